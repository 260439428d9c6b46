"""Accumulators of wgmma as the PTX ISA lays them out in registers, for tests: NumPy, beside the core's C."""

from __future__ import annotations

import numpy as np

from cute_kernels.emulator.machine.units.matrix.wgmma import WARPS


def rows_of_accumulators(registers: np.ndarray, halves: bool = False) -> np.ndarray:
    """Rows of D that one warp holds: 32 bits [n / 2 registers, 32 lanes] -> [16 rows, n].

    Registers 4 g to 4 g + 3 of lane l are columns ``8 g + 2 * (l % 4)`` and the next one, of row ``l / 4`` and then of
    row ``l / 4 + 8``. With ``halves`` (FP16), a register is both columns of a row: [n / 4 registers, 32 lanes].
    """
    if halves:
        pairs = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, 2, 8, 4, 2)
        return pairs.transpose(1, 2, 0, 3, 4).reshape(16, -1).astype(np.uint32)
    groups = len(registers) // 4
    return registers.reshape(groups, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, 8 * groups)


def accumulators_of_rows(rows: np.ndarray, halves: bool = False) -> np.ndarray:
    """The inverse of `rows_of_accumulators` for all warps: [64, n] -> [4 warps, registers, 32 lanes]."""
    groups = rows.shape[1] // 8
    split = rows.reshape(WARPS, 2, 8, groups, 4, 2)
    if halves:
        pairs = np.ascontiguousarray(split.transpose(0, 3, 1, 2, 4, 5).astype(np.uint16))
        return pairs.view(np.uint32).reshape(WARPS, 2 * groups, 32)
    return split.transpose(0, 3, 1, 5, 2, 4).reshape(WARPS, 4 * groups, 32)
