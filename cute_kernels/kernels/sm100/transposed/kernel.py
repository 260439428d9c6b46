"""What the device functions of the kernels whose weight stays on chip have in common: allocate, dispatch to roles."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

from cute_kernels.kernels.graph import Graph
from cute_kernels.kernels.pipes import Pipe, make_pipes, stamp_waits
from cute_kernels.kernels.sm100.cluster import ClusterPlace, cluster_place
from cute_kernels.kernels.sm100.frame import begin, end
from cute_kernels.kernels.sm100.pipes import Sm100Pipe
from cute_kernels.kernels.sm100.transposed.instruction import accumulators_of_parts
from cute_kernels.kernels.sm100.transposed.mma import Mma, RowsOperand
from cute_kernels.kernels.sm100.transposed.weight import fill_tensor_memory, weight_load
from cute_kernels.kernels.stamps import make_stamps
from cute_kernels.plan import LANES
from cute_kernels.plan.sm100_transposed import Sm100TransposedPlan


class WeightArguments(Protocol):
    """What every kernel's arguments have: ``[N, K]`` in memory, or its TMA view where ``weight_atom`` loads it."""

    weight_atom: cute.CopyAtom | None
    weight: cute.Tensor
    groups: Int32


class TransposedKernel:
    """Device side of a plan. A subclass says what is loaded and multiplied beside the weight, and what is stored."""

    plan: Sm100TransposedPlan
    graph: Graph

    def atoms(self, args: Any) -> tuple[cute.CopyAtom, ...]:
        """Descriptors to be prefetched."""
        raise NotImplementedError

    def order(self, args: Any, first: Int32, step: Int32) -> Any:
        """The tiles of a cluster."""
        raise NotImplementedError

    def load(self, args: Any, stages: cute.Pointer, pipe: Pipe, order: Any, place: ClusterPlace) -> Any:
        """The role of the load warp, beside that for a weight in shared memory."""
        raise NotImplementedError

    def operand(self, stages: cute.Pointer) -> RowsOperand:
        """The stages as MMAs read them."""
        raise NotImplementedError

    def terms(self, args: Any) -> tuple[cute.Tensor, cute.Tensor | None]:
        """The weight in memory, and its second term."""
        return args.weight, None

    def epilogue(
        self, args: Any, accumulators: tuple, staging: cute.Pointer, pipe: Pipe, order: Any, slab: Int32, quarter: Int32
    ) -> Any:
        """The role of an epilogue warp, which has a quarter of the lanes of the features of a CTA."""
        raise NotImplementedError

    @cute.jit
    def run(self, args: WeightArguments, profile: cute.Pointer | None) -> None:
        """The whole kernel."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if plan.ctas > 1 else Int32(0)
        place = cluster_place(plan, rank)

        storage = cute.arch.get_dyn_smem(Uint8, alignment=plan.swizzle_period)
        barriers = cute.recast_ptr(storage, dtype=Int64)
        tmem_address = cute.recast_ptr(storage + self.graph.slots * 8, dtype=Int32)
        weight, stages, staging = (storage + region.offset for region in plan.smem[1:])
        pipes = make_pipes(self.graph, barriers, functools.partial(Sm100Pipe, place=place))

        begin(plan, self.graph, warp, barriers, tmem_address, self.atoms(args))

        stamps = stamp_waits(pipes, make_stamps(plan, profile, warp))
        tmem = cute.arch.retrieve_tmem_ptr(Int32, 16, tmem_address)
        accumulators = accumulators_of_parts(plan, tmem)
        cluster = cute.arch.block_idx()[0] // plan.ctas
        clusters = cute.arch.grid_dim()[0] // plan.ctas
        group = cluster % args.groups
        order = self.order(args, cluster // args.groups, clusters // args.groups)

        if warp == plan.load_warp:
            if cutlass.const_expr(plan.config.weight == "smem"):
                weight_load(plan, (args.weight_atom, args.weight), weight, pipes["weight"], group, place).run()
            self.load(args, stages, pipes["operands"], order, place).run()
        elif warp == plan.mma_warp:
            if place.leads:
                resident = weight if plan.config.weight == "smem" else tmem + plan.weight_column
                edges = (pipes[name] for name in ("operands", "accumulator", "weight"))
                Mma(plan, self.operand(stages), resident, accumulators, *edges, order).run()
        else:
            slab = group * plan.ctas + rank
            quarter = warp % 4
            if cutlass.const_expr(plan.config.weight == "tmem"):
                lane = quarter * LANES + cute.arch.lane_idx()
                fill_tensor_memory(plan, self.terms(args), tmem + plan.weight_column, slab, lane, pipes["weight"])
            self.epilogue(args, accumulators, staging, pipes["accumulator"], order, slab, quarter).run()

        stamps.finish()
        end(plan, warp, accumulators[0])
