"""Events of the core that a timeline shows (``core/trace.h``), told to it in the order of the program.

The core notes an event as it happens, and leaves the operation to Python where there is no room for more: Python takes
all events first, whenever it is called. So none is lost, and what Python and the core do stays in order. An event has
the numbers that later ones change: steps of the warp, the state of an mbarrier. All else is as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.observe.trace import Flight
from cute_kernels.emulator.state.mbarrier import OPERATIONS

if TYPE_CHECKING:
    from cute_kernels.emulator.state.memory_tables import MemoryTables
    from cute_kernels.emulator.units.sm import Cluster, Warp

_Event = STRUCTURES["TraceEvent"]
_ROOM = 256  # events: more than an operation makes
_WARPGROUP = CONSTANTS["WGMMA_WARPS"]


class TraceLog:
    """Log of the events of one cluster.

    Args:
        cluster: what runs; it has a timeline.
        tables: where the core finds room.
    """

    def __init__(self, cluster: Cluster, tables: MemoryTables) -> None:
        self._cluster, self._trace, self._header = cluster, cluster.trace, tables.header
        self._events = np.zeros((_ROOM, ctypes.sizeof(_Event) // 8), np.int64)
        self._header.trace, self._header.trace_size = self._events.ctypes.data, _ROOM
        self._names: dict[tuple[int, int], tuple[str, str]] = {}  # of wgmmas, by form and CTA
        self._tell: dict[int, Callable[[Warp, Sequence[int]], Flight | None]] = {
            CONSTANTS[f"TRACE_{name}"]: function
            for name, function in (
                ("PASSED", self._passed), ("MBARRIER", self._mbarrier),
                ("WGMMA", self._wgmma), ("NAMED", self._named),
            )
        }  # fmt: skip

    def report(self, warp: Warp) -> None:
        """Tells the timeline what the warp that runs did in the core."""
        events = self._events[: self._header.trace_used].tolist()
        self._header.trace_used = 0
        flight, trace = None, self._trace
        for kind, instruction, steps, *values in events:
            if flight is not None:
                trace.finish(flight)
            trace.at((steps, instruction))
            flight = self._tell[kind](warp, values)
        if flight is not None:
            trace.finish(flight)
        trace.at(None)

    def _passed(self, warp: Warp, values: Sequence[int]) -> None:
        address, state, _, parity, *_ = values
        self._trace.step(f"passed {self._trace.barrier(address)}", **{"parity" if parity else "phase": state})

    def _mbarrier(self, warp: Warp, values: Sequence[int]) -> None:
        address, operation, _, completed, phase, pending, tx, arriver = values
        barrier = self._cluster.barriers.describe_as(address, phase, pending, tx, arriver)
        name = OPERATIONS[operation].removeprefix("mbarrier.")
        self._trace.step(f"{name} {self._trace.barrier(address)}", barrier=barrier)
        if completed:
            self._trace.release(("mbarrier", address), phase + (operation == CONSTANTS["ARRIVE_EXPECT_TX"]))

    def _take_effect(self, name: str, what: str, queue: tuple[str, ...]) -> Flight:
        """An operation that takes effect as soon as it is issued; what it completes is told next."""
        flight = self._trace.issue(name, what, queue)
        self._trace.take_effect(flight)
        return flight

    def _wgmma(self, warp: Warp, values: Sequence[int]) -> Flight:
        _, form, _, _, complete, *_ = values
        key = form, warp.cta.rank
        if key not in self._names:
            self._names[key] = self._cluster.wgmma.core.names(*key)
        queue = ("wgmma", warp.cta.rank, warp.index // _WARPGROUP)
        flight = self._take_effect(*self._names[key], queue)
        self._trace.release(queue, complete)
        return flight

    def _named(self, warp: Warp, values: Sequence[int]) -> None:
        _, number, _, _, generation, *_ = values
        self._trace.release(warp.cta.named.barrier(number).key, generation)
