"""Generic addresses, reads of memory by one thread, and what is told to the race detector, where Python executes."""

import numpy as np

from cute_kernels.emulator.machine.units.sm import Warp
from cute_kernels.emulator.races.memory_order import Strength, lane_vector


def watch(
    warp: Warp, mask: int, space: str, addresses: np.ndarray, nbytes: int, write: bool, strength: Strength | None = None
) -> None:
    """Reports accesses of ``nbytes`` at int64 ``addresses [executing lanes]`` that a warp has just made. Raises Race:
    see `cute_kernels.emulator.races.tracker`."""
    tracker = warp.cluster.tracker
    if tracker is None or not addresses.size or space not in ("shared", "global"):
        return
    tracker.generic(warp.agent, lane_vector(mask), space, addresses, nbytes, write, strength is not None)
    if strength is not None:
        tracker.strong(warp.agent, mask, space, addresses.tolist(), nbytes, strength)


def enter(warp: Warp, lane: int) -> None:
    """Tells the race detector, if there is one, which lane issues the asynchronous operation that follows."""
    if warp.agent is not None:
        warp.cluster.tracker.enter(warp.agent, lane)
