"""Counts of a kernel by line of its source (`Options.counters`), beside the source and as data.

Columns are sums of the metrics of docs/emulator/counters.md; `COLUMNS` says which. Every count of a launch belongs to
one line, or to none, so that the lines of a kernel add up to its counts.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cute_kernels.common.words import counted
from cute_kernels.emulator.isa.ptx.source_lines import SourcePlace, own_places
from cute_kernels.emulator.observe.counters import InstructionCounts, UnitCounts
from cute_kernels.emulator.reports.source_table import SourceTable, in_order, place_document
from cute_kernels.emulator.reports.sources import short_name

COLUMNS = {
    "instructions": "warp instructions",
    "shared_wavefronts": "wavefronts of shared memory, of the load/store unit and of TMA",
    "excess_wavefronts": "of those of the load/store unit, beyond what the words accessed need at best",
    "bank_conflicts": "wavefronts beyond one for each group of lanes that is served together",
    "operand_wavefronts": "128 bytes of shared memory that MMAs read",
    "global_sectors": "sectors of 32 bytes of global memory",
    "global_bytes": "bytes that instructions and copies ask of global memory, whatever sectors that takes",
}
"""Column -> what it counts."""

_TITLES = dict(zip(COLUMNS, ("instr", "shared", "excess", "conflicts", "operands", "sectors", "bytes"), strict=True))
_SECTOR_BYTES = 32


@dataclass
class LineCounts:
    """Counts of one line."""

    place: SourcePlace | None  # the line; None for what has no line of its own: branches and loop counters, mostly
    counts: Counter[str] = field(default_factory=Counter)  # by column
    by_role: Counter[str] = field(default_factory=Counter)  # instructions per role
    units: dict[str, Counter[str]] = field(default_factory=dict)  # kind -> metric -> count, of all roles
    ptx_lines: set[int] = field(default_factory=set)  # of the PTX texts of the profile

    def add(self, other: InstructionCounts) -> None:
        """Adds what an instruction of the line did."""
        self.ptx_lines.add(other.ptx_line)
        self.by_role.update(other.executions)
        self.counts["instructions"] += sum(other.executions.values())
        for kinds in other.units.values():
            for kind, metrics in kinds.items():
                self.units.setdefault(kind, Counter()).update(metrics)
                self.counts.update(columns_of(kind, metrics))


def columns_of(kind: str, metrics: dict[str, int]) -> dict[str, int]:
    """The columns but the instructions' of one kind of work, by its metrics."""
    through_l2 = metrics.get("l2_bytes_read", 0) + metrics.get("l2_bytes_written", 0)
    bulk = kind.split(".")[0] in ("tma", "bulk") and kind != "bulk.send"
    ideal = metrics.get("ideal_wavefronts")
    counts = {
        "shared_wavefronts": metrics.get("wavefronts", 0),
        "excess_wavefronts": metrics["wavefronts"] - ideal if ideal is not None else 0,
        "bank_conflicts": metrics.get("bank_conflicts", 0),
        "operand_wavefronts": metrics.get("operand_wavefronts", 0),
        "global_sectors": through_l2 // _SECTOR_BYTES if bulk else metrics.get("sectors", 0),
        "global_bytes": metrics["bytes"] if bulk or "global" in kind.split(".") else 0,
    }
    return {column: count for column, count in counts.items() if count}


@dataclass
class Profile:
    """Launches of one kernel."""

    kernel: str  # name of the entry
    name: str = ""  # of the kernel in its program, "" if that is not known
    # launches, ctas: how many ran
    launches: int = 0
    ctas: int = 0
    lines: dict[SourcePlace | None, LineCounts] = field(default_factory=dict)  # with counts, by place
    activities: dict[str, str] = field(default_factory=dict)  # role -> what its warps do

    def add(self, ptx: str, units: UnitCounts) -> None:
        """Adds a launch: its PTX, and its counts by instruction."""
        self.launches += 1
        self.ctas += units.ctas
        self.activities.update(units.activities)
        places = own_places(ptx)
        for each in units.by_instruction:
            place = places[each.ptx_line - 1] if each.ptx_line else None
            self.lines.setdefault(place, LineCounts(place)).add(each)

    @property
    def total(self) -> Counter[str]:
        """Counts of all lines, by column."""
        return sum((line.counts for line in self.lines.values()), Counter())

    def table(self, mark: Callable[[str], str] = lambda row: row) -> SourceTable:
        """The counts beside the source. ``mark``: as of `SourceTable`."""
        return SourceTable({place: line.counts for place, line in self.lines.items()}, _TITLES, mark)

    def document(self) -> dict[str, Any]:
        """Profile as data for JSON."""
        return {
            "kernel": self.kernel,
            "name": self.name,
            "launches": self.launches,
            "ctas": self.ctas,
            "roles": self.activities,
            "total": _columns(self.total),
            "lines": [_line_document(each) for each in in_order(self.lines.values(), lambda line: line.place)],
        }

    def text(self, mark: Callable[[str], str] = lambda row: row) -> str:
        """A table beside the source, as `SourceTable` makes it."""
        count = f"{counted(self.launches, 'launch', 'launches')}, {counted(self.ctas, 'CTA')}"
        head = f"profile of {self.name or self.kernel}: {count}"
        return "\n".join([head, *self.table(mark).rows("without a line of its own: branches, loop counters")])


def profiles(launches: Iterable[tuple[str, str, UnitCounts]]) -> list[Profile]:
    """One profile per kernel and text of (PTX, name of the kernel, counts of a launch), in order of first launch."""
    found: dict[tuple[str, str], Profile] = {}
    for ptx, kernel, units in launches:
        found.setdefault((ptx, kernel), Profile(kernel, short_name(ptx, kernel))).add(ptx, units)
    return list(found.values())


def _columns(counts: Counter[str]) -> dict[str, int]:
    return {column: counts[column] for column in COLUMNS}


def _line_document(line: LineCounts) -> dict[str, Any]:
    return {
        **place_document(line.place),
        **_columns(line.counts),
        "by_role": dict(line.by_role),
        "units": {kind: dict(metrics) for kind, metrics in sorted(line.units.items())},
        "ptx_lines": sorted(line.ptx_lines),
    }
