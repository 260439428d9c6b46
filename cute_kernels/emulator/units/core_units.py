"""MMAs: what a warp's bytecode calls instead of Python.

Each function performs the frequent case whole or does nothing: whatever is illegal, rare or has to wait is left to the
Python function of the instruction, which decides again and words the error. Both work on the same state, and the
counts that `Cluster.count` hands to the units.
With detectors, operations are told to the race detector first, by its own functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import address, library
from cute_kernels.emulator.state.async_engine import AsyncOp
from cute_kernels.emulator.state.memory_tables import MemoryTables
from cute_kernels.emulator.units.matrix.dense_mma import core_kinds
from cute_kernels.emulator.units.matrix.operands import KINDS

if TYPE_CHECKING:
    from cute_kernels.emulator.units.surroundings import Surroundings

MmaIssuer, MmaArguments, MmaWork = (STRUCTURES[name] for name in ("MmaIssuer", "MmaArguments", "MmaWork"))
_ISSUERS = CONSTANTS["MMA_ISSUERS"]
_KINDS = {kind: number for number, kind in enumerate(KINDS)}


class Units:
    """The units of one cluster, as the core knows them.

    Args:
        cluster: whose barriers and copies they are.
        tables: where the core finds it.
    """

    def __init__(self, cluster: Surroundings, tables: MemoryTables) -> None:
        self._cluster, self._header, self._tables = cluster, tables.header, tables
        self._issuers = (MmaIssuer * _ISSUERS)()
        self._issuer_texts: dict[int, str] = {}
        self._kinds = core_kinds(cluster.arithmetic)
        self._watched = cluster.tracker is not None
        options, header = cluster.options, self._header
        flags = CONSTANTS["EAGER"] if options.completion == "eager" else 0
        header.unit_flags = flags | (CONSTANTS["WATCHED"] if self._watched else 0)
        header.mma_issuers = ctypes.addressof(self._issuers)
        header.mma_kinds = ctypes.addressof(self._kinds)
        for rank in range(len(cluster.ctas)):
            if self._watched:
                tables.cta(rank).shadow = cluster.tracker.shared[rank].address
        header.tensor_mma = address("tensor_mma")
        cluster.engine.words[CONSTANTS["WORK_MMA"]] = self._mma

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
        return bool(library().tensor_mma(self._tables.address, arguments, place))

    def _mma(self, address: int) -> AsyncOp:
        work = MmaWork.from_address(address)
        return AsyncOp(("tcgen05", work.rank), None, self._issuer_texts[work.issuer], name=f"mma {work.m}x{work.n}")


def slot(key: Sequence[int], slots: int) -> int:
    """The entry of an MMA, a commit or a text, given its key, among a power of two."""
    return library().key_slot((ctypes.c_int64 * len(key))(*key), len(key), slots)
