"""Plan of the SM100a kernel over images: strips are the N operand of tcgen05, the weight stays on chip."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.common.facts import number
from cute_kernels.config import PatchEmbedImagesProblem, Sm100ImagesConfig
from cute_kernels.plan import b200, base, images_strips
from cute_kernels.plan import sm100_transposed as transposed
from cute_kernels.plan.images import MOST_PATCHES, TILE_IMAGES, TILE_ORDER, TILE_PATCHES


@dataclass(frozen=True)
class Sm100ImagesPlan(images_strips.StripsPlan, transposed.Sm100TransposedPlan):
    """The persistent tcgen05 kernel over strips: rows of ``x`` are patches, of which a CTA loads its own images."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm100.patch_embed_images:Sm100ImagesKernel"
    stage_name: ClassVar[str] = "strips"

    config: Sm100ImagesConfig

    # ---- tiles -----------------------------------------------------------------------------------------------------
    cta_images = number(lambda self: self.tile_images // self.cta_group)


# --- limits of the SM100a kernel over images, and which configuration a problem gets where it is left open -----------

FIELDS = {
    "source": base.Field("how patches come out of the images", ("strips", "gather")),
    "tile_patches": TILE_PATCHES,
    "tile_images": TILE_IMAGES,
    "cta_group": transposed.CTA_GROUP,
    "weight": transposed.WEIGHT_MEMORY,
    "accumulators": transposed.ACCUMULATORS,
    "mma_columns": transposed.MMA_COLUMNS,
    "tmem_load_width": base.Field("columns whose registers an epilogue warp holds", (16, 32)),
    "stages": transposed.STAGES,
    "stage_blocks": base.Field("halves of a patch of one channel in a stage", (1, 2)),
    "order": TILE_ORDER,
}


_TRIED_SHAPES = 4
"""Shapes of tiles for each memory and group of CTAs that a tuner times."""


def checked_plan(
    problem: PatchEmbedImagesProblem, config: Sm100ImagesConfig, arch: base.Arch, sm_count: int
) -> Sm100ImagesPlan:
    """The plan, or ValueError; what a config leaves open is chosen by `resolve`."""
    integers = problem.precision == "int8"
    images_strips.check_strips_problem(problem) if integers else images_strips.check_gathered_problem(problem)
    base.check_fields(config, FIELDS)
    rule = f"how patches of {problem.in_dtype} come out of the images"
    base.require("source", config.source, ("strips" if integers else "gather",), rule)
    base.check_sm_count(sm_count, config.cta_group, "pair")
    _check_channels(problem, config, arch)
    plan = resolve(problem, config, arch, sm_count)
    check(plan)
    return plan


def _check_channels(problem: PatchEmbedImagesProblem, config: Sm100ImagesConfig, arch: base.Arch) -> None:
    """Checks that the smallest tile fits beside the weight, in the memory where that stays."""
    shape = {"tile_patches": 1, "tile_images": transposed.COLUMN_STEP}
    least = transposed.smallest(config, "tmem", **shape)
    per_channel = Sm100ImagesPlan(dataclasses.replace(problem, channels=1), least, arch, 1)
    tmem = (arch.tmem_columns - transposed.COLUMN_STEP) // per_channel.weight_columns
    beside = dataclasses.replace(per_channel, config=transposed.smallest(config, "smem", **shape))
    smem = (arch.smem_bytes - (beside.smem_bytes - beside.weight_bytes)) // beside.weight_bytes
    most = {"tmem": tmem, "smem": smem, None: max(tmem, smem)}[config.weight]
    if problem.channels > most:
        rule = (
            f"the weight of {per_channel.features} features has "
            f"{problem.channels * per_channel.weight_columns} columns of tensor memory or "
            f"{problem.channels * beside.weight_bytes:,} B of shared memory, and stays there"
        )
        base.reject("channels", problem.channels, rule, most)


# ---- limits of a complete configuration -----------------------------------------------------------------------------

def check(plan: Sm100ImagesPlan) -> None:
    """Raises ValueError for the first limit that is broken."""
    _check_tile(plan)
    transposed.check_tensor_memory(plan, functools.partial(_narrower, plan))
    transposed.check_mma_tiles(plan)
    step, patches = _images_step(plan), plan.tile_patches
    fitting = functools.partial(transposed.largest_fitting, plan, step, "tile_images", patches)
    transposed.check_stages(plan, "tile_images", plan.tile_images, fitting)
    images_strips.check_table(plan)


def _images_step(plan: Sm100ImagesPlan) -> int:
    return images_strips.images_step(plan.tile_patches, transposed.COLUMN_STEP) * plan.cta_group


def _check_tile(plan: Sm100ImagesPlan) -> None:
    """The columns of a tile are a legal N, and so is each CTA's share of them."""
    step, images = _images_step(plan), plan.tile_images
    largest = transposed.MOST_COLUMNS // plan.tile_patches // step * step
    if images % step or not 1 <= images <= largest:
        rule = (
            f"with {plan.tile_patches} patches and {plan.cta_group} CTAs multiples of {step} up to {largest} make N = "
            f"{transposed.COLUMN_STEP * plan.cta_group} to {transposed.MOST_COLUMNS}"
        )
        base.reject("tile_images", images, rule, min(max(base.round_up(images, step), step), largest))


def _narrower(plan: Sm100ImagesPlan, columns: int) -> tuple[str, object, object]:
    step = _images_step(plan)
    images = columns // plan.tile_patches // step * step
    if images:
        return "tile_images", plan.tile_images, images
    for patches in range(columns // plan.tile_images, 0, -1):
        if plan.tile_images % (images_strips.images_step(patches, transposed.COLUMN_STEP) * plan.cta_group) == 0:
            return "tile_patches", plan.tile_patches, patches
    return "tile_patches", plan.tile_patches, 1


# ---- what a problem gets --------------------------------------------------------------------------------------------

def default_config(problem: PatchEmbedImagesProblem, arch: base.Arch, sm_count: int) -> Sm100ImagesConfig:
    """Everything open."""
    return Sm100ImagesConfig()


def predict(plan: Sm100ImagesPlan) -> base.Prediction:
    """The modelled time of a launch on a B200, by costs that are fitted to rows: no time of images was at hand."""
    p = plan.problem
    pixels = p.batch * p.channels * p.height * p.width * base.ITEMSIZE[p.in_dtype]
    weight = p.n * p.k * base.ITEMSIZE[plan.weight_dtype]
    table = p.table_rows * p.n * base.ITEMSIZE["float32"]
    out = p.batch * p.positions * p.n * base.ITEMSIZE[p.out_dtype]
    return b200.predict(transposed.transposed_work(plan, pixels + weight + table + out))


@functools.lru_cache(maxsize=1024)
def resolve(
    problem: PatchEmbedImagesProblem, config: Sm100ImagesConfig, arch: base.Arch, sm_count: int
) -> Sm100ImagesPlan:
    """The plan with what the configuration leaves open filled in: of all legal shapes the one of least cost.

    Shared memory keeps the weight where the configuration says so, or where no shape leaves it room in tensor memory.
    Of equal shapes the first is taken, so that CTAs work alone where a pair gains nothing. Where none is legal, it is
    the cheapest, whose limit `check` then names.
    """
    weights = (config.weight,) if config.weight is not None else ("tmem", "smem")
    cheapest = None
    for weight in weights:
        plans = sorted(_candidates(problem, config, arch, sm_count, weight), key=transposed.launch_clocks)
        cheapest = cheapest or plans[0]
        for plan in plans:
            if base.is_legal(plan, check):
                return plan
    return cheapest


def search_space(problem: PatchEmbedImagesProblem, arch: base.Arch, sm_count: int) -> list[Sm100ImagesPlan]:
    """Legal plans that are worth timing on a device: of each memory and group of CTAs those of least cost."""
    plans: list[Sm100ImagesPlan] = []
    with contextlib.suppress(ValueError):
        plans.append(checked_plan(problem, Sm100ImagesConfig(), arch, sm_count))
        for weight, group in itertools.product(("tmem", "smem"), (1, 2) if sm_count > 1 else (1,)):
            config = Sm100ImagesConfig(cta_group=group)
            shapes = sorted(_candidates(problem, config, arch, sm_count, weight), key=transposed.launch_clocks)
            plans += [plan for plan in shapes if base.is_legal(plan, check)][:_TRIED_SHAPES]
    return list(dict.fromkeys(plans))


def _candidates(
    problem: PatchEmbedImagesProblem, config: Sm100ImagesConfig, arch: base.Arch, sm_count: int, weight: str
) -> Iterator[Sm100ImagesPlan]:
    """Complete configurations, with a single CTA and wide tiles first."""
    groups = (config.cta_group,) if config.cta_group else (1, 2) if sm_count > 1 else (1,)
    source = "strips" if problem.precision == "int8" else "gather"
    for group, patches in itertools.product(groups, _patches(problem, config)):
        step = images_strips.images_step(patches, transposed.COLUMN_STEP) * group
        largest = max(step, transposed.MOST_COLUMNS // patches // step * step)
        most = min(largest, base.round_up(problem.batch, step))
        images = (config.tile_images,) if config.tile_images else range(most, 0, -step)
        for count in images:
            shape = dataclasses.replace(
                config, source=source, cta_group=group, weight=weight, tile_patches=patches, tile_images=count
            )
            yield transposed.complete(Sm100ImagesPlan(problem, shape, arch, sm_count))


def _patches(problem: PatchEmbedImagesProblem, config: Sm100ImagesConfig) -> tuple[int, ...]:
    """The grid row in 1 to 3 more pieces than it needs; and 16 patches, of which one image is a legal tile."""
    if config.tile_patches:
        return (config.tile_patches,)
    least = -(-problem.grid_width // MOST_PATCHES)
    pieces = (-(-problem.grid_width // (least + i)) for i in range(4))
    return tuple(dict.fromkeys((*pieces, MOST_PATCHES)))
