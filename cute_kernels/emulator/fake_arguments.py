"""Torch tensors as arguments of functions that were compiled for CuTe DSL's fake tensors.

With TVM-FFI such a call passes DLPack tensors; without it CuTe DSL marshals a torch tensor as if all of its layout were
dynamic, which is another memory layout than that of the compiled parameter when part of it is static. Here the
parameter is packed as the fake tensor says: a pointer, the dynamic extents, the dynamic strides.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels import dsl


@functools.cache
def _descriptor_type(extents: tuple[int, ...], strides: tuple[int, ...]) -> type[ctypes.Structure]:
    """The structure of a parameter, from the widths in bits of its dynamic extents and strides."""
    integers = {32: ctypes.c_int32, 64: ctypes.c_int64}

    def structure(fields: list) -> type[ctypes.Structure]:
        return type("Fields", (ctypes.Structure,), {"_fields_": fields})

    shape = structure([(f"extent{i}", integers[width]) for i, width in enumerate(extents)])
    stride = structure([(f"stride{i}", integers[width]) for i, width in enumerate(strides)])
    layout = structure([(name, kind) for name, kind in (("shape", shape), ("stride", stride)) if kind._fields_])
    return structure([("data", ctypes.c_void_p), *([("layout", layout)] if layout._fields_ else [])])


class TensorArgument:
    """The memory of one tensor parameter.

    Args:
        tensor: what is passed.
        fake: what was compiled for.

    Raises:
        ValueError: a rank, or a static extent or stride, that differs.
    """

    def __init__(self, tensor: torch.Tensor, fake: Any) -> None:
        extents, strides = tuple(tensor.shape), tuple(tensor.stride())
        dynamic_extents, dynamic_strides = fake.dynamic_shapes_mask, fake.dynamic_strides_mask
        if len(extents) != len(dynamic_extents):
            raise ValueError(f"a tensor of shape {extents} where {fake} is expected")
        for given, wanted, dynamic in (
            *zip(extents, fake.shape, dynamic_extents, strict=True),
            *((s, w, d or e == 1) for s, w, d, e in zip(strides, fake.stride, dynamic_strides, extents, strict=True)),
        ):
            if not dynamic and given != wanted:
                raise ValueError(f"a tensor of shape {extents}, strides {strides} where {fake} is expected")
        values = [extent for extent, dynamic in zip(extents, dynamic_extents) if dynamic]
        steps = [stride for stride, dynamic in zip(strides, dynamic_strides) if dynamic]
        widths = (
            tuple(symbol.width for symbol, dynamic in zip(symbols, mask) if dynamic)
            for symbols, mask in ((fake.shape, dynamic_extents), (fake.stride, dynamic_strides))
        )
        self._tensor = tensor
        self._memory = _descriptor_type(*widths)()
        self._memory.data = tensor.data_ptr()
        for name, numbers in (("shape", values), ("stride", steps)):
            for i, number in enumerate(numbers):
                part = getattr(self._memory.layout, name)
                setattr(part, part._fields_[i][0], number)

    def __c_pointers__(self) -> list[int]:
        return [ctypes.addressof(self._memory)]


@contextlib.contextmanager
def accepting_tensors() -> Iterator[None]:
    """Functions that are compiled inside for fake tensors can be called with torch tensors."""
    with dsl.adapting_calls(_fake_tensors, _pack_tensors):
        yield


def _fake_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those among compile-time arguments, by parameter name."""
    return {name: value for name, value in _named(args, kwargs).items() if dsl.is_fake_tensor(value)}


def _pack_tensors(
    fakes: dict[str, Any], names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple(_argument(x, fakes.get(name)) for x, name in zip(args, names)) + args[len(names) :]
    return args, {name: _argument(x, fakes.get(name)) for name, x in kwargs.items()}


def _argument(value: Any, fake: Any) -> Any:
    return TensorArgument(value, fake) if fake is not None and isinstance(value, torch.Tensor) else value


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Compile-time arguments by parameter name; empty where the signature cannot be bound."""
    function, *rest = args
    if not inspect.isroutine(function) and hasattr(function, "__call__"):  # noqa: B004 - its signature is wanted
        function = function.__call__
    try:
        signature = inspect.signature(function)
        known = {name: value for name, value in kwargs.items() if name in signature.parameters}
        return dict(signature.bind_partial(*rest, **known).arguments)
    except (TypeError, ValueError):
        return {}
