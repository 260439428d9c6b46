"""Waits and other answers in a kernel's flow graph: which looks at an mbarrier are waits, which answers decide nothing,
and behind which waits the lanes of a warp may part."""

import operator
from collections.abc import Callable, Sequence

from cute_kernels.emulator.isa.ptx.families import read, written
from cute_kernels.emulator.isa.ptx.flow import Block, Flow, is_together
from cute_kernels.emulator.isa.ptx.program import Immediate, Instruction, Not, Operand, Register, Special, items_of

_COPIES = ("cp", "async", "bulk")
_COMMUTING, _INTEGERS = frozenset("add min max and or xor".split()), frozenset("u32 s32 b32 u64 s64 b64".split())
_SENT = (("st", "async"), ("red", "async"), ("tcgen05", "commit"))


def is_wait(instruction: Instruction) -> bool:
    """Whether it looks at an mbarrier, once or until a phase is complete."""
    return instruction.parts[0] == "mbarrier" and instruction.parts[1] in ("try_wait", "test_wait")


def contributes(instruction: Instruction) -> bool:
    """Whether it makes an arrival at an mbarrier, or a copy or an operation that signals one."""
    parts = instruction.parts
    if parts[0] == "mbarrier":
        return parts[1].startswith(("arrive", "expect_tx", "complete_tx"))
    if parts[:3] == _COPIES or parts[:3] == ("cp", "async", "mbarrier"):
        return "mbarrier" in parts or any(part.startswith("mbarrier::") for part in parts)
    return parts[:2] in _SENT


def parting(flow: Flow) -> frozenset[int]:
    """Indices of waits from which some lanes can go on to an arrival without the others having waited.

    Lanes that execute an instruction together, as elect.sync, bar.warp.sync or wgmma, have all waited.
    """
    found = flow.facts.get("parting")
    if found is None:
        waits = (i for i in flow.kernel.instructions if is_wait(i))
        found = flow.facts["parting"] = frozenset(i.index for i in waits if _apart(flow, i.index, _parts))
    return found


def loads_behind(flow: Flow, wait: int) -> bool:
    """Whether all lanes may load what they have waited for, before one of them goes on for all."""
    return _apart(flow, wait, _loads)


def _parts(flow: Flow, block: Block, instruction: Instruction) -> bool:
    guard = instruction.guard is not None and instruction.guard.register in flow.varying
    return (block.divergent or guard) and contributes(instruction)


def _loads(flow: Flow, block: Block, instruction: Instruction) -> bool:
    # Also volatile or with an order; an address of no space may be one of shared memory.
    elsewhere = any(part.partition("::")[0] in ("global", "param", "const", "local") for part in instruction.parts)
    return instruction.parts[0] == "ld" and not elsewhere and not block.divergent


def _apart(flow: Flow, wait: int, found: Callable[[Flow, Block, Instruction], bool]) -> bool:
    """Whether there is such an instruction behind a wait, before the lanes execute one together."""
    block = _block_of(flow, wait)
    work, seen = [(block.index, wait + 1)], set()
    while work:
        index, start = work.pop()
        here = flow.blocks[index]
        for instruction in flow.kernel.instructions[start : here.end]:
            if is_together(instruction):
                break
            if found(flow, here, instruction):
                return True
        else:
            new = {*here.successors} - seen - {flow.exit}
            seen |= new
            work += [(each, flow.blocks[each].start) for each in new]
    return False


#: The first parts of opcodes that do nothing but compute their destinations from their operands.
PURE = frozenset(
    "abs add addc and bfe bfi bfind bmsk brev clz cnot copysign cos cvt cvta div dp2a dp4a ex2 fma fns getctarank "
    "isspacep lg2 lop3 mad mad24 madc mapa max min mov mul mul24 neg not or popc prmt rcp rem rsqrt sad selp set setp "
    "shf shl shr sin slct sqrt sub subc szext tanh testp vabsdiff2 vabsdiff4 xor".split()
)


_INTEGER_TYPES = {f"{kind}{bits}" for kind in "bsu" for bits in (16, 32, 64)}
_BITWISE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def waits_until_complete(flow: Flow, index: int) -> bool:
    """Whether a look at an mbarrier is a wait: whoever is told that the phase is not complete comes back to look again.

    On the way back nothing has an effect, and no register changes that is read before it is written. Behind the look
    its block may compute what does not depend on how often it looks, such as the 0 or 1 that a function returns for it.
    """
    instruction = flow.kernel.instructions[index]
    block = _block_of(flow, index)
    looks = written(instruction)[:1]
    branch = flow.kernel.instructions[block.end - 1]
    behind = flow.kernel.instructions[index + 1 : block.end - 1]
    if not looks or branch.parts[0] != "bra" or branch.guard is None or len(block.successors) != 2:
        return False
    made = {name for each in behind for name in written(each)}
    if instruction.guard is not None or index != block.start or made & block.live_in or not all(map(_is_fixed, behind)):
        return False
    goes_on = [_answered(behind, {looks[0]: answer}).get(branch.guard.register) for answer in (0, 1)]
    if goes_on not in ([0, 1], [1, 0]):
        return False
    taken, passed = block.successors  # the target first
    again, on = (taken, passed) if bool(goes_on[0]) != branch.guard.negated else (passed, taken)
    back = _idle(flow, again, block.index)
    if back is None or on in (again, block.index):
        return False
    live = block.live_in | (flow.blocks[on].live_in if on != flow.exit else frozenset())
    return not _changed(flow, back) & (live - set(looks) - made)


def _is_fixed(instruction: Instruction) -> bool:
    """Whether it computes the same of the same registers at any time."""
    special = any(isinstance(each, Special) for operand in instruction.operands for each in items_of(operand))
    return instruction.parts[0] in PURE and instruction.guard is None and not special


def _answered(behind: Sequence[Instruction], values: dict[str, int]) -> dict[str, int]:
    """Values of registers behind some instructions, as far as selp, mov, setp, and, or, xor of integers tell."""
    for each in behind:
        name, type_ = each.parts[0], each.parts[-1]
        operands = [_value(operand, values) for operand in each.operands[1:]]
        if type_ == "pred":
            operands = [None if value is None else int(value != 0) for value in operands]
        known = None not in operands and (type_ == "pred" or type_ in _INTEGER_TYPES)
        result = None
        if name == "selp" and operands[2] is not None and type_ in _INTEGER_TYPES:
            result = operands[0] if operands[2] else operands[1]
        elif name == "mov" and known:
            result = operands[0]
        elif name in _BITWISE and known:
            result = _BITWISE[name](*operands)
        elif name == "setp" and known and len(operands) == 2 and len(each.parts) == 3:
            same = (operands[0] - operands[1]) % (1 << int(type_[1:])) == 0
            result = {"eq": int(same), "ne": int(not same)}.get(each.parts[1])
        elif name == "not" and type_ == "pred" and known:
            result = 1 - operands[0]
        for register in written(each):
            values.pop(register, None)
        if result is not None and isinstance(each.operands[0], Register):
            values[each.operands[0].name] = result
    return values


def _value(operand: Operand, values: dict[str, int]) -> int | None:
    """Value of an operand, None if it is not known."""
    if isinstance(operand, Immediate):
        return None if operand.float_bits else operand.value
    if isinstance(operand, Not):
        inner = values.get(operand.register.name)
        return None if inner is None else 1 - inner
    return values.get(operand.name) if isinstance(operand, Register) else None


def _block_of(flow: Flow, index: int) -> Block:
    return next(block for block in flow.blocks if block.start <= index < block.end)


def _idle(flow: Flow, start: int, *ends: int) -> set[int] | None:
    """Blocks from one on, until the first of some others, if nothing in them has an effect and all ways lead there."""
    work, seen = [start], set(ends)
    while work:
        index = work.pop()
        if index in seen:
            continue
        if index == flow.exit or not _is_pure(flow, index):
            return None
        seen.add(index)
        work += flow.blocks[index].successors
    reached, before = set(ends), 0
    while before != len(reached):
        before = len(reached)
        reached |= {index for index in seen if index in ends or reached.issuperset(flow.blocks[index].successors)}
    return seen - set(ends) if seen <= reached else None


def _is_pure(flow: Flow, index: int) -> bool:
    block = flow.blocks[index]
    names = (each.parts[0] for each in flow.kernel.instructions[block.start : block.end])
    return all(name in PURE or name in ("bra", "nanosleep") for name in names)


def _instructions(flow: Flow, blocks: set[int]) -> list[Instruction]:
    spans = (flow.blocks[index] for index in blocks)
    return [each for span in spans for each in flow.kernel.instructions[span.start : span.end]]


def _changed(flow: Flow, blocks: set[int]) -> set[str]:
    """Registers that they write."""
    return {name for each in _instructions(flow, blocks) for name in written(each)}


def decides_nothing(flow: Flow, index: int) -> bool:
    """Whether what an instruction answers, as %clock, flows into nothing but how long a loop without effect runs."""
    readers = _readers(flow)
    if flow.kernel.instructions[index].parts[0] not in PURE:
        return False
    work, seen = list(written(flow.kernel.instructions[index])), set()
    while work:
        name = work.pop()
        if name in seen:
            continue
        seen.add(name)
        for reader in readers.get(name, []):
            if reader.parts[0] == "bra":
                if not _only_delays(flow, reader.index):
                    return False
            elif reader.parts[0] not in PURE or (reader.guard is not None and reader.guard.register == name):
                return False
            else:
                work += written(reader)
    return True


def _readers(flow: Flow) -> dict[str, list[Instruction]]:
    """Instructions that read each register."""
    readers: dict[str, list[Instruction]] = flow.facts.get("readers")
    if readers is None:
        readers = flow.facts["readers"] = {}
        for each in flow.kernel.instructions:
            for name in read(each):
                readers.setdefault(name, []).append(each)
    return readers


def commutes(flow: Flow, index: int) -> str:
    """Name of what an atomic operation does to integers, if its result is not used: those of one name commute. "" for
    all other instructions."""
    instruction = flow.kernel.instructions[index]
    name, *parts = instruction.parts
    done = _COMMUTING.intersection(parts)
    if name not in ("atom", "red") or "async" in parts or not done or parts[-1] not in _INTEGERS:
        return ""
    if any(each in _readers(flow) for each in written(instruction)):
        return ""
    (operation,) = done
    return f"{operation} {parts[-1] if operation in ('min', 'max') else parts[-1][1:]}"


def _only_delays(flow: Flow, branch: int) -> bool:
    """Whether both sides of a branch do nothing until they meet; and a loop ends in any case, as time goes on."""
    block, inside = _block_of(flow, branch), set()
    meeting = flow.reconvergence[block.index]
    if meeting == flow.exit:
        return False
    for successor in block.successors:
        idle = _idle(flow, successor, meeting, block.index)
        if idle is None:
            return False
        inside |= idle
    loop, before = {block.index}, 0
    while before != len(loop):
        before = len(loop)
        loop |= {index for index in inside if loop.intersection(flow.blocks[index].successors)}
    turns = [each for each in block.successors if each in loop]
    if turns:
        inside.add(block.index)
        if len(turns) > 1 or not _is_pure(flow, block.index) or not _until_time(flow, loop, block, turns[0]):
            return False
    return not _changed(flow, inside) & flow.blocks[meeting].live_in


def _until_time(flow: Flow, loop: set[int], block: Block, turn: int) -> bool:
    """Whether a loop without branches, but for the one that ends a block, goes on while the time that it looks at in
    each turn is less than something that it does not change."""
    inside, branch = _instructions(flow, loop), flow.kernel.instructions[block.end - 1]
    if any(len(flow.blocks[index].successors) > 1 for index in loop - {block.index}):
        return False
    made: dict[str, list[Instruction]] = {}
    for each in inside:
        for name in written(each):
            made.setdefault(name, []).append(each)

    def one(name: str, *opcodes: str) -> Instruction | None:
        found = made.get(name, [])
        return found[0] if len(found) == 1 and found[0].guard is None and found[0].parts[0] in opcodes else None

    def is_now(operand: Operand, steps: int = 3) -> bool:
        if isinstance(operand, Special):
            return operand.name.startswith(("%clock", "%globaltimer"))
        by = one(operand.name, "mov", "sub") if isinstance(operand, Register) and steps else None
        return by is not None and is_now(by.operands[1], steps - 1) and all(map(is_fixed, by.operands[2:]))

    def is_fixed(operand: Operand) -> bool:
        return isinstance(operand, Immediate) or (isinstance(operand, Register) and operand.name not in made)

    compare = one(branch.guard.register, "setp") if branch.guard is not None else None
    if compare is None or len(compare.parts) != 3 or len(compare.operands) != 3:
        return False
    stays = (turn == block.successors[0]) != branch.guard.negated
    less = compare.parts[1] in (("lt", "le", "lo", "ls") if stays else ("gt", "ge", "hi", "hs"))
    more = compare.parts[1] in (("gt", "ge", "hi", "hs") if stays else ("lt", "le", "lo", "ls"))
    first, second = compare.operands[1:]
    return (less and is_now(first) and is_fixed(second)) or (more and is_now(second) and is_fixed(first))


def waited_for_alone(flow: Flow, index: int) -> bool:
    """Whether the state that an arrival returns is read by waits for its phase alone."""
    names = set(written(flow.kernel.instructions[index]))
    readers = [each for each in flow.kernel.instructions if names & set(read(each))]
    return all(is_wait(each) and "parity" not in each.parts for each in readers)
