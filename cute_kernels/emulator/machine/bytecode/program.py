"""Bytecode of a kernel, which the interpreter of the core runs (``core/interpreter.c``).

An instruction is the address of a function of the core and its operands: mostly offsets in the state of a warp, which
holds a header, counts, registers, constants and intermediate values (`Instruction` and `WarpHeader` of
``core/state.h``).
"""

from __future__ import annotations

import copy
import ctypes
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.pure_operations import operations
from cute_kernels.emulator.machine.bytecode.sites import Site
from cute_kernels.emulator.machine.graph.values import FULL, OfWarp
from cute_kernels.emulator.machine.units.matrix.wgmma import Form as WgmmaForm

LANES = CONSTANTS["LANES"]
_INSTRUCTION = struct.Struct("=QIIIIq")
assert _INSTRUCTION.size == ctypes.sizeof(STRUCTURES["Instruction"])


@dataclass
class Layout:
    """Where a warp's state is, in bytes from its start; grows while the kernel is lowered."""

    slots: dict[str, int] = field(default_factory=dict)  # offset per register and per constant of a warp, by its name
    # constants of a warp: (name, function of the warp, bits, uniform)
    of_warps: list[tuple[str, OfWarp, int, bool]] = field(default_factory=list)
    constants: dict[bytes, int] = field(default_factory=dict)  # offset of every literal by its bytes
    size: int = 0

    def new(self, nbytes: int) -> int:
        """A new place; rows of lanes lie on cache lines, shorter ones on multiples of their length."""
        align = min(64, nbytes)
        offset = -(-self.size // align) * align
        self.size = offset + nbytes
        return offset

    def slot(self, name: str, bits: int, uniform: bool) -> int:
        if name not in self.slots:
            self.slots[name] = self.new(row_bytes(bits, uniform))
        return self.slots[name]

    def constant(self, value: int, bits: int, lanes: bool) -> int:
        """The place of a literal, as all lanes share it or in every lane."""
        if not lanes:
            data = value.to_bytes(8, "little")
        elif bits == 1:
            data = (FULL if value else 0).to_bytes(8, "little")
        else:
            data = value.to_bytes(bits // 8, "little") * LANES
        if data not in self.constants:
            self.constants[data] = self.new(len(data))
        return self.constants[data]


def row_bytes(bits: int, uniform: bool) -> int:
    """Size of a value in the state of a warp."""
    return 8 if uniform or bits == 1 else LANES * bits // 8


class Program:
    """State that the blocks of a kernel share while they are lowered: code, sites, the state's layout. ``header``:
    bytes of the state before the registers; ``detectors``: whether instructions have to be reported to them."""

    def __init__(self, header: int, detectors: bool) -> None:
        self.detectors = detectors
        self.layout = Layout(size=header)
        self.sites: list[Site] = []
        self.rows = 1  # of the exchange area
        self.code: list[list[int]] = []
        self.lists: list[int] = []
        self.wgmmas: list[WgmmaForm] = []
        self._temporary: dict[int, list[int]] = {}  # all places of intermediate values, by size

    def site(self, site: Site) -> int:
        """The number of a new site."""
        self.sites.append(site)
        return len(self.sites) - 1

    def reserve(self, rows: int) -> None:
        """Makes the exchange area at least this large."""
        self.rows = max(self.rows, rows)

    def put(
        self, name: str, *, lanes: bool = True, d: int = 0, a: int = 0, b: int = 0, c: int = 0, imm: int = 0
    ) -> list[int]:
        """Appends an instruction, which may be changed as long as the program is not finished."""
        instruction = [operations()[name, lanes], d, a, b, c, imm]
        self.code.append(instruction)
        return instruction

    def list(self, items: Iterable[int]) -> int:
        """The index of a list of operands."""
        index = len(self.lists)
        self.lists.extend(items)
        return index

    def places(self) -> dict[int, list[int]]:
        """Free places of intermediate values, by size, for a block; `temporary` takes from them."""
        return {size: list(places) for size, places in self._temporary.items()}

    def temporary(self, free: dict[int, list[int]], nbytes: int) -> int:
        places = free.setdefault(nbytes, [])
        if not places:
            places.append(self.layout.new(nbytes))
            self._temporary.setdefault(nbytes, []).append(places[0])
        return places.pop()


class Bytecode:
    """A finished program in memory, which lives as long as this object. ``program``: all of it. ``starts``: index of
    the first instruction of every block, and of the exit. ``address``: of a `Program` of ``core/state.h``.
    ``template``: the state of a warp that has not begun, without its registers, uint8."""

    def __init__(self, program: Program, starts: Sequence[int]) -> None:
        code = b"".join(_INSTRUCTION.pack(*instruction) for instruction in program.code)
        lists = np.array([*program.lists, 0], np.uint32)
        self._place(np.frombuffer(code, np.uint64).copy(), np.array(starts, np.int32), lists)
        self.template = np.zeros(-(-program.layout.size // 64) * 64, np.uint8)
        for data, offset in program.layout.constants.items():
            self.template[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def _place(self, code: np.ndarray, starts: np.ndarray, lists: np.ndarray) -> None:
        self._arrays = code, starts, lists
        self._program = STRUCTURES["Program"](*(array.ctypes.data for array in self._arrays), len(starts) - 1)
        self.address = ctypes.addressof(self._program)

    def copy(self) -> Bytecode:
        """Another one in memory, for `stop_at`."""
        made = copy.copy(self)
        code, starts, lists = self._arrays
        made._place(code.copy(), starts, lists)
        return made

    def stop_at(self, blocks: Iterable[int]) -> None:
        """From now on, ``SITE_STOP`` is called in front of these blocks, and a warp's header has the one it is in."""
        code, starts, _ = self._arrays
        functions = code.reshape(-1, _INSTRUCTION.size // 8)[:, 0]
        functions[starts[:-1]] = operations()["follow", True]
        functions[starts[list(blocks)]] = operations()["stop", True]
