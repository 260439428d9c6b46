"""The table of an operation's arguments: a dataclass whose fields say what each argument is; and what executes a call.

From the fields follow, in one place, the operator's schema, how arguments travel through torch's dispatcher and back,
the checks that need nothing but a tensor's metadata, and what a repeated call looks at
(`cute_kernels.operations.base`). An argument is added by adding a field:

    @dataclass(frozen=True, eq=False)
    class GemmArguments:
        a: torch.Tensor = tensor(*IN_DTYPES, shapes=("[M, K]", "[B, M, K]"), dense=True)
        bias: torch.Tensor | None = tensor(*OUT_DTYPES, optional=True)
        allow_tf32: bool = plain("bool allow_tf32=False", bool, default=False)
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from cute_kernels.config import check_choice, type_name
from cute_kernels.operations.runtime import devices
from cute_kernels.operations.runtime.repeat import Role
from cute_kernels.operations.scales import split_scale
from cute_kernels.plan import arch_of
from cute_kernels.plan.config_codec import ConfigCodec

Backend = Literal["auto", "emulator", "reference"]

_SUPPORTED = (
    "supported: CUDA devices of compute capability 8.0 to 9.0, 10.0 (B200, GB200) and 12.x, CPU tensors (plain torch, "
    'or the PTX emulator with backend="emulator"), and any torch device with backend="reference"'
)


def check_backend(backend: str) -> None:
    """Raises ValueError for an unknown one."""
    check_choice("backend", backend, get_args(Backend))


ON_DEVICE = ("kernel", "program")
"""Answers of `choose_backend` where tensors are on a CUDA device, of which arch and SMs are asked."""


def choose_backend(device: torch.device, backend: str) -> Literal["kernel", "program", "emulator", "reference"]:
    """Chooses what executes a call whose tensors are on ``device``; ``"program"``: the session of the program that runs
    in the emulator, of which the device is. Raises ValueError: unknown backend, or the emulator asked to read device
    memory; NotImplementedError: no kernel for this device."""
    check_backend(backend)
    if backend == "reference":
        return "reference"
    if backend == "emulator":
        if device.type != "cpu":
            raise ValueError(f'backend = "emulator" with tensors on {device}: the emulator reads CPU tensors')
        return "emulator"
    if device.type == "cpu":
        return "reference"
    if device.type != "cuda" or torch.version.hip is not None:
        raise NotImplementedError(f"no kernel for device {device}; {_SUPPORTED}")
    if arch_of(torch.cuda.get_device_capability(device)) is None:
        major, minor = torch.cuda.get_device_capability(device)
        raise NotImplementedError(
            f"no kernel for {torch.cuda.get_device_name(device)} (compute capability {major}.{minor}); {_SUPPORTED}"
        )
    return "program" if devices.is_emulated() else "kernel"


_REQUIRED = object()
"""Default of a parameter that has none."""


@dataclass(frozen=True)
class Row:
    """One argument, in `role` of a repeated call (`cute_kernels.operations.runtime.repeat.Repeatable`); tensors come
    first in a schema, in the order of the table, then everything else. ``operand``: name of the operand that it is
    or gives; its own where empty. ``optional``: None is allowed."""

    role: Role = "static"
    operand: str = ""
    optional: bool = False

    def tensors(self, name: str) -> tuple[str, ...]:
        """Declarations of tensors in the schema."""
        return ()

    def others(self, name: str) -> tuple[tuple[str, Any], ...]:
        """Declarations of everything else, each with its default."""
        return ()

    def encode(self, name: str, value: Any) -> tuple[tuple, tuple]:
        """Values of `tensors` and of `others`. Raises TypeError or ValueError for what cannot be an argument at all."""
        raise NotImplementedError

    def decoder(self) -> Callable[..., Any] | None:
        """Makes the value from the operator's parameters of this row, the inverse of `encode`; None: it is one."""
        return None


@dataclass(frozen=True)
class TensorRow(Row):
    """A tensor."""

    role: Role = "varies"
    dtypes: tuple[torch.dtype, ...] = ()  # allowed element types
    # allowed shapes in words, ``"[N, K]"``, of which the number of extents is checked; none if empty
    shapes: tuple[str, ...] = ()
    dense: bool = False  # contiguous, and every extent at least 1
    may_be_empty: bool = False  # every extent but the last may be 0 all the same

    def tensors(self, name: str) -> tuple[str, ...]:
        return (f"Tensor{'?' if self.optional else ''} {name}",)

    def encode(self, name: str, value: Any) -> tuple[tuple, tuple]:
        if not isinstance(value, torch.Tensor) and not (value is None and self.optional):
            raise TypeError(f"{name} is {type(value).__name__}: must be torch.Tensor")
        if value is not None and value.is_nested:  # torch's dispatcher would refuse it without a name
            raise TypeError(f"{name} is a nested tensor: must be a torch.Tensor of one shape")
        return (value,), ()

    def wrong_type(self, name: str, value: torch.Tensor) -> Exception | None:
        if value.layout is not torch.strided:
            return TypeError(f"{name} has layout {value.layout}: must be {torch.strided}")
        if value.dtype not in self.dtypes:
            return TypeError(f"{name} has dtype {value.dtype}: must be one of {', '.join(map(str, self.dtypes))}")
        return None

    def wrong_shape(self, name: str, value: torch.Tensor) -> Exception | None:
        if self.shapes and value.dim() not in [shape.count(",") + 1 for shape in self.shapes]:
            return ValueError(f"{name} has shape {list(value.shape)}: must be {' or '.join(self.shapes)}")
        if self.dense and 0 in (value.shape[-1:] if self.may_be_empty else value.shape):
            which = "the last" if self.may_be_empty else "every"
            return ValueError(f"{name} has shape {list(value.shape)}: {which} extent must be at least 1")
        return None

    def wrong_strides(self, name: str, value: torch.Tensor) -> Exception | None:
        if not self.dense or value.layout is not torch.strided or value.is_contiguous():
            return None
        return ValueError(
            f"{name} has strides {list(value.stride())} for shape {list(value.shape)}: must be contiguous "
            f"(use {name}.contiguous())"
        )


@dataclass(frozen=True)
class ScaleRow(Row):
    """A factor: None (1), a number, or a tensor.

    ``operand`` is what a tensor of more than one element is.
    """

    role: Role = "scale"
    optional: bool = True

    def tensors(self, name: str) -> tuple[str, ...]:
        return (f"Tensor? {name}",)

    def others(self, name: str) -> tuple[tuple[str, Any], ...]:
        return ((f"float? {name}_value", _REQUIRED),)

    def encode(self, name: str, value: Any) -> tuple[tuple, tuple]:
        number, held = split_scale(name, value)
        return (held,), (None if value is None or held is not None else number,)

    def decoder(self) -> Callable[..., Any]:
        return lambda held, number: number if held is None else held


@dataclass(frozen=True)
class ConfigRow(Row):
    """Tunables, one of the classes that a codec knows, or None."""

    codec: ConfigCodec | None = None

    def others(self, name: str) -> tuple[tuple[str, Any], ...]:
        return (("str? config=None", None),)  # a schema has no dataclasses

    def encode(self, name: str, value: Any) -> tuple[tuple, tuple]:
        return (), (None if value is None else self.codec.encode(value),)

    def decoder(self) -> Callable[..., Any]:
        return lambda text: None if text is None else self.codec.decode(text)


@dataclass(frozen=True)
class PlainRow(Row):
    """Something that an operator's schema has a type for: its declaration with its name, what raises for a value of
    another type, and its default."""

    declaration: str = ""
    check: Callable[[str, Any], None] = lambda name, value: None
    default: Any = _REQUIRED

    def others(self, name: str) -> tuple[tuple[str, Any], ...]:
        return ((self.declaration, self.default),)

    def encode(self, name: str, value: Any) -> tuple[tuple, tuple]:
        self.check(name, value)
        return (), (value,)


def _parameter(declaration: str) -> str:
    """The name in a declaration of a schema."""
    return declaration.partition("=")[0].split()[-1]


def _field(row: Row) -> Any:
    return dataclasses.field(metadata={"row": row})


def tensor(*dtypes: torch.dtype, **facts: Any) -> Any:
    """A field that is a tensor; see `TensorRow`."""
    return _field(TensorRow(dtypes=dtypes, **facts))


def scale(operand: str) -> Any:
    """A field that is a factor; see `ScaleRow`."""
    return _field(ScaleRow(operand=operand))


def config(codec: ConfigCodec) -> Any:
    """The field of the tunables; see `ConfigRow`."""
    return _field(ConfigRow(codec=codec))


def backend() -> Any:
    """The field of the backend."""
    return _field(PlainRow(declaration="str backend", check=lambda name, value: check_backend(value)))


def plain(declaration: str, kind: type, *, optional: bool = False, default: Any = _REQUIRED) -> Any:
    """A field of another type that the schema has; its values are instances of ``kind``, or None if optional."""
    expected = f"{'torch.' * (kind.__module__ == 'torch')}{kind.__name__}{' or None' * optional}"

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind) and not (value is None and optional):
            raise TypeError(f"{name} is {type_name(value)}: must be {expected}")

    return _field(PlainRow(declaration=declaration, check=check, default=default))


class ArgumentTable:
    """Consequences of the fields of a dataclass of arguments: ``rows`` by name, in the order of the fields, and the
    names of the arguments that may be tensors, which are the operator's first."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.rows: dict[str, Row] = {field.name: field.metadata["row"] for field in dataclasses.fields(kind)}
        self._tensors = [text for name, row in self.rows.items() for text in row.tensors(name)]
        self._others = [part for name, row in self.rows.items() for part in row.others(name)]
        parameters = [_parameter(text) for text in (*self._tensors, *(text for text, _ in self._others))]
        self.tensor_names = tuple(parameters[: len(self._tensors)])
        self._defaults = (_REQUIRED,) * len(self._tensors) + tuple(default for _, default in self._others)
        self._first: list[int] = []
        self._decoders: list[tuple[int, Callable[..., Any], list[int]]] = []
        for place, (name, row) in enumerate(self.rows.items()):
            own = [*row.tensors(name), *(text for text, _ in row.others(name))]
            places = [parameters.index(_parameter(text)) for text in own]
            self._first.append(places[0])
            if (decoder := row.decoder()) is not None:
                self._decoders.append((place, decoder, places))

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of arguments that a call leaves out."""
        given = {name: getattr(row, "default", None) for name, row in self.rows.items()}
        return {name: None if value is _REQUIRED else value for name, value in given.items()} | {"backend": "auto"}

    @property
    def schema(self) -> str:
        """Parameters of the operator."""
        return ", ".join([*self._tensors, *(text for text, _ in self._others)])

    def encode(self, values: Sequence[Any]) -> list[Any]:
        """Values in the order of the fields -> arguments of the operator. Raises TypeError, ValueError: a value that
        cannot be an argument at all."""
        tensors: list[Any] = []
        others: list[Any] = []
        for (name, row), value in zip(self.rows.items(), values, strict=True):
            held, more = row.encode(name, value)
            tensors.extend(held)
            others.extend(more)
        return tensors + others

    def decode(self, flat: tuple) -> tuple:
        """The inverse of `encode`; the dispatcher leaves out last arguments that have their defaults."""
        flat += self._defaults[len(flat) :]
        values = [flat[place] for place in self._first]
        for place, decoder, places in self._decoders:
            values[place] = decoder(*[flat[i] for i in places])
        return tuple(values)

    def tensors_of(self, arguments: Any) -> list[tuple[str, Row, torch.Tensor]]:
        """Tensors that are there, in the order of the fields."""
        found = [(name, row, getattr(arguments, name)) for name, row in self.rows.items()]
        return [(name, row, value) for name, row, value in found if isinstance(value, torch.Tensor)]

    def check(self, arguments: Any, problems: Callable[[Any], Iterator[Exception]]) -> None:
        """Everything that can be told from the metadata of the tensors; also runs on fake tensors.

        ``problems``: what the operation itself finds wrong, about types and extents that depend on each other; asked
        where every tensor has the number of extents that it is to have. Raises TypeError, ValueError: all that is
        wrong, naming argument, what was given and what is allowed; of the kind of the first.
        """
        given = self.tensors_of(arguments)
        known = [(name, row, value) for name, row, value in given if isinstance(row, TensorRow)]
        shapes = [row.wrong_shape(name, value) for name, row, value in known]
        wrong = [row.wrong_type(name, value) for name, row, value in known] + shapes
        wrong += [row.wrong_strides(name, value) for name, row, value in known]
        if not any(shapes):
            wrong += problems(arguments)
        first, _, reference = given[0]
        wrong += [
            ValueError(f"{name} is on {value.device} and {first} is on {reference.device}: they must be on one device")
            for name, _, value in given[1:]
            if value.device != reference.device
        ]
        found = [problem for problem in wrong if problem is not None]
        if found:
            raise type(found[0])("; ".join(map(str, found)))
