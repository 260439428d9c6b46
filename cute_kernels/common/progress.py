"""One line on a terminal that says how far a command is."""

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

_EVERY = 0.1  # seconds


class ProgressLine:
    """Writes over itself; silent where the stream is no terminal. A context that clears the line at its end.
    ``stream``: default: stderr; ``shown``: whether it is shown on a terminal."""

    def __init__(self, stream: TextIO | None = None, *, shown: bool = True) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._shown = shown and self._stream is not None and self._stream.isatty()
        self._last = 0.0

    def show(self, text: str, share: float | None = None) -> None:
        """Shows the text, behind a bar if ``share`` of the work, 0 to 1, is known."""
        now = time.monotonic()
        if not self._shown or now - self._last < _EVERY:
            return
        self._last = now
        bar = ""
        if share is not None:
            full = round(20 * min(max(share, 0.0), 1.0))
            bar = f"[{'#' * full}{'.' * (20 - full)}] "
        self._stream.write(f"\r\x1b[K{bar}{text}")
        self._stream.flush()

    def print(self, text: str) -> None:
        """A line that stays, on the stream, above the one that changes; terminal or not."""
        if self._stream is not None:
            self._stream.write(("\r\x1b[K" if self._shown else "") + text + "\n")
            self._stream.flush()

    def row(self, text: str) -> None:
        """A line that stays, above the one that changes; silent where the stream is no terminal."""
        if self._shown:
            self.print(text)

    def following(self, count: int, text: Callable[[Any], str]) -> Callable[[Any], None]:
        """A function that shows each of ``count`` results, ``text`` of it, and how many are known."""
        done = itertools.count(1)

        def seen(result: Any) -> None:
            number = next(done)
            self.row(text(result))
            self.show(f"{number}/{count}", number / count)

        return seen

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
