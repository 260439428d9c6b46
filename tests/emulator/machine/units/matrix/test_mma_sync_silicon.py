"""mma.sync as chips compute it, from registers to registers, against integers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.machine.units.matrix.mma_sync import TYPES, Form, accumulator_registers, accumulator_rows
from tests.emulator.aligned_sums import NAN, Rules, decode, dot, encode
from tests.emulator.mma_launch import BITS, accumulators, execute, multiply_in_core, registers
from tests.emulator.sm90_cases import MMA_FORMS
from tests.emulator.sum_inputs import STYLES, numbers
from tests.nightly import examples

#: Bits behind the point, of operands of 16 and of 19 bits.
HMMA = {"sm_80": 24, "sm_86": 24, "sm_89": 24, "sm_90": 25, "sm_100a": 25, "sm_120": 25}
#: How sums of FP8 are made in FP32 where the chip multiplies it.
FP8 = {"sm_89": Rules(13, 10, 16, -132), "sm_120": Rules(25, 0, 32, -133)}
SPLIT = ("sm_90", "sm_100a")  # where it is multiplied as FP16
FORMS = [
    *MMA_FORMS,
    *((16, 8, 16, d, a, b) for d in ("f32", "f16") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
]
CODES = {"f16": np.uint16, "f32": np.uint32, "s32": np.int32}


def run(form: Form, target: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D [m, n], bit patterns."""
    fragments = (registers(x, BITS[name])[None] for x, name in ((a, form.a_type.name), (b, form.b_type.name)))
    d = multiply_in_core(form, *fragments, accumulator_registers(c[None]), Arithmetic("silicon", target))
    return accumulator_rows(d, form.m, c.dtype.type)[0]


def of_fp8(code: int, name: str) -> int:
    """Its FP16 bit pattern."""
    number = decode(code, name)
    if number.special:
        return {"nan": NAN["f16"], "inf": 0x7C00, "-inf": 0xFC00}[number.special]
    return encode(number.significand, number.unit, "f16", 0) if number.significand else (code & 0x80) << 8


def added(x: int, y: int, form: str) -> int:
    """The sum of two numbers, rounded to nearest even by NumPy."""
    dtype, bits = (np.float16, np.uint16) if form == "f16" else (np.float32, np.uint32)
    with np.errstate(all="ignore"):
        total = np.array([x], bits).view(dtype) + np.array([y], bits).view(dtype)
    return NAN[form] if np.isnan(total[0]) else int(total.view(bits)[0])


def split(a: np.ndarray, b: np.ndarray, c: int, types: tuple[str, str], d_type: str, rules: Rules) -> int:
    """What ptxas makes of FP8: FP16 of the lower halves of all registers, the upper ones on top of that, and then C."""
    x, y = (np.array([of_fp8(int(code), name) for code in row]) for row, name in zip((a, b), types))
    lower, total = np.arange(len(a)) % 4 < 2, 0
    for half in (lower, ~lower):
        total = dot(x[half].tolist(), y[half].tolist(), total, ("f16", "f16"), d_type, rules)
    return added(c, total, d_type)


def rules_of(target: str, name: str, d_type: str) -> Rules:
    fraction = HMMA[target]
    rules = Rules(fraction, 0, 16 if fraction == 24 else 32, -108 - fraction)
    if name.startswith("e") and target not in SPLIT:
        rules = FP8[target]
    return dataclasses.replace(rules, cut=0, floor=rules.floor + 112) if d_type == "f16" else rules


def expected(form: Form, target: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D, of bit patterns or, of integers, values."""
    types = form.a_type.name, form.b_type.name
    if form.c_type == "s32":
        total = a.astype(np.int64) @ b.astype(np.int64).T + c
        return (np.clip(total, -(2**31), 2**31 - 1) if form.saturate else total).astype(np.int32)
    rules, d = rules_of(target, types[0], form.c_type), np.zeros_like(c)
    for i, j in np.ndindex(*c.shape):
        if types[0].startswith("e") and target in SPLIT:
            d[i, j] = split(a[i], b[j], int(c[i, j]), types, form.c_type, rules)
        else:
            d[i, j] = dot(a[i].tolist(), b[j].tolist(), int(c[i, j]), types, form.c_type, rules)
    return d


def draw(form: Form, style: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and C: bit patterns or, of integers, values, of which some sums leave 32 bits."""
    rng = np.random.default_rng(seed)
    shapes = (form.m, form.k), (form.n, form.k)
    if form.c_type == "s32":
        ranges = ((-128, 128) if element.name == "s8" else (0, 256) for element in (form.a_type, form.b_type))
        a, b = (rng.integers(*between, shape) for between, shape in zip(ranges, shapes))
        c = rng.integers(-(2**31), 2**31, (form.m, form.n)) >> rng.integers(0, 20)
        c[0], c[1] = 2**31 - 1, -(2**31)
        return a, b, c.astype(np.int32)
    a, b = (numbers(rng, t.name, shape, style) for t, shape in zip((form.a_type, form.b_type), shapes))
    c = numbers(rng, form.c_type, (form.m, form.n), style)
    return a, b, np.where(rng.random(c.shape) < 0.1, c.dtype.type(0), c).astype(CODES[form.c_type])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("name", "k", "d_type"), [("f16", 16, "f16"), ("f16", 8, "f32"), ("bf16", 16, "f32"), ("tf32", 4, "f32")]
)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_operands_of_16_and_of_19_bits(target: str, name: str, k: int, d_type: str, style: str) -> None:
    form = Form(16, 8, k, TYPES[name], TYPES[name], d_type)
    operands = draw(form, style, k)
    assert np.array_equal(run(form, target, *operands), expected(form, target, *operands))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("d_type", ["f32", "f16"])
@pytest.mark.parametrize(("k", "types"), [(32, ("e4m3", "e4m3")), (16, ("e5m2", "e4m3"))])
@pytest.mark.parametrize("target", ["sm_89", "sm_90", "sm_120"])
def test_fp8(target: str, k: int, types: tuple[str, str], d_type: str, style: str) -> None:
    form = Form(16, 8, k, *(TYPES[name] for name in types), d_type)
    operands = draw(form, style, k)
    assert np.array_equal(run(form, target, *operands), expected(form, target, *operands))


@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
def test_fp8_of_a_chip_without_is_refused(target: str) -> None:
    a, b, c = (np.zeros((n, 32), np.uint32) for n in (4, 2, 4))
    with pytest.raises(UnsupportedPTX, match="sm_8. does not have it: it needs sm_89"):
        execute("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", a, b, c, target=target, arithmetic="silicon")


@settings(max_examples=examples(60, 3000))
@given(
    drawn=st.sampled_from(FORMS),
    target=st.sampled_from(list(HMMA)),
    style=st.sampled_from(STYLES),
    saturate=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_instruction_of_a_kernel(drawn: tuple, target: str, style: str, saturate: bool, seed: int) -> None:
    """Every form on every target."""
    m, n, k, d, *types = drawn
    if types[0].startswith("e") and target not in (*FP8, *SPLIT):
        target = "sm_89"
    form = Form(m, n, k, *(TYPES[name] for name in types), d, saturate and d == "s32")
    a, b, c = draw(form, style, seed)
    shape = f"m{m}n{n}k{k}.row.col{'.satfinite' * form.saturate}"
    opcode = f"mma.sync.aligned.{shape}.{d}.{'.'.join(types)}.{d}"
    codes = ((x & 255 if d == "s32" else x, BITS[name]) for x, name in zip((a, b), types))
    got = execute(opcode, *(registers(*each) for each in codes), accumulators(c), target=target, arithmetic="silicon")
    assert np.array_equal(got, accumulators(expected(form, target, a, b, c)))
