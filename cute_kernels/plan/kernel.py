"""A kernel as plans know it: its tunables, its planner, which problems get it, what a tuner tries, a model of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cute_kernels.model.prediction import Prediction
from cute_kernels.plan.base import Arch, Plan
from cute_kernels.plan.fields import Fields


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel of an operation on an architecture.

    Attributes:
        config: class of its tunables.
        plan: ``(problem, config, arch, sm_count) -> Plan``; chooses the fields that are open, and raises ValueError
            where a limit is broken.
        fields: legal values of its tunables.
        choose: ``(problem, arch, sm_count)`` -> the configuration that a problem gets; it may leave fields open.
        search: ``(problem, arch, sm_count)`` -> plans that are worth timing on a device, the most promising first;
            none of a problem that it cannot compute.
        takes: why a problem does not get this kernel unless its configuration asks for it; empty where it does.
        predict: the modelled time of a plan.
    """

    config: type
    plan: Callable[[Any, Any, Arch, int], Plan]
    fields: Fields
    choose: Callable[[Any, Arch, int], Any]
    search: Callable[[Any, Arch, int], list[Any]]
    takes: Callable[[Any, Arch], str] = lambda problem, arch: ""
    predict: Callable[[Any], Prediction | None] | None = None
