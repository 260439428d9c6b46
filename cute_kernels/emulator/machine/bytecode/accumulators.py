"""wgmma.mma_async in bytecode: which values of a basic block are accumulators, where they are, and when they are known.

A wgmma reads and writes the registers that it names where they lie, when it completes. A value that is needed after
its register became an accumulator is put aside first. Where a kernel touches accumulators in flight,
``core/registers_in_flight.c`` copies, reads and overwrites what may still have to be filled in.
"""

from collections.abc import Sequence
from typing import Protocol

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.instructions.wgmma import COMMIT, WAIT, MmaAsync
from cute_kernels.emulator.isa.ptx.families import written
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.bytecode.program import Program, row_bytes
from cute_kernels.emulator.machine.bytecode.sites import Key, key_of
from cute_kernels.emulator.machine.graph.block import BlockBuilder, Operation
from cute_kernels.emulator.machine.graph.values import LiveIn, Node, Result, Value

_ROW = row_bytes(32, False)
_FOR_WGMMA = CONSTANTS["FLAG"]  # of ``registers_move``


class Emitter(Protocol):
    """Emits the block: as much of `emitter.BlockEmitter` as is asked here."""

    program: Program
    builder: BlockBuilder
    instruction: Instruction

    def live(self, value: LiveIn) -> int: ...
    def where(self, value: LiveIn | Result) -> int: ...
    def operand(self, value: Value, lanes: bool) -> int: ...
    def scratch(self, nbytes: int) -> int: ...
    def used_after(self, key: Key, index: int) -> bool: ...
    def put_aside(self, value: LiveIn | Result) -> None: ...


class Accumulators:
    """Accumulators of one block, while its nodes are emitted. ``emitter``: of the block. ``ages``: registers' variables
    that may be in flight when the block begins, and how many groups were committed since; None: nothing but wgmmas
    touches what is in flight in this kernel."""

    def __init__(self, emitter: Emitter, ages: dict[str, int] | None) -> None:
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
        found = self._emitter.scratch(_ROW)
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
