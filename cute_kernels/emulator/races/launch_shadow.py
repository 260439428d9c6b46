"""State of the race detector that outlives a launch's clusters: accesses to global memory, by region."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cute_kernels.emulator.core.layout import word_count, words
from cute_kernels.emulator.isa.ptx.flow import Flow
from cute_kernels.emulator.isa.ptx.waits import parting
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.races.launch_accesses import (
    READ,
    STRONG_READ,
    STRONGLY_WRITTEN,
    WRITES,
    WRITTEN,
    Region,
    Span,
    spans_of,
)
from cute_kernels.emulator.races.meetings import Visits
from cute_kernels.emulator.races.shadow import GRANULE, LANE_BITS, STRONG, Epochs, Plane, Shadow
from cute_kernels.emulator.races.shadow_unit import ShadowUnit
from cute_kernels.emulator.races.sync_point import Knowledge

#: Words of a row of `LaunchShadow`'s table of regions, a `LaunchRegion` of the core.
_REGION_WORDS = word_count("LaunchRegion")
_NON_COHERENT, _STORES, _PARTING, _FIRST = (
    words("LaunchRegions")[name] for name in ("non_coherent", "stores", "parting", "first")
)


@dataclass
class LaunchShadow:
    """State that outlives a cluster: accesses to global memory, and what was released there."""

    memory: GlobalMemory
    epochs: Epochs = field(default_factory=Epochs)
    regions: dict[Region, Shadow] = field(default_factory=dict)  # shadow per registered region of global memory
    clusters: int = 0  # how many have been made
    # per address, what was released there to other clusters, see `abroad`
    released: dict[int, Knowledge] = field(default_factory=dict)
    # per address, what was known at any fence.sc that happens before a strong write there
    fenced: dict[int, Knowledge] = field(default_factory=dict)
    visits: Visits | None = None  # the latest strong accesses; None: there was none
    first: int = 1  # first epoch of this launch; those before it belong to a launch that may not be over yet
    # of the kernel, to name the instructions of earlier accesses; None: they are not named. `follow` sets it
    flow: Flow | None = None
    non_coherent: frozenset[int] = frozenset()  # instructions of the kernel that are ld.global.nc, by index
    makes_maps: bool = False  # the kernel changes tensor maps, and what reads them is recorded
    elsewhere: list[Span] = field(default_factory=list)  # accesses that clusters in other processes made
    # addresses of the tensor maps in global memory that this process used; they are in no shadow
    maps: set[int] = field(default_factory=set)
    # a `LaunchRegions` of the core, as int64
    block: np.ndarray = field(default_factory=lambda: np.zeros(word_count("LaunchRegions"), np.int64))

    def __post_init__(self) -> None:
        self._table = np.zeros((0, _REGION_WORDS), np.int64)

    def follow(self, flow: Flow) -> None:
        """The launch executes this kernel. The core is told of all memory: what it does not know is Python's."""
        self.flow = flow
        self.non_coherent = flow.kernel.non_coherent
        self.makes_maps = flow.kernel.makes_maps
        self._flags = np.zeros(len(flow.kernel.instructions), np.uint8)
        self._flags[list(self.non_coherent)] = 1
        self._stores = np.array([one.parts[0] == "st" for one in flow.kernel.instructions], np.uint8)
        self._parting = np.zeros(len(flow.kernel.instructions), np.uint8)
        self._parting[list(parting(flow))] = 1
        self.block[_NON_COHERENT] = self._flags.ctypes.data if self.non_coherent else 0
        self.block[_STORES] = self._stores.ctypes.data
        self.block[_PARTING] = self._parting.ctypes.data
        self.block[_FIRST] = self.first
        self.track_all()

    def track_all(self) -> None:
        """All memory that may be written has a shadow, of which the core knows."""
        regions = self.memory.regions()
        if len(self._table) == len(regions):
            return
        rows = []
        for index, region in enumerate(regions):
            origin, nbytes, writable = self.memory.region_bounds(index)
            shadow = self.regions.setdefault((origin, nbytes), Shadow(nbytes, bounded=True)) if writable else None
            rows.append((region.start, region.end, writable, 0 if shadow is None else shadow.address, origin))
        self._table = np.array(rows, np.int64).reshape(-1, _REGION_WORDS)
        self.block[:2] = self._table.ctypes.data, len(rows)

    def shadow(self, index: int) -> tuple[Shadow, int] | None:
        """The shadow of a region of the memory and its first address; None for memory that is only read."""
        self.track_all()
        origin, nbytes, writable = self.memory.region_bounds(index)
        return (self.regions[origin, nbytes], origin) if writable else None

    def place(self, plane: Plane, offset: int) -> str:
        """Where an offset in the plane of a region is, for reports: ``"byte 12 of out (256 bytes)"``."""
        name, byte, nbytes = self.array(plane, offset)
        return f"byte {byte} of {name or 'a global array'} ({nbytes} bytes)"

    def array(self, plane: Plane, offset: int) -> tuple[str, int, int]:
        """Name of the array that an offset in the plane of a region is in, the byte of it, and how many it has."""
        bounds = next(key for key, shadow in self.regions.items() if plane is shadow.coarse or plane is shadow.fine)
        # A window begins up to 31 bytes before its array, and may be that of several arrays.
        region, byte = next(
            (region, bounds[0] + offset - region.start)
            for index, region in enumerate(self.memory.regions())
            if self.memory.region_bounds(index)[:2] == bounds and region.start <= bounds[0] + offset < region.end
        )
        return region.name, byte, region.end - region.start

    def accesses(self) -> list[Span]:
        """Accesses to global memory since the launch began, by span."""
        return [
            span for region, shadow in self.regions.items()
            for span in spans_of(region, shadow, self.epochs, self.first)
        ]  # fmt: skip

    def successor(self) -> LaunchShadow:
        """For a launch that may begin before this one is over: who accessed what becomes "the launch before"."""
        epochs = Epochs()
        weak, strong = (epochs.new(0, 1, "launch before this one", kind) for kind in (0, STRONG))
        for shadow in self.regions.values():
            for plane in (shadow.coarse, shadow.fine):
                if plane is not None:
                    for layer in (plane.writes, *plane.readers()):
                        if not layer.any():  # pages that nobody has touched stay so
                            continue
                        is_strong = self.epochs.generic[layer >> LANE_BITS] == STRONG
                        layer[:] = np.where(layer == 0, 0, np.where(is_strong, strong, weak))
        for span in self.elsewhere:
            self._adopt(span, epochs, weak, strong)
        return LaunchShadow(self.memory, epochs, self.regions, first=len(epochs))

    def _adopt(self, span: Span, epochs: Epochs, weak: int, strong: int) -> None:
        """Records what was done to a span, by these identities."""
        shadow = self.regions.setdefault(span.region, Shadow(span.region[1], bounded=True))
        core = ShadowUnit(epochs, lambda address: shadow)
        for runs, unit in ((span.granules, GRANULE), (span.single, 1)):
            codes = runs.expand() if runs is not None else np.zeros(0, np.uint8)
            for code, identity in ((WRITTEN, weak), (STRONGLY_WRITTEN, strong), (READ, weak), (STRONG_READ, strong)):
                places = span.start + unit * np.flatnonzero(codes & code)
                core.note(shadow, places, unit, identity, bool(code & WRITES))
