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
    """A warp.

    Attributes:
        cluster: linear index of its cluster, 0 where there is only one; ``several``: there are more.
        cta: rank of its CTA in the cluster.
        index: in the CTA.
        role: or "".
    """

    cluster: int
    cta: int
    index: int
    role: str = ""
    several: bool = False

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
    """An access or operation that a fault is about.

    Attributes:
        verb: what it does, or did: "reads", "wrote", "arrived", "initialised", ...
        instructions: the one that it was, or those of which one was.
        warp: label of the warp that issued it, "" if that is not known.
        lanes: those that are concerned, as far as they are known.
        what: how the detector calls it.
        waited: its own warp has waited for its end.
        steps: instructions that its warp had executed, up to the end of its block; 0: that is not known.
        signals: the mbarrier that tells of its completion, by CTA and offset in shared memory, or None.
    """

    verb: str
    instructions: tuple[Located, ...] = ()
    warp: str = ""
    lanes: tuple[int, ...] = ()
    what: str = ""
    signals: tuple[int, int] | None = None
    waited: bool = False
    steps: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes that a fault is about.

    Attributes:
        space: "shared" or "global" (``first`` and ``count`` are bytes), or "tensor" (columns).
        first, count: where, in the shared or tensor memory of CTA ``cta``, or in the global array ``name``.
        cta: rank in its cluster, -1 for global memory.
        name: of the array, "" if it has none.
        lane: the first one, in tensor memory.
    """

    space: str
    first: int
    count: int
    cta: int = -1
    name: str = ""
    lane: int = 0


@dataclass(frozen=True)
class BarrierState:
    """An mbarrier as it was when the fault was found.

    Attributes:
        name: given by the launch, or "".
        cta, offset: where it is in shared memory.
        phase: number of phases that are complete; expected, pending: arrivals; tx: bytes outstanding.
        live: False where there is no barrier.
        init: the instruction that initialised it, None if that is not known.
        initialiser, last_arrival: labels of warps, "" for nobody.
    """

    name: str
    cta: int
    offset: int
    phase: int = 0
    expected: int = 0
    pending: int = 0
    tx: int = 0
    live: bool = True
    init: Located | None = None
    initialiser: str = ""
    last_arrival: str = ""


@dataclass(frozen=True)
class Moment:
    """An operation on an mbarrier that has been performed.

    Attributes:
        operation: "arrive", "announce" or "deliver" (bytes), "wait" for one that has passed, "timeout" for one that
            has not.
        place: of the mbarrier: CTA, and offset in its shared memory.
        phase: phases that were complete before.
        amount: arrivals or bytes; of a wait the parity that it asked for, -1 if it is not by parity.
        warp: label of the warp that issued it, "" if that is not known.
        instruction: that issued it, None if that is not known.
    """

    operation: str
    place: tuple[int, int]
    phase: int
    amount: int
    warp: str = ""
    instruction: Located | None = None


@dataclass(frozen=True)
class Past:
    """The operations on mbarriers of a cluster before a fault.

    Attributes:
        barriers: all that are live.
        moments: the latest operations on them, in order.
        whole: no operations came before them.
        unwritten: ranges of shared memory that nobody has written: CTA, first byte, and how many.
    """

    barriers: tuple[BarrierState, ...] = ()
    moments: tuple[Moment, ...] = ()
    whole: bool = True
    unwritten: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class WaitState:
    """A warp of a kernel that hangs.

    Attributes:
        warp: its label.
        instruction: where it stands, None if that is not known.
        kind: `Wait.kind`, "" for a warp that could run.
        text: what it waits for.
        barrier: the mbarrier, or None.
        state: the parity, or the phase, that it waits for.
        by_parity: which of the two.
        missing: labels of the warps that have not arrived at the barrier of the CTA or cluster that it waits at.
    """

    warp: str
    instruction: Located | None
    kind: str = ""
    text: str = ""
    barrier: BarrierState | None = None
    state: int = 0
    by_parity: bool = True
    missing: tuple[str, ...] = ()


@dataclass
class Facts:
    """See the classes of the fields; empty where it does not apply or is not known.

    Attributes:
        side: what the executing warp does, beside the location of the error itself.
        other: what it is in conflict with.
        memory: where they meet.
        barrier: that the fault is about; barriers: all there are, of a hang.
        waits: all warps that have not exited, of a hang; exited: those that have.
        pending: asynchronous operations that are not complete, of a hang.
        sentence: what is wrong, without addresses, "" where the table of kinds or the message has it.
        notes: further sentences.
        past: of the mbarriers, as far as it is kept.
        phase: of the barrier, that a wait is for which may pass too early; -1 of others.
        early: kind and message of an arrival, bytes or a wait before it that order had not kept in their phase.
    """

    side: Side | None = None
    other: Side | None = None
    memory: Memory | None = None
    barrier: BarrierState | None = None
    barriers: tuple[BarrierState, ...] = ()
    waits: tuple[WaitState, ...] = ()
    exited: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    sentence: str = ""
    notes: list[str] = field(default_factory=list)
    past: Past = Past()
    phase: int = -1
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
