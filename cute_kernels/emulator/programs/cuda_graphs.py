"""CUDA graphs of a program."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Protocol

from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.programs.streams import Streams

NO_POOL = (0, 0)
"""Handle of the memory of graphs, which are given none: they hold launches on memory that programs have."""


class Session(Protocol):
    """The part of a program's session that is used here."""

    graph: Graph | None
    streams: Streams

    def launch(self, launch: CapturedLaunch) -> None:
        """Executes a launch."""


class Graph:
    """A CUDA graph of kernel launches; a program has a class of its own, with its ``session``."""

    session: Session
    launches: list[CapturedLaunch]

    def __new__(cls, *_: object, **__: object) -> Graph:
        made = super().__new__(cls)
        made.launches = []
        return made

    def __init__(self, keep_graph: bool = False) -> None: ...

    def capture_begin(self, *_: object, **__: object) -> None:
        """From here on launches are remembered instead of executed."""
        self.session.graph = self

    def capture_end(self) -> None:
        """Launches execute again."""
        self.session.graph = None

    def pool(self) -> tuple[int, int]:
        """Handle of its memory."""
        return NO_POOL

    def replay(self) -> None:
        """Executes the remembered launches in order, in the current stream."""
        for launch in self.launches:
            self.session.launch(dataclasses.replace(launch, stream=self.session.streams.current))

    def reset(self) -> None:
        """Forgets the launches."""
        self.launches = []

    @contextlib.contextmanager
    def captured(self, *_: object, **__: object) -> Iterator[None]:
        """Remembers what is launched inside, behind everything: torch.cuda.graph synchronises the device first."""
        self.session.streams.host_waits()
        self.capture_begin()
        try:
            yield
        finally:
            self.capture_end()
