"""Facts of a fault beside its message: both sides of a race, barriers, who waits for what.

Whoever raises an error adds it (`cute_kernels.emulator.errors.EmulatorError.facts`), and `reports` makes a report
of it. Nothing here is needed to understand the message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

_NAME = re.compile(r"(?:cluster (\d+), )?CTA (\d+) warp (\d+)(?: \(([^()]*)\))?$")


class Located(Protocol):
    """An instruction as reports name it: attributes as of `ptx.program.Instruction`."""

    @property
    def parts(self) -> tuple[str, ...]: ...
    @property
    def line(self) -> int: ...
    @property
    def source(self) -> str: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class WarpName:
    """A warp."""

    cluster: int  # linear index of its cluster, 0 where there is only one
    cta: int  # rank of its CTA in the cluster
    index: int  # in the CTA
    role: str = ""  # "" where it has none
    several: bool = False  # there are more

    def __str__(self) -> str:
        cluster = f"cluster {self.cluster}, " if self.several else ""
        return f"{cluster}CTA {self.cta} warp {self.index}" + (f" ({self.role})" if self.role else "")

    @classmethod
    def of(cls, text: str | None) -> WarpName | None:
        """The warp that a text ends with, or None."""
        found = _NAME.search(text or "")
        if found is None:
            return None
        cluster, cta, index, role = found.groups()
        return cls(int(cluster or 0), int(cta), int(index), role or "", cluster is not None)


@dataclass(frozen=True)
class Side:
    """An access or operation that a fault is about."""

    verb: str  # what it does, or did: "reads", "wrote", "arrived", "initialised", ...
    instructions: tuple[Located, ...] = ()  # the one that it was, or those of which one was
    warp: str = ""  # label of the warp that issued it, "" if that is not known
    lanes: tuple[int, ...] = ()  # those that are concerned, as far as they are known
    what: str = ""  # how the detector calls it
    # the mbarrier that tells of its completion, by CTA and offset in shared memory, or None
    signals: tuple[int, int] | None = None
    waited: bool = False  # its own warp has waited for its end
    steps: int = 0  # instructions that its warp had executed, up to the end of its block; 0: that is not known


@dataclass(frozen=True)
class Memory:
    """Bytes that a fault is about."""

    space: str  # "shared" or "global" (``first`` and ``count`` are bytes), or "tensor" (columns)
    # first, count: where, in the shared or tensor memory of CTA ``cta``, or in the global array ``name``
    first: int
    count: int
    cta: int = -1  # rank in its cluster, -1 for global memory
    name: str = ""  # of the array, "" if it has none
    lane: int = 0  # the first one, in tensor memory


@dataclass(frozen=True)
class BarrierState:
    """An mbarrier as it was when the fault was found."""

    name: str  # given by the launch, or ""
    # cta, offset: where it is in shared memory
    cta: int
    offset: int
    phase: int = 0  # number of phases that are complete
    expected: int = 0  # arrivals of a phase
    pending: int = 0  # arrivals that it still waits for
    tx: int = 0  # bytes outstanding
    live: bool = True  # False where there is no barrier
    init: Located | None = None  # the instruction that initialised it, None if that is not known
    # initialiser, last_arrival: labels of warps, "" for nobody
    initialiser: str = ""
    last_arrival: str = ""


@dataclass(frozen=True)
class Moment:
    """An operation on an mbarrier that has been performed."""

    # "arrive", "announce" or "deliver" (bytes), "wait" for one that has passed, "timeout" for one that has not
    operation: str
    place: tuple[int, int]  # of the mbarrier: CTA, and offset in its shared memory
    phase: int  # phases that were complete before
    amount: int  # arrivals or bytes; of a wait the parity that it asked for, -1 if it is not by parity
    warp: str = ""  # label of the warp that issued it, "" if that is not known
    instruction: Located | None = None  # that issued it, None if that is not known


@dataclass(frozen=True)
class DoubleArrival:
    """The first phase of a named barrier that is complete though a warp has arrived in it twice."""

    number: int  # of the barrier
    warp: str  # label of the warp
    instruction: Located | None  # its second arrival
    warps: tuple[str, ...]  # labels of all that arrived


@dataclass(frozen=True)
class Past:
    """The operations on barriers of a cluster before a fault."""

    barriers: tuple[BarrierState, ...] = ()  # all that are live
    moments: tuple[Moment, ...] = ()  # the latest operations on them, in order
    whole: bool = True  # no operations came before them
    # ranges of shared memory that nobody has written: CTA, first byte, and how many
    unwritten: tuple[tuple[int, int, int], ...] = ()
    doubles: tuple[DoubleArrival, ...] = ()


@dataclass(frozen=True)
class WaitState:
    """A warp of a kernel that hangs."""

    warp: str  # its label
    instruction: Located | None  # where it stands, None if that is not known
    kind: str = ""  # `Wait.kind`, "" for a warp that could run
    text: str = ""  # what it waits for
    barrier: BarrierState | None = None  # the mbarrier, or None
    state: int = 0  # the parity, or the phase, that it waits for
    by_parity: bool = True  # which of the two
    # labels of the warps that have not arrived at the barrier of the CTA or cluster that it waits at
    missing: tuple[str, ...] = ()


@dataclass
class Facts:
    """See the classes of the fields; empty where it does not apply or is not known."""

    side: Side | None = None  # what the executing warp does, beside the location of the error itself
    other: Side | None = None  # what it is in conflict with
    memory: Memory | None = None  # where they meet
    barrier: BarrierState | None = None  # that the fault is about
    barriers: tuple[BarrierState, ...] = ()  # all there are, of a hang
    waits: tuple[WaitState, ...] = ()  # all warps that have not exited, of a hang
    exited: tuple[str, ...] = ()  # those that have, of a hang
    pending: tuple[str, ...] = ()  # asynchronous operations that are not complete, of a hang
    sentence: str = ""  # what is wrong, without addresses, "" where the table of kinds or the message has it
    notes: list[str] = field(default_factory=list)  # further sentences
    past: Past = Past()  # of the barriers, as far as it is kept
    phase: int = -1  # of the barrier, that a wait is for which may pass too early; -1 of others
    # kind and message of an arrival, bytes or a wait before it that order had not kept in their phase
    early: tuple[str, str] | None = None


def ranges(numbers: Iterable[int]) -> str:
    """E.g. "0-3, 7"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
