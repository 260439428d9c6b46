"""Random inputs for whole-kernel tests of the dense GEMM, and the reference result of its contract."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels import reference
from cute_kernels.compile import Artifact
from cute_kernels.config import GemmConfig, GemmProblem
from cute_kernels.emulator import Options, Report
from cute_kernels.plan import GemmPlan, make_plan
from cute_kernels.runtime.operands import Operands
from cute_kernels.testing.data import POISON
from tests.emulator.exact_sums import emulate

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


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
    config: GemmConfig | None = None,
    arch: str | None = None,
    sm_count: int | None = None,
    seed: int = 0,
) -> GemmCase:
    """Inputs drawn from a seed, a poisoned output with its padding, and what the contract says it must become."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(batches, m, k, generator=generator).to(in_dtype)
    b = torch.randn(batches, n, k, generator=generator).to(in_dtype)
    values = torch.randn(n, generator=generator) if bias else None
    names = (str(dtype).removeprefix("torch.") for dtype in (in_dtype, out_dtype))
    plan = make_plan(GemmProblem(m, n, k, batches, *names, bias, activation), config, arch, sm_count=sm_count)
    padded = None if values is None else torch.nn.functional.pad(values, (0, plan.padded_n - n))
    out = torch.full((batches, m, plan.out_pitch), POISON[out_dtype], dtype=BITS[out_dtype]).view(out_dtype)
    expected = out.clone()
    expected[..., :n] = reference.gemm(a, b, values, out_dtype, getattr(plan.config, "split_k", 1), activation)
    return GemmCase(plan, Operands(a=a, b=b, bias=padded, out=out), expected)


def check(case: GemmCase, options: Options | None = None, artifact: Artifact | None = None) -> Report:
    """Emulates a launch, of another kernel if there is one, and asserts that its result is the reference's."""
    report = emulate(case.plan, case.tensors, options, artifact=artifact)
    wrong = case.mismatches()
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {wrong.nonzero()[0]}"
    return report
