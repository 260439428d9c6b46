"""Bulk copies, of byte ranges and through tensor maps, which the core performs (``core/bulk_copies.c``).

This has what the core asks for: decoded tensor maps, names, reductions, and words of what is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.machine.state.async_engine import AsyncOp
from cute_kernels.emulator.machine.state.smem import OFFSET_MASK, PARAM_WINDOW
from cute_kernels.emulator.machine.state.warp import Wait
from cute_kernels.emulator.machine.units.copies.generic_accesses import space_of, view_bytes
from cute_kernels.emulator.machine.units.copies.reductions import OPERATIONS, TYPES, combine
from cute_kernels.emulator.machine.units.copies.tensor_map import (
    CHUNK,
    NBYTES,
    PACKED,
    SWIZZLES,
    UNIT,
    Im2colMap,
    TensorMap,
    decode,
)
from cute_kernels.emulator.races.happens_before import Agent

if TYPE_CHECKING:
    from cute_kernels.emulator.machine.units.surroundings import Surroundings

BulkCopy, _Map, _Name, _Thread = (STRUCTURES[name] for name in ("BulkCopy", "TensorMap", "CopyName", "BulkThread"))
LOAD, SEND, STORE = (CONSTANTS[f"BULK_{name}"] for name in ("LOAD", "SEND", "STORE"))
_LOADS, _READ, _WRITE = (CONSTANTS[f"WORK_BULK_{name}"] for name in ("LOAD", "READ", "WRITE"))
_RULES = {value: name.removeprefix("RULE_") for name, value in CONSTANTS.items() if name.startswith("RULE_")}
_MAPS, _RANKS, _NO_MAP = CONSTANTS["MAPS"], CONSTANTS["RANKS"], CONSTANTS["NO_MAP"]
Thread = tuple[int, int, int]  # CTA, warp, lane
#: What the core asks this unit.
ASKED = {
    CONSTANTS[f"BULK_{name}"]: name
    for name in ("REFUSED", "NAME", "MAP", "GROUPS", "MAP_READ", "ELSEWHERE", "COMBINE", "INIT_ORDER")
}
#: Element type of a tensor map -> reductions (PTX ISA, cp.reduce.async.bulk.tensor).
_REDUCTIONS = {
    **dict.fromkeys(("u32", "u64"), ("add", "min", "max", "inc", "dec", "and", "or", "xor")),
    **dict.fromkeys(("s32", "s64"), ("add", "min", "max", "and", "or", "xor")),
    **dict.fromkeys(("f16", "bf16"), ("add", "min", "max")),
    **dict.fromkeys(("f32", "f64"), ("add",)),
}
#: The driver API (cuTensorMapEncodeTiled) requires this of tensor maps; a copy faults with "misaligned address" on an
#: H200 where it is not met, although the PTX ISA leaves it unsaid.
_MAP_ALIGNMENT = 64


def tensor_descriptor(cluster: Surroundings, address: int) -> bytes:
    """The 128 bytes of a tensor map. Raises IllegalAccess: misaligned, or not in memory that the launch may read."""
    if address % _MAP_ALIGNMENT:
        raise IllegalAccess(f"tensor map at {address:#x}, which is not {_MAP_ALIGNMENT}-byte aligned")
    if cluster.tracker is not None and space_of("generic", address)[0] == "global":
        cluster.tracker.launch.maps.add(address)
    return bytes(view_bytes(cluster, "generic", address, NBYTES))


class Issuer(Protocol):
    """A warp that issues copies."""

    agent: Agent | None

    def stores_in_bulk(self, lane: int) -> None: ...


class BulkUnit:
    """The bulk copies of one cluster, and the bulk groups of its threads (CTA, warp, lane)."""

    def __init__(self, cluster: Surroundings) -> None:
        self.cluster, self._header = cluster, cluster.barriers.tables
        self._maps = (_Map * _MAPS)()
        for entry in self._maps:
            entry.key = _NO_MAP
        self._next = 0
        self._names = (_Name * (CONSTANTS["NAMES"] if cluster.tracker is not None else 0))()
        self._header.maps, self._header.names = ctypes.addressof(self._maps), ctypes.addressof(self._names)
        self._threads: dict[Thread, ctypes.Structure] = {}
        cluster.engine.words.update(dict.fromkeys((_LOADS, _READ, _WRITE), self._work))

    def answer(self, what: int, fault: ctypes.Structure, warp: Issuer | None) -> None:
        """Does what the core asks for, a key of `ASKED`. Raises IllegalAccess, UnsupportedPTX: a copy, or its tensor
        map, that is illegal or not implemented; BarrierMisuse: of a copy to an mbarrier whose mbarrier.init is not
        ordered before."""
        if ASKED[what] == "GROUPS":
            warp.stores_in_bulk(fault.lane)
            return
        copy, tracker = BulkCopy.from_address(fault.record), self.cluster.tracker
        match ASKED[what]:
            case "REFUSED":
                raise _refused(_RULES[fault.rule], copy, len(self.cluster.ctas))
            case "NAME":
                fault.text = tracker.epochs.text(self.text(copy))
            case "MAP":
                fault.number = self._decode(copy.other)
            case "MAP_READ" if copy.kind == STORE:
                tracker.store_reads_map(copy, self.text(copy))
            case "MAP_READ":
                fault.column, fault.clock = tracker.load_reads_map(warp.agent, copy, self.text(copy))
            case "ELSEWHERE":
                tracker.reads_elsewhere(fault.cta, fault.identity)
            case "INIT_ORDER":
                text = self.text(copy)
                tracker.report(tracker.before_init(copy.signal, text, warp.agent, fault.column, fault.clock))
            case _:
                self._combine(copy, *(_bytes(each, fault.nbytes) for each in (fault.cells, fault.more)))

    def _decode(self, address: int) -> int:
        """Decodes the tensor map at a generic address for the core: number of the entry."""
        content = tensor_descriptor(self.cluster, address)
        tensor_map, (space, _) = decode(content), space_of("generic", address)
        known = (number for number, entry in enumerate(self._maps) if entry.key == address)
        number = next(known, self._next)
        if number == self._next:
            self._next = (self._next + 1) % _MAPS
        entry = self._maps[number]
        ctypes.memset(ctypes.addressof(entry), 0, ctypes.sizeof(entry))
        entry.key, entry.host = _NO_MAP, 0
        if space != "shared":  # there it is decoded each time
            entry.key = address
            entry.host = address if space == "global" else self._header.params + address - PARAM_WINDOW
        entry.content[:] = np.frombuffer(content[: NBYTES // 2], np.int64).tolist()
        _fill(entry, tensor_map)
        tracker = self.cluster.tracker
        entry.changes = tracker is not None and tracker.launch.makes_maps and space == "global"
        return number

    @staticmethod
    def _combine(copy: ctypes.Structure, cells: np.ndarray, more: np.ndarray) -> None:
        type_ = decode(_content(copy)).dtype.removesuffix("_ftz") if copy.rank else TYPES[copy.type]
        cells[:] = combine(OPERATIONS[copy.reduction], type_, cells.copy(), more, flush=copy.kind == STORE)

    # --- names --------------------------------------------------------------------------------------------------------

    def text(self, copy: ctypes.Structure) -> str:
        """Name of a copy in reports."""
        return self._text(copy.kind, copy.rank, copy.nbytes, copy.shared, copy.signal, copy.work.warp)

    def _text(self, kind: int, mapped: int, nbytes: int, shared: int, signal: int, warp: int) -> str:
        offset, cta, issued = shared & OFFSET_MASK, shared >> 24, f"issued by {self.cluster.barriers.labels[warp]}"
        if not mapped:
            if kind == STORE:
                return f"bulk store of {nbytes} bytes from shared offset {offset} {issued}"
            return f"bulk copy of {nbytes} bytes{' between shared memories' if kind == SEND else ''} {issued}"
        if kind == STORE:
            return f"TMA store of {nbytes} bytes from shared offset {offset} of CTA {cta}, {issued}"
        return (
            f"TMA load of {nbytes} bytes to shared offset {offset} of CTA {cta} for the mbarrier at offset "
            f"{signal & OFFSET_MASK} of CTA {signal >> 24}, {issued}"
        )

    def _work(self, address: int) -> AsyncOp:
        copy = BulkCopy.from_address(address)
        unit, text = ("tma" if copy.rank else "bulk",), self.text(copy)
        if copy.work.kind == _LOADS:
            return AsyncOp(unit, None, text, name=f"{'send' if copy.kind == SEND else 'load'} {copy.nbytes} B")
        part = "read" if copy.work.kind == _READ else "write"
        thread = next(thread for thread, kept in self._threads.items() if ctypes.addressof(kept) == copy.thread)
        name = f"store {copy.nbytes} B: {part}"
        return AsyncOp(unit, None, f"{text} ({part})", name=name, signals=("bulk_group", thread))

    # --- groups -------------------------------------------------------------------------------------------------------

    def thread(self, thread: Thread, columns: tuple[int, int] = (0, 0)) -> ctypes.Structure:
        """The `BulkThread` of a thread; ``columns``: of its reads and writes in the race detector, where it is new."""
        if thread not in self._threads:
            self._threads[thread] = _Thread(reads=columns[0], writes=columns[1])
        return self._threads[thread]

    def wait_satisfied(self, thread: Thread, count: int, read: bool) -> bool:
        """Whether at most the ``count`` newest committed groups of a thread are incomplete.

        ``read`` (wait_group.read): only their source reads have to be done. When satisfied, the older groups count
        as observed by the thread: their shared memory may be written again.
        """
        address = ctypes.addressof(self.thread(thread))
        return bool(library().bulk_wait(self.cluster.engine.address, address, count, read))

    def wait(self, thread: Thread, count: int, read: bool) -> Wait:
        """cp.async.bulk.wait_group of a thread; arguments as of `wait_satisfied`."""
        text = f"waits for the {'reads' if read else 'writes'} of all but {count} bulk groups of lane {thread[2]}"
        return Wait(
            "bulk_group", lambda: self.wait_satisfied(thread, count, read), lambda: text, ("bulk_group", thread)
        )

    def unobserved(self) -> Iterator[tuple[Thread, str, int]]:
        """Threads that never waited for a store's reads of shared memory: thread, latest such store, its place.

        A CTA must not exit in this state: its shared memory may be handed to another CTA while still being read.
        """
        for thread, kept in self._threads.items():
            if kept.stored > kept.waited:
                rank, warp, _ = thread
                number = self.cluster.ctas[rank].warps[warp].number
                yield thread, self._text(STORE, kept.mapped, kept.nbytes, kept.shared, 0, number), kept.place


def _bytes(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _content(copy: ctypes.Structure) -> bytes:
    return bytes(copy.map.content).ljust(NBYTES, b"\0")


def _fill(entry: ctypes.Structure, tensor_map: TensorMap | Im2colMap) -> None:
    """Tells the core what a tensor map says."""
    swizzle, missing, im2col = SWIZZLES[tensor_map.swizzle], _RANKS - tensor_map.rank, isinstance(tensor_map, Im2colMap)
    kind, packed = tensor_map.dtype.removesuffix("_ftz"), PACKED.get(tensor_map.dtype)
    entry.rank, entry.im2col = tensor_map.rank, im2col
    entry.bits, entry.base = tensor_map.element_bits, tensor_map.address
    entry.extents[:] = (*tensor_map.extents, *[1] * missing)
    entry.strides[:] = (0, *tensor_map.strides, *[0] * missing)
    entry.steps[:] = (*tensor_map.element_strides, *[1] * missing)
    if im2col:
        entry.lower[: tensor_map.rank - 2], entry.sizes[: tensor_map.rank - 2] = tensor_map.lower_corner, tensor_map.box
    else:
        entry.tile[:] = (*tensor_map.tile, *[1] * missing)
    entry.row_bytes, entry.box_bytes = tensor_map.row_bytes, tensor_map.box_bytes
    entry.rows = tensor_map.box_bytes // tensor_map.row_bytes
    entry.group = packed.group_bytes if packed is not None and packed.padding else CHUNK
    entry.shared_bytes, entry.pitch = tensor_map.shared_bytes, tensor_map.shared_pitch
    entry.contiguous = tensor_map.padding != 0 or tensor_map.shared_pitch == tensor_map.row_bytes
    entry.shift, entry.mask = swizzle.shift, swizzle.mask
    entry.not_a_number, entry.rounds = tensor_map.nan_fill, kind == "tf32"
    entry.stores = kind != "b4x16_p64"
    entry.reductions = sum(1 << OPERATIONS.index(name) for name in _REDUCTIONS.get(kind, ()))


def _refused(rule: str, copy: ctypes.Structure, ctas: int) -> EmulatorError:
    """The error of a copy that breaks a rule."""
    if not copy.rank and rule not in ("SIGNAL", "MASK"):
        return _refused_range(rule, copy)
    signal, cta = copy.signal >> 24, copy.shared >> 24
    if rule == "MASK":
        return IllegalAccess(f"multicast mask {copy.mask:#x} in a cluster of {ctas} CTAs")
    if rule == "SIGNAL" and not copy.rank:
        return IllegalAccess(f"bulk copy to CTA {cta} signals an mbarrier of CTA {signal}")
    tensor_map = decode(_content(copy))
    kind, coords = tensor_map.dtype, tuple(copy.coordinates[: copy.rank])
    if rule == "MODE":
        modes = ("tiled", "im2col") if isinstance(tensor_map, Im2colMap) else ("im2col", "tiled")
        return IllegalAccess("a tensor copy in {} mode through a tensor map in {} mode".format(*modes))
    if rule == "FOURS":
        return IllegalAccess(
            f".tile::gather4 and .tile::scatter4 take a tensor map whose box is one row, not {tensor_map.box}"
        )
    if rule == "RANK":
        return IllegalAccess(f"{len(coords)} coordinates for a tensor map of rank {tensor_map.rank}")
    if rule == "CORNER":
        return UnsupportedPTX(
            f"im2col copy at coordinates {coords}: a store through a map with the lower corner "
            f"{tensor_map.lower_corner}"
        )
    if rule == "HALO_128":
        return UnsupportedPTX(
            f".im2col::w::128 with wHalo {copy.halo}: the PTX ISA does not say whether the halo lies after each 32 "
            "pixels in shared memory, or after all 128"
        )
    if rule == "BEHIND":
        return UnsupportedPTX(
            f"im2col copy along W at coordinates {coords} with wHalo {copy.halo}: a halo goes beyond the last position "
            "of the bounding box, where the PTX ISA leaves open which pixels follow"
        )
    if rule == "REDUCTION":
        return UnsupportedPTX(f"tensor reduction .{OPERATIONS[copy.reduction]} of {kind} elements")
    if rule == "SIGNAL":
        allowed = " or the other of its pair" if copy.pair else " (.cta_group::2 allows the pair's other)"
        return IllegalAccess(
            f"tensor copy to CTA {cta} signals an mbarrier of CTA {signal}; allowed is its own CTA{allowed}"
        )
    return IllegalAccess(
        {
            "NEGATIVE": f"tensor store at the negative coordinates {coords}",
            "FIRST": f"tensor copy at coordinates {coords}: the first is {tensor_map.bytes_of(coords[0])} bytes, no "
            f"multiple of {CHUNK}",
            "UNIT": f"tensor copy at coordinates {coords} of {kind} elements: the first is no multiple of {UNIT}",
            "SHARED": f"tensor copy at shared address {copy.shared:#x}, which is not 128-byte aligned",
            "LOADS_ONLY": "tensor store through a tensor map of type 16U4_ALIGN16B, which is for loads only",
        }.get(rule)
        or f"im2col copy at coordinates {coords}: {_refused_pixels(rule, tensor_map, coords, copy)}"
    )


def _refused_pixels(rule: str, tensor_map: Im2colMap, coords: tuple[int, ...], copy: ctypes.Structure) -> str:
    if rule == "HALO":
        most = 32 if copy.mode == CONSTANTS["MODE_W_128"] else 512
        return f"wHalo {copy.halo} and wOffset {copy.offsets[0]}; legal are 0 to {most - 1}, and 0 to 31"
    if rule == "SWIZZLE":
        return "loads along W take a tensor map with a swizzle"
    if rule == "OFFSETS":
        offsets, bits = tuple(copy.offsets[: len(coords) - 2]), {3: 16, 4: 8, 5: 5}[len(coords)]
        return f"im2col offsets {offsets}; legal at rank {len(coords)} are 0 to {(1 << bits) - 1}"
    box = zip("WHD", coords[1:-1], tensor_map.lower_corner, tensor_map.box)
    name, position, lower, size = next(each for each in box if not each[2] <= each[1] < each[2] + each[3])
    return f"{name} = {position} is outside of the bounding box, {lower} to {lower + size - 1}"


def _refused_range(rule: str, copy: ctypes.Structure) -> EmulatorError:
    name, _, beyond = rule.partition("_")
    source, target = (copy.shared, copy.other) if copy.kind == STORE else (copy.other, copy.shared)
    value = {"SOURCE": source, "TARGET": target, "SIZE": copy.nbytes}[name] & (1 << 64) - 1
    what = {"SOURCE": "source", "TARGET": "destination", "SIZE": "size"}[name]
    problem = "beyond all memory" if beyond else f"no multiple of {CHUNK}"
    return IllegalAccess(f"bulk copy whose {what} {value:#x} is {problem}")
