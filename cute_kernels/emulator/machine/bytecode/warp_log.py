"""Accesses that the core has logged for the race detector (`memory_tables`), handed on in program order.

The core works the log off (``core/log.c``); what it finds late is worded as of the entry.
"""

import ctypes

from cute_kernels.emulator.core.layout import STRUCTURES
from cute_kernels.emulator.machine.state.memory_tables import MemoryTables
from cute_kernels.emulator.machine.state.tmem import rectangle
from cute_kernels.emulator.machine.units.sm import Warp

LogEntry = STRUCTURES["LogEntry"]


class WarpLog:
    """The log of one warp's execution. ``instruction``: index of the one whose entry is being reported, or was when
    that raised; -1: none; ``steps``: the `WarpHeader.steps` of the warp at that entry."""

    def __init__(self, warp: Warp, tables: MemoryTables) -> None:
        self.warp, self.tables = warp, tables
        self.instruction, self.steps = -1, 0

    def enter(self) -> None:
        """The warp is about to execute: what it logs is its own."""
        tracker = self.warp.cluster.tracker
        if tracker is not None:
            self.tables.header.context = ctypes.addressof(tracker.context(self.warp.agent))

    def report(self) -> None:
        """Tells the race detector what is in the log, which is empty afterwards. Raises Race: see `races.tracker` and
        `races.tensor_memory`."""
        if not self.tables.header.log_used:
            return
        log, tracker = self.tables.take_log(), self.warp.cluster.tracker
        start = 0
        while (start := tracker.observe(self.warp.agent, log, start, self._stand_at)) < len(log):
            self._load_tensor(LogEntry.from_buffer(log[start]))
            start += 1
        self.instruction = -1

    def _stand_at(self, entry: ctypes.Structure) -> None:
        self.instruction, self.steps = entry.instruction, entry.steps

    def _load_tensor(self, entry: ctypes.Structure) -> None:
        """tcgen05.ld that is not in order at once."""
        self._stand_at(entry)
        address, index = entry.addresses[:2]
        tensor = self.warp.cluster.tracker.tensor
        tensor.load(self.warp.agent, rectangle(address, "32x32b", entry.argument), index)
