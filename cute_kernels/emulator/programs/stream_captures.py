"""Captures of streams into CUDA graphs: which streams belong to one, and what a capture does not permit.

Work belongs to a capture if its stream does: the one in which the capture began, and each that has waited for an event
of a stream of the capture. Texts of errors are those of cudaGetErrorString.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from cute_kernels.emulator.captured_launch import CapturedLaunch

Clock = dict[int, int]
"""Per stream, how many of its launches are over."""

_WAITS = "operation not permitted when stream is capturing"
_INVALID = "operation failed due to a previous error during capture"
_MERGE = "operation would result in a merge of separate capture sequences"
_UNJOINED = "capturing stream has unjoined work"
_ISOLATION = "dependency created on uncaptured work in another stream"
_IMPLICIT = "operation would make the legacy stream depend on a capturing blocking stream"
_CAPTURED_EVENT = "operation not permitted on an event last recorded in a capturing stream"


def joined(*clocks: Clock) -> Clock:
    """The clock by which is over whatever is over by one of these."""
    found: Clock = {}
    for clock in clocks:
        for stream, tick in clock.items():
            found[stream] = max(found.get(stream, 0), tick)
    return found


class Holder(Protocol):
    """A CUDA graph that holds what is captured."""

    def take(self, launch: CapturedLaunch) -> None:
        """Remembers a launch."""

    def work(self, stream: int) -> int:
        """How many launches and operators it has of a stream."""

    def add_stream(self, stream: int) -> None:
        """A stream becomes a part of the capture."""

    def reset(self) -> None:
        """Ends the capture, and forgets it."""


class Capture:
    """One capture.

    Args:
        origin: handle of the stream in which it begins.
        mode: cudaStreamCaptureMode: "global", "thread_local" or "relaxed".
        graph: that takes what is captured.
    """

    def __init__(self, origin: int, mode: str, graph: Holder) -> None:
        self.origin, self.graph, self._mode = origin, graph, mode
        self._thread = threading.get_ident()
        self._clocks: dict[int, Clock] = {origin: {}}
        self._error = ""
        self.is_over = False
        graph.add_stream(origin)

    def __contains__(self, stream: int) -> bool:
        return stream in self._clocks

    def reached(self, stream: int) -> Captured:
        """The work that an event waits for which is recorded now in a stream of it."""
        return Captured(self, {**self._clocks[stream], stream: self.graph.work(stream)})

    def wait(self, stream: int, clock: Clock) -> None:
        """A stream waits for an event of it, and belongs to it from now on."""
        if stream not in self._clocks:
            self.graph.add_stream(stream)
        self._clocks[stream] = joined(self._clocks.get(stream, {}), clock)

    def forbids_waits(self) -> bool:
        """Whether this thread must not wait for what the capture has nothing to do with."""
        return self._mode == "global" or self._mode == "thread_local" and self._thread == threading.get_ident()

    def fail(self, error: str, what: str) -> NoReturn:
        """Raises RuntimeError. The capture cannot end well any more."""
        self._error = f"{error}: {what}"
        raise RuntimeError(f"CUDA error: {self._error}")

    def end(self) -> None:
        """Raises RuntimeError: something that it does not permit came before; a stream of it has work that the stream
        in which it began does not wait for."""
        self.is_over = True
        if self._error:
            raise RuntimeError(f"CUDA error: {_INVALID}: {self._error}")
        over = self.reached(self.origin).clock
        for stream in self._clocks:
            if self.graph.work(stream) > over.get(stream, 0):
                raise RuntimeError(
                    f"CUDA error: {_UNJOINED}: stream {self.origin:#x}, in which the capture began, does not wait for "
                    f"what was captured in stream {stream:#x}: wait_stream() or wait_event() must come before the end"
                )


@dataclass(frozen=True)
class Captured:
    """The work that an event waits for which was recorded in a stream of a capture."""

    capture: Capture
    clock: Clock


class Captures:
    """All captures that have begun and are not over."""

    def __init__(self) -> None:
        self._all: list[Capture] = []

    def begin(self, capture: Capture) -> None:
        """A capture begins."""
        self._all.append(capture)

    def end(self, capture: Capture) -> None:
        """A capture is over. Raises RuntimeError as `Capture.end` does."""
        self._all = [each for each in self._all if each is not capture]
        capture.end()

    def abandon(self) -> None:
        """The program ends."""
        while self._all:
            self._all.pop().graph.reset()

    def __bool__(self) -> bool:
        return bool(self._all)

    def of(self, stream: int) -> Capture | None:
        """The one to which a stream belongs."""
        return next((each for each in self._all if stream in each), None)

    def wait(self, stream: int, point: Clock | Captured) -> bool:
        """A stream waits for an event; whether that is a matter of captures alone.

        Raises:
            RuntimeError: what is captured and what is not would depend on each other, or two captures.
        """
        own = self.of(stream)
        if not isinstance(point, Captured):
            if own is not None and point:
                own.fail(_ISOLATION, "a stream that is captured waits for one that is not, or for an event of before")
            return own is not None
        capture = point.capture
        if capture.is_over:
            raise RuntimeError(f"CUDA error: {_CAPTURED_EVENT}, whose capture is over")
        if own not in (None, capture):
            own.fail(_MERGE, "a stream that is captured waits for one of another capture")
        if stream == 0:
            capture.fail(_IMPLICIT, "the default stream waits for one that is captured")
        capture.wait(stream, point.clock)
        return True

    def check_wait(self, name: str, streams: Iterable[int] | None) -> None:
        """Raises RuntimeError: the host must not wait for these streams now, or for all; ``name``: who does."""
        if not self._all:
            return
        for capture in self._all:
            if streams is None or any(stream in capture for stream in streams) or capture.forbids_waits():
                capture.fail(_WAITS, f"{name} makes the host wait for the device while a CUDA graph is captured")

    def check_event(self, point: object) -> None:
        """Raises RuntimeError: the host must not wait for an event of a capture."""
        if isinstance(point, Captured):
            what = "the host waits for it"
            if point.capture.is_over:
                raise RuntimeError(f"CUDA error: {_CAPTURED_EVENT}: {what}")
            point.capture.fail(_CAPTURED_EVENT, what)
