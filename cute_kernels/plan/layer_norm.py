"""Plan of the pass over uint8 rows that finds what a LayerNorm multiplies each of them by."""

import functools
from dataclasses import dataclass, field
from typing import ClassVar

from cute_kernels.common.facts import fact, flag, number
from cute_kernels.config import LAUNCH_ARGUMENT, Typed, longest_row
from cute_kernels.plan.base import LANES, VECTOR_BYTES, Arch, Operand, Plan, SmemRegion, reject, sizes


@dataclass(frozen=True)
class LayerNormScaleProblem(Typed):
    """Rows ``[m, k]`` of uint8 -> ``[m]`` FP32, ``1 / sqrt(variance + eps)`` of each."""

    m: int = field(metadata=LAUNCH_ARGUMENT)
    k: int = field(metadata=LAUNCH_ARGUMENT)


@dataclass(frozen=True)
class LayerNormScalePlan(Plan):
    """A legal way to run one pass; construct it with `plan_layer_norm_scale`. ``warps``: of a CTA, each with a row of
    its own."""

    operation: ClassVar[str] = "layer_norm_scale"
    kernel: ClassVar[str] = "cute_kernels.kernels.layer_norm:LayerNormScaleKernel"
    graph: ClassVar[str] = "cute_kernels.kernels.graph:no_graph"

    problem: LayerNormScaleProblem
    config: None

    warps: int = 4

    @functools.cached_property
    def operands(self) -> tuple[Operand, ...]:
        """In memory: ``x`` [m, k], and ``scale`` [m], which is written; ``addend`` is ``k * k * eps``."""
        return (
            Operand("x", "uint8"),
            Operand("addend", "float32", "value"),
            Operand("scale", "float32", alignment=4, written=True),
            *sizes(m=self.problem.m, k=self.problem.k),
        )

    overlaps = flag(lambda self: self.arch.compute_capability >= (9, 0))
    """The launch may begin before what is in front of it has ended, as architectures from 9.0 on allow."""
    clusters = number(lambda self: -(-self.problem.m // self.warps))
    threads = number(lambda self: self.warps * LANES)
    roles = fact(lambda self: ("sum",) * self.warps)
    smem = fact(lambda self: (SmemRegion("nothing", 0, 0, VECTOR_BYTES),))

    def describe_problem(self) -> str:
        return f"rows [{self.problem.m}, {self.problem.k}] of uint8 -> factors of a LayerNorm [{self.problem.m}]"


def plan_layer_norm_scale(problem: LayerNormScaleProblem, arch: Arch) -> LayerNormScalePlan:
    """The plan, or ValueError naming the limit, the value and the nearest legal value."""
    most = longest_row("uint8")  # of which sums of squares fit unsigned 32-bit integers, too
    if not 1 <= problem.m <= 2**31 - 1:
        reject("m", problem.m, "rows are counted in 32 bits", min(max(problem.m, 1), 2**31 - 1))
    if not VECTOR_BYTES <= problem.k <= most or problem.k % VECTOR_BYTES:
        nearest = min(max(problem.k - problem.k % VECTOR_BYTES, VECTOR_BYTES), most)
        reject("k", problem.k, f"rows are whole {VECTOR_BYTES} bytes, at most {most}", nearest)
    return LayerNormScalePlan(problem, None, arch, arch.sm_count)
