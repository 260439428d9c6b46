"""Loads and stores of lanes (PTX ISA, "ld" and "st"), byte by byte in Python."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Memory:
    """One memory.

    Attributes:
        data: what it holds, by address: an address that is not there is out of bounds.
        unwritten: addresses that nobody has written.
        opaque: addresses of live mbarriers.
    """

    data: dict[int, int]
    unwritten: set[int] = field(default_factory=set)
    opaque: set[int] = field(default_factory=set)

    def fault(self, addresses: Iterable[int], nbytes: int, write: bool) -> str | None:
        """The kind of what is wrong with an access of ``nbytes`` at each of some addresses, or None."""
        addresses = list(addresses)
        places = [address + byte for address in addresses for byte in range(nbytes)]
        if any(address % nbytes for address in addresses):
            return "misaligned"
        if any(place not in self.data for place in places):
            return "out-of-bounds"
        if self.opaque.intersection(places):
            return "barrier-memory"
        return "uninitialised-read" if not write and self.unwritten.intersection(places) else None

    def load(self, address: int, nbytes: int) -> list[int]:
        return [self.data[address + byte] for byte in range(nbytes)]

    def store(self, address: int, values: list[int]) -> None:
        for byte, value in enumerate(values):
            self.data[address + byte] = value
            self.unwritten.discard(address + byte)
