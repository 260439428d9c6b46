"""Common parts of the host functions of all kernels: how they launch; of patch embeds, what they are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.kernels.epilogue import Scales, scales_of
from cute_kernels.kernels.graph import Graph
from cute_kernels.kernels.load import positions_layout, rows_layout
from cute_kernels.kernels.tiles import index_view
from cute_kernels.kernels.tma import Tma
from cute_kernels.plan import Plan
from cute_kernels.plan.base import ITEMSIZE, VECTOR_BYTES
from cute_kernels.plan.images import ImagesPlan
from cute_kernels.plan.patch_embed import PatchEmbedPlan


def launch_clusters(kernel: Any, plan: Plan, clusters: Int32, stream: Any) -> None:
    """Launches persistent clusters with programmatic dependent launch.

    Args:
        kernel: device function with its arguments.
        plan: gives threads, cluster and shared memory.
        clusters: how many.
        stream: where.
    """
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


class PatchEmbedHost:
    """Host entry of a patch embed for one plan.

    A subclass has the device code, ``kernel(arguments, profile)``, `arguments`, and ``__call__`` with its operands.

    Attributes:
        plan, graph: what the kernel does, its roles and barriers.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph

    def arguments(self, operands: Any) -> Any:
        """Arguments of the kernel, from its operands: TMA atoms with their views, and sizes in tiles."""
        raise NotImplementedError


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


# --- the host entry that all kernels over images have in common: their operands as tensors, and the launch -----------


@dataclass(frozen=True)
class ImagesOperands:
    """Operands of a launch: pointers, and sizes in images, pixels and features."""

    images: cute.Pointer
    weight: cute.Tensor
    scale: cute.Pointer | None
    table: cute.Pointer | None
    out: cute.Pointer
    batch: Int32
    height: Int32
    width: Int32
    n: Int32
    grid_height: Int32
    grid_width: Int32


class ImagesHost(PatchEmbedHost):
    """Images, their sizes and features are launch arguments; channels are not."""

    plan: ImagesPlan

    @cute.jit
    def __call__(
        self,
        images_pointer: cute.Pointer,
        weight_pointer: cute.Pointer,
        scale_pointer: cute.Pointer | None,
        table_pointer: cute.Pointer | None,
        out_pointer: cute.Pointer,
        batch: Int32,
        height: Int32,
        width: Int32,
        n: Int32,
        clusters: Int32,
        profile: cute.Pointer | None,
        stream: Any,
    ) -> None:
        """Builds TMA descriptors and launches ``clusters`` clusters on ``stream``."""
        plan, problem, k = self.plan, self.plan.problem, self.plan.weight_columns_of_k
        operands = ImagesOperands(
            images=images_pointer,
            weight=cute.make_tensor(weight_pointer, cute.make_layout((n, k), stride=(k, 1))),
            scale=scale_pointer,
            table=table_pointer,
            out=out_pointer,
            batch=batch,
            height=height,
            width=width,
            n=n,
            grid_height=height // problem.patch,
            grid_width=width // problem.patch,
        )
        launch_clusters(self.kernel(self.arguments(operands), profile), plan, clusters, stream)


# --- the host entry that all patch embeds over rows have in common: their operands as views, and the launch ----------


@dataclass(frozen=True)
class RowsOperands:
    """Operands of a launch over rows.

    Attributes:
        x, out: ``[images, K or N, positions]``; where tiles are not made of positions, rows count as images of one.
        weight: ``[N, K]``.
        table: bias + position table, in a layout of the kernel's own, or None.
        table_index: ``[rows]`` position of each row, or None.
        table_rows: positions that the table has.
        scales: of rows, features and the whole call.
        rows, n, k: sizes.
        images, positions: extents of ``x`` and ``out``.
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


class RowsHost(PatchEmbedHost):
    """Rows, features and positions are launch arguments."""

    plan: PatchEmbedPlan

    @cute.jit
    def __call__(
        self,
        x_pointer: cute.Pointer,
        weight_pointer: cute.Pointer,
        table_pointer: cute.Pointer | None,
        index_pointer: cute.Pointer | None,
        out_pointer: cute.Pointer,
        scale_argument: Float32 | cute.Pointer | None,
        row_scale_pointer: cute.Pointer | None,
        feature_scale_pointer: cute.Pointer | None,
        m: Int32,
        n: Int32,
        k: Int32,
        table_rows: Int32,
        clusters: Int32,
        profile: cute.Pointer | None,
        stream: Any,
    ) -> None:
        """Builds TMA descriptors and launches ``clusters`` clusters on ``stream``."""
        plan = self.plan
        positions = table_rows if cutlass.const_expr(plan.positions_in_order) else 1
        images = m // positions
        in_row = VECTOR_BYTES // ITEMSIZE[plan.problem.in_dtype]
        by_pointer = plan.problem.scale_source == "pointer"
        operands = RowsOperands(
            x=cute.make_tensor(x_pointer, positions_layout(images, k, positions, in_row)),
            weight=cute.make_tensor(weight_pointer, rows_layout(n, k, in_row)),
            out=cute.make_tensor(out_pointer, positions_layout(images, n, positions, 8)),
            table=table_pointer,
            table_index=index_view(index_pointer, m),
            table_rows=table_rows,
            scales=scales_of(by_pointer, scale_argument, row_scale_pointer, feature_scale_pointer, m, n),
            rows=m,
            n=n,
            k=k,
            images=images,
            positions=positions,
        )
        launch_clusters(self.kernel(self.arguments(operands), profile), plan, clusters, stream)


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
