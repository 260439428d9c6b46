"""One dense tcgen05.mma: what it reads and writes, its checks, its execution by the core."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.observe.races.operations import PipelinedAccess
from cute_kernels.emulator.observe.races.tensor_memory import Pipelined
from cute_kernels.emulator.observe.races.tracker import RaceTracker
from cute_kernels.emulator.state.smem import ClusterMemory
from cute_kernels.emulator.state.tmem import LANE_GROUP, TensorMemory, split_address
from cute_kernels.emulator.units.copies.tensor_map import CHUNK
from cute_kernels.emulator.units.matrix import products
from cute_kernels.emulator.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.units.matrix.operands import (
    D_TYPES,
    K_BYTES,
    KINDS,
    ElementType,
    Instruction,
    MmaKind,
    Places,
    check_operand,
    decode_matrix,
    find_operand,
    kind_codes,
)
from cute_kernels.emulator.units.matrix.products import LANES, Accumulator, Kind, Part, Rows


class MmaUnit(Protocol):
    """Tensor core that executes MMAs; attributes as of `tensor_core.TensorCore`."""

    shared: ClusterMemory
    tensor_memories: list[TensorMemory]
    tracker: RaceTracker | None
    arithmetic: Arithmetic
    instructions: int


@functools.lru_cache(maxsize=16)
def core_kinds(arithmetic: Arithmetic) -> ctypes.Array[MmaKind]:
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


class Mma:
    """One MMA between issue and completion. Equal ones may share it: it keeps nothing of an execution."""

    def __init__(
        self, core: MmaUnit, fields: Instruction, cta_group: int, rank: int, d: int, a: int, b: int,
        accumulate: bool, a_in_tmem: bool, text: str,
    ) -> None:  # fmt: skip
        self.core, self.fields, self.accumulate, self.text = core, fields, accumulate, text
        self.name = f"mma {fields.m}x{fields.n}"
        self._described: ctypes.Structure | None = None
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
        self._tmem_places: np.ndarray | None = None
        if a_in_tmem:
            words = np.arange(K_BYTES // 4) + split_address(a)[1]
            self._tmem_places = np.ascontiguousarray(words * LANES + np.arange(self.rows)[:, None])
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

    def _accesses(self, operands: list[Places]) -> Iterator[PipelinedAccess]:
        """Accesses of an MMA that the race detector has to know."""
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

    def asks_for(self) -> dict[str, int]:
        """Arguments of `UnitCounters.mma`.

        Each CTA reads its own rows of A and of B from its shared memory; the pair exchanges what it reads of B.
        """
        operand = (self.columns + (self.rows if self.a_tmem is None else 0)) * K_BYTES
        accumulator = self.rows * self.fields.n * 4
        read = (accumulator if self.accumulate else 0) + (self.rows * K_BYTES if self.a_tmem is not None else 0)
        ctas = len(self.ranks)
        return {"operand_bytes": ctas * operand, "tmem_read": ctas * read, "tmem_written": ctas * accumulator}

    def _width(self) -> int:
        """Columns of the accumulator in each CTA."""
        return self.fields.n // 2 if self.cta_group == 2 and self.rows == 64 else self.fields.n

    def run(self) -> None:
        """Computes the result and writes it to tensor memory."""
        if self._described is None:
            self._described = self._describe()
        if any(self._checked.get(rank) != self.core.tensor_memories[rank].changes for rank in self.ranks):
            self._check()
        if not products.execute(self._described):
            self._check()
            # Execution goes on after the report: whatever the memory holds is multiplied.
            if not products.execute(self._describe(checked=False)):
                raise AssertionError(f"{self.text}: nothing is wrong with what the core does not execute")
        self.core.instructions += 1

    def _check(self) -> None:
        """Checks operands, then accumulators, which from then on count as written."""
        for places, element, mn_major in self._in_shared_memory():
            for rank in self.ranks:
                self.core.shared.ctas[rank].check_initialised(places.places, element.nbytes if mn_major else CHUNK)
        for rank in self.ranks:
            memory = self.core.tensor_memories[rank]
            if self.a_tmem is not None:
                memory.check(0, self.rows, split_address(self.a_tmem)[1], K_BYTES // 4, write=False)
            self._check_accumulator(memory)
            self._checked[rank] = memory.changes

    def _in_shared_memory(self) -> Iterator[tuple[Places, ElementType, bool]]:
        yield self.b_places, self.fields.b_type, self.fields.b_mn_major
        if self.a_places is not None:
            yield self.a_places, self.fields.a_type, self.fields.a_mn_major

    def _describe(self, checked: bool = True) -> ctypes.Structure:
        """The operation as the core has it, which executes it only on operands that are initialised, if ``checked``."""
        fields, (lane, column) = self.fields, split_address(self.d)
        a_unit = 4 if self.a_tmem is not None else fields.a_type.nbytes if fields.a_mn_major else CHUNK
        b_unit = fields.b_type.nbytes if fields.b_mn_major else CHUNK
        half_lanes = self.cta_group == 1 and self.rows == 64  # row m in lane m % 16 + 32 * (m / 16)
        accumulator = Accumulator(
            fields.d_type, self.accumulate, fields.saturate, self._width(), self._width(),
            wrap_offset=self.rows,  # M = 128 in two CTAs: columns n >= N/2 are in lanes 64 to 127
            group_stride=LANE_GROUP * (2 if half_lanes else 1),
        )  # fmt: skip
        parts: list[Part] = []
        for rank in self.ranks:
            memory = self.core.tensor_memories[rank]
            data, states = self.core.shared.ctas[rank].addresses()
            shared = data, states if checked else None
            if self._tmem_places is None:
                a = Rows(*shared, self.a_places.address)
            else:
                a = Rows(memory.address_of_column(0), None, self._tmem_places.ctypes.data)
            cells = memory.address_of_column(column) + memory.cells.itemsize * lane
            parts.append((a, Rows(*shared, self.b_places.address), cells, memory.allocated_address + column))
        kinds = Kind(fields.a_type, fields.negate_a, a_unit), Kind(fields.b_type, fields.negate_b, b_unit)
        sums = self.core.arithmetic.sums("tcgen05", fields.a_type.name, fields.d_type)
        return products.describe(self.rows, fields.n, *kinds, accumulator, parts, sums)

    def _check_accumulator(self, memory: TensorMemory) -> None:
        lane, column = split_address(self.d)
        half_lanes = self.cta_group == 1 and self.rows == 64
        if lane not in ((0, 16) if half_lanes else (0,)):
            raise IllegalAccess(f"{self.text}: accumulator at lane {lane}")
        places = [(lane + 32 * quarter, 16) for quarter in range(4)] if half_lanes else [(0, LANES)]
        for first, lanes in places:
            if self.accumulate:
                memory.check(first, lanes, column, self._width(), write=False)
            memory.check(first, lanes, column, self._width(), write=True)
