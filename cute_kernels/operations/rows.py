"""What the kernel over rows reads besides its arguments: padded and aligned rows, the bias + position table."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_kernels.operations.base import ROW_BYTES
from cute_kernels.operations.table import build_table
from cute_kernels.plan import PatchEmbedPlan
from cute_kernels.runtime.constants import DERIVED, Sources

Addends = tuple["torch.Tensor | None", "torch.Tensor | None"]


def rows_table(plan: PatchEmbedPlan, sources: Sources, addends: Callable[[], Addends]) -> torch.Tensor | None:
    """The bias + position table as the plan lays it out, kept while the constants live unchanged.

    Args:
        plan: of the kernel over rows.
        sources: tensors that it is made from, for `cute_kernels.runtime.constants`.
        addends: gives bias ``[N]`` and positions ``[S, N]``, either of which may be None.
    """
    problem = plan.problem
    if not problem.table_rows:
        return None
    dtype = getattr(torch, plan.table_dtype)

    def build() -> torch.Tensor:
        return build_table(
            *addends(),
            positions=problem.table_rows,
            columns=plan.padded_n,
            dtype=dtype,
            layout=plan.table_layout,
            nan_row=problem.table_index,
        )

    table = DERIVED.get(("table", plan.table_layout, plan.table_shape, dtype, problem.table_index), sources, build)
    if tuple(table.shape) != tuple(plan.table_shape):
        raise AssertionError(f"table {list(table.shape)} does not match the plan's {list(plan.table_shape)}")
    return table


def tma_readable(rows: torch.Tensor) -> bool:
    """Whether rows are whole 16 bytes and begin on such."""
    return rows.shape[-1] * rows.itemsize % ROW_BYTES == 0 and rows.data_ptr() % ROW_BYTES == 0


def tma_rows(rows: torch.Tensor, width: int) -> torch.Tensor:
    """``rows`` itself if TMA can read it, otherwise an aligned copy with every row zero-padded to ``width``."""
    if tma_readable(rows):
        return rows
    padded = torch.zeros(rows.shape[0], width, dtype=rows.dtype, device=rows.device)
    padded[:, : rows.shape[1]] = rows
    return padded
