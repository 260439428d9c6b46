"""Configurations by text: ``tile_rows=192,pingpong=false`` on a command line, for the architecture at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TypeVar

from cute_kernels.config import Config
from cute_kernels.plan import ARCHS, PLANNERS

Kind = TypeVar("Kind", bound=Config)

CONFIG_TYPES: dict[str, dict[str, type[Config]]] = {
    operation: {arch: target.config for arch, target in planner.targets.items()}
    for operation, planner in PLANNERS.items()
}
"""Class of the tunables, by operation and architecture."""

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def parse_config(text: str, kind: type[Kind]) -> Kind:
    """``"tile_n=192,pingpong=true"``: the defaults of ``kind`` but for these fields.

    Raises:
        ValueError: an unknown field, or a value of another type than the field's.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    values: dict[str, object] = {}
    for item in text.split(","):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator or name not in defaults:
            raise ValueError(f"{item!r} in {text!r}, allowed: name=value with {', '.join(defaults)}")
        if isinstance(defaults[name], bool):
            if value not in _BOOLEANS:
                raise ValueError(f"{item!r}: true or false")
            values[name] = _BOOLEANS[value]
        else:
            values[name] = int(value) if isinstance(defaults[name], int) else value
    return kind(**values)


def parse_first(text: str, kinds: Iterable[type[Config]]) -> Config:
    """As `parse_config`, of the first of the classes that has all of the fields.

    Raises:
        ValueError: none has; what is wrong with the text for each of them.
    """
    reasons = []
    for kind in kinds:
        try:
            return parse_config(text, kind)
        except ValueError as error:
            reasons.append(f"{kind.__name__}: {error}")
    raise ValueError("; ".join(reasons))


def check_parsable(text: str, kinds: Iterable[type[Config]]) -> None:
    """Refuses a text that is a configuration on no architecture, before a device is asked for.

    Raises:
        ValueError: says what is wrong with it for each of the classes.
    """
    parse_first(text, kinds)


def arch_of(capability: tuple[int, int]) -> str:
    """The key of `cute_kernels.plan.ARCHS` that devices of a compute capability run.

    Raises:
        ValueError: there is no kernel for them.
    """
    for name, arch in ARCHS.items():
        if arch.compute_capability == tuple(capability):
            return name
    allowed = ", ".join("{}.{}".format(*arch.compute_capability) for arch in ARCHS.values())
    raise ValueError("compute capability {}.{}, allowed: {}".format(*capability, allowed))
