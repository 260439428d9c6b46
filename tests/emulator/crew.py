"""Warps without a program, for tests that drive units and the race detector directly."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from cute_kernels.emulator.gmem import GlobalMemory
from cute_kernels.emulator.happens_before import FULL
from cute_kernels.emulator.launch_shadow import LaunchShadow
from cute_kernels.emulator.sanitizer import RaceTracker
from cute_kernels.emulator.smem import ClusterMemory


class Crew:
    """A race detector and warps that it knows: ``crew[i]``, the first entered.

    Args:
        sizes: bytes of shared memory per CTA.
        ranks: CTA of each warp.
        gmem: global memory of the launch.
    """

    def __init__(self, sizes: list[int], ranks: list[int], gmem: GlobalMemory | None = None) -> None:
        self.tracker = RaceTracker(sizes, LaunchShadow(gmem or GlobalMemory()), len(ranks))
        self.warps = [
            SimpleNamespace(agent=self.tracker.make_agent(rank, FULL, f"warp {i}")) for i, rank in enumerate(ranks)
        ]
        self.tracker.enter(self.warps[0])

    def __getitem__(self, index: int) -> SimpleNamespace:
        return self.warps[index]

    def store(self, index: int, memory: ClusterMemory, addresses: np.ndarray, values: np.ndarray) -> None:
        """st.shared by the first lanes of a warp, one address each."""
        memory.store(addresses, values)
        self.touch(index, addresses, values.shape[1], write=True)

    def touch(self, index: int, addresses: np.ndarray, nbytes: int, *, write: bool) -> None:
        """A load or store as the race detector sees it."""
        lanes = np.arange(len(addresses), dtype=np.int32)
        self.tracker.generic(self.warps[index], lanes, "shared", addresses.astype(np.int64), nbytes, write)
