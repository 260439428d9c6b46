"""Counts of a kernel by line of its source (`Options.counters`), beside the source and as data.

Columns are sums of the metrics of docs/emulator/counters.md; `COLUMNS` says which. Every count of a launch belongs to
one line, or to none, so that the lines of a kernel add up to its counts.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cute_kernels.emulator.diagnostics.sources import short_name
from cute_kernels.emulator.observe.counters import InstructionCounts, UnitCounts
from cute_kernels.emulator.ptx.source_lines import SourcePlace, own_places

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

HOT = 0.1
"""Share of a kernel's count in any column from which on a line is marked."""

_TITLES = dict(zip(COLUMNS, ("instr", "shared", "excess", "conflicts", "operands", "sectors", "bytes"), strict=True))
_SECTOR_BYTES = 32
_CONTEXT = 2  # source lines shown before and behind one with counts


@dataclass
class LineCounts:
    """Counts of one line.

    Attributes:
        place: the line; None for what has no line of its own: branches and loop counters, mostly.
        counts: by column.
        by_role: instructions per role.
        units: kind -> metric -> count, of all roles.
        ptx_lines: of the PTX texts of the profile.
    """

    place: SourcePlace | None
    counts: Counter[str] = field(default_factory=Counter)
    by_role: Counter[str] = field(default_factory=Counter)
    units: dict[str, Counter[str]] = field(default_factory=dict)
    ptx_lines: set[int] = field(default_factory=set)

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
    """Launches of one kernel.

    Attributes:
        kernel: name of the entry.
        name: of the kernel in its program, "" if that is not known.
        launches, ctas: how many ran.
        lines: with counts, by place.
        activities: role -> what its warps do.
    """

    kernel: str
    name: str = ""
    launches: int = 0
    ctas: int = 0
    lines: dict[SourcePlace | None, LineCounts] = field(default_factory=dict)
    activities: dict[str, str] = field(default_factory=dict)

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

    def hot(self, line: LineCounts) -> bool:
        """Whether a line has a share of at least `HOT` in some column."""
        total = self.total
        return any(count >= HOT * total[column] for column, count in line.counts.items() if count)

    def files(self) -> dict[str, dict[int, LineCounts]]:
        """The lines that have a place, by file and number; files with most instructions first."""
        linecache.checkcache()  # files may have been edited since they were read
        files: dict[str, dict[int, LineCounts]] = {}
        for place, line in self.lines.items():
            if place is not None:
                files.setdefault(place.path, {})[place.line] = line
        weight = {path: sum(line.counts["instructions"] for line in lines.values()) for path, lines in files.items()}
        return {path: dict(sorted(files[path].items())) for path in sorted(files, key=lambda path: -weight[path])}

    def document(self) -> dict[str, Any]:
        """Profile as data for JSON."""
        return {
            "kernel": self.kernel,
            "name": self.name,
            "launches": self.launches,
            "ctas": self.ctas,
            "roles": self.activities,
            "total": _columns(self.total),
            "lines": [_line_document(line) for line in sorted(self.lines.values(), key=_order)],
        }

    def text(self, mark: Callable[[str], str] = lambda row: row) -> str:
        """A table beside the source, in the manner of ``perf annotate``.

        Args:
            mark: applied to the rows of hot lines, e.g. to colour them.
        """
        table = _Table(self, mark)
        count = f"{self.launches} launch{'es' if self.launches != 1 else ''}"
        rows = [f"profile of {self.name or self.kernel}: {count}, {self.ctas:,} CTAs"]
        for path, lines in self.files().items():
            rows += ["", table.head(path)]
            before = None
            for number in _with_context(path, lines):
                if before is not None and number != before + 1:
                    rows.append(table.gap())
                source = linecache.getline(path, number).rstrip()
                rows.append(table.row(lines.get(number), f"{number:5} {source}"))
                before = number
        rows.append("")
        if None in self.lines:
            rows.append(table.row(self.lines[None], "without a line of its own: branches, loop counters"))
        return "\n".join([*rows, table.total()])


class _Table:
    """Rows of a profile: mark, share of the instructions, columns that are not empty, text."""

    def __init__(self, profile: Profile, mark: Callable[[str], str]) -> None:
        self._profile, self._mark, self._sum = profile, mark, profile.total
        self._shown = [column for column in COLUMNS if self._sum[column] or column == "instructions"]
        self._widths = {c: max(len(_TITLES[c]), len(f"{self._sum[c]:,}")) for c in self._shown}

    def head(self, text: str) -> str:
        return self._line("  ", "%", (_TITLES[c] for c in self._shown), text)

    def gap(self) -> str:
        return self._line("  ", "", ("" for _ in self._shown), "  ...")

    def row(self, line: LineCounts | None, text: str) -> str:
        hot = line is not None and self._profile.hot(line)
        result = self._counts("> " if hot else "  ", line.counts if line is not None else Counter(), text)
        return self._mark(result) if hot else result

    def total(self) -> str:
        return self._counts("  ", self._sum, "total")

    def _counts(self, begin: str, counts: Counter[str], text: str) -> str:
        share = 100 * counts["instructions"] / max(self._sum["instructions"], 1)
        percent = f"{share:.1f}" if counts["instructions"] else ""
        return self._line(begin, percent, (f"{counts[c]:,}" if counts[c] else "" for c in self._shown), text)

    def _line(self, begin: str, percent: str, cells: Iterable[str], text: str) -> str:
        columns = "  ".join(f"{cell:>{self._widths[c]}}" for c, cell in zip(self._shown, cells))
        return f"{begin}{percent:>5}  {columns}  {text}".rstrip()


def profiles(launches: Iterable[tuple[str, str, UnitCounts]]) -> list[Profile]:
    """One profile per kernel and text of (PTX, name of the kernel, counts of a launch), in order of first launch."""
    found: dict[tuple[str, str], Profile] = {}
    for ptx, kernel, units in launches:
        found.setdefault((ptx, kernel), Profile(kernel, short_name(ptx, kernel))).add(ptx, units)
    return list(found.values())


def _with_context(path: str, lines: dict[int, LineCounts]) -> list[int]:
    last = len(linecache.getlines(path))
    near = {number for line in lines for number in range(line - _CONTEXT, line + _CONTEXT + 1) if 0 < number <= last}
    return sorted(near | set(lines))


def _order(line: LineCounts) -> tuple[bool, str, int]:
    return (line.place is None, line.place.path if line.place else "", line.place.line if line.place else 0)


def _columns(counts: Counter[str]) -> dict[str, int]:
    return {column: counts[column] for column in COLUMNS}


def _line_document(line: LineCounts) -> dict[str, Any]:
    place = line.place
    return {
        "file": place.path if place else None,
        "line": place.line if place else None,
        "text": linecache.getline(place.path, place.line).strip() if place else None,
        **_columns(line.counts),
        "by_role": dict(line.by_role),
        "units": {kind: dict(metrics) for kind, metrics in sorted(line.units.items())},
        "ptx_lines": sorted(line.ptx_lines),
    }
