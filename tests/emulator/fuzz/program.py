"""A launch as data: what is damaged, run, and kept where it was found to end otherwise than it should."""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.emulator.oracle.launches import address_of

MAP_BYTES = 128


@dataclass(frozen=True)
class Program:
    """One launch.

    Attributes:
        name: where it comes from.
        text: PTX.
        params: of every kernel parameter its bytes. Addresses are those of `address_of`.
        buffers: global memory before the launch; addresses of buffers in it likewise.
        grid, block, cluster, shared: of the launch; bytes of dynamic shared memory.
        options: of `Options`, by name; ``trace`` and ``going_on`` are True for a file and for a function that goes on.
        damage: what has been done to it, by kind.
    """

    name: str
    text: str
    params: tuple[bytes, ...]
    buffers: tuple[bytes, ...]
    grid: tuple[int, ...] = (1, 1, 1)
    block: tuple[int, ...] = (32, 1, 1)
    cluster: tuple[int, ...] = (1, 1, 1)
    shared: int = 4096
    options: dict[str, Any] = field(default_factory=dict)
    damage: tuple[str, ...] = ()

    def with_options(self, **options: Any) -> Program:
        """With other options besides its own."""
        return dataclasses.replace(self, options={**self.options, **options})


def addresses(count: int) -> tuple[bytes, ...]:
    """Parameters that are the addresses of the first buffers."""
    return tuple(struct.pack("<Q", address_of(i)) for i in range(count))


def on_arrays(name: str, text: str, *arrays: np.ndarray, **shape: Any) -> Program:
    """A kernel whose parameters are the addresses of these arrays, and then ``numbers`` of 64 bits."""
    numbers = [struct.pack("<Q", number) for number in shape.pop("numbers", ())]
    buffers = tuple(array.tobytes() for array in arrays)
    return Program(name, text, (*addresses(len(arrays)), *numbers), buffers, **shape)


def is_map(value: bytes) -> bool:
    """Whether these may be the bytes of a tensor map."""
    return len(value) == MAP_BYTES


_PLAIN = ("name", "text", "grid", "block", "cluster", "shared", "options", "damage")


def to_json(program: Program, base: Program) -> dict[str, Any]:
    """As JSON has it; of the buffers what differs from those of the program that was damaged."""
    plain = {name: getattr(program, name) for name in _PLAIN}
    buffers = [_difference(content, old) for content, old in zip(program.buffers, base.buffers, strict=True)]
    return plain | {"params": [value.hex() for value in program.params], "buffers": buffers}


def from_json(data: dict[str, Any], base: Program) -> Program:
    """The program that `to_json` was given."""
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name in _PLAIN}
    buffers = []
    for changes, old in zip(data["buffers"], base.buffers, strict=True):
        content = bytearray(old)
        for start, new in changes:
            content[start : start + len(new) // 2] = bytes.fromhex(new)
        buffers.append(bytes(content))
    return Program(params=tuple(map(bytes.fromhex, data["params"])), buffers=tuple(buffers), **plain)


def _difference(content: bytes, old: bytes) -> list[tuple[int, str]]:
    """(first byte, bytes in hexadecimal) of each changed word of four bytes."""
    if len(content) != len(old):
        raise ValueError(f"a buffer of {len(content)} bytes, which had {len(old)}")
    words = range(0, len(old), 4)
    return [(at, content[at : at + 4].hex()) for at in words if content[at : at + 4] != old[at : at + 4]]
