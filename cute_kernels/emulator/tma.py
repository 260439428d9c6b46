"""Tensor memory accelerator: tensor maps, tile copies between global and shared memory, swizzles, completion.

A tensor map is the 128-byte hardware descriptor. `decode` reads it; modes that are not implemented raise.
Dimension 0 is the innermost one throughout, as in the tensor map.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.async_engine import AsyncEngine, AsyncOp, BulkGroups, BulkOp
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.gmem import GlobalMemory
from cute_kernels.emulator.mbarrier import MBarriers
from cute_kernels.emulator.sanitizer import ProxyTracker
from cute_kernels.emulator.smem import OFFSET_MASK, ClusterMemory, shared_address

SHARED_ALIGNMENT = 128  # PTX ISA: shared-memory address of a tensor copy

#: Hardware data type code -> (name, bytes per element).
DATA_TYPES = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
}
#: Swizzle code -> (name, bytes of the span within which 16-byte chunks are permuted).
SWIZZLES = {0: ("none", 16), 1: ("32B", 32), 2: ("64B", 64), 3: ("128B", 128)}


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map of a tiled tensor.

    Attributes:
        address: global address of element 0.
        dtype: element type, a name of `DATA_TYPES`.
        extents: elements per dimension, innermost first.
        strides: bytes between elements of dimensions 1.. (dimension 0 is contiguous).
        box: elements per dimension of one copy.
        element_strides: traversal strides, all 1.
        swizzle: ``"none"``, ``"32B"``, ``"64B"``, ``"128B"``.
        interleave: 0 (none).
        nan_fill: whether out-of-bounds elements read as NaN instead of zero.
        l2_promotion: code 0..3; no effect on results.
    """

    address: int
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: str = "none"
    interleave: int = 0
    nan_fill: bool = False
    l2_promotion: int = 0

    @property
    def rank(self) -> int:
        return len(self.extents)

    @property
    def element_bytes(self) -> int:
        return {name: size for name, size in DATA_TYPES.values()}[self.dtype]

    @functools.cached_property
    def box_bytes(self) -> int:
        """Bytes of one copy, those out of bounds included: what the mbarrier counts."""
        return math.prod(self.box) * self.element_bytes


def encode(tensor_map: TensorMap) -> bytes:
    """The 128 bytes of a tensor map (for tests; kernels get theirs from CuTe DSL's host code)."""
    codes = {name: code for code, (name, _) in DATA_TYPES.items()}
    swizzles = {name: code for code, (name, _) in SWIZZLES.items()}
    words = [0] * 16
    rank = tensor_map.rank
    words[0] = tensor_map.address & 0xFFFFFFFF
    words[1] = tensor_map.address >> 32
    words[2] = (rank - 1) << 4 | codes[tensor_map.dtype] << 7 | swizzles[tensor_map.swizzle] << 13
    for i, stride in enumerate(tensor_map.strides):
        words[3 + i] = (stride >> 4) & 0xFFFFFFFF
        words[7] |= (stride >> 36) << (4 * i)
    for i in range(5):
        words[8 + i] = tensor_map.extents[i] - 1 if i < rank else 0
        words[13] |= ((tensor_map.element_strides[i] - 1) if i < rank else 0) << (3 * i)
    box = [(tensor_map.box[i] - 1) if i < rank else 0 for i in range(5)]
    words[13] |= box[0] << 24
    words[14] = box[1] | box[2] << 8 | box[3] << 16 | box[4] << 24
    return struct.pack("<16I", *words)


@functools.lru_cache(maxsize=256)
def decode(data: bytes) -> TensorMap:
    """Decodes a 128-byte tensor map.

    Raises:
        UnsupportedPTX: a data type, interleave, fill or stride mode that is not implemented.
    """
    if len(data) != 128:
        raise IllegalAccess(f"a tensor map has 128 bytes, not {len(data)}")
    words = struct.unpack("<16I", data[:64])
    header = words[2]
    rank = (header >> 4 & 7) + 1
    code = header >> 7 & 15
    if code not in DATA_TYPES:
        raise UnsupportedPTX(f"tensor map with data type code {code}")
    name, _ = DATA_TYPES[code]
    return TensorMap(
        address=words[0] | words[1] << 32,
        dtype=name,
        extents=tuple(words[8 + i] + 1 for i in range(rank)),
        strides=tuple((words[3 + i] | (words[7] >> (4 * i) & 15) << 32) << 4 for i in range(rank - 1)),
        box=tuple((b + 1) for b in struct.unpack("<5B", data[55:60])[:rank]),
        element_strides=tuple((words[13] >> (3 * i) & 7) + 1 for i in range(rank)),
        swizzle=SWIZZLES[header >> 13 & 3][0],
    )


@functools.lru_cache(maxsize=256)
def chunk_order(swizzle: str, nbytes: int, phase: int) -> np.ndarray | None:
    """Where the 16-byte chunks of a contiguous shared range go: physical chunk p holds logical chunk ``order[p]``.

    The swizzle XORs bits of the absolute shared address; the permutation is its own inverse within each span.

    Args:
        swizzle: as in `TensorMap.swizzle`.
        nbytes: length of the range.
        phase: shared address of its first byte modulo 1024 (the period of the widest swizzle).
    """
    if swizzle == "none":
        return None
    address = np.arange(-(-nbytes // 16), dtype=np.int64) * 16 + phase
    bits = {"32B": 1, "64B": 3, "128B": 7}[swizzle]
    order = (address ^ ((address >> 7 & bits) << 4)) - phase >> 4
    return order


def _window(tensor_map: TensorMap, coords: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Part of the box inside the tensor: per dimension first and end index within the box, and the coordinates."""
    first = [max(0, -c) for c in coords]
    end = [min(box, extent - c) for box, extent, c in zip(tensor_map.box, tensor_map.extents, coords, strict=True)]
    return first, end, list(coords)


def _global_tile(
    tensor_map: TensorMap, coords: Sequence[int], gmem: GlobalMemory, *, write: bool
) -> tuple[np.ndarray, tuple[slice, ...]] | None:
    """The in-bounds part of a box as a strided uint8 view [.., dim 1, bytes of dim 0] and its place in the box."""
    first, end, _ = _window(tensor_map, coords)
    if any(e <= f for f, e in zip(first, end, strict=True)):
        return None
    size = tensor_map.element_bytes
    strides = (size, *tensor_map.strides)
    start = tensor_map.address + sum((c + f) * s for c, f, s in zip(coords, first, strides, strict=True))
    counts = [e - f for f, e in zip(first, end, strict=True)]
    span = sum((n - 1) * s for n, s in zip(counts, strides, strict=True)) + size
    view = gmem.view(start, span, write=write)
    shape = (*reversed(counts[1:]), counts[0] * size)
    tile = np.ndarray(shape, np.uint8, buffer=view, strides=(*reversed(tensor_map.strides), 1))
    place = tuple(slice(f, e) for f, e in zip(reversed(first[1:]), reversed(end[1:]), strict=True))
    return tile, (*place, slice(first[0] * size, end[0] * size))


def _box_shape(tensor_map: TensorMap) -> tuple[int, ...]:
    return (*reversed(tensor_map.box[1:]), tensor_map.box[0] * tensor_map.element_bytes)


def load_tile(tensor_map: TensorMap, coords: Sequence[int], gmem: GlobalMemory) -> np.ndarray:
    """One box from global memory: uint8 [box bytes] in box order (dimension 0 fastest), out-of-bounds elements zero.

    Args:
        tensor_map: the tensor.
        coords: signed element coordinates of the box's first element, innermost first.
        gmem: where the tensor lives.

    Raises:
        IllegalAccess: the in-bounds part is not registered memory, or the number of coordinates is wrong.
    """
    _check_coords(tensor_map, coords)
    part = _global_tile(tensor_map, coords, gmem, write=False)
    if part is None:
        return np.zeros(tensor_map.box_bytes, np.uint8)
    tile, place = part
    if tile.size == tensor_map.box_bytes:
        return np.ascontiguousarray(tile).reshape(-1)
    box = np.zeros(_box_shape(tensor_map), np.uint8)
    box[place] = tile
    return box.reshape(-1)


def store_tile(tensor_map: TensorMap, coords: Sequence[int], gmem: GlobalMemory, data: np.ndarray) -> None:
    """Writes uint8 [box bytes] in box order to global memory; elements out of bounds are dropped."""
    _check_coords(tensor_map, coords)
    part = _global_tile(tensor_map, coords, gmem, write=True)
    if part is not None:
        tile, place = part
        tile[...] = data.reshape(_box_shape(tensor_map))[place]


def _check_coords(tensor_map: TensorMap, coords: Sequence[int]) -> None:
    if len(coords) != tensor_map.rank:
        raise IllegalAccess(f"{len(coords)} coordinates for a tensor map of rank {tensor_map.rank}")


def swizzle_into(destination: np.ndarray, data: np.ndarray, swizzle: str, address: int) -> None:
    """Writes box bytes to their swizzled places: ``destination`` is the shared range that starts at ``address``."""
    order = chunk_order(swizzle, len(data), address & 1023)
    if order is None:
        destination[...] = data
    else:
        destination.view(np.complex128)[...] = data.view(np.complex128)[order]


def unswizzle(source: np.ndarray, swizzle: str, address: int) -> np.ndarray:
    """The inverse of `swizzle_into`: box bytes (a copy) from the shared range that starts at ``address``."""
    order = chunk_order(swizzle, len(source), address & 1023)
    if order is None:
        return source.copy()
    return source.view(np.complex128)[order].view(np.uint8)


class TmaUnit:
    """Executes the tensor copies of one cluster.

    Checks happen at issue, data movement when the asynchronous engine runs the operation.

    Attributes:
        bytes_loaded, bytes_stored: box bytes of the copies issued so far, multicast counted once per destination.
    """

    def __init__(
        self,
        gmem: GlobalMemory,
        shared: ClusterMemory,
        barriers: MBarriers,
        engine: AsyncEngine,
        tracker: ProxyTracker | None = None,
        groups: BulkGroups | None = None,
    ) -> None:
        self.gmem = gmem
        self.shared = shared
        self.barriers = barriers
        self.engine = engine
        self.tracker = tracker
        self.groups = groups if groups is not None else BulkGroups()
        self.bytes_loaded = 0
        self.bytes_stored = 0
        self._serial = 0

    def load(
        self,
        descriptor: bytes,
        coords: Sequence[int],
        destination: int,
        barrier: int,
        *,
        rank: int,
        cta_group: int | None = None,
        multicast: int | None = None,
        describe: str = "",
    ) -> None:
        """cp.async.bulk.tensor.Nd.shared.global.tile.mbarrier::complete_tx::bytes.

        Args:
            descriptor: the 128 bytes of the tensor map.
            coords: element coordinates, innermost first.
            destination: shared address.
            barrier: shared address of the mbarrier.
            rank: cluster rank of the issuing CTA.
            cta_group: the qualifier, None when absent. 2 allows the mbarrier to be in the other CTA of the pair.
            multicast: CTA mask, or None without ``.multicast::cluster``.
            describe: who issues, for reports.

        Raises:
            IllegalAccess: alignment, bounds, or a barrier in a CTA where it may not be.
            UnsupportedPTX: a tensor map mode that is not implemented.
        """
        tensor_map = decode(bytes(descriptor))
        _check_coords(tensor_map, coords)
        coords = tuple(coords)
        if destination % SHARED_ALIGNMENT:
            raise IllegalAccess(
                f"tensor copy to shared address {destination:#x}, which is not {SHARED_ALIGNMENT}-byte aligned"
            )
        nbytes = tensor_map.box_bytes
        for target, signal in self._targets(destination, barrier, cta_group, multicast):
            self._serial += 1
            self.bytes_loaded += nbytes
            self.engine.submit(
                AsyncOp(
                    ("tma", self._serial),
                    functools.partial(self._run_load, tensor_map, coords, target, signal),
                    f"TMA load of {nbytes} bytes to shared offset {target & OFFSET_MASK} of CTA {target >> 24}, "
                    f"signals offset {signal & OFFSET_MASK} of CTA {signal >> 24} {describe}",
                )
            )

    def store(
        self, descriptor: bytes, coords: Sequence[int], source: int, *, thread: Hashable, describe: str = ""
    ) -> None:
        """cp.async.bulk.tensor.Nd.global.shared::cta.tile.bulk_group: joins the open bulk group of ``thread``.

        Args:
            descriptor: the 128 bytes of the tensor map.
            coords: element coordinates, innermost first.
            source: shared address.
            thread: identity of the issuing thread, as in `BulkGroups`.
            describe: who issues, for reports.

        Raises:
            IllegalAccess, UnsupportedPTX: as for `load`.
            ProxyFenceMissing: the source was written through the generic proxy and not fenced since.
        """
        tensor_map = decode(bytes(descriptor))
        _check_coords(tensor_map, coords)
        if source % SHARED_ALIGNMENT:
            raise IllegalAccess(
                f"tensor copy from shared address {source:#x}, which is not {SHARED_ALIGNMENT}-byte aligned"
            )
        nbytes = tensor_map.box_bytes
        rank, offset = self.shared.resolve(source)
        text = f"TMA store of {nbytes} bytes from shared offset {offset} of CTA {rank} {describe}".rstrip()
        bulk = BulkOp(text)
        if self.tracker is not None:
            self.tracker.async_read(rank, offset, nbytes, text)
            token = self.tracker.read_begin(rank, offset, nbytes, text)
            bulk.on_observed = functools.partial(self.tracker.read_end, token)
        self.groups.issue(thread, bulk)
        self.bytes_stored += nbytes
        self._serial += 1
        key = ("tma", self._serial)
        box: list[np.ndarray] = []

        def read() -> None:
            box.append(unswizzle(self.shared.view(source, nbytes), tensor_map.swizzle, source))
            bulk.read_done = True

        def write() -> None:
            store_tile(tensor_map, coords, self.gmem, box.pop())
            bulk.write_done = True

        self.engine.submit(AsyncOp(key, read, f"{text} (read)"))
        self.engine.submit(AsyncOp(key, write, f"{text} (write)"))

    def prefetch(self, descriptor: bytes, coords: Sequence[int] | None = None) -> None:
        """prefetch.tensormap / cp.async.bulk.prefetch.tensor: no effect on results; the descriptor is checked."""
        tensor_map = decode(bytes(descriptor))
        if coords is not None:
            _check_coords(tensor_map, coords)

    def _run_load(self, tensor_map: TensorMap, coords: Sequence[int], target: int, signal: int) -> None:
        nbytes = tensor_map.box_bytes
        if self.tracker is not None:
            rank, offset = self.shared.resolve(target)
            self.tracker.async_write(rank, offset, nbytes, "TMA load")
        data = load_tile(tensor_map, coords, self.gmem)
        swizzle_into(self.shared.view(target, nbytes, write=True), data, tensor_map.swizzle, target)
        self.barriers.complete_tx(signal, nbytes)

    def _targets(
        self, destination: int, barrier: int, cta_group: int | None, multicast: int | None
    ) -> list[tuple[int, int]]:
        """(destination, mbarrier) addresses of each copy."""
        rank, offset = self.shared.resolve(destination)
        signal_rank, signal_offset = self.shared.resolve(barrier)
        if multicast is None:
            if signal_rank != rank and not (cta_group == 2 and signal_rank ^ rank == 1):
                raise IllegalAccess(
                    f"tensor copy to CTA {rank} signals an mbarrier of CTA {signal_rank}; allowed is its own CTA"
                    + (" or the other of its pair" if cta_group == 2 else " (.cta_group::2 allows the pair's other)")
                )
            return [(destination, barrier)]
        if not multicast or multicast >> len(self.shared.ctas):
            raise IllegalAccess(f"multicast mask {multicast:#x} in a cluster of {len(self.shared.ctas)} CTAs")
        targets = []
        for target in range(len(self.shared.ctas)):
            if multicast >> target & 1:
                signal = (target & ~1) | (signal_rank & 1) if cta_group == 2 else target
                targets.append((shared_address(target, offset), shared_address(signal, signal_offset)))
        return targets
