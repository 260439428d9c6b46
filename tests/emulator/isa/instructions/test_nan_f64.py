"""NaN results of f64: which one is open in the PTX ISA, but it may not depend on how a launch is executed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch

INFINITY, QUIET = 0x7FF << 52, 1 << 51
VALUES = [
    0x7FF8000000000000, 0xFFF8000000000123, 0x7FF0000000000001, 0xFFF0000000000456, 0x7FFFFFFFFFFFFFFF, INFINITY,
    INFINITY | 1 << 63, 0, 0x3FF0000000000000, 0xBFF0000000000000,
]  # fmt: skip
OPERATIONS = {
    "add.f64": 2, "sub.f64": 2, "mul.f64": 2, "div.rn.f64": 2, "fma.rn.f64": 3, "sqrt.rn.f64": 1, "rcp.rn.f64": 1,
    "min.f64": 2, "max.f64": 2,
}  # fmt: skip
OPEN = "the PTX ISA leaves the NaN results of f64 open"


def is_nan(bits: int) -> bool:
    return bits & ~(1 << 63) > INFINITY


def expected(operands: tuple[int, ...], result: int) -> int:
    """``result`` where it is a number."""
    if not is_nan(result):
        return result
    return next((x | QUIET for x in operands if is_nan(x)), 0xFFF8 << 48)


def by_lanes(operation: str, rows: np.ndarray, options: Options) -> np.ndarray:
    """One row of operands per thread."""
    count = rows.shape[1]
    loads = " ".join(f"ld.global.b64 %d1{i}, [%d3+{8 * i}];" for i in range(count))
    names = ", ".join(f"%d1{i}" for i in range(count))
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r1, %r2, 32, %r1; ld.param.u64 %d0, [p0];
    ld.param.u64 %d1, [p1]; mul.wide.u32 %d2, %r1, {8 * count}; add.u64 %d3, %d0, %d2; {loads}
    {operation} %d20, {names};
    mul.wide.u32 %d4, %r1, 8; add.u64 %d5, %d1, %d4; st.global.b64 [%d5], %d20; ret;"""
    padded = np.zeros((-(-len(rows) // 32) * 32, count), np.uint64)
    padded[: len(rows)] = rows
    out = np.zeros(len(padded), np.uint64)
    launch(module(body), padded, out, grid=(len(padded) // 32, 1, 1), options=options, hardware=OPEN)
    return out[: len(rows)]


def by_warps(operation: str, row: np.ndarray, options: Options) -> int:
    """The same operands in all lanes, which the emulator computes once."""
    names = [f"%d1{i}" for i in range(len(row))]
    loads = " ".join(f"ld.param.u64 {name}, [p{i + 1}];" for i, name in enumerate(names))
    body = f"ld.param.u64 %d0, [p0]; {loads} {operation} %d20, {', '.join(names)}; st.global.b64 [%d0], %d20; ret;"
    out = np.zeros(1, np.uint64)
    text = module(body, parameters=1 + len(row))
    launch(text, out, *map(int, row), options=options, hardware=OPEN)
    return int(out[0])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nan_results_are_the_same_everywhere(operation: str):
    rows = np.array(list(itertools.product(VALUES, repeat=OPERATIONS[operation])), np.uint64)
    results = by_lanes(operation, rows, Options()).tolist()
    for row, result in zip(rows.tolist(), results, strict=True):
        assert result == expected(tuple(row), result), [hex(x) for x in row]
    assert any(map(is_nan, results)) and not all(map(is_nan, results))
    for index in range(0, len(rows), max(len(rows) // 12, 1)):
        assert by_warps(operation, rows[index], Options()) == results[index]
