"""The pure operations of the core, by the name that lowering has for them (`values.PureOp.name`), and calls of them.

``core/table_*.h`` defines each; bytecode has the addresses of its two forms. Here Python asks for a result itself: for
operands that are known when a kernel is lowered, and for arrays.
"""

import ctypes
import functools
import re
from collections.abc import Callable

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library

LANES = CONSTANTS["LANES"]
_CACHE_LINE = 64
#: Operations whose names end with constants, and how the table names them: pattern, name, the constant ``imm``.
_WITH_CONSTANT: tuple[tuple[re.Pattern[str], str, Callable[[re.Match[str]], int]], ...] = (
    (re.compile(r"(sh[lr]_[bsu]\d+_by)(\d+)"), r"\1", lambda match: int(match[2])),
    (re.compile(r"lop3_0x([0-9a-f]+)"), "lop3", lambda match: int(match[1], 16)),
    (re.compile(r"(slice\d+_\d+)_(\d+)"), r"\1", lambda match: int(match[2])),
    (re.compile(r"extend_([su])(\d+)_(\d+)_(\d+)"), r"extend_\1_\3_\4", lambda match: int(match[2])),
    (re.compile(r"saturate_([su])(\d+)_([su])(\d+)"), r"saturate_\1_\3", lambda m: int(m[2]) | int(m[4]) << 8),
    (re.compile(r"(cvt_f16_e\dm\dx2|cvt_e\dm\dx2_f32_rs(?:_relu)?)_(\d)"), r"\1", lambda match: int(match[2])),
)
_Form = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


@functools.cache
def operations() -> dict[tuple[str, bool], int]:
    """Addresses of the core's functions by the operation's name and whether the form is that for lanes."""
    core = library()
    found: dict[tuple[str, bool], int] = {}
    for number in range(core.operation_count()):
        name = ctypes.string_at(core.operation_name(number)).decode()
        for lanes in (False, True):
            address = core.operation_run(number, lanes)
            if address:
                found[name, lanes] = address
    return found


@functools.cache
def pure_operation(name: str) -> tuple[str, int]:
    """Name in the core's table and constant of a pure operation. Raises KeyError: the table has none of this name."""
    for pattern, base, constant in _WITH_CONSTANT:
        match = pattern.fullmatch(name)
        if match:
            name, value = match.expand(base), constant(match)
            break
    else:
        value = 0
    if (name, True) not in operations():
        raise KeyError(f"the core has no operation {name}: a line of core/table_*.h is missing")
    return name, value


@functools.cache
def _form(name: str, lanes: bool) -> tuple[Callable[..., int], int]:
    """A form of an operation as a function, and its constant."""
    base, constant = pure_operation(name)
    return _Form(operations()[base, lanes]), constant


def evaluate(name: str, *operands: int) -> int:
    """The result of an operation on bit patterns, 0 or 1 for predicates; so is the result."""
    function, constant = _form(name, False)
    state = (ctypes.c_uint64 * 5)(0, *operands)
    instruction = STRUCTURES["Instruction"](None, 0, 8, 16, 24, 32 if len(operands) == 4 else constant)
    function(ctypes.byref(instruction), state, None)
    return state[0]


def apply(name: str, *operands: np.ndarray) -> np.ndarray:
    """The results of an operation on the elements of up to three arrays [n] of one type, which results have too."""
    function, constant = _form(name, True)
    count, dtype = len(operands[0]), operands[0].dtype
    row = LANES * dtype.itemsize
    length = -(-count // LANES) * row  # of an array in whole rows, bytes
    raw = np.zeros(4 * length + _CACHE_LINE, np.uint8)
    arrays = raw[-raw.ctypes.data % _CACHE_LINE :][: 4 * length].view(dtype).reshape(4, -1)
    for array, operand in zip(arrays[1:], operands):
        array[:count] = operand
    for start in range(0, length, row):
        instruction = STRUCTURES["Instruction"](None, *(start + length * index for index in range(4)), constant)
        function(ctypes.byref(instruction), arrays.ctypes.data, None)
    return arrays[0, :count]
