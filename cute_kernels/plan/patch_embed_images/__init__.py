"""Plans of the patch embed that reads patches out of images."""

from __future__ import annotations

from cute_kernels.config import PatchEmbedImagesProblem, Sm90ImagesConfig, Sm100ImagesConfig
from cute_kernels.plan.patch_embed_images.base import check_images_problem
from cute_kernels.plan.patch_embed_images.sm90 import plan_sm90_images
from cute_kernels.plan.patch_embed_images.sm100_limits import plan_sm100_images
from cute_kernels.plan.planner import Planner, Target

PATCH_EMBED_IMAGES = Planner(
    "patch_embed_images",
    PatchEmbedImagesProblem,
    check_images_problem,
    {
        "sm_90a": Target(Sm90ImagesConfig, plan_sm90_images),
        "sm_100a": Target(Sm100ImagesConfig, plan_sm100_images),
    },
)
