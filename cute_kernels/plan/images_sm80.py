"""Plan of the kernel that reads patches out of images and multiplies by ``mma.sync``, for any GPU since Ampere.

Rows of the product are patches. A thread copies the pixels of a patch row by row, 16 bytes at a time; neighbouring
lanes have neighbouring patches, or the pieces of one row.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.common.chips import CTA_SMEM_BYTES
from cute_kernels.common.facts import fact, number, text
from cute_kernels.config import PatchEmbedImagesProblem, Sm80ImagesConfig, longest_row
from cute_kernels.plan import base, sm80
from cute_kernels.plan.images import ImagesPlan
from cute_kernels.plan.sm80 import Sm80Plan, candidates, check_tiles, choice

COPIED_ROWS = (16, 32, 64)
"""Bytes of a row of a patch, in as many pieces as lanes copy side by side."""

FIELDS = sm80.FIELDS | {
    "tile_images": base.Field("images whose patches at a position are neighbouring rows", (1, 8)),
    "teams": base.Field("groups of warps of a CTA, which share the weight if they are two", (1, 2)),
}


TWO_TEAMS = (Sm80ImagesConfig(64, 256, 1, 4, 64, 4, 1, teams=2),)
"""Where the weight of 256 features of uint8 x int8 fits, an H100's mma.sync is fastest with it: fewer features would
copy the pixels more often, in pieces of 16 bytes."""


def copies_rows(problem: PatchEmbedImagesProblem) -> bool:
    """Whether rows of a patch have lengths that this kernel copies."""
    return problem.patch * base.ITEMSIZE[problem.in_dtype] in COPIED_ROWS


@dataclass(frozen=True)
class Sm80ImagesPlan(Sm80Plan, ImagesPlan):
    """One tile per CTA. Its rows are ``tile_images`` images at one position, then the same images at the next one."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm80.patch_embed_images:Sm80ImagesKernel"

    config: Sm80ImagesConfig

    runs = text(lambda self: "patches: one kernel reads the images")

    @property
    def m_tiles(self) -> int:
        images = base.round_up(self.problem.batch, self.config.tile_images)
        return -(-images * self.problem.positions // self.config.tile_m)

    n_tiles = number(lambda self: -(-self.problem.n // self.config.tile_n))
    table_shape = fact(lambda self: (self.problem.table_rows, self.problem.n) if self.problem.table_rows else None)
    """``[positions, N]`` in row-major order of the patch grid, ``[1, N]`` of a bias alone; None without both."""
    pieces = number(lambda self: self.problem.patch * self.in_bytes // base.VECTOR_BYTES)
    """Copies of a row of a patch: lanes side by side have one each."""
    patch_rows = number(lambda self: self.chunks // self.pieces)
    """Rows of a patch in a stage."""
    pass_patches = number(lambda self: min(self.config.tile_m, self.team_threads // self.pieces))
    """Patches that all threads copy at a time."""
    parts = number(lambda self: self.team_threads // self.pieces // self.pass_patches)
    """Threads that share the rows of one patch in a stage."""
    tile_positions = number(lambda self: self.config.tile_m // self.config.tile_images)
    """Rows of the table that a tile adds."""

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows of the table that a tile adds, and of the scales of its features, in FP32."""
        return (self.tile_positions + (self.problem.precision == "int8")) * self.config.tile_n * 4

    @property
    def copies_table(self) -> bool:
        """Table and scales are copied to shared memory under the products, where there is room and time for it.

        Otherwise every lane loads them at a tile's end, where the latency of L2 is not hidden. The copies belong to the
        first block's group, which has to be waited for before the last block: see `MainLoop`.
        """
        c, total = self.config, self.kept_bytes + self.teams * (self.ring_bytes + self.table_bytes)
        fits = total <= self.arch.smem_bytes
        fits = fits and c.resident_ctas * (total + CTA_SMEM_BYTES) <= self.arch.sm_smem_bytes
        return fits and c.tile_images == 8 and self.problem.table_rows > 1 and self.k_blocks >= c.stages

    compiled_in = fact(lambda self: super().compiled_in | {"copies_table": self.copies_table})

    def team_smem(self, start: int) -> tuple[base.SmemRegion, ...]:
        regions = super().team_smem(start)
        if not self.copies_table:
            return regions
        return (*regions, base.SmemRegion("table and scales of a tile", start + self.ring_bytes, self.table_bytes, 128))

    teams = number(lambda self: self.config.teams)

    @property
    def clusters(self) -> int:
        """CTAs, of a weight that is kept as many for all features: tiles of neighbouring features follow each other."""
        all_at_once = super().clusters
        return all_at_once if not self.keeps_b else max(all_at_once // self.n_tiles, 1) * self.n_tiles


def checked_plan(
    problem: PatchEmbedImagesProblem, config: Sm80ImagesConfig, arch: base.Arch, sm_count: int
) -> Sm80ImagesPlan:
    p = problem
    sides = tuple(size // base.ITEMSIZE[p.in_dtype] for size in COPIED_ROWS)
    base.require("patch", p.patch, sides, f"a row of a patch is {COPIED_ROWS} bytes, in pieces of 16")
    if p.channels_last:
        base.reject("channels_last", True, "copies need neighbouring pixels of one channel", False)
    most = longest_row(p.in_dtype)
    if most is not None and p.k > most:
        base.reject("channels", p.channels, "sums of products of uint8 by int8 leave 32 bits", most // p.patch**2)
    base.check_fields(config, FIELDS)
    plan = Sm80ImagesPlan(problem, config, arch, sm_count)
    check_kept(plan)
    check_tiles(plan)
    check_patches(plan)
    return plan


def check_kept(plan: Sm80ImagesPlan) -> None:
    """A weight that is kept fits shared memory beside the stages, and is copied before the first of several blocks."""
    if plan.keeps_b and not plan.overlaps:
        rule = f"two teams copy blocks ahead, of which a tile has {plan.k_blocks}"
        base.reject("stages", plan.config.stages, rule, plan.k_blocks + 1)
    if plan.keeps_b and plan.smem_bytes > plan.arch.smem_bytes:
        rule = (
            f"{plan.kept_bytes:,} B of the weight and {plan.teams} x {plan.team_bytes:,} B of stages make "
            f"{plan.smem_bytes:,} B of shared memory, the limit is {plan.arch.smem_bytes:,} B"
        )
        base.reject("teams", plan.config.teams, rule, 1)


def check_patches(plan: Sm80ImagesPlan) -> None:
    """Checks what copies of patches ask of a tile."""
    c = plan.config
    if plan.parts * plan.pass_patches * plan.pieces != plan.team_threads or c.tile_m % plan.pass_patches:
        rule = f"{plan.threads} threads copy {plan.patch_rows} rows of {plan.pass_patches} patches at a time"
        base.reject("tile_m", c.tile_m, rule, 128)
    rows = plan.m_tiles * c.tile_m
    if rows >= 2**31:
        fit = (2**31 - 1) // plan.problem.positions // base.LANES * base.LANES
        base.reject("batch", plan.problem.batch, f"{rows} rows, which are numbered with 32 bits", fit)


def _configs(problem: PatchEmbedImagesProblem) -> list[Sm80ImagesConfig]:
    images = 8 if problem.batch >= 8 else 1
    others = [dataclasses.replace(config, tile_images=images) for config in TWO_TEAMS]
    return [*candidates(Sm80ImagesConfig, tile_images=images), *others]


default_config, search_space = choice(Sm80ImagesConfig, checked_plan, _configs)
