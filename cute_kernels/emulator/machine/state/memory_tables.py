"""The tables that the core finds the memories and units of a cluster by, and the exchange area of a launch.

A launch has one exchange area of 256-byte rows, through which calls of Python get operands and results.
"""

import ctypes

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.state.mbarrier import MBarriers

ROW = CONSTANTS["EXCHANGE_ROW"]  # bytes: 32 lanes of 64 bits
#: Flags of the tables.
STATES, SPURIOUS = CONSTANTS["STATES"], CONSTANTS["SPURIOUS"]
#: Kinds of entries of the log for the race detector, and flags of the tables that ask for them.
LOG = {
    (space, write): CONSTANTS[f"LOG_{space.upper()}_{'WRITE' if write else 'READ'}"]
    for space in ("shared", "global") for write in (False, True)
}  # fmt: skip
TENSOR_LOAD = CONSTANTS["LOG_TENSOR_LOAD"]
LOG_ENTRY = ctypes.sizeof(STRUCTURES["LogEntry"])
_LOG_ENTRIES = 64  # a few: what is worked off soon is still in the cache


class MemoryTables:
    """The memories of a cluster, as the core knows them. ``address``: of the tables. ``header``: the tables, a
    `Tables`, which `MBarriers` has made. ``cta``: what they know of the shared memory of a CTA, a `Cta`."""

    def __init__(self, barriers: MBarriers, gmem: GlobalMemory, params: bytes, flags: int) -> None:
        self.warp_mmas: ctypes.Array[ctypes.Structure] | None = None  # forms of mma.sync, whose address the header has
        self.header, self.address, self.cta = barriers.tables, barriers.address, barriers.cta
        regions = gmem.regions()
        self._regions = np.array([(r.start, r.end, r.writable) for r in regions] or [(0, 0, 0)], np.int64)
        self._params = np.frombuffer(params or b"\0", np.uint8)
        self._log = np.zeros((_LOG_ENTRIES if flags & ~STATES else 0, LOG_ENTRY), np.uint8)
        header = self.header
        header.flags = flags
        header.regions, header.region_table = len(regions), self._regions.ctypes.data
        header.params, header.param_bytes = self._params.ctypes.data, len(params)
        header.log, header.log_size = self._log.ctypes.data, len(self._log)

    def take_log(self) -> np.ndarray:
        """Takes what is logged and not worked off, uint8 [n, LOG_ENTRY], in order; the log is empty afterwards."""
        done, used = self.header.log_done, self.header.log_used
        self.header.log_done = self.header.log_used = 0
        return self._log[done:used]


def exchange_area(rows: int) -> tuple[np.ndarray, int]:
    """(uint8 [rows * ROW], its address), on a cache line."""
    raw = np.zeros(rows * ROW + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    area = raw[skip : skip + rows * ROW]
    return area, area.ctypes.data


CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_uint32)
