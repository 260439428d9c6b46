"""`(PatchEmbedProblem, config, architecture) -> Plan`: the only place that knows a hardware limit.

`make_plan` either raises `ValueError` naming the limit, the value that broke it and the nearest legal value, or returns
a `Plan` that every later stage may trust without checking anything again. Planning is pure Python: no GPU, no torch, no
CuTe DSL.
"""

from __future__ import annotations

from cute_kernels.config import Config, GemmProblem, PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.model.prediction import Prediction
from cute_kernels.plan.base import (
    ARCHS,
    ITEMSIZE,
    LANES,
    VECTOR_BYTES,
    Arch,
    Operand,
    Plan,
    SmemRegion,
    TmemRegion,
    arch_of,
    reject,
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
from cute_kernels.plan.registry import PLANNERS, Planner, Target

__all__ = [
    "ARCHS",
    "ITEMSIZE",
    "LANES",
    "PLANNERS",
    "VECTOR_BYTES",
    "Arch",
    "GemmPlan",
    "ImagesPlan",
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
    "Target",
    "TmemRegion",
    "arch_of",
    "candidate_plans",
    "make_plan",
    "predict",
    "runs",
]

_BY_PROBLEM = {planner.problem: planner for planner in PLANNERS.values()}


def candidate_plans(
    problem: PatchEmbedProblem | GemmProblem, arch: str, *, sm_count: int | None = None
) -> list[Plan]:
    """Plans that are worth timing on a device, the most promising first, all of them different.

    Args:
        problem: what to compute.
        arch: a key of `ARCHS`.
        sm_count: as for `make_plan`.

    Raises:
        ValueError: as `make_plan`.
        NotImplementedError: the architecture has no kernel for the operation, or nothing to choose from.
    """
    planner = _BY_PROBLEM[type(problem)]
    limits = _limits(arch)
    target = planner.target(arch).of(problem)
    if target.search is None:
        raise NotImplementedError(f"{planner.operation} has no search space on {arch}")
    planner.check(problem)
    return target.search(problem, limits, limits.sm_count if sm_count is None else sm_count)


def predict(plan: Plan) -> Prediction | None:
    """The modelled time of a launch; None where no model knows the kernel. docs/model.md"""
    targets = PLANNERS[plan.operation].targets[plan.arch.name].kernels if plan.operation in PLANNERS else ()
    model = next((target.predict for target in targets if isinstance(plan.config, target.configs)), None)
    return None if model is None else model(plan)


def make_plan(
    problem: PatchEmbedProblem | PatchEmbedImagesProblem | GemmProblem,
    config: Config | None = None,
    arch: str | None = None,
    *,
    sm_count: int | None = None,
) -> Plan:
    """Checks every limit and returns the plan.

    Args:
        problem: what to compute.
        config: tunables of the architecture; the default configuration when None.
        arch: a key of `ARCHS`; that of the config's type when None, and the operation's first without a config.
        sm_count: multiprocessors of the device at hand; that of the architecture's usual part when None.

    Raises:
        ValueError: a limit is broken; the message names the limit, the value and the nearest legal value.
        TypeError: the config belongs to another architecture or to another kernel.
        NotImplementedError: the architecture has no kernel for the operation.
    """
    planner = _BY_PROBLEM[type(problem)]
    if arch is None:
        arch = planner.kinds.get(type(config), next(iter(planner.targets)))
    limits = _limits(arch)
    if config is not None:
        arch = planner.arch_for(arch, config)
        limits = _limits(arch)
    target = planner.target(arch).of(problem, config)
    if config is not None and not isinstance(config, target.configs):
        allowed = " or ".join(kind.__name__ for kind in target.configs)
        raise TypeError(f"config is {type(config).__name__}, {arch} takes {allowed}")
    planner.check(problem)
    return target.plan(problem, config, limits, limits.sm_count if sm_count is None else sm_count)


def runs(plan: Plan) -> str:
    """Which kernels run, and why these where a problem may have others."""
    why = PLANNERS[plan.operation].targets[plan.arch.name].why
    return plan.runs if why is None else f"{plan.runs}: {why(plan)}"


def _limits(arch: str) -> Arch:
    if arch not in ARCHS:
        reject("arch", arch, f"supported architectures are {', '.join(ARCHS)}", next(iter(ARCHS)))
    return ARCHS[arch]
