"""Plan of the dense GEMM by ``mma.sync``, for any GPU since Ampere."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.config import GemmProblem, Sm80GemmConfig
from cute_kernels.plan.base import Arch, reject, require
from cute_kernels.plan.gemm import GemmPlan
from cute_kernels.plan.sm80 import Sm80Plan, candidates, check_tiles, plans_of

ROUNDINGS = ("nearest", "nearest_a", "truncate")


@dataclass(frozen=True)
class Sm80GemmPlan(Sm80Plan, GemmPlan):
    """One tile of one batch per CTA, in groups of rows of tiles."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm80.gemm:GemmKernel"

    config: Sm80GemmConfig

    @property
    def multiplied(self) -> str:
        return self.problem.in_dtype

    @property
    def multiplied_dtype(self) -> str:
        """FP32 is copied as it is: what rounds it to TF32 is the kernel."""
        return self.problem.in_dtype

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


def plan_sm80_gemm(problem: GemmProblem, config: Sm80GemmConfig | None, arch: Arch, sm_count: int) -> Sm80GemmPlan:
    """The plan, or ValueError; the first of `search_space` when ``config`` is None."""
    if config is None:
        return search_space(problem, arch, sm_count)[0]
    if sm_count < 1:
        reject("sm_count", sm_count, "a CTA needs a multiprocessor", 1)
    require("rounding", config.rounding, ROUNDINGS, "how float32 becomes TF32")
    if not 1 <= config.group_m <= 1024:
        legal = min(max(config.group_m, 1), 1024)
        reject("group_m", config.group_m, "blocks of rows in a group of the tile order", legal)
    plan = Sm80GemmPlan(problem, config, arch, sm_count)
    check_tiles(plan)
    return plan


def search_space(problem: GemmProblem, arch: Arch, sm_count: int) -> list[Sm80GemmPlan]:
    """Plans that are worth timing, the one with the least modelled time first."""
    plan = functools.partial(plan_sm80_gemm, problem, arch=arch, sm_count=sm_count)
    return plans_of(candidates(Sm80GemmConfig), plan)
