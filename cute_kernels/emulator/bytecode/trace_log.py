"""Events of the core that a timeline shows (``core/trace.h``), told to it in the order of the program.

The core notes an event as it happens. Python takes all of them whenever it is called, for one where there is no room
for more. So none is lost, and what Python and the core do stays in order. An event has the numbers that later ones
change: steps of the warp, the state of an mbarrier. All else is as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.state.mbarrier import OPERATIONS

if TYPE_CHECKING:
    from cute_kernels.emulator.state.memory_tables import MemoryTables
    from cute_kernels.emulator.units.sm import Cluster, Warp

_Event = STRUCTURES["TraceEvent"]
_ROOM = 256  # events: more than an operation makes


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
        self._tell: dict[int, Callable[[Warp, Sequence[int]], None]] = {
            CONSTANTS["TRACE_PASSED"]: self._passed,
            CONSTANTS["TRACE_MBARRIER"]: self._mbarrier,
            CONSTANTS["TRACE_NAMED"]: self._named,
        }

    def report(self, warp: Warp) -> None:
        """Tells the timeline what the warp that runs did in the core."""
        events = self._events[: self._header.trace_used].tolist()
        self._header.trace_used = 0
        for kind, instruction, steps, *values in events:
            self._trace.at((steps, instruction))
            self._tell[kind](warp, values)
        self._trace.at(None)

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

    def _named(self, warp: Warp, values: Sequence[int]) -> None:
        _, number, _, _, generation, *_ = values
        self._trace.release(warp.cta.named.barrier(number).key, generation)
