"""Fifth-generation tensor core: words for tcgen05.mma, commit, ld and st, which the core executes.

They are in ``core/tensor_mma.c``, ``commits.c`` and ``tensor_access.c``.

How one instruction adds is in `matrix.arithmetic`: as published models of a B200 have it, or exactly with one rounding.
"""

import ctypes
import functools

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.machine.state.async_engine import AsyncEngine, AsyncOp
from cute_kernels.emulator.machine.state.mbarrier import MBarriers
from cute_kernels.emulator.machine.state.smem import ClusterMemory
from cute_kernels.emulator.machine.state.tmem import TensorAccess, TensorCells, TensorMemory, rectangles
from cute_kernels.emulator.machine.state.warp import WarpState
from cute_kernels.emulator.machine.units.matrix import scaled_mma
from cute_kernels.emulator.machine.units.matrix.arithmetic import EXACTLY, Arithmetic
from cute_kernels.emulator.machine.units.matrix.operands import D_TYPES, KINDS, MmaKind, kind_codes
from cute_kernels.emulator.machine.units.matrix.tensor_mma import TensorMma
from cute_kernels.emulator.races.tracker import RaceTracker

TensorThread, TensorCommit, _TensorMma = (STRUCTURES[name] for name in ("TensorThread", "TensorCommit", "TensorMma"))
#: What the core asks this unit, by number.
ASKED = {
    CONSTANTS[name]: name
    for name in (
        "COMMIT_MASK", "NAME_COMMIT", "COMMITS_MEET", "ADD_STREAM", "TENSOR_REFUSED", "TENSOR_ORDER",
        "MMA_REFUSED", "MMA_FIELDS", "MMA_NAME", "MMA_TOUCHES", "MMA_PRODUCT",
    )
}  # fmt: skip


@functools.lru_cache(maxsize=16)
def core_kinds(arithmetic: Arithmetic) -> ctypes.Array[ctypes.Structure]:
    """All `KINDS` for the core, in their order, and how they add: an array of `MmaKind`."""
    kinds = (MmaKind * len(KINDS))(*map(kind_codes, KINDS))
    for kind, types in zip(kinds, KINDS.values()):
        for number, d_type in enumerate(D_TYPES):
            try:
                sums = arithmetic.sums("tcgen05", next(iter(types.values())).name, d_type)
            except UnsupportedPTX:  # raised again by an instruction that adds so
                kind.sums[number].fraction = CONSTANTS["UNKNOWN_SUMS"]
            else:
                kind.sums[number] = sums.fraction, sums.result, sums.step, sums.lowest
    return kinds


class TensorCore:
    """The tcgen05 pipe of one cluster. ``arithmetic``: how products are added."""

    def __init__(
        self, shared: ClusterMemory, tensor_memories: list[TensorMemory], barriers: MBarriers, engine: AsyncEngine,
        tracker: RaceTracker | None = None, arithmetic: Arithmetic = EXACTLY,
    ) -> None:
        self.arithmetic = arithmetic
        self.shared = shared
        self.tensor_memories = tensor_memories
        self.barriers = barriers
        self.engine = engine
        self.tracker = tracker
        self._threads: ctypes.Array[ctypes.Structure] | None = None
        self._cells = (TensorCells * len(tensor_memories))()
        for rank, memory in enumerate(tensor_memories):
            self._cells[rank] = memory.addresses(tracker.tensor.planes[rank].address if tracker is not None else 0)
        barriers.tables.tensor_cells = ctypes.addressof(self._cells)
        self._kinds = core_kinds(arithmetic)
        barriers.tables.mma_kinds = ctypes.addressof(self._kinds)
        engine.words[CONSTANTS["WORK_TENSOR_COMMIT"]] = self._committed
        engine.words[CONSTANTS["WORK_TENSOR_MMA"]] = self._multiplied
        engine.shared_queues.update((("tcgen05", r), CONSTANTS["TENSOR_QUEUE"] - r) for r in range(len(shared.ctas)))

    def threads_of(self, warps: int) -> None:
        """Makes room for what the core knows of the threads of so many warps."""
        self._threads = (TensorThread * (CONSTANTS["LANES"] * warps))()
        self.barriers.tables.tensor_threads = ctypes.addressof(self._threads)

    def answer(self, what: int, fault: ctypes.Structure, warp: WarpState | None) -> None:
        """Does what the core asks for, a key of `ASKED`. Raises UnsupportedPTX: a mode that is not implemented;
        IllegalAccess: operands or accumulator outside their memories, not allocated or not initialised; a mask of a
        commit is empty or names CTAs outside the cluster; TensorMemoryRace: an earlier access to cells may not be over.
        """
        name = ASKED[what]
        if name.startswith("MMA"):
            self._answer_mma(name, fault, warp)
        elif name in ("TENSOR_REFUSED", "TENSOR_ORDER"):
            self._access(name, TensorAccess.from_address(fault.tensor.record), warp, fault.tensor.index)
        elif name == "COMMIT_MASK":
            message = f"multicast mask {fault.tensor.ctas:#x} in a cluster of {len(self.shared.ctas)} CTAs"
            raise IllegalAccess(message)
        elif name == "NAME_COMMIT":
            thread = TensorThread.from_address(fault.tensor.record)
            label = f"tcgen05.commit issued by {warp.label}"
            if label not in self.barriers.labels:
                self.barriers.labels.append(label)
            thread.label = self.barriers.labels.index(label) + 1
            self._follow(thread, warp, fault.tensor.lane)
        elif name == "COMMITS_MEET":
            self.tracker.note_commits(fault.barrier.address)
        else:
            self.tracker.points[fault.barrier.address].add_stream(fault.barrier.column)

    def _answer_mma(self, name: str, fault: ctypes.Structure, warp: WarpState | None) -> None:
        mma = self._mma(fault.tensor.record)
        match name:
            case "MMA_REFUSED":
                mma.refuse(fault.tensor, self.shared)
            case "MMA_FIELDS":
                mma.decode()
            case "MMA_NAME":
                thread = TensorThread.from_address(fault.tensor.thread)
                thread.text = self.tracker.epochs.text(mma.text)
                self._follow(thread, warp, mma.record.lane)
            case "MMA_TOUCHES":
                mma.check(self.shared, self.tensor_memories)
            case _:
                scaled_mma.multiply(mma, self.shared, self.tensor_memories, self.arithmetic)

    def _follow(self, thread: ctypes.Structure, warp: WarpState, lane: int) -> None:
        """With detectors, gives a thread its stream."""
        if self.tracker is not None:
            self.tracker.enter(warp.agent, lane)
            thread.stream = self.tracker.tensor.stream()

    def _access(self, name: str, access: ctypes.Structure, warp: WarpState, index: int) -> None:
        if name == "TENSOR_REFUSED":
            self.tensor_memories[warp.cta.rank].refuse(warp.index, access)
            return
        for place in rectangles(access):
            if access.write:
                self.tracker.tensor.store(warp.agent, place)
            else:
                self.tracker.tensor.load(warp.agent, place, index)

    def _mma(self, address: int) -> TensorMma:
        record = _TensorMma.from_address(address)
        return TensorMma(record, self.barriers.labels[record.work.warp])

    def _multiplied(self, address: int) -> AsyncOp:
        mma = self._mma(address)
        name = f"mma {mma.record.fields.m}x{mma.record.fields.n}"
        return AsyncOp(("tcgen05", mma.record.rank), None, mma.text, name=name)

    def _committed(self, address: int) -> AsyncOp:
        commit = TensorCommit.from_address(address)
        return AsyncOp(("tcgen05", commit.rank), None, self.barriers.labels[commit.label - 1], name="commit")
