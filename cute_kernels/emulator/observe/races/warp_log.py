"""Accesses that the core has logged for the race detector (`memory_tables`), handed on in program order.

The core works the log off while it can (``core/log.c``); an entry that it leaves is reported here as the functions of
sites report accesses.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.observe.races.memory_order import lane_vector, orders
from cute_kernels.emulator.state.memory_tables import LOG, MemoryTables
from cute_kernels.emulator.state.tmem import rectangle

if TYPE_CHECKING:
    from cute_kernels.emulator.observe.races.shadow_unit import ShadowUnit
    from cute_kernels.emulator.state.warp import Warp

_ACCESSES = {bit: kind for kind, bit in LOG.items()}
_TOGETHER, _STRONG = CONSTANTS["LOG_TOGETHER"], CONSTANTS["LOG_STRONG"]


class WarpLog:
    """The log of one warp's execution.

    Attributes:
        instruction: index of the one whose entry is being reported, or was when that raised; -1: none.
        steps: the `WarpHeader.steps` of the warp at that entry.
    """

    def __init__(self, warp: Warp, tables: MemoryTables) -> None:
        self.warp, self.tables = warp, tables
        self.instruction, self.steps = -1, 0
        self._unit: ShadowUnit | None = None  # from the first time that the warp executes
        self._context: ctypes.Structure | None = None

    def enter(self) -> None:
        """The warp is about to execute: what it logs is its own."""
        tracker = self.warp.cluster.tracker
        if tracker is None:
            return
        if self._unit is None:
            self._unit = tracker.unit
            self._context = self._unit.context(tracker, self.warp.agent)
        self.tables.header.context = ctypes.addressof(self._context)

    def report(self) -> None:
        """Tells the race detector what is in the log, which is empty afterwards.

        Raises:
            Race: see `races.tracker` and `races.tensor_memory`.
        """
        if not self.tables.header.log_used:
            return
        log = self.tables.take_log()
        start = 0
        while start < len(log):
            start = self._unit.observe(self._context, log, start)
            if start == len(log):
                break
            self._report_entry(log[start])
            start += 1
        self.instruction = -1

    def _report_entry(self, entry: np.ndarray) -> None:
        """Reports one entry, uint8 [LOG_ENTRY]."""
        kind, mask, argument, self.instruction = entry[:16].view(np.int32).tolist()
        mask &= 0xFFFFFFFF
        addresses = entry[16:].view(np.int64)
        self.steps = int(addresses[-1])
        access = _ACCESSES.get(kind & ~(_TOGETHER | _STRONG))
        if access is not None:
            (space, write), tracker = access, self.warp.cluster.tracker
            lanes = lanes_of = lane_vector(mask)
            if kind & _TOGETHER:
                lanes = int(lanes[0]) if len(lanes) == 1 else -1
                lanes_of = lanes_of[:1]
            strong, places = bool(kind & _STRONG), addresses[lanes_of]
            tracker.generic(self.warp, lanes, space, places, argument & 0xFF, write, strong)
            if strong:
                tracker.strong(self.warp, mask, space, places.tolist(), *orders(argument))
            return
        address, index = addresses[:2].tolist()
        self.warp.cluster.tracker.tensor.load(self.warp, rectangle(address, "32x32b", argument), index)
