"""Fifth-generation tensor core: tcgen05.mma on operands in shared memory, accumulators in tensor memory.

Contract of one instruction: ``D = fp32_round(exact sum over its K of a*b + d)``, one rounding to nearest even, for
every input (`cute_kernels.emulator.exact`). The order and the width of the additions inside the real unit are
undocumented, so silicon may differ from it in the last bits. NaN results are 0x7FFFFFFF. TF32 operands lose their 13
low bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cute_kernels.emulator import exact
from cute_kernels.emulator.async_engine import AsyncEngine, AsyncOp
from cute_kernels.emulator.counters import UnitCounters
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.matrix_operands import (
    E4M3,
    K_BYTES,
    ElementType,
    Instruction,
    Places,
    check_operand,
    decode_instruction,
    decode_matrix,
    decode_values,
    find_operand,
    load_operand,
)
from cute_kernels.emulator.mbarrier import MBarriers
from cute_kernels.emulator.native_matrix import LANES, E4m3Unit, unit_if_worth_it
from cute_kernels.emulator.native_mma import SUMS_LIMIT, Part, make_job
from cute_kernels.emulator.sanitizer import RaceTracker
from cute_kernels.emulator.smem import OFFSET_MASK, ClusterMemory, shared_address
from cute_kernels.emulator.tensor_map import CHUNK
from cute_kernels.emulator.tensor_races import Pipelined, PipelinedAccess
from cute_kernels.emulator.tmem import LANE_GROUP, TensorMemory, split_address

_MOST_KNOWN = 4096  # MMAs that are kept; a kernel repeats those of its pipeline's stages


class TensorCore:
    """The tcgen05 pipe of one cluster.

    Attributes:
        instructions: MMAs executed so far.
        meter: hears of every MMA that is issued, or None.
        native: whether products of E4M3 run in machine code (None: once that is worth its compilation).
    """

    def __init__(
        self,
        shared: ClusterMemory,
        tensor_memories: list[TensorMemory],
        barriers: MBarriers,
        engine: AsyncEngine,
        tracker: RaceTracker | None = None,
        meter: UnitCounters | None = None,
        native: bool | None = None,
    ) -> None:
        self.meter = meter
        self.native = native
        self.shared = shared
        self.tensor_memories = tensor_memories
        self.barriers = barriers
        self.engine = engine
        self.tracker = tracker
        self.instructions = 0
        self._scratch: dict[tuple[int, int], np.ndarray] = {}
        self._known: dict[tuple[object, ...], _Mma] = {}

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
        describe: str = "",
    ) -> tuple[np.ndarray | None, int, object]:
        """tcgen05.mma.cta_group.kind [d], a-desc, b-desc, idesc, enable-input-d.

        With cta_group::2 each CTA of the pair holds half of the rows of A, half of the rows of B and the accumulator
        of its half of A, all at the same offsets.

        Args:
            kind: a key of `KINDS`.
            cta_group: 1 or 2.
            rank: cluster rank of the issuing CTA.
            d: tensor-memory address of the accumulator.
            a: 64-bit matrix descriptor (or, ``a_in_tmem``, a tensor-memory address).
            b: 64-bit matrix descriptor.
            instruction: 32-bit instruction descriptor.
            accumulate: the enable-input-d predicate.
            a_in_tmem: A is in tensor memory, K-major, packed: 32 bytes per lane in 8 columns.
            describe: who issues, for reports.

        Returns:
            The job with which machine code may execute it again (`native_mma`), None where it is one for Python; the
            address of what tells the race detector of it (`TensorRaces.watch`), 0 without; and the owner of the arrays
            that the job has addresses of.

        Raises:
            UnsupportedPTX: a mode that is not implemented.
            IllegalAccess: operands or accumulator outside their memories.
            ProxyFenceMissing: an operand was written through the generic proxy and not fenced since.
        """
        key = (kind, cta_group, rank, d, a, b, instruction, accumulate, a_in_tmem, describe)
        work = self._known.get(key)
        if work is None:
            if cta_group not in (1, 2):
                raise UnsupportedPTX(f"tcgen05.mma.cta_group::{cta_group}")
            if cta_group == 2 and rank % 2:
                raise UnsupportedPTX(f"tcgen05.mma.cta_group::2 issued by CTA {rank}, the odd one of its pair")
            fields = decode_instruction(kind, cta_group, instruction)
            text = f"tcgen05.mma.cta_group::{cta_group}.kind::{kind} issued {describe or f'by CTA {rank}'}"
            work = _Mma(self, fields, cta_group, rank, d, a, b, accumulate, a_in_tmem, text)
            work.issue()
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = work
        elif self.tracker is not None:  # else its checks would say the same again
            work.issue()
        if self.meter is not None:
            work.count(self.meter)
        self.engine.submit(AsyncOp(("tcgen05", rank), work.run, work.text, name=work.name))
        return work.job, work.watch() if work.job is not None and self.tracker is not None else 0, work

    def commit(
        self, *, cta_group: int, rank: int, barrier: int, multicast: int | None = None, describe: str = ""
    ) -> str:
        """tcgen05.commit: one arrival on the mbarrier when all earlier tcgen05 operations of this CTA are complete.

        Args:
            cta_group: 1 or 2.
            rank: cluster rank of the issuing CTA.
            barrier: shared address of the mbarrier.
            multicast: CTA mask: arrive at the same offset in each of these CTAs; None: at ``barrier`` itself.
            describe: who issues, for reports.

        Returns:
            What reports call it.

        Raises:
            IllegalAccess: the mask is empty or names CTAs outside the cluster.
        """
        if multicast is None:
            targets = [barrier]
        else:
            if not multicast or multicast >> len(self.shared.ctas):
                raise IllegalAccess(f"multicast mask {multicast:#x} in a cluster of {len(self.shared.ctas)} CTAs")
            targets = [
                shared_address(target, barrier & OFFSET_MASK)
                for target in range(len(self.shared.ctas))
                if multicast >> target & 1
            ]
        who = f"tcgen05.commit issued {describe or f'by CTA {rank}'}"

        commit = self.tracker.tensor.commit(targets) if self.tracker is not None else None

        def run() -> None:
            for target in targets:
                if commit is not None:
                    self.tracker.tensor.committed(commit, target, rank)
                self.barriers.arrive(target, 1, who)

        self.engine.submit(AsyncOp(("tcgen05", rank), run, who, name="commit"))
        return who

    def scratch(self, n: int, m: int) -> np.ndarray:
        """A reused float64 array [n, m]: allocating it anew would cost as much as the product."""
        if (n, m) not in self._scratch:
            self._scratch[n, m] = np.empty((n, m))
        return self._scratch[n, m]


class _Mma:
    """One MMA between issue and completion. Equal ones may share it: it keeps nothing of an execution."""

    def __init__(
        self, core: TensorCore, fields: Instruction, cta_group: int, rank: int, d: int, a: int, b: int,
        accumulate: bool, a_in_tmem: bool, text: str,
    ) -> None:  # fmt: skip
        self.core, self.fields, self.accumulate, self.text = core, fields, accumulate, text
        self.name = f"mma {fields.m}x{fields.n}"
        self.job: np.ndarray | None = None
        self.cta_group = cta_group
        self._watched: Pipelined | None = None
        self._checked: dict[int, int] = {}  # rank: changes of its tensor memory when the accumulator was checked
        self.ranks = [rank] if cta_group == 1 else [rank, rank + 1]
        if max(self.ranks) >= len(core.tensor_memories):
            raise IllegalAccess(f"{text}: the cluster has no CTA {max(self.ranks)}")
        self.rows, self.columns = fields.m // cta_group, fields.n // cta_group
        self.d = d
        self.a_tmem = a if a_in_tmem else None
        if a_in_tmem and (self.rows != 128 or fields.a_mn_major or split_address(a)[0]):
            raise UnsupportedPTX(f"{text}: A in tensor memory other than K-major with 128 rows per CTA from lane 0")
        self.a_places = None if a_in_tmem else self._places(a, self.rows, fields.a_type, fields.a_mn_major)
        self.b_places = self._places(b, self.columns, fields.b_type, fields.b_mn_major)

    def _places(self, descriptor: int, rows: int, element: ElementType, mn_major: bool) -> Places:
        matrix = decode_matrix(descriptor)
        if mn_major and element.nbytes == 4 and matrix.swizzle != "128B_atom32B":
            raise UnsupportedPTX(f"{self.text}: MN-major {element.name} operand with swizzle {matrix.swizzle}")
        if not mn_major and matrix.swizzle == "128B_atom32B":
            raise UnsupportedPTX(f"{self.text}: K-major operand with swizzle {matrix.swizzle}")
        return find_operand(matrix, rows, element.nbytes, mn_major)

    def issue(self) -> None:
        """Checks at issue, by the race detector too."""
        core = self.core
        operands = [self.b_places] if self.a_places is None else [self.b_places, self.a_places]
        if self._watched is None:
            for rank in self.ranks:
                for operand in operands:
                    check_operand(core.shared.ctas[rank], operand, self.text)
            self._watched = Pipelined(self.text, self._accesses(operands))
        if core.tracker is not None:
            core.tracker.tensor.issue(self._watched)

    def watch(self) -> int:
        """`TensorRaces.watch` of the MMA by the lane that has issued it."""
        memories = [self.core.tensor_memories[rank] for rank in self.ranks]
        races, column = self.core.tracker.tensor, split_address(self.d)[1]
        return races.watch(self._watched, self.fields.n, memories, column)

    def _accesses(self, operands: list[Places]) -> Iterator[PipelinedAccess]:
        """What the race detector has to know."""
        for rank in self.ranks:
            for operand in operands:
                yield PipelinedAccess(rank, operand.starts, CHUNK)
            if self.a_tmem is not None:
                column = split_address(self.a_tmem)[1]
                place = slice(column, column + K_BYTES // 4), slice(0, self.rows // LANE_GROUP)
                yield PipelinedAccess(rank, place=place)
            yield PipelinedAccess(rank, place=self._accumulator_place(), write=True)

    def _accumulator_place(self) -> tuple[slice, slice]:
        """Columns and lane groups of the accumulator in each CTA."""
        lane, column = split_address(self.d)
        interleaved = self.cta_group == 1 and self.rows == 64  # 16 of every 32 lanes
        return slice(column, column + self._width()), slice(lane // LANE_GROUP, None, 2 if interleaved else 1)

    def count(self, meter: UnitCounters) -> None:
        """Each CTA reads its own rows of A and of B from its shared memory; the pair exchanges what it reads of B."""
        operand = (self.columns + (self.rows if self.a_tmem is None else 0)) * K_BYTES
        accumulator = self.rows * self.fields.n * 4
        read = (accumulator if self.accumulate else 0) + (self.rows * K_BYTES if self.a_tmem is not None else 0)
        ctas = len(self.ranks)
        meter.mma(ctas * operand, tmem_read=ctas * read, tmem_written=ctas * accumulator)

    def _width(self) -> int:
        """Columns of the accumulator in each CTA."""
        return self.fields.n // 2 if self.cta_group == 2 and self.rows == 64 else self.fields.n

    def run(self) -> None:
        """Computes the result and writes it to tensor memory."""
        unit = self._unit()
        if unit is None or not self._execute(unit):
            self._run_by_cta(unit)
            if self.job is None and unit is not None and self._whole(unit):
                self.job = self._make_job()
        self.core.instructions += 1

    def _unit(self) -> E4m3Unit | None:
        """Machine code for the products, or None where this instruction is not one for it."""
        fields = self.fields
        plain = fields.a_type is E4M3 and fields.b_type is E4M3 and self.rows == LANES and self.a_tmem is None
        if not plain or fields.a_mn_major or fields.b_mn_major or fields.negate_a or fields.negate_b:
            return None
        return unit_if_worth_it(self.core.native)

    def _execute(self, unit: E4m3Unit) -> bool:
        """Executes all of it in machine code; False, and nothing done, where that is not for machine code."""
        if not self._whole(unit):
            return False
        for rank in self.ranks:
            memory = self.core.tensor_memories[rank]
            if self._checked.get(rank) != memory.changes:
                if memory.detect:  # operands are checked first, and may be what is wrong
                    return False
                self._cells(memory)
                self._checked[rank] = memory.changes
        if self.job is None:
            self.job = self._make_job()
        return unit.execute(self.job.ctypes.data)

    def _whole(self, unit: E4m3Unit) -> bool:
        """Whether machine code may execute all of it."""
        return unit.short and self.fields.d_type == "f32"

    def _run_by_cta(self, unit: E4m3Unit | None) -> None:
        if unit is not None and not self._load_native_b(unit):
            unit = None
        b = None
        for rank in self.ranks:
            memory = self.core.tensor_memories[rank]
            if unit is not None and self._run_native(unit, rank, memory):
                continue
            if b is None:
                b = self._load_b()
            a = self._load_a(rank) if self.a_tmem is None else self._load_tmem(rank)
            self._accumulate(memory, b, a)

    def _make_job(self) -> np.ndarray:
        column = split_address(self.d)[1]
        parts = []
        for rank in self.ranks:
            memory = self.core.tensor_memories[rank]
            places = self.a_places.address, self.b_places.address
            accumulator = memory.address_of_column(column), *memory.addresses_of_facts(column)
            parts.append(Part(*self.core.shared.ctas[rank].addresses(), *places, *accumulator))
        return make_job(parts, self.fields.n, self.accumulate)

    def _load_b(self) -> np.ndarray:
        fields = self.fields
        parts = [self._load(r, self.b_places, fields.b_type, fields.b_mn_major, fields.negate_b) for r in self.ranks]
        return np.concatenate(parts) if self.cta_group == 2 else parts[0]

    def _load_a(self, rank: int) -> np.ndarray:
        fields = self.fields
        return self._load(rank, self.a_places, fields.a_type, fields.a_mn_major, fields.negate_a)

    def _load_native_b(self, unit: E4m3Unit) -> bool:
        """Loads operand B; False where a byte is NaN or uninitialised."""
        for index, rank in enumerate(self.ranks):
            cta = self.core.shared.ctas[rank]
            if not unit.load_b(*cta.addresses(), self.b_places.address, self.columns, index * self.columns):
                return False
        return True

    def _run_native(self, unit: E4m3Unit, rank: int, memory: TensorMemory) -> bool:
        """One CTA's product; False, and nothing done, where a byte is NaN or uninitialised or a sum may be inexact."""
        cta = self.core.shared.ctas[rank]
        sums, earlier = self._exact_so_far(memory)
        if earlier is None or not unit.load_a(*cta.addresses(), self.a_places.address):
            return False
        if self._checked.get(rank) != memory.changes:  # from then on all its columns count as written
            self._cells(memory)
            self._checked[rank] = memory.changes
        unit.multiply(self.fields.n, memory.address_of_column(split_address(self.d)[1]), self.accumulate)
        sums[...] = earlier + 1
        return True

    def _load(
        self, rank: int, places: Places, element: ElementType, mn_major: bool, negate: bool
    ) -> np.ndarray:
        """float64 [rows, K] of one CTA's part of an operand."""
        values = load_operand(self.core.shared.ctas[rank], places.places, element, mn_major)
        return -values if negate else values

    def _load_tmem(self, rank: int) -> np.ndarray:
        _, column = split_address(self.a_tmem)
        memory = self.core.tensor_memories[rank]
        memory.check(0, self.rows, column, K_BYTES // 4, write=False)
        raw = np.ascontiguousarray(memory.cells[column : column + K_BYTES // 4, : self.rows].T)
        values = decode_values(raw.view(np.uint8), self.fields.a_type)
        return -values if self.fields.negate_a else values

    def _cells(self, memory: TensorMemory) -> np.ndarray:
        """The accumulator as a float32 view of shape [n, rows] or one that an array [n, rows] reshapes to."""
        lane, column = split_address(self.d)
        n = self.fields.n
        half_lanes = self.cta_group == 1 and self.rows == 64
        if lane not in ((0, 16) if half_lanes else (0,)):
            raise IllegalAccess(f"{self.text}: accumulator at lane {lane}")
        if half_lanes:
            # M = 64 in one CTA: row m in lane m % 16 + 32 * (m / 16).
            for quarter in range(4):
                self._check(memory, lane + 32 * quarter, 16, column, n)
            return memory.floats[column : column + n].reshape(n, 4, 32)[:, :, lane : lane + 16]
        if self.rows == 64:
            # M = 128 in two CTAs: columns n >= N/2 are in lanes 64 to 127.
            self._check(memory, 0, 128, column, n // 2)
            return memory.floats[column : column + n // 2].reshape(n // 2, 2, 64).transpose(1, 0, 2)
        self._check(memory, 0, 128, column, n)
        return memory.floats[column : column + n]

    def _check(self, memory: TensorMemory, lane: int, lanes: int, column: int, columns: int) -> None:
        if self.accumulate:
            memory.check(lane, lanes, column, columns, write=False)
        memory.check(lane, lanes, column, columns, write=True)

    def _exact_so_far(self, memory: TensorMemory) -> tuple[np.ndarray, int | None]:
        """Counts of the accumulator's columns, and their largest if this instruction's sums are exact in float64."""
        fields = self.fields
        _, column = split_address(self.d)
        sums = memory.e4m3_sums[column : column + self._width()]
        earlier = int(np.maximum.reduce(sums)) if self.accumulate else 0
        # The count is kept per column: it says nothing when two accumulators share columns, each in half of the lanes.
        tagged = (self.rows == 128 or self.cta_group == 2) and (not self.accumulate or int(np.minimum.reduce(sums)) > 0)
        exact_types = fields.a_type is E4M3 and fields.b_type is E4M3 and fields.d_type == "f32"
        return sums, earlier if exact_types and tagged and earlier < SUMS_LIMIT else None

    def _accumulate(self, memory: TensorMemory, b: np.ndarray, a: np.ndarray) -> None:
        """Tensor memory is stored column by column, so D is computed transposed: [n, rows]."""
        cells = self._cells(memory)
        fields = self.fields
        sums, earlier = self._exact_so_far(memory)
        if earlier is not None:
            # Products are multiples of 2^-18 below 2^18, and so are accumulators made of them alone: float64 holds
            # every sum of up to 2048 such instructions exactly, and the conversion to FP32 is the only rounding.
            total = self.core.scratch(len(b), len(a))
            exact.dot(b, a, out=total)
            # A NaN operand (E4M3 has no infinity) makes its whole row of products NaN.
            if np.isfinite(total[:, 0]).all() and np.isfinite(total[0]).all():
                shaped = total.reshape(cells.shape)
                if self.accumulate:
                    np.add(shaped, cells, out=shaped)
                np.copyto(cells, shaped, casting="same_kind")
                sums[...] = earlier + 1
                return
        sums[...] = 0
        if fields.d_type == "s32":
            total = exact.dot(b, a)  # exact: 32 products below 2^16
            if self.accumulate:
                total += np.ascontiguousarray(cells).view(np.int32).reshape(total.shape)
            cells.view(np.int32)[...] = exact.to_int32(total, fields.saturate).reshape(cells.shape)
            return
        old = np.ascontiguousarray(cells).reshape(len(b), len(a)) if self.accumulate else None
        precision = max(fields.a_type.precision, fields.b_type.precision)
        if fields.d_type == "f16":
            half = None if old is None else old.view(np.uint32).astype(np.uint16).view(np.float16)
            total = exact.dot_add(b, a, half, precision, np.float16).view(np.uint16)
            cells.view(np.uint32)[...] = total.astype(np.uint32).reshape(cells.shape)
            return
        cells[...] = exact.dot_add(b, a, old, precision).reshape(cells.shape)
