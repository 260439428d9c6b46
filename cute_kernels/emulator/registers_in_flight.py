"""A warp's registers in bytecode, in kernels that touch accumulators of wgmmas in flight.

In most kernels a wgmma reads and writes the registers that it names, when it completes (`wgmma.RegisterFile`). Where
instructions other than wgmmas touch them before, it fills what then *holds* its results: a copy holds what the original
holds, and a register that was overwritten holds nothing of it any more. Whoever reads a register in flight, which only
kernels do that no detector looks at, finds `wgmma.PENDING`.

All registers that hold one result were filled by the same operations before and will be by the same ones after, so that
an operation may take its old accumulator from any of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.wgmma import PENDING, RegisterFile

_LANES = np.arange(32)


class HeldResults(RegisterFile):
    """The accumulators of one wgmma, wherever they are when it completes.

    Args:
        registers: of the warp.
        places: indices of the first lanes of the accumulators in the warp's state, in their order.
    """

    def __init__(self, registers: RegistersInFlight, places: np.ndarray) -> None:
        self._registers, self._count = registers, len(places)
        self._holders = {int(place): row for row, place in enumerate(places)}
        super().__init__(registers.words, places)

    def __contains__(self, place: int) -> bool:
        return place in self._holders

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Registers take over what others hold, all at once: (source, target) each."""
        taken = [(target, self._holders.get(source)) for source, target in pairs]
        self.drop(target for target, _ in taken)
        self._holders.update((target, row) for target, row in taken if row is not None)

    def drop(self, places: Iterable[int]) -> None:
        """These registers are overwritten."""
        for place in places:
            self._holders.pop(place, None)

    def locate(self) -> None:
        homes = np.full(self._count, self._registers.spare)
        for place, row in self._holders.items():
            homes[row] = place
        self.place(homes)

    def fill(self) -> None:
        words, homes = self._registers.words, {row: place for place, row in self._holders.items()}
        for place, row in self._holders.items():
            if homes[row] != place:
                words[place : place + 32] = words[homes[row] : homes[row] + 32]
        self._registers.pending.remove(self)


class RegistersInFlight:
    """Which registers of a warp will be filled, and by what.

    Args:
        words: uint32, the warp's state.
        spare: index of 32 words that nobody reads, for results that no register holds any more.

    Attributes:
        pending: of wgmmas that have not completed, oldest first.
    """

    def __init__(self, words: np.ndarray, spare: int) -> None:
        self.words, self.spare = words, spare
        self.pending: list[HeldResults] = []

    def issue(self, places: np.ndarray) -> HeldResults:
        """The accumulators of a wgmma that is issued now."""
        results = HeldResults(self, places)
        self.pending.append(results)
        return results

    def read(self, places: np.ndarray) -> np.ndarray:
        """What instructions find in registers, uint32 [registers, 32]."""
        found = self.words[places[:, None] + _LANES]
        for row, place in enumerate(places.tolist()):
            if any(place in results for results in self.pending):
                found[row] = PENDING
        return found

    def overwrite(self, places: np.ndarray) -> None:
        """Registers will be written, perhaps not in all lanes: what they waited for is lost."""
        for place, values in zip(places.tolist(), self.read(places)):
            self.words[place : place + 32] = values
        for results in self.pending:
            results.drop(places.tolist())

    def move(self, sources: np.ndarray, targets: np.ndarray, lanes: int, whole: bool) -> None:
        """Copies registers, all at once.

        Args:
            lanes: the mask of those that execute.
            whole: no lane of the warp is missing. Else a copy holds what can be read, and is not filled.
        """
        if whole:
            values = self.words[sources[:, None] + _LANES]
            for results in self.pending:
                results.copy(zip(sources.tolist(), targets.tolist()))
        else:
            values = self.read(sources)
            self.overwrite(targets)
        mask = (lanes >> _LANES & 1).astype(bool)
        for place, row in zip(targets.tolist(), values):
            np.copyto(self.words[place : place + 32], row, where=mask)


# --- what bytecode calls ----------------------------------------------------------------------------------------------


def move_in_flight(warp: Any, mask: int, sources: np.ndarray, targets: np.ndarray) -> None:
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
    warp.code.in_flight.move(sources, targets, mask, whole)


def rearrange_in_flight(warp: Any, mask: int, sources: np.ndarray, targets: np.ndarray) -> None:
    """The same for a wgmma, which asks for the whole warp itself."""
    warp.code.in_flight.move(sources, targets, mask, True)


def read_in_flight(warp: Any, mask: int, source: np.ndarray, target: int) -> None:
    """Leaves what an instruction finds in a register that may be in flight."""
    registers = warp.code.in_flight
    registers.words[target : target + 32] = registers.read(source)[0]


def overwrite_in_flight(warp: Any, mask: int, places: np.ndarray) -> None:
    """Registers that may hold accumulators in flight are about to be written."""
    warp.code.in_flight.overwrite(places)
