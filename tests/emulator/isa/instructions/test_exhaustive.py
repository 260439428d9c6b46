"""Instructions on all values that 8 and 16 bits have, against ml_dtypes, NumPy and the tables of the PTX ISA."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.machine.units.matrix.mma_sync import TYPES, Form, accumulator_rows
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.mma_launch import multiply_in_core
from tests.emulator.ptx_launch import launch
from tests.nightly import NIGHTLY

FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
HALVES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
ALL = np.arange(1 << 16, dtype=np.uint32)
#: For many instructions at once: by day every eighth number, another rest of 8 for every 8 of them.
MANY = ALL if NIGHTLY else ALL[::8] + (ALL[::8] >> 3) % 8
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}
WIDTHS = (8, 16, 32, 64)


def results(instructions: list[str], inputs: np.ndarray) -> np.ndarray:
    """uint64 [n, instructions]: what is in %d9 after each, with an element of ``inputs``, uint32 [n], in %r5.

    Instructions may use %h0 to %h9, %r10 to %r19 and %d9; before each %d9 is 0.
    """
    assert len(inputs) % 1024 == 0
    body = "".join(f"mov.b64 %d9, 0; {each} st.global.b64 [%d8+{8 * i}], %d9;\n" for i, each in enumerate(instructions))
    text = module(
        "ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];\n"
        "mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x; mad.lo.u32 %r0, %r0, 1024, %r1;\n"
        "mad.wide.u32 %d0, %r0, 4, %d0; ld.global.u32 %r5, [%d0]; cvt.u16.u32 %h0, %r5;\n"
        f"mad.wide.u32 %d8, %r0, {8 * len(instructions)}, %d1;\n{body}ret;"
    )
    out = aligned(np.zeros((len(inputs), len(instructions)), np.uint64))
    grid = (len(inputs) // 1024, 1, 1)
    launch(text, aligned(inputs), out, grid=grid, block=(1024, 1, 1), options=Options(detectors=False))
    return out


def given(bits: int) -> str:
    return "%h0" if bits <= 16 else "%r5"


def bits_of(values: np.ndarray, name: str) -> np.ndarray:
    """Bit patterns, with the canonical NaN."""
    raw = values.view(f"u{values.dtype.itemsize}").astype(np.uint32)
    return np.where(np.isnan(values), np.uint32(NAN[name]), raw)


def test_integers() -> None:
    """Every conversion from and to integers that takes 8 or 16 bits."""
    instructions, expected = [], []
    for (kind, bits), (goal, wide), sat in itertools.product(
        itertools.product("us", (8, 16)), itertools.product("us", WIDTHS), (False, True)
    ):
        fits = goal == kind and wide >= bits or goal == "s" and wide > bits
        if sat and fits:
            continue
        register = {8: "%h1", 16: "%h1", 32: "%r10", 64: "%d9"}[wide]
        spread = "" if wide == 64 else f"cvt.u64.u{16 if wide < 32 else 32} %d9, {register};"
        name = f"cvt{'.sat' if sat else ''}.{goal}{wide}.{kind}{bits}"
        instructions.append(f"{name} {register}, %h0; {spread}")
        value = MANY.astype(f"u{bits // 8}").view(f"{'i' if kind == 's' else 'u'}{bits // 8}").astype(np.int64)
        if sat:
            half = 1 << min(wide, 32) - 1  # no value has more than 17 bits
            value = np.clip(value, -half if goal == "s" else 0, half - 1 if goal == "s" else 2 * half - 1)
        cut = value.astype(f"{'i' if goal == 's' else 'u'}{wide // 8}").astype(np.int64)
        expected.append(cut.astype(np.uint64) & np.uint64((1 << max(wide, 16)) - 1))  # extended by the type
    got = results(instructions, MANY)
    for i, (instruction, want) in enumerate(zip(instructions, expected)):
        np.testing.assert_array_equal(got[:, i], want, instruction)


@pytest.mark.parametrize("name", HALVES)
def test_halves_to_integers(name: str) -> None:
    """Rounded as the mode says and cut to the range. NaN becomes 0, in 64 bits the highest bit: as on an H200."""
    rounds = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    with np.errstate(all="ignore"):
        values = MANY.astype(np.uint16).view(HALVES[name]).astype(np.float64)
        kinds = list(itertools.product(rounds, "us", (16, 32, 64)))
        registers = {16: ("%h1", "cvt.u64.u16 %d9, %h1;"), 32: ("%r10", "cvt.u64.u32 %d9, %r10;"), 64: ("%d9", "")}
        texts = ((f"cvt.{mode}.{kind}{bits}.{name}", registers[bits]) for mode, kind, bits in kinds)
        instructions = [f"{opcode} {register}, %h0; {spread}" for opcode, (register, spread) in texts]
        got = results(instructions, MANY)
        for i, (mode, kind, bits) in enumerate(kinds):
            low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind == "s" else (0, (1 << bits) - 1)
            whole = rounds[mode](values)
            inside = (whole > low) & (whole < high)  # float64 rounds 2^64 - 1 up, and no half lies in between
            want = np.where(inside, whole, 0).astype(np.int64 if kind == "s" else np.uint64).view(np.uint64)
            mask = (1 << bits) - 1
            for where, value in ((whole <= low, low), (whole >= high, high), (whole != whole, bits == 64 and 1 << 63)):
                want[where] = np.uint64(value & mask)
            np.testing.assert_array_equal(got[:, i], want & np.uint64(mask), instructions[i])


@pytest.mark.parametrize("name", HALVES)
def test_integers_to_halves_and_halves_to_wider_floats(name: str) -> None:
    instructions = [f"cvt.rn.{name}.{kind}16 %h1, %h0; cvt.u64.u16 %d9, %h1;" for kind in "us"]
    instructions.append(f"cvt.f32.{name} %r10, %h0; cvt.u64.u32 %d9, %r10;")
    got = results(instructions, ALL)
    integers = ALL.astype(np.uint16)
    with np.errstate(all="ignore"):
        for i, values in enumerate((integers, integers.view(np.int16))):  # float32 has all of them exactly
            want = values.astype(np.float32).astype(HALVES[name]).view(np.uint16)
            np.testing.assert_array_equal(got[:, i], want, instructions[i])
        wide = integers.view(HALVES[name]).astype(np.float32)
    # NaN of bf16 keep their payload, and those of f16 become the canonical one: as recorded on an H200.
    want = bits_of(wide, "f32") if name == "f16" else ALL << 16
    np.testing.assert_array_equal(got[:, 2], want)


@pytest.mark.parametrize("name", HALVES)
def test_rounding_to_halves(name: str) -> None:
    """Half-way between any two neighbours and next to it on both sides, by the definition of rounding to even."""
    codes = np.arange(0x7F80 if name == "bf16" else 0x7C00, dtype=np.uint32)
    values = np.array([*codes, len(codes)], np.uint16).view(HALVES[name]).astype(np.float64)
    values[-1] = 2 * values[-2] - values[-3]  # what would follow the largest number is infinity
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    inputs = np.concatenate([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(np.inf))])
    want = np.concatenate([codes, codes + (codes & 1), codes + 1])
    for sign in (0, 1):
        raw = inputs.view(np.uint32) | np.uint32(sign << 31)
        padded = np.concatenate([raw, np.zeros(-len(raw) % 1024, np.uint32)])
        got = results([f"cvt.rn.{name}.f32 %h1, %r5; cvt.u64.u16 %d9, %h1;"], padded)[: len(raw), 0]
        np.testing.assert_array_equal(got, want | sign << 15)


@pytest.mark.parametrize("name", FP8)
def test_fp8_to_halves(name: str) -> None:
    got = results([f"cvt.rn.f16x2.{name}x2 %r10, %h0; cvt.u64.u32 %d9, %r10;"], ALL)[:, 0]
    with np.errstate(all="ignore"):
        codes = np.arange(256, dtype=np.uint8).view(FP8[name]).astype(np.float32).astype(np.float16)
    each = bits_of(codes, "f16")
    np.testing.assert_array_equal(got, each[ALL >> 8] << 16 | each[ALL & 255])


@pytest.mark.parametrize("name", FP8)
def test_rounding_to_fp8(name: str) -> None:
    """All values of f16, and the neighbours in f32 of all that are half-way between two FP8 numbers."""
    with np.errstate(all="ignore"):
        exact = ALL.astype(np.uint16).view(np.float16).astype(np.float32)
        short = exact[::64]  # ten bits of fraction, of which those half-way between two numbers use four at most
        near = [np.nextafter(short, np.float32(end)) for end in (-np.inf, np.inf)]
        values = np.concatenate([exact, *near])
        largest = np.float32(ml_dtypes.finfo(FP8[name]).max)
        want = np.clip(values, -largest, largest).astype(FP8[name]).view(np.uint8).astype(np.uint64)
    want = np.where(np.isnan(values), 0x7F, want)
    text = f"cvt.rn.satfinite.{name}x2.f32 %h1, %r5, 0f00000000; cvt.u64.u16 %d9, %h1;"
    np.testing.assert_array_equal(results([text], values.view(np.uint32))[:, 0], want << 8)


@pytest.mark.parametrize("name", HALVES)
def test_signs_of_halves(name: str) -> None:
    texts = [f"{op}.{name} %h1, %h0; cvt.u64.u16 %d9, %h1;" for op in ("abs", "neg")]
    got = results(texts, ALL)
    with np.errstate(all="ignore"):
        nan = np.isnan(ALL.astype(np.uint16).view(HALVES[name]))
    np.testing.assert_array_equal(got[:, 0], np.where(nan, NAN[name], ALL & 0x7FFF))
    np.testing.assert_array_equal(got[:, 1], np.where(nan, NAN[name], ALL ^ 0x8000))


A, B = 0x83024170, 0x7F9516E8  # bytes that differ, some of them negative


def permuted(selector: np.ndarray) -> np.ndarray:
    """The default mode of prmt (PTX ISA): bit 3 of a nibble replicates the byte's sign."""
    table = np.array([*A.to_bytes(4, "little"), *B.to_bytes(4, "little")], np.uint64)
    table = np.concatenate([table, np.where(table & 128, np.uint64(255), np.uint64(0))])
    return sum(table[selector >> 4 * i & 15] << np.uint64(8 * i) for i in range(4))


def test_prmt_with_all_selectors() -> None:
    text = f"prmt.b32 %r10, {A:#x}, {B:#x}, %r5; cvt.u64.u32 %d9, %r10;"
    above = ALL | np.uint32(0xABCD0000)  # the upper half of a selector is ignored
    np.testing.assert_array_equal(results([text], above)[:, 0], permuted(ALL))


#: PTX ISA, prmt: which byte goes to d3, d2, d1, d0, for selector values 0 to 3.
MODES = {
    "f4e": ("3210", "4321", "5432", "6543"), "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"), "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"), "rc16": ("1010", "3232", "1010", "3232"),
}  # fmt: skip


def test_modes_of_prmt() -> None:
    """With all selectors of 16 bits: only the lowest two bits count."""
    texts = [f"prmt.b32.{mode} %r10, {A:#x}, {B:#x}, %r5; cvt.u64.u32 %d9, %r10;" for mode in MODES]
    got = results(texts, ALL | np.uint32(0xABCD0000))
    for i, selectors in enumerate(MODES.values()):
        nibbles = np.array([int(each, 16) for each in selectors], np.uint32)
        np.testing.assert_array_equal(got[:, i], permuted(nibbles[ALL & 3]), texts[i])


@pytest.mark.parametrize(("a_name", "b_name"), [*itertools.product(FP8, FP8)])
def test_products_of_all_fp8_numbers(a_name: str, b_name: str) -> None:
    """512 mma.sync of 16 rows and 8 columns, each with one product: FP32 has every product exactly."""
    codes = np.arange(256, dtype=np.uint8)
    left, right = codes.reshape(16, 16).repeat(32, axis=0), np.tile(codes.reshape(32, 8), (16, 1))
    registers = [np.zeros((512, count, 32), np.uint32) for count in (4, 2, 4)]
    # Byte 0 of a row lies in lane 4 * (row % 8), in register row / 8; likewise for columns.
    for row in range(16):
        registers[0][:, row // 8, 4 * (row % 8)] = left[:, row]
    for column in range(8):
        registers[1][:, 0, 4 * column] = right[:, column]
    form = Form(16, 8, 32, TYPES[a_name], TYPES[b_name], "f32")
    got = accumulator_rows(multiply_in_core(form, *registers), 16, np.uint32)
    with np.errstate(all="ignore"):
        a, b = left.view(FP8[a_name]).astype(np.float32), right.view(FP8[b_name]).astype(np.float32)
        want = bits_of(a[:, :, None] * b[:, None, :] + np.float32(0), "f32")
    np.testing.assert_array_equal(got, want)
