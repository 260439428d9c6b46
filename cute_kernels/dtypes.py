"""Element types by the names that torch gives them, for whoever does without torch."""

from __future__ import annotations

from typing import Any

ITEMSIZE = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element."""

WEIGHT_TYPES = {
    "float8_e4m3fn": "float8_e4m3fn", "uint8": "int8", "int8": "int8", "bfloat16": "bfloat16", "float16": "float16",
}  # fmt: skip
"""Element type of the second operand of a product, a weight, by that of the first."""

LARGEST_PRODUCT = {"uint8": 255 * 128, "int8": 128 * 128}
"""Magnitude of one product of integers; sums of K of them have 32 bits."""


def longest_row(in_dtype: str) -> int | None:
    """The largest K whose sums of products fit 32-bit integers, in whole 16 bytes; None of floating-point numbers."""
    if in_dtype not in LARGEST_PRODUCT:
        return None
    return (2**31 - 1) // LARGEST_PRODUCT[in_dtype] // 16 * 16



def name_of(dtype: Any) -> str:
    """Name of a torch dtype without its module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
