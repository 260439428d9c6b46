"""Layouts of CuTe, as the text of CuTe DSL's types has them: from coordinates to places in memory.

A layout is a shape and a stride, nested alike. Coordinates of a nested mode count its first part fastest.
"""

import ast
import functools
import re

import numpy as np

_SWIZZLE = re.compile(r"S<(\d+),(\d+),(\d+)>")
_Nested = int | tuple


@functools.lru_cache(maxsize=256)
def offsets(layout: str) -> np.ndarray:
    """Elements from the beginning of a tensor to each of its coordinates: int64, with an axis for each mode.

    The operands and accumulators of an MMA, ``((rows, columns), rest, rest, ..)``, become the matrices that their tiles
    lie in: ``[rows, columns, ..]``. Raises ValueError: an extent or stride that only the running kernel knows."""
    shape, _, stride = layout.partition(":")
    try:
        extents, steps = ast.literal_eval(shape), ast.literal_eval(stride)
    except (SyntaxError, ValueError):
        raise ValueError(f"layout = {layout}: must have numbers for extents and strides") from None
    if isinstance(extents, int):
        extents, steps = (extents,), (steps,)
    if len(extents) >= 3 and isinstance(extents[0], tuple) and all(isinstance(each, int) for each in extents[1:3]):
        (rows, columns), *rest = extents
        (row_step, column_step), *rest_steps = steps
        extents = ((rows, rest[0]), (columns, rest[1]), *rest[2:])
        steps = ((row_step, rest_steps[0]), (column_step, rest_steps[1]), *rest_steps[2:])
    result = np.zeros((), np.int64)
    for extent, step in zip(extents, steps):
        result = result[..., None] + _mode(extent, step)
    return result


def _mode(extent: _Nested, step: _Nested) -> np.ndarray:
    """Offsets of one mode, int64 [size]."""
    if isinstance(extent, int):
        return np.arange(extent, dtype=np.int64) * step
    result = np.zeros(1, np.int64)
    for parts in zip(extent, step):
        result = (_mode(*parts)[:, None] + result).ravel()
    return result


def swizzled(addresses: np.ndarray, swizzle: str) -> np.ndarray:
    """Addresses in bytes after a swizzle ``S<bits, base, shift>`` of a pointer; "" is none."""
    found = _SWIZZLE.fullmatch(swizzle)
    if found is None:
        return addresses
    bits, base, shift = map(int, found.groups())
    return addresses ^ (addresses >> shift & ((1 << bits) - 1) << base)
