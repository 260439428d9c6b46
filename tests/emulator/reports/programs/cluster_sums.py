"""Sums over rows in a cluster of four: each CTA adds its rows, and sends quarters of the sums to the others."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

WIDTH, CTAS, STAGES, SLOTS, ROWS = 128, 4, 3, 2, 5  # ROWS: of a CTA and batch
PART = WIDTH // CTAS
ROW_BYTES = WIDTH * 4
LOAD, ADD, FINISH = 0, 1, 2  # warps


@cute.kernel
def add_up(load: cute.CopyAtom, x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    rows = cute.make_tensor(cute.arch.alloc_smem(Int32, WIDTH * STAGES, 128), cute.make_layout((WIDTH, STAGES)))
    inbox = cute.make_tensor(
        cute.arch.alloc_smem(Int32, WIDTH * SLOTS, alignment=128), cute.make_layout((PART, CTAS, SLOTS))
    )
    full = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    empty = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    came = cute.arch.alloc_smem(cutlass.Int64, SLOTS)
    room = cute.arch.alloc_smem(cutlass.Int64, SLOTS)
    if thread == 0:
        for s in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + s, 1)
            cute.arch.mbarrier_init(empty + s, 32)
        for s in cutlass.range_constexpr(SLOTS):
            cute.arch.mbarrier_init(came + s, 1)
            cute.arch.mbarrier_init(room + s, CTAS)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    batches = cute.size(x, mode=[1]) // (CTAS * ROWS)
    if warp == LOAD:
        with cute.arch.elect_one():
            for i in cutlass.range(batches * ROWS, unroll=1):
                s = i % STAGES
                cute.arch.mbarrier_wait(empty + s, (i // STAGES & 1) ^ 1)
                cute.arch.mbarrier_arrive_and_expect_tx(full + s, ROW_BYTES)
                cute.copy(load, x[None, i * CTAS + rank], rows[None, s], mbar_ptr=full + s)
    elif warp == ADD:
        sums = cute.make_rmem_tensor((CTAS,), Int32)
        for batch in cutlass.range(batches, unroll=1):
            sums.fill(0)
            for j in cutlass.range(ROWS, unroll=1):
                i = batch * ROWS + j
                s = i % STAGES
                cute.arch.mbarrier_wait(full + s, i // STAGES & 1)
                for k in cutlass.range_constexpr(CTAS):
                    sums[k] += rows[k * PART + lane, s]
                cute.arch.mbarrier_arrive(empty + s)
            slot = batch % SLOTS
            cute.arch.mbarrier_wait(room + slot, (batch // SLOTS & 1) ^ 1)
            for k in cutlass.range_constexpr(CTAS):
                place = inbox.iterator + cute.crd2idx((lane, rank, slot), inbox.layout)
                cute.arch.store_async_dsmem(place, sums[k], came + slot, k)
    else:
        for batch in cutlass.range(batches, unroll=1):
            slot = batch % SLOTS
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(came + slot, WIDTH * 4)
            cute.arch.mbarrier_wait(came + slot, batch // SLOTS & 1)
            total = Int32(0)
            for k in cutlass.range_constexpr(CTAS):
                total += inbox[lane, k, slot]
            y[rank * PART + lane, batch] = total
            cute.arch.sync_warp()
            if lane < CTAS:
                cute.arch.mbarrier_arrive(room + slot, lane)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32, num_bits_per_copy=ROW_BYTES * 8)
    add_up(load, x, y).launch(grid=(CTAS, 1, 1), cluster=(CTAS, 1, 1), block=(96, 1, 1), stream=stream)


def main() -> None:
    x = torch.randint(-99, 99, (5 * CTAS * ROWS, WIDTH), device="cuda", dtype=torch.int32)
    y = torch.empty(5, WIDTH, device="cuda", dtype=torch.int32)
    tensors = [from_dlpack(tensor.T, assumed_align=16) for tensor in (x, y)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    assert torch.equal(y, x.view(5, CTAS * ROWS, WIDTH).sum(1, dtype=torch.int32))


if __name__ == "__main__":
    main()
