"""Rows in memory as TMA and the stores see them: plain, or as images at positions."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def rows_layout(rows: Int32, columns: Int32, divisor: int) -> cute.Layout:
    """Row-major ``[rows, columns]`` whose rows are a multiple of ``divisor`` elements, 16 bytes for TMA."""
    columns = cute.assume(columns, divby=divisor)
    return cute.make_layout((rows, columns), stride=(columns, 1))


def positions_layout(images: Int32, columns: Int32, positions: Int32, divisor: int) -> cute.Layout:
    """Row-major ``[images, positions, columns]`` seen as ``[images, columns, positions]``; likewise."""
    columns = cute.assume(columns, divby=divisor)
    image_stride = cute.assume(columns * positions, divby=divisor)
    return cute.make_layout((images, columns, positions), stride=(image_stride, 1, columns))
