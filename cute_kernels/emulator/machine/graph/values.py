"""The values and nodes of a basic block's data-flow graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cute_kernels.emulator.isa.ptx.program import Instruction

FULL = 0xFFFFFFFF
DTYPES: dict[str, type[np.generic]] = {
    f"{kind}{8 * size}": np.dtype(f"{code}{size}").type
    for kind, code, sizes in (("u", "u", (1, 2, 4, 8)), ("s", "i", (1, 2, 4, 8)), ("f", "f", (2, 4, 8)))
    for size in sizes
}
#: Width in bits of each, and of predicates.
STORED_BITS = {"pred": 1, **{name: np.dtype(type_).itemsize * 8 for name, type_ in DTYPES.items()}}
CANONICAL = {8: "u8", 16: "u16", 32: "u32", 64: "u64", 1: "pred"}


class PureOp(NamedTuple):
    """A function of its operands without effects, which the core defines (`pure_operations`)."""

    name: str  # in the core's table; families of operations have a constant behind it
    inputs: tuple[str, ...]  # storage type per operand (a key of DTYPES, or "pred")
    output: str  # storage type of the result


@functools.cache
def of_one_type(name: str, type_: str, count: int) -> PureOp:
    """An operation of ``count`` operands whose result has their type."""
    return PureOp(name, (type_,) * count, type_)


class Value:
    """A quantity of ``bits`` bits inside a block; ``type`` is how a varying value is stored."""

    bits: int
    type: str
    uniform: bool


class Constant(Value):
    """A literal bit pattern."""

    def __init__(self, value: int, bits: int) -> None:
        self.value = value & ((1 << bits) - 1)
        self.bits, self.type, self.uniform = bits, CANONICAL.get(bits, "wide"), True


OfWarp = Callable[..., object]
"""Gives a constant of a warp, an int or an array of 32 numbers, for a `Warp`."""


class LiveIn(Value):
    """The value that a register has when the block is entered; with ``of_warp`` a constant of the warp, by its name."""

    def __init__(self, variable: str, bits: int, uniform: bool, of_warp: OfWarp | None = None) -> None:
        self.variable, self.bits, self.uniform, self.of_warp = variable, bits, uniform, of_warp
        self.type = CANONICAL.get(bits, "wide")


class Pack(Value):
    """Equally wide parts, least significant first; only computed when something needs the whole."""

    def __init__(self, parts: Sequence[Value]) -> None:
        self.parts = tuple(parts)
        self.bits = sum(part.bits for part in parts)
        self.type = CANONICAL.get(self.bits, "wide")
        self.uniform = all(part.uniform for part in parts)


class Result(Value):
    def __init__(self, node: Node, type_: str, uniform: bool) -> None:
        self.node, self.type, self.uniform = node, type_, uniform
        self.bits = STORED_BITS[type_]


@dataclass(eq=False)
class Node:
    """A pure operation or an anchor of the block's graph."""

    instruction: Instruction
    args: tuple[Value, ...]
    op: PureOp | None = None
    anchor: Anchor | None = None
    results: list[Result] = field(default_factory=list)
    guard: Value | None = None

    @property
    def uniform(self) -> bool:
        return self.results[0].uniform


class Anchor:
    """An instruction with effects, or one that reads state. Without ``effects`` it is left out when nothing uses it."""

    effects = True


NOT_PREDICATE = of_one_type("not_pred", "pred", 1)


@functools.cache
def select_op(bits: int) -> PureOp:
    """``(yes, no, predicate)`` -> yes where the predicate holds."""
    type_ = CANONICAL[bits]
    return PureOp(f"select_{type_}", (type_, type_, "pred"), type_)


@functools.cache
def resize_op(bits: int, wanted: int) -> PureOp:
    """Truncates or extends with zeros."""
    source, target = CANONICAL[bits], CANONICAL[wanted]
    return PureOp(f"resize_{source}_{target}", (source,), target)


@functools.cache
def slice_op(bits: int, width: int, shift: int) -> PureOp:
    """``width`` bits from bit ``shift`` on."""
    return PureOp(f"slice{bits}_{width}_{shift}", (CANONICAL[bits],), CANONICAL[width])


@functools.cache
def pack_op(bits: int) -> PureOp:
    """``(low, high)`` -> twice as many bits."""
    return PureOp(f"pack2x{bits}", (CANONICAL[bits],) * 2, CANONICAL[2 * bits])
