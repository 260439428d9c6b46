"""Loops of a kernel's machine code, and the clocks that a warp needs to issue one pass of each."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cute_kernels.explore.sass.listing import Instruction

_BRANCHES = ("BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU")
_ENDS = ("EXIT", "RET", "KILL")
_TRIES = ("SYNCS.PHASECHK", "NANOSLEEP", "USETMAXREG.TRY_ALLOC")
_WORKS = re.compile(r"LD[GSLT]?|LDSM|LDTM|ST\w*|UTM\w*|UTC\w*|ATOM\w*|RED\w*|BAR|\w*MMA")
"""A loop that tries, and has no instruction of these opcodes, does nothing but wait."""


@dataclass
class Block:
    """Instructions that are executed one after the other, from ``first`` to before ``end``; blocks that may follow."""

    first: int
    end: int
    follow: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    ``header``: the block that every pass begins with. ``blocks``: all of it, those of inner loops too. ``depth``: 1 for
    one that is in no other loop. ``shortest``, ``longest``: clocks to issue one pass, by the way through it that needs
    least and most; every instruction at most once, those of inner loops too."""

    header: int
    blocks: frozenset[int]
    depth: int
    shortest: int
    longest: int


class Flow:
    """Blocks and loops of a kernel.

    ``code``: its instructions. ``blocks``: in order of their addresses. ``block_of``: the block of each instruction.
    ``complete``: whether every branch names where it leads; loops through one that does not are missing."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        self.code = code
        self.blocks = _blocks(code)
        self.block_of = [number for number, block in enumerate(self.blocks) for _ in range(block.first, block.end)]
        self.complete = all(each.targets for each in code if each.name in _BRANCHES)
        self._entries = _entries(code, self.blocks)

    @cached_property
    def loops(self) -> list[Loop]:
        """Loops that do more than wait for a barrier, by the address at which they begin."""
        bodies: dict[int, set[int]] = {}
        for number, block in enumerate(self.blocks):
            for follower in block.follow:
                if follower in self._dominators[number]:
                    bodies.setdefault(follower, {follower}).update(self._before(number, follower))
        bodies = {
            header: body
            for header, body in bodies.items()
            if not _only_waits(self._instructions(body))
        }
        found = []
        for header, body in sorted(bodies.items()):
            around = sum(header in other for other in bodies.values())
            found.append(Loop(header, frozenset(body), around, *self._clocks(header, body)))
        return found

    @cached_property
    def innermost(self) -> dict[int, Loop]:
        """By number of an instruction in a loop, the innermost one."""
        loops = sorted(self.loops, key=lambda loop: loop.depth)
        of_block = {block: loop for loop in loops for block in loop.blocks}
        return {number: of_block[block] for number, block in enumerate(self.block_of) if block in of_block}

    def around(self, number: int) -> frozenset[int]:
        """Blocks of the outermost loop around an instruction; all blocks outside of loops."""
        block = self.block_of[number]
        loops = (loop.blocks for loop in self.loops if loop.depth == 1 and block in loop.blocks)
        return next(loops, frozenset(range(len(self.blocks))))

    def repeated(self, number: int) -> bool:
        """Whether an instruction is in a loop; in a kernel without loops, all count as one pass."""
        return not self.loops or number in self.innermost

    def inside(self, loop: Loop) -> Iterator[Instruction]:
        """Instructions of a loop and of those in it, by address."""
        return self._instructions(loop.blocks)

    @cached_property
    def before(self) -> list[list[int]]:
        """By block, those that it may follow."""
        result: list[list[int]] = [[] for _ in self.blocks]
        for number, block in enumerate(self.blocks):
            for follower in block.follow:
                result[follower].append(number)
        return result

    @cached_property
    def _order(self) -> list[int]:
        """Blocks that can be reached, each before those that follow it but for the ways back."""
        done: list[int] = []
        seen: set[int] = set()
        for entry in self._entries:
            stack = [(entry, iter(self.blocks[entry].follow))] if entry not in seen else []
            seen.add(entry)
            while stack:
                number, followers = stack[-1]
                following = next((each for each in followers if each not in seen), None)
                if following is None:
                    done.append(number)
                    stack.pop()
                else:
                    seen.add(following)
                    stack.append((following, iter(self.blocks[following].follow)))
        return done[::-1]

    @cached_property
    def _dominators(self) -> list[set[int]]:
        """By block, those that every way to it goes through, itself among them; none of what cannot be reached."""
        everything = set(self._order)
        result = [everything if number in everything else set() for number in range(len(self.blocks))]
        for entry in self._entries:
            result[entry] = {entry}
        changed = True
        while changed:
            changed = False
            for number in self._order:
                if number not in self._entries:
                    ways = [result[each] for each in self.before[number] if each in everything]
                    found = set.intersection(*ways) | {number}
                    changed = changed or found != result[number]
                    result[number] = found
        return result

    def _before(self, number: int, header: int) -> set[int]:
        """Blocks from which ``number`` is reached without the header, and the block itself."""
        found, waiting = {header}, [number]
        while waiting:
            block = waiting.pop()
            if block not in found:
                found.add(block)
                waiting += [each for each in self.before[block] if self._dominators[each]]
        return found

    def _instructions(self, blocks: Iterable[int]) -> Iterator[Instruction]:
        for number in sorted(blocks):
            yield from self.code[self.blocks[number].first : self.blocks[number].end]

    def _clocks(self, header: int, body: set[int]) -> tuple[int, int]:
        """Least and most clocks of one pass: ways back end it, of inner loops too."""
        least, most = {header: 0}, {header: 0}
        ends = []
        for number in (each for each in self._order if each in least):
            block = self.blocks[number]
            own = sum(issue_clocks(each) for each in self.code[block.first : block.end])
            for follower in block.follow:
                if follower == header:
                    ends.append((least[number] + own, most[number] + own))
                elif follower in body and follower not in self._dominators[number]:
                    least[follower] = min(least.get(follower, least[number] + own), least[number] + own)
                    most[follower] = max(most.get(follower, 0), most[number] + own)
        return min(low for low, _ in ends), max(high for _, high in ends)


def issue_clocks(instruction: Instruction) -> int:
    """Clocks for which an instruction keeps its warp from issuing the next one."""
    return max(instruction.stall, 1)


def _only_waits(code: Iterable[Instruction]) -> bool:
    code = list(code)
    tries = any(each.opcode.startswith(_TRIES) for each in code)
    return tries and not any(_WORKS.fullmatch(each.name) or "ARRIVE" in each.opcode for each in code)


def _blocks(code: Sequence[Instruction]) -> list[Block]:
    numbers = {instruction.address: number for number, instruction in enumerate(code)}
    begins = {0}
    for number, instruction in enumerate(code):
        begins.update(numbers[target] for target in instruction.targets)
        if instruction.name in (*_BRANCHES, *_ENDS):
            begins.add(number + 1)
    edges = sorted(begins - {len(code)})
    blocks = [Block(first, end) for first, end in zip(edges, [*edges[1:], len(code)])]
    of_instruction = {block.first: number for number, block in enumerate(blocks)}
    for number, block in enumerate(blocks):
        last = code[block.end - 1]
        if last.name in _BRANCHES:
            block.follow += [of_instruction[numbers[target]] for target in last.targets]
        if not _leaves(last) and number + 1 < len(blocks):
            block.follow.append(number + 1)
    return blocks


def _leaves(last: Instruction) -> bool:
    """Whether what stands behind an instruction does not follow it."""
    if last.predicate:
        return False
    if last.name in ("BRA", "JMP"):
        return last.operands.startswith("`")  # otherwise a condition stands before the label
    return last.name in _BRANCHES or last.name in _ENDS


def _entries(code: Sequence[Instruction], blocks: Sequence[Block]) -> list[int]:
    """The kernel's first block, and those that calls lead to."""
    called = {target for instruction in code if instruction.name == "CALL" for target in instruction.targets}
    return [number for number, block in enumerate(blocks) if not number or code[block.first].address in called]
