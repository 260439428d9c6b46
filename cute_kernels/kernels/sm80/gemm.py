"""The dense GEMM by ``mma.sync``: tiles of all batches, in turn."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.dsl import compiling
from cute_kernels.kernels.gemm import Addends, bias_view, biases, finish, gemm_addends, multipliers, row_pitch
from cute_kernels.kernels.host import ELEMENT_TYPES, Host, Operands
from cute_kernels.kernels.sm80 import epilogue
from cute_kernels.kernels.sm80.instructions import any_of_cta, count_arrival
from cute_kernels.kernels.sm80.load import Load, rows_load
from cute_kernels.kernels.sm80.mainloop import Tiles, Warp
from cute_kernels.kernels.tiles import GroupedOrder
from cute_kernels.plan.base import ITEMSIZE
from cute_kernels.plan.gemm_sm80 import Sm80GemmPlan


@dataclass(frozen=True)
class GemmTiles(Tiles):
    """Tiles of all batches, in groups of rows of tiles; sizes and operands of a launch."""

    plan: cutlass.Constexpr[Sm80GemmPlan]
    a: cute.Pointer
    b: cute.Pointer
    bias: cute.Pointer | None
    addends: Addends
    out: cute.Pointer
    arrivals: cute.Pointer | None
    partials: cute.Pointer | None
    m: Int32
    n: Int32
    k: Int32
    batches: Int32

    @property
    def k_bytes(self) -> Int32:
        return self.k * ITEMSIZE[self.plan.multiplied]

    @property
    def order(self) -> GroupedOrder:
        c = self.plan.config
        tiles = cute.ceil_div(self.m, c.tile_m), cute.ceil_div(self.n, c.tile_n)
        return GroupedOrder(*tiles, self.batches, c.group_m, Int32(0), Int32(1))

    def loads(self, tile: Int32) -> tuple[Load, Load]:
        """Rows of ``a`` and of ``b``."""
        plan, k_bytes = self.plan, self.k_bytes
        row, column, batch = self._place(tile)
        a, b = (
            pointer.toint() + Int64(batch) * Int64(rows) * Int64(k_bytes)
            for pointer, rows in ((self.a, self.m), (self.b, self.n))
        )
        return (
            rows_load(plan, a, row, self.m, k_bytes, of_b=False, part=self._slice(tile)),
            rows_load(plan, b, column, self.n, k_bytes, of_b=True, part=self._slice(tile)),
        )

    def _slice(self, tile: Int32) -> tuple[Int32, Int32] | None:
        """Bytes of K that a slice has from and up to: whole blocks, as many as in others or one less."""
        c = self.plan.config
        if c.split_k == 1:
            return None
        blocks, number = cute.ceil_div(self.k_bytes, c.row_bytes), tile % c.split_k
        start, end = (number * blocks // c.split_k, (number + 1) * blocks // c.split_k)
        return start * c.row_bytes, cutlass.min(end * c.row_bytes, self.k_bytes)

    def _place(self, tile: Int32) -> tuple[Int32, Int32, Int32]:
        """First row and column, batch. Slices of a tile follow each other, so that they arrive together."""
        m_tile, n_tile, batch = self.order.coordinates(tile // self.plan.config.split_k)
        return m_tile * self.plan.config.tile_m, n_tile * self.plan.config.tile_n, batch

    @cute.jit
    def store(self, sums: cute.Tensor, warp: Warp, tile: Int32) -> None:
        """Finishes and stores; of slices the one that arrives last does, with the sums of all."""
        if cutlass.const_expr(self.plan.config.split_k == 1):
            self._finish(sums, warp, tile)
        else:
            if self._arrive(sums, tile) != 0:
                self._add(sums, tile)
                self._finish(sums, warp, tile)

    def _partials(self, tile: Int32) -> cute.Tensor:
        """This thread's sums of a slice in the workspace, ``[4, vectors]``, beside those of its neighbours."""
        thread, _, _ = cute.arch.thread_idx()
        threads = self.plan.threads
        place = self.partials + cute.assume(Int64(tile) * self.plan.partial_elements + Int64(thread * 4), divby=4)
        return cute.make_tensor(place, cute.make_layout((4, self.plan.accumulators // 4), stride=(1, 4 * threads)))

    @cute.jit
    def _arrive(self, sums: cute.Tensor, tile: Int32) -> Int32:
        """Stores a slice's sums and counts it; whether all others have arrived."""
        thread, _, _ = cute.arch.thread_idx()
        cute.autovec_copy(_by_vectors(sums), self._partials(tile))
        cute.arch.sync_threads()
        last = Int32(0)
        if thread == 0:
            counter = self.arrivals + tile // self.plan.config.split_k
            if count_arrival(counter.toint()) == self.plan.config.split_k - 1:
                last = Int32(1)
                cute.make_tensor(counter, 1)[0] = Int32(0)  # as the next launch wants to find it
        return any_of_cta(last)

    def _add(self, sums: cute.Tensor, tile: Int32) -> None:
        """Sums of all slices, added in pairs, whatever the order of arrival."""
        split = self.plan.config.split_k
        slices = [self._partials(tile // split * split + i) for i in range(split)]
        total = _by_vectors(sums)
        for vector in range(self.plan.accumulators // 4):
            loaded = []
            for one in slices:
                four = cute.make_rmem_tensor(4, sums.element_type)
                cute.autovec_copy(one[None, vector], four)
                loaded.append(four)
            for e in range(4):
                values = [four[e] for four in loaded]
                while len(values) > 1:
                    values = [x + y for x, y in zip(values[::2], values[1::2], strict=True)]
                total[e, vector] = values[0]

    @cute.jit
    def _finish(self, sums: cute.Tensor, warp: Warp, tile: Int32) -> None:
        """Finishes and stores; of rows that are rounded up to 16 bytes all columns."""
        plan, problem, m, wide = self.plan, self.plan.problem, self.m, self.plan.lane_columns
        row, column, batch = self._place(tile)
        pitch = row_pitch(self.n, problem.out_dtype)
        dtype, bias = ELEMENT_TYPES[problem.out_dtype], bias_view(self.bias, plan, self.n)
        for block in cutlass.range_constexpr(len(epilogue.lane_blocks(plan))):
            n_at = column + epilogue.lane_column(warp, block)
            addend = biases(bias, n_at, wide, plan.bias_vector)
            columns = self.addends.column_factors(n_at, batch, wide, plan.column_vector)
            for eighth in cutlass.range_constexpr(len(epilogue.lane_rows(plan))):
                m_at = row + epilogue.lane_row(warp, eighth)
                rounded = finish(
                    epilogue.lane_sums(sums, plan, block, eighth),
                    addend,
                    problem.activation,
                    dtype,
                    scale=multipliers(self.addends.row_factor(m_at, batch), columns),
                    residual=self.addends.addends(m_at, n_at, batch, wide),
                    out_factor=self.addends.out_factor,
                )
                if m_at < m and n_at < pitch:
                    place = (Int64(batch) * Int64(m) + Int64(m_at)) * Int64(pitch) + Int64(n_at)
                    epilogue.store_vector(self.out, place, rounded)


class Sm80GemmKernel(Host):
    """Host entry and kernel for one plan. Sizes are launch arguments: one compiled kernel serves all of them."""

    plan: Sm80GemmPlan

    @cute.jit
    def __call__(self, o: Operands, stream: Any) -> None:
        """Launches ``clusters`` CTAs on ``stream``."""
        tiles = GemmTiles(
            plan=self.plan, a=o.a, b=o.b, bias=o.bias, addends=gemm_addends(self.plan, o), out=o.out,
            arrivals=o.arrivals, partials=o.partials, m=o.m, n=o.n, k=o.k, batches=o.batches
        )
        epilogue.launch(self.kernel(tiles), self.plan, o.clusters, stream)

    @cute.kernel
    def kernel(self, tiles: GemmTiles) -> None:
        c, order = self.plan.config, tiles.order
        k_blocks = cute.ceil_div(cute.ceil_div(tiles.k_bytes, c.row_bytes), c.split_k)
        tiles = replace(tiles, addends=tiles.addends.loaded())
        epilogue.run(self.plan, tiles, order.tiles * c.split_k, k_blocks)


def _by_vectors(sums: cute.Tensor) -> cute.Tensor:
    """The accumulators of a lane as ``[4, vectors]``."""
    return cute.make_tensor(sums.iterator, (4, cute.size(sums) // 4))


compiling.name_kernel(Sm80GemmKernel.kernel, "gemm_sm80")
