"""Host memory that stands for device memory, with addresses around it that belong to nothing.

Kernels use plain host addresses, and an access is legal where some allocation is. Allocations that lie side by side
would make an access beyond one of them a legal access of the next, depending on where the host's allocator placed
them. The pages of a guard are never touched, so that it takes address space and no memory.
"""

import numpy as np

GUARD = 256 << 10  # bytes on each side: 256 rows beyond the end of a matrix with 1 KiB per row


def guarded(nbytes: int, alignment: int) -> np.ndarray:
    """Zeros, uint8 [nbytes] at a multiple of ``alignment`` bytes; nothing else is within `GUARD` bytes of it.

    What memory held before would make two runs of a program differ that reads what it never wrote.
    """
    raw = np.zeros(GUARD + alignment + nbytes + GUARD, np.uint8)
    skip = GUARD + -(raw.ctypes.data + GUARD) % alignment
    return raw[skip : skip + nbytes]
