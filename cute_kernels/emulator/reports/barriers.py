"""Names of mbarriers: those that the launch gives, else the variable in the call that initialises them, or that a
pipeline of CuTe DSL is assigned to; without such a call the array of shared memory that they lie in.
"""

import ast
from collections.abc import Callable, Iterable

from cute_kernels.emulator.facts import BarrierState, WarpName
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.reports.arrays import assigned_variable
from cute_kernels.emulator.reports.model import Barrier, Place, SourceLine
from cute_kernels.emulator.reports.sources import last_name, nodes, syntax_tree


class Barriers:
    """The mbarriers of a cluster, as reports have them. ``states``: all that are known; ``place``: of an
    instruction; ``array``: name of the array at an offset of shared memory, "" without one."""

    def __init__(
        self, states: Iterable[BarrierState], place: Callable[[Instruction], Place],
        array: Callable[[int], str] = lambda offset: "",
    ) -> None:
        self._place, self._array = place, array
        self._variables: dict[str, set[int]] = {}
        for state in states:
            if variable := self._variable(state):
                self._variables.setdefault(variable, set()).add(state.offset)

    def barrier(self, state: BarrierState) -> Barrier:
        """A barrier as reports show it."""
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
        if state.name or len(stages) < 2:
            return variable
        number, half = stages.index(state.offset), len(stages) // 2
        if len(stages) % 2 == 0 and self._has_both_kinds(state):
            return f"{variable}.{'full' if number < half else 'empty'}[{number % half}]"
        return f"{variable}[{number}]"

    def _variable(self, state: BarrierState) -> str:
        source = self._source(state)
        called = "" if source is None else variable_in_call(source.path, source.line)
        return called or self._array(state.offset)

    def _has_both_kinds(self, state: BarrierState) -> bool:
        """Whether a pipeline made it, whose full barriers lie in front of as many empty ones; not those of an order."""
        source = self._source(state)
        kind = "" if source is None else pipeline_in_call(source.path, source.line)[1]
        return bool(kind) and kind != "PipelineOrder"

    def _source(self, state: BarrierState) -> SourceLine | None:
        return None if state.init is None else self._place(state.init).source


def variable_in_call(path: str, line: int) -> str:
    """The variable that the first argument of a call in a line is made of, "" if there is none: ``full + i`` is full,
    and ``full[1]`` is itself, since elements of a list need not lie in its order.

    Of several calls it is the one that ends last, since a location is that of the call's name.
    """
    variable, pipeline = pipeline_in_call(path, line)
    if pipeline:
        return variable
    calls = [call for call in _calls(path, line) if call.args or call.keywords]
    inits = [call for call in calls if "init" in last_name(call.func)]
    named = (_variable([*call.args, *(each.value for each in call.keywords)][0]) for call in inits or calls)
    return next(filter(None, named), "")


def pipeline_in_call(path: str, line: int) -> tuple[str, str]:
    """The variable that a pipeline is assigned to whose ``create`` is called in a line, and its class; or "" twice."""
    for call in _calls(path, line):
        name = call.func
        if isinstance(name, ast.Attribute) and name.attr == "create" and last_name(name.value).startswith("Pipeline"):
            return assigned_variable(path, call.lineno, call.col_offset), last_name(name.value)
    return "", ""


def _calls(path: str, line: int) -> list[ast.Call]:
    tree = syntax_tree(path)
    calls = nodes(tree, ast.Call) if tree is not None else []
    return [call for call in calls if call.lineno <= line <= (call.end_lineno or 0)]


def _variable(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"{name}[{node.slice.value}]" if (name := _variable(node.value)) else ""
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
