"""Torch tensors as arguments of functions that were compiled for CuTe DSL's fake tensors.

With TVM-FFI such a call passes DLPack tensors; without it CuTe DSL marshals a torch tensor as if all of its layout were
dynamic, which is another memory layout than that of the compiled parameter when part of it is static. Here the
parameter is packed as the fake tensor says: a pointer, the dynamic extents, the dynamic strides. What TVM-FFI checks of
a tensor is checked.
"""

import ctypes
import functools

import torch

from cute_kernels.emulator.errors import UnsupportedOperation
from cute_kernels.emulator.programs import compile_arguments


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


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(extents, strides) in elements; FP4 lies in pairs along the dimension that is contiguous."""
    extents, strides = list(tensor.shape), list(tensor.stride())
    if tensor.dtype == torch.float4_e2m1fn_x2:
        paired = max((i for i, stride in enumerate(strides) if stride == 1), default=len(strides) - 1)
        extents[paired] *= 2
        strides = [1 if i == paired else 2 * stride for i, stride in enumerate(strides)]
    return tuple(extents), tuple(strides)


def _integers_of_a_width(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether two element types differ at most in their sign, which is not in the type of a compiled parameter."""
    integers = not any(each.is_floating_point or each.is_complex or each == torch.bool for each in (one, other))
    return integers and one.itemsize == other.itemsize


class TensorArgument:
    """The memory of one tensor parameter.

    Args:
        tensor: what is passed.
        fake: what was compiled for.
        name: of the parameter, or of a part of it.
        symbols: (value, where it comes from) of the symbolic integers of this call so far, by identity; extended.

    Raises:
        ValueError: an element type, a rank, or a static extent or stride, that differs; an extent or stride that is no
            multiple of what was promised, or differs from another one of the same symbol; an address that is not
            aligned as promised.
        UnsupportedOperation: elements of less than eight bits, except FP4, of which torch's hold two each.
    """

    def __init__(self, tensor: torch.Tensor, fake: object, name: str, symbols: dict[int, tuple[int, str]]) -> None:
        extents, strides = _layout(tensor)
        dynamic_extents, dynamic_strides = fake.dynamic_shapes_mask, fake.dynamic_strides_mask
        self._check_elements(tensor, fake, name)
        if len(extents) != len(dynamic_extents):
            raise ValueError(f"Mismatched Tensor {name}: has {len(extents)} dimensions: must be {fake}")
        for i, each in enumerate(zip(extents, fake.shape, dynamic_extents)):
            self._check_number(f"{name}.shape[{i}]", *each, symbols, f"for {fake}")
        for i, each in enumerate(zip(strides, fake.stride, dynamic_strides)):
            self._check_number(f"{name}.strides[{i}]", *each, symbols, f"for {fake}", free=extents[i] == 1)
        values = [extent for extent, dynamic in zip(extents, dynamic_extents) if dynamic]
        steps = [stride for stride, dynamic in zip(strides, dynamic_strides) if dynamic]
        self._tensor = tensor
        self._memory = _descriptor_type(*compile_arguments.dynamic_widths(fake))()
        self._memory.data = tensor.data_ptr()
        for part_name, numbers in (("shape", values), ("stride", steps)):
            for i, number in enumerate(numbers):
                part = getattr(self._memory.layout, part_name)
                field, integer = part._fields_[i]
                if integer(number).value != number:
                    raise ValueError(f"Out of bound {name} = {number} in its {part_name}: must fit for {fake}")
                setattr(part, field, number)

    @staticmethod
    def _check_number(
        where: str, number: int, wanted: object, dynamic: bool, symbols: dict[int, tuple[int, str]], compiled: str,
        free: bool = False,
    ) -> None:
        """An extent or a stride; a free one only says what its symbol is. Errors begin as those of TVM-FFI do:
        programs look for that."""
        if not dynamic:
            if number != wanted and not free:
                raise ValueError(f"Mismatched {where} = {number}: must be {wanted} {compiled}")
        elif compile_arguments.is_symbol(wanted):
            value, first = symbols.setdefault(id(wanted), (number, where))
            if free:
                return
            if value != number:
                raise ValueError(f"Mismatched {where} = {number}: must be {value} as {first} {compiled}")
            if number % wanted.divisibility:
                raise ValueError(f"Invalid {where} = {number}: must be a multiple of {wanted.divisibility} {compiled}")

    @staticmethod
    def _check_elements(tensor: torch.Tensor, fake: object, name: str) -> None:
        dtype = compile_arguments.torch_dtype(fake)
        if dtype is None:
            raise UnsupportedOperation(f"argument {name}: a tensor of {fake.element_type}")
        if tensor.dtype != dtype and not _integers_of_a_width(tensor.dtype, dtype):
            raise ValueError(f"Mismatched Tensor {name}: has elements of {tensor.dtype}: must be {fake}, of {dtype}")
        alignment = fake._assumed_align or 1  # of the address, in bytes
        if tensor.data_ptr() % alignment:
            address = f"{tensor.data_ptr():#x}"
            raise ValueError(f"Misaligned Tensor data {name} = {address}: must be a multiple of {alignment} for {fake}")

    def __c_pointers__(self) -> list[int]:
        return [ctypes.addressof(self._memory)]
