"""Names of mbarriers: those that the launch gives, else the variable in the call that initialises them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable

from cute_kernels.emulator.diagnostics.model import Barrier, Place
from cute_kernels.emulator.diagnostics.sources import last_name, syntax_tree
from cute_kernels.emulator.facts import BarrierState, WarpName
from cute_kernels.emulator.ptx.program import Instruction


class Barriers:
    """The mbarriers of a cluster, as reports have them.

    Args:
        states: all that are known.
        place: of an instruction.
    """

    def __init__(self, states: Iterable[BarrierState], place: Callable[[Instruction], Place]) -> None:
        self._place = place
        self._variables: dict[str, set[int]] = {}
        for state in states:
            if variable := self._variable(state):
                self._variables.setdefault(variable, set()).add(state.offset)

    def barrier(self, state: BarrierState) -> Barrier:
        """One of them."""
        init = None
        if state.init is not None:
            init = self._place(state.init)
            if (who := WarpName.of(state.initialiser)) is not None:
                init = Place(init.source, init.inlined_at, init.ptx_line, init.instruction, (who,))
        return Barrier(
            self._name(state), state.cta, state.offset, _words(state), state.live, state.phase, state.expected,
            state.pending, state.tx, init, WarpName.of(state.last_arrival),
        )  # fmt: skip

    def _name(self, state: BarrierState) -> str:
        variable = state.name or self._variable(state)
        # An array of barriers is initialised by one call: which of them it is says its place among those.
        stages = sorted(self._variables.get(variable, ()))
        return f"{variable}[{stages.index(state.offset)}]" if not state.name and len(stages) > 1 else variable

    def _variable(self, state: BarrierState) -> str:
        if state.init is None or (source := self._place(state.init).source) is None:
            return ""
        return variable_in_call(source.path, source.line)


def variable_in_call(path: str, line: int) -> str:
    """The variable that the first argument of a call in a line is made of, "" if there is none: ``full + i`` is full.

    Of several calls it is the one that ends last, since a location is that of the call's name.
    """
    tree = syntax_tree(path)
    if tree is None:
        return ""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    calls = [call for call in calls if call.lineno <= line <= (call.end_lineno or 0)]
    inits = [call for call in calls if "init" in last_name(call.func)]
    for call in inits or calls:
        if name := _variable(call.args[0]):
            return name
    return ""


def _variable(node: ast.expr) -> str:
    while True:
        if isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value  # storage.full.data_ptr()
        else:
            return last_name(node)


def _words(state: BarrierState) -> str:
    if not state.live:
        return "not initialised"
    parts = []
    if state.pending:
        parts.append(f"{state.pending} of {state.expected} arrivals missing")
    if state.tx > 0:
        parts.append(f"{state.tx} bytes missing")
    if state.tx < 0:
        parts.append(f"{-state.tx} bytes more than announced")
    return f"in phase {state.phase}: {', '.join(parts) or 'complete'}"
