"""Configurations as text: a setting of a command line, an argument of an operator or of a JSON document.

One place knows how fields are written down, whatever their class: ``FIELD=VALUE``, where ``auto`` is a field that the
plan chooses. `Planner.codec` is that of the classes of an operation.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from cute_kernels.config import Typed

OPEN = "auto"
"""How a field that is None is spelled."""

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class ConfigCodec:
    """Configurations of some classes, all of whose fields are integers, bools or words. ``kinds``: the classes by their
    names."""

    def __init__(self, kinds: Iterable[type[Typed]]) -> None:
        self.kinds = {kind.__name__: kind for kind in kinds}
        self._decoded: dict[str, Any] = {}

    def encode(self, config: Any) -> str:
        """``CLASS:FIELD=VALUE,..`` Raises TypeError: a configuration of another class."""
        for name, kind in self.kinds.items():
            if type(config) is kind:
                settings = [f"{field}={spell(getattr(config, field))}" for field in kind.types]
                return f"{name}:{','.join(settings)}"
        allowed = ", ".join(f"cute_kernels.{name}" for name in self.kinds)
        raise TypeError(f"config is {type(config).__name__}: must be {allowed} or None")

    def decode(self, text: str) -> Any:
        """The inverse of `encode`: equal texts give the same object, by whose identity a repeated call is found. Raises
        ValueError: an unknown class, an unknown field or a value of another type."""
        if text not in self._decoded:
            name, _, settings = text.partition(":")
            kind = self._kind(name)
            self._decoded[text] = parse_settings(kind, settings.split(",") if settings else (), name) or kind()
        return self._decoded[text]

    def _kind(self, name: str) -> type:
        if name not in self.kinds:
            raise ValueError(f"config of class {name!r}: must be one of {', '.join(map(repr, self.kinds))}")
        return self.kinds[name]


def parse_settings(kind: type[Typed], settings: Iterable[str], where: str) -> Any:
    """A configuration of ``kind`` from settings ``FIELD=VALUE``; None, for the plan's choice, where there is none.

    Other fields keep their defaults; names may have ``-`` in place of ``_``. ``where``: what the fields are of, for
    messages. Raises ValueError: a setting that is no FIELD=VALUE, an unknown field, a value of another type, or a field
    set twice.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        name = name.strip().replace("-", "_")
        if not separator or name not in kind.types:
            near = difflib.get_close_matches(name, kind.types, n=1)
            meant = f"did you mean {near[0]}? " if separator and near else ""
            names = ", ".join(kind.types)
            raise ValueError(f"setting {setting}: {meant}must be FIELD=VALUE; fields for {where}: {names}")
        if name in values:
            raise ValueError(f"setting {setting}: {name} is set twice")
        values[name] = _parse(setting, text.strip(), *kind.types[name])
    return kind(**values) if values else None


def _parse(setting: str, text: str, kind: type, is_open: bool) -> Any:
    if is_open and text == OPEN:
        return None
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(f"setting {setting}: must be true or false")
        return _BOOLEANS[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"setting {setting}: must be an integer{f' or {OPEN}' * is_open}") from None


def spell(value: object) -> str:
    """A value of a field as `parse_settings` reads it."""
    if value is None:
        return OPEN
    (value,) = {value}  # to torch.compile an int is a symbol, which has no text, and an element of a set is a constant
    return str(value).lower() if isinstance(value, bool) else str(value)
