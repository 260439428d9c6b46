"""Places in bytecode that call Python: which function, with which operands of the exchange area."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.graph.values import LiveIn, Result, Value
from cute_kernels.emulator.machine.state.memory_tables import ROW
from cute_kernels.emulator.machine.units.sm import Warp

_GO, _WAIT = CONSTANTS["GO"], CONSTANTS["WAIT"]
_WORDS = ROW // 8  # 64-bit words of a row

Key = str | Value
"""Key of a value of a block: live registers go by their name, of which there may be several `LiveIn`."""

Function = Callable[["Warp", int], int]
"""Performs a site for the executing lanes of a warp; returns ``GO`` or ``WAIT``."""


@dataclass(frozen=True)
class Row:
    """An operand in the exchange area, in row ``index``."""

    index: int
    bits: int
    uniform: bool


@dataclass
class Site:
    """A place in bytecode that calls Python."""

    instruction: Instruction | None  # the instruction that the call performs; None: the call belongs to the interpreter
    function: Callable[..., object] | None = None  # ``function(warp, mask, *arguments)``
    arguments: Sequence[object] = ()  # a `Row`, a tuple of arguments, or any other object, which is passed as it is
    results: Sequence[Result] = field(default_factory=tuple)  # the values that the function returns, as `Call` says
    blocking: bool = False  # the function returns None where the warp has to wait


def key_of(value: Value) -> Key:
    return value.variable if isinstance(value, LiveIn) else value


def bound(site: Site, words: memoryview, lanes: dict[int, np.ndarray]) -> Function:
    """A site on the exchange area of one launch. ``site``: the place. ``words``: the exchange area as 64-bit words.
    ``lanes``: the exchange area as rows ``[rows, 32]`` of 8, 16, 32 and 64 bits, by their bits."""
    function, blocking = site.function, site.blocking
    readers = [_reader(argument, words, lanes) for argument in site.arguments]
    store = _writer(site.results, words, lanes)

    def call(warp: Warp, mask: int) -> int:
        returned = function(warp, mask, *[read() for read in readers])
        if blocking and returned is None:
            return _WAIT
        if store is not None:
            store(returned)
        return _GO

    return call


def _reader(argument: object, words: memoryview, lanes: dict[int, np.ndarray]) -> Callable[[], object]:
    if isinstance(argument, tuple):
        parts = [_reader(part, words, lanes) for part in argument]
        return lambda: tuple(read() for read in parts)
    if not isinstance(argument, Row):
        return lambda: argument
    word = argument.index * _WORDS
    if argument.uniform and argument.bits == 1:
        return lambda: words[word] != 0
    if argument.uniform or argument.bits == 1:
        return lambda: words[word]
    return lanes[argument.bits][argument.index].copy  # asynchronous operations may keep it


def _writer(
    results: Sequence[Result], words: memoryview, lanes: dict[int, np.ndarray]
) -> Callable[[object], None] | None:
    """Leaves what a function returned in the first rows of the exchange area."""
    if not results:
        return None
    count, first = len(results), results[0]
    if not first.uniform and first.bits != 1:
        target = lanes[first.bits][0] if count == 1 else lanes[first.bits][:count]

        def store(returned: object) -> None:
            target[...] = returned

    elif count == 1:

        def store(returned: object) -> None:
            words[0] = returned

    else:

        def store(returned: object) -> None:
            for index in range(count):
                words[index * _WORDS] = returned[index]

    return store
