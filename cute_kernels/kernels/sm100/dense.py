"""The persistent, warp-specialised dense GEMM on Blackwell: allocate, build pipes, dispatch to roles.

The roles that load and multiply are those of the patch embed; a stage may hold two waves of ``a``, tiles run in groups
of row blocks, and the epilogue stores through a short ring of buffers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from cute_kernels.kernels.dense import ELEMENT_TYPES, OPERAND_TYPES, bias_view, matrices, out_pitch
from cute_kernels.kernels.graph import sm100_graph
from cute_kernels.kernels.load import Load
from cute_kernels.kernels.pipes import make_pipes
from cute_kernels.kernels.sm100.cluster import cluster_place
from cute_kernels.kernels.sm100.dense_epilogue import DenseEpilogue
from cute_kernels.kernels.sm100.frame import begin, clusters_of_grid, end, stage_tensor, tensor_memory, tma_operand
from cute_kernels.kernels.sm100.mma import Mma
from cute_kernels.kernels.sm100.pipes import Sm100Pipe
from cute_kernels.kernels.staging import staging_layout, warp_staging
from cute_kernels.kernels.tiles import GroupedOrder
from cute_kernels.plan import Sm100GemmPlan


@dataclass(frozen=True)
class DeviceArguments:
    """What the host function hands to the kernel: TMA atoms with their views, layouts, bias and sizes in tiles."""

    tiled_mma: cute.TiledMma
    a_atom: cute.CopyAtom
    a: cute.Tensor
    a_layout: cute.ComposedLayout
    b_atom: cute.CopyAtom
    b: cute.Tensor
    b_layout: cute.ComposedLayout
    out_atom: cute.CopyAtom
    out: cute.Tensor
    bias: cute.Tensor | None
    m_tiles: Int32
    n_tiles: Int32
    batches: Int32
    k_blocks: Int32


class DenseGemm:
    """Host entry and kernel for one plan. Sizes are launch arguments: one compiled kernel serves all of them."""

    def __init__(self, plan: Sm100GemmPlan) -> None:
        self.plan = plan
        self.graph = sm100_graph(plan)
        self.tile_mnk = (plan.mma_m, plan.config.tile_n, plan.tile_k)

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
        plan, problem = self.plan, self.plan.problem
        dtype = OPERAND_TYPES[problem.in_dtype]
        a = matrices(a_pointer, m, k, k, batches, problem.in_dtype)
        b = matrices(b_pointer, n, k, k, batches, problem.in_dtype)
        out = matrices(out_pointer, m, n, out_pitch(plan, n), batches, problem.out_dtype)

        tiled_mma = sm100_utils.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, tcgen05.CtaGroup.TWO, self.tile_mnk[:2]
        )
        a_layout = sm100_utils.make_smem_layout_a(tiled_mma, self.tile_mnk, dtype, plan.config.stages * plan.waves)
        b_layout = sm100_utils.make_smem_layout_b(tiled_mma, self.tile_mnk, dtype, plan.config.stages)
        cluster_vmnk = (plan.cta_group, *plan.pairs, 1)
        stage = (None, None, None, 0)
        a_tma = cute.nvgpu.make_tiled_tma_atom_A(
            _load(plan.pairs[1]), a, cute.slice_(a_layout, stage), self.tile_mnk, tiled_mma, cluster_vmnk
        )
        b_tma = cute.nvgpu.make_tiled_tma_atom_B(
            _load(plan.pairs[0]), b, cute.slice_(b_layout, stage), self.tile_mnk, tiled_mma, cluster_vmnk
        )
        box = (plan.store_rows, plan.store_columns)
        out_atom, out_view = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, staging_layout(*box), box
        )
        arguments = DeviceArguments(
            tiled_mma, a_tma.atom, a_tma.tma_tensor, a_layout, b_tma.atom, b_tma.tma_tensor, b_layout,
            out_atom, out_view, bias_view(bias_pointer, plan, n),
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

    @cute.kernel
    def kernel(self, args: DeviceArguments) -> None:
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        place = cluster_place(plan, cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))

        storage = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=plan.swizzle_period)
        barriers = cute.recast_ptr(storage, dtype=Int64)
        tmem_address = cute.recast_ptr(storage + self.graph.slots * 8, dtype=Int32)
        a_stages, b_stages, staging = (storage + region.offset for region in plan.smem[1:])
        pipes = make_pipes(self.graph, barriers, functools.partial(Sm100Pipe, place=place))
        begin(plan, self.graph, warp, barriers, tmem_address, (args.a_atom, args.b_atom, args.out_atom))

        order = GroupedOrder(
            args.m_tiles, args.n_tiles, args.batches, plan.config.group_m, cute.arch.cluster_idx()[0],
            clusters_of_grid(plan),
        )  # fmt: skip
        dtype = OPERAND_TYPES[plan.problem.in_dtype]
        a_tensor = stage_tensor(a_stages, args.a_layout, dtype)
        b_tensor = stage_tensor(b_stages, args.b_layout, dtype)
        count = plan.accumulators * plan.waves
        accumulators = tensor_memory(args.tiled_mma, self.tile_mnk[:2], count, tmem_address)

        if warp == plan.load_warp:
            mma = args.tiled_mma.get_slice(place.rank)
            along_m, along_n = (plan.pairs[0], place.m), (plan.pairs[1], place.n)
            a = cute.local_tile(args.a, cute.slice_(self.tile_mnk, (None, 0, None)), (None, None, None))
            b = cute.local_tile(args.b, cute.slice_(self.tile_mnk, (0, None, None)), (None, None, None))
            Load(
                tma_operand((args.a_atom, mma.partition_A(a)), a_tensor, plan.waves, along_m, along_n, place.a_mask),
                tma_operand((args.b_atom, mma.partition_B(b)), b_tensor, 1, along_n, along_m, place.b_mask),
                pipes["operands"], order, args.k_blocks, place.leads,
            ).run()  # fmt: skip
        elif warp == plan.mma_warp:
            if place.leads:
                Mma(
                    args.tiled_mma, args.tiled_mma.make_fragment_A(a_tensor), args.tiled_mma.make_fragment_B(b_tensor),
                    accumulators, pipes["operands"], pipes["accumulator"], order, args.k_blocks,
                    plan.waves, plan.config.idle_clocks,
                ).run()  # fmt: skip
        else:
            ring = warp_staging(
                staging, (warp - plan.first_epilogue_warp) * plan.config.store_stages, plan.store_rows,
                plan.config.store_stages, args.out_atom, args.out, ELEMENT_TYPES[plan.problem.out_dtype],
            )  # fmt: skip
            DenseEpilogue(
                plan, accumulators, ring, args.bias, pipes["accumulator"], order, place, warp
            ).run()  # fmt: skip
        end(plan, warp, accumulators)


def _load(sharers: int) -> cpasync.CopyBulkTensorTileG2SOp | cpasync.CopyBulkTensorTileG2SMulticastOp:
    """TMA load into CTAs of pairs, of which each of the ``sharers`` CTAs loads its part for all."""
    kind = cpasync.CopyBulkTensorTileG2SMulticastOp if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp
    return kind(tcgen05.CtaGroup.TWO)


DenseGemm.kernel.set_name_prefix("gemm_sm100a", remove_cutlass_symbol=True, keep_mangled_name=False)
