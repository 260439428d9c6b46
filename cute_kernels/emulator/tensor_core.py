"""Fifth-generation tensor core: tcgen05.mma on operands in shared memory, accumulators in tensor memory.

Contract of one instruction: ``D = fp32_round(exact sum over its K of a*b + d)``, one rounding to nearest even, for
every input (`cute_kernels.emulator.exact`). The order and the width of the additions inside the real unit are
undocumented, so silicon may differ from it in the last bits. NaN results are 0x7FFFFFFF. TF32 operands lose their 13
low bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cute_kernels.emulator import exact
from cute_kernels.emulator.async_engine import AsyncEngine, AsyncOp
from cute_kernels.emulator.counters import UnitCounters
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.mbarrier import MBarriers
from cute_kernels.emulator.native_matrix import LANES, E4m3Unit, unit_if_worth_it
from cute_kernels.emulator.sanitizer import RaceTracker
from cute_kernels.emulator.smem import OFFSET_MASK, ClusterMemory, SharedMemory, shared_address
from cute_kernels.emulator.tensor_map import CHUNK, SWIZZLES
from cute_kernels.emulator.tmem import LANE_GROUP, TensorMemory, split_address

K_BYTES = 32  # PTX ISA: K of every dense kind is 32 bytes of operand elements
_CORE_ROWS = 8  # rows of a core matrix
_E4M3_SUMS_LIMIT = 1 << 11  # instructions; each adds less than 2^23 to an accumulator on a grid of 2^-18


@dataclass(frozen=True)
class ElementType:
    """An operand type: its name, bytes per element and significand bits."""

    name: str
    nbytes: int
    precision: int


E4M3 = ElementType("e4m3", 1, 4)
E5M2 = ElementType("e5m2", 1, 3)
F16 = ElementType("f16", 2, 11)
BF16 = ElementType("bf16", 2, 8)
TF32 = ElementType("tf32", 4, 11)
S8 = ElementType("s8", 1, 8)
U8 = ElementType("u8", 1, 8)
#: kind -> type code of the instruction descriptor -> element type.
KINDS = {"f8f6f4": {0: E4M3, 1: E5M2}, "f16": {0: F16, 1: BF16}, "tf32": {2: TF32}, "i8": {0: U8, 1: S8}}
#: kind -> type code of the accumulator -> its name.
_FLOATS = {0: "f16", 1: "f32"}
_ACCUMULATORS = {"f8f6f4": _FLOATS, "f16": _FLOATS, "tf32": {1: "f32"}, "i8": {2: "s32"}}
_DTYPES = {
    "s8": np.int8,
    "u8": np.uint8,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}


@dataclass(frozen=True)
class Instruction:
    """The fields of an instruction descriptor that a dense MMA uses (PTX ISA, "Instruction descriptor").

    Attributes:
        a_type, b_type: element types.
        negate_a, negate_b: the operand is negated.
        a_mn_major, b_mn_major: the operand is MN-major (False: K-major).
        m, n: shape of the accumulator, of both CTAs together.
        d_type: type of the accumulator, ``"f32"``, ``"f16"`` (the low half of a cell) or ``"s32"``.
        saturate: integer sums saturate.
    """

    a_type: ElementType
    b_type: ElementType
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    m: int
    n: int
    d_type: str = "f32"
    saturate: bool = False


@dataclass(frozen=True)
class Matrix:
    """A shared-memory matrix descriptor (PTX ISA, "Shared memory descriptor"); offsets in bytes.

    Attributes:
        address: offset of the matrix in the shared memory of its CTA.
        leading: leading dimension byte offset.
        stride: stride dimension byte offset.
        swizzle: a name of `SWIZZLES`.
    """

    address: int
    leading: int
    stride: int
    swizzle: str


@functools.lru_cache(maxsize=256)
def decode_instruction(kind: str, cta_group: int, descriptor: int) -> Instruction:
    """Decodes an instruction descriptor.

    Raises:
        UnsupportedPTX: sparsity, element types not implemented or that do not go with the accumulator.
        IllegalAccess: a shape that does not exist.
    """
    if kind not in KINDS:
        raise UnsupportedPTX(f"tcgen05.mma.kind::{kind}; implemented are {', '.join(KINDS)}")
    where = f"instruction descriptor {descriptor:#010x} of kind::{kind}"
    types = KINDS[kind]
    # Bits 0-2: sparsity; 3: saturation, of integers; 6, 23, 29: reserved; 13-14: negation, not of integers; 30-31: .ws.
    reserved = 3 << 13 if kind == "i8" else 1 << 3
    if descriptor & (0x7 | reserved | 1 << 6 | 1 << 23 | 7 << 29):
        raise UnsupportedPTX(f"{where}: sparsity, saturation of floats, negation of integers or a reserved bit")
    accumulators = _ACCUMULATORS[kind]
    if descriptor >> 4 & 3 not in accumulators:
        known = ", ".join(f"{code} ({name})" for code, name in accumulators.items())
        raise UnsupportedPTX(f"{where}: D type {descriptor >> 4 & 3}; implemented is {known}")
    for operand, code in (("A", descriptor >> 7 & 7), ("B", descriptor >> 10 & 7)):
        if code not in types:
            known = ", ".join(f"{c} ({t.name})" for c, t in types.items())
            raise UnsupportedPTX(f"{where}: {operand} type {code}; implemented are {known}")
    if accumulators[descriptor >> 4 & 3] == "f16" and BF16 in (types[descriptor >> 7 & 7], types[descriptor >> 10 & 7]):
        raise UnsupportedPTX(f"{where}: BF16 operands with an FP16 accumulator")
    m, n = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
    step = {(1, 64): 8, (1, 128): 16, (2, 128): 16, (2, 256): 16}.get((cta_group, m))
    if step is None or n % step or not step <= n <= 256:
        raise IllegalAccess(
            f"{where}: shape {m}x{n} with cta_group::{cta_group}; legal are 64xN (N a multiple of 8) and 128xN (16) "
            "with cta_group::1, 128xN and 256xN (16) with cta_group::2, N at most 256"
        )
    return Instruction(
        a_type=types[descriptor >> 7 & 7],
        b_type=types[descriptor >> 10 & 7],
        negate_a=bool(descriptor >> 13 & 1),
        negate_b=bool(descriptor >> 14 & 1),
        a_mn_major=bool(descriptor >> 15 & 1),
        b_mn_major=bool(descriptor >> 16 & 1),
        m=m,
        n=n,
        d_type=accumulators[descriptor >> 4 & 3],
        saturate=bool(descriptor >> 3 & 1),
    )


_SWIZZLE_MODES = {0: "none", 1: "128B_atom32B", 2: "128B", 4: "64B", 6: "32B"}


@functools.lru_cache(maxsize=1024)
def decode_matrix(descriptor: int) -> Matrix:
    """Decodes a shared-memory matrix descriptor.

    Raises:
        UnsupportedPTX: a reserved bit pattern, a base offset, or an absolute leading dimension.
        UnsupportedPTX: the 32-byte-atom pattern entered in its middle.
    """
    where = f"matrix descriptor {descriptor:#018x}"
    mode = descriptor >> 61 & 7
    if mode not in _SWIZZLE_MODES:
        raise UnsupportedPTX(f"{where}: swizzle mode {mode}")
    if descriptor >> 46 & 7 != 1:
        raise UnsupportedPTX(f"{where}: bits 46-48 are {descriptor >> 46 & 7}, not the constant 1")
    if descriptor >> 49 & 0xFFF or descriptor >> 14 & 3 or descriptor >> 30 & 3:
        raise UnsupportedPTX(f"{where}: a base offset, an absolute leading dimension or a reserved bit")
    matrix = Matrix(
        address=(descriptor & 0x3FFF) << 4,
        leading=(descriptor >> 16 & 0x3FFF) << 4,
        stride=(descriptor >> 32 & 0x3FFF) << 4,
        swizzle=_SWIZZLE_MODES[mode],
    )
    check_pattern_start(matrix, where)
    return matrix


def check_pattern_start(matrix: Matrix, where: str) -> None:
    """Raises UnsupportedPTX where a start in the middle of a swizzle pattern has not been seen on hardware.

    With base offset 0 the pattern is a function of absolute address bits, so a matrix may start in any row of it: with
    wgmma on an H200, starts 128 to 896 bytes into a 128B pattern read what TMA's pattern writes there. Nobody looked at
    the pattern of 32-byte atoms.
    """
    span, rows = SWIZZLES[matrix.swizzle].span, _atom_rows(matrix.swizzle)
    if matrix.swizzle == "128B_atom32B" and matrix.address % (span * rows) >= span:
        raise UnsupportedPTX(
            f"{where}: the matrix starts at shared offset {matrix.address}, in the middle of the pattern of swizzle "
            f"{matrix.swizzle} ({span * rows} bytes)"
        )


def _atom_rows(swizzle: str) -> int:
    return 4 if swizzle == "128B_atom32B" else _CORE_ROWS


@functools.lru_cache(maxsize=512)
def operand_places(matrix: Matrix, rows: int, element_bytes: int, mn_major: bool) -> np.ndarray:
    """Where an operand lies in shared memory, relative to offset 0 of its CTA.

    Returns:
        K-major: int64 [rows, 2], indices of the 16-byte chunks of each row. MN-major: int64 [rows, K], indices of the
        elements. Canonical layouts of the PTX ISA, "Shared memory matrix layout".
    """
    pattern = SWIZZLES[matrix.swizzle]
    if not mn_major:
        row, chunk = np.arange(rows)[:, None], np.arange(K_BYTES // CHUNK)[None, :]
        in_chunk_units = row // _CORE_ROWS * matrix.stride
        if pattern.span:
            offset = in_chunk_units + row % _CORE_ROWS * pattern.span + chunk * CHUNK
        else:
            offset = in_chunk_units + row % _CORE_ROWS * CHUNK + chunk * matrix.leading
    else:
        row, k = np.arange(rows)[:, None] * element_bytes, np.arange(K_BYTES // element_bytes)[None, :]
        if pattern.span:
            group = _atom_rows(matrix.swizzle)
            offset = row // pattern.span * matrix.leading + row % pattern.span
            offset = offset + k // group * matrix.stride + k % group * pattern.span
        else:
            offset = row // CHUNK * matrix.stride + row % CHUNK
            offset = offset + k // _CORE_ROWS * matrix.leading + k % _CORE_ROWS * CHUNK
    address = matrix.address + offset
    address = address ^ (address >> pattern.shift & pattern.mask)
    return address // (element_bytes if mn_major else CHUNK)


@functools.lru_cache(maxsize=8)
def _values_of_bits(name: str) -> np.ndarray:
    """Values of all 16-bit patterns: float64 [65536] of a 16-bit type, pairs as complex128 [65536] of an 8-bit type."""
    dtype = np.dtype(_DTYPES[name])
    codes = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        values = codes.astype(np.float64)
    return values.view(np.complex128) if dtype.itemsize == 1 else values


def decode_values(raw: np.ndarray, element: ElementType) -> np.ndarray:
    """float64 [rows, K] of operand bits: uint8 [rows, 32], or elements [rows, K]."""
    rows = raw.shape[0]
    if element.nbytes == 4:
        # The tensor core reads the upper 19 bits of a TF32 register.
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64).reshape(rows, -1)
    codes = raw.view(np.uint16)
    return np.take(_values_of_bits(element.name), codes, mode="clip").view(np.float64).reshape(rows, -1)


@dataclass(frozen=True)
class Places:
    """Where an operand lies in shared memory.

    Attributes:
        places: see `operand_places`; ``address`` is the array's.
        starts: int64, offsets of its 16-byte chunks.
        low, high: offsets of its first byte and behind its last.
    """

    places: np.ndarray
    starts: np.ndarray
    low: int
    high: int
    address: int

    @classmethod
    def of(cls, places: np.ndarray, element_bytes: int, mn_major: bool) -> Places:
        """From the indices that `operand_places` returns."""
        unit = element_bytes if mn_major else CHUNK
        low, high = int(places.min()) * unit, (int(places.max()) + 1) * unit
        chunks = places if not mn_major else np.unique(places * element_bytes // CHUNK)
        places, starts = np.ascontiguousarray(places), chunks.reshape(-1) * CHUNK
        starts.flags.writeable = False
        return cls(places, starts, low, high, places.ctypes.data)


@functools.lru_cache(maxsize=512)
def find_operand(matrix: Matrix, rows: int, element_bytes: int, mn_major: bool) -> Places:
    """`operand_places` of an operand, and what else there is to know of them."""
    return Places.of(operand_places(matrix, rows, element_bytes, mn_major), element_bytes, mn_major)


def check_operand(cta: SharedMemory, operand: Places, who: str) -> None:
    """Raises IllegalAccess when part of an operand lies outside of the shared memory of its CTA."""
    if operand.high > cta.size:
        raise IllegalAccess(
            f"{who}: operand at shared offsets {operand.low} to {operand.high} of CTA {cta.cta_rank}, which has "
            f"{cta.size} bytes"
        )


def load_operand(cta: SharedMemory, places: np.ndarray, element: ElementType, mn_major: bool) -> np.ndarray:
    """float64 [rows, K] of an operand in shared memory, given its `operand_places`."""
    unit = element.nbytes if mn_major else CHUNK
    cta.check_initialised(places, unit)
    raw = cta.words[unit][places] if mn_major else cta.chunks[places].view(np.uint8)
    return decode_values(np.ascontiguousarray(raw), element)


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
    ) -> None:
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

        Raises:
            UnsupportedPTX: a mode that is not implemented.
            IllegalAccess: operands or accumulator outside their memories.
            ProxyFenceMissing: an operand was written through the generic proxy and not fenced since.
        """
        if cta_group not in (1, 2):
            raise UnsupportedPTX(f"tcgen05.mma.cta_group::{cta_group}")
        if cta_group == 2 and rank % 2:
            raise UnsupportedPTX(f"tcgen05.mma.cta_group::2 issued by CTA {rank}, the odd one of its pair")
        fields = decode_instruction(kind, cta_group, instruction)
        text = f"tcgen05.mma.cta_group::{cta_group}.kind::{kind} issued {describe or f'by CTA {rank}'}"
        work = _Mma(self, fields, cta_group, rank, d, a, b, accumulate, a_in_tmem, text)
        work.issue()
        if self.meter is not None:
            work.count(self.meter)
        self.engine.submit(AsyncOp(("tcgen05", rank), work.run, text, name=f"mma {fields.m}x{fields.n}"))

    def commit(
        self, *, cta_group: int, rank: int, barrier: int, multicast: int | None = None, describe: str = ""
    ) -> None:
        """tcgen05.commit: one arrival on the mbarrier when all earlier tcgen05 operations of this CTA are complete.

        Args:
            cta_group: 1 or 2.
            rank: cluster rank of the issuing CTA.
            barrier: shared address of the mbarrier.
            multicast: CTA mask: arrive at the same offset in each of these CTAs; None: at ``barrier`` itself.
            describe: who issues, for reports.

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

    def scratch(self, n: int, m: int) -> np.ndarray:
        """A reused float64 array [n, m]: allocating it anew would cost as much as the product."""
        if (n, m) not in self._scratch:
            self._scratch[n, m] = np.empty((n, m))
        return self._scratch[n, m]


class _Mma:
    """One MMA between issue and completion."""

    def __init__(
        self, core: TensorCore, fields: Instruction, cta_group: int, rank: int, d: int, a: int, b: int,
        accumulate: bool, a_in_tmem: bool, text: str,
    ) -> None:  # fmt: skip
        self.core, self.fields, self.accumulate, self.text = core, fields, accumulate, text
        self.cta_group = cta_group
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
        watched = core.tracker.tensor.operation(self.text) if core.tracker is not None else None
        operands = [self.b_places] if self.a_places is None else [self.b_places, self.a_places]
        for rank in self.ranks:
            for operand in operands:
                check_operand(core.shared.ctas[rank], operand, self.text)
                if watched is not None:
                    core.tracker.async_read(rank, operand.starts, CHUNK, watched)
            if watched is not None:
                if self.a_tmem is not None:
                    column = split_address(self.a_tmem)[1]
                    place = slice(column, column + K_BYTES // 4), slice(0, self.rows // LANE_GROUP)
                    core.tracker.tensor.access(rank, place, watched, write=False)
                core.tracker.tensor.access(rank, self._accumulator_place(), watched, write=True)

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
        unit = self._native_unit()
        b = None
        for rank in self.ranks:
            memory = self.core.tensor_memories[rank]
            if unit is not None and self._run_native(unit, rank, memory):
                continue
            if b is None:
                b = self._load_b()
            a = self._load_a(rank) if self.a_tmem is None else self._load_tmem(rank)
            self._accumulate(memory, b, a)
        self.core.instructions += 1

    def _load_b(self) -> np.ndarray:
        fields = self.fields
        parts = [self._load(r, self.b_places, fields.b_type, fields.b_mn_major, fields.negate_b) for r in self.ranks]
        return np.concatenate(parts) if self.cta_group == 2 else parts[0]

    def _load_a(self, rank: int) -> np.ndarray:
        fields = self.fields
        return self._load(rank, self.a_places, fields.a_type, fields.a_mn_major, fields.negate_a)

    def _native_unit(self) -> E4m3Unit | None:
        """The unit with operand B loaded, or None where this instruction is not one for it."""
        fields = self.fields
        plain = fields.a_type is E4M3 and fields.b_type is E4M3 and self.rows == LANES and self.a_tmem is None
        if not plain or fields.a_mn_major or fields.b_mn_major or fields.negate_a or fields.negate_b:
            return None
        unit = unit_if_worth_it(self.core.native)
        if unit is not None:
            for index, rank in enumerate(self.ranks):
                cta = self.core.shared.ctas[rank]
                if not unit.load_b(*cta.addresses(), self.b_places.address, self.columns, index * self.columns):
                    return None
        return unit

    def _run_native(self, unit: E4m3Unit, rank: int, memory: TensorMemory) -> bool:
        """One CTA's product; False, and nothing done, where a byte is NaN or uninitialised or a sum may be inexact."""
        cta = self.core.shared.ctas[rank]
        sums, earlier = self._exact_so_far(memory)
        if earlier is None or not unit.load_a(*cta.addresses(), self.a_places.address):
            return False
        self._cells(memory)
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
        earlier = int(sums.max()) if self.accumulate else 0
        # The count is kept per column: it says nothing when two accumulators share columns, each in half of the lanes.
        tagged = (self.rows == 128 or self.cta_group == 2) and (not self.accumulate or int(sums.min()) > 0)
        exact_types = fields.a_type is E4M3 and fields.b_type is E4M3 and fields.d_type == "f32"
        return sums, earlier if exact_types and tagged and earlier < _E4M3_SUMS_LIMIT else None

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
            if fields.saturate:
                total = np.clip(total, -(1 << 31), (1 << 31) - 1)
            cells.view(np.int32)[...] = total.astype(np.int64).astype(np.int32).reshape(cells.shape)
            return
        old = np.ascontiguousarray(cells).reshape(len(b), len(a)) if self.accumulate else None
        precision = max(fields.a_type.precision, fields.b_type.precision)
        if fields.d_type == "f16":
            half = None if old is None else old.view(np.uint32).astype(np.uint16).view(np.float16)
            total = exact.dot_add(b, a, half, precision, np.float16).view(np.uint16)
            cells.view(np.uint32)[...] = total.astype(np.uint32).reshape(cells.shape)
            return
        cells[...] = exact.dot_add(b, a, old, precision).reshape(cells.shape)
