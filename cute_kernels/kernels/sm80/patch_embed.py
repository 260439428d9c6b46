"""The patch embed of rows by ``mma.sync``."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cute_kernels.dsl import compiling
from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue import Scales, scale_add_round, scales_of
from cute_kernels.kernels.host import Host, Operands
from cute_kernels.kernels.sm80 import epilogue
from cute_kernels.kernels.sm80.load import Load, rows_load
from cute_kernels.kernels.sm80.mainloop import FeatureTiles, Warp
from cute_kernels.kernels.tiles import TableRows, index_view
from cute_kernels.plan.base import ITEMSIZE
from cute_kernels.plan.patch_embed_sm80 import Sm80PatchEmbedPlan


@dataclass(frozen=True)
class RowsTiles(FeatureTiles):
    """Tiles of rows; sizes and operands of a launch."""

    plan: cutlass.Constexpr[Sm80PatchEmbedPlan]
    x: cute.Pointer
    weight: cute.Pointer
    table: cute.Pointer | None
    positions: TableRows
    out: cute.Pointer
    scales: Scales
    m: Int32
    n: Int32
    k: Int32

    @property
    def k_bytes(self) -> Int32:
        return self.k * ITEMSIZE[self.plan.multiplied]

    def loads(self, tile: Int32) -> tuple[Load, Load]:
        """Rows of ``x`` and of the weight."""
        row, column = self._place(tile)
        return (
            rows_load(self.plan, self.x, row, self.m, self.k_bytes, of_b=False),
            rows_load(self.plan, self.weight, column, self.n, self.k_bytes, of_b=True),
        )

    @cute.jit
    def store(self, sums: cute.Tensor, warp: Warp, tile: Int32) -> None:
        """Scales, adds the table, rounds and stores."""
        plan, m, n = self.plan, self.m, self.n
        row, column = self._place(tile)
        contract, adds_bf16 = plan.config.epilogue, plan.arch.compute_capability >= (9, 0)
        eights = epilogue.lane_rows(plan)
        for block in cutlass.range_constexpr(len(epilogue.lane_blocks(plan))):
            n_at = column + epilogue.lane_column(warp, block)
            if n_at < n:
                features = self._features(n_at)
                for begin in cutlass.range_constexpr(0, len(eights), epilogue.ROWS_AHEAD):
                    several = eights[begin : begin + epilogue.ROWS_AHEAD]
                    places = [row + epilogue.lane_row(warp, eighth) for eighth in several]
                    inside = [cutlass.min(m_at, m - 1) for m_at in places]
                    addends = [self._addend(m_at, n_at) for m_at in inside]
                    factors = [self._scale(features, m_at) for m_at in inside]
                    for i in cutlass.range_constexpr(len(several)):
                        values = epilogue.lane_sums(sums, plan, block, several[i])
                        rounded = scale_add_round(values, addends[i], factors[i], contract, False, adds_bf16)
                        if places[i] < m:
                            epilogue.store_vector(self.out, Int64(places[i]) * Int64(n) + Int64(n_at), rounded)

    def _addend(self, m_at: Int32, n_at: Int32) -> cute.Tensor | None:
        """Bias and position that are added to a lane's columns of a row."""
        if self.table is None:
            return None
        entry = Float32 if self.plan.config.epilogue == "f32" else BFloat16
        return epilogue.load_vector(self.table, self.positions.of(m_at) * self.n + n_at, self.plan.lane_columns, entry)

    def _features(self, n_at: Int32) -> list[Float32] | None:
        """Factors of a lane's columns, with the call's number unless rows have it."""
        scales = self.scales
        if scales.features is None:
            return None
        wide = self.plan.lane_columns
        loaded = epilogue.load_vector(scales.features.iterator, n_at, wide, Float32)
        factors = [loaded[e] for e in range(wide)]
        return factors if scales.call is None else [ptx.mul_rn_f32(factor, scales.call) for factor in factors]

    def _scale(self, features: list[Float32] | None, m_at: Int32) -> Float32 | cute.Tensor:
        """One multiplier for a lane's columns of a row, or registers of one for each."""
        scales = self.scales
        if features is None:
            return scales.call if scales.rows is None else scales.row(m_at)
        own = cute.make_rmem_tensor(len(features), Float32)
        factor = None if scales.rows is None else scales.rows[m_at]
        for e, feature in enumerate(features):
            own[e] = feature if factor is None else ptx.mul_rn_f32(factor, feature)
        return own


class Sm80PatchEmbedKernel(Host):
    """Host entry and kernel for one plan. Sizes are launch arguments."""

    plan: Sm80PatchEmbedPlan

    @cute.jit
    def __call__(self, o: Operands, stream: Any) -> None:
        """Launches ``clusters`` CTAs on ``stream``."""
        by_pointer = self.plan.problem.scale_source == "pointer"
        tiles = RowsTiles(
            plan=self.plan,
            x=o.x,
            weight=o.weight,
            table=o.table,
            positions=TableRows(o.table_rows, index_view(o.index, o.m), o.m),
            out=o.out,
            scales=scales_of(by_pointer, o.scale, o.row_scale, o.feature_scale, o.m, o.n),
            m=o.m,
            n=o.n,
            k=o.k,
        )
        epilogue.launch(self.kernel(tiles), self.plan, o.clusters, stream)

    @cute.kernel
    def kernel(self, tiles: RowsTiles) -> None:
        c = self.plan.config
        m_tiles, n_tiles, k_bytes = cute.ceil_div(tiles.m, c.tile_m), tiles.n_tiles, tiles.k_bytes
        tiles = replace(tiles, scales=tiles.scales.loaded())
        epilogue.run(self.plan, tiles, m_tiles * n_tiles, cute.ceil_div(k_bytes, c.row_bytes))


compiling.name_kernel(Sm80PatchEmbedKernel.kernel, "patch_embed_sm80")
