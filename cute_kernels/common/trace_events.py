"""Events of a timeline in Chrome's JSON trace format, which https://ui.perfetto.dev opens: tracks, slices and arrows.

The axis is in microseconds; what one stands for, whoever records says in the note of the file.
"""

import itertools
import json
from json.encoder import encode_basestring_ascii as _quoted
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.common.files import write_text


class Track(NamedTuple):
    """A row of the picture: threads of one process stand together."""

    process: int
    thread: int


class TraceEvents:
    """Collects events, as text: a launch has many, and the garbage collector has nothing to look for in a string."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._begins: list[float] = []
        self._ends: list[float] = []  # how long each lasts, negative
        self._flows = itertools.count(1)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events as the format has them, in the order in which they were added."""
        return [json.loads(text) for text in self._texts]

    def name(self, kind: str, track: Track, name: str) -> None:
        """Names a process (``kind`` "process") or a thread of it ("thread"); they are shown in the order of numbers."""
        index = track.process if kind == "process" else track.thread
        for field, key, value in (("name", "name", _quoted(name)), ("sort_index", "sort_index", index)):
            head = f'{{"ph": "M", "pid": {track.process}, "tid": {track.thread}, "name": {_quoted(f"{kind}_{field}")}'
            self._begins.append(-1)
            self._ends.append(0)
            self._texts.append(f'{head}, "args": {{"{key}": {value}}}}}')

    def slice(self, track: Track, name: str, category: str, begin: float, end: float, **details: str | float) -> None:
        """Something that lasts from ``begin`` to ``end``."""
        args = ", ".join([f"{_quoted(key)}: {_text(value)}" for key, value in details.items()])
        process, thread = track
        self._begins.append(begin)
        self._ends.append(begin - end)
        self._texts.append(
            f'{{"ph": "X", "name": {_quoted(name)}, "cat": {_quoted(category)}, "pid": {process}, "tid": {thread}, '
            f'"ts": {begin!r}, "dur": {end - begin!r}, "args": {{{args}}}}}'
        )

    def flow(self, name: str, source: tuple[Track, float], target: tuple[Track, float]) -> None:
        """An arrow between two places, each inside a slice."""
        ((process, thread), begin), ((to_process, to_thread), end) = source, target
        common = f'"id": {next(self._flows)}, "name": {_quoted(name)}, "cat": {_quoted(name)}'
        self._begins += (begin, end)
        self._ends += (0, 0)
        self._texts += (
            f'{{"ph": "s", {common}, "pid": {process}, "tid": {thread}, "ts": {begin!r}}}',
            f'{{"ph": "f", {common}, "pid": {to_process}, "tid": {to_thread}, "ts": {end!r}, "bp": "e"}}',
        )

    def write(self, path: str | Path, axis: str) -> None:
        """Writes the file; ``axis`` says what a microsecond of it is."""
        # A reader takes slices that begin together in the order of the file: the outer one has to come first.
        times = list(zip(self._begins, self._ends))
        order = sorted(range(len(times)), key=times.__getitem__)
        events = ", ".join([self._texts[index] for index in order])
        write_text(Path(path), f'{{"traceEvents": [{events}], "otherData": {{"axis": {_quoted(axis)}}}}}\n')


def _text(value: str | float) -> str:
    if isinstance(value, str):
        return _quoted(value)
    return str(value) if type(value) is int else json.dumps(value)
