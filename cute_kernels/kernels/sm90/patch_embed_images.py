"""The persistent integer GEMM over images for Hopper: allocate, build pipes, dispatch to roles.

As the kernel over FP8 rows, with patches that TMA reads out of the images themselves: a strip of whole pieces of image
rows is a K-major operand as it lands (`cute_kernels.plan.images`).

Rows of 14 pixels begin where no row of an operand can, and TMA cannot gather them: the first coordinate of a box of
bytes has to be a multiple of 16. Strips of them are loaded into a ring of their own, from which warps copy row i, byte
14 i on, to byte 16 i of an operand stage. A thread copies two rows at once, which are seven whole words: the lanes of a
load then read different banks, and of eight lanes four store their second row first, so that stores do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int8, Int32, Uint8, Uint32

from cute_kernels.dsl import compiling
from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue import scale_add
from cute_kernels.kernels.host import ImagesHost, Operands
from cute_kernels.kernels.load import tma_operand
from cute_kernels.kernels.pipes import PipelineState, Sm90Pipe
from cute_kernels.kernels.sm90.transposed import ROWS_PER_STORE, Frame, TransposedKernel, WarpgroupStaging
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
from cute_kernels.kernels.tma import all_ctas, k_major, load_tma, shared_tensor, store_tma, swizzled
from cute_kernels.plan.images_sm90 import REPACK_PAIRS, REPACK_WARPS, Sm90ImagesPlan
from cute_kernels.plan.images_strips import REPACKED
from cute_kernels.plan.tiles import CORE_COLUMNS

# --- epilogue of a consumer warpgroup: integer sums -> FP32, scale, bias + position, BF16 -> staging -> TMA ----------

@dataclass(frozen=True)
class Sm90ImagesEpilogue:
    """Drains one warpgroup's sums of its block of 64 features x the patches of a tile: ``int8`` of the reference. They
    go to ``[box, tile of a grid row, 64-feature block, image tile, grid row]``.

    ``table``: view of `StripsPlan.table_shape`, ``[4, 32, period, padded features / 16, position tiles]``; ``scales``:
    of the two features of a thread; ``held``: registers ``[4, period]`` of table values, and of which position tile
    they are: read anew only where that changes, which with images running fastest is once per many tiles. None if
    registers do not allow it. ``row_tiles``: tiles along a grid row.
    """

    plan: Sm90ImagesPlan
    staging: WarpgroupStaging
    table: cute.Tensor | None
    scales: tuple[Float32, Float32]
    held: tuple[cute.Tensor, cute.Tensor] | None
    row_tiles: Int32
    feature_block: Int32

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
        block = self.feature_block * 4 + self.staging.thread // 32
        source = self.table[None, self.staging.thread % 32, j, block, self._table_tile(position_tile)]
        cute.autovec_copy(source, values)

    def _table_tile(self, position_tile: Int32) -> Int32:
        return position_tile if self.plan.problem.table_rows > 1 else Int32(0)


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


@dataclass(frozen=True)
class DeviceArguments:
    """Arguments of the kernel from the host function: the instruction, and the operands."""

    tiled_mma: cute.TiledMma
    operands: StripsArguments


class Sm90ImagesKernel(ImagesHost, TransposedKernel):
    """Host entry and kernel for one plan."""

    plan: Sm90ImagesPlan

    def arguments(self, o: Operands, weight: cute.Tensor, grid: tuple[Int32, Int32]) -> DeviceArguments:
        plan = self.plan
        if not plan.resident:
            weight = load_tma(weight, k_major(Int8, self._weight_box, 1), self._weight_box)
        out = cute.make_tensor(o.out, out_layout(o.batch, *grid, o.n))
        out = store_tma(out, self.staging_layout(), self.out_box)
        images = images_tma(plan, o, plan.config.cluster)
        common = strips_arguments(plan, o, grid, images, weight, out)
        return DeviceArguments(self.tiled_mma(Int8, Uint8), common)

    @property
    def _weight_box(self) -> tuple[int, int]:
        """``[features, 128 bytes of K]`` of a CTA."""
        return (self.plan.features, self.plan.k_block_bytes)

    @property
    def out_box(self) -> tuple[int, int, int, int]:
        """``[patches, features, images, grid rows]`` of a warpgroup's part of a tile."""
        return (self.plan.tile_patches, 64, self.plan.tile_images, 1)

    def staging_layout(self) -> cute.ComposedLayout:
        strides = (64, 1, 64 * self.plan.tile_patches, 64 * self.plan.tile_rows)
        return swizzled(cute.make_layout(self.out_box, stride=strides))

    @cute.kernel
    def kernel(self, args: DeviceArguments) -> None:
        self.run(args)

    def atoms(self, operands: StripsArguments) -> tuple[cute.CopyAtom, ...]:
        return operands.images[0].atom, operands.out.atom

    def order(self, operands: StripsArguments, first: Int32, step: Int32) -> ImageOrder | PositionOrder:
        return images_order(self.plan, operands, first, step)

    def weight_stages(self, frame: Frame) -> cute.Tensor:
        return shared_tensor(frame.memory[0], k_major(Int8, self._weight_box, self.plan.ring_blocks), Int8)

    def x_stages(self, frame: Frame) -> Iterator[cute.Tensor]:
        for part in self.plan.row_parts:
            yield operand(self.plan, frame.memory[1], part)

    def staging(self, frame: Frame) -> cute.Pointer:
        return frame.memory[2]

    def repack(self, frame: Frame) -> Repack:
        thread = cute.arch.thread_idx()[0] - (self.plan.load_warp + 1) * 32
        _, strips, _, raw = frame.memory
        return Repack(self.plan, raw, strips, frame.pipes["raw"], frame.pipes["operands"], frame.order, thread)

    def load(self, args: DeviceArguments, frame: Frame) -> StripLoad:
        plan, o, ctas, weight = self.plan, args.operands, self.plan.config.cluster, None
        buffers, pipe = frame.memory[1], frame.pipes["operands"]
        if cutlass.const_expr(plan.repacks):
            buffers, pipe = frame.memory[3], frame.pipes["raw"]
        if cutlass.const_expr(not plan.resident):
            features = cute.local_tile(o.weight.view, self._weight_box, (None, None))
            weight = tma_operand(o.weight.atom, features, self.weight_stages(frame), 2)
        pairs = zip(o.images, plan.row_parts, strict=True)
        return StripLoad(
            plan=plan,
            parts=tuple(strip_boxes(plan, tma, buffers, (ctas, frame.rank), part) for tma, part in pairs),
            operands=pipe,
            order=frame.order,
            row_tiles=o.row_tiles,
            multicast=all_ctas(ctas),
            weight=weight,
            n_tile=frame.n_tile,
        )

    def epilogue(
        self, operands: StripsArguments, staging: WarpgroupStaging, feature_block: Int32
    ) -> Sm90ImagesEpilogue:
        o, feature = operands, feature_block * 64 + staging.thread // 32 * 16 + staging.thread % 32 // 4
        scales = (scale_of_feature(o.scale, feature), scale_of_feature(o.scale, feature + 8))
        return Sm90ImagesEpilogue(self.plan, staging, o.table, scales, self._held(), o.row_tiles, feature_block)

    def _held(self) -> tuple[cute.Tensor, cute.Tensor] | None:
        if not self.plan.holds_table:
            return None
        values = cute.make_rmem_tensor((TABLE_VALUES, self.plan.table_period), Float32)
        values.fill(0.0)
        position = cute.make_rmem_tensor(1, Int32)
        position.fill(-1)
        return values, position


compiling.name_kernel(Sm90ImagesKernel.kernel, "patch_embed_images_sm90a")
