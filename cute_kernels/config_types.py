"""Types of the fields of problems and configurations: what dataclasses do not check themselves."""

from __future__ import annotations

import operator
from dataclasses import Field, fields
from typing import Any


def check_types(instance: Any) -> None:
    """Makes integers of any library ``int``, and refuses fields of another type than they are annotated with.

    Equal configurations must be the same key of a cache, in memory and, by their ``repr``, on disk: ``np.int64(4)``,
    ``4.0`` and ``True`` would be equal to integers and yet be keys of their own.

    Raises:
        TypeError: naming the field.
        ValueError: an integer other than 0 and 1 in place of a bool.
    """
    for part in fields(instance):  # which torch.compile traces; not through a cache of our own
        value = getattr(instance, part.name)
        kind, is_open = field_type(part)
        if type(value) is kind or (value is None and is_open):
            continue
        if kind is int:
            checked = _integer(part.name, value)
        elif kind is bool:
            checked = _boolean(part.name, value)
        elif isinstance(value, str):
            checked = str(value)
        else:
            raise TypeError(f"{part.name} = {value!r} is {type(value).__name__}, expected a string")
        object.__setattr__(instance, part.name, checked)


def field_type(part: Field) -> tuple[type, bool]:
    """The type of a field of a problem or configuration, ``int``, ``bool`` or ``str``, and whether it may be None."""
    name = part.type.removesuffix(_OPEN)
    return _TYPES.get(name, str), name != part.type


_OPEN = " | None"
_TYPES: dict[str, type] = {"int": int, "bool": bool}
"""By annotation; any other is of strings."""


def type_name(value: Any) -> str:
    """A type in messages, with its module: NumPy has a ``bool`` that is none of Python's."""
    return f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} = {value!r} is {type(value).__name__}, expected an integer")
    return operator.index(value)


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} = {value!r} is {type_name(value)}, expected True or False")
    # An operator schema passes a bool among integers as 0 or 1.
    if operator.index(value) not in (0, 1):
        raise ValueError(f"{name} = {value!r}, allowed: True, False")
    return operator.index(value) == 1
