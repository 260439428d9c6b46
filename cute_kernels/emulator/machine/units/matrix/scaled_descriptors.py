"""Instruction descriptors of tcgen05.mma with block scaling (PTX ISA, "Block Scaling")."""

import functools
from dataclasses import dataclass

from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.machine.units.matrix import operands

#: Kind -> its element types, scales of a row in one instruction -> types of scales by code.
SCALED_KINDS: dict[str, tuple[dict[int, operands.ElementType], dict[int, tuple[str, ...]]]] = {
    "mxf8f6f4": (operands.EIGHT_BITS_AND_LESS, {1: ("ue8m0",)}),
    "mxf4": ({1: operands.E2M1_PAIRS}, {2: ("ue8m0",)}),
    "mxf4nvf4": ({1: operands.E2M1_PAIRS}, {2: ("ue8m0",), 4: ("ue4m3", "ue8m0")}),
}
_SCALE_TYPES = ("ue4m3", "ue8m0")  # by bit 23 of the instruction descriptor
_SHAPES = {1: ((128,), range(8, 257, 8)), 2: ((128, 256), range(16, 257, 16))}


@dataclass(frozen=True)
class ScaleFields:
    """Fields of an instruction descriptor about scales: their type, and in which byte of a cell the first one is."""

    name: str
    a_id: int
    b_id: int


@functools.lru_cache(maxsize=256)
def decode_scaled(kind: str, count: int, cta_group: int, descriptor: int) -> tuple[operands.Instruction, ScaleFields]:
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
        operands.check_majorness(types[code], mn_major, f"{where}: {operand}")
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
    fields = operands.Instruction(
        a_type=types[codes[0]], b_type=types[codes[1]],
        negate_a=bool(descriptor >> 13 & 1), negate_b=bool(descriptor >> 14 & 1),
        a_mn_major=bool(majors[0]), b_mn_major=bool(majors[1]), m=m, n=n,
    )  # fmt: skip
    return fields, ScaleFields(name, *ids)
