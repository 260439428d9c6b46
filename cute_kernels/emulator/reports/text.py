"""Reports for terminals, in the manner of rustc: kind, one sentence, both source lines, help, the command to replay."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from cute_kernels.common.files import current_folder
from cute_kernels.emulator.reports.model import Barrier, Diagnostic, Place, Related, SourceLine
from cute_kernels.emulator.reports.words import names_of_warps

_LONGEST = 76  # characters of a source line or instruction that are shown
_MOST_PLACES = 3  # where it is one of several
_MOST_LINES = 4  # of PTX that one source line became
_RED, _BLUE, _BOLD, _PLAIN = "\033[1;31m", "\033[1;34m", "\033[1m", "\033[0m"

Row = tuple[str, str, str]
"""Where, the line there, and who."""


def render(diagnostic: Diagnostic, *, verbose: bool = False, color: bool = False) -> str:
    """Several lines. ``diagnostic``: the report. ``verbose``: with all instructions, barriers and the emulator's own
    words. ``color``: with ANSI colours."""
    head = f"{diagnostic.level}[{diagnostic.kind}]"
    sentence = diagnostic.sentence
    if color:
        head, sentence = f"{_RED}{head}{_PLAIN}", f"{_BOLD}{sentence}{_PLAIN}"
    lines = [f"{head}: {sentence}", *_aligned(list(_rows(diagnostic, verbose)))]
    for name, text in _sentences(diagnostic, verbose):
        label = f"{_BLUE}{name}:{_PLAIN}" if color else f"{name}:"
        lines.append(f"  {label} {text}")
    return "\n".join(lines)


def short_path(path: str) -> str:
    """Relative to the current folder where it is inside."""
    folder = current_folder()
    if folder is None:
        return path
    absolute = os.path.abspath(path)
    return os.path.relpath(absolute) if Path(absolute).is_relative_to(folder) else path


def _rows(diagnostic: Diagnostic, verbose: bool) -> Iterator[Row]:
    if diagnostic.waiting:
        for number, waiting in enumerate(diagnostic.waiting):
            yield from _place("    " if number else "--> ", waiting.place, verbose)
            yield f"      {_what(waiting.what, waiting.barrier)}", "", ""
    elif diagnostic.place.source or diagnostic.place.ptx_line or diagnostic.place.warps:
        yield from _place("--> ", diagnostic.place, verbose)
    for related in diagnostic.related:
        yield from _related(related, verbose)
    seen = set()
    for barrier in _barriers(diagnostic, verbose):
        if (barrier.cta, barrier.offset) not in seen:
            seen.add((barrier.cta, barrier.offset))
            yield from _barrier(barrier, diagnostic, verbose)


def _what(what: str, barrier: Barrier | None) -> str:
    return f"{what}: {barrier.state.partition(': ')[2]}" if barrier is not None else what


def _place(label: str, place: Place, verbose: bool, more_lines: tuple[int, ...] = ()) -> Iterator[Row]:
    who = ", ".join(filter(None, (names_of_warps(place.warps, place.lanes), _ptx_line(place, more_lines))))
    if place.source is not None:
        yield label + _location(place.source), _cut(place.source.text), who
        if place.inlined_at is not None:
            inlined = place.inlined_at
            yield f"    inlined at {_location(inlined)}", _cut(inlined.text), ""
        if verbose and place.instruction:
            yield "", f"PTX: {place.instruction}", ""
    elif place.ptx_line is not None:
        yield f"{label}PTX line {place.ptx_line}", place.instruction if verbose else _cut(place.instruction), (
            names_of_warps(place.warps, place.lanes)
        )
    else:
        yield label.rstrip(), "", who


def _ptx_line(place: Place, more: tuple[int, ...]) -> str:
    if place.ptx_line is None:
        return ""
    shown = ", ".join(map(str, (place.ptx_line, *more)[:_MOST_LINES]))
    dots = ", .." if len(more) >= _MOST_LINES else ""
    return f"PTX line{'s' if more else ''} {shown}{dots}"


def _location(source: SourceLine) -> str:
    return f"{short_path(source.path)}:{source.line}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 2] + ".."


def _related(related: Related, verbose: bool) -> Iterator[Row]:
    groups = _by_source(related.places)
    shown = groups if verbose else groups[:_MOST_PLACES]
    for number, (place, *others) in enumerate(shown):
        lines = tuple(each.ptx_line for each in others if each.ptx_line is not None)
        yield from _place(f"{'or' if number else related.relation} ", place, verbose, lines)
    if len(groups) > len(shown):
        yield f"or {len(groups) - len(shown)} more lines", "", ""


def _by_source(places: tuple[Place, ...]) -> list[list[Place]]:
    """Places of each source line together: an unrolled loop repeats it."""
    found: dict[object, list[Place]] = {}
    for place in places:
        key = (place.source.path, place.source.line) if place.source else place.ptx_line
        found.setdefault(key, []).append(place)
    return list(found.values())


def _barriers(diagnostic: Diagnostic, verbose: bool) -> Iterator[Barrier]:
    if diagnostic.barrier is not None:
        yield diagnostic.barrier
    for waiting in diagnostic.waiting:
        if waiting.barrier is not None:
            yield waiting.barrier
    if verbose:
        yield from diagnostic.barriers


def _barrier(barrier: Barrier, diagnostic: Diagnostic, verbose: bool) -> Iterator[Row]:
    if barrier.init is not None:
        label = f"{barrier.name or 'barrier'} initialised at "
        for where, text, who in _place(label, barrier.init, verbose):
            yield where, text, who if verbose else ""
    if barrier is diagnostic.barrier or verbose:
        place = f" (shared offset {barrier.offset} of CTA {barrier.cta})" if verbose and barrier.name else ""
        last = names_of_warps((barrier.last_arrival,)) if barrier.last_arrival is not None else "nobody"
        yield f"  {barrier.name or barrier.title}{place} is {barrier.state}; last arrival by {last}", "", ""


def _aligned(rows: list[Row]) -> list[str]:
    """In columns; a row of a first column alone is as wide as it is."""
    first = max((len(where) for where, text, who in rows if text or who), default=0)
    second = max((len(text) for _, text, who in rows if who), default=0)
    return [
        f"  {where:<{first}}   {text:<{second}}   {who}".rstrip() if text or who else f"  {where}"
        for where, text, who in rows
    ]


def _sentences(diagnostic: Diagnostic, verbose: bool) -> Iterator[tuple[str, str]]:
    if diagnostic.memory:
        yield "where", diagnostic.memory
    for number, step in enumerate(diagnostic.cycle):
        yield ("cycle" if number == 0 else "  and"), step
    for note in diagnostic.notes:
        yield "note", note
    if diagnostic.help:
        yield "help", diagnostic.help
    if diagnostic.exited:
        yield "exited", names_of_warps(diagnostic.exited)
    if verbose:
        yield "in full", diagnostic.message.replace("\n", "\n    ")
    if diagnostic.kernel:
        launch = f", launch {diagnostic.launch}" if diagnostic.launch else ""
        full = f" ({diagnostic.kernel_name})" if verbose and diagnostic.kernel != diagnostic.kernel_name else ""
        yield "kernel", f"{diagnostic.kernel}{full}{launch}"
    for number, step in enumerate(diagnostic.steps):
        yield ("steps" if number == 0 else f"    {number}"), step
    if diagnostic.replay:
        yield "replay", shlex.join(diagnostic.replay)
