"""From an error of the emulator to a report."""

import dataclasses
from collections.abc import Sequence

from cute_kernels.emulator.errors import EmulatorError, UnsupportedPTX
from cute_kernels.emulator.facts import Memory, Side, WarpName
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.reports import sources
from cute_kernels.emulator.reports.access_causes import ACCESSES
from cute_kernels.emulator.reports.arrays import array_at, array_before, arrays, tile_at
from cute_kernels.emulator.reports.barrier_causes import BARRIERS
from cute_kernels.emulator.reports.barriers import Barriers
from cute_kernels.emulator.reports.evidence import Cause, Evidence
from cute_kernels.emulator.reports.hangs import cycle, grouped, in_one_sentence
from cute_kernels.emulator.reports.kinds import kind as kind_of
from cute_kernels.emulator.reports.model import Barrier, Diagnostic, Place, Related, SourceLine, Waiting
from cute_kernels.emulator.reports.protocol_causes import PROTOCOL, UNHEARD
from cute_kernels.emulator.reports.words import noun, with_article

_RELATIONS = {"wrote": "written at", "read": "read at", "waits": "waits at", "expects": "expected at"}

CAUSES: tuple[Cause, ...] = (*PROTOCOL, *BARRIERS, *ACCESSES, *UNHEARD)
"""Which of several causes a fault has: facts that tell them apart, and the mend of each; the first row of a kind that
holds counts. Rows that are taken for each other stand together, each with a fact that the other one's fault does not
have. Where the facts are not known no row holds, and the kind's own help stands."""


def diagnose(
    error: EmulatorError, *, replay: Sequence[str] = (), seed: int | None = None, schedule: Sequence[str] = ()
) -> Diagnostic:
    """A report of an error. ``error``: as it came out of the launch. ``replay``: the command that shows it again, as
    words. ``seed``, ``schedule``: of the run."""
    return _Diagnosis(error).result(tuple(replay), seed, tuple(schedule))


def place_of_line(ptx: str, line: int, text: str) -> Place:
    """Where a line of a PTX text comes from; ``text`` is its instruction."""
    location = sources.location(ptx, line)
    if location is None:
        return Place(None, None, line, text)
    inlined = sources.source_line(location.inlined_at) if location.inlined_at else None
    return Place(sources.source_line(location.place), inlined, line, text)


class _Diagnosis:
    """One error while its report is made: its facts, the places and barriers that they name."""

    def __init__(self, error: EmulatorError) -> None:
        self.error, self.facts, self.ptx = error, error.facts, error.ptx or ""
        self.kernel = error.kernel or (error.launch.kernel_name if error.launch is not None else "")
        facts = self.facts
        states = [*facts.barriers, *([facts.barrier] if facts.barrier is not None else [])]
        self.barriers = Barriers(states, self.place, self._array)
        self.barrier = self.barriers.barrier(facts.barrier) if facts.barrier is not None else None

    def result(self, replay: tuple[str, ...], seed: int | None, schedule: tuple[str, ...]) -> Diagnostic:
        """The report."""
        error, facts = self.error, self.facts
        waiting = grouped(facts.waits, self.place, self.barriers)
        name, help_ = _cause_of(error.kind, self._evidence(waiting))
        kind, fields = kind_of(name), self._fields()
        early = []
        if facts.early is not None and not help_:
            early = [f"before that, {facts.early[1]} ({facts.early[0]})"]
            help_ = f"mend first what came before ({facts.early[0]}): {kind_of(facts.early[0]).help}"
        message = error.message.splitlines() or [""]
        name_of_kernel = self.kernel
        return Diagnostic(
            kind=name,
            error=type(error).__name__,
            sentence=facts.sentence or _filled(kind.sentence, fields) or in_one_sentence(waiting) or message[0],
            message=error.message,
            place=self._primary(waiting),
            related=tuple(self._related()),
            memory=self._memory(facts.memory),
            barrier=self.barrier,
            waiting=waiting,
            cycle=cycle(waiting),
            exited=tuple(name for each in facts.exited if (name := WarpName.of(each)) is not None),
            barriers=tuple(self.barriers.barrier(state) for state in facts.barriers),
            notes=(*(() if waiting else message[1:]), *facts.notes, *early),
            help=help_ or _filled(kind.help, fields),
            kernel=sources.short_name(self.ptx, name_of_kernel) if name_of_kernel else "",
            kernel_name=name_of_kernel,
            launch=error.launch_number,
            replay=replay,
            seed=seed,
            schedule=schedule,
        )

    def _evidence(self, waiting: tuple[Waiting, ...]) -> Evidence:
        past = Barriers(self.facts.past.barriers, self.place)
        kernel = None
        if self.ptx and not isinstance(self.error, UnsupportedPTX):
            kernels = parse(self.ptx).kernels
            kernel = kernels.get(self.kernel) or next(iter(kernels.values()), None)
        named = tuple(arrays(self.ptx, self.kernel, self.error.launch)) if kernel is not None else ()
        return Evidence(self.error, waiting, self.place, lambda state: past.barrier(state).title, named, kernel)

    def place(self, instruction: Instruction) -> Place:
        return self._at(instruction.line, instruction.text)

    def _at(self, line: int, text: str) -> Place:
        return place_of_line(self.ptx, line, text)

    def _primary(self, waiting: tuple) -> Place:
        error, side = self.error, self.facts.side
        who = WarpName.of(error.warp) or WarpName.of(side.warp if side is not None else "")
        warps = (who,) if who is not None else ()
        lanes = side.lanes if side is not None else ()
        if error.ptx_line is not None:
            place = self._at(error.ptx_line, (error.instruction or "").strip())
        elif side is not None and side.instructions:
            place = self.place(side.instructions[0])
        elif waiting:
            return waiting[0].place
        elif error.source:
            path, _, line = error.source.split(" inlined at ")[0].rpartition(":")
            place = Place(SourceLine(path, int(line) if line.isdecimal() else 0))
        else:
            place = Place()
        return dataclasses.replace(place, warps=warps, lanes=lanes)

    def _related(self) -> list[Related]:
        other = self.facts.other
        if other is None:
            return []
        who = WarpName.of(other.warp)
        places = [
            dataclasses.replace(self.place(each), warps=(who,) if who is not None else (), lanes=other.lanes)
            for each in other.instructions
        ]
        if not places and who is not None:
            places = [Place(warps=(who,), lanes=other.lanes)]
        relation = _RELATIONS.get(other.verb, other.verb)
        return [Related(relation, tuple(places), other.what)] if places else []

    def _fields(self) -> dict[str, str]:
        side, other, memory = self.facts.side, self.facts.other, self.facts.memory
        fields = {"barrier": self._barrier_title(self.barrier)}
        if side is not None:
            later = self._operation(side, self.error.instruction)
            fields |= {"later": later, "operation": later.partition(" ")[2], "reads": side.verb}
            fields["space"] = memory.space if memory is not None else ""
        if other is not None:
            fields |= {"earlier": self._operation(other), "read": other.verb}
        return fields

    def _operation(self, side: Side, text: str | None = None) -> str:
        if side.instructions:
            return with_article(noun(side.instructions[0]))
        what = side.what.split(" of ")[0].split(" issued")[0]
        if not what and text:
            guardless = text.split(maxsplit=1)[-1] if text.startswith("@") else text
            what = noun(_named(guardless.split()[0]))
        return with_article(what) if what else "an access"

    def _memory(self, memory: Memory | None) -> str:
        if memory is None:
            return ""
        if memory.space == "tensor":
            last = memory.first + memory.count - 1
            columns = f"column {memory.first}" if memory.count == 1 else f"columns {memory.first} to {last}"
            element = self._element(4 * (memory.first + (memory.lane << 16)), "tensor")
            who = WarpName.of(self.error.warp)
            cta = who.cta if memory.cta < 0 and who is not None else memory.cta
            return f"{columns} of the tensor memory of CTA {cta}" + f": {element}" * bool(element)
        count = f"{memory.count} byte{'s' if memory.count != 1 else ''}"
        if memory.space != "shared":
            return f"{count} from byte {memory.first} on of {memory.name or 'a global array'}"
        place = f"offset {memory.first} of the shared memory of CTA {memory.cta}"
        if not self.ptx:
            return f"{count} at {place}"
        arguments = self.ptx, self.kernel, self.error.launch, memory.first
        if self.error.kind == "out-of-bounds":
            before = array_before(*arguments)
            distance = memory.first - before.first - before.nbytes if before is not None else 0
            return f"{count} at {place}" + (f", {distance} bytes behind the end of {before.name}" if before else "")
        array = array_at(*arguments, memory.count)
        if array is None:
            return f"{count} at {place}"
        element = self._element(memory.first)
        last = self._element(memory.first + memory.count - 1) if element else ""
        tile = f": {element}" + (f" to {last}" if last not in ("", element) else "") if element else ""
        return f"{count} from byte {memory.first - array.first} on of {array.name} ({place}){tile}"

    def _array(self, offset: int) -> str:
        array = array_at(self.ptx, self.kernel, self.error.launch, offset, 8) if self.ptx else None
        if array is None:
            return ""
        return array.name + f"[byte {offset - array.first}]" * (offset > array.first)

    def _element(self, byte: int, space: str = "shared") -> str:
        return tile_at(self.ptx, self.kernel, self.error.launch, byte, space)[1] if self.ptx else ""

    @staticmethod
    def _barrier_title(barrier: Barrier | None) -> str:
        if barrier is None:
            return "an mbarrier"
        return f"the mbarrier {barrier.name}" if barrier.name else barrier.title


def _cause_of(kind: str, evidence: Evidence) -> tuple[str, str]:
    """The kind of a report, and its help where a row holds, else ""."""
    rows = ACCESSES if kind == "source-in-use" and evidence.alone else CAUSES
    for cause in rows:
        if kind in cause.kinds and (fields := cause.fields(evidence)) is not None:
            return cause.kind or kind, cause.help.format_map({**evidence.common, **fields})
    return kind, ""


def _named(opcode: str) -> Instruction:
    return Instruction(0, tuple(opcode.rstrip(";").split(".")), (), None, 0, "", opcode)


def _filled(template: str, fields: dict[str, str]) -> str:
    """With its fields; "" where one is not known."""
    try:
        return template.format_map(fields)
    except KeyError:
        return ""
