"""cvt of elements of four and six bits and of scales, on all values that matter, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.emulator import UnsupportedPTX
from cute_kernels.testing.ptx import module
from tests.emulator.instructions.test_exhaustive import ALL, results
from tests.emulator.ptx_launch import launch

TYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}
SCALE = ml_dtypes.float8_e8m0fnu


def codes_of(values: np.ndarray, name: str) -> np.ndarray:
    """What ml_dtypes rounds to; it has no rule for NaN, which the PTX ISA makes the largest number."""
    dtype = TYPES[name]
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    with np.errstate(invalid="ignore"):
        cut = np.where(np.isnan(values), largest, np.clip(values, -largest, largest))
    return cut.astype(dtype).view(np.uint8).astype(np.uint64)


def inputs(name: str) -> np.ndarray:
    """float32: all of f16, and what lies next to those of them that can be half-way between two numbers."""
    with np.errstate(all="ignore"):
        exact = ALL.astype(np.uint16).view(np.float16).astype(np.float32)
        near = [np.nextafter(exact[::64], np.float32(end)) for end in (-np.inf, np.inf)]
    return np.concatenate([exact, *near])


def packing(name: str, opcode: str, sources: str) -> str:
    """A cvt whose result is spread to %d9."""
    if name == "e2m1":
        return f"{{ .reg .b8 %q0; .reg .b8 %q1; mov.b16 {{%q0, %q1}}, 0; {opcode} %q0, {sources}; mov.b16 %h1, " \
            "{%q0, %q1}; cvt.u64.u16 %d9, %h1; }"  # fmt: skip
    return f"{opcode} %h1, {sources}; cvt.u64.u16 %d9, %h1;"


def packed(high: np.ndarray, low: np.ndarray, name: str) -> np.ndarray:
    return high << (4 if name == "e2m1" else 8) | low


@pytest.mark.parametrize("name", TYPES)
def test_rounding(name: str) -> None:
    """The first source goes to the upper half; .relu makes negative numbers zero; from halves, both at once."""
    values = inputs(name)
    texts = [
        packing(name, f"cvt.rn.satfinite.{name}x2.f32", "%r5, 0f3F800000"),
        packing(name, f"cvt.rn.satfinite.relu.{name}x2.f32", "0f3F800000, %r5"),
    ]
    got = results(texts, values.view(np.uint32))
    unit = codes_of(np.ones(1, np.float32), name)
    np.testing.assert_array_equal(got[:, 0], packed(codes_of(values, name), unit, name))
    plain = np.where(np.isnan(values), values, np.maximum(values, 0))
    np.testing.assert_array_equal(got[:, 1], packed(unit, codes_of(plain, name), name))


@pytest.mark.parametrize("relu", ["", ".relu"])
def test_halves_to_e2m1(relu: str) -> None:
    opposite = ALL << 16 | (ALL ^ 0x8000)
    got = results([packing("e2m1", f"cvt.rn.satfinite{relu}.e2m1x2.f16x2", "%r5")], opposite)[:, 0]
    with np.errstate(all="ignore"):
        high = ALL.astype(np.uint16).view(np.float16).astype(np.float32)
    low = -high
    if relu:
        high, low = (np.where(np.isnan(x), x, np.where(x > 0, x, 0)) for x in (high, low))
    np.testing.assert_array_equal(got, packed(codes_of(high, "e2m1"), codes_of(low, "e2m1"), "e2m1"))


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", TYPES)
def test_to_halves(name: str, relu: str) -> None:
    """All pairs of codes; of six bits, the upper two of a byte do not count."""
    source, move = "%h0", ""
    if name == "e2m1":
        source, move = "%q0", "mov.b16 {%q0, %q1}, %h0;"
    opcode = f"cvt.rn{relu}.f16x2.{name}x2"
    text = f"{{ .reg .b8 %q0; .reg .b8 %q1; {move} {opcode} %r10, {source}; cvt.u64.u32 %d9, %r10; }}"
    got = results([text], ALL)[:, 0]
    codes = np.arange(1 << (4 if name == "e2m1" else 6), dtype=np.uint8)
    values = codes.view(TYPES[name]).astype(np.float32)
    halves = np.where(np.signbit(values) & bool(relu), 0, values).astype(np.float16).view(np.uint16).astype(np.uint32)
    high, low = (ALL >> 4 & 15, ALL & 15) if name == "e2m1" else (ALL >> 8 & 63, ALL & 63)
    np.testing.assert_array_equal(got, halves[high] << 16 | halves[low])


def scales_of(values: np.ndarray, up: bool, finite: bool) -> np.ndarray:
    """By comparison with all numbers that ml_dtypes has."""
    numbers = np.arange(255, dtype=np.uint8).view(SCALE).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaN
        size = np.abs(values.astype(np.float64))
    code = np.searchsorted(numbers, size) if up else np.maximum(np.searchsorted(numbers, size, "right"), 1) - 1
    code = np.where(np.isinf(size), 255, code)
    code = np.minimum(code, 254) if finite else code
    return np.where(np.isnan(values), 255, code).astype(np.uint64)


@pytest.mark.parametrize("finite", ["", ".satfinite"])
@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_scales(mode: str, finite: str) -> None:
    """All of bf16, from pairs and as f32, and what lies next to them in f32."""
    with np.errstate(all="ignore"):
        exact = (ALL << 16).view(np.float32)
        away = ((ALL << 16) + np.uint32(1)).view(np.float32)
        inner = ((ALL << 16) - np.uint32(1)).view(np.float32)
    text = f"cvt.{mode}{finite}.ue8m0x2.f32 %h1, %r5, 0f40000000; cvt.u64.u16 %d9, %h1;"
    for values in (exact, away, inner):
        got = results([text], values.view(np.uint32))[:, 0]
        want = scales_of(values, mode == "rp", bool(finite))
        np.testing.assert_array_equal(got, want << np.uint64(8) | np.uint64(128))
    text = f"cvt.{mode}{finite}.ue8m0x2.bf16x2 %h1, %r5; cvt.u64.u16 %d9, %h1;"
    want = scales_of(exact, mode == "rp", bool(finite))
    np.testing.assert_array_equal(results([text], ALL << 16 | 0x3F80)[:, 0], want << np.uint64(8) | np.uint64(127))


def test_scales_to_bf16() -> None:
    got = results(["cvt.rn.bf16x2.ue8m0x2 %r10, %h0; cvt.u64.u32 %d9, %r10;"], ALL)[:, 0]
    values = np.arange(256, dtype=np.uint8).view(SCALE).astype(ml_dtypes.bfloat16)
    bits = np.where(np.isnan(values), 0x7FFF, values.view(np.uint16)).astype(np.uint32)
    np.testing.assert_array_equal(got, bits[ALL >> 8] << 16 | bits[ALL & 255])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cvt.rn.e2m3x2.f32 %h1, %r1, %r2;", r"it needs .rn, .satfinite and may have .relu"),
        ("cvt.rn.satfinite.e2m3x2.f16x2 %h1, %r1;", r"cvt from f16x2 to e2m3x2 is not implemented"),
        ("cvt.rn.bf16x2.e2m3x2 %r1, %h1;", r"cvt from e2m3x2 to bf16x2 is not implemented"),
        ("cvt.rn.satfinite.ue8m0x2.f32 %h1, %r1, %r2;", r"it needs .rz and may have .satfinite"),
        ("cvt.rz.bf16x2.ue8m0x2 %r1, %h1;", r"it needs .rn"),
        ("cvt.rn.satfinite.e2m1x2.f32 %h1, %r1, %r2;", r"operand d of cvt.* is %h1, a register of type .b16"),
    ],
)
def test_others_are_refused(text: str, message: str) -> None:
    with pytest.raises(UnsupportedPTX, match=message):
        launch(module(f"{text}\nret;", parameters=0))
