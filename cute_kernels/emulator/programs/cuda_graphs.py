"""CUDA graphs of a program: launches, and operators of torch in between."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Protocol

from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.programs.stream_captures import Capture
from cute_kernels.emulator.programs.streams import DEFAULT, Streams

NO_POOL = (0, 0)
"""Handle of the memory of graphs, which share none: each keeps what its operators have made."""


class Device(Protocol):
    """The part of `cuda_device.CudaDevice` that is used here."""

    def call(self, name: str, *arguments: object) -> object:
        """Calls an operator of the device, which notes those of torch in streams that are captured."""


class Session(Protocol):
    """The part of a program's session that is used here."""

    streams: Streams
    device: Device

    def launch(self, launch: CapturedLaunch) -> None:
        """Executes a launch."""


class Graph:
    """Stands for torch.cuda.CUDAGraph; a program has a class of its own, with its ``session``."""

    session: Session
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
        """From here on launches in the current stream are remembered instead of executed.

        Raises:
            RuntimeError: the graph has been captured, or the stream is captured already, or is the default one.
        """
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
        """Launches execute again.

        Raises:
            RuntimeError: the current stream is not the one in which the capture of the graph began; see `Capture.end`.
        """
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
