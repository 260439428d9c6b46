"""mma.sync as chips compute it, from registers to registers, against integers."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.units.matrix.mma_sync import TYPES, Form, accumulator_registers, accumulator_rows, multiply
from tests.emulator.aligned_sums import NAN, Rules, decode, dot, encode
from tests.emulator.sum_inputs import STYLES, numbers

HMMA = {"sm_80": 24, "sm_90": 25, "sm_100a": 25}


def registers_of(rows: np.ndarray) -> np.ndarray:
    """uint32 [1, registers, 32] of rows of A or columns of B [rows, K], by the formula of the PTX ISA."""
    raw = np.ascontiguousarray(rows).view(np.uint32)
    count, chunks = len(rows) // 8, raw.shape[1] // 4
    result = np.empty((1, count * chunks, 32), np.uint32)
    for register, lane in np.ndindex(count * chunks, 32):
        result[0, register, lane] = raw[lane // 4 + 8 * (register % count), 4 * (register // count) + lane % 4]
    return result


def run(form: Form, target: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D [m, n], bit patterns."""
    dtype = np.uint16 if form.c_type == "f16" else np.uint32
    arguments = registers_of(a), registers_of(b), accumulator_registers(c[None].astype(dtype))
    return accumulator_rows(multiply(form, *arguments, Arithmetic("silicon", target)), form.m, dtype)[0]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("name", "k", "d_type"), [("f16", 16, "f16"), ("f16", 8, "f32"), ("bf16", 16, "f32"), ("tf32", 4, "f32")]
)
@pytest.mark.parametrize("target", HMMA)
def test_operands_of_16_and_of_19_bits(target: str, name: str, k: int, d_type: str, style: str) -> None:
    rng = np.random.default_rng(k)
    a, b, c = (numbers(rng, t, shape, style) for t, shape in ((name, (16, k)), (name, (8, k)), (d_type, (16, 8))))
    got = run(Form(16, 8, k, TYPES[name], TYPES[name], d_type), target, a, b, c)
    fraction = HMMA[target]
    rules = Rules(fraction, 0, 16 if fraction == 24 else 32, (4 if d_type == "f16" else -108) - fraction)
    for i, j in np.ndindex(16, 8):
        assert got[i, j] == dot(a[i].tolist(), b[j].tolist(), int(c[i, j]), (name, name), d_type, rules)


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


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("d_type", ["f32", "f16"])
@pytest.mark.parametrize(("k", "types"), [(32, ("e4m3", "e4m3")), (16, ("e5m2", "e4m3"))])
@pytest.mark.parametrize("target", ["sm_90", "sm_100a"])
def test_fp8_is_two_products_of_fp16(target: str, k: int, types: tuple[str, str], d_type: str, style: str) -> None:
    """What ptxas makes of it: the lower halves of all registers, the upper ones on top of that, and then C."""
    rng = np.random.default_rng(k)
    a, b = (numbers(rng, name, (rows, k), style) for name, rows in zip(types, (16, 8)))
    c = numbers(rng, d_type, (16, 8), style)
    got = run(Form(16, 8, k, TYPES[types[0]], TYPES[types[1]], d_type), target, a, b, c)
    rules, halves = Rules(25, 0, 32, -21 if d_type == "f16" else -133), ("f16", "f16")
    lower = np.arange(k) % 4 < 2
    for i, j in np.ndindex(16, 8):
        x, y = (np.array([of_fp8(int(code), name) for code in row]) for row, name in zip((a[i], b[j]), types))
        total = 0
        for half in (lower, ~lower):
            total = dot(x[half].tolist(), y[half].tolist(), total, halves, d_type, rules)
        assert got[i, j] == added(int(c[i, j]), total, d_type)


@pytest.mark.parametrize("style", STYLES)
def test_fp8_of_ada(style: str) -> None:
    """Two steps of 16 elements; 13 bits."""
    rng, types = np.random.default_rng(2), ("e4m3", "e5m2")
    a, b = (numbers(rng, name, (rows, 32), style) for name, rows in zip(types, (16, 8)))
    c = numbers(rng, "f32", (16, 8), style)
    got = run(Form(16, 8, 32, TYPES["e4m3"], TYPES["e5m2"], "f32"), "sm_89", a, b, c)
    for i, j in np.ndindex(16, 8):
        assert got[i, j] == dot(a[i].tolist(), b[j].tolist(), int(c[i, j]), types, "f32", Rules(13, 10, 16, -132))
