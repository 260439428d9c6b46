"""What is registered of an operation: its problem, and for every architecture tunables and planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cute_kernels.config_codec import ConfigCodec
from cute_kernels.model.prediction import Prediction
from cute_kernels.plan.base import Arch, Plan


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

    @property
    def configs(self) -> dict[str, type]:
        """The class of each architecture's tunables; of several kernels, that of the first."""
        return {arch: target.config for arch, target in self.targets.items()}

    @property
    def kinds(self) -> dict[type, str]:
        """All classes of tunables, and the architecture of each."""
        return {
            config: arch
            for arch, target in self.targets.items()
            for kernel in target.kernels
            for config in kernel.configs
        }

    @cached_property
    def codec(self) -> ConfigCodec:
        """How its configurations are written down."""
        return ConfigCodec(self.kinds)
