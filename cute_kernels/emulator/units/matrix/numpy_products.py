"""Products of mma.sync that the core does not have: of f64, of single bits, and of integers of four bits.

Sums of integers are exact, and wrap at 32 bits or saturate once. f64 is a chain of fused multiply-adds in order of K,
which begins with C; each rounds as the instruction says.
"""

from __future__ import annotations

import numpy as np

from cute_kernels.emulator.core.pure_operations import apply

_BITS = {"xor": np.bitwise_xor, "and": np.bitwise_and}


def doubles(a: np.ndarray, b: np.ndarray, c: np.ndarray, rounding: str) -> np.ndarray:
    """Bit patterns of f64, uint64 [count, m, K], [count, n, K] and [count, m, n] -> D like C."""
    d = c.reshape(-1)
    for k in range(a.shape[-1]):
        factors = (np.broadcast_to(x, c.shape).reshape(-1) for x in (a[:, :, None, k], b[:, None, :, k]))
        d = apply("fma_f64" if rounding == "rn" else f"fma_{rounding}_f64", *factors, d)
    return d.reshape(c.shape)


def common_bits(a: np.ndarray, b: np.ndarray, c: np.ndarray, operation: str) -> np.ndarray:
    """How many bits of rows are 1 after ``operation``: uint8 [count, m, bytes], [count, n, bytes]; C and D uint32."""
    bits = np.unpackbits(_BITS[operation](a[:, :, None], b[:, None]), axis=-1)
    return c + bits.sum(-1, dtype=np.uint32)


def nibbles(rows: np.ndarray, signed: bool) -> np.ndarray:
    """Elements of four bits, the lower one of a byte first: uint8 [..., bytes] -> int64 [..., 2 bytes]."""
    elements = np.stack((rows & 15, rows >> 4), -1).reshape(*rows.shape[:-1], -1).astype(np.int64)
    return (elements ^ 8) - 8 if signed else elements


def integers(a: np.ndarray, b: np.ndarray, c: np.ndarray, saturate: bool) -> np.ndarray:
    """int64 [count, m, 1, K] and [count, 1 or m, n, K], uint32 [count, m, n] -> D like C."""
    total = (a * b).sum(-1) + c.view(np.int32)
    return (np.clip(total, -(2**31), 2**31 - 1) if saturate else total).astype(np.uint32)
