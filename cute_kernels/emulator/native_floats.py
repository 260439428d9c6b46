"""LLVM IR of floating-point operations and conversions; see `native_ops`."""

from __future__ import annotations

from cute_kernels.emulator.instructions_numerics import NAN_F16
from cute_kernels.emulator.native_ops import Emit, Emitter, rule

# --- f32 ------------------------------------------------------------------------------------------------------------


def _extreme(e: Emitter, name: str, x: str, y: str) -> str:
    """Bits of min or max of two f32, the number where one is NaN, -0 below +0."""
    a, b = e.to_float(x, 32), e.to_float(y, 32)
    chosen = e.select(32, e.fcmp("olt" if name == "min" else "ogt", 32, a, b), x, y)
    either = e.select(32, e.fcmp("uno", 32, b, b), x, chosen)
    either = e.select(32, e.fcmp("uno", 32, a, a), y, either)
    zero = e.literal(0, 32)
    zeros = e.bin("and", 1, e.fcmp("oeq", 32, a, zero), e.fcmp("oeq", 32, b, zero))
    signed_zero = e.bin("or" if name == "min" else "and", 32, x, y)
    return e.canonical(e.to_float(e.select(32, zeros, signed_zero, either), 32))


def _f32_bits(e: Emitter, name: str, args: list[str]) -> str:
    """An f32 operation on bits, NaN canonical."""
    if name in ("min", "max"):
        return _extreme(e, name, *args)
    if name in ("abs", "neg"):
        masked = e.bin("and", 32, args[0], e.const(0x7FFFFFFF, 32))
        flipped = e.bin("xor", 32, args[0], e.const(0x80000000, 32))
        return e.canonical(e.to_float(masked if name == "abs" else flipped, 32))
    x = [e.to_float(arg, 32) for arg in args]
    if name == "fma":
        result = e.intrinsic("fma", e.float_type(32), *x)
    elif name == "sqrt":
        result = e.intrinsic("sqrt", e.float_type(32), *x)
    elif name == "rcp":
        result = e.fbin("fdiv", 32, e.literal(0x3F800000, 32), x[0])
    elif name == "rsqrt":
        root = e.intrinsic("sqrt", e.float_type(64), e.fcast("fpext", x[0], 32, 64))
        result = e.fcast("fptrunc", e.fbin("fdiv", 64, e.literal(0x3FF0000000000000, 64), root), 64, 32)
    else:
        result = e.fbin(f"f{name}", 32, *x)
    return e.canonical(result)


@rule(r"(add|sub|mul|fma|div|min|max|abs|neg|rcp|sqrt|rsqrt)_f32(_ftz)?(_sat)?")
def _f32(name: str, ftz: str | None, saturate: str | None) -> Emit:
    def emit(e: Emitter, *args: str) -> str:
        result = _f32_bits(e, name, [e.flush(x) for x in args] if ftz else list(args))
        if ftz:
            result = e.flush(result)
        if saturate:
            x = e.to_float(result, 32)
            one = e.const(0x3F800000, 32)
            below = e.select(32, e.fcmp("olt", 32, x, e.to_float(one, 32)), result, one)
            result = e.select(32, e.fcmp("ogt", 32, x, e.literal(0, 32)), below, e.const(0, 32))
        return result

    return emit


_FLOAT_RELATIONS = {
    **{name: f"o{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"{name}u": f"u{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{"num": "ord", "nan": "uno"},
}


@rule(r"setp_(\w+)_(f32|f64|bf16)")
def _compare_floats(relation: str, type_: str) -> Emit:
    relation = _FLOAT_RELATIONS[relation]
    bits = 64 if type_ == "f64" else 32

    def emit(e: Emitter, a: str, b: str) -> str:
        x, y = (widen_bf16(e, v) if type_ == "bf16" else v for v in (a, b))
        return e.fcmp(relation, bits, e.to_float(x, bits), e.to_float(y, bits))

    return emit


# --- f16 and bf16 ---------------------------------------------------------------------------------------------------


def widen_bf16(e: Emitter, x: str) -> str:
    """Bits of bf16 to bits of f32."""
    return e.bin("shl", 32, e.resize(x, 16, 32), e.const(16, 32))


def _narrow_bf16(e: Emitter, x: str) -> str:
    """Bits of f32 to bits of bf16, to nearest even."""
    odd = e.bin("and", 32, e.bin("lshr", 32, x, e.const(16, 32)), e.const(1, 32))
    rounded = e.bin("add", 32, e.bin("add", 32, x, e.const(0x7FFF, 32)), odd)
    return _nan_f16(e, x, e.resize(e.bin("lshr", 32, rounded, e.const(16, 32)), 32, 16))


def _nan_f16(e: Emitter, x: str, narrow: str) -> str:
    """The canonical NaN of 16 bits where the f32 with bits ``x`` is NaN."""
    value = e.to_float(x, 32)
    return e.select(16, e.fcmp("uno", 32, value, value), e.const(int(NAN_F16), 16), narrow)


def _widen_f16(e: Emitter, x: str) -> str:
    """Bits of f16 to an f32."""
    return e.fcast("fpext", e.to_float(x, 16), 16, 32)


def _narrow_f16(e: Emitter, x: str) -> str:
    """Bits of f32 to bits of f16, to nearest even."""
    return _nan_f16(e, x, e.to_bits(e.fcast("fptrunc", e.to_float(x, 32), 32, 16), 16))


def _magnitude(e: Emitter, x: str) -> str:
    return e.bin("and", 64, x, e.const((1 << 63) - 1, 64))


def _sum_to_odd(e: Emitter, a: str, b: str) -> str:
    """`instructions_numerics.sum_to_odd`: f64 sum rounded to odd."""
    s = e.fbin("fadd", 64, a, b)
    bb = e.fbin("fsub", 64, s, a)
    error = e.fbin("fadd", 64, e.fbin("fsub", 64, a, e.fbin("fsub", 64, s, bb)), e.fbin("fsub", 64, b, bb))
    bits, zero = e.to_bits(s, 64), e.literal(0, 64)
    even = e.fcmp("one", 64, error, zero)
    infinite = e.const(0x7FF << 52, 64)
    for x in (bits, e.to_bits(error, 64)):
        even = e.bin("and", 1, even, e.cmp("ult", 64, _magnitude(e, x), infinite))
    even = e.bin("and", 1, even, e.cmp("eq", 64, e.bin("and", 64, bits, e.const(1, 64)), e.const(0, 64)))
    inwards = e.bin("xor", 1, e.fcmp("ogt", 64, error, zero), e.fcmp("ogt", 64, s, zero))
    step = e.select(64, inwards, e.const(-1, 64), e.const(1, 64))
    return e.to_float(e.bin("add", 64, bits, e.select(64, even, step, e.const(0, 64))), 64)


def _f64_to_f32_odd(e: Emitter, x: str) -> str:
    """`instructions_numerics.f64_to_f32_odd`: bits of f32."""
    near = e.fcast("fptrunc", x, 64, 32)
    bits, wide = e.to_bits(near, 32), e.fcast("fpext", near, 32, 64)
    inexact = e.bin("and", 1, e.fcmp("une", 64, wide, x), e.fcmp("ord", 64, x, x))
    away = e.cmp("ugt", 64, _magnitude(e, e.to_bits(wide, 64)), _magnitude(e, e.to_bits(x, 64)))
    less = e.bin("sub", 32, bits, e.const(1, 32))
    truncated = e.select(32, e.bin("and", 1, inexact, away), less, bits)
    return e.select(32, inexact, e.bin("or", 32, truncated, e.const(1, 32)), bits)


@rule(r"(add|sub|mul|fma|min|max|abs|neg)_(bf16|f16)")
def _half(name: str, type_: str) -> Emit:
    narrow = _narrow_bf16 if type_ == "bf16" else _narrow_f16

    def widen(e: Emitter, x: str) -> str:
        return e.to_float(widen_bf16(e, x), 32) if type_ == "bf16" else _widen_f16(e, x)

    def emit(e: Emitter, *args: str) -> str:
        if name in ("min", "max", "abs", "neg"):
            wide = [e.to_bits(widen(e, x), 32) for x in args]
            return narrow(e, _f32_bits(e, name, wide))
        if name == "sub":
            args = (args[0], e.bin("xor", 16, args[1], e.const(0x8000, 16)))
        x = [e.fcast("fpext", widen(e, arg), 32, 64) for arg in args]
        if name in ("add", "sub"):
            if type_ == "bf16":  # 24 bits are more than 2 * 8 + 2: rounding the f32 sum again is rounding once
                return narrow(e, e.to_bits(e.fbin("fadd", 32, *(widen(e, arg) for arg in args)), 32))
            total = e.fbin("fadd", 64, *x)
        else:
            total = e.fbin("fmul", 64, x[0], x[1])
            if name == "fma":
                total = _sum_to_odd(e, total, x[2])
        return narrow(e, _f64_to_f32_odd(e, total))

    return emit


# --- conversions ----------------------------------------------------------------------------------------------------


@rule(r"cvt_(f32|f64)_([su])(\d+)")
def _from_integer(target: str, kind: str, bits: str) -> Emit:
    wanted = int(target[1:])

    def emit(e: Emitter, x: str) -> str:
        name = "sitofp" if kind == "s" else "uitofp"
        value = e.code.let(f"{name} {e.type(int(bits))} {x} to {e.float_type(wanted)}")
        return e.to_bits(value, wanted)

    return emit


_ROUNDING = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@rule(r"cvt_(rni|rzi|rmi|rpi)(_ftz)?_([su])(8|16|32)_f32")
def _to_integer(mode: str, ftz: str | None, kind: str, width: str) -> Emit:
    bits = int(width)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind == "s" else (0, (1 << bits) - 1)

    def emit(e: Emitter, x: str) -> str:
        value = e.fcast("fpext", e.to_float(e.flush(x) if ftz else x, 32), 32, 64)
        whole = e.intrinsic(_ROUNDING[mode], e.float_type(64), value)
        top, bottom = (e.code.let(f"sitofp {e.type(64)} {e.const(v, 64)} to {e.float_type(64)}") for v in (high, low))
        inside = e.bin("and", 1, e.fcmp("olt", 64, whole, top), e.fcmp("ogt", 64, whole, bottom))
        flag, floats = e.type(1), e.float_type(64)
        safe = e.code.let(f"select {flag} {inside}, {floats} {whole}, {floats} {e.literal(0, 64)}")
        plain = e.resize(e.code.let(f"fptosi {floats} {safe} to {e.type(64)}"), 64, bits)
        above = e.select(bits, e.fcmp("oge", 64, whole, top), e.const(high, bits), plain)
        return e.select(bits, e.fcmp("ole", 64, whole, bottom), e.const(low, bits), above)

    return emit


@rule(r"cvt_(rni|rzi|rmi|rpi)_f32")
def _integral(mode: str) -> Emit:
    return lambda e, x: e.canonical(e.intrinsic(_ROUNDING[mode], e.float_type(32), e.to_float(x, 32)))


@rule(r"cvt_(bf16|f16)_f32_(rn|rz)(_satfinite)?(_relu)?")
def _narrow(target: str, mode: str, satfinite: str | None, relu: str | None) -> Emit | None:
    if satfinite:
        return None

    def emit(e: Emitter, x: str) -> str:
        if relu:
            value = e.to_float(x, 32)
            keep = e.bin("or", 1, e.fcmp("uno", 32, value, value), e.fcmp("ogt", 32, value, e.literal(0, 32)))
            x = e.select(32, keep, x, e.const(0, 32))
        if mode == "rz":
            return _nan_f16(e, x, e.resize(e.bin("lshr", 32, x, e.const(16, 32)), 32, 16))
        return _narrow_bf16(e, x) if target == "bf16" else _narrow_f16(e, x)

    return emit


@rule(r"cvt_f32_(bf16|f16|f64)")
def _widen(source: str) -> Emit:
    if source == "bf16":
        return widen_bf16
    if source == "f16":
        return lambda e, x: e.canonical(_widen_f16(e, x))
    return lambda e, x: e.to_bits(e.fcast("fptrunc", e.to_float(x, 64), 64, 32), 32)


@rule(r"cvt_f64_f32")
def _double() -> Emit:
    return lambda e, x: e.to_bits(e.fcast("fpext", e.to_float(x, 32), 32, 64), 64)


@rule(r"cvt_rna_tf32")
def _tf32() -> Emit:
    def emit(e: Emitter, x: str) -> str:
        rounded = e.bin("and", 32, e.bin("add", 32, x, e.const(0x1000, 32)), e.const(0xFFFFE000, 32))
        magnitude = e.bin("and", 32, x, e.const(0x7FFFFFFF, 32))
        return e.select(32, e.cmp("ult", 32, magnitude, e.const(0x7F800000, 32)), rounded, x)

    return emit
