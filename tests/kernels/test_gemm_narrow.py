"""The dense GEMM with operands and outputs of 8 bits, and residuals, in the emulator: bit for bit the reference."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import GemmConfig, Sm80GemmConfig, Sm90GemmConfig, Sm100GemmConfig
from cute_kernels.emulator import Options
from cute_kernels.operations import reference
from cute_kernels.operations.compile import compile_plan
from tests.emulator.cases import check
from tests.emulator.gemm_inputs import columns, make_gemm_case
from tests.nightly import crossed, daily_or_all, drawn, drawn_together, examples, nightly

FP8, INT8, UINT8 = torch.float8_e4m3fn, torch.int8, torch.uint8
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
TOGETHER = Sm90GemmConfig(128, 128, stages=3, store_stages=1)
IN_TURN = Sm90GemmConfig(64, 128, stages=3, pingpong=True, store_stages=1)
SPLIT = dataclasses.replace(TOGETHER, cluster_m=1, split_k=2)
PAIRS = Sm100GemmConfig(stages=3, store_stages=1)
CONFIGS = (TOGETHER, IN_TURN, SPLIT, PAIRS)
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp8": FP8}
POLICIES = ("eager", "lazy", "random")


@settings(max_examples=examples(12, 200), suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 300),
    n=columns(200),
    k=st.integers(9, 40).map(lambda i: 16 * i),
    batches=st.integers(1, 2),
    kernel=drawn_together(
        in_dtype=[FP8, INT8, UINT8, torch.bfloat16],
        out_dtype=daily_or_all([torch.bfloat16, FP8], [*FLOATS, FP8]),
        scales=["number", "row", "column", "row column", "pointer"],
        bias=[True, False],
        activation=daily_or_all(["none", "gelu_tanh"], ["none", "gelu_tanh", "silu"]),
        residual=daily_or_all([None, torch.bfloat16], [None, *FLOATS]),
        config=CONFIGS,
    ),
    sm_count=st.sampled_from([2, 4, 132]),
    completion=st.sampled_from(POLICIES),
    seed=st.integers(0, 2**20),
)
def test_any_problem_under_any_schedule(completion: str, seed: int, kernel: dict[str, Any], **facts) -> None:
    """Rows, columns and K end inside a tile, columns inside the 16 bytes of a row; every kind of addend."""
    out_scale = 0.05 if kernel["out_dtype"] is FP8 else None
    case = make_gemm_case(seed=seed, out_scale=out_scale, **kernel, **facts)
    check(case, Options(seed=seed, completion=completion, interleave="random"))


TRANSPOSED = dataclasses.replace(TOGETHER, transposed=True, tile_n=48)
SCALED = [(torch.bfloat16, ""), (FP8, "row"), (INT8, "column"), (UINT8, "row column"), (FP8, "pointer")]
TRANSPOSED_CONFIGS = (
    TRANSPOSED,
    dataclasses.replace(TRANSPOSED, tile_n=80, cluster_m=1, cluster_n=2, pingpong=True, store_stages=2),
    dataclasses.replace(TRANSPOSED, tile_m=64, tile_n=32, cluster_m=1, split_k=2),
)


@settings(max_examples=examples(12, 150), suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 200),
    n=columns(300),
    k=st.integers(9, 40).map(lambda i: 16 * i),
    batches=st.integers(1, 2),
    kernel=drawn_together(
        operands=daily_or_all(SCALED, itertools.product(*map(dict.fromkeys, zip(*SCALED)))),
        out_dtype=daily_or_all([torch.bfloat16], [torch.bfloat16, torch.float16]),
        bias=[True, False],
        activation=daily_or_all(["none", "gelu_tanh"], ["none", "gelu_tanh", "silu"]),
        residual=daily_or_all([None, torch.bfloat16], [None, torch.bfloat16, torch.float16]),
        config=TRANSPOSED_CONFIGS,
    ),
    sm_count=st.sampled_from([2, 4, 132]),
    completion=st.sampled_from(POLICIES),
    seed=st.integers(0, 2**20),
)
def test_any_problem_transposed(completion: str, seed: int, kernel: dict[str, Any], **facts) -> None:
    """Factors of rows are those of columns of the accumulators, and the other way round; so is the bias."""
    in_dtype, scales = kernel["operands"]
    facts |= {"in_dtype": in_dtype, "scales": scales if in_dtype.itemsize == 1 else ""}
    facts |= {name: value for name, value in kernel.items() if name != "operands"}
    case = make_gemm_case(seed=seed, **facts)
    check(case, Options(seed=seed, completion=completion, interleave="random"))


@settings(max_examples=examples(4, 60), suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 200),
    n=st.integers(1, 150),
    k=st.integers(1, 30).map(lambda i: 16 * i),
    types=drawn([("sm_89", FP8, FP8), ("sm_80", UINT8, torch.bfloat16)], [
        *itertools.product(["sm_89", "sm_120"], [FP8, INT8, UINT8], [*FLOATS, FP8]),
        *itertools.product(["sm_80"], [INT8, UINT8], FLOATS),
    ]),
    scales=st.sampled_from(["", "row", "column", "row column", "pointer"]),
    bias=st.booleans(),
    residual=st.sampled_from([None, *FLOATS]),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_any_problem_by_mma_sync(types: tuple, seed: int, **facts) -> None:
    arch, in_dtype, out_dtype = types
    out_scale = 0.05 if out_dtype is FP8 else None
    config = Sm80GemmConfig(tile_m=64, tile_n=64, stages=3)
    case = make_gemm_case(
        in_dtype=in_dtype, out_dtype=out_dtype, out_scale=out_scale, config=config, arch=arch, sm_count=2, seed=seed,
        **facts,
    )  # fmt: skip
    check(case, Options(seed=seed))


@pytest.mark.parametrize("config", CONFIGS, ids=["cooperative", "pingpong", "split", "pairs"])
@pytest.mark.parametrize("in_dtype", [FP8, pytest.param(UINT8, marks=nightly)])
def test_a_long_row(config: GemmConfig, in_dtype: torch.dtype) -> None:
    """K = 4304, the hidden features of so400m; two tiles of one cluster, the second of few columns."""
    ctas = config.cluster_m * getattr(config, "split_k", 1)
    rows = getattr(config, "tile_m", 128) * config.cluster_m - 5
    case = make_gemm_case(
        m=rows, n=144, k=4304, in_dtype=in_dtype, scales="row column",
        residual=torch.bfloat16, config=config, sm_count=ctas, seed=3,
    )  # fmt: skip
    assert case.plan.clusters == 1 and case.plan.tiles >= 2
    check(case, Options(completion="lazy"))


@pytest.mark.parametrize(
    ("types", "kernel"), crossed(itertools.product(("bf16", "tf32"), DTYPES), ("pingpong", "pairs"))
)
def test_other_operands_with_a_residual_or_a_narrow_output(types: tuple[str, str], kernel: str) -> None:
    config = dataclasses.replace(IN_TURN if kernel == "pingpong" else PAIRS, tile_n=64)
    in_dtype, out_dtype = (DTYPES[name] for name in types)
    case = make_gemm_case(
        m=150, n=70, k=72, in_dtype=in_dtype, out_dtype=out_dtype, residual=torch.float16, config=config, seed=5
    )
    check(case, Options(completion="random", interleave="random"))


@pytest.mark.parametrize("config", [
    Sm90GemmConfig(64, 64, 3, 1, pingpong=True, store_stages=1),
    Sm90GemmConfig(64, 96, 3, 1, pingpong=True, store_stages=3), Sm90GemmConfig(128, 160, 3, 1, store_stages=1),
    Sm90GemmConfig(128, 160, 4, 1, pingpong=True, store_stages=10),
    Sm100GemmConfig(tile_n=64, stages=3, store_stages=1),
], ids=["64", "96", "160", "160, a buffer for every region", "pairs, 64"])  # fmt: skip
def test_rows_of_store_buffers_of_fewer_than_128_bytes(config: GemmConfig) -> None:
    """Tiles whose columns of 8 bits are no whole number of those."""
    case = make_gemm_case(
        m=150, n=190, k=144, in_dtype=FP8, out_dtype=FP8, scales="column", activation="gelu_tanh", config=config,
        sm_count=2, seed=8,
    )  # fmt: skip
    assert case.plan.store_row_bytes < 128
    check(case, Options(completion="lazy"))


def test_what_is_beyond_the_range_of_e4m3_saturates() -> None:
    """Both signs, the largest number itself, and NaN."""
    case = make_gemm_case(m=64, n=128, k=128, in_dtype=FP8, out_dtype=FP8, bias=False, config=IN_TURN, seed=6)
    case.tensors.out_scale = 1e-4
    case.tensors.a[0, 3, 5] = float("nan")
    expected = reference.gemm(case.tensors.a, case.tensors.b, out_dtype=FP8, scale_a=0.3, scale_b=0.1, out_scale=1e-4)
    case.expected.copy_(expected)
    check(case)
    out = case.tensors.out.float()
    assert out[0, 3].isnan().all() and (out == 448).any() and (out == -448).any()


LARGE = {
    "128 x 256": Sm90GemmConfig(),
    "256 x 128": Sm90GemmConfig(256, 128),
    "pingpong": Sm90GemmConfig(128, 128, 6, pingpong=True),
    "pairs": Sm100GemmConfig(tile_n=256, stages=4),
}
EPILOGUES = {
    "FP8": {"in_dtype": FP8, "scales": "row column", "residual": torch.bfloat16},
    "UINT8 to FP8": {"in_dtype": UINT8, "scales": "row column", "out_dtype": FP8, "activation": "gelu_tanh"},
}


@pytest.mark.parametrize(("config", "epilogue"), crossed(LARGE, EPILOGUES))
def test_kernels_do_not_spill(config: str, epilogue: str) -> None:
    case = make_gemm_case(m=300, n=300, k=256, config=LARGE[config], **EPILOGUES[epilogue])
    resources = compile_plan(case.plan, emulated=True).resources
    assert resources.stack_bytes == 0 and resources.local_bytes == 0


def test_nan_of_e4m3_is_told_from_memory_that_nobody_wrote() -> None:
    """Of the two NaN of E4M3 kernels write one, torch the other where its operand is negative."""
    case = make_gemm_case(m=3, n=16, k=128, in_dtype=FP8, out_dtype=FP8, bias=False, config=IN_TURN, seed=6)
    case.expected.copy_(torch.tensor(float("nan")))
    bits, expected = case.tensors.out.view(torch.uint8), case.expected.view(torch.uint8)
    for reference_bits in (0x7F, 0xFF):
        expected.fill_(reference_bits)
        assert case.mismatches().all()
        bits[..., 0, :] = 0x7F
        assert case.mismatches().any(-1).tolist() == [[False, True, True]]
        bits.fill_(0xFF)
