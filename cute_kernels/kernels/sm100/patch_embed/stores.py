"""How a warp's rows of the output leave: registers -> staging -> global memory, one class per way.

Every class has ``write`` (values of this thread's row from a column of the warp on), ``finish_tile`` and ``finish``
(before the CTA exits). Nothing is shared between warps.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from cute_kernels.kernels import ptx
from cute_kernels.kernels.sm100.patch_embed.rows import TileRows, WarpRows
from cute_kernels.kernels.staging import CHUNK_BYTES, WarpStaging, warp_staging
from cute_kernels.kernels.stamps import NO_STAMPS, Stamps
from cute_kernels.plan import LANES, Sm100PatchEmbedPlan
from cute_kernels.plan.patch_embed.sm100_epilogue import DIRECT_BYTES
from cute_kernels.plan.profile import Phase

BYTES = 2
"""Of an element of the output."""


@dataclass(frozen=True)
class Output:
    """Where all warps of a CTA store.

    Attributes:
        staging: this CTA's staging area.
        atom: TMA store of a region, or None where threads store.
        out: its TMA view ``[images, N, positions]``, or that of the memory itself.
        rows: of the tiles.
        stamps: of the warp.
    """

    plan: Sm100PatchEmbedPlan
    staging: cute.Pointer
    atom: cute.CopyAtom | None
    out: cute.Tensor
    rows: TileRows
    stamps: Stamps = NO_STAMPS

    def of_warp(self, columns: int, offset: Int32, lane: Int32) -> TmaStores | CoalescedStores | DirectStores:
        """The stores of a warp with so many columns, whose staging begins at byte ``offset``."""
        plan = self.plan
        if plan.config.store == "direct":
            return DirectStores(plan, self.out, self.rows, lane, self.stamps)
        if plan.config.store == "coalesced":
            pitch = plan.padded_row_bytes(columns)
            base = self.staging + cute.assume(offset, divby=CHUNK_BYTES)
            return CoalescedStores(plan, base, pitch, columns, self.out, self.rows, lane, self.stamps)
        ring = warp_staging(
            self.staging, offset // plan.store_region_bytes, LANES, plan.store_buffers(columns), self.atom, self.out,
            BFloat16,
        )  # fmt: skip
        return TmaStores(plan, ring, ring.row_chunks(lane), columns, self.stamps)


@dataclass(frozen=True)
class TmaStores:
    """Swizzled regions of 64 columns, whose TMA stores are issued in groups.

    Attributes:
        ring: the warp's buffers.
        row_chunks: where this thread's row of the first buffer keeps its chunks.
        columns: of the warp.
    """

    plan: Sm100PatchEmbedPlan
    ring: WarpStaging
    row_chunks: tuple[cute.Pointer, ...]
    columns: int
    stamps: Stamps

    @cute.jit
    def write(
        self, values: cute.Tensor, column: cutlass.Constexpr[int], rows: WarpRows, first_column: Int32
    ) -> None:
        width = self.plan.store_columns
        region = column // width
        group = next(group for group in self.plan.store_groups(self.columns) if group.first <= region < group.end)
        if cutlass.const_expr(column == group.first * width):
            self.stamps.mark(Phase.BUFFER)
            self.ring.acquire(group.pending)
        self.stamps.mark(Phase.STAGING)
        self.ring.write_row(values, self.row_chunks, region % self.ring.buffers, column % width)
        if cutlass.const_expr(column + cute.size(values) == group.end * width):
            self.stamps.mark(Phase.STORE)
            self.ring.publish()
            for i in cutlass.range_constexpr(group.first, group.end):
                block = first_column // width + i
                self.ring.issue(i % self.ring.buffers, rows.block, block, rows.position)
            self.ring.commit()

    def finish_tile(self, rows: WarpRows, first_column: Int32) -> None:
        """All groups of the tile are issued."""

    def finish(self) -> None:
        self.ring.finish()


@dataclass(frozen=True)
class CoalescedStores:
    """Padded rows of staging: each thread writes its own row, then the warp reads row by row and stores it.

    Attributes:
        base: the warp's staging.
        pitch: bytes from row to row.
        columns: of the warp, ``columns / 32`` of which a lane reads of every row.
        out: ``[images, N, positions]`` over the output.
    """

    plan: Sm100PatchEmbedPlan
    base: cute.Pointer
    pitch: int
    columns: int
    out: cute.Tensor
    rows: TileRows
    lane: Int32
    stamps: Stamps

    @cute.jit
    def write(
        self, values: cute.Tensor, column: cutlass.Constexpr[int], rows: WarpRows, first_column: Int32
    ) -> None:
        self.stamps.mark(Phase.STAGING)
        count = CHUNK_BYTES // BYTES
        packed = cute.make_tensor(values.iterator, cute.make_layout((count, cute.size(values) // count)))
        row = self.base + cute.assume(self.lane * self.pitch, divby=CHUNK_BYTES)
        for i in cutlass.range_constexpr(cute.size(values) // count):
            target = cute.recast_ptr(row + (column * BYTES + i * CHUNK_BYTES), dtype=BFloat16)
            cute.autovec_copy(packed[None, i], cute.make_tensor(target, cute.make_layout(count)))

    @cute.jit
    def finish_tile(self, rows: WarpRows, first_column: Int32) -> None:
        """Stores the rows that there are; N may end inside the columns of the warp, and is a multiple of 8."""
        self.stamps.mark(Phase.STORE)
        count = self.columns // LANES
        cute.arch.sync_warp()
        there = min(self.rows.images - rows.block * LANES, LANES)
        if rows.position >= self.rows.positions:
            there = Int32(0)
        column = first_column + self.lane * count
        if column < cute.size(self.out, mode=[1]):
            target = _element(self.out, rows.block * LANES, column, rows.position, count * BYTES)
            mine = self.base + cute.assume(self.lane * (count * BYTES), divby=count * BYTES)
            for i in cutlass.range(there, unroll=8):
                staged = mine + cute.assume(i * self.pitch, divby=CHUNK_BYTES)
                source = cute.make_tensor(cute.recast_ptr(staged, dtype=BFloat16), cute.make_layout(count))
                row = target + cute.assume(Int64(i) * self.out.stride[0], divby=count)
                cute.autovec_copy(source, cute.make_tensor(row, cute.make_layout(count)))
        # The next tile overwrites what other lanes read here.
        cute.arch.sync_warp()

    def finish(self) -> None:
        """Threads' own stores outlive them."""


@dataclass(frozen=True)
class DirectStores:
    """Every thread stores its own row, 32 bytes at a time.

    Attributes:
        out: ``[images, N, positions]`` over the output, N a multiple of 16.
    """

    plan: Sm100PatchEmbedPlan
    out: cute.Tensor
    rows: TileRows
    lane: Int32
    stamps: Stamps

    @cute.jit
    def write(
        self, values: cute.Tensor, column: cutlass.Constexpr[int], rows: WarpRows, first_column: Int32
    ) -> None:
        self.stamps.mark(Phase.STORE)
        count = DIRECT_BYTES // BYTES
        image = rows.block * LANES + self.lane
        there = (image < self.rows.images) & (rows.position < self.rows.positions)
        words = cute.recast_tensor(values, Int32)
        for i in cutlass.range_constexpr(cute.size(values) // count):
            first = first_column + column + i * count
            target = _element(self.out, image, first, rows.position, DIRECT_BYTES)
            inside = there & (first < cute.size(self.out, mode=[1]))
            ptx.st_global_v8(target, tuple(words[i * 8 + j] for j in range(8)), Int32(inside))

    def finish_tile(self, rows: WarpRows, first_column: Int32) -> None:
        """Everything is stored."""

    def finish(self) -> None:
        """Threads' own stores outlive them."""


@cute.jit
def _element(
    out: cute.Tensor, image: Int32, column: Int32, position: Int32, alignment: cutlass.Constexpr[int]
) -> cute.Pointer:
    """Where an element of the output is; offsets pass 2^31."""
    elements = Int64(image) * out.stride[0] + Int64(position) * out.stride[2] + Int64(column)
    return out.iterator + cute.assume(elements, divby=alignment // BYTES)
