"""Layouts of the tensors that a kernel has in shared memory, and what its accesses cost each, by source line."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.common.words import counted
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.observe.counters import InstructionCounts, UnitCounts
from cute_kernels.emulator.reports import arrays, sources

_METRICS = ("wavefronts", "bank_conflicts")
_MOST = 16  # rows, and pieces of a row, that are kept


@dataclass(frozen=True)
class Tensor:
    """The first stage of a tensor in shared memory.

    ``title``: name, type, layout, swizzle and first byte. ``banks``: of 4 bytes, in which 16 bytes begin, or an element
    where neighbours lie apart; of the first rows and columns. ``whole``: whether these are all."""

    title: str
    banks: tuple[tuple[int, ...], ...]
    whole: bool

    @property
    def caption(self) -> str:
        """The title, and what of the tensor is shown."""
        return self.title + ", its first rows and columns" * (not self.whole)


@dataclass(frozen=True)
class Access:
    """Accesses of one line of the source to a tensor: what its instructions are, and counts of all warps."""

    tensor: str
    place: str
    text: str
    kinds: tuple[str, ...]
    wavefronts: int
    bank_conflicts: int


@dataclass(frozen=True)
class OwnMemory:
    """The tensors of a kernel, and accesses to shared memory: those with most conflicts first, by tensor and line."""

    tensors: tuple[Tensor, ...]
    accesses: tuple[Access, ...]

    @staticmethod
    def read(found: Mapping[str, Any] | None) -> "OwnMemory | None":
        """Memory from what `dataclasses.asdict` and JSON made of it; None from None."""
        if found is None:
            return None
        banks = [tuple(map(tuple, each["banks"])) for each in found["tensors"]]
        tensors = (Tensor(**{**each, "banks": rows}) for each, rows in zip(found["tensors"], banks))
        accesses = (Access(**{**each, "kinds": tuple(each["kinds"])}) for each in found["accesses"])
        return OwnMemory(tuple(tensors), tuple(accesses))

    def by_tensor(self) -> dict[str, list[Access]]:
        """Accesses by the tensor's name, those with most conflicts first."""
        found: dict[str, list[Access]] = {}
        for each in self.accesses:
            found.setdefault(each.tensor, []).append(each)
        return dict(sorted(found.items(), key=lambda item: [-cost for cost in reversed(costs(item[1]))]))

    def lines(self) -> Iterator[str]:
        """Banks of each tensor, then accesses, for people."""
        for tensor in self.tensors:
            yield f"{tensor.caption}; banks by row"
            yield from (f"{row:4} " + " ".join(f"{bank:2}" for bank in banks) for row, banks in enumerate(tensor.banks))
        for name, accesses in self.by_tensor().items():
            yield f"{name}: {cost_text(*costs(accesses))}"
            for each in accesses:
                yield f"    {each.place} ({', '.join(each.kinds)}): {cost_text(*costs([each]))}: {each.text}"


def costs(accesses: Sequence[Access]) -> tuple[int, int]:
    """Wavefronts and bank conflicts of accesses together."""
    return sum(each.wavefronts for each in accesses), sum(each.bank_conflicts for each in accesses)


def cost_text(wavefronts: int, conflicts: int) -> str:
    """Both in words."""
    return f"{counted(wavefronts, 'wavefront')}, {counted(conflicts, 'bank conflict')}"


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
        title = f"{tile.name}: {tile.view.element} {tile.view.layout}, {tile.swizzle}, from byte {places.min():,} on"
        tensors.setdefault((tile.name, places.tobytes()), _tensor(title, places, tile.dtype.itemsize))
    known = [each for each in arrays.arrays(launch.ptx, launch.kernel_name, launch) if each.name]
    counts: dict[tuple[str, str, str], Counter] = {}
    kinds: dict[tuple[str, str, str], dict[str, None]] = {}
    for each in units.by_instruction:
        if each.shared[1]:
            about = _name(known, *each.shared), *_place(launch.ptx, each.ptx_line)
            counts.setdefault(about, Counter()).update(_costs(each, kinds.setdefault(about, {})))
    made = (Access(*about, tuple(kinds[about]), *map(cost.__getitem__, _METRICS)) for about, cost in counts.items())
    ordered = sorted(made, key=lambda each: (-each.bank_conflicts, -each.wavefronts, each.place))
    return OwnMemory(tuple(tensors.values()), tuple(ordered))


def _tensor(title: str, places: np.ndarray, itemsize: int) -> Tensor:
    """``places``: bytes at which elements begin, int64 [rows, columns]."""
    rows, columns = places.shape
    step = max(1, 16 // itemsize)
    if columns % step or (np.diff(places.reshape(rows, -1, step)) != itemsize).any():
        step = 1
    banks = places[:, ::step] // 4 % 32
    return Tensor(title, tuple(map(tuple, banks[:_MOST, :_MOST].tolist())), max(banks.shape) <= _MOST)


def _name(known: Sequence[arrays.Array], first: int, end: int) -> str:
    """The smallest array that has all of some bytes; otherwise all that have some of them."""
    whole = [each for each in known if each.first <= first and end <= each.first + each.nbytes]
    parts = [each for each in known if each.first < end and first < each.first + each.nbytes]
    found = [min(whole, key=lambda each: each.nbytes)] if whole else parts
    return " and ".join(dict.fromkeys(each.name for each in found)) or "shared memory without a name"


def _place(ptx: str, line: int) -> tuple[str, str]:
    """File and line of an instruction, and the text there."""
    where = sources.location(ptx, line)
    if where is None:
        return f"PTX line {line}", ptx.splitlines()[line - 1].strip()
    path, number = where.place.path, where.place.line
    return f"{path.rpartition('/')[2]}:{number}", sources.text_of_line(path, number).strip()


def _costs(each: InstructionCounts, kinds: dict[str, None]) -> Counter:
    """Metrics of an instruction in shared memory, whose kinds are added to ``kinds``."""
    found: Counter = Counter()
    for by_kind in each.units.values():
        for kind, metrics in by_kind.items():
            if "wavefronts" in metrics:
                kinds[kind] = None
                found.update({name: metrics[name] for name in _METRICS if name in metrics})
    return found
