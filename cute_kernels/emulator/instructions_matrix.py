"""Warp-wide loads and stores of 8x8 matrices of 16-bit elements: ldmatrix, stmatrix.

Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i. Lane l holds, in register i, the elements
``2 * (l % 4)`` and the next one of row ``l / 4``; with ``.trans`` of column ``l / 4``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_kernels.emulator.block import BlockBuilder, Call
from cute_kernels.emulator.decode import Instruction, Vector
from cute_kernels.emulator.instructions_memory import address_value
from cute_kernels.emulator.instructions_registry import always_varies, family, qualifiers
from cute_kernels.emulator.instructions_sync import require_whole_warp
from cute_kernels.emulator.memory_order import watch

_ROWS = 8
_ROW_BYTES = 16
_COUNTS = {"x1": 1, "x2": 2, "x4": 4}


def rows_of_registers(registers: np.ndarray, transposed: bool) -> np.ndarray:
    """Matrix rows in memory order: uint32 [n, 32 lanes] -> uint8 [8 n, 16 bytes]."""
    if not transposed:
        return np.ascontiguousarray(registers).view(np.uint8).reshape(-1, _ROW_BYTES)
    halves = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, 8, 4, 2)
    return np.ascontiguousarray(halves.transpose(0, 2, 3, 1)).view(np.uint8).reshape(-1, _ROW_BYTES)


def registers_of_rows(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """The inverse: uint8 [8 n, 16 bytes] -> uint32 [n, 32 lanes]."""
    if transposed:
        halves = rows.view(np.uint16).reshape(-1, 4, 2, 8)
        rows = np.ascontiguousarray(halves.transpose(0, 3, 1, 2))
    return rows.view(np.uint32).reshape(-1, 32)


def _row_addresses(warp: Any, mask: int, address: Any, count: int, name: str) -> np.ndarray:
    require_whole_warp(warp, mask, name)
    return np.broadcast_to(np.asarray(address, np.int64), (32,))[: _ROWS * count]


def load_matrix(warp: Any, mask: int, address: Any, count: int, transposed: bool) -> np.ndarray:
    """ldmatrix: uint32 [count, 32] (one register: [32])."""
    addresses = _row_addresses(warp, mask, address, count, "ldmatrix")
    if warp.cluster.meter is not None:
        warp.cluster.meter.matrices("ldmatrix", addresses)
    raw = warp.cluster.memory.load(addresses, _ROW_BYTES)
    watch(warp, (1 << len(addresses)) - 1, "shared", addresses[None], _ROW_BYTES, False)
    registers = registers_of_rows(np.ascontiguousarray(raw), transposed)
    return registers if count > 1 else registers[0]


def store_matrix(
    warp: Any, mask: int, address: Any, count: int, transposed: bool, values: tuple[Any, ...]
) -> None:
    """stmatrix."""
    addresses = _row_addresses(warp, mask, address, count, "stmatrix")
    warp.cluster.progress += 1
    if warp.cluster.meter is not None:
        warp.cluster.meter.matrices("stmatrix", addresses)
    registers = np.stack([np.broadcast_to(np.asarray(value, np.uint32), (32,)) for value in values])
    warp.cluster.memory.store(addresses, rows_of_registers(registers, transposed))
    watch(warp, (1 << len(addresses)) - 1, "shared", addresses[None], _ROW_BYTES, True)


def _form(instruction: Instruction, registers: Any) -> tuple[int, bool, tuple[Any, ...]]:
    """(matrices, transposed, register operands)."""
    parts = qualifiers(instruction, "sync", "aligned", "m8n8", *_COUNTS, "trans", "shared", "shared::cta", "b16")
    counts = [_COUNTS[part] for part in parts if part in _COUNTS]
    if len(counts) != 1 or "m8n8" not in parts or parts[-1] != "b16":
        raise instruction.refuse("m8n8 matrices of b16, x1, x2 or x4, are implemented")
    if not {"shared", "shared::cta"} & set(parts):
        raise instruction.refuse("a generic address is not implemented; .shared is")
    items = registers.items if isinstance(registers, Vector) else (registers,)
    if len(items) != counts[0]:
        raise instruction.refuse(f"{counts[0]} registers are needed")
    return counts[0], "trans" in parts, items


@family("ldmatrix", varies=always_varies)
def _ldmatrix(block: BlockBuilder, instruction: Instruction) -> None:
    """ldmatrix.m8n8.b16, with .trans."""
    count, transposed, items = _form(instruction, instruction.operands[0])
    address = address_value(block, instruction.operands[1])
    results = block.call(load_matrix, address, count, transposed, results=[("u32", False)] * count)
    for item, value in zip(items, results):
        block.define(item, value)


@family("stmatrix", destinations=0)
def _stmatrix(block: BlockBuilder, instruction: Instruction) -> None:
    """stmatrix.m8n8.b16, with .trans."""
    count, transposed, items = _form(instruction, instruction.operands[1])
    address = address_value(block, instruction.operands[0])
    values = [block.whole(block.value(item, 32)) for item in items]
    block.anchor(Call(store_matrix, [address, count, transposed, tuple(values)]), [], [address, *values])
