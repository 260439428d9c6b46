"""A program for test_command.py that ends in the way that its argument names."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def fill(y: cute.Tensor, offset: cutlass.Int32):
    """y[thread + offset] = thread"""
    thread, _, _ = cute.arch.thread_idx()
    y[thread + offset] = thread


@cute.kernel
def wait_for_nobody(y: cute.Tensor):
    """Hangs."""
    barrier = cute.arch.alloc_smem(cutlass.Int64, 1)
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.sync_threads()
    cute.arch.mbarrier_wait(barrier, 0)
    y[thread] = thread


@cute.jit
def launch(y: cute.Tensor, offset: cutlass.Int32, blocks: cutlass.Int32, stream: cuda.CUstream):
    fill(y, offset).launch(grid=(blocks, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def launch_hanging(y: cute.Tensor):
    wait_for_nobody(y).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.kernel
def allocate(y: cute.Tensor):
    """By an instruction that the emulator does not implement."""
    thread, _, _ = cute.arch.thread_idx()
    number = thread.ir_value()
    text = "alloca.u32 $0, $1;"
    y[thread] = cutlass.Int32(llvm.inline_asm(number.type, [number], text, "=r,r"))


@cute.jit
def launch_refused(y: cute.Tensor, stream: cuda.CUstream):
    allocate(y).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


executors = []


def main(how: str) -> None:
    """Each kernel error as it is, caught, wrapped by an exception of the program, or hidden behind its own exit."""
    y = torch.zeros(32, dtype=torch.int32, device="cuda")
    tensor, stream = from_dlpack(y), cuda.CUstream(0)
    launch(tensor, cutlass.Int32(0), cutlass.Int32(1), stream)
    assert y.tolist() == list(range(32))
    kind, _, then = how.partition("-")

    def fail() -> None:
        if kind in ("fault", "both"):
            launch(tensor, cutlass.Int32(1 << 20), cutlass.Int32(1), stream)
        elif kind == "refused":
            launch_refused(tensor, stream)

    if then == "thread":  # which the program does not wait for
        threading.Thread(target=fail).start()
        return
    if then == "executor":  # neither waited for nor shut down
        executors.append(ThreadPoolExecutor(1))
        executors[-1].submit(fail)
        return
    if kind == "both":
        try:
            launch_refused(tensor, stream)
        except Exception as error:
            print("caught", type(error).__name__)
    try:
        if kind in ("fault", "both", "refused"):
            fail()
        elif kind == "illegal":
            launch(tensor, cutlass.Int32(0), cutlass.Int32(0), stream)
        elif kind == "hang":
            launch_hanging(tensor)
    except Exception as error:
        if then == "caught":
            print("caught", type(error).__name__)
        elif then == "wrapped":
            raise ValueError("a kernel failed") from error
        elif then.isdecimal():
            sys.exit(int(then))
        else:
            raise
    if kind == "raise":
        raise ValueError("the program's own")
    if kind == "exit":
        sys.exit(int(then) if then.isdecimal() else then or None)


if __name__ == "__main__":
    main(sys.argv[1])
