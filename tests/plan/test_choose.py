"""`cute_kernels.plan.choose`: a problem's configuration is complete, and its plan is the problem's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from cute_kernels.config import GemmProblem, PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.plan import ARCHS, PLANNERS, choose, make_plan

ARCH = st.sampled_from(sorted(ARCHS))
WITHOUT_FP8 = ("sm_80", "sm_86", "sm_90")
"""Whose mma.sync does not multiply E4M3."""

SM_COUNT = st.sampled_from([None, 1, 2, 78, 132])


def assert_complete(problem: Any, arch: str, sm_count: int | None) -> None:
    plan, config = make_plan(problem, None, arch, sm_count=sm_count), choose(problem, arch, sm_count=sm_count)
    assert make_plan(problem, config, arch, sm_count=sm_count) == plan
    assert None not in dataclasses.asdict(config).values() and plan.config == config
    assert type(config) in {kernel.config for kernel in PLANNERS[plan.operation].of(arch)}


@given(
    images=st.integers(1, 5000),
    positions=st.integers(1, 1100),
    n=st.integers(1, 250).map(lambda i: 8 * i),
    k=st.integers(1, 130).map(lambda i: 16 * i),
    table=st.sampled_from([0, 1, 2]),
    dtype=st.sampled_from(["float8_e4m3fn", "uint8", "bfloat16"]),
    indexed=st.booleans(),
    arch=ARCH,
    sm_count=SM_COUNT,
)
def test_rows(images, positions, n, k, table, dtype, indexed, arch, sm_count) -> None:
    rows = {0: 0, 1: 1, 2: positions}[table]
    assume(dtype != "float8_e4m3fn" or arch not in WITHOUT_FP8)
    problem = PatchEmbedProblem(images * positions, n, k, rows, dtype, table_index=indexed and rows > 0)
    assert_complete(problem, arch, sm_count)


@given(
    batch=st.integers(1, 5000),
    grid=st.tuples(st.integers(1, 8), st.integers(1, 8)).map(lambda grid: (2 * grid[0], 2 * grid[1])),
    patch=st.sampled_from([8, 14, 16, 32]),
    precision=st.sampled_from([("int8", "uint8"), ("bf16", "bfloat16"), ("fp16", "float16")]),
    channels_last=st.booleans(),
    bias=st.booleans(),
    arch=ARCH,
    sm_count=SM_COUNT,
)
def test_images(batch, grid, patch, precision, channels_last, bias, arch, sm_count) -> None:
    """Read by a kernel itself, or laid out as rows first."""
    problem = PatchEmbedImagesProblem(
        batch, 3, patch * grid[0], patch * grid[1], patch, 768, precision[1], channels_last and precision[0] == "int8",
        precision[0], int(bias),
    )  # fmt: skip
    assert_complete(problem, arch, sm_count)


@given(
    m=st.integers(1, 9000),
    n=st.integers(1, 9000),
    k=st.integers(1, 500).map(lambda i: 8 * i),
    batches=st.integers(1, 5),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    out_dtype=st.sampled_from(["bfloat16", "float32"]),
    scale=st.booleans(),
    bias=st.sampled_from([None, "float16", "float32"]),
    activation=st.sampled_from(["none", "gelu_tanh"]),
    residual=st.sampled_from([None, "bfloat16", "float32"]),
    arch=ARCH,
    sm_count=st.sampled_from([None, 2, 78, 132]),
)
@example(9760, 104, 3352, 1, "bfloat16", "bfloat16", False, None, "none", "bfloat16", "sm_90a", None)
@example(38475, 400, 688, 1, "float32", "float32", True, "float16", "gelu_tanh", "float16", "sm_90a", None)
def test_gemm(m, n, k, batches, dtype, out_dtype, scale, bias, activation, residual, arch, sm_count) -> None:
    """Whatever follows the product: store buffers, numbers of columns and a residual take memory from the stages."""
    more = {"column_scale": scale, "bias": bias is not None, "bias_dtype": bias or "bfloat16"}
    epilogue = {"out_dtype": out_dtype, "activation": activation, "residual": residual}
    assert_complete(GemmProblem(m, n, k, batches, dtype, **epilogue, **more), arch, sm_count)


def test_tile_numbers_fit_32_bits_where_a_larger_tile_lets_them() -> None:
    """Three of the candidates do."""
    problem = GemmProblem(46586, 2**31 - 2**20, 16, 2)
    plan = make_plan(problem, arch="sm_90a")
    assert plan.tiles + plan.clusters < 2**31


@pytest.mark.parametrize("arch", ARCHS)
def test_the_last_kernel_takes_what_the_others_refuse(arch: str) -> None:
    """And says nothing, where the others say why."""
    for problem in (
        PatchEmbedProblem(196, 768, 4096, in_dtype="bfloat16" if arch in WITHOUT_FP8 else "float8_e4m3fn"),
        PatchEmbedImagesProblem(8, 3, 224, 224, 14, 1152, channels_last=True),
        GemmProblem(8, 8, 8),
    ):
        planner = next(planner for planner in PLANNERS.values() if planner.problem is type(problem))
        reasons = [kernel.takes(problem, ARCHS[arch]) for kernel in planner.of(arch)]
        chosen, config = planner.usual(problem, ARCHS[arch])
        taking = [kernel for kernel, reason in zip(planner.of(arch), reasons, strict=True) if not reason]
        assert chosen in (taking if arch in planner.timed else taking[:1])
        assert type(choose(problem, arch)) is type(config)
