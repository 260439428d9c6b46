"""Proves, before a kernel runs, that registers of wgmma are fenced and waited for.

wgmma.mma_async reads and writes registers asynchronously. PTX ISA makes two rules of that, which no schedule of the
emulator could show to be broken:

* Between any access to a register and a wgmma that uses it as accumulator or A fragment there is a wgmma.fence; only
  accumulators that go from one wgmma to the next of the same shape need none. The first wgmma needs one in any case.
* Nothing else touches these registers until a wgmma.wait_group covers the group of the wgmma. (Reading A fragments
  meanwhile is let pass: that can change nothing.)

The analysis follows all paths of the flow graph and takes what may happen on any of them as happening. Plain moves of
registers and constants are no accesses themselves, because virtual registers of PTX are not yet allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.isa.ptx.families import CONTROL, read, registers_of, written
from cute_kernels.emulator.isa.ptx.flow import Flow, walk
from cute_kernels.emulator.isa.ptx.program import Instruction, Register, Vector

_OLDEST = 16  # groups; wait_group takes at most 7, so that all older ones are alike


@dataclass(frozen=True)
class _Use:
    """The wgmma that a register belongs to, and the number of wgmma.commit_group since (0: not committed)."""

    wgmma: Instruction
    age: int


@dataclass
class _State:
    """Facts that hold at one place of the program."""

    # accumulators, fragments: registers of wgmmas in flight
    accumulators: dict[str, _Use] = field(default_factory=dict)
    fragments: dict[str, _Use] = field(default_factory=dict)
    # registers accessed since the last wgmma.fence, and by which instruction
    touched: dict[str, Instruction] = field(default_factory=dict)
    unfenced: bool = False  # some path to here has no wgmma.fence at all

    def copy(self) -> _State:
        return _State(dict(self.accumulators), dict(self.fragments), dict(self.touched), self.unfenced)

    def merge(self, other: _State) -> bool:
        """Adds what may hold on another path. Returns whether anything changed."""
        changed = other.unfenced and not self.unfenced
        self.unfenced |= other.unfenced
        for mine, theirs in ((self.accumulators, other.accumulators), (self.fragments, other.fragments)):
            for name, use in theirs.items():
                if name not in mine or mine[name].age > use.age:
                    mine[name] = use
                    changed = True
        for name, instruction in other.touched.items():
            if name not in self.touched:
                self.touched[name] = instruction
                changed = True
        return changed


def check_registers(flow: Flow) -> None:
    """Checks a kernel. Raises IllegalAccess: naming the register, the instruction that touches it and the asynchronous
    one."""
    instructions = flow.kernel.instructions
    relevant = {
        name
        for instruction in instructions
        if _is(instruction, "mma_async")
        for operand in instruction.operands[:2]
        if isinstance(operand, Vector)
        for name in registers_of(operand)
    }
    if not any(_is(instruction, "mma_async") for instruction in instructions):
        return
    for state, instruction, _ in walk(flow, _State(unfenced=True)):
        _step(state, instruction, relevant)


def accumulators_in_flight(flow: Flow) -> list[dict[str, int]] | None:
    """Registers that may hold accumulators of a wgmma in flight, in kernels where other instructions touch them: by
    block, what may be in flight at its start, with the number of wgmma.commit_group since; a block that starts with a
    wgmma.wait_group has waited. None: only wgmmas touch the accumulators of others.

    `check_registers` lets copies pass, because virtual registers of PTX are not yet allocated; where nobody checks,
    there may be anything."""
    before: list[dict[str, int]] = [{} for _ in flow.blocks]
    touched = False
    if not any(_is(instruction, "mma_async") for instruction in flow.kernel.instructions):
        return None
    for state, instruction, block in walk(flow, _State(unfenced=True)):
        if _is(instruction, "wait_group"):
            _group(state, instruction)
        if instruction.index == block.start:
            before[block.index] = {name: use.age for name, use in state.accumulators.items()}
        if _is(instruction, "commit_group"):
            _group(state, instruction)
        own: set[str] = set()
        if _is(instruction, "mma_async"):
            own = set(registers_of(instruction.operands[0]))
            state.accumulators.update(dict.fromkeys(own, _Use(instruction, 0)))
        if state.accumulators:
            names = {*read(instruction), *written(instruction)}
            touched |= any(name in state.accumulators for name in names - own)
        if _moved(state, instruction):
            state.accumulators[written(instruction)[0]] = state.accumulators[instruction.operands[1].name]
    return before if touched else None


def _is(instruction: Instruction, name: str) -> bool:
    return instruction.parts[:2] == ("wgmma", name)


def _step(state: _State, instruction: Instruction, relevant: set[str]) -> None:
    if _is(instruction, "fence"):
        state.touched.clear()
        state.unfenced = False
    elif _is(instruction, "mma_async"):
        _mma(state, instruction)
    elif instruction.parts[0] == "wgmma":
        _group(state, instruction)
    elif instruction.parts[0] not in CONTROL:
        _other(state, instruction, relevant)


def _group(state: _State, instruction: Instruction) -> None:
    """wgmma.commit_group and wgmma.wait_group."""
    if _is(instruction, "commit_group"):
        for uses in (state.accumulators, state.fragments):
            for name, use in uses.items():
                uses[name] = _Use(use.wgmma, min(use.age + 1, _OLDEST))
    elif _is(instruction, "wait_group"):
        newest = instruction.operands[0].value
        for uses in (state.accumulators, state.fragments):
            for name in [name for name, use in uses.items() if use.age > newest]:
                del uses[name]


def _mma(state: _State, instruction: Instruction) -> None:
    accumulators = list(registers_of(instruction.operands[0]))
    a = instruction.operands[1]
    fragments = list(registers_of(a)) if isinstance(a, Vector) else []
    if state.unfenced:
        raise _error(instruction, "there is a way to this wgmma without any wgmma.fence")
    for name in (*accumulators, *fragments):
        if name in state.touched:
            earlier = state.touched[name]
            raise _error(
                instruction,
                f"register {name} is accessed at PTX line {earlier.line} `{earlier.text}` and used by this wgmma with "
                "no wgmma.fence in between",
            )
    for name in fragments:
        if name in state.accumulators:
            raise _error(instruction, _in_flight(name, "accumulator", state.accumulators[name]))
    for name in accumulators:
        use = state.accumulators.get(name)
        if use is not None and use.wgmma.parts[4:6] != instruction.parts[4:6]:
            raise _error(instruction, _in_flight(name, "accumulator (of another shape)", use))
        if name in state.fragments:
            raise _error(instruction, _in_flight(name, "A fragment", state.fragments[name]))
    state.accumulators.update(dict.fromkeys(accumulators, _Use(instruction, 0)))
    state.fragments.update(dict.fromkeys(fragments, _Use(instruction, 0)))


def _other(state: _State, instruction: Instruction, relevant: set[str]) -> None:
    reads, writes = read(instruction), written(instruction)
    moved = _moved(state, instruction)
    for name in reads:
        if name in state.accumulators and not moved:
            raise _error(instruction, _in_flight(name, "accumulator", state.accumulators[name]))
    for name in writes:
        for role, uses in (("accumulator", state.accumulators), ("A fragment", state.fragments)):
            if name in uses and not moved:
                raise _error(instruction, _in_flight(name, role, uses[name]))
    if moved:
        state.accumulators[writes[0]] = state.accumulators[reads[0]]
        return
    if instruction.parts[0] == "mov" and instruction.guard is None and not isinstance(instruction.operands[0], Vector):
        # Compilers move loop-carried registers and initial zeros behind the fence, and ptxas knows them for what they
        # are. A copy has had the accesses that its source has had.
        source = instruction.operands[1]
        earlier = state.touched.get(source.name) if isinstance(source, Register) else None
        if earlier is not None:
            state.touched[writes[0]] = earlier
        else:
            state.touched.pop(writes[0], None)
        return
    for name in (*reads, *writes):
        if name in relevant:
            state.touched[name] = instruction


def _moved(state: _State, instruction: Instruction) -> bool:
    """Whether this copies an accumulator in flight as a whole, in the lanes that execute it."""
    if instruction.parts[0] != "mov" or instruction.guard is not None:
        return False
    target, source = instruction.operands
    registers = isinstance(target, Register) and isinstance(source, Register)  # not {%h0, %h1}, which reads halves
    return registers and source.name in state.accumulators


def _in_flight(name: str, role: str, use: _Use) -> str:
    return (
        f"register {name} is an {role} of the wgmma at PTX line {use.wgmma.line}, for which no wgmma.wait_group has "
        "waited on some way to here"
    )


def _error(instruction: Instruction, message: str) -> IllegalAccess:
    return IllegalAccess(message).at(instruction).know("register-in-flight")
