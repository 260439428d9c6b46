"""The persistent GEMM with a fused epilogue for Hopper: allocate, build pipes, dispatch to roles.

Consumer warpgroups own 64 output features each and walk the rows of ``x``, which one TMA warp streams through shared
memory. The weight stays in registers (or is streamed along), the accumulators are stored transposed.

Warpgroups that issue WGMMAs at any time run in lockstep, and their epilogues leave the tensor cores idle together. With
a ring of two tiles each has the tensor cores to itself for a tile while another one stores. A stage is refilled when
every warpgroup of every CTA of the cluster has arrived, since each CTA multicasts into all of them; a warpgroup arrives
when at most its newest WGMMA group is outstanding, so that the one which read the stage is complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from cute_kernels import dsl
from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue import Scales, scale_add_round
from cute_kernels.kernels.graph import sm90_graph
from cute_kernels.kernels.host import ELEMENT_TYPES, RowsHost, RowsOperands
from cute_kernels.kernels.load import RowsLoad
from cute_kernels.kernels.pipes import make_pipes, stamp_waits
from cute_kernels.kernels.sm90.frame import Sm90Pipe, begin
from cute_kernels.kernels.sm90.transposed import ROWS_PER_STORE, Mma, TransposedStaging, resident_weight
from cute_kernels.kernels.stamps import make_stamps
from cute_kernels.kernels.tiles import PositionOrder, TableRows
from cute_kernels.plan import Sm90PatchEmbedPlan
from cute_kernels.plan.patch_embed import WEIGHT_TYPES

# --- epilogue of a consumer warpgroup: accumulators -> scale, bias + position, BF16 -> staging -> TMA store ----------


ROWS_PER_THREAD = ROWS_PER_STORE // 4
"""Rows of one stmatrix of which a thread has values."""


@dataclass(frozen=True)
class Sm90PatchEmbedEpilogue:
    """Drains one warpgroup's accumulators of 64 features x tile_rows rows.

    Attributes:
        staging: this warpgroup's buffer, stored to ``[box, row block, 64-feature block, position block]``.
        table: ``[2, 8, padded features / 16, rows]`` view of the bias + position table, or None: a thread's pair of
            features, its place in a block of 16, the block.
        table_rows: which row of the table a row of the output gets.
        scales: dequantisation multipliers.
        pair: factors of the two features of a thread, or None.
        feature_block: this warpgroup's block of 64 features.
        thread: index in the warpgroup.
    """

    plan: Sm90PatchEmbedPlan
    staging: TransposedStaging
    table: cute.Tensor | None
    table_rows: TableRows
    scales: Scales
    pair: tuple[Float32, Float32] | None
    feature_block: Int32
    thread: Int32

    @cute.jit
    def prefetch(self, row_block: Int32, position: Int32) -> tuple[cute.Tensor | None, cute.Tensor | None]:
        """Fetches before the WGMMAs of a tile what is needed of the table and of the rows' factors."""
        return self._prefetch_table(row_block, position), self._prefetch_rows(row_block, position)

    @cute.jit
    def _prefetch_rows(self, row_block: Int32, position: Int32) -> cute.Tensor | None:
        """Factors of all rows of a tile that a thread has, four for each stmatrix."""
        if cutlass.const_expr(not self.plan.prefetches_rows):
            return None
        factors = cute.make_rmem_tensor(cute.make_layout(self.plan.row_registers), Float32)
        for i in cutlass.range_constexpr(self.plan.config.tile_rows // ROWS_PER_STORE):
            self._load_rows(factors, i * ROWS_PER_THREAD, row_block, position, i)
        return factors

    @cute.jit
    def _prefetch_table(self, row_block: Int32, position: Int32) -> cute.Tensor | None:
        """Table values that are fetched before the WGMMAs of a tile: two for each position, in flat order all."""
        plan = self.plan
        if cutlass.const_expr(self.table is None or not plan.prefetches_table):
            return None
        values = cute.make_rmem_tensor(cute.make_layout(plan.table_registers), self.table.element_type)
        if cutlass.const_expr(plan.config.order == "position"):
            pair = cute.make_rmem_tensor(cute.make_layout(2), self.table.element_type)
            for i in cutlass.range_constexpr(plan.config.tile_positions):
                self._load_pair(pair, self._position(position, i))
                values[2 * i], values[2 * i + 1] = pair[0], pair[1]
            return values
        first_table_row = self._first_table_row(row_block)
        for i in cutlass.range_constexpr(plan.config.tile_rows // ROWS_PER_STORE):
            self._load_block(values, i * 8, row_block, first_table_row, i)
        return values

    @cute.jit
    def store(
        self, accumulator: cute.Tensor, fetched: tuple[cute.Tensor | None, cute.Tensor | None], row_block: Int32,
        position: Int32,
    ) -> None:  # fmt: skip
        """Converts, stages and stores one tile; returns as soon as the TMA store is issued."""
        plan = self.plan
        fetched_table, fetched_rows = fetched
        addresses = self.staging.addresses()
        first_table_row = Int32(0)
        if cutlass.const_expr(plan.config.order == "flat" and self.table is not None and not plan.prefetches_table):
            first_table_row = self._first_table_row(row_block)
        self.staging.acquire()
        for i in cutlass.range_constexpr(plan.config.tile_rows // ROWS_PER_STORE):
            registers = cute.make_rmem_tensor(cute.make_layout(8), Float32)
            for j in cutlass.range_constexpr(8):
                registers[j] = Float32(accumulator[i * 8 + j])
            addends = self._addends(fetched_table, row_block, position, first_table_row, i)
            scale = self._scale(fetched_rows, row_block, position, i)
            values = scale_add_round(registers, addends, scale, plan.config.epilogue, packed_f32=False)
            self.staging.write(addresses, values, i)
        self.staging.store(row_block, self.feature_block, position)

    @cute.jit
    def finish(self) -> None:
        self.staging.finish()

    @cute.jit
    def _scale(
        self, fetched: cute.Tensor | None, row_block: Int32, position: Int32, block: cutlass.Constexpr[int]
    ) -> Float32 | cute.Tensor:
        """The call's number, or the multipliers of one stmatrix in the order of `_addends`."""
        if cutlass.const_expr(self.scales.rows is None and self.pair is None):
            return self.scales.call
        values = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        rows = cute.make_rmem_tensor(cute.make_layout(ROWS_PER_THREAD), Float32)
        if cutlass.const_expr(self.scales.rows is not None):
            if cutlass.const_expr(fetched is None):
                self._load_rows(rows, 0, row_block, position, block)
            else:
                for j in cutlass.range_constexpr(ROWS_PER_THREAD):
                    rows[j] = fetched[block * ROWS_PER_THREAD + j]
        for j in cutlass.range_constexpr(8):
            row = j // 4 * 2 + j % 2
            if cutlass.const_expr(self.scales.rows is None):
                values[j] = self.pair[j // 2 % 2]
            elif cutlass.const_expr(self.pair is None):
                values[j] = rows[row]
            else:
                values[j] = ptx.mul_rn_f32(rows[row], self.pair[j // 2 % 2])
        return values

    @cute.jit
    def _load_rows(
        self, factors: cute.Tensor, offset: cutlass.Constexpr[int], row_block: Int32, position: Int32,
        block: cutlass.Constexpr[int],
    ) -> None:  # fmt: skip
        """Factors of a thread's four rows of one stmatrix: rows 0-1, rows 8-9."""
        plan = self.plan
        for half in cutlass.range_constexpr(2):
            for odd in cutlass.range_constexpr(2):
                row = block * ROWS_PER_STORE + half * 8 + self.thread % 4 * 2 + odd
                if cutlass.const_expr(plan.positions_in_order):
                    # 8 rows are one position's, since the images of a tile are a multiple of 8.
                    i = (block * ROWS_PER_STORE + half * 8) // plan.tile_images
                    positions = self.table_rows.positions
                    image = min(
                        row_block * plan.tile_images + row - i * plan.tile_images,
                        self.table_rows.rows // positions - 1,
                    )
                    index = image * positions + self._position(position, i)
                else:
                    index = row_block * plan.config.tile_rows + row
                factors[offset + half * 2 + odd] = self.scales.row(index)

    @cute.jit
    def _addends(
        self, fetched: cute.Tensor | None, row_block: Int32, position: Int32, first_table_row: Int32,
        block: cutlass.Constexpr[int],
    ) -> cute.Tensor | None:  # fmt: skip
        """Table values of one stmatrix by register: feature 0 of rows 0-1, feature 8 of rows 0-1, the same for 8-9."""
        if cutlass.const_expr(self.table is None):
            return None
        plan = self.plan
        values = cute.make_rmem_tensor(cute.make_layout(8), self.table.element_type)
        if cutlass.const_expr(plan.config.order == "flat" and fetched is None):
            self._load_block(values, 0, row_block, first_table_row, block)
        elif cutlass.const_expr(plan.config.order == "flat"):
            for j in cutlass.range_constexpr(8):
                values[j] = fetched[block * 8 + j]
        else:
            pair = cute.make_rmem_tensor(cute.make_layout(2), self.table.element_type)
            for half in cutlass.range_constexpr(2):
                # 8 rows are one position's, since the images of a tile are a multiple of 8.
                i = (block * ROWS_PER_STORE + half * 8) // plan.tile_images
                if cutlass.const_expr(fetched is None):
                    self._load_pair(pair, self._position(position, i))
                else:
                    pair[0], pair[1] = fetched[2 * i], fetched[2 * i + 1]
                for j in cutlass.range_constexpr(4):
                    values[half * 4 + j] = pair[j // 2]
        return values

    @cute.jit
    def _load_block(
        self, values: cute.Tensor, offset: cutlass.Constexpr[int], row_block: Int32, first_table_row: Int32,
        block: cutlass.Constexpr[int],
    ) -> None:  # fmt: skip
        """Flat order: fills the eight values of one stmatrix, beginning at ``offset``."""
        pair = cute.make_rmem_tensor(cute.make_layout(2), self.table.element_type)
        for half in cutlass.range_constexpr(2):
            for odd in cutlass.range_constexpr(2):
                row = block * ROWS_PER_STORE + half * 8 + self.thread % 4 * 2 + odd
                self._load_pair(pair, self._table_row(row_block, first_table_row, row))
                values[offset + half * 4 + odd], values[offset + half * 4 + 2 + odd] = pair[0], pair[1]

    @cute.jit
    def _position(self, block: Int32, i: cutlass.Constexpr[int]) -> Int32:
        """Position ``i`` of a tile. Beyond the last one, whose rows TMA clips, the last: the table ends there."""
        if cutlass.const_expr(self.plan.config.tile_positions == 1):
            return block
        return min(block * self.plan.config.tile_positions + i, self.table_rows.positions - 1)

    @property
    def _wraps_once(self) -> bool:
        return self.plan.table_wraps_once and self.table_rows.index is None

    @cute.jit
    def _first_table_row(self, row_block: Int32) -> Int32:
        """Table row of the first row of a tile, where the others follow from it without a division."""
        if cutlass.const_expr(not self._wraps_once):
            return Int32(0)
        return self.table_rows.of(row_block * self.plan.config.tile_rows)

    @cute.jit
    def _table_row(self, row_block: Int32, first_table_row: Int32, row: Int32) -> Int32:
        """Table row of row ``row`` of a tile."""
        if cutlass.const_expr(not self._wraps_once):
            return self.table_rows.of(row_block * self.plan.config.tile_rows + row)
        table_row = first_table_row + row
        if table_row >= self.table_rows.positions:
            table_row -= self.table_rows.positions
        return table_row

    @cute.jit
    def _load_pair(self, pair: cute.Tensor, table_row: Int32) -> None:
        block = self.feature_block * 4 + self.thread // 32
        cute.autovec_copy(self.table[None, self.thread % 32 // 4, block, table_row], pair)


# --- the kernel ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceArguments:
    """Arguments of the kernel from the host function: TMA atoms with their views, weight, table, scale and sizes."""

    tiled_mma: cute.TiledMma
    x_atom: cute.CopyAtom
    x: cute.Tensor
    weight_atom: cute.CopyAtom | None
    weight: cute.Tensor
    out_atom: cute.CopyAtom
    out: cute.Tensor
    table: cute.Tensor | None
    table_index: cute.Tensor | None
    table_rows: Int32
    scales: Scales
    rows: Int32
    row_tiles: Int32
    position_tiles: Int32
    groups: Int32
    tile_stages: Int32


class Sm90PatchEmbedKernel(RowsHost):
    """Host entry and kernel for one plan. A resident K is compiled in."""

    plan: Sm90PatchEmbedPlan

    def __init__(self, plan: Sm90PatchEmbedPlan) -> None:
        super().__init__(plan, sm90_graph(plan))
        self.streamed = plan.config.weight == "streamed"
        self.element = ELEMENT_TYPES[plan.problem.in_dtype]
        self.weight_element = ELEMENT_TYPES[WEIGHT_TYPES[plan.problem.in_dtype]]
        self.accumulator = Int32 if plan.sums_integers else Float32

    def arguments(self, operands: RowsOperands) -> DeviceArguments:
        plan, config, o = self.plan, self.plan.config, operands
        tiled_mma = cute.make_tiled_mma(self._mma_op())
        load = cpasync.CopyBulkTensorTileG2SMulticastOp() if config.cluster > 1 else cpasync.CopyBulkTensorTileG2SOp()
        x_atom, x_view = cpasync.make_tiled_tma_atom(
            load, o.x, self._box_layout(1), self._box(plan.tile_k), num_multicast=config.cluster
        )
        weight_atom, weight = None, o.weight
        if self.streamed:
            weight_atom, weight = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), weight, self._block_layout(plan.features, 1),
                (plan.features, plan.tile_k),
            )  # fmt: skip
        out_atom, out_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), o.out, self._staging_layout(), self._box(64)
        )
        groups = cute.ceil_div(cute.ceil_div(o.n, plan.features), config.cluster)
        return DeviceArguments(
            tiled_mma=tiled_mma,
            x_atom=x_atom,
            x=x_view,
            weight_atom=weight_atom,
            weight=weight,
            out_atom=out_atom,
            out=out_view,
            table=self._table_view(o.table, o.table_rows, groups),
            table_index=o.table_index,
            table_rows=o.table_rows,
            scales=o.scales,
            rows=o.rows,
            row_tiles=cute.ceil_div(o.images, plan.tile_images),
            position_tiles=cute.ceil_div(o.positions, config.tile_positions),
            groups=groups,
            tile_stages=cute.ceil_div(o.k, plan.tile_k * config.stage_blocks),
        )

    def _table_view(self, pointer: cute.Pointer | None, rows: Int32, groups: Int32) -> cute.Tensor | None:
        """``[2, 8, padded features / 16, rows]`` over the table of `Plan.table_shape`."""
        if pointer is None:
            return None
        blocks = groups * (self.plan.config.cluster * self.plan.features // 16)
        shape = (2, 8, blocks, rows + int(self.plan.problem.table_index))
        row = cute.assume(blocks * 16, divby=16)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=(1, 2, 16, row)))

    def _mma_op(self) -> warpgroup.MmaOp:
        """WGMMA of 64 features, the rows of a tile and 32 bytes of K."""
        plan = self.plan
        source = warpgroup.OperandSource.SMEM if self.streamed else warpgroup.OperandSource.RMEM
        shape = (64, plan.config.tile_rows, plan.mma_k_bytes * 8 // self.element.width)
        majors = (OperandMajorMode.K, OperandMajorMode.K)
        if plan.sums_integers:
            return warpgroup.MmaI8Op(self.weight_element, self.element, Int32, shape, source, *majors)
        if self.element.width == 16:
            return warpgroup.MmaF16BF16Op(self.element, Float32, shape, source, *majors)
        return warpgroup.MmaF8Op(self.weight_element, self.element, Float32, shape, source, *majors)

    def _block_layout(self, rows: int, blocks: int) -> cute.ComposedLayout:
        """``[rows, 128 bytes of K, blocks]``, K-major, SWIZZLE_128B; without the last mode for a single block."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.element)
        layout = cute.tile_to_shape(atom, (rows, self.plan.tile_k, blocks), order=(0, 1, 2))
        return layout if blocks > 1 else cute.slice_(layout, (None, None, 0))

    def _box(self, columns: int) -> tuple[int, int, int]:
        """``[images, columns, positions]`` of a tile: TMA puts its rows one after another, images fastest."""
        return (self.plan.tile_images, columns, self.plan.config.tile_positions)

    def _box_layout(self, blocks: int) -> cute.ComposedLayout:
        """The bytes of `_block_layout` as TMA fills them: ``[images, 128 bytes of K, positions, blocks]``."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.element)
        layout = cute.tile_to_shape(atom, (*self._box(self.plan.tile_k), blocks), order=(0, 1, 2, 3))
        return layout if blocks > 1 else cute.slice_(layout, (None, None, None, 0))

    def _staging_layout(self) -> cute.ComposedLayout:
        """``[images, 64, positions]`` BF16 of a tile, SWIZZLE_128B."""
        outer = cute.make_layout(self._box(64), stride=(64, 1, 64 * self.plan.tile_images))
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)

    @cute.kernel
    def kernel(self, args: DeviceArguments, profile: cute.Pointer | None) -> None:
        plan, config = self.plan, self.plan.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if config.cluster > 1 else Int32(0)

        storage = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=plan.swizzle_period)
        barriers = cute.recast_ptr(storage, dtype=Int64)
        x_stages, weight_stages, staging = (storage + region.offset for region in plan.smem[1:])
        pipes = make_pipes(self.graph, barriers, Sm90Pipe)
        pipe = pipes["operands"]

        begin(self.graph, warp == plan.load_warp, barriers, (args.x_atom, args.out_atom))

        stamps = stamp_waits(pipes, make_stamps(plan, profile, warp))
        cluster = cute.arch.block_idx()[0] // config.cluster
        clusters = cute.arch.grid_dim()[0] // config.cluster
        slab = cluster % args.groups * config.cluster + cta_rank
        order = PositionOrder(args.row_tiles, args.position_tiles, cluster // args.groups, clusters // args.groups)
        blocks = config.stages * config.stage_blocks
        weight_tensor = None
        if cutlass.const_expr(self.streamed):
            weight_tensor = _blocks(weight_stages, self._block_layout(plan.features, blocks), self.weight_element)

        if warp >= plan.load_warp:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == plan.load_warp:
                self._load(args, x_stages, weight_tensor, pipe, order, slab, cta_rank).run()
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            x_tensor = _blocks(x_stages, self._block_layout(config.tile_rows, blocks), self.element)
            self._mma(args, x_tensor, weight_tensor, staging, pipe, order, slab, warp // 4).run()
        stamps.finish()

    def _load(self, args, x_stages, weight_tensor, pipe, order, slab, cta_rank) -> RowsLoad:
        plan, config = self.plan, self.plan.config
        rows = cute.local_tile(args.x, self._box(plan.tile_k), (None, None, None))
        x_boxes = _blocks(x_stages, self._box_layout(config.stages * config.stage_blocks), self.element)
        x_blocks, x_source = cpasync.tma_partition(
            args.x_atom, cta_rank, cute.make_layout(config.cluster),
            cute.group_modes(x_boxes, 0, 3), cute.group_modes(rows, 0, 3),
        )  # fmt: skip
        weight = None
        if cutlass.const_expr(self.streamed):
            features = cute.local_tile(args.weight, (plan.features, plan.tile_k), (None, None))
            blocks, source = cpasync.tma_partition(
                args.weight_atom, 0, cute.make_layout(1),
                cute.group_modes(weight_tensor, 0, 2), cute.group_modes(features, 0, 2),
            )  # fmt: skip
            weight = (args.weight_atom, source, blocks)
        return RowsLoad(
            args.x_atom, x_source, x_blocks, pipe, order, args.tile_stages, config.stage_blocks, weight, slab,
            config.cluster,
        )  # fmt: skip

    def _mma(self, args, x_tensor, weight_tensor, staging, pipe, order, slab, warpgroup_index) -> Mma:
        plan, config = self.plan, self.plan.config
        thread = cute.arch.thread_idx()[0] % 128
        slice_ = args.tiled_mma.get_slice(thread)
        feature_block = slab * config.warpgroups + warpgroup_index
        if cutlass.const_expr(self.streamed):
            blocks = config.stages * config.stage_blocks
            mine = cute.local_tile(weight_tensor, (64, plan.tile_k, blocks), (warpgroup_index, 0, 0))
            weight = args.tiled_mma.make_fragment_A(slice_.partition_A(mine))
        else:
            weight = resident_weight(args.tiled_mma, slice_, args.weight, feature_block, plan.k_blocks * plan.tile_k)
        x_fragments = args.tiled_mma.make_fragment_B(slice_.partition_B(x_tensor))

        buffer = staging + cute.assume(warpgroup_index * plan.staging_bytes, divby=plan.swizzle_period)
        layout = self._staging_layout()
        staged = cute.make_tensor(cute.recast_ptr(buffer, layout.inner, dtype=BFloat16), layout.outer)
        boxes = cute.local_tile(args.out, self._box(64), (None, None, None))
        source, target = cpasync.tma_partition(
            args.out_atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 3), cute.group_modes(boxes, 0, 3)
        )
        named = {barrier.name: barrier.identifier for barrier in self.graph.named_barriers}
        staging = TransposedStaging(
            buffer, args.out_atom, source, target, thread, named["staged 0"] + warpgroup_index, pipe.stamps
        )
        table_rows = TableRows(args.table_rows, args.table_index, args.rows)
        scales = args.scales.loaded()
        pair = None
        if cutlass.const_expr(scales.features is not None):
            first = feature_block * 64 + thread // 32 * 16 + thread % 32 // 4
            pair = (scales.feature(first), scales.feature(first + 8))
        epilogue = Sm90PatchEmbedEpilogue(plan, staging, args.table, table_rows, scales, pair, feature_block, thread)
        return Mma(
            plan, args.tiled_mma, self.accumulator, weight, x_fragments, pipe, epilogue, order, args.tile_stages,
            warpgroup_index, thread, named["turn 0"],
        )  # fmt: skip


def _blocks(pointer: cute.Pointer, layout: cute.ComposedLayout, element: type) -> cute.Tensor:
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=element), layout.outer)


dsl.name_kernel(Sm90PatchEmbedKernel.kernel, "patch_embed_sm90a")

