"""The reference's sums of tensor cores against integers, result by result."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.operations import reference
from tests.emulator.aligned_sums import Rules, dot
from tests.emulator.sum_inputs import numbers

WIDE, NARROW = Rules(25, 0, 32, -133), Rules(13, 10, 32, -133)
STYLES = ("normal", "near", "far", "subnormal", "special")


def tensor(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(dtype)


def chain(a: np.ndarray, b: np.ndarray, name: str, rules: Rules) -> np.ndarray:
    """FP32 bit patterns of ``a @ b.T``."""
    result = np.zeros((len(a), len(b)), np.uint32)
    step = 32 // (4 if name == "tf32" else a.itemsize)
    for i, j in np.ndindex(result.shape):
        total = 0
        for start in range(0, a.shape[1], step):
            x, y = (row[start : start + step].tolist() for row in (a[i], b[j]))
            total = dot(x, y, total, (name, name), "f32", rules)
        result[i, j] = total
    return result


def same(got: torch.Tensor, want: np.ndarray) -> None:
    """Equal bits; of NaN, any."""
    bits = got.contiguous().view(torch.int32).numpy().view(np.uint32)
    nan = (want & 0x7FFFFFFF) > 0x7F800000
    assert np.array_equal(np.isnan(got.numpy()), nan)
    np.testing.assert_array_equal(bits[~nan], want[~nan])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("e4m3", torch.float8_e4m3fn), ("f16", torch.float16), ("bf16", torch.bfloat16), ("tf32", torch.float32)],
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_chains(arch: str, name: str, dtype: torch.dtype, style: str) -> None:
    rng = np.random.default_rng(sum(map(ord, arch + name + style)))
    a, b = (numbers(rng, name, (rows, 104), style) for rows in (9, 8))
    if name == "tf32":  # the operation rounds its operands to TF32, and loses nothing of these
        a, b = a & 0xFFFFE000, b & 0xFFFFE000
    rules = NARROW if name == "e4m3" and arch == "sm_90a" else WIDE
    x, y = tensor(a, dtype), tensor(b, dtype)
    same(reference.accumulate(x, y, arch) if dtype is not torch.float32 else reference.gemm(x, y, arithmetic=arch),
         chain(a, b, name, rules))  # fmt: skip


def test_exact_sums_are_others() -> None:
    """Of FP8, Hopper keeps 13 bits; of BF16 both chips keep as many."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(32, 256, generator=generator) for _ in range(2))
    for dtype, equal in ((torch.float8_e4m3fn, False), (torch.bfloat16, True)):
        exact, hopper, blackwell = (
            reference.accumulate(x.to(dtype), y.to(dtype), arithmetic) for arithmetic in ("exact", "sm_90a", "sm_100a")
        )
        assert (exact != hopper).float().mean() > 0.5
        assert torch.equal(hopper, blackwell) == equal


@pytest.mark.parametrize("call", [reference.accumulate, reference.gemm])
def test_unknown_arithmetic_is_refused(call) -> None:
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="arithmetic = 'sm_80': must be one of 'exact', 'sm_90a', 'sm_100a'"):
        call(x, x, arithmetic="sm_80")
