"""tcgen05.mma of dense kinds on small integers (PTX ISA, "tcgen05.mma", "Data path layout organization"), in NumPy.

What an MMA asks for is checked when it is issued; what it reads and writes, when it takes effect.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LANES, COLUMNS, QUARTER = 128, 512, 32


class Wrong(Exception):
    """The kind of what a program must not do."""


@dataclass(frozen=True)
class Multiply:
    """D (+)= A * B by one CTA (``group`` 1) or a pair, with ``m`` rows of A and ``n`` of B in all CTAs together.

    ``d``: lane and column of D; ``a_column``: of A in tensor memory, or None; ``buffers``: of A and B in shared memory.
    """

    group: int
    m: int
    n: int
    d: tuple[int, int]
    accumulate: bool
    negate: bool
    a_column: int | None
    buffers: tuple[int, int]
    rank: int
    disabled: bool


class TensorCores:
    """Tensor memory of some CTAs, int64 and bool [CTAs, lanes, columns], and what shared memory holds.

    ``operands``: of A and of B, the rows of each CTA [CTAs, rows, K] in a buffer; None where it has nothing.
    """

    def __init__(self, ctas: int, operands: tuple[list[np.ndarray | None], list[np.ndarray | None]]) -> None:
        self.operands = operands
        self.cells = np.zeros((ctas, LANES, COLUMNS), np.int64)
        self.written = np.zeros((ctas, LANES, COLUMNS), bool)
        self.allocated = np.zeros(COLUMNS, bool)
        self.a_rows: dict[int, np.ndarray] = {}  # A in tensor memory [CTAs, lanes, K], by its column

    def issue(self, mma: Multiply) -> None:
        """Raises `Wrong`: lanes of D are left out, the issuer or its peer, the form of A in tensor memory."""
        if mma.disabled:
            raise Wrong("disable-output-lane mask")
        if mma.group == 2 and mma.rank % 2:
            raise Wrong("odd one of its pair")
        if mma.rank + mma.group > len(self.cells):
            raise Wrong("the cluster has no CTA")
        if mma.a_column is not None and mma.m // mma.group != LANES:
            raise Wrong("A in tensor memory other than")

    def take_effect(self, mma: Multiply) -> None:
        """Raises `Wrong`: an operand was not written, or D is no place, is not allocated or was not written."""
        ctas = range(mma.rank, mma.rank + mma.group)
        rows, columns = mma.m // mma.group, mma.n // mma.group
        a, b = (operands[number] for operands, number in zip(self.operands, mma.buffers))
        if b is None or (a is None and mma.a_column is None):
            raise Wrong("uninitialised shared memory")
        if mma.a_column is not None:
            a = self.a_rows.get(mma.a_column)
            self._check(ctas, slice(0, LANES), slice(mma.a_column, mma.a_column + 8), read=True)
        cta, lane, column = self.places(mma)
        if (lane < 0).any():
            raise Wrong("accumulator at lane")
        touched = slice(int(column.min()), int(column.max()) + 1)
        self._check(ctas, np.unique(lane), touched, read=mma.accumulate)
        left = np.concatenate([a[rank, :rows] for rank in ctas])
        right = np.concatenate([b[rank, :columns] for rank in ctas])
        product = (-left if mma.negate else left) @ right.T
        place = cta, lane, column
        self.cells[place] = product + (self.cells[place] if mma.accumulate else 0)
        self.written[place] = True

    def _check(self, ctas: range, lanes: np.ndarray | slice, columns: slice, read: bool) -> None:
        if columns.stop > COLUMNS:
            raise Wrong("leaves the 128 x 512 cells")
        if not self.allocated[columns].all():
            raise Wrong("not allocated")
        if read and not all(self.written[rank][lanes, columns].all() for rank in ctas):
            raise Wrong("uninitialised TMEM")

    @staticmethod
    def places(mma: Multiply) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """CTA, lane and column of every element of D, int64 [m, n]; lane -1 where it cannot begin."""
        first, base = mma.d
        i, j = np.arange(mma.m)[:, None], np.arange(mma.n)[None] + np.zeros((mma.m, 1), np.int64)
        cta, row = np.divmod(i + 0 * j, mma.m // mma.group)
        if (mma.group, mma.m) == (1, 64):  # 16 lanes of each quarter
            lane, column, starts = first + row % 16 + row // 16 * QUARTER, j, (0, 16)
        elif (mma.group, mma.m) == (2, 128):  # the upper half of the columns is in the upper half of the lanes
            lane, column, starts = row + 64 * (j // (mma.n // 2)), j % (mma.n // 2), (0,)
        else:
            lane, column, starts = row, j, (0,)
        return mma.rank + cta, lane if first in starts else np.full_like(lane, -1), base + column
