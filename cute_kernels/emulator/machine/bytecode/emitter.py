"""One basic block's graph of values (`block.BlockBuilder`) to bytecode.

The nodes are emitted in program order. What the core does not know becomes a *site*: a call of the Python function that
the node names, with operands and results in the rows of the exchange area (`memory_tables`).
"""

from __future__ import annotations

from collections.abc import Sequence

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.core.pure_operations import pure_operation
from cute_kernels.emulator.isa.instructions.memory import Access
from cute_kernels.emulator.isa.instructions.wgmma import COMMIT, WAIT, MmaAsync
from cute_kernels.emulator.isa.ptx.families import written
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.bytecode.program import Program, row_bytes
from cute_kernels.emulator.machine.bytecode.sites import Key, Row, Site, key_of
from cute_kernels.emulator.machine.graph.block import BlockBuilder, Call, Operation
from cute_kernels.emulator.machine.graph.values import Constant, LiveIn, Node, Pack, Result, Value
from cute_kernels.emulator.machine.state.smem import PARAM_WINDOW, parameter_offset

_ROWS = CONSTANTS["ROWS_A"], CONSTANTS["ROWS_B"], CONSTANTS["ROWS_D"]  # of `BlockEmitter._operation`
_LISTED = CONSTANTS["LISTED"]
_TOGETHER = "load_together"
_ROW = row_bytes(32, False)
_FOR_WGMMA = CONSTANTS["FLAG"]  # of ``registers_move``
_ONE_ADDRESS = (_TOGETHER, "tensor_load", "tensor_store")  # accesses of all lanes


def _kind(bits: int) -> str:
    return "pred" if bits == 1 else f"u{bits}"


class BlockEmitter:
    """Emits the nodes of a builder, a block whose instructions have all been lowered.

    Results are in places of their own until they were used for the last time; the value that a register has at the end
    of the block is computed where the register is, if nothing asks for the old value any more. ``number``: of the
    block; ``in_flight``: as ``ages`` of `Accumulators`."""

    def __init__(
        self, program: Program, builder: BlockBuilder, number: int, in_flight: dict[str, int] | None = None
    ) -> None:
        self.program, self.builder, self.number = program, builder, number
        self.instruction = builder.instruction  # whose node is emitted
        self.accumulators = Accumulators(self, in_flight)
        self._free = program.places()
        self._places: dict[Key, int] = {}  # of results, and of live registers that were put aside
        self._spread: dict[Key, int] = {}  # of uniform values in every lane
        self._targets: dict[Value, int] = {}  # results that are computed where a register is
        self._last: dict[Key, int] = {}  # index of the node that uses a value last
        self._owned: dict[Key, list[tuple[int, int]]] = {}  # places to be freed when a value is not used any more
        self._scratch: list[tuple[int, int]] = []  # places for one node

    def live(self, value: LiveIn) -> int:
        """Where a register or a warp's constant is."""
        name = value.variable
        if name in self._places:
            return self._places[name]
        layout = self.program.layout
        if value.of_warp is not None and name not in layout.slots:
            layout.of_warps.append((name, value.of_warp, value.bits, value.uniform))
        return layout.slot(name, value.bits, value.uniform)

    def take(self, nbytes: int, owner: Key | None = None) -> int:
        """A place for an intermediate value, while its owner or, without one, the present node needs it."""
        place = self.program.temporary(self._free, nbytes)
        (self._scratch if owner is None else self._owned.setdefault(owner, [])).append((nbytes, place))
        return place

    def _release(self, key: Key) -> None:
        for nbytes, place in self._owned.pop(key, ()):
            self._free[nbytes].append(place)
        self._spread.pop(key, None)

    def define(self, result: Result) -> int:
        """The place of a result."""
        place = self._targets.get(result)
        if place is None:
            place = self.take(row_bytes(result.bits, result.uniform), result)
        self._places[result] = place
        return place

    def used_after(self, key: Key, index: int) -> bool:
        """Whether a node behind this one, or what comes after the block, uses a value."""
        return self._last.get(key, -1) > index

    def where(self, value: LiveIn | Result) -> int:
        """The place of a value, which may have to be filled in there."""
        if isinstance(value, LiveIn):
            return self.live(value)
        variable = self.accumulators.in_place.get(value)
        return self._places[value] if variable is None or value in self._places else self.program.layout.slots[variable]

    def operand(self, value: Value, lanes: bool) -> int:
        """Where a value is, one for each lane or (uniform values only) the same for all."""
        if isinstance(value, Constant):
            return self.program.layout.constant(value.value, value.bits, lanes)
        place = self.where(value)
        if key_of(value) in self.accumulators.values:
            return self.accumulators.read(place)
        if value.uniform and lanes:
            key = key_of(value)
            if key not in self._spread:
                self._spread[key] = self.take(row_bytes(value.bits, False), key)
                self.program.put(f"spread_{_kind(value.bits)}", d=self._spread[key], a=place)
            return self._spread[key]
        if not value.uniform and not lanes:
            raise AssertionError(f"a varying value is used where lanes must agree: {self.builder.instruction}")
        return place

    def word(self, value: Value) -> int:
        """A value of the first lane that executes, or of all, as 64 bits."""
        if value.uniform:
            return self.operand(value, False)
        place = self.take(8)
        self.program.put(f"lane_{_kind(value.bits)}", d=place, a=self.operand(value, True), c=CONSTANTS["FLAG"])
        return place

    def emit(self, live_out: frozenset[str], condition: Value | None) -> None:
        """Emits all nodes that matter and the stores of live registers."""
        finals = self.builder.finals(live_out)
        nodes = self._order([value for _, value in finals] + ([condition] if condition is not None else []))
        finals += self.accumulators.restored(live_out, nodes)
        ending = self._find_last_uses(nodes, finals, condition)
        self._choose_targets(nodes, finals)
        for index, node in enumerate(nodes):
            self.instruction = node.instruction
            if node.anchor is None:
                self._pure(node)
            else:
                self._anchor(node, index)
            self.accumulators.pass_by(node)
            for nbytes, place in self._scratch:
                self._free[nbytes].append(place)
            self._scratch.clear()
            for key in ending.get(index, ()):
                self._release(key)
            for result in node.results:
                if result not in self._last:
                    self._release(result)
        self._finals(finals, condition)

    def _order(self, roots: list[Value]) -> list[Node]:
        needed, detectors = self.builder.needed(roots), self.program.detectors
        return [
            node
            for node in self.builder.nodes
            if (node in needed or node.anchor is not None and node.anchor.effects)
            and (detectors or not getattr(node.anchor, "watched", False))
        ]

    def _find_last_uses(
        self, nodes: Sequence[Node], finals: Sequence[tuple[str, Value]], condition: Value | None
    ) -> dict[int, list[Key]]:
        """Fills in `_last`; what is used last by each node."""

        def use(value: Value, index: int) -> None:
            if isinstance(value, Pack):
                for part in value.parts:
                    use(part, index)
            elif not isinstance(value, Constant):
                self._last[key_of(value)] = index

        for index, node in enumerate(nodes):
            for value in node.args:
                use(value, index)
            if node.guard is not None:
                use(node.guard, index)
        for value in [value for _, value in finals] + ([condition] if condition is not None else []):
            use(value, len(nodes))
        ending: dict[int, list[Key]] = {}
        for key, index in self._last.items():
            ending.setdefault(index, []).append(key)
        return ending

    def _choose_targets(self, nodes: Sequence[Node], finals: Sequence[tuple[str, Value]]) -> None:
        builder = self.builder
        numbers = {node: index for index, node in enumerate(nodes)}
        blocking = [i for i, node in enumerate(nodes) if getattr(node.anchor, "blocking", False)]
        first = blocking[-1] if blocking else 0  # before it, registers are read again when the block runs again
        products = {
            item.name
            for node in nodes
            if isinstance(node.anchor, MmaAsync)
            for item in node.instruction.operands[0].items
        }
        for register, value in finals:
            uniform = register not in builder.varying
            if not isinstance(value, Result) or value in self._targets or value.uniform != uniform:
                continue
            if register in products or isinstance(value.node.anchor, MmaAsync) or builder.divergent and not uniform:
                continue
            variable, index = register, numbers[value.node]
            if variable in self.accumulators.slots:
                continue
            if first <= index and self._last.get(variable, -1) <= index:
                self._targets[value] = self.program.layout.slot(variable, builder.bits_of(register), uniform)

    def _pure(self, node: Node) -> None:
        result = node.results[0]
        lanes = not result.uniform
        name, constant = pure_operation(node.op.name)
        operands = [self.operand(arg, lanes) for arg in node.args]
        if len(operands) == 4:
            constant = operands[3]
        self.program.put(name, lanes=lanes, d=self.define(result), imm=constant, **dict(zip("abc", operands)))

    def _anchor(self, node: Node, index: int) -> None:
        if isinstance(node.anchor, MmaAsync):
            self.accumulators.emit(node, index)
            return
        memory, operation = isinstance(node.anchor, Access), isinstance(node.anchor, Operation)
        if memory:  # operands that are spread before the guard, for later nodes too
            one = node.anchor.name in _ONE_ADDRESS
            for value in (*(() if one else (node.anchor.address,)), *node.anchor.values):
                self.operand(value, True)
        if operation:
            given = node.anchor.operands
            lanes = node.anchor.in_lanes
            operands = [0 if value is None else self.operand(value, lanes or not value.uniform) for value in given]
        for result in node.results:
            self.define(result)
        guard = None
        if node.guard is not None:
            uniform = node.guard.uniform
            guard = self.program.put("guard", lanes=not uniform, a=self.operand(node.guard, not uniform))
        start = len(self.program.code)
        if operation:
            self._operation(node, operands)
        elif memory:
            self._access(node)
        else:
            self._python(node, node.anchor)
        if guard is not None:
            guard[-1] = len(self.program.code) - start
            self.program.put("guard_end")

    def _python(self, node: Node, called: Call) -> None:
        """Calls Python. A blocking site that has to wait leaves the interpreter, or the block runs again."""
        program, rows = self.program, []
        arguments = [self._argument(arg, rows) for arg in called.args]
        program.reserve(max(len(rows), len(node.results)))
        for value, index in rows:
            lanes = not value.uniform
            program.put(f"put_{_kind(value.bits)}", lanes=lanes, d=index, a=self.operand(value, lanes))
        site = program.site(Site(node.instruction, called.function, arguments, node.results, called.blocking))
        program.put("call_blocking" if called.blocking else "call", a=site, b=self.number if called.blocking else 0)
        for index, result in enumerate(node.results):
            program.put(f"get_{_kind(result.bits)}", lanes=not result.uniform, d=self._places[result], a=index)

    def _argument(self, arg: object, rows: list[tuple[Value, int]]) -> object:
        """An argument of `Site`; values that vary get a row."""
        if isinstance(arg, Constant):
            return bool(arg.value) if arg.bits == 1 else arg.value
        if isinstance(arg, Value):
            rows.append((arg, len(rows)))
            return Row(len(rows) - 1, arg.bits, arg.uniform)
        if isinstance(arg, (tuple, list)):
            return tuple(self._argument(item, rows) for item in arg)
        return arg

    def _operation(self, node: Node, places: Sequence[int]) -> None:
        anchor, operands = node.anchor, node.anchor.operands
        if anchor.in_lanes:
            results = [self._places[result] for result in node.results]
            where, operands = {"b": self.program.list([*anchor.facts, *places, *results])}, ()
        elif anchor.facts:
            rows = [0 if value is None or value.uniform else value.bits // 8 for value in operands]
            items = [_LISTED * place + nbytes for place, nbytes in zip(places, rows)]
            where, operands = {"b": self.program.list([*anchor.facts, *items])}, ()
        else:
            where = dict(zip("abd", places))
        flags = anchor.flags | sum(row for row, value in zip(_ROWS, operands) if not value.uniform)
        flags |= CONSTANTS["WIDE"] * any(value.bits == 64 for value in operands)
        if node.results and not anchor.in_lanes:
            where["d"] = self._places[node.results[0]]
        imm = anchor.order | self.number << 8 | node.instruction.index << 32
        self.program.put(anchor.name, c=flags, imm=imm, **where)

    def _access(self, node: Node) -> None:
        anchor, program = node.anchor, self.program
        if anchor.values:
            elements = [self.operand(value, True) for value in anchor.values]
        else:
            elements = [self._places[result] for result in node.results]
        name, together = anchor.name, anchor.name in _ONE_ADDRESS
        if name == _TOGETHER and self._parameters(anchor, elements):
            return
        place = self.word(anchor.address) if together else self.operand(anchor.address, True)
        operands = program.list([node.instruction.index, *anchor.facts, *elements, 0])
        program.put(name if together else f"{name}_at_u{anchor.address.bits}", a=place, b=operands, imm=anchor.offset)

    def _parameters(self, anchor: Access, elements: Sequence[int]) -> bool:
        """A load of parameters that there are, at a constant address."""
        (space, size, _), address, count = anchor.facts, anchor.address, len(elements)
        if not isinstance(address, Constant):
            return False
        if space != CONSTANTS["SPACE_PARAM"] and (space != CONSTANTS["SPACE_GENERIC"] or address.value < PARAM_WINDOW):
            return False
        place, end = parameter_offset(address.value), self.builder.context.kernel.parameter_bytes
        if place < 0 or place % (size * count) or place + size * count > end:
            return False
        self.program.put("parameters", a=count, b=size, c=self.program.list(elements), imm=place)
        return True

    def put_aside(self, value: LiveIn | Result) -> None:
        """Copies what a register holds, which is about to be overwritten."""
        key = key_of(value)
        if key in self._places:
            return
        if key in self.accumulators.values:
            self._places[key] = self.accumulators.copy(self.where(value))
            return
        place = self.take(row_bytes(value.bits, value.uniform), key)
        name = f"move_{_kind(value.bits)}" if not value.uniform else "move_u64"
        self.program.put(name, lanes=not value.uniform, d=place, a=self.where(value))
        self._places[key] = place

    def _finals(self, finals: Sequence[tuple[str, Value]], condition: Value | None) -> None:
        builder, program, in_flight = self.builder, self.program, self.accumulators.values
        changed = {register for register, _ in finals}
        for value in [value for _, value in finals] + ([condition] if condition is not None else []):
            if isinstance(value, LiveIn) and value.variable in changed and value.variable not in in_flight:
                self.put_aside(value)
        for register, value in self.accumulators.finals(finals):
            variable, bits = register, builder.bits_of(register)
            if self.accumulators.in_place.get(value) == variable:
                continue
            uniform = register not in builder.varying
            place = program.layout.slot(variable, bits, uniform)
            if self._targets.get(value) == place:
                continue
            if uniform:
                program.put("move_u64", lanes=False, d=place, a=self.operand(value, False))
            elif builder.divergent:
                program.put(f"merge_{_kind(bits)}", d=place, a=self.operand(value, True))
            elif value.uniform and not isinstance(value, Constant) and key_of(value) not in self._spread:
                program.put(f"spread_{_kind(bits)}", d=place, a=self.operand(value, False))
            else:
                program.put(f"move_{_kind(bits)}", d=place, a=self.operand(value, True))


class Accumulators:
    """Accumulators of wgmmas of one block, while its nodes are emitted: where they are, and when they are known.

    A wgmma reads and writes the registers that it names where they lie, when it completes. A value that is needed after
    its register became an accumulator is put aside first. Where a kernel touches accumulators in flight,
    ``core/registers_in_flight.c`` copies, reads and overwrites what may still have to be filled in.

    ``ages``: registers' variables that may be in flight when the block begins, and how many groups were committed
    since; None: nothing but wgmmas touches what is in flight in this kernel."""

    def __init__(self, emitter: BlockEmitter, ages: dict[str, int] | None) -> None:
        self._emitter, self._followed = emitter, ages is not None
        self.values: dict[Key, int] = dict(ages or {})  # keys of values that may be in flight now, with their ages
        self.slots: dict[str, int] = dict(ages or {})  # variables whose places may be filled in by and by, likewise
        self.in_place: dict[Value, str] = {}  # results of wgmmas of this block: the variable that they are in
        self._newest: dict[str, Result] = {}  # of variables that have been accumulators in this block: which

    def pass_by(self, node: Node) -> None:
        """A node has been emitted."""
        if not self._followed or not isinstance(node.anchor, (MmaAsync, Operation)):
            return
        if isinstance(node.anchor, MmaAsync):
            self.values.update(dict.fromkeys(node.results, 0))
            self.slots.update((self.in_place[result], 0) for result in node.results)
            return
        for ages in (self.values, self.slots):
            if node.anchor.name == COMMIT:
                ages.update([(key, age + 1) for key, age in ages.items()])
            elif node.anchor.name == WAIT:
                for key in [key for key, age in ages.items() if age > node.anchor.order]:
                    del ages[key]

    def emit(self, node: Node, index: int) -> None:
        """The wgmma of a node, the ``index``-th of its block."""
        emitter, anchor = self._emitter, node.anchor
        program = emitter.program
        names = [item.name for item in node.instruction.operands[0].items]
        offsets = [program.layout.slot(name, 32, False) for name in names]
        old = [self._newest.get(name, name) for name in names]  # keys of what is in these places
        self._make_way(node, index, names, old)
        self._write([pair for pair, key in zip(zip(names, anchor.accumulators), old) if key_of(pair[1]) != key])
        for name, result in zip(names, node.results):
            self.in_place[result] = name
            self._newest[name] = result
        program.wgmmas.append(anchor.form)
        self._put(node, offsets)

    def _make_way(self, node: Node, index: int, names: Sequence[str], old: Sequence[Key]) -> None:
        """Puts aside what is in the places of a wgmma's accumulators and is used later, or by it in another role."""
        uses: dict[Key, list[int]] = {}
        for position, value in enumerate(node.args):
            uses.setdefault(key_of(value), []).append(position)
        for j, (name, key) in enumerate(zip(names, old)):
            if self._emitter.used_after(key, index) or any(position != j for position in uses.get(key, ())):
                self._emitter.put_aside(key if isinstance(key, Result) else LiveIn(name, 32, False))

    def _write(self, pairs: Sequence[tuple[str, Value]]) -> None:
        """Gives variables their values, which lie in the place of none of them."""
        emitter = self._emitter
        slots = emitter.program.layout.slots
        moves = [(emitter.where(value), slots[name]) for name, value in pairs if key_of(value) in self.values]
        others = [(name, value) for name, value in pairs if key_of(value) not in self.values]
        places = [emitter.operand(value, True) for _, value in others]
        self._move(moves, _FOR_WGMMA)
        self.overwrite([name for name, _ in others])
        for (name, _), place in zip(others, places):
            emitter.program.put("move_u32", d=slots[name], a=place)

    def _put(self, node: Node, offsets: Sequence[int]) -> None:
        """The core's instruction, for the latest form."""
        anchor, emitter, program = node.anchor, self._emitter, self._emitter.program
        scalars = [anchor.accumulate, anchor.b, *(() if anchor.form.a_in_registers else anchor.a)]
        words = [emitter.operand(value, not value.uniform) for value in scalars]
        fragments = [emitter.operand(value, True) for value in anchor.a] if anchor.form.a_in_registers else []
        words += [0] * (3 - len(words))
        listed = program.list([len(program.wgmmas) - 1, *words, *fragments, *offsets])
        varying = sum(1 << bit for bit, value in enumerate(scalars) if not value.uniform)
        program.put("wgmma", b=listed, c=varying, imm=node.instruction.index << 32)

    def restored(self, live_out: frozenset[str], nodes: Sequence[Node]) -> list[tuple[str, Value]]:
        """Registers that hold at the end of the block what they held before, and an accumulator in between."""
        if not self._followed:
            return []
        builder = self._emitter.builder
        wgmmas = [node.instruction for node in nodes if isinstance(node.anchor, MmaAsync)]
        names = {item.name for instruction in wgmmas for item in instruction.operands[0].items}
        found = [(name, builder.register(name)) for name in sorted(names & live_out)]
        return [(name, value) for name, value in found if key_of(value) == name]

    def finals(self, finals: Sequence[tuple[str, Value]]) -> list[tuple[str, Value]]:
        """Gives registers the values that are in flight. Returns the others, whose registers may be written then."""
        emitter, moves, others = self._emitter, [], []
        for register, value in finals:
            if key_of(value) not in self.values:
                others.append((register, value))
                continue
            place = emitter.program.layout.slot(register, 32, False)
            if emitter.where(value) != place:
                moves.append((emitter.where(value), place))
            emitter.instruction = self._writer(register)
        self._move(moves)
        self.overwrite([register for register, _ in others])
        return others

    def _writer(self, register: str) -> Instruction:
        """The last instruction of the block that writes a register."""
        instructions, last = self._emitter.builder.context.kernel.instructions, self._emitter.builder.instruction.index
        return next(each for each in reversed(instructions[: last + 1]) if register in written(each))

    def copy(self, place: int) -> int:
        """A place of its own for what is in flight, which may be filled in long after the block."""
        target = self._emitter.program.layout.new(_ROW)
        self._move([(place, target)], _FOR_WGMMA)
        return target

    def read(self, place: int) -> int:
        """Offset of the value that an instruction reads from a register."""
        found = self._emitter.take(_ROW)
        self._emitter.program.put("registers_read", a=place, d=found)
        return found

    def _move(self, pairs: Sequence[tuple[int, int]], flags: int = 0) -> None:
        """Copies from place to place, all at once, with what will be filled in."""
        if pairs:
            program, places = self._emitter.program, [place for side in zip(*pairs) for place in side]
            place = self._emitter.instruction.index << 32
            program.put("registers_move", b=program.list([len(pairs), *places]), c=flags, imm=place)

    def overwrite(self, variables: Sequence[str]) -> None:
        """Notes that registers are about to be written, whatever a wgmma in flight will fill in."""
        program = self._emitter.program
        places = [program.layout.slots[name] for name in variables if name in self.slots]
        if places:
            program.put("registers_overwrite", b=program.list([len(places), *places]))
