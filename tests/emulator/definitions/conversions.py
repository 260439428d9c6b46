"""Conversions between integers and floats of all sizes."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np

from tests.emulator.definitions import rounding
from tests.emulator.definitions.definition import KINDS, Definition, quiet
from tests.emulator.ieee import BF16, F16, F32

FP8 = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}
#: Type -> bits of exponent and of fraction; none has infinities or NaN, and the bias is that of IEEE 754.
FORMATS = {"e2m1x2": (2, 1), "e2m3x2": (2, 3), "e3m2x2": (3, 2)}
MODES = ("rni", "rzi", "rmi", "rpi")
INTEGERS = [f"{kind}{bits}" for kind in "su" for bits in (8, 16, 32, 64)]
LARGEST_TF32 = np.uint32(0x7F7FE000).view(np.float32)
LARGEST = {"f16": np.float32(65504), "bf16": np.uint32(0x7F7F0000).view(np.float32)}


def to_halves() -> dict[str, Definition]:
    """f32 to bits of f16 and bf16."""
    found: dict[str, Definition] = {}
    functions = {
        ("bf16", "rn"): rounding.f32_to_bf16,
        ("bf16", "rz"): rounding.f32_to_bf16_truncated,
        ("f16", "rn"): rounding.f32_to_f16,
        ("f16", "rz"): lambda x: directed(x.astype(np.float64), "f16", "rz").astype(np.uint16),
    }
    for ((target, mode), base), satfinite, relu in itertools.product(functions.items(), (False, True), (False, True)):

        def function(
            x: np.ndarray, base=base, satfinite: bool = satfinite, relu: bool = relu, target: str = target
        ) -> np.ndarray:
            if relu:
                x = np.where(x != x, x, np.where(x > 0, x, np.float32(0)))
            if satfinite:
                x = np.clip(x, -LARGEST[target], LARGEST[target])
            return base(x)

        name = f"cvt_{target}_f32_{mode}{'_satfinite' if satfinite else ''}{'_relu' if relu else ''}"
        found[name] = Definition(quiet(function), ("f32",), "u16")
    return found


def directed(x: np.ndarray, target: str, mode: str) -> np.ndarray:
    """f64 to the bits of a smaller float, by exact fractions."""
    fmt = {"f16": F16, "bf16": BF16, "f32": F32}[target]

    def one(value: float) -> int:
        if math.isnan(value):
            return int(np.float64(value).astype(np.float32).view(np.uint32)) if target == "f32" else fmt.nan
        sign = fmt.sign_bit if math.copysign(1, value) < 0 else 0
        if math.isinf(value):
            return sign | fmt.infinity
        if mode == "rn":
            return fmt.round(Fraction(value), zero_negative=bool(sign))
        cut = fmt.round(Fraction(value), zero_negative=bool(sign), toward_zero=True)
        return cut + (mode == ("rm" if sign else "rp") and fmt.value(cut) != Fraction(value))

    return np.array([one(each) for each in x.tolist()], np.uint32)


def from_doubles() -> dict[str, Definition]:
    """f64 to smaller floats, in all directions."""
    found: dict[str, Definition] = {}
    for target, mode in itertools.product(("f16", "bf16", "f32"), ("rn", "rz", "rm", "rp")):
        if (target, mode) != ("f32", "rn"):
            stored = "f32" if target == "f32" else "u16"

            def function(x: np.ndarray, target: str = target, mode: str = mode) -> np.ndarray:
                bits = directed(x, target, mode)
                return bits.view(np.float32) if target == "f32" else bits.astype(np.uint16)

            found[f"cvt_{target}_f64_{mode}"] = Definition(quiet(function), ("f64",), stored)
    return found


def wide_integer(x: int, mode: str) -> float:
    """To f64, in a direction, or to the neighbour whose last bit is set where x lies between two."""
    near = float(x)
    if int(near) == x:
        return near
    other = math.nextafter(near, math.inf if int(near) < x else -math.inf)
    low, high = sorted((near, other))
    if mode == "odd":
        return next(each for each in (low, high) if np.float64(each).view(np.uint64) & np.uint64(1))
    return {"rm": low, "rp": high, "rz": low if x > 0 else high}[mode]


def by_random(x: np.ndarray, random: np.ndarray, target: str, flags: str, turned: bool) -> np.ndarray:
    """Away from zero where the part of a step that x is beyond a code and the random part of a step make one."""
    if target in LARGEST:
        table = np.arange(F16.infinity if target == "f16" else BF16.infinity, dtype=np.uint16)
        magnitude = table.view(np.float16 if target == "f16" else ml_dtypes.bfloat16).astype(np.float64)
    elif target in FP8:
        codes = np.arange(128, dtype=np.uint8).view(FP8[target]).astype(np.float64)
        magnitude = codes[np.isfinite(codes)]
    else:
        magnitude = magnitudes(*FORMATS[target]).astype(np.float64)
    bits = 13 if target == "f16" else 16
    part = np.array([int(f"{r:016b}"[::-1], 2) if turned else r & ((1 << bits) - 1) for r in random.tolist()])
    size = np.abs(np.where(np.isfinite(x), x, 0)).astype(np.float64)
    below = np.searchsorted(magnitude, size, "right") - 1
    beyond = 2 * magnitude[-1] - magnitude[-2]  # what follows the largest number
    step = np.append(magnitude, beyond)[below + 1] - magnitude[below]
    code = below + ((size - magnitude[below]) / step + part / 2.0**bits >= 1)
    finite = "satfinite" in flags or target not in LARGEST
    code = np.where(np.isinf(x) | (size >= beyond), len(magnitude), code)
    code = np.minimum(code, len(magnitude) - finite)
    sign = 1 << {"f16": 15, "bf16": 15, "e2m1x2": 3, "e2m3x2": 5, "e3m2x2": 5}.get(target, 7)
    code = np.where(np.signbit(x), 0 if "relu" in flags else code | sign, code)
    nan = 0x7FFF if target in LARGEST else 0x7F if target in FP8 else len(magnitude) - 1
    return np.where(x != x, nan, code).astype(np.uint16 if target in LARGEST else np.uint8)


def stochastic() -> dict[str, Definition]:
    """f32 and random bits to narrower floats."""
    found: dict[str, Definition] = {}
    every = itertools.product((*LARGEST, *FP8, *FORMATS), ("", "_satfinite"), ("", "_relu"), (False, True))
    for target, finite, relu, turned in every:
        half = target in LARGEST
        if not (turned if half else finite):

            def function(
                x: np.ndarray, r: np.ndarray, t: str = target, flags: str = finite + relu, turned: bool = turned
            ) -> np.ndarray:
                return by_random(*np.broadcast_arrays(x, r), t, flags, turned)

            name = f"cvt_{target}_f32_rs{finite}{relu}{'' if half else f'_{turned:d}'}"
            found[name] = Definition(quiet(function), ("f32", "u16"), "u16" if half else "u8")
    return found


def to_integers() -> dict[str, Definition]:
    """Rounded to an integer and cut to its range."""
    found: dict[str, Definition] = {}
    for mode, target, (source, ftz) in itertools.product(MODES, INTEGERS, (("f32", 0), ("f32", 1), ("f64", 0))):

        def function(x: np.ndarray, mode: str = mode, target: str = target, ftz: int = ftz) -> np.ndarray:
            x = rounding.flush_f32(x) if ftz else x
            return rounding.float_to_integer(x, mode, int(target[1:]), target[0] == "s")

        found[f"cvt_{mode}{'_ftz' * ftz}_{target}_{source}"] = Definition(function, (source,), f"u{target[1:]}")
    return found


def from_integers() -> dict[str, Definition]:
    """To nearest even."""
    found: dict[str, Definition] = {}
    for kind in INTEGERS:
        for target in ("f32", "f64"):
            dtype = KINDS[target]
            found[f"cvt_{target}_{kind}"] = Definition(lambda x, dtype=dtype: x.astype(dtype), (kind,), target)
        for mode in ("rz", "rm", "rp", "odd") if kind.endswith("64") else ():

            def wide(x: np.ndarray, mode: str = mode) -> np.ndarray:
                return np.array([wide_integer(each, mode) for each in x.tolist()])

            found[f"cvt_f64_{kind}_{mode}"] = Definition(wide, (kind,), "f64")
        for target, narrow in (("f16", rounding.f64_to_f16), ("bf16", rounding.f64_to_bf16)):
            if not kind.endswith("64"):
                function = Definition(lambda x, narrow=narrow: narrow(x.astype(np.float64)), (kind,), "u16")
                found[f"cvt_{target}_{kind}"] = function
    return found


def widen_f16(x: np.ndarray) -> np.ndarray:
    """NaN becomes canonical here, while bf16 keeps its payload: both as on an H200."""
    return rounding.canonical_f32(x.view(np.float16).astype(np.float32))


def quiet_f64(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x).view(np.uint64)
    return np.where(x != x, bits | np.uint64(1 << 51), bits).view(np.float64)


def cut_tf32(x: np.ndarray) -> np.ndarray:
    """To 10 mantissa bits, towards zero (.rz)."""
    cut = (x.view(np.uint32) >> np.uint32(13) << np.uint32(13)).view(np.float32)
    return rounding.canonical_f32(np.where(x == x, cut, x))


def round_tf32(x: np.ndarray) -> np.ndarray:
    """To 10 mantissa bits, ties away from zero (.rna)."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits).astype(np.uint32).view(np.float32)


def round_tf32_to_even(x: np.ndarray) -> np.ndarray:
    """To 10 mantissa bits, ties to even (.rn): a multiple of what the last one is worth, which FP64 divides exactly."""
    exact = np.where(np.isfinite(x), x, 0).astype(np.float64)
    unit = np.exp2(np.maximum(np.frexp(exact)[1], -125) - 11.0)
    rounded = (np.rint(exact / unit) * unit).astype(np.float32)
    return rounding.canonical_f32(np.where(np.isfinite(x), np.copysign(rounded, x), x))


def between_floats() -> dict[str, Definition]:
    """To f32 or f64: a NaN is quieted and keeps the upper bits of its payload, as on an H200."""
    found: dict[str, Definition] = {}
    widen = {"bf16": rounding.bf16_to_f32, "f16": widen_f16}
    for target, source in itertools.product(("f32", "f64"), ("f16", "bf16", "f32", "f64")):
        if target != source:

            def function(x: np.ndarray, target: str = target, source: str = source) -> np.ndarray:
                return widen.get(source, lambda x: x)(x).astype(KINDS[target])

            stored = "u16" if source in widen else source
            found[f"cvt_{target}_{source}"] = Definition(quiet(function), (stored,), target)
    for mode in MODES:
        function = lambda x, mode=mode: rounding.canonical_f32(rounding.round_integral(x, mode))  # noqa: E731
        found[f"cvt_{mode}_f32"] = Definition(function, ("f32",), "f32")
        function = lambda x, mode=mode: quiet_f64(rounding.round_integral(x, mode))  # noqa: E731
        found[f"cvt_{mode}_f64"] = Definition(quiet(function), ("f64",), "f64")
    to_tf32 = {"rna": round_tf32, "rn": round_tf32_to_even, "rz": cut_tf32}
    for (mode, base), finite, relu in itertools.product(to_tf32.items(), ("", "_satfinite"), ("", "_relu")):

        def function(x: np.ndarray, base=base, finite: str = finite, relu: str = relu) -> np.ndarray:
            x = np.where(np.signbit(x) & (x == x), np.float32(0), x) if relu else x
            return base(np.clip(x, -LARGEST_TF32, LARGEST_TF32) if finite else x)

        found[f"cvt_{mode}_tf32{finite}{relu}"] = Definition(quiet(function), ("f32",), "f32")
    found["flush_f32"] = Definition(rounding.flush_f32, ("f32",), "f32")
    clamped = lambda x: np.where(x > 0, np.minimum(x, 1.0), 0.0)  # noqa: E731
    found["cvt_sat_f64"] = Definition(quiet(clamped), ("f64",), "f64")
    found["cvt_sat_f32"] = Definition(rounding.clamp_f32, ("f32",), "f32")
    found["cvt_sat_ftz_f32"] = Definition(lambda x: rounding.clamp_f32(rounding.flush_f32(x)), ("f32",), "f32")
    return found


def to_fp8(x: np.ndarray, target: str, relu: bool) -> np.ndarray:
    """ml_dtypes rounds to nearest even; .satfinite clamps what would overflow, and NaN is 0x7F."""
    largest = np.float32(ml_dtypes.finfo(FP8[target]).max)
    positive = np.where(x > 0, x, np.float32(0)) if relu else x
    codes = np.clip(positive, -largest, largest).astype(FP8[target]).view(np.uint8)
    return np.where(x != x, np.uint8(0x7F), codes)


def magnitudes(exponent_bits: int, fraction_bits: int) -> np.ndarray:
    """float32, the values of all codes without a sign, which ascend."""
    codes = np.arange(1 << exponent_bits + fraction_bits)
    field, fraction = codes >> fraction_bits, codes & ((1 << fraction_bits) - 1)
    bias = (1 << exponent_bits - 1) - 1
    digits = fraction + np.where(field > 0, 1 << fraction_bits, 0)
    return np.ldexp(digits, np.maximum(field, 1) - bias - fraction_bits).astype(np.float32)


def to_code(x: np.ndarray, target: str, relu: bool) -> np.ndarray:
    """f32 to bytes: to nearest even, what is too large to the largest number, NaN to the positive one."""
    values = magnitudes(*FORMATS[target])
    middle = (values[1:] + values[:-1]) / 2
    size = np.abs(x)
    code = np.searchsorted(middle, size)  # NaN is behind all numbers
    tie = size == middle[np.minimum(code, len(middle) - 1)]
    code = code + (tie & (code & 1).astype(bool))
    negative = np.signbit(x) & (x == x)
    return np.where(negative, 0 if relu else code | len(values), code).astype(np.uint8)


def from_code(x: np.ndarray, source: str, shift: int) -> np.ndarray:
    """Bytes to f16 bits, exactly; ``shift``: how far to the right the code is shifted first."""
    values = magnitudes(*FORMATS[source])
    table = np.concatenate([values, -values]).astype(np.float16).view(np.uint16)
    return table[x >> np.uint8(shift) & np.uint8(len(table) - 1)]


def to_scale(x: np.ndarray, up: bool, finite: bool) -> np.ndarray:
    """The exponent field, of subnormal numbers 0; upwards one more where it is less than the magnitude."""
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


def from_scale(x: np.ndarray) -> np.ndarray:
    """To bits of bf16: powers of two from 2^-127 to 2^127, and NaN."""
    bits = x.astype(np.uint16) << np.uint16(7)
    return np.where(x == 255, np.uint16(0x7FFF), np.where(x == 0, np.uint16(0x40), bits))


def narrow() -> dict[str, Definition]:
    """To and from eight, six and four bits."""
    found: dict[str, Definition] = {}
    for relu in (False, True):
        suffix = "_relu" * relu
        for target, convert in (*((t, to_fp8) for t in FP8), *((t, to_code) for t in FORMATS)):
            function = lambda x, f=convert, t=target, relu=relu: f(x, t, relu)  # noqa: E731
            found[f"cvt_{target}_f32{suffix}"] = Definition(quiet(function), ("f32",), "u8")
    for source, shift in (("e2m1x2", 0), ("e2m1x2", 4), ("e2m3x2", 0), ("e3m2x2", 0)):
        function = lambda x, s=source, shift=shift: from_code(x, s, shift)  # noqa: E731
        found[f"cvt_f16_{source}_{shift}"] = Definition(function, ("u8",), "u16")
    for source, dtype in FP8.items():
        function = lambda x, dtype=dtype: rounding.f32_to_f16(x.view(dtype).astype(np.float32))  # noqa: E731
        found[f"cvt_f16_{source}_0"] = Definition(function, ("u8",), "u16")
    for up, finite in itertools.product((False, True), repeat=2):
        function = lambda x, up=up, finite=finite: to_scale(x, up, finite)  # noqa: E731
        name = f"cvt_ue8m0_f32_{'rp' if up else 'rz'}{'_satfinite' if finite else ''}"
        found[name] = Definition(function, ("f32",), "u8")
    found["cvt_bf16_ue8m0"] = Definition(from_scale, ("u8",), "u16")
    return found


def conversions() -> dict[str, Definition]:
    """All of them, by the name that the core has."""
    narrowed = {**to_halves(), **from_doubles(), **stochastic(), **narrow()}
    return {**narrowed, **to_integers(), **from_integers(), **between_floats()}
