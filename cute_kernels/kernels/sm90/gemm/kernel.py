"""The persistent dense GEMM on Hopper: allocate, build pipes, dispatch to roles.

One warp loads, two consumer warpgroups multiply and store: together, half of a tile each, or in turn, a tile each.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, TFloat32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from cute_kernels import dsl
from cute_kernels.kernels.elements import ELEMENT_TYPES
from cute_kernels.kernels.gemm import DeviceArguments, GemmHost, Tma
from cute_kernels.kernels.graph import sm90_gemm_graph
from cute_kernels.kernels.load import Load, clear_unloaded, tma_operand
from cute_kernels.kernels.pipes import make_pipes
from cute_kernels.kernels.sm90.frame import begin
from cute_kernels.kernels.sm90.gemm.mma import GemmMma
from cute_kernels.kernels.sm90.gemm.split_k import PartialSums
from cute_kernels.kernels.sm90.gemm.tf32 import MmaTf32Op
from cute_kernels.kernels.sm90.pipes import Sm90Pipe
from cute_kernels.kernels.staging import warp_staging
from cute_kernels.kernels.tiles import GroupedOrder
from cute_kernels.plan import Sm90GemmPlan


class GemmKernel(GemmHost):
    """Host entry and kernel for one plan."""

    plan: Sm90GemmPlan

    def __init__(self, plan: Sm90GemmPlan) -> None:
        super().__init__(plan, sm90_gemm_graph(plan))

    def operands(self, a: cute.Tensor, b: cute.Tensor) -> tuple[cute.TiledMma, Tma, Tma]:
        plan, config = self.plan, self.plan.config
        operation = MmaTf32Op if self.dtype is TFloat32 else warpgroup.MmaF16BF16Op
        tiled_mma = cute.make_tiled_mma(
            operation(
                self.dtype, Float32, (64, config.tile_n, plan.mma_k), warpgroup.OperandSource.SMEM,
                OperandMajorMode.K, OperandMajorMode.K,
            )
        )  # fmt: skip
        a_tma = self._load_atom(a, plan.loaded_rows, config.cluster_n)
        return tiled_mma, a_tma, self._load_atom(b, config.tile_n, config.cluster_m)

    def _load_atom(self, tensor: cute.Tensor, rows: int, sharers: int) -> Tma:
        """TMA load of ``rows`` rows of one K block, of which each of the ``sharers`` CTAs loads its part for all."""
        load = cpasync.CopyBulkTensorTileG2SMulticastOp() if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp()
        layout = self._stage_layout(rows)
        return cpasync.make_tiled_tma_atom(load, tensor, layout, (rows, self.plan.tile_k), num_multicast=sharers)

    def _stage_layout(self, rows: int, stages: int | None = None) -> cute.ComposedLayout:
        """``[rows, 128 bytes of K]``, K-major, SWIZZLE_128B; with ``stages`` a last mode of stages."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        layout = cute.tile_to_shape(atom, (rows, self.plan.tile_k, stages or 1), order=(0, 1, 2))
        return layout if stages else cute.slice_(layout, (None, None, 0))

    @cute.kernel
    def kernel(self, args: DeviceArguments) -> None:
        plan, config = self.plan, self.plan.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if plan.ctas > 1 else Int32(0)
        first_cta, first_block, k_blocks = 0, 0, args.k_blocks
        if cutlass.const_expr(config.split_k > 1):
            # The CTAs of one slice of K share operands; slices follow each other.
            slice_ = rank // plan.sharing_ctas
            rank = rank % plan.sharing_ctas
            first_cta = slice_ * plan.sharing_ctas
            first_block = slice_ * k_blocks // config.split_k
            k_blocks = (slice_ + 1) * k_blocks // config.split_k - first_block
        rank_m, rank_n = rank % config.cluster_m, rank // config.cluster_m

        storage = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=plan.swizzle_period)
        barriers = cute.recast_ptr(storage, dtype=Int64)
        a_stages, b_stages, staging, *more = (storage + region.offset for region in plan.smem[1:])
        pipes = make_pipes(self.graph, barriers, Sm90Pipe)
        pipe = pipes["operands"]

        if cutlass.const_expr(plan.loaded_rows < config.tile_m):
            # wgmma reads them; begin() synchronises the CTA before it does.
            loaded_bytes = plan.loaded_rows * plan.k_block_bytes
            clear_unloaded(a_stages, config.stages, plan.a_stage_bytes, loaded_bytes, plan.threads)
        begin(self.graph, warp == plan.load_warp, barriers, (args.a_atom, args.b_atom, args.out_atom))

        order = GroupedOrder(
            args.m_tiles, args.n_tiles, args.batches, config.group_m, cute.arch.block_idx()[0] // plan.ctas,
            cute.arch.grid_dim()[0] // plan.ctas,
        )  # fmt: skip
        a_tensor = self._stages(a_stages, config.tile_m)
        b_tensor = self._stages(b_stages, config.tile_n)

        if warp >= plan.load_warp:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == plan.load_warp:
                along_m, along_n = (config.cluster_m, rank_m), (config.cluster_n, rank_n)
                # A row of CTAs shares a, a column of CTAs shares b.
                row_of_ctas = Int32(sum(1 << config.cluster_m * i for i in range(config.cluster_n)))
                row_of_ctas = row_of_ctas << (rank_m + first_cta)
                column_of_ctas = Int32((1 << config.cluster_m) - 1) << (rank_n * config.cluster_m + first_cta)
                loaded = cute.local_tile(a_tensor, (plan.loaded_rows, plan.tile_k, config.stages), (0, 0, 0))
                a, b = self._tiles(args.a, plan.loaded_rows), self._tiles(args.b, config.tile_n)
                Load(
                    tma_operand((args.a_atom, a), loaded, 2, 1, along_m, along_n, row_of_ctas),
                    tma_operand((args.b_atom, b), b_tensor, 2, 1, along_n, along_m, column_of_ctas),
                    pipe, order, k_blocks, first_block=first_block,
                ).run()  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            group = warp // 4
            part = 0 if cutlass.const_expr(config.pingpong) else group
            mine = cute.local_tile(a_tensor, (plan.warpgroup_rows, plan.tile_k, config.stages), (part, 0, 0))
            thread = cute.arch.thread_idx()[0] % 128
            mma = args.tiled_mma.get_slice(thread)
            ring = warp_staging(
                staging, warp * config.store_stages, plan.store_rows, config.store_stages, args.out_atom, args.out,
                ELEMENT_TYPES[plan.problem.out_dtype],
            )  # fmt: skip
            partials = None
            if cutlass.const_expr(config.split_k > 1):
                partials = PartialSums(plan, pipes["partials"], more[0], slice_, rank, warp)
            GemmMma(
                plan, args.tiled_mma, args.tiled_mma.make_fragment_A(mma.partition_A(mine)),
                args.tiled_mma.make_fragment_B(mma.partition_B(b_tensor)), pipe, ring, args.bias, order, k_blocks,
                group, thread, rank_m, rank_n, first_cta, partials, self.graph.named_barriers[0].identifier,
            ).run()  # fmt: skip

    def _stages(self, pointer: cute.Pointer, rows: int) -> cute.Tensor:
        layout = self._stage_layout(rows, self.plan.config.stages)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.dtype), layout.outer)

    def _tiles(self, view: cute.Tensor, rows: int) -> cute.Tensor:
        """TMA view ``[rows, K, batch]`` by boxes of one K block."""
        return cute.local_tile(view, (rows, self.plan.tile_k), (None, None, None))


dsl.name_kernel(GemmKernel.kernel, "gemm_sm90a")
