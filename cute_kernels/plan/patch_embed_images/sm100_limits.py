"""Limits of the SM100a kernel over images, and which configuration a problem gets where it is left open."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from cute_kernels.config import PatchEmbedImagesProblem, Sm100ImagesConfig
from cute_kernels.plan.base import Arch, reject, require, round_up
from cute_kernels.plan.patch_embed_images.base import BOX_BYTES, INTEGERS, MOST_PATCHES
from cute_kernels.plan.patch_embed_images.sm100 import (
    ADDRESS_BYTES,
    BARRIER_BYTES,
    COLUMN_STEP,
    MOST_COLUMNS,
    Sm100ImagesPlan,
)
from cute_kernels.plan.patch_embed_images.strips import (
    check_gathered_problem,
    check_strips_problem,
    check_table,
    images_step,
)

_MACS_PER_CLOCK = 8192
"""Products of 8-bit integers on one multiprocessor, from the 4.5 POP/s of the data sheet (HGX B200, dense); of 16-bit
numbers half as many."""

_WAVEFRONT = 128
"""Bytes that shared memory moves in a clock."""

_TILE_CLOCKS = 400
"""What a tile costs besides: signals between its roles. An estimate."""

_DRAIN_CLOCKS = 1000
"""From the last MMA to the last store of an accumulator that nothing else hides. An estimate."""


def plan_sm100_images(
    problem: PatchEmbedImagesProblem, config: Sm100ImagesConfig | None, arch: Arch, sm_count: int
) -> Sm100ImagesPlan:
    """The plan, or ValueError; what a config leaves open is chosen by `resolve`."""
    integers = problem.precision in INTEGERS
    check_strips_problem(problem, ("int8",)) if integers else check_gathered_problem(problem)
    config = config or Sm100ImagesConfig()
    rule = f"how patches of {problem.in_dtype} come out of the images"
    require("source", config.source, ("auto", "strips" if integers else "gather"), rule)
    require("cta_group", config.cta_group, (0, 1, 2), "CTAs of one MMA; 0 chooses")
    require("weight", config.weight, ("auto", "tmem", "smem"), "where the weight stays")
    require("accumulators", config.accumulators, (0, 1, 2), "accumulators in tensor memory; 0 chooses")
    require("tmem_load_width", config.tmem_load_width, (16, 32), "columns whose registers an epilogue warp holds")
    require("stage_blocks", config.stage_blocks, (1, 2), "halves of a patch of one channel in a stage")
    require("order", config.order, ("row", "image"), "images or positions run fastest")
    if not 0 <= config.tile_patches <= MOST_PATCHES:
        rule = f"a row of a TMA box has {BOX_BYTES} bytes at most; 0 chooses"
        reject("tile_patches", config.tile_patches, rule, min(max(config.tile_patches, 1), MOST_PATCHES))
    if config.stages < 2 and config.stages != 0:
        reject("stages", config.stages, "TMA and MMA overlap only with two stages or more; 0 fills the memory", 2)
    if sm_count < config.cta_group:
        reject("sm_count", sm_count, f"a pair needs {config.cta_group} multiprocessors", config.cta_group)
    _check_channels(problem, config, arch)
    plan = resolve(problem, config, arch, sm_count)
    check(plan)
    return plan


def _check_channels(problem: PatchEmbedImagesProblem, config: Sm100ImagesConfig, arch: Arch) -> None:
    """Of the memory in which the weight stays, the smallest tile takes a part."""
    per_channel = Sm100ImagesPlan(dataclasses.replace(problem, channels=1), _smallest(config, "tmem"), arch, 1)
    tmem = (arch.tmem_columns - COLUMN_STEP) // per_channel.weight_columns
    beside = dataclasses.replace(per_channel, config=_smallest(config, "smem"))
    smem = (arch.smem_bytes - (beside.smem_bytes - beside.weight_bytes)) // beside.weight_bytes
    most = {"tmem": tmem, "smem": smem, "auto": max(tmem, smem)}[config.weight]
    if problem.channels > most:
        rule = (
            f"the weight of 128 features has {problem.channels * per_channel.weight_columns} columns of tensor memory "
            f"or {problem.channels * beside.weight_bytes:,} B of shared memory, and stays there"
        )
        reject("channels", problem.channels, rule, most)


def _smallest(config: Sm100ImagesConfig, weight: str) -> Sm100ImagesConfig:
    return dataclasses.replace(
        config, tile_patches=1, tile_images=COLUMN_STEP, cta_group=1, weight=weight, accumulators=1,
        part_columns=COLUMN_STEP, stages=2, stage_blocks=1,
    )  # fmt: skip


# ---- limits of a complete configuration -----------------------------------------------------------------------------


def check(plan: Sm100ImagesPlan) -> None:
    """Raises ValueError for the first limit that is broken."""
    _check_tile(plan)
    _check_tensor_memory(plan)
    _check_parts(plan)
    _check_stages(plan)
    check_table(plan)


def _images_step(plan: Sm100ImagesPlan) -> int:
    return images_step(plan.tile_patches, COLUMN_STEP) * plan.cta_group


def _check_tile(plan: Sm100ImagesPlan) -> None:
    """The columns of a tile are a legal N, and so is each CTA's share of them."""
    step, images = _images_step(plan), plan.tile_images
    largest = MOST_COLUMNS // plan.tile_patches // step * step
    if images % step or not 1 <= images <= largest:
        rule = (
            f"with {plan.tile_patches} patches and {plan.cta_group} CTAs multiples of {step} up to {largest} make N = "
            f"{COLUMN_STEP * plan.cta_group} to {MOST_COLUMNS}"
        )
        reject("tile_images", images, rule, min(max(round_up(images, step), step), largest))


def _check_tensor_memory(plan: Sm100ImagesPlan) -> None:
    config, most = plan.config, plan.arch.tmem_columns
    room = most - plan.weight_columns
    if plan.accumulator_columns <= room:
        return
    rule = (
        f"{plan.weight_columns} columns of weight and {config.accumulators} accumulators of {plan.columns} make "
        f"{plan.weight_columns + plan.accumulator_columns}, tensor memory has {most}"
    )
    if plan.columns <= room:
        reject("accumulators", config.accumulators, rule, room // plan.columns)
    step = _images_step(plan)
    images = room // config.accumulators // plan.tile_patches // step * step
    if images:
        reject("tile_images", plan.tile_images, rule, images)
    most = room // config.accumulators // plan.tile_images
    legal = (p for p in range(most, 0, -1) if not plan.tile_images % (images_step(p, COLUMN_STEP) * plan.cta_group))
    reject("tile_patches", plan.tile_patches, rule, next(legal, 1))


def _check_parts(plan: Sm100ImagesPlan) -> None:
    """Every part is a legal N, and whole loads of an epilogue warp."""
    config, step = plan.config, COLUMN_STEP * plan.cta_group
    if config.part_columns % step or not step <= config.part_columns <= plan.columns:
        rule = f"N of an MMA of {plan.cta_group} CTAs is a multiple of {step}, and the tile has {plan.columns} columns"
        nearest = min(max(round_up(config.part_columns, step), step), plan.columns)
        reject("part_columns", config.part_columns, rule, nearest)
    for _, columns in plan.parts:
        if columns // plan.cta_group % config.tmem_load_width:
            rule = f"a load's columns are patches of one CTA, and a part has {columns // plan.cta_group} of each"
            reject("tmem_load_width", config.tmem_load_width, rule, COLUMN_STEP)


def _check_stages(plan: Sm100ImagesPlan) -> None:
    """Barriers and shared memory; all parts of a tile read its stages, which the last part frees."""
    config, arch = plan.config, plan.arch
    fixed = plan.smem_bytes - config.stages * plan.stage_bytes
    room = (arch.smem_bytes - fixed) // plan.stage_bytes
    slots = (plan.barrier_bytes - ADDRESS_BYTES) // BARRIER_BYTES
    most = min(room, (slots - (plan.used_barrier_bytes - ADDRESS_BYTES) // BARRIER_BYTES) // 2 + config.stages)
    if config.stages > room:
        rule = (
            f"{config.stages} stages of {plan.stage_bytes:,} B and {fixed:,} B beside them make {plan.smem_bytes:,} B "
            f"of shared memory, the limit is {arch.smem_bytes:,} B"
        )
        if most >= 2:
            reject("stages", config.stages, rule, most)
        rule = f"{rule}, and two stages are needed"
        if config.stage_blocks == 2 and plan.stage_bytes <= arch.smem_bytes - fixed:
            reject("stage_blocks", config.stage_blocks, rule, 1)
        reject("tile_images", plan.tile_images, rule, _most_images(plan))
    if config.stages > most:
        reject("stages", config.stages, f"the {plan.barrier_bytes:,} B of barriers hold those of {most} stages", most)
    if len(plan.parts) > 1 and config.stages < plan.tile_stages:
        rule = f"the parts of a tile read its {plan.tile_stages} stages in turn, and the last part frees them"
        if plan.tile_stages <= most:
            reject("stages", config.stages, rule, plan.tile_stages)
        reject("part_columns", config.part_columns, f"{rule}; {most} fit", plan.columns)


def _most_images(plan: Sm100ImagesPlan) -> int:
    """Of a tile with which two stages fit."""
    step = _images_step(plan)
    for images in range(plan.tile_images - step, step, -step):
        columns = images * plan.tile_patches
        config = dataclasses.replace(plan.config, tile_images=images, part_columns=columns, stages=2)
        if dataclasses.replace(plan, config=config).smem_bytes <= plan.arch.smem_bytes:
            return images
    return step


# ---- what a problem gets --------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def resolve(
    problem: PatchEmbedImagesProblem, config: Sm100ImagesConfig, arch: Arch, sm_count: int
) -> Sm100ImagesPlan:
    """The plan with what the configuration leaves open filled in: of all legal shapes the one of least cost.

    Shared memory keeps the weight where the configuration says so, or where no shape leaves it room in tensor memory.
    Of equal shapes the first is taken, so that CTAs work alone where a pair gains nothing. Where none is legal, it is
    the cheapest, whose limit `check` then names.
    """
    weights = (config.weight,) if config.weight != "auto" else ("tmem", "smem")
    cheapest = None
    for weight in weights:
        plans = sorted(_candidates(problem, config, arch, sm_count, weight), key=cost)
        cheapest = cheapest or plans[0]
        for plan in plans:
            if _is_legal(plan):
                return plan
    return cheapest


def _is_legal(plan: Sm100ImagesPlan) -> bool:
    try:
        check(plan)
    except ValueError:
        return False
    return True


def _candidates(
    problem: PatchEmbedImagesProblem, config: Sm100ImagesConfig, arch: Arch, sm_count: int, weight: str
) -> Iterator[Sm100ImagesPlan]:
    """Complete configurations, with a single CTA and wide tiles first."""
    groups = (config.cta_group,) if config.cta_group else (1, 2) if sm_count > 1 else (1,)
    source = "strips" if problem.precision == "int8" else "gather"
    for group, patches in itertools.product(groups, _patches(problem, config)):
        step = images_step(patches, COLUMN_STEP) * group
        largest = max(step, MOST_COLUMNS // patches // step * step)
        most = min(largest, round_up(problem.batch, step))
        images = (config.tile_images,) if config.tile_images else range(most, 0, -step)
        for count in images:
            shape = dataclasses.replace(
                config, source=source, cta_group=group, weight=weight, tile_patches=patches, tile_images=count
            )
            yield _complete(Sm100ImagesPlan(problem, shape, arch, sm_count))


def _patches(problem: PatchEmbedImagesProblem, config: Sm100ImagesConfig) -> tuple[int, ...]:
    """The grid row in 1 to 3 more pieces than it needs; and 16 patches, of which one image is a legal tile."""
    if config.tile_patches:
        return (config.tile_patches,)
    least = -(-problem.grid_width // MOST_PATCHES)
    pieces = (-(-problem.grid_width // (least + i)) for i in range(4))
    return tuple(dict.fromkeys((*pieces, MOST_PATCHES)))


def _complete(plan: Sm100ImagesPlan) -> Sm100ImagesPlan:
    """With accumulators, parts and stages that the configuration leaves open.

    Two accumulators where tensor memory holds them; otherwise one in two parts, of which the first is drained while the
    MMAs of the second run.
    """
    config = plan.config
    accumulators = config.accumulators or (2 if 2 * plan.columns + plan.weight_columns <= plan.arch.tmem_columns else 1)
    step = COLUMN_STEP * plan.cta_group
    half = round_up(-(-plan.columns // 2), max(step, config.tmem_load_width * plan.cta_group))
    parts = config.part_columns or (plan.columns if accumulators > 1 or half >= plan.columns else half)
    config = dataclasses.replace(config, accumulators=accumulators, part_columns=parts, stages=config.stages or 2)
    resolved = dataclasses.replace(plan, config=config)
    if not plan.config.stages:
        room = 2 + (plan.arch.smem_bytes - resolved.smem_bytes) // resolved.stage_bytes
        stages = max(2, min(room, 2 * resolved.tile_stages))
        resolved = dataclasses.replace(resolved, config=dataclasses.replace(config, stages=stages))
    return resolved


def cost(plan: Sm100ImagesPlan) -> float:
    """Clocks of a launch as far as shapes tell them apart: counted work by published rates, no measured time.

    The tensor core's products, or the wavefronts of shared memory (strips written by TMA, operands read by MMAs, output
    staged and read), whichever take longer; both as the emulator counts them. Tiles that a cluster has one after the
    other, and rounds of clusters that the device does not hold at once.
    """
    products = plan.features * plan.columns * plan.problem.k * plan.pixel_bytes / _MACS_PER_CLOCK
    strips = plan.stage_bytes * plan.tile_stages / _WAVEFRONT
    weight = plan.weight_bytes * len(plan.parts) / _WAVEFRONT if plan.config.weight == "smem" else 0
    staging = 2 * plan.epilogue_warps * plan.columns * 64 / _WAVEFRONT
    clocks = max(products, 2 * strips + weight + staging) + _TILE_CLOCKS
    if plan.config.accumulators * len(plan.parts) == 1:
        clocks += _DRAIN_CLOCKS
    tiles = -(-plan.tiles * plan.groups // plan.clusters)
    rounds = -(-plan.clusters * plan.ctas // plan.sm_count)
    return tiles * rounds * clocks
