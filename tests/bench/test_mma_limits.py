"""bench/mma_limits.py: what is left out of kernels, and its table. No times: there is no GPU."""

from __future__ import annotations

import re

import pytest

from bench import mma_limits
from bench.gemm_cases import GemmCase
from bench.timing import Run
from cute_kernels.config import GemmProblem, PatchEmbedImagesProblem, Sm80GemmConfig, Sm80ImagesConfig
from cute_kernels.operations.compile import compile_uncached
from cute_kernels.plan import make_plan

PLANS = {
    "gemm": (GemmProblem(128, 64, 256, in_dtype="float32", out_dtype="float32"), Sm80GemmConfig(64, 64, stages=3)),
    "images": (
        PatchEmbedImagesProblem(8, 3, 32, 32, 16, 64, "bfloat16", precision="bf16", table_rows=4),
        Sm80ImagesConfig(64, 64, stages=3),
    ),
}
OPCODES = {"copies": "cp.async.cg", "stores": r"st.global.v\d", "fragments": "ldmatrix", "products": "mma.sync"}


def counts(operation: str, parts: tuple[str, ...]) -> dict[str, int]:
    problem, config = PLANS[operation]
    with mma_limits.left_out(parts):
        ptx = compile_uncached(make_plan(problem, config, "sm_90")).ptx
    return {name: len(re.findall(opcode, ptx)) for name, opcode in OPCODES.items()}


@pytest.mark.parametrize(("operation", "parts"), [("gemm", ("fragments",)), ("images", ("copies", "stores"))])
def test_parts_are_left_out_and_nothing_else(operation: str, parts: tuple[str, ...]) -> None:
    """Of copies and fragments those of the first blocks stay; a kernel compiled afterwards has all again."""
    assert parts in mma_limits.LEFT_OUT
    less, whole = counts(operation, parts), counts(operation, ())
    for name, count in whole.items():
        assert (0 <= less[name] < count) if name in parts else (less[name] == count > 0), name
    assert "stores" not in parts or less["stores"] == 0


@pytest.mark.parametrize("name", mma_limits.CASES)
def test_cases_are_planned(name: str) -> None:
    case = mma_limits.CASES[name]
    plan = mma_limits.plan_of(case, "sm_90", 132)
    assert plan.overlaps and (plan.config.rounding == "truncate" if isinstance(case, GemmCase) else plan.copies_table)


def test_a_line_of_the_table() -> None:
    """256 GFLOP in 2 ms of 1,500 MHz, on 64 tensor cores, each of 2,048 at a time: 1.54 clocks each."""
    runs = [
        Run("burst", 0, 5, 1.0),
        Run("sustained", 0, 100, 2.0, 1500.0, 650.0),
        Run("sustained", 1, 100, 2.0, 1500.0),
    ]
    with pytest.raises(ValueError, match="nothing to summarize"):
        mma_limits.row_of("all", runs[:1], 256 * 10**9, 64, 2048)
    row = mma_limits.row_of("all", runs, 256 * 10**9, 64, 2048)
    assert row == ["all", "1.000", "2.000", "256", "128", "1500", "650", "1.54"]
