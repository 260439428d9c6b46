"""Counts by source line beside the source, in the manner of ``perf annotate``."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from cute_kernels.common.files import printable
from cute_kernels.emulator.isa.ptx.source_lines import SourcePlace
from cute_kernels.emulator.reports.sources import lines_of, text_of_line

HOT = 0.1
"""Share of all counts of any column from which on a line is marked."""

Item = TypeVar("Item")

_CONTEXT = 2  # source lines shown before and behind one with counts


class SourceTable:
    """Counts of lines, and the rows that show them: mark, share of the first column, columns, source. ``lines``: counts
    of each line by column; of None, what belongs to no line. ``titles``: column -> what stands above it, in their
    order. Columns without counts are left out, but the first one. ``mark``: applied to the rows of hot lines, e.g. to
    colour them. ``total``: counts of all lines."""

    def __init__(
        self,
        lines: Mapping[SourcePlace | None, Counter[str]],
        titles: Mapping[str, str],
        mark: Callable[[str], str] = lambda row: row,
    ) -> None:
        self._lines, self._titles, self._mark = lines, titles, mark
        self.total: Counter[str] = sum(lines.values(), Counter())
        self._share = next(iter(titles))
        self._shown = [column for column in titles if self.total[column] or column == self._share]
        self._widths = {c: max(len(titles[c]), len(f"{self.total[c]:,}")) for c in self._shown}

    def hot(self, counts: Counter[str]) -> bool:
        """Whether a line with these counts has a share of at least `HOT` in some column."""
        return any(count >= HOT * self.total[column] for column, count in counts.items() if count)

    def rows(self, without: str) -> list[str]:
        """The table: files with most counts of the first column first. ``without``: what the row of counts without a
        line says."""
        rows: list[str] = []
        for path, numbers in self._files().items():
            rows += ["", self._line("  ", "%", (self._titles[c] for c in self._shown), printable(path))]
            before = None
            for number in _with_context(path, numbers):
                if before is not None and number != before + 1:
                    rows.append(self._line("  ", "", ("" for _ in self._shown), "  ..."))
                source = text_of_line(path, number).rstrip()
                rows.append(self._row(self._lines.get(SourcePlace(path, number)), f"{number:5} {source}"))
                before = number
        rows.append("")
        if None in self._lines:
            rows.append(self._row(self._lines[None], without))
        return [*rows, self._counts("  ", self.total, "total")]

    def _files(self) -> dict[str, list[int]]:
        """Numbers of the lines by file."""
        weight: Counter[str] = Counter()
        numbers: dict[str, list[int]] = {}
        for place, counts in self._lines.items():
            if place is not None:
                numbers.setdefault(place.path, []).append(place.line)
                weight[place.path] += counts[self._share]
        return {path: sorted(numbers[path]) for path in sorted(numbers, key=lambda path: -weight[path])}

    def _row(self, counts: Counter[str] | None, text: str) -> str:
        hot = counts is not None and self.hot(counts)
        result = self._counts("> " if hot else "  ", counts or Counter(), text)
        return self._mark(result) if hot else result

    def _counts(self, begin: str, counts: Counter[str], text: str) -> str:
        share = 100 * counts[self._share] / max(self.total[self._share], 1)
        percent = f"{share:.1f}" if counts[self._share] else ""
        return self._line(begin, percent, (f"{counts[c]:,}" if counts[c] else "" for c in self._shown), text)

    def _line(self, begin: str, percent: str, cells: Iterable[str], text: str) -> str:
        columns = "  ".join(f"{cell:>{self._widths[c]}}" for c, cell in zip(self._shown, cells))
        return f"{begin}{percent:>5}  {columns}  {text}".rstrip()


def in_order(lines: Iterable[Item], place_of: Callable[[Item], SourcePlace | None]) -> list[Item]:
    """Lines by file and number, what has none at the end."""

    def key(line: Item) -> tuple[bool, str, int]:
        place = place_of(line)
        return (place is None, place.path if place else "", place.line if place else 0)

    return sorted(lines, key=key)


def place_document(place: SourcePlace | None) -> dict[str, str | int | None]:
    """File, number and text of a line as data for JSON."""
    text = text_of_line(place.path, place.line).strip() if place else None
    return {"file": place.path if place else None, "line": place.line if place else None, "text": text}


def _with_context(path: str, lines: Sequence[int]) -> list[int]:
    last = len(lines_of(path))
    near = {number for line in lines for number in range(line - _CONTEXT, line + _CONTEXT + 1) if 0 < number <= last}
    return sorted(near | set(lines))
