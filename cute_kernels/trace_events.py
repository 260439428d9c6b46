"""Events of a timeline in Chrome's JSON trace format, which https://ui.perfetto.dev opens: tracks, slices and arrows.

The axis is in microseconds; what one stands for, whoever records says in the note of the file.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Track:
    """A row of the picture: threads of one process stand together."""

    process: int
    thread: int


class TraceEvents:
    """Collects events.

    Attributes:
        events: as the format has them, in the order in which they were added.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._flows = itertools.count(1)

    def name(self, kind: str, track: Track, name: str) -> None:
        """Names a process (``kind`` "process") or a thread of it ("thread"); they are shown in the order of numbers."""
        base = {"ph": "M", "pid": track.process, "tid": track.thread}
        self.events.append({**base, "name": f"{kind}_name", "args": {"name": name}})
        index = track.process if kind == "process" else track.thread
        self.events.append({**base, "name": f"{kind}_sort_index", "args": {"sort_index": index}})

    def slice(self, track: Track, name: str, category: str, begin: float, end: float, **details: Any) -> None:
        """Something that lasts from ``begin`` to ``end``."""
        self.events.append(
            {"ph": "X", "name": name, "cat": category, "pid": track.process, "tid": track.thread, "ts": begin,
             "dur": end - begin, "args": details}
        )  # fmt: skip

    def flow(self, name: str, source: tuple[Track, float], target: tuple[Track, float]) -> None:
        """An arrow between two places, each inside a slice."""
        number = next(self._flows)
        for phase, (track, time) in (("s", source), ("f", target)):
            event = {"ph": phase, "id": number, "name": name, "cat": name, "pid": track.process, "tid": track.thread}
            self.events.append({**event, "ts": time, **({"bp": "e"} if phase == "f" else {})})

    def write(self, path: str | Path, axis: str) -> None:
        """Writes the file; ``axis`` says what a microsecond of it is."""
        # A reader takes slices that begin together in the order of the file: the outer one has to come first.
        events = sorted(self.events, key=lambda event: (event.get("ts", -1), -event.get("dur", 0)))
        Path(path).write_text(json.dumps({"traceEvents": events, "otherData": {"axis": axis}}) + "\n")
