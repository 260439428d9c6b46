"""Addresses in the parameters and the memory of a launch, moved to where its memory lies now."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Relocation:
    """Ranges and where they lie elsewhere: (address here, address there, bytes)."""

    ranges: tuple[tuple[int, int, int], ...]

    def words(self, data: bytes, *, back: bool = False) -> bytes:
        """``data`` with every aligned 64-bit word that is an address inside (or at the end of) a range moved.

        For parameters, tensor maps (whose first word is an address) and, ``back``, whatever a kernel leaves. Not for
        other data from ranges below 2^32 (host arrays can lie there, in the heap of an executable that is not
        position-independent), where a 32-bit operand in a 64-bit slot looks like an address. Device memory lies above.
        """
        size = len(data) // 8 * 8
        words = np.frombuffer(data[:size], np.uint64).copy()
        moved = words.copy()
        for host, device, nbytes in self.ranges:
            source, target = (device, host) if back else (host, device)
            inside = (words >= np.uint64(source)) & (words <= np.uint64(source + nbytes))
            moved[inside] = words[inside] - np.uint64(source) + np.uint64(target)
        return moved.tobytes() + data[size:]
