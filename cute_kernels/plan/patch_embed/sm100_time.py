"""What the SM100 kernels over rows do per tile, in the units that `cute_kernels.model.b200` has costs for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from cute_kernels.model import b200
from cute_kernels.model.prediction import Prediction
from cute_kernels.plan.base import ITEMSIZE
from cute_kernels.plan.patch_embed.sm100 import Sm100PatchEmbedPlan
from cute_kernels.plan.patch_embed.sm100_resident import Sm100ResidentPlan
from cute_kernels.plan.sm100_transposed_time import transposed_work

LINE = 128

RESOLUTION = 0.036
"""Of the model: the median error of a variant that was left out of the fit (docs/model.md). Times that are nearer to
each other than this do not tell plans apart."""

AnyPlan = TypeVar("AnyPlan", Sm100PatchEmbedPlan, Sm100ResidentPlan, "Sm100PatchEmbedPlan | Sm100ResidentPlan")


def quickest(
    plans: Sequence[AnyPlan], counted: Callable[[AnyPlan], float], is_legal: Callable[[AnyPlan], bool]
) -> AnyPlan | None:
    """Of the legal plans the one of least modelled time; of those that the model does not tell apart, the one of least
    counted work, and of equal ones the first.

    Args:
        plans: of one problem.
        counted: clocks of a launch by counted work, which knows what the model has no cost for: how often the tensor
            core reads its operands from shared memory.
        is_legal: asked in the order of modelled times, of as few plans as possible.

    Returns:
        None where no plan is legal.
    """
    near: list[AnyPlan] = []
    slowest = math.inf
    for time, _, plan in sorted((predict(plan).microseconds, i, plan) for i, plan in enumerate(plans)):
        if time > slowest:
            break
        if is_legal(plan):
            slowest = min(slowest, time * (1 + RESOLUTION))
            near.append(plan)
    order = {id(plan): i for i, plan in enumerate(plans)}
    return min(near, key=lambda plan: (counted(plan), order[id(plan)]), default=None)


def predict(plan: Sm100PatchEmbedPlan | Sm100ResidentPlan) -> Prediction:
    """The modelled time of a launch on a B200.

    The costs are fitted to variants that stream the weight; of a weight on chip the model has seen no time.
    """
    return b200.predict(resident_work(plan) if isinstance(plan, Sm100ResidentPlan) else streamed_work(plan))


def resident_work(plan: Sm100ResidentPlan) -> b200.TileWork:
    """Of the kernel whose weight stays on chip."""
    return transposed_work(plan, memory_bytes(plan), plan.fill_wavefronts)


def streamed_work(plan: Sm100PatchEmbedPlan) -> b200.TileWork:
    """Of the kernel that streams the weight; every warp of the epilogue has a quarter of the rows."""
    problem, config = plan.problem, plan.config
    out_lines = plan.cta_m * plan.tile_n * ITEMSIZE[problem.out_dtype] // LINE
    stores = {
        "tma": 2 * out_lines,  # staging is written and read by TMA
        "coalesced": 3 * out_lines,  # and stored by the warps, line by line
        "direct": 4 * out_lines,  # 32 bytes of a line at a time
    }[config.store]
    columns = max(end - begin for begin, end in plan.epilogue_columns)
    return b200.TileWork(
        tiles=-(-plan.tiles // plan.clusters),
        mma_clocks=plan.mma_clocks,
        operand_bytes=plan.k_blocks * plan.stage_bytes,
        lines=plan.table_lines + stores,
        partial_lines=4 * out_lines if config.store == "direct" else 0,
        waits=-(-columns // (config.tmem_load_width * config.tmem_loads)),
        columns=columns,
        memory_bytes=memory_bytes(plan),
    )  # fmt: skip


def memory_bytes(plan: Sm100PatchEmbedPlan | Sm100ResidentPlan) -> int:
    """What a launch cannot do without: both operands once, the table, the output."""
    problem = plan.problem
    operands = (problem.m + problem.n) * problem.k * ITEMSIZE[problem.in_dtype]
    table = problem.table_rows * problem.n * ITEMSIZE[plan.table_dtype]
    return operands + table + problem.m * problem.n * ITEMSIZE[problem.out_dtype]
