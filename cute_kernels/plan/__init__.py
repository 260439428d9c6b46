"""`(problem, configuration, architecture) -> Plan`: which kernel a problem gets, its tiles, and every limit.

`make_plan` either raises `ValueError` naming the limit, the value that broke it and the nearest legal value, or returns
a `Plan` that every later stage may trust without checking anything again. Planning is pure Python: no GPU, no torch, no
CuTe DSL. `prediction` and `b200` model the time of a launch (docs/model.md).
"""

from cute_kernels.plan.base import ARCHS, Plan, arch_of
from cute_kernels.plan.registry import PLANNERS, Planner, candidate_plans, choose, make_plan, predict

__all__ = ["ARCHS", "PLANNERS", "Plan", "Planner", "arch_of", "candidate_plans", "choose", "make_plan", "predict"]
