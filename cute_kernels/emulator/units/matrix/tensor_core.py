"""Fifth-generation tensor core: tcgen05.mma on operands in shared memory, accumulators in tensor memory.

How one instruction adds is in `matrix.arithmetic`: as published models of a B200 have it, or exactly with one rounding.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.observe.counters import UnitCounters
from cute_kernels.emulator.observe.races.tracker import RaceTracker
from cute_kernels.emulator.state.async_engine import AsyncEngine, AsyncOp
from cute_kernels.emulator.state.mbarrier import MBarriers
from cute_kernels.emulator.state.smem import ClusterMemory
from cute_kernels.emulator.state.tmem import TensorAccess, TensorCells, TensorMemory, rectangles
from cute_kernels.emulator.units.matrix.arithmetic import EXACTLY, Arithmetic
from cute_kernels.emulator.units.matrix.dense_mma import Mma
from cute_kernels.emulator.units.matrix.operands import decode_instruction
from cute_kernels.emulator.units.matrix.scaled_mma import ScaledMma, Scales, decode_scaled

if TYPE_CHECKING:
    from cute_kernels.emulator.state.warp import WarpState

CommitThread, TensorCommit = STRUCTURES["CommitThread"], STRUCTURES["TensorCommit"]
#: What the core asks this unit.
ASKED = {
    CONSTANTS[name]
    for name in ("COMMIT_MASK", "NAME_COMMIT", "COMMITS_MEET", "ADD_STREAM", "TENSOR_REFUSED", "TENSOR_ORDER")
}
_MOST_KNOWN = 4096  # MMAs that are kept; a kernel repeats those of its pipeline's stages


def mma_text(kind: str, cta_group: int, who: str) -> str:
    """Name in reports of the MMAs of this kind, ``who`` as in "by warp 1"."""
    return f"tcgen05.mma.cta_group::{cta_group}.kind::{kind} issued {who}"


class TensorCore:
    """The tcgen05 pipe of one cluster.

    Attributes:
        instructions: MMAs executed so far.
        meter: hears of every MMA that is issued, or None.
        arithmetic: how products are added.
    """

    def __init__(
        self,
        shared: ClusterMemory,
        tensor_memories: list[TensorMemory],
        barriers: MBarriers,
        engine: AsyncEngine,
        tracker: RaceTracker | None = None,
        meter: UnitCounters | None = None,
        arithmetic: Arithmetic = EXACTLY,
    ) -> None:
        self.meter, self.arithmetic = meter, arithmetic
        self.shared = shared
        self.tensor_memories = tensor_memories
        self.barriers = barriers
        self.engine = engine
        self.tracker = tracker
        self.instructions = 0
        self._known: dict[tuple[object, ...], Mma] = {}
        self._threads: ctypes.Array[CommitThread] | None = None
        self._cells = (TensorCells * len(tensor_memories))()
        for rank, memory in enumerate(tensor_memories):
            self._cells[rank] = memory.addresses(tracker.tensor.planes[rank].address if tracker is not None else 0)
        barriers.tables.tensor_cells = ctypes.addressof(self._cells)
        engine.words[CONSTANTS["WORK_TENSOR_COMMIT"]] = self._committed
        engine.shared_queues.update((("tcgen05", r), CONSTANTS["TENSOR_QUEUE"] - r) for r in range(len(shared.ctas)))

    def commits_of(self, warps: int) -> None:
        """Makes room for what the core knows of the threads of so many warps that commit."""
        self._threads = (CommitThread * (CONSTANTS["LANES"] * warps))()
        self.barriers.tables.commit_threads = ctypes.addressof(self._threads)

    def mma(
        self,
        *,
        kind: str,
        cta_group: int,
        rank: int,
        d: int,
        a: int,
        b: int,
        instruction: int,
        accumulate: bool,
        a_in_tmem: bool = False,
        scales: Scales | None = None,
        describe: str = "",
    ) -> None:
        """tcgen05.mma.cta_group.kind [d], a-desc, b-desc, idesc, enable-input-d, with block scaling or without.

        With cta_group::2 each CTA of the pair holds half of the rows of A, half of the rows of B and the accumulator
        of its half of A, all at the same offsets.

        Args:
            kind: a key of `KINDS`; with scales, of `SCALED_KINDS`.
            cta_group: 1 or 2.
            rank: cluster rank of the issuing CTA.
            d: tensor-memory address of the accumulator.
            a: 64-bit matrix descriptor (or, ``a_in_tmem``, a tensor-memory address).
            b: 64-bit matrix descriptor.
            instruction: 32-bit instruction descriptor.
            accumulate: the enable-input-d predicate.
            a_in_tmem: A is in tensor memory, K-major, packed: 32 bytes per lane in 8 columns.
            scales: of a kind with block scaling.
            describe: who issues, for reports.

        Raises:
            UnsupportedPTX: a mode that is not implemented.
            IllegalAccess: operands or accumulator outside their memories.
            ProxyFenceMissing: an operand was written through the generic proxy and not fenced since.
        """
        key = (kind, cta_group, rank, d, a, b, instruction, accumulate, a_in_tmem, scales, describe)
        work = self._known.get(key)
        if work is None:
            if cta_group not in (1, 2):
                raise UnsupportedPTX(f"tcgen05.mma.cta_group::{cta_group}")
            if cta_group == 2 and rank % 2:
                raise UnsupportedPTX(f"tcgen05.mma.cta_group::2 issued by CTA {rank}, the odd one of its pair")
            text = mma_text(kind, cta_group, describe or f"by CTA {rank}")
            operands = cta_group, rank, d, a, b, accumulate, a_in_tmem, text
            if scales is not None:
                fields, scale_fields = decode_scaled(kind, scales.count, cta_group, instruction)
                work = ScaledMma(self, fields, *operands).with_scales(scales, scale_fields, kind)
            else:
                fields = decode_instruction(kind, cta_group, instruction)
                narrow = fields.a_type.narrow or fields.b_type.narrow
                work = (ScaledMma if narrow else Mma)(self, fields, *operands)
            work.issue()
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = work
        elif self.tracker is not None:  # else its checks would say the same again
            work.issue()
        if self.meter is not None:
            self.meter.mma(**work.asks_for())
        self.engine.submit(AsyncOp(("tcgen05", rank), work.run, work.text, name=work.name))

    def answer(self, what: int, fault: ctypes.Structure, warp: WarpState | None) -> None:
        """Does what the core asks for, one of `ASKED`, for tcgen05.commit (``core/commits.c``), ld and st
        (``core/tensor_access.c``).

        Raises:
            IllegalAccess: a mask is empty or names CTAs outside the cluster; cells that may not be accessed.
            TensorMemoryRace: an earlier access to them may not be over.
        """
        if what in (CONSTANTS["TENSOR_REFUSED"], CONSTANTS["TENSOR_ORDER"]):
            self._access(what, TensorAccess.from_address(fault.address), warp, fault.given)
            return
        if what == CONSTANTS["COMMIT_MASK"]:
            message = f"multicast mask {fault.given:#x} in a cluster of {len(self.shared.ctas)} CTAs"
            raise IllegalAccess(message)
        if what == CONSTANTS["NAME_COMMIT"]:
            thread = CommitThread.from_address(fault.address)
            label = f"tcgen05.commit issued by {warp.label}"
            if label not in self.barriers.labels:
                self.barriers.labels.append(label)
            thread.label = self.barriers.labels.index(label) + 1
            if self.tracker is not None:
                self.tracker.enter(warp.agent, fault.given)
                thread.stream = self.tracker.tensor.stream()
        elif what == CONSTANTS["COMMITS_MEET"]:
            self.tracker.note_commits(fault.address)
        else:
            self.tracker.points[fault.address].add_stream(fault.given)

    def _access(self, what: int, access: ctypes.Structure, warp: WarpState, index: int) -> None:
        if what == CONSTANTS["TENSOR_REFUSED"]:
            self.tensor_memories[warp.cta.rank].refuse(warp.index, access)
            return
        for place in rectangles(access):
            if access.write:
                self.tracker.tensor.store(warp.agent, place)
            else:
                self.tracker.tensor.load(warp.agent, place, index)

    def _committed(self, address: int) -> AsyncOp:
        commit = TensorCommit.from_address(address)
        return AsyncOp(("tcgen05", commit.rank), None, self.barriers.labels[commit.label - 1], name="commit")
