"""Read-modify-write operations on memory: what atom, red, red.async and cp.reduce.async.bulk compute.

Additions round to nearest even. As the PTX ISA says of atom.add.f32 and red.add.f32, subnormal inputs and results are
flushed to zero in global memory and kept in shared memory; f16 and bf16 (.noftz) and f64 keep them everywhere.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from cute_kernels.emulator.core.pure_operations import apply

#: Element type -> NumPy type. Types of one lane of a packed operand are looked up by `element_of`.
DTYPES = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (16, 32, 64)},
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
FLOATS = ("f16", "bf16", "f32", "f64")
#: Operations and types of bulk reductions, by their numbers in the core.
OPERATIONS, TYPES = ("", "add", "min", "max", "inc", "dec", "and", "or", "xor"), tuple(DTYPES)
_TINY = np.finfo(np.float32).tiny


def element_of(type_: str) -> str:
    """``f16x2`` and ``bf16x2`` are pairs of elements that are updated one by one."""
    return type_.removesuffix("x2")


def _flush(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < _TINY, np.copysign(np.float32(0), values), values)


def _add(old: np.ndarray, new: np.ndarray, flush: bool) -> np.ndarray:
    with np.errstate(all="ignore"):
        if flush and old.dtype == np.float32:
            return _flush(_flush(old) + _flush(new))
        return old + new


_FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray, bool], np.ndarray]] = {
    "add": _add,
    "min": lambda old, new, flush: np.minimum(old, new),
    "max": lambda old, new, flush: np.maximum(old, new),
    "and": lambda old, new, flush: old & new,
    "or": lambda old, new, flush: old | new,
    "xor": lambda old, new, flush: old ^ new,
    "exch": lambda old, new, flush: new,
    "inc": lambda old, new, flush: np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, new, flush: np.where((old == 0) | (old > new), new, old - old.dtype.type(1)),
}
_INTEGER = {"add", "min", "max"}
_BITWISE = {"and", "or", "xor"}


def operations(type_: str) -> set[str]:
    """Operations that exist for a type besides exch and cas."""
    element = element_of(type_)
    if element in FLOATS:
        return {"add"} if element in ("f32", "f64") else _INTEGER
    kind, bits = element[0], element[1:]
    if bits == "16":
        return set()
    names = _BITWISE if kind == "b" else _INTEGER
    return names | ({"inc", "dec"} if element == "u32" else set())


def combine(name: str, type_: str, old: np.ndarray, new: np.ndarray, *, flush: bool = False) -> np.ndarray:
    """``old <op> new`` element by element. ``name``: operation; cas is not one of them. ``type_``: element type of
    both, a key of `DTYPES` or packed. ``old``, ``new``: uint8 arrays of equal shape. ``flush``: subnormal FP32 sums and
    summands become zero. Returns uint8, like ``old``."""
    element = element_of(type_)
    halves = element in ("f16", "bf16") and name != "exch"
    dtype = np.dtype(np.uint16) if halves else DTYPES[element]
    a, b = (np.ascontiguousarray(x).view(np.uint8).view(dtype).reshape(-1) for x in (old, new))
    with np.errstate(over="ignore"):
        result = apply(f"{name}_{element}", a, b) if halves else _FUNCTIONS[name](a, b, flush)
    return np.ascontiguousarray(result.astype(dtype, copy=False)).view(np.uint8).reshape(old.shape)
