"""Tensor memory accelerator: tile copies between global and shared memory, and their completion.

As on an H200 (tests/emulator/data), the box rows of a swizzled copy lie one swizzle span apart even when they are
shorter. `tensor_boxes` has what a copy does in global memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.observe.counters import UnitCounters
from cute_kernels.emulator.observe.races.tracker import Operation, RaceTracker
from cute_kernels.emulator.state.async_engine import AsyncEngine, AsyncOp, BulkGroups, BulkOp
from cute_kernels.emulator.state.gmem import GlobalMemory
from cute_kernels.emulator.state.mbarrier import MBarriers
from cute_kernels.emulator.state.smem import OFFSET_MASK, ClusterMemory, shared_address
from cute_kernels.emulator.units.copies.packed_elements import padded, padding_of, without_padding
from cute_kernels.emulator.units.copies.tensor_boxes import (
    check_coords,
    global_rows,
    inside_box,
    load_checked_tile,
    store_tile,
    tile_sectors,
)
from cute_kernels.emulator.units.copies.tensor_map import (
    CHUNK,
    SWIZZLE_PERIOD,
    Im2colMap,
    TensorMap,
    chunk_order,
    chunk_places,
    decode,
)

#: Element type of a tensor map -> reductions (PTX ISA, cp.reduce.async.bulk.tensor).
_REDUCTIONS = {
    **dict.fromkeys(("u32", "u64"), ("add", "min", "max", "inc", "dec", "and", "or", "xor")),
    **dict.fromkeys(("s32", "s64"), ("add", "min", "max", "and", "or", "xor")),
    **dict.fromkeys(("f16", "bf16"), ("add", "min", "max")),
    **dict.fromkeys(("f32", "f64"), ("add",)),
}
SHARED_ALIGNMENT = 128  # PTX ISA: shared-memory address of a tensor copy


def load_text(nbytes: int, target: int, signal: int, who: str) -> str:
    """Name of a load of a box to one CTA in reports: its bytes, shared addresses of box and mbarrier, who issues it."""
    return (
        f"TMA load of {nbytes} bytes to shared offset {target & OFFSET_MASK} of CTA {target >> 24} for the "
        f"mbarrier at offset {signal & OFFSET_MASK} of CTA {signal >> 24}, issued {who}"
    )


def store_text(nbytes: int, source: int, who: str) -> str:
    """Words of a store for reports."""
    return f"TMA store of {nbytes} bytes from shared offset {source & OFFSET_MASK} of CTA {source >> 24}, issued {who}"


class TmaUnit:
    """Executes the tensor copies of one cluster.

    Checks happen at issue, data movement when the asynchronous engine runs the operation.

    Attributes:
        bytes_loaded, bytes_stored: box bytes of the copies issued so far, multicast counted once per destination.
        meter: hears of every copy that is issued, or None.
    """

    def __init__(
        self,
        gmem: GlobalMemory,
        shared: ClusterMemory,
        barriers: MBarriers,
        engine: AsyncEngine,
        tracker: RaceTracker | None = None,
        groups: BulkGroups | None = None,
        meter: UnitCounters | None = None,
    ) -> None:
        self.meter = meter
        self.gmem = gmem
        self.shared = shared
        self.barriers = barriers
        self.engine = engine
        self.tracker = tracker
        self.groups = groups if groups is not None else BulkGroups()
        self.bytes_loaded = 0
        self.bytes_stored = 0
        self._serial = 0

    def executing(self) -> int:
        """Index of the instruction that issues an operation; -1: not known."""
        agent = self.tracker.agent if self.tracker is not None else None
        return agent.executing() if agent is not None else -1

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
        offsets: Sequence[int] | None = None,
        describe: str = "",
        map_address: int | None = None,
    ) -> None:
        """cp.async.bulk.tensor.Nd.shared.global.{tile, im2col}.mbarrier::complete_tx::bytes.

        Args:
            descriptor: the 128 bytes of the tensor map.
            coords: element coordinates, innermost first.
            destination: shared address.
            barrier: shared address of the mbarrier.
            rank: cluster rank of the issuing CTA.
            cta_group: the qualifier, None when absent. 2 allows the mbarrier to be in the other CTA of the pair.
            multicast: CTA mask, or None without ``.multicast::cluster``.
            offsets: of ``.im2col``, None in tiled mode.
            describe: who issues, for reports.
            map_address: of the tensor map in global memory, if the kernel may change it.

        Raises:
            IllegalAccess: alignment, bounds, a barrier in a CTA where it may not be, a tensor map of the other mode.
            UnsupportedPTX: a tensor map mode that is not implemented.
        """
        tensor_map = _decode_for(descriptor, im2col=offsets is not None)
        coords, offsets = tuple(coords), tuple(offsets or ())
        check_coords(tensor_map, coords, offsets)
        _check_shared(destination)
        nbytes = tensor_map.box_bytes
        targets = self._targets(destination, barrier, cta_group, multicast)
        if self.meter is not None:
            touched = tile_sectors(tensor_map, coords, offsets, write=False)
            self.meter.bulk("tma.load", nbytes, touched, len(targets))
        watched = map_read = None
        for target, signal in targets:
            self.bytes_loaded += nbytes
            text = load_text(nbytes, target, signal, describe or f"by CTA {rank}")
            if self.tracker is not None:
                first, watched = watched is None, self._watch_load(tensor_map, target, signal, text)
                if first:
                    rows = global_rows(tensor_map, coords, self.gmem, offsets, write=False)
                    self.tracker.global_rows(*rows, watched, False)
                    if map_address is not None:
                        map_read = self.tracker.load_reads_map(map_address, signal, text)
                watched.map_read = map_read
            fetch = functools.partial(load_checked_tile, tensor_map, coords, self.gmem, offsets)
            run = functools.partial(self._run_load, tensor_map, fetch, target, signal, watched)
            self.engine.submit(AsyncOp(self._new_queue(), run, text, name=f"load {nbytes} B"))

    def store(
        self,
        descriptor: bytes,
        coords: Sequence[int],
        source: int,
        *,
        thread: Hashable,
        describe: str = "",
        reduction: str | None = None,
        im2col: bool = False,
        map_address: int | None = None,
    ) -> None:
        """cp.async.bulk.tensor.Nd.global.shared::cta.{tile,im2col_no_offs}.bulk_group, in a bulk group of ``thread``.

        Args:
            descriptor: the 128 bytes of the tensor map.
            coords: element coordinates, innermost first.
            source: shared address.
            thread: identity of the issuing thread, as in `BulkGroups`.
            describe: who issues, for reports.
            reduction: operation of cp.reduce.async.bulk.tensor.
            im2col: ``.im2col_no_offs`` instead of ``.tile``.
            map_address: as for `load`.

        Raises:
            IllegalAccess, UnsupportedPTX: as for `load`, and for a negative coordinate.
            ProxyFenceMissing: the source was written through the generic proxy and not fenced since.
        """
        tensor_map = _decode_for(descriptor, im2col=im2col)
        coords = tuple(coords)
        check_coords(tensor_map, coords, store=True)
        _check_shared(source)
        if tensor_map.dtype == "b4x16_p64":
            raise IllegalAccess("tensor store through a tensor map of type 16U4_ALIGN16B, which is for loads only")
        kind = tensor_map.dtype.removesuffix("_ftz")
        if reduction is not None and reduction not in _REDUCTIONS.get(kind, ()):
            raise UnsupportedPTX(f"tensor reduction .{reduction} of {tensor_map.dtype} elements")
        nbytes = tensor_map.box_bytes
        rank, offset = self.shared.resolve(source)
        text = store_text(nbytes, source, describe or f"by {thread}")
        bulk = BulkOp(text, place=self.executing())
        pieces = self._stored_pieces(rank, tensor_map, coords, offset)
        if self.tracker is not None:
            group = self.groups.committed(thread) + 1
            read_part, write_part = self.tracker.bulk(group, text, reduces=reduction is not None)
            if np.size(pieces[0]):
                self.tracker.async_read(rank, *pieces, read_part)
            self.tracker.global_rows(*global_rows(tensor_map, coords, self.gmem, write=True), write_part, True)
            if map_address is not None:
                self.tracker.store_reads_map(map_address, group, text)
        self.groups.issue(thread, bulk)
        self.bytes_stored += nbytes
        if self.meter is not None:
            self.meter.bulk("tma.store", nbytes, tile_sectors(tensor_map, coords, write=True))
        key = self._new_queue()
        box: list[np.ndarray] = []

        def read() -> None:
            box.append(self._read_box(tensor_map, source, pieces))
            bulk.has_read()

        def write() -> None:
            store_tile(tensor_map, coords, self.gmem, box.pop(), reduction)
            bulk.has_written()

        signals = ("bulk_group", thread)
        self.engine.submit(AsyncOp(key, read, f"{text} (read)", name=f"store {nbytes} B: read", signals=signals))
        self.engine.submit(AsyncOp(key, write, f"{text} (write)", name=f"store {nbytes} B: write", signals=signals))

    def prefetch(self, descriptor: bytes, coords: Sequence[int] | None = None) -> None:
        """prefetch.tensormap / cp.async.bulk.prefetch.tensor: no effect on results; the operands are checked."""
        tensor_map = decode(descriptor)
        if coords is not None:
            check_coords(tensor_map, coords)

    def _new_queue(self) -> tuple[str, int]:
        """Tensor copies are not ordered among each other: each gets a queue of its own."""
        self._serial += 1
        return ("tma", self._serial)

    def _watch_load(self, tensor_map: TensorMap | Im2colMap, target: int, signal: int, text: str) -> Operation:
        rank, offset = self.shared.resolve(target)
        operation = self.tracker.copy(signal, text)
        self.tracker.async_write(rank, *self._checked_pieces(rank, tensor_map, offset), operation)
        return operation

    def _run_load(
        self,
        tensor_map: TensorMap | Im2colMap,
        fetch: Callable[[], np.ndarray],
        target: int,
        signal: int,
        watched: Operation | None,
    ) -> None:
        rank, offset = self.shared.resolve(target)
        cta = self.shared.ctas[rank]
        nbytes = tensor_map.shared_bytes
        starts, _ = self._pieces(tensor_map, offset)
        data = fetch() if not tensor_map.padding else padded(tensor_map.dtype, fetch())
        if isinstance(starts, int):
            cta.check_range(offset, nbytes, write=True)
            destination = cta.data[offset : offset + nbytes]
            if tensor_map.swizzle == "none":
                destination[...] = data
            else:
                order = chunk_order(tensor_map.swizzle, nbytes, offset % SWIZZLE_PERIOD)
                np.take(data.view(np.complex128), order, out=destination.view(np.complex128), mode="clip")
        else:
            cta.check_lanes(starts, CHUNK, write=True)
            cta.words[CHUNK][starts // CHUNK] = data.view(np.uint64).reshape(-1, 2)
        if tensor_map.padding:  # in every 16 bytes, whatever the swizzle
            cta.states[1][offset : offset + nbytes][padding_of(tensor_map.dtype, nbytes)] = 0
        if watched is not None:
            self.tracker.complete_copy(watched, signal, rank)
        self.barriers.complete_tx(signal, tensor_map.box_bytes)

    def _read_box(
        self, tensor_map: TensorMap | Im2colMap, source: int, pieces: tuple[int | np.ndarray, int]
    ) -> np.ndarray:
        """uint8 [box bytes] in box order (a copy) from its swizzled places in shared memory.

        Raises:
            IllegalAccess: ``pieces``, those that are stored, are not initialised, or part of an mbarrier.
        """
        rank, offset = self.shared.resolve(source)
        cta = self.shared.ctas[rank]
        starts, length = pieces
        if isinstance(starts, int):
            cta.check_range(starts, length, write=False)
        elif starts.size:
            cta.check_lanes(starts, length, write=False)
        data = cta.words[CHUNK][_places(tensor_map, offset) // CHUNK].view(np.uint8).reshape(-1)
        return without_padding(data) if tensor_map.padding else data

    @staticmethod
    def _pieces(tensor_map: TensorMap | Im2colMap, offset: int) -> tuple[int | np.ndarray, int]:
        """The shared bytes of a box at ``offset``: one range, or (rows shorter than their pitch) its chunks."""
        if tensor_map.shared_pitch == tensor_map.row_bytes or tensor_map.padding:
            return offset, tensor_map.shared_bytes
        return _places(tensor_map, offset), CHUNK

    def _checked_pieces(
        self, rank: int, tensor_map: TensorMap | Im2colMap, offset: int
    ) -> tuple[int | np.ndarray, int]:
        """`_pieces` in the memory of a CTA. Rows that are shorter than their pitch end behind the bytes of the box."""
        starts, length = self._pieces(tensor_map, offset)
        self.shared.ctas[rank].check_bounds(offset, int(np.max(starts)) + length - offset)
        return starts, length

    def _stored_pieces(
        self, rank: int, tensor_map: TensorMap | Im2colMap, coords: Sequence[int], offset: int
    ) -> tuple[int | np.ndarray, int]:
        """`_checked_pieces` of what a store writes, which is not what lies out of the tensor's bounds: chunks, of which
        there may be none, or bytes where a chunk is cut."""
        pieces = self._checked_pieces(rank, tensor_map, offset)
        inside = inside_box(tensor_map, coords)
        if inside.all():
            return pieces
        places = _places(tensor_map, offset)
        chunks = inside.reshape(len(places), -1)
        whole = chunks.all(axis=1)
        if (chunks.any(axis=1) == whole).all():
            return places[whole], CHUNK
        return (places[:, None] + np.arange(CHUNK))[chunks], 1

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
                # With .cta_group::2 the parity of the given mbarrier's CTA picks which CTA of each pair is signalled.
                signal = (target & ~1) | (signal_rank & 1) if cta_group == 2 else target
                targets.append((shared_address(target, offset), shared_address(signal, signal_offset)))
        return targets


def _places(tensor_map: TensorMap | Im2colMap, offset: int) -> np.ndarray:
    """Shared offsets of the 16-byte chunks of a box at ``offset``, int64 [chunks] in box order."""
    phase = offset % SWIZZLE_PERIOD
    if tensor_map.padding and tensor_map.swizzle != "none":
        return offset + CHUNK * chunk_order(tensor_map.swizzle, tensor_map.shared_bytes, phase)
    if tensor_map.padding:
        return np.arange(offset, offset + tensor_map.shared_bytes, CHUNK)
    rows = tensor_map.box_bytes // tensor_map.row_bytes
    return CHUNK * chunk_places(tensor_map.swizzle, rows, tensor_map.row_bytes, phase) + (offset - phase)


def _decode_for(descriptor: bytes, *, im2col: bool) -> TensorMap | Im2colMap:
    """The tensor map of a copy. Raises IllegalAccess if its mode is not that of the instruction."""
    tensor_map = decode(descriptor)
    if isinstance(tensor_map, Im2colMap) != im2col:
        modes = ("im2col", "tiled") if im2col else ("tiled", "im2col")
        raise IllegalAccess("a tensor copy in {} mode through a tensor map in {} mode".format(*modes))
    return tensor_map


def _check_shared(address: int) -> None:
    if address % SHARED_ALIGNMENT:
        raise IllegalAccess(f"tensor copy at shared address {address:#x}, which is not {SHARED_ALIGNMENT}-byte aligned")
