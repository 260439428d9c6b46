"""Layouts of shared memory: from a coordinate to byte, bank and lane, and the wavefronts that an access costs."""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.common.words import counted
from cute_kernels.config import ITEMSIZE
from cute_kernels.dsl.layouts import offsets, swizzled

BYTES = {
    **ITEMSIZE, "bf16": 2, "f16": 2, "fp16": 2, "f32": 4, "fp32": 4, "tf32": 4, "f64": 8, "fp64": 8, "f8": 1, "fp8": 1,
    "i8": 1, "u8": 1, "i32": 4,
}  # fmt: skip
"""Bytes of an element by the name of its type."""

_BANKS, _WORD, _WAVEFRONT, _WIDEST, _WARP = 32, 4, 128, 16, 32
_MOST = 1 << 20
_COMPOSED = re.compile(r"S<(\d+,\d+,\d+)>\s*o\s*(-?\d+)\s*o\s*(.*)")


@dataclass(frozen=True)
class Shown:
    """A layout and an access to it; a notebook shows a table.

    ``byte``: address of each coordinate, int64 [rows, columns]. ``lane``: that accesses a coordinate, -1 where none
    does, int64 [rows, columns]. ``requests``, ``wavefronts``, ``conflicts``: of one warp's access of all its values; a
    conflict is a wavefront beyond the first of lanes that are served together."""

    byte: np.ndarray
    lane: np.ndarray
    requests: int
    wavefronts: int
    conflicts: int

    @property
    def bank(self) -> np.ndarray:
        """Banks of 4 bytes, int64 [rows, columns]."""
        return self.byte // _WORD % _BANKS

    def records(self) -> list[dict[str, int]]:
        """A mapping for each coordinate."""
        places = {name: getattr(self, name) for name in ("byte", "bank", "lane")}
        return [
            {"row": at[0], "column": at[1], **{name: int(found[at]) for name, found in places.items()}}
            for at in np.ndindex(*self.byte.shape)
        ]

    def lines(self) -> list[str]:
        """Bytes and banks of each row, a cell for elements that stay neighbours everywhere, then the cost."""
        columns = self.byte.shape[1]
        steps = (step for step in range(columns, 0, -1) if columns % step == 0)
        step = next(step for step in steps if step == 1 or _neighbours(self.byte, step))
        cells = [["", *(str(column) for column in range(0, columns, step))]]
        for row, (byte, bank) in enumerate(zip(self.byte, self.bank)):
            cells.append([str(row), *(f"{a}:{b}" for a, b in zip(byte[::step], bank[::step]))])
        width = max(len(cell) for line in cells for cell in line)
        grid = [" ".join(cell.rjust(width) for cell in line) for line in cells]
        return ["byte:bank by row and column", *grid, self._cost]

    @property
    def _cost(self) -> str:
        names = "wavefront", "bank conflict"
        costs = ", ".join(map(counted, (self.wavefronts, self.conflicts), names))
        return f"{counted(self.requests, 'request')} of a warp, {costs}"

    def _repr_html_(self) -> str:
        rows: dict[int, str] = {}
        for each in self.records():
            style = f"background:hsl({each['bank'] * 11} 55% 78%);color:#000;border:{2 * (each['lane'] >= 0)}px solid"
            title = ", ".join(f"{name} {value}" for name, value in each.items())
            cell = f'<td style="{style}" title="{title}">{each["bank"]}</td>'
            rows[each["row"]] = rows.get(each["row"], f"<th>{each['row']}</th>") + cell
        lines = "".join(f"<tr>{row}</tr>" for row in rows.values())
        return f"<table><caption>Banks by row and column. {self._cost}.</caption>{lines}</table>"


def show_layout(
    layout: Any, *, swizzle: str = "", dtype: Any = "bf16", lanes: str = "(32,1):(1,0)", load: bool = True
) -> Shown:
    """Places of a layout in shared memory, and what it costs a warp to access it.

    Args:
        layout: of CuTe, as its text or an object of CuTe DSL that prints as one: ``(8,64):(64,1)``, or with a swizzle
            ``S<3,4,3> o 0 o (8,64):(64,1)``, which swizzles elements behind its offset, as CuTe's does where a tensor
            has it. The first mode is rows; further ones are columns, the first fastest.
        swizzle: ``B,M,S``, of addresses in bytes, as those of pointers to shared memory are: for a composed layout of
            which a pointer gets ``inner``, this and the text of ``outer``.
        dtype: a key of `BYTES`, or a dtype of torch.
        lanes: layout from (lane, value) to the index of a coordinate, rows fastest, as CuTe's thread-value layouts.
            Values of a lane that are neighbours in memory are one access of up to 16 bytes.
        load: a load, whose lanes may share a wavefront where a store's do not.

    Raises:
        ValueError: texts that are none of these, or an index beyond the layout.
    """
    text, own, offset = str(layout), "", 0
    if found := _COMPOSED.fullmatch(text):
        own, offset, text = found[1], int(found[2]), found[3]
    if swizzle and not re.fullmatch(r"\d+,\d+,\d+", swizzle):
        raise ValueError(f"swizzle = {swizzle}: must be three numbers, B,M,S")
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in BYTES:
        raise ValueError(f"dtype = {dtype}: must be one of {', '.join(BYTES)}")
    size, plain, index = BYTES[dtype], offset + _places("layout", text), _places("lanes", lanes)
    if plain.min() < 0:
        raise ValueError(f"layout = {layout}: must have no element before its first byte; one is {-plain.min()} before")
    elements = swizzled(plain, f"S<{own}>")
    elements = elements[None] if elements.ndim == 1 else elements.reshape(len(elements), -1, order="F")
    byte = swizzled(elements * size, f"S<{swizzle}>")
    if index.ndim != 2 or len(index) > _WARP or not 0 <= index.min() <= index.max() < byte.size:
        ends = f"{index.min()} to {index.max()}"
        must = f"must be (lane, value), of at most {_WARP} lanes, to coordinates 0 to {byte.size - 1}"
        raise ValueError(f"lanes = {lanes}: {must}; it has shape {index.shape}, and goes to {ends}")
    lane = np.full(byte.size, -1)
    lane[index] = np.arange(len(index))[:, None]
    accessed = byte.ravel(order="F")[index]
    widths = (width for width in (16, 8, 4, 2, 1) if width * size <= _WIDEST and accessed.shape[1] % width == 0)
    width = next(each for each in widths if _neighbours(accessed, each, size) and _aligned(accessed, each * size, each))
    costs = [_cost(accessed[:, first], width * size, load) for first in range(0, accessed.shape[1], width)]
    wavefronts, groups = (sum(each) for each in zip(*costs))
    return Shown(byte, lane.reshape(byte.shape, order="F"), len(costs), wavefronts, wavefronts - groups)


def _places(name: str, text: str) -> np.ndarray:
    """`offsets` of a layout that can be shown."""
    count = math.prod(map(int, re.findall(r"\d+", text.partition(":")[0])))
    if count > _MOST:
        raise ValueError(f"{name} = {text[:80]}: must have at most {_MOST:,} coordinates; it has {count:,}")
    try:
        return offsets(text)
    except OverflowError:
        raise ValueError(f"{name} = {text[:80]}: must have strides of 64 bits") from None


def _neighbours(places: np.ndarray, width: int, nbytes: int | None = None) -> bool:
    """Whether each ``width`` columns lie one behind the other, ``nbytes`` apart or as far as the first two."""
    apart = nbytes or places.flat[1] - places.flat[0]
    return bool((np.diff(places.reshape(len(places), -1, width), axis=2) == apart).all())


def _aligned(places: np.ndarray, nbytes: int, width: int) -> bool:
    return bool((places[:, ::width] % nbytes == 0).all())


def _cost(places: np.ndarray, nbytes: int, load: bool) -> tuple[int, int]:
    """Wavefronts of an access of a warp, and groups of lanes that are served together: what the emulator counts."""
    width = max(nbytes, _WORD)
    together = min(_WARP, _WAVEFRONT // width)
    lanes = np.arange(len(places))
    pairs = ((places == places[np.minimum(lanes ^ apart, len(lanes) - 1)]).all() for apart in (1, 2))
    if load and together < _WARP and any(pairs):
        together *= 2
    groups = [places[first : first + together] for first in range(0, len(places), together)]
    words = (group[:, None] // _WORD + np.arange(width // _WORD) for group in groups)
    return sum(int(np.bincount(np.unique(each) % _BANKS).max()) for each in words), len(groups)
