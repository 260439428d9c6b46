"""The list of kernels: of every operation its problem, and for every architecture its kernels; `make_plan` asks it."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

from cute_kernels import config as configs
from cute_kernels.config import Config, Problem
from cute_kernels.plan import (
    gemm,
    gemm_sm80,
    gemm_sm90,
    gemm_sm100,
    images,
    images_gather,
    images_sm80,
    images_sm90,
    images_sm100,
    patch_embed,
    patch_embed_resident,
    patch_embed_sm80,
    patch_embed_sm90,
    patch_embed_sm100,
    sm100_transposed,
)
from cute_kernels.plan.base import ARCHS, Arch, Kernel, Plan, Prediction, check_sm_count, reject
from cute_kernels.plan.config_codec import ConfigCodec
from cute_kernels.plan.images_chain import (
    chained,
    why_not_read_on_sm90,
    why_rows_on_sm80,
    why_rows_on_sm90,
    why_rows_on_sm100,
    work_on_sm90,
)
from cute_kernels.plan.images_gather import why_not_gathered
from cute_kernels.plan.options import ProblemOptions
from cute_kernels.plan.patches_sm90 import predicting


@dataclass(frozen=True)
class Planner:
    """An operation, as plans know it: class of its problems, ``options`` by which a command line names one of them, and
    ``check``, which raises ValueError for a problem that no architecture could run. ``kernels``: by the name of the
    architecture; a problem gets the first that takes it, and the last takes all. ``timed``: architectures where it gets
    the one of least modelled time among those that take it."""

    operation: str
    problem: type
    options: ProblemOptions
    check: Callable[[Any], None]
    kernels: Mapping[str, tuple[Kernel, ...]]
    timed: tuple[str, ...] = ()

    def of(self, arch: str) -> tuple[Kernel, ...]:
        """The kernels of an architecture. Raises NotImplementedError: there is none."""
        if arch not in self.kernels:
            raise NotImplementedError(f"{self.operation} has kernels for {', '.join(self.kernels)}, not for {arch}")
        return self.kernels[arch]

    def usual(self, problem: Any, arch: Arch, sm_count: int | None = None) -> tuple[Kernel, Config]:
        """The kernel and the configuration that a problem gets; on the usual part of an architecture without a number
        of multiprocessors. Raises ValueError: no kernel takes it."""
        kernel, plan = self._usual(problem, arch, arch.sm_count if sm_count is None else sm_count)
        return kernel, plan.config

    def _usual(self, problem: Any, arch: Arch, count: int) -> tuple[Kernel, Plan]:
        kernels = self.of(arch.name)
        taking = [kernel for kernel in kernels if not kernel.takes(problem, arch)] or [kernels[-1]]
        if arch.name not in self.timed or len(taking) == 1:
            return taking[0], taking[0].plan(problem, taking[0].choose(problem, arch, count), arch, count)
        plans, refused = {}, []
        for kernel in taking:
            try:
                plans[kernel] = kernel.plan(problem, kernel.choose(problem, arch, count), arch, count)
            except ValueError as error:  # it takes such problems, but not this one: a limit of every configuration
                refused.append(error)
        if not plans:
            raise refused[0]
        least = min(plans, key=lambda kernel: kernel.predict(plans[kernel]).microseconds)
        return least, plans[least]

    def plan(self, problem: Any, config: Any, arch: Arch, sm_count: int) -> Plan:
        """The plan of a configuration's kernel; without one, that of the kernel and configuration that are chosen.
        Raises NotImplementedError: there is no kernel for the architecture; TypeError: the configuration is none of
        its kernels'; ValueError: a limit is broken."""
        kernels = {kernel.config: kernel for kernel in self.of(arch.name)}
        if config is not None and type(config) not in kernels:
            allowed = " or ".join(kind.__name__ for kind in kernels)
            raise TypeError(f"config is {type(config).__name__}, {arch.name} takes {allowed}")
        check_sm_count(sm_count, 1)
        self.check(problem)
        if config is not None:
            return kernels[type(config)].plan(problem, config, arch, sm_count)
        return self._usual(problem, arch, sm_count)[1]

    def search(self, problem: Any, arch: Arch, sm_count: int) -> list[Plan]:
        """Plans that are worth timing on a device, all different and the most promising first.

        Of several kernels, what the problem gets, and then all by modelled time, or in turn where one has no model.
        """
        check_sm_count(sm_count, 1)
        kernels = {kernel: kernel.search(problem, arch, sm_count) for kernel in self.of(arch.name)}
        found = {kernel: plans for kernel, plans in kernels.items() if plans}
        if len(found) < 2:
            return [plan for plans in found.values() for plan in plans]
        if all(kernel.predict for kernel in found):
            timed = [(kernel.predict(plan).microseconds, plan) for kernel, plans in found.items() for plan in plans]
            plans = [plan for _, plan in sorted(timed, key=lambda pair: pair[0])]
        else:
            plans = [plan for turn in itertools.zip_longest(*found.values()) for plan in turn if plan is not None]
        return list(dict.fromkeys((self.plan(problem, None, arch, sm_count), *plans)))

    @property
    def kinds(self) -> dict[type, str]:
        """All classes of tunables, and the architecture of each, the first where there are several."""
        found: dict[type, str] = {}
        for arch, kernels in self.kernels.items():
            for kernel in kernels:
                found.setdefault(kernel.config, arch)
        return found

    def arch_for(self, arch: str, config: Any) -> str:
        """The architecture that has a configuration, among those whose binaries a device of ``arch`` runs.

        A device of compute capability 9.0 runs those of sm_90a and of sm_90. ``arch`` where none of them has it.
        """
        capability = ARCHS[arch].compute_capability
        same = [name for name in (arch, *self.kernels) if ARCHS[name].compute_capability == capability]
        having = (name for name in same if any(type(config) is k.config for k in self.kernels.get(name, ())))
        return next(having, arch)

    @cached_property
    def codec(self) -> ConfigCodec:
        """How its configurations are written down."""
        return ConfigCodec(self.kinds)


MMA_SYNC = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
"""Architectures that the kernels of ``mma.sync`` are compiled for."""

def _kernel(module: ModuleType, config: type, **more: Any) -> Kernel:
    """The kernel of a file in plan/, all of which have these functions; ``predict`` where a model knows its time."""
    more.setdefault("predict", getattr(module, "predict", None))
    return Kernel(config, module.checked_plan, module.FIELDS, module.default_config, module.search_space, **more)


_STREAMED = _kernel(patch_embed_sm100, configs.Sm100PatchEmbedConfig, takes=patch_embed_resident.why_on_chip)
_RESIDENT = _kernel(patch_embed_resident, configs.Sm100ResidentConfig, predict=sm100_transposed.predict)
_ROWS_SM90 = _kernel(patch_embed_sm90, configs.Sm90PatchEmbedConfig, predict=predicting(patch_embed_sm90.work))
_ROWS_SM80 = _kernel(patch_embed_sm80, configs.Sm80PatchEmbedConfig)
PATCH_EMBED = Planner(
    "patch_embed",
    configs.PatchEmbedProblem,
    patch_embed.OPTIONS,
    patch_embed.check_problem,
    {"sm_100a": (_STREAMED, _RESIDENT), "sm_90a": (_ROWS_SM90,), **dict.fromkeys(MMA_SYNC, (_ROWS_SM80,))},
)

_IMAGES_SM100 = _kernel(images_sm100, configs.Sm100ImagesConfig, takes=lambda problem, arch: why_rows_on_sm100(problem))
_IMAGES_SM90 = _kernel(
    images_sm90, configs.Sm90ImagesConfig, takes=lambda problem, arch: why_not_read_on_sm90(problem),
    predict=predicting(images_sm90.work)
)
_GATHER = _kernel(
    images_gather, configs.Sm90GatherConfig, takes=lambda problem, arch: why_not_gathered(problem),
    predict=predicting(images_gather.work)
)
_IMAGES_SM80 = _kernel(images_sm80, configs.Sm80ImagesConfig, takes=lambda problem, arch: why_rows_on_sm80(problem))
PATCH_EMBED_IMAGES = Planner(
    "patch_embed_images",
    configs.PatchEmbedImagesProblem,
    images.OPTIONS,
    images.check_images_problem,
    {
        "sm_90a": (_IMAGES_SM90, _GATHER, chained(_ROWS_SM90, why_rows_on_sm90, predicting(work_on_sm90))),
        "sm_100a": (_IMAGES_SM100, chained(_STREAMED, why_rows_on_sm100), chained(_RESIDENT, why_rows_on_sm100)),
        **dict.fromkeys(MMA_SYNC, (_IMAGES_SM80, chained(_ROWS_SM80, why_rows_on_sm80))),
    },
    timed=("sm_90a",),
)

GEMM = Planner(
    "gemm",
    configs.GemmProblem,
    gemm.OPTIONS,
    gemm.check_gemm_problem,
    {
        "sm_100a": (_kernel(gemm_sm100, configs.Sm100GemmConfig),),
        "sm_90a": (_kernel(gemm_sm90, configs.Sm90GemmConfig),),
        **dict.fromkeys(MMA_SYNC, (_kernel(gemm_sm80, configs.Sm80GemmConfig),)),
    },
)

PLANNERS: dict[str, Planner] = {planner.operation: planner for planner in (PATCH_EMBED, PATCH_EMBED_IMAGES, GEMM)}
"""Every operation by its name. Commands, tuner and the codec of configurations read this, too."""

_BY_PROBLEM = {planner.problem: planner for planner in PLANNERS.values()}


def choose(problem: Problem, arch: str | None = None, *, sm_count: int | None = None) -> Config:
    """The configuration that a problem gets, complete: ``make_plan(p) == make_plan(p, choose(p))``. ``problem``,
    ``arch``, ``sm_count``: as for `make_plan`. Raises ValueError, NotImplementedError: as `make_plan`."""
    return make_plan(problem, None, arch, sm_count=sm_count).config


def candidate_plans(problem: Problem, arch: str, *, sm_count: int | None = None) -> list[Plan]:
    """Plans that are worth timing on a device, the most promising first, all of them different. ``sm_count``: as for
    `make_plan`. Raises ValueError: as `make_plan`; NotImplementedError: the architecture has no kernel for the
    operation, or nothing to choose from."""
    planner = _BY_PROBLEM[type(problem)]
    device = _device(arch, sm_count)
    planner.of(arch)
    planner.check(problem)
    plans = planner.search(problem, *device)
    if not plans:
        raise NotImplementedError(f"{planner.operation} has no search space for this problem on {arch}")
    return plans


def predict(plan: Plan) -> Prediction | None:
    """The modelled time of a launch; None where no model knows the kernel. docs/model.md"""
    kernels = PLANNERS[plan.operation].of(plan.arch.name) if plan.operation in PLANNERS else ()
    model = next((kernel.predict for kernel in kernels if type(plan.config) is kernel.config), None)
    return None if model is None else model(plan)


def make_plan(
    problem: Problem, config: Config | None = None, arch: str | None = None, *, sm_count: int | None = None
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
    limits, sm_count = _device(arch, sm_count)
    if config is not None:
        limits = ARCHS[planner.arch_for(arch, config)]
    return planner.plan(problem, config, limits, sm_count)


def _device(arch: str, sm_count: int | None) -> tuple[Arch, int]:
    """Limits of an architecture, and multiprocessors: of its usual part when None."""
    if arch not in ARCHS:
        reject("arch", arch, f"supported architectures are {', '.join(ARCHS)}", next(iter(ARCHS)))
    return ARCHS[arch], ARCHS[arch].sm_count if sm_count is None else sm_count
