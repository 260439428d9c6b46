"""Faults at mbarriers and in an array of three dimensions, one for each argument: what do reports call them?"""

import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

FAULT = sys.argv[1]
THREADS = 64
INITIALISER = THREADS if FAULT == "never" else 0  # no thread has that number


@cute.kernel
def faulty(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    ring = SmemAllocator().allocate_array(cutlass.Int64, 2)
    pair = [cute.arch.alloc_smem(cutlass.Int64, 1) for _ in range(2)]
    cube = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, THREADS), cute.make_layout((4, 4, 4)))
    if thread == INITIALISER:
        cute.arch.mbarrier_init(mbar_ptr=ring, cnt=THREADS)
        cute.arch.mbarrier_init(mbar_ptr=ring + 1, cnt=THREADS + 1)
        cute.arch.mbarrier_init(pair[0], THREADS)
        cute.arch.mbarrier_init(pair[1], THREADS + 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if cutlass.const_expr(FAULT == "list"):
        cute.arch.mbarrier_arrive(pair[1])
        cute.arch.mbarrier_wait(pair[1], 0)
    if cutlass.const_expr(FAULT in ("keyword", "never")):
        cute.arch.mbarrier_arrive(ring + 1)
        cute.arch.mbarrier_wait(ring + 1, 0)
    cube[thread % 4, thread // 4 % 4, thread // 16] = x[thread]
    y[thread] = cube[thread % 4, thread // 4 % 4, 3 - thread // 16]


@cute.kernel
def summed(x: cute.Tensor, y: cute.Tensor):
    """One lane of each warp writes a part of the sum, and all threads add the parts."""
    thread, _, _ = cute.arch.thread_idx()
    parts = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, 2), cute.make_layout(2))
    if thread % 32 == 0:
        parts[thread // 32] = x[thread]
    y[thread] = parts[0] + parts[1]


@cute.kernel
def transposed(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cube = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, THREADS), cute.make_layout((4, 4, 4)))
    cube[thread % 4, thread // 4 % 4, thread // 16] = x[thread]
    y[thread] = cube[thread % 4, thread // 4 % 4, 3 - thread // 16]


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor):
    {"cube": transposed, "sum": summed}.get(FAULT, faulty)(x, y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


x = torch.randn(THREADS, device="cuda")
launch(from_dlpack(x), from_dlpack(torch.empty_like(x)))
