"""The persistent GEMM over images for Blackwell: allocate, build pipes, dispatch to roles.

The output is computed transposed, ``D[feature, patch] = weight * patches^T``: 128 features of the weight stay in
each CTA for the whole launch, and strips of images, which TMA reads where they lie, are the N operand.
The load warp of each CTA streams strips, the leader's MMA warp issues, and the epilogue warps drain one MMA tile of
the accumulators while another is computed.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.dsl import compiling
from cute_kernels.kernels.epilogue import scale_add
from cute_kernels.kernels.host import ELEMENT_TYPES, ImagesHost, Operands
from cute_kernels.kernels.pipes import Pipe
from cute_kernels.kernels.sm100.cta_pair import ClusterPlace, cta_group
from cute_kernels.kernels.sm100.transposed import MATRICES, TransposedEpilogue, TransposedKernel, transposed_layout
from cute_kernels.kernels.strips import (
    TABLE_VALUES,
    StripLoad,
    StripsArguments,
    images_order,
    images_tma,
    operand_layout,
    out_layout,
    row_swizzle,
    scale_of_feature,
    strip_boxes,
    strips_arguments,
)
from cute_kernels.kernels.tiles import ImageOrder, PositionOrder
from cute_kernels.kernels.tma import MMA_STEPS
from cute_kernels.plan.base import LANES
from cute_kernels.plan.images import STRIP_PATCH
from cute_kernels.plan.images_sm100 import Sm100ImagesPlan
from cute_kernels.plan.images_strips import BLOCK_FEATURES
from cute_kernels.plan.tiles import CORE_COLUMNS

# --- strips of images as the N operand of tcgen05.mma, where they land -----------------------------------------------

@dataclass(frozen=True)
class Strips:
    """Operand stages that begin at ``strips`` in shared memory."""

    plan: Sm100ImagesPlan
    strips: cute.Pointer

    def fragments(self, tiled_mma: cute.TiledMma, first: int, columns: int) -> cute.Tensor:
        """Shared-memory descriptors ``[.., k step in block, block]`` of this CTA's patches of an MMA tile."""
        plan = self.plan
        count, first = columns // plan.cta_group, first // plan.cta_group
        if plan.in_bytes == 2:
            rows, blocks = STRIP_PATCH * plan.cta_patches, plan.ring_blocks
            layout = cute.make_layout(
                ((count, STRIP_PATCH), 1, MMA_STEPS, blocks), stride=((STRIP_PATCH, 1), 0, rows, MMA_STEPS * rows)
            )
            strips = self.strips + plan.in_bytes * STRIP_PATCH * first
            strips = cute.recast_ptr(strips, row_swizzle(plan.row_parts[0]), dtype=ELEMENT_TYPES[plan.problem.in_dtype])
            return tiled_mma.make_fragment_B(cute.make_tensor(strips, layout))
        whole = operand_layout(plan, plan.row_parts[0])
        chunks, step, block = whole.stride[1], 2 * whole.stride[1][1], whole.stride[2]
        layout = cute.make_layout(
            ((count, (STRIP_PATCH, 2)), 1, MMA_STEPS, whole.shape[2]), stride=((STRIP_PATCH, chunks), 0, step, block)
        )
        strips = self.strips + STRIP_PATCH * first
        return tiled_mma.make_fragment_B(cute.make_tensor(strips, layout))


# --- epilogue warps: sums -> FP32, scale, bias + position, rounding -> transposed staging -> TMA stores --------------

BLOCKS = LANES // BLOCK_FEATURES
"""Blocks of 16 features of an epilogue warp."""


@dataclass(frozen=True)
class Sm100ImagesEpilogue(TransposedEpilogue):
    """Epilogue of patches of images, stored to ``[box, tile of a grid row, block of features, image tile, grid row]``.

    Integer sums by the contract ``int8`` of the reference; FP32 sums, which have no scales, get the table by one
    addition, and are rounded. ``table``: view of `StripsPlan.table_shape`, ``[4, 32, period, padded features / 16,
    position tiles]``; ``scales``: of the four features of a thread, ``lane / 4 + 8 i``; ``row_tiles``: tiles along a
    grid row.
    """

    plan: Sm100ImagesPlan
    table: cute.Tensor | None
    scales: tuple[Float32, ...] | None
    row_tiles: Int32

    def registers(self) -> cute.Tensor | None:
        """``[4, blocks of 16 features, period]``: read anew where the position changes, with images fastest rarely."""
        if self.table is None:
            return None
        values = cute.make_rmem_tensor((TABLE_VALUES, BLOCKS, self.plan.table_period), Float32)
        values.fill(0.0)
        return values

    @cute.jit
    def fetch(self, registers: cute.Tensor | None, row_block: Int32, position: Int32, held: Int32) -> Int32:
        if cutlass.const_expr(registers is not None):
            tile = position if self.plan.problem.table_rows > 1 else Int32(0)
            if tile != held:
                self._load_table(registers, tile)
                held = tile
        return held

    @cute.jit
    def finish(
        self, sums: cute.Tensor, registers: cute.Tensor | None, held: Int32, row: cutlass.Constexpr[int],
        row_block: Int32, position: Int32
    ) -> cute.Tensor:
        values = cute.make_rmem_tensor((2, MATRICES), Float32)
        for i in cutlass.range_constexpr(MATRICES):
            pair = (Float32(sums[0, i % 2, i // 2]), Float32(sums[1, i % 2, i // 2]))
            if cutlass.const_expr(registers is not None or self.scales is not None):
                scale, addends = Float32(1.0) if self.scales is None else self.scales[i], None
                if cutlass.const_expr(registers is not None):
                    j = row // CORE_COLUMNS % self.plan.table_period
                    addends = (registers[2 * (i % 2), i // 2, j], registers[2 * (i % 2) + 1, i // 2, j])
                pair = scale_add(pair, (scale, scale), addends, packed_f32=True)
            values[0, i], values[1, i] = pair
        rounded = cute.make_rmem_tensor((2, MATRICES), self.staging.dtype)
        rounded.store(values.load().to(self.staging.dtype))
        return rounded

    @cute.jit
    def store(self, row_block: Int32, position: Int32) -> None:
        grid_row = position // self.row_tiles
        row_tile = position - grid_row * self.row_tiles
        self.staging.store(row_tile, self.feature_block, row_block, grid_row)

    @cute.jit
    def _load_table(self, values: cute.Tensor, tile: Int32) -> None:
        for j in cutlass.range_constexpr(self.plan.table_period):
            for block in cutlass.range_constexpr(BLOCKS):
                source = self.table[None, self.staging.lane, j, self.feature_block * BLOCKS + block, tile]
                cute.autovec_copy(source, values[None, block, j])


class Sm100ImagesKernel(ImagesHost, TransposedKernel):
    """Host entry and kernel for one plan."""

    plan: Sm100ImagesPlan

    def arguments(self, o: Operands, weight: cute.Tensor, grid: tuple[Int32, Int32]) -> StripsArguments:
        plan = self.plan
        out = cute.make_tensor(o.out, out_layout(o.batch, *grid, o.n))
        images = images_tma(plan, o, 1, cta_group(plan))
        return strips_arguments(plan, o, grid, images, self.weight_tma(weight), self.out_tma(out))

    @cute.kernel
    def kernel(self, args: StripsArguments) -> None:
        self.run(args)

    def atoms(self, args: StripsArguments) -> tuple[cute.CopyAtom, ...]:
        return args.images[0].atom, args.out.atom

    def order(self, args: StripsArguments, first: Int32, step: Int32) -> ImageOrder | PositionOrder:
        return images_order(self.plan, args, first, step)

    def load(
        self, args: StripsArguments, stages: cute.Pointer, pipe: Pipe, order: ImageOrder | PositionOrder,
        place: ClusterPlace
    ) -> StripLoad:
        plan = self.plan
        return StripLoad(
            plan=plan,
            parts=(strip_boxes(plan, args.images[0], stages, (1, 0), plan.row_parts[0]),),
            operands=pipe,
            order=order,
            row_tiles=args.row_tiles,
            image_step=plan.cta_group,
            first_images=place.rank,
            announces=place.leads,
        )

    def operand(self, stages: cute.Pointer) -> Strips:
        return Strips(self.plan, stages)

    @property
    def out_box(self) -> tuple[int, int, int, int]:
        """``[patches, features, images, grid rows]`` of a warp's part of a tile."""
        return (self.plan.tile_patches, LANES, self.plan.tile_images, 1)

    def staging_layout(self) -> cute.ComposedLayout:
        """Patches follow each other, image after image, as those of a tile do."""
        plan = self.plan
        return transposed_layout(self.out_box, (LANES, 1, LANES * plan.tile_patches, LANES * plan.columns))

    def epilogue(self, args: StripsArguments, drain: TransposedEpilogue) -> Sm100ImagesEpilogue:
        scales = None
        if cutlass.const_expr(args.scale is not None):
            first = drain.feature_block * LANES + drain.staging.lane // 4
            scales = tuple(scale_of_feature(args.scale, first + 8 * i) for i in range(MATRICES))
        return Sm100ImagesEpilogue(**vars(drain), table=args.table, scales=scales, row_tiles=args.row_tiles)


compiling.name_kernel(Sm100ImagesKernel.kernel, "patch_embed_images_sm100a")
