"""Asynchronous operations as the race detector sees them."""

from dataclasses import dataclass

import numpy as np

Place = tuple[slice, slice]
"""Columns of tensor memory, and groups of `LANE_GROUP` lanes."""


@dataclass
class Operation:
    """One asynchronous operation, as the detector sees it.

    Attributes:
        identity: of its accesses.
        column: stream that it belongs to.
        clocks: what its issuer knows, int32 [rows, columns].
        own, lane: columns of the issuing warp and the issuing lane; -1 for an operation of several warps.
        reduces: it combines what it writes with what is there.
        generic: it accesses memory through the generic proxy.
        order: of a copy: what is known to be over when it is complete, int32 [columns].
        address: host address of ``clocks``.
        private: what the issuing lane alone knows, as `Agent.private`; 0: nothing.
    """

    identity: int
    column: int
    clocks: np.ndarray
    own: int
    lane: int
    reduces: bool = False
    generic: bool = False
    order: np.ndarray | None = None
    address: int = 0
    private: int = 0

    def __post_init__(self) -> None:
        self.address = self.address or self.clocks.ctypes.data
