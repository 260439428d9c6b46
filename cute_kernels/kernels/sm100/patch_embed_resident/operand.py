"""Rows of ``x`` as the N operand of tcgen05.mma: how TMA fills a stage, and how MMAs read it."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.kernels.sm100.transposed.instruction import MMA_STEPS
from cute_kernels.plan import Sm100ResidentPlan


@dataclass(frozen=True)
class Rows:
    """Operand stages that begin at ``stages`` in shared memory: 128 bytes of a row after another, SWIZZLE_128B."""

    plan: Sm100ResidentPlan
    stages: cute.Pointer

    def fragments(self, tiled_mma: cute.TiledMma, first: int, columns: int) -> cute.Tensor:
        """Shared-memory descriptors ``[.., k step in block, block]`` of this CTA's rows of a part of the columns."""
        plan = self.plan
        count, first = columns // plan.cta_group, first // plan.cta_group
        step, blocks = plan.tile_k // MMA_STEPS, plan.config.stages * plan.config.stage_blocks
        layout = cute.make_layout(
            ((count, step), 1, MMA_STEPS, blocks), stride=((plan.tile_k, 1), 0, step, plan.tile_k * plan.cta_rows)
        )
        # A part begins with a multiple of 8 rows, the 1024 bytes after which the swizzle repeats.
        rows = cute.recast_ptr(
            self.stages + first * plan.k_block_bytes, cute.make_swizzle(3, 4, 3), dtype=element_type(plan)
        )
        return tiled_mma.make_fragment_B(cute.make_tensor(rows, layout))


def element_type(plan: Sm100ResidentPlan) -> type:
    return ELEMENT_TYPES[plan.problem.in_dtype]


def rows_box(plan: Sm100ResidentPlan) -> tuple[int, int, int]:
    """``[images, 128 bytes of K, positions]`` of one CTA: TMA puts its rows one after another, images fastest."""
    return (plan.cta_images, plan.tile_k, plan.config.tile_positions)


def box_layout(plan: Sm100ResidentPlan, blocks: int) -> cute.ComposedLayout:
    """Boxes as TMA fills them, ``[images, 128 bytes of K, positions, blocks]``; no last mode for a single block."""
    atom = sm100_utils.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, element_type(plan))
    layout = cute.tile_to_shape(atom, (*rows_box(plan), blocks), order=(0, 1, 2, 3))
    return layout if blocks > 1 else cute.slice_(layout, (None, None, None, 0))


def row_boxes(
    plan: Sm100ResidentPlan, tma: tuple[cute.CopyAtom, cute.Tensor], stages: cute.Pointer
) -> tuple[cute.Tensor, cute.Tensor]:
    """What the load warp copies: ``[box, row block, k_block, position block]`` to ``[box, block]``.

    Args:
        plan: what is loaded.
        tma: atom, and TMA view ``[images, K, positions]`` of ``x``.
        stages: buffers in shared memory.
    """
    layout = box_layout(plan, plan.config.stages * plan.config.stage_blocks)
    boxes = cute.make_tensor(cute.recast_ptr(stages, layout.inner, dtype=element_type(plan)), layout.outer)
    rows = cute.local_tile(tma[1], rows_box(plan), (None, None, None))
    blocks, source = cpasync.tma_partition(
        tma[0], 0, cute.make_layout(1), cute.group_modes(boxes, 0, 3), cute.group_modes(rows, 0, 3)
    )
    return source, blocks
