"""Rows of x + w by CTAs that take tickets: one warp takes them, one copies, two add what the ticket says."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

WIDTH, STAGES, TICKETS, CTAS = 128, 2, 3, 2
SCHEDULE, COPY, THREADS = 0, 1, 128  # warps 2 and 3 add


@cute.kernel
def add_rows(bulk: cute.CopyAtom, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, counter: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    ring = cute.make_layout((WIDTH, STAGES))
    sx = cute.make_tensor(cute.arch.alloc_smem(Float32, WIDTH * STAGES, alignment=128), ring)
    sw = cute.make_tensor(cute.arch.alloc_smem(Float32, WIDTH * STAGES, alignment=128), ring)
    tickets = cute.make_tensor(cute.arch.alloc_smem(Int32, TICKETS, alignment=16), cute.make_layout(TICKETS))
    told = cute.arch.alloc_smem(cutlass.Int64, TICKETS)
    taken = cute.arch.alloc_smem(cutlass.Int64, TICKETS)
    full = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    free = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    if thread == 0:
        for s in cutlass.range_constexpr(TICKETS):
            cute.arch.mbarrier_init(told + s, 1)
            cute.arch.mbarrier_init(taken + s, 3)
        for s in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + s, 33)
            cute.arch.mbarrier_init(free + s, 64)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    count = cute.size(x, mode=[1])
    if warp == SCHEDULE:
        with cute.arch.elect_one():
            ticket, i = Int32(0), Int32(0)
            while ticket < count:
                slot = i % TICKETS
                cute.arch.mbarrier_wait(taken + slot, (i // TICKETS & 1) ^ 1)
                ticket = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
                tickets[slot] = ticket
                cute.arch.mbarrier_arrive(told + slot)
                i += 1
    elif warp == COPY:
        i = Int32(0)
        cute.arch.mbarrier_wait(told, 0)
        ticket = tickets[0]
        while ticket < count:
            stage, slot = i % STAGES, i % TICKETS
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(taken + slot)
            cute.arch.mbarrier_wait(free + stage, (i // STAGES & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, WIDTH * 4)
                cute.copy(bulk, w[None, ticket % 4], sw[None, stage], mbar_ptr=full + stage)
            copy = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128)
            source = cute.local_tile(x[None, ticket], (4,), (lane,))
            cute.copy(copy, source, cute.local_tile(sx[None, stage], (4,), (lane,)))
            cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
            i += 1
            cute.arch.mbarrier_wait(told + i % TICKETS, i // TICKETS & 1)
            ticket = tickets[i % TICKETS]
    else:
        i = Int32(0)
        cute.arch.mbarrier_wait(told, 0)
        ticket = tickets[0]
        while ticket < count:
            stage, slot = i % STAGES, i % TICKETS
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(taken + slot)
            cute.arch.mbarrier_wait(full + stage, i // STAGES & 1)
            for k in cutlass.range_constexpr(2):
                column = thread % 64 + 64 * k
                y[column, ticket] = sx[column, stage] + sw[column, stage]
            cute.arch.mbarrier_arrive(free + stage)
            i += 1
            cute.arch.mbarrier_wait(told + i % TICKETS, i // TICKETS & 1)
            ticket = tickets[i % TICKETS]
    cute.arch.sync_threads()


@cute.jit
def launch(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, counter: cute.Tensor, stream: cuda.CUstream):
    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=WIDTH * 32)
    add_rows(bulk, x, w, y, counter).launch(grid=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    x, w = torch.randn(24, WIDTH, device="cuda"), torch.randn(4, WIDTH, device="cuda")
    y, counter = torch.empty_like(x), torch.zeros(1, device="cuda", dtype=torch.int32)
    tensors = [from_dlpack(tensor.T, assumed_align=16) for tensor in (x, w, y)]
    launch(*tensors, from_dlpack(counter), cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(y, x + w.repeat(6, 1))


if __name__ == "__main__":
    main()
