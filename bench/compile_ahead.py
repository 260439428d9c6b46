"""Compiles many plans into the disk cache, before anything is timed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable

from cute_kernels.compile import compile_plan
from cute_kernels.plan import Plan


def _compile(plan: Plan) -> None:
    compile_plan(plan)


def compile_all(plans: Iterable[Plan]) -> int:
    """Fills the disk cache with every plan's kernel, one process per core; returns their number."""
    plans = {plan.kernel_key: plan for plan in plans}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for _ in pool.imap_unordered(_compile, plans.values(), chunksize=2):
            pass
    return len(plans)
