"""The persistent, warp-specialised dense GEMM on Blackwell: allocate, build pipes, dispatch to roles.

The roles that load and multiply are those of the patch embed; a stage may hold two MMA tiles of ``a``, tiles run in
groups of row blocks, and the epilogue stores through a short ring of buffers.

Pairs in one column of a cluster multiply the same rows of ``b``, pairs in one row the same rows of ``a``: the CTAs of
equal rank in them load a part each and multicast it. A stage is free when every pair that reads what its CTA loads has
committed. Every MMA tile has accumulator barriers of its own: it is drained when its own last MMA is complete, and
overwritten when it is drained.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.dsl import compiling
from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue import as_floats
from cute_kernels.kernels.gemm import Addends, DeviceArguments, GemmHost, biases, finish, multipliers
from cute_kernels.kernels.host import ELEMENT_TYPES
from cute_kernels.kernels.load import Load, tma_operand
from cute_kernels.kernels.pipes import this_cluster
from cute_kernels.kernels.sm100 import cta_pair
from cute_kernels.kernels.tiles import GroupedOrder
from cute_kernels.kernels.tma import Tma, WarpStaging, load_operation, shared_tensor, warp_staging
from cute_kernels.plan.base import LANES
from cute_kernels.plan.gemm_sm100 import Sm100GemmPlan

# --- epilogue warps: accumulators -> bias, rounding -> ring of swizzled store buffers -> TMA stores ------------------

@dataclass(frozen=True)
class GemmEpilogue:
    """Drains accumulators, one warp at a time: nothing but the accumulator's barriers is shared between warps.

    ``accumulators``: tensor-memory view ``[.., accumulator * mma_tiles + mma_tile]`` of this CTA's 128 rows of each MMA
    tile; ``staging``: this warp's store buffers of 32 rows x 128 bytes; ``warp``: hardware warp id, whose remainder by
    4 is the quarter of the tensor-memory lanes that it may reach.
    """

    plan: Sm100GemmPlan
    accumulators: cute.Tensor
    staging: WarpStaging
    bias: cute.Tensor | None
    accumulator: cta_pair.Sm100Pipe
    order: GroupedOrder
    place: cta_pair.ClusterPlace
    warp: Int32
    addends: Addends

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        width, dtype = plan.tmem_load_width, ELEMENT_TYPES[plan.problem.out_dtype]
        lane = cute.arch.lane_idx()
        quarter = self.warp % 4

        thread = quarter * LANES + lane
        tmem_load, source, fragment_shape = cta_pair.tmem_loads(self.accumulators, plan.cta_m, width, thread)
        row_chunks = self.staging.row_chunks(lane)

        state = self.accumulator.consumer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            m_tile, n_tile, batch = self.order.coordinates(tile)
            m_tile, n_tile = m_tile * plan.pairs[0] + self.place.m, n_tile * plan.pairs[1] + self.place.n
            first_column = n_tile * plan.config.tile_n
            for i in cutlass.range_constexpr(plan.regions_per_tile):
                mma_tile, region = divmod(i, plan.regions_per_tile // plan.mma_tiles)
                if cutlass.const_expr(region == 0):
                    self.accumulator.wait_full(state, mma_tile)
                    ptx.tcgen05_fence_after_thread_sync()
                    row = self._row_block(m_tile, mma_tile) * LANES + lane
                    row_factor = self.addends.row_factor(row, batch)
                buffer = i % plan.config.store_stages
                self.staging.acquire()
                for part in cutlass.range_constexpr(plan.store_columns // width):
                    column = region * plan.store_columns + part * width
                    fragment = cute.make_rmem_tensor(fragment_shape, self.accumulators.element_type)
                    bias = biases(self.bias, first_column + column, width, plan.bias_vector)
                    columns = self.addends.column_factors(first_column + column, batch, width, plan.column_vector)
                    residual = self.addends.addends(row, first_column + column, batch, width)
                    index = self.accumulator.slot(state, mma_tile)
                    cute.copy(tmem_load, source[None, None, None, 0, column // width, index], fragment)
                    cute.arch.fence_view_async_tmem_load()
                    if cutlass.const_expr(column + width == plan.config.tile_n):
                        cta_pair.release_accumulator(self.accumulator, state, mma_tile)
                    values = finish(
                        as_floats(cute.make_tensor(fragment.iterator, width)), bias, plan.problem.activation, dtype,
                        scale=multipliers(row_factor, columns), residual=residual, out_factor=self.addends.out_factor,
                        packed_f32=True
                    )
                    self.staging.write_row(values, row_chunks, buffer, part * width)
                column_block = first_column // plan.store_columns + region
                self.staging.store(buffer, self._row_block(m_tile, mma_tile), column_block, batch)
            state.advance()
        self.staging.finish()

    def _row_block(self, m_tile: Int32, mma_tile: int) -> Int32:
        """This warp's 32 rows of an MMA tile, counted in such."""
        block = (m_tile * self.plan.mma_tiles + mma_tile) * (self.plan.mma_m // LANES)
        return block + self.place.rank * 4 + self.warp % 4


class Sm100GemmKernel(GemmHost):
    """Host entry and kernel for one plan."""

    plan: Sm100GemmPlan

    def __init__(self, plan: Sm100GemmPlan) -> None:
        super().__init__(plan)
        self.tile_mnk = (plan.mma_m, plan.config.tile_n, plan.tile_k)

    def operands(self, a: cute.Tensor, b: cute.Tensor) -> tuple[cute.TiledMma, Tma, Tma]:
        plan = self.plan
        tiled_mma = cta_pair.make_mma(self.dtype, self.b_dtype, self.tile_mnk[:2], tcgen05.CtaGroup.TWO)
        a_layout, b_layout = (cute.slice_(layout, (None, None, None, 0)) for layout in self._stage_layouts(tiled_mma))
        rest = (self.tile_mnk, tiled_mma, (plan.cta_group, *plan.pairs, 1))
        a_load, b_load = (load_operation(plan.pairs[i], tcgen05.CtaGroup.TWO) for i in (1, 0))
        a_tma = cute.nvgpu.make_tiled_tma_atom_A(a_load, a, a_layout, *rest)
        b_tma = cute.nvgpu.make_tiled_tma_atom_B(b_load, b, b_layout, *rest)
        return tiled_mma, Tma(*a_tma), Tma(*b_tma)

    def _stage_layouts(self, tiled_mma: cute.TiledMma) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Buffers of ``a`` by stage and MMA tile, and of ``b`` by stage."""
        stages = self.plan.config.stages
        return (
            sm100_utils.make_smem_layout_a(tiled_mma, self.tile_mnk, self.dtype, stages * self.plan.mma_tiles),
            sm100_utils.make_smem_layout_b(tiled_mma, self.tile_mnk, self.b_dtype, stages),
        )

    @cute.kernel
    def kernel(self, args: DeviceArguments) -> None:
        plan = self.plan
        frame = cta_pair.enter(plan, self.graph, (args.a.atom, args.b.atom, args.out.atom))
        warp, place, pipes = frame.warp, frame.place, frame.pipes
        a_stages, b_stages, staging = frame.regions

        cluster, (_, clusters) = cute.arch.cluster_idx()[0], this_cluster(plan)
        order = GroupedOrder(args.m_tiles, args.n_tiles, args.batches, plan.config.group_m, cluster, clusters)
        a_layout, b_layout = self._stage_layouts(args.tiled_mma)
        a_tensor = shared_tensor(a_stages, a_layout, self.dtype)
        b_tensor = shared_tensor(b_stages, b_layout, self.b_dtype)
        count = plan.accumulators * plan.mma_tiles
        dtype = Int32 if plan.sums_integers else Float32
        accumulators = cta_pair.tensor_memory(args.tiled_mma, self.tile_mnk[:2], count, frame.tmem_address, dtype)

        if warp == plan.load_warp:
            mma = args.tiled_mma.get_slice(place.rank)
            along_m, along_n = (plan.pairs[0], place.m), (plan.pairs[1], place.n)
            a = cute.local_tile(args.a.view, cute.slice_(self.tile_mnk, (None, 0, None)), (None, None, None))
            b = cute.local_tile(args.b.view, cute.slice_(self.tile_mnk, (0, None, None)), (None, None, None))
            a_part, a_shared = mma.partition_A(a), {"tile": along_m, "share": along_n, "mask": place.a_mask}
            b_part, b_shared = mma.partition_B(b), {"tile": along_n, "share": along_m, "mask": place.b_mask}
            rows = tma_operand(args.a.atom, a_part, a_tensor, 3, boxes=plan.mma_tiles, **a_shared)
            columns = tma_operand(args.b.atom, b_part, b_tensor, 3, **b_shared)
            Load(rows, columns, pipes["operands"], order, args.k_blocks, place.leads).run()
        elif warp == plan.mma_warp:
            if place.leads:
                cta_pair.Mma(
                    tiled_mma=args.tiled_mma, row_fragments=args.tiled_mma.make_fragment_A(a_tensor),
                    column_fragments=args.tiled_mma.make_fragment_B(b_tensor), accumulators=accumulators,
                    operands=pipes["operands"], accumulator=pipes["accumulator"], order=order, k_blocks=args.k_blocks,
                    mma_tiles=plan.mma_tiles
                ).run()
        else:
            buffers = plan.config.store_stages
            ring = warp_staging(
                staging, first=(warp - plan.first_epilogue_warp) * buffers, rows=plan.store_rows, buffers=buffers,
                out=args.out, dtype=ELEMENT_TYPES[plan.problem.out_dtype], row_bytes=plan.store_row_bytes
            )
            GemmEpilogue(
                plan=plan, accumulators=accumulators, staging=ring, bias=args.bias, accumulator=pipes["accumulator"],
                order=order, place=place, warp=warp, addends=args.addends.loaded()
            ).run()
        cta_pair.end(plan, warp, accumulators)


compiling.name_kernel(Sm100GemmKernel.kernel, "gemm_sm100a")
