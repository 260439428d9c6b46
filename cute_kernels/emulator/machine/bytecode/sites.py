"""Places in bytecode that call Python, and the Python source of what they call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cute_kernels.emulator.isa.ptx.decode import Instruction
from cute_kernels.emulator.machine.graph.values import LiveIn, Result, Value
from cute_kernels.emulator.machine.state.memory_tables import ROW

Key = str | Value
"""Key of a value of a block: live registers go by their variable, of which there may be several `LiveIn`."""


@dataclass
class Site:
    """A place in bytecode that calls Python.

    Attributes:
        instruction: what it performs.
        source: body of ``def site(W, mask)`` that returns None where a blocking instruction has to wait.
    """

    instruction: Instruction | None
    source: list[str]


def key_of(value: Value) -> Key:
    return value.variable if isinstance(value, LiveIn) else value


def fetch(value: Value, row: int) -> str:
    """Python source of an operand in the exchange area."""
    if value.uniform:
        return f"(Q[{row * ROW // 8}] != 0)" if value.bits == 1 else f"Q[{row * ROW // 8}]"
    # A copy: asynchronous operations may keep it.
    return f"Q[{row * ROW // 8}]" if value.bits == 1 else f"X{value.bits}[{row}].copy()"


def store_results(results: Sequence[Result]) -> list[str]:
    """Python source that leaves ``r``, what was called has returned, in the exchange area."""
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
