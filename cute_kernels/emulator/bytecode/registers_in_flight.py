"""A warp's registers in bytecode, in kernels that touch accumulators of wgmmas in flight.

In most kernels a wgmma reads and writes the registers that it names, when it completes (`wgmma.RegisterFile`). Where
instructions other than wgmmas touch them before, it fills what then *holds* its results: a copy holds what the original
holds, and a register that was overwritten holds nothing of it any more. Whoever reads a register in flight, which only
kernels do that no detector looks at, finds `wgmma.PENDING`.

All registers that hold one result were filled by the same operations before and will be by the same ones after, so that
an operation may take its old accumulator from any of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.units.matrix.wgmma import PENDING, RegisterFile

if TYPE_CHECKING:
    from cute_kernels.emulator.units.sm import Warp

_LANES = np.arange(32)
_CELL = 16  # words; every register of 32 lanes begins at a multiple of them
_NOTHING = -1
_ROWS = np.arange(256)


class HeldResults(RegisterFile):
    """The accumulators of one wgmma, wherever they are when it completes.

    Args:
        registers: of the warp.
        number: of the wgmma among those in flight.
        count: how many accumulators there are.
    """

    def __init__(self, registers: RegistersInFlight, number: int, count: int) -> None:
        self._registers, self._number, self._count = registers, number, count
        self.address = registers.words.ctypes.data

    def locate(self) -> None:
        held = self._registers.held[self._number]
        cells = np.flatnonzero(held != _NOTHING)
        self._rows, self._holders = held[cells], cells
        self._homes = np.full(self._count, self._registers.spare // _CELL)
        self._homes[self._rows] = cells
        self.place(_CELL * self._homes)

    def fill(self) -> None:
        homes = self._homes[self._rows]
        copies = np.flatnonzero(homes != self._holders)
        if len(copies):
            self._registers.copy(homes[copies], self._holders[copies])
        self._registers.complete(self._number)


class RegistersInFlight:
    """Which registers of a warp will be filled, and by what.

    Args:
        words: uint32, the warp's state.
        spare: index of 32 words that nobody reads, for results that no register holds any more.

    Attributes:
        held: of the wgmmas in flight, the row that each place holds of their results, or -1: [wgmmas, cells].
    """

    def __init__(self, words: np.ndarray, spare: int) -> None:
        self.words, self.spare = words, spare
        self._cells = words.reshape(-1, _CELL)
        self.held = np.full((0, len(words) // _CELL), _NOTHING, np.int16)
        self._free: list[int] = []

    def issue(self, places: np.ndarray) -> HeldResults:
        """The accumulators of a wgmma that is issued now."""
        if not self._free:
            self._free.append(len(self.held))
            self.held = np.pad(self.held, ((0, 1), (0, 0)), constant_values=_NOTHING)
        number = self._free.pop()
        self.held[number, places // _CELL] = _ROWS[: len(places)]
        return HeldResults(self, number, len(places))

    def complete(self, number: int) -> None:
        """The results of a wgmma are where they belong."""
        self.held[number] = _NOTHING
        self._free.append(number)

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies what cells hold now to others, all at once."""
        lanes = np.concatenate([self._cells[sources], self._cells[sources + 1]], axis=1)
        self._cells[targets], self._cells[targets + 1] = lanes[:, :_CELL], lanes[:, _CELL:]

    def read(self, places: np.ndarray) -> np.ndarray:
        """Values that instructions find in registers, uint32 [registers, 32]."""
        found = self.words[places[:, None] + _LANES]
        found[(self.held[:, places // _CELL] != _NOTHING).any(axis=0)] = PENDING
        return found

    def overwrite(self, places: np.ndarray) -> None:
        """Registers will be written, perhaps not in all lanes: what they waited for is lost."""
        self.words[places[:, None] + _LANES] = self.read(places)
        self.held[:, places // _CELL] = _NOTHING

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies registers, all at once, with what they will be filled with."""
        sources, targets = sources // _CELL, targets // _CELL
        self.copy(sources, targets)
        self.held[:, targets] = self.held[:, sources]

    def move_lanes(self, sources: np.ndarray, targets: np.ndarray, mask: int) -> None:
        """Copies what can be read to some lanes of registers, all at once."""
        values = self.read(sources)
        self.overwrite(targets)
        lanes = np.flatnonzero(mask >> _LANES & 1)
        self.words[targets[:, None] + lanes] = values[:, lanes]


# --- what bytecode calls ----------------------------------------------------------------------------------------------


def move_in_flight(warp: Warp, mask: int, sources: np.ndarray, targets: np.ndarray) -> None:
    """Copies registers that may hold accumulators in flight, as the program asks for.

    Raises:
        UnsupportedPTX: some lanes would have a copy, and others not; without the detector, they get what can be read.
    """
    whole = mask == warp.live
    if not whole and warp.cluster.options.looks_for("registers"):
        raise UnsupportedPTX(
            f"lanes {mask:#010x} of a warp with live lanes {warp.live:#010x} copy an accumulator of a wgmma that no "
            "wgmma.wait_group has waited for: only whole warps can"
        )
    if whole:
        warp.code.in_flight.move(sources, targets)
    else:
        warp.code.in_flight.move_lanes(sources, targets, mask)


def rearrange_in_flight(warp: Warp, mask: int, sources: np.ndarray, targets: np.ndarray) -> None:
    """Rearranges registers for a wgmma, which asks for the whole warp itself."""
    warp.code.in_flight.move(sources, targets)


def read_in_flight(warp: Warp, mask: int, source: np.ndarray, target: int) -> None:
    """Leaves what an instruction finds in a register that may be in flight."""
    registers = warp.code.in_flight
    registers.words[target : target + 32] = registers.read(source)[0]


def overwrite_in_flight(warp: Warp, mask: int, places: np.ndarray) -> None:
    """Registers that may hold accumulators in flight are about to be written."""
    warp.code.in_flight.overwrite(places)
