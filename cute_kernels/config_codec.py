"""Configurations as something else: parameters of an operator, a JSON document, settings of a command line.

One place knows how the fields of a configuration are written down, whatever its class: `Planner.codec` is that of the
classes of an operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class ConfigCodec:
    """JSON codec of configurations of some classes, all of whose fields are integers, bools or words.

    Attributes:
        kinds: the classes by their names.
        has_words: whether any of them has a field that is a word.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self.kinds = {kind.__name__: kind for kind in kinds}
        fields = {name: dataclasses.fields(kind) for name, kind in self.kinds.items()}
        self._words = {n: tuple(f.name for f in found if isinstance(f.default, str)) for n, found in fields.items()}
        self._numbers = {
            n: tuple(f.name for f in found if not isinstance(f.default, str)) for n, found in fields.items()
        }
        self.has_words = any(self._words.values())
        self._decoded: dict[tuple, Any] = {}

    # ---- parameters of an operator, whose schema has no dataclasses --------------------------------------------------

    @property
    def parameters(self) -> tuple[tuple[str, Any], ...]:
        """Declarations in an operator's schema, each with its default: class, integers and, if there are any, words."""
        words = (("str config_words=''", ""),) if self.has_words else ()
        return (("str? config_type=None", None), ("int[] config_numbers=[]", ()), *words)

    def encode(self, config: Any) -> tuple[Any, ...]:
        """Values of `parameters`.

        Raises:
            TypeError: a configuration of another class.
        """
        if config is None:
            return (None, [], "") if self.has_words else (None, [])
        for name, kind in self.kinds.items():
            if type(config) is kind:
                numbers = [getattr(config, field) for field in self._numbers[name]]
                words = ",".join([getattr(config, field) for field in self._words[name]])
                return (name, numbers, words) if self.has_words else (name, numbers)
        allowed = ", ".join(f"cute_kernels.{name}" for name in self.kinds)
        raise TypeError(f"config is {type(config).__name__}, expected {allowed} or None")

    def decode(self, name: str | None, numbers: Sequence[int] = (), words: str = "") -> Any:
        """The inverse of `encode`: equal values give the same object, by whose identity a repeated call is found.

        Raises:
            ValueError: an unknown class, or another number of fields than it has.
        """
        if name is None:
            return None
        key = (name, tuple(numbers), words)
        if key not in self._decoded:
            self._decoded[key] = self._decode(*key)
        return self._decoded[key]

    def _decode(self, name: str, numbers: tuple[int, ...], words: str) -> Any:
        kind = self._kind(name)
        names = (*self._numbers[name], *self._words[name])
        values = (*numbers, *(words.split(",") if words else ()))
        if len(names) != len(values):
            given = f"{list(numbers)} and {words!r}" if self.has_words else f"{list(numbers)}"
            raise ValueError(f"config_type = {name!r} takes {', '.join(names)}, given {given}")
        return kind(**dict(zip(names, values, strict=True)))

    def _kind(self, name: str) -> type:
        if name not in self.kinds:
            raise ValueError(f"config_type = {name!r}, allowed: {', '.join(map(repr, self.kinds))}")
        return self.kinds[name]

    # ---- a JSON document ---------------------------------------------------------------------------------------------

    def to_document(self, config: Any) -> dict[str, Any]:
        """``{"kind": class, "config": fields}``."""
        return {"kind": type(config).__name__, "config": dataclasses.asdict(config)}

    def from_document(self, document: Mapping[str, Any]) -> Any:
        """The inverse of `to_document`.

        Raises:
            KeyError, TypeError, ValueError: something else.
        """
        return self._kind(document["kind"])(**document["config"])


# --- settings of a command line --------------------------------------------------------------------------------------


def parse_settings(kind: type, settings: Iterable[str], where: str) -> Any:
    """A configuration of ``kind`` from settings ``FIELD=VALUE``; None, for the plan's choice, where there is none.

    Args:
        kind: class of the configuration.
        settings: each one field; the others keep their defaults. Field names may have ``-`` in place of ``_``.
        where: what the fields are of, for messages.

    Raises:
        ValueError: a setting that is no FIELD=VALUE, an unknown field, a value of another type, or a field set twice.
    """
    kinds = {field.name: type(field.default) for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        name = name.strip().replace("-", "_")
        if not separator or name not in kinds:
            raise ValueError(f"setting {setting}: expected FIELD=VALUE; fields for {where}: {', '.join(kinds)}")
        if name in values:
            raise ValueError(f"setting {setting}: {name} is set twice")
        values[name] = _parse(setting, text.strip(), kinds[name])
    return kind(**values) if values else None


def _parse(setting: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"setting {setting}: expected true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"setting {setting}: expected an integer") from None


def spell(value: object) -> str:
    """A value of a field as `parse_settings` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
