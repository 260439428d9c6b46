"""Barriers, MMAs and tensor copies: what a warp's bytecode calls instead of Python.

Each function performs the frequent case whole or does nothing: whatever is illegal, rare or has to wait is left to the
Python function of the instruction, which decides again and words the error. A timeline is told of both
(``core/trace.h``, `trace_log`). Both work on the same state: rows of `mbarrier.MBarriers`, shared memory, and the
counts that `Cluster.count` hands to the units. With detectors, operations are told to the race detector first, by its
own functions (``core/points.c``, ``core/copies.c``).

Tensor copies are for where they take effect when they are issued (``completion="eager"``). Python decodes a tensor map
when it executes the first copy through it (`Units.learn`); later copies compare the 64 bytes that count with those that
were decoded, so that a map that changes is decoded again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import address, library
from cute_kernels.emulator.state.generic_addresses import PARAM_WINDOW, SHARED_WINDOW
from cute_kernels.emulator.state.memory_tables import MemoryTables
from cute_kernels.emulator.units.copies.packed_elements import PACKED
from cute_kernels.emulator.units.copies.tensor_map import NBYTES, SWIZZLES, TensorMap, decode
from cute_kernels.emulator.units.copies.tma import load_text, store_text
from cute_kernels.emulator.units.matrix.dense_mma import core_kinds
from cute_kernels.emulator.units.matrix.operands import KINDS

if TYPE_CHECKING:
    from cute_kernels.emulator.units.surroundings import Surroundings

Plan, MmaIssuer, MmaArguments, CopyName, CopyArguments = (
    STRUCTURES[name]
    for name in ("Plan", "MmaIssuer", "MmaArguments", "CopyName", "CopyArguments")
)
_PLANS, _ISSUERS, _NAMES = (CONSTANTS[name] for name in ("PLANS", "MMA_ISSUERS", "NAMES"))
_KINDS = {kind: number for number, kind in enumerate(KINDS)}
_RANKS, _NO_MAP = CONSTANTS["RANKS"], CONSTANTS["NO_MAP"]

#: Functions of the core that bytecode calls.
_UNITS = (
    "tensor_load", "tensor_store", "tensor_mma",
)  # fmt: skip


class Issuer(NamedTuple):
    """Who issues a copy: number of the warp in its cluster, lane, index of the instruction."""

    warp: int
    lane: int
    instruction: int


class Units:
    """The units of one cluster, as the core knows them.

    Args:
        cluster: whose barriers and copies they are.
        tables: where the core finds it.
    """

    def __init__(self, cluster: Surroundings, tables: MemoryTables) -> None:
        self._cluster, self._header, self._tables = cluster, tables.header, tables
        self._plans = (Plan * _PLANS)()
        for plan in self._plans:
            plan.key = _NO_MAP
        self._next = 0
        self._seen: dict[int, bytes] = {}  # tensor maps that need not be looked at again
        self._issuers = (MmaIssuer * _ISSUERS)()
        self._issuer_texts: dict[int, str] = {}
        self._kinds = core_kinds(cluster.arithmetic)
        self._watched = cluster.tracker is not None
        named = self._watched or cluster.trace is not None
        self._names = (CopyName * (_NAMES if named else 0))()
        options, header = cluster.options, self._header
        flags = CONSTANTS["EAGER"] if options.completion == "eager" else 0
        header.unit_flags = flags | (CONSTANTS["WATCHED"] if self._watched else 0)
        header.plans, header.mma_issuers = ctypes.addressof(self._plans), ctypes.addressof(self._issuers)
        header.mma_kinds = ctypes.addressof(self._kinds)
        header.names = ctypes.addressof(self._names)
        header.first_name = cluster.tracker.epochs.name_by(self._copy_name) if self._watched else -1
        for rank in range(len(cluster.ctas)):
            if self._watched:
                tables.cta(rank).shadow = cluster.tracker.shared[rank].address
        for name in _UNITS:
            setattr(header, name, address(name))

    def _copy_name(self, number: int) -> str:
        """Name in reports of the tensor copies of an entry of the core's table."""
        nbytes, shared, signal, warp = self._names[number].key
        who = f"by {self._cluster.barriers.labels[warp]}"
        return store_text(nbytes, shared, who) if signal < 0 else load_text(nbytes, shared, signal, who)

    def copy_text(self, text: int) -> str:
        """Name in reports of the tensor copies to which the core gave this text number."""
        return self._copy_name(self._header.first_name - text)

    def finish(self) -> None:
        """The cluster has exited: what it did is asked for by others alone."""
        if self._watched:
            self._cluster.tracker.epochs.settle_names(self._header.first_name)

    def load(
        self, addresses: tuple[int, int, int], coords: Sequence[int], multicast: int | None, pair: bool, who: Issuer
    ) -> bool:
        """The core executes a tensor copy to shared memory that Python was called for. False: it cannot.

        Args:
            addresses: of the tensor map, in shared memory, and of the mbarrier.
            coords: element coordinates, innermost first.
            multicast: mask of CTAs, or None.
            pair: .cta_group::2.
            who: issues it.
        """
        arguments = self._arguments(addresses, coords, -1 if multicast is None else multicast, who)
        return self._executed(library().tensor_load(self._tables.address, arguments, len(coords), pair))

    def store(self, tensor_map: int, shared: int, coords: Sequence[int], who: Issuer) -> bool:
        """Stores to global memory if the core can, like `load`; the lane has bulk groups."""
        arguments = self._arguments((tensor_map, shared, 0), coords, -1, who)
        return self._executed(library().tensor_store(self._tables.address, arguments, len(coords)))

    @staticmethod
    def _arguments(addresses: tuple[int, int, int], coords: Sequence[int], multicast: int, who: Issuer) -> object:
        places = (*coords, *[0] * (_RANKS - len(coords)))
        return ctypes.byref(CopyArguments(*addresses, places, multicast, *who))

    def _executed(self, done: int) -> bool:
        """Whether the core has done what it was asked for; a timeline hears of that before Python does more."""
        if self._header.trace_used:
            self._tables.tell(self._cluster.executing)
        return bool(done)

    def learn_mma(self, kind: str, cta_group: int, who: int, text: str) -> None:
        """The core executes MMAs of this kind and group, by this thread, from now on.

        Args:
            kind: of `KINDS`.
            cta_group: 1 or 2.
            who: CTA rank, lane and warp.
            text: what reports call them.
        """
        key = cta_group, who, _KINDS[kind]
        number = slot(key, _ISSUERS)
        entry = self._issuers[number]
        if entry.known:  # or another one is, and this one stays Python's
            return
        entry.key[:], entry.known = key, 1
        self._issuer_texts[number] = text
        if self._watched:
            self._cluster.tracker.tensor.follow(entry, text)

    def mma(self, kind: str, cta_group: int, who: int, operands: Sequence[int], place: int) -> bool:
        """The core executes an MMA that Python was called for. False: it cannot.

        Args:
            kind, cta_group, who: as for `learn_mma`.
            operands: accumulator, descriptors of A and B, instruction descriptor, whether it accumulates.
            place: index of the instruction.
        """
        arguments = ctypes.byref(MmaArguments(cta_group, who, _KINDS[kind], *operands, 0))
        return self._executed(library().tensor_mma(self._tables.address, arguments, place))

    def mma_text(self, number: int) -> str:
        """Name in reports of the MMAs of an entry of `learn_mma`."""
        return self._issuer_texts[number]

    def learn(self, address: int, descriptor: bytes) -> bool:
        """The core executes copies through a tensor map from now on, if it is one of the frequent kind.

        That is: tiled, elements side by side, rows that fill their span of the swizzle, all of the tensor in one
        registered region.

        Args:
            address: generic address of the tensor map, in parameters or in global memory.
            descriptor: its 128 bytes, of which `decode` makes a tensor map.

        Returns:
            Whether it did not know the map until now.
        """
        if self._seen.get(address) == descriptor:
            return False
        self._seen[address] = descriptor
        tensor_map = decode(descriptor)
        host = self._host_address(address)
        if (
            host is None
            or not isinstance(tensor_map, TensorMap)
            or any(step != 1 for step in tensor_map.element_strides)
            or tensor_map.shared_pitch != tensor_map.row_bytes
            or tensor_map.dtype in PACKED
        ):
            return False
        gmem, start = self._cluster.gmem, tensor_map.address
        nbytes = tensor_map.bytes_of(tensor_map.extents[0])
        nbytes += sum((extent - 1) * step for extent, step in zip(tensor_map.extents[1:], tensor_map.strides))
        inside = [region for region in gmem.regions() if region.start <= start and start + nbytes <= region.end]
        if not inside:
            return False
        known = next((plan for plan in self._plans if plan.key == address), None)
        plan = known or self._plans[self._next]
        if known is None:
            self._seen.pop(plan.key, None)
            self._next = (self._next + 1) % _PLANS
        swizzle, missing = SWIZZLES[tensor_map.swizzle], _RANKS - tensor_map.rank
        plan.key, plan.host = address, host
        plan.content[:] = np.frombuffer(descriptor[: NBYTES // 2], np.int64).tolist()
        plan.rank, plan.element, plan.base = tensor_map.rank, tensor_map.element_bits // 8, start
        plan.row_bytes, plan.box_bytes = tensor_map.row_bytes, tensor_map.box_bytes
        plan.shift, plan.mask = swizzle.shift, swizzle.mask
        plan.loads = not tensor_map.dtype.startswith("tf32")  # those are rounded on the way
        plan.stores = any(region.writable for region in inside)
        plan.strides[:] = (0, *tensor_map.strides, *[0] * missing)
        plan.tile[:] = (*tensor_map.tile, *[1] * missing)
        plan.extents[:] = (*tensor_map.extents, *[1] * missing)
        outer = [(n, step) for n, step in zip(tensor_map.tile[1:], tensor_map.strides) if n > 1] or [(1, 0)]
        plan.rows, plan.pitch = outer[0] if len(outer) == 1 else (0, 0)
        return True

    def _host_address(self, address: int) -> int | None:
        """Where the bytes of a tensor map are; None in shared memory."""
        if address >= PARAM_WINDOW:
            return self._header.params + address - PARAM_WINDOW
        return address if address < SHARED_WINDOW else None


def slot(key: Sequence[int], slots: int) -> int:
    """The entry of an MMA, a commit or a text, given its key, among a power of two."""
    return library().key_slot((ctypes.c_int64 * len(key))(*key), len(key), slots)


def function(name: str) -> Callable[..., int]:
    """One of the functions that bytecode calls, for Python."""
    return getattr(library(), name)
