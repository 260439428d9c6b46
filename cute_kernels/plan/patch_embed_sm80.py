"""Plan of the patch embed of rows by ``mma.sync``, for any GPU since Ampere."""

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.common.facts import fact, number
from cute_kernels.config import PatchEmbedProblem, Sm80PatchEmbedConfig
from cute_kernels.plan import sm80
from cute_kernels.plan.base import Arch, check_fields
from cute_kernels.plan.patch_embed import EPILOGUE, PatchEmbedPlan, TableLayout, check_capacity
from cute_kernels.plan.sm80 import Sm80Plan, candidates, check_tiles, choice, require_fp8

FIELDS = sm80.FIELDS | {"epilogue": EPILOGUE}


@dataclass(frozen=True)
class Sm80PatchEmbedPlan(Sm80Plan, PatchEmbedPlan):
    """One tile per CTA; tiles of neighbouring features follow each other, so that rows come from DRAM once."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm80.patch_embed:Sm80PatchEmbedKernel"

    config: Sm80PatchEmbedConfig

    table_layout: TableLayout = "row_major"

    m_tiles = number(lambda self: -(-self.problem.m // self.config.tile_m))
    n_tiles = number(lambda self: -(-self.problem.n // self.config.tile_n))
    padded_n = number(lambda self: self.problem.n)
    """Columns of the table: those of the output, of which every lane reads whole vectors."""
    table_shape = fact(lambda self: (self.table_height, self.padded_n) if self.problem.table_rows else None)
    """``[rows, N]``, or None without bias and positions."""


def checked_plan(
    problem: PatchEmbedProblem, config: Sm80PatchEmbedConfig, arch: Arch, sm_count: int
) -> Sm80PatchEmbedPlan:
    check_fields(config, FIELDS)
    require_fp8(arch.name, problem.in_dtype)
    plan = Sm80PatchEmbedPlan(problem, config, arch, sm_count)
    check_tiles(plan)
    check_capacity(plan)
    return plan


default_config, search_space = choice(
    Sm80PatchEmbedConfig, checked_plan, lambda problem: candidates(Sm80PatchEmbedConfig)
)
