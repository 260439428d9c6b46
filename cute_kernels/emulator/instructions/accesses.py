"""Loads and stores as Python performs them for warps: which state space, the checks, the moves; local memory of a warp.

Bytecode calls these functions where the core leaves an access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.graph.values import FULL
from cute_kernels.emulator.observe.races.memory_order import Strength, watch, watch_uniform
from cute_kernels.emulator.state.generic_addresses import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, parameter_offset
from cute_kernels.emulator.state.lane_masks import block_lanes

if TYPE_CHECKING:
    from cute_kernels.emulator.state.warp import Warp


def space_of(warp: Warp, space: str, address: int) -> tuple[str, int]:
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


def view_bytes(warp: Warp, space: str, address: int, nbytes: int) -> np.ndarray | bytes:
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
    warp: Warp, mask: int, space: str, address: int, size: int, count: int, strength: Strength | None
) -> Any:
    """One load for all lanes: an int, or a tuple of ``count`` ints."""
    if address % (size * count):
        raise IllegalAccess(f"misaligned {space} load of {size * count} bytes at {address:#x}").know("misaligned")
    raw = bytes(view_bytes(warp, space, address, size * count))
    if strength is not None:
        warp.cluster.look(warp, (address,), size * count)
    if warp.cluster.meter is not None:
        warp.cluster.meter.uniform("ld", *space_of(warp, space, address), size * count, mask)
    if warp.cluster.tracker is not None:
        watch_uniform(warp, mask, *space_of(warp, space, address), size * count, False, strength)
    if count == 1:
        return int.from_bytes(raw, "little")
    return tuple(int.from_bytes(raw[i : i + size], "little") for i in range(0, size * count, size))


def load_lanes(
    warp: Warp, mask: int, space: str, addresses: np.ndarray, size: int, count: int, dtype: Any,
    strength: Strength | None = None,
) -> np.ndarray:  # fmt: skip
    """``count`` elements loaded by each lane: addresses int64 [32] -> [count, 32]; lanes that are off get zeros."""
    cluster, nbytes = warp.cluster, size * count
    if space == "generic":
        space, shift = _generic_lanes(mask, addresses)
        addresses = addresses - shift
    lanes = block_lanes(mask)
    if strength is not None:
        cluster.look(warp, addresses[lanes], nbytes)
    result = np.zeros((count, 32), dtype)
    if space == "local":
        raw = local_memory(warp).load(addresses, lanes, nbytes)
    else:
        if cluster.meter is not None:
            cluster.meter.lanes("ld", space, addresses[None], nbytes, mask)
        memory = cluster.memory if space == "shared" else cluster.gmem
        raw = memory.load(addresses[lanes], nbytes)
        watch(warp, mask, space, addresses[lanes], nbytes, False, strength)
    result[:, lanes] = raw.view(dtype).T
    return result


def store_lanes(
    warp: Warp, mask: int, space: str, addresses: np.ndarray, data: np.ndarray, size: int, count: int,
    strength: Strength | None = None,
) -> None:  # fmt: skip
    """``count`` elements stored by each lane: addresses int64 [32], data [count, 32]."""
    cluster, nbytes = warp.cluster, size * count
    cluster.progress += 1
    if space == "generic":
        space, shift = _generic_lanes(mask, addresses)
        addresses = addresses - shift
    lanes = block_lanes(mask)
    raw = np.ascontiguousarray(data[:, lanes].T).view(np.uint8)
    if space == "local":
        local_memory(warp).store(addresses, lanes, raw)
        return
    if cluster.meter is not None:
        cluster.meter.lanes("st", space, addresses[None], nbytes, mask)
    (cluster.memory if space == "shared" else cluster.gmem).store(addresses[lanes], raw)
    watch(warp, mask, space, addresses[lanes], nbytes, True, strength)


def _generic_lanes(mask: int, addresses: np.ndarray) -> tuple[str, int]:
    """The space that all executing lanes address, and where its window begins."""
    active = addresses[block_lanes(mask)]
    low, high = int(active.min()), int(active.max())
    for space, start, end in (
        ("global", 0, SHARED_WINDOW),
        ("shared", SHARED_WINDOW, LOCAL_WINDOW),
        ("local", LOCAL_WINDOW, PARAM_WINDOW),
    ):
        if start <= low and high < end:
            return space, start
    raise IllegalAccess("a generic access whose lanes address different spaces, or parameters, is not implemented")


def local_memory(warp: Warp) -> LocalMemory:
    """Raises IllegalAccess where the kernel declares no local memory."""
    if not hasattr(warp, "local"):
        raise IllegalAccess("access to local memory by a kernel that declares none")
    return warp.local


class LocalMemory:
    """Local memory of one warp: ``nbytes`` for each lane, at the same addresses."""

    def __init__(self, nbytes: int) -> None:
        self.cells = np.zeros((32, nbytes), np.uint8)

    def _places(self, addresses: np.ndarray, lanes: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers [lanes, 1] and bytes [lanes, nbytes] of the accesses of some lanes, bool [32], at [32] addresses."""
        first = addresses[lanes]
        if (first % nbytes).any() or (first < 0).any() or (first + nbytes > self.cells.shape[1]).any():
            raise IllegalAccess(
                f"local access of {nbytes} bytes at {[hex(a) for a in sorted(set(first.tolist()))[:4]]} of "
                f"{self.cells.shape[1]} bytes"
            ).know("out-of-bounds")
        return np.flatnonzero(lanes)[:, None], first[:, None] + np.arange(nbytes)

    def load(self, addresses: np.ndarray, lanes: np.ndarray, nbytes: int) -> np.ndarray:
        """uint8 [lanes, nbytes]."""
        return self.cells[self._places(addresses, lanes, nbytes)]

    def store(self, addresses: np.ndarray, lanes: np.ndarray, data: np.ndarray) -> None:
        """uint8 [lanes, nbytes]."""
        self.cells[self._places(addresses, lanes, data.shape[-1])] = data
