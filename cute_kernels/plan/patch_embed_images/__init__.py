"""Plans of the patch embed that reads patches out of images."""

from __future__ import annotations

from cute_kernels.config import (
    PatchEmbedImagesProblem,
    Sm90GatherConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm90RowsConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
    Sm100ResidentConfig,
)
from cute_kernels.plan.patch_embed_images import sm90_default, sm100_limits
from cute_kernels.plan.patch_embed_images.base import check_images_problem
from cute_kernels.plan.patch_embed_images.chain import (
    plan_sm90_chain,
    plan_sm100_chain,
    why_rows_on_sm90,
    why_rows_on_sm100,
)
from cute_kernels.plan.patch_embed_images.gather import multiplies_floats
from cute_kernels.plan.patch_embed_images.gather_default import plan_sm90_gather, search_space
from cute_kernels.plan.planner import Planner, Target

_SM90_CHAIN = Target(
    Sm90PatchEmbedConfig, plan_sm90_chain, takes=lambda problem: bool(why_rows_on_sm90(problem)), also=(Sm90RowsConfig,)
)
_SM100_CHAIN = Target(
    Sm100PatchEmbedConfig, plan_sm100_chain, takes=lambda problem: bool(why_rows_on_sm100(problem)),
    also=(Sm100ResidentConfig,),
)  # fmt: skip
_GATHER = Target(Sm90GatherConfig, plan_sm90_gather, search_space, takes=multiplies_floats)

PATCH_EMBED_IMAGES = Planner(
    "patch_embed_images",
    PatchEmbedImagesProblem,
    check_images_problem,
    {
        "sm_90a": Target(
            Sm90ImagesConfig, sm90_default.plan_sm90_images, predict=sm90_default.predict, others=(_GATHER,),
            fallback=_SM90_CHAIN,
        ),
        "sm_100a": Target(
            Sm100ImagesConfig, sm100_limits.plan_sm100_images, predict=sm100_limits.predict, fallback=_SM100_CHAIN
        ),
    },
)
