"""Plan of the SM90a kernel over uint8 images: pixels through shared memory, weights in registers or with the pixels."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.common.facts import flag, number
from cute_kernels.config import PatchEmbedImagesProblem, Sm90ImagesConfig
from cute_kernels.plan import base
from cute_kernels.plan import images_strips as strips
from cute_kernels.plan.images import MOST_PATCHES, STRIP_PATCH, TILE_IMAGES, TILE_ORDER, TILE_PATCHES
from cute_kernels.plan.patches_sm90 import Work, by_time
from cute_kernels.plan.sm90_transposed import (
    ADDRESSING_REGISTERS,
    TransposedPlan,
    check_barriers,
    check_registers,
    of_tiles,
    ring_stages,
    work_of,
)

REPACK_WARPS = 7
"""Warps that lengthen rows of patches: all of two producer warpgroups but one, which loads (bench/results)."""

REPACK_PAIRS = 4
"""Pairs of rows that a thread of them loads before it stores the first."""

REPACK_REGISTERS = {1: (232, 136), 2: (208, 48), 3: (128, 40)}
"""Registers per consumer and per producer thread by consumer warpgroups, beside two producer warpgroups: together no
more than the CTA begins with, 168, 128 and 96 per thread, or `setmaxnreg.inc` waits for ever."""

RAW_STAGES = 2
"""Strips on their way to them at least: one is loaded while the other is repacked."""

MOST_COLUMNS = 256
"""The largest N of a WGMMA."""

STEPS = strips.BLOCK_BYTES // 32
"""WGMMAs of a K block, of 32 bytes each."""


@dataclass(frozen=True)
class Sm90ImagesPlan(strips.StripsPlan, TransposedPlan):
    """The persistent WGMMA kernel over strips, as `TransposedPlan` says."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm90.patch_embed_images:Sm90ImagesKernel"

    config: Sm90ImagesConfig

    @property
    def runs(self) -> str:
        weight = "" if self.resident else ", with the weight beside them"
        return f"{self.config.source}: one kernel reads the images{weight}"

    @property
    def roles(self) -> tuple[str, ...]:
        """A second producer warpgroup where rows are repacked, whose warps stand between TMA and the operand."""
        if not self.repacks:
            return super().roles
        return ("mma",) * (4 * self.config.warpgroups) + ("load",) + ("repack",) * REPACK_WARPS

    stage_ctas = number(lambda self: 1 if self.repacks else super().stage_ctas)
    """CTAs that share a stage: what one repacks it keeps."""
    load_stages = number(lambda self: self.config.raw_stages or RAW_STAGES if self.repacks else super().load_stages)

    def multiplies(self, block: int, step: int) -> bool:
        """Not steps whose pixels are all zeros, which lengthen rows of 96 bytes to 128 and patches of 14 rows to 16."""
        first = block * self.k_block_bytes + step * self.mma_k_bytes
        if self.repacks:
            return first < strips.REPACKED * self.span
        # Rows of a step or more alone can have a whole one of zeros.
        return self.splits or self.span < self.mma_k_bytes or first % self.span < self.row_bytes

    # ---- registers -------------------------------------------------------------------------------------------------
    @property
    def consumer_registers(self) -> int:
        return REPACK_REGISTERS[self.config.warpgroups][0] if self.repacks else super().consumer_registers

    @property
    def producer_registers(self) -> int:
        return REPACK_REGISTERS[self.config.warpgroups][1] if self.repacks else super().producer_registers

    # ---- memory ----------------------------------------------------------------------------------------------------
    stage_bytes = number(lambda self: self.pixel_stage_bytes + self.weight_stage_bytes)

    @cached_property
    def smem(self) -> tuple[base.SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order."""
        stages = self.config.stages
        return base.smem_map(
            ("barriers", self.barrier_bytes, 128),
            (f"weight: {self.config.weight}", stages * self.weight_stage_bytes, self.swizzle_period),
            (f"{self.config.source}: {stages} stages", stages * self.pixel_stage_bytes, self.swizzle_period),
            ("output staging", self.config.warpgroups * self.staging_bytes, self.swizzle_period),
            *((("strips before they are repacked", self.load_stages * self.load_pitch, 128),) if self.repacks else ()),
        )

    # ---- bias + position table -------------------------------------------------------------------------------------
    table_registers = number(lambda self: 4 * self.table_period if self.problem.table_rows else 0)
    """Table values of a thread for all columns of a tile."""
    holds_table = flag(lambda self: 0 < self.table_registers <= self.consumer_registers - self.needed_registers)
    """The values stay in registers until the position changes; otherwise they are read where they are added."""
    prefetches_table = flag(lambda self: self.holds_table)


# --- limits of the SM90a kernel over uint8 images, and which configuration a problem gets ----------------------------

RAW_STAGES_BY_CHOICE = (3, RAW_STAGES)
"""Strips that wait to be repacked, the first number that fits."""

USUAL_COLUMNS = 128
"""Columns of a tile beside a weight in registers: two warpgroups' accumulators fit beside that of 768 inputs."""

TRIED_SHAPES = 6
"""Shapes of tiles for each source, memory and number of warpgroups that a tuner times."""


FIELDS = {
    "source": base.Field("how patches come out of the images", ("strips", "gather", "repack", "split")),
    "tile_patches": TILE_PATCHES,
    "tile_images": TILE_IMAGES,
    "warpgroups": base.Field("consumer warpgroups that registers allow", (1, 2, 3)),
    "cluster": base.Field("pairs of multiprocessors share patches; larger clusters leave some idle", (1, 2)),
    "stages": base.Field("TMA and WGMMA overlap only with two stages or more", least=2, open=base.TWO_TILES),
    "stage_blocks": base.Field("K blocks of 128 bytes in a stage", (1, 2, strips.SPLIT_BLOCKS)),
    "order": TILE_ORDER,
    "weight": base.Field("where the weight operand comes from", ("registers", "streamed")),
    "raw_stages": base.Field("strips that wait to be repacked, none of other sources", least=0),
}


def default_config(problem: PatchEmbedImagesProblem, arch: base.Arch, sm_count: int) -> Sm90ImagesConfig:
    """Everything open but the order of the tiles."""
    return Sm90ImagesConfig()


def checked_plan(
    problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig, arch: base.Arch, sm_count: int
) -> Sm90ImagesPlan:
    """The plan, or ValueError; what a config leaves open is chosen by `resolve`."""
    check_operand(problem)
    base.check_fields(config, FIELDS)
    base.require("source", config.source, _sources(problem), "how patches come out of these images")
    sources = (config.source,) if config.source else _sources(problem)
    legal = tuple(blocks for source in sources for blocks in _blocks(source))
    base.require("stage_blocks", config.stage_blocks, legal, "K blocks of 128 bytes in a stage")
    rule = "where the weight operand comes from; beside rows that are repacked it stays in registers"
    base.require("weight", config.weight, _weights(problem), rule)
    repacks = sources == ("repack",)
    if repacks:
        base.require("stage_blocks", config.stage_blocks, (2,), "a stage is a whole patch of one channel")
    if config.raw_stages is not None and (config.raw_stages < RAW_STAGES if repacks else config.raw_stages != 0):
        rule = "strips that wait to be repacked, at least two, and none of other sources"
        base.reject("raw_stages", config.raw_stages, rule, RAW_STAGES if repacks else 0)
    if repacks and config.tile_patches is not None and config.tile_patches % 8:
        rule = f"a row of a TMA box is whole 16 bytes, of patches of {strips.REPACKED} eight or 16"
        base.reject("tile_patches", config.tile_patches, rule, 8 if config.tile_patches < 12 else 16)
    config = resolve(problem, config, arch, sm_count)
    base.check_sm_count(sm_count, config.cluster)
    check_tile(config)
    plan = Sm90ImagesPlan(problem, config, arch, sm_count)
    check_registers(plan, "tile_images", config.tile_patches, strips.images_step(config.tile_patches), _otherwise(plan))
    if not _shares(plan):
        rule = f"each of {config.cluster} CTAs of a cluster loads whole 128 bytes of a strip of {plan.load_bytes}"
        base.reject("cluster", config.cluster, rule, 1)
    if not _divides(plan):
        share = "its share of the rows of a stage, or of the images of a single row"
        rule = f"each of {config.cluster} CTAs of a cluster loads {share}"
        base.reject("stage_blocks", config.stage_blocks, rule, 2)
    check_barriers(plan)
    base.check_smem(plan)
    strips.check_table(plan)
    return plan


def _otherwise(plan: Sm90ImagesPlan) -> tuple[str, object, object]:
    """Field to change where registers do not hold the weight: name, value and nearest legal value."""
    config, p = plan.config, plan.problem
    if "streamed" in _weights(p):
        return "weight", config.weight, "streamed"
    others = (dataclasses.replace(plan, config=dataclasses.replace(config, warpgroups=each)) for each in (2, 1, 3))
    holding = [each.config.warpgroups for each in others if each.needed_registers <= each.consumer_registers]
    return ("warpgroups", config.warpgroups, holding[0]) if holding else ("channels", p.channels, 1)


def check_operand(p: PatchEmbedImagesProblem) -> None:
    """Rows of patches that TMA writes as rows of an operand, of bytes."""
    strips.check_integers(p)
    reason, most = strips.why_no_operand(p), strips.SPANS[-1] // STRIP_PATCH
    if reason and p.channels_last and p.channels > most:
        base.reject("channels", p.channels, reason, most)
    if reason:
        base.reject("patch", p.patch, reason, STRIP_PATCH)


def _sources(p: PatchEmbedImagesProblem) -> tuple[str, ...]:
    """All ways: strips where a patch's row is 16 bytes, or becomes as long; rows that two swizzles make up may be split
    instead of lengthened."""
    if strips.row_bytes(p) == strips.REPACKED:
        return ("repack",)
    if strips.span_of(strips.row_bytes(p)) == strips.SPANS[0]:
        return ("strips",)
    return ("split", "gather") if strips.may_split(p) else ("gather",)


def _blocks(source: str) -> tuple[int, ...]:
    """K blocks that a stage may have."""
    return (strips.SPLIT_BLOCKS,) if source == "split" else (1, 2)


def _weights(p: PatchEmbedImagesProblem) -> tuple[str, ...]:
    """Where the weight may come from: TMA fills stages with pixels and weight, or warps fill them with pixels."""
    return ("registers",) if strips.row_bytes(p) == strips.REPACKED else ("registers", "streamed")


def check_tile(config: Sm90ImagesConfig) -> None:
    """The columns of a tile are a legal N of an integer WGMMA, and pairs of its groups of 8 fill a stmatrix."""
    step = strips.images_step(config.tile_patches)
    largest = MOST_COLUMNS // config.tile_patches // step * step
    if config.tile_images % step or not 1 <= config.tile_images <= largest:
        rule = f"with {config.tile_patches} patches multiples of {step} up to {largest} make N = 16 to 256"
        nearest = min(max(base.round_up(config.tile_images, step), step), largest)
        base.reject("tile_images", config.tile_images, rule, nearest)


# ---- choice: the configuration of least modelled time ---------------------------------------------------------------

@functools.lru_cache(maxsize=4096)
def resolve(
    problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig, arch: base.Arch, sm_count: int
) -> Sm90ImagesConfig:
    """The configuration with what it leaves open filled in: source, shape of the tiles, weight, warpgroups, cluster,
    stages."""
    plans = list(_shapes(problem, config, arch, sm_count))
    fit = [plan for plan in plans if _fits(plan)]
    if fit:  # where no tile has room for the stages that are given, the plan says so
        roomy = [plan for plan in fit if plan.smem_bytes <= arch.smem_bytes]
        return by_time(roomy or fit, work)[0].config
    # The plan that lacks the fewest registers or the least memory says so.
    return min(plans, key=lambda plan: (plan.needed_registers - plan.consumer_registers, plan.smem_bytes)).config


def search_space(problem: PatchEmbedImagesProblem, arch: base.Arch, sm_count: int) -> list[Sm90ImagesPlan]:
    """Legal plans that are worth timing on a device: of each source, memory of the weight and number of warpgroups the
    shapes of least modelled time, the chooser's choice first."""
    if problem.precision != "int8" or strips.why_no_operand(problem):
        return []
    found: dict[tuple, list[Sm90ImagesPlan]] = {}
    for plan in by_time(filter(_fits, _shapes(problem, Sm90ImagesConfig(), arch, sm_count)), work):
        shapes = found.setdefault((plan.config.source, plan.config.weight, plan.config.warpgroups), [])
        shapes += [plan] if len(shapes) < TRIED_SHAPES else []
    configs = dict.fromkeys(plan.config for shapes in found.values() for plan in shapes)
    return by_time(base.legal_plans(checked_plan, problem, configs, arch, sm_count), work)


def _shapes(
    problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig, arch: base.Arch, sm_count: int
) -> Iterator[Sm90ImagesPlan]:
    """Plans that a configuration leaves open, with the stages that they would get."""
    sources = (config.source,) if config.source else _sources(problem)
    weights = (config.weight,) if config.weight else _weights(problem)
    warpgroups = (config.warpgroups,) if config.warpgroups else (2, 3, 1)
    clusters = (config.cluster,) if config.cluster else (2, 1) if sm_count > 1 else (1,)
    for source, weight, groups in itertools.product(sources, weights, warpgroups):
        narrow = Sm90ImagesPlan(
            problem,
            dataclasses.replace(
                config, source=source, weight=weight, warpgroups=groups, tile_patches=1, tile_images=1, raw_stages=0
            ),
            arch,
            sm_count,
        )
        room = min(narrow.consumer_registers - narrow.weight_registers, narrow.entry_registers) - ADDRESSING_REGISTERS
        columns = min(2 * room, USUAL_COLUMNS if narrow.resident else MOST_COLUMNS)
        for cluster, patches, blocks in itertools.product(
            clusters, _tile_patches(problem, config), _stage_blocks(narrow, config.stage_blocks)
        ):
            shape = dataclasses.replace(narrow.config, cluster=cluster, tile_patches=patches, stage_blocks=blocks)
            for images in _tile_images(problem, config, patches, columns):
                yield _with_stages(dataclasses.replace(narrow, config=dataclasses.replace(shape, tile_images=images)),
                                   config)


def _with_stages(plan: Sm90ImagesPlan, given: Sm90ImagesConfig) -> Sm90ImagesPlan:
    """With the stages that it would get, and strips that wait to be repacked, where these are open."""

    def filled(raw: int) -> Sm90ImagesPlan:
        least = dataclasses.replace(plan, config=dataclasses.replace(plan.config, stages=2, raw_stages=raw))
        stages = given.stages or ring_stages(least)
        return dataclasses.replace(least, config=dataclasses.replace(least.config, stages=stages))

    if not plan.repacks:
        return filled(0)
    plans = [filled(raw) for raw in ((given.raw_stages,) if given.raw_stages else RAW_STAGES_BY_CHOICE)]
    return next(filter(_fits, plans), plans[-1])


def _stage_blocks(plan: Sm90ImagesPlan, given: int | None) -> tuple[int, ...]:
    """Two where a weight in registers leaves room for such stages, otherwise either."""
    legal = _blocks(plan.config.source)
    if given:
        return (given,) if given in legal else ()
    return (max(legal),) if plan.resident else legal[::-1]


def _tile_patches(problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig) -> tuple[int, ...]:
    """Pieces of a grid row, and 16, of which one fills a tile; of repacked rows whole 16 bytes."""
    if config.tile_patches:
        return (config.tile_patches,)
    width = problem.grid_width
    if strips.row_bytes(problem) == strips.REPACKED:
        return (16, 8) if width > 8 else (8,)
    least = -(-width // MOST_PATCHES)
    pieces = (least, least + 1, least + 2, 2 * least, 4 * least)
    return tuple(dict.fromkeys((*(-(-width // i) for i in pieces), MOST_PATCHES)))


def _tile_images(
    problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig, patches: int, columns: int
) -> tuple[int, ...]:
    """Images of a tile: as many as fit the columns, and no more than there are, at least one step; a half and a quarter
    of that."""
    if config.tile_images:
        return (config.tile_images,)
    step = strips.images_step(patches)
    images = max(step, min(columns // patches, base.round_up(problem.batch, step)) // step * step)
    return tuple(sorted({max(step, images // i // step * step) for i in (1, 2, 4)}))


def _fits(plan: Sm90ImagesPlan) -> bool:
    """Whether registers hold what they have to, shared memory two stages, and each CTA of a cluster loads its share."""
    return (
        plan.needed_registers <= plan.consumer_registers
        and plan.accumulator_registers + ADDRESSING_REGISTERS <= plan.entry_registers
        and plan.smem_bytes - (plan.config.stages - 2) * plan.stage_bytes <= plan.arch.smem_bytes
        and _divides(plan)
        and _shares(plan)
    )


def work(plan: Sm90ImagesPlan) -> Work:
    """The work of a launch, for the model of its time."""
    p, c = plan.problem, plan.config
    if plan.repacks:
        rows = plan.load_bytes // (plan.load_box[0] * plan.in_bytes)
    else:
        rows = len(plan.row_parts) * plan.pixel_stage_bytes // plan.row_span
        rows //= 1 if plan.gathers else plan.tile_patches
    received = rows / c.stage_blocks
    loaded = received / c.cluster
    block_bytes = plan.pixel_stage_bytes / c.stage_blocks
    at_once = plan.tiles <= plan.clusters // plan.feature_groups
    images = of_tiles(plan.image_tiles * plan.tile_images - p.batch, plan.image_tiles, at_once)
    beyond = images * plan.stage_rows / c.stage_blocks * (plan.tile_patches if plan.gathers else 1)
    steps = [plan.multiplies(block, step) for block in range(c.stage_blocks) for step in range(STEPS)]
    return work_of(
        plan, is_rows=False, block_bytes=block_bytes, beyond=min(loaded, beyond),
        memory=p.batch * (math.prod((p.channels, p.height, p.width)) + p.positions * p.n * plan.out_bytes) + p.n * p.k,
        multiplied=sum(steps) / len(steps),
        boxes=(loaded * (not plan.gathers), loaded * plan.gathers, received, block_bytes * plan.repacks)
    )


def _divides(plan: Sm90ImagesPlan) -> bool:
    """Whether the CTAs of a cluster have equal shares of a box: of its rows, or of a single row of its images."""
    _, images, rows, _ = plan.stage_box
    cluster = plan.config.cluster
    return rows >= cluster or images % cluster == 0


def _shares(plan: Sm90ImagesPlan) -> bool:
    """Whether the parts of a strip that the CTAs of a cluster load lie as TMA writes them."""
    cluster = plan.config.cluster
    return not plan.repacks or plan.load_bytes % (strips.BLOCK_BYTES * cluster) == 0 or cluster == 1
