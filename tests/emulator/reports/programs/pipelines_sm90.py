"""a @ b.T on Hopper with the pipeline classes of CuTe DSL: a TMA ring, and stores from two buffers in turn."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack

ROWS, COLUMNS, K, STAGES, BUFFERS = 64, 32, 32, 3, 2
STAGE_BYTES = (ROWS + COLUMNS) * K * 2
CONSUMER_WARPS, THREADS = 4, 160


def operand_layout(rows: int, stages: int):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, BFloat16)
    return cute.tile_to_shape(atom, (rows, K, stages), order=(0, 1, 2))


@cute.kernel
def gemm(mma: cute.TiledMma, load_a: cute.CopyAtom, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor,
         store: cute.CopyAtom, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    a_layout, b_layout = operand_layout(ROWS, STAGES), operand_layout(COLUMNS, STAGES)
    bars = cute.arch.alloc_smem(cutlass.Int64, 2 * STAGES)
    a_memory = cute.arch.alloc_smem(cutlass.Uint8, ROWS * K * 2 * STAGES, alignment=1024)
    b_memory = cute.arch.alloc_smem(cutlass.Uint8, COLUMNS * K * 2 * STAGES, alignment=1024)
    c_memory = cute.arch.alloc_smem(Float32, ROWS * COLUMNS * BUFFERS, alignment=1024)
    sa = cute.make_tensor(cute.recast_ptr(a_memory, a_layout.inner, dtype=BFloat16), a_layout.outer)
    sb = cute.make_tensor(cute.recast_ptr(b_memory, b_layout.inner, dtype=BFloat16), b_layout.outer)
    sc = cute.make_tensor(
        c_memory, cute.make_layout((ROWS, COLUMNS, BUFFERS), stride=(COLUMNS, 1, ROWS * COLUMNS))
    )
    ring = pipeline.PipelineTmaAsync.create(
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CONSUMER_WARPS),
        tx_count=STAGE_BYTES,
        barrier_storage=bars,
    )
    stores = pipeline.PipelineTmaStore.create(
        num_stages=BUFFERS, producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32)
    )
    k_blocks, n_tiles = cute.size(a, mode=[1]) // K, cute.size(b, mode=[0]) // COLUMNS
    ga = cute.group_modes(cute.local_tile(a, (ROWS, K), (0, None)), 0, 2)
    gb = cute.group_modes(cute.local_tile(b, (COLUMNS, K), (None, None)), 0, 2)
    gc = cute.group_modes(cute.local_tile(c, (ROWS, COLUMNS), (0, None)), 0, 2)
    one = cute.make_layout(1)
    sa_load, ga_load = cpasync.tma_partition(load_a, 0, one, cute.group_modes(sa, 0, 2), ga)
    sb_load, gb_load = cpasync.tma_partition(load_b, 0, one, cute.group_modes(sb, 0, 2), gb)
    sc_store, gc_store = cpasync.tma_partition(store, 0, one, cute.group_modes(sc, 0, 2), gc)
    if warp == CONSUMER_WARPS:
        filling = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        for i in cutlass.range(k_blocks * n_tiles, unroll=1):
            ring.producer_acquire(filling)
            full = ring.producer_get_barrier(filling)
            cute.copy(load_a, ga_load[None, i % k_blocks], sa_load[None, filling.index], tma_bar_ptr=full)
            tile_of_b = gb_load[None, i // k_blocks, i % k_blocks]
            cute.copy(load_b, tile_of_b, sb_load[None, filling.index], tma_bar_ptr=full)
            filling.advance()
    else:
        part = mma.get_slice(thread)
        fa, fb = mma.make_fragment_A(part.partition_A(sa)), mma.make_fragment_B(part.partition_B(sb))
        tile = part.partition_C(sc)
        accumulator = cute.make_rmem_tensor(tile[None, None, None, 0].shape, Float32)
        using = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        for n_tile in cutlass.range(n_tiles, unroll=1):
            buffer = n_tile % BUFFERS
            accumulator.fill(0)
            mma.set(warpgroup.Field.ACCUMULATE, True)
            for _ in cutlass.range(k_blocks, unroll=1):
                ring.consumer_wait(using)
                warpgroup.fence()
                for step in cutlass.range_constexpr(K // 16):
                    cute.gemm(mma, accumulator, fa[None, None, step, using.index], fb[None, None, step, using.index],
                              accumulator)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                ring.consumer_release(using)
                using.advance()
            if warp == 0:
                stores.producer_acquire()
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            cute.autovec_copy(accumulator, tile[None, None, None, buffer])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=2, number_of_threads=128)
            if warp == 0:
                cute.copy(store, sc_store[None, buffer], gc_store[None, n_tile])
                stores.producer_commit()
        if warp == 0:
            stores.producer_tail()


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    k_major = OperandMajorMode.K
    operation = warpgroup.MmaF16BF16Op(
        BFloat16, Float32, (64, COLUMNS, 16), warpgroup.OperandSource.SMEM, k_major, k_major
    )
    a_layout = cute.slice_(operand_layout(ROWS, 1), (None, None, 0))
    b_layout = cute.slice_(operand_layout(COLUMNS, 1), (None, None, 0))
    c_layout = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    load = cpasync.CopyBulkTensorTileG2SOp()
    load_a = cpasync.make_tiled_tma_atom(load, a, a_layout, (ROWS, K))
    load_b = cpasync.make_tiled_tma_atom(load, b, b_layout, (COLUMNS, K))
    store = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c, c_layout, (ROWS, COLUMNS))
    kernel = gemm(cute.make_tiled_mma(operation), *load_a, *load_b, *store)
    kernel.launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


def main() -> None:
    a, b = (torch.randn(rows, 2 * K, device="cuda").bfloat16() for rows in (ROWS, 4 * COLUMNS))
    c = torch.empty(len(a), len(b), device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (a, b, c)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
