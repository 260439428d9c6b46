"""Conversions between number formats, against independent arithmetic."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.ieee import BF16, F16, F32, F64, Format
from tests.emulator.instruction_cases import Case, check, signed
from tests.emulator.isa.instructions.test_instructions import rows_of_operands


def to_integer(fmt: Format, x: int, mode: str, kind: str, bits: int) -> int:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind == "s" else (0, (1 << bits) - 1)
    if fmt.is_nan(x):
        return 1 << 63 if bits == 64 else 0
    if fmt.is_infinite(x):
        return low if fmt.negative(x) else high
    value = fmt.value(x)
    floor = value.numerator // value.denominator
    whole = {
        "rni": round(value),  # Fraction rounds half to even
        "rzi": floor if value >= 0 else -((-value.numerator) // value.denominator),
        "rmi": floor,
        "rpi": -((-value.numerator) // value.denominator),
    }[mode]
    return min(max(whole, low), high)


def conversion_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}

    def add(text: str, out: int, sources: tuple[int, ...], expected: Callable[..., int], kinds: str) -> None:
        cases[text.split()[0]] = Case(text, out, sources, expected, kinds)

    widths = {8: 16, 16: 16, 32: 32, 64: 64}  # bits of the register that holds a type
    for source_kind in "us":
        for source_bits in (8, 16, 32, 64):
            for kind in "us":
                for bits in (8, 16, 32, 64):

                    def widen(x: int, k: str = source_kind, n: int = source_bits, t: str = kind, b: int = bits) -> int:
                        value = x & ((1 << n) - 1)
                        value = signed(value, n) if k == "s" else value
                        value &= (1 << b) - 1
                        return signed(value, b) if t == "s" else value  # the register is extended by the type

                    name = f"cvt.{kind}{bits}.{source_kind}{source_bits}"
                    add(f"{name} {{d}}, {{0}};", widths[bits], (widths[source_bits],), widen, "i")

                    def clamp(x: int, k: str = source_kind, n: int = source_bits, t: str = kind, b: int = bits) -> int:
                        value = x & ((1 << n) - 1)
                        value = signed(value, n) if k == "s" else value
                        low, high = (-(1 << b - 1), (1 << b - 1) - 1) if t == "s" else (0, (1 << b) - 1)
                        return min(max(value, low), high)

                    fits = kind == source_kind and bits >= source_bits or kind == "s" and bits > source_bits
                    if not fits:  # PTX allows .sat only where it can do something
                        add(
                            f"cvt.sat.{kind}{bits}.{source_kind}{source_bits} {{d}}, {{0}};",
                            widths[bits],
                            (widths[source_bits],),
                            clamp,
                            "i",
                        )
    for kind in "us":
        for bits in (32, 64):
            for mode in ("rni", "rzi", "rmi", "rpi"):
                add(
                    f"cvt.{mode}.{kind}{bits}.f32 {{d}}, {{0}};",
                    bits,
                    (32,),
                    functools.partial(to_integer, F32, mode=mode, kind=kind, bits=bits),
                    "f",
                )
            for name, fmt in (("f32", F32), ("f16", F16), ("bf16", BF16), ("f64", F64)):
                if bits == 64 and name in ("f16", "bf16"):
                    continue

                def to_float(x: int, kind: str = kind, bits: int = bits, fmt: Format = fmt) -> int:
                    return fmt.round(Fraction(signed(x, bits) if kind == "s" else x))

                add(f"cvt.rn.{name}.{kind}{bits} {{d}}, {{0}};", fmt.bits, (bits,), to_float, "i")
    for name, fmt in (("f16", F16), ("bf16", BF16)):
        add(f"cvt.rn.{name}.f32 {{d}}, {{0}};", 16, (32,), lambda x, fmt=fmt: F32.convert(x, fmt), "f")
        widened = {F16: lambda x: F16.convert(x, F32), BF16: lambda x: keep_payload(x, BF16, F32)}[fmt]
        add(f"cvt.f32.{name} {{d}}, {{0}};", 32, (16,), widened, "f")
        add(
            f"cvt.rn.{name}x2.f32 {{d}}, {{0}}, {{1}};",
            32,
            (32, 32),
            lambda a, b, fmt=fmt: F32.convert(a, fmt) << 16 | F32.convert(b, fmt),
            "ff",
        )
    add("cvt.rz.bf16.f32 {d}, {0};", 16, (32,), lambda x: F32.convert(x, BF16, toward_zero=True), "f")
    add("cvt.f64.f32 {d}, {0};", 64, (32,), lambda x: keep_payload(x, F32, F64), "f")
    add("cvt.rn.f32.f64 {d}, {0};", 32, (64,), lambda x: keep_payload(x, F64, F32), "f")
    add("cvt.rni.f32.f32 {d}, {0};", 32, (32,), integral, "f")
    return cases


def keep_payload(x: int, source: Format, target: Format) -> int:
    """Conversions between f32 and f64, and from bf16, quiet a NaN and keep the upper bits of its payload."""
    if not source.is_nan(x):
        return source.convert(x, target)
    payload = x & ((1 << source.fraction_bits) - 1)
    shift = target.fraction_bits - source.fraction_bits
    payload = payload << shift if shift >= 0 else payload >> -shift
    quiet = 0 if source is BF16 else 1 << (target.fraction_bits - 1)
    return target.infinity | quiet | payload | (target.sign_bit if source.negative(x) else 0)


def integral(x: int) -> int:
    if F32.is_nan(x):
        return F32.nan
    if F32.is_infinite(x):
        return x
    return F32.round(Fraction(round(F32.value(x))), zero_negative=F32.negative(x))


CONVERSION = conversion_cases()


@pytest.mark.parametrize("name", CONVERSION)
@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_conversion(name: str, seed: int):
    check(CONVERSION[name], seed)


@pytest.mark.parametrize(("name", "dtype"), [("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)])
@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_conversion_to_fp8(name: str, dtype: type, seed: int):
    """ml_dtypes rounds to nearest even; .satfinite clamps what would overflow, and NaN is 0x7F."""
    largest = float(ml_dtypes.finfo(dtype).max)

    def one(x: int) -> int:
        if F32.is_nan(x):
            return 0x7F
        value = struct.unpack("<f", struct.pack("<I", x))[0]
        return int(np.array([min(max(value, -largest), largest)], np.float32).astype(dtype).view(np.uint8)[0])

    text = f"cvt.rn.satfinite.{name}.f32 {{d}}, {{0}}, {{1}};"
    check(Case(text, 16, (32, 32), lambda a, b: one(a) << 8 | one(b), "ff"), seed)


@pytest.mark.parametrize(("name", "dtype"), [("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)])
@pytest.mark.parametrize("relu", ["", ".relu"])
@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_conversion_from_fp16_to_fp8(name: str, dtype: type, relu: str, seed: int):
    """Likewise; with .relu what is negative becomes 0."""
    largest = float(ml_dtypes.finfo(dtype).max)

    def one(x: int) -> int:
        value = float(np.array([x], np.uint16).view(np.float16)[0])
        if value != value:
            return 0x7F
        if relu and x >> 15:
            return 0
        return int(np.array([min(max(value, -largest), largest)], np.float32).astype(dtype).view(np.uint8)[0])

    text = f"cvt.rn.satfinite{relu}.{name}.f16x2 {{d}}, {{0}};"
    check(Case(text, 16, (32,), lambda x: one(x >> 16) << 8 | one(x & 0xFFFF)), seed)


@pytest.mark.parametrize(("name", "dtype"), [("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)])
def test_conversion_from_fp8(name: str, dtype: type):
    def one(x: int) -> int:
        value = float(np.array([x], np.uint8).view(dtype).astype(np.float32)[0])
        return F16.nan if value != value else int(np.array([value], np.float16).view(np.uint16)[0])

    case = Case(f"cvt.rn.f16x2.{name} {{d}}, {{0}};", 32, (16,), lambda x: one(x >> 8) << 16 | one(x & 255))
    for seed in range(12):
        check(case, seed)
