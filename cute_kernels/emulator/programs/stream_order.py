"""Whether a program's launch comes directly behind the one before it, so that the two may overlap.

Programmatic stream serialisation orders a launch against the kernel right before it in its stream. Where the program
fills or copies device memory in between, that work is what it may overlap, and everything before is over.
"""

import hashlib
from collections.abc import Iterable

from cute_kernels.emulator.machine.state.gmem import GlobalMemory

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Functions of torch that make device memory and launch nothing."""


class StreamOrder:
    """Record of what happened on the device since the last launch."""

    def __init__(self) -> None:
        self._left: dict[tuple[int, int], bytes] | None = None
        self._other_work = False
        self._stream = 0

    def made(self, function: str) -> None:
        """A function of torch has made device memory."""
        self._other_work |= function not in _ALLOCATIONS

    def launched(self, regions: Iterable[tuple[int, int]], stream: int = 0) -> None:
        """A launch is over; (address, bytes) of all device memory, and the handle of its stream."""
        self._left, self._other_work, self._stream = _digests(regions), False, stream

    def directly_follows(self, regions: Iterable[tuple[int, int]], stream: int = 0) -> bool:
        """Whether a launch now would follow the last one in its stream with no other work on the device in between."""
        if self._left is None or self._other_work or stream != self._stream:
            return False
        return all(self._left.get(region, digest) == digest for region, digest in _digests(regions).items())


def _digests(regions: Iterable[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
    memory = GlobalMemory()
    found = {}
    for address, nbytes in regions:
        memory.register(address, nbytes)
        found[address, nbytes] = hashlib.blake2b(memory.view(address, nbytes), digest_size=16).digest()
    return found
