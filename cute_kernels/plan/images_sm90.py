"""Plan of the SM90a kernel over uint8 images: pixels through shared memory, weights in registers or with the pixels."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.common.facts import flag, number, text
from cute_kernels.config import PatchEmbedImagesProblem, Sm90ImagesConfig
from cute_kernels.plan import base
from cute_kernels.plan import images_strips as strips
from cute_kernels.plan import patch_embed_sm90 as rows
from cute_kernels.plan.images import MOST_PATCHES, STRIP_PATCH, TILE_IMAGES, TILE_ORDER, TILE_PATCHES
from cute_kernels.plan.sm90_transposed import (
    ADDRESSING_REGISTERS,
    TransposedPlan,
    check_barriers,
    check_registers,
    ring_stages,
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
    tile_positions = number(lambda self: self.tile_patches)

    rows_of_tiles = text(lambda self: "position")


# --- limits of the SM90a kernel over uint8 images, and which configuration a problem gets ----------------------------
# Few images get the configuration of least predicted time, by the model of the kernel over rows
# (`cute_kernels.plan.patch_embed_sm90`), which has the same consumers, epilogue and stages. Many reach the power
# limit, where the weight stays in registers if these hold it, and the shape of least padding is taken.


USUAL_COLUMNS = 128
"""Columns of a tile beside a weight in registers: two warpgroups' accumulators fit beside that of 768 inputs."""

FEW_OPERATIONS = 4e10
"""Multiplications and additions up to which the model of a launch chooses: 172 images of 196 patches, 768 inputs and
768 features. Of 68 drawn shapes, none kept out, the choice then took 1.03 of the fastest candidate's time in the mean,
1.05 with a quarter of that; of 12 drawn afterwards it took 1.13 (bench/results: 2026-11-29-h200)."""

MACS_PER_CLOCK = 4096
"""Integer products of a multiprocessor, dense (H200 data sheet: 1,979 TOP/s)."""

SHARED_BYTES_PER_CLOCK = 128

CLOCKS_PER_MICROSECOND = 1755
"""Clock of an H200 at few images, where power does not limit."""

LAUNCH_MICROSECONDS = 2.5
"""Time of a launch that has next to nothing to do, by the model of the kernel over rows."""

BOX_ROW_CLOCKS, BOX_BYTES_PER_CLOCK = 2.2, 50
"""Clocks of a row of a TMA box, and bytes of a strip's row that come in another one: fitted to all the same shapes."""

_UNSHARED = {1: 1.05, 2: 1.0}
"""Estimated cost of a CTA without a neighbour that shares its patches, by CTAs of a cluster."""

_ALONE = {1: 1.3, 2: 1.0, 3: 1.05}
"""Estimated cost of tensor cores that wait for a CTA's epilogue, by its warpgroups."""

FAST_SPLITS = (48,)
"""Rows that are split by default: of 96 bytes 1.448 ms split, 1.132 gathered (bench/results)."""

RAW_STAGES_BY_CHOICE = (3, RAW_STAGES)
"""Strips that wait to be repacked, the first number that fits."""

TRIED_SHAPES = 3
"""Shapes of tiles for each source, memory and number of warpgroups that a tuner times."""

FEW_SPLITS = 4096
"""Patches up to which these rows are gathered: 3,136 in 0.81 of the time, 6,272 in 1.33 (bench/results)."""


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
    source = config.source or source_of(problem)
    base.require("source", config.source, _sources(problem), "how patches come out of these images")
    legal = (strips.SPLIT_BLOCKS,) if source == "split" else (1, 2)
    base.require("stage_blocks", config.stage_blocks, legal, "K blocks of 128 bytes in a stage")
    rule = "where the weight operand comes from; beside rows that are repacked it stays in registers"
    base.require("weight", config.weight, _weights(problem), rule)
    if source == "repack":
        base.require("stage_blocks", config.stage_blocks, (2,), "a stage is a whole patch of one channel")
    repacks = source == "repack"
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


def source_of(p: PatchEmbedImagesProblem) -> str:
    """Strips where a patch's row is 16 bytes, or becomes as long; of others what took least time."""
    return _sources(p)[0]


def _sources(p: PatchEmbedImagesProblem) -> tuple[str, ...]:
    """All ways, the usual one first: rows that two swizzles make up may be split instead of lengthened."""
    if strips.row_bytes(p) == strips.REPACKED:
        return ("repack",)
    if strips.span_of(strips.row_bytes(p)) == strips.SPANS[0]:
        return ("strips",)
    if not strips.may_split(p):
        return ("gather",)
    fast = strips.row_bytes(p) in FAST_SPLITS and p.batch * p.positions > FEW_SPLITS
    return ("split", "gather") if fast else ("gather", "split")


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


# ---- choice --------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=4096)
def resolve(
    problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig, arch: base.Arch, sm_count: int
) -> Sm90ImagesConfig:
    """The configuration with what it leaves open filled in: shape of the tiles, weight, warpgroups, cluster, stages."""
    if config.source is None:
        config = dataclasses.replace(config, source=source_of(problem))
    if config.source != "repack":
        config = dataclasses.replace(config, raw_stages=0)
    elif not config.raw_stages:
        options = (dataclasses.replace(config, raw_stages=count) for count in RAW_STAGES_BY_CHOICE)
        chosen = [resolve(problem, option, arch, sm_count) for option in options]
        return next((c for c in chosen if _fits(Sm90ImagesPlan(problem, c, arch, sm_count))), chosen[-1])
    operations = 2 * problem.batch * problem.positions * problem.n * problem.k
    few = operations <= FEW_OPERATIONS and len(_weights(problem)) > 1
    plans = list(_shapes(problem, config, arch, sm_count, few))
    fit = [plan for plan in plans if _fits(plan)]
    if fit and config.source == "split" and not few:
        # More warpgroups have more features, for which TMA brings the rows in two parts less often: on an H200 three
        # took 0.98 of two's time sustained and 0.92 in bursts, by the model 0.93.
        by_warpgroups = itertools.groupby(sorted(fit, key=_warpgroups), _warpgroups)
        plan = min((min(same, key=_cost) for _, same in by_warpgroups), key=lambda plan: predict(plan).microseconds)
    elif fit:
        plan = min(fit, key=_microseconds if few else _cost)
    else:  # the plan that lacks the fewest registers or the least memory says so
        plan = min(plans, key=lambda plan: (plan.needed_registers - plan.consumer_registers, plan.smem_bytes))
    return plan.config


def search_space(problem: PatchEmbedImagesProblem, arch: base.Arch, sm_count: int) -> list[Sm90ImagesPlan]:
    """Legal plans that are worth timing on a device: of each source, memory of the weight and number of warpgroups the
    shapes of least cost and of least modelled time, the chooser's choice first."""
    if problem.precision != "int8" or strips.why_no_operand(problem):
        return []
    chosen = checked_plan(problem, default_config(problem, arch, sm_count), arch, sm_count)
    found: dict[tuple, list[Sm90ImagesPlan]] = {}
    for source, few in itertools.product(_sources(problem), (True, False)):
        given = Sm90ImagesConfig(source=source, order=chosen.config.order, raw_stages=chosen.config.raw_stages)
        for plan in _shapes(problem, given, arch, sm_count, few):
            found.setdefault((source, plan.config.weight, plan.config.warpgroups), []).append(plan)
    plans = [chosen]
    for shapes in found.values():
        fit = {plan.config: plan for plan in shapes if _fits(plan)}.values()
        ranked = (sorted(fit, key=key)[:TRIED_SHAPES] for key in (_cost, _microseconds))
        configs = [plan.config for plans_of in ranked for plan in plans_of]
        plans += base.legal_plans(checked_plan, problem, configs, arch, sm_count)
    return list(dict.fromkeys(plans))


def _shapes(
    problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig, arch: base.Arch, sm_count: int, few: bool
) -> Iterator[Sm90ImagesPlan]:
    """Plans that a configuration leaves open, with the stages that they would get."""
    weights = _weights(problem) if config.weight is None else (config.weight,)
    warpgroups = (config.warpgroups,) if config.warpgroups else (2, 3, 1)
    clusters = (config.cluster,) if config.cluster else (2, 1) if sm_count > 1 else (1,)
    for weight, groups in itertools.product(weights, warpgroups):
        narrow = Sm90ImagesPlan(
            problem,
            dataclasses.replace(config, weight=weight, warpgroups=groups, tile_patches=1, tile_images=1),
            arch,
            sm_count,
        )
        room = min(narrow.consumer_registers - narrow.weight_registers, narrow.entry_registers) - ADDRESSING_REGISTERS
        columns = min(2 * room, USUAL_COLUMNS if few or narrow.resident else MOST_COLUMNS)
        for cluster, patches, blocks in itertools.product(
            clusters, _tile_patches(problem, config, few), _stage_blocks(narrow, config.stage_blocks)
        ):
            shape = dataclasses.replace(narrow.config, cluster=cluster, tile_patches=patches, stage_blocks=blocks)
            for images in _tile_images(problem, config, patches, columns, few):
                yield _with_stages(problem, shape, images, config.stages, arch, sm_count)


def _with_stages(
    problem: PatchEmbedImagesProblem, shape: Sm90ImagesConfig, images: int, stages: int | None, arch: base.Arch,
    sm_count: int
) -> Sm90ImagesPlan:
    """The plan of a tile of so many images, with the stages that it would get."""
    plan = Sm90ImagesPlan(problem, dataclasses.replace(shape, tile_images=images, stages=stages or 2), arch, sm_count)
    if stages or ring_stages(plan) == 2:
        return plan
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, stages=ring_stages(plan)))


def _stage_blocks(plan: Sm90ImagesPlan, given: int | None) -> tuple[int, ...]:
    """Two where a weight in registers leaves room for such stages, otherwise either."""
    if given:
        return (given,)
    if plan.splits:
        return (strips.SPLIT_BLOCKS,)
    return (2,) if plan.resident else (2, 1)


def _tile_patches(problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig, few: bool) -> tuple[int, ...]:
    """Any; of repacked rows whole 16 bytes; with few images pieces of a grid row, and 16, of which one fills a tile."""
    if config.tile_patches:
        return (config.tile_patches,)
    width = problem.grid_width
    if source_of(problem) == "repack":
        return (16, 8) if width > 8 else (8,)
    if not few:
        return tuple(range(min(MOST_PATCHES, width), 0, -1))
    least = -(-width // MOST_PATCHES)
    pieces = (least, least + 1, least + 2, 2 * least, 4 * least)
    return tuple(dict.fromkeys((*(-(-width // i) for i in pieces), MOST_PATCHES)))


def _tile_images(
    problem: PatchEmbedImagesProblem, config: Sm90ImagesConfig, patches: int, columns: int, few: bool
) -> tuple[int, ...]:
    """Images of a tile: as many as fit the columns, and no more than there are, at least one step; with few, and with
    the longer stages of split rows, also a half and a quarter of that."""
    if config.tile_images:
        return (config.tile_images,)
    step, fewer = strips.images_step(patches), few or config.source == "split"
    images = max(step, min(columns // patches, base.round_up(problem.batch, step)) // step * step)
    return tuple(sorted({max(step, images // i // step * step) for i in ((1, 2, 4) if fewer else (1,))}))


def _fits(plan: Sm90ImagesPlan) -> bool:
    """Whether registers hold what they have to, shared memory two stages, and each CTA of a cluster loads its share."""
    return (
        plan.needed_registers <= plan.consumer_registers
        and plan.accumulator_registers + ADDRESSING_REGISTERS <= plan.entry_registers
        and plan.smem_bytes - (plan.config.stages - 2) * plan.stage_bytes <= plan.arch.smem_bytes
        and _divides(plan)
        and _shares(plan)
    )


ERROR = 0.47
"""The largest of 24 configurations that were timed, which no fit has seen (docs/model.md)."""


def predict(plan: Sm90ImagesPlan) -> base.Prediction | None:
    """The modelled time of a launch: that of the kernel over rows, or of TMA for the rows of the boxes.

    None for rows that are repacked: no fact describes the time that the repacking warps take.
    """
    if plan.repacks:
        return None
    boxes = _box_microseconds(plan)
    prediction = rows.predict(plan)
    if LAUNCH_MICROSECONDS + boxes <= prediction.microseconds:
        return dataclasses.replace(prediction, error=ERROR)
    parts = {"rows of TMA boxes": boxes, "launch": LAUNCH_MICROSECONDS}
    return base.Prediction(sum(parts.values()), parts, rows.CAVEAT, ERROR)


def _warpgroups(plan: Sm90ImagesPlan) -> int:
    return plan.config.warpgroups


def _microseconds(plan: Sm90ImagesPlan) -> float:
    """Microseconds of a launch, for comparisons: almost the larger of what `predict` has, which overlap."""
    return (rows.predicted_microseconds(plan) ** 3 + (LAUNCH_MICROSECONDS + _box_microseconds(plan)) ** 3) ** (1 / 3)


def _box_microseconds(plan: Sm90ImagesPlan) -> float:
    """Time that TMA takes for the rows of the boxes, one after the other."""
    tiles = -(-plan.tiles // (plan.clusters // plan.feature_groups))
    per_row = 1 if plan.gathers else plan.tile_patches
    box_rows = len(plan.row_parts) * plan.pixel_stage_bytes // plan.row_span // per_row
    of_row = BOX_ROW_CLOCKS + (0 if plan.gathers else plan.row_span * per_row / BOX_BYTES_PER_CLOCK)
    return tiles * plan.tile_stages * box_rows * of_row / plan.config.cluster / CLOCKS_PER_MICROSECOND


def _divides(plan: Sm90ImagesPlan) -> bool:
    """Whether the CTAs of a cluster have equal shares of a box: of its rows, or of a single row of its images."""
    _, images, rows, _ = plan.stage_box
    cluster = plan.config.cluster
    return rows >= cluster or images % cluster == 0


def _shares(plan: Sm90ImagesPlan) -> bool:
    """Whether the parts of a strip that the CTAs of a cluster load lie as TMA writes them."""
    cluster = plan.config.cluster
    return not plan.repacks or plan.load_bytes % (strips.BLOCK_BYTES * cluster) == 0 or cluster == 1


def _cost(plan: Sm90ImagesPlan) -> float:
    """Cost by which shapes that a problem allows are compared: the least is taken.

    Products of features, patches and images that do not exist, and clusters without a tile in the last wave; rows of
    TMA boxes, of which those of 16 bytes took 2 to 3 times as long as those of 224 on an H200; WGMMAs of few columns,
    for which a weight fragment is read as often as for many. A streamed weight is written to shared memory and read
    from it for every tile, and needs a ring of some length.
    """
    config, problem = plan.config, plan.problem
    patches = plan.row_tiles * plan.tile_patches / problem.grid_width
    images = plan.image_tiles * plan.tile_images / problem.batch
    together = plan.clusters // plan.feature_groups
    waves = -(-plan.tiles // together) * together / plan.tiles
    cost = (1 + strips.SPANS[0] / (plan.tile_patches * plan.row_bytes)) * (1 + 16 / plan.tile_rows)
    if plan.resident:
        cost *= 1.0 if plan.tile_rows <= USUAL_COLUMNS else 2.0
    else:
        shared = plan.tile_rows + plan.features + config.warpgroups * (64 + plan.tile_rows)
        products = plan.features * plan.tile_rows / MACS_PER_CLOCK
        cost *= max(1.0, shared / SHARED_BYTES_PER_CLOCK / products) * (1 + 1 / (config.stages * config.stage_blocks))
    return plan.padded_n * patches * images * waves * cost * _UNSHARED[config.cluster] * _ALONE[config.warpgroups]
