"""cvt between integer and floating-point types; those of less than eight bits are in `instructions_convert_narrow`."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

from cute_kernels.emulator import instructions_numerics as numerics
from cute_kernels.emulator.block import BlockBuilder
from cute_kernels.emulator.decode import Instruction, Register
from cute_kernels.emulator.instructions_convert_narrow import convert_narrow
from cute_kernels.emulator.instructions_float import float_to_float
from cute_kernels.emulator.instructions_integer import signed
from cute_kernels.emulator.instructions_registry import family
from cute_kernels.emulator.values import CANONICAL, DTYPES, Pack, PureOp, Value

_INTEGER_BITS = {f"{k}{b}": b for k in "us" for b in (8, 16, 32, 64)}
_FP8 = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}
_MODES = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")


@family("cvt")
def _cvt(block: BlockBuilder, instruction: Instruction) -> None:
    """cvt: integers, f16, bf16, f32, f64, packed f16x2/bf16x2/e4m3x2/e5m2x2/e2m3x2/e3m2x2/e2m1x2/ue8m0x2, tf32."""
    *flags, target, source = instruction.parts[1:]
    for flag in flags:
        if flag not in (*_MODES, "sat", "satfinite", "relu", "ftz"):
            raise instruction.refuse(f"qualifier .{flag} of cvt is not implemented")
    narrow = convert_narrow(block, instruction, flags, target, source)
    if narrow is not None:
        result = narrow
    elif target in _INTEGER_BITS and source in _INTEGER_BITS:
        result = _integer_to_integer(block, instruction, flags, target, source)
    elif target in ("f16x2", "bf16x2", "e4m3x2", "e5m2x2") and source == "f32":
        result = _pair(block, instruction, flags, target)
    elif target in _FP8 or source in _FP8:
        result = _fp8(block, instruction, flags, target, source)
    elif target in _INTEGER_BITS:
        result = _float_to_integer(block, instruction, flags, target, source)
    elif source in _INTEGER_BITS:
        result = _integer_to_float(block, instruction, flags, target, source)
    else:
        result = _float_to_float(block, instruction, flags, target, source)
    block.define(instruction.operands[0], result)


def _only(instruction: Instruction, flags: list[str], *allowed: str) -> None:
    for flag in flags:
        if flag not in allowed:
            raise instruction.refuse(f"cvt.{'.'.join(instruction.parts[1:])}: .{flag} is not implemented here")


def _register_bits(block: BlockBuilder, instruction: Instruction) -> int:
    destination = instruction.operands[0]
    return block.bits_of(destination.name) if isinstance(destination, Register) else 32


@functools.cache
def extend(source: str, bits: int, source_bits: int) -> PureOp:
    """Reads the low bits of a register as ``source`` and extends them to ``bits`` bits by their sign."""
    width = _INTEGER_BITS[source]
    low = f"({{0}} & {(1 << width) - 1:#x})"
    value = signed(low, width) if source[0] == "s" else low

    def vector(x: np.ndarray) -> np.ndarray:
        narrow = x.astype(DTYPES[f"u{width}"]).view(DTYPES[source])
        return narrow.astype(DTYPES[f"s{bits}"] if source[0] == "s" else DTYPES[f"u{bits}"]).view(DTYPES[f"u{bits}"])

    name = f"extend_{source}_{bits}_{source_bits}"
    return PureOp(name, (CANONICAL[source_bits],), f"u{bits}", vector, f"({value} & {(1 << bits) - 1:#x})")


@functools.cache
def saturate(source: str, target: str) -> PureOp:
    """Reads the low bits of 64 as ``source`` and limits them to the range of ``target``; the result has 64 bits."""
    width, bits = _INTEGER_BITS[source], _INTEGER_BITS[target]
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if target[0] == "s" else (0, (1 << bits) - 1)

    def vector(x: np.ndarray) -> np.ndarray:
        narrow = x.astype(DTYPES[f"u{width}"]).view(DTYPES[source])
        if narrow.dtype == np.uint64:
            return np.minimum(narrow, np.uint64(high))
        limited = np.maximum(narrow, 0) if bits == 64 and low == 0 else np.clip(narrow.astype(np.int64), low, high)
        return limited.astype(np.int64).view(np.uint64)

    value = f"({{0}} & {(1 << width) - 1:#x})"
    value = signed(value, width) if source[0] == "s" else value
    scalar = f"(min(max({value}, {low}), {high}) & {(1 << 64) - 1:#x})"
    return PureOp(f"saturate_{source}_{target}", ("u64",), "u64", vector, scalar)


def _integer_to_integer(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value:
    """Truncation, extension, saturation. A register wider than the destination type is extended by the type's sign."""
    _only(instruction, flags, "sat")
    operand = instruction.operands[1]
    source_bits = _value_bits(block, operand, _INTEGER_BITS[source])
    value = block.value(operand, source_bits)
    register = _register_bits(block, instruction)
    width = _INTEGER_BITS[target]
    if "sat" in flags:
        value = block.pure(saturate(source, target), block.resize(value, 64))
    elif width > _INTEGER_BITS[source]:
        value = block.pure(extend(source, width, value.bits), value)
    if register == width == value.bits:
        return value
    if register < width:
        raise instruction.refuse("the destination register is narrower than the destination type")
    return block.pure(extend(target, register, value.bits), value)


def _value_bits(block: BlockBuilder, operand: object, default: int) -> int:
    return block.bits_of(operand.name) if isinstance(operand, Register) else default


@functools.cache
def _narrow_f32(target: str, mode: str, satfinite: bool, relu: bool) -> PureOp:
    """f32 to f16 or bf16 bits."""
    functions = {
        ("bf16", "rn"): numerics.f32_to_bf16,
        ("bf16", "rz"): numerics.f32_to_bf16_truncated,
        ("f16", "rn"): numerics.f32_to_f16,
    }
    base = functions[target, mode]
    largest = {"f16": np.float32(65504), "bf16": np.uint32(0x7F7F0000).view(np.float32)}[target]

    def vector(x: np.ndarray) -> np.ndarray:
        if relu:
            x = np.where(x != x, x, np.where(x > 0, x, np.float32(0)))
        if satfinite:
            x = np.clip(x, -largest, largest)
        return base(x)

    plain = not satfinite and not relu
    name = f"cvt_{target}_f32_{mode}{'_satfinite' if satfinite else ''}{'_relu' if relu else ''}"
    return PureOp(name, ("f32",), "u16", base if plain else vector)


def _narrow_from_flags(instruction: Instruction, flags: list[str], target: str) -> PureOp:
    _only(instruction, flags, "rn", "rz", "satfinite", "relu")
    mode = "rz" if "rz" in flags else "rn"
    if (target, mode) == ("f16", "rz"):
        raise instruction.refuse("cvt.rz to f16 is not implemented")
    return _narrow_f32(target, mode, "satfinite" in flags, "relu" in flags)


def _pair(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str) -> Value:
    """cvt.rn.f16x2.f32 d, a, b: a goes to the upper half."""
    if len(instruction.operands) != 3:
        raise instruction.refuse("a packed conversion takes two sources")
    high, low = (block.value(operand, 32) for operand in instruction.operands[1:])
    if target in _FP8:
        _only(instruction, flags, "rn", "satfinite", "relu")
        if "satfinite" not in flags:
            raise instruction.refuse("a conversion to FP8 needs .satfinite")
        op = to_fp8(target, "relu" in flags)
    else:
        op = _narrow_from_flags(instruction, flags, target[:-2])
    return Pack([block.pure(op, low), block.pure(op, high)])


@functools.cache
def to_fp8(target: str, relu: bool) -> PureOp:
    dtype = _FP8[target]
    largest = np.float32(ml_dtypes.finfo(dtype).max)

    def vector(x: np.ndarray) -> np.ndarray:
        nan = x != x
        if relu:
            x = np.where(x > 0, x, np.float32(0))
        with np.errstate(invalid="ignore"):
            bits = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
        return np.where(nan, np.uint8(0x7F), bits)

    return PureOp(f"cvt_{target}_f32{'_relu' if relu else ''}", ("f32",), "u8", vector)


@functools.cache
def from_fp8(source: str) -> PureOp:
    """To f16 bits, exactly; NaN becomes canonical."""
    dtype = _FP8[source]

    def vector(x: np.ndarray) -> np.ndarray:
        return numerics.f32_to_f16(x.view(dtype).astype(np.float32))

    return PureOp(f"cvt_f16_{source}", ("u8",), "u16", vector)


def _fp8(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str) -> Value:
    """Two FP8 values to f16x2 (exact). The other direction of f16x2 is refused: it has no user yet."""
    if target != "f16x2" or source not in _FP8:
        raise instruction.refuse(f"cvt from {source} to {target} is not implemented")
    _only(instruction, flags, "rn")
    codes = block.split(block.value(instruction.operands[1], 16), 2)
    return Pack([block.pure(from_fp8(source), code) for code in codes])


_FLOAT_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


@functools.cache
def float_to_integer(mode: str, ftz: bool, target: str, source: str) -> PureOp:
    """Rounds f32 or f64 to an integer and cuts it to the range of ``target``."""
    bits = _INTEGER_BITS[target]

    def vector(x: np.ndarray) -> np.ndarray:
        return numerics.float_to_integer(numerics.flush_f32(x) if ftz else x, mode, bits, target[0] == "s")

    return PureOp(f"cvt_{mode}{'_ftz' if ftz else ''}_{target}_{source}", (source,), f"u{bits}", vector)


def _float_to_integer(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value:
    _only(instruction, flags, "rni", "rzi", "rmi", "rpi", "sat", "ftz")
    modes = [flag for flag in flags if flag in ("rni", "rzi", "rmi", "rpi")]
    if len(modes) != 1 or source not in _FLOAT_BITS:
        raise instruction.refuse("a float-to-integer conversion needs one integer rounding")
    ftz = "ftz" in flags
    if ftz and source != "f32":
        raise instruction.refuse("a float-to-integer conversion has .ftz from f32 only")
    bits = _INTEGER_BITS[target]
    value = block.value(instruction.operands[1], _FLOAT_BITS[source])
    if source in ("f16", "bf16"):
        value, source = block.pure(float_to_float("f32", source), value), "f32"
    value = block.pure(float_to_integer(modes[0], ftz, target, source), value)
    register = _register_bits(block, instruction)
    return value if register == bits else block.pure(extend(target, register, bits), value)


@functools.cache
def integer_to_float(target: str, source: str) -> PureOp:
    """To f32 or f64, and of 32 bits at most to bits of f16 or bf16; to nearest even."""
    if target in ("f16", "bf16"):
        narrow = numerics.f64_to_f16 if target == "f16" else numerics.f64_to_bf16
        return PureOp(f"cvt_{target}_{source}", (source,), "u16", lambda x: narrow(x.astype(np.float64)))
    goal = DTYPES[target]
    return PureOp(f"cvt_{target}_{source}", (source,), target, lambda x: x.astype(goal))


def _integer_to_float(
    block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str
) -> Value:
    _only(instruction, flags, "rn")
    operand = instruction.operands[1]
    width = _INTEGER_BITS[source]
    value = block.value(operand, _value_bits(block, operand, width))
    if value.bits != width:
        value = block.resize(value, width)
    if target not in ("f32", "f64") and (target not in ("f16", "bf16") or width > 32):
        raise instruction.refuse(f"cvt from {source} to {target} is not implemented")
    return block.pure(integer_to_float(target, source), value)


def _round_tf32(x: np.ndarray) -> np.ndarray:
    """To 10 mantissa bits, ties away from zero (.rna)."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits).astype(np.uint32).view(np.float32)


_ROUND_TF32 = PureOp("cvt_rna_tf32", ("f32",), "f32", _round_tf32)


def _float_to_float(block: BlockBuilder, instruction: Instruction, flags: list[str], target: str, source: str) -> Value:
    if (target, source) == ("tf32", "f32"):
        _only(instruction, flags, "rna")
        return block.pure(_ROUND_TF32, block.value(instruction.operands[1], 32))
    if target not in _FLOAT_BITS or source not in _FLOAT_BITS:
        raise instruction.refuse(f"cvt from {source} to {target} is not implemented")
    value = block.value(instruction.operands[1], _FLOAT_BITS[source])
    if source == "f32" and target in ("f16", "bf16"):
        return block.pure(_narrow_from_flags(instruction, flags, target), value)
    integral = [flag for flag in flags if flag in ("rni", "rzi", "rmi", "rpi")]
    if target == source == "f32" and integral:
        _only(instruction, flags, *integral, "ftz", "sat")
        if set(flags) - set(integral):
            raise instruction.refuse("cvt to an integral float with .ftz or .sat is not implemented")
        return block.pure(integral_float(integral[0]), value)
    if target == source == "f32" and set(flags) in ({"sat"}, {"sat", "ftz"}):
        return block.pure(saturated_float("ftz" in flags), value)
    _only(instruction, flags, "rn")
    if (target, source) != ("f32", "f64") and (target not in ("f32", "f64") or source == "f64"):
        raise instruction.refuse(f"cvt from {source} to {target} is not implemented")
    return block.pure(float_to_float(target, source), value)


@functools.cache
def integral_float(mode: str) -> PureOp:
    """Rounds f32 to an integral f32."""
    return PureOp(
        f"cvt_{mode}_f32", ("f32",), "f32", lambda x: numerics.canonical_f32(numerics.round_integral(x, mode))
    )


@functools.cache
def saturated_float(ftz: bool) -> PureOp:
    """.sat of f32. .ftz changes nothing that .sat has not made a zero or a normal number but subnormals, which it
    flushes."""
    flush = numerics.flush_f32 if ftz else lambda x: x
    name = "cvt_sat_ftz_f32" if ftz else "cvt_sat_f32"
    return PureOp(name, ("f32",), "f32", lambda x: numerics.clamp_f32(flush(x)))
