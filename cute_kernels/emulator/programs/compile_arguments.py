"""Arguments that a function was compiled with, and what they say of those that it is called with."""

import dataclasses
import sys

import cutlass
import cutlass.cute.runtime
import cutlass.cute.typing
import cutlass.torch
import torch
from cuda.bindings import driver

from cute_kernels.dsl.programs import is_pointer


def dynamic_widths(tensor: cutlass.cute.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bits of each dynamic extent, and of each dynamic stride, in the parameter of a tensor."""
    stride = 32 if getattr(tensor, "_use_32bit_stride", False) else 64
    parts = ((tensor.shape, tensor.dynamic_shapes_mask, 32), (tensor.stride, tensor.dynamic_strides_mask, stride))
    extents, strides = (
        tuple(getattr(number, "width", width) for number, dynamic in zip(numbers, mask) if dynamic)
        for numbers, mask, width in parts
    )
    return extents, strides


def is_on_device(tensor: cutlass.cute.Tensor) -> bool:
    """Whether a fake tensor stands for one in the memory of a device."""
    return tensor.memspace != cutlass.cute.AddressSpace.generic


def torch_dtype(tensor: cutlass.cute.Tensor) -> torch.dtype | None:
    """Element type of the torch tensors that TVM-FFI takes for a tensor; None where torch has none."""
    kind = tensor.element_type
    if kind is cutlass.Float4E2M1FN:
        return torch.float4_e2m1fn_x2
    if kind.width < 8 and kind.__name__ != "Boolean":
        return None
    return getattr(torch, _names().get(kind, ""), None) or cutlass.torch.dtype(kind)


def _names() -> dict[type, str]:
    """TVM-FFI's names of types. Programs register types of their own, by the name of the one whose memory they have."""
    converter = sys.modules.get("cutlass.cute._tvm_ffi_args_spec_converter")
    return getattr(converter, "NumericToTVMFFIDtype", {})


def _in_memory(kind: type) -> type:
    """The type that a number of a type is passed as: the first one of its name."""
    names = _names()
    return next((other for other, name in names.items() if name == names.get(kind)), kind)


def is_symbol(value: object) -> bool:
    """Whether an extent is symbolic, with a ``width`` in bits and the ``divisibility`` that is promised."""
    return isinstance(value, cutlass.cute.typing.SymInt)


def is_number(value: object) -> bool:
    """Whether an argument of a call is a number of Python or of CuTe DSL."""
    return isinstance(value, (bool, int, float, cutlass.Numeric))


def scalar(example: object, value: object) -> object:
    """A number as what a function was compiled with: a scalar, a symbolic integer or a pointer. Raises TypeError: a
    fraction where an integer is expected; ValueError: no multiple of what a symbolic integer promises, or more than the
    bits of an integer hold."""
    plain = value.value if isinstance(value, cutlass.Numeric) else value
    if is_symbol(example):
        if plain % example.divisibility:
            raise ValueError(f"compiled for multiples of {example.divisibility}; {plain} is given")
        return _within((cutlass.Int32 if example.width == 32 else cutlass.Int64), plain)
    if is_pointer(example):
        return cutlass.cute.runtime.make_ptr(example.dtype, plain, example.memspace, example._assumed_align)
    if type(example) in (bool, int, float):
        if isinstance(plain, float) and type(example) is not float:
            raise TypeError(f"compiled with the {type(example).__name__} {example}; {plain} is given")
        return type(example)(plain)
    if not isinstance(example, cutlass.Numeric):
        return value
    if isinstance(plain, float) and issubclass(type(example), cutlass.Integer):
        raise TypeError(f"compiled with type {type(example).__name__}; {plain} is given")
    return _within(_in_memory(type(example)), plain)


def _within(kind: type, plain: float) -> object:
    """A number as an object of CuTe DSL, which would drop the bits of an integer that do not fit."""
    if kind is cutlass.Boolean:  # has the range of a signed bit; any number but 0 is true
        return kind(bool(plain))
    if issubclass(kind, cutlass.Integer) and kind.width < 64:
        low, high = (-(1 << kind.width - 1), (1 << kind.width - 1) - 1) if kind.signed else (0, (1 << kind.width) - 1)
        if not low <= plain <= high:
            raise ValueError(f"compiled with type {kind.__name__}, of {low} to {high}; {plain} is given")
    return kind(plain)


def is_plain_dataclass(value: object) -> bool:
    """Whether an argument is passed by its fields."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not hasattr(value, "__c_pointers__")
        and not hasattr(type(value), "_struct_type")
    )


def is_stream(value: object) -> bool:
    """Whether an argument of `cute.compile` is a stream, fake or not."""
    return hasattr(value, "use_tvm_ffi_env_stream") or isinstance(value, driver.CUstream)


def is_environment_stream(value: object) -> bool:
    """Whether an argument of `cute.compile` is a fake stream that TVM-FFI takes from its environment."""
    return bool(getattr(value, "use_tvm_ffi_env_stream", False))


def stream(value: object) -> object:
    """A stream from its handle or from torch's object."""
    if isinstance(value, driver.CUstream):
        return value
    return driver.CUstream(getattr(value, "cuda_stream", value))
