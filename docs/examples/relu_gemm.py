"""relu(a @ b.T) on Hopper, on the parts of `cute_kernels.kernels`: one warp loads, one warpgroup multiplies."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack

from cute_kernels.kernels.graph import Edge, Graph, Role, Signal
from cute_kernels.kernels.load import Load, tma_operand
from cute_kernels.kernels.pipes import Sm90Pipe, begin, make_pipes
from cute_kernels.kernels.tiles import SnakeOrder
from cute_kernels.kernels.tma import WarpStaging, staging_layout, warp_staging

ROWS, COLUMNS, K = 64, 64, 64  # of a tile; K and COLUMNS are 128 bytes of BF16, a row of SWIZZLE_128B
STAGES, CTAS = 2, 2
STAGE_BYTES = (ROWS + COLUMNS) * K * 2
STORE_ROWS = 16  # of a warp: what a WGMMA leaves in the registers of one

GRAPH = Graph(
    roles=(Role("mma", first_warp=0, warps=4), Role("load", first_warp=4, warps=1)),
    edges=(
        Edge(
            "operands", producer="load", consumer="mma", stages=STAGES,
            full=Signal.TMA_BYTES, empty=Signal.WARPGROUP_ARRIVE, tx_bytes=STAGE_BYTES,
        ),
    ),
    ctas=1,
)  # fmt: skip


def stages_layout(rows: int, stages: int | None = None) -> cute.ComposedLayout:
    """``[rows, K]`` as WGMMA reads it, SWIZZLE_128B; with ``stages`` a last mode of stages."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    layout = cute.tile_to_shape(atom, (rows, K, stages or 1), order=(0, 1, 2))
    return layout if stages else cute.slice_(layout, (None, None, 0))


@dataclass(frozen=True)
class Multiply:
    """The consumer: one warpgroup that multiplies stage by stage, and stores every tile."""

    tiled_mma: cute.TiledMma
    a: cute.Tensor  # descriptors [.., k step, stage]
    b: cute.Tensor
    operands: Sm90Pipe
    order: SnakeOrder
    k_blocks: Int32
    staging: WarpStaging

    @cute.jit
    def run(self) -> None:
        thread = cute.arch.thread_idx()[0]
        self.tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        accumulator = cute.make_rmem_tensor(self.tiled_mma.partition_shape_C((ROWS, COLUMNS)), Float32)
        state = self.operands.consumer_state()
        for tile in cutlass.range(self.order.first, self.order.tiles, self.order.step, unroll=1):
            accumulator.fill(0)
            for _ in cutlass.range(self.k_blocks, unroll=1):
                self.operands.wait_full(state)
                self.issue(accumulator, state.index)
                warpgroup.wait_group(0)
                self.operands.arrive_empty(state, thread, 1)
                state.advance()
            row_block, column_block = self.order.coordinates(tile)
            self.store(accumulator, row_block * (ROWS // STORE_ROWS) + thread // 32, column_block)
        self.staging.finish()

    @cute.jit
    def issue(self, accumulator: cute.Tensor, stage: Int32) -> None:
        """The WGMMAs of a stage."""
        warpgroup.fence()
        for step in cutlass.range_constexpr(K // 16):
            a, b = self.a[None, None, step, stage], self.b[None, None, step, stage]
            cute.gemm(self.tiled_mma, accumulator, a, b, accumulator)
        warpgroup.commit_group()

    @cute.jit
    def store(self, accumulator: cute.Tensor, row_block: Int32, column_block: Int32) -> None:
        """ReLU, rounding to BF16, and this warp's 16 x 64 results by TMA."""
        lane = cute.arch.lane_idx()
        self.staging.acquire()
        for group in cutlass.range_constexpr(COLUMNS // 8):
            for half in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(cute.make_layout(2), BFloat16)
                for i in cutlass.range_constexpr(2):
                    pair[i] = cutlass.max(accumulator[(i, half, group), 0, 0], Float32(0)).to(BFloat16)
                target = self.staging.chunk(lane // 4 + half * 8, group) + cute.assume(lane % 4 * 4, divby=4)
                cute.autovec_copy(pair, cute.make_tensor(cute.recast_ptr(target, dtype=BFloat16), cute.make_layout(2)))
        self.staging.store(0, row_block, column_block)


@cute.kernel
def relu_gemm(
    tiled_mma: cute.TiledMma, a_atom: cute.CopyAtom, a: cute.Tensor, b_atom: cute.CopyAtom, b: cute.Tensor,
    out_atom: cute.CopyAtom, out: cute.Tensor,
):  # fmt: skip
    """Allocates, builds the pipes, and sends every warp to its role."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    barriers = cute.arch.alloc_smem(cutlass.Int64, GRAPH.slots)
    a_stages, b_stages = (
        cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=BFloat16), layout.outer)
        for layout in (stages_layout(ROWS, STAGES), stages_layout(COLUMNS, STAGES))
        for pointer in (cute.arch.alloc_smem(cutlass.Uint8, cute.cosize(layout.outer) * 2, alignment=1024),)
    )
    buffers = cute.arch.alloc_smem(cutlass.Uint8, 4 * STORE_ROWS * 128, alignment=1024)
    pipe = make_pipes(GRAPH, barriers, Sm90Pipe)["operands"]
    begin(GRAPH, warp == GRAPH.role("load").first_warp, barriers, (a_atom, b_atom, out_atom))

    m, n = (cute.ceil_div(cute.size(out, mode=[mode]), extent) for mode, extent in ((0, ROWS), (1, COLUMNS)))
    order = SnakeOrder(Int32(m), Int32(n), first=cute.arch.block_idx()[0], step=Int32(CTAS))
    k_blocks = Int32(cute.ceil_div(cute.size(a, mode=[1]), K))
    if warp == GRAPH.role("load").first_warp:
        a_tiles, b_tiles = (cute.local_tile(view, (rows, K), (None, None)) for view, rows in ((a, ROWS), (b, COLUMNS)))
        rows, columns = tma_operand((a_atom, a_tiles), a_stages, 2), tma_operand((b_atom, b_tiles), b_stages, 2)
        Load(rows, columns, pipe, order, k_blocks).run()
    else:
        mma = tiled_mma.get_slice(cute.arch.thread_idx()[0])
        a_fragments = tiled_mma.make_fragment_A(mma.partition_A(a_stages))
        b_fragments = tiled_mma.make_fragment_B(mma.partition_B(b_stages))
        staging = warp_staging(buffers, warp, STORE_ROWS, 1, out_atom, out, BFloat16)
        Multiply(tiled_mma, a_fragments, b_fragments, pipe, order, k_blocks, staging).run()


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    k_major = OperandMajorMode.K
    operation = warpgroup.MmaF16BF16Op(
        BFloat16, Float32, (64, COLUMNS, 16), warpgroup.OperandSource.SMEM, k_major, k_major
    )
    load, box = cpasync.CopyBulkTensorTileG2SOp(), (STORE_ROWS, COLUMNS)
    kernel = relu_gemm(
        cute.make_tiled_mma(operation),
        *cpasync.make_tiled_tma_atom(load, a, stages_layout(ROWS), (ROWS, K)),
        *cpasync.make_tiled_tma_atom(load, b, stages_layout(COLUMNS), (COLUMNS, K)),
        *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out, staging_layout(*box), box),
    )
    kernel.launch(grid=(CTAS, 1, 1), block=(5 * 32, 1, 1), stream=stream, use_pdl=True)


def relu_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """relu(a @ b.T) for bfloat16 ``[M, K]`` and ``[N, K]`` on the GPU, K and N multiples of 8."""
    out = torch.empty(len(a), len(b), dtype=torch.bfloat16, device=a.device)
    # Of dynamic extent, so that a block of rows beyond the output keeps its coordinate, and TMA clips it.
    tensors = [from_dlpack(tensor, assumed_align=16).mark_compact_shape_dynamic(mode=0) for tensor in (a, b, out)]
    launch(*tensors, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    return out


if __name__ == "__main__":
    a, b = torch.randn(200, 160, device="cuda").bfloat16(), torch.randn(136, 160, device="cuda").bfloat16()
    expected = (a.float() @ b.float().T).relu().bfloat16()
    torch.testing.assert_close(relu_product(a, b), expected)
    print("the result is right")
