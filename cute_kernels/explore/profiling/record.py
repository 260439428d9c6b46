"""A launch with clock stamps, and the stamps of its warps."""

import functools
import statistics
from dataclasses import dataclass
from typing import Literal

import torch

from cute_kernels.kernels.graph import Graph, graph_of
from cute_kernels.operations.runtime import gpu
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import Plan
from cute_kernels.plan import base as layout
from cute_kernels.plan.base import Phase

DEFAULT_STAMPS = 16384
"""Stamps of a warp: 128 KB of memory."""


@dataclass(frozen=True, eq=False)
class WarpRecord:
    """Record that one warp wrote."""

    # cta, warp: which one; ``role`` is the warp's in the kernel's graph
    cta: int
    warp: int
    role: str
    sm: int  # multiprocessor that it ran on
    # begin, finish: clock of that multiprocessor and nanoseconds of the device, read one after the other when the roles
    # began and when this one was over
    begin: tuple[int, int]
    finish: tuple[int, int]
    clocks: torch.Tensor  # int64 ``[stamps]``: clocks of the multiprocessor
    # int64 ``[stamps]``: what began at each of them; the last one is `Phase.END` unless stamps were lost
    phases: torch.Tensor
    lost: int  # stamps for which there was no room; those that are there are the first


@dataclass(frozen=True, eq=False)
class Profile:
    """Stamps of a launch. ``plan``: of the kernel, with the number of stamps that it was compiled for; ``warps``: one
    for each warp of the grid, by CTA and warp."""

    plan: Plan
    warps: tuple[WarpRecord, ...]

    @functools.cached_property
    def graph(self) -> Graph:
        return graph_of(self.plan)

    @property
    def lost(self) -> int:
        """Stamps of all warps for which there was no room."""
        return sum(warp.lost for warp in self.warps)

    @functools.cached_property
    def clocks_per_nanosecond(self) -> float:
        """Median over the warps; 0 where the device's time did not advance."""
        rates = [
            (w.finish[0] - w.begin[0]) / (w.finish[1] - w.begin[1]) for w in self.warps if w.finish[1] > w.begin[1]
        ]
        return statistics.median(rates) if rates else 0.0


def record(
    plan: Plan, operands: Operands, *, stamps: int = DEFAULT_STAMPS, device: Literal["gpu", "emulator"] = "gpu"
) -> Profile:
    """Launches the kernel of a plan with clock stamps, and waits for it.

    A GPU executes it three times, and the last one counts: the first ones load code and warm the caches. In the
    emulator clocks are no time: every read of one is 16 more than the one before it, in the order of the schedule.

    Args:
        plan: of one launch whose kernel can be profiled; not yet compiled for stamps.
        operands: as for `cute_kernels.operations.runtime.gpu.launch`, on the CUDA device, or in host memory for the
            emulator.
        stamps: that each warp may write.
        device: what executes it.

    Raises:
        NotImplementedError, ValueError: as `cute_kernels.plan.base.with_profile`; also the ValueError of `decode`.
        TypeError: an operand that the plan needs is missing.
    """
    profiled = layout.with_profile(plan, stamps)
    memory = torch.zeros(layout.profile_shape(profiled), dtype=torch.int64, device=operands.out.device)
    operands = operands.replace(profile=memory)
    if device == "emulator":
        import cute_kernels.operations.runtime.emulated as emulated

        emulated.launch(profiled, operands)
    else:
        for _ in range(3):
            torch.cuda.synchronize(memory.device)
            memory.zero_()
            gpu.launch(profiled, operands)
    return decode(profiled, memory)


def decode(plan: Plan, memory: torch.Tensor) -> Profile:
    """Decodes what the warps of a launch wrote.

    ``plan``: of the kernel, compiled for stamps. ``memory``: int64 of `cute_kernels.plan.base.profile_shape`, zeros
    before the launch. Raises ValueError: memory of another shape or type, or warps that wrote nothing."""
    shape = layout.profile_shape(plan)
    if tuple(memory.shape) != shape or memory.dtype is not torch.int64:
        raise ValueError(f"memory is {list(memory.shape)} of {memory.dtype}: must be {list(shape)} of torch.int64")
    memory = memory.cpu()
    silent = (memory[:, :, layout.COUNT] == 0).nonzero().tolist()
    if silent:
        cta, warp = silent[0]
        raise ValueError(f"memory has no stamps of {len(silent)} warps, the first of them warp {warp} of CTA {cta}")
    warps = []
    for cta, rows in enumerate(memory):
        for warp, row in enumerate(rows):
            header = row[: layout.HEADER].tolist()
            kept = min(header[layout.COUNT], plan.profile)
            words = row[layout.HEADER : layout.HEADER + kept]
            warps.append(
                WarpRecord(
                    cta=cta,
                    warp=warp,
                    role=plan.roles[warp],
                    sm=header[layout.SM],
                    begin=(header[layout.BEGIN], header[layout.BEGIN + 1]),
                    finish=(header[layout.FINISH], header[layout.FINISH + 1]),
                    clocks=words >> layout.PHASE_BITS,
                    phases=words & ((1 << layout.PHASE_BITS) - 1),
                    lost=header[layout.COUNT] - kept,
                )
            )
    return Profile(plan, tuple(warps))


def phase_name(graph: Graph, phase: int) -> str:
    """Name of a phase for people: "issue", "wait operands_full"."""
    if phase < layout.FIRST_WAIT:
        return _NAMES.get(phase, Phase(phase).name.lower())
    edge, empty = divmod(phase - layout.FIRST_WAIT, 2)
    return f"wait {graph.edges[edge].name}_{'empty' if empty else 'full'}"


_NAMES = {Phase.ORDER_BARRIER: "wait order barrier", Phase.MMA: "wait MMAs", Phase.BUFFER: "wait staging"}


def is_wait(phase: int) -> bool:
    """Whether a warp does nothing of its own in a phase: it waits for other warps, for copies, or idles."""
    return phase >= layout.FIRST_WAIT or phase in (Phase.ORDER_BARRIER, Phase.BUFFER, Phase.STAGGER)
