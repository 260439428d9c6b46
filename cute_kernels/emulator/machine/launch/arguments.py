"""Arguments of a launch: types, shapes, and Python values to the parameter block that a kernel declares."""

import contextlib
import math
import operator
import struct
import sys
from collections.abc import Mapping, Sequence, Set

import numpy as np

from cute_kernels.emulator.isa.ptx.program import Kernel
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.units.copies.tensor_map import NBYTES, Im2colMap, TensorMap, encode

_FLOATS = {2: "<e", 4: "<f", 8: "<d"}
_POINTER_BYTES = 8


def require_type(name: str, value: object, kinds: type | tuple[type, ...], needed: str) -> None:
    """Raises TypeError, naming the argument, what is given and what is needed, unless it has one of these types."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        kind = type(value)  # with its module, since NumPy's bool is called bool too
        given = f"{kind.__module__}.{kind.__name__}".removeprefix("builtins.")
        raise TypeError(f"{name} is a {given}: must be {needed}")


def extents(name: str, shape: int | Sequence[int]) -> tuple[int, int, int]:
    """(x, y, z) of a launch shape: a positive integer or one to three of them. Raises TypeError: something else than
    integers; ValueError: another number of them, or one that is not positive."""
    needed = "must be a positive integer or one to three of them (x, y, z)"
    try:
        if isinstance(shape, (bool, str, bytes, Mapping, Set)):
            raise TypeError
        given = (shape,) if hasattr(shape, "__index__") else tuple(shape)
        if any(isinstance(n, bool) for n in given):
            raise TypeError
        numbers = tuple(operator.index(n) for n in given)
    except TypeError:
        raise TypeError(f"{name} = {shape!r}: {needed}") from None
    if not 1 <= len(numbers) <= 3 or min(numbers) < 1:
        raise ValueError(f"{name} = {shape!r}: {needed}")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def parameter_block(kernel: Kernel, params: bytes | Sequence[bytes]) -> bytes:
    """The parameter block: parameters at their declared offsets. Raises TypeError: neither bytes nor a sequence of
    them; ValueError: number or sizes do not fit the declarations."""
    raw = (bytes, bytearray, memoryview)
    listed = isinstance(params, Sequence) and not isinstance(params, str) and all(isinstance(p, raw) for p in params)
    if not isinstance(params, raw) and not listed:
        raise TypeError(f"params = {params!r}: must be the parameter block as bytes, or bytes for each parameter")
    if isinstance(params, raw):
        if len(params) < kernel.parameter_bytes:
            raise ValueError(f"the parameter block has {len(params)} bytes, the kernel takes {kernel.parameter_bytes}")
        return bytes(params)
    if len(params) != len(kernel.parameters):
        raise ValueError(f"{len(params)} parameters, the kernel takes {len(kernel.parameters)}")
    result = bytearray(kernel.parameter_bytes)
    for i, (declared, given) in enumerate(zip(kernel.parameters, params)):
        if len(given) != declared.nbytes:
            raise ValueError(f"parameter {i} has {len(given)} bytes, the kernel declares {declared.nbytes}")
        result[declared.offset : declared.offset + declared.nbytes] = given
    return bytes(result)


def pack_arguments(kernel: Kernel, args: Sequence[object], memory: GlobalMemory) -> list[bytes]:
    """One byte string per parameter, of the size that the kernel declares.

    Args:
        kernel: the declarations.
        args: for each parameter an int or bool (its value; the number itself for a parameter of type ``.f16``, ``.f32``
            or ``.f64``), a float (2, 4 or 8 bytes of type ``.f`` or ``.b``), a CPU torch tensor or NumPy array (its
            address; the memory becomes accessible, read-only for a read-only array), a NumPy scalar, a `TensorMap` or
            `Im2colMap`, or bytes, the last three as they are. Of a tensor map whose address is not registered, the
            tensor or array becomes accessible that a variable of a calling function holds.
        memory: where tensors and arrays are registered.

    Raises:
        ValueError: another number of arguments, or one that does not fit its parameter.
        TypeError: no list or tuple, a kind of argument that is not listed, or a float for a parameter of type ``.u`` or
            ``.s``.
    """
    require_type("args", args, (list, tuple), "a list or tuple with a value for each parameter")
    if len(args) != len(kernel.parameters):
        names = ", ".join(parameter.name for parameter in kernel.parameters)
        raise ValueError(f"{len(args)} arguments for the {len(kernel.parameters)} parameters of {kernel.name}: {names}")
    result = []
    for argument, parameter in zip(args, kernel.parameters, strict=True):
        name = f"argument {parameter.name}"
        # What the bits of a Python number are follows from the declaration: 2 for .f32 is 2.0, not a denormal.
        if isinstance(argument, int) and parameter.element in ("f16", "f32", "f64"):
            argument = _as_float(argument, name)
        if type(argument) is float and parameter.element[0] in "us":  # np.float64 is a float too, taken as it is
            raise TypeError(f"{name} is the float {argument}: must be an int, the kernel declares .{parameter.element}")
        raw = _bytes_of(argument, parameter.nbytes, name, memory)
        if len(raw) != parameter.nbytes:
            raise ValueError(f"argument {parameter.name} has {len(raw)} bytes, the kernel declares {parameter.nbytes}")
        result.append(raw)
    for argument, parameter in zip(args, kernel.parameters):
        if isinstance(argument, (TensorMap, Im2colMap)) and memory.region_index(argument.address, 1) is None:
            _register_tensor_of(argument.address, f"the tensor behind argument {parameter.name}", memory)
    return result


def _register_tensor_of(address: int, name: str, memory: GlobalMemory) -> None:
    """Registers the largest tensor or array with this address among the variables of calling functions.

    The map does not say how far memory goes: maps of ragged tensors reach around the address space.
    """
    found, frame = [], sys._getframe(1)
    while frame is not None:
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            if isinstance(value, np.ndarray) or hasattr(type(value), "data_ptr"):
                place = GlobalMemory()
                with contextlib.suppress(ValueError, TypeError, RuntimeError):  # on a device, sparse, without storage
                    place.register_tensor(value)
                if place.region_index(address, 1) is not None:
                    found.append(value)
        frame = frame.f_back
    if found:
        value = max(found, key=lambda each: each.nbytes)
        memory.register_tensor(value, name, value.flags.writeable if isinstance(value, np.ndarray) else True)


def _as_float(argument: int, name: str) -> float:
    try:
        return float(argument)
    except OverflowError:
        raise ValueError(f"{name}: an int of {argument.bit_length()} bits is too large for a float") from None


def _bytes_of(argument: object, nbytes: int, name: str, memory: GlobalMemory) -> bytes:
    if isinstance(argument, (bytes, bytearray, memoryview)):
        return bytes(argument)
    if isinstance(argument, (TensorMap, Im2colMap)):
        return encode(argument)
    if isinstance(argument, np.generic):
        return argument.tobytes()
    if isinstance(argument, int):  # bool too
        low, high = -(1 << 8 * nbytes - 1), (1 << 8 * nbytes) - 1
        if not low <= argument <= high:
            raise ValueError(f"{name} = {argument}: must be {low} to {high}, which fit into {nbytes} bytes")
        return (argument % (1 << 8 * nbytes)).to_bytes(nbytes, "little")
    if isinstance(argument, float):
        if nbytes not in _FLOATS:
            raise ValueError(f"{name} is a float of {nbytes} bytes: must be of 2, 4 or 8")
        try:
            return struct.pack(_FLOATS[nbytes], argument)
        except OverflowError:
            if nbytes == 4:
                return struct.pack("<f", math.copysign(math.inf, argument))
            raise ValueError(f"{name}: {argument} is too large for {nbytes} bytes") from None
    if isinstance(argument, np.ndarray) or hasattr(argument, "data_ptr"):
        if isinstance(argument, np.ndarray) and argument.dtype.hasobject:
            raise TypeError(f"{name} is an array of {argument.dtype}: a kernel would overwrite references to objects")
        if str(getattr(argument, "layout", "torch.strided")) != "torch.strided":
            raise TypeError(f"{name} is a tensor of layout {argument.layout}: must be torch.strided")
        writable = argument.flags.writeable if isinstance(argument, np.ndarray) else True
        memory.register_tensor(argument, name, writable)
        address = argument.ctypes.data if isinstance(argument, np.ndarray) else argument.data_ptr()
        return address.to_bytes(_POINTER_BYTES, "little")
    raise TypeError(
        f"{name} is a {type(argument).__name__}: must be an int, a float, a torch tensor or NumPy array on the CPU, a "
        f"NumPy scalar, a tensor map (TensorMap, Im2colMap or {NBYTES} bytes) or bytes"
    )
