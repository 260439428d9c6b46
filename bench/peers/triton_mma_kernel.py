"""The Triton kernel of `bench.peers.triton_mma`; imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


# One parameter per address, size and compile-time constant: Triton's kernels take no structures.
@triton.jit
def product(
    a,
    b,
    out,
    m,
    n,
    k,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``out = a @ b.T``; K is a multiple of its block."""
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    group, within = tile // (GROUP * tiles_n), tile % (GROUP * tiles_n)
    tall = min(tiles_m - group * GROUP, GROUP)
    rows = (group * GROUP + within % tall) * ROWS + tl.arange(0, ROWS)
    columns = within // tall * COLUMNS + tl.arange(0, COLUMNS)
    inside = tl.arange(0, BLOCK_K)
    from_a = a + (rows % m)[:, None].to(tl.int64) * k + inside[None, :]
    from_b = b + (columns % n)[None, :].to(tl.int64) * k + inside[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, k, BLOCK_K):
        sums = tl.dot(tl.load(from_a), tl.load(from_b), sums, input_precision="tf32")
        from_a += BLOCK_K
        from_b += BLOCK_K
    place = out + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])
