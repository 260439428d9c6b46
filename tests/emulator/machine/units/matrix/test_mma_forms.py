"""Rarer forms of mma.sync: f64, single bits, four-bit integers, and sparse A, element by element after the PTX ISA."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from cute_kernels.emulator.errors import BarrierMisuse, IllegalAccess, UnsupportedPTX
from tests.emulator.aligned_sums import Rules, dot
from tests.emulator.matrix_cases import encode
from tests.emulator.mma_launch import BITS, accumulators, execute, registers
from tests.emulator.sum_inputs import numbers

INTEGERS = {"s4": (-8, 8), "u4": (0, 16), "s8": (-128, 128), "u8": (0, 256)}


# --- f64 --------------------------------------------------------------------------------------------------------------


def rounded(value: Fraction, mode: str) -> float:
    """To a double; float() of a fraction rounds to nearest even."""
    near = float(value)
    if mode == "rn" or Fraction(near) == value:
        return near
    up = mode == "rp" or mode == "rz" and value < 0
    if (Fraction(near) > value) == up:
        return near
    return math.nextafter(near, math.inf if up else -math.inf)


@pytest.mark.parametrize("mode", ["", ".rn", ".rz", ".rm", ".rp"])
@pytest.mark.parametrize(("m", "k"), [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_f64_is_a_chain_of_fused_multiply_adds(m: int, k: int, mode: str) -> None:
    """From C on, in order of K."""
    rng = np.random.default_rng(m * k)
    a, b, c = (rng.normal(size=shape) * 2.0 ** rng.integers(-30, 30, shape) for shape in ((m, k), (8, k), (m, 8)))
    opcode = f"mma.sync.aligned.m{m}n8k{k}.row.col{mode}.f64.f64.f64.f64"
    got = execute(opcode, *(registers(x.view(np.uint64), 64, 64) for x in (a, b)), accumulators(c))
    expected = np.zeros((m, 8))
    for i, j in np.ndindex(m, 8):
        total = c[i, j]
        for x, y in zip(a[i].tolist(), b[j].tolist()):
            total = rounded(Fraction(x) * Fraction(y) + Fraction(total), mode[1:] or "rn")
        expected[i, j] = total
    assert np.array_equal(got, accumulators(expected))


# --- bits and integers of four bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["xor", "and"])
@pytest.mark.parametrize(("m", "k"), [(8, 128), (16, 128), (16, 256)])
def test_bits(m: int, k: int, operation: str) -> None:
    rng = np.random.default_rng(k)
    a, b = (rng.integers(0, 2, (rows, k)) for rows in (m, 8))
    c = rng.integers(-(2**31), 2**31, (m, 8)).astype(np.int32)
    c[0] = 2**31 - 1  # the sum wraps
    opcode = f"mma.sync.aligned.m{m}n8k{k}.row.col.s32.b1.b1.s32.{operation}.popc"
    got = execute(opcode, registers(a, 1), registers(b, 1), accumulators(c))
    both = a[:, None] * b[None] if operation == "and" else a[:, None] != b[None]
    assert np.array_equal(got, accumulators((c + both.sum(-1)).astype(np.int32)))


def summed(a: np.ndarray, b: np.ndarray, c: np.ndarray, saturate: bool) -> np.ndarray:
    total = a @ b.T + c.astype(np.int64)
    return (np.clip(total, -(2**31), 2**31 - 1) if saturate else total).astype(np.int32)


def integer_operands(types: tuple[str, str], m: int, k: int) -> tuple[np.ndarray, ...]:
    """A, B and C; sums of the first rows leave 32 bits."""
    rng = np.random.default_rng(k)
    a, b = (rng.integers(*INTEGERS[name], (rows, k)) for name, rows in zip(types, (m, 8)))
    c = rng.integers(-9999, 9999, (m, 8)).astype(np.int32)
    c[0], c[1] = 2**31 - 1, -(2**31)
    return a, b, c


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("types", [("s4", "s4"), ("u4", "s4"), ("s4", "u4"), ("u4", "u4")])
@pytest.mark.parametrize(("m", "k"), [(8, 32), (16, 32), (16, 64)])
def test_integers_of_four_bits(m: int, k: int, types: tuple[str, str], saturate: bool) -> None:
    a, b, c = integer_operands(types, m, k)
    opcode = f"mma.sync.aligned.m{m}n8k{k}.row.col{'.satfinite' * saturate}.s32.{types[0]}.{types[1]}.s32"
    got = execute(opcode, registers(a & 15, 4), registers(b & 15, 4), accumulators(c))
    assert np.array_equal(got, accumulators(summed(a, b, c, saturate)))


# --- sparse A ---------------------------------------------------------------------------------------------------------

SPARSE = [
    *((k, t, t, d) for k in (16, 32) for t, d in (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"))),
    *((k, "tf32", "tf32", "f32") for k in (8, 16)),
    *((64, a, b, "f32") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *((k, a, b, "s32") for k in (32, 64) for a in ("s8", "u8") for b in ("s8", "u8")),
    *((k, a, b, "s32") for k in (64, 128) for a in ("s4", "u4") for b in ("s4", "u4")),
]


def group(name: str) -> tuple[int, int]:
    """(elements of a chunk, those that lie together)."""
    return {"tf32": (2, 1), "s4": (8, 2), "u4": (8, 2)}.get(name, (4, 1))


def selectors(name: str, k: int) -> int:
    """How many there are."""
    stored = k * BITS[name] // 16
    return {8: 2, 16: 4 if BITS[name] > 8 else 2, 32: 2 if BITS[name] > 8 else 1}[stored]


def drawn_places(rng: np.random.Generator, name: str, k: int, ordered: bool) -> np.ndarray:
    """Where the stored pieces of each chunk belong: [16, chunks, 2], of tf32 [16, chunks, 1]."""
    size, together = group(name)
    shape = (16, k // size)
    if name == "tf32":
        return rng.integers(0, 2, (*shape, 1))
    found = rng.permuted(np.broadcast_to(np.arange(size // together), (*shape, size // together)), axis=-1)[..., :2]
    return np.sort(found, -1) if ordered else found


def expand(stored: np.ndarray, where: np.ndarray, name: str, k: int) -> np.ndarray:
    """The rows of A with their zeros."""
    size, together = group(name)
    dense = np.zeros((16, k), stored.dtype)
    for row, chunk, n, i in np.ndindex(*where.shape, together):
        dense[row, chunk * size + where[row, chunk, n] * together + i] = stored[
            row, (chunk * where.shape[-1] + n) * together + i
        ]
    return dense


def metadata(where: np.ndarray, name: str, k: int, selector: int, rng: np.random.Generator) -> np.ndarray:
    """[1, 32]: where the figures of the PTX ISA have the four bits of each chunk; noise in the others."""
    words = rng.integers(0, 2**32, 32, np.uint64)
    chunks = where.shape[1]
    for row, chunk in np.ndindex(16, chunks):
        code = (0b0100, 0b1110)[where[row, chunk, 0]] if name == "tf32" else where[row, chunk] @ (1, 4)
        if BITS[name] > 8:
            lane, bit = 4 * (row % 8) + selector * (chunks // 4) + chunk // 4, 16 * (row // 8) + 4 * (chunk % 4)
        else:
            lane, bit = 4 * (row % 8) + 2 * selector + 2 * (chunk // 8) + row // 8, 4 * (chunk % 8)
        words[lane] = int(words[lane]) & ~(15 << bit) | int(code) << bit
    return words.astype(np.uint32)[None]


def sparse_opcode(k: int, a: str, b: str, d: str, *, ordered: bool, suffix: str = "") -> str:
    return f"mma.sp{'::ordered_metadata' * ordered}.sync.aligned.m16n8k{k}.row.col{suffix}.{d}.{a}.{b}.{d}"


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("k", "a_type", "b_type", "d_type"), SPARSE)
def test_sparse_operands(k: int, a_type: str, b_type: str, d_type: str, ordered: bool) -> None:
    """Every selector; sums that are exact on every chip, against the product of the matrix with its zeros."""
    rng = np.random.default_rng(k)
    integers = a_type in INTEGERS
    stored = rng.integers(*(INTEGERS[a_type] if integers else (-4, 5)), (16, k // 2))
    b = rng.integers(*(INTEGERS[b_type] if integers else (-4, 5)), (8, k))
    c = rng.integers(-50, 50, (16, 8)).astype({"f32": np.float32, "f16": np.float16, "s32": np.int32}[d_type])
    if integers:
        c[0], c[1] = 2**31 - 1, -(2**31)
    a_codes, b_codes = (
        x & (1 << BITS[name]) - 1 if integers else encode(x, name) for x, name in ((stored, a_type), (b, b_type))
    )
    for selector in range(selectors(a_type, k)):
        where = drawn_places(rng, a_type, k, ordered)
        suffix = ".satfinite" if integers and selector else ""
        opcode = sparse_opcode(k, a_type, b_type, d_type, ordered=ordered, suffix=suffix)
        operands = registers(a_codes, BITS[a_type]), registers(b_codes, BITS[b_type]), accumulators(c)
        dense = expand(stored, where, a_type, k)
        expected = summed(dense, b, c, bool(suffix)) if integers else (dense @ b.T + c).astype(c.dtype)
        for arithmetic in ("exact", "silicon"):
            got = execute(
                opcode, *operands, metadata(where, a_type, k, selector, rng), selector=selector, arithmetic=arithmetic
            )
            assert np.array_equal(got, accumulators(expected))


@pytest.mark.parametrize(("target", "fraction", "step"), [("sm_90", 25, 32), ("sm_80", 24, 16)])
@pytest.mark.parametrize(
    ("k", "name", "d_type"), [(32, "f16", "f32"), (16, "f16", "f16"), (32, "bf16", "f32"), (16, "tf32", "f32")]
)
def test_sparse_sums_are_those_of_what_is_stored(
    k: int, name: str, d_type: str, target: str, fraction: int, step: int
) -> None:
    """A step adds as many products as one without sparsity."""
    rng = np.random.default_rng(k)
    stored, b = (numbers(rng, name, shape, "near") for shape in ((16, k // 2), (8, k)))
    c = numbers(rng, d_type, (16, 8), "near")
    where = drawn_places(rng, name, k, True)
    dtype = np.uint16 if d_type == "f16" else np.uint32
    operands = registers(stored, BITS[name]), registers(b, BITS[name]), accumulators(c.astype(dtype))
    opcode = sparse_opcode(k, name, name, d_type, ordered=True)
    got = execute(
        opcode, *operands, metadata(where, name, k, 0, rng), selector=0, target=target, arithmetic="silicon"
    )
    size, _ = group(name)
    rules = Rules(fraction, 0, step, (4 if d_type == "f16" else -108) - fraction)
    expected = np.zeros((16, 8), dtype)
    for i, j in np.ndindex(16, 8):
        chosen = [int(b[j, chunk * size + place]) for chunk, places in enumerate(where[i]) for place in places]
        expected[i, j] = dot(stored[i].tolist(), chosen, int(c[i, j]), (name, name), d_type, rules)
    assert np.array_equal(got, accumulators(expected))


def one_wrong(code: int, name: str = "f16", stored: int = 1, ordered: bool = True) -> None:
    """The metadata of all chunks are ``code``."""
    k = 16
    width = BITS[name]
    a, b = registers(np.full((16, k // 2), stored), width), registers(np.ones((8, k), int), width)
    words = np.full((1, 32), code * 0x11111111, np.uint32)
    opcode = sparse_opcode(k, name, name, "f32", ordered=ordered)
    execute(opcode, a, b, accumulators(np.zeros((16, 8), np.float32)), words, selector=0)


@pytest.mark.parametrize("code", range(16))
@pytest.mark.parametrize(("name", "ordered"), [("f16", True), ("f16", False), ("tf32", True)])
def test_metadata_that_means_nothing_is_reported(code: int, name: str, ordered: bool) -> None:
    first, second = code & 3, code >> 2
    legal = code in (4, 14) if name == "tf32" else first < second if ordered else first != second
    if legal:
        one_wrong(code, name, ordered=ordered)
    else:
        with pytest.raises(IllegalAccess, match=f"metadata {code:#06b} of mma.sp in row 0, chunk 0"):
            one_wrong(code, name, ordered=ordered)
    one_wrong(code, name, stored=0, ordered=ordered)  # where zeros belong is all one


FORMS = {
    "mma.sync.aligned.m16n8k4.row.col.rz.f32.tf32.tf32.f32": "qualifier .rz does not exist here",
    "mma.sync.aligned.m8n8k4.row.col.satfinite.f64.f64.f64.f64": "qualifier .satfinite does not exist here",
    "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32": "a qualifier is missing, one of .and, .xor",
    "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.or.popc": "qualifier .or does not exist here",
    "mma.sync.aligned.m16n8k64.row.col.s32.s4.s8.s32": "qualifier .s8 ",
    "mma.sync.aligned.m16n8k32.row.col.f64.f64.f64.f64": "qualifier .m16n8k32 ",
}


@pytest.mark.parametrize("opcode", FORMS)
def test_other_forms_are_refused(opcode: str) -> None:
    dtype = np.uint64 if "f64" in opcode else np.uint32
    with pytest.raises(UnsupportedPTX, match=FORMS[opcode]):
        execute(opcode, *(np.zeros((n, 32), dtype) for n in (2, 1, 4)))


@pytest.mark.parametrize(("k", "name", "selector", "legal"), [
    (16, "f16", 4, "0 to 3"), (32, "f16", 2, "0 to 1"), (32, "bf16", -1, "0 to 1"), (8, "tf32", 4, "0 to 3"),
    (16, "tf32", 3, "0 to 1"), (32, "s8", 2, "0 to 1"), (64, "u8", 1, "0 are"), (64, "e4m3", 1, "0 are"),
    (64, "s4", 2, "0 to 1"), (128, "u4", 3, "0 are"),
])  # fmt: skip
def test_selectors_beyond_those_of_the_shape_are_refused(k: int, name: str, selector: int, legal: str) -> None:
    opcode = sparse_opcode(k, name, name, "s32" if name in INTEGERS else "f32", ordered=True)
    wide = k * BITS[name] // 16 // 8
    operands = (np.zeros((n, 32), np.uint32) for n in (wide, wide, 4, 1))
    with pytest.raises(UnsupportedPTX, match=f"selector {selector}; .* {legal}"):
        execute(opcode, *operands, selector=selector)


@pytest.mark.parametrize(
    "opcode",
    [
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16",
        sparse_opcode(16, "f16", "f16", "f16", ordered=True),
    ],
)  # fmt: skip
def test_all_lanes_take_part(opcode: str) -> None:
    sparse = "mma.sp" in opcode
    shape = (2, 2, 2, 1) if sparse else (1, 1, 2) if "f64" in opcode else (2, 1, 2)
    operands = (np.zeros((n, 32), np.uint64 if "f64" in opcode else np.uint32) for n in shape)
    with pytest.raises(BarrierMisuse, match="executed by lanes"):
        execute(opcode, *operands, selector=0 if sparse else None, guard="@%p1")
