"""Plans of the patch embed that reads patches out of images."""

from __future__ import annotations

from cute_kernels.config import PatchEmbedImagesProblem, Sm90GatherConfig, Sm90ImagesConfig, Sm100ImagesConfig
from cute_kernels.plan.patch_embed_images.base import check_images_problem
from cute_kernels.plan.patch_embed_images.gather import multiplies_floats
from cute_kernels.plan.patch_embed_images.gather_default import plan_sm90_gather, search_space
from cute_kernels.plan.patch_embed_images.sm90 import plan_sm90_images
from cute_kernels.plan.patch_embed_images.sm100_limits import plan_sm100_images
from cute_kernels.plan.planner import Planner, Target

_GATHER = Target(Sm90GatherConfig, plan_sm90_gather, search_space, takes=multiplies_floats)

PATCH_EMBED_IMAGES = Planner(
    "patch_embed_images",
    PatchEmbedImagesProblem,
    check_images_problem,
    {
        "sm_90a": Target(Sm90ImagesConfig, plan_sm90_images, others=(_GATHER,)),
        "sm_100a": Target(Sm100ImagesConfig, plan_sm100_images),
    },
)
