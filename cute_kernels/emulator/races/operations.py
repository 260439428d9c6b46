"""Asynchronous operations as the race detector sees them."""

from dataclasses import dataclass

import numpy as np

Place = tuple[slice, slice]
"""Columns of tensor memory, and groups of `LANE_GROUP` lanes."""


@dataclass
class Operation:
    """One asynchronous operation, as the detector sees it."""

    identity: int  # of its accesses
    column: int  # stream that it belongs to
    clocks: np.ndarray  # what its issuer knows, int32 [rows, columns]
    # own, lane: columns of the issuing warp and the issuing lane; -1 for an operation of several warps
    own: int
    lane: int
    reduces: bool = False  # it combines what it writes with what is there
    generic: bool = False  # it accesses memory through the generic proxy
    order: np.ndarray | None = None  # of a copy: what is known to be over when it is complete, int32 [columns]
    address: int = 0  # host address of ``clocks``
    private: int = 0  # what the issuing lane alone knows, as `Agent.private`; 0: nothing

    def __post_init__(self) -> None:
        self.address = self.address or self.clocks.ctypes.data
