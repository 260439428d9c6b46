"""Random inputs for whole-kernel tests of the dense GEMM, and the reference result of its contract."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels import reference
from cute_kernels.compile import Artifact
from cute_kernels.config import GemmConfig
from cute_kernels.emulator import Options
from cute_kernels.operations.gemm import GEMM, GemmArguments
from cute_kernels.plan import GemmPlan, make_plan
from cute_kernels.runtime.operands import Operands
from cute_kernels.testing.data import POISON
from tests.emulator.exact_sums import emulate

BITS = {
    torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class GemmCase:
    plan: GemmPlan
    tensors: Operands
    expected: torch.Tensor

    def mismatches(self) -> torch.Tensor:
        """Boolean ``[batches, M, N]``: bits that differ from the reference. TMA may write the padding of a row."""
        bits = BITS[self.tensors.out.dtype]
        return (self.tensors.out.view(bits) != self.expected.view(bits))[..., : self.plan.problem.n]


def make_gemm_case(
    *,
    m: int = 200,
    n: int = 128,
    k: int = 128,
    batches: int = 1,
    in_dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
    activation: str = "none",
    scales: str = "",
    residual: torch.dtype | None = None,
    out_scale: float | None = None,
    config: GemmConfig | None = None,
    arch: str | None = None,
    sm_count: int | None = None,
    seed: int = 0,
) -> GemmCase:
    """Inputs drawn from a seed, a poisoned output with its padding, and what the contract says it must become.

    ``scales``: of which multipliers there are more than one, ``"row"``, ``"column"``, ``"row column"``, or that the
    call's is in memory, ``"pointer"``. Operands of 8 bits without have a number.
    """
    generator = torch.Generator().manual_seed(seed)
    a = drawn_values((batches, m, k), in_dtype, generator)
    b = drawn_values((batches, n, k), torch.int8 if in_dtype is torch.uint8 else in_dtype, generator)
    values = torch.randn(n, generator=generator) if bias else None
    factors: dict[str, float | torch.Tensor] = {"scale_a": 0.3, "scale_b": 0.1} if in_dtype.itemsize == 1 else {}
    if "row" in scales:
        factors["scale_a"] = torch.rand(batches, m, 1, generator=generator) + 0.5
    if "column" in scales:
        factors["scale_b"] = torch.rand(batches, 1, n, generator=generator) / 8
    if "pointer" in scales:
        factors["scale_b"] = torch.tensor(0.1)
    more = {"residual": None if residual is None else drawn_values((batches, m, n), residual, generator)}
    more |= {"out_scale": out_scale, "out_dtype": out_dtype, "activation": activation}
    others = {"backend": "auto", "config": config, "allow_tf32": True}
    arguments = GemmArguments(a=a, b=b, bias=values, **{"scale_a": None, "scale_b": None} | factors | more | others)
    plan = make_plan(GEMM.problem(arguments), config, arch, sm_count=sm_count)
    operands = GEMM.prepare(arguments, plan).operands
    out = torch.full((batches, m, plan.out_pitch), POISON[out_dtype], dtype=BITS[out_dtype]).view(out_dtype)
    expected = out.clone()
    expected[..., :n] = reference.gemm(
        a, b, values, split_k=getattr(plan.config, "split_k", 1), **factors | more
    )
    return GemmCase(plan, operands.replace(out=out).of(plan), expected)


def drawn_values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normally distributed, of integers all that there are."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, generator=generator, dtype=dtype)


def check(case: GemmCase, options: Options | None = None, artifact: Artifact | None = None) -> None:
    """Emulates a launch, of another kernel if there is one, and asserts that its result is the reference's."""
    emulate(case.plan, case.tensors, options, artifact=artifact)
    wrong = case.mismatches()
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {wrong.nonzero()[0]}"
