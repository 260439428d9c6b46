"""Global memory: registered regions of host memory, addressed by their real host addresses.

Nothing is copied: a region is a window onto the buffer of a torch or NumPy array, so tensors of many gigabytes cost
nothing. An access is legal when one registered region contains it whole; regions may overlap (views of one storage).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.errors import EmulatorError, IllegalAccess

if TYPE_CHECKING:
    import torch

_OFFSET_RANGE, _MOST_TURNS = 1 << 32, 4  # of offsets in 32 bits, which are a multiple of it off where they overflow
_WINDOW_ALIGNMENT = 32  # bytes: the widest access of a lane


@dataclass
class _Region:
    """One registered range: ``cells`` is its memory, uint8 [bytes]."""

    start: int
    end: int
    name: str
    writable: bool
    owner: object

    def __post_init__(self) -> None:
        self.cells = np.ctypeslib.as_array((ctypes.c_uint8 * (self.end - self.start)).from_address(self.start))

    def describe(self) -> str:
        return f"{self.name or 'unnamed'} [{self.start:#x}, {self.end:#x}){'' if self.writable else ' read-only'}"


class GlobalMemory:
    """The regions that a launch may touch.

    Attributes:
        accesses: what an observer keeps of the launch that ran last with this memory (`LaunchShadow`), or None.
        modules: by PTX text, its .global and .const variables by name: they keep their values from launch to launch.
    """

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        self.accesses: object | None = None
        self.modules: dict[str, dict[str, np.ndarray]] = {}

    def clear(self) -> None:
        """Makes everything inaccessible; what the race detector knows of the last launch, and modules, stay."""
        self._regions.clear()

    def register(
        self, address: int, nbytes: int, name: str = "", writable: bool = True, *, owner: object = None
    ) -> None:
        """Makes host memory ``[address, address + nbytes)`` accessible.

        Args:
            address: host address of the first byte.
            nbytes: length in bytes; 0 registers nothing.
            name: used in error messages.
            writable: False makes every store into the region an error.
            owner: object kept alive as long as this memory (the tensor that owns the buffer).

        Raises:
            ValueError: address or nbytes is negative, or the address is 0.
        """
        if address <= 0 or nbytes < 0:
            raise ValueError(f"cannot register {nbytes} bytes at {address:#x} as {name!r}")
        if nbytes:
            self._regions.append(_Region(address, address + nbytes, name, writable, owner))

    def register_tensor(self, tensor: np.ndarray | torch.Tensor, name: str = "", writable: bool = True) -> None:
        """Registers the bytes that a CPU torch tensor or a NumPy array spans (from its lowest to its highest element).

        Raises:
            ValueError: a tensor that is not in host memory.
            TypeError: neither a torch tensor nor a NumPy array.
        """
        if isinstance(tensor, np.ndarray):
            spans = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)]
            low = tensor.ctypes.data + sum(span for span in spans if span < 0)
            high = tensor.ctypes.data + sum(span for span in spans if span > 0) + tensor.itemsize
            high = high if tensor.size else low
        elif hasattr(tensor, "data_ptr") and hasattr(tensor, "stride"):
            if tensor.device.type != "cpu":
                raise ValueError(f"tensor {name!r} is on {tensor.device}: must be in host memory")
            span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            low = tensor.data_ptr()
            high = low + span * tensor.element_size() if tensor.numel() else low
        else:
            raise TypeError(f"{name!r} is {type(tensor).__name__}: must be a torch tensor or NumPy array")
        if high > low:
            self.register(low, high - low, name, writable, owner=tensor)

    def view(self, address: int, nbytes: int, *, write: bool = False) -> np.ndarray:
        """The bytes ``[address, address + nbytes)`` as a uint8 array onto host memory (no copy).

        Raises:
            IllegalAccess: no registered (for ``write``: writable) region contains the range.
        """
        region = self._find(int(address), int(nbytes), write)
        offset = int(address) - region.start
        return region.cells[offset : offset + nbytes]

    def regions(self) -> Sequence[_Region]:
        """The registered ranges: ``start``, ``end`` and ``writable`` of each."""
        return self._regions

    def region_index(self, address: int, nbytes: int) -> int | None:
        """Number of the first region that contains the range, or None."""
        end = address + nbytes
        for index, region in enumerate(self._regions):
            if region.start <= address and end <= region.end:
                return index
        return None

    def region_bounds(self, index: int) -> tuple[int, int, bool]:
        """(first address of the window, its bytes, writable) of a region: aligned for every access."""
        region = self._regions[index]
        origin = region.start // _WINDOW_ALIGNMENT * _WINDOW_ALIGNMENT
        return origin, region.end - origin, region.writable

    def describe(self) -> str:
        """The registered regions, one a line."""
        return "\n".join(region.describe() for region in self._regions) or "no region is registered"

    def _find(self, address: int, nbytes: int, write: bool) -> _Region:
        end = address + nbytes
        for region in self._regions:
            if region.start <= address and end <= region.end and (region.writable or not write):
                return region
        raise self.refusal(address, nbytes, write)

    def refusal(self, address: int, nbytes: int, write: bool) -> EmulatorError:
        """Error of an access that no region allows."""
        index = self.region_index(address, nbytes)
        what = f"global {'store' if write else 'load'} of {nbytes} bytes at {address:#x}"
        if index is not None:
            region = self._regions[index]
            return IllegalAccess(f"{what} hits the read-only region {region.describe()}").know("read-only")
        region, relation = self._nearest(address, nbytes)
        nearest = f"{region.describe()} ({relation})" if region is not None else "none is registered"
        error = IllegalAccess(f"{what} is outside every registered region; nearest: {nearest}")
        short = f"a {'store' if write else 'load'} of {nbytes} bytes of global memory is outside of all arrays"
        if region is not None:
            short += f"; the nearest is {region.name or 'one without a name'}: {relation}"
        turns = self._overflow(address, nbytes)
        if turns is not None:
            short += f"; {turns * _OFFSET_RANGE:+,} bytes, {abs(turns)} times 2^32, it would be inside of one"
        error.know("out-of-bounds" if turns is None else "offset-overflow", sentence=short)
        error.address = address
        return error

    def _overflow(self, address: int, nbytes: int) -> int | None:
        """How many times 2^32 bytes an access is away from a region that it would be inside of; None: it is not."""
        near = sorted(range(-_MOST_TURNS, _MOST_TURNS + 1), key=abs)[1:]
        for turns in near:
            start = (address + turns * _OFFSET_RANGE) % (1 << 64)  # as addresses are added
            if any(region.start <= start and start + nbytes <= region.end for region in self._regions):
                return turns
        return None

    def _nearest(self, address: int, nbytes: int) -> tuple[_Region | None, str]:
        """The nearest region, and how the address lies to it."""
        if not self._regions:
            return None, ""

        def distance(region: _Region) -> int:
            return max(region.start - address, address + nbytes - region.end, 0)

        region = min(self._regions, key=distance)
        if address < region.start:
            relation = f"{region.start - address} bytes before its start"
        else:
            relation = f"{address - region.start} bytes after its start, its length is {region.end - region.start}"
        return region, relation
