"""`TensorMemory` with loads and stores of a warp, as tcgen05.ld and st perform them, for tests of units."""

from __future__ import annotations

import ctypes

import numpy as np

from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.machine.state.tmem import (
    SHAPE_NUMBERS,
    SHAPES,
    TensorAccess,
    TensorCells,
    TensorMemory,
    split_address,
)


class TensorRegisters(TensorMemory):
    @property
    def floats(self) -> np.ndarray:
        return self.cells.view(np.float32)

    def load(self, warp: int, address: int, shape: str, repeat: int, split: int = 0, pack: bool = False) -> np.ndarray:
        """What the registers are then, uint32 [32 lanes, registers]."""
        rows = np.zeros((SHAPES.get(shape, (1, 1))[1] * repeat, 32), np.uint32)
        self._access(warp, address, rows, (False, SHAPE_NUMBERS[shape], repeat, split, pack))
        return rows.T

    def store(self, warp: int, address: int, shape: str, repeat: int, values: np.ndarray, split: int = 0) -> None:
        rows = np.ascontiguousarray(np.asarray(values, np.uint32).T)
        self._access(warp, address, rows, (True, SHAPE_NUMBERS[shape], repeat, split, False))

    def _access(self, warp: int, address: int, rows: np.ndarray, facts: tuple[int, ...]) -> None:
        access = TensorAccess(*facts, *split_address(address), len(rows))
        access.registers[: len(rows)] = [row.ctypes.data for row in rows]
        core = TensorCells(*self.addresses(0))
        own = access.lane // 32 == warp % 4 and access.lane % 32 in ((0,) if facts[1] == 0 else (0, 16))
        if not own or not library().tensor_access(ctypes.addressof(core), ctypes.addressof(access), False):
            self.refuse(warp, access)
            library().tensor_access(ctypes.addressof(core), ctypes.addressof(access), True)
