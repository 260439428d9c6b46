"""Plans of the patch embed."""

from __future__ import annotations

from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig, Sm100PatchEmbedConfig
from cute_kernels.plan.patch_embed.base import check_problem
from cute_kernels.plan.patch_embed.sm90_default import plan_sm90
from cute_kernels.plan.patch_embed.sm100 import plan_sm100
from cute_kernels.plan.planner import Planner, Target

PATCH_EMBED = Planner(
    "patch_embed",
    PatchEmbedProblem,
    check_problem,
    {"sm_100a": Target(Sm100PatchEmbedConfig, plan_sm100), "sm_90a": Target(Sm90PatchEmbedConfig, plan_sm90)},
)
