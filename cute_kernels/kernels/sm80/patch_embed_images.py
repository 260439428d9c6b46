"""The patch embed of images by ``mma.sync``: rows of a CTA's tile are patches, which it copies out of the images."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.dsl import compiling
from cute_kernels.kernels.epilogue import scale_add
from cute_kernels.kernels.gemm import finish
from cute_kernels.kernels.host import ELEMENT_TYPES, Host, Operands
from cute_kernels.kernels.sm80 import epilogue
from cute_kernels.kernels.sm80.instructions import cp_async_16
from cute_kernels.kernels.sm80.load import Load, rows_load, shared_base, team_thread
from cute_kernels.kernels.sm80.mainloop import FeatureTiles, Warp
from cute_kernels.kernels.sm80.patch_load import Grid, grid_of, patch_load
from cute_kernels.plan.images_sm80 import Sm80ImagesPlan


@dataclass(frozen=True)
class ImagesTiles(FeatureTiles):
    """Tiles of patches; sizes and operands of a launch."""

    plan: cutlass.Constexpr[Sm80ImagesPlan]
    images: cute.Pointer
    weight: cute.Pointer
    scale: cute.Pointer | None
    table: cute.Pointer | None
    out: cute.Pointer
    grid: Grid
    n: Int32

    def loads(self, tile: Int32) -> tuple[Load, Load]:
        """Patches, and rows of the weight."""
        row, column = self._place(tile)
        k_bytes = Int32(self.plan.k_bytes)
        return (
            patch_load(self.plan, self.images, row, self.grid),
            rows_load(self.plan, self.weight, column, self.n, k_bytes, of_b=True),
        )

    @cute.jit
    def store(self, sums: cute.Tensor, warp: Warp, tile: Int32) -> None:
        """Scales, adds the table, rounds and stores."""
        plan, grid, n = self.plan, self.grid, self.n
        row, column = self._place(tile)
        dtype = ELEMENT_TYPES[plan.problem.out_dtype]
        eights = epilogue.lane_rows(plan)
        first = (row + warp.row) // 8
        patches = [grid.patch(plan, first + eighth, warp.lane // epilogue.LANES_ALONG) for eighth in eights]
        for block in cutlass.range_constexpr(len(epilogue.lane_blocks(plan))):
            inside = epilogue.lane_column(warp, block)
            n_at = column + inside
            if n_at < n:
                scales = self._scales(n_at, inside)
                for begin in cutlass.range_constexpr(0, len(eights), epilogue.ROWS_AHEAD):
                    several = eights[begin : begin + epilogue.ROWS_AHEAD]
                    addends = [self._addend(warp.row // 8 + e, patches[e][1], n_at, inside) for e in several]
                    for i in cutlass.range_constexpr(len(several)):
                        image, position = patches[several[i]]
                        values = self._scaled(sums, block, several[i], scales, addends[i])
                        rounded = finish(values, None if scales is not None else addends[i], "none", dtype)
                        if image < grid.batch:
                            place = Int64(image * grid.positions.divisor + position) * Int64(n) + Int64(n_at)
                            epilogue.store_vector(self.out, place, rounded)

    @cute.jit
    def begin(self, tile: Int32) -> None:
        """Copies the tile's rows of the table, and the scales of its features behind them."""
        plan, n = self.plan, self.n
        if cutlass.const_expr(plan.copies_table):
            row, column = self._place(tile)
            thread = team_thread(plan)
            pieces = plan.config.tile_n // 4  # of 16 bytes in a row
            count = plan.tile_positions * pieces
            target = self._shared_table() + thread * 16
            for first in cutlass.range_constexpr(0, count, plan.team_threads):
                piece = first + thread
                n_at = column + piece % pieces * 4
                _, position = self.grid.patch(plan, row // 8 + piece // pieces, Int32(0))
                source = self.table.toint() + (Int64(position) * Int64(n) + Int64(n_at)) * 4
                cp_async_16(target, first * 16, source, Int32(n_at < n) * Int32(piece < count))
            if cutlass.const_expr(self.scale is not None):
                n_at = column + thread * 4
                source = self.scale.toint() + Int64(n_at) * 4
                cp_async_16(target, count * 16, source, Int32(n_at < n) * Int32(thread < pieces))

    def _shared_table(self) -> Int32:
        """Address of ``[tile_positions, tile_n]``, and one row more with the scales."""
        return shared_base(self.plan) + self.plan.ring_bytes

    def _scales(self, n_at: Int32, inside: Int32) -> cute.Tensor | None:
        """Scales of a lane's features from ``n_at`` on, which are from ``inside`` on in the tile."""
        plan = self.plan
        if self.scale is None:
            return None
        if plan.copies_table:
            return self._shared(plan.tile_positions, inside)
        return epilogue.load_vector(self.scale, n_at, plan.lane_columns, Float32)

    def _addend(self, place: Int32, position: Int32, n_at: Int32, inside: Int32) -> cute.Tensor | None:
        """Bias and position that are added to a lane's sums of one row, of the tile's position number ``place``."""
        plan = self.plan
        if self.table is None:
            return None
        if plan.copies_table:
            return self._shared(place, inside)
        one = plan.problem.table_rows == 1
        return epilogue.load_vector(self.table, n_at if one else position * self.n + n_at, plan.lane_columns, Float32)

    def _shared(self, place: Int32 | int, inside: Int32) -> cute.Tensor:
        plan = self.plan
        offset = Int32(place * plan.config.tile_n) + inside
        table = cute.make_ptr(Float32, self._shared_table(), cute.AddressSpace.smem, assumed_align=128)
        return epilogue.load_vector(table, offset, plan.lane_columns, Float32)

    def _scaled(
        self, sums: cute.Tensor, block: int, eighth: int, scales: cute.Tensor | None, addend: cute.Tensor | None
    ) -> cute.Tensor:
        """A lane's sums of one row; of integers times their scales, with what is added to them."""
        plan = self.plan
        values = epilogue.lane_sums(sums, plan, block, eighth)
        if scales is None:
            return values
        for e in range(plan.lane_columns):
            (values[e],) = scale_add((values[e],), (scales[e],), None if addend is None else (addend[e],))
        return values


class Sm80ImagesKernel(Host):
    """Host entry and kernel for one plan. Batch, sizes of the images and features are launch arguments."""

    plan: Sm80ImagesPlan

    @cute.jit
    def __call__(self, o: Operands, stream: Any) -> None:
        """Launches ``clusters`` CTAs on ``stream``."""
        tiles = ImagesTiles(
            plan=self.plan,
            images=o.images,
            weight=o.weight,
            scale=o.scale,
            table=o.table,
            out=o.out,
            grid=grid_of(o.batch, o.height, o.width, self.plan.problem.patch),
            n=o.n,
        )
        epilogue.launch(self.kernel(tiles), self.plan, o.clusters, stream)

    @cute.kernel
    def kernel(self, tiles: ImagesTiles) -> None:
        c, grid, n_tiles = self.plan.config, tiles.grid, tiles.n_tiles
        rows = cute.ceil_div(grid.batch, c.tile_images) * c.tile_images * grid.positions.divisor
        epilogue.run(self.plan, tiles, cute.ceil_div(rows, c.tile_m) * n_tiles, Int32(self.plan.k_blocks))


compiling.name_kernel(Sm80ImagesKernel.kernel, "patch_embed_images_sm80")
