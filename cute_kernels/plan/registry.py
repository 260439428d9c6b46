"""The list of kernels: of every operation its problem, and for every architecture tunables and planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cute_kernels.config import (
    GemmProblem,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Sm80GemmConfig,
    Sm80ImagesConfig,
    Sm80PatchEmbedConfig,
    Sm90GatherConfig,
    Sm90GemmConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100GemmConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
    Sm100ResidentConfig,
)
from cute_kernels.config_codec import ConfigCodec
from cute_kernels.model.prediction import Prediction
from cute_kernels.plan import (
    gemm_sm80,
    gemm_sm90,
    gemm_sm100,
    images_sm80,
    images_sm90,
    images_sm100,
    patch_embed_sm80,
    patch_embed_sm90,
    sm100_choice,
)
from cute_kernels.plan.base import ARCHS, Arch, Plan
from cute_kernels.plan.gemm import check_gemm_problem
from cute_kernels.plan.images import check_images_problem
from cute_kernels.plan.images_chain import (
    plan_sm80_chain,
    plan_sm90_chain,
    plan_sm100_chain,
    why_rows_on_sm80,
    why_rows_on_sm90,
    why_rows_on_sm100,
)
from cute_kernels.plan.images_gather import multiplies_floats, plan_sm90_gather, search_space
from cute_kernels.plan.patch_embed import check_problem


@dataclass(frozen=True)
class Target:
    """One architecture of an operation.

    Attributes:
        config: class of its tunables.
        plan: ``(problem, config or None, arch, sm_count) -> Plan``; chooses where there is no config, and raises
            ValueError where a limit is broken.
        search: ``(problem, arch, sm_count)`` -> plans that are worth timing on a device, the most promising first.
        predict: the modelled time of a plan, where there is a model.
        others: kernels with tunables of their own, for problems that they take.
        takes: of another kernel: whether a problem is one of its.
        also: further classes of tunables that ``plan`` takes, of kernels for the same problems; without a configuration
            it chooses among all of them.
        why: says of a plan why the problem gets this kernel, where there are several.
        fallback: what problems get that none of these kernels takes, and every problem whose configuration asks for it.
    """

    config: type
    plan: Callable[[Any, Any, Arch, int], Plan]
    search: Callable[[Any, Arch, int], list[Any]] | None = None
    predict: Callable[[Any], Prediction | None] | None = None
    others: tuple[Target, ...] = ()
    takes: Callable[[Any], bool] = bool
    fallback: Target | None = None
    also: tuple[type, ...] = ()
    why: Callable[[Any], str] | None = None

    @property
    def configs(self) -> tuple[type, ...]:
        """All classes of tunables that ``plan`` takes."""
        return (self.config, *self.also)

    def of(self, problem: Any, config: Any = None) -> Target:
        """The kernel that a problem gets, with a configuration or None."""
        if self.fallback is not None:
            asked = isinstance(config, self.fallback.configs)
            if asked or (config is None and self.fallback.takes(problem)):
                return self.fallback
        return self.reading(problem)

    def reading(self, problem: Any) -> Target:
        """The kernel that a problem gets unless it falls back."""
        return next((other for other in self.others if other.takes(problem)), self)

    @property
    def kernels(self) -> tuple[Target, ...]:
        """Everything that is registered of the architecture."""
        return (self, *self.others, *(() if self.fallback is None else (self.fallback,)))


@dataclass(frozen=True)
class Planner:
    """An operation, as plans know it.

    Attributes:
        operation: its name, that of `Plan.operation`.
        problem: class of its problems.
        check: raises ValueError for a problem that no architecture could run.
        targets: by the name of the architecture.
    """

    operation: str
    problem: type
    check: Callable[[Any], None]
    targets: Mapping[str, Target]

    def target(self, arch: str) -> Target:
        """That of an architecture.

        Raises:
            NotImplementedError: there is none.
        """
        if arch not in self.targets:
            raise NotImplementedError(f"{self.operation} has kernels for {', '.join(self.targets)}, not for {arch}")
        return self.targets[arch]

    def arch_for(self, arch: str, config: Any) -> str:
        """The architecture that has a configuration, of those whose binaries a device of ``arch`` runs.

        A device of compute capability 9.0 runs those of sm_90a and of sm_90; ``arch`` where none of them has it.
        """
        capability = ARCHS[arch].compute_capability
        same = [name for name in self.targets if ARCHS[name].compute_capability == capability]
        kinds = {
            name: {kind for kernel in self.targets[name].kernels for kind in kernel.configs} for name in (arch, *same)
            if name in self.targets
        }  # fmt: skip
        return next((name for name, of_arch in kinds.items() if type(config) in of_arch), arch)

    @property
    def configs(self) -> dict[str, type]:
        """The class of each architecture's tunables; of several kernels, that of the first."""
        return {arch: target.config for arch, target in self.targets.items()}

    @property
    def kinds(self) -> dict[type, str]:
        """All classes of tunables, and the architecture of each, the first where there are several."""
        return {
            config: arch
            for arch, target in reversed(self.targets.items())
            for kernel in target.kernels
            for config in kernel.configs
        }

    @cached_property
    def codec(self) -> ConfigCodec:
        """How its configurations are written down."""
        return ConfigCodec(self.kinds)


MMA_SYNC = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
"""Architectures that the kernels of mma.sync are compiled for."""


def _of_any(target: Target) -> dict[str, Target]:
    return dict.fromkeys(MMA_SYNC, target)


PATCH_EMBED = Planner(
    "patch_embed",
    PatchEmbedProblem,
    check_problem,
    {
        "sm_100a": Target(
            Sm100PatchEmbedConfig, sm100_choice.plan_sm100, sm100_choice.search_space, sm100_choice.predict,
            also=(Sm100ResidentConfig,), why=sm100_choice.why,
        ),
        "sm_90a": Target(
            Sm90PatchEmbedConfig, patch_embed_sm90.plan_sm90, patch_embed_sm90.search_space, patch_embed_sm90.predict
        ),
        **_of_any(Target(Sm80PatchEmbedConfig, patch_embed_sm80.plan_sm80, patch_embed_sm80.search_space)),
    },
)  # fmt: skip

PATCH_EMBED_IMAGES = Planner(
    "patch_embed_images",
    PatchEmbedImagesProblem,
    check_images_problem,
    {
        "sm_90a": Target(
            Sm90ImagesConfig, images_sm90.plan_sm90_images, predict=images_sm90.predict,
            others=(Target(Sm90GatherConfig, plan_sm90_gather, search_space, takes=multiplies_floats),),
            fallback=Target(
                Sm90PatchEmbedConfig, plan_sm90_chain, takes=lambda problem: bool(why_rows_on_sm90(problem)),
            ),
        ),
        "sm_100a": Target(
            Sm100ImagesConfig, images_sm100.plan_sm100_images, predict=images_sm100.predict,
            fallback=Target(
                Sm100PatchEmbedConfig, plan_sm100_chain, takes=lambda problem: bool(why_rows_on_sm100(problem)),
                also=(Sm100ResidentConfig,),
            ),
        ),
        **_of_any(Target(
            Sm80ImagesConfig, images_sm80.plan_sm80_images, images_sm80.search_space,
            fallback=Target(
                Sm80PatchEmbedConfig, plan_sm80_chain, takes=lambda problem: bool(why_rows_on_sm80(problem)),
            ),
        )),
    },
)  # fmt: skip

GEMM = Planner(
    "gemm",
    GemmProblem,
    check_gemm_problem,
    {
        "sm_100a": Target(Sm100GemmConfig, gemm_sm100.plan_sm100_gemm, gemm_sm100.search_space),
        "sm_90a": Target(Sm90GemmConfig, gemm_sm90.plan_sm90_gemm, gemm_sm90.search_space),
        **_of_any(Target(Sm80GemmConfig, gemm_sm80.plan_sm80_gemm, gemm_sm80.search_space)),
    },
)

PLANNERS: dict[str, Planner] = {planner.operation: planner for planner in (PATCH_EMBED, PATCH_EMBED_IMAGES, GEMM)}
"""Every operation by its name. Commands, tuner and the codec of configurations read this, too."""
