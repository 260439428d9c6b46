"""Memory-ordering qualifiers of PTX, and how loads and stores are reported to the race detector."""

import functools
from collections.abc import Iterable

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.machine.state.lane_masks import block_lanes
from cute_kernels.emulator.races.sync_point import Order

_ACQUIRE, _RELEASE, _FIELD = (CONSTANTS[f"STRENGTH_{name}"] for name in ("ACQUIRE", "RELEASE", "FIELD"))
_GRID_SCOPES = frozenset({"gpu", "sys", "gl"})
_WIDE_SCOPES = _GRID_SCOPES | {"cluster"}
#: What a strong access does: the orders with which it acquires and releases, None for neither.
Strength = tuple[int | None, int | None]


def sync_order(parts: Iterable[str]) -> int:
    """`Order` of a barrier operation: release or acquire unless .relaxed, of the CTA unless a wider scope is named."""
    parts = set(parts)
    return (0 if "relaxed" in parts else int(Order.SYNC)) | (int(Order.WIDE) if parts & _WIDE_SCOPES else 0)


def fence_order(parts: Iterable[str]) -> int:
    """`Order` of a fence that is not of a proxy."""
    parts = set(parts)
    return sync_order(parts) | (int(Order.GRID) if parts & _GRID_SCOPES else 0)


def access_strength(parts: Iterable[str], *, atomic: bool = False, write: bool = False) -> Strength | None:
    """Strength of a load, store or atomic; None for a weak one.

    By the PTX ISA atomics are relaxed at the scope of the GPU by default, volatile accesses count as relaxed at that of
    the system, and red, an atomic ``write``, is no read that could acquire.
    """
    parts = set(parts)
    if not atomic and not parts & {"volatile", "mmio", "relaxed", "acquire", "release"}:
        return None
    wide = 0 if "cta" in parts else int(Order.WIDE) if "cluster" in parts else int(Order.WIDE | Order.GRID)
    acquires, releases = bool(parts & {"acquire", "acq_rel"}), bool(parts & {"release", "acq_rel"})
    acquire = (int(Order.SYNC) if acquires else 0) | wide if not write else None
    release = (int(Order.SYNC) if releases else 0) | wide if atomic or write else None
    return acquire, release


def strength_number(strength: Strength | None) -> int:
    """A strength as the core passes it on, 0 for a weak access; `orders` is the inverse."""
    acquire, release = (0 if order is None else order + 1 for order in strength or (None, None))
    return acquire << _ACQUIRE | release << _RELEASE


def orders(number: int) -> Strength:
    """The strength that an argument of the core's log has."""
    acquire, release = ((number >> shift & _FIELD) - 1 for shift in (_ACQUIRE, _RELEASE))
    return acquire if acquire >= 0 else None, release if release >= 0 else None


@functools.lru_cache(maxsize=512)
def lane_vector(mask: int) -> np.ndarray:
    """Lanes of a mask."""
    return np.flatnonzero(block_lanes(mask)).astype(np.int32)


def masks_by_address(mask: int, address: np.ndarray | int) -> dict[int, int]:
    """Which of the executing lanes name which address."""
    if isinstance(address, int):
        return {address: mask}
    groups: dict[int, int] = {}
    for lane in np.flatnonzero(block_lanes(mask)).tolist():
        where = int(address[lane])
        groups[where] = groups.get(where, 0) | 1 << lane
    return groups
