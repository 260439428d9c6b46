"""Generic addresses, reads of memory by one thread, and what is told to the race detector, where Python executes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.graph.values import FULL
from cute_kernels.emulator.observe.races.memory_order import Strength, lane_vector
from cute_kernels.emulator.state.access_faults import local_together, outside_parameters
from cute_kernels.emulator.state.generic_addresses import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, parameter_offset

if TYPE_CHECKING:
    from cute_kernels.emulator.units.sm import Warp


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
        raise local_together(given, nbytes)
    if space == "param":
        start = parameter_offset(address)
        if start < 0 or start + nbytes > len(warp.cluster.params):
            raise outside_parameters(address, nbytes, len(warp.cluster.params))
        return warp.cluster.params[start : start + nbytes]
    if space == "shared":
        return warp.cluster.memory.view(address & FULL, nbytes)
    return warp.cluster.gmem.view(address, nbytes)


def watch(
    warp: Warp, mask: int, space: str, addresses: np.ndarray, nbytes: int, write: bool, strength: Strength | None = None
) -> None:
    """Reports accesses of ``nbytes`` at int64 ``addresses [executing lanes]`` that a warp has just made.

    Raises:
        Race: see `cute_kernels.emulator.observe.races.tracker`.
    """
    tracker = warp.cluster.tracker
    if tracker is None or not addresses.size or space not in ("shared", "global"):
        return
    tracker.generic(warp.agent, lane_vector(mask), space, addresses, nbytes, write, strength is not None)
    if strength is not None:
        tracker.strong(warp.agent, mask, space, addresses.tolist(), *strength)


def watch_uniform(
    warp: Warp, mask: int, space: str, address: int, nbytes: int, write: bool, strength: Strength | None = None
) -> None:
    """Watches one access of all executing lanes to the same address."""
    tracker = warp.cluster.tracker
    if tracker is None or space not in ("shared", "global"):
        return
    lanes = mask.bit_length() - 1 if mask & (mask - 1) == 0 else -1
    tracker.generic(warp.agent, lanes, space, np.array([address], np.int64), nbytes, write, strength is not None)
    if strength is not None:
        tracker.strong(warp.agent, mask, space, [address], *strength)


def enter(warp: Warp, lane: int) -> None:
    """Tells the race detector, if there is one, which lane issues the asynchronous operation that follows."""
    if warp.agent is not None:
        warp.cluster.tracker.enter(warp.agent, lane)
