"""Element types by the names that torch gives them, for whoever does without torch."""

from __future__ import annotations

from typing import Any

ITEMSIZE = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element."""


def name_of(dtype: Any) -> str:
    """Name of a torch dtype without its module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
