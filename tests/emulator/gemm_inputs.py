"""Random inputs for whole-kernel tests of the dense GEMM, and the reference result of its contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from cute_kernels.config import GemmConfig
from cute_kernels.operations import reference
from cute_kernels.operations.base import random_values
from cute_kernels.operations.gemm import GEMM, GemmArguments
from cute_kernels.plan import make_plan
from tests.emulator.cases import Case
from tests.nightly import NIGHTLY


@dataclass(frozen=True)
class Epilogue:
    """What an epilogue does.

    ``scales``: of which multipliers there are more than one, ``"row"``, ``"column"``, ``"row column"``, that the call's
    and the output's are in memory, ``"pointer"``, or that there is a ``"number"``, as always of operands of 8 bits.
    """

    bias: bool = True
    activation: str = "none"
    scales: str = ""
    residual: torch.dtype | None = None
    out_scale: float | None = None


def columns(most: int) -> SearchStrategy[int]:
    """How many columns a drawn product has: by day an odd number, of which all have the same kernel.

    Another kernel reads two or four elements of a bias at once; tests of given sizes have those, and a night.
    """
    return st.integers(1, most) if NIGHTLY else st.integers(0, (most - 1) // 2).map(lambda half: 2 * half + 1)


def make_gemm_case(
    *,
    m: int = 200,
    n: int = 128,
    k: int = 128,
    batches: int = 1,
    in_dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
    arch: str | None = None,
    sm_count: int | None = None,
    seed: int = 0,
    **epilogue: Any,
) -> Case:
    """Inputs drawn from a seed, a poisoned output with its padding, and what the contract says it must become.

    ``epilogue``: fields of `Epilogue`.
    """
    does = Epilogue(**epilogue)
    scales, residual, out_scale = does.scales, does.residual, does.out_scale
    generator = torch.Generator().manual_seed(seed)
    a = random_values(batches, m, k, dtype=in_dtype, generator=generator)
    b = random_values(batches, n, k, dtype=torch.int8 if in_dtype is torch.uint8 else in_dtype, generator=generator)
    values = random_values(n, dtype=torch.float32, generator=generator) if does.bias else None
    scaled = in_dtype.itemsize == 1 or scales
    factors: dict[str, float | torch.Tensor] = {"scale_a": 0.3, "scale_b": 0.1} if scaled else {}
    if "row" in scales:
        factors["scale_a"] = torch.rand(batches, m, 1, generator=generator) + 0.5
    if "column" in scales:
        factors["scale_b"] = torch.rand(batches, 1, n, generator=generator) / 8
    if "pointer" in scales:
        factors["scale_b"] = torch.tensor(0.1)
        out_scale = None if out_scale is None else torch.tensor([out_scale])
    more = {"residual": None if residual is None else random_values(batches, m, n, dtype=residual, generator=generator)}
    more |= {"out_scale": out_scale, "out_dtype": out_dtype, "activation": does.activation}
    others = {"backend": "auto", "config": config, "allow_tf32": True}
    arguments = GemmArguments(a=a, b=b, bias=values, **{"scale_a": None, "scale_b": None} | factors | more | others)
    plan = make_plan(GEMM.problem(arguments), config, arch, sm_count=sm_count)
    operands = GEMM.prepare(arguments, plan).operands
    expected = reference.gemm(a, b, values, split_k=getattr(plan.config, "split_k", 1), **factors | more)
    return Case(plan, operands.of(plan), expected).fresh()
