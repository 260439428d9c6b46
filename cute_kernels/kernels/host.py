"""Common parts of the host functions of all kernels: how they launch; of patch embeds, what they are made of."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.config import WEIGHT_TYPES
from cute_kernels.kernels.epilogue import Scales, scales_of
from cute_kernels.kernels.graph import graph_of
from cute_kernels.kernels.load import positions_layout, rows_layout
from cute_kernels.kernels.tiles import index_view
from cute_kernels.kernels.tma import Tma
from cute_kernels.plan import Plan
from cute_kernels.plan.base import ITEMSIZE, VECTOR_BYTES
from cute_kernels.plan.images import ImagesPlan
from cute_kernels.plan.patch_embed import PatchEmbedPlan

Operands: TypeAlias = Any
"""The operands of a launch as CuTe DSL traces them: a named tuple with a field for each row of `Plan.operands`."""


def launch_clusters(kernel: Any, plan: Plan, clusters: Int32, stream: Any) -> None:
    """Launches persistent clusters with programmatic dependent launch."""
    kernel.launch(
        grid=(clusters * math.prod(plan.cluster), 1, 1),
        block=(plan.threads, 1, 1),
        cluster=plan.cluster,
        smem=plan.smem_bytes,
        min_blocks_per_mp=plan.resident_ctas,
        # All of it for shared memory: what CuTe DSL takes otherwise it asks a driver for, when it compiles.
        preferred_smem_carveout=100 if plan.resident_ctas > 1 else None,
        stream=stream,
        use_pdl=True,
    )


class Host:
    """Host entry for one plan. Sizes are launch arguments: one compiled kernel serves all of them.

    A subclass has ``__call__(operands, stream)`` and the device code, ``kernel``.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, graph_of(plan)


# --- CuTe DSL's types by the names that plans use --------------------------------------------------------------------

ELEMENT_TYPES = {
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "tfloat32": cutlass.TFloat32,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    "int8": cutlass.Int8,
    "uint8": cutlass.Uint8,
}
"""Types of numbers and of what pointers point to. A map of ``"tfloat32"`` makes TMA round FP32 on its way to shared
memory."""


# --- the host entry that all kernels over images have in common ------------------------------------------------------

class ImagesHost(Host):
    """Images, their sizes and features are launch arguments; channels are not.

    A subclass has ``kernel(arguments)`` and ``arguments(operands, weight, grid)``: TMA atoms with their views,
    and sizes in tiles, of the weight ``[N, K]`` and the patches of an image along its height and width.
    """

    plan: ImagesPlan

    @cute.jit
    def __call__(self, o: Operands, stream: Any) -> None:
        """Builds TMA descriptors and launches ``clusters`` clusters on ``stream``."""
        plan, patch, k = self.plan, self.plan.problem.patch, self.plan.weight_columns_of_k
        weight = cute.make_tensor(o.weight, cute.make_layout((o.n, k), stride=(k, 1)))
        arguments = self.arguments(o, weight, (o.height // patch, o.width // patch))
        launch_clusters(self.kernel(arguments), plan, o.clusters, stream)


# --- the host entry that all patch embeds over rows have in common: their operands as views, and the launch ----------

@dataclass(frozen=True)
class RowsOperands:
    """Operands of a launch over rows, and sizes.

    ``x`` and ``out`` are ``[images, K or N, positions]``; where tiles are not made of positions, rows count as images
    of one. ``weight`` is ``[N, K]``, ``table`` in a layout of the kernel's own, ``table_index`` positions of rows.
    """

    x: cute.Tensor
    weight: cute.Tensor
    out: cute.Tensor
    table: cute.Pointer | None
    table_index: cute.Tensor | None
    table_rows: Int32
    scales: Scales
    rows: Int32
    n: Int32
    k: Int32
    images: Int32
    positions: Int32


class RowsHost(Host):
    """Rows, features and positions are launch arguments.

    A subclass has ``kernel(arguments)`` and ``arguments(operands: RowsOperands)``.
    """

    plan: PatchEmbedPlan

    def __init__(self, plan: PatchEmbedPlan) -> None:
        super().__init__(plan)
        self.element = ELEMENT_TYPES[plan.problem.in_dtype]
        self.weight_element = ELEMENT_TYPES[WEIGHT_TYPES[plan.problem.in_dtype]]
        self.accumulator = Int32 if plan.sums_integers else Float32

    @cute.jit
    def __call__(self, o: Operands, stream: Any) -> None:
        """Builds TMA descriptors and launches ``clusters`` clusters on ``stream``."""
        plan, m, n, k = self.plan, o.m, o.n, o.k
        positions = o.table_rows if cutlass.const_expr(plan.positions_in_order) else 1
        images = m // positions
        in_row = VECTOR_BYTES // ITEMSIZE[plan.problem.in_dtype]
        by_pointer = plan.problem.scale_source == "pointer"
        operands = RowsOperands(
            x=cute.make_tensor(o.x, positions_layout(images, k, positions, in_row)),
            weight=cute.make_tensor(o.weight, rows_layout(n, k, in_row)),
            out=cute.make_tensor(o.out, positions_layout(images, n, positions, 8)),
            table=o.table,
            table_index=index_view(o.index, m),
            table_rows=o.table_rows,
            scales=scales_of(by_pointer, o.scale, o.row_scale, o.feature_scale, m, n),
            rows=m,
            n=n,
            k=k,
            images=images,
            positions=positions,
        )
        launch_clusters(self.kernel(self.arguments(operands)), plan, o.clusters, stream)


# --- arguments of the kernels that compute ``out^T`` of rows ---------------------------------------------------------

@dataclass(frozen=True)
class TransposedArguments:
    """Arguments of a kernel: TMA copies, weight, table, scales and sizes in tiles.

    ``weight`` is ``[N, K]`` in memory, or its load where TMA brings it into shared memory. ``table`` is
    ``[f, 8, padded features / (8 f), rows]``: of f features of a thread, its place in a block of 8 f, the block.
    """

    x: Tma
    weight: cute.Tensor | Tma
    out: Tma
    table: cute.Tensor | None
    table_index: cute.Tensor | None
    table_rows: Int32
    scales: Scales
    rows: Int32
    row_tiles: Int32
    position_tiles: Int32
    feature_groups: Int32


def transposed_arguments(
    plan: PatchEmbedPlan, o: RowsOperands, x: Tma, weight: cute.Tensor | Tma, out: Tma
) -> TransposedArguments:
    """The arguments, from operands and TMA copies."""
    feature_groups = cute.ceil_div(cute.ceil_div(o.n, plan.features), plan.ctas)
    table = None
    if o.table is not None:
        own = plan.thread_features
        blocks = feature_groups * (plan.ctas * plan.features // (8 * own))
        row = cute.assume(blocks * (8 * own), divby=8 * own)
        shape = (own, 8, blocks, o.table_rows + int(plan.problem.table_index))
        table = cute.make_tensor(o.table, cute.make_layout(shape, stride=(1, own, 8 * own, row)))
    return TransposedArguments(
        x=x,
        weight=weight,
        out=out,
        table=table,
        table_index=o.table_index,
        table_rows=o.table_rows,
        scales=o.scales,
        rows=o.rows,
        row_tiles=cute.ceil_div(o.images, plan.tile_images),
        position_tiles=cute.ceil_div(o.positions, plan.config.tile_positions),
        feature_groups=feature_groups,
    )
