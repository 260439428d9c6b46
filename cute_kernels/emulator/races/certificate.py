"""The certificate of a launch: that every schedule of it, with this input, ends and leaves the bits of the run at hand.

It is given where the detectors, which go by order and not by what happened to come first, have found nothing in the
run; where every instruction that was executed is known to depend on nothing but its operands and on memory that order
decides; and where nothing may have to wait for room. What stands against it is a `Place`. An instruction that is not
in the tables below stands against it.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cute_kernels.emulator.isa.ptx.flow import Flow
from cute_kernels.emulator.isa.ptx.program import Instruction, Special, items_of
from cute_kernels.emulator.isa.ptx.waits import PURE, decides_nothing, is_wait, waited_for_alone, waits_until_complete
from cute_kernels.emulator.races.meetings import Meeting

#: What a certificate takes for granted, in every report.
ASSUMPTIONS = (
    "All this is said of this input at these addresses, on a chip that runs every warp sometimes and the lanes of a "
    "warp in step.",
    "Races are those that the detectors find: docs/emulator/contract.md lists the others, and all assumptions.",
)
_MOST = 3
#: Kinds of places that are draws: a certificate for these draws says that nothing else depends on the schedule.
DRAWS = frozenset({"draw"})
#: Kinds of places that are reported at the end of a run in which nothing else is.
PHASES = frozenset({"arrival-early", "bytes-early", "announced-late", "lanes-overtaken", "inval-order"})

#: Why the events of a place cannot come in another order, by its kind; of other kinds without meetings, `_NO_EVENTS`.
_UNTRIED = {
    "lanes-overtaken": "lanes of a warp step together in the emulator",
    "answer": "a look has the answer that the barrier has, and no arrival is known that it could come before",
    "pool": "who takes registers or tensor memory from whom is not followed",
    "unknown": "what else an instruction could do is not known",
}
_NO_EVENTS = "no two events of it are known that could come in another order"

_MEMORY = frozenset("ld ldu st ldmatrix stmatrix movmatrix prefetch prefetchu applypriority createpolicy".split())
_ORDER = frozenset("bar barrier membar nanosleep griddepcontrol elect shfl vote match redux".split())
_UNITS = frozenset("mma wmma wgmma tcgen05 cp".split())
_CONTROL = frozenset("bra ret exit trap brkpt pmevent".split())
_KNOWN = PURE | _MEMORY | _ORDER | _UNITS | _CONTROL
_STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "mmio"})
_CLASSES = {
    "atom": "another order of atomic operations", "red": "another order of atomic operations",
    "multimem": "another order of operations on multicast memory", "activemask": "which lanes are together",
    "clusterlaunchcontrol": "which cluster is left",
}  # fmt: skip
#: Beginnings of special registers that are the same in every schedule.
_FIXED = ("%tid", "%ntid", "%laneid", "%lanemask", "%ctaid", "%nctaid", "%cluster", "%ncluster", "%is_explicit_cluster",
          "%dynamic_smem", "%total_smem", "%aggr_smem", "%reserved_smem", "%envreg")  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A reason against a certificate."""

    # that of a fault which other schedules may show ("arrival-early", "bytes-early", "announced-late",
    # "lanes-overtaken", "inval-order", "allocation-order"); "draw" (the outcome is one of several), "answer" (of a look
    # that the program goes by), "pool" (something may have to wait for room), "unknown" (an instruction that is not
    # classified), "reported" (a detector's report, after which execution went on) or "schedule" (the run is none that
    # can be judged)
    kind: str
    text: str  # what it is
    # instruction, line, source: where; "" and 0 where it is nowhere
    instruction: str = ""
    line: int = 0
    source: str = ""
    meetings: tuple[Meeting, ...] = ()  # pairs of events that it consists of, as far as they are known
    untried: str = ""  # why no other order of them was tried; "" where one was, or may be

    def __str__(self) -> str:
        where = self.source or (f"PTX line {self.line}" if self.line else "")
        return f"{self.text} [{self.kind}]" + (f": {where} `{self.instruction}`" if where else "")

    @property
    def tried(self) -> list[Meeting]:
        """Meetings that were tried."""
        return [each for each in self.meetings if each.shown is not None]

    def trials(self) -> list[str]:
        """Outcomes of trials, in lines."""
        return [*(f"tried: {each}" for each in self.tried), *([f"not tried: {self.untried}"] if self.untried else [])]

    def facts(self) -> dict[str, object]:
        """The place for a report in JSON."""
        found = {name: value for name, value in vars(self).items() if value and name != "meetings"}
        return found | ({"tried": [each.facts() for each in self.tried]} if self.tried else {})


@dataclass(frozen=True)
class Certificate:
    """Outcome of judging one run of a launch; `places` stand against it, none where it is given."""

    places: tuple[Place, ...] = ()

    @property
    def given(self) -> bool:
        """Every schedule of the launch, with this input, ends and leaves these bits, under `ASSUMPTIONS`."""
        return not self.places

    @property
    def for_draws(self) -> bool:
        """Not given, but every schedule in which the draws that are named fall as in this run leaves these bits."""
        return bool(self.places) and all(place.kind in DRAWS for place in self.places)

    def with_trial(self, meeting: Meeting, shown: str) -> "Certificate":
        """A copy with the outcome of a trial."""

        def tried(one: Meeting) -> Meeting:
            return dataclasses.replace(one, shown=shown) if one.schedule == meeting.schedule else one

        places = (dataclasses.replace(each, meetings=tuple(map(tried, each.meetings))) for each in self.places)
        return Certificate(tuple(places))

    def without_trials(self, why: str) -> "Certificate":
        """A copy of which every place that has not been tried says why."""
        return Certificate(tuple(
            each if each.tried else dataclasses.replace(each, untried=each.untried or why) for each in self.places
        ))

    @property
    def untried(self) -> Counter[str]:
        """How many places were not tried, by reason."""
        return Counter(each.untried for each in self.places if each.untried)

    def lines(self) -> list[str]:
        """The certificate in words; the first line says whether it is given."""
        if self.given:
            return [
                "certificate",
                "Every schedule of this launch, with this input, ends and leaves these bits.",
                *ASSUMPTIONS,
            ]
        count = len(self.places)
        stand = f"{count} place{'s stand' if count > 1 else ' stands'} against it"
        title = f"certificate for these draws; {stand}" if self.for_draws else f"no certificate; {stand}"
        lines = [title]
        for number, place in enumerate(self.places, 1):
            lines += [f"{number} {place}", *(f"  {each}" for each in place.trials())]
        return [*lines, *ASSUMPTIONS]

    def facts(self) -> dict[str, object]:
        """The certificate for a report in JSON."""
        places = [place.facts() for place in self.places]
        facts = {"given": self.given, "for_draws": self.for_draws, "assumptions": list(ASSUMPTIONS), "places": places}
        return facts | ({"untried": dict(self.untried)} if self.untried else {})


def judge(
    flow: Flow, executed: Sequence[int], found: Iterable[tuple[str, int, str]], whole: str = "",
    meetings: Iterable[tuple[str, int, Meeting]] = (), strong: Collection[tuple[int, bool]] = (),
) -> Certificate:
    """The certificate of a launch that has ended. ``flow``: of its kernel. ``executed``: how often warps entered each
    of its blocks. ``found``: places of the run itself: kind, index of the instruction or -1, text. ``whole``: why the
    run as a whole cannot be judged; "" where it can. ``meetings``: events that places consist of: kind and index of the
    instruction, and what they are. ``strong``: instructions with strong accesses, and whether one met any that it does
    not commute with."""
    places = {Place("schedule", whole): None} if whole else {}
    for kind, index, text in sorted(found):
        places[_place(flow.kernel.instructions[index] if index >= 0 else None, kind, text)] = None
    against = _of_blocks(flow)
    commuting = {index for index, apart in strong if not apart} - {index for index, apart in strong if apart}
    for block, count in enumerate(executed):
        for index, place in against.get(block, ()) if count else ():
            if index not in commuting:
                places[place] = None
    met: dict[tuple[str, str, int], list[Meeting]] = {}
    for kind, index, meeting in sorted(meetings):
        instruction = flow.kernel.instructions[index]
        met.setdefault((kind, instruction.text, instruction.line), []).append(meeting)
    judged = []
    for each in _few(places):
        own = tuple(met.pop((each.kind, each.instruction, each.line), ()))
        why = "" if own else _UNTRIED.get(each.kind, _NO_EVENTS)
        judged.append(dataclasses.replace(each, meetings=own, untried=why))
    return Certificate(tuple(judged))


def _few(places: Iterable[Place]) -> Iterator[Place]:
    """At most three of a kind at one line of the source."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for place in places:
        key = place.kind, place.text, place.source or str(place.line)
        counts[key] += 1
        if counts[key] <= _MOST:
            yield place


def _of_blocks(flow: Flow) -> dict[int, list[tuple[int, Place]]]:
    """Per block what its instructions, by index, have against the certificate."""
    known = flow.facts.get("certificate")
    if known is None:
        known = flow.facts["certificate"] = {}
        for block in flow.blocks:
            for instruction in flow.kernel.instructions[block.start : block.end]:
                found = [(instruction.index, _place(instruction, *each)) for each in _against(flow, instruction)]
                if found:
                    known.setdefault(block.index, []).extend(found)
    return known


def _place(instruction: Instruction | None, kind: str, text: str) -> Place:
    if instruction is None:
        return Place(kind, text)
    return Place(kind, text, instruction.text, instruction.line, instruction.source)


def _against(flow: Flow, instruction: Instruction) -> Iterator[tuple[str, str]]:
    """Reasons of an instruction against the certificate: kind and text."""
    parts, name = instruction.parts, instruction.parts[0]
    operands = (each for operand in instruction.operands for each in items_of(operand))
    times = [each for each in operands if isinstance(each, Special) and not each.name.startswith(_FIXED)]
    if times and not decides_nothing(flow, instruction.index):
        yield "draw", "time, or the place on the chip, which the program goes by"
    if name in _CLASSES:
        yield "draw", _CLASSES[name]
    elif name == "cp" and "reduce" in parts:
        yield "draw", "another order of sums by bulk copies"
    elif name in ("ld", "st") and _STRONG.intersection(parts):
        yield "draw", "a strong access, which may meet others in any order"
    elif name == "mbarrier":
        yield from _of_mbarrier(flow, instruction)
    elif name == "fence":
        if any(part.startswith("tensormap") for part in parts):
            yield "unknown", "a fence of tensor maps, which the detectors do not follow"
    elif name == "setmaxnreg":
        return  # the run itself is asked
    elif name not in _KNOWN:
        yield "unknown", "an instruction of which it is not known what its result depends on"


def _of_mbarrier(flow: Flow, instruction: Instruction) -> Iterator[tuple[str, str]]:
    parts = instruction.parts
    if is_wait(instruction):
        if not waits_until_complete(flow, instruction.index):
            yield "answer", "a look at an mbarrier, whose answer the program goes by without looking again"
    elif "pending_count" in parts or any(part.lower() == "nocomplete" for part in parts):
        yield "answer", "how many arrivals are pending depends on their order"
    elif not waited_for_alone(flow, instruction.index):
        yield "answer", "a state of an mbarrier flows into more than a wait for it"
