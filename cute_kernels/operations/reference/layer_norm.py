"""A LayerNorm of uint8 rows as factors of the rows of a product, by its rounding contract."""

import torch

from cute_kernels.common.float_environment import default_environment

# Bounds the integer temporaries of one row chunk, in elements.
_CHUNK_ELEMENTS = 1 << 22


@default_environment()
def layer_norm_scale(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """``1 / sqrt(variance + eps)`` of each row, within ``3.5 * 2**-24`` of it.

    Sum S and sum of squares Q are exact integers, and so is ``K * Q - S * S``, which is K squared times the variance.
    It is rounded to FP32 once; ``fp32(K * K * eps)`` is added, the square root is taken, and K is divided by that, each
    with one rounding to nearest even.

    Args:
        rows: ``[rows, K]`` uint8, K at most 65,792.
        eps: in units of squared elements.

    Returns:
        ``[rows, 1]`` float32.
    """
    k = rows.shape[1]
    addend = torch.tensor(k * k * eps, dtype=torch.float32, device=rows.device)
    out = torch.empty(rows.shape[0], 1, dtype=torch.float32, device=rows.device)
    step = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, rows.shape[0], step):
        values = rows[start : start + step].to(torch.int32)
        total, squares = (each.sum(1, keepdim=True, dtype=torch.int64) for each in (values, values * values))
        spread = (squares * k - total * total).to(torch.float32)
        # torch's square roots in FP32 miss the nearest number at times; float64 has bits enough to find it.
        deviation = (spread + addend).to(torch.float64).sqrt().to(torch.float32)
        out[start : start + step] = torch.full_like(deviation, k) / deviation
    return out
