"""Loads and stores as Python performs them for warps: which state space, the checks, the moves; local memory of a warp.

Generated code calls these functions, and bytecode where the core leaves an access.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.emulator.counters import counting
from cute_kernels.emulator.decode import Instruction
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess
from cute_kernels.emulator.instructions_move import (
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    block_lanes,
    parameter_offset,
)
from cute_kernels.emulator.memory_order import Strength, distinct, watch, watch_uniform
from cute_kernels.emulator.values import FULL


def space_of(warp: Any, space: str, address: int) -> tuple[str, int]:
    """(global, shared or param; address in it) of an address in ``space``."""
    if space != "generic":
        return space, address
    if address >= PARAM_WINDOW:
        return "param", address
    if address >= LOCAL_WINDOW:
        return "local", address - LOCAL_WINDOW
    if address >= SHARED_WINDOW:
        return "shared", address - SHARED_WINDOW
    return "global", address


def view_bytes(warp: Any, space: str, address: int, nbytes: int) -> np.ndarray | bytes:
    """Bytes for a read by one thread."""
    given = address
    space, address = space_of(warp, space, address)
    if space == "local":
        message = f"load of {nbytes} bytes at {given:#x}, an address of local memory, another place in each lane"
        raise IllegalAccess(f"{message}: one read for all lanes is not implemented").know("out-of-bounds")
    if space == "param":
        start = parameter_offset(address)
        if start < 0 or start + nbytes > len(warp.cluster.params):
            size = len(warp.cluster.params)
            message = f"load of {nbytes} bytes at offset {start} of {size} parameter bytes"
            raise IllegalAccess(message).know("out-of-bounds")
        return warp.cluster.params[start : start + nbytes]
    if space == "shared":
        return warp.cluster.memory.view(address & FULL, nbytes)
    return warp.cluster.gmem.view(address, nbytes)


def load_uniform(
    warp: Any, mask: int, space: str, address: int, size: int, count: int, strength: Strength | None
) -> Any:
    """One load for all lanes: an int, or a tuple of ``count`` ints."""
    if address % (size * count):
        raise IllegalAccess(f"misaligned {space} load of {size * count} bytes at {address:#x}").know("misaligned")
    raw = bytes(view_bytes(warp, space, address, size * count))
    warp.cluster.polls += strength is not None
    if warp.cluster.meter is not None:
        warp.cluster.meter.uniform("ld", *space_of(warp, space, address), size * count, mask)
    if warp.cluster.tracker is not None:
        watch_uniform(warp, mask, *space_of(warp, space, address), size * count, False, strength)
    if count == 1:
        return int.from_bytes(raw, "little")
    return tuple(int.from_bytes(raw[i : i + size], "little") for i in range(0, size * count, size))


def load_lanes(
    warp: Any,
    mask: int,
    space: str,
    addresses: np.ndarray,
    size: int,
    count: int,
    dtype: Any,
    strength: Strength | None = None,
) -> np.ndarray:
    """n loads of ``count`` elements by each lane: addresses int64 [n, 32] -> [n * count, 32]."""
    n = len(addresses)
    warp.cluster.polls += strength is not None
    if space == "generic":
        space, shift = _generic_lanes(warp, mask, addresses)
        addresses = addresses - shift
    if space == "local":
        raw = local_memory(warp).load(addresses, mask, size * count).view(dtype)
        return raw.transpose(0, 2, 1).reshape(n * count, 32)
    if warp.cluster.meter is not None:
        warp.cluster.meter.lanes("ld", space, addresses, size * count, mask)
    memory = warp.cluster.memory if space == "shared" else warp.cluster.gmem
    if mask == FULL:
        raw = memory.load(addresses.reshape(-1), size * count).view(dtype).reshape(n, 32, count)
        watch(warp, mask, space, addresses, size * count, False, strength)
        return raw.transpose(0, 2, 1).reshape(n * count, 32)
    lanes = block_lanes(mask)
    addresses = addresses[:, lanes]
    raw = memory.load(addresses.reshape(-1), size * count).view(dtype).reshape(n, -1, count)
    watch(warp, mask, space, addresses, size * count, False, strength)
    result = np.zeros((n * count, 32), dtype)
    result[:, lanes] = raw.transpose(0, 2, 1).reshape(n * count, -1)
    return result


def store_lanes(
    warp: Any,
    mask: int,
    space: str,
    addresses: np.ndarray,
    data: np.ndarray,
    size: int,
    count: int,
    strength: Strength | None = None,
) -> None:
    """n stores of ``count`` elements by each lane: addresses int64 [n, 32], data [n * count, 32] (broadcast)."""
    n = len(addresses)
    warp.cluster.progress += 1
    if space == "generic":
        space, shift = _generic_lanes(warp, mask, addresses)
        addresses = addresses - shift
    if space == "local":
        lanes = np.broadcast_to(data, (n * count, 32)).reshape(n, count, 32).transpose(0, 2, 1)
        raw = np.ascontiguousarray(lanes).view(np.uint8).reshape(n, 32, size * count)
        local_memory(warp).store(addresses, mask, raw)
        return
    if warp.cluster.meter is not None:
        warp.cluster.meter.lanes("st", space, addresses, size * count, mask)
    data = np.broadcast_to(data, (n * count, 32)).reshape(n, count, 32).transpose(0, 2, 1)
    if mask != FULL:
        lanes = block_lanes(mask)
        addresses, data = addresses[:, lanes], data[:, lanes]
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1, size * count)
    if space == "shared":
        warp.cluster.memory.store(addresses.reshape(-1), raw)
    else:
        warp.cluster.gmem.store(addresses.reshape(-1), raw)
    watch(warp, mask, space, addresses, size * count, True, strength)


def load_merged(
    warp: Any, mask: int, space: str, addresses: np.ndarray, size: int, count: int, dtype: Any,
    instructions: tuple[Instruction, ...],
) -> np.ndarray:  # fmt: skip
    """`load_lanes` of neighbouring instructions, a row of ``addresses`` each: as if one followed the other.

    Raises:
        EmulatorError: an access is illegal or races; it names the instruction whose access that is.
    """
    try:
        with counting(warp.cluster.meter, instructions):
            return load_lanes(warp, mask, space, addresses, size, count, dtype)
    except EmulatorError:  # of one of them; or of none, where each by itself addresses another state space
        rows = [
            _one_of_merged(instruction, load_lanes, warp, mask, space, addresses[i : i + 1], size, count, dtype)
            for i, instruction in enumerate(instructions)
        ]
        return np.concatenate(rows)


def store_merged(
    warp: Any, mask: int, space: str, addresses: np.ndarray, data: np.ndarray, size: int, count: int,
    instructions: tuple[Instruction, ...],
) -> None:  # fmt: skip
    """`store_lanes` of neighbouring instructions, a row of ``addresses`` each: as if one followed the other.

    Raises:
        EmulatorError: an access is illegal or races, also one with the other; it names the instruction.
    """
    if warp.cluster.tracker is None or distinct(addresses[:, block_lanes(mask)]):
        try:
            with counting(warp.cluster.meter, instructions):
                return store_lanes(warp, mask, space, addresses, data, size, count)
        except EmulatorError:  # as in `load_merged`
            pass
    data = np.broadcast_to(data, (len(addresses) * count, 32))
    for i, instruction in enumerate(instructions):
        values = data[i * count : (i + 1) * count]
        _one_of_merged(instruction, store_lanes, warp, mask, space, addresses[i : i + 1], values, size, count)


def _one_of_merged(instruction: Instruction, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except EmulatorError as error:
        text, source = instruction.text, instruction.source or None
        # Not from the error of the merged access: generated code has one line for all of them.
        raise error.locate(ptx_line=instruction.line, instruction=text, source=source) from None


def _generic_lanes(warp: Any, mask: int, addresses: np.ndarray) -> tuple[str, int]:
    active = addresses[..., block_lanes(mask)]
    low, high = int(active.min()), int(active.max())
    for space, start, end in (
        ("global", 0, SHARED_WINDOW),
        ("shared", SHARED_WINDOW, LOCAL_WINDOW),
        ("local", LOCAL_WINDOW, PARAM_WINDOW),
    ):
        if start <= low and high < end:
            return space, start
    raise IllegalAccess("a generic access whose lanes address different spaces, or parameters, is not implemented")


def local_memory(warp: Any) -> LocalMemory:
    """Raises IllegalAccess where the kernel declares no local memory."""
    if not hasattr(warp, "local"):
        raise IllegalAccess("access to local memory by a kernel that declares none")
    return warp.local


class LocalMemory:
    """Local memory of one warp: ``nbytes`` for each lane, at the same addresses."""

    def __init__(self, nbytes: int) -> None:
        self.cells = np.zeros((32, nbytes), np.uint8)

    def _places(self, addresses: np.ndarray, mask: int, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Lanes [lanes, 1] and bytes [n, lanes, nbytes] of accesses [n, 32]."""
        lanes = np.flatnonzero(block_lanes(mask))
        first = addresses[:, lanes]
        if (first % nbytes).any() or (first < 0).any() or (first + nbytes > self.cells.shape[1]).any():
            raise IllegalAccess(
                f"local access of {nbytes} bytes at {[hex(a) for a in sorted(set(first.ravel().tolist()))[:4]]} of "
                f"{self.cells.shape[1]} bytes"
            ).know("out-of-bounds")
        return lanes[:, None], first[..., None] + np.arange(nbytes)

    def load(self, addresses: np.ndarray, mask: int, nbytes: int) -> np.ndarray:
        """uint8 [n, 32, nbytes]; lanes that are off read zero."""
        lanes, places = self._places(addresses, mask, nbytes)
        out = np.zeros((len(addresses), 32, nbytes), np.uint8)
        out[:, lanes[:, 0]] = self.cells[lanes, places]
        return out

    def store(self, addresses: np.ndarray, mask: int, data: np.ndarray) -> None:
        """uint8 [n, 32, nbytes]."""
        lanes, places = self._places(addresses, mask, data.shape[-1])
        for row in range(len(places)):  # in program order: later stores win
            self.cells[lanes, places[row]] = data[row, lanes[:, 0]]


def lane_addresses(base: np.ndarray, offsets: np.ndarray | int) -> np.ndarray:
    """int64 [n, 32] from a base that broadcasts and offsets [n, 1]."""
    shape = np.broadcast_shapes(base.shape, np.shape(offsets), (1, 32))
    return np.broadcast_to(base.astype(np.int64, copy=False) + offsets, shape)
