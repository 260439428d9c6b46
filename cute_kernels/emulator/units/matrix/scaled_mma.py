"""tcgen05.mma with elements of less than eight bits, or with scales in tensor memory (PTX ISA, "Block Scaling")."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.observe.races.operations import PipelinedAccess
from cute_kernels.emulator.state.smem import SharedMemory
from cute_kernels.emulator.state.tmem import LANES, TensorMemory, split_address
from cute_kernels.emulator.units.copies.tensor_map import CHUNK
from cute_kernels.emulator.units.matrix.dense_mma import Mma
from cute_kernels.emulator.units.matrix.operands import (
    E2M1_PAIRS,
    EIGHT_BITS_AND_LESS,
    K_BYTES,
    ElementType,
    Instruction,
    Places,
    check_majorness,
)
from cute_kernels.emulator.units.matrix.scaled_products import (
    Numbers,
    Side,
    codes_of_cells,
    codes_of_rows,
    dot_products,
)

_QUARTER = 32  # lanes, to all of which scales are copied
_BYTE_IDS = 0x3FFFFFFF  # bits 30 and 31 of an address may hold the id, which counts in the instruction descriptor alone
#: Kind -> its element types, scales of a row in one instruction -> types of scales by code.
SCALED_KINDS: dict[str, tuple[dict[int, ElementType], dict[int, tuple[str, ...]]]] = {
    "mxf8f6f4": (EIGHT_BITS_AND_LESS, {1: ("ue8m0",)}),
    "mxf4": ({1: E2M1_PAIRS}, {2: ("ue8m0",)}),
    "mxf4nvf4": ({1: E2M1_PAIRS}, {2: ("ue8m0",), 4: ("ue4m3", "ue8m0")}),
}
_SCALE_TYPES = ("ue4m3", "ue8m0")  # by bit 23 of the instruction descriptor
_SHAPES = {1: ((128,), range(8, 257, 8)), 2: ((128, 256), range(16, 257, 16))}


@dataclass(frozen=True)
class Scales:
    """Scales of one MMA.

    Attributes:
        a, b: tensor-memory addresses.
        count: of each row: 1, 2 or 4, for as many blocks of K.
    """

    a: int
    b: int
    count: int


@dataclass(frozen=True)
class ScaleFields:
    """Fields of an instruction descriptor about scales: their type, and in which byte of a cell the first one is."""

    name: str
    a_id: int
    b_id: int


@functools.lru_cache(maxsize=256)
def decode_scaled(kind: str, count: int, cta_group: int, descriptor: int) -> tuple[Instruction, ScaleFields]:
    """Decodes an instruction descriptor of a kind with block scaling (PTX ISA, "Instruction descriptor").

    Args:
        kind: a key of `SCALED_KINDS`.
        count: scales of each row.
        cta_group: 1 or 2.
        descriptor: 32 bits.

    Raises:
        UnsupportedPTX: sparsity, a K of 96, reserved bits, types that do not go with the kind.
        IllegalAccess: a shape that does not exist, or a byte in which these scales cannot begin.
    """
    where = f"instruction descriptor {descriptor:#010x} of kind::{kind}"
    types, scale_types = SCALED_KINDS[kind]
    if descriptor & (0xF | 1 << 6 | 7 << 24 | 1 << 31):
        raise UnsupportedPTX(f"{where}: sparsity, K of 96 or a reserved bit")
    # Of FP4 kinds, bit 12 is a version of sparsity, which CUTLASS's builder of descriptors sets for dense MMAs too.
    codes = descriptor >> 7 & 7, descriptor >> 10 & (7 if kind == "mxf8f6f4" else 3)
    majors = descriptor >> 15 & 1, descriptor >> 16 & 1
    for operand, code, mn_major in zip("AB", codes, majors):
        if code not in types:
            known = ", ".join(f"{number} ({element.name})" for number, element in types.items())
            raise UnsupportedPTX(f"{where}: {operand} type {code}; implemented are {known}")
        check_majorness(types[code], mn_major, f"{where}: {operand}")
    name = _SCALE_TYPES[descriptor >> 23 & 1]
    if name not in scale_types[count]:
        allowed = " or ".join(scale_types[count])
        raise UnsupportedPTX(f"{where}: scales of type {name}; {count} for each row are {allowed}")
    ids = descriptor >> 29 & 3, descriptor >> 4 & 3
    for operand, first in zip("AB", ids):
        if first % count:
            raise IllegalAccess(
                f"{where}: scales of {operand} begin in byte {first}; {count} begin in a multiple of {count}"
            )
    m, n = (descriptor >> 27 & 3) * 128, (descriptor >> 17 & 63) * 8
    legal_m, legal_n = _SHAPES[cta_group]
    if m not in legal_m or n not in legal_n:
        raise IllegalAccess(
            f"{where}: shape {m}x{n} with cta_group::{cta_group}; legal are M {' and '.join(map(str, legal_m))} with "
            f"N a multiple of {legal_n.step} up to 256"
        )
    fields = Instruction(
        a_type=types[codes[0]], b_type=types[codes[1]],
        negate_a=bool(descriptor >> 13 & 1), negate_b=bool(descriptor >> 14 & 1),
        a_mn_major=bool(majors[0]), b_mn_major=bool(majors[1]), m=m, n=n,
    )  # fmt: skip
    return fields, ScaleFields(name, *ids)


class ScaledMma(Mma):
    """One MMA whose products NumPy computes; scales are optional."""

    scales: Scales | None = None
    scale_fields: ScaleFields | None = None
    kind = ""

    def with_scales(self, scales: Scales, fields: ScaleFields, kind: str) -> ScaledMma:
        """Has the MMA scale its operands. Raises IllegalAccess where the scales do not begin in lane 0."""
        self.kind, self.scale_fields = kind, fields
        self.scales = replace(scales, a=scales.a & _BYTE_IDS, b=scales.b & _BYTE_IDS)
        for operand, address in (("A", self.scales.a), ("B", self.scales.b)):
            if split_address(address)[0]:
                raise IllegalAccess(f"{self.text}: scales of {operand} at lane {split_address(address)[0]}")
        return self

    @property
    def _folded(self) -> bool:
        """64 rows in each CTA of a pair: lanes from 64 on have the upper half of the columns of D."""
        return self.cta_group == 2 and self.rows == 64

    def _scale_columns(self) -> list[tuple[int, int]]:
        """First column and number of columns of the scales of A and of B, each 32 rows in one."""
        assert self.scales is not None
        rows = self.rows, self.fields.n // 2 if self._folded else self.fields.n
        return [(split_address(at)[1], -(-n // _QUARTER)) for at, n in zip((self.scales.a, self.scales.b), rows)]

    def _accesses(self, operands: list[Places]) -> Iterator[PipelinedAccess]:
        *others, accumulator = super()._accesses(operands)
        if self.scales is None:
            yield from (*others, accumulator)
            return
        for rank in self.ranks:
            for column, count in self._scale_columns():
                yield PipelinedAccess(rank, place=(slice(column, column + count), slice(None)))
        yield from (*others, accumulator)

    def run(self) -> None:
        core, fields = self.core, self.fields
        sums = core.arithmetic.sums("tcgen05", fields.a_type.name, fields.d_type)
        if self.scales is not None:
            sums = core.arithmetic.scaled_sums(self.kind)
        b_codes = np.concatenate([self._codes_in_shared(rank, self.b_places, fields.b_type) for rank in self.ranks])
        b = Numbers.of(b_codes, fields.b_type.name, fields.negate_b)
        for rank in self.ranks:
            memory = core.tensor_memories[rank]
            a = Numbers.of(self._codes_of_a(rank), fields.a_type.name, fields.negate_a)
            scales = self._scales_of(memory) if self.scales is not None else (None, None)
            self._check_accumulator(memory)
            place = self._cells()
            old = memory.cells[place] if self.accumulate else None
            memory.cells[place] = dot_products(Side(a, scales[0]), Side(b, scales[1]), old, fields.d_type, sums)
        core.instructions += 1

    def _codes_of_a(self, rank: int) -> np.ndarray:
        if self.a_places is not None:
            return self._codes_in_shared(rank, self.a_places, self.fields.a_type)
        assert self.a_tmem is not None
        memory, column = self.core.tensor_memories[rank], split_address(self.a_tmem)[1]
        memory.check(0, self.rows, column, K_BYTES // 4, write=False)
        cells = np.ascontiguousarray(memory.cells[column : column + K_BYTES // 4, : self.rows].T)
        return codes_of_cells(cells.view(np.uint8), self.fields.a_type)

    def _codes_in_shared(self, rank: int, operand: Places, element: ElementType) -> np.ndarray:
        cta: SharedMemory = self.core.shared.ctas[rank]
        places = operand.places
        if places.shape[1] == K_BYTES // CHUNK:
            # Of a chunk the last bytes may hold nothing: tensor copies of padded types do not write them.
            words = places[..., None] * (CHUNK // 4) + np.arange(element.held // 4)
            cta.check_initialised(words, 4)
            rows = np.ascontiguousarray(cta.chunks[places]).view(np.uint8)
        else:
            cta.check_initialised(places, 1)
            rows = cta.data[places]
        return codes_of_rows(rows.reshape(len(places), K_BYTES), element)

    def _cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns and lanes of D in each CTA, both [rows, n]."""
        lane, column = split_address(self.d)
        row, j = np.arange(self.rows)[:, None], np.arange(self.fields.n)[None]
        if self._folded:
            half = self.fields.n // 2
            return column + j % half, row + 64 * (j // half)
        if self.rows == 64:
            return column + j, lane + row // 16 * _QUARTER + row % 16
        return column + j, row + 0 * j

    def _scales_of(self, memory: TensorMemory) -> tuple[Numbers, Numbers]:
        """Scales of A and B. Row i lies in lane i % 32 of column i // 32, and so in all quarters of the lanes.

        Where a CTA of a pair has 64 rows, lanes from 64 on have the scales of the upper half of B's rows, beside the
        columns of D that they compute: so NVIDIA's example 2cta_mma_blockscale_m128.py copies them (CUTLASS,
        examples/python/CuTeDSL/experimental/primitives/tcgen05).
        """
        assert self.scales is not None and self.scale_fields is not None
        count, name = self.scales.count, self.scale_fields.name
        (a_column, a_columns), (b_column, b_columns) = self._scale_columns()
        a = self._quarters(memory, a_column, a_columns, self.rows, self.scale_fields.a_id)
        rows = self.fields.n // 2 if self._folded else self.fields.n
        b = self._quarters(memory, b_column, b_columns, rows, self.scale_fields.b_id)
        self._check_equal(a, "A")
        halves = [b[:2], b[2:]] if self._folded else [b]
        for quarters in halves:
            self._check_equal(quarters, "B")
        chosen = np.concatenate([quarters[0] for quarters in halves])
        assert a.shape[-1] == chosen.shape[-1] == count
        return Numbers.of(a[0], name), Numbers.of(chosen, name)

    def _quarters(self, memory: TensorMemory, column: int, columns: int, rows: int, first: int) -> np.ndarray:
        """uint8 [4 quarters, rows, scales of a row]."""
        assert self.scales is not None
        memory.check(0, LANES, column, columns, write=False)
        cells = memory.cells[column : column + columns].reshape(columns, -1, _QUARTER).transpose(1, 0, 2)
        shifts = 8 * (first + np.arange(self.scales.count, dtype=np.uint32))
        words = cells.reshape(len(cells), -1)[:, :rows, None]
        return (words >> shifts.astype(np.uint32) & np.uint32(255)).astype(np.uint8)

    def _check_equal(self, quarters: np.ndarray, operand: str) -> None:
        """Raises IllegalAccess where the quarters differ: by the PTX ISA scales are in all of them."""
        wrong = np.argwhere(quarters != quarters[0])
        if len(wrong):
            quarter, row, which = (int(x) for x in wrong[0])
            raise IllegalAccess(
                f"{self.text}: scale {which} of row {row} of {operand} is {quarters[quarter, row, which]:#04x} in one "
                f"quarter of the lanes and {quarters[0, row, which]:#04x} in another; scales are in all of them"
            )
