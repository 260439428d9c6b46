"""What a kernel that is profiled writes: clock stamps of its warps, and where they are in memory.

A warp keeps a row of 64-bit words: `HEADER` words about itself, then its stamps in the order in which it made them. A
stamp is ``%clock64`` in the upper 56 bits and the phase that begins there in the lower 8. Clocks are those of the
multiprocessor: warps of one CTA can be compared with each other as they are, CTAs by the times that the headers pair
with clocks (``%globaltimer``, nanoseconds, the same on the whole device).
"""

from __future__ import annotations

import dataclasses
from enum import IntEnum

from cute_kernels.plan.base import Plan, reject


class Phase(IntEnum):
    """What a warp does from a stamp on until its next one. `wait_phase` numbers the waits for barriers."""

    TILE = 1
    """The next tile: where it is, and what is fetched before its data are waited for."""
    ISSUE = 2
    """Copies or MMAs of a stage are started."""
    COMMIT = 3
    """The accumulator is handed over."""
    TURN = 4
    """Waits for the tensor cores, which another warpgroup has."""
    MMA = 5
    """Waits for its own MMAs."""
    STAGGER = 6
    """Idles so that the warps do not all begin at once."""
    READ = 7
    """Reads accumulators and the table into registers."""
    MATH = 8
    """Scales, adds and rounds; in kernels of the transposed product this is interleaved with writes to staging."""
    BUFFER = 9
    """Waits until a store has read the staging buffer."""
    STAGING = 10
    """Writes to the staging buffer."""
    STORE = 11
    """Starts stores of the output."""
    END = 12
    """The role is over."""


FIRST_WAIT = 64
"""From here on phases are waits: two for each edge of the kernel's graph."""

PHASE_BITS = 8
"""Of a stamp."""

HEADER = 8
"""Words before the stamps of a warp: `COUNT`, `SM`, `BEGIN`, `FINISH`, and one more, which keeps rows on 64 bytes."""

COUNT, SM, BEGIN, FINISH = 0, 1, 2, 4
"""Words of the header: stamps that were made, even those for which there was no room; number of the multiprocessor; a
clock and the time next to it when the roles begin, and when this one ends."""

MOST_WORDS = 2**31 - 1
"""Of all rows: they are indexed with 32 bits."""


def wait_phase(edge: int, empty: bool) -> int:
    """Number of the phase in which a warp waits for a barrier of the ``edge``-th edge of the graph."""
    return FIRST_WAIT + 2 * edge + empty


def row_words(plan: Plan) -> int:
    """Words of one warp."""
    return HEADER + plan.profile


def profile_shape(plan: Plan) -> tuple[int, int, int]:
    """Shape of the buffer, int64: CTAs, warps of a CTA, words of a warp."""
    return plan.grid[0], len(plan.roles), row_words(plan)


def with_profile(plan: Plan, stamps: int) -> Plan:
    """The same plan, whose kernel is compiled to write clock stamps into an operand ``profile`` (`profile_shape`).

    Args:
        plan: of a kernel that can be profiled, and of one launch.
        stamps: how many each warp may write; what comes after that is counted and not kept. A multiple of 8.

    Raises:
        NotImplementedError: the plan's kernel writes no stamps, or it chains several.
        ValueError: no such number of stamps is possible.
    """
    if plan.launches != (plan,):
        kernels = " and ".join(part.operation for part in plan.launches)
        raise NotImplementedError(f"the plan of {plan.operation} chains kernels, of {kernels}: profile them one by one")
    if not any(operand.name == "profile" for operand in plan.operands):
        raise NotImplementedError(f"kernels of {plan.operation} ({type(plan).__name__}) write no clock stamps")
    rows = plan.grid[0] * len(plan.roles)
    most = (MOST_WORDS // rows - HEADER) // 8 * 8
    if not 0 < stamps <= most or stamps % 8:
        rule = f"{rows} warps write whole 64 bytes of stamps, indexed with 32 bits: multiples of 8 up to {most}"
        reject("stamps", stamps, rule, min(max(8, stamps - stamps % 8), most))
    return dataclasses.replace(plan, profile=stamps)
