"""A launch for tests of whole kernels: a plan, operands with a poisoned output, and what the contract says of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.emulator import Options, Report
from cute_kernels.operations.base import Operation
from cute_kernels.operations.compile import Artifact
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import Plan, make_plan
from cute_kernels.testing import data
from tests.emulator.exact_sums import emulate


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An output in host memory that nobody has written."""
    return data.poisoned(shape, dtype, device="cpu")


@dataclass(frozen=True)
class Case:
    """What a launch gets and must give.

    Attributes:
        plan, tensors: of the launch; the output is poisoned.
        expected: the result; rows of the output may be longer, of which TMA may write the rest.
    """

    plan: Plan
    tensors: Operands
    expected: torch.Tensor

    def mismatches(self) -> torch.Tensor:
        """Boolean, of the result's shape: bits that differ or are unwritten; a written NaN stands for any."""
        out = self.tensors.out[..., : self.expected.shape[-1]]
        bits = data.bits_of(out)
        nan = out.float().isnan()
        both_nan, unwritten = nan & self.expected.float().isnan(), nan & (bits == data.POISON[out.dtype])
        return unwritten | (bits != data.bits_of(self.expected)) & ~both_nan

    def fresh(self) -> Case:
        """The same inputs with a poisoned output and other written memory of its own."""
        written, out = self.tensors.of(self.plan).written(self.plan), self.tensors.out
        own = {name: tensor.clone() for name, tensor in written.items() if tensor is not None}
        own["out"] = poisoned(*out.shape, dtype=out.dtype)
        return dataclasses.replace(self, tensors=self.tensors.replace(**own))


@dataclass(frozen=True)
class Output:
    """What a patch embed of images adds, a bias and positions, and the type of what it writes."""

    bias: bool = True
    pos: bool = True
    out_dtype: torch.dtype = torch.bfloat16


def case_of(operation: Operation, arguments: Any, arch: str | None = None, sm_count: int | None = None) -> Case:
    """A call of an operation on an architecture, as it prepares its operands, and the reference of its contract."""
    operation.check(arguments)
    plan = make_plan(operation.problem(arguments), arguments.config, arch, sm_count=sm_count)
    operands, expected = operation.prepare(arguments, plan).operands, operation.reference(arguments)
    return Case(plan, operands, expected.reshape(*operands.out.shape[:-1], expected.shape[-1])).fresh()


def check(case: Case, options: Options | None = None, artifact: Artifact | None = None) -> Report:
    """Emulates a launch, of another kernel if there is one, and asserts that its result is the expected one."""
    report = emulate(case.plan, case.tensors, options, artifact=artifact)
    wrong = case.mismatches()
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {wrong.nonzero()[0]}"
    return report
