"""Arguments of functions that were compiled for TVM-FFI, or for fake tensors, which only TVM-FFI calls take.

The emulator compiles such functions without TVM-FFI, whose own host code needs a CUDA runtime. What a call means is
decided here instead, as TVM-FFI does: parameters that were compiled with a stream of the environment are left out of
the call; tensors are DLPack tensors; numbers, alone and inside of (named) tuples and data classes, are Python numbers;
what was compiled as a constant or as None is passed as that, or as None. CuTe DSL's own calls would drop Python numbers
inside of tuples, and read all of a tensor's layout as dynamic.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator

import torch

from cute_kernels.dsl.programs import adapted, adapting_calls, c_pointers, is_constexpr, is_fake_tensor, is_tensor
from cute_kernels.emulator.programs import compile_arguments
from cute_kernels.emulator.programs.tensor_arguments import TensorArgument

_UNKNOWN = object()


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """How a function was compiled: its signature, and the arguments of `cute.compile` by parameter name."""

    name: str
    signature: inspect.Signature
    examples: dict[str, object]


@dataclasses.dataclass(frozen=True)
class _Call:
    """State of one call: values of symbolic integers so far, by identity."""

    symbols: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def converting_calls(note: Callable[[dict[str, int]], None]) -> Iterator[None]:
    """Functions that are compiled inside for TVM-FFI or for fake tensors can be called inside as TVM-FFI calls them.

    Such a call raises TypeError for a wrong number or kind of arguments, ValueError for a value that does not fit, or a
    tensor that is not on the device. ``note``: as of `adapting_calls`."""
    with adapting_calls(_remember, _convert, note):
        yield


def _remember(args: tuple[object, ...], kwargs: dict[str, object], tvm_ffi: bool) -> _Compiled | None:
    function, *rest = args
    name = getattr(function, "__name__", type(function).__name__)
    if not inspect.isroutine(function) and hasattr(function, "__call__"):  # noqa: B004 - its signature is wanted
        function = function.__call__
    try:
        signature = inspect.signature(function)
        known = {name: value for name, value in kwargs.items() if name in signature.parameters}
        bound = signature.bind_partial(*rest, **known)
    except (TypeError, ValueError):
        return None
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return None
    bound.apply_defaults()
    examples = dict(bound.arguments)
    if not tvm_ffi and not any(map(_is_fake, examples.values())):
        return None
    return _Compiled(name, signature, examples)


def _is_fake(example: object) -> bool:
    if isinstance(example, (tuple, list)):
        return any(map(_is_fake, example))
    return is_fake_tensor(example) or compile_arguments.is_environment_stream(example)


def _convert(
    compiled: _Compiled,
    names: list[str],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> tuple[tuple[object, ...], dict[str, object]]:
    streams = [name for name in names if compile_arguments.is_environment_stream(compiled.examples.get(name))]
    taken = [compiled.signature.parameters[name] for name in names if name not in streams]
    try:
        bound = compiled.signature.replace(parameters=taken).bind(*args, **kwargs)
    except TypeError as error:
        listed = ", ".join(parameter.name for parameter in taken)
        also = f"; {', '.join(streams)} comes from the environment" if streams else ""
        raise TypeError(f"{compiled.name} takes {len(taken)} arguments ({listed}{also}): {error}") from None
    bound.apply_defaults()
    call = _Call()
    converted = {
        name: _argument(value, compiled.examples.get(name, _UNKNOWN), name, call)
        for name, value in bound.arguments.items()
    }
    return (), {**converted, **{name: compile_arguments.stream(torch.cuda.current_stream()) for name in streams}}


class _Parts:
    """Parts of one parameter, one behind the other."""

    def __init__(self, parts: list[object]) -> None:
        self.parts = [adapted(part) for part in parts]

    def __c_pointers__(self) -> list[object]:
        return [pointer for part in self.parts for pointer in c_pointers(part)]


def _argument(value: object, example: object, name: str, call: _Call, nested: bool = False) -> object:
    """Value that is handed to CuTe DSL for an argument. ``value``: of the call. ``example``: what the function was
    compiled with. ``name``: of the parameter, or of a part of it. ``call``: extended by the symbolic integers of the
    argument. ``nested``: inside of a named tuple, where Python numbers are constants of the compiled function. CuTe DSL
    makes 32-bit arguments of those in plain tuples, lists and data classes."""
    if isinstance(example, (tuple, list)):
        if not isinstance(value, (tuple, list)) or len(value) != len(example):
            raise TypeError(f"argument {name}: compiled with {len(example)} values; {value!r} is given")
        labels = getattr(example, "_fields", None) or range(len(example))
        names = [f"{name}.{label}" if isinstance(label, str) else f"{name}[{label}]" for label in labels]
        constants = nested or type(example) not in (tuple, list)
        return _Parts([_argument(v, e, n, call, constants) for v, e, n in zip(value, example, names)])
    if compile_arguments.is_plain_dataclass(example):
        if type(value) is not type(example):
            raise TypeError(f"argument {name}: {value!r} is given: must be a {type(example).__name__}")
        fields = [field.name for field in dataclasses.fields(example) if not is_constexpr(field)]
        parts = ((getattr(value, f), getattr(example, f), f"{name}.{f}") for f in fields)
        return _Parts([_argument(v, e, n, call, nested) for v, e, n in parts])
    if is_tensor(example) and isinstance(value, torch.Tensor):
        if is_fake_tensor(example) and compile_arguments.is_on_device(example) and not value.is_cuda:
            raise ValueError(f"Mismatched Tensor {name}: is on the CPU (expected device_type=cuda): must be {example}")
        return TensorArgument(value, example, name, call.symbols)
    if example is None or nested and isinstance(example, (bool, int, float, str, type)):
        if value is not None and not (type(value) is type(example) and value == example):
            raise ValueError(f"argument {name}: compiled as the constant {example!r}; {value!r} is given")
        return _Parts([])
    if value is None and example is not _UNKNOWN:
        raise TypeError(f"argument {name}: None is given, but it was compiled with {example!r}")
    if compile_arguments.is_stream(example):
        return compile_arguments.stream(value)
    if compile_arguments.is_number(value):
        try:
            return compile_arguments.scalar(example, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"argument {name}: {error}") from None
    return value
