"""A cluster as its units know it, which are made with it or for it."""

from typing import Protocol

from cute_kernels.emulator.machine.state.async_engine import AsyncEngine
from cute_kernels.emulator.machine.state.warp import ClusterState, WarpState
from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.races.tracker import RaceTracker


class Surroundings(ClusterState, Protocol):
    """A cluster; attributes as of `units.sm.Cluster`."""

    options: Options
    arithmetic: Arithmetic
    engine: AsyncEngine
    tracker: RaceTracker | None
    trace: object | None
    executing: WarpState | None
