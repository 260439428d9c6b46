"""cvt of elements of four and six bits and of scales, on all values that matter, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.emulator import UnsupportedPTX
from cute_kernels.testing.ptx import module
from tests.emulator.isa.instructions.test_exhaustive import ALL, results
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


FLOATS = {**TYPES, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
#: Random bits from the highest on, of a, b, e, f (PTX ISA: which a pair has; measured on B200: their order).
SLICES = {
    "e2m1": ([*range(8, 16), *range(24, 32)], [*range(31, 23, -1), *range(15, 7, -1)],
             [*range(8), *range(16, 24)], [*range(23, 15, -1), *range(7, -1, -1)]),
    "": (range(16, 32), range(31, 15, -1), range(16), range(15, -1, -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
def test_random_rounding(name: str) -> None:
    """Four numbers share a word of random bits, two by two; what both neighbours are, follows from ml_dtypes."""
    rng = np.random.default_rng(3)
    words = rng.integers(0, 1 << 32, 1 << 12, dtype=np.uint32)
    numbers = np.unique(np.arange(256 if name[1] in "45" else 64 if name != "e2m1" else 16, dtype=np.uint8)
                        .view(FLOATS[name]).astype(np.float64))  # fmt: skip
    numbers = numbers[np.isfinite(numbers)]
    constants = [(numbers[4] * 3 + numbers[5]) / 4, (numbers[-4] + 2 * numbers[-3]) / 3, numbers[-1] * 9, numbers[-2]]
    inputs = [np.float32(each) for each in constants]
    bits = ", ".join(f"0f{int(each.view(np.uint32)):08X}" for each in inputs)
    register = "%h1" if name == "e2m1" else "%r10"
    text = f"cvt.rs.satfinite.{name}x4.f32 {register}, {{{bits}}}, %r5; cvt.u64.u{16 if name == 'e2m1' else 32} %d9, "
    got, width = results([f"{text}{register};"], words)[:, 0], 4 if name == "e2m1" else 8
    for place, (value, taken) in enumerate(zip(inputs, SLICES.get(name, SLICES[""]), strict=True)):
        random = sum((words >> bit & 1).astype(np.uint64) << np.uint64(15 - at) for at, bit in enumerate(taken))
        value = float(np.clip(value, numbers[0], numbers[-1]))
        above = int(np.searchsorted(numbers, value))
        nearer, further = sorted((numbers[max(above - 1, 0)], numbers[above]), key=abs)
        part = 0.0 if value == numbers[above] else (value - nearer) / (further - nearer)
        chosen = np.where(part + random / 65536 >= 1, further, value if value == numbers[above] else nearer)
        want = chosen.astype(FLOATS[name]).view(np.uint8).astype(np.uint64)
        np.testing.assert_array_equal(got >> np.uint64(width * (3 - place)) & np.uint64((1 << width) - 1), want)


@pytest.mark.parametrize(("name", "bits"), [("f16", 13), ("bf16", 16)])
def test_random_rounding_to_halves(name: str, bits: int) -> None:
    """The first number goes to the upper half and takes the upper half of the random bits."""
    words = np.random.default_rng(4).integers(0, 1 << 32, 1 << 12, dtype=np.uint32)
    unit = 2.0 ** (bits - 23)  # behind 1
    text = f"cvt.rs.{name}x2.f32 %r10, 0f{_pattern(1 + unit / 4)}, 0f{_pattern(-1 - unit * 0.625)}, %r5;"
    got = results([f"{text} cvt.u64.u32 %d9, %r10;"], words)[:, 0].astype(np.uint32)
    one = int(np.ones(1, {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[name]).view(np.uint16)[0])
    whole = 1 << bits
    high, low = words >> 16 & whole - 1, words & whole - 1
    np.testing.assert_array_equal(got >> 16, one + (high >= whole * 3 // 4))
    np.testing.assert_array_equal(got & 0xFFFF, (one | 0x8000) + (low >= whole * 3 // 8))


def _pattern(value: float) -> str:
    return f"{int(np.float32(value).view(np.uint32)):08X}"


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", FLOATS)
def test_pairs_of_bf16(name: str, relu: str) -> None:
    """To two codes, and from two codes, which BF16 has all."""
    values = (ALL << 16).view(np.float32)
    opcode = f"cvt.rn.satfinite{relu}.{name}x2.bf16x2"
    got = results(["xor.b32 %r10, %r5, 0x8000; " + packing(name, opcode, "%r10")], ALL << 16 | ALL)[:, 0]
    largest = np.float32(ml_dtypes.finfo(FLOATS[name]).max)

    def codes(x: np.ndarray) -> np.ndarray:
        x = np.where(np.isnan(x), x, np.maximum(x, 0)) if relu else x
        finite = np.where(np.isnan(x), largest, np.clip(x, -largest, largest)).astype(FLOATS[name]).view(np.uint8)
        return np.where(np.isnan(x) & (name[1] in "45"), 0x7F, finite).astype(np.uint64)

    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, packed(codes(values), codes(-values), name))
    if name == "e2m1":
        return
    text = f"cvt.rn{relu}.bf16x2.{name}x2 %r10, %h0; cvt.u64.u32 %d9, %r10;"
    width = 8 if name in ("e4m3", "e5m2") else 6
    table = np.arange(1 << width, dtype=np.uint8).view(FLOATS[name]).astype(np.float32)
    table = np.where(np.signbit(table) & (table == table), 0, table) if relu else table
    wide = np.where(np.isnan(table), 0x7FFF, table.astype(ml_dtypes.bfloat16).view(np.uint16)).astype(np.uint32)
    mask = (1 << width) - 1
    np.testing.assert_array_equal(results([text], ALL)[:, 0], wide[ALL >> 8 & mask] << 16 | wide[ALL & mask])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cvt.rn.e2m3x2.f32 %h1, %r1, %r2;", r"one of .satfinite; it takes .rn.satfinite{.relu}"),
        ("cvt.rn.satfinite.e2m3x2.f64 %h1, %d1;", r"qualifier .f64 does not exist here"),
        ("cvt.rn.f32.e2m3x2 %r1, %h1;", r"qualifier .e2m3x2 does not exist here"),
        ("cvt.rs.e4m3x4.f32 %r1, {%r1, %r1, %r1, %r1}, %r2;", r"one of .satfinite; it takes .rs.satfinite{.relu}"),
        ("cvt.rs.f16.f32 %h1, %r1, %r2;", r"cvt.rs.f16.f32: qualifier .rs does not"),
        ("cvt.rn.f16.f16 %h1, %h1;", r"cvt.rn.f16.f16: qualifier .* it takes"),
        ("cvt.rn.satfinite.ue8m0x2.f32 %h1, %r1, %r2;", r"qualifier .ue8m0x2 does not exist here"),
        ("cvt.rz.bf16x2.ue8m0x2 %r1, %h1;", r"qualifier .* does not exist here"),
        ("cvt.rn.satfinite.e2m1x2.f32 %h1, %r1, %r2;", r"operand d of cvt.* is %h1, a register of type .b16"),
    ],
)
def test_others_are_refused(text: str, message: str) -> None:
    with pytest.raises(UnsupportedPTX, match=message):
        launch(module(f"{text}\nret;", parameters=0))
