"""`(Problem, config, architecture) -> Plan`: the only place that knows a hardware limit.

`make_plan` either raises `ValueError` naming the limit, the value that broke it and the nearest legal value, or returns
a `Plan` that every later stage may trust without checking anything again. Planning is pure Python: no GPU, no torch, no
CuTe DSL.
"""

from __future__ import annotations

from cute_kernels.config import Config, Problem, Sm90Config, TileConfig
from cute_kernels.plan.base import ARCHS, ITEMSIZE, LANES, VECTOR_BYTES, Arch, Plan, SmemRegion, check_problem, reject
from cute_kernels.plan.sm90 import Sm90Plan, plan_sm90
from cute_kernels.plan.sm100 import Sm100Plan, plan_sm100

__all__ = [
    "ARCHS",
    "CONFIG_TYPES",
    "ITEMSIZE",
    "LANES",
    "VECTOR_BYTES",
    "Arch",
    "Plan",
    "Sm90Plan",
    "Sm100Plan",
    "SmemRegion",
    "make_plan",
]

_PLANNERS = {"sm_100a": (TileConfig, plan_sm100), "sm_90a": (Sm90Config, plan_sm90)}

CONFIG_TYPES: dict[str, type[Config]] = {arch: kind for arch, (kind, _) in _PLANNERS.items()}
"""The class of each architecture's tunables."""


def make_plan(
    problem: Problem, config: Config | None = None, arch: str | None = None, *, sm_count: int | None = None
) -> Plan:
    """Checks every limit and returns the plan.

    Args:
        problem: what to compute.
        config: tunables of the architecture; the default configuration when None.
        arch: a key of `ARCHS`; that of the config's type when None, and sm_100a without a config.
        sm_count: multiprocessors of the device at hand; that of the architecture's usual part when None.

    Raises:
        ValueError: a limit is broken; the message names the limit, the value and the nearest legal value.
        TypeError: the config belongs to another architecture.
    """
    if arch is None:
        arch = next((name for name, (kind, _) in _PLANNERS.items() if isinstance(config, kind)), "sm_100a")
    if arch not in ARCHS:
        reject("arch", arch, f"supported architectures are {', '.join(ARCHS)}", next(iter(ARCHS)))
    kind, planner = _PLANNERS[arch]
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"config is {type(config).__name__}, {arch} takes {kind.__name__}")
    check_problem(problem)
    return planner(problem, config, ARCHS[arch], ARCHS[arch].sm_count if sm_count is None else sm_count)
