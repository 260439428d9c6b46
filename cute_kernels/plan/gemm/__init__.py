"""Plans of the dense GEMM."""

from __future__ import annotations

from cute_kernels.config import GemmProblem, Sm90GemmConfig, Sm100GemmConfig
from cute_kernels.plan.gemm import sm90, sm100
from cute_kernels.plan.gemm.base import check_gemm_problem
from cute_kernels.plan.planner import Planner, Target

GEMM = Planner(
    "gemm",
    GemmProblem,
    check_gemm_problem,
    {
        "sm_100a": Target(Sm100GemmConfig, sm100.plan_sm100_gemm, sm100.search_space),
        "sm_90a": Target(Sm90GemmConfig, sm90.plan_sm90_gemm, sm90.search_space),
    },
)
