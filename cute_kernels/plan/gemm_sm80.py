"""Plan of the dense GEMM by ``mma.sync``, for any GPU since Ampere."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.config import GemmProblem, Sm80GemmConfig
from cute_kernels.plan import sm80
from cute_kernels.plan.base import Arch, Field, check_fields, reject
from cute_kernels.plan.gemm import GROUP_M, GemmPlan
from cute_kernels.plan.sm80 import Sm80Plan, candidates, check_tiles, first_config, plans_of, require_fp8

FIELDS = sm80.FIELDS | {
    "group_m": GROUP_M,
    "rounding": Field("how float32 becomes TF32", ("nearest", "nearest_a", "truncate")),
}


@dataclass(frozen=True)
class Sm80GemmPlan(Sm80Plan, GemmPlan):
    """One tile of one batch per CTA, in groups of rows of tiles."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm80.gemm:Sm80GemmKernel"

    config: Sm80GemmConfig

    @property
    def multiplied(self) -> str:
        return self.problem.in_dtype

    @property
    def multiplied_dtype(self) -> str:
        """FP32 is copied as it is: what rounds it to TF32 is the kernel."""
        return self.problem.in_dtype

    @property
    def lane_columns(self) -> int:
        """At most 8, also where 16 bytes hold 16 elements: a warp's columns are a multiple of 32."""
        return min(super().lane_columns, 8)

    @property
    def rounds(self) -> tuple[bool, bool]:
        rounding = self.config.rounding if self.problem.in_dtype == "float32" else "truncate"
        return rounding != "truncate", rounding == "nearest"

    @property
    def cluster_rows(self) -> int:
        return self.config.tile_m

    @property
    def cluster_columns(self) -> int:
        return self.config.tile_n

    @property
    def tiles(self) -> int:
        return self.m_tiles * self.n_tiles * self.problem.batches

    def describe_tiles(self) -> list[tuple[str, str]]:
        rows = [("order", f"groups of {self.config.group_m} blocks of rows")]
        if self.problem.in_dtype == "float32":
            rows.append(("rounding to TF32", self.config.rounding))
        return [*super().describe_tiles(), *rows]


def plan_sm80_gemm(problem: GemmProblem, config: Sm80GemmConfig, arch: Arch, sm_count: int) -> Sm80GemmPlan:
    """The plan, or ValueError."""
    if sm_count < 1:
        reject("sm_count", sm_count, "a CTA needs a multiprocessor", 1)
    check_fields(config, FIELDS)
    require_fp8(arch.name, problem.in_dtype)
    if problem.out_dtype == "float8_e4m3fn" and arch.compute_capability < (8, 9):
        rule = f"{arch.name} has no conversion to E4M3, sm_89 and later have"
        reject("out_dtype", problem.out_dtype, rule, "bfloat16")
    plan = Sm80GemmPlan(problem, config, arch, sm_count)
    check_tiles(plan)
    return plan


def default_config(problem: GemmProblem, arch: Arch, sm_count: int) -> Sm80GemmConfig:
    """That of the least modelled time."""
    return first_config(search_space(problem, arch, sm_count), Sm80GemmConfig)


def search_space(problem: GemmProblem, arch: Arch, sm_count: int) -> list[Sm80GemmPlan]:
    """Plans that are worth timing, the one with the least modelled time first."""
    plan = functools.partial(plan_sm80_gemm, problem, arch=arch, sm_count=sm_count)
    return plans_of(candidates(Sm80GemmConfig), plan)
