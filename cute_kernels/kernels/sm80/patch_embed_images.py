"""The patch embed of images by ``mma.sync``: rows of a CTA's tile are patches, which it copies out of the images."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels import dsl
from cute_kernels.kernels import ptx
from cute_kernels.kernels.gemm import finish
from cute_kernels.kernels.host import ELEMENT_TYPES
from cute_kernels.kernels.sm80.epilogue import (
    lane_blocks,
    lane_column,
    lane_row,
    lane_rows,
    lane_sums,
    launch,
    load_vector,
    run,
    store_vector,
)
from cute_kernels.kernels.sm80.load import Load, rows_load
from cute_kernels.kernels.sm80.mainloop import Warp
from cute_kernels.kernels.sm80.patch_load import Grid, patch_load
from cute_kernels.plan import Sm80ImagesPlan

HIGH = 256.0
"""Weight of the high term of two."""


@dataclass(frozen=True)
class ImagesTiles:
    """Tiles of which those of neighbouring features follow each other; sizes and operands of a launch."""

    plan: Sm80ImagesPlan
    images: cute.Pointer
    weight: cute.Pointer
    scale: cute.Pointer | None
    table: cute.Pointer | None
    out: cute.Pointer
    grid: Grid
    n: Int32
    columns: Int32
    n_tiles: Int32

    def loads(self, tile: Int32) -> tuple[Load, Load]:
        """Patches, and rows of the weight."""
        row, column = self._place(tile)
        k_bytes = Int32(self.plan.k_bytes)
        return (
            patch_load(self.plan, self.images, row, self.grid),
            rows_load(self.plan, self.weight, column, self.columns, k_bytes, of_b=True),
        )

    def _place(self, tile: Int32) -> tuple[Int32, Int32]:
        """First row and column of the product."""
        c = self.plan.config
        return tile // self.n_tiles * c.tile_m, tile % self.n_tiles * c.tile_n

    @cute.jit
    def store(self, sums: cute.Tensor, warp: Warp, tile: Int32) -> None:
        """Scales, adds the table, rounds and stores."""
        plan, wide, grid, n = self.plan, self.plan.lane_columns, self.grid, self.n
        row, column = self._place(tile)
        dtype = ELEMENT_TYPES[plan.problem.out_dtype]
        for block in cutlass.range_constexpr(len(lane_blocks(plan)) // plan.terms):
            n_at = column // plan.terms + self._column(warp, block)
            if n_at < n:
                scales = None
                if cutlass.const_expr(self.scale is not None):
                    scales = load_vector(self.scale, n_at, wide, Float32)
                for eighth in cutlass.range_constexpr(len(lane_rows(plan))):
                    image, position = grid.patch(plan, row + lane_row(warp, eighth))
                    if image < grid.batch:
                        at = position * n + n_at
                        addend = None
                        if cutlass.const_expr(self.table is not None):
                            one = plan.problem.table_rows == 1
                            addend = load_vector(self.table, n_at if cutlass.const_expr(one) else at, wide, Float32)
                        values = self._scaled(sums, block, eighth, scales, addend)
                        rounded = finish(values, None if scales is not None else addend, "none", dtype)
                        store_vector(self.out, Int64(image) * Int64(grid.positions * n) + Int64(at), rounded)

    def _column(self, warp: Warp, block: int) -> Int32:
        """A lane's first feature of a block, or of a block of high terms and the block of low ones behind it."""
        if self.plan.terms == 1:
            return lane_column(warp, block)
        inside = lane_column(warp, 2 * block) - warp.column - 2 * block * self.plan.terms_block
        return warp.column // 2 + block * self.plan.terms_block + inside

    def _scaled(
        self, sums: cute.Tensor, block: int, eighth: int, scales: cute.Tensor | None, addend: cute.Tensor | None
    ) -> cute.Tensor:
        """A lane's sums of one row; of integers times their scales, with what is added to them."""
        plan = self.plan
        if scales is None:
            return lane_sums(sums, plan, block, eighth)
        values = lane_sums(sums, plan, block * plan.terms, eighth)
        if plan.terms == 2:
            low = lane_sums(sums, plan, 2 * block + 1, eighth)
            for e in range(plan.lane_columns):
                values[e] = ptx.fma_rn_f32(values[e], Float32(HIGH), low[e])
        for e in range(plan.lane_columns):
            if addend is None:
                values[e] = ptx.mul_rn_f32(values[e], scales[e])
            else:
                values[e] = ptx.fma_rn_f32(values[e], scales[e], addend[e])
        return values


class Sm80ImagesKernel:
    """Host entry and kernel for one plan. Batch, sizes of the images and features are launch arguments."""

    def __init__(self, plan: Sm80ImagesPlan) -> None:
        self.plan = plan

    @cute.jit
    def __call__(
        self,
        images_pointer: cute.Pointer,
        weight_pointer: cute.Pointer,
        scale_pointer: cute.Pointer | None,
        table_pointer: cute.Pointer | None,
        out_pointer: cute.Pointer,
        batch: Int32,
        height: Int32,
        width: Int32,
        n: Int32,
        clusters: Int32,
        stream,
    ) -> None:
        """Launches ``clusters`` CTAs on ``stream``."""
        patch = self.plan.problem.patch
        grid = Grid(batch, height, width, width // patch, height // patch * (width // patch))
        kernel = self.kernel(images_pointer, weight_pointer, scale_pointer, table_pointer, out_pointer, grid, n)
        launch(kernel, self.plan, clusters, stream)

    @cute.kernel
    def kernel(
        self, images: cute.Pointer, weight: cute.Pointer, scale: cute.Pointer | None, table: cute.Pointer | None,
        out: cute.Pointer, grid: Grid, n: Int32,
    ) -> None:  # fmt: skip
        plan, c = self.plan, self.plan.config
        columns = n
        if cutlass.const_expr(plan.terms == 2):
            columns = cute.ceil_div(n, plan.terms_block) * (2 * plan.terms_block)
        n_tiles = cute.ceil_div(columns, c.tile_n)
        rows = cute.ceil_div(grid.batch, c.tile_images) * c.tile_images * grid.positions
        tiles = ImagesTiles(
            plan=plan,
            images=images,
            weight=weight,
            scale=scale,
            table=table,
            out=out,
            grid=grid,
            n=n,
            columns=columns,
            n_tiles=n_tiles,
        )
        run(plan, tiles, cute.ceil_div(rows, c.tile_m) * n_tiles, Int32(plan.k_blocks))


dsl.name_kernel(Sm80ImagesKernel.kernel, "patch_embed_images_sm80")
