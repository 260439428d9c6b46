"""Strips of images as the N operand of tcgen05.mma, where they land."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute

from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.kernels.sm100.transposed.instruction import MMA_STEPS
from cute_kernels.kernels.strips import operand_layout, row_swizzle
from cute_kernels.plan import Sm100ImagesPlan
from cute_kernels.plan.patch_embed_images.base import STRIP_PATCH


@dataclass(frozen=True)
class Strips:
    """Operand stages that begin at ``strips`` in shared memory."""

    plan: Sm100ImagesPlan
    strips: cute.Pointer

    def fragments(self, tiled_mma: cute.TiledMma, first: int, columns: int) -> cute.Tensor:
        """Shared-memory descriptors ``[.., k step in block, block]`` of this CTA's patches of a part of the columns."""
        plan = self.plan
        count, first = columns // plan.cta_group, first // plan.cta_group
        if plan.pixel_bytes == 2:
            rows, blocks = STRIP_PATCH * plan.cta_patches, plan.config.stages * plan.config.stage_blocks
            layout = cute.make_layout(
                ((count, STRIP_PATCH), 1, MMA_STEPS, blocks), stride=((STRIP_PATCH, 1), 0, rows, MMA_STEPS * rows)
            )
            strips = self.strips + plan.pixel_bytes * STRIP_PATCH * first
            strips = cute.recast_ptr(strips, row_swizzle(plan.row_parts[0]), dtype=ELEMENT_TYPES[plan.problem.in_dtype])
            return tiled_mma.make_fragment_B(cute.make_tensor(strips, layout))
        whole = operand_layout(plan, plan.row_parts[0])
        chunks, step, block = whole.stride[1], 2 * whole.stride[1][1], whole.stride[2]
        layout = cute.make_layout(
            ((count, (STRIP_PATCH, 2)), 1, MMA_STEPS, whole.shape[2]), stride=((STRIP_PATCH, chunks), 0, step, block)
        )
        strips = self.strips + STRIP_PATCH * first
        return tiled_mma.make_fragment_B(cute.make_tensor(strips, layout))
