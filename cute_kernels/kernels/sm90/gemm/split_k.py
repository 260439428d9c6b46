"""Adding up the slices of a tile that the CTAs of a cluster share along K, through distributed shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.kernels import ptx
from cute_kernels.kernels.pipes import Pipe
from cute_kernels.plan import Sm90GemmPlan

GROUP = 4
"""FP32 values of a 16-byte store: two rows and two columns of an accumulator."""


@dataclass(frozen=True)
class PartialSums:
    """The sums of one warp's rows over every slice of K, which one of the CTAs adds up and finishes.

    CTA ``i`` of a split finishes the rows of its warps ``i * finished_warps`` to ``(i + 1) * finished_warps - 1``; the
    same warps of the other CTAs send it their sums. Nothing is shared between the warps of a CTA.

    Attributes:
        sums: stage ``w`` is full when warp ``w`` of this CTA has received every other slice's sums, and empty when what
            warp ``w`` of this CTA sent has been read.
        buffers: where warp ``w % finished_warps`` receives, `Sm90GemmPlan.received_bytes` each.
        slice: this CTA's slice of K.
        first: this CTA's place among those that share operands; slice ``i`` has CTA ``first + i * sharing_ctas`` there.
        warp: index of this warp among the consumers.
    """

    plan: Sm90GemmPlan
    sums: Pipe
    buffers: cute.Pointer
    slice: Int32
    first: Int32
    warp: Int32

    @property
    def finisher(self) -> Int32:
        """The slice whose CTA finishes this warp's rows."""
        return self.warp // self.plan.finished_warps

    def _cta(self, slice_: Int32) -> Int32:
        return self.first + slice_ * self.plan.sharing_ctas

    def _group(self, distance: Int32, index: int) -> cute.Pointer:
        """Where 16 bytes of this lane arrive from slice ``slice ^ distance``: 512 bytes of a warp are contiguous."""
        offset = (self.warp % self.plan.finished_warps) * self.plan.received_bytes
        offset += (distance - 1) * self.plan.partial_bytes
        offset += index * 512 + cute.arch.lane_idx() * 16
        return cute.recast_ptr(self.buffers + cute.assume(offset, divby=16), dtype=Float32)

    @cute.jit
    def send(self, accumulator: cute.Tensor, phase: Int32) -> None:
        """Sends this warp's sums to the CTA that finishes its rows.

        Args:
            accumulator: sums of this warp over its slice.
            phase: parity of the tile's number in this cluster.
        """
        groups = cute.size(accumulator) // GROUP
        bits = cute.make_tensor(
            cute.recast_ptr(accumulator.iterator, dtype=Int32), cute.make_layout((GROUP, groups))
        )
        self.sums.wait_empty_phase(self.sums.empty + self.warp, phase ^ 1)
        for index in cutlass.range_constexpr(groups):
            cute.arch.store_async_dsmem(
                self._group(self.slice ^ self.finisher, index), tuple(bits[i, index] for i in range(GROUP)),
                self.sums.full + self.warp, self._cta(self.finisher),
            )  # fmt: skip

    @cute.jit
    def receive(self, phase: Int32) -> None:
        """Waits for the sums of the other slices.

        Args:
            phase: parity of the tile's number in this cluster.
        """
        full = self.sums.full + self.warp
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.plan.received_bytes)
        self.sums.wait_full_phase(full, phase)

    def add(self, values: cute.Tensor, first: int) -> None:
        """Adds the sums of the other slices, as they are needed: all of them at once would not fit the registers.

        The additions form a balanced binary tree over the slices. Each one commutes, so that the result does not depend
        on which slice is this CTA's.

        Args:
            values: accumulators of groups of four.
            first: number of their first group.
        """
        for group in range(cute.size(values) // GROUP):
            size = 1
            while size < self.plan.config.split_k:
                subtree = self._sum(size, 2 * size, first + group)
                for i in range(GROUP):
                    values[group * GROUP + i] = values[group * GROUP + i] + subtree[i]
                size *= 2

    def _sum(self, begin: int, end: int, index: int) -> list[Float32]:
        """The sum over the slices at distances ``begin`` to ``end - 1``, a power of two of them, as a tree."""
        if end - begin == 1:
            source = cute.make_tensor(self._group(Int32(begin), index), cute.make_layout(GROUP))
            loaded = cute.make_rmem_tensor(cute.make_layout(GROUP), Float32)
            cute.autovec_copy(source, loaded)
            return [loaded[i] for i in range(GROUP)]
        middle = (begin + end) // 2
        left, right = self._sum(begin, middle, index), self._sum(middle, end, index)
        return [a + b for a, b in zip(left, right, strict=True)]

    @cute.jit
    def release(self) -> None:
        """After the last `add` of a tile: the senders may write the sums of their next one."""
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < self.plan.config.split_k - 1:
            cute.arch.mbarrier_arrive(self.sums.empty + self.warp, self._cta(self.slice ^ (lane + 1)))

    @cute.jit
    def drain(self, phase: Int32) -> None:
        """At the end: a CTA must outlive the signals that its sums have been read.

        Args:
            phase: as for the next tile, if there were one.
        """
        if self.slice != self.finisher:
            ptx.mbarrier_try_wait_relaxed_cluster(self.sums.empty + self.warp, phase ^ 1)
