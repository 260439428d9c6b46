"""CUDA graphs of a program: launches, and operators of torch in between; captures of streams into them.

Work belongs to a capture if its stream does: the one in which the capture began, and each that has waited for an event
of a stream of the capture. Texts of errors are those of cudaGetErrorString.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from cute_kernels.emulator.captured_launch import CapturedLaunch

DEFAULT = 0
"""Handle of the default stream, which waits for all streams that are not made with cudaStreamNonBlocking."""
NO_POOL = (0, 0)
"""Handle of the memory of graphs, which share none: each keeps what its operators have made."""
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


class Capture:
    """One capture. ``origin``: handle of the stream in which it begins. ``mode``: cudaStreamCaptureMode: "global",
    "thread_local" or "relaxed". ``graph``: that takes what is captured."""

    def __init__(self, origin: int, mode: str, graph: Graph) -> None:
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
        """A stream waits for an event; whether that is a matter of captures alone. Raises RuntimeError: what is
        captured and what is not would depend on each other, or two captures."""
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
        if stream == DEFAULT:
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


class Graph:
    """Stands for torch.cuda.CUDAGraph; a program has a class of its own, with its ``session``."""

    session: Any  # `capturing.Session`
    _launches: list[tuple[int, CapturedLaunch]]  # with the number of operators before each
    _generators: list[object]  # that were registered
    _operators: int | None  # number of those that the device has noted
    _capture: Capture | None  # while it goes on

    def __new__(cls, *_: object, **__: object) -> Graph:
        made = super().__new__(cls)
        made._launches, made._generators, made._operators, made._capture = [], [], None, None
        return made

    def __init__(self, *_: object, **__: object) -> None: ...

    def register_generator_state(self, generator: object) -> None:
        """Replays may draw from a generator of the program, too."""
        self._generators.append(generator)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global", **_: object) -> None:
        """From here on launches in the current stream are remembered instead of executed. Raises RuntimeError: the
        graph has been captured, or the stream is captured already, or is the default one."""
        streams = self.session.streams
        if self._operators is not None:
            raise RuntimeError("this CUDAGraph has been captured: must be a new one, or one after reset()")
        if streams.capture_of(streams.current) is not None:
            raise RuntimeError("a CUDA graph is being captured in this stream: must end before another one begins")
        if streams.current == DEFAULT:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them "
                "on the default stream.)"
            )
        self._operators = self.session.device.call("begin_graph")
        for generator in self._generators:
            self.session.device.call("add_generator", self._operators, generator)
        self._capture = Capture(streams.current, capture_error_mode, self)
        streams.captures.begin(self._capture)

    def capture_end(self) -> None:
        """Launches execute again. Raises RuntimeError: the current stream is not the one in which the capture of the
        graph began; see `Capture.end`."""
        streams, capture = self.session.streams, self._capture
        if capture is None or streams.current != capture.origin:
            raise RuntimeError("this stream does not capture this CUDAGraph: capture_begin() in it comes first")
        try:
            self._end()
        except RuntimeError:
            self.reset()
            raise

    def _end(self) -> None:
        capture, self._capture = self._capture, None
        self.session.device.call("end_graph", self._operators)
        self.session.streams.captures.end(capture)

    def take(self, launch: CapturedLaunch) -> None:
        """Remembers a launch."""
        self._launches.append((self._count(), launch))

    def add_stream(self, stream: int) -> None:
        """Captures what is done in the stream, too."""
        self.session.device.call("capture_stream", self._operators, stream)

    def work(self, stream: int) -> int:
        """How many launches and operators it has of a stream."""
        launches = sum(launch.stream == stream for _, launch in self._launches)
        return launches + self.session.device.call("work_of_graph", self._operators, stream)

    def _count(self) -> int:
        return 0 if self._operators is None else self.session.device.call("operators_of_graph", self._operators)

    def instantiate(self) -> None:
        """Nothing: a graph can be replayed at any time."""

    def enable_debug_mode(self) -> None:
        """Nothing: `debug_dump` writes no file."""

    def debug_dump(self, path: str) -> None:
        """Nothing."""

    def pool(self) -> tuple[int, int]:
        """Handle of its memory."""
        return NO_POOL

    def replay(self) -> None:
        """Executes everything in order, in the current stream. Raises RuntimeError: nothing has been captured."""
        done, session = 0, self.session
        if self._operators is None or self._capture is not None:
            raise RuntimeError("this CUDAGraph has not been captured: capture_begin() and capture_end() come first")
        for before, launch in [*self._launches, (self._count(), None)]:
            if before > done:
                session.device.call("replay_graph", self._operators, done, before)
            done = before
            if launch is not None:
                session.launch(dataclasses.replace(launch, stream=session.streams.current))

    def reset(self) -> None:
        """Forgets the launches and operators, and gives their memory back."""
        if self._capture is not None:
            with contextlib.suppress(RuntimeError):
                self._end()
        self._launches = []
        if self._operators is not None:
            self.session.device.call("free_graph", self._operators)
            self._operators = None

    def __del__(self) -> None:
        self.reset()
