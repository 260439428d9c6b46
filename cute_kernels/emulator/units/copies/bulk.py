"""Bulk copies and reductions of plain byte ranges: cp.async.bulk and cp.reduce.async.bulk without tensor maps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.observe.races.operations import Operation
from cute_kernels.emulator.observe.shared_banks import SECTOR_BYTES
from cute_kernels.emulator.state.async_engine import AsyncOp, BulkOp
from cute_kernels.emulator.state.smem import shared_address
from cute_kernels.emulator.units.copies.reductions import combine

if TYPE_CHECKING:
    from cute_kernels.emulator.units.copies.tma import TmaUnit

_UNIT = 16  # bytes: PTX ISA, alignment of both addresses and of the size
Reduction = tuple[str, str]  # operation, element type


def _check(source: int, target: int, nbytes: int) -> None:
    for name, value in (("source", source), ("destination", target), ("size", nbytes)):
        if value % _UNIT:
            raise IllegalAccess(f"bulk copy whose {name} {value:#x} is no multiple of {_UNIT}")
        if value >> 63:  # what tells the race detector of an access counts in signed numbers
            raise IllegalAccess(f"bulk copy whose {name} {value:#x} is beyond all memory")


class BulkUnit:
    """Executes the bulk copies of one cluster; its groups, engine and detectors are those of the TMA unit."""

    def __init__(self, tma: TmaUnit) -> None:
        self.tma = tma
        self._serial = 0

    def _queue(self) -> tuple[str, int]:
        self._serial += 1
        return ("bulk", self._serial)

    def load(
        self, source: int, target: int, nbytes: int, barrier: int, multicast: int | None, describe: str
    ) -> None:
        """Global to shared memory, with bytes counted on an mbarrier.

        Args:
            source, target: global and shared address.
            nbytes: size.
            barrier: shared address of the mbarrier, in the CTA of the target.
            multicast: CTA mask: the same offsets in each of these CTAs.
            describe: who issues.

        Raises:
            IllegalAccess: alignment, bounds, a mask of CTAs that do not exist, or a barrier in another CTA.
        """
        _check(source, target, nbytes)
        tma = self.tma
        ranks = len(tma.shared.ctas)
        pairs = [(target, barrier)]
        if multicast is not None:
            if not multicast or multicast >> ranks:
                raise IllegalAccess(f"multicast mask {multicast:#x} in a cluster of {ranks} CTAs")
            chosen = [rank for rank in range(ranks) if multicast >> rank & 1]
            pairs = [(shared_address(r, target & 0xFFFFFF), shared_address(r, barrier & 0xFFFFFF)) for r in chosen]
        if tma.meter is not None:
            tma.meter.bulk("bulk.load", nbytes, _sectors(source, nbytes), len(pairs))
        for where, signal in pairs:
            self._copy_to_shared(where, signal, nbytes, source, f"bulk copy of {nbytes} bytes issued {describe}")

    def _watch_write(self, target: int, signal: int, nbytes: int, text: str, reduces: bool) -> Operation:
        """Tells the race detector of a copy to shared memory."""
        tma = self.tma
        rank, offset = tma.shared.resolve(target)
        tma.shared.ctas[rank].check_bounds(offset, nbytes)
        watched = tma.tracker.copy(signal, text, reduces=reduces)
        tma.tracker.async_write(rank, offset, nbytes, watched)
        return watched

    def _copy_to_shared(self, target: int, signal: int, nbytes: int, source: int, text: str) -> None:
        tma = self.tma
        _same_cta(target, signal)
        rank, _ = tma.shared.resolve(target)
        tma.bytes_loaded += nbytes
        watched = None
        if tma.tracker is not None:
            watched = self._watch_write(target, signal, nbytes, text, False)
            tma.tracker.global_rows(np.array([source], np.int64), nbytes, watched, False)

        def run() -> None:
            if watched is not None:
                tma.tracker.complete_copy(watched, signal, rank)
            tma.shared.view(target, nbytes, write=True)[:] = tma.gmem.view(source, nbytes)
            tma.barriers.complete_tx(signal, nbytes)

        tma.engine.submit(AsyncOp(self._queue(), run, text, name=f"load {nbytes} B"))

    def send(
        self, source: int, target: int, nbytes: int, barrier: int, reduction: Reduction | None, describe: str
    ) -> None:
        """Shared memory of the own CTA to that of a CTA of the cluster, with bytes counted on an mbarrier there.

        Raises:
            IllegalAccess: alignment, bounds, or a barrier in another CTA than the target.
            ProxyFenceMissing: the source was written through the generic proxy and not fenced since.
        """
        _check(source, target, nbytes)
        _same_cta(target, barrier)
        tma = self.tma
        text = f"bulk copy of {nbytes} bytes between shared memories issued {describe}"
        if tma.meter is not None:
            tma.meter.bulk("bulk.send", nbytes, 0)
        rank, _ = tma.shared.resolve(target)
        watched = None
        if tma.tracker is not None:
            watched = self._watch_write(target, barrier, nbytes, text, reduction is not None)
            self._watch_read(source, nbytes, watched)

        def run() -> None:
            data = tma.shared.view(source, nbytes).copy()
            if watched is not None:
                tma.tracker.complete_copy(watched, barrier, rank)
            cells = tma.shared.view(target, nbytes, write=reduction is None)
            cells[:] = data if reduction is None else combine(*reduction, cells.copy(), data)
            tma.barriers.complete_tx(barrier, nbytes)

        tma.engine.submit(AsyncOp(self._queue(), run, text, name=f"send {nbytes} B"))

    def store(
        self,
        source: int,
        target: int,
        nbytes: int,
        reduction: Reduction | None,
        keep: int | None,
        *,
        thread: Hashable,
        describe: str,
    ) -> None:
        """Shared to global memory; joins the open bulk group of ``thread``.

        Args:
            source, target: shared and global address.
            nbytes: size.
            reduction: (operation, element type), or None to copy.
            keep: .cp_mask: bit i says whether byte i of every 16 is written; None for all.
            thread: identity of the issuing thread, as in `BulkGroups`.
            describe: who issues.

        Raises:
            IllegalAccess, ProxyFenceMissing: as for `send`.
        """
        _check(source, target, nbytes)
        tma = self.tma
        text = f"bulk store of {nbytes} bytes from shared offset {source & 0xFFFFFF} issued {describe}"
        bulk = BulkOp(text, place=tma.executing())
        if tma.tracker is not None:
            # Bytes that .cp_mask leaves out may be another thread's: like reductions, such stores do not race.
            shares = reduction is not None or keep is not None
            reads, writes = tma.tracker.bulk(tma.groups.committed(thread) + 1, text, reduces=shares)
            self._watch_read(source, nbytes, reads)
            tma.tracker.global_rows(np.array([target], np.int64), nbytes, writes, True)
        tma.groups.issue(thread, bulk)
        tma.bytes_stored += nbytes
        if tma.meter is not None:
            tma.meter.bulk("bulk.store", nbytes, _sectors(target, nbytes))
        box: list[np.ndarray] = []

        def read() -> None:
            box.append(tma.shared.view(source, nbytes).copy())
            bulk.has_read()

        def write() -> None:
            data = box.pop()
            cells = tma.gmem.view(target, nbytes, write=True)
            if reduction is not None:
                cells[:] = combine(*reduction, cells.copy(), data, flush=True)
            elif keep is not None:
                chosen = np.tile([bool(keep >> i & 1) for i in range(_UNIT)], nbytes // _UNIT)
                cells[chosen] = data[chosen]
            else:
                cells[:] = data
            bulk.has_written()

        queue = self._queue()
        signals = ("bulk_group", thread)
        tma.engine.submit(AsyncOp(queue, read, f"{text} (read)", name=f"store {nbytes} B: read", signals=signals))
        tma.engine.submit(AsyncOp(queue, write, f"{text} (write)", name=f"store {nbytes} B: write", signals=signals))

    def _watch_read(self, source: int, nbytes: int, operation: Operation) -> None:
        rank, offset = self.tma.shared.resolve(source)
        self.tma.shared.ctas[rank].check_bounds(offset, nbytes)
        self.tma.tracker.async_read(rank, offset, nbytes, operation)


def _sectors(address: int, nbytes: int) -> int:
    """32-byte sectors of a range."""
    return (address + nbytes - 1) // SECTOR_BYTES - address // SECTOR_BYTES + 1 if nbytes else 0


def _same_cta(target: int, barrier: int) -> None:
    if target >> 24 != barrier >> 24:
        raise IllegalAccess(f"bulk copy to CTA {target >> 24} signals an mbarrier of CTA {barrier >> 24}")
