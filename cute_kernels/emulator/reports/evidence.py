"""The evidence for the cause of a fault: who waited for which mbarrier, who signalled it, and whose a stage is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.facts import BarrierState, Facts, Located, Memory, Moment, WarpName
from cute_kernels.emulator.isa.ptx.program import Immediate, Kernel
from cute_kernels.emulator.reports.arrays import Array
from cute_kernels.emulator.reports.model import Place, Waiting
from cute_kernels.emulator.reports.text import short_path
from cute_kernels.emulator.reports.words import short_names

Spot = tuple[int, int]
"""CTA, and offset of an mbarrier in its shared memory."""


Fields = dict[str, object]


def kept(function: Callable) -> Callable:
    """A function of evidence, and of what can be a key, that is computed once for each of these."""

    @functools.wraps(function)
    def found(e: Evidence, *key: object) -> object:
        values = e.known.setdefault(function, {})
        if key not in values:
            values[key] = function(e, *key)
        return values[key]

    return found


@dataclass(frozen=True)
class Cause:
    """A row of the table of causes."""

    kinds: tuple[str, ...]  # of the reports that it may be the cause of
    # fields of ``help`` where it may be the cause, beside those of `Evidence.common`; None where it is not
    holds: Callable[[Evidence], Fields | None]
    help: str  # cause and mend; "": the help of ``kind``
    kind: str = ""  # that the report becomes, "" for none
    when: Callable[[Fields], bool] = lambda fields: True  # of the fields, whether it is the cause

    def fields(self, evidence: Evidence) -> Fields | None:
        """Fields of ``help``, None where it is not the cause."""
        found = self.holds(evidence)
        return found if found is not None and self.when(found) else None


@dataclass(frozen=True)
class Evidence:
    """One fault."""

    error: EmulatorError  # the fault
    waiting: tuple[Waiting, ...]  # of a hang, who waits for what
    place: Callable[[Located], Place]  # of an instruction in the program
    title: Callable[[BarrierState], str]  # of an mbarrier, its name or where it is
    arrays: Sequence[Array]  # of shared memory, those that are known
    kernel: Kernel | None = None  # None if it is not known

    @property
    def instructions(self) -> Sequence[Located]:
        """Instructions of the kernel, in the order of its text."""
        return self.kernel.instructions if self.kernel is not None else ()

    @property
    def facts(self) -> Facts:
        """Facts of the error."""
        return self.error.facts

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Operations on mbarriers, in order."""
        return self.facts.past.moments

    @property
    def common(self) -> Fields:
        """Who is at fault and where; where the operation stands that it is in conflict with, and who issued that."""
        other = self.facts.other
        use = self.line(other.instructions[0]) if other is not None and other.instructions else "its use"
        by = self.who([other.warp]) if other is not None else "nobody"
        at = self.line(self.at_fault)
        return {"who": self.who([self.warp]), "here": at, "at": at, "use": use, "by": by}

    def about(self, spot: Spot) -> Fields:
        """Name of an mbarrier, its count, and where it is initialised."""
        state = self.state(spot) or self.facts.barrier
        return {"here": self.name(spot), "count": state.expected, "init": self.line(state.init)}

    # --- words --------------------------------------------------------------------------------------------------------

    @kept
    def line(self, instruction: Located | None) -> str:
        """Where an instruction stands: "program.py:7"."""
        if instruction is None:
            return "a place that is not known"
        place = self.place(instruction)
        source = place.inlined_at or place.source
        where = f"{short_path(source.path)}:{source.line}" if source is not None else ""
        return where or f"PTX line {instruction.line}"

    def lines(self, moments: Iterable[Moment]) -> str:
        """Where operations stand."""
        return " and ".join(dict.fromkeys(self.line(each.instruction) for each in moments))

    def name(self, spot: Spot) -> str:
        """Name of an mbarrier, with its CTA where a cluster has several."""
        state = self.state(spot)
        title = self.title(state) if state is not None else f"the mbarrier at shared offset {spot[1]}"
        return f"{title} of CTA {spot[0]}" if self.several else title

    @property
    def several(self) -> bool:
        """Whether several CTAs have mbarriers."""
        return len({each.cta for each in self.facts.past.barriers}) > 1

    def who(self, labels: Iterable[str]) -> str:
        """Warps, those of each CTA together."""
        by_cta: dict[int, list[WarpName]] = {}
        for label in dict.fromkeys(labels):
            if (name := WarpName.of(label)) is not None:
                by_cta.setdefault(name.cta, []).append(name)
        texts = (short_names(warps) + (f" of CTA {cta}" if self.several else "") for cta, warps in by_cta.items())
        return " and ".join(texts) or "nobody"

    # --- mbarriers ----------------------------------------------------------------------------------------------------

    def state(self, spot: Spot) -> BarrierState | None:
        """The mbarrier that is there."""
        return self._states.get(spot)

    @functools.cached_property
    def _states(self) -> dict[Spot, BarrierState]:
        return {(each.cta, each.offset): each for each in reversed(self.facts.past.barriers)}

    @functools.cached_property
    def known(self) -> dict[object, dict]:
        """Findings of rows, kept for the others."""
        return {}

    @kept
    def stages(self, spot: Spot) -> list[int]:
        """Offsets of the mbarriers of the same array and purpose: some arrays have full and empty ones."""
        state = self.state(spot)
        key = self.purpose(state) if state is not None else ("",)
        if not key[0]:
            return [spot[1]]
        bytes_here, waiters = self._uses(state)
        found = []
        for each in self.facts.past.barriers:
            if each.cta == spot[0] and self.purpose(each) == key:
                bytes_there, others = self._uses(each)
                same = None in (bytes_here, bytes_there) or bytes_here == bytes_there
                if same and (not waiters or not others or waiters & others):
                    found.append(each.offset)
        return sorted(found)

    @kept
    def purpose(self, state: BarrierState) -> tuple[str, int, str]:
        """Array, count and line of initialisation: the same for all of a purpose."""
        return self.title(state).rpartition("[")[0], state.expected, self.line(state.init)

    def _uses(self, state: BarrierState) -> tuple[bool | None, set[str]]:
        """Whether bytes were announced or came there (None: nothing has happened), and who waited for it."""
        here = self._at_offset.get(state.offset, [])
        done = {each.operation for each in here} - {"wait", "timeout"}
        waiters = {each.warp for each in here if each.operation in ("wait", "timeout") and each.place[0] == state.cta}
        return bool(done - {"arrive"}) if done else None, waiters

    @functools.cached_property
    def _at_offset(self) -> dict[int, list[Moment]]:
        found: dict[int, list[Moment]] = {}
        for each in self.moments:
            found.setdefault(each.place[1], []).append(each)
        return found

    def stage(self, spot: Spot) -> int:
        """Index of an mbarrier in its array."""
        return self.stages(spot).index(spot[1])

    def alike(self, spot: Spot) -> Callable[[Spot], bool]:
        """Tells mbarriers of the same array, in any CTA."""
        offsets = self.stages(spot)
        return lambda other: other[1] in offsets

    def siblings(self, spot: Spot) -> Iterator[BarrierState]:
        """The mbarriers at the same offset in other CTAs."""
        return (each for each in self.facts.past.barriers if each.offset == spot[1] and each.cta != spot[0])

    def did(self, operation: str, spot: Spot | None = None, phase: int | None = None, warp: str = "") -> list[Moment]:
        """Operations of a kind; at an mbarrier, in a phase, by a warp."""
        return [
            each for each in self.moments
            if each.operation == operation and spot in (None, each.place) and phase in (None, each.phase)
            and warp in ("", each.warp)
        ]  # fmt: skip

    def signals(self, warps: Iterable[str] | None = None) -> list[Moment]:
        """All but waits; by some warps."""
        return [
            each for each in self.moments
            if each.operation not in ("wait", "timeout") and (warps is None or each.warp in warps)
        ]  # fmt: skip

    def untouched(self, spot: Spot) -> bool:
        """Whether nobody has ever signalled an mbarrier."""
        state = self.state(spot)
        return state is not None and not state.phase and state.pending == state.expected and not state.tx

    def bytes_of(self, spot: Spot, phase: int) -> tuple[int, int, str]:
        """Bytes of a phase that were announced, those that came, and where both happened, in words."""
        announced, came = self.did("announce", spot, phase), self.did("deliver", spot, phase)
        by_place: dict[tuple[str, str], int] = {}
        for each in came:
            key = self.who([each.warp]), self.line(each.instruction)
            by_place[key] = by_place.get(key, 0) + each.amount
        parts = [f"{count:,} by {who} at {line}" for (who, line), count in by_place.items()]
        brought = f"copies bring {', '.join(parts)}" if parts else "no copy brings any"
        total = sum(each.amount for each in announced)
        at = f" at {self.lines(announced)}" if announced else ""
        words = f"for {self.name(spot)} {total:,} bytes are announced{at}, and {brought}"
        return total, sum(each.amount for each in came), words

    # --- warps and stages ---------------------------------------------------------------------------------------------

    @property
    def warp(self) -> str:
        """Label of the warp that is at fault, or issued what is; "" if that is not known."""
        side = self.facts.side
        name = WarpName.of(self.error.warp) or WarpName.of(side.warp if side is not None else "")
        return str(name) if name is not None else ""

    @property
    def alone(self) -> bool:
        """Whether a warp is in conflict with what it issued itself: no mbarrier between warps has a part in that."""
        return self.facts.other is not None and self.warp != "" and self.facts.other.warp == self.warp

    def last_wait(self, spot: Spot | None = None) -> Moment | None:
        """The last wait that the warp has passed, for an mbarrier or its like; for any without one."""
        alike = self.alike(spot) if spot is not None else lambda place: True
        waits = self.did("wait", warp=self.warp) if self.warp else []
        return next((each for each in reversed(waits) if alike(each.place)), None)

    @property
    def at_fault(self) -> Located | None:
        """The instruction of the error."""
        side = self.facts.side
        found = next((each for each in self.instructions if each.line == self.error.ptx_line), None)
        return found or (side.instructions[0] if side is not None and side.instructions else None)

    def stage_of_memory(self, memory: Memory | None, stages: int) -> int | None:
        """Stage of an array that some bytes are in, of so many stages; None if that is not known."""
        if memory is None or memory.space != "shared" or stages < 2:
            return None
        around = (each for each in self.arrays if each.first <= memory.first < each.first + each.nbytes)
        array = next((each for each in around if each.nbytes % stages == 0), None)
        return (memory.first - array.first) * stages // array.nbytes if array is not None else None

    def reached(self, instruction: Located, ends: Callable[[Located], bool] = lambda each: False) -> list[Located]:
        """Instructions that a warp may come to from one, in the order of the text; it does not go on behind an end."""
        if self.kernel is None:
            return []
        every, labels = self.kernel.instructions, self.kernel.labels
        work = [each.index + 1 for each in every if each.line == instruction.line]
        if instruction.parts[0] == "bra":
            work.append(labels.get(every[work[0] - 1].operands[0].name, 0))
        seen: set[int] = set()
        while work:
            index = work.pop()
            if index in seen or index >= len(every):
                continue
            seen.add(index)
            each = every[index]
            if ends(each):
                continue
            if each.parts[0] == "bra":
                work.append(labels.get(each.operands[0].name, 0))
            if each.parts[0] not in ("bra", "ret", "exit") or each.guard is not None:
                work.append(index + 1)
        return [every[index] for index in sorted(seen)]

    def reaches(self, first: Located, last: Located, ends: Callable[[Located], bool]) -> bool:
        """Whether a warp may come from one instruction to another, and pass no end."""
        return any(each.line == last.line for each in self.reached(first, ends))

    def behind(self, instruction: Located, wanted: Callable[[Located], bool], ends: Callable[[Located], bool]) -> list:
        """Instructions that are wanted and stand behind one in the text, up to an end."""
        found = []
        for each in self.instructions:
            if each.line > instruction.line:
                if ends(each):
                    break
                if wanted(each):
                    found.append(each)
        return found


def named_barrier(instruction: Located | None) -> int | None:
    """Number of the barrier of a bar or barrier instruction, -1 where a register says it; None: it is none."""
    if instruction is None or instruction.parts[0] not in ("bar", "barrier") or instruction.parts[1:2] == ("warp",):
        return None
    if "cluster" in instruction.parts or not instruction.operands:
        return None
    return instruction.operands[0].value if isinstance(instruction.operands[0], Immediate) else -1


def stores_shared(instruction: Located) -> bool:
    """Whether it stores to shared memory of its CTA from registers."""
    return instruction.parts[0] in ("st", "stmatrix") and not {"shared", "shared::cta"}.isdisjoint(instruction.parts)


def is_barrier(instruction: Located) -> bool:
    """Whether a thread waits there for others, or arrives at a barrier."""
    parts = instruction.parts
    return parts[0] in ("bar", "barrier") or parts[0] == "mbarrier" and parts[1] in ("try_wait", "test_wait", "arrive")


def passed_at_once(wait: Moment) -> bool:
    """Whether a wait by parity passed because no phase was complete: that before the first one counts as complete."""
    return wait.phase == 0 and wait.amount == 1
