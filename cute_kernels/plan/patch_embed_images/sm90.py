"""Plan of the SM90a kernel over images: strips through shared memory, integer weights resident in registers."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.config import PatchEmbedImagesProblem, Sm90ImagesConfig
from cute_kernels.plan.base import (
    ITEMSIZE,
    Arch,
    SmemRegion,
    check_smem,
    reject,
    require,
    round_up,
    smem_map,
)
from cute_kernels.plan.patch_embed_images.base import BOX_BYTES, INTEGERS, MOST_PATCHES
from cute_kernels.plan.patch_embed_images.strips import StripsPlan, check_strips_problem, check_table, images_step
from cute_kernels.plan.sm90_transposed import (
    ADDRESSING_REGISTERS,
    BLOCK_REGISTERS,
    WARPGROUP_FEATURES,
    TransposedPlan,
    check_barriers,
    check_registers,
    ring_stages,
)

ROWS_PER_STORE = 16
"""Columns of a WGMMA that one stmatrix.x4 of a warp covers."""

MOST_COLUMNS = 256
"""The largest N of a WGMMA."""

USUAL_COLUMNS = 128
"""Columns of a tile if the config does not say: two warpgroups' accumulators fit beside 768 inputs' weight."""

TERMS_COLUMNS = 112
"""Likewise of a weight of two terms: beside 128 features' of 768 inputs shared memory holds the stages of one tile."""

_UNSHARED = {1: 1.15, 2: 1.0}
"""Of a CTA without a neighbour that shares its strips, by CTAs of a cluster, and"""

_ALONE = {1: 1.3, 2: 1.0, 3: 1.05}
"""of the tensor cores in its epilogue, by warpgroups: what they weigh against padding. Estimates."""


@dataclass(frozen=True)
class Sm90ImagesPlan(StripsPlan, TransposedPlan):
    """The persistent WGMMA kernel over strips, as `TransposedPlan` says."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm90.patch_embed_images.kernel:PatchEmbedImagesKernel"

    @property
    def resident(self) -> bool:
        return True

    # ---- registers -------------------------------------------------------------------------------------------------

    @property
    def accumulator_registers(self) -> int:
        """Each term of a weight has sums of its own."""
        return self.terms * self.tile_rows // 2

    @property
    def held_blocks(self) -> int:
        """K blocks of the weight whose fragments stay in registers: of one term all.

        Of two, as many of the high one as there is room for beside two sets of accumulators.
        """
        if self.terms == 1:
            return self.k_blocks
        room = self.consumer_registers - self.accumulator_registers - ADDRESSING_REGISTERS
        return min(self.k_blocks, max(0, room // BLOCK_REGISTERS))

    @property
    def weight_registers(self) -> int:
        return self.held_blocks * BLOCK_REGISTERS

    @property
    def handover_stage(self) -> int:
        """Of two terms, whose weight leaves shared memory for a ring of one tile: half a tile behind.

        A stage is free only when every warpgroup has read it. A warpgroup that is half a tile behind stores while the
        other one multiplies, and of the ring the other half can be filled meanwhile.
        """
        behind = super().handover_stage
        return behind if self.terms == 1 else max(behind, min(self.tile_stages, self.config.stages) // 2)

    # ---- memory ----------------------------------------------------------------------------------------------------

    @property
    def shared_blocks(self) -> int:
        """K blocks of the weight that stay in shared memory: the low term, then the rest of the high one."""
        return self.terms * self.k_blocks - self.held_blocks

    @property
    def weight_bytes(self) -> int:
        """Of the weight in shared memory."""
        return self.shared_blocks * self.features * self.k_block_bytes

    @property
    def staging_bytes(self) -> int:
        """Per warpgroup: ``tile_rows`` rows of 64 features, 128 bytes a row as SWIZZLE_128B needs."""
        return self.tile_rows * WARPGROUP_FEATURES * ITEMSIZE[self.problem.out_dtype]

    @cached_property
    def smem(self) -> tuple[SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order."""
        stages = self.config.stages
        return smem_map((
            ("barriers", self.barrier_bytes, 128),
            (f"weight: {self.shared_blocks} K blocks", self.weight_bytes, self.swizzle_period),
            (f"strips: {stages} stages", stages * self.stage_bytes, self.swizzle_period),
            ("output staging", self.config.warpgroups * self.staging_bytes, self.swizzle_period),
        ))  # fmt: skip

    # ---- bias + position table -------------------------------------------------------------------------------------

    @property
    def table_registers(self) -> int:
        """Table values of a thread for all columns of a tile."""
        return 4 * self.table_period if self.problem.table_rows else 0

    @property
    def holds_table(self) -> bool:
        """The values stay in registers until the position changes; otherwise they are read where they are added."""
        return 0 < self.table_registers <= self.consumer_registers - self.needed_registers

    def describe_tiles(self) -> list[tuple[str, str]]:
        c = self.config
        what = f"{self.tile_images} images x {self.tile_patches} patches of a grid row"
        table = "none" if self.table_shape is None else f"{self.table_shape}, {'held' if self.holds_table else 'read'}"
        return [
            ("source", f"{c.source}: TMA boxes of {self.stage_box} pixels, images, rows, channels"),
            ("tile", f"{what} = {self.tile_rows} columns x {self.features} features, {self.k_blocks} K blocks of 128"),
            ("stages", f"{c.stages} of {c.stage_blocks} K blocks, {self.tile_stages} for a tile"),
            ("tiles", f"{self.tiles} = {self.image_tiles} of images x {self.position_tiles} of positions, {c.order}"),
            ("clusters", f"{self.clusters} of {c.cluster} CTAs in {self.groups} groups of features"),
            ("registers", f"{self.needed_registers} + table, of {self.consumer_registers} per consumer thread"),
            ("epilogue", f"table {table}, pingpong {c.pingpong}"),
        ]


def plan_sm90_images(
    problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig | None, arch: Arch, sm_count: int
) -> Sm90ImagesPlan:
    """The plan, or ValueError; what a config leaves open is chosen by `resolve`."""
    check_strips_problem(problem, INTEGERS)
    if config is None:
        # A ring that is no longer than a tile is handed on in the smallest pieces.
        config = Sm90ImagesConfig(stage_blocks=1 if problem.precision == "int16" else 2)
    require("source", config.source, ("auto", "strips"), "how patches come out of the images")
    require("warpgroups", config.warpgroups, (0, 1, 2, 3), "consumer warpgroups that registers allow; 0 chooses")
    rule = "pairs of multiprocessors share strips; larger clusters leave some idle; 0 chooses"
    require("cluster", config.cluster, (0, 1, 2), rule)
    require("stage_blocks", config.stage_blocks, (1, 2), "halves of a patch of one channel in a stage")
    require("order", config.order, ("row", "image"), "images or positions run fastest")
    most = min(MOST_PATCHES, problem.grid_width)
    rule = f"a row of a TMA box has {BOX_BYTES} bytes at most, a grid row {problem.grid_width} patches; 0 chooses"
    if not 0 <= config.tile_patches <= most:
        reject("tile_patches", config.tile_patches, rule, min(max(config.tile_patches, 1), most))
    if config.stages < 2 and config.stages != 0:
        reject("stages", config.stages, "TMA and WGMMA overlap only with two stages or more; 0 fills the memory", 2)
    given, config = config, resolve(problem, config, arch, sm_count)
    if sm_count < config.cluster:
        reject("sm_count", sm_count, f"a cluster needs {config.cluster} multiprocessors", config.cluster)
    check_tile(config)
    plan = Sm90ImagesPlan(problem, config, arch, sm_count)
    check_registers(plan, "tile_images", config.tile_patches, images_step(config.tile_patches), _channels(plan))
    check_barriers(plan)
    _check_shared_weight(plan, given)
    check_smem(plan)
    check_table(plan)
    return plan


def check_tile(config: Sm90ImagesConfig) -> None:
    """The columns of a tile are a legal N of an integer WGMMA, and pairs of its groups of 8 fill a stmatrix."""
    step = images_step(config.tile_patches)
    largest = MOST_COLUMNS // config.tile_patches // step * step
    if config.tile_images % step or not 1 <= config.tile_images <= largest:
        rule = f"with {config.tile_patches} patches multiples of {step} up to {largest} make N = 16 to 256"
        reject("tile_images", config.tile_images, rule, min(max(round_up(config.tile_images, step), step), largest))


def _check_shared_weight(plan: Sm90ImagesPlan, given: Sm90ImagesConfig) -> None:
    """A weight of two terms leaves shared memory for two stages and staging; ``given`` is what the caller chose."""

    def fits(channels: int) -> bool:
        problem = dataclasses.replace(plan.problem, channels=channels)
        config = resolve(problem, given, plan.arch, plan.sm_count)
        return _fits(Sm90ImagesPlan(problem, config, plan.arch, plan.sm_count))

    if plan.terms == 1 or _fits(plan):
        return
    rule = (
        f"{plan.shared_blocks} K blocks of a weight of two terms, {plan.weight_bytes:,} B for {plan.features} "
        "features, leave shared memory without room for two stages and the output"
    )
    fewer = (channels for channels in range(plan.problem.channels - 1, 0, -1) if fits(channels))
    reject("channels", plan.problem.channels, rule, next(fewer, 1))


def _fits(plan: Sm90ImagesPlan) -> bool:
    """Whether registers hold what they have to, and shared memory two stages beside what is no stage."""
    at_entry = plan.accumulator_registers + ADDRESSING_REGISTERS
    smem = plan.smem_bytes - (plan.config.stages - 2) * plan.stage_bytes
    registers = plan.needed_registers <= plan.consumer_registers and at_entry <= plan.entry_registers
    return registers and smem <= plan.arch.smem_bytes


def _channels(plan: Sm90ImagesPlan) -> tuple[str, int, int]:
    """Channels, and how many of them leave room for the smallest tile of these patches."""
    smallest = plan.tile_patches * images_step(plan.tile_patches) // 2
    room = plan.consumer_registers - ADDRESSING_REGISTERS - smallest
    return "channels", plan.problem.channels, max(1, room // (BLOCK_REGISTERS * plan.k_blocks // plan.problem.channels))


def resolve(problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig, arch: Arch, sm_count: int) -> Sm90ImagesConfig:
    """The configuration with what it leaves open filled in: shape of the tiles, warpgroups, cluster, stages."""
    warpgroups = (config.warpgroups,) if config.warpgroups else (2, 3, 1)
    clusters = (config.cluster,) if config.cluster else (2, 1) if sm_count > 1 else (1,)
    patches = (config.tile_patches,) if config.tile_patches else range(min(MOST_PATCHES, problem.grid_width), 0, -1)
    plans = []
    for choice in itertools.product(warpgroups, clusters, patches):
        shape = dict(zip(("warpgroups", "cluster", "tile_patches"), choice, strict=True))
        shaped = dataclasses.replace(config, source="strips", stages=config.stages or 2, **shape)
        plans.append(Sm90ImagesPlan(problem, _with_images(problem, shaped, arch), arch, sm_count))
    fit = [plan for plan in plans if _fits(plan)]
    # Where nothing fits, the plan that lacks the fewest registers or the least memory says so.
    plan = min(fit, key=_cost) if fit else min(plans, key=_lacking)
    stages = config.stages or ring_stages(plan)
    return dataclasses.replace(plan.config, stages=stages)


def _with_images(problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig, arch: Arch) -> Sm90ImagesConfig:
    """As many images as fit the usual columns and the registers, and no more than there are; at least one step."""
    if config.tile_images:
        return config
    step = images_step(config.tile_patches)
    if problem.precision == "int16":
        return _with_images_of_terms(problem, config, arch, step)
    smallest = Sm90ImagesPlan(problem, dataclasses.replace(config, tile_images=step), arch, arch.sm_count)
    room = smallest.consumer_registers - smallest.needed_registers + smallest.accumulator_registers
    columns = min(USUAL_COLUMNS, 2 * room)
    images = min(columns // config.tile_patches, round_up(problem.batch, step)) // step * step
    return dataclasses.replace(config, tile_images=max(step, images))


def _with_images_of_terms(
    problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig, arch: Arch, step: int
) -> Sm90ImagesConfig:
    """Likewise beside a weight of two terms: registers hold what accumulators leave of it, shared memory the rest."""
    images = min(TERMS_COLUMNS // config.tile_patches, round_up(problem.batch, step)) // step * step
    for count in range(images, step, -step):
        plan = Sm90ImagesPlan(problem, dataclasses.replace(config, tile_images=count), arch, arch.sm_count)
        if _fits(plan):
            return plan.config
    return dataclasses.replace(config, tile_images=step)


def _lacking(plan: Sm90ImagesPlan) -> tuple[int, int]:
    """Registers and bytes of shared memory beyond what there is."""
    return plan.needed_registers - plan.consumer_registers, plan.smem_bytes


def _cost(plan: Sm90ImagesPlan) -> float:
    """Of shapes that a problem allows, the one of least cost is taken.

    Products of features and patches that do not exist; rows of TMA boxes, of which those of 16 bytes took 2 to 3 times
    as long as those of 224 on an H200; WGMMAs of few columns, for which a weight fragment is read as often as for many.
    """
    config, problem = plan.config, plan.problem
    patches = plan.row_tiles * plan.tile_patches / problem.grid_width
    wide = 1.0 if plan.tile_rows <= USUAL_COLUMNS else 2.0
    rows = (1 + 1 / plan.tile_patches) * (1 + 16 / plan.tile_rows) * wide
    return plan.padded_n * patches * rows * _UNSHARED[config.cluster] * _ALONE[config.warpgroups]
