"""torch._scaled_mm with scales of blocks on "cuda", against sums of products of single elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.emulator.programs import capture

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def place(row: int, column: int, scales_of_row: int) -> int:
    """Of a scale (cuBLAS, "1D Block Scaling Factors Layout")."""
    tile = row // 128 * -(-scales_of_row // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def operand(rows: int, k: int, fp4: bool, scale_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """(elements, scales, their products) of random numbers."""
    random = np.random.default_rng(rows)
    length = 32 if scale_type == torch.float8_e8m0fnu else 16
    count = k // length
    scales = torch.zeros(-(-rows // 128) * -(-count // 4) * 512).to(scale_type)
    powers = random.integers(-2, 3, (rows, count))
    for row, column in np.ndindex(rows, count):
        scales[place(row, column, count)] = 2.0 ** powers[row, column]
    if fp4:
        codes = random.integers(0, 16, (rows, k)).astype(np.uint8)
        signed = [(1 - 2 * (code >> 3)) * E2M1[code & 7] for code in codes.flatten().tolist()]
        values = np.array(signed).reshape(rows, k)
        elements = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)
    else:
        values = random.integers(-8, 9, (rows, k)).astype(float)
        elements = torch.from_numpy(values).to(torch.float8_e4m3fn)
    return elements, scales, values * 2.0 ** np.repeat(powers, length, 1)


@pytest.mark.parametrize(
    ("fp4", "scale_type"),
    [(True, torch.float8_e4m3fn), (True, torch.float8_e8m0fnu), (False, torch.float8_e8m0fnu)],
    ids=["nvfp4", "mxfp4", "mxfp8"],
)
def test_products(fp4: bool, scale_type: torch.dtype):
    a, scale_a, first = operand(160, 192, fp4, scale_type)
    b, scale_b, second = operand(48, 192, fp4, scale_type)
    with capture("sm_100a"):
        operands = (a.cuda(), b.cuda().transpose(0, 1), scale_a.cuda(), scale_b.cuda())
        result = torch._scaled_mm(*operands, out_dtype=torch.float32)
        assert result.is_cuda
    assert np.array_equal(result.cpu().numpy(), (first @ second.T).astype(np.float32))


def test_one_scale_is_left_to_torch():
    a, b = torch.ones(32, 32).to(torch.float8_e4m3fn), torch.ones(16, 32).to(torch.float8_e4m3fn)
    with capture("sm_100a"):
        scale = torch.tensor(0.5, device="cuda")
        result = torch._scaled_mm(a.cuda(), b.cuda().T, scale, scale, out_dtype=torch.float32)
    assert result.tolist() == [[8.0] * 16] * 32
