"""A warp's staging buffer: its 32 or 16 features x the rows of a tile, transposed on their way to TMA."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warp

from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.plan import LANES, VECTOR_BYTES
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan

_MATRIX_FEATURES = 8
"""Of a matrix of stmatrix, 16 bytes of a row."""

_BANK_BYTES = 128
"""After which a swizzle XORs differently: the banks of shared memory."""


def staging_layout(
    box: tuple[int, ...], strides: tuple[int, ...], features: int = LANES
) -> cute.ComposedLayout:
    """A box of rows of 32 elements of 16 bits, SWIZZLE_64B, or of 16, SWIZZLE_32B."""
    bits = (features // _MATRIX_FEATURES).bit_length() - 1
    return cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, cute.make_layout(box, stride=strides))


@dataclass(frozen=True)
class TransposedStaging:
    """One buffer of rows of features, and the TMA store that reads it. Nothing is shared between warps.

    A thread holds features ``lane / 4 + 8 i``, and of every 8 rows two neighbouring ones (PTX ISA, tcgen05.ld
    .16x256b). stmatrix with ``.trans`` turns that into rows of features.

    Attributes:
        buffer: begins on 512 bytes, the period of SWIZZLE_64B.
        atom, source, target: TMA store of the buffer to a box of the output; TMA clips what is beyond the output.
        lane: of the warp.
        dtype: of the output, 16 bits.
        features: of a row: 32 or 16.
    """

    buffer: cute.Pointer
    atom: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor
    lane: Int32
    dtype: type
    features: int

    def addresses(self) -> tuple[cute.CopyAtom, cute.Pointer]:
        """stmatrix, and where this lane's row of the first 8 rows is.

        Lanes 8 i to 8 i + 7 give the row addresses of matrix i: features 8 i to 8 i + 7 of 8 rows. SWIZZLE_64B XORs
        address bits 4-5 with bits 7-8, which are ``row / 2 % 4`` as a buffer begins on 512 bytes; SWIZZLE_32B bit 4
        with bit 7, ``row / 4 % 2``. Of two matrices the other lanes' addresses are not read.
        """
        matrices, row_bytes = self.features // _MATRIX_FEATURES, 2 * self.features
        row, chunk = self.lane % 8, self.lane // 8
        chunk = chunk if self.features == LANES else chunk % matrices
        place = chunk ^ row // (_BANK_BYTES // row_bytes) % matrices
        offset = cute.assume(row * row_bytes + place * VECTOR_BYTES, divby=VECTOR_BYTES)
        first = cute.recast_ptr(self.buffer + offset, dtype=self.dtype)
        return cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=matrices), self.dtype), first

    @cute.jit
    def acquire(self) -> None:
        """Waits until the TMA store before has read the buffer."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    def write(self, addresses: tuple[cute.CopyAtom, cute.Pointer], values: cute.Tensor, row: int) -> None:
        """Writes a thread's values of 8 rows, two of each of its features, from ``row`` on."""
        atom, first = addresses
        layout = cute.make_layout((2 * self.features // _MATRIX_FEATURES, 1))
        rows = cute.make_tensor(first + row * self.features, layout)
        cute.copy(atom, cute.make_tensor(values.iterator, layout), rows)

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


def warp_staging(
    plan: Sm100TransposedPlan, storage: cute.Pointer, layout: cute.ComposedLayout, atom: cute.CopyAtom,
    out: cute.Tensor, box: tuple[int, ...], quarter: Int32,
) -> TransposedStaging:  # fmt: skip
    """The buffer of the warp that drains a quarter of the lanes.

    Args:
        plan: says how large it is.
        storage: staging of the CTA.
        layout: of `staging_layout`.
        atom: TMA store made with that layout.
        out: TMA view of the output.
        box: what is stored at once.
        quarter: which warp.
    """
    buffer = storage + cute.assume(quarter * plan.staging_bytes, divby=512)
    dtype, modes = ELEMENT_TYPES[plan.problem.out_dtype], len(box)
    staged = cute.make_tensor(cute.recast_ptr(buffer, layout.inner, dtype=dtype), layout.outer)
    boxes = cute.local_tile(out, box, (None,) * modes)
    source, target = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, modes), cute.group_modes(boxes, 0, modes)
    )
    return TransposedStaging(buffer, atom, source, target, cute.arch.lane_idx(), dtype, plan.warp_features)
