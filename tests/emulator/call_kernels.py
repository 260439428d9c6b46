"""Kernels for test_call_arguments.py: host functions with many kinds of parameters."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.base_dsl.typing import get_c_pointers, get_mlir_types


def _dynamic(fields: tuple) -> list:
    return [field for field in fields if not (field is None or isinstance(field, (bool, int, float)))]


def with_constants(kind: type) -> type:
    """A named tuple whose None and Python numbers stay constants of the kernel, as libraries make theirs."""

    def new_from_mlir_values(self: tuple, values: list) -> tuple:
        fields, rest = [], list(values)
        for field in self:
            count = len(get_mlir_types(field)) if _dynamic((field,)) else 0
            fields.append(cutlass.new_from_mlir_values(field, rest[:count]) if count else field)
            rest = rest[count:]
        return type(self)(*fields)

    kind.__c_pointers__ = lambda self: [p for field in _dynamic(self) for p in get_c_pointers(field)]
    kind.__get_mlir_types__ = lambda self: [t for field in _dynamic(self) for t in get_mlir_types(field)]
    kind.__extract_mlir_values__ = lambda self: [v for f in _dynamic(self) for v in cutlass.extract_mlir_values(f)]
    kind.__new_from_mlir_values__ = new_from_mlir_values
    return kind


@with_constants
class Inner(NamedTuple):
    """Numbers, one of them wider, and a constant."""

    factor: Float32
    offset: Int64
    power: cutlass.Constexpr[int] = 2


@with_constants
class Outer(NamedTuple):
    """A tuple in a tuple, tensors, and one that may be absent."""

    count: Int32
    inner: Inner
    x: cute.Tensor
    extra: cute.Tensor | None


@dataclasses.dataclass
class Settings:
    """A data class of numbers."""

    first: Int32
    second: Float32


@cute.kernel
def combine(y: cute.Tensor, outer: Outer, last: Int32):
    """y[i] = factor * x[i]**power + offset + last for i < count."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < outer.count:
        value = outer.x[thread]
        for _ in cutlass.range_constexpr(outer.inner.power - 1):
            value = value * outer.x[thread]
        y[thread] = outer.inner.factor * value + Float32(outer.inner.offset) + Float32(last)


@cute.jit
def stream_first(stream: cuda.CUstream, y: cute.Tensor, outer: Outer, last: Int32):
    combine(y, outer, last).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def stream_between(y: cute.Tensor, stream: cuda.CUstream, outer: Outer, last: Int32 = 5):
    combine(y, outer, last).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def stream_last(y: cute.Tensor, outer: Outer, last: Int32, stream: cuda.CUstream):
    combine(y, outer, last).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def stream_by_keyword(y: cute.Tensor, outer: Outer, last: Int32, *, stream: cuda.CUstream):
    combine(y, outer, last).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


class Operator:
    """A host function that is a method, with a constant among its parameters."""

    @cute.jit
    def __call__(
        self, y: cute.Tensor, twice: cutlass.Constexpr[bool], outer: Outer, stream: cuda.CUstream, last: Int32
    ):
        combine(y, outer, last + last if cutlass.const_expr(twice) else last).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=stream
        )


@cute.kernel
def add(y: cute.Tensor, first: Int32, second: Float32):
    """y[i] = first + second."""
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = Float32(first) + second


@cute.jit
def with_settings(y: cute.Tensor, settings: Settings, stream: cuda.CUstream):
    add(y, settings.first, settings.second).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.jit
def with_tuple(y: cute.Tensor, numbers: tuple[Int32, Float32], stream: cuda.CUstream):
    add(y, numbers[0], numbers[1]).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@cute.kernel
def describe(y: cute.Tensor, packed: cute.Tensor):
    """y = the extents of a tensor of FP4 and the strides, then its first two bytes."""
    numbers = (*packed.shape, *packed.stride)
    for i in cutlass.range_constexpr(4):
        y[i] = Int32(numbers[i])
    halves = cute.recast_tensor(packed, cutlass.Uint8)
    for i in cutlass.range_constexpr(2):
        y[4 + i] = Int32(halves[0, i])


@cute.jit
def with_fp4(y: cute.Tensor, packed: cute.Tensor, stream: cuda.CUstream):
    describe(y, packed).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


@cute.kernel
def store(y: cute.Tensor, number: cutlass.Numeric):
    y[0] = number


@cute.jit
def with_number(y: cute.Tensor, number: cutlass.Numeric, stream: cuda.CUstream):
    store(y, number).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


@cute.jit
def with_matrix(y: cute.Tensor, x: cute.Tensor, stream: cuda.CUstream):
    """y[0] = x[1, 0]."""
    store(y, x[1, 0]).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)
