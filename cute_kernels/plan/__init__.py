"""`(problem, configuration, architecture) -> Plan`: which kernel a problem gets, its tiles, and every limit.

`make_plan` either raises `ValueError` naming the limit, the value that broke it and the nearest legal value, or returns
a `Plan` that every later stage may trust without checking anything again. Planning is pure Python: no GPU, no torch, no
CuTe DSL. `prediction` and `b200` model the time of a launch (docs/model.md).
"""

from __future__ import annotations

from cute_kernels.plan.base import (
    ARCHS,
    ITEMSIZE,
    LANES,
    VECTOR_BYTES,
    Arch,
    Kernel,
    Operand,
    Plan,
    SmemRegion,
    TmemRegion,
    arch_of,
)
from cute_kernels.plan.gemm import GemmPlan
from cute_kernels.plan.gemm_sm80 import Sm80GemmPlan
from cute_kernels.plan.gemm_sm90 import Sm90GemmPlan
from cute_kernels.plan.gemm_sm100 import Sm100GemmPlan
from cute_kernels.plan.images import ImagesPlan
from cute_kernels.plan.images_gather import Sm90GatherPlan
from cute_kernels.plan.images_sm80 import Sm80ImagesPlan
from cute_kernels.plan.images_sm90 import Sm90ImagesPlan
from cute_kernels.plan.images_sm100 import Sm100ImagesPlan
from cute_kernels.plan.patch_embed import PatchEmbedPlan
from cute_kernels.plan.patch_embed_resident import Sm100ResidentPlan
from cute_kernels.plan.patch_embed_sm80 import Sm80PatchEmbedPlan
from cute_kernels.plan.patch_embed_sm90 import Sm90PatchEmbedPlan
from cute_kernels.plan.patch_embed_sm100 import Sm100PatchEmbedPlan
from cute_kernels.plan.registry import PLANNERS, Planner, candidate_plans, choose, make_plan, predict

__all__ = [
    "ARCHS",
    "ITEMSIZE",
    "LANES",
    "PLANNERS",
    "VECTOR_BYTES",
    "Arch",
    "GemmPlan",
    "ImagesPlan",
    "Kernel",
    "Operand",
    "PatchEmbedPlan",
    "Plan",
    "Planner",
    "Sm80GemmPlan",
    "Sm80ImagesPlan",
    "Sm80PatchEmbedPlan",
    "Sm90GatherPlan",
    "Sm90GemmPlan",
    "Sm90ImagesPlan",
    "Sm90PatchEmbedPlan",
    "Sm100GemmPlan",
    "Sm100ImagesPlan",
    "Sm100PatchEmbedPlan",
    "Sm100ResidentPlan",
    "SmemRegion",
    "TmemRegion",
    "arch_of",
    "candidate_plans",
    "choose",
    "make_plan",
    "predict",
]
