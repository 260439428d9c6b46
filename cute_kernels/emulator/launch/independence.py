"""Whether the memory of a launch lets processes of their own execute its clusters; `Kernel.dependence`: its code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cute_kernels.emulator.state.gmem import GlobalMemory

_MAPS = Path("/proc/self/maps")


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
