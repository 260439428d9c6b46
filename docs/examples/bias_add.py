"""Adds a bias to the rows of a matrix: one warp loads tiles into a ring by TMA, four add, and TMA stores the sums."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

ROWS, COLUMNS, STAGES, CTAS = 16, 32, 2, 2
ADDERS = 128  # threads that add; the warp behind them loads


@cute.kernel
def add_bias(load: cute.CopyAtom, x: cute.Tensor, store: cute.CopyAtom, y: cute.Tensor, bias: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    tiles = (cute.size(x, mode=[0]) // ROWS - cta + CTAS - 1) // CTAS
    tile = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    ring = cute.append(tile, cute.make_layout(STAGES, stride=ROWS * COLUMNS))
    sx = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, ROWS * COLUMNS * STAGES, alignment=128), ring)
    sy = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, ROWS * COLUMNS, alignment=128), tile)
    full = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    empty = cute.arch.alloc_smem(cutlass.Int64, STAGES)
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, ADDERS)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()  # x may be what the launch before this one writes
    gx, gy = (cute.group_modes(cute.local_tile(t, (ROWS, COLUMNS), (None, 0)), 0, 2) for t in (x, y))
    sx_load, gx_load = cpasync.tma_partition(load, 0, cute.make_layout(1), cute.group_modes(sx, 0, 2), gx)
    sy_store, gy_store = cpasync.tma_partition(store, 0, cute.make_layout(1), cute.group_modes(sy, 0, 2), gy)
    if thread >= ADDERS:
        for i in cutlass.range(tiles, unroll=1):
            stage = i % STAGES
            cute.arch.mbarrier_wait(empty + stage, (i // STAGES & 1) ^ 1)  # the first turn finds the ring empty
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, ROWS * COLUMNS * 4)
            cute.copy(load, gx_load[None, cta + i * CTAS], sx_load[None, stage], tma_bar_ptr=full + stage)
    else:
        for i in cutlass.range(tiles, unroll=1):
            stage = i % STAGES
            cute.arch.mbarrier_wait(full + stage, i // STAGES & 1)
            for k in cutlass.range_constexpr(ROWS * COLUMNS // ADDERS):
                row, column = (k * ADDERS + thread) // COLUMNS, thread % COLUMNS
                sy[row, column] = sx[row, column, stage] + bias[column]
            cute.arch.mbarrier_arrive(empty + stage)
            cute.arch.fence_proxy("async.shared", space="cta")  # the store reads through the asynchronous proxy
            cute.arch.barrier(barrier_id=1, number_of_threads=ADDERS)
            if thread < 32:
                cute.copy(store, sy_store, gy_store[None, cta + i * CTAS])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=1, number_of_threads=ADDERS)


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, bias: cute.Tensor, stream: cuda.CUstream):
    tile = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    load = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, tile, (ROWS, COLUMNS))
    store = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, tile, (ROWS, COLUMNS))
    kernel = add_bias(*load, *store, bias)
    kernel.launch(grid=(CTAS, 1, 1), block=(ADDERS + 32, 1, 1), stream=stream, use_pdl=True)


compiled = {}


def bias_add(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x + bias for float32 ``[M, 32]`` and ``[32]`` on the GPU, M a multiple of 16."""
    y = torch.empty_like(x)
    matrices = [from_dlpack(t, assumed_align=16).mark_compact_shape_dynamic(mode=0) for t in (x, y)]
    arguments = *matrices, from_dlpack(bias), cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    if "launch" not in compiled:  # once for any M
        compiled["launch"] = cute.compile(launch, *arguments)
    compiled["launch"](*arguments)
    return y


if __name__ == "__main__":
    x, bias = torch.randn(112, COLUMNS, device="cuda"), torch.randn(COLUMNS, device="cuda")
    torch.testing.assert_close(bias_add(bias_add(x, bias), bias), x + bias + bias)
    print("the result is right")
