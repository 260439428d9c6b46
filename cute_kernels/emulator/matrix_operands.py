"""Operands of tcgen05.mma and wgmma: element types, descriptors, and where a matrix lies in shared memory."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.smem import SharedMemory
from cute_kernels.emulator.tensor_map import CHUNK, SWIZZLES

K_BYTES = 32  # PTX ISA: K of every dense kind is 32 bytes of operand elements
_CORE_ROWS = 8  # rows of a core matrix


@dataclass(frozen=True)
class ElementType:
    """An operand type.

    Attributes:
        name: as in PTX.
        nbytes: of an element, or of the container that it takes in shared memory.
        held: bytes that hold data of every 16 in shared memory. Elements of four and six bits lie side by side in the
            first of them, as tensor copies of the padded types leave them (PTX ISA, "Packing formats").
    """

    name: str
    nbytes: int
    held: int = CHUNK

    @property
    def narrow(self) -> bool:
        """Whether it has less than eight bits."""
        return self.held < CHUNK or self is E2M1_PAIRS


E4M3 = ElementType("e4m3", 1)
E5M2 = ElementType("e5m2", 1)
F16 = ElementType("f16", 2)
BF16 = ElementType("bf16", 2)
TF32 = ElementType("tf32", 4)
S8 = ElementType("s8", 1)
U8 = ElementType("u8", 1)
E2M3 = ElementType("e2m3", 1, held=12)
E3M2 = ElementType("e3m2", 1, held=12)
E2M1 = ElementType("e2m1", 1, held=8)
E2M1_PAIRS = ElementType("e2m1x2", 1)  # two in a byte, the first one lower: operands of the kinds of FP4
#: kind -> type code of the instruction descriptor -> element type.
EIGHT_BITS_AND_LESS = {0: E4M3, 1: E5M2, 3: E2M3, 4: E3M2, 5: E2M1}
KINDS = {"f8f6f4": EIGHT_BITS_AND_LESS, "f16": {0: F16, 1: BF16}, "tf32": {2: TF32}, "i8": {0: U8, 1: S8}}
#: kind -> type code of the accumulator -> its name.
_FLOATS = {0: "f16", 1: "f32"}
_ACCUMULATORS = {"f8f6f4": _FLOATS, "f16": _FLOATS, "tf32": {1: "f32"}, "i8": {2: "s32"}}


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


#: Integers and cta_group -> legal M, legal N, the latter in words: PTX ISA, "Matrix Shape", dense kinds without .ws.
_SHAPES: dict[tuple[bool, int], tuple[tuple[int, int], Collection[int], str]] = {
    (False, 1): ((64, 128), range(8, 257, 8), "N a multiple of 8 up to 256"),
    (False, 2): ((128, 256), range(16, 257, 16), "N a multiple of 16 up to 256"),
    (True, 1): ((64, 128), (8, 24, *range(16, 257, 16)), "N 8, 24 or a multiple of 16 up to 256"),
    (True, 2): ((128, 256), range(32, 257, 32), "N a multiple of 32 up to 256"),
}


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
    for operand, code, major in (("A", descriptor >> 7 & 7, 15), ("B", descriptor >> 10 & 7, 16)):
        check_majorness(types[code], descriptor >> major & 1, f"{where}: {operand}")
    m, n = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
    legal_m, legal_n, description = _SHAPES[kind == "i8", cta_group]
    if m not in legal_m or n not in legal_n:
        raise IllegalAccess(
            f"{where}: shape {m}x{n} with cta_group::{cta_group}; legal are {legal_m[0]}xN and {legal_m[1]}xN with "
            f"{description}"
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


def check_majorness(element: ElementType, mn_major: int, where: str) -> None:
    """Raises UnsupportedPTX where an operand cannot be MN-major."""
    if mn_major and element.narrow:
        raise UnsupportedPTX(f"{where} of {element.name} MN-major; elements of less than eight bits are K-major")


_SWIZZLE_MODES = {0: "none", 1: "128B_atom32B", 2: "128B", 4: "64B", 6: "32B"}


@functools.lru_cache(maxsize=1024)
def decode_matrix(descriptor: int) -> Matrix:
    """Decodes a shared-memory matrix descriptor.

    Raises:
        UnsupportedPTX: a reserved bit pattern, a base offset of a swizzled matrix, or an absolute leading dimension.
        UnsupportedPTX: the 32-byte-atom pattern entered in its middle.
    """
    where = f"matrix descriptor {descriptor:#018x}"
    mode = descriptor >> 61 & 7
    if mode not in _SWIZZLE_MODES:
        raise UnsupportedPTX(f"{where}: swizzle mode {mode}")
    if descriptor >> 46 & 7 != 1:
        raise UnsupportedPTX(f"{where}: bits 46-48 are {descriptor >> 46 & 7}, not the constant 1")
    base = 7 if mode else 0  # no swizzle repeats no pattern: its base offset means nothing (PTX ISA)
    if descriptor >> 49 & (0xFF8 | base) or descriptor >> 14 & 3 or descriptor >> 30 & 3:
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
        ).know("out-of-bounds")
