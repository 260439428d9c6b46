"""Matrices of a warp between memory and registers: ldmatrix, stmatrix, movmatrix. Of 16-bit elements they are 8x8.

Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i. Lane l holds, in register i, the elements
``2 * (l % 4)`` and the next one of row ``l / 4``; with ``.trans`` of column ``l / 4``.

Of 8-bit elements, always transposed, ldmatrix loads 16x16 (.m16n16), which two registers of a lane hold, and stmatrix
stores 16x8 (.m16n8), from one. They are 16 and 8 rows of 16 bytes in memory. Register r of ldmatrix holds, of column
``l / 4 + 8 * r``, four rows from ``4 * (l % 4)`` on; the one of stmatrix, of columns ``l / 4`` and 8 behind it, two
rows each from ``2 * (l % 4)`` on. (CUTLASS, copy_sm100.hpp and copy_traits_sm100.hpp)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.graph.block import BlockBuilder, Call
from cute_kernels.emulator.graph.values import Value
from cute_kernels.emulator.instructions.accesses import space_of
from cute_kernels.emulator.instructions.memory import address_value
from cute_kernels.emulator.instructions.sync import require_whole_warp
from cute_kernels.emulator.observe.races.memory_order import watch
from cute_kernels.emulator.ptx.decode import Instruction, Vector
from cute_kernels.emulator.ptx.families import always_varies, family, qualifiers

if TYPE_CHECKING:
    from cute_kernels.emulator.state.lane_masks import LaneValues
    from cute_kernels.emulator.state.warp import Warp

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


def registers_of_bytes(rows: np.ndarray) -> np.ndarray:
    """ldmatrix.m16n16: uint8 [16 n, 16 bytes] -> uint32 [2 n, 32 lanes]."""
    parts = rows.reshape(-1, 4, 4, 2, 8).transpose(0, 3, 4, 1, 2)
    return np.ascontiguousarray(parts).reshape(-1, 4).view(np.uint32).reshape(-1, 32)


def bytes_of_registers(registers: np.ndarray) -> np.ndarray:
    """stmatrix.m16n8: uint32 [n, 32 lanes] -> uint8 [8 n, 16 bytes]."""
    parts = np.ascontiguousarray(registers).view(np.uint8).reshape(-1, 8, 4, 2, 2).transpose(0, 2, 4, 3, 1)
    return np.ascontiguousarray(parts).reshape(-1, _ROW_BYTES)


def _row_addresses(warp: Warp, mask: int, space: str, address: LaneValues, rows: int, name: str) -> np.ndarray:
    """Addresses of rows in shared memory, int64 [rows]; ``space`` is shared or generic, as for the functions below."""
    require_whole_warp(warp, mask, name)
    given = np.broadcast_to(np.asarray(address, np.int64), (32,))[:rows]
    places = [space_of(warp, space, each) for each in given.tolist()]
    for (found, _), each in zip(places, given.tolist()):
        if found != "shared":
            message = f"{name} at the generic address {each:#x}, which is not one of shared memory"
            raise IllegalAccess(message).know("out-of-bounds")
    return np.array([place for _, place in places], np.int64)


def load_matrix(warp: Warp, mask: int, space: str, address: LaneValues, count: int, transposed: bool) -> np.ndarray:
    """ldmatrix of 16-bit elements: uint32 [count, 32] (one register: [32])."""
    registers = registers_of_rows(_load(warp, mask, space, address, _ROWS * count), transposed)
    return registers if count > 1 else registers[0]


def load_bytes(warp: Warp, mask: int, space: str, address: LaneValues, count: int) -> np.ndarray:
    """ldmatrix of 8-bit elements: uint32 [2 count, 32]."""
    return registers_of_bytes(_load(warp, mask, space, address, 16 * count))


def _load(warp: Warp, mask: int, space: str, address: LaneValues, rows: int) -> np.ndarray:
    addresses = _row_addresses(warp, mask, space, address, rows, "ldmatrix")
    if warp.cluster.meter is not None:
        warp.cluster.meter.matrices("ldmatrix", addresses)
    raw = warp.cluster.memory.load(addresses, _ROW_BYTES)
    watch(warp, (1 << len(addresses)) - 1, "shared", addresses, _ROW_BYTES, False)
    return np.ascontiguousarray(raw)


def store_matrix(
    warp: Warp, mask: int, space: str, address: LaneValues, count: int, transposed: bool, values: tuple[Any, ...]
) -> None:
    """stmatrix of 16-bit elements."""
    _store(warp, mask, space, address, rows_of_registers(_registers(values), transposed))


def store_bytes(warp: Warp, mask: int, space: str, address: LaneValues, values: tuple[Any, ...]) -> None:
    """stmatrix of 8-bit elements."""
    _store(warp, mask, space, address, bytes_of_registers(_registers(values)))


def _registers(values: tuple[Any, ...]) -> np.ndarray:
    return np.stack([np.broadcast_to(np.asarray(value, np.uint32), (32,)) for value in values])


def _store(warp: Warp, mask: int, space: str, address: LaneValues, rows: np.ndarray) -> None:
    addresses = _row_addresses(warp, mask, space, address, len(rows), "stmatrix")
    warp.cluster.progress += 1
    if warp.cluster.meter is not None:
        warp.cluster.meter.matrices("stmatrix", addresses)
    warp.cluster.memory.store(addresses, rows)
    watch(warp, (1 << len(addresses)) - 1, "shared", addresses, _ROW_BYTES, True)


def _place(block: BlockBuilder, instruction: Instruction, operand: Any) -> tuple[str, Value]:
    """(shared or generic, address)."""
    space = "shared" if {"shared", "shared::cta"} & set(instruction.parts) else "generic"
    return space, address_value(block, operand, 64 if space == "generic" else 32)


def _form(instruction: Instruction, registers: Any, shape: str) -> tuple[int, bool, bool, tuple[Any, ...]]:
    """(matrices, transposed, 8-bit elements, register operands); ``shape`` is that of 8-bit elements."""
    parts = qualifiers(
        instruction, "sync", "aligned", "m8n8", shape, *_COUNTS, "trans", "shared", "shared::cta", "b16", "b8"
    )
    counts = [_COUNTS[part] for part in parts if part in _COUNTS]
    octets, each = parts[-1] == "b8", 2 if shape == "m16n16" else 1
    legal = shape in parts and "trans" in parts if octets else "m8n8" in parts and parts[-1] == "b16"
    if len(counts) != 1 or not legal or octets and each * counts[0] > 4:
        few = "x1 or x2" if each == 2 else "x1, x2 or x4"
        raise instruction.refuse(
            f"m8n8 matrices of b16, x1, x2 or x4, and {shape} ones of b8, {few}, transposed, are implemented"
        )
    items = registers.items if isinstance(registers, Vector) else (registers,)
    needed = counts[0] * (each if octets else 1)
    if len(items) != needed:
        raise instruction.refuse(f"{needed} registers are needed")
    return counts[0], "trans" in parts, octets, items


@family("ldmatrix", varies=always_varies)
def _ldmatrix(block: BlockBuilder, instruction: Instruction) -> None:
    """ldmatrix.m8n8.b16, with .trans; .m16n16.trans.b8; of shared memory, by generic addresses too."""
    count, transposed, octets, items = _form(instruction, instruction.operands[0], "m16n16")
    space, address = _place(block, instruction, instruction.operands[1])
    kinds = [("u32", False)] * len(items)
    if octets:
        results = block.call(load_bytes, space, address, count, results=kinds)
    else:
        results = block.call(load_matrix, space, address, count, transposed, results=kinds)
    for item, value in zip(items, results):
        block.define(item, value)


@family("stmatrix", destinations=0)
def _stmatrix(block: BlockBuilder, instruction: Instruction) -> None:
    """stmatrix.m8n8.b16, with .trans; .m16n8.trans.b8; to shared memory, by generic addresses too."""
    count, transposed, octets, items = _form(instruction, instruction.operands[1], "m16n8")
    space, address = _place(block, instruction, instruction.operands[0])
    values = [block.whole(block.value(item, 32)) for item in items]
    call = Call(store_bytes, [space, address, tuple(values)])
    if not octets:
        call = Call(store_matrix, [space, address, count, transposed, tuple(values)])
    block.anchor(call, [], [address, *values])


def transpose(warp: Warp, mask: int, value: LaneValues) -> np.ndarray:
    """movmatrix: uint32 [32]."""
    require_whole_warp(warp, mask, "movmatrix")
    return registers_of_rows(rows_of_registers(_registers((value,)), False), True)[0]


@family("movmatrix", varies=always_varies)
def _movmatrix(block: BlockBuilder, instruction: Instruction) -> None:
    """movmatrix.m8n8.trans.b16: a matrix in registers, transposed."""
    if instruction.parts[1:] != ("sync", "aligned", "m8n8", "trans", "b16"):
        raise instruction.refuse("movmatrix.sync.aligned.m8n8.trans.b16 is implemented")
    value = block.value(instruction.operands[1], 32)
    (result,) = block.call(transpose, value, results=[("u32", False)])
    block.define(instruction.operands[0], result)
