"""Reverses numbers through shared memory that is allocated in every way that CuTe DSL has: the argument says which.

The barrier between store and load is missing, so that each way has a report that names its array.
"""

import sys

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator, SmemPartition

THREADS = 64


@cute.struct
class Storage:
    barriers: cute.struct.MemRange[cutlass.Int64, 3]
    early: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, THREADS], 128]
    late: cute.struct.MemRange[cutlass.Float32, THREADS]


def behind_padding(allocator: SmemAllocator) -> cute.Pointer:
    """An array of a function that the kernel calls."""
    inner = allocator.allocate_array(cutlass.Float32, THREADS, byte_alignment=512)
    return inner


@cute.kernel
def reverse(x: cute.Tensor, y: cute.Tensor, which: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    layout = cute.make_layout(THREADS)
    allocator = SmemAllocator()
    faulty = "first" if which == "unused" else which
    if cutlass.const_expr(which == "unused"):
        cute.arch.alloc_smem(cutlass.Float32, THREADS)
    first = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, THREADS), layout)
    second, third = (
        cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, THREADS), layout),
        cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, THREADS, alignment=128), layout),
    )
    storage = allocator.allocate(Storage)
    allocator.allocate_array(cutlass.Float32, 5)
    tensor = allocator.allocate_tensor(cutlass.Float32, layout)
    inner = cute.make_tensor(behind_padding(allocator), layout)
    reserved = allocator.allocate_array(cutlass.Float32, THREADS, partition=SmemPartition.RESERVED)
    arrays = {
        "first": first,
        "second": second,
        "third": third,
        "early": storage.early.get_tensor(layout),
        "late": storage.late.get_tensor(layout),
        "tensor": tensor,
        "inner": inner,
        "reserved": cute.make_tensor(reserved, layout),
    }
    for name, smem in arrays.items():
        value = cute.make_rmem_tensor(1, smem.element_type)  # in registers, whatever this line names
        value[0] = x[thread] + len(name)
        smem[thread] = value[0]
        if cutlass.const_expr(faulty not in (name, "all")):
            cute.arch.sync_threads()
        y[thread] = smem[THREADS - 1 - thread]


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream, which: cutlass.Constexpr, smem: cutlass.Constexpr):
    reverse(x, y, which).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, smem=smem)


which, smem = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None
x = torch.randn(THREADS, device="cuda")
launch(from_dlpack(x), from_dlpack(torch.empty_like(x)), cuda.CUstream(0), which, smem)
