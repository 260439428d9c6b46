"""Generic addresses, reads of memory by one thread, and what is told to the race detector, where Python executes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.machine.state.access_faults import local_together, outside_parameters
from cute_kernels.emulator.machine.state.smem import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, parameter_offset

if TYPE_CHECKING:
    from cute_kernels.emulator.machine.units.surroundings import Surroundings


def space_of(space: str, address: int) -> tuple[str, int]:
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


def view_bytes(cluster: Surroundings, space: str, address: int, nbytes: int) -> np.ndarray | bytes:
    """Bytes for a read by one thread."""
    given = address
    space, address = space_of(space, address)
    if space == "local":
        raise local_together(given, nbytes)
    if space == "param":
        start = parameter_offset(address)
        if start < 0 or start + nbytes > len(cluster.params):
            raise outside_parameters(address, nbytes, len(cluster.params))
        return cluster.params[start : start + nbytes]
    if space == "shared":
        return cluster.memory.view(address & 0xFFFFFFFF, nbytes)
    return cluster.gmem.view(address, nbytes)
