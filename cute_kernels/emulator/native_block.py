"""One basic block's graph of values (`block.BlockBuilder`) to LLVM IR.

The nodes are emitted in program order; what native code cannot do becomes a *site*: a call of the Python function that
the node names, with operands and results in the rows of the exchange area (`native_memory`). Sites are numbered;
`Site.source` is the Python function that performs one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cute_kernels.emulator import native_floats  # noqa: F401 - registers its operations
from cute_kernels.emulator.block import BlockBuilder, Call
from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.decode import Instruction
from cute_kernels.emulator.instructions_memory import Load, Store, load_lanes, load_uniform, store_lanes
from cute_kernels.emulator.instructions_move import PARAM_WINDOW
from cute_kernels.emulator.instructions_wgmma import MmaAsync, mma_async_in_place
from cute_kernels.emulator.native import c_function
from cute_kernels.emulator.native_inline import INLINE, SILENT
from cute_kernels.emulator.native_memory import ROW, Tables
from cute_kernels.emulator.native_ops import LANES, Code, Emitter, emitter_of
from cute_kernels.emulator.values import (
    CANONICAL,
    DTYPES,
    Constant,
    LiveIn,
    Namespace,
    Node,
    PureOp,
    Result,
    Value,
)


class NotNative(Exception):
    """A kernel that the native back end cannot run, and why: registers that are filled behind the warp's back."""


@dataclass(frozen=True)
class _Bound:
    """An argument of a site that is a name already."""

    name: str


@dataclass
class Site:
    """A place in native code that calls Python.

    Attributes:
        instruction: what it performs.
        source: body of ``def site(W, mask)`` that returns None where a blocking instruction has to wait.
        block: the basic block, for blocking instructions.
    """

    instruction: Instruction | None
    source: list[str]
    block: int


@dataclass
class Layout:
    """Where a warp's state is, in bytes from its start; grows while the kernel is translated.

    Attributes:
        slots: offset and width per register and per expression that is constant for a warp.
        expressions: of the latter, (expression, bits, uniform).
    """

    slots: dict[str, int] = field(default_factory=dict)
    expressions: list[tuple[str, int, bool]] = field(default_factory=list)
    size: int = 0

    def slot(self, name: str, bits: int, uniform: bool) -> int:
        if name not in self.slots:
            nbytes = 8 if uniform or bits == 1 else LANES * bits // 8
            align = min(64, nbytes)
            self.slots[name] = -(-self.size // align) * align
            self.size = self.slots[name] + nbytes
        return self.slots[name]


class Program:
    """What the blocks of a kernel share: code, sites, state layout, helper functions.

    ``detectors``: whether instructions have to be reported to them.
    """

    def __init__(self, space: Namespace, registers: set[str], header: int, detectors: bool) -> None:
        self.detectors = detectors
        self.code = Code()
        self.space = space
        self.registers = registers
        self.layout = Layout(size=header)
        self.sites: list[Site] = []
        self.rows = 1

    def site(self, instruction: Instruction | None, source: list[str], block: int = -1) -> int:
        self.sites.append(Site(instruction, source, block))
        return len(self.sites) - 1

    def reserve(self, rows: int) -> None:
        """Makes the exchange area at least this large."""
        self.rows = max(self.rows, rows)


class BlockEmitter:
    """Emits the nodes of a builder.

    Args:
        builder: a block whose instructions have all been lowered.
        number: index of the block.
    """

    def __init__(self, program: Program, builder: BlockBuilder, number: int) -> None:
        self.program, self.builder, self.number = program, builder, number
        self.code = program.code
        self.head: list[str] = []
        self.names: dict[Any, str] = {}
        self._in_place: dict[Value, str] = {}  # accumulators of wgmmas of this block: the variable that they are in
        self._live: dict[tuple[str, int], str] = {}
        self.emitters = {lanes: Emitter(self.code, lanes) for lanes in (False, True)}

    # --- values -----------------------------------------------------------------------------------------------------

    def live(self, value: LiveIn) -> str:
        """What a register or a warp's constant holds when the block is entered; loaded once, at its start."""
        name = value.variable
        key = (name, value.bits)
        if key not in self._live:
            known = name in self.program.registers
            if not known and name not in self.program.layout.slots:
                self.program.layout.expressions.append((name, value.bits, value.uniform))
            offset = self.program.layout.slot(name, value.bits, value.uniform)
            self._live[key] = self._load(offset, value.bits, value.uniform)
        return self._live[key]

    def _load(self, offset: int, bits: int, uniform: bool) -> str:
        """Code at the head of the block that reads a slot."""
        pointer, loaded = self.code.fresh("p"), self.code.fresh("l")
        self.head.append(f"{pointer} = getelementptr i8, ptr %s, i64 {offset}")
        if bits == 1:
            stored = "i8" if uniform else "i32"
            self.head.append(f"{loaded} = load {stored}, ptr {pointer}")
            result = self.code.fresh("l")
            cast = f"trunc i8 {loaded} to i1" if uniform else f"bitcast i32 {loaded} to <{LANES} x i1>"
            self.head.append(f"{result} = {cast}")
            return result
        type_ = f"i{bits}" if uniform else f"<{LANES} x i{bits}>"
        align = min(64, 8 if uniform else LANES * bits // 8)
        self.head.append(f"{loaded} = load {type_}, ptr {pointer}, align {align}")
        return loaded

    def operand(self, value: Value, lanes: bool) -> str:
        """A value as an operand over all lanes or (uniform values only) as a scalar."""
        if isinstance(value, Constant):
            return self.emitters[lanes].const(value.value, value.bits)
        if value in self._in_place:
            raise NotNative(f"an accumulator in flight is used (PTX line {self.builder.instruction.line})")
        name = self.live(value) if isinstance(value, LiveIn) else self.names[value]
        if value.uniform and lanes:
            return self.splat(name, value.bits)
        if not value.uniform and not lanes:
            raise AssertionError(f"a varying value is used where lanes must agree: {self.builder.instruction}")
        return name

    def splat(self, name: str, bits: int) -> str:
        one = self.code.let(f"insertelement <{LANES} x i{bits}> poison, i{bits} {name}, i32 0")
        return self.code.let(
            f"shufflevector <{LANES} x i{bits}> {one}, <{LANES} x i{bits}> poison, <{LANES} x i32> zeroinitializer"
        )

    def mask(self, value: Value) -> str:
        """A predicate as an i32 of lanes."""
        if value.uniform:
            return self.code.let(f"sext i1 {self.operand(value, False)} to i32")
        return self.code.let(f"bitcast <{LANES} x i1> {self.operand(value, True)} to i32")

    # --- exchange area ----------------------------------------------------------------------------------------------

    def row(self, index: int) -> str:
        self.program.reserve(index + 1)
        return self.code.let(f"getelementptr i8, ptr %x, i64 {index * ROW}")

    def write_row(self, index: int, value: Value, lanes: bool) -> None:
        pointer = self.row(index)
        if value.bits == 1:
            text = self.mask(value) if lanes or not value.uniform else None
            if text is None:
                text = self.code.let(f"zext i1 {self.operand(value, False)} to i32")
            wide = self.code.let(f"zext i32 {text} to i64")
            self.code.put(f"store i64 {wide}, ptr {pointer}")
        elif lanes:
            self.code.put(f"store <{LANES} x i{value.bits}> {self.operand(value, True)}, ptr {pointer}, align 64")
        else:
            wide = self.emitters[False].resize(self.operand(value, False), value.bits, 64)
            self.code.put(f"store i64 {wide}, ptr {pointer}")

    def read_row(self, index: int, result: Result) -> None:
        """Reads a result of a site or of an access."""
        pointer = self.row(index)
        bits = result.bits
        if bits == 1:
            if result.uniform:
                self.names[result] = self.code.let(f"trunc i64 {self.code.let(f'load i64, ptr {pointer}')} to i1")
            else:
                word = self.code.let(f"load i32, ptr {pointer}")
                self.names[result] = self.code.let(f"bitcast i32 {word} to <{LANES} x i1>")
            return
        type_ = f"i{bits}" if result.uniform else f"<{LANES} x i{bits}>"
        self.names[result] = self.code.let(f"load {type_}, ptr {pointer}, align 64")

    # --- emission ---------------------------------------------------------------------------------------------------

    def emit(self, live_out: frozenset[str], condition: Value | None) -> None:
        """Emits all nodes that matter and the stores of live registers."""
        builder = self.builder
        finals = builder.finals(live_out)
        roots = [value for _, value in finals] + ([condition] if condition is not None else [])
        needed = builder.needed(roots)
        for node in builder.nodes:
            if node in needed or node.anchor is not None and node.anchor.effects:
                if node.anchor is None:
                    self._pure(node)
                else:
                    self._anchor(node)
        self._finals(finals)

    def _pure(self, node: Node) -> None:
        op, result = node.op, node.results[0]
        lanes = not result.uniform
        emit = emitter_of(op.name)
        if emit is not None:
            self.names[result] = emit(self.emitters[lanes], *(self.operand(arg, lanes) for arg in node.args))
            return
        for index, arg in enumerate(node.args):
            self.write_row(index, arg, lanes)
        source = _pure_source(op, result, self.program.space)
        self._call(node, self.program.site(node.instruction, source), "%M")
        self.read_row(0, result)

    def _anchor(self, node: Node) -> None:
        if isinstance(node.anchor, MmaAsync):
            self._wgmma(node)
            return
        memory = isinstance(node.anchor, (Load, Store))
        call = None if memory else node.anchor.as_call()
        if call is None and not memory:
            raise NotNative(f"{node.instruction.opcode} (PTX line {node.instruction.line})")
        function = None if memory else call[0]
        if not self.program.detectors and function in SILENT:
            return
        inline = INLINE.get(function)
        if inline is not None and node.guard is None and inline(self, node):
            return
        joined = None
        mask = "%M"
        if node.guard is not None:
            joined, mask = self._enter_guard(node.guard)
        if memory:
            self._access(node, mask)
        elif function is load_uniform:
            self._uniform_load(node, mask)
        else:
            self.python(node, mask)
        if joined is not None:
            self.code.put(f"br label %{joined}")
            self.code.put(f"{joined}:")
        for index, result in enumerate(node.results):
            if result not in self.names:
                self.read_row(index, result)

    def _wgmma(self, node: Node) -> None:
        """wgmma.mma_async on registers in place: their slots are read and written when the operation completes."""
        anchor, builder, layout = node.anchor, self.builder, self.program.layout
        offsets = []
        for item, value, result in zip(node.instruction.operands[0].items, anchor.accumulators, node.results):
            variable = builder.variables[item.name]
            if item.name not in builder.varying or builder.bits_of(item.name) != 32:
                raise NotNative(f"accumulator {item.name} (PTX line {node.instruction.line})")
            offsets.append(layout.slot(variable, 32, False))
            if self._in_place.get(value) != variable and not (
                isinstance(value, LiveIn) and value.variable == variable
            ):
                pointer = self.code.let(f"getelementptr i8, ptr %s, i64 {offsets[-1]}")
                self.code.put(f"store <{LANES} x i32> {self.operand(value, True)}, ptr {pointer}, align 64")
            self._in_place[result] = variable
        places = self.program.space.bind(np.array(offsets) // 4, "PLACES")
        form = self.program.space.bind(anchor.form, "FORM")
        a = tuple(anchor.a) if anchor.form.a_in_registers else anchor.a[0]
        self._python_call(node, mma_async_in_place, [_Bound(form), _Bound(places), a, anchor.b, anchor.accumulate])

    def _enter_guard(self, guard: Value) -> tuple[str, str]:
        """Branches around a node that no lane executes. Its operands are computed inside: later code shares none."""
        mask = "%M"
        if guard.uniform:
            test = self.operand(guard, False)
        else:
            mask = self.code.let(f"and i32 %M, {self.mask(guard)}")
            test = self.code.let(f"icmp ne i32 {mask}, 0")
        inside, joined = self.code.fresh("g")[1:], self.code.fresh("j")[1:]
        self.code.put(f"br i1 {test}, label %{inside}, label %{joined}")
        self.code.put(f"{inside}:")
        return joined, mask

    def _call(self, node: Node, site: int, mask: str, blocking: bool = False) -> None:
        """Calls Python. A blocking site that has to wait leaves native code, or goes back to the start of a block."""
        status = self.code.let(f"call i32 %cb(i32 {site}, i32 {mask})")
        fine = self.code.let(f"icmp eq i32 {status}, 0")
        go, leave = self.code.fresh("c")[1:], self.code.fresh("o")[1:]
        self.code.put(f"br i1 {fine}, label %{go}, label %{leave}")
        self.code.put(f"{leave}:")
        if blocking:
            again = self.code.let(f"icmp eq i32 {status}, {AGAIN}")
            self.code.put(f"br i1 {again}, label %dispatch, label %{leave}.r")
            self.code.put(f"{leave}.r:")
        self.code.put(f"ret i32 {status}")
        self.code.put(f"{go}:")

    def python(self, node: Node, mask: str) -> None:
        called, given = node.anchor.as_call()
        self._python_call(node, called, given, mask, node.results)

    def _python_call(
        self, node: Node, called: Callable[..., Any], given: Sequence[Any], mask: str = "%M",
        results: Sequence[Result] = (),
    ) -> None:  # fmt: skip
        blocking = isinstance(node.anchor, Call) and node.anchor.blocking
        rows: list[tuple[Value, int]] = []
        arguments = [self._argument(arg, rows) for arg in given]
        for value, index in rows:
            self.write_row(index, value, lanes=not value.uniform)
        function = self.program.space.bind(called, called.__name__)
        source = [f"r = {function}({', '.join(['W', 'mask', *arguments])})"]
        if blocking:
            source.append("if r is None: return 1")
        source += _store_results(results)
        self.program.reserve(len(results))
        if blocking:
            self.code.put(f"store i32 {self.number}, ptr %pc.p")
        site = self.program.site(node.instruction, source, self.number)
        self._call(node, site, mask, blocking=blocking)

    def _argument(self, arg: Any, rows: list[tuple[Value, int]]) -> str:
        if isinstance(arg, _Bound):
            return arg.name
        if isinstance(arg, Constant):
            return repr(bool(arg.value)) if arg.bits == 1 else repr(arg.value)
        if isinstance(arg, Value):
            rows.append((arg, len(rows)))
            return _fetch(arg, len(rows) - 1)
        if arg is None or isinstance(arg, (int, str, bool)):
            return repr(arg)
        if isinstance(arg, (tuple, list)):
            return "(" + "".join(self._argument(item, rows) + ", " for item in arg) + ")"
        return self.program.space.bind(arg, "obj")

    # --- memory -----------------------------------------------------------------------------------------------------

    def _access(self, node: Node, mask: str) -> None:
        anchor = node.anchor
        write = isinstance(anchor, Store)
        wide = self.emitters[True].resize(self.operand(anchor.base, True), anchor.base.bits, 64)
        address = self.emitters[True].bin("add", 64, wide, self.emitters[True].const(anchor.offset, 64))
        self.code.put(f"store <{LANES} x i64> {address}, ptr {self.row(0)}, align 64")
        count = len(anchor.values) if write else anchor.count
        if write:
            for index, value in enumerate(anchor.values):
                self.write_row(index + 1, value, lanes=True)
        dtype = self.program.space.bind(DTYPES[CANONICAL[anchor.size * 8]], f"u{8 * anchor.size}")
        bits = 8 * anchor.size
        addresses = "X64[0:1].view(s64).copy()"
        if write:
            function = self.program.space.bind(store_lanes, "store_lanes")
            data = f"X{bits}[1:{count + 1}].copy()"
            call = f"{function}(W, mask, {anchor.space!r}, {addresses}, {data}, {anchor.size}, {count}"
            source = [f"{call}, {anchor.strength})"]
        else:
            function = self.program.space.bind(load_lanes, "load_lanes")
            call = f"{function}(W, mask, {anchor.space!r}, {addresses}, {anchor.size}, {count}, {dtype}"
            source = [f"X{bits}[0:{count}] = {call}, {anchor.strength})"]
        self.program.reserve(count + 1)
        if anchor.strength is not None:  # the race detector has to know the order, which the log does not tell
            self._call(node, self.program.site(node.instruction, source), mask)
            return
        self._fast_or_python(node, anchor.space, write, anchor.size, count, mask, source)

    def _uniform_load(self, node: Node, mask: str) -> None:
        space, address, size, count, _ = node.anchor.args
        if isinstance(address, Constant) and PARAM_WINDOW <= address.value and space in ("param", "generic"):
            place = address.value - PARAM_WINDOW
            limit = self.builder.context.kernel.parameter_bytes
            if place % (size * count) == 0 and place + size * count <= limit:
                self._parameter(node, place, size)
                return
        # Which lanes load decides what the race detector says, and a log entry of one address could not tell.
        self.python(node, mask)

    def _parameter(self, node: Node, place: int, size: int) -> None:
        base = self.code.let(f"getelementptr i8, ptr %t, i64 {Tables.params.offset}")
        params = self.code.let(f"load ptr, ptr {base}")
        for index, result in enumerate(node.results):
            pointer = self.code.let(f"getelementptr i8, ptr {params}, i64 {place + index * size}")
            loaded = self.code.let(f"load i{8 * size}, ptr {pointer}, align 1")
            if node.guard is None:
                self.names[result] = loaded
            else:  # read back where both ways have joined
                self.code.put(f"store i{8 * size} {loaded}, ptr {self.row(index)}")

    def _fast_or_python(
        self,
        node: Node,
        space: str,
        write: bool,
        size: int,
        count: int,
        mask: str,
        source: list[str],
    ) -> None:
        site = self.program.site(node.instruction, source)
        numbers = node.instruction.index, CONSTANTS[f"SPACE_{space.upper()}"], int(write), size, count
        words = ", ".join(f"i32 {number}" for number in numbers)
        done = self.code.let(f"call i32 {c_function('warp_access')}(ptr %t, ptr %x, i32 {mask}, {words})")
        test = self.code.let(f"icmp ne i32 {done}, 0")
        fast, slow = self.code.fresh("f")[1:], self.code.fresh("s")[1:]
        self.code.put(f"br i1 {test}, label %{fast}, label %{slow}")
        self.code.put(f"{slow}:")
        self._call(node, site, mask)
        self.code.put(f"br label %{fast}")
        self.code.put(f"{fast}:")

    # --- registers --------------------------------------------------------------------------------------------------

    def _finals(self, finals: Sequence[tuple[str, Value]]) -> None:
        builder, layout = self.builder, self.program.layout
        for register, value in finals:
            if self._in_place.get(value) == builder.variables[register]:
                continue
            uniform = register not in builder.varying
            bits = builder.bits_of(register)
            offset = layout.slot(builder.variables[register], bits, uniform)
            text = self.operand(value, not uniform)
            if builder.divergent and not uniform:
                old = self.live(LiveIn(builder.variables[register], bits, False))
                text = self.emitters[True].select(bits, "%Mv", text, old)
            pointer = self.code.let(f"getelementptr i8, ptr %s, i64 {offset}")
            if bits == 1:
                cast = f"zext i1 {text} to i8" if uniform else f"bitcast <{LANES} x i1> {text} to i32"
                self.code.put(f"store {'i8' if uniform else 'i32'} {self.code.let(cast)}, ptr {pointer}")
            else:
                align = min(64, 8 if uniform else LANES * bits // 8)
                self.code.put(f"store {self.emitters[not uniform].type(bits)} {text}, ptr {pointer}, align {align}")


#: What a site returns to native code: go on, leave (the warp waits), leave (an error), run the block again.
GO, WAIT, ERROR, AGAIN = range(4)


def _fetch(value: Value, row: int) -> str:
    """Python source of an operand in the exchange area."""
    if value.uniform:
        return f"(Q[{row * ROW // 8}] != 0)" if value.bits == 1 else f"Q[{row * ROW // 8}]"
    # A copy: asynchronous operations may keep it.
    return f"Q[{row * ROW // 8}]" if value.bits == 1 else f"X{value.bits}[{row}].copy()"


def _store_results(results: Sequence[Result]) -> list[str]:
    if not results:
        return []
    first = results[0]
    if first.uniform or first.bits == 1:
        if len(results) == 1:
            return ["Q[0] = r"]
        return [f"Q[{i * ROW // 8}] = r[{i}]" for i in range(len(results))]
    if len(results) == 1:
        return [f"X{first.bits}[0] = r"]
    return [f"X{first.bits}[0:{len(results)}] = r"]


def _pure_source(op: PureOp, result: Result, space: Namespace) -> list[str]:
    """A pure operation that native code does not know."""

    def bits(type_: str) -> int:
        return 1 if type_ == "pred" else np.dtype(DTYPES[type_]).itemsize * 8

    widths = [bits(t) for t in op.inputs]
    if result.uniform and op.scalar is not None:
        words = [f"Q[{i * ROW // 8}]" for i in range(len(widths))]
        args = [f"({word} != 0)" if width == 1 else word for word, width in zip(words, widths)]
        return [f"Q[0] = {op.scalar.format(*args)}"]
    stop = ":1" if result.uniform else ""
    args = []
    for i, (type_, width) in enumerate(zip(op.inputs, widths)):
        if width == 1:
            args.append(f"LANES[Q[{i * ROW // 8}]]")
        else:
            view = "" if type_ == CANONICAL[width] else f".view({space.bind(DTYPES[type_], type_)})"
            args.append(f"X{width}[{i}{', ' + stop if stop else ''}]{view}")
    call = f"{space.bind(op.vector, op.name)}({', '.join(args)})"
    if op.output == "pred":
        return [f"Q[0] = bool({call}[0])" if result.uniform else f"Q[0] = mask_of({call})"]
    target = f"X{result.bits}[0{', ' + stop if stop else ''}]"
    return [f"{target} = {call}.view(u{result.bits})"]
