"""`(PatchEmbedProblem, config, architecture) -> Plan`: the only place that knows a hardware limit.

`make_plan` either raises `ValueError` naming the limit, the value that broke it and the nearest legal value, or returns
a `Plan` that every later stage may trust without checking anything again. Planning is pure Python: no GPU, no torch, no
CuTe DSL.
"""

from __future__ import annotations

from cute_kernels.config import Config, Problem
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
from cute_kernels.plan.kernel import Kernel
from cute_kernels.plan.patch_embed import PatchEmbedPlan
from cute_kernels.plan.patch_embed_resident import Sm100ResidentPlan
from cute_kernels.plan.patch_embed_sm80 import Sm80PatchEmbedPlan
from cute_kernels.plan.patch_embed_sm90 import Sm90PatchEmbedPlan
from cute_kernels.plan.patch_embed_sm100 import Sm100PatchEmbedPlan
from cute_kernels.plan.registry import PLANNERS, Planner

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

_BY_PROBLEM = {planner.problem: planner for planner in PLANNERS.values()}


def choose(
    problem: Problem,
    arch: str | None = None,
    *,
    sm_count: int | None = None,
) -> Config:
    """The configuration that a problem gets, complete: ``make_plan(p) == make_plan(p, choose(p))``.

    Args:
        problem, arch, sm_count: as for `make_plan`.

    Raises:
        ValueError, NotImplementedError: as `make_plan`.
    """
    return make_plan(problem, None, arch, sm_count=sm_count).config


def candidate_plans(problem: Problem, arch: str, *, sm_count: int | None = None) -> list[Plan]:
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
    planner.of(arch)
    planner.check(problem)
    plans = planner.search(problem, limits, limits.sm_count if sm_count is None else sm_count)
    if not plans:
        raise NotImplementedError(f"{planner.operation} has no search space for this problem on {arch}")
    return plans


def predict(plan: Plan) -> Prediction | None:
    """The modelled time of a launch; None where no model knows the kernel. docs/model.md"""
    kernels = PLANNERS[plan.operation].of(plan.arch.name) if plan.operation in PLANNERS else ()
    model = next((kernel.predict for kernel in kernels if type(plan.config) is kernel.config), None)
    return None if model is None else model(plan)


def make_plan(
    problem: Problem,
    config: Config | None = None,
    arch: str | None = None,
    *,
    sm_count: int | None = None,
) -> Plan:
    """Checks every limit and returns the plan.

    Args:
        problem: what to compute.
        config: tunables of a kernel, of which those that are None are chosen; kernel and tunables are chosen when None.
        arch: a key of `ARCHS`; that of the config's type when None, and the operation's first without a config.
        sm_count: multiprocessors of the device at hand; that of the architecture's usual part when None.

    Raises:
        ValueError: a limit is broken; the message names the limit, the value and the nearest legal value.
        TypeError: the config belongs to another architecture or to another operation.
        NotImplementedError: the architecture has no kernel for the operation.
    """
    planner = _BY_PROBLEM[type(problem)]
    if arch is None:
        arch = planner.kinds.get(type(config), next(iter(planner.kernels)))
    limits = _limits(arch)
    if config is not None:
        arch = planner.arch_for(arch, config)
        limits = _limits(arch)
    return planner.plan(problem, config, limits, limits.sm_count if sm_count is None else sm_count)


def _limits(arch: str) -> Arch:
    if arch not in ARCHS:
        reject("arch", arch, f"supported architectures are {', '.join(ARCHS)}", next(iter(ARCHS)))
    return ARCHS[arch]
