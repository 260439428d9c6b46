"""The persistent dense GEMM on Hopper: allocate, build pipes, dispatch to roles.

One warp loads, two consumer warpgroups multiply and store: together, half of a tile each, or in turn, a tile each. Of a
tile with the 64 rows of a WGMMA there is one, unless two take turns.

In turn, each warpgroup skips the stages of the other one's tile. The other one's order barrier is signalled when the
last WGMMA of a tile has been issued, unless no tile follows: a barrier that nobody waits for must not stay half full.

With a split of K, CTA i of s finishes the rows of consumer warps ``w i / s`` to ``w (i + 1) / s - 1`` of w: the same
warps of the others send it their accumulators by ``st.async``, which it adds as it rounds, in one fixed order. Tensor
cores ignore the low 13 bits of an FP32 number; TMA rounds to TF32 on the way, so that they are zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, TFloat32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_kernels.dsl import compiling
from cute_kernels.kernels import tma
from cute_kernels.kernels.gemm import DeviceArguments, GemmHost
from cute_kernels.kernels.host import ELEMENT_TYPES
from cute_kernels.kernels.load import Load, clear_unloaded, tma_operand
from cute_kernels.kernels.pipes import Sm90Pipe, allocate, begin, this_cluster, warp_and_rank
from cute_kernels.kernels.sm90.gemm_mma import GemmMma, KeptNumbers, PartialSums, Residual, TransposedMma, sums_type
from cute_kernels.kernels.tiles import DividedOrder, tile_divisors
from cute_kernels.plan.gemm_sm90 import Sm90GemmPlan

# --- WGMMA on TF32 operands, which CuTe DSL 4.8 has no operation for -------------------------------------------------

TF32_K = 8
"""Elements of K of one instruction: 32 bytes, as of every element type."""


class MmaTf32Op(warpgroup.MmaF16BF16Op):
    """``wgmma.mma_async.m64nNk8.f32.tf32.tf32``: FP32 accumulators, both operands K-major.

    The operation of 16-bit operands with another element type: the compiler makes the instruction from the types, and
    only the checks of that class stand in the way.
    """

    descriptive_name = "warpgroup TF32 MMA Operation"

    def _verify(self) -> None:
        if self.a_dtype is not cutlass.TFloat32 or self.acc_dtype is not cutlass.Float32:
            raise TypeError(f"{self.a_dtype} operands with {self.acc_dtype} accumulators: must be TFloat32, Float32")
        if self.shape_mnk[2] != TF32_K:
            raise ValueError(f"shape_mnk = {self.shape_mnk}: must be K = {TF32_K}")


class Sm90GemmKernel(GemmHost):
    """Host entry and kernel for one plan."""

    plan: Sm90GemmPlan

    def __init__(self, plan: Sm90GemmPlan) -> None:
        super().__init__(plan)
        if plan.config.transposed:
            self.dtype, self.b_dtype = self.b_dtype, self.dtype

    def operands(self, a: cute.Tensor, b: cute.Tensor) -> tuple[cute.TiledMma, tma.Tma, tma.Tma]:
        plan, config = self.plan, self.plan.config
        if cutlass.const_expr(config.transposed):
            a, b = b, a
        tiled_mma = cute.make_tiled_mma(self._operation())
        a_box, b_box = (plan.loaded_rows, plan.tile_k), (config.tile_n, plan.tile_k)
        a_tma = tma.load_tma(a, tma.k_major(self.dtype, a_box, 1), a_box, config.cluster_n)
        return tiled_mma, a_tma, tma.load_tma(b, tma.k_major(self.b_dtype, b_box, 1), b_box, config.cluster_m)

    def divisors(self, m_tiles: Int32, n_tiles: Int32) -> tuple[cute.FastDivmodDivisorV2, ...]:
        tiles = (n_tiles, m_tiles) if self.plan.config.transposed else (m_tiles, n_tiles)
        return tile_divisors(*tiles, self.plan.config.group_m)

    def _operation(self) -> warpgroup.MmaOp:
        """WGMMA of 64 rows, the columns of a tile and 32 bytes of K."""
        shape = (64, self.plan.config.tile_n, self.plan.mma_k)
        rest = (sums_type(self.plan), shape, warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K)
        if self.plan.sums_integers:
            return warpgroup.MmaI8Op(self.dtype, self.b_dtype, *rest)
        if self.dtype.width == 8:
            return warpgroup.MmaF8Op(self.dtype, self.b_dtype, *rest)
        return (MmaTf32Op if self.dtype is TFloat32 else warpgroup.MmaF16BF16Op)(self.dtype, *rest)

    @cute.kernel
    def kernel(self, args: DeviceArguments) -> None:
        plan, config = self.plan, self.plan.config
        warp, rank = warp_and_rank(plan)
        first_cta, first_block, k_blocks = 0, 0, args.k_blocks
        if cutlass.const_expr(config.split_k > 1):
            # The CTAs of one slice of K share operands; slices follow each other.
            slice_ = rank // plan.sharing_ctas
            rank = rank % plan.sharing_ctas
            first_cta = slice_ * plan.sharing_ctas
            first_block = slice_ * k_blocks // config.split_k
            k_blocks = (slice_ + 1) * k_blocks // config.split_k - first_block
        rank_m, rank_n = rank % config.cluster_m, rank // config.cluster_m

        barriers, regions, pipes = allocate(plan, self.graph, Sm90Pipe)
        count = len(plan.first_smem)
        numbers, (a_stages, b_stages, staging, *more) = regions[:count], regions[count:]
        pipe = pipes["operands"]

        if cutlass.const_expr(plan.loaded_rows < config.tile_m):
            # wgmma reads them; begin() synchronises the CTA before it does.
            loaded_bytes = plan.loaded_rows * plan.k_block_bytes
            clear_unloaded(a_stages, config.stages, plan.a_stage_bytes, loaded_bytes, plan.threads)
        atoms = (args.a.atom, args.b.atom, args.out.atom)
        if cutlass.const_expr(plan.tma_residual):
            atoms += (args.residual.atom,)
        begin(self.graph, warp == plan.load_warp, barriers, atoms, relaxed=plan.loaded_rows == config.tile_m)

        tiles = (args.n_tiles, args.m_tiles) if config.transposed else (args.m_tiles, args.n_tiles)
        order = DividedOrder(*tiles, args.batches, config.group_m, *this_cluster(plan), args.divisors)
        a_layout, b_layout = (
            tma.k_major(dtype, (rows, plan.tile_k), config.stages)
            for dtype, rows in ((self.dtype, config.tile_m), (self.b_dtype, config.tile_n))
        )
        a_tensor = tma.shared_tensor(a_stages, a_layout, self.dtype)
        b_tensor = tma.shared_tensor(b_stages, b_layout, self.b_dtype)

        if warp >= plan.load_warp:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == plan.load_warp:
                along_m, along_n = (config.cluster_m, rank_m), (config.cluster_n, rank_n)
                # A row of CTAs shares a, a column of CTAs shares b.
                row_of_ctas = Int32(sum(1 << config.cluster_m * i for i in range(config.cluster_n)))
                row_of_ctas = row_of_ctas << (rank_m + first_cta)
                column_of_ctas = Int32((1 << config.cluster_m) - 1) << (rank_n * config.cluster_m + first_cta)
                loaded = cute.local_tile(a_tensor, (plan.loaded_rows, plan.tile_k, config.stages), (0, 0, 0))
                a, b = self._tiles(args.a.view, plan.loaded_rows), self._tiles(args.b.view, config.tile_n)
                rows = tma_operand(args.a.atom, a, loaded, 2, tile=along_m, share=along_n, mask=row_of_ctas)
                columns = tma_operand(args.b.atom, b, b_tensor, 2, tile=along_n, share=along_m, mask=column_of_ctas)
                Load(rows, columns, pipe, order, k_blocks, first_block=first_block).run()
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            group = warp // 4
            part = 0 if cutlass.const_expr(config.pingpong) else group
            mine = cute.local_tile(a_tensor, (plan.warpgroup_rows, plan.tile_k, config.stages), (part, 0, 0))
            thread = cute.arch.thread_idx()[0] % 128
            mma = args.tiled_mma.get_slice(thread)
            store_group = warp // plan.store_warps
            ring = tma.warp_staging(
                staging, first=store_group * config.store_stages, rows=plan.store_rows, buffers=config.store_stages,
                out=args.out, dtype=ELEMENT_TYPES[plan.problem.out_dtype], row_bytes=plan.store_row_bytes
            )
            if cutlass.const_expr(plan.store_warps > 1):
                barrier = self.graph.named_barrier("staged 0") + store_group
                ring = tma.group_staging(ring, warp % plan.store_warps, barrier, plan.store_warps)
            partials = None
            if cutlass.const_expr(config.split_k > 1):
                partials = PartialSums(plan, pipes["partials"], more[0], slice_, rank, warp)
            (TransposedMma if config.transposed else GemmMma)(
                plan=plan,
                tiled_mma=args.tiled_mma,
                a_fragments=args.tiled_mma.make_fragment_A(mma.partition_A(mine)),
                b_fragments=args.tiled_mma.make_fragment_B(mma.partition_B(b_tensor)),
                operands=pipe,
                staging=ring,
                bias=args.bias,
                order=order,
                k_blocks=k_blocks,
                warpgroup=group,
                thread=thread,
                rank_m=rank_m,
                rank_n=rank_n,
                first_cta=first_cta,
                partials=partials,
                order_barrier=self.graph.named_barrier("order barrier 0"),
                addends=args.addends.loaded(),
                residual=self._residual(args, pipes, ring, store_group),
                kept=self._kept(numbers, group, thread),
            ).run()

    def _kept(self, memory: list[cute.Pointer], group: Int32, thread: Int32) -> KeptNumbers | None:
        """Numbers of the columns of this warpgroup's tiles, if there are any."""
        plan = self.plan
        if not plan.kept:
            return None
        own = group if plan.config.pingpong else 0
        return KeptNumbers(
            base=memory[0] + cute.assume(own * plan.kept_bytes, divby=plan.kept_bytes),
            kinds=plan.kept,
            count=plan.config.tile_n,
            thread=thread if plan.config.pingpong else group * 128 + thread,
            threads=128 * plan.warpgroups // plan.keeping_groups,
            barrier=self.graph.named_barrier("kept 0") + own,
        )

    def _residual(
        self, args: DeviceArguments, pipes: dict[str, Sm90Pipe], ring: tma.WarpStaging, group: Int32
    ) -> Residual | None:
        """Addends of the results of a ring of store buffers, if TMA brings them."""
        plan = self.plan
        if not plan.tma_residual:
            return None
        box, dtype = (plan.store_rows, plan.store_columns), ELEMENT_TYPES[plan.problem.residual]
        layout = tma.staging_layout(*box, plan.store_row_bytes, max(2, ring.buffers))
        boxes = cute.local_tile(args.residual.view, box, (None, None, None))
        target, source = tma.sides(args.residual.atom, tma.shared_tensor(ring.base, layout, dtype), boxes, 2)
        full = pipes["residual"].full + group * ring.buffers
        return Residual(full, plan.store_buffer_bytes, args.residual.atom, source, target, dtype)

    def _tiles(self, view: cute.Tensor, rows: int) -> cute.Tensor:
        """TMA view ``[rows, K, batch]`` by boxes of one K block."""
        return cute.local_tile(view, (rows, self.plan.tile_k), (None, None, None))


compiling.name_kernel(Sm90GemmKernel.kernel, "gemm_sm90a")
