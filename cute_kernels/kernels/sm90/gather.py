"""The persistent GEMM over 16-bit images for Hopper: allocate, build pipes, dispatch to roles.

As the dense GEMM, with patches that TMA gathers out of the images themselves: boxes of pixels are a K-major operand as
they land (`cute_kernels.plan.images_gather`).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_kernels.dsl import compiling
from cute_kernels.kernels import tma
from cute_kernels.kernels.host import ELEMENT_TYPES, ImagesHost, Operands
from cute_kernels.kernels.load import Operand, tma_operand
from cute_kernels.kernels.pipes import (
    Pipe,
    Sm90Pipe,
    allocate,
    begin,
    this_cluster,
    warp_and_rank,
)
from cute_kernels.kernels.sm90.gemm_mma import COLUMN_GROUP, GemmMma, Numbers
from cute_kernels.kernels.tiles import PatchOrder
from cute_kernels.plan.base import ITEMSIZE
from cute_kernels.plan.images_gather import BLOCK_PIXELS, Sm90GatherPlan
from cute_kernels.plan.shared_operands import WARPGROUP_ROWS

# --- TMA producer warp: patches out of images, and the weight -> operand stages --------------------------------------

@dataclass(frozen=True)
class GatherLoad:
    """Fills operand stages for every tile of this cluster.

    Each CTA of a cluster loads its share of a box of patches and multicasts it to all of them, so a stage may be filled
    only when the warpgroups of every CTA have released it; each CTA's full barrier expects the whole stage.

    Attributes:
        atom, source, patches: TMA view ``[box, tile of a grid row, of a grid column, of images, rows of pixels]`` and
            buffers ``[box, stage]``. Pixels beyond the images are loaded as zeros: a stage always has all its bytes.
        weight: this CTA's features.
        channel_blocks: blocks of rows of pixels from one channel to the next.
    """

    plan: Sm90GatherPlan
    atom: cute.CopyAtom
    source: cute.Tensor
    patches: cute.Tensor
    weight: Operand
    operands: Pipe
    order: PatchOrder
    channel_blocks: Int32

    @cute.jit
    def run(self) -> None:
        plan = self.plan
        blocks, ctas = plan.problem.patch // plan.pixel_rows, tma.all_ctas(plan.config.cluster)
        state = self.operands.producer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            row_tile, column_tile, image_tile, n_tile = self.order.coordinates(tile)
            weight = self.weight.place(n_tile, ())
            for channel in cutlass.range(plan.problem.channels, unroll=1):
                for block in cutlass.range(blocks, unroll=1):
                    barrier = self.operands.acquire(state)
                    rows = channel * self.channel_blocks + block
                    box = self.source[None, 0, row_tile, column_tile, image_tile, rows]
                    tma.fetch(self.atom, box, self.patches[None, state.index], barrier, ctas)
                    self.weight.fetch(weight, channel * blocks + block, state.index, barrier)
                    state.advance()
        self.operands.drain(state)


# --- consumer warpgroup: operand stages -> WGMMA accumulators -> bias + position, rounding, store buffers, TMA -------

@dataclass(frozen=True)
class GatherMma(GemmMma):
    """Computes and stores this warpgroup's patches of the tiles of its cluster.

    A WGMMA's 64 rows are one patch of each of 64 pieces. MMA tiles run through the places of a patch in a piece first,
    then through blocks of 64 pieces. ``bias``: table ``[2, padded features / 2, rows]``; ``grid``: patches of a column
    and of a row of an image.
    """

    plan: Sm90GatherPlan
    order: PatchOrder
    grid: tuple[Int32, Int32] = (0, 0)

    @property
    def activation(self) -> str:
        return "none"

    @cute.jit
    def _place(self, tile: Int32) -> tuple[Int32, ...]:
        """Place of a tile: its first piece of a grid row, grid row, image and column."""
        plan, config = self.plan, self.plan.config
        row_tile, column_tile, image_tile, n_tile = self.order.coordinates(tile)
        column = (n_tile * config.cluster + self.rank_n) * config.tile_n
        return row_tile * plan.pieces, column_tile * config.tile_rows, image_tile * config.tile_images, column

    def _mma_tile(self, mma_tile: int) -> tuple[Int32 | int, Int32 | int]:
        """Place of an MMA tile's patches in their pieces, and first of its 64 pieces."""
        q = self.plan.config.row_patches
        number = mma_tile if self.plan.config.pingpong else self.warpgroup * self.plan.mma_tiles + mma_tile
        return number % q, number // q * WARPGROUP_ROWS

    def _piece(self, place: tuple[Int32, ...], row: Int32) -> tuple[Int32, Int32, Int32]:
        """Piece of a grid row, grid row and image of a row of the operand."""
        pieces, rows = self.plan.pieces, self.plan.config.tile_rows
        return place[0] + row % pieces, place[1] + row // pieces % rows, place[2] + row // (pieces * rows)

    def _block(self, place: tuple[Int32, ...], mma_tile: int, region: int) -> tuple[Int32, ...]:
        """The box of the output that a store buffer goes to: features, place in a piece, piece, grid row, image."""
        plan = self.plan
        column = place[3] // plan.store_columns + region
        patch, first = self._mma_tile(mma_tile)
        piece, grid_row, image = self._piece(place, first + self.thread // 32 * plan.store_rows)
        _, _, pieces, rows, images = plan.store_box
        return column, patch, piece // pieces, grid_row // rows, image // images

    def _ahead(self, place: tuple[Int32, ...], i: int) -> tuple[cute.Tensor | None, ...] | None:
        region, mma_tile = divmod(i, self.plan.mma_tiles)
        columns = [(region * self._groups + j) * COLUMN_GROUP for j in range(self._groups)]
        return tuple(self._table(place, mma_tile, column) for column in columns)

    def _bias(
        self, ahead: tuple[cute.Tensor | None, ...] | None, group: int, rows: Numbers, columns: Numbers
    ) -> cute.Tensor | None:
        return ahead[group]

    @cute.jit
    def _table(
        self, place: tuple[Int32, ...], mma_tile: cutlass.Constexpr[int], column: cutlass.Constexpr[int]
    ) -> cute.Tensor | None:
        """Table values of the eight accumulators of one column group: two rows, of the same position or not."""
        if cutlass.const_expr(self.bias is None):
            return None
        values = cute.make_rmem_tensor(8, Float32)
        pair = cute.make_rmem_tensor(2, Float32)
        pairs = (place[3] + column) // 2 + self.thread % 4
        for row in cutlass.range_constexpr(2):
            if cutlass.const_expr(row == 0 or not self.plan.one_position):
                table_row = self._table_row(place, mma_tile, row)
            for half in cutlass.range_constexpr(2):
                if cutlass.const_expr(row == 1 and self.plan.one_position):
                    pair[0], pair[1] = values[half * 4], values[half * 4 + 1]
                else:
                    cute.autovec_copy(self.bias[None, pairs + half * 4, table_row], pair)
                values[half * 4 + row * 2], values[half * 4 + row * 2 + 1] = pair[0], pair[1]
        return values

    @cute.jit
    def _table_row(
        self, place: tuple[Int32, ...], mma_tile: cutlass.Constexpr[int], half: cutlass.Constexpr[int]
    ) -> Int32:
        """Position of a thread's row; beyond the grid, where TMA clips, a last one: the table ends there."""
        plan = self.plan
        if cutlass.const_expr(plan.problem.table_rows == 1):
            return Int32(0)
        patch, first = self._mma_tile(mma_tile)
        row = first + self.thread // 32 * plan.store_rows + self.thread % 32 // 4 + 8 * half
        piece, grid_row, _ = self._piece(place, row)
        height, width = self.grid
        return min(grid_row, height - 1) * width + min(piece * plan.config.row_patches + patch, width - 1)


_SWIZZLES = {
    32: warpgroup.SmemLayoutAtomKind.K_SW32,
    64: warpgroup.SmemLayoutAtomKind.K_SW64,
    128: warpgroup.SmemLayoutAtomKind.K_SW128,
}


@dataclass(frozen=True)
class DeviceArguments:
    """Arguments of the kernel from the host: TMA copies, table and sizes in patches and tiles."""

    tiled_mma: cute.TiledMma
    images: tma.Tma
    weight: tma.Tma
    out: tma.Tma
    table: cute.Tensor | None
    grid_height: Int32
    grid_width: Int32
    image_tiles: Int32
    column_tiles: Int32
    row_tiles: Int32
    n_tiles: Int32


class Sm90GatherKernel(ImagesHost):
    """Host entry and kernel for one plan."""

    plan: Sm90GatherPlan

    def __init__(self, plan: Sm90GatherPlan) -> None:
        super().__init__(plan)
        self.dtype, self.out_dtype = (ELEMENT_TYPES[name] for name in (plan.problem.in_dtype, plan.problem.out_dtype))

    def arguments(self, o: Operands, weight: cute.Tensor, grid: tuple[Int32, Int32]) -> DeviceArguments:
        plan, config, problem = self.plan, self.plan.config, self.plan.problem
        grid_height, grid_width = grid
        images = cute.make_tensor(o.images, self._images_layout(o.batch, o.height, o.width))
        out = cute.make_tensor(o.out, self._out_layout(o.batch, grid_height, grid_width, o.n))
        shape, majors = (WARPGROUP_ROWS, config.tile_n, 16), (OperandMajorMode.K, OperandMajorMode.K)
        tiled_mma = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, warpgroup.OperandSource.SMEM, *majors)
        )
        weight_box = (config.tile_n, BLOCK_PIXELS)
        n_tiles = cute.ceil_div(o.n, config.cluster * config.tile_n)
        table = None
        if o.table is not None:
            pairs = n_tiles * (config.cluster * config.tile_n // 2)
            rows = grid_height * grid_width if problem.table_rows > 1 else 1
            table = cute.make_tensor(o.table, cute.make_ordered_layout((2, pairs, rows), order=(0, 1, 2)))
        return DeviceArguments(
            tiled_mma=tiled_mma,
            images=tma.load_tma(images, self._box_layout(1), plan.box, config.cluster),
            weight=tma.load_tma(weight, tma.k_major(self.dtype, weight_box, 1), weight_box),
            out=tma.store_tma(out, self._staging_layout(1), plan.store_box),
            table=table,
            grid_height=grid_height,
            grid_width=grid_width,
            image_tiles=cute.ceil_div(o.batch, config.tile_images),
            column_tiles=cute.ceil_div(grid_height, config.tile_rows),
            row_tiles=cute.ceil_div(grid_width, config.tile_patches),
            n_tiles=n_tiles,
        )

    # ---- memory ----------------------------------------------------------------------------------------------------
    def _images_layout(self, batch: Int32, height: Int32, width: Int32) -> cute.Layout:
        """Contiguous ``[B, C, H, W]`` seen as ``[pixels of a piece, pieces, grid rows, B, rows of pixels]``.

        The last mode has the rows of the upper edge of the image in every channel; a grid row is as many rows further
        down as a patch is high. Rows of 16 bytes and more for TMA.
        """
        p, plan = self.plan.problem, self.plan
        piece = plan.box[0]
        width = cute.assume(width, divby=p.patch)
        grid_row = cute.assume(width * p.patch, divby=p.patch)
        image = cute.assume(height * width * p.channels, divby=p.patch)
        return cute.make_layout(
            (piece, width // piece, height // p.patch, batch, height * p.channels),
            stride=(1, piece, grid_row, image, width),
        )

    def _out_layout(self, batch: Int32, grid_height: Int32, grid_width: Int32, n: Int32) -> cute.Layout:
        """Contiguous ``[B, S, N]`` seen as ``[N, patches of a piece, pieces, grid rows, B]``."""
        patches, divisor = self.plan.config.row_patches, 16 // ITEMSIZE[self.plan.problem.out_dtype]
        n, piece, grid_row, image = (
            cute.assume(value, divby=divisor)
            for value in (n, patches * n, grid_width * n, grid_height * grid_width * n)
        )
        return cute.make_layout(
            (n, patches, grid_width // patches, grid_height, batch), stride=(1, n, piece, grid_row, image)
        )

    def _box_layout(self, stages: int) -> cute.ComposedLayout:
        """The stages as TMA fills them: ``[pixels of a piece, pieces, grid rows, images, rows of pixels, stages]``."""
        box = self.plan.box
        shape = box if stages == 1 else (*box, stages)
        return self._swizzled(cute.make_ordered_layout(shape, order=tuple(range(len(shape)))))

    def _operand_layout(self) -> cute.ComposedLayout:
        """``[patches, 64 pixels of K, stages]``; patches run through 64 pieces, places in a piece, blocks of 64 pieces.
        """
        plan = self.plan
        piece, patch, rows = plan.box[0], plan.problem.patch, plan.box_rows
        blocks = rows // WARPGROUP_ROWS
        patches = cute.make_layout(
            (WARPGROUP_ROWS, (plan.config.row_patches, blocks)), stride=(piece, (patch, WARPGROUP_ROWS * piece))
        )
        pixels = cute.make_layout((patch, plan.pixel_rows), stride=(1, rows * piece))
        stages = cute.make_layout(plan.config.stages, stride=rows * piece * plan.pixel_rows)
        return self._swizzled(
            cute.make_layout(
                (patches.shape, pixels.shape, stages.shape), stride=(patches.stride, pixels.stride, stages.stride)
            )
        )

    def _swizzled(self, layout: cute.Layout) -> cute.ComposedLayout:
        """By the bytes of a row of the operand, as TMA writes them."""
        atom = warpgroup.make_smem_layout_atom(_SWIZZLES[self.plan.row_bytes], self.dtype)
        return cute.make_composed_layout(atom.inner, 0, layout)

    def _staging_layout(self, buffers: int) -> cute.ComposedLayout:
        """Layout of the buffers that a warp stores from, SWIZZLE_128B: rows of 128 bytes of features."""
        box = self.plan.store_box
        shape = box if buffers == 1 else (*box, buffers)
        return tma.swizzled(cute.make_ordered_layout(shape, order=tuple(range(len(shape)))))

    # ---- device ----------------------------------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, args: DeviceArguments) -> None:
        plan, config = self.plan, self.plan.config
        warp, rank = warp_and_rank(plan)
        barriers, memory, pipes = allocate(plan, self.graph, Sm90Pipe)
        pipe = pipes["operands"]
        begin(self.graph, warp == plan.load_warp, barriers, (args.images.atom, args.weight.atom, args.out.atom))

        cluster, clusters = this_cluster(plan)
        order = PatchOrder(
            image_tiles=args.image_tiles, column_tiles=args.column_tiles, row_tiles=args.row_tiles,
            n_tiles=args.n_tiles, images_first=config.order == "row", first=cluster, step=clusters
        )

        if warp >= plan.load_warp:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == plan.load_warp:
                self._load(args, memory, pipe, order, rank).run()
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            self._mma(args, memory, pipe, order, rank, warp).run()

    def _weight_stages(self, memory: cute.Pointer) -> cute.Tensor:
        layout = tma.k_major(self.dtype, (self.plan.config.tile_n, BLOCK_PIXELS), self.plan.config.stages)
        return tma.shared_tensor(memory, layout, self.dtype)

    def _load(
        self, args: DeviceArguments, memory: list[cute.Pointer], pipe: Sm90Pipe, order: PatchOrder, rank: Int32
    ) -> GatherLoad:
        plan, config = self.plan, self.plan.config
        boxes = tma.shared_tensor(memory[0], self._box_layout(config.stages), self.dtype)
        pixels = cute.local_tile(args.images.view, plan.box, (None,) * 5)
        stages, source = tma.sides(args.images.atom, boxes, pixels, 5, (config.cluster, rank))
        features = cute.local_tile(args.weight.view, (config.tile_n, BLOCK_PIXELS), (None, None))
        weight_stages = self._weight_stages(memory[1])
        return GatherLoad(
            plan=plan,
            atom=args.images.atom,
            source=source,
            patches=stages,
            weight=tma_operand(args.weight.atom, features, weight_stages, 2, tile=(config.cluster, rank)),
            operands=pipe,
            order=order,
            channel_blocks=args.grid_height * (plan.problem.patch // plan.pixel_rows),
        )

    def _mma(
        self, args: DeviceArguments, memory: list[cute.Pointer], pipe: Sm90Pipe, order: PatchOrder, rank: Int32,
        warp: Int32
    ) -> GatherMma:
        plan, config = self.plan, self.plan.config
        group, thread = warp // 4, cute.arch.thread_idx()[0] % 128
        slice_ = args.tiled_mma.get_slice(thread)
        operand = tma.shared_tensor(memory[0], self._operand_layout(), self.dtype)
        fragments = args.tiled_mma.make_fragment_A(slice_.partition_A(operand))
        part = 0 if cutlass.const_expr(config.pingpong) else group
        shape = (1, plan.mma_tiles, BLOCK_PIXELS // 16, config.stages)
        fragments = cute.local_tile(fragments, shape, (0, part, 0, 0))
        features = args.tiled_mma.make_fragment_B(slice_.partition_B(self._weight_stages(memory[1])))
        return GatherMma(
            plan=plan, tiled_mma=args.tiled_mma, a_fragments=fragments, b_fragments=features, operands=pipe,
            staging=self._ring(memory[2], args, warp), bias=args.table, order=order, k_blocks=Int32(plan.k_blocks),
            warpgroup=group, thread=thread, rank_m=Int32(0), rank_n=rank, first_cta=0, partials=None,
            order_barrier=self.graph.named_barrier("order barrier 0"), grid=(args.grid_height, args.grid_width)
        )

    def _ring(self, staging: cute.Pointer, args: DeviceArguments, warp: Int32) -> tma.WarpStaging:
        plan, buffers = self.plan, self.plan.config.store_stages
        size = plan.store_rows * plan.k_block_bytes
        base = staging + cute.assume(warp * (buffers * size), divby=size)
        staged = tma.shared_tensor(base, self._staging_layout(max(2, buffers)), self.out_dtype)
        boxes = cute.local_tile(args.out.view, plan.store_box, (None,) * 5)
        source, target = tma.sides(args.out.atom, staged, boxes, 5)
        return tma.WarpStaging(base, plan.store_rows, tma.LINE_BYTES, buffers, args.out.atom, source, target)


compiling.name_kernel(Sm90GatherKernel.kernel, "patch_embed_gather_sm90a")
