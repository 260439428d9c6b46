"""Registers of tcgen05.ld, followed through a kernel before it runs.

tcgen05.ld writes its registers asynchronously. An instruction that reads one of them is ordered after the load by that
dependency alone (PTX ISA, "Register dependencies, same thread"). Two things follow from it:

* What overwrites a register that nothing has read yet is not ordered after the load, until tcgen05.wait::ld. What is
  read there afterwards may be the load's, and is reported.
* A load whose values have been used has read tensor memory. The PTX ISA asks for tcgen05.wait::ld all the same before
  the columns are written again; NVIDIA's kernels contain none. So the race detector is told of the first use
  (`first_uses`), and takes the load as complete.

Copies of registers are no use: compilers put them anywhere. What may happen on one path is taken as happening.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.isa.ptx.families import read, written
from cute_kernels.emulator.isa.ptx.flow import Flow, walk
from cute_kernels.emulator.isa.ptx.program import Instruction


@dataclass
class _Loads:
    """Registers of tcgen05.ld at one place of the program."""

    pending: dict[str, Instruction] = field(default_factory=dict)  # the load that may not have written a register yet
    # registers overwritten meanwhile: the load, and what overwrote them
    mixed: dict[str, tuple[Instruction, Instruction]] = field(default_factory=dict)
    # registers that hold what loads have loaded, while nothing has used it: indices of these loads
    values: dict[str, frozenset[int]] = field(default_factory=dict)

    def copy(self) -> _Loads:
        return _Loads(dict(self.pending), dict(self.mixed), dict(self.values))

    def merge(self, other: _Loads) -> bool:
        """Adds what may hold on another path. Returns whether anything changed."""
        before = self.copy()
        self.pending = {**other.pending, **self.pending}
        self.mixed = {**other.mixed, **self.mixed}
        for name, loads in other.values.items():
            self.values[name] = self.values.get(name, frozenset()) | loads
        return (before.pending.keys(), before.mixed.keys(), before.values) != (
            self.pending.keys(), self.mixed.keys(), self.values,
        )  # fmt: skip


def first_uses(flow: Flow) -> dict[int, tuple[int, ...]]:
    """Checks a kernel, and finds where the values of its tcgen05.ld are used first. Returns index of an instruction ->
    indices of the loads of which it, on some path, is the first to use a value. Raises IllegalAccess: a register is
    read that was overwritten while a load might still write it."""
    uses: dict[int, tuple[int, ...]] = {}
    if not any(instruction.parts[:2] == ("tcgen05", "ld") for instruction in flow.kernel.instructions):
        return uses
    for loads, instruction, _ in walk(flow, _Loads()):
        used = _step(loads, instruction)
        if used:
            uses[instruction.index] = tuple(sorted(used))
    return uses


def _step(loads: _Loads, instruction: Instruction) -> set[int]:
    """Takes one instruction into account. Returns the loads that it uses first."""
    if instruction.parts[:2] == ("tcgen05", "wait::ld"):
        loads.pending.clear()
        loads.values.clear()
        return set()
    reads, writes = read(instruction), written(instruction)
    found: set[int] = set()
    for name in reads:
        if name in loads.mixed:
            raise _mixed(instruction, name, *loads.mixed[name])
        found |= loads.values.get(name, frozenset())
    if instruction.guard is None:
        for name in reads:
            loads.pending.pop(name, None)
    _overwrite(loads, instruction, writes)
    if instruction.parts[:2] == ("tcgen05", "ld"):
        loads.pending.update(dict.fromkeys(writes, instruction))
        loads.values.update(dict.fromkeys(writes, frozenset([instruction.index])))
    elif found and instruction.parts[0] == "mov":
        loads.values.update(dict.fromkeys(writes, frozenset(found)))
        return set()
    for name in [name for name, held in loads.values.items() if held & found]:
        loads.values[name] -= found
        if not loads.values[name]:
            del loads.values[name]
    return found


def _overwrite(loads: _Loads, instruction: Instruction, writes: tuple[str, ...]) -> None:
    for name in writes:
        if name in loads.pending:
            loads.mixed[name] = (loads.pending[name], instruction)
        elif instruction.guard is None:
            loads.mixed.pop(name, None)
        if instruction.guard is None:
            loads.values.pop(name, None)


def _mixed(instruction: Instruction, name: str, load: Instruction, other: Instruction) -> IllegalAccess:
    return IllegalAccess(
        f"register {name} is overwritten at PTX line {other.line} `{other.text}` while the tcgen05.ld at PTX "
        f"line {load.line} may still write it, for which no tcgen05.wait::ld has waited on some way to there"
    ).at(instruction)
