"""`(PatchEmbedProblem, config, architecture) -> Plan`: the only place that knows a hardware limit.

`make_plan` either raises `ValueError` naming the limit, the value that broke it and the nearest legal value, or returns
a `Plan` that every later stage may trust without checking anything again. Planning is pure Python: no GPU, no torch, no
CuTe DSL.
"""

from __future__ import annotations

from cute_kernels.config import (
    Config,
    GemmConfig,
    GemmProblem,
    PatchEmbedConfig,
    PatchEmbedProblem,
    Sm90GemmConfig,
    Sm90PatchEmbedConfig,
    Sm100GemmConfig,
    Sm100PatchEmbedConfig,
)
from cute_kernels.plan.base import ARCHS, ITEMSIZE, LANES, VECTOR_BYTES, Arch, Plan, SmemRegion, check_problem, reject
from cute_kernels.plan.gemm import sm90 as sm90_gemm
from cute_kernels.plan.gemm import sm100 as sm100_gemm
from cute_kernels.plan.gemm.base import GemmPlan, check_gemm_problem
from cute_kernels.plan.gemm.sm90 import Sm90GemmPlan, plan_sm90_gemm
from cute_kernels.plan.gemm.sm100 import Sm100GemmPlan, plan_sm100_gemm
from cute_kernels.plan.patch_embed.sm90 import Sm90PatchEmbedPlan, plan_sm90
from cute_kernels.plan.patch_embed.sm100 import Sm100PatchEmbedPlan, plan_sm100

__all__ = [
    "ARCHS",
    "CONFIG_TYPES",
    "GEMM_CONFIG_TYPES",
    "ITEMSIZE",
    "LANES",
    "VECTOR_BYTES",
    "Arch",
    "GemmPlan",
    "Plan",
    "Sm90GemmPlan",
    "Sm90PatchEmbedPlan",
    "Sm100GemmPlan",
    "Sm100PatchEmbedPlan",
    "SmemRegion",
    "gemm_candidates",
    "make_plan",
]

_PLANNERS = {
    PatchEmbedProblem: (
        check_problem,
        {"sm_100a": (Sm100PatchEmbedConfig, plan_sm100), "sm_90a": (Sm90PatchEmbedConfig, plan_sm90)},
    ),
    GemmProblem: (
        check_gemm_problem,
        {"sm_100a": (Sm100GemmConfig, plan_sm100_gemm), "sm_90a": (Sm90GemmConfig, plan_sm90_gemm)},
    ),
}

CONFIG_TYPES: dict[str, type[PatchEmbedConfig]] = {
    arch: kind for arch, (kind, _) in _PLANNERS[PatchEmbedProblem][1].items()
}
"""The class of each architecture's tunables of the patch embed."""

GEMM_CONFIG_TYPES: dict[str, type[GemmConfig]] = {arch: kind for arch, (kind, _) in _PLANNERS[GemmProblem][1].items()}
"""The class of each architecture's tunables of the dense GEMM."""


def gemm_candidates(problem: GemmProblem, arch: str, *, sm_count: int | None = None) -> list[GemmPlan]:
    """Plans of a dense GEMM that are worth timing on a device, the most promising first.

    Args:
        problem: what to compute.
        arch: a key of `ARCHS`.
        sm_count: as for `make_plan`.

    Raises:
        ValueError: as `make_plan`.
    """
    check_gemm_problem(problem)
    if arch not in ARCHS:
        reject("arch", arch, f"supported architectures are {', '.join(ARCHS)}", next(iter(ARCHS)))
    search = {"sm_90a": sm90_gemm.search_space, "sm_100a": sm100_gemm.search_space}[arch]
    return search(problem, ARCHS[arch], ARCHS[arch].sm_count if sm_count is None else sm_count)


def make_plan(
    problem: PatchEmbedProblem | GemmProblem,
    config: Config | None = None,
    arch: str | None = None,
    *,
    sm_count: int | None = None,
) -> Plan:
    """Checks every limit and returns the plan.

    Args:
        problem: what to compute.
        config: tunables of the architecture; the default configuration when None.
        arch: a key of `ARCHS`; that of the config's type when None, and sm_100a without a config.
        sm_count: multiprocessors of the device at hand; that of the architecture's usual part when None.

    Raises:
        ValueError: a limit is broken; the message names the limit, the value and the nearest legal value.
        TypeError: the config belongs to another architecture or to another kernel.
    """
    check, planners = _PLANNERS[type(problem)]
    if arch is None:
        arch = next((name for name, (kind, _) in planners.items() if isinstance(config, kind)), "sm_100a")
    if arch not in ARCHS:
        reject("arch", arch, f"supported architectures are {', '.join(ARCHS)}", next(iter(ARCHS)))
    kind, planner = planners[arch]
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"config is {type(config).__name__}, {arch} takes {kind.__name__}")
    check(problem)
    return planner(problem, config, ARCHS[arch], ARCHS[arch].sm_count if sm_count is None else sm_count)
