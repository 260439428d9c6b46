"""Output staging: a warp's ring of store buffers in shared memory, and the TMA stores that read them."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

CHUNK_BYTES = 16
"""What SWIZZLE_128B moves around as a whole; also the widest shared-memory store."""

ROW_BYTES = 128
"""A row of a buffer, as SWIZZLE_128B needs it."""


def staging_layout(rows: int, columns: int, buffers: int | None = None) -> cute.ComposedLayout:
    """``[rows, columns]`` of 128 bytes a row, SWIZZLE_128B; with ``buffers`` a last mode of consecutive buffers."""
    swizzle = cute.make_swizzle(3, 4, 3)
    if buffers is None:
        return cute.make_composed_layout(swizzle, 0, cute.make_layout((rows, columns), stride=(columns, 1)))
    outer = cute.make_layout((rows, columns, buffers), stride=(columns, 1, rows * columns))
    return cute.make_composed_layout(swizzle, 0, outer)


@dataclass(frozen=True)
class WarpStaging:
    """The store buffers of one warp, each ``rows`` rows of 128 bytes. Nothing is shared between warps.

    Attributes:
        base: first buffer; a multiple of 1024 bytes, the period of SWIZZLE_128B.
        rows: rows of a buffer.
        buffers: buffers of the ring, used in turn.
        atom, source, target: TMA store of buffer ``[box, buffer]`` to ``[box, row block, column block, batch]``; TMA
            clips rows and columns beyond the output.
    """

    base: cute.Pointer
    rows: int
    buffers: int
    atom: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor

    def chunk(self, row: Int32, chunk: Int32 | int) -> cute.Pointer:
        """Where 16-byte chunk ``chunk`` of a row of the first buffer is kept, in bytes.

        SWIZZLE_128B XORs address bits 4-6 with bits 7-9, which are ``row % 8`` as a buffer begins on 1024 bytes.
        """
        offset = row * ROW_BYTES + (chunk ^ row % 8) * CHUNK_BYTES
        return self.base + cute.assume(offset, divby=CHUNK_BYTES)

    def offset(self, buffer: int) -> int:
        """Bytes from the first buffer to another one."""
        return buffer * self.rows * ROW_BYTES

    @cute.jit
    def acquire(self) -> None:
        """Waits until the next buffer of the ring may be written.

        Bulk groups complete in order: with all but the newest ``buffers - 1`` read, the store that used it is done.
        """
        cute.arch.cp_async_bulk_wait_group(self.buffers - 1, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def store(self, buffer: cutlass.Constexpr[int], row_block: Int32, column_block: Int32, batch: Int32) -> None:
        """TMA store of one buffer, once every lane has fenced its own writes and the warp agrees."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        cute.copy(self.atom, self.source[None, buffer], self.target[None, row_block, column_block, batch])
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(self) -> None:
        """The CTA must not exit before TMA has read its staging."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def warp_staging(
    storage: cute.Pointer, warp: Int32, rows: int, buffers: int, atom: cute.CopyAtom, out: cute.Tensor, dtype: type
) -> WarpStaging:
    """The ring of warp ``warp`` (0 for the first that stores) in the staging area at ``storage``.

    Args:
        storage: staging area of the CTA.
        warp: index among the warps that store.
        rows, buffers: shape of the ring.
        atom: TMA store made with ``staging_layout(rows, columns)``.
        out: TMA view ``[M, N, batch]`` of the output.
        dtype: element type of the output.
    """
    columns = ROW_BYTES * 8 // dtype.width
    base = storage + cute.assume(warp * (buffers * rows * ROW_BYTES), divby=rows * ROW_BYTES)
    layout = staging_layout(rows, columns, buffers)
    staged = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=dtype), layout.outer)
    boxes = cute.local_tile(out, (rows, columns), (None, None, None))
    source, target = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(boxes, 0, 2)
    )
    return WarpStaging(base, rows, buffers, atom, source, target)
