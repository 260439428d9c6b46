"""Floating-point arithmetic: f32, f32x2, f16, bf16 and their pairs, f64.

Sums, products, fused multiply-adds, quotients and square roots are correctly rounded; these and their NaNs were found
equal to an H200 bit for bit. The ``.approx`` functions (ex2, lg2, rcp, rsqrt, sin, cos, tanh, div) are computed in f64
and rounded: the hardware's tables are not documented. An H200 differed from them in the last bits of a fifth of random
ex2, lg2 and rsqrt, and in more of tanh, sin and cos, whose error on silicon is bounded absolutely only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.emulator import instructions_numerics as numerics
from cute_kernels.emulator.block import BlockBuilder
from cute_kernels.emulator.decode import TYPE_BITS, Instruction
from cute_kernels.emulator.instructions_registry import family, qualifiers
from cute_kernels.emulator.values import DTYPES, Pack, PureOp, Value

_HALF = {"f16": numerics.f64_to_f16, "bf16": numerics.f64_to_bf16}
_ROUNDING = ("rn",)


def _quiet(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    @functools.wraps(function)
    def inner(*args: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return function(*args)

    return inner


def _add_f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return numerics.canonical_f32(a + b)


def _sub_f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return numerics.canonical_f32(a - b)


def _mul_f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return numerics.canonical_f32(a * b)


def _div_f32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return numerics.canonical_f32(a / b)


def _via_f64(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def inner(*args: np.ndarray) -> np.ndarray:
        return numerics.canonical_f32(function(*(x.astype(np.float64) for x in args)).astype(np.float32))

    return inner


def _magnitude_bits(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).view(np.float32)


def _negate_bits(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) ^ np.uint32(0x80000000)).view(np.float32)


def _directed_f64(name: str, mode: str) -> Callable[..., np.ndarray]:
    fused = functools.partial(numerics.fma_f64, mode=mode)
    functions: dict[str, Callable[..., np.ndarray]] = {
        "add": lambda a, b: fused(a, np.float64(1), b),
        "sub": lambda a, b: fused(a, np.float64(1), -b),
        # A zero addend of the product's sign changes nothing, not even the sign of a zero.
        "mul": lambda a, b: fused(a, b, np.copysign(np.float64(0), a) * np.copysign(np.float64(1), b)),
        "fma": fused,
    }
    return numerics.with_nan_f64(functions[name])


def _directed_sum(mode: str) -> Callable[..., np.ndarray]:
    return lambda a, b: numerics.fma_directed_f32(mode, a, np.float32(1), b)


def _directed_product(mode: str) -> Callable[..., np.ndarray]:
    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        # A zero addend of the product's sign changes nothing, not even the sign of a zero.
        zero = np.copysign(np.float32(0), a) * np.copysign(np.float32(1), b)
        return numerics.fma_directed_f32(mode, a, b, zero)

    return product


def _directed_difference(mode: str) -> Callable[..., np.ndarray]:
    return lambda a, b: numerics.fma_directed_f32(mode, a, np.float32(1), _negate_bits(b))


def _signs_xored(order: Callable[..., np.ndarray], widen: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Any]:
    """min or max of magnitudes as f32, with the exclusive or of the operands' signs: .xorsign.abs."""

    def signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = widen(a), widen(b)
        result = order(_magnitude_bits(a), _magnitude_bits(b))
        sign = (a.view(np.uint32) ^ b.view(np.uint32)) & np.uint32(0x80000000)
        return np.where(result != result, result.view(np.uint32), result.view(np.uint32) | sign).view(np.float32)

    return signed


def _rectified(x: np.ndarray) -> np.ndarray:
    """.relu of bits of f16 or bf16: negative numbers and -0 become +0, NaN stays."""
    negative = (x & np.uint16(0x8000)) != 0  # the one NaN of these results has no sign
    return np.where(negative, np.uint16(0), x)


_ORDERS: dict[str, Callable[..., np.ndarray]] = {
    "min": numerics.lowest_f32,
    "max": numerics.highest_f32,
    "min.NaN": numerics.lowest_nan_f32,
    "max.NaN": numerics.highest_nan_f32,
}
_F32: dict[str, tuple[int, Callable[..., np.ndarray]]] = {
    "add": (2, _add_f32),
    "sub": (2, _sub_f32),
    "mul": (2, _mul_f32),
    "fma": (3, numerics.fma_f32),
    **{f"add.{mode}": (2, _directed_sum(mode)) for mode in numerics.DIRECTIONS},
    **{f"sub.{mode}": (2, _directed_difference(mode)) for mode in numerics.DIRECTIONS},
    **{f"mul.{mode}": (2, _directed_product(mode)) for mode in numerics.DIRECTIONS},
    **{f"fma.{mode}": (3, functools.partial(numerics.fma_directed_f32, mode)) for mode in numerics.DIRECTIONS},
    "div": (2, _div_f32),
    "min": (2, numerics.lowest_f32),
    "max": (2, numerics.highest_f32),
    "min.NaN": (2, numerics.lowest_nan_f32),
    "max.NaN": (2, numerics.highest_nan_f32),
    **{f"{name}.xorsign": (2, _signs_xored(order, lambda x: x)) for name, order in _ORDERS.items()},
    "abs": (1, lambda x: numerics.canonical_f32(_magnitude_bits(x))),
    "neg": (1, lambda x: numerics.canonical_f32(_negate_bits(x))),
    "rcp": (1, lambda x: numerics.canonical_f32(np.float32(1) / x)),
    "sqrt": (1, lambda x: numerics.canonical_f32(np.sqrt(x))),
    "rsqrt": (1, _via_f64(lambda x: 1.0 / np.sqrt(x))),
    "ex2": (1, _via_f64(np.exp2)),
    "lg2": (1, _via_f64(np.log2)),
    "sin": (1, _via_f64(np.sin)),
    "cos": (1, _via_f64(np.cos)),
    "tanh": (1, _via_f64(np.tanh)),
}
_APPROXIMATE = ("ex2", "lg2", "sin", "cos", "tanh", "rsqrt")


@functools.cache
def f32_op(name: str, ftz: bool = False, saturate: bool = False) -> PureOp:
    """An f32 operation with the modifiers .ftz and .sat."""
    count, function = _F32[name]

    def vector(*args: np.ndarray) -> np.ndarray:
        result = function(*(numerics.flush_f32(x) for x in args)) if ftz else function(*args)
        if ftz:
            result = numerics.flush_f32(result)
        return numerics.clamp_f32(result) if saturate else result

    plain = not ftz and not saturate
    label = f"{name.replace('.', '_')}_f32{'_ftz' if ftz else ''}{'_sat' if saturate else ''}"
    return PureOp(label, ("f32",) * count, "f32", _quiet(function if plain else vector))


@functools.cache
def f64_op(name: str) -> PureOp:
    """An f64 operation."""
    table = {
        "add": (2, numerics.with_nan_f64(np.add)),
        "sub": (2, numerics.with_nan_f64(np.subtract)),
        "mul": (2, numerics.with_nan_f64(np.multiply)),
        "div": (2, numerics.with_nan_f64(np.divide)),
        "abs": (1, np.abs),
        "neg": (1, np.negative),
        "sqrt": (1, numerics.with_nan_f64(np.sqrt)),
        "min": (2, numerics.with_nan_f64(numerics.lowest_f64)),
        "max": (2, numerics.with_nan_f64(numerics.highest_f64)),
        "rcp": (1, numerics.with_nan_f64(lambda x: 1.0 / x)),
        "fma": (3, numerics.with_nan_f64(numerics.fma_f64)),
        **{
            f"{name}.{mode}": (3 if name == "fma" else 2, _directed_f64(name, mode))
            for name in ("add", "sub", "mul", "fma")
            for mode in numerics.DIRECTIONS
        },
    }
    count, function = table[name]
    return PureOp(f"{name.replace('.', '_')}_f64", ("f64",) * count, "f64", _quiet(function))


@functools.cache
def half_op(name: str, type_: str) -> PureOp:
    """An operation on bits (u16) of f16 or bf16."""
    bf16 = type_ == "bf16"
    widen = numerics.bf16_to_f32 if bf16 else (lambda x: x.view(np.float16).astype(np.float32))
    narrow = numerics.f32_to_bf16 if bf16 else numerics.f32_to_f16
    fused = numerics.fma_bf16 if bf16 else numerics.fma_f16
    exact = {
        "fma": (3, fused),
        "fma.relu": (3, lambda a, b, c: _rectified(fused(a, b, c))),
        **{
            f"{name}.xorsign": (2, lambda a, b, order=order: narrow(_signs_xored(order, widen)(a, b)))
            for name, order in _ORDERS.items()
        },
        "add": (2, numerics.add_bf16 if bf16 else numerics.add_f16),
        "mul": (2, numerics.mul_bf16 if bf16 else numerics.mul_f16),
        "sub": (2, _subtract(numerics.add_bf16 if bf16 else numerics.add_f16)),
        "min": (2, lambda a, b: narrow(numerics.lowest_f32(widen(a), widen(b)))),
        "max": (2, lambda a, b: narrow(numerics.highest_f32(widen(a), widen(b)))),
        "min.NaN": (2, lambda a, b: narrow(numerics.lowest_nan_f32(widen(a), widen(b)))),
        "max.NaN": (2, lambda a, b: narrow(numerics.highest_nan_f32(widen(a), widen(b)))),
        "abs": (1, lambda a: narrow(_magnitude_bits(widen(a)))),
        "neg": (1, lambda a: narrow(_negate_bits(widen(a)))),
        "ex2": (1, lambda a: _HALF[type_](np.exp2(widen(a).astype(np.float64)))),
        "tanh": (1, lambda a: _HALF[type_](np.tanh(widen(a).astype(np.float64)))),
    }
    count, function = exact[name]
    return PureOp(f"{name.replace('.', '_')}_{type_}", ("u16",) * count, "u16", _quiet(function))


def _subtract(add: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def subtract(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return add(a, b ^ np.uint16(0x8000))

    return subtract


def _lower(block: BlockBuilder, instruction: Instruction, name: str, sources: list[Value], type_: str) -> Value:
    parts = instruction.parts[1:-1]
    ftz, saturate = "ftz" in parts, "sat" in parts
    if type_ == "f32":
        return block.pure(f32_op(name, ftz, saturate), *sources)
    if type_ in ("f16", "bf16"):
        if ftz or saturate:
            raise instruction.refuse(f".ftz and .sat of {name}.{type_} are not implemented")
        return block.pure(half_op(name, type_), *sources)
    if type_ == "f64" and not saturate:
        return block.pure(f64_op(name), *sources)
    raise instruction.refuse(f"{name}.{type_} is not implemented")


def _elementwise(block: BlockBuilder, instruction: Instruction, name: str = "") -> None:
    """Applies the operation, pairs (x2 types) element by element."""
    name, type_ = name or instruction.parts[0], instruction.parts[-1]
    base, pair = (type_[:-2], True) if type_.endswith("x2") else (type_, False)
    bits = TYPE_BITS[base] * (2 if pair else 1)
    sources = [block.value(operand, bits) for operand in instruction.operands[1:]]
    if pair:
        halves = [block.split(source, 2) for source in sources]
        result: Value = Pack([_lower(block, instruction, name, [h[i] for h in halves], base) for i in (0, 1)])
    else:
        result = _lower(block, instruction, name, sources, base)
    block.define(instruction.operands[0], result)


_FLOATS = ("f32", "f32x2", "f16", "f16x2", "bf16", "bf16x2", "f64")


@family("add", "sub", "mul", "fma")
def _sum_product(block: BlockBuilder, instruction: Instruction) -> None:
    """add, sub, mul, fma on floats: .rn (the default), .ftz, .sat; f16 or bf16 operands of f32 sums; f32, f32x2
    and f64 directed; .relu of fma on f16 and bf16."""
    parts = qualifiers(instruction, "rn", *numerics.DIRECTIONS, "ftz", "sat", "relu", *_FLOATS)
    modes = [part for part in parts if part in numerics.DIRECTIONS]
    types = [part for part in parts if part in _FLOATS]
    if modes:
        if types not in (["f32"], ["f32x2"], ["f64"]):
            raise instruction.refuse(f"{instruction.opcode} is not implemented")
        _elementwise(block, instruction, f"{instruction.parts[0]}.{modes[0]}")
        return
    if "relu" in parts:
        if instruction.parts[0] != "fma" or len(types) != 1 or types[0] not in ("f16", "f16x2", "bf16", "bf16x2"):
            raise instruction.refuse(f"{instruction.opcode} is not implemented")
        _elementwise(block, instruction, "fma.relu")
        return
    if len(types) == 2 and types[0] == "f32" and types[1] in ("f16", "bf16") and instruction.parts[0] != "mul":
        _mixed(block, instruction, types[1])
    elif len(types) == 1:
        _elementwise(block, instruction)
    else:
        raise instruction.refuse(f"{instruction.opcode}, with operands of these types, is not implemented")


@functools.cache
def float_to_float(target: str, source: str) -> PureOp:
    """To f32 or f64: exactly, or to nearest even."""
    widen = {"bf16": numerics.bf16_to_f32, "f16": _widen_f16}.get(source, lambda x: x)
    goal = DTYPES[target]
    stored = source if source in DTYPES and source != "f16" else "u16"
    return PureOp(f"cvt_{target}_{source}", (stored,), target, lambda x: _quiet_cast(widen(x), goal))


def _widen_f16(x: np.ndarray) -> np.ndarray:
    """f16 bits to f32. NaN becomes canonical here, while bf16 keeps its payload: both as on an H200."""
    return numerics.canonical_f32(_quiet_cast(x.view(np.float16), np.float32))


def _quiet_cast(x: np.ndarray, dtype: type) -> np.ndarray:
    """Rounds to nearest even; a NaN is quieted and keeps the upper bits of its payload, as on an H200."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def _mixed(block: BlockBuilder, instruction: Instruction, type_: str) -> None:
    """All operands but the last are of the half type; the result and the last one are f32."""
    *narrow, last = instruction.operands[1:]
    sources = [block.pure(float_to_float("f32", type_), block.value(operand, 16)) for operand in narrow]
    sources.append(block.value(last, 32))
    parts = (*(part for part in instruction.parts if part not in _FLOATS), "f32")
    plain = dataclasses.replace(instruction, parts=parts)
    block.define(instruction.operands[0], _lower(block, plain, instruction.parts[0], sources, "f32"))


@family("min", "max", "abs", "neg")
def _order(block: BlockBuilder, instruction: Instruction) -> None:
    """min, max (of three operands too; .NaN; .xorsign.abs), abs, neg on floats."""
    parts = qualifiers(instruction, "ftz", "NaN", "xorsign", "abs", *_FLOATS)
    name, type_ = instruction.parts[0], instruction.parts[-1]
    if "NaN" in parts:
        if name not in ("min", "max") or type_ == "f64":
            raise instruction.refuse(f"{instruction.opcode} is not implemented")
        name += ".NaN"
    if "xorsign" in parts or "abs" in parts:
        both = parts[-3:-1] == ["xorsign", "abs"]
        if name.split(".")[0] not in ("min", "max") or not both or type_ == "f64" or len(instruction.operands) != 3:
            raise instruction.refuse(f"{instruction.opcode} is not implemented")
        name += ".xorsign"
    if name.startswith("m") and len(instruction.operands) == 4:
        if type_ != "f32":
            raise instruction.refuse("three operands exist for f32 only")
        first, second, third = (block.value(operand, 32) for operand in instruction.operands[1:])
        both = _lower(block, instruction, name, [first, second], type_)
        block.define(instruction.operands[0], _lower(block, instruction, name, [both, third], type_))
        return
    _elementwise(block, instruction, name)


def _copy_sign(sign: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    top = sign.dtype.type(1 << (8 * sign.dtype.itemsize - 1))
    return sign & top | magnitude & ~top


@family("copysign")
def _copysign(block: BlockBuilder, instruction: Instruction) -> None:
    """copysign: the sign of the first operand, the rest of the second one, NaN as they are."""
    qualifiers(instruction, "f32", "f64")
    bits = TYPE_BITS[instruction.parts[-1]]
    kind = f"u{bits}"
    sources = [block.value(operand, bits) for operand in instruction.operands[1:]]
    op = PureOp(f"copysign_{kind}", (kind,) * 2, kind, _copy_sign)
    block.define(instruction.operands[0], block.pure(op, *sources))


@family("div", "rcp", "sqrt")
def _quotient(block: BlockBuilder, instruction: Instruction) -> None:
    """div, rcp, sqrt: .rn exactly, .approx and .full rounded correctly too."""
    qualifiers(instruction, "rn", "approx", "full", "ftz", "f32", "f64")
    _elementwise(block, instruction)


@family(*_APPROXIMATE)
def _approximate(block: BlockBuilder, instruction: Instruction) -> None:
    """ex2, lg2, sin, cos, tanh, rsqrt (.approx)."""
    qualifiers(instruction, "approx", "ftz", "f32", "f16", "bf16", "f16x2", "bf16x2")
    type_ = instruction.parts[-1]
    if type_ not in ("f32",) and instruction.parts[0] not in ("ex2", "tanh"):
        raise instruction.refuse(f"{instruction.parts[0]}.{type_} is not implemented")
    if type_ in ("bf16", "bf16x2"):
        parts = tuple(part for part in instruction.parts if part != "ftz")  # bf16 has f32's exponents: nothing to flush
        instruction = _with_parts(instruction, parts)
    _elementwise(block, instruction)


def _with_parts(instruction: Instruction, parts: tuple[str, ...]) -> Instruction:
    return dataclasses.replace(instruction, parts=parts)
