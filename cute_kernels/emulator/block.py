"""Lowering of one basic block: instructions to a graph of values, and the graph to Python source.

Inside a block every write makes a new value (SSA), so moves, 64-bit packing and unpacking cost nothing, and pure
instructions may be reordered freely. That is what makes the emulator fast: equal instructions on different registers
(32 multiplications after a 32-column tensor-memory load) are collected level by level of the data-flow graph and run
as one NumPy call on ``[registers, 32 lanes]``. Instructions with effects (*anchors*) keep their order; neighbours that
do the same to memory are merged into one vector access.

How values look in the generated code: a uniform value is a Python int (its bit pattern; predicates: bool); a varying
value is an array over 32 lanes, a varying predicate is a bit mask of lanes in a Python int.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cute_kernels.emulator.decode import (
    TYPE_BITS,
    Immediate,
    Instruction,
    Not,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from cute_kernels.emulator.scalars import SCALAR_NAMES
from cute_kernels.emulator.values import (
    CANONICAL,
    DTYPES,
    FULL,
    NOT_PREDICATE,
    STORED_BITS,
    Anchor,
    Constant,
    LiveIn,
    Namespace,
    Node,
    Pack,
    PureOp,
    Result,
    Value,
    agreed_lanes,
    first_bit,
    first_lane,
    index_array,
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
        self, function: Callable[..., Any], args: Sequence[Any], blocking: bool = False, effects: bool = True
    ) -> None:
        self.function, self.args, self.blocking, self.effects = function, list(args), blocking, effects

    def as_call(self) -> tuple[Callable[..., Any], Sequence[Any]]:
        return self.function, self.args

    def emit(self, block: BlockBuilder, nodes: list[Node]) -> None:
        (node,) = nodes
        name = block.space.bind(self.function, self.function.__name__)
        args = [block.argument(arg) for arg in self.args]
        mask, condition = block.guard_mask(node)
        call = f"{name}(W, {', '.join([mask, *args])})"
        if not node.results and not self.blocking:
            block.put(f"if {condition}: {call}" if condition else call, node)
            return
        target = block.fresh("v")
        if condition:
            block.put(f"{target} = {call} if {condition} else {block.nothing(node, self.blocking)}", node)
        else:
            block.put(f"{target} = {call}", node)
        if self.blocking:
            block.put_block(target, node)
        many = len(node.results) > 1
        for row, result in enumerate(node.results):
            result.place = (target, row if many else None)


class BlockBuilder:
    """Builds the graph of one basic block; `emit` turns it into source lines.

    Args:
        types: declared type per register.
        variables: Python variable per register.
        varying: registers held per lane.
        space: shared by all blocks of a kernel.
        divergent: whether the block can run under a partial mask.
        context: facts of the kernel that lowering functions need (symbol addresses, parameter offsets, flow).
    """

    def __init__(
        self,
        types: dict[str, str],
        variables: dict[str, str],
        varying: set[str],
        space: Namespace,
        divergent: bool,
        context: Any,
    ) -> None:
        self.types, self.variables, self.varying = types, variables, varying
        self.space, self.divergent, self.context = space, divergent, context
        self.current: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.guard: Value | None = None
        self.instruction: Instruction | None = None
        self.lines: list[tuple[int, str, int]] = []  # (extra indentation, text, instruction index)
        self._live: dict[str, LiveIn] = {}
        self._known: dict[Any, Value] = {}
        self._last_anchor = 0
        self._names = 0
        #: Results of instructions that check that the warp is whole: there are no other lanes that keep what they have.
        self.of_whole_warps: set[Value] = set()

    # --- building -------------------------------------------------------------------------------------------------

    def bits_of(self, register: str) -> int:
        return TYPE_BITS[self.types[register]]

    def value(self, operand: Operand, bits: int) -> Value:
        """The value of a source operand, read as ``bits`` bits."""
        if isinstance(operand, Register):
            return self.register(operand.name)
        if isinstance(operand, Immediate):
            return self._immediate(operand, bits)
        if isinstance(operand, Not):
            return self.logic_not(self.register(operand.register.name))
        if isinstance(operand, Vector):
            return Pack([self.value(item, bits // len(operand.items)) for item in operand.items])
        if isinstance(operand, (Symbol, Special)):
            return self.context.named_value(self, operand, bits)
        raise self.instruction.refuse(f"operand {operand} cannot be read as a value")

    def _immediate(self, operand: Immediate, bits: int) -> Constant:
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
                self._live[name] = LiveIn(self.variables[name], self.bits_of(name), name not in self.varying)
            return self._live[name]
        return self.current[name]

    def define(self, operand: Operand, value: Value) -> None:
        """Writes a destination operand; under a guard the lanes that are off keep the old value."""
        if isinstance(operand, Sink):
            return
        if isinstance(operand, Vector):
            parts = self.split(value, len(operand.items))
            for item, part in zip(operand.items, parts):
                self.define(item, part)
            return
        if not isinstance(operand, Register):
            undeclared = isinstance(operand, Symbol) and operand.name not in self.context.parameters
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
        return self.pure(pack_op(len(parts), parts[0].bits), *parts)

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
        if uniform and op.scalar is not None and all(isinstance(arg, Constant) for arg in args):
            result: Value = self._fold(op, args)
        else:
            level = 1 + max((arg.level for arg in args), default=0)
            node = Node(self.instruction, args, level, op=op)
            result = Result(node, op.output, uniform)
            node.results.append(result)
            self.nodes.append(node)
        self._known[key] = result
        return result

    @staticmethod
    def _fold(op: PureOp, args: tuple[Value, ...]) -> Constant:
        literals = [repr(bool(a.value)) if a.bits == 1 else repr(a.value) for a in args]
        names = {"np": np, **SCALAR_NAMES}
        return Constant(int(eval(op.scalar.format(*literals), names)), STORED_BITS[op.output])  # noqa: S307 - our own template

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
        function = first_bit if value.bits == 1 else first_lane
        return self.call(function, value, results=[(value.type, True)], effects=False)[0]

    def agreed(self, value: Value) -> Value:
        """A value that PTX requires to be the same in all executing lanes, as a uniform one; checked when it runs."""
        if value.uniform:
            return value
        return self.call(agreed_lanes, self.whole(value), results=[(value.type, True)])[0]

    def anchor(
        self, anchor: Anchor, results: Sequence[tuple[str, bool]] = (), args: Sequence[Value] = ()
    ) -> list[Value]:
        """Adds an anchor. ``results``: (storage type, uniform) each; ``args``: the Values that it reads."""
        args = tuple(args)
        level = max([self._last_anchor, *(arg.level + 1 for arg in args)])
        if self.guard is not None:
            level = max(level, self.guard.level + 1)
        self._last_anchor = level
        node = Node(self.instruction, args, level, anchor=anchor, guard=self.guard)
        node.results = [Result(node, type_, uniform) for type_, uniform in results]
        self.nodes.append(node)
        return list(node.results)

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        results: Sequence[tuple[str, bool]] = (),
        blocking: bool = False,
        effects: bool = True,
    ) -> list[Value]:
        """Adds a `Call` of ``function(warp, mask, *args)``."""
        args = tuple(self.whole(arg) if isinstance(arg, Value) else arg for arg in args)
        values = [arg for arg in args if isinstance(arg, Value)]
        return self.anchor(Call(function, args, blocking, effects), results, values)

    # --- emission -------------------------------------------------------------------------------------------------

    def put(self, text: str, node: Node, indent: int = 0) -> None:
        self.lines.append((indent, text, node.instruction.index))

    def put_block(self, target: str, node: Node) -> None:
        """The warp waits and executes this block again when it is resumed."""
        self.put(f"if {target} is None:", node)
        self.put("C[pc] -= 1", node, 1)
        if self.divergent:
            self.put("pc, M, rpc, _park = W.park(pc, M, rpc)", node, 1)
            self.put("if _park: budget = yield", node, 1)
        else:
            self.put("budget = yield", node, 1)
        self.put("continue", node, 1)

    def fresh(self, prefix: str) -> str:
        self._names += 1
        return f"{prefix}{self._names}"

    def guard_mask(self, node: Node) -> tuple[str, str]:
        """(expression of the mask of executing lanes, condition to execute at all or "")."""
        if node.guard is None:
            return "M", ""
        if node.guard.uniform:
            return "M", self.scalar(node.guard)
        name = self.fresh("m")
        self.put(f"{name} = M & {self.mask(node.guard)}", node)
        return name, name

    def nothing(self, node: Node, blocking: bool) -> str:
        """What a guarded-off call results in; its lanes never look at it."""
        if not node.results:
            return "True"
        if all(result.uniform for result in node.results) or node.results[0].type == "pred":
            return "0" if len(node.results) == 1 else "(" + "0," * len(node.results) + ")"
        shape = (len(node.results), 32) if len(node.results) > 1 else (32,)
        return self.space.bind(np.zeros(shape, DTYPES[node.results[0].type]), "ZERO")

    def scalar(self, value: Value) -> str:
        """A uniform value as a Python int (predicate: bool)."""
        if isinstance(value, Constant):
            return repr(bool(value.value)) if value.bits == 1 else repr(value.value)
        if not value.uniform:
            raise AssertionError(f"a varying value is used where lanes must agree: {self.instruction}")
        return self._spell(value)

    def mask(self, value: Value) -> str:
        """A predicate as a mask of lanes."""
        if isinstance(value, Constant):
            return str(FULL if value.value else 0)
        return f"({FULL} if {self._spell(value)} else 0)" if value.uniform else self._spell(value)

    def lanes(self, value: Value, type_: str) -> str:
        """Any value as an array that broadcasts over lanes, of the given storage type."""
        if type_ == "pred":
            return f"LANES[{self.mask(value)}]"
        if isinstance(value, Constant):
            return self.space.constant([value.value], type_, column=False)
        if value.uniform:
            return f"one_{type_}({self._spell(value)})"
        view = "" if value.type == type_ else f".view({type_})"
        return self._spell(value) + view

    def argument(self, arg: Any) -> str:
        """An argument of a Call."""
        if isinstance(arg, Value):
            if arg.uniform:
                return self.scalar(arg)
            return self.mask(arg) if arg.bits == 1 else self.lanes(arg, CANONICAL[arg.bits])
        if arg is None or isinstance(arg, (int, str, bool)):
            return repr(arg)
        if isinstance(arg, (tuple, list)):
            return "(" + "".join(self.argument(item) + ", " for item in arg) + ")"
        return self.space.bind(arg, "obj")

    def _spell(self, value: Value) -> str:
        if isinstance(value, LiveIn):
            return value.variable
        assert isinstance(value, Result), value
        name, row = value.place
        assert name, f"{value.node.instruction.text}: used before it is emitted"
        return name if row is None else f"{name}[{row}]"

    def emit(self, live_out: frozenset[str], condition: Value | None) -> str:
        """Writes the source of the block without its branch to ``lines``.

        Args:
            live_out: registers that later blocks read.
            condition: predicate that the branch at the end tests, or None.

        Returns:
            The expression of ``condition`` (uniform: bool, varying: lane mask), or "".
        """
        finals = self.finals(live_out)
        needed = self.needed([value for _, value in finals] + ([condition] if condition is not None else []))
        levels: dict[int, tuple[list[Node], list[Node]]] = {}
        for node in self.nodes:
            if node in needed or node.anchor is not None and node.anchor.effects:
                levels.setdefault(node.level, ([], []))[node.anchor is not None].append(node)
        for level in sorted(levels):
            pure, anchors = levels[level]
            self._emit_pure(pure)
            self._emit_anchors(anchors)
        test = ""
        if condition is not None:
            test = self.scalar(condition) if condition.uniform else self.mask(condition)
            if isinstance(condition, LiveIn) and any(self.variables[name] == test for name, _ in finals):
                self.lines.append((0, f"test = {test}", self.instruction.index))  # before its register is overwritten
                test = "test"
        self._emit_finals(finals)
        return test

    def finals(self, live_out: frozenset[str]) -> list[tuple[str, Value]]:
        """Registers of ``live_out`` that this block changes, with their values at its end."""
        finals = []
        for name in sorted(live_out & set(self.current)):
            value = self.whole(self.current[name])
            if not (isinstance(value, LiveIn) and value.variable == self.variables[name]):
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

    def _emit_pure(self, nodes: list[Node]) -> None:
        groups: dict[Any, list[Node]] = {}
        for node in nodes:
            if node.uniform or node.op.masks is not None:
                self._emit_scalar(node)
            else:
                pattern = tuple(arg.uniform for arg in node.args)
                groups.setdefault((node.op.name, pattern), []).append(node)
        for members in groups.values():
            self._emit_vector(members)

    def _emit_scalar(self, node: Node) -> None:
        op, target = node.op, self.fresh("v")
        if not node.uniform:
            text = op.masks.format(*(self.mask(arg) for arg in node.args))
        elif op.scalar is not None:
            text = op.scalar.format(*(self.scalar(arg) for arg in node.args))
        else:
            args = ", ".join(
                f"np.array([{self.scalar(a)}])" if t == "pred" else f"one_{t}({self.scalar(a)})"
                for a, t in zip(node.args, op.inputs)
            )
            function = self.space.bind(op.vector, op.name)
            text = f"bool({function}({args})[0])" if op.output == "pred" else f"bits_of({function}({args}))"
        self.put(f"{target} = {text}", node)
        node.results[0].place = (target, None)

    def _emit_vector(self, members: list[Node]) -> None:
        op = members[0].op
        function = self.space.bind(op.vector, op.name)
        if len(members) == 1:
            args = [self.lanes(arg, t) for arg, t in zip(members[0].args, op.inputs)]
        else:
            args = [self.rows([m.args[i] for m in members], t) for i, t in enumerate(op.inputs)]
        text = f"{function}({', '.join(args)})"
        if op.output == "pred":
            text = f"{'mask_of' if len(members) == 1 else 'masks_of'}({text})"
        target = self.fresh("v" if len(members) == 1 else "g")
        self.put(f"{target} = {text}", members[0])
        for row, node in enumerate(members):
            node.results[0].place = (target, None if len(members) == 1 else row)

    def rows(self, values: list[Value], type_: str) -> str:
        """One operand of a grouped operation: an array that broadcasts to [n, 32].

        The cheap cases come first: the same value in all rows; rows of one array at equal distances (a slice);
        literals (a column).
        """
        if all(value is values[0] for value in values):
            return self.lanes(values[0], type_)
        if all(isinstance(value, Constant) for value in values):
            patterns = [value.value for value in values]
            if type_ == "pred":
                return self.space.bind(np.array([bool(p) for p in patterns])[:, None], "P")
            if len(set(patterns)) == 1:
                return self.space.constant(patterns[:1], type_, column=False)
            return self.space.constant(patterns, type_, column=True)
        if type_ == "pred":
            return f"stack_lanes(({', '.join(self.mask(value) for value in values)},))"
        if all(value.uniform for value in values):
            return f"column_{type_}(({', '.join(self.scalar(value) for value in values)},))"
        sliced = self._slice(values)
        if sliced is not None:
            return sliced if values[0].type == type_ else f"{sliced}.view({type_})"
        return f"stack(({', '.join(self._full_row(value, type_) for value in values)},))"

    def _full_row(self, value: Value, type_: str) -> str:
        text = self.lanes(value, type_)
        return f"spread({text})" if value.uniform else text

    def _slice(self, values: list[Value]) -> str | None:
        if not all(isinstance(value, Result) and value.place[1] is not None and not value.uniform for value in values):
            return None
        if len({value.place[0] for value in values}) != 1:
            return None
        rows = [value.place[1] for value in values]
        step = rows[1] - rows[0]
        if any(b - a != step for a, b in zip(rows, rows[1:])):
            return f"{values[0].place[0]}[{self.space.bind(index_array(tuple(rows)), 'I')}]" if step else None
        if step > 0:
            stop = rows[-1] + 1
            return f"{values[0].place[0]}[{rows[0]}:{stop}{'' if step == 1 else f':{step}'}]"
        if step == 0:
            return None
        stop = "" if rows[-1] == 0 else rows[-1] - 1
        return f"{values[0].place[0]}[{rows[0]}:{stop}:{step}]"

    def _emit_anchors(self, nodes: list[Node]) -> None:
        start = 0
        while start < len(nodes):
            end = start + 1
            key = nodes[start].anchor.key
            while end < len(nodes) and key is not None and nodes[end].anchor.key == key and not nodes[start].guard:
                if nodes[end].guard is not None:
                    break
                end += 1
            nodes[start].anchor.emit(self, nodes[start:end])
            start = end

    def _emit_finals(self, finals: list[tuple[str, Value]]) -> None:
        """Assigns live registers. Sources that are registers go first and together: they may be targets as well."""
        if not finals:
            return
        last = self.nodes[-1] if self.nodes else None
        index = self.instruction.index if last is None else last.instruction.index
        first = [(n, v) for n, v in finals if isinstance(v, LiveIn)]
        rest = [(n, v) for n, v in finals if not isinstance(v, LiveIn)]
        texts = [(self.variables[n], self._final(n, v)) for n, v in first]
        if texts:
            self.lines.append((0, f"{', '.join(t for t, _ in texts)} = {', '.join(s for _, s in texts)}", index))
        for name, value in rest:
            self.lines.append((0, f"{self.variables[name]} = {self._final(name, value)}", index))

    def _final(self, name: str, value: Value) -> str:
        variable = self.variables[name]
        if name not in self.varying:
            return self.scalar(value)
        if value.bits == 1:
            mask = self.mask(value)
            return f"{mask} & M | {variable} & ~M" if self.divergent else mask
        text = self.lanes(value, CANONICAL[value.bits])
        if self.divergent and value not in self.of_whole_warps:
            return f"where(LANES[M], {text}, {variable})"
        return f"spread({text})" if value.uniform else text
