"""Which rows make a tile of the SM100 kernel, where a configuration leaves that open.

In position order a tile is images at positions. A warp then adds one row of the table to its 32 rows, but tiles that
reach beyond the images or the positions are partly empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.plan.base import LANES, reject, require
from cute_kernels.plan.patch_embed.sm100_epilogue import Sm100Epilogue

Planned = Callable[[Sm100PatchEmbedConfig], Sm100Epilogue]


def positions_of(problem: PatchEmbedProblem) -> int:
    """Positions of an image, 1 where there are none."""
    return max(problem.table_rows, 1)


def allowed_positions(problem: PatchEmbedProblem, config: Sm100PatchEmbedConfig) -> tuple[int, ...]:
    """Values of ``tile_positions`` in position order: 32 images or more in a tile, no more positions than there are."""
    most = 128 * config.cta_group // LANES
    return tuple(p for p in (1, 2, 4, 8) if p <= most and p <= positions_of(problem))


def check_order(problem: PatchEmbedProblem, config: Sm100PatchEmbedConfig) -> None:
    """Fields of the order, before and after they are resolved."""
    require("order", config.order, ("auto", "position", "flat"), "which rows make a tile")
    positions = positions_of(problem)
    if config.order == "position" and problem.table_index:
        reject("order", config.order, "an index gives every row its own table row", "flat")
    if config.order == "position" and problem.m % positions:
        rule = f"position order needs whole images of {positions} positions, m = {problem.m}"
        reject("order", config.order, rule, "flat")
    legal = (0, *allowed_positions(problem, config))
    rule = f"a tile of {128 * config.cta_group} rows has 32 images or more, and an image has {positions} positions"
    if config.order == "flat":
        legal, rule = (0, 1), "in flat order the rows of a tile are consecutive ones"
    require("tile_positions", config.tile_positions, legal, rule)
    if config.order == "position" and config.table not in ("auto", "row_major"):
        reject("table", config.table, "in position order all rows of a warp have the same table row", "row_major")


def resolve(problem: PatchEmbedProblem, config: Sm100PatchEmbedConfig, planned: Planned) -> Sm100PatchEmbedConfig:
    """The configuration with order, positions of a tile and layout of the table filled in.

    Args:
        planned: the plan of a configuration without open fields.
    """
    table = "interleaved" if config.table == "auto" else config.table
    flat = dataclasses.replace(config, order="flat", tile_positions=max(config.tile_positions, 1), table=table)
    whole = problem.m % positions_of(problem) == 0 and not problem.table_index
    if config.order == "flat" or not whole:
        return flat
    counts = (config.tile_positions,) if config.tile_positions else allowed_positions(problem, config)
    position = min(
        (dataclasses.replace(config, order="position", tile_positions=p, table="row_major") for p in counts),
        key=lambda candidate: planned(candidate).tiles,
    )
    if config.order == "position" or config.tile_positions > 1:
        return position
    if problem.table_rows == 0 or config.table not in ("auto", "row_major"):
        return flat
    return min((position, flat), key=lambda candidate: shared_memory_clocks(planned(candidate)))


def tile_wavefronts(plan: Sm100Epilogue) -> int:
    """128-byte wavefronts of one CTA in a tile: TMA fill, operand reads, table, staging.

    All pass through the shared memory and L1 of the SM, one a clock.
    """
    operands = plan.k_blocks * plan.stage_bytes // 128
    staging = 0 if plan.config.store == "direct" else 2 * plan.cta_m * plan.tile_n * 2 // 128
    return 2 * operands + plan.table_lines + staging


def shared_memory_clocks(plan: Sm100Epilogue) -> int:
    """`tile_wavefronts` of the cluster with the most tiles.

    It is a count, not a prediction of time: what of it runs beside what is not documented.
    """
    return -(-plan.tiles // plan.clusters) * tile_wavefronts(plan)
