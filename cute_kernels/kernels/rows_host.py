"""The host entry that all patch embeds over rows have in common: their operands as views, and the launch."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.kernels.host import PatchEmbedHost, launch_clusters
from cute_kernels.kernels.row_views import positions_layout, rows_layout
from cute_kernels.kernels.scales import Scales, scales_of
from cute_kernels.kernels.table_rows import index_view
from cute_kernels.plan.base import ITEMSIZE, VECTOR_BYTES
from cute_kernels.plan.patch_embed.base import PatchEmbedPlan


@dataclass(frozen=True)
class RowsOperands:
    """What a launch is given.

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
        stream,
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
            table=table_pointer, table_index=index_view(index_pointer, m), table_rows=table_rows,
            scales=scales_of(by_pointer, scale_argument, row_scale_pointer, feature_scale_pointer, m, n),
            rows=m, n=n, k=k, images=images, positions=positions,
        )  # fmt: skip
        launch_clusters(self.kernel(self.arguments(operands), profile), plan, clusters, stream)
