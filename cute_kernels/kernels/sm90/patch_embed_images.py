"""The persistent integer GEMM over images for Hopper: allocate, build pipes, dispatch to roles.

As the kernel over FP8 rows, with patches that TMA reads out of the images themselves: a strip of whole pieces of image
rows is a K-major operand as it lands (`cute_kernels.plan.images`).

Rows of 14 pixels begin where no row of an operand can, and TMA cannot gather them: the first coordinate of a box of
bytes has to be a multiple of 16. Strips of them are loaded into a ring of their own, from which warps copy row i, byte
14 i on, to byte 16 i of an operand stage. A thread copies two rows at once, which are seven whole words: the lanes of a
load then read different banks, and of eight lanes four store their second row first, so that stores do.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int8, Int32, Uint8, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_kernels import dsl
from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue import scale_add
from cute_kernels.kernels.host import ImagesHost, Operands
from cute_kernels.kernels.load import Operand, tma_operand
from cute_kernels.kernels.pipes import (
    PipelineState,
    Sm90Pipe,
    allocate,
    begin,
    make_stamps,
    stamp_waits,
    this_cluster,
    warp_and_rank,
)
from cute_kernels.kernels.sm90.transposed import (
    ROWS_PER_STORE,
    Mma,
    WarpgroupStaging,
    resident_weight,
    warpgroup_staging,
)
from cute_kernels.kernels.strips import (
    TABLE_VALUES,
    StripLoad,
    StripsArguments,
    images_order,
    images_tma,
    operand,
    out_layout,
    scale_of_feature,
    strip_boxes,
    strips_arguments,
)
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.kernels.tma import Tma, all_ctas, k_major, load_tma, shared_tensor, store_tma, swizzled
from cute_kernels.plan.base import Phase
from cute_kernels.plan.images_sm90 import REPACK_PAIRS, REPACK_WARPS, Sm90ImagesPlan
from cute_kernels.plan.images_strips import REPACKED
from cute_kernels.plan.tiles import CORE_COLUMNS

# --- epilogue of a consumer warpgroup: integer sums -> FP32, scale, bias + position, BF16 -> staging -> TMA ----------


@dataclass(frozen=True)
class Sm90ImagesEpilogue:
    """Drains one warpgroup's sums of 64 features x the patches of a tile: ``int8`` of the reference.

    Attributes:
        staging: this warpgroup's buffer, stored to ``[box, tile of a grid row, 64-feature block, image tile, grid
            row]``.
        table: ``[4, 32, period, padded features / 16, position tiles]`` view of the table, or None: see
            `StripsPlan.table_shape`.
        scales: of the two features of a thread.
        held: registers ``[4, period]`` of table values, and of which position tile they are: read anew only where that
            changes, which with images running fastest is once per many tiles. None if registers do not allow it.
        row_tiles: tiles along a grid row.
        feature_block: this warpgroup's block of 64 features.
        thread: index in the warpgroup.
    """

    plan: Sm90ImagesPlan
    staging: WarpgroupStaging
    table: cute.Tensor | None
    scales: tuple[Float32, Float32]
    held: tuple[cute.Tensor, cute.Tensor] | None
    row_tiles: Int32
    feature_block: Int32
    thread: Int32

    @cute.jit
    def prefetch(self, image_tile: Int32, position_tile: Int32) -> None:
        """Fetches the table values of a tile, if they have a place and are not there."""
        if cutlass.const_expr(self.held is not None):
            values, position = self.held
            if self._table_tile(position_tile) != position[0]:
                for j in cutlass.range_constexpr(self.plan.table_period):
                    self._load(values[None, j], j, position_tile)
                position[0] = self._table_tile(position_tile)

    @cute.jit
    def store(self, sums: cute.Tensor, fetched: None, image_tile: Int32, position_tile: Int32) -> None:
        """Converts, stages and stores one tile; returns as soon as the TMA store is issued."""
        groups = ROWS_PER_STORE // CORE_COLUMNS
        addresses = self.staging.addresses()
        self.staging.acquire()
        for i in cutlass.range_constexpr(self.plan.tile_rows // ROWS_PER_STORE):
            values = cute.make_rmem_tensor(TABLE_VALUES * groups, Float32)
            for group in cutlass.range_constexpr(groups):
                addends = self._addends(i * groups + group, position_tile)
                for j in cutlass.range_constexpr(TABLE_VALUES):
                    total = (Float32(sums[(i * groups + group) * TABLE_VALUES + j]),)
                    addend = None if addends is None else (addends[j],)
                    (values[group * TABLE_VALUES + j],) = scale_add(total, (self.scales[j // 2],), addend)
            rounded = cute.make_rmem_tensor(TABLE_VALUES * groups, BFloat16)
            rounded.store(values.load().to(BFloat16))
            self.staging.write(addresses, rounded, i)
        grid_row = position_tile // self.row_tiles
        self.staging.store(position_tile - grid_row * self.row_tiles, self.feature_block, image_tile, grid_row)

    @cute.jit
    def finish(self) -> None:
        self.staging.finish()

    def _addends(self, group: int, position_tile: Int32) -> cute.Tensor | None:
        """Table values of the ``group``-th 8 columns."""
        if self.table is None:
            return None
        j = group % self.plan.table_period
        if self.held is not None:
            return self.held[0][None, j]
        values = cute.make_rmem_tensor(TABLE_VALUES, Float32)
        self._load(values, j, position_tile)
        return values

    def _load(self, values: cute.Tensor, j: int, position_tile: Int32) -> None:
        block = self.feature_block * 4 + self.thread // 32
        source = self.table[None, self.thread % 32, j, block, self._table_tile(position_tile)]
        cute.autovec_copy(source, values)

    def _table_tile(self, position_tile: Int32) -> Int32:
        return position_tile if self.plan.problem.table_rows > 1 else Int32(0)


# --- the product, and a weight that comes through shared memory K block by K block ----------------------------------


def integer_mma(plan: Sm90ImagesPlan, source: warpgroup.OperandSource) -> cute.TiledMma:
    """64 features x a tile's patches x 32 bytes; ``source`` is where the features' weight comes from."""
    shape, majors = (64, plan.tile_rows, 32), (OperandMajorMode.K, OperandMajorMode.K)
    return cute.make_tiled_mma(warpgroup.MmaI8Op(Int8, Uint8, Int32, shape, source, *majors))


def weight_tensor(plan: Sm90ImagesPlan, memory: cute.Pointer, blocks: int) -> cute.Tensor:
    """``[features, 128 bytes of K, blocks]`` over shared memory."""
    return shared_tensor(memory, k_major(Int8, (plan.features, plan.k_block_bytes), blocks), Int8)


def weight_tma(plan: Sm90ImagesPlan, weight: cute.Tensor) -> Tma:
    """TMA load of one K block of a CTA's features: atom and view of ``[N, K]``."""
    box = (plan.features, plan.k_block_bytes)
    return load_tma(weight, k_major(Int8, box, 1), box)


def weight_operand(plan: Sm90ImagesPlan, tma: Tma, memory: cute.Pointer, blocks: int) -> Operand:
    """Operand that loads K blocks of a CTA's features, given atom and view, into buffers in shared memory."""
    boxes = cute.local_tile(tma.view, (plan.features, plan.k_block_bytes), (None, None))
    return tma_operand(tma.atom, boxes, weight_tensor(plan, memory, blocks), 2)


# --- warps between TMA and the operand: rows of patches of 14 bytes, side by side in a strip, become rows of 16 ------


THREADS = REPACK_WARPS * 32

ROW_BYTES = 16

WORDS = 4
"""Words of 4 bytes of a row in the operand."""

PAIR_WORDS = 7
"""Words of two rows of 14 bytes. An odd number: lanes that read every seventh word read different banks."""


@dataclass(frozen=True)
class Repack:
    """Fills operand stages out of raw strips, one plane of a tile at a time.

    A strip lands as ``[row][patch][14 bytes]``, the patches of all images side by side, and the operand wants ``[row]
    [patch][16 bytes]``: row i of either, counted through, begins at 14 i and at 16 i. What a thread copies does not
    depend on where rows of the images end. The last two rows of a patch in the operand, zeros, are not there.

    Attributes:
        raw, stages: buffers of both.
        strips, operands: pipes of both.
        thread: index among the threads of the role.
    """

    plan: Sm90ImagesPlan
    raw: cute.Pointer
    stages: cute.Pointer
    strips: Sm90Pipe
    operands: Sm90Pipe
    order: PositionOrder | ImageOrder
    thread: Int32

    @cute.jit
    def run(self) -> None:
        plan, lane = self.plan, self.thread % 32
        strip, stage = self.strips.consumer_state(), self.operands.producer_state()
        for _ in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            self.strips.stamps.mark(Phase.TILE)
            for _ in cutlass.range(plan.planes, unroll=1):
                self.strips.wait_full(strip)
                raw = self.raw + cute.assume(strip.index * plan.load_pitch, divby=128)
                buffer = self.stages + cute.assume(stage.index * plan.pixel_stage_bytes, divby=128)
                self._copy(raw, buffer, strip, stage)
                # WGMMA reads the operand through the async proxy.
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                self.operands.arrive_written(stage, lane)
                strip.advance()
                stage.advance()

    @cute.jit
    def _copy(
        self, raw: cute.Pointer, stage: cute.Pointer, strip_state: PipelineState, stage_state: PipelineState
    ) -> None:
        """Repacks as many pairs in registers as a thread holds, whose loads do not wait for each other.

        The strip is free when the last ones are loaded, and the stage has to be when the first ones are stored.
        """
        held = REPACK_PAIRS
        rounds = -(-self._pairs // (held * THREADS))
        for r in cutlass.range_constexpr(rounds):
            indices = [self.thread + j * THREADS for j in range(r * held, (r + 1) * held) if j * THREADS < self._pairs]
            pairs = [self._load_pair(raw, cutlass.min(i, Int32(self._pairs - 1))) for i in indices]
            if cutlass.const_expr(r == rounds - 1):
                # TMA writes the strip through the async proxy. Without the fence ptxas lets the arrival overtake the
                # loads, which wait for no result: on an H200 results were wrong.
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                self.strips.arrive_empty(strip_state, self.thread % 32, self.plan.config.cluster)
            if cutlass.const_expr(r == 0):
                self.operands.wait_empty(stage_state)
            for j in cutlass.range_constexpr(len(pairs)):
                if cutlass.const_expr((r * held + j + 1) * THREADS <= self._pairs):
                    self._store_pair(stage, indices[j], pairs[j])
                elif indices[j] < self._pairs:
                    self._store_pair(stage, indices[j], pairs[j])

    @property
    def _pairs(self) -> int:
        """Pairs of rows of a plane of a tile."""
        return REPACKED * self.plan.tile_rows // 2

    def _load_pair(self, raw: cute.Pointer, i: Int32) -> list[Uint32]:
        """The words of two rows: the first begins with a word, the second in the middle of one."""
        source = cute.recast_ptr(raw + cute.assume(i * PAIR_WORDS * 4, divby=4), dtype=Uint32)
        words = cute.make_tensor(source, PAIR_WORDS)
        return [words[j] for j in range(PAIR_WORDS)]

    @cute.jit
    def _store_pair(self, stage: cute.Pointer, i: Int32, w: list[Uint32]) -> None:
        # Of eight lanes, whose stores of 16 bytes are one wavefront, four write first rows and four second ones.
        second_first = self.thread // 4 % 2
        first = (w[0], w[1], w[2], w[3] & Uint32(0xFFFF))
        second = (*(ptx.shf_r_wrap_b32(w[j], w[j + 1], Uint32(16)) for j in (3, 4, 5)), w[6] >> Uint32(16))
        self._store(stage, i * 2 + second_first, second_first, second, first)
        self._store(stage, i * 2 + 1 - second_first, second_first, first, second)

    @cute.jit
    def _store(self, stage: cute.Pointer, i: Int32, choice: Int32, yes: tuple, no: tuple) -> None:
        row = cute.make_rmem_tensor(WORDS, Uint32)
        for j in cutlass.range_constexpr(WORDS):
            row[j] = cutlass.select_(choice != 0, yes[j], no[j])
        cute.autovec_copy(row, self._row(stage, i))

    def _row(self, stage: cute.Pointer, i: Int32) -> cute.Tensor:
        target = stage + cute.assume(i * ROW_BYTES, divby=ROW_BYTES)
        return cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), WORDS)


# --- the kernel ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceArguments:
    """Arguments of the kernel from the host function: the instruction, and the operands."""

    tiled_mma: cute.TiledMma
    operands: StripsArguments


@dataclass(frozen=True)
class SplitMma(Mma):
    """With descriptors of their own for the shorter parts of split rows, the last block of every stage."""

    rest_fragments: cute.Tensor

    def _columns(self, stage: Int32, block: int, step: int) -> cute.Tensor:
        longer, shorter = self.plan.row_parts
        if block < longer.blocks:
            return self.x_fragments[None, None, step, stage * longer.blocks + block]
        return self.rest_fragments[None, None, step, stage * shorter.blocks + block - longer.blocks]


class Sm90ImagesKernel(ImagesHost):
    """Host entry and kernel for one plan."""

    plan: Sm90ImagesPlan

    def arguments(self, o: Operands, weight: cute.Tensor, grid: tuple[Int32, Int32]) -> DeviceArguments:
        plan = self.plan
        weight = weight if plan.resident else weight_tma(plan, weight)
        out = cute.make_tensor(o.out, out_layout(o.batch, *grid, o.n))
        out = store_tma(out, self._staging_layout(), self._out_box())
        images = images_tma(plan, o, plan.config.cluster)
        source = warpgroup.OperandSource.RMEM if plan.resident else warpgroup.OperandSource.SMEM
        common = strips_arguments(plan, o, grid, images, weight, out)
        return DeviceArguments(integer_mma(plan, source), common)

    def _out_box(self) -> tuple[int, int, int, int]:
        """``[patches, features, images, grid rows]`` of a warpgroup's part of a tile."""
        return (self.plan.tile_patches, 64, self.plan.tile_images, 1)

    def _staging_layout(self) -> cute.ComposedLayout:
        """That box in BF16, SWIZZLE_128B: patches follow each other, image after image, as the columns of a tile do."""
        strides = (64, 1, 64 * self.plan.tile_patches, 64 * self.plan.tile_rows)
        return swizzled(cute.make_layout(self._out_box(), stride=strides))

    @cute.kernel
    def kernel(self, args: DeviceArguments, profile: cute.Pointer | None) -> None:
        plan, config, o = self.plan, self.plan.config, args.operands
        warp, cta_rank = warp_and_rank(plan)
        barriers, (weight, strips, staging, *raw), pipes = allocate(plan, self.graph, Sm90Pipe)
        pipe = pipes["operands"]
        begin(self.graph, warp == plan.load_warp, barriers, (o.images[0].atom, o.out.atom))

        stamps = stamp_waits(pipes, make_stamps(plan, profile, warp))
        cluster, clusters = this_cluster(plan)
        n_tile = cluster % o.feature_groups * config.cluster + cta_rank
        order = images_order(plan, o, cluster // o.feature_groups, clusters // o.feature_groups)

        if warp >= plan.load_warp:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == plan.load_warp:
                loaded = (raw[0], pipes["raw"]) if plan.repacks else (strips, pipe)
                self._load(o, weight, *loaded, order, n_tile, cta_rank).run()
            elif cutlass.const_expr(plan.repacks):
                thread = cute.arch.thread_idx()[0] - (plan.load_warp + 1) * 32
                Repack(
                    plan=plan, raw=raw[0], stages=strips, strips=pipes["raw"], operands=pipe, order=order, thread=thread
                ).run()
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            self._mma(args, (weight, strips, staging), pipe, order, n_tile, warp // 4).run()
        stamps.finish()

    def _load(
        self,
        args: StripsArguments,
        shared: cute.Pointer,
        strips: cute.Pointer,
        pipe: Sm90Pipe,
        order: ImageOrder | PositionOrder,
        n_tile: Int32,
        cta_rank: Int32,
    ) -> StripLoad:
        ctas = self.plan.config.cluster
        weight = None
        if cutlass.const_expr(not self.plan.resident):
            weight = weight_operand(self.plan, args.weight, shared, self.plan.ring_blocks)
        pairs = zip(args.images, self.plan.row_parts, strict=True)
        return StripLoad(
            plan=self.plan,
            parts=tuple(strip_boxes(self.plan, tma, strips, (ctas, cta_rank), part) for tma, part in pairs),
            operands=pipe,
            order=order,
            row_tiles=args.row_tiles,
            multicast=all_ctas(ctas),
            weight=weight,
            n_tile=n_tile,
        )

    def _mma(
        self,
        args: DeviceArguments,
        memory: tuple[cute.Pointer, cute.Pointer, cute.Pointer],
        pipe: Sm90Pipe,
        order: ImageOrder | PositionOrder,
        n_tile: Int32,
        warpgroup_index: Int32,
    ) -> Mma:
        plan, config, o = self.plan, self.plan.config, args.operands
        shared, strips, staging = memory
        thread = cute.arch.thread_idx()[0] % 128
        slice_ = args.tiled_mma.get_slice(thread)
        feature_block = n_tile * config.warpgroups + warpgroup_index
        if cutlass.const_expr(plan.resident):
            columns = plan.k_blocks * plan.k_block_bytes
            weight = resident_weight(args.tiled_mma, slice_, o.weight, feature_block, columns)
        else:
            streamed = weight_tensor(plan, shared, plan.ring_blocks)
            mine = cute.local_tile(streamed, (64, plan.k_block_bytes, plan.ring_blocks), (warpgroup_index, 0, 0))
            weight = args.tiled_mma.make_fragment_A(slice_.partition_A(mine))
        fragments, *others = (
            args.tiled_mma.make_fragment_B(slice_.partition_B(operand(plan, strips, part))) for part in plan.row_parts
        )

        buffer = warpgroup_staging(
            plan,
            staging,
            layout=self._staging_layout(),
            out=o.out,
            box=self._out_box(),
            warpgroup=warpgroup_index,
            staged=self.graph.named_barrier("staged 0"),
            stamps=pipe.stamps,
        )
        feature = feature_block * 64 + thread // 32 * 16 + thread % 32 // 4
        scales = (scale_of_feature(o.scale, feature), scale_of_feature(o.scale, feature + 8))
        epilogue = Sm90ImagesEpilogue(
            plan=plan,
            staging=buffer,
            table=o.table,
            scales=scales,
            held=self._held(),
            row_tiles=o.row_tiles,
            feature_block=feature_block,
            thread=thread,
        )
        common = {
            "plan": plan,
            "tiled_mma": args.tiled_mma,
            "accumulator_type": Int32,
            "weight": weight,
            "x_fragments": fragments,
            "operands": pipe,
            "epilogue": epilogue,
            "order": order,
            "tile_stages": Int32(plan.tile_stages),
            "warpgroup": warpgroup_index,
            "thread": thread,
            "order_barrier": self.graph.named_barrier("order barrier 0"),
        }
        if cutlass.const_expr(plan.splits):
            return SplitMma(**common, rest_fragments=others[0])
        return Mma(**common)

    def _held(self) -> tuple[cute.Tensor, cute.Tensor] | None:
        if not self.plan.holds_table:
            return None
        values = cute.make_rmem_tensor((TABLE_VALUES, self.plan.table_period), Float32)
        values.fill(0.0)
        position = cute.make_rmem_tensor(1, Int32)
        position.fill(-1)
        return values, position


dsl.name_kernel(Sm90ImagesKernel.kernel, "patch_embed_images_sm90a")
