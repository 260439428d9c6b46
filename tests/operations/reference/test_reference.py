"""The references against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.operations import reference
from tests.operations.reference import exact

FP32 = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


def random_fp8(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """All finite E4M3 values are equally likely, so that exponents differ widely within a sum."""
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, codes ^ 1, codes).view(torch.float8_e4m3fn)


@given(st.lists(st.tuples(FP32, FP32, FP32), min_size=1, max_size=20))
def test_fma32_rounds_once(triples):
    a, b, c = (torch.tensor(column, dtype=torch.float32) for column in zip(*triples, strict=True))
    expected = [
        exact.fp32(x * y + z)
        for x, y, z in zip(exact.fractions(a), exact.fractions(b), exact.fractions(c), strict=True)
    ]
    finite = [abs(e) < Fraction(2) ** 127 for e in expected]
    result = reference.fma32(a, b, c)
    assert [f for f, ok in zip(exact.fractions(result.nan_to_num(0, 0, 0)), finite, strict=True) if ok] == [
        e for e, ok in zip(expected, finite, strict=True) if ok
    ]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tail", [2.0**-60, -(2.0**-60)])
def test_fma32_where_float64_rounds_twice(sign, tail):
    """a * b lies midway between two FP32 numbers and c decides; float64 cannot hold the sum and would break the tie."""
    a, b = torch.tensor([1 + 2.0**-12]), torch.tensor([sign * (1 + 2.0**-12)])  # 1 + 2^-11 + 2^-24
    c = torch.tensor([sign * tail])
    naive = (a.double() * b.double() + c.double()).float()
    fused = reference.fma32(a, b, c)
    assert exact.fractions(fused) == [exact.fp32(exact.fractions(a)[0] * exact.fractions(b)[0] + exact.fractions(c)[0])]
    assert (naive != fused).item() == (tail > 0)


def test_fma32_keeps_subnormals_infinities_and_nan():
    tiny = torch.tensor([2.0**-140])
    assert reference.fma32(tiny, torch.tensor([0.5]), torch.tensor([2.0**-149])).item() == 2.0**-141 + 2.0**-149
    assert reference.fma32(tiny, tiny, torch.tensor([math.inf])).item() == math.inf
    assert reference.fma32(torch.tensor([2.0**100]), torch.tensor([2.0**100]), tiny).item() == math.inf
    assert math.isnan(reference.fma32(torch.tensor([math.nan]), tiny, tiny).item())


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(1, 100))
def test_accumulate_rounds_after_each_mma(seed, rows, n, k):
    generator = torch.Generator().manual_seed(seed)
    x, weight = random_fp8(generator, rows, k), random_fp8(generator, n, k)
    acc = reference.accumulate(x, weight)
    for row, values in zip(exact.fractions(x), exact.fractions(acc), strict=True):
        for column, value in zip(exact.fractions(weight), values, strict=True):
            total = Fraction(0)
            for start in range(0, k, 32):
                total = exact.fp32(
                    total + sum(a * b for a, b in zip(row[start : start + 32], column[start : start + 32], strict=True))
                )
            assert value == total


def test_accumulate_differs_from_one_rounding_at_the_end():
    """The granularity is observable: a large block absorbs a small one that a later block would have rescued."""
    x, weight = torch.full((1, 96), 448.0), torch.zeros(1, 96)
    x[0, 32] = 1.0
    weight[0, :32], weight[0, 32], weight[0, 64:] = 448.0, 2.0**-9, -448.0
    x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    assert reference.accumulate(x, weight).item() == 0.0
    assert (x.double() @ weight.double().T).item() == 2.0**-9


def test_accumulate_of_rows_whose_sums_float64_does_not_hold():
    """Beyond 2^17 elements: a sum of FP32's 24 bits and the smallest product, which decides a tie."""
    x = torch.full((1, (1 << 19) + 32), 448.0)
    x[0, -32:] = 0.0
    x[0, -2:] = torch.tensor([64.0, 2.0**-9])
    large = (1 << 19) * 448**2  # even, and its neighbour in FP32 is 2^13 away
    x = x.to(torch.float8_e4m3fn)
    assert reference.accumulate(x, x).item() == large + 2**13


def test_accumulate_propagates_nan():
    x = torch.ones(2, 40).to(torch.float8_e4m3fn)
    x[1, 3] = math.nan
    assert reference.accumulate(x, x).isnan().tolist() == [[False, True], [True, True]]


@given(
    seed=st.integers(0, 2**32),
    positions=st.integers(1, 3),
    images=st.integers(1, 2),
    k=st.sampled_from([1, 16, 33, 80]),
    with_bias=st.booleans(),
    with_pos=st.booleans(),
    addend=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    epilogue=st.sampled_from(["f32", "bf16x2"]),
)
def test_contracts(seed, positions, images, k, with_bias, with_pos, addend, epilogue):
    generator = torch.Generator().manual_seed(seed)
    rows, n = positions * images, 4
    x, weight = random_fp8(generator, rows, k), random_fp8(generator, n, k)
    bias = torch.randn(n, generator=generator).to(addend) if with_bias else None
    pos = torch.randn(positions, n, generator=generator).to(addend) if with_pos else None
    scale = torch.rand((), generator=generator).item() * 1e-4 + 1e-6
    scale = torch.tensor(scale, dtype=torch.float32).item()
    contract = {"f32": reference.patch_embed_f32, "bf16x2": reference.patch_embed_bf16x2}[epilogue]
    out = contract(x, weight, bias, pos, scale)
    assert out.dtype == torch.bfloat16
    assert exact.fractions(out) == exact.patch_embed(x, weight, bias, pos, scale, epilogue)


@pytest.mark.parametrize("epilogue", ["f32", "bf16x2"])
@pytest.mark.parametrize(("by_row", "by_feature"), [(True, False), (False, True), (True, True)])
def test_scales_of_rows_and_features_are_multiplied_first(by_row, by_feature, epilogue):
    generator = torch.Generator().manual_seed(7)
    x, weight = random_fp8(generator, 6, 40), random_fp8(generator, 8, 40)
    pos = torch.randn(3, 8, generator=generator)
    rows = torch.rand(6, 1, generator=generator) if by_row else torch.full((6, 1), 0.7)
    features = torch.rand(1, 8, generator=generator) if by_feature else torch.full((1, 8), 0.3)
    contract = {"f32": reference.patch_embed_f32, "bf16x2": reference.patch_embed_bf16x2}[epilogue]
    scale = features if by_feature else features[0, 0]
    out = contract(x, weight, None, pos, scale, row_scale=rows)
    expected = exact.patch_embed(x, weight, None, pos, (rows.view(-1).tolist(), features.view(-1).tolist()), epilogue)
    assert exact.fractions(out) == expected


def test_row_chunks_do_not_change_the_result(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    x, weight = random_fp8(generator, 35, 64), random_fp8(generator, 8, 64)
    pos = torch.randn(5, 8, generator=generator)
    by_row = torch.rand(35, 1, generator=generator)
    whole = reference.patch_embed_f32(x, weight, None, pos, 1e-3, None, by_row)
    monkeypatch.setattr(reference.rows, "_CHUNK_ELEMENTS", 3 * 8)
    assert torch.equal(reference.patch_embed_f32(x, weight, None, pos, 1e-3, None, by_row), whole)


@pytest.mark.parametrize("size", [8, 11])  # 11: what is left of the last patch is cropped
def test_conv2d_is_a_product_of_patches(size):
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(2, 3, size, size, generator=generator)
    weight = torch.randn(6, 3, 4, 4, generator=generator)
    bias, pos = torch.randn(6, generator=generator), torch.randn(4, 6, generator=generator)
    out = reference.patch_embed_conv2d(pixels, weight, bias, pos)
    for b in range(2):
        for s in range(4):
            top, left = s // 2 * 4, s % 2 * 4
            patch = pixels[b, :, top : top + 4, left : left + 4].double()
            expected = (weight.double() * patch).sum((1, 2, 3)) + bias.double() + pos[s].double()
            torch.testing.assert_close(out[b, s].double(), expected, rtol=1e-5, atol=1e-5)
