"""Instructions that sm_90 has, against independent results; digests of what a GPU made of the same launches agree."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import Options, UnsupportedPTX
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.machine.units.matrix.test_exact import TYPES, nearest_float32, rational_dot
from tests.emulator.ptx_launch import launch
from tests.emulator.sm90_all_cases import cases
from tests.emulator.sm90_cases import MMA_BYTES, Case, digest, mma_operands

_FILE = Path(__file__).parents[2] / "data" / "cases_h200.json"
RECORDED = json.loads(_FILE.read_text()) if _FILE.exists() else {}
CASES = cases()
POLICIES = ("eager", "lazy", "random")


def run(case: Case, text: str | None = None, hardware: str | None = None, **options: object) -> np.ndarray:
    out = np.full(case.expected.shape, 0xAB, np.uint8) if case.expected.dtype == np.uint8 else None
    if out is None:
        out = np.full(case.expected.nbytes, 0xAB, np.uint8).view(case.expected.dtype).reshape(case.expected.shape)
    out = aligned(out)
    launch(
        text or case.text,
        *map(aligned, case.inputs),
        out,
        block=(case.block, 1, 1),
        grid=(case.grid, 1, 1),
        cluster=(case.cluster, 1, 1),
        dynamic_smem=case.shared,
        options=Options(**options),
        hardware=hardware,
    )
    return out


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_against_independent_results(case: Case) -> None:
    for policy in POLICIES if "async" in case.text else POLICIES[:1]:
        out = run(case, completion=policy, seed=len(case.name))
        assert np.array_equal(out.view(np.uint8), case.expected.view(np.uint8)), policy
    if case.name in RECORDED:
        assert digest(out) == RECORDED[case.name]


def test_mma_with_registers_that_are_the_same_in_all_lanes() -> None:
    """Literals and registers of one value stand beside those that differ from lane to lane."""
    text = module(
        "ld.param.u64 %d0, [p0];\nmov.u32 %r0, %laneid;\nmad.wide.u32 %d0, %r0, 16, %d0;\nmov.b32 %r9, 0x01010101;\n"
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%r4, %r5, %r6, %r7}, {%r0, %r9, %r9, %r9}, {%r9, %r9}, "
        "{%r0, %r9, %r9, %r9};\nst.global.v4.b32 [%d0], {%r4, %r5, %r6, %r7};\nret;",
        parameters=1,
    )
    out = aligned(np.zeros((32, 4), np.int32))
    launch(text, out, options=Options())
    a, b = np.ones((16, 32), np.int64), np.ones((8, 32), np.int64)
    c = np.full((32, 4), 0x01010101)
    c[:, 0] = np.arange(32)
    for lane in range(32):  # register 0 of A: row lane / 4, four bytes of K from 4 * (lane % 4) on
        a[lane // 4, 4 * (lane % 4) : 4 * (lane % 4) + 4] = (lane, 0, 0, 0)
    product = a @ b.T
    rows, columns = np.arange(32) // 4, 2 * (np.arange(32) % 4)
    expected = np.stack([product[rows + 8 * (i // 2), columns + i % 2] for i in range(4)], axis=1) + c
    assert np.array_equal(out, expected)


def test_every_recorded_case_still_exists() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert set(RECORDED) <= {case.name for case in CASES}


@pytest.mark.parametrize(
    "name, old, new, message",
    [
        ("mma mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", ".f16.f16.f32", ".f16.bf16.f32", "qualifier .bf16"),
        ("mma mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "row.col", "row.row", "does not go with"),
        ("mma mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "m16n8k16", "m16n8k32", "qualifier .m16n8k32"),
        ("mma mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "m16n8k16", "m16n8k8", "a list of 2 registers"),
        ("cp.async.cg 16 whole, wait_all", "[%x0], 16", "[%x0], 8", "cp-size 8"),
        ("cp.async.ca 4 whole, wait_all", ".global [", ".global.L2::never [", "qualifier"),
    ],
)
def test_other_forms_are_refused(name: str, old: str, new: str, message: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    assert case.text.count(old) == 1
    with pytest.raises(UnsupportedPTX, match=message):
        run(case, case.text.replace(old, new))


@pytest.mark.parametrize("d_type, a_type", [("f32", "f16"), ("f16", "f16"), ("f32", "bf16"), ("f16", "e5m2")])
def test_mma_rounds_once(d_type: str, a_type: str) -> None:
    """Operands and accumulators of all magnitudes, against rational sums rounded by integer arithmetic.

    That is the contract here, not what an H200 does; exact sums are compared with it above.
    """
    x = mma_operands((16, 8, 32 if a_type == "e5m2" else 16, d_type, a_type, a_type))
    kind, nbytes = TYPES[a_type], MMA_BYTES[a_type]
    rng = np.random.default_rng(5)
    limit = {"f16": 0x5C00, "bf16": 0x4380, "e5m2": 0x5C}[a_type]  # magnitudes below 256
    shapes, signs = (x.a.shape, x.b.shape), 8 * nbytes - 1
    codes = [rng.integers(0, limit, shape) | rng.integers(0, 2, shape) << signs for shape in shapes]
    a, b = (c.astype(np.uint8 if nbytes == 1 else np.uint16) for c in codes)
    result = np.float16 if d_type == "f16" else np.float32
    c = (rng.standard_normal((16, 8)) * 2.0 ** rng.integers(-12, 12, (16, 8))).astype(result)
    expected = np.zeros((16, 8), result)
    for i, j in np.ndindex(16, 8):
        exact = rational_dot(a[i].view(kind).astype(float), b[j].view(kind).astype(float)) + Fraction(float(c[i, j]))
        expected[i, j] = nearest(exact, result)
    assert len(np.unique(expected)) > 64
    registers = [x.pack(a, nbytes), x.pack(b, nbytes), x.accumulators(c)]
    case = Case("", x.text(), (np.concatenate(registers),), x.accumulators(expected))
    reason = "sums that are not exact, which PTX lets a tensor core round as it does"
    out = run(case, hardware=reason, arithmetic="exact")
    assert np.array_equal(out, x.accumulators(expected))


def nearest(value: Fraction, kind: type) -> float:
    """The nearest FP32 or FP16, ties to even."""
    if kind is np.float32:
        return nearest_float32(value)
    exponent = max(math.frexp(float(abs(value)))[1] - 11, -24)
    whole, rest = divmod(abs(value) / Fraction(2) ** exponent, 1)
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2)
    return math.copysign(float(whole * Fraction(2) ** exponent), value)
