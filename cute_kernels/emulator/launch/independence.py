"""Whether the clusters of a launch can be executed apart from each other, as far as that can be told before.

What depends on the order of clusters is known by its instruction: it communicates through global memory, or asks which
clusters are left. Accesses that meet without any of these are found when they happen (`launch_accesses`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cute_kernels.emulator.ptx.decode import Instruction, Kernel
from cute_kernels.emulator.state.gmem import GlobalMemory

_MAPS = Path("/proc/self/maps")
_STRONG_LOADS = frozenset({"acquire", "relaxed", "volatile", "mmio"})


def dependence(kernel: Kernel) -> str:
    """Reason why a cluster of the kernel may depend on those before it: ``"PTX line 12 ..."``; "": nothing is seen."""
    for instruction in kernel.instructions:
        why = _depends(instruction)
        if why:
            return f"PTX line {instruction.line} (`{instruction.opcode}`) {why}"
    return ""


def _depends(instruction: Instruction) -> str:
    parts = instruction.parts
    name = parts[0]
    if name in ("atom", "red", "multimem"):
        return "" if _in_shared(parts) else "combines with global memory, in the order of the clusters"
    if name == "cp":
        return "combines with global memory, in the order of the clusters" if {"reduce", "global"} <= set(parts) else ""
    if name == "ld":
        strong = _STRONG_LOADS.intersection(parts) and not _in_shared(parts)
        return "may read what another cluster signals" if strong else ""
    if name == "clusterlaunchcontrol":
        return "asks for the clusters that are left"
    if name == "call":
        return "prints or stops, in the order of the clusters"
    if instruction.makes_maps:
        return "makes tensor maps in global memory, whose fences the race detector does not follow"
    return ""


def _in_shared(parts: Sequence[str]) -> bool:
    return any(part.startswith("shared") for part in parts)


def shared_memory(memory: GlobalMemory) -> str:
    """Memory that may be written and is not one process's own, or is registered under two names; "": none."""
    regions = sorted(memory.regions(), key=lambda region: region.start)
    end, widest = 0, None
    for region in regions:
        if widest is not None and region.start < end and (region.writable or widest.writable):
            same = (region.start, region.end, region.writable) == (widest.start, widest.end, widest.writable)
            if not same:
                return f"{widest.name or 'an array'} and {region.name or 'an array'} share memory"
        if region.end > end:
            end, widest = region.end, region
    mappings = _shared_mappings()
    if mappings is None:
        return "the system does not tell which memory processes share"
    for region in regions:
        if region.writable and any(start < region.end and region.start < end for start, end in mappings):
            return f"{region.name or 'an array'} is in memory that processes share"
    return ""


def _shared_mappings() -> Sequence[tuple[int, int]] | None:
    """Address ranges of this process that a forked one would share; None where the system does not tell."""
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        span, flags = line.split()[:2]
        if flags.endswith("s"):
            first, _, end = span.partition("-")
            found.append((int(first, 16), int(end, 16)))
    return found
