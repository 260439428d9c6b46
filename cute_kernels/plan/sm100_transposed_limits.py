"""Limits that the plans of `Sm100TransposedPlan` share, and what they do where a configuration leaves it open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from cute_kernels.plan.base import reject, round_up
from cute_kernels.plan.sm100_transposed import ADDRESS_BYTES, BARRIER_BYTES, COLUMN_STEP, Sm100TransposedPlan

AnyPlan = TypeVar("AnyPlan", bound=Sm100TransposedPlan)

TILE_CLOCKS = 400
"""What a tile costs besides: signals between its roles. An estimate."""

_DRAIN_CLOCKS = 1000
"""From the last MMA to the last store of an accumulator that nothing else hides. An estimate."""


def check_parts(plan: Sm100TransposedPlan) -> None:
    """Every part is a legal N, and whole loads of an epilogue warp."""
    config, step = plan.config, COLUMN_STEP * plan.cta_group
    if config.part_columns % step or not step <= config.part_columns <= plan.columns:
        rule = f"N of an MMA of {plan.cta_group} CTAs is a multiple of {step}, and the tile has {plan.columns} columns"
        nearest = min(max(round_up(config.part_columns, step), step), plan.columns)
        reject("part_columns", config.part_columns, rule, nearest)
    for _, columns in plan.parts:
        if columns // plan.cta_group % config.tmem_load_width:
            rule = f"a load's columns are rows of one CTA, and a part has {columns // plan.cta_group} of each"
            reject("tmem_load_width", config.tmem_load_width, rule, COLUMN_STEP)


def check_stages(plan: Sm100TransposedPlan, name: str, value: int, smaller: Callable[[], int]) -> None:
    """Barriers and shared memory; all parts of a tile read its stages, which the last part frees.

    Args:
        plan: to be checked.
        name, value: what to report where two stages do not fit: a field of the tile's shape.
        smaller: its nearest legal value.
    """
    config, arch = plan.config, plan.arch
    fixed = plan.smem_bytes - config.stages * plan.stage_bytes
    room = (arch.smem_bytes - fixed) // plan.stage_bytes
    slots = (plan.barrier_bytes - ADDRESS_BYTES) // BARRIER_BYTES
    most = min(room, (slots - (plan.used_barrier_bytes - ADDRESS_BYTES) // BARRIER_BYTES) // 2 + config.stages)
    if config.stages > room:
        rule = (
            f"{config.stages} stages of {plan.stage_bytes:,} B and {fixed:,} B beside them make {plan.smem_bytes:,} B "
            f"of shared memory, the limit is {arch.smem_bytes:,} B"
        )
        if most >= 2:
            reject("stages", config.stages, rule, most)
        rule = f"{rule}, and two stages are needed"
        if config.stage_blocks == 2 and plan.stage_bytes <= arch.smem_bytes - fixed:
            reject("stage_blocks", config.stage_blocks, rule, 1)
        reject(name, value, rule, smaller())
    if config.stages > most:
        reject("stages", config.stages, f"the {plan.barrier_bytes:,} B of barriers hold those of {most} stages", most)
    if len(plan.parts) > 1 and config.stages < plan.tile_stages:
        rule = f"the parts of a tile read its {plan.tile_stages} stages in turn, and the last part frees them"
        if plan.tile_stages <= most:
            reject("stages", config.stages, rule, plan.tile_stages)
        reject("part_columns", config.part_columns, f"{rule}; {most} fit", plan.columns)


def is_legal(plan: AnyPlan, check: Callable[[AnyPlan], None]) -> bool:
    """Whether a check does not refuse it."""
    try:
        check(plan)
    except ValueError:
        return False
    return True


def complete(plan: AnyPlan) -> AnyPlan:
    """With accumulators, parts and stages that the configuration leaves open.

    Two accumulators where tensor memory holds them; otherwise one in two parts, of which the first is drained while the
    MMAs of the second run.
    """
    config = plan.config
    accumulators = config.accumulators or (2 if 2 * plan.columns + plan.weight_columns <= plan.arch.tmem_columns else 1)
    step = COLUMN_STEP * plan.cta_group
    half = round_up(-(-plan.columns // 2), max(step, config.tmem_load_width * plan.cta_group))
    parts = config.part_columns or (plan.columns if accumulators > 1 or half >= plan.columns else half)
    config = dataclasses.replace(config, accumulators=accumulators, part_columns=parts, stages=config.stages or 2)
    resolved = dataclasses.replace(plan, config=config)
    if not plan.config.stages:
        room = 2 + (plan.arch.smem_bytes - resolved.smem_bytes) // resolved.stage_bytes
        stages = max(2, min(room, 2 * resolved.tile_stages))
        resolved = dataclasses.replace(resolved, config=dataclasses.replace(config, stages=stages))
    return resolved


def launch_clocks(plan: Sm100TransposedPlan) -> float:
    """Clocks of a launch as far as shapes tell them apart: counted work by published rates, no measured time.

    The tensor core's products, or the wavefronts of shared memory, whichever take longer. Tiles that a cluster has one
    after the other, and rounds of clusters that the device does not hold at once.
    """
    clocks = max(plan.mma_clocks, plan.wavefronts + plan.table_wavefronts) + TILE_CLOCKS
    if plan.config.accumulators * len(plan.parts) == 1:
        clocks += _DRAIN_CLOCKS
    tiles = -(-plan.tiles * plan.groups // plan.clusters)
    rounds = -(-plan.clusters * plan.ctas // plan.sm_count)
    return tiles * rounds * clocks
