"""The persistent, warp-specialised GEMM with a fused epilogue: allocate, build pipes, dispatch to roles.

Each pair of CTAs walks tiles of 256 x tile_n, or each CTA tiles of 128 x tile_n. The load warp of each CTA streams
operands, the leader's MMA warp issues UMMAs into one of two accumulators in tensor memory, and the epilogue warps drain
the other.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import BFloat16, Float32, Int32

from cute_kernels.dsl import compiling
from cute_kernels.kernels import ptx, tma
from cute_kernels.kernels.epilogue import Scales, as_floats, scale_add_round
from cute_kernels.kernels.host import RowsHost, RowsOperands
from cute_kernels.kernels.load import Load, Operand, tma_operand
from cute_kernels.kernels.pipes import this_cluster
from cute_kernels.kernels.sm100 import cta_pair
from cute_kernels.kernels.tiles import SnakeOrder, TableRows
from cute_kernels.plan.base import LANES, VECTOR_BYTES
from cute_kernels.plan.patch_embed_sm100 import Sm100PatchEmbedPlan

# --- which rows of the output a tile, a CTA and a warp have: consecutive ones, or images at positions ----------------

@dataclass(frozen=True)
class WarpRows:
    """The 32 rows of a warp in a tile: a block of images at a position, possibly beyond the last, or rows."""

    block: Int32
    position: Int32


@dataclass(frozen=True)
class TileRows:
    """Rows of a tile: images run fastest, positions next; flat order has one position, whose images are the rows.

    ``position_tiles`` are tiles along the positions, which run faster than those of images.
    """

    plan: Sm100PatchEmbedPlan
    rank: Int32
    images: Int32
    positions: Int32
    position_tiles: Int32

    @cute.jit
    def split(self, m_tile: Int32) -> tuple[Int32, Int32]:
        """``m_tile -> (tile of images, tile of positions)``."""
        image_tile, position_tile = m_tile, Int32(0)
        if cutlass.const_expr(self.plan.config.order == "position"):
            image_tile = m_tile // self.position_tiles
            position_tile = m_tile - image_tile * self.position_tiles
        return image_tile, position_tile

    @cute.jit
    def box(self, m_tile: Int32) -> tuple[Int32, Int32]:
        """(image block, position block) of what this CTA loads, in boxes of ``cta_images`` x ``cta_positions``."""
        plan = self.plan
        image_block, position_block = self.split(m_tile)
        if cutlass.const_expr(plan.config.tile_positions >= plan.cta_group):
            position_block = position_block * plan.cta_group + self.rank
        else:
            image_block = image_block * plan.cta_group + self.rank
        return image_block, position_block

    @cute.jit
    def of_warp(self, m_tile: Int32, quarter: Int32) -> WarpRows:
        """The rows of a quarter of this CTA's lanes."""
        plan = self.plan
        blocks = plan.tile_images // LANES
        image_tile, position_tile = self.split(m_tile)
        place = self.rank * (plan.cta_m // LANES) + quarter
        position = position_tile * plan.config.tile_positions + place // blocks
        return WarpRows(image_tile * blocks + place % blocks, position)

    @cute.jit
    def row(self, rows: WarpRows, lane: Int32) -> Int32:
        """The row of ``x`` and of the output that a lane has; one that exists if it is beyond images or positions.

        In flat order a row beyond the last one stays what it is.
        """
        row = rows.block * LANES + lane
        if cutlass.const_expr(self.plan.config.order == "position"):
            position = min(rows.position, self.positions - 1)
            row = min(row, self.images - 1) * self.positions + position
        return row


@dataclass(frozen=True)
class RowsOperand(Operand):
    """``x`` as this CTA loads it: TMA view ``[box, image block, k_block, position block]``."""

    rows: TileRows | None = None

    def place(self, tile: Int32, batch: tuple) -> tuple[Int32, ...]:
        return self.rows.box(tile)


# --- what an epilogue thread reads from global memory for its row: bias + position, and factors of the scale ---------

FACTORS = 4
"""Factors of features in one load of 16 bytes."""


def table_view(
    plan: Sm100PatchEmbedPlan, pointer: cute.Pointer | None, rows: Int32, columns: Int32
) -> cute.Tensor | None:
    """``[rows, columns]`` over the table of `Plan.table_shape`, both modes hierarchical unless it is row-major."""
    if pointer is None:
        return None
    if plan.config.table == "row_major":
        pitch = cute.assume(columns, divby=plan.tile_n)
        return cute.make_tensor(pointer, cute.make_layout((rows, columns), stride=(pitch, 1)))
    vector = VECTOR_BYTES * 8 // pointer.dtype.width
    chunks = columns // vector
    layout = cute.make_layout(
        ((LANES, cute.ceil_div(rows, LANES)), (vector, chunks)),
        stride=((vector, cute.assume(chunks * (LANES * vector), divby=LANES * vector)), (1, LANES * vector)),
    )
    return cute.make_tensor(pointer, layout)


@dataclass(frozen=True)
class TableReader:
    """Reads the bias + position table, a view of `table_view` or None, 16 bytes at a time."""

    plan: Sm100PatchEmbedPlan
    table: cute.Tensor | None
    rows: TileRows
    table_rows: TableRows

    @cute.jit
    def row(self, rows: WarpRows, lane: Int32) -> Int32:
        """The row of the table that a lane adds: in position order the same for all lanes of the warp."""
        if cutlass.const_expr(self.table is None):
            return Int32(0)
        if cutlass.const_expr(self.plan.config.order == "position"):
            return min(rows.position, self.rows.positions - 1)
        return self.table_rows.of(self.rows.row(rows, lane))

    @cute.jit
    def first(self, rows: WarpRows, lane: Int32, column: Int32) -> Int32:
        """Elements from where the table begins to a lane's row at the first column of its warp, a multiple of 64."""
        if cutlass.const_expr(self.table is None):
            return Int32(0)
        row, layout = self.row(rows, lane), self.table.layout
        if cutlass.const_expr(self.plan.config.table == "row_major"):
            return cute.crd2idx((row, column), layout)
        place = ((row % LANES, row // LANES), (0, column // self.plan.table_shape[3]))
        return cute.crd2idx(place, layout)

    @cute.jit
    def load(self, first: Int32, column: cutlass.Constexpr[int], width: cutlass.Constexpr[int]) -> cute.Tensor | None:
        """``width`` values of a row, from a column of the warp on; ``first`` is where its columns begin."""
        if cutlass.const_expr(self.table is None):
            return None
        vector = VECTOR_BYTES * 8 // self.table.element_type.width
        values = cute.make_rmem_tensor((vector, width // vector), self.table.element_type)
        base = self.table.iterator + cute.assume(first, divby=vector)
        for i in cutlass.range_constexpr(width // vector):
            chunk = cute.make_tensor(base + self._further(column + i * vector), vector)
            cute.autovec_copy(chunk, values[None, i])
        return cute.make_tensor(values.iterator, width)

    def _further(self, column: int) -> int:
        """Elements from the first column of a warp to another one: whole chunks of the layout, and what is left."""
        if self.plan.config.table == "row_major":
            return column
        vector = self.plan.table_shape[3]
        return column // vector * (LANES * vector) + column % vector


@dataclass(frozen=True)
class ScaleReader:
    """The multipliers of a thread's row, and of its columns."""

    scales: Scales

    @cute.jit
    def row_factor(self, row: Int32) -> Float32 | None:
        """Factor of the multiplier that is the same in the whole row, or None."""
        if cutlass.const_expr(self.scales.rows is None):
            return self.scales.call
        return self.scales.row(row)

    @cute.jit
    def multiplier(
        self, row_factor: Float32 | None, column: Int32, width: cutlass.Constexpr[int]
    ) -> Float32 | cute.Tensor:
        """The multiplier of this thread's row, or those of ``width`` columns.

        All lanes of a warp read the same 16 bytes. Of the features beyond N, a multiple of 8, nothing is stored.
        """
        features = self.scales.features
        if cutlass.const_expr(features is None):
            return row_factor
        values = cute.make_rmem_tensor((FACTORS, width // FACTORS), Float32)
        for i in cutlass.range_constexpr(width // FACTORS):
            first = cute.assume(min(column + i * FACTORS, cute.size(features) - FACTORS), divby=FACTORS)
            cute.autovec_copy(cute.make_tensor(features.iterator + first, FACTORS), values[None, i])
        flat = cute.make_tensor(values.iterator, width)
        if cutlass.const_expr(row_factor is not None):
            for i in cutlass.range_constexpr(0, width, 2):
                flat[i], flat[i + 1] = ptx.mul_rn_f32x2((flat[i], flat[i + 1]), (row_factor, row_factor))
        return flat


# --- how a warp's rows of the output leave: registers -> swizzled staging -> TMA, nothing shared between warps -------

@dataclass(frozen=True)
class TmaStores:
    """Swizzled regions of 64 columns, each stored when it is full; a thread has a row of the first buffer."""

    plan: Sm100PatchEmbedPlan
    ring: tma.WarpStaging
    row_chunks: tuple[cute.Pointer, ...]

    @cute.jit
    def write(self, values: cute.Tensor, column: cutlass.Constexpr[int], rows: WarpRows, first_column: Int32) -> None:
        """Values of this thread's row, from a column of the warp on."""
        width, buffers = self.plan.store_columns, self.ring.buffers
        region = column // width
        if cutlass.const_expr(column % width == 0):
            self.ring.acquire(buffers - 1)
        self.ring.write_row(values, self.row_chunks, region % buffers, column % width)
        if cutlass.const_expr((column + cute.size(values)) % width == 0):
            self.ring.publish()
            self.ring.issue(region % buffers, rows.block, first_column // width + region, rows.position)
            self.ring.commit()


# --- epilogue warps: accumulators -> scale, bias + position, BF16 -> stores ------------------------------------------

@dataclass(frozen=True)
class Sm100PatchEmbedEpilogue:
    """Drains accumulators, one warp at a time: nothing but the accumulator's barriers is shared between warps."""

    plan: Sm100PatchEmbedPlan
    accumulators: cute.Tensor
    staging: cute.Pointer
    out: tma.Tma
    table: TableReader
    scales: ScaleReader
    accumulator: cta_pair.Sm100Pipe
    order: SnakeOrder
    rows: TileRows

    @cute.jit
    def run(self, warp: Int32) -> None:
        """Picks this warp's share of columns; one unrolled copy of the loop exists per distinct width."""
        plan = self.plan
        columns, first_column, offset = Int32(0), Int32(0), Int32(0)
        for i in cutlass.range_constexpr(plan.config.epilogue_warps):
            if warp == plan.first_epilogue_warp + i:
                begin, end = plan.epilogue_columns[i]
                columns, first_column, offset = Int32(end - begin), Int32(begin), Int32(plan.staging_offsets[i])
        widths = sorted({end - begin for begin, end in plan.epilogue_columns})
        for i in cutlass.range_constexpr(len(widths)):
            if columns == widths[i]:
                self._drain(warp, widths[i], first_column, offset)

    @cute.jit
    def _drain(self, warp: Int32, columns: cutlass.Constexpr[int], first_column: Int32, offset: Int32) -> None:
        plan, config = self.plan, self.plan.config
        width = config.tmem_load_width
        lane = cute.arch.lane_idx()
        quarter = self.lane_quarter(warp)

        thread = quarter * LANES + lane
        tmem_load, source, fragment_shape = cta_pair.tmem_loads(self.accumulators, plan.cta_m, width, thread)
        ring = tma.warp_staging(
            self.staging, first=offset // plan.store_region_bytes, rows=LANES, buffers=plan.store_buffers(columns),
            out=self.out, dtype=BFloat16
        )
        stores = TmaStores(plan, ring, ring.row_chunks(lane))

        state = self.accumulator.consumer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            m_tile, n_tile = self.order.coordinates(tile)
            rows = self.rows.of_warp(m_tile, quarter)
            row_factor = self.scales.row_factor(self.rows.row(rows, lane))
            first = n_tile * plan.tile_n + first_column
            table_first = self.table.first(rows, lane, first)
            self.accumulator.wait_full(state)
            if cutlass.const_expr(config.stagger_clocks > 0):
                idle((warp - plan.first_epilogue_warp) * config.stagger_clocks)
            ptx.tcgen05_fence_after_thread_sync()
            for column in cutlass.range_constexpr(0, columns, width):
                addends = self.table.load(table_first, column, width)
                fragment = cute.make_rmem_tensor(fragment_shape, self.accumulators.element_type)
                chunk = (first_column + column) // width
                cute.copy(tmem_load, source[None, None, None, 0, chunk, state.index], fragment)
                cute.arch.fence_view_async_tmem_load()
                if cutlass.const_expr(column + width == columns):
                    cta_pair.release_accumulator(self.accumulator, state)
                scale = self.scales.multiplier(row_factor, first + column, width)
                registers = as_floats(cute.make_tensor(fragment.iterator, width))
                values = scale_add_round(registers, addends, scale, config.epilogue, packed_f32=True)
                stores.write(values, column, rows, first)
            state.advance()
        ring.finish()

    @staticmethod
    def lane_quarter(warp: Int32) -> Int32:
        """Quarter of the tensor-memory lanes that a warp may reach, by its hardware id (PTX ISA, tcgen05.ld)."""
        return warp % 4


@dataclass(frozen=True)
class DeviceArguments:
    """Arguments of the kernel from the host function: TMA copies, layouts, table, scale and sizes."""

    tiled_mma: cute.TiledMma
    x: tma.Tma
    x_layout: cute.ComposedLayout
    x_boxes: cute.ComposedLayout
    weight: tma.Tma
    weight_layout: cute.ComposedLayout
    out: tma.Tma
    table: cute.Tensor | None
    table_index: cute.Tensor | None
    table_rows: Int32
    rows: Int32
    images: Int32
    positions: Int32
    position_tiles: Int32
    scales: Scales
    order_m_tiles: Int32
    order_n_tiles: Int32
    k_blocks: Int32


class Sm100PatchEmbedKernel(RowsHost):
    """Host entry and kernel for one plan: one compiled kernel serves all sizes."""

    plan: Sm100PatchEmbedPlan

    def arguments(self, operands: RowsOperands) -> DeviceArguments:
        plan, config, o = self.plan, self.plan.config, operands
        group, tile_mnk = cta_pair.cta_group(plan), (plan.tile_m, plan.tile_n, plan.tile_k)
        tiled_mma = cta_pair.make_mma(self.element, self.weight_element, tile_mnk[:2], group)
        x_layout = sm100_utils.make_smem_layout_a(tiled_mma, tile_mnk, self.element, config.stages)
        weight_layout = sm100_utils.make_smem_layout_b(tiled_mma, tile_mnk, self.weight_element, config.stages)
        cluster_vmnk = cute.tiled_divide(cute.make_layout((*plan.cluster,)), (tiled_mma.thr_id,))
        box = self._x_box()
        block = cute.slice_(weight_layout, (None, None, None, 0))
        weight_tma = cute.nvgpu.make_tiled_tma_atom_B(
            tma.load_operation(1, group), o.weight, block, tile_mnk, tiled_mma, cluster_vmnk.shape
        )
        region = (LANES, plan.store_columns)
        n_tiles = cute.ceil_div(o.n, plan.tile_n)
        height = o.table_rows + int(plan.problem.table_index)
        position_tiles = cute.ceil_div(o.positions, config.tile_positions)
        return DeviceArguments(
            tiled_mma=tiled_mma,
            x=tma.load_tma(o.x, tma.k_major(self.element, box, 1), box, 1, group),
            x_layout=x_layout,
            x_boxes=tma.k_major(self.element, box, config.stages),
            weight=tma.Tma(*weight_tma),
            weight_layout=weight_layout,
            out=tma.store_tma(o.out, tma.staging_layout(*region), region),
            table=table_view(plan, o.table, height, n_tiles * plan.tile_n),
            table_index=o.table_index,
            table_rows=o.table_rows,
            rows=o.rows,
            images=o.images,
            positions=Int32(o.positions),
            position_tiles=Int32(position_tiles),
            scales=o.scales,
            order_m_tiles=cute.ceil_div(o.images, plan.tile_images) * position_tiles,
            order_n_tiles=n_tiles,
            k_blocks=cute.ceil_div(o.k, plan.tile_k),
        )

    def _x_box(self) -> tuple[int, int, int]:
        """``[images, 128 bytes of K, positions]`` of a CTA's rows: TMA puts them one after another, images fastest."""
        return (self.plan.cta_images, self.plan.tile_k, self.plan.cta_positions)

    @cute.kernel
    def kernel(self, args: DeviceArguments) -> None:
        plan = self.plan
        frame = cta_pair.enter(plan, self.graph, (args.x.atom, args.weight.atom, args.out.atom))
        warp, place, pipes = frame.warp, frame.place, frame.pipes
        x_stages, weight_stages, staging = frame.regions

        rows = TileRows(plan, place.rank, args.images, args.positions, args.position_tiles)
        order = SnakeOrder(args.order_m_tiles, args.order_n_tiles, *this_cluster(plan), plan.config.snake)
        x_tensor = tma.shared_tensor(x_stages, args.x_layout, self.element)
        weight_tensor = tma.shared_tensor(weight_stages, args.weight_layout, self.weight_element)
        accumulators = cta_pair.tensor_memory(
            args.tiled_mma, (plan.tile_m, plan.tile_n), plan.accumulators, frame.tmem_address, self.accumulator
        )

        if warp == plan.load_warp:
            self._load(args, (x_stages, weight_tensor), pipes["operands"], order, rows, place).run()
        elif warp == plan.mma_warp:
            if place.leads:
                cta_pair.Mma(
                    tiled_mma=args.tiled_mma,
                    row_fragments=args.tiled_mma.make_fragment_A(x_tensor),
                    column_fragments=args.tiled_mma.make_fragment_B(weight_tensor),
                    accumulators=accumulators,
                    operands=pipes["operands"],
                    accumulator=pipes["accumulator"],
                    order=order,
                    k_blocks=args.k_blocks,
                ).run()
        else:
            self._epilogue(args, accumulators, staging, pipes["accumulator"], order, rows).run(warp)

        cta_pair.end(plan, warp, accumulators)

    def _load(
        self, args: DeviceArguments, memory: tuple[cute.Pointer, cute.Tensor], pipe: cta_pair.Sm100Pipe,
        order: SnakeOrder, rows: TileRows, place: cta_pair.ClusterPlace
    ) -> Load:
        plan = self.plan
        boxes = cute.local_tile(args.x.view, self._x_box(), (None, None, None))
        stages = tma.shared_tensor(memory[0], args.x_boxes, self.element)
        x = tma_operand(args.x.atom, boxes, stages, 3)
        weight = cute.local_tile(args.weight.view, (plan.tile_n, plan.tile_k), (None, None))
        weight = args.tiled_mma.get_slice(rows.rank).partition_B(weight)
        columns = tma_operand(args.weight.atom, weight, memory[1], 3)
        x = RowsOperand(x.atom, x.source, x.stages, rows=rows)
        return Load(x, columns, pipe, order, args.k_blocks, place.leads)

    def _epilogue(
        self, args: DeviceArguments, accumulators: cute.Tensor, staging: cute.Pointer, pipe: cta_pair.Sm100Pipe,
        order: SnakeOrder, rows: TileRows
    ) -> Sm100PatchEmbedEpilogue:
        plan = self.plan
        table_rows = TableRows(args.table_rows, args.table_index, args.rows)
        return Sm100PatchEmbedEpilogue(
            plan=plan, accumulators=accumulators, staging=staging, out=args.out,
            table=TableReader(plan, args.table, rows, table_rows), scales=ScaleReader(args.scales.loaded()),
            accumulator=pipe, order=order, rows=rows
        )


compiling.name_kernel(Sm100PatchEmbedKernel.kernel, "patch_embed_sm100a")


@cute.jit
def idle(clocks: Int32) -> None:
    """Passes SM clocks; the difference is right across a wrap of the 32-bit counter."""
    start = cute.arch.clock()
    now = start
    while now - start < clocks:
        now = cute.arch.clock()
