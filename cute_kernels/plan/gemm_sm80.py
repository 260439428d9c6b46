"""Plan of the dense GEMM by ``mma.sync``, for any GPU since Ampere."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.common.facts import number, text
from cute_kernels.config import GemmProblem, Sm80GemmConfig
from cute_kernels.plan import sm80
from cute_kernels.plan.base import Arch, Field, Operand, check_fields, reject, require
from cute_kernels.plan.gemm import GROUP_M, GemmPlan
from cute_kernels.plan.sm80 import Sm80Plan, candidates, check_tiles, choice, require_fp8

SPLITS = (1, 2, 4, 8)

FIELDS = sm80.FIELDS | {
    "group_m": GROUP_M,
    "rounding": Field("how float32 becomes TF32", ("nearest", "nearest_a", "truncate")),
    "split_k": Field("slices of K", SPLITS),
}

EXCHANGE_CLOCKS = 3000
"""Clocks from the last store of a slice's sums until the CTA that adds them has read them, but for their bytes."""

MOST_SHARED = 4096
"""Tiles of a launch whose slices are counted where they arrive."""


@dataclass(frozen=True)
class Sm80GemmPlan(Sm80Plan, GemmPlan):
    """One tile of one batch per CTA, in groups of rows of tiles."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm80.gemm:Sm80GemmKernel"

    config: Sm80GemmConfig

    multiplied_dtype = text(lambda self: self.problem.in_dtype)
    """FP32 is copied as it is: what rounds it to TF32 is the kernel."""
    lane_columns = number(lambda self: min(super().lane_columns, 8))
    """At most 8, also where 16 bytes hold 16 elements: a warp's columns are a multiple of 32."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Operands of `GemmPlan.operands`, and a workspace if K is split.

        It is ``arrivals``, 0 for every tile before a launch and behind it, and ``partials`` [tiles, slices,
        `partial_elements`].
        """
        split = self.config.split_k > 1
        given = super().operands
        first_size = next(i for i, operand in enumerate(given) if operand.kind == "size")
        workspace = (
            Operand("arrivals", "int32", present=split, written=split),
            Operand("partials", "int32" if self.sums_integers else "float32", present=split, written=split),
        )
        return (*given[:first_size], *workspace, *given[first_size:])

    k_blocks = number(lambda self: -(-super().k_blocks // self.config.split_k))
    """Stages that a slice of a tile takes, the last one of some with zeros."""
    shared_tiles = number(lambda self: self.tiles // self.config.split_k)
    """Tiles whose slices are added."""
    partial_elements = number(lambda self: self.config.tile_m * self.config.tile_n)
    """Sums of a tile."""

    @property
    def beside_clocks(self) -> float:
        """Modelled clocks, of slices those of their exchange through L2."""
        split = self.config.split_k
        return 0.0 if split == 1 else EXCHANGE_CLOCKS + (split + 1) * 4 * self.partial_elements * sm80.BYTE_CLOCKS

    @property
    def rounds(self) -> tuple[bool, bool]:
        rounding = self.config.rounding if self.problem.in_dtype == "float32" else "truncate"
        return rounding != "truncate", rounding == "nearest"

    cluster_rows = number(lambda self: self.config.tile_m)
    cluster_columns = number(lambda self: self.config.tile_n)
    tiles = number(lambda self: self.m_tiles * self.n_tiles * self.problem.batches * self.config.split_k)
    """Slices of all tiles."""


def checked_plan(problem: GemmProblem, config: Sm80GemmConfig, arch: Arch, sm_count: int) -> Sm80GemmPlan:
    check_fields(config, FIELDS)
    require_fp8(arch.name, problem.in_dtype)
    if problem.out_dtype == "float8_e4m3fn" and arch.compute_capability < (8, 9):
        rule = f"{arch.name} has no conversion to E4M3, sm_89 and later have"
        reject("out_dtype", problem.out_dtype, rule, "bfloat16")
    plan = Sm80GemmPlan(problem, config, arch, sm_count)
    check_split(plan)
    check_tiles(plan)
    return plan


def check_split(plan: Sm80GemmPlan) -> None:
    """Slices have whole blocks of 128 bytes, and their tiles counters."""
    c = plan.config
    if c.split_k == 1:
        return
    require("row_bytes", c.row_bytes, (128,), "slices of K are counted in blocks of 128 bytes")
    blocks = -(-plan.k_bytes // c.row_bytes)
    if blocks < c.split_k:
        fit = max(split for split in SPLITS if split <= blocks)
        reject("split_k", c.split_k, f"slices have parts of {blocks} blocks of {c.row_bytes} bytes", fit)
    if plan.shared_tiles > MOST_SHARED:
        reject("split_k", c.split_k, f"{plan.shared_tiles} tiles, {MOST_SHARED} may be split", 1)


def _configs(problem: GemmProblem) -> list[Sm80GemmConfig]:
    """All tiles, and K split among those of few rows."""
    narrow = [config for config in candidates(Sm80GemmConfig) if config.row_bytes == 128 and config.tile_m <= 64]
    splits = (dataclasses.replace(config, split_k=split) for config in narrow for split in SPLITS[1:])
    return [*candidates(Sm80GemmConfig), *splits]


default_config, search_space = choice(Sm80GemmConfig, checked_plan, _configs)
