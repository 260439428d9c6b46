"""Position embeddings for the grids that images have, interpolated once per grid and kept."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from cute_kernels.common import forks
from cute_kernels.config import check_choice
from cute_kernels.models.nn import availability
from cute_kernels.models.nn.origin import Origin
from cute_kernels.operations.runtime.constants import DERIVED

Interpolation = Literal["bicubic", "bilinear"]


def interpolate(
    pos_embed: torch.Tensor, native: tuple[int, int], grid: tuple[int, int], mode: Interpolation, antialias: bool
) -> torch.Tensor:
    """``[rows * columns, N]`` float32 of ``pos_embed`` ``[S, N]`` or ``[1, S, N]``, of grid ``native``, for ``grid``.

    `torch.nn.functional.interpolate` in FP32, ``align_corners=False``, whatever the type of the parameter.
    """
    image = pos_embed.reshape(*native, -1).to(torch.float32).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(image, size=grid, mode=mode, align_corners=False, antialias=antialias)
    return resized[0].flatten(1).t().contiguous()


def checked_grids(
    spatial_shapes: torch.Tensor | Sequence[Sequence[int]], batch: int, length: int
) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of every image; reading a tensor on a GPU makes the host wait once.

    Raises:
        TypeError, ValueError: no grids; another number of images, a grid without patches, or more patches than rows.
    """
    shapes = spatial_shapes.tolist() if isinstance(spatial_shapes, torch.Tensor) else spatial_shapes
    if not isinstance(shapes, Iterable):
        raise TypeError(f"spatial_shapes is {type(spatial_shapes).__name__}: must be (rows, columns) of every image")
    grids = tuple(two_integers("spatial_shapes", shape) for shape in shapes)
    if len(grids) != batch:
        raise ValueError(f"spatial_shapes has {len(grids)} grids: must be one per image, {batch}")
    for rows, columns in grids:
        if rows * columns > length:
            raise ValueError(f"spatial_shapes has a grid of {rows} x {columns} patches: must be at most {length}")
    return grids


def two_integers(name: str, value: Sequence[int]) -> tuple[int, int]:
    """``value`` as a pair of integers of at least 1, or a TypeError or ValueError that calls it ``name``."""
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} is {type(value).__name__}: must be two integers (rows, columns)")
    pair = tuple(value)
    if len(pair) != 2 or any(isinstance(extent, bool) or not isinstance(extent, int) for extent in pair):
        raise ValueError(f"{name} has {value!r}: must be two integers (rows, columns)")
    if min(pair) < 1:
        raise ValueError(f"{name} has {pair}: must be at least 1")
    return pair


def checked_grid(pos_embed: torch.Tensor, grid: tuple[int, int] | None, weight: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of positions that fit ``weight``, a square where the caller says none. Raises TypeError,
    ValueError: other positions than ``[S, N]`` or ``[1, S, N]`` on its device; a grid of another number."""
    features = weight.shape[0]
    if not isinstance(pos_embed, torch.Tensor):
        raise TypeError(f"pos_embed is {type(pos_embed).__name__}: must be torch.Tensor")
    if not pos_embed.is_floating_point():
        raise TypeError(f"pos_embed has dtype {pos_embed.dtype}: must be floating-point types")
    if pos_embed.device != weight.device:
        devices = f"on {pos_embed.device} and weight is on {weight.device}"
        raise ValueError(f"pos_embed is {devices}: they must be on one device")
    one = pos_embed.dim() == 2 or (pos_embed.dim() == 3 and pos_embed.shape[0] == 1)
    if not one or pos_embed.shape[-1] != features or not pos_embed.shape[-2]:
        shapes = f"[S, N] or [1, S, N] with N = {features}"
        raise ValueError(f"pos_embed has shape {list(pos_embed.shape)}: must be {shapes}")
    count = pos_embed.shape[-2]
    rows, columns = (math.isqrt(count),) * 2 if grid is None else two_integers("grid", grid)
    if grid is None and rows * columns != count:
        raise ValueError(f"pos_embed has S = {count} positions: must be a square grid, or say `grid`")
    if rows * columns != count:
        raise ValueError(f"grid = {(rows, columns)} with {count} positions: rows x columns must be S")
    return rows, columns


@dataclass
class PositionCache:
    """The last ``capacity`` results for one parameter, forgotten when it changes; ``misses`` counts what was computed.

    ``mode`` and ``antialias`` are as `torch.nn.functional.interpolate` has them.
    """

    mode: Interpolation = "bicubic"
    antialias: bool = False
    capacity: int = 32
    misses: int = 0

    def __post_init__(self) -> None:
        check_choice("interpolation", self.mode, get_args(Interpolation))
        if not isinstance(self.antialias, bool):
            raise TypeError(f"antialias is {type(self.antialias).__name__}: must be bool")
        self._entries: OrderedDict[Hashable, object] = OrderedDict()
        self._source: Origin | None = None
        self._ids: tuple[Origin, bool] | None = None
        self._lock = forks.lock()

    def __reduce__(self) -> tuple:
        return PositionCache, (self.mode, self.antialias, self.capacity)

    def table(self, pos_embed: torch.Tensor, native: tuple[int, int], grid: tuple[int, int]) -> torch.Tensor:
        """``[S, N]``: ``pos_embed`` itself where the grids are equal, otherwise `interpolate`'s result.

        The same object call after call, since operations find what they derive from it by object; computed anew where
        gradients flow through it.
        """
        if grid == native and pos_embed.dim() == 2:
            return pos_embed

        def build() -> torch.Tensor:
            if grid == native:
                # A view that is kept without need of gradients must not keep `torch.utils.swap_tensors` from swapping.
                return (pos_embed if torch.is_grad_enabled() else pos_embed.detach()).flatten(0, 1)
            return interpolate(pos_embed, native, grid, self.mode, self.antialias)

        return self._keep(pos_embed, ("table", native, grid), build)

    def for_kernel(self, pos_embed: torch.Tensor, native: tuple[int, int], grid: tuple[int, int]) -> torch.Tensor:
        """`table`, but in a graph that is traced the parameter itself where grids are equal: what is derived from it is
        found by object."""
        return pos_embed if availability.traced() and grid == native else self.table(pos_embed, native, grid)

    def packed(
        self, pos_embed: torch.Tensor, native: tuple[int, int], grids: tuple[tuple[int, int], ...], length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of images of several grids, each padded to ``length`` rows with its first position: ``[T, N]``, the
        tables of the distinct grids in turn, and ``[B, length]`` int32, which row of it each row of the batch gets."""

        def build() -> tuple[torch.Tensor, torch.Tensor]:
            tables, first, total = [], {}, 0
            for rows, columns in dict.fromkeys(grids):
                tables.append(self.table(pos_embed, native, (rows, columns)).to(torch.float32))
                first[rows, columns] = total
                total += rows * columns
            index = torch.empty(len(grids), length, dtype=torch.int32, device="cpu")
            for image, (rows, columns) in enumerate(grids):
                index[image] = first[rows, columns]
                index[image, : rows * columns] += torch.arange(rows * columns, dtype=torch.int32, device="cpu")
            return torch.cat(tables), index.to(pos_embed.device)

        return self._keep(pos_embed, ("packed", native, grids, length), build)

    @torch.compiler.disable
    def in_order(self, position_ids: torch.Tensor, count: int) -> bool:
        """Whether ``[1, count]`` indices are 0, 1, 2, ..: looked at once, and again after a write to them."""
        if not availability.is_plain(position_ids) or tuple(position_ids.shape) != (1, count):
            return False
        if self._ids is None or not self._ids[0].is_unchanged(position_ids):
            in_order = torch.equal(position_ids[0], torch.arange(count, device=position_ids.device))
            self._ids = Origin(position_ids), in_order
        return self._ids[1]

    def _keep(self, pos_embed: torch.Tensor, key: Hashable, build: Callable[[], object]) -> object:
        """``build()``, or its result of an earlier call with this key and the parameter as it was.

        A graph that is traced or exported computes it, and so does a transformation of `torch.func`: what stands for
        the parameter then has no memory, as that of subclasses of tensors may not have.
        """
        if availability.in_graph() or not availability.is_plain(pos_embed) or availability.is_transformed(pos_embed):
            return build()
        return self._kept(pos_embed, key, build)

    @torch.compiler.disable
    def _kept(self, pos_embed: torch.Tensor, key: Hashable, build: Callable[[], object]) -> object:
        # Beside a weight that trains, comparing positions on a GPU would make the host wait in every step.
        compared = pos_embed.is_cuda and DERIVED.compares_on_gpu
        if torch.is_grad_enabled() and (pos_embed.requires_grad or compared):
            return build()
        with self._lock:
            if self._source is None or not self._source.is_unchanged(pos_embed):
                self._entries.clear()
                self._source = Origin(pos_embed)
            source = self._source
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        # Not tensors of inference mode, which operations could not find again: these have no version counter.
        with torch.inference_mode(False), torch.no_grad():
            value = build()
        with self._lock:
            self.misses += 1
            if self._source is source:
                self._entries[key] = value
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)
        return value

    def __len__(self) -> int:
        return len(self._entries)
