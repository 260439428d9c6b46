"""Costs of a kernel's machine code by source line and loop: as text beside the source, and as data."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from cute_kernels.common.words import columns
from cute_kernels.emulator.isa.ptx.source_lines import SourcePlace, own_places
from cute_kernels.emulator.reports.source_table import SourceTable, in_order, place_document
from cute_kernels.emulator.reports.sources import short_name
from cute_kernels.explore.sass import findings
from cute_kernels.explore.sass.findings import KINDS, Finding
from cute_kernels.explore.sass.flow import Flow, Loop, issue_clocks
from cute_kernels.explore.sass.listing import Instruction, kernels

COLUMNS = {
    "instructions": "instructions of machine code",
    "looped": "of those in loops, where there are any",
    "clocks": "that a warp needs to issue these, the sum of their stall counts",
    "exposed": "clocks of waits for loads that nothing issued between covers",
    "membar": "MEMBAR of these",
    "cache": "CCTL.IVALL of these",
    "lanes": "loops over lanes, of these",
    "move": "copies of registers in loops with MMAs",
    "spill": "loads and stores of spilled registers, in loops or not",
}
"""Column -> what it counts."""

_TITLES = dict(zip(COLUMNS, "instr looped clocks exposed MEMBAR CCTL lanes moves spills".split(), strict=True))


class MachineCode:
    """A kernel's machine code and what costs in it.

    ``kernel``: name of the entry. ``code``: its instructions. ``ptx``: the PTX text that they were made of. ``flow``:
    its blocks and loops. ``findings``: what costs, by address; of a kernel with loops only what stands in one, but for
    spills. ``name``: of the kernel in its program."""

    def __init__(self, kernel: str, code: Sequence[Instruction], ptx: str) -> None:
        self.kernel, self.ptx, self.name = kernel, ptx, short_name(ptx, kernel)
        self.flow = Flow(code)
        self.findings = findings.findings(self.flow)
        self._places = own_places(ptx)
        self._texts = ptx.splitlines()

    def place(self, instruction: Instruction) -> SourcePlace | None:
        """The source line that an instruction was made of; None if it has none of its own."""
        return self._places[instruction.ptx_line - 1] if 0 < instruction.ptx_line <= len(self._places) else None

    @cached_property
    def lines(self) -> dict[SourcePlace | None, Counter[str]]:
        """Counts of each source line, by column."""
        lines: dict[SourcePlace | None, Counter[str]] = {}
        for number, instruction in enumerate(self.flow.code):
            counts = lines.setdefault(self.place(instruction), Counter())
            counts["instructions"] += 1
            if self.flow.repeated(number):
                counts["looped"] += 1
                counts["clocks"] += issue_clocks(instruction)
        for found in self.findings:
            column, amount = ("exposed", found.clocks) if found.kind == "wait" else (found.kind, 1)
            lines[self.place(found.instruction)][column] += amount
        return lines

    def text(self, mark: Callable[[str], str] = lambda row: row) -> str:
        """Counts beside the source, loops, findings. ``mark``: as of `SourceTable`."""
        head = f"machine code of {self.name or self.kernel}: {len(self.flow.code):,} instructions"
        shown: dict[SourcePlace | None, Counter[str]] = {}
        for place, counts in self.lines.items():
            shown.setdefault(place if counts["looped"] or counts["spill"] else None, Counter()).update(counts)
        table = SourceTable(shown, _TITLES, mark)
        rows = [head, *table.rows("outside of loops, or without a line of its own: branches, loop counters")]
        return "\n".join([*rows, *self._loop_rows(), *self._finding_rows()])

    def annotated(self) -> str:
        """The PTX text of what is repeated, with the instructions made of each line below it."""
        made: dict[int, list[Instruction]] = {}
        for number, instruction in enumerate(self.flow.code):
            if self.flow.repeated(number):
                made.setdefault(instruction.ptx_line, []).append(instruction)
        costs = {found.instruction.address: found for found in self.findings}
        rows = []
        for line in sorted(made):
            rows.append(f"{line:6}  {self._ptx(line)}")
            for each in made[line]:
                why = f"  <- {_why(costs[each.address])}" if each.address in costs else ""
                awaits = "".join(map(str, each.awaits)) or "-"
                clocks = f"{issue_clocks(each):2} clocks"
                rows.append(f"        {each.address:#06x} {clocks}, awaits {awaits}  {each.text}{why}")
        return "\n".join(rows)

    def document(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "name": self.name,
            "instructions": len(self.flow.code),
            "all_branches_known": self.flow.complete,
            "loops": [self._loop_document(loop) for loop in self.flow.loops],
            "lines": [
                {**place_document(place), **{column: self.lines[place][column] for column in COLUMNS}}
                for place in in_order(self.lines, lambda place: place)
            ],
            "findings": [self._finding_document(found) for found in self.findings],
        }

    def _loop_document(self, loop: Loop) -> dict[str, Any]:
        code = list(self.flow.inside(loop))
        ptx_lines = sorted({each.ptx_line for each in code} - {0})
        return {
            **place_document(next(filter(None, map(self.place, code)), None)),
            "depth": loop.depth,
            "addresses": [code[0].address, code[-1].address],
            "ptx_lines": [ptx_lines[0], ptx_lines[-1]] if ptx_lines else [],
            "instructions": len(code),
            "clocks_shortest": loop.shortest,
            "clocks_longest": loop.longest,
            "mma": sum(map(findings.is_mma, code)),
            "opcodes": dict(Counter(each.name for each in code).most_common()),
        }

    def _loop_rows(self) -> Iterator[str]:
        if not self.flow.complete:
            yield "\nan indirect branch does not say where it leads: loops through it are missing"
        if not self.flow.loops:
            yield "\nno loops: everything is executed once"
            return
        yield "\nloops: clocks that a warp needs at least to issue one pass, by its shortest way and its longest"
        rows = [("", "instr", "clocks", "MMAs", "most frequent", "begins at")]
        for number, loop in enumerate(self.flow.loops, 1):
            facts = self._loop_document(loop)
            frequent = ", ".join(f"{count} {name}" for name, count in itertools.islice(facts["opcodes"].items(), 4))
            clocks = f"{loop.shortest:,} to {loop.longest:,}"
            place = f"{'  ' * (loop.depth - 1)}{_short(facts['file'])}:{facts['line']}  {facts['text']}"
            rows.append((f"loop {number}", f"{facts['instructions']:,}", clocks, str(facts["mma"]), frequent, place))
        yield from columns(rows)

    def _ptx(self, line: int) -> str:
        text = self._texts[line - 1] if 0 < line <= len(self._texts) else ""
        return " ".join(text.split())

    def _finding_document(self, found: Finding) -> dict[str, Any]:
        each, loops = found.instruction, self.flow.loops
        return {
            "kind": found.kind,
            **place_document(self.place(each)),
            "ptx_line": each.ptx_line,
            "ptx": self._ptx(each.ptx_line),
            "address": each.address,
            "instruction": each.text,
            "loop": loops.index(found.loop) + 1 if found.loop is not None else None,
            "clocks": found.clocks,
            "load": found.producer.text if found.producer is not None else None,
            "load_ptx_line": found.producer.ptx_line if found.producer is not None else None,
            "behind": found.behind,
        }

    def _finding_rows(self) -> Iterator[str]:
        """A line for each loop, PTX line and reason, by kind, the longest waits first; moves by loop."""
        for kind, what in KINDS.items():
            alike: Counter[tuple[str, ...]] = Counter()
            for found in sorted(self.findings, key=lambda found: -found.clocks):
                if found.kind == kind:
                    alike[self._move_cells(found) if kind == "move" else self._cells(found)] += 1
            if alike:
                yield f"\n{what}"
                yield from columns([(f"{count} x", *cells) for cells, count in alike.items()])

    def _cells(self, found: Finding) -> tuple[str, ...]:
        facts = self._finding_document(found)
        loop = f"loop {facts['loop']}" if facts["loop"] else "once"
        place = f"{_short(facts['file'])}:{facts['line']}  {facts['text']}" if facts["file"] else ""
        return loop, _why(found), f"PTX {facts['ptx_line']}: {facts['ptx'][:60]}", place

    def _move_cells(self, found: Finding) -> tuple[str, ...]:
        count = sum(map(findings.is_mma, self.flow.inside(found.loop)))
        return f"loop {self.flow.loops.index(found.loop) + 1}", found.instruction.name, f"beside {count} MMAs"


def _why(found: Finding) -> str:
    if found.producer is None:
        return found.instruction.opcode
    line = f" (PTX {found.producer.ptx_line})" if found.producer.ptx_line != found.instruction.ptx_line else ""
    return f"{found.producer.opcode}{line}, {found.behind} clocks before, takes {found.clocks} more"


def _short(path: str | None) -> str:
    return path.rpartition("/")[2] if path else "?"


def machine_code(listing: str, ptx: str) -> list[MachineCode]:
    """The kernels of a listing of `compile.disassemble`, of those that a PTX text has. Raises ValueError: a listing
    without instructions."""
    return [MachineCode(name, code, ptx) for name, code in kernels(listing).items() if f".entry {name}(" in ptx]
