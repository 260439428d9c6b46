"""One cluster without a program that issues bulk copies, for tests of the unit."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.machine.state import access_faults
from cute_kernels.emulator.machine.state.async_engine import AsyncEngine
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.state.memory_tables import STATES
from cute_kernels.emulator.machine.state.smem import PARAM_WINDOW, ClusterMemory, SharedMemory, shared_address
from cute_kernels.emulator.machine.units.copies import bulk
from cute_kernels.emulator.machine.units.copies.reductions import OPERATIONS
from cute_kernels.testing.ptx import aligned
from tests.emulator.barriers import Barriers
from tests.emulator.crew import Crew, converge

SHARED_BYTES = 1 << 14
BARRIER, DATA = 1024, 2048


class Machine:
    """One cluster whose first warp issues bulk copies, with an mbarrier initialised for one arrival in every CTA."""

    def __init__(self, memory: np.ndarray, ctas: int = 1, policy: str = "eager", detectors: bool = True) -> None:
        self.gmem = GlobalMemory()
        self.gmem.register_tensor(memory, "memory")
        size = DATA + SHARED_BYTES
        self.crew = Crew([size] * ctas, [0, min(ctas - 1, 1)], self.gmem) if detectors else None
        tracker = self.crew.tracker if detectors else None
        self.ctas = [SharedMemory(size, rank) for rank in range(ctas)]
        self.shared = ClusterMemory(self.ctas)
        self.barriers = Barriers(self.shared)
        self.barriers.labels.append("warp 0")
        self.engine = AsyncEngine(policy, random.Random(0), tables=self.barriers.address)
        self.engine.reraise = self.barriers.reraise
        self.params = aligned(np.zeros(128, np.uint8))  # where the tensor map is
        warps = [SimpleNamespace(number=0)]
        self.cluster = SimpleNamespace(
            barriers=self.barriers, engine=self.engine, tracker=tracker, gmem=self.gmem, memory=self.shared,
            params=self.params, ctas=[SimpleNamespace(warps=warps) for _ in range(ctas)],
        )  # fmt: skip
        self.bulk = bulk.BulkUnit(self.cluster)
        self.header, self.barriers.ask = self.barriers.tables, self._ask
        self.header.work, self.header.flags = self.engine.address, STATES
        self.header.params = self.params.ctypes.data
        if detectors:
            self.context = tracker.context(self.crew[0].agent)
            self.header.context = ctypes.addressof(self.context)
            tracker.launch.track_all()
        for rank in range(ctas):
            address = shared_address(rank, BARRIER)
            self.barriers.init(address, 1)
            if detectors:
                self.barriers.watch(address, tracker.initialise(self.crew[0].agent, address))
        if detectors and ctas > 1:
            converge(self.crew[0].agent, 1)

    def _ask(self, what: int) -> bool:
        fault, tracker = self.header.fault, self.cluster.tracker
        if what in bulk.ASKED:
            self.bulk.answer(what, fault.bulk, self.crew and self.crew[0])
        elif what == CONSTANTS["RACE_RAISED"]:
            tracker.unit.reraise()
        elif what in access_faults.FAULTS:
            raise access_faults.fault(what, fault.access, self.shared, self.gmem, None)
        else:
            raise (tracker and tracker.fault(what, fault.barrier, self.crew[0].agent)) or self.barriers.fault(what)
        return True

    def fill(self, data: np.ndarray, rank: int = 0) -> None:
        self.shared.view(shared_address(rank, DATA), len(data), write=True)[...] = data

    def load(
        self, descriptor: bytes, coords: Sequence[int], destination: int, barrier: int, *, cta_group: int | None = None,
        multicast: int | None = None, offsets: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """cp.async.bulk.tensor to shared memory."""
        copy = self.tensor_copy(bulk.LOAD, descriptor, coords, destination)
        copy.signal, copy.mask, copy.pair = barrier, -1 if multicast is None else multicast, cta_group == 2
        copy.mode = CONSTANTS["MODE_TILED" if offsets is None else "MODE_PIXELS"]
        copy.offsets[: len(offsets or ())] = offsets or ()
        self.issue(copy)

    def store(
        self, descriptor: bytes, coords: Sequence[int], source: int, *, im2col: bool = False, reduction: str = ""
    ) -> None:
        """cp.async.bulk.tensor, or cp.reduce.async.bulk.tensor, from shared memory by one thread."""
        copy = self.tensor_copy(bulk.STORE, descriptor, coords, source)
        copy.mode = CONSTANTS["MODE_PIXELS" if im2col else "MODE_TILED"]
        copy.reduction, copy.mask, copy.signal = OPERATIONS.index(reduction), -1, -1
        copy.thread = ctypes.addressof(self.thread())
        self.issue(copy)

    def tensor_copy(self, kind: int, descriptor: bytes, coords: Sequence[int], shared: int) -> ctypes.Structure:
        """A tiled copy of a kind, in part."""
        self.params[:] = np.frombuffer(descriptor, np.uint8)
        copy = bulk.BulkCopy(kind=kind, rank=len(coords), other=PARAM_WINDOW, shared=shared)
        copy.coordinates[: len(coords)] = [int(c) for c in coords]
        return copy

    def issue(self, copy: ctypes.Structure) -> None:
        """Any `BulkCopy`."""
        regions = np.array([(r.start, r.end, r.writable) for r in self.gmem.regions()], np.int64)
        self.header.regions, self.header.region_table = len(regions), regions.ctypes.data
        copy.work.place = -1
        if library().bulk_copy(self.barriers.address, ctypes.addressof(copy)):
            self.barriers.reraise()
        self._regions = regions  # for what takes effect later

    # --- bulk groups of the thread ------------------------------------------------------------------------------------

    def thread(self) -> ctypes.Structure:
        columns = (0, 0) if self.crew is None else self.crew.tracker.bulk_columns(self.crew[0].agent, 0)
        return self.bulk.thread((0, 0, 0), columns)

    def commit(self) -> None:
        library().bulk_commit(ctypes.addressof(self.thread()))

    def go_on_until(self, done: Callable[[], bool]) -> None:
        """Asynchronous work takes effect, and no more than has to."""
        while not done():
            assert self.engine.step()

    def waits(self, newest: int, read: bool) -> Callable[[], bool]:
        """Whether a wait for all but the newest groups ends."""
        return lambda: self.bulk.wait_satisfied((0, 0, 0), newest, read)
