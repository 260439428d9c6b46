"""The table's layout and rounding, element by element."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.operations.table import build_table
from tests.operations.reference import exact


@given(
    seed=st.integers(0, 2**32),
    positions=st.integers(1, 70),
    n=st.integers(1, 5).map(lambda chunks: 8 * chunks),
    extra=st.sampled_from([0, 8, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias_dtype=st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    pos_dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
)
def test_every_element(seed, positions, n, extra, dtype, bias_dtype, pos_dtype):
    if bias_dtype is None and pos_dtype is None:
        return
    generator = torch.Generator().manual_seed(seed)
    bias = None if bias_dtype is None else torch.randn(n, generator=generator).to(bias_dtype)
    pos = None if pos_dtype is None else torch.randn(n, positions, generator=generator).to(pos_dtype).T  # strided
    rows, vector = (1 if pos is None else positions), 16 // dtype.itemsize
    shape = (-(-rows // 32), (n + extra) // vector, 32, vector)
    table = build_table(bias, pos, shape, "interleaved", dtype)
    assert table.shape == shape
    assert table.dtype == dtype
    assert table.is_contiguous()
    values = exact.fractions(table)
    zero = Fraction(0)
    for p in range(table.shape[0] * 32):
        for c in range(n + extra):
            expected = zero
            if p < rows and c < n:
                expected = (zero if bias is None else Fraction(bias[c].item())) + (
                    zero if pos is None else Fraction(pos[p, c].item())
                )
                expected = exact.fp32(expected) if dtype == torch.float32 else exact.bf16(exact.fp32(expected))
            assert values[p // 32][c // vector][p % 32][c % vector] == expected


@pytest.mark.parametrize("nan_row", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [5, 32, 40])
def test_every_element_of_the_row_major_layout(dtype, nan_row, rows):
    """After the last row there may be one of NaN."""
    n, columns = 24, 64
    generator = torch.Generator().manual_seed(2)
    bias, pos = torch.randn(n, generator=generator), torch.randn(rows, n, generator=generator)
    shape = (rows + nan_row, columns)
    table = build_table(bias, pos, shape, "row_major", dtype, nan_row=nan_row)
    assert tuple(table.shape) == shape and table.is_contiguous()
    for p in range(rows):
        for c in range(columns):
            assert table[p, c].item() == ((bias[c] + pos[p, c]).to(dtype).item() if c < n else 0.0)
    assert not nan_row or table[rows].isnan().all()


@pytest.mark.parametrize("nan_row", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_of_the_paired_layout(dtype, nan_row):
    """Columns c and c + 8 of every 16 stand side by side; after the last row there may be one of NaN."""
    rows, n, columns = 5, 24, 48
    generator = torch.Generator().manual_seed(1)
    bias, pos = torch.randn(n, generator=generator), torch.randn(rows, n, generator=generator)
    shape = (rows + nan_row, columns // 16, 8, 2)
    table = build_table(bias, pos, shape, "paired", dtype, nan_row=nan_row)
    assert table.shape == shape and table.is_contiguous()
    for p in range(rows):
        for c in range(columns):
            expected = (bias[c] + pos[p, c]).to(dtype).item() if c < n else 0.0
            assert table[p, c // 16, c % 8, c % 16 // 8].item() == expected
    assert not nan_row or table[rows].isnan().all()


@pytest.mark.parametrize("positions", [31, 32, 33])
def test_the_row_of_nan_follows_the_last_position_of_an_interleaved_table(positions):
    pos = torch.randn(positions, 8)
    shape = (-(-(positions + 1) // 32), 2, 32, 4)
    table = build_table(None, pos, shape, "interleaved", nan_row=True)
    rows = table.transpose(1, 2).reshape(-1, 8)
    assert torch.equal(rows[:positions], pos) and rows[positions].isnan().all()
    assert not rows[positions + 1 :].any()


def test_lanes_of_a_warp_read_consecutive_bytes():
    pos = torch.arange(64.0)[:, None].expand(64, 8).contiguous()
    table = build_table(None, pos, (2, 2, 32, 4), "interleaved")
    flat = table.flatten()  # 32 lanes x 4 columns of the first block come first
    assert flat[:128].view(32, 4).tolist() == pos[:32, :4].tolist()
