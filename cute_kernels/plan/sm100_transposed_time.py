"""What SM100 kernels of the transposed product do per tile, in units that `cute_kernels.model.b200` has costs for."""

from __future__ import annotations

from cute_kernels.model import b200
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan


def transposed_work(plan: Sm100TransposedPlan, memory_bytes: int, once_lines: float = 0.0) -> b200.TileWork:
    """Of the busiest CTA; every warp of the epilogue has a quarter of the features.

    Args:
        plan: of rows or of images.
        memory_bytes: that a launch cannot do without.
        once_lines: of bringing the weight to where it stays.
    """
    return b200.TileWork(
        tiles=-(-plan.tiles * plan.groups // plan.clusters) * -(-plan.clusters * plan.ctas // plan.sm_count),
        mma_clocks=plan.mma_clocks,
        operand_bytes=plan.tile_stages * plan.stage_bytes,
        lines=plan.table_wavefronts + plan.staging_wavefronts,
        partial_lines=0,
        waits=sum(-(-columns // plan.config.tmem_load_width) for _, columns in plan.parts),
        columns=plan.columns,
        memory_bytes=memory_bytes,
        once_lines=once_lines,
    )
