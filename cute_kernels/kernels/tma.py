"""TMA copies by boxes: operations, swizzled boxes in shared memory, the two sides of a copy, and staging of stores."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05, warpgroup


class Tma(NamedTuple):
    """A TMA copy, and the view of the tensor in global memory."""

    atom: cute.CopyAtom
    view: cute.Tensor


def load_operation(sharers: int, *group: tcgen05.CtaGroup) -> cpasync.TmaCopyOp:
    """TMA load, of which each of the ``sharers`` CTAs loads its part for all."""
    kind = cpasync.CopyBulkTensorTileG2SMulticastOp if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp
    return kind(*group)


def load_tma(
    tensor: cute.Tensor, layout: cute.Layout | cute.ComposedLayout, box: tuple[int, ...], sharers: int = 1,
    *group: tcgen05.CtaGroup
) -> Tma:
    """Loads boxes of a tensor to shared memory, where one has this layout."""
    operation = load_operation(sharers, *group)
    return Tma(*cpasync.make_tiled_tma_atom(operation, tensor, layout, box, num_multicast=sharers))


def store_tma(tensor: cute.Tensor, layout: cute.Layout | cute.ComposedLayout, box: tuple[int, ...]) -> Tma:
    """Stores boxes of a tensor from shared memory, where one has this layout."""
    return Tma(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, box))


MMA_STEPS = 4
"""Tensor-core instructions, of 32 bytes of K each, in one K block of 128 bytes."""


def swizzled(layout: cute.Layout, bits: int = 3) -> cute.ComposedLayout:
    """A layout with SWIZZLE_32B, 64B or 128B, by the bits that are changed."""
    return cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, layout)


def k_major(dtype: type, box: tuple[int, ...], blocks: int) -> cute.ComposedLayout:
    """``[*box, blocks]``, K-major, SWIZZLE_128B; without the last mode for a single block.

    The second mode of a box is 128 bytes of K.
    """
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    shape = (*box, blocks) if blocks > 1 else box
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def shared_tensor(pointer: cute.Pointer, layout: cute.ComposedLayout, dtype: type) -> cute.Tensor:
    """Shared memory with a swizzled layout, which its pointer carries."""
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def sides(
    atom: cute.CopyAtom, shared: cute.Tensor, memory: cute.Tensor, modes: int, share: tuple[int, int | Int32] = (1, 0)
) -> tuple[cute.Tensor, cute.Tensor]:
    """Both sides of a copy by boxes of so many ``modes``: in shared memory, and in the view of global memory.

    ``share``: CTAs that share a box, and which of its parts this CTA copies.
    """
    groups = cute.group_modes(shared, 0, modes), cute.group_modes(memory, 0, modes)
    return cpasync.tma_partition(atom, share[1], cute.make_layout(share[0]), *groups)


def fetch(
    atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer, multicast: Int16 | None = None
) -> None:
    """Starts the load of a box, whose bytes complete on ``barrier`` in this CTA, or in those of a mask, ``multicast``.
    """
    if multicast is None:
        cute.copy(atom, source, target, tma_bar_ptr=barrier)
    else:
        cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=multicast)


def all_ctas(ctas: int) -> Int16 | None:
    """Bit mask of the CTAs of a cluster; None of one alone."""
    return Int16((1 << ctas) - 1) if ctas > 1 else None


# --- output staging: a warp's ring of store buffers in shared memory, and the TMA stores that read them --------------
# Rows have 128, 64 or 32 bytes, with the swizzle of that name. Regions begin on multiples of 1024 bytes, because
# swizzles permute bits of absolute addresses.


CHUNK_BYTES = 16
"""Bytes that a swizzle moves around as a whole; also the widest shared-memory store."""

LINE_BYTES = 128
"""Bytes whose number selects how a swizzle moves chunks: those of all banks."""


def staging_layout(rows: int, columns: int, row_bytes: int = 128, buffers: int | None = None) -> cute.ComposedLayout:
    """``[rows, columns]`` of ``row_bytes``, with the swizzle of that name.

    With ``buffers`` there is a last mode of consecutive buffers.
    """
    bits = (row_bytes // CHUNK_BYTES).bit_length() - 1
    if buffers is None:
        return swizzled(cute.make_layout((rows, columns), stride=(columns, 1)), bits)
    return swizzled(cute.make_layout((rows, columns, buffers), stride=(columns, 1, rows * columns)), bits)


@dataclass(frozen=True)
class StagingBuffer:
    """A buffer in shared memory, and the TMA store of its content to a box, of which TMA clips what is beyond."""

    buffer: cute.Pointer
    atom: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor

    @cute.jit
    def issue(self, *coordinates: Int32) -> None:
        """Starts the store to a box of the output, given its coordinates, as a group of its own."""
        cute.copy(self.atom, self.source, self.target[(None, *coordinates)])
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(self) -> None:
        """The CTA must not exit before TMA has read its staging."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def staging_buffer(
    buffer: cute.Pointer, layout: cute.ComposedLayout, dtype: type, out: Tma, box: tuple[int, ...]
) -> StagingBuffer:
    """The buffer that begins at ``buffer``, with the layout of a box in it, by which ``out`` was made."""
    boxes = cute.local_tile(out.view, box, (None,) * len(box))
    source, target = sides(out.atom, shared_tensor(buffer, layout, dtype), boxes, len(box))
    return StagingBuffer(buffer, out.atom, source, target)


@dataclass(frozen=True)
class WarpStaging:
    """A ring of store buffers of one warp, each ``rows`` rows of ``row_bytes``, from ``base`` on, a multiple of 1024
    bytes, the longest period of a swizzle. Nothing is shared between warps.

    ``source``, ``target``: of the TMA store of buffer ``[box, buffer]`` to ``[box, row block, column block]``, and
    batch if the output has batches; TMA clips rows and columns beyond the output.
    """

    base: cute.Pointer
    rows: int
    row_bytes: int
    buffers: int
    atom: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor

    def chunk(self, row: Int32, chunk: Int32 | int) -> cute.Pointer:
        """Where 16-byte chunk ``chunk`` of a row of the first buffer is kept, in bytes.

        SWIZZLE_128B XORs address bits 4-6 with bits 7-9, which are ``row % 8`` as a buffer begins on 1024 bytes;
        SWIZZLE_64B bits 4-5 with bits 7-8, SWIZZLE_32B bit 4 with bit 7.
        """
        line = row // (LINE_BYTES // self.row_bytes)
        offset = row * self.row_bytes + (Int32(chunk) ^ line % (self.row_bytes // CHUNK_BYTES)) * CHUNK_BYTES
        return self.base + cute.assume(offset, divby=CHUNK_BYTES)

    def offset(self, buffer: int) -> int:
        """Bytes from the first buffer to another one."""
        return buffer * self.rows * self.row_bytes

    @property
    def stores(self) -> bool | Boolean:
        """Whether this warp issues the stores."""
        return True

    def synchronise(self) -> None:
        """All threads that fill a buffer are here."""
        cute.arch.sync_warp()

    @cute.jit
    def acquire(self, pending: cutlass.Constexpr[int | None] = None) -> None:
        """Waits until the next buffer of the ring may be written: with all but the newest ``buffers - 1`` groups read,
        the store that used it is done, for bulk groups complete in order. ``pending``: how many of the newest groups
        may be unread, where a group has several buffers."""
        if self.stores:
            cute.arch.cp_async_bulk_wait_group(self.buffers - 1 if pending is None else pending, read=True)
        self.synchronise()

    @cute.jit
    def store(self, buffer: cutlass.Constexpr[int], *block: Int32) -> None:
        """TMA store of one buffer to a block, once every thread has fenced its own writes and all agree."""
        self.publish()
        if self.stores:
            self.issue(buffer, *block)
            self.commit()

    @cute.jit
    def publish(self) -> None:
        """Makes what the lanes wrote to the buffers visible to TMA."""
        cute.arch.fence_view_async_shared()
        self.synchronise()

    @cute.jit
    def issue(self, buffer: cutlass.Constexpr[int], *block: Int32) -> None:
        """TMA store of one buffer to a block."""
        cute.copy(self.atom, self.source[None, buffer], self.target[(None, *block)])

    @cute.jit
    def commit(self) -> None:
        """Makes one group of what was issued since the last commit."""
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def write_row(
        self, values: cute.Tensor, chunks: tuple[cute.Pointer, ...], buffer: cutlass.Constexpr[int],
        column: cutlass.Constexpr[int]
    ) -> None:
        """Writes one thread's registers to its row of a buffer, beginning at ``column``, 16 bytes at a time.

        ``chunks`` are the row's chunks in the first buffer, as `row_chunks` gives them.
        """
        count = CHUNK_BYTES * 8 // values.element_type.width
        packed = cute.make_tensor(values.iterator, (count, cute.size(values) // count))
        for i in cutlass.range_constexpr(cute.size(values) // count):
            target = chunks[column // count + i] + self.offset(buffer)
            target = cute.make_tensor(cute.recast_ptr(target, dtype=values.element_type), count)
            cute.autovec_copy(packed[None, i], target)

    def row_chunks(self, row: Int32) -> tuple[cute.Pointer, ...]:
        """Where a row of the first buffer keeps each of its chunks."""
        return tuple(self.chunk(row, i) for i in range(self.row_bytes // CHUNK_BYTES))

    @cute.jit
    def finish(self) -> None:
        """The CTA must not exit before TMA has read its staging."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class GroupStaging(WarpStaging):
    """The store buffers of several warps with a named barrier, which fill one together; the first of them stores."""

    first: Boolean
    barrier: Int32
    threads: int

    @property
    def stores(self) -> Boolean:
        return self.first

    def synchronise(self) -> None:
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=self.threads)


def group_staging(ring: WarpStaging, place: Int32, barrier: Int32, warps: int) -> GroupStaging:
    """A ring that so many warps share, of which this one is the ``place``-th; they have a named barrier."""
    return GroupStaging(**vars(ring), first=place == 0, barrier=barrier, threads=32 * warps)


def warp_staging(
    storage: cute.Pointer, first: Int32, rows: int, buffers: int, out: Tma, dtype: type, row_bytes: int = 128
) -> WarpStaging:
    """The ring of ``buffers`` buffers that begins at buffer ``first`` of the staging area at ``storage``.

    A buffer has ``rows`` rows of 128, 64 or 32 bytes; ``out`` was made with its `staging_layout`, and views ``[M, N]``
    or ``[M, N, batch]``.
    """
    columns = row_bytes * 8 // dtype.width
    base = storage + cute.assume(first * (rows * row_bytes), divby=rows * row_bytes)
    staged = shared_tensor(base, staging_layout(rows, columns, row_bytes, buffers), dtype)
    boxes = cute.local_tile(out.view, (rows, columns), (None,) * cute.rank(out.view))
    return WarpStaging(base, rows, row_bytes, buffers, out.atom, *sides(out.atom, staged, boxes, 2))
