"""Arguments of `cute.compile`, and of calls of what it has compiled."""

from __future__ import annotations

import dataclasses
from typing import Any


def is_fake_tensor(value: Any) -> bool:
    """Whether an argument of `cute.compile` stands for a tensor by its type, extents and strides alone."""
    import cutlass.cute.runtime

    return isinstance(value, cutlass.cute.runtime._FakeTensor)


def is_tensor(value: Any) -> bool:
    """Whether an argument of `cute.compile` is a tensor, fake or of memory."""
    import cutlass.cute.runtime

    return isinstance(value, (cutlass.cute.runtime._FakeTensor, cutlass.cute.runtime._Tensor))


def is_pointer(value: Any) -> bool:
    """Whether an argument of `cute.compile` is a pointer."""
    import cutlass.cute.runtime

    return isinstance(value, cutlass.cute.runtime._Pointer)


def is_constexpr(field: dataclasses.Field) -> bool:
    """Whether a field of a data class is a constant of the compiled function."""
    import cutlass.base_dsl.utils.tree_utils

    return cutlass.base_dsl.utils.tree_utils.is_constexpr_field(field)


def adapted(value: Any) -> Any:
    """An argument as the object that CuTe DSL makes of it, if it has an adapter for its type."""
    import cutlass.base_dsl.runtime.jit_arg_adapters

    if hasattr(value, "__c_pointers__"):
        return value
    adapter = cutlass.base_dsl.runtime.jit_arg_adapters.JitArgAdapterRegistry.get_registered_adapter(value)
    return value if adapter is None else adapter(value)


def c_pointers(value: Any) -> list[Any]:
    """Addresses of what an `adapted` argument is passed by."""
    import cutlass.base_dsl.typing

    return cutlass.base_dsl.typing.get_c_pointers(value)
