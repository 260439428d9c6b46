"""Plans of the patch embed."""

from __future__ import annotations

from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig, Sm100PatchEmbedConfig, Sm100ResidentConfig
from cute_kernels.plan.patch_embed import sm90_default, sm100_default
from cute_kernels.plan.patch_embed.base import check_problem
from cute_kernels.plan.planner import Planner, Target

PATCH_EMBED = Planner(
    "patch_embed",
    PatchEmbedProblem,
    check_problem,
    {
        "sm_100a": Target(
            Sm100PatchEmbedConfig, sm100_default.plan_sm100, sm100_default.search_space, sm100_default.predict,
            also=(Sm100ResidentConfig,), why=sm100_default.why,
        ),
        "sm_90a": Target(Sm90PatchEmbedConfig, sm90_default.plan_sm90, sm90_default.search_space, sm90_default.predict),
    },
)
