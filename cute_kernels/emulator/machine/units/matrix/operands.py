"""Operands of tcgen05.mma and wgmma: element types, descriptors, and where a matrix lies in shared memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.machine.state.smem import SharedMemory
from cute_kernels.emulator.machine.units.copies.tensor_map import CHUNK, SWIZZLES

MmaKind, _MmaFields, _Matrix, _MatrixRows = (
    STRUCTURES[name] for name in ("MmaKind", "MmaFields", "Matrix", "MatrixRows")
)
K_BYTES = 32  # PTX ISA: K of every dense kind is 32 bytes of operand elements


@dataclass(frozen=True)
class ElementType:
    """An operand type."""

    name: str  # as in PTX
    nbytes: int  # of an element, or of the container that it takes in shared memory
    # bytes that hold data of every 16 in shared memory. Elements of four and six bits lie side by side in the first of
    # them, as tensor copies of the padded types leave them (PTX ISA, "Packing formats")
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
_ELEMENTS = {
    CONSTANTS[element.name.upper()]: element for element in (E4M3, E5M2, F16, BF16, TF32, S8, U8, E2M3, E3M2, E2M1)
}
#: By their elements; the core multiplies none of those of less than eight bits.
ELEMENT_NUMBERS = {element: number for number, element in _ELEMENTS.items()} | {E2M1_PAIRS: CONSTANTS["E2M1"]}
#: kind -> type code of the instruction descriptor -> element type.
EIGHT_BITS_AND_LESS = {0: E4M3, 1: E5M2, 3: E2M3, 4: E3M2, 5: E2M1}
KINDS = {"f8f6f4": EIGHT_BITS_AND_LESS, "f16": {0: F16, 1: BF16}, "tf32": {2: TF32}, "i8": {0: U8, 1: S8}}
#: kind -> type code of the accumulator -> its name.
_FLOATS = {0: "f16", 1: "f32"}
_ACCUMULATORS = {"f8f6f4": _FLOATS, "f16": _FLOATS, "tf32": {1: "f32"}, "i8": {2: "s32"}}


@dataclass(frozen=True)
class Instruction:
    """The fields of an instruction descriptor that a dense MMA uses (PTX ISA, "Instruction descriptor")."""

    # a_type, b_type: element types
    a_type: ElementType
    b_type: ElementType
    # negate_a, negate_b: the operand is negated
    negate_a: bool
    negate_b: bool
    # a_mn_major, b_mn_major: the operand is MN-major (False: K-major)
    a_mn_major: bool
    b_mn_major: bool
    # m, n: shape of the accumulator, of both CTAs together
    m: int
    n: int
    d_type: str = "f32"  # type of the accumulator, ``"f32"``, ``"f16"`` (the low half of a cell) or ``"s32"``
    saturate: bool = False  # integer sums saturate


@dataclass(frozen=True)
class Matrix:
    """A shared-memory matrix descriptor (PTX ISA, "Shared memory descriptor"); offsets in bytes."""

    address: int  # offset of the matrix in the shared memory of its CTA
    leading: int  # leading dimension byte offset
    stride: int  # stride dimension byte offset
    swizzle: str  # a name of `SWIZZLES`


#: Integers and cta_group -> legal N in words: PTX ISA, "Matrix Shape", dense kinds without .ws.
_SHAPES: dict[tuple[bool, int], str] = {
    (False, 1): "N a multiple of 8 up to 256",
    (False, 2): "N a multiple of 16 up to 256",
    (True, 1): "N 8, 24 or a multiple of 16 up to 256",
    (True, 2): "N a multiple of 32 up to 256",
}
D_TYPES = ("f32", "f16", "s32")  # by their numbers in the core


@functools.lru_cache(maxsize=8)
def kind_codes(kind: str) -> ctypes.Structure:
    """Type codes of one of `KINDS` for the core: an `MmaKind`."""
    described = MmaKind()
    described.elements[:] = [
        CONSTANTS[KINDS[kind][code].name.upper()] if code in KINDS[kind] else CONSTANTS["NO_TYPE"]
        for code in range(CONSTANTS["TYPE_CODES"])
    ]
    described.d[:] = [
        D_TYPES.index(_ACCUMULATORS[kind][code]) if code in _ACCUMULATORS[kind] else CONSTANTS["NO_TYPE"]
        for code in range(CONSTANTS["D_CODES"])
    ]
    return described


@functools.lru_cache(maxsize=256)
def decode_instruction(kind: str, cta_group: int, descriptor: int) -> Instruction:
    """Decodes an instruction descriptor (``core/descriptors.c``). Raises UnsupportedPTX: sparsity, element types not
    implemented or that do not go with the accumulator; IllegalAccess: a shape that does not exist."""
    if kind not in KINDS:
        raise UnsupportedPTX(f"tcgen05.mma.kind::{kind}; implemented are {', '.join(KINDS)}")
    fields = _MmaFields()
    wrong = library().mma_fields(ctypes.byref(kind_codes(kind)), cta_group, descriptor, ctypes.byref(fields))
    if wrong:
        raise _refused_instruction(wrong, kind, cta_group, descriptor)
    return Instruction(
        a_type=_ELEMENTS[fields.a], b_type=_ELEMENTS[fields.b],
        negate_a=bool(fields.negate_a), negate_b=bool(fields.negate_b),
        a_mn_major=bool(fields.a_mn_major), b_mn_major=bool(fields.b_mn_major),
        m=fields.m, n=fields.n, d_type=D_TYPES[fields.d], saturate=bool(fields.saturate),
    )  # fmt: skip


def _refused_instruction(wrong: int, kind: str, cta_group: int, descriptor: int) -> EmulatorError:
    """The error for what `decode_instruction` has found wrong."""
    where = f"instruction descriptor {descriptor:#010x} of kind::{kind}"
    codes = {"A": descriptor >> 7 & 7, "B": descriptor >> 10 & 7}
    operand = "A" if wrong in (CONSTANTS["MMA_A_TYPE"], CONSTANTS["MMA_A_MAJOR"]) else "B"
    if wrong == CONSTANTS["MMA_BITS"]:
        text = "sparsity, saturation of floats, negation of integers or a reserved bit"
    elif wrong == CONSTANTS["MMA_D_TYPE"]:
        text = f"D type {descriptor >> 4 & 3}; implemented is {_listed(_ACCUMULATORS[kind].items())}"
    elif wrong in (CONSTANTS["MMA_A_TYPE"], CONSTANTS["MMA_B_TYPE"]):
        known = _listed((code, element.name) for code, element in KINDS[kind].items())
        text = f"{operand} type {codes[operand]}; implemented are {known}"
    elif wrong == CONSTANTS["MMA_BF16"]:
        text = "BF16 operands with an FP16 accumulator"
    elif wrong == CONSTANTS["MMA_SHAPE"]:
        m, n = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
        return IllegalAccess(
            f"{where}: shape {m}x{n} with cta_group::{cta_group}; legal are {64 * cta_group}xN and "
            f"{128 * cta_group}xN with {_SHAPES[kind == 'i8', cta_group]}"
        )
    else:
        return _refused_majorness(KINDS[kind][codes[operand]], f"{where}: {operand}")
    return UnsupportedPTX(f"{where}: {text}")


def _listed(names: Iterable[tuple[int, str]]) -> str:
    return ", ".join(f"{code} ({name})" for code, name in names)


def check_majorness(element: ElementType, mn_major: int, where: str) -> None:
    """Raises UnsupportedPTX where an operand cannot be MN-major."""
    if mn_major and element.narrow:
        raise _refused_majorness(element, where)


def _refused_majorness(element: ElementType, where: str) -> UnsupportedPTX:
    return UnsupportedPTX(f"{where} of {element.name} MN-major; elements of less than eight bits are K-major")


_SWIZZLES = tuple(SWIZZLES)  # by their numbers in the core


@functools.lru_cache(maxsize=1024)
def decode_matrix(descriptor: int) -> Matrix:
    """Decodes a shared-memory matrix descriptor (``core/descriptors.c``). Raises UnsupportedPTX: a reserved bit
    pattern, a base offset of a swizzled matrix, an absolute leading dimension, or a pattern of 32-byte atoms that is
    entered in its middle."""
    fields = _Matrix()
    wrong = library().matrix_fields(descriptor, ctypes.byref(fields))
    matrix = Matrix(fields.address, fields.leading, fields.stride, _SWIZZLES[fields.swizzle])
    if not wrong:
        return matrix
    texts = {
        "MATRIX_MODE": f"swizzle mode {descriptor >> 61 & 7}",
        "MATRIX_CONSTANT": f"bits 46-48 are {descriptor >> 46 & 7}, not the constant 1",
        "MATRIX_BITS": "a base offset, an absolute leading dimension or a reserved bit",
        "MATRIX_START": f"the matrix starts at shared offset {matrix.address}, in the middle of the pattern of swizzle "
        f"{matrix.swizzle} (512 bytes)",
    }
    text = next(text for name, text in texts.items() if CONSTANTS[name] == wrong)
    raise UnsupportedPTX(f"matrix descriptor {descriptor:#018x}: {text}")


@functools.lru_cache(maxsize=512)
def operand_places(matrix: Matrix, rows: int, element_bytes: int, mn_major: bool) -> np.ndarray:
    """Where an operand lies in shared memory, relative to offset 0 of its CTA (``core/descriptors.c``).

    Returns:
        K-major: int64 [rows, 2], indices of the 16-byte chunks of each row. MN-major: int64 [rows, K], indices of the
        elements. Canonical layouts of the PTX ISA, "Shared memory matrix layout".
    """
    places = np.empty((rows, K_BYTES // (element_bytes if mn_major else CHUNK)), np.int64)
    described = _Matrix(matrix.address, matrix.leading, matrix.stride, _SWIZZLES.index(matrix.swizzle))
    layout = _MatrixRows(rows, element_bytes, mn_major)
    library().matrix_places(ctypes.byref(described), ctypes.byref(layout), places.ctypes.data)
    return places


@dataclass(frozen=True)
class Places:
    """Where an operand lies in shared memory."""

    places: np.ndarray  # see `operand_places`; ``address`` is the array's
    starts: np.ndarray  # int64, offsets of its 16-byte chunks
    # low, high: offsets of its first byte and behind its last
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


# --- with block scaling (PTX ISA, "Block Scaling") --------------------------------------------------------------------

#: Kind -> its element types, scales of a row in one instruction -> types of scales by code.
SCALED_KINDS: dict[str, tuple[dict[int, ElementType], dict[int, tuple[str, ...]]]] = {
    "mxf8f6f4": (EIGHT_BITS_AND_LESS, {1: ("ue8m0",)}),
    "mxf4": ({1: E2M1_PAIRS}, {2: ("ue8m0",)}),
    "mxf4nvf4": ({1: E2M1_PAIRS}, {2: ("ue8m0",), 4: ("ue4m3", "ue8m0")}),
}
_SCALE_TYPES = ("ue4m3", "ue8m0")  # by bit 23 of the instruction descriptor
_SCALED_SHAPES = {1: ((128,), range(8, 257, 8)), 2: ((128, 256), range(16, 257, 16))}


@dataclass(frozen=True)
class ScaleFields:
    """Fields of an instruction descriptor about scales: their type, and in which byte of a cell the first one is."""

    name: str
    a_id: int
    b_id: int


@functools.lru_cache(maxsize=256)
def decode_scaled(kind: str, count: int, cta_group: int, descriptor: int) -> tuple[Instruction, ScaleFields]:
    """Decodes an instruction descriptor of a kind with block scaling (PTX ISA, "Instruction descriptor"). ``kind``: a
    key of `SCALED_KINDS`. ``count``: scales of each row. ``cta_group``: 1 or 2. ``descriptor``: 32 bits. Raises
    UnsupportedPTX: sparsity, a K of 96, reserved bits, types that do not go with the kind; IllegalAccess: a shape that
    does not exist, or a byte in which these scales cannot begin."""
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
    legal_m, legal_n = _SCALED_SHAPES[cta_group]
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
