"""Any call of `gemm` on every architecture in the emulator, numbers that spoil others among its inputs: to the bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import ACTIVATIONS, GemmConfig, Sm80GemmConfig, Sm90GemmConfig, Sm100GemmConfig, name_of
from cute_kernels.emulator import Options
from cute_kernels.operations.base import random_values
from cute_kernels.operations.gemm import GEMM, GemmArguments
from cute_kernels.plan.gemm import B_TYPES
from tests.emulator.cases import case_of, check
from tests.nightly import examples

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
INT8, UINT8 = torch.int8, torch.uint8
FLOATS, NARROW = (BF16, FP16, FP32), (FP8, INT8, UINT8)
TOGETHER = Sm90GemmConfig(128, 64, stages=3, store_stages=1)
CONFIGS = {
    "sm_90a": (
        TOGETHER, Sm90GemmConfig(64, 64, stages=3, pingpong=True, store_stages=1),
        dataclasses.replace(TOGETHER, cluster_m=1, split_k=2),
    ),
    "sm_100a": (Sm100GemmConfig(tile_n=64, stages=3, store_stages=1),),
    "sm_89": (Sm80GemmConfig(tile_m=64, tile_n=64, stages=3),),
}  # fmt: skip
"""Tiles of 64 columns, whose kernels are compiled in half the time of wider ones; those are test_gemm_narrow.py's."""
HOSTILE = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 2.0**-149, -(2.0**-127), 3e38, 448.0, 2.0**-9)
FACTORS = (*HOSTILE, -1.5, 1e-30, 1e30)
POLICIES = ("eager", "lazy", "random")


def spoil(draw: st.DrawFn, values: torch.Tensor, numbers: tuple[float, ...] = HOSTILE) -> torch.Tensor:
    """With some elements replaced by such numbers, as its type has them; of integers by the least and the largest."""
    flat = values.view(-1)
    for place in draw(st.lists(st.integers(0, flat.numel() - 1), max_size=3)):
        if values.dtype.is_floating_point:
            flat[place] = torch.tensor(draw(st.sampled_from(numbers))).to(values.dtype)
        else:
            limits = torch.iinfo(values.dtype)
            flat[place] = draw(st.sampled_from([limits.min, limits.max, 0]))
    return values


@st.composite
def calls(draw: st.DrawFn, config: GemmConfig) -> GemmArguments:
    """Arguments of a call; by day of types whose kernels other tests compile, too."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    wide = draw(st.booleans())
    dtype = draw(st.sampled_from(FLOATS if wide else NARROW))
    out_dtype = draw(st.sampled_from([*FLOATS, FP8]))
    m, n, step = draw(st.integers(1, 200)), draw(st.integers(1, 150)), 16 // dtype.itemsize
    k = step * draw(st.integers(64 // step * 4 // dtype.itemsize, 400 // step))
    batches, own = draw(st.sampled_from([((), False), ((2,), False), ((2,), True)]))
    spoiled = draw(st.booleans())

    def floats(*shape: int, dtype: torch.dtype = FP32, numbers: tuple[float, ...] = HOSTILE) -> torch.Tensor:
        values = random_values(*shape, dtype=dtype, generator=generator)
        return spoil(draw, values, numbers) if spoiled else values

    def factor(name: str, *shape: int) -> float | torch.Tensor | None:
        kind = draw(st.sampled_from(["none", "number", "one", "vector"]), label=name)
        if kind in ("none", "number"):
            return None if kind == "none" else 0.3
        return floats(*(shape if kind == "vector" else (1,)), numbers=FACTORS)

    def one_of_floats(name: str, *shape: int) -> torch.Tensor | None:
        kind = draw(st.sampled_from([None, *FLOATS]), label=name)
        return None if kind is None else floats(*shape, dtype=kind)

    out_scale: float | torch.Tensor | None = None
    if out_dtype is FP8:
        out_scale = draw(st.sampled_from([None, 0.05, torch.tensor([[0.7]]), torch.tensor(-0.3), torch.tensor([0.0])]))
    return GemmArguments(
        a=floats(*batches, m, k, dtype=dtype),
        b=floats(*(batches if own else ()), n, k, dtype=getattr(torch, B_TYPES[name_of(dtype)])),
        bias=one_of_floats("bias", n),
        scale_a=factor("scale_a", *batches, m, 1),
        scale_b=factor("scale_b", *(batches if own else ()), 1, n),
        residual=one_of_floats("residual", *batches, m, n),
        out_scale=out_scale,
        out_dtype=out_dtype,
        backend="auto",
        config=config,
        allow_tf32=True,
        activation=draw(st.sampled_from(ACTIVATIONS)),
    )


@pytest.mark.parametrize("arch", CONFIGS)
@settings(max_examples=examples(6, 150), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_call_under_any_schedule(arch: str, data: st.DataObject) -> None:
    """Rows, columns and K end inside a tile, columns inside the 16 bytes of a row; every combination of addends."""
    config = data.draw(st.sampled_from(CONFIGS[arch]))
    arguments = data.draw(calls(config))
    case = case_of(GEMM, arguments, arch, data.draw(st.sampled_from([2, 4, 132])))
    seed, completion = data.draw(st.integers(0, 2**20)), data.draw(st.sampled_from(POLICIES))
    check(case, Options(seed=seed, completion=completion, interleave="random"))


@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize(("n", "k"), [(1, 4304), (4304, 64)])
def test_one_column_and_many(arch: str, n: int, k: int) -> None:
    """The hidden features of so400m, and a bias of one element, at the end of its memory."""
    generator = torch.Generator().manual_seed(n)
    a, b = (random_values(rows, k, dtype=INT8, generator=generator) for rows in (3, n))
    a[0, 0], b[0, 0] = -128, -128
    arguments = GemmArguments(
        a=a,
        b=b,
        bias=random_values(n, dtype=BF16, generator=generator),
        scale_a=torch.rand(3, 1, generator=generator),
        scale_b=torch.rand(1, n, generator=generator),
        residual=random_values(3, n, dtype=FP16, generator=generator),
        out_scale=torch.tensor([[0.5]]),
        out_dtype=FP8,
        backend="auto",
        config=CONFIGS[arch][0],
        allow_tf32=False,
        activation="none",
    )
    check(case_of(GEMM, arguments, arch, 4))
