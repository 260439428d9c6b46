"""Layouts of the tensors that a kernel has in shared memory, and what its accesses cost there, by source line."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from cute_kernels.common.words import counted
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.isa.ptx.source_lines import SourcePlace
from cute_kernels.emulator.observe.counters import UnitCounts
from cute_kernels.emulator.reports import arrays, sources

_METRICS = ("wavefronts", "bank_conflicts")
_SHARED = ("ld.shared", "st.shared", "ldmatrix.shared", "stmatrix.shared", "atom.shared", "red.shared")


@dataclass(frozen=True)
class Tensor:
    """A tensor in shared memory: ``byte``: at which elements of its first stage begin, int64 [rows, columns]."""

    name: str
    layout: str
    swizzle: str
    element: str
    itemsize: int
    byte: np.ndarray

    @property
    def title(self) -> str:
        """Name, layout and swizzle."""
        return f"{self.name}: {self.element} {self.layout}, {self.swizzle}, from byte {self.byte.min():,} on"

    def banks(self) -> np.ndarray:
        """Banks of 4 bytes, by rows and pieces of 16 bytes, as far as these are neighbours, int64 [rows, pieces]."""
        rows, columns = self.byte.shape
        step = max(1, 16 // self.itemsize)
        if columns % step or (np.diff(self.byte.reshape(rows, -1, step)) != self.itemsize).any():
            step = 1
        return self.byte[:, ::step] // 4 % 32


@dataclass(frozen=True)
class Access:
    """Accesses to shared memory in one line of the source: what its instructions are, and counts of all warps."""

    place: str
    text: str
    kinds: tuple[str, ...]
    wavefronts: int
    bank_conflicts: int

    def __str__(self) -> str:
        cost = ", ".join(map(counted, (self.wavefronts, self.bank_conflicts), ("wavefront", "bank conflict")))
        return f"{self.place} ({', '.join(self.kinds)}): {cost}"


@dataclass(frozen=True)
class OwnMemory:
    """The tensors of a kernel and the lines that access shared memory, those with most conflicts first."""

    tensors: tuple[Tensor, ...]
    accesses: tuple[Access, ...]


def of_launch(launch: CapturedLaunch, units: UnitCounts) -> OwnMemory:
    """Tensors and accesses of a launch that ran with counters."""
    tensors: dict[tuple, Tensor] = {}
    for tile in arrays.tiles(launch.ptx, launch.kernel_name, launch):
        if tile.view.space != "shared":
            continue
        try:
            places = tile.places()
        except ValueError:  # known to the running kernel alone
            continue
        places = places.reshape(*places.shape[:2], -1)[:, :, 0] if places.ndim > 1 else places[None]
        made = Tensor(tile.name, tile.view.layout, tile.swizzle, tile.view.element, tile.dtype.itemsize, places)
        tensors.setdefault((made.name, made.byte.tobytes()), made)
    lines: dict[SourcePlace, Counter] = {}
    kinds: dict[SourcePlace, dict[str, None]] = {}
    for each in units.by_instruction:
        for by_kind in each.units.values():
            for kind, metrics in by_kind.items():
                where = sources.location(launch.ptx, each.ptx_line)
                if kind.startswith(_SHARED) and where is not None:
                    lines.setdefault(where.place, Counter()).update({name: metrics[name] for name in _METRICS})
                    kinds.setdefault(where.place, {})[kind] = None
    accesses = (_access(place.path, place.line, tuple(kinds[place]), counts) for place, counts in lines.items())
    ordered = sorted(accesses, key=lambda each: (-each.bank_conflicts, -each.wavefronts, each.place))
    return OwnMemory(tuple(tensors.values()), tuple(ordered))


def _access(path: str, line: int, kinds: tuple[str, ...], counts: Counter) -> Access:
    text = sources.text_of_line(path, line).strip()
    return Access(f"{path.rpartition('/')[2]}:{line}", text, kinds, *(int(counts[name]) for name in _METRICS))
