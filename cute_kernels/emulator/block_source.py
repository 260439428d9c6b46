"""A basic block's graph of values (`block.BlockBuilder`) to Python source.

Equal instructions on different registers (32 multiplications after a 32-column tensor-memory load) are collected level
by level of the data-flow graph and run as one NumPy call on ``[registers, 32 lanes]``. That is what makes this back end
fast. Instructions with effects (*anchors*) keep their order; neighbours that do the same to memory are merged into one
vector access.

How values look in the generated code: a uniform value is a Python int (its bit pattern; predicates: bool); a varying
value is an array over 32 lanes, a varying predicate is a bit mask of lanes in a Python int.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_kernels.emulator.block import BlockBuilder
from cute_kernels.emulator.values import (
    CANONICAL,
    DTYPES,
    FULL,
    Constant,
    LiveIn,
    Node,
    Result,
    Value,
    index_array,
)


class BlockSource:
    """The source of one basic block; `emit` writes it.

    Args:
        builder: a block whose instructions have all been lowered.

    Attributes:
        space: names that the source refers to.
        lines: (extra indentation, text, instruction index) each.
    """

    def __init__(self, builder: BlockBuilder) -> None:
        self._builder, self.space = builder, builder.space
        self.lines: list[tuple[int, str, int]] = []
        self._names = 0

    def put(self, text: str, node: Node, indent: int = 0) -> None:
        self.lines.append((indent, text, node.instruction.index))

    def put_block(self, target: str, node: Node) -> None:
        """The warp waits and executes this block again when it is resumed."""
        self.put(f"if {target} is None:", node)
        self.put("C[pc] -= 1", node, 1)
        if self._builder.divergent:
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
            raise AssertionError(f"a varying value is used where lanes must agree: {self._builder.instruction}")
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
        finals = self._builder.finals(live_out)
        needed = self._builder.needed([value for _, value in finals] + ([condition] if condition is not None else []))
        levels: dict[int, tuple[list[Node], list[Node]]] = {}
        for node in self._builder.nodes:
            if node in needed or node.anchor is not None and node.anchor.effects:
                levels.setdefault(node.level, ([], []))[node.anchor is not None].append(node)
        for level in sorted(levels):
            pure, anchors = levels[level]
            self._emit_pure(pure)
            self._emit_anchors(anchors)
        test = ""
        if condition is not None:
            test = self.scalar(condition) if condition.uniform else self.mask(condition)
            if isinstance(condition, LiveIn) and any(self._builder.variables[name] == test for name, _ in finals):
                # Before its register is overwritten.
                self.lines.append((0, f"test = {test}", self._builder.instruction.index))
                test = "test"
        self._emit_finals(finals)
        return test

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
        last = self._builder.nodes[-1] if self._builder.nodes else None
        index = self._builder.instruction.index if last is None else last.instruction.index
        first = [(n, v) for n, v in finals if isinstance(v, LiveIn)]
        rest = [(n, v) for n, v in finals if not isinstance(v, LiveIn)]
        texts = [(self._builder.variables[n], self._final(n, v)) for n, v in first]
        if texts:
            self.lines.append((0, f"{', '.join(t for t, _ in texts)} = {', '.join(s for _, s in texts)}", index))
        for name, value in rest:
            self.lines.append((0, f"{self._builder.variables[name]} = {self._final(name, value)}", index))

    def _final(self, name: str, value: Value) -> str:
        variable = self._builder.variables[name]
        if name not in self._builder.varying:
            return self.scalar(value)
        if value.bits == 1:
            mask = self.mask(value)
            return f"{mask} & M | {variable} & ~M" if self._builder.divergent else mask
        text = self.lanes(value, CANONICAL[value.bits])
        if self._builder.divergent and value not in self._builder.of_whole_warps:
            return f"where(LANES[M], {text}, {variable})"
        return f"spread({text})" if value.uniform else text
