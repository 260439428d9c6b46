"""A cluster as its units know it, which are made with it or for it."""

from __future__ import annotations

from typing import Protocol

from cute_kernels.emulator.observe.races.tracker import RaceTracker
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.state.async_engine import AsyncEngine
from cute_kernels.emulator.state.warp import ClusterState, WarpState
from cute_kernels.emulator.units.matrix.arithmetic import Arithmetic


class Surroundings(ClusterState, Protocol):
    """A cluster; attributes as of `units.sm.Cluster`."""

    options: Options
    arithmetic: Arithmetic
    engine: AsyncEngine
    tracker: RaceTracker | None
    trace: object | None
    executing: WarpState | None
