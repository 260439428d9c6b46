"""The persistent dense GEMM on Hopper: allocate, build pipes, dispatch to roles.

One warp loads, two consumer warpgroups multiply and store: together, half of a tile each, or in turn, a tile each.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64, TFloat32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from cute_kernels.kernels.dense import ELEMENT_TYPES, OPERAND_TYPES, bias_view, matrices, out_pitch
from cute_kernels.kernels.graph import sm90_gemm_graph
from cute_kernels.kernels.load import Load, Operand
from cute_kernels.kernels.pipes import make_pipes
from cute_kernels.kernels.sm90.dense_mma import DenseMma
from cute_kernels.kernels.sm90.frame import begin
from cute_kernels.kernels.sm90.pipes import Sm90Pipe
from cute_kernels.kernels.sm90.split_k import PartialSums
from cute_kernels.kernels.sm90.tf32 import MmaTf32Op
from cute_kernels.kernels.staging import staging_layout, warp_staging
from cute_kernels.kernels.tiles import GroupedOrder
from cute_kernels.plan import Sm90GemmPlan


@dataclass(frozen=True)
class DeviceArguments:
    """What the host function hands to the kernel: TMA atoms with their views, bias and sizes in tiles."""

    tiled_mma: cute.TiledMma
    a_atom: cute.CopyAtom
    a: cute.Tensor
    b_atom: cute.CopyAtom
    b: cute.Tensor
    out_atom: cute.CopyAtom
    out: cute.Tensor
    bias: cute.Tensor | None
    m_tiles: Int32
    n_tiles: Int32
    batches: Int32
    k_blocks: Int32


class DenseGemm:
    """Host entry and kernel for one plan. Sizes are launch arguments: one compiled kernel serves all of them."""

    def __init__(self, plan: Sm90GemmPlan) -> None:
        self.plan = plan
        self.graph = sm90_gemm_graph(plan)
        self.dtype = OPERAND_TYPES[plan.problem.in_dtype]

    @cute.jit
    def __call__(
        self,
        a_pointer: cute.Pointer,
        b_pointer: cute.Pointer,
        bias_pointer: cute.Pointer | None,
        out_pointer: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        batches: Int32,
        clusters: Int32,
        stream,
    ) -> None:
        """Builds TMA descriptors and launches ``clusters`` clusters on ``stream``."""
        plan, config, problem = self.plan, self.plan.config, self.plan.problem
        a = matrices(a_pointer, m, k, k, batches, problem.in_dtype)
        b = matrices(b_pointer, n, k, k, batches, problem.in_dtype)
        out = matrices(out_pointer, m, n, out_pitch(plan, n), batches, problem.out_dtype)

        operation = MmaTf32Op if self.dtype is TFloat32 else warpgroup.MmaF16BF16Op
        tiled_mma = cute.make_tiled_mma(
            operation(
                self.dtype, Float32, (64, config.tile_n, plan.mma_k), warpgroup.OperandSource.SMEM,
                OperandMajorMode.K, OperandMajorMode.K,
            )
        )  # fmt: skip
        a_atom, a_view = self._load_atom(a, config.tile_m, config.cluster_n)
        b_atom, b_view = self._load_atom(b, config.tile_n, config.cluster_m)
        box = (plan.store_rows, plan.store_columns)
        out_atom, out_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, staging_layout(*box), box
        )
        arguments = DeviceArguments(
            tiled_mma, a_atom, a_view, b_atom, b_view, out_atom, out_view, bias_view(bias_pointer, plan, n),
            cute.ceil_div(m, plan.cluster_rows), cute.ceil_div(n, plan.cluster_columns), batches,
            cute.ceil_div(k, plan.tile_k),
        )  # fmt: skip
        self.kernel(arguments).launch(
            grid=(clusters * plan.ctas, 1, 1),
            block=(plan.threads, 1, 1),
            cluster=plan.cluster,
            smem=plan.smem_bytes,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    def _load_atom(self, tensor: cute.Tensor, rows: int, sharers: int) -> tuple[cute.CopyAtom, cute.Tensor]:
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
                Load(
                    self._operand((args.a_atom, args.a), a_tensor, config.tile_m, along_m, along_n, row_of_ctas),
                    self._operand((args.b_atom, args.b), b_tensor, config.tile_n, along_n, along_m, column_of_ctas),
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
            DenseMma(
                plan, args.tiled_mma, args.tiled_mma.make_fragment_A(mma.partition_A(mine)),
                args.tiled_mma.make_fragment_B(mma.partition_B(b_tensor)), pipe, ring, args.bias, order, k_blocks,
                group, thread, rank_m, rank_n, first_cta, partials, self.graph.named_barriers[0].identifier,
            ).run()  # fmt: skip

    def _stages(self, pointer: cute.Pointer, rows: int) -> cute.Tensor:
        layout = self._stage_layout(rows, self.plan.config.stages)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.dtype), layout.outer)

    def _operand(
        self, tma: tuple[cute.CopyAtom, cute.Tensor], stages: cute.Tensor, rows: int, tile: tuple[int, Int32],
        share: tuple[int, Int32], mask: Int32,
    ) -> Operand:  # fmt: skip
        """One operand of this CTA.

        Args:
            tma: atom and TMA view ``[rows, K, batch]``.
            stages: ``[rows, K, stage]`` in shared memory.
            rows: rows of a tile of one CTA.
            tile: tiles of a cluster along this operand, and which one is this CTA's.
            share: CTAs that share this CTA's tile, and which of its parts this CTA loads.
            mask: the CTAs that share it.
        """
        atom, source = tma
        blocks = cute.local_tile(source, (rows, self.plan.tile_k), (None, None, None))
        stages, source = cpasync.tma_partition(
            atom, share[1], cute.make_layout(share[0]), cute.group_modes(stages, 0, 2), cute.group_modes(blocks, 0, 2)
        )
        multicast = Int16(mask) if share[0] > 1 else None
        return Operand(atom, source, stages, step=tile[0], first=tile[1], multicast=multicast)


DenseGemm.kernel.set_name_prefix("gemm_sm90a", remove_cutlass_symbol=True, keep_mangled_name=False)
