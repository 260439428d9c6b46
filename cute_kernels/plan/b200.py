"""A B200's time for the patch embed, from what one CTA does for a tile.

No time here was measured by this project: the costs are a non-negative least-squares fit to the times that the notes
of the CUDA original give for its variants (`bench/model.py`, docs/model.md), and the rates of the tensor core and of
device memory are those of the data sheet.

The form of the model is a sum: in those notes a tile takes neither the time of its slowest unit nor that of its longest
role, and what is taken away from any of the parts below shortens it. Beside the sum there are two floors, the tensor
core's time for the products and device memory's for the bytes of the launch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cute_kernels.common.chips import CHIPS
from cute_kernels.plan.base import Prediction

CLOCKS_PER_MICROSECOND = 1707.5
"""6,156 clocks of a tile and 147 tiles of a cluster in 0.530 ms, by the notes' own accounting (F31)."""

MACS_PER_CLOCK = 8192
"""Products of 8-bit numbers on one multiprocessor, from the 4.5 POP/s of the data sheet (HGX B200, dense); of 16-bit
numbers half as many."""

MEMORY_BYTES_PER_MICROSECOND = CHIPS["sm_100a"].memory_rate / 1e6
"""Bytes of device memory that are moved in a microsecond."""

LAUNCH_MICROSECONDS = 2.0
"""From the launch to the first tile and from the last to the end: about what fits H200 times
(`cute_kernels.plan.patch_embed_sm90`). The notes time one size only: that does not tell it from the cost of tiles."""


CAVEAT = (
    "Modelled for a B200, never measured by this project. The model ranks designs (rank correlation 0.93 over 21 "
    "variants that the fit had not seen, 9 distinct times), not settings of one design: over 145 configurations of the "
    "CUDA original, measured by others on a B200, its rank correlation is -0.09. It does not see stages, "
    "epilogue_warps or stagger. How far ratios of two of its times are off is unknown."
)
"""docs/model.md says where both figures come from."""


ERROR, ERROR_ELSEWHERE = 0.12, 0.25
"""The largest error of a variant that was left out of the fit; and of designs that it has not seen (docs/model.md)."""

RESOLUTION = 0.036
"""The median error of a variant that was left out of the fit (docs/model.md). Times that are nearer to each other than
this do not tell plans apart."""


@dataclass(frozen=True)
class UnitClocks:
    """Clocks of an SM for one unit of work."""

    operand_byte: float  # brought from L2 into shared memory by TMA
    # 128 bytes through the load/store unit: a wavefront of shared memory, a line of a global access; staging that TMA
    # reads counts as well
    line: float
    partial_line: float  # besides, of a line that a store of 32 bytes writes a part of
    wait: float  # one ``tcgen05.wait::ld`` of the warp that has the most of them
    column: float  # one accumulator column of that warp


FITTED = UnitClocks(operand_byte=0.0142, line=0.451, partial_line=0.426, wait=80.2, column=5.34)
"""`python -m bench.model` prints these."""


@dataclass(frozen=True)
class TileWork:
    """Work of the busiest CTA of a launch."""

    tiles: int  # one after the other
    mma_clocks: float  # of a tile at the published rate of the tensor core
    operand_bytes: float  # of a tile, brought by TMA
    lines: float  # of a tile, as `UnitClocks.line` counts them
    waits: float  # of a tile, in the warp that has the most
    columns: float  # of a tile, in that warp
    memory_bytes: float  # that the whole launch reads from and writes to device memory
    once_lines: float = 0.0  # lines before the first tile, of bringing a resident weight to its place
    partial_lines: float = 0.0  # of a tile, those of its lines that a store writes a part of


PARTS = {
    "operands from L2": ("operand_bytes", "operand_byte"),
    "load/store lines": ("lines", "line"),
    "partly written lines": ("partial_lines", "partial_line"),
    "waits for tensor memory": ("waits", "wait"),
    "epilogue columns": ("columns", "column"),
}
"""Parts of the work of a tile: the amount in `TileWork`, its cost in `UnitClocks`."""


def amounts(work: TileWork) -> tuple[float, ...]:
    """Clocks of a tile, in the order of `PARTS`."""
    return tuple(getattr(work, amount) for amount, _ in PARTS.values())


def predict(work: TileWork, costs: UnitClocks = FITTED, error: float = ERROR_ELSEWHERE) -> Prediction:
    """The modelled time of a launch; ``error`` as of `Prediction`."""
    parts = {name: getattr(work, amount) * getattr(costs, cost) for name, (amount, cost) in PARTS.items()}
    if work.mma_clocks > sum(parts.values()):
        parts = {"tensor core": work.mma_clocks}
    microseconds = {name: work.tiles * clocks / CLOCKS_PER_MICROSECOND for name, clocks in parts.items()}
    if work.once_lines:
        microseconds["bringing the weight"] = work.once_lines * costs.line / CLOCKS_PER_MICROSECOND
    memory = work.memory_bytes / MEMORY_BYTES_PER_MICROSECOND
    if memory > sum(microseconds.values()):
        microseconds = {"device memory": memory}
    microseconds["launch"] = LAUNCH_MICROSECONDS
    return Prediction(sum(microseconds.values()), microseconds, CAVEAT, error)


class Timed(Protocol):
    """A plan that knows what its busiest CTA does."""

    @property
    def work(self) -> TileWork: ...


TimedPlan = TypeVar("TimedPlan", bound=Timed)


def quickest(
    plans: Sequence[TimedPlan], counted: Callable[[TimedPlan], float], is_legal: Callable[[TimedPlan], bool]
) -> TimedPlan | None:
    """Plan of least modelled time of the legal ones, None where there is none; of those that the model does not tell
    apart, the one of least counted work, and of equal ones the first.

    ``counted``: clocks of a launch by counted work, which knows what the model has no cost for: how often the tensor
    core reads its operands from shared memory; ``is_legal``: asked in the order of modelled times, of as few plans as
    possible.
    """
    near: list[TimedPlan] = []
    slowest = math.inf
    for time, _, plan in sorted((predict(plan.work).microseconds, i, plan) for i, plan in enumerate(plans)):
        if time > slowest:
            break
        if is_legal(plan):
            slowest = min(slowest, time * (1 + RESOLUTION))
            near.append(plan)
    order = {id(plan): i for i, plan in enumerate(plans)}
    return min(near, key=lambda plan: (counted(plan), order[id(plan)]), default=None)
