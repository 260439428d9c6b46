"""Strategies for hypothesis: configurations of this package's kernels."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from cute_kernels.plan import PLANNERS, make_plan


def configurations(problem: Any, arch: str) -> SearchStrategy[Any]:
    """Legal configurations of this package's kernels for a problem; a failure is reduced towards the plan's own choice.

    Args:
        problem: of any operation.
        arch: target architecture.

    Raises:
        NotImplementedError, ValueError: as of `cute_kernels.plan.make_plan`.
    """
    usual = make_plan(problem, arch=arch)
    plans = PLANNERS[usual.operation].search(problem, usual.arch, usual.sm_count)
    return st.sampled_from(list(dict.fromkeys(plan.config for plan in (usual, *plans))))
