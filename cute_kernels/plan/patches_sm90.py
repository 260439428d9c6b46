"""Modelled time of the SM90 kernels of patches: of rows, of images that a kernel reads, of rows behind a pass.

A launch is `Work`, counted from its plan; `CONSTANTS` say what each unit costs. `python -m bench.choices fit --images`
has fitted them to timings of models that were drawn at random, `regret --images` says how near to the fastest the
choice is where no fit has looked.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from cute_kernels.plan.base import Prediction

Numbers = tuple[float, ...]

# fmt: off
CONSTANTS = {
    "once": (3408.0, 4195.0, 1338.0, 545.9, 516.8, 6180.0),
    "epilogue": (9.772, 156.0, 197.6, 3.565, 28.68),
    "boxes": (1.951, 1.087, 0.4596, 0.008891, 0.4751, 1.188, 0.002264),
    "block": (66.17, 76.09, 85.39),
    "in_turn": (0.3428, 1.075),
    "rates": (914.4, 0.01151, 0.002427, 1.519, 2.69, 2.184, 0.8759, 0.01542),
}
CLOCKS_PER_MICROSECOND = 1905
# fmt: on

MEMORY_BYTES_PER_CLOCK = 2800
"""4.8 TB/s of an H200 at 1.7 GHz."""

MACS_PER_CLOCK = 2048
"""Multiply-adds of 16-bit operands per multiprocessor and clock."""

BLOCK_MACS = 64
"""Multiply-adds of 16-bit operands per output that take the time of one K block, of any element type: 128 bytes."""

EARLIER = 0.11
"""Share of a wave's missing tiles by which a last wave that is not full takes less."""

PARTS = ("launch", "first operands", "K blocks", "epilogues", "device memory", "pass over the images")

ERROR = 0.24
"""Largest error of nine launches in ten, of models that the fit had not seen."""

RATIO_ERRORS = (0.15, 0.30)
"""Largest error of nine in ten ratios of two times of one problem: of plans that differ in one field, and of any."""

CAVEAT = (
    "Modelled, from launches on an H200 that were measured: of models that the fit had not seen, error 10% in the "
    "median and 70% at the most. Ratios of two configurations: 15% off in nine pairs of ten that differ in one field, "
    "all fields together, 30% in nine of ten of all."
)
"""`python -m bench.model` prints these figures."""


class Work(NamedTuple):
    """The work of a launch; a fit has tensors for numbers."""

    # 1 for the kernel of rows, of strips or of gathered 16-bit patches; for a cluster of several CTAs; K blocks of
    # weight that a CTA keeps in registers; 1 for a pass in front
    once: Numbers
    # of a tile, elements in thousands that a warpgroup stores, transposed and not, and whose table rows are found one
    # by one; columns whose table values are fetched late; positions
    epilogue: Numbers
    # of a K block, rows of TMA boxes that a CTA loads, of strips and of gathered rows, and that it gets; bytes that are
    # repacked; of gathered 16-bit patches rows that it loads and gets, and bytes
    boxes: Numbers
    block: Numbers  # 1 for kernels of strips and rows, 1 for that of 16-bit patches; stages per K block of the former
    wgmma: float  # clocks of a K block's products
    fetched: float  # bytes of a K block that a CTA loads
    shared: float  # rows of 128 bytes of shared memory that a K block reads and writes
    beyond: float  # rows of a K block beyond the end of an operand, which TMA is slow to fill with zeros
    ragged: float  # 1 for rows that begin inside a line of L2
    of_stage: float  # K blocks of a stage
    stages: float  # of the ring
    groups: float  # warpgroups of which each has its own features of a tile
    in_turn: Numbers  # 1 where warpgroups take turns, so that products hide an epilogue: a transposed one, another
    k_blocks: float  # of a tile
    waves: float  # tiles of the busiest cluster
    share: float  # of the multiprocessors that have a tile
    memory: float  # bytes of device memory that the kernel reads and writes
    passed: float = 0.0  # and a pass in front


def waves(tiles: int, clusters: int) -> float:
    """Tiles of the busiest of so many clusters, for `Work`."""
    return 1.0 if tiles <= clusters else (1 - EARLIER) * math.ceil(tiles / clusters) + EARLIER * tiles / clusters


def larger(*values: float) -> float:
    """Almost the largest: work that overlaps, but for where several take as long."""
    return sum(value**4 for value in values) ** 0.25


def parts(work: Work, constants: Mapping[str, Numbers] = CONSTANTS) -> Numbers:
    """Clocks of a launch, in the order of `PARTS`."""

    def total(name: str) -> float:
        return sum(constant * number for constant, number in zip(constants[name], getattr(work, name), strict=True))

    latency, fetch, first, lines, beyond, cycle, shared, heat = constants["rates"]
    w = work
    fetched = w.fetched * w.share**0.5
    load = larger(
        fetched * fetch * (1 + lines * w.ragged) + beyond * w.beyond, total("boxes"), w.shared * shared
    )
    # A stage is free when it has come, was multiplied by all warpgroups and asked for again.
    round_trip = (latency / w.of_stage + cycle * w.wgmma + load) / w.stages
    block = larger(w.wgmma, load, round_trip) + total("block") + heat * w.wgmma * w.share
    epilogue = total("epilogue")
    *of_kernels, of_pass = w.once
    *costs, pass_cost = constants["once"]
    once = sum(cost * number for cost, number in zip(costs, of_kernels, strict=True))
    hides = total("in_turn")
    found = (
        once + hides * epilogue / w.groups,
        first * w.k_blocks * fetched,
        w.waves * w.k_blocks * block,
        w.waves * (1 - hides) * epilogue,
    )
    device = sum(found)
    memory = larger(device, w.memory / MEMORY_BYTES_PER_CLOCK) - device
    return (*found, memory, of_pass * pass_cost + w.passed / MEMORY_BYTES_PER_CLOCK)


def by_time(plans: Iterable[Any], work: Callable[[Any], Work]) -> list[Any]:
    """Plans by their modelled time."""
    return sorted(plans, key=lambda plan: sum(parts(work(plan))))


def predicting(work: Callable[[Any], Work]) -> Callable[[Any], Prediction]:
    """The modelled time of a plan, with what it consists of."""

    def predict(plan: Any) -> Prediction:
        found = zip(PARTS, parts(work(plan)), strict=True)
        times = {name: clocks / CLOCKS_PER_MICROSECOND for name, clocks in found if clocks}
        return Prediction(sum(times.values()), times, CAVEAT, ERROR, RATIO_ERRORS)

    return predict
