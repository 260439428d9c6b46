"""The values and nodes of a basic block's data-flow graph, and the names that generated code refers to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_kernels.emulator.decode import Instruction
from cute_kernels.emulator.errors import BarrierMisuse

if TYPE_CHECKING:
    from cute_kernels.emulator.block_source import BlockSource

FULL = 0xFFFFFFFF
DTYPES: dict[str, Any] = {
    "u8": np.uint8,
    "s8": np.int8,
    "u16": np.uint16,
    "s16": np.int16,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
}
#: Width in bits of each, and of predicates.
STORED_BITS = {"pred": 1, **{name: np.dtype(type_).itemsize * 8 for name, type_ in DTYPES.items()}}
CANONICAL = {8: "u8", 16: "u16", 32: "u32", 64: "u64", 1: "pred"}


@dataclass(frozen=True)
class PureOp:
    """A function of its operands without effects.

    Attributes:
        name: unique; also the name in generated code.
        inputs: storage type per operand (a key of DTYPES, or "pred").
        output: storage type of the result.
        vector: over arrays of ``inputs``' dtypes (predicates: bool arrays) that broadcast together.
        scalar: expression over the operands' bit patterns as Python ints (predicates: bools) that gives the result's
            bit pattern; None to call ``vector`` on one element.
        masks: expression over lane masks, for operations on predicates only.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    vector: Callable[..., np.ndarray] | None
    scalar: str | None = None
    masks: str | None = None


class Value:
    """A quantity of ``bits`` bits inside a block; ``type`` is how a varying value is stored."""

    bits: int
    type: str
    uniform: bool
    level: int = 0


class Constant(Value):
    """A literal bit pattern."""

    def __init__(self, value: int, bits: int) -> None:
        self.value = value & ((1 << bits) - 1)
        self.bits, self.type, self.uniform = bits, CANONICAL.get(bits, "wide"), True


class LiveIn(Value):
    """The value that a register has when the block is entered."""

    def __init__(self, variable: str, bits: int, uniform: bool) -> None:
        self.variable, self.bits, self.uniform = variable, bits, uniform
        self.type = CANONICAL.get(bits, "wide")


class Pack(Value):
    """Equally wide parts, least significant first; only computed when something needs the whole."""

    def __init__(self, parts: Sequence[Value]) -> None:
        self.parts = tuple(parts)
        self.bits = sum(part.bits for part in parts)
        self.type = CANONICAL.get(self.bits, "wide")
        self.uniform = all(part.uniform for part in parts)
        self.level = max(part.level for part in parts)


class Result(Value):
    """A result of a node. ``place`` is set when the node is emitted: (array name, row or None) or an expression."""

    def __init__(self, node: Node, type_: str, uniform: bool) -> None:
        self.node, self.type, self.uniform = node, type_, uniform
        self.bits = STORED_BITS[type_]
        self.level = node.level
        self.place: tuple[str, int | None] = ("", None)


@dataclass(eq=False)
class Node:
    """A pure operation or an anchor of the block's graph."""

    instruction: Instruction
    args: tuple[Value, ...]
    level: int
    op: PureOp | None = None
    anchor: Anchor | None = None
    results: list[Result] = field(default_factory=list)
    guard: Value | None = None

    @property
    def uniform(self) -> bool:
        return self.results[0].uniform


class Anchor:
    """An instruction with effects, or one that reads state.

    ``emit(block, nodes)`` writes the source for ``nodes``, all with the same ``key`` (anchors with key None are
    never merged), and sets the places of their results. Without ``effects`` it is left out when nothing uses it.
    """

    key: Any = None
    effects = True

    def emit(self, block: BlockSource, nodes: list[Node]) -> None:
        raise NotImplementedError

    def as_call(self) -> tuple[Callable[..., Any], Sequence[Any]] | None:
        """One node as a call ``function(warp, mask, *args)``, whose arguments may be or contain Values.

        None: it is none, because its results are filled in after it has returned.
        """
        return None


class Namespace:
    """Objects that generated code refers to by name."""

    def __init__(self, reserved: Collection[str] = ()) -> None:
        self.values: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._reserved = reserved

    def bind(self, thing: Any, hint: str) -> str:
        """The name of an object; the same object always gets the same name."""
        key = id(thing)
        if key not in self._names:
            name = "".join(c if c.isalnum() else "_" for c in hint)
            if name in self.values or name in self._reserved:
                name = f"{name}_{len(self.values)}"
            self.values[name] = thing
            self._names[key] = name
        return self._names[key]

    def constant(self, patterns: Sequence[int], type_: str, column: bool) -> str:
        """The name of an array of literals: shape [1], or [n, 1] for a column of a grouped operation."""
        key = (tuple(patterns), type_, column)
        if key not in self._names:
            size = np.dtype(DTYPES[type_]).itemsize
            raw = b"".join(int(p).to_bytes(size, "little") for p in patterns)
            array = np.frombuffer(raw, DTYPES[type_])
            name = f"K{len(self.values)}"
            self.values[name] = array[:, None] if column else array
            self._names[key] = name
        return self._names[key]


# --- selection, packing, width ---------------------------------------------------------------------------------------

NOT_PREDICATE = PureOp("not_pred", ("pred",), "pred", None, "(not {0})", "({0} ^ 0xFFFFFFFF)")
_INDEX_ARRAYS: dict[tuple[int, ...], np.ndarray] = {}
_OPS: dict[Any, PureOp] = {}


def first_lane(warp: Any, mask: int, lanes: np.ndarray) -> int:
    return int(lanes[0])


def agreed_lanes(warp: Any, mask: int, lanes: np.ndarray) -> int:
    """The value that all executing lanes have.

    Raises:
        BarrierMisuse: they have different ones.
    """
    active = lanes[[lane for lane in range(32) if mask >> lane & 1]]
    if (active != active[0]).any():
        raise BarrierMisuse(f"an operand that must be the same in all lanes is {sorted(set(active.tolist()))}")
    return int(active[0])


def first_bit(warp: Any, mask: int, lanes: int) -> bool:
    return bool(lanes & 1)


def index_array(rows: tuple[int, ...]) -> np.ndarray:
    return _INDEX_ARRAYS.setdefault(rows, np.array(rows))


def select_op(bits: int) -> PureOp:
    """``(yes, no, predicate)`` -> yes where the predicate holds."""
    if ("select", bits) not in _OPS:
        scalar = "({0} if {2} else {1})"
        type_ = CANONICAL[bits]
        masks = "({0} & {2} | {1} & ~{2})" if bits == 1 else None
        _OPS["select", bits] = PureOp(
            f"select_{type_}", (type_, type_, "pred"), type_, lambda yes, no, p: np.where(p, yes, no), scalar, masks
        )
    return _OPS["select", bits]


def resize_op(bits: int, wanted: int) -> PureOp:
    key = ("resize", bits, wanted)
    if key not in _OPS:
        source, target = CANONICAL[bits], CANONICAL[wanted]
        scalar = f"({{0}} & {(1 << wanted) - 1:#x})" if wanted < bits else "{0}"
        _OPS[key] = PureOp(
            f"resize_{source}_{target}", (source,), target, lambda x: x.astype(DTYPES[target]), scalar
        )
    return _OPS[key]


def slice_op(bits: int, width: int, shift: int) -> PureOp:
    key = ("slice", bits, width, shift)
    if key not in _OPS:
        target = DTYPES[CANONICAL[width]]
        _OPS[key] = PureOp(
            f"slice{bits}_{width}_{shift}",
            (CANONICAL[bits],),
            CANONICAL[width],
            (lambda x: (x >> shift).astype(target)) if shift else (lambda x: x.astype(target)),
            f"({{0}} >> {shift} & {(1 << width) - 1:#x})",
        )
    return _OPS[key]


def pack_op(bits: int) -> PureOp:
    """``(low, high)`` -> twice as many bits."""
    key = ("pack", bits)
    if key not in _OPS:
        total = DTYPES[CANONICAL[2 * bits]]

        def pack(low: np.ndarray, high: np.ndarray) -> np.ndarray:
            return low.astype(total) | high.astype(total) << bits

        kind = CANONICAL[bits]
        _OPS[key] = PureOp(f"pack2x{bits}", (kind, kind), CANONICAL[2 * bits], pack, f"({{0}} | {{1}} << {bits})")
    return _OPS[key]
