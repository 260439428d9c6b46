"""What machine code has logged for the race detector (`native_memory`), handed on in program order.

The shadow unit works the log off while it can (`native_events_code`); an entry that it leaves is reported here as the
Python back end's instructions report it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.memory_order import distinct
from cute_kernels.emulator.native_memory import EVENT, LOG, MemoryTables
from cute_kernels.emulator.sync_point import Row
from cute_kernels.emulator.tmem import rectangle

if TYPE_CHECKING:
    from cute_kernels.emulator.native_shadow import ShadowUnit
    from cute_kernels.emulator.warp import Warp

_ACCESSES = {bit: kind for kind, bit in LOG.items()}
_EVENTS = {bit: name for name, bit in EVENT.items()}


class WarpLog:
    """The log of one warp's execution.

    Attributes:
        instruction: index of the one whose entry is being reported, or was when that raised; -1: none.
    """

    def __init__(self, warp: Warp, tables: MemoryTables) -> None:
        self.warp, self.tables = warp, tables
        self.instruction = -1
        self._unit: ShadowUnit | None = None
        self._context: np.ndarray | None = None

    def enter(self) -> None:
        """The warp is about to execute: what it logs is its own."""
        tracker = self.warp.cluster.tracker
        if tracker is None:
            return
        if self._unit is None:
            self._unit = tracker.unit()
            if self._unit is not None:
                self._context = self._unit.context(tracker, self.warp.agent)
                if self.warp.cluster.units is not None:
                    self.warp.cluster.units.bind(self._unit)
        header = self.tables.header
        header.context = 0 if self._context is None else self._context.ctypes.data
        header.observe = 0 if self._unit is None else self._unit.observe_address

    def report(self) -> None:
        """Tells the race detector what is in the log, which is empty afterwards.

        Raises:
            Race: see `sanitizer` and `tensor_races`.
        """
        if not self.tables.header.log_used:
            return
        log = self.tables.take_log()
        start = 0
        while start < len(log):
            if self._unit is not None:
                start = self._unit.observe(self._context, log, start)
                if start == len(log):
                    break
            start = self._report_first(log, start)
        self.instruction = -1

    def _report_first(self, log: np.ndarray, start: int) -> int:
        """Reports the entry ``start``, without the unit also those like it that follow. Returns the next one."""
        fields = log[start:, :16].view(np.int32)
        kind, mask, argument, self.instruction = fields[0].tolist()
        mask &= 0xFFFFFFFF
        if kind in _ACCESSES:
            end = start + 1
            if self._unit is None:
                others = np.flatnonzero((fields[:, (0, 2)] != fields[0, (0, 2)]).any(axis=1))
                end = start + int(others[0]) if len(others) else len(log)
                if end - start > 1 and _ACCESSES[kind][1] and not distinct(self._accesses(log[start:end])[1]):
                    end = start + 1
            try:
                self._report_accesses(log[start:end], *_ACCESSES[kind], argument)
            except EmulatorError:
                if end - start > 1:  # which of them it was
                    for entry in range(start, end):
                        self.instruction = int(fields[entry - start, 3])
                        self._report_accesses(log[entry : entry + 1], *_ACCESSES[kind], argument)
                raise
            return end
        agent, name = self.warp.agent, _EVENTS[kind]
        if name == "converge":
            agent.converge(mask)
        elif name == "fence_proxy":
            agent.fence_proxy(mask, [row for row, bit in ((Row.PROXY, 1), (Row.PROXY_GLOBAL, 2)) if argument & bit])
        elif name == "tensor_load":
            address, index = log[start, 16:32].view(np.int64).tolist()
            self.warp.cluster.tracker.tensor.load(self.warp, rectangle(address, "32x32b", argument), index)
        elif name == "tensor_wait":
            agent.complete_tensor(argument)
        else:
            (agent.fence_before if argument else agent.fence_after)()
        return start + 1

    def _report_accesses(self, log: np.ndarray, space: str, write: bool, nbytes: int) -> None:
        lanes, addresses = self._accesses(log)
        self.warp.cluster.tracker.generic(self.warp, lanes, space, addresses, nbytes, write)

    @staticmethod
    def _accesses(log: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lanes (int32) and addresses (int64) of entries: one pair for each lane that accesses memory."""
        masks = np.unpackbits(np.ascontiguousarray(log[:, 4:8]), axis=1, bitorder="little").astype(bool)
        rows, lanes = np.nonzero(masks)
        return lanes.astype(np.int32), log[:, 16:].view(np.int64)[rows, lanes]
