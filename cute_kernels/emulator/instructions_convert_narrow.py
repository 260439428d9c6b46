"""cvt to and from elements of four and six bits, and scales: e2m1x2, e2m3x2, e3m2x2, ue8m0x2.

Two e2m1 are one byte; of e2m3, e3m2 and ue8m0 each lies in a byte of its own. What the PTX ISA leaves open follows the
functions that NVIDIA's cuda_fp8.hpp (CUDA 13.0) has for hosts: scales ignore the sign.
"""

from __future__ import annotations

import functools

import numpy as np

from cute_kernels.emulator.block import BlockBuilder
from cute_kernels.emulator.decode import Instruction
from cute_kernels.emulator.instructions_float import float_to_float
from cute_kernels.emulator.values import Pack, PureOp, Value

#: Type -> bits of exponent and of fraction; none has infinities or NaN, and the bias is that of IEEE 754.
FORMATS = {"e2m1x2": (2, 1), "e2m3x2": (2, 3), "e3m2x2": (3, 2)}
SCALES = "ue8m0x2"


def magnitudes(exponent_bits: int, fraction_bits: int) -> np.ndarray:
    """float32, the values of all codes without a sign, which ascend."""
    codes = np.arange(1 << exponent_bits + fraction_bits)
    field, fraction = codes >> fraction_bits, codes & ((1 << fraction_bits) - 1)
    bias = (1 << exponent_bits - 1) - 1
    digits = fraction + np.where(field > 0, 1 << fraction_bits, 0)
    return np.ldexp(digits, np.maximum(field, 1) - bias - fraction_bits).astype(np.float32)


def convert_narrow(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value | None:
    """The result of a cvt of one of these types; None: it has none of them.

    Raises:
        UnsupportedPTX: qualifiers or types that do not go together.
    """
    if not {target, source} & {*FORMATS, SCALES}:
        return None
    if target == SCALES and source in ("f32", "bf16x2"):
        return _to_scales(block, instruction, flags, source)
    if (target, source) == ("bf16x2", SCALES):
        _needs(instruction, flags, {"rn"})
        codes = block.split(block.value(instruction.operands[1], 16), 2)
        return Pack([block.pure(FROM_SCALE, code) for code in codes])
    if target in FORMATS and source == "f32":
        return _from_floats(block, instruction, flags, target)
    if (target, source) == ("e2m1x2", "f16x2"):
        return _from_halves(block, instruction, flags, target)
    if source in FORMATS and target == "f16x2":
        return _to_halves(block, instruction, flags, source)
    raise instruction.refuse(f"cvt from {source} to {target} is not implemented")


def _needs(instruction: Instruction, flags: list[str], needed: set[str], *allowed: str) -> None:
    if not needed <= set(flags) or set(flags) - needed - set(allowed) or len(set(flags)) < len(flags):
        name = ".".join(instruction.parts)
        choice = f" and may have .{', .'.join(allowed)}" if allowed else ""
        raise instruction.refuse(f"{name}: it needs .{', .'.join(sorted(needed))}{choice}")


@functools.cache
def to_code(target: str, relu: bool) -> PureOp:
    """One f32 to a byte: to nearest even, what is too large to the largest number, NaN to the positive one."""
    exponent_bits, fraction_bits = FORMATS[target]
    values = magnitudes(exponent_bits, fraction_bits)
    middle = (values[1:] + values[:-1]) / 2

    def vector(x: np.ndarray) -> np.ndarray:
        size = np.abs(x)
        code = np.searchsorted(middle, size)  # NaN is behind all numbers
        tie = size == middle[np.minimum(code, len(middle) - 1)]
        code = code + (tie & (code & 1).astype(bool))
        negative = np.signbit(x) & (x == x)
        code = np.where(negative, 0 if relu else code | len(values), code)
        return code.astype(np.uint8)

    return PureOp(f"cvt_{target}_f32{'_relu' if relu else ''}", ("f32",), "u8", vector)


NIBBLES = PureOp("join_nibbles", ("u8", "u8"), "u8", lambda low, high: low | high << np.uint8(4))


def _joined(block: BlockBuilder, target: str, low: Value, high: Value) -> Value:
    return block.pure(NIBBLES, low, high) if target == "e2m1x2" else Pack([low, high])


def _from_floats(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str) -> Value:
    """a goes to the upper half."""
    _needs(instruction, flags, {"rn", "satfinite"}, "relu")
    high, low = (block.value(operand, 32) for operand in instruction.operands[1:])
    op = to_code(target, "relu" in flags)
    return _joined(block, target, block.pure(op, low), block.pure(op, high))


def _from_halves(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str) -> Value:
    _needs(instruction, flags, {"rn", "satfinite"}, "relu")
    op, widen = to_code(target, "relu" in flags), float_to_float("f32", "f16")
    halves = block.split(block.value(instruction.operands[1], 32), 2)
    parts = [block.pure(op, block.pure(widen, half)) for half in halves]
    return _joined(block, target, *parts)


@functools.cache
def from_code(source: str, relu: bool, nibble: int) -> PureOp:
    """A byte to f16 bits, exactly; ``nibble``: how far to the right the code is shifted first."""
    values = magnitudes(*FORMATS[source])
    table = np.concatenate([values, np.zeros_like(values) if relu else -values]).astype(np.float16).view(np.uint16)
    name = f"cvt_f16_{source}{'_relu' if relu else ''}_{nibble}"
    return PureOp(name, ("u8",), "u16", lambda x: table[x >> np.uint8(nibble) & np.uint8(len(table) - 1)])


def _to_halves(block: BlockBuilder, instruction: Instruction, flags: list[str], source: str) -> Value:
    _needs(instruction, flags, {"rn"}, "relu")
    relu = "relu" in flags
    if source == "e2m1x2":
        pair = block.value(instruction.operands[1], 8)
        return Pack([block.pure(from_code(source, relu, shift), pair) for shift in (0, 4)])
    parts = block.split(block.value(instruction.operands[1], 16), 2)
    return Pack([block.pure(from_code(source, relu, 0), part) for part in parts])


# --- scales: powers of two from 2^-127 to 2^127, and NaN ------------------------------------------------------------


@functools.cache
def to_scale(up: bool, finite: bool) -> PureOp:
    """The exponent field, of subnormal numbers 0; upwards one more where it is less than the magnitude."""

    def vector(x: np.ndarray) -> np.ndarray:
        size = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
        scale = size >> np.uint32(23)
        if up:
            fraction = size & np.uint32(0x7FFFFF)
            # 2^-127 is 0x400000, a subnormal number that code 0 has exactly.
            less = (fraction > np.where(scale == 0, np.uint32(0x400000), np.uint32(0))) & (scale < 255)
            scale = scale + less
        if finite:
            scale = np.where(size <= 0x7F800000, np.minimum(scale, 254), 255)
        return scale.astype(np.uint8)

    name = f"cvt_ue8m0_f32_{'rp' if up else 'rz'}{'_satfinite' if finite else ''}"
    return PureOp(name, ("f32",), "u8", vector)


def _to_scales(block: BlockBuilder, instruction: Instruction, flags: list[str], source: str) -> Value:
    mode = "rp" if "rp" in flags else "rz"
    _needs(instruction, flags, {mode}, "satfinite")
    op = to_scale(mode == "rp", "satfinite" in flags)
    if source == "f32":
        high, low = (block.value(operand, 32) for operand in instruction.operands[1:])
        return Pack([block.pure(op, low), block.pure(op, high)])
    widen = float_to_float("f32", "bf16")
    halves = block.split(block.value(instruction.operands[1], 32), 2)
    return Pack([block.pure(op, block.pure(widen, half)) for half in halves])


def _bf16_of_scale(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.uint16) << np.uint16(7)
    return np.where(x == 255, np.uint16(0x7FFF), np.where(x == 0, np.uint16(0x40), bits))


FROM_SCALE = PureOp("cvt_bf16_ue8m0", ("u8",), "u16", _bf16_of_scale)
