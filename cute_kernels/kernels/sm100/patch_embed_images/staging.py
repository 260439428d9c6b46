"""A warp's staging buffer: accumulators of 32 features x the patches of a tile, transposed on their way to TMA."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from cute_kernels.plan import LANES, VECTOR_BYTES, Sm100ImagesPlan

_ROW_BYTES = 2 * LANES
"""A row of the buffer: one patch's 32 features in 16 bits."""


def out_box(plan: Sm100ImagesPlan) -> tuple[int, int, int, int]:
    """``[patches, features, images, grid rows]`` of a warp's part of a tile."""
    return (plan.tile_patches, LANES, plan.tile_images, 1)


def staging_layout(plan: Sm100ImagesPlan) -> cute.ComposedLayout:
    """That box in 16-bit elements, SWIZZLE_64B: patches follow each other, image after image, as those of a tile do."""
    stride = (LANES, 1, LANES * plan.tile_patches, LANES * plan.columns)
    return cute.make_composed_layout(cute.make_swizzle(2, 4, 3), 0, cute.make_layout(out_box(plan), stride=stride))


@dataclass(frozen=True)
class PatchStaging:
    """One buffer of rows of 32 features, and the TMA store that reads it. Nothing is shared between warps.

    A thread holds features ``lane / 4 + 8 i``, and of every 8 patches two neighbouring ones (PTX ISA, tcgen05.ld
    .16x256b). stmatrix with ``.trans`` turns that into rows of features.

    Attributes:
        buffer: begins on 512 bytes, the period of SWIZZLE_64B.
        atom, source, target: TMA store of the buffer to a box of the output; TMA clips what is beyond the output.
        lane: of the warp.
        dtype: of the output, 16 bits.
    """

    buffer: cute.Pointer
    atom: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor
    lane: Int32
    dtype: type

    def addresses(self) -> tuple[cute.CopyAtom, cute.Pointer]:
        """stmatrix, and where this lane's row of the first 8 patches is.

        Lanes 8 i to 8 i + 7 give the row addresses of matrix i: features 8 i to 8 i + 7 of 8 patches. SWIZZLE_64B XORs
        address bits 4-5 with bits 7-8, which are ``patch / 2 % 4`` as a buffer begins on 512 bytes.
        """
        patch, chunk = self.lane % 8, self.lane // 8
        offset = cute.assume(patch * _ROW_BYTES + (chunk ^ patch // 2 % 4) * VECTOR_BYTES, divby=VECTOR_BYTES)
        first = cute.recast_ptr(self.buffer + offset, dtype=self.dtype)
        return cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), self.dtype), first

    @cute.jit
    def acquire(self) -> None:
        """Waits until the TMA store before has read the buffer."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    @staticmethod
    def write(addresses: tuple[cute.CopyAtom, cute.Pointer], values: cute.Tensor, patch: int) -> None:
        """Writes a thread's eight values of 8 patches, from ``patch`` on."""
        atom, first = addresses
        rows = cute.make_tensor(first + patch * LANES, cute.make_layout((8, 1)))
        cute.copy(atom, cute.make_tensor(values.iterator, cute.make_layout((8, 1))), rows)

    @cute.jit
    def store(self, *coordinates: Int32) -> None:
        """Starts the TMA store of the whole buffer to a box of the output, given its coordinates."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        cute.copy(self.atom, self.source, self.target[(None, *coordinates)])
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(self) -> None:
        """The CTA must not exit before TMA has read its staging."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
