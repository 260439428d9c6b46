"""A warpgroup's staging buffer: accumulators of 64 features x columns, transposed on their way to a TMA store."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16, Int32
from cutlass.cute.nvgpu import warp

from cute_kernels.kernels.stamps import Stamps
from cute_kernels.plan import VECTOR_BYTES
from cute_kernels.plan.profile import Phase

ROWS_PER_STORE = 16
"""Rows of the output (WGMMA columns) that one stmatrix.x4 of a warp covers, with the warp's 16 features."""


@dataclass(frozen=True)
class TransposedStaging:
    """One buffer of rows of 64 BF16 features, SWIZZLE_128B, and the TMA store that reads it.

    A thread holds features ``lane / 4`` and ``lane / 4 + 8`` of its warp's 16, and of every 8 columns two neighbouring
    ones (PTX ISA, wgmma accumulator layout). stmatrix with ``.trans`` turns that into rows of features.

    Attributes:
        buffer: begins on 1024 bytes, the period of SWIZZLE_128B.
        atom, source, target: TMA store of the buffer to a box of the output; TMA clips what is beyond the output.
        thread: index in the warpgroup.
        staged: named barrier of this warpgroup.
        stamps: of the warp.
    """

    buffer: cute.Pointer
    atom: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor
    thread: Int32
    staged: Int32
    stamps: Stamps

    def addresses(self) -> tuple[cute.CopyAtom, cute.Pointer]:
        """stmatrix, and where this lane's row of the first 16 rows is.

        Lanes 8 i to 8 i + 7 give the row addresses of matrix i; matrices 0, 1 are features 0-7, 8-15 of rows 0-7,
        matrices 2, 3 of rows 8-15. SWIZZLE_128B: chunk XOR row % 8.
        """
        lane, warp_index = self.thread % 32, self.thread // 32
        row = lane // 16 * 8 + lane % 8
        chunk = (warp_index * 2 + lane // 8 % 2) ^ lane % 8
        offset = cute.assume(row * 128 + chunk * VECTOR_BYTES, divby=VECTOR_BYTES)
        first = cute.recast_ptr(self.buffer + offset, dtype=BFloat16)
        return cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), BFloat16), first

    @cute.jit
    def acquire(self) -> None:
        """Waits until the TMA store before has read the buffer; what is written to it is computed from now on."""
        self.stamps.mark(Phase.BUFFER)
        if self.thread // 32 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self._synchronise()
        self.stamps.mark(Phase.MATH)

    @staticmethod
    def write(
        addresses: tuple[cute.CopyAtom, cute.Pointer], values: cute.Tensor, block: int
    ) -> None:
        """Writes a thread's eight BF16 values of 16 columns, ``block`` times 16 from the first ones on."""
        atom, first = addresses
        rows_16 = cute.make_tensor(first + block * (ROWS_PER_STORE * 64), cute.make_layout((8, 1)))
        cute.copy(atom, cute.make_tensor(values.iterator, cute.make_layout((8, 1))), rows_16)

    @cute.jit
    def store(self, *coordinates: Int32) -> None:
        """Starts the TMA store of the whole buffer to a box of the output, given its coordinates."""
        self.stamps.mark(Phase.STORE)
        cute.arch.fence_view_async_shared()
        self._synchronise()
        if self.thread // 32 == 0:
            cute.copy(self.atom, self.source, self.target[(None, *coordinates)])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(self) -> None:
        """The CTA must not exit before TMA has read its staging."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _synchronise(self) -> None:
        cute.arch.barrier(barrier_id=self.staged, number_of_threads=128)
