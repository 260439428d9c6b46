"""Configurations by text: ``tile_rows=192,pingpong=false`` on a command line, for the architecture at hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from cute_kernels import plan
from cute_kernels.config import Config
from cute_kernels.plan import ARCHS, PLANNERS
from cute_kernels.plan.config_codec import parse_settings
from cute_kernels.plan.registry import MMA_SYNC
from cute_kernels.plan.sm80 import FP8_ARCHS

Kind = TypeVar("Kind", bound=Config)

CONFIG_TYPES: dict[str, dict[str, type[Config]]] = {
    operation: {arch: kernels[0].config for arch, kernels in planner.kernels.items()}
    for operation, planner in PLANNERS.items()
}
"""Class of the first kernel's tunables, by operation and architecture."""


def parse_config(text: str, kind: type[Kind]) -> Kind:
    """``"tile_n=192,pingpong=true"``: the defaults of ``kind`` but for these fields.

    Raises:
        ValueError: an unknown field, or a value of another type than the field's.
    """
    return parse_settings(kind, text.split(","), kind.__name__)


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


BENCHED = tuple(name for name, arch in ARCHS.items() if plan.arch_of(arch.compute_capability) == name)
"""Keys of `cute_kernels.plan.ARCHS` whose kernels devices get without being asked."""


def arch_of(capability: tuple[int, int]) -> str:
    """The one of `BENCHED` that devices of a compute capability run.

    Raises:
        ValueError: there is none.
    """
    if name := plan.arch_of(tuple(capability)):
        return name
    allowed = ", ".join("{}.{}".format(*ARCHS[name].compute_capability) for name in BENCHED)
    raise ValueError("compute capability {}.{}: must be one of {}".format(*capability, allowed))


def rows_type(arch: str) -> str:
    """Element type of the rows that are timed: E4M3 where tensor cores multiply it, BF16 elsewhere."""
    return "float8_e4m3fn" if arch not in MMA_SYNC or arch in FP8_ARCHS else "bfloat16"
