"""Lowering of one basic block: instructions to a graph of values, of which bytecode is made.

Inside a block every write makes a new value (SSA), so moves, 64-bit packing and unpacking cost nothing. Instructions
with effects are *anchors*.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cute_kernels.emulator.core.pure_operations import evaluate
from cute_kernels.emulator.isa.ptx import program
from cute_kernels.emulator.machine.graph.values import (
    NOT_PREDICATE,
    STORED_BITS,
    Anchor,
    Constant,
    LiveIn,
    Node,
    Pack,
    PureOp,
    Result,
    Value,
    pack_op,
    resize_op,
    select_op,
    slice_op,
)


class Call(Anchor):
    """Calls ``function(warp, mask, *args)``; arguments are Values or any Python objects.

    Uniform results come back as an int or a tuple of ints; varying results as one array ``[32]`` or, for several, an
    array ``[n, 32]``. A blocking function returns None for "not yet", with the reason in ``warp.wait``.
    """

    def __init__(
        self, function: Callable[..., object], args: Sequence[object], blocking: bool = False, effects: bool = True
    ) -> None:
        self.function, self.args, self.blocking, self.effects = function, list(args), blocking, effects


@dataclass(eq=False)
class Operation(Anchor):
    """A function of the core that performs an instruction with effects whole."""

    name: str  # of the function
    # at most two, or three where there is no result; with ``facts`` any number, None where one is missing
    operands: Sequence[Value | None]
    flags: int = 0  # what it is told beside that, in bits that do not say which operands vary
    order: int = 0  # `Order` of what it synchronises, or another number of eight bits
    blocking: bool = False  # the warp may have to wait
    watched: bool = False  # it only tells the race detector something
    effects: bool = True  # as of `Call`
    facts: Sequence[int] = ()  # numbers that it is told in front of a list of its operands
    in_lanes: bool = False  # the operands have a value in each lane; there may be several results, whose places follow


class KernelContext(Protocol):
    """Facts of a kernel that lowering functions ask for; attributes as of `bytecode.context.Context`."""

    kernel: program.Kernel
    parameters: dict[str, int]
    local_bytes: int
    static_shared: int

    def number_of(self, form: Hashable) -> int: ...
    def is_wide_symbol(self, symbol: program.Symbol) -> bool: ...
    def is_uniform_of_tid(self, instruction: program.Instruction) -> bool: ...
    def named_value(self, block: BlockBuilder, operand: program.Symbol | program.Special, bits: int) -> Value: ...


class BlockBuilder:
    """Builds the graph of one basic block. ``types``: declared type per register. ``varying``: registers held per lane.
    ``divergent``: whether the block can run under a partial mask. ``context``: of the kernel."""

    def __init__(self, types: dict[str, str], varying: set[str], divergent: bool, context: KernelContext) -> None:
        self.types, self.varying = types, varying
        self.divergent, self.context = divergent, context
        self.current: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.guard: Value | None = None
        self.instruction: program.Instruction | None = None
        self._live: dict[str, LiveIn] = {}
        self._known: dict[Hashable, Value] = {}

    def bits_of(self, register: str) -> int:
        return program.TYPE_BITS[self.types[register]]

    def value(self, operand: program.Operand, bits: int) -> Value:
        """The value of a source operand, read as ``bits`` bits."""
        if isinstance(operand, program.Register):
            return self.register(operand.name)
        if isinstance(operand, program.Immediate):
            return self._immediate(operand, bits)
        if isinstance(operand, program.Not):
            return self.logic_not(self.register(operand.register.name))
        if isinstance(operand, program.Vector):
            return Pack([self.value(item, bits // len(operand.items)) for item in operand.items])
        if isinstance(operand, (program.Symbol, program.Special)):
            return self.context.named_value(self, operand, bits)
        raise self.instruction.refuse(f"operand {operand} cannot be read as a value")

    def _immediate(self, operand: program.Immediate, bits: int) -> Constant:
        if bits == 1:
            return Constant(1 if operand.value else 0, 1)
        value = operand.value
        if operand.float_bits and operand.float_bits != bits:
            if (operand.float_bits, bits) != (64, 32):
                raise self.instruction.refuse("a floating-point literal of another width than the operation")
            value = int(np.array([value], np.uint64).view(np.float64).astype(np.float32).view(np.uint32)[0])
        return Constant(value, bits)

    def register(self, name: str) -> Value:
        """The value that a register has at this point."""
        if name not in self.current:
            if name not in self._live:
                self._live[name] = LiveIn(name, self.bits_of(name), name not in self.varying)
            return self._live[name]
        return self.current[name]

    def define(self, operand: program.Operand, value: Value) -> None:
        """Writes a destination operand; under a guard the lanes that are off keep the old value."""
        if isinstance(operand, program.Sink):
            return
        if isinstance(operand, program.Vector):
            parts = self.split(value, len(operand.items))
            for item, part in zip(operand.items, parts):
                self.define(item, part)
            return
        if not isinstance(operand, program.Register):
            undeclared = isinstance(operand, program.Symbol) and operand.name not in self.context.parameters
            why = "is not declared as a register" if undeclared else "is no register, and cannot be written"
            raise self.instruction.refuse(f"{operand} {why}")
        bits = self.bits_of(operand.name)
        if value.bits != bits:
            value = self.resize(value, bits)
        if self.guard is not None:
            value = self.select(self.guard, value, self.register(operand.name))
        self.current[operand.name] = value

    def resize(self, value: Value, bits: int) -> Value:
        """Zero-extends or truncates: what PTX does where operand and register differ in width (loads, stores, cvt)."""
        if value.bits == bits:
            return value
        if bits > 64 or value.bits > 64 or 1 in (bits, value.bits):
            raise self.instruction.refuse(f"{value.bits} bits where {bits} are expected")
        return self.pure(resize_op(value.bits, bits), value)

    def split(self, value: Value, count: int) -> list[Value]:
        """``count`` equal parts, least significant first."""
        if isinstance(value, Pack) and len(value.parts) == count:
            return list(value.parts)
        if isinstance(value, Pack) and len(value.parts) > count and len(value.parts) % count == 0:
            step = len(value.parts) // count
            return [Pack(value.parts[i : i + step]) for i in range(0, len(value.parts), step)]
        if isinstance(value, Pack) and count % len(value.parts) == 0:
            return [p for part in value.parts for p in self.split(part, count // len(value.parts))]
        bits = value.bits // count
        if value.bits > 64:
            raise self.instruction.refuse(f"a {value.bits}-bit value is not made of {count} known parts")
        return [self.pure(slice_op(value.bits, bits, i * bits), value) for i in range(count)]

    def whole(self, value: Value) -> Value:
        """A Pack as one computed value."""
        if not isinstance(value, Pack):
            return value
        if value.bits > 64:
            raise self.instruction.refuse(f"a {value.bits}-bit value cannot be computed with")
        parts = [self.whole(part) for part in value.parts]
        while len(parts) > 1:
            parts = [self.pure(pack_op(low.bits), low, high) for low, high in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def pure(self, op: PureOp, *args: Value) -> Value:
        """The result of a pure operation; equal operations on equal values are computed once."""
        args = tuple(self.whole(arg) for arg in args)
        key = (op.name, *[("c", a.value, a.bits) if isinstance(a, Constant) else id(a) for a in args])
        if key in self._known:
            return self._known[key]
        for arg, wanted in zip(args, op.inputs, strict=True):
            bits = STORED_BITS[wanted]
            if arg.bits != bits:
                raise self.instruction.refuse(f"an operand has {arg.bits} bits where {op.name} needs {bits}")
        uniform = all(arg.uniform for arg in args)
        if all(isinstance(arg, Constant) for arg in args):
            literals = [arg.value for arg in args]
            result: Value = Constant(evaluate(op.name, *literals), STORED_BITS[op.output])
        else:
            node = Node(self.instruction, args, op=op)
            result = Result(node, op.output, uniform)
            node.results.append(result)
            self.nodes.append(node)
        self._known[key] = result
        return result

    def select(self, predicate: Value, yes: Value, no: Value) -> Value:
        """``predicate ? yes : no`` lane by lane."""
        if yes is no:
            return yes
        return self.pure(select_op(yes.bits), yes, no, predicate)

    def logic_not(self, predicate: Value) -> Value:
        return self.pure(NOT_PREDICATE, predicate)

    def first_lane(self, value: Value) -> Value:
        """A varying value that is known to be the same in all lanes, as a uniform one."""
        if value.uniform:
            return value
        kind = "pred" if value.bits == 1 else f"u{value.bits}"
        return self.operation(f"lane_{kind}", value, results=[(value.type, True)], effects=False)[0]

    def agreed(self, value: Value) -> Value:
        """A value that PTX requires to be the same in all executing lanes, as a uniform one; checked when it runs."""
        if value.uniform:
            return value
        return self.operation(f"agreed_u{value.bits}", value, results=[(value.type, True)])[0]

    def anchor(
        self, anchor: Anchor, results: Sequence[tuple[str, bool]] = (), args: Sequence[Value] = ()
    ) -> list[Value]:
        """Adds an anchor. ``results``: (storage type, uniform) each; ``args``: the Values that it reads."""
        args = tuple(args)
        node = Node(self.instruction, args, anchor=anchor, guard=self.guard)
        node.results = [Result(node, type_, uniform) for type_, uniform in results]
        self.nodes.append(node)
        return list(node.results)

    def call(
        self, function: Callable[..., object], *args: object, results: Sequence[tuple[str, bool]] = (),
        blocking: bool = False, effects: bool = True,
    ) -> list[Value]:  # fmt: skip
        """Adds a `Call` of ``function(warp, mask, *args)``."""
        args = tuple(self.whole(arg) if isinstance(arg, Value) else arg for arg in args)
        values = [arg for arg in args if isinstance(arg, Value)]
        return self.anchor(Call(function, args, blocking, effects), results, values)

    def operation(
        self, name: str, *operands: Value | None, results: Sequence[tuple[str, bool]] = (),
        **more: int | bool | Sequence[int],
    ) -> list[Value]:  # fmt: skip
        """Adds an `Operation`, with ``more`` of its attributes."""
        values = [None if value is None else self.whole(value) for value in operands]
        given = [value for value in values if value is not None]
        return self.anchor(Operation(name, values, **more), results, given)

    def finals(self, live_out: frozenset[str]) -> list[tuple[str, Value]]:
        """Registers of ``live_out`` that this block changes, with their values at its end."""
        finals = []
        for name in sorted(live_out & set(self.current)):
            value = self.whole(self.current[name])
            if not (isinstance(value, LiveIn) and value.variable == name):
                finals.append((name, value))
        return finals

    def needed(self, roots: list[Value]) -> set[Node]:
        """Nodes with effects, and all that they and ``roots`` depend on."""
        needed: set[Node] = set()
        work = list(roots)
        for node in self.nodes:
            if node.anchor is not None and node.anchor.effects:
                work.extend(node.args)
                work.extend([node.guard] if node.guard is not None else [])
        while work:
            value = work.pop()
            if isinstance(value, Pack):
                work.extend(value.parts)
            elif isinstance(value, Result) and value.node not in needed:
                needed.add(value.node)
                work.extend(value.node.args)
                work.extend([value.node.guard] if value.node.guard is not None else [])
        return needed
