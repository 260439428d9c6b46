"""Control flow of a kernel: basic blocks, reconvergence points, live registers, and which registers are warp-uniform.

A register is *uniform* when all lanes that can read it read the same value. Uniform registers are held as Python
integers, all others as arrays of 32 lanes. A branch on a non-uniform predicate is *divergent*; its lanes meet again at
its immediate post-dominator, and the blocks in between (its *region*) run under a lane mask.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from cute_kernels.emulator.isa.ptx.families import CONTROL, find_family, read, registers_of, written
from cute_kernels.emulator.isa.ptx.program import Immediate, Instruction, Kernel, Operand, Register, Special, Symbol

#: Special registers that can differ between the lanes of a warp; the y and z coordinates only if warps span rows.
LANE_SPECIALS = ("%laneid", "%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt")
TID_SPECIALS = ("%tid.x", "%tid.y", "%tid.z")
_COMPARE_UNIFORM = {"lt": 0, "ge": 0, "gt": 31, "le": 31, "lo": 0, "hs": 0, "hi": 31, "ls": 31}


@dataclass
class Block:
    """Instructions ``[start, end)`` of the kernel, entered at the first and left at the last."""

    index: int
    start: int
    end: int
    # for a conditional branch the target first, then the fall-through. The number of blocks stands for the end of the
    # kernel
    successors: tuple[int, ...] = ()
    predecessors: list[int] = field(default_factory=list)
    live_in: frozenset[str] = frozenset()
    live_out: frozenset[str] = frozenset()
    divergent: bool = False  # can be executed by a part of the warp's lanes
    continues: bool = False  # no turn of a warp ends in front of it (`Family.own_turn`)


@dataclass
class Flow:
    """Result of `analyse`."""

    kernel: Kernel
    blocks: list[Block]  # in text order
    reconvergence: list[int]  # immediate post-dominator per block (number of blocks = end of the kernel)
    varying: set[str]  # registers that can differ between lanes
    divergent_branches: set[int]  # blocks that end in a branch on a varying predicate
    tid_copies: set[str]  # registers that hold %tid.x itself
    rows_of_warps: bool  # each warp lies in one row of the thread block, so %tid.y and %tid.z are uniform
    # blocks that lanes reach on both sides of a divergent branch, before all of them meet
    joined: set[int] = field(default_factory=set)
    # indices of instructions in these that lanes execute together (`is_together`); a block begins there
    gathers: set[int] = field(default_factory=set)
    facts: dict[str, object] = field(default_factory=dict, repr=False)  # what others have found out about it, by name

    @property
    def exit(self) -> int:
        return len(self.blocks)

    @functools.cached_property
    def opcodes(self) -> list[list[tuple[str, int]]]:
        """Per block, the opcodes of its instructions and how many there are of each, in order of first use."""
        instructions = self.kernel.instructions
        counts = [Counter(i.opcode for i in instructions[block.start : block.end]) for block in self.blocks]
        return [list(count.items()) for count in counts]


def analyse(kernel: Kernel, block_shape: tuple[int, int, int], single: bool = False) -> Flow:
    """Builds the flow graph of a kernel for one shape of the thread block.

    ``single``: each instruction is a block, which continues the one before where both would be in the same block.
    Raises UnsupportedPTX: an unknown opcode, or an indirect branch."""
    blocks = _split(kernel, single)
    x, y, z = block_shape
    _live(kernel, blocks)
    while True:
        # Threads are numbered row by row: a warp lies in one row, with %tid.x = 32 w + lane, exactly in these cases.
        rows = x % 32 == 0 or y == z == 1
        flow = Flow(kernel, blocks, _post_dominators(blocks), set(), set(), set(), rows)
        _Uniformity(flow, whole_warps=x * y * z % 32 == 0).run()
        if _leave_early(flow):
            continue
        for block in (blocks[index] for index in flow.joined):
            flow.gathers.update(i.index for i in kernel.instructions[block.start : block.end] if is_together(i))
        if flow.gathers <= {block.start for block in blocks}:
            return flow
        blocks = _split(kernel, single, flow.gathers)
        _live(kernel, blocks)


def is_together(instruction: Instruction) -> bool:
    """Whether all lanes of a warp, or those of a member mask, have to execute an instruction together."""
    parts = instruction.parts
    return "sync" in parts or "aligned" in parts or parts[0] in ("bar", "barrier") and parts[1:2] != ("cluster",)


F = TypeVar("F", bound="Facts")


class Facts(Protocol):
    """Knowledge of one place of a kernel; ``merge`` adds what may hold on another path, and says whether it is new."""

    def copy(self: F) -> F: ...
    def merge(self: F, other: F) -> bool: ...


def walk(flow: Flow, at_entry: F) -> Iterator[tuple[F, Instruction, Block]]:
    """Every instruction with what holds before it, which the caller changes; again where more turns out to hold."""
    before: dict[int, F] = {0: at_entry}
    work = [0]
    while work:
        block = flow.blocks[work.pop()]
        facts = before[block.index].copy()
        for instruction in flow.kernel.instructions[block.start : block.end]:
            yield facts, instruction, block
        for successor in block.successors:
            if successor == flow.exit:
                continue
            if successor not in before:
                before[successor] = facts.copy()
                work.append(successor)
            elif before[successor].merge(facts):
                work.append(successor)


def _target(kernel: Kernel, instruction: Instruction) -> int:
    operand = instruction.operands[0]
    if not isinstance(operand, Symbol) or operand.name not in kernel.labels:
        raise instruction.refuse("the branch target is not a label of this kernel")
    return kernel.labels[operand.name]


def _split(kernel: Kernel, single: bool, gathers: Iterable[int] = ()) -> list[Block]:
    instructions = kernel.instructions
    leaders, continued = {0}, set(range(len(kernel.instructions))) if single else set(gathers)
    leaders.update(index for index in kernel.labels.values() if index < len(instructions))
    for instruction in instructions:
        if instruction.parts[0] in CONTROL:
            leaders.add(instruction.index + 1)
        elif find_family(instruction).blocking:
            (leaders if find_family(instruction).own_turn else continued).add(instruction.index)
    continued -= leaders
    leaders |= continued
    starts = sorted(index for index in leaders if index < len(instructions))
    ends = starts[1:] + [len(instructions)]
    blocks = [Block(i, start, end, continues=start in continued) for i, (start, end) in enumerate(zip(starts, ends))]
    block_at = {block.start: block.index for block in blocks}
    block_at[len(instructions)] = len(blocks)
    for block in blocks:
        last = instructions[block.end - 1]
        following = block_at[block.end]
        if last.parts[0] == "bra":
            for part in last.parts[1:]:
                if part != "uni":
                    raise last.refuse(f"qualifier .{part} of bra is not implemented")
            taken = block_at[_target(kernel, last)]
            block.successors = (taken,) if last.guard is None or taken == following else (taken, following)
        elif last.parts[0] in ("ret", "exit"):
            block.successors = (len(blocks),) if last.guard is None else (len(blocks), following)
        else:
            block.successors = (following,)
        for successor in block.successors:
            if successor < len(blocks):
                blocks[successor].predecessors.append(block.index)
    return blocks


def _leave_early(flow: Flow) -> bool:
    """Has divergent branches to a block that does nothing but exit end the kernel themselves; returns whether any did.

    Compilers write ``if (..) return;`` as a branch to one ``ret`` for all. Lanes that go there do not wait for the
    others: what these come to, barriers and exchanges among lanes, is for threads that have not exited (PTX ISA).
    """
    blocks, instructions = flow.blocks, flow.kernel.instructions
    exits, changed = {flow.exit}, False
    for block in reversed(blocks):  # one that only jumps to such a block is another, where it stands before it
        last = instructions[block.end - 1]
        alone = block.end - block.start == 1 and last.parts[0] in ("bra", "ret", "exit")
        if alone and len(block.successors) == 1 and block.successors[0] in exits:
            exits.add(block.index)
    for index in flow.divergent_branches:
        block = blocks[index]
        for successor in exits.intersection(block.successors) - {flow.exit}:
            blocks[successor].predecessors.remove(index)
            block.successors = tuple(flow.exit if s == successor else s for s in block.successors)
            changed = True
    return changed


def _live(kernel: Kernel, blocks: list[Block]) -> None:
    """Registers live at the block borders. A guarded write does not end the life of the old value."""
    use, kill = [], []
    for block in blocks:
        used: set[str] = set()
        killed: set[str] = set()
        for instruction in kernel.instructions[block.start : block.end]:
            used.update(name for name in read(instruction) if name not in killed)
            names = written(instruction)
            if instruction.guard is None:
                killed.update(names)
            else:
                used.update(name for name in names if name not in killed)
        use.append(used)
        kill.append(killed)
    live_in: list[set[str]] = [set() for _ in blocks] + [set()]
    work = list(range(len(blocks)))
    while work:
        index = work.pop()
        out: set[str] = set().union(*(live_in[s] for s in blocks[index].successors))
        new = use[index] | (out - kill[index])
        blocks[index].live_out = frozenset(out)
        if new != live_in[index]:
            live_in[index] = new
            work.extend(blocks[index].predecessors)
    for block in blocks:
        block.live_in = frozenset(live_in[block.index])
        block.live_out = frozenset(set().union(*(live_in[s] for s in block.successors)))


def _post_dominators(blocks: list[Block]) -> list[int]:
    """Immediate post-dominators by iteration over the reverse graph (Cooper, Harvey, Kennedy)."""
    exit_index = len(blocks)
    order: list[int] = []
    seen = {exit_index}
    reverse: list[list[int]] = [list(block.predecessors) for block in blocks] + [[]]
    reverse[exit_index] = [block.index for block in blocks if exit_index in block.successors]

    def visit(root: int) -> None:
        stack = [(root, iter(reverse[root]))]
        while stack:
            node, children = stack[-1]
            for child in children:
                if child not in seen:
                    seen.add(child)
                    stack.append((child, iter(reverse[child])))
                    break
            else:
                order.append(node)
                stack.pop()

    visit(exit_index)
    position = {node: i for i, node in enumerate(order)}
    idom: dict[int, int] = {exit_index: exit_index}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            new = None
            for successor in blocks[node].successors:
                if successor in idom:
                    new = successor if new is None else _meet(new, successor, idom, position)
            if new is not None and idom.get(node) != new:
                idom[node] = new
                changed = True
    # A block that cannot reach the end (an endless loop) has no post-dominator: its lanes meet at the end.
    return [idom.get(block.index, exit_index) for block in blocks]


def _meet(a: int, b: int, idom: dict[int, int], position: dict[int, int]) -> int:
    while a != b:
        while position[a] < position[b]:
            a = idom[a]
        while position[b] < position[a]:
            b = idom[b]
    return a


# --- uniformity -----------------------------------------------------------------------------------------------------


class _Uniformity:
    """Grows the set of varying registers until nothing changes."""

    def __init__(self, flow: Flow, whole_warps: bool) -> None:
        self.flow, self.whole_warps = flow, whole_warps
        self.instructions = flow.kernel.instructions
        self.defined_in: dict[str, set[int]] = {}
        self.definitions: dict[str, int] = {}
        for block in flow.blocks:
            for instruction in self.instructions[block.start : block.end]:
                for name in written(instruction):
                    self.defined_in.setdefault(name, set()).add(block.index)
                    self.definitions[name] = self.definitions.get(name, 0) + 1
        self.regions: dict[int, _Region] = {}

    def run(self) -> None:
        flow = self.flow
        for instruction in self.instructions:
            if self._is_tid_copy(instruction):
                flow.tid_copies.update(written(instruction))
        changed = True
        while changed:
            changed = self._data() | self._control()
        for branch in flow.divergent_branches:
            flow.joined |= self.regions[branch].shared
            for index in self.regions[branch].blocks:
                flow.blocks[index].divergent = True
        if not self.whole_warps:
            for block in flow.blocks:  # the last warp has fewer than 32 lanes: everything runs under a mask
                block.divergent = True

    def _is_tid_copy(self, instruction: Instruction) -> bool:
        if not self.flow.rows_of_warps or instruction.parts[0] != "mov" or instruction.guard is not None:
            return False
        names = written(instruction)
        return instruction.operands[1:] == (Special("%tid.x"),) and [self.definitions[name] for name in names] == [1]

    def _varies(self, operand: Operand) -> bool:
        if isinstance(operand, Special):
            if operand.name in TID_SPECIALS:
                return operand.name == "%tid.x" or not self.flow.rows_of_warps
            return operand.name in LANE_SPECIALS
        return any(name in self.flow.varying for name in registers_of(operand))

    def _data(self) -> bool:
        """Varying operands make varying results."""
        varying = self.flow.varying
        before = len(varying)
        for instruction in self.instructions:
            if instruction.parts[0] in CONTROL:
                continue
            names = written(instruction)
            if not names or all(name in varying for name in names):
                continue
            if uniform_function_of_tid(self.flow, instruction):
                continue
            result = find_family(instruction).varies(instruction, self._varies)
            if instruction.guard is not None and instruction.guard.register in varying:
                result = True
            each = result if isinstance(result, list) else [result] * len(names)
            varying.update(name for name, varies in zip(names, each) if varies)
        return len(varying) != before

    def _control(self) -> bool:
        """Registers written under a divergent branch and read where lanes of both of its sides can be."""
        flow = self.flow
        changed = False
        for block in flow.blocks:
            last = self.instructions[block.end - 1]
            if block.index in flow.divergent_branches or len(block.successors) < 2:
                continue
            if last.guard is not None and last.guard.register in flow.varying:
                flow.divergent_branches.add(block.index)
                self.regions[block.index] = _Region(flow, block.index)
                changed = True
        for branch in flow.divergent_branches:
            region = self.regions[branch]
            for name in region.mixed:
                if name not in flow.varying and self.defined_in.get(name, set()) & region.blocks:
                    flow.varying.add(name)
                    changed = True
        return changed


class _Region:
    """Blocks between a divergent branch and its reconvergence point. ``blocks``: reachable from a successor of the
    branch without passing the reconvergence point. ``mixed``: registers live where lanes that took different ways can
    read what the others wrote: at the reconvergence point, at the entry of either side, and at blocks that both sides
    reach."""

    def __init__(self, flow: Flow, branch: int) -> None:
        end = flow.reconvergence[branch]
        sides = [self._reach(flow, s, end) for s in flow.blocks[branch].successors]
        self.blocks: set[int] = set().union(*sides)
        self.shared = sides[0] & sides[1]  # those that both sides reach
        borders = self.shared | set(flow.blocks[branch].successors) | {end}
        self.mixed: set[str] = set()
        for index in borders:
            if index < flow.exit:
                self.mixed |= flow.blocks[index].live_in

    @staticmethod
    def _reach(flow: Flow, start: int, end: int) -> set[int]:
        seen: set[int] = set()
        work = [start]
        while work:
            index = work.pop()
            if index == end or index >= flow.exit or index in seen:
                continue
            seen.add(index)
            work.extend(flow.blocks[index].successors)
        return seen


def region_of(flow: Flow, branch: int) -> set[int]:
    """Blocks between the branch at the end of a block and where its lanes meet."""
    return _Region(flow, branch).blocks


def uniform_function_of_tid(flow: Flow, instruction: Instruction) -> bool:
    """Whether the result depends only on the warp index part of %tid.x: ``tid >> 5``, ``tid / 32``, ``tid < 64``, ...

    A warp holds the threads 32 w .. 32 w + 31, so these are the same for all of its lanes.
    """
    operands = instruction.operands
    if len(operands) != 3 or instruction.guard is not None:
        return False
    if not isinstance(operands[1], Register) or operands[1].name not in flow.tid_copies:
        return False
    if not isinstance(operands[2], Immediate) or operands[2].float_bits:
        return False
    constant, name = operands[2].value, instruction.parts[0]
    if name == "shr":
        return constant >= 5
    if name == "div":
        return constant > 0 and constant % 32 == 0
    if name == "and":
        return constant & 31 == 0
    if name == "setp" and len(instruction.parts) == 3 and constant >= 0:
        return _COMPARE_UNIFORM.get(instruction.parts[1]) == constant % 32
    return False
