"""CUDA graphs of a program: launches, and operators of torch in between."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.programs.streams import Streams

NO_POOL = (0, 0)
"""Handle of the memory of graphs, which share none: each keeps what its operators have made."""


class Device(Protocol):
    """The part of `cuda_device.CudaDevice` that is used here."""

    def call(self, name: str, *arguments: object) -> object:
        """Calls an operator of the device, which notes those of torch while this thread captures."""


class Session(Protocol):
    """The part of a program's session that is used here."""

    graph: Graph | None
    streams: Streams
    device: Device

    def launch(self, launch: CapturedLaunch) -> None:
        """Executes a launch."""


class Graph:
    """Stands for torch.cuda.CUDAGraph; a program has a class of its own, with its ``session``."""

    session: Session
    _launches: list[tuple[int, CapturedLaunch]]  # with the number of operators before each
    _operators: int | None  # number of those that the device has noted

    def __new__(cls, *_: object, **__: object) -> Graph:
        made = super().__new__(cls)
        made._launches, made._operators = [], None
        return made

    def __init__(self, *_: object, **__: object) -> None: ...

    def capture_begin(self, *_: object, **__: object) -> None:
        """From here on launches are remembered instead of executed."""
        if self._operators is not None:
            raise RuntimeError("this CUDAGraph has been captured: must be a new one, or one after reset()")
        if self.session.graph is not None:
            raise RuntimeError("a CUDA graph is being captured in this thread: must end before another one begins")
        self._operators = self.session.device.call("begin_graph")
        self.session.graph = self

    def capture_end(self) -> None:
        """Launches execute again. Raises RuntimeError: this thread does not capture the graph."""
        if self.session.graph is not self:
            raise RuntimeError("this thread does not capture this CUDAGraph: capture_begin() comes first")
        self.session.graph = None
        self.session.device.call("end_graph")

    def take(self, launch: CapturedLaunch) -> None:
        """Remembers a launch."""
        self._launches.append((self._count(), launch))

    def _count(self) -> int:
        return 0 if self._operators is None else self.session.device.call("operators_of_graph", self._operators)

    def instantiate(self) -> None:
        """Nothing: a graph can be replayed at any time."""

    def enable_debug_mode(self) -> None:
        """Nothing: there is no file to dump."""

    def pool(self) -> tuple[int, int]:
        """Handle of its memory."""
        return NO_POOL

    def replay(self) -> None:
        """Executes everything in order, in the current stream. Raises RuntimeError: nothing has been captured."""
        done, session = 0, self.session
        if self._operators is None or session.graph is self:
            raise RuntimeError("this CUDAGraph has not been captured: capture_begin() and capture_end() come first")
        for before, launch in [*self._launches, (self._count(), None)]:
            if before > done:
                session.device.call("replay_graph", self._operators, done, before)
            done = before
            if launch is not None:
                session.launch(dataclasses.replace(launch, stream=session.streams.current))

    def reset(self) -> None:
        """Forgets the launches and operators, and gives their memory back."""
        self._launches = []
        if self._operators is not None:
            self.session.device.call("free_graph", self._operators)
            self._operators = None

    def __del__(self) -> None:
        self.reset()
