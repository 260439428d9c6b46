"""Asynchronous copies of single threads from global to shared memory, which the core performs (``core/lane_copies.c``).

This has what the core asks for: names, words of what is wrong, and accesses that are not simply in order.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess
from cute_kernels.emulator.machine.state.async_engine import AsyncOp
from cute_kernels.emulator.machine.state.lane_masks import block_lanes
from cute_kernels.emulator.machine.state.smem import OFFSET_MASK, RANK_SHIFT
from cute_kernels.emulator.machine.state.warp import Wait, WarpState
from cute_kernels.emulator.races.shadow import GENERIC

if TYPE_CHECKING:
    from cute_kernels.emulator.machine.units.surroundings import Surroundings

LaneCopies, LaneCopy, CopiesArrival = (STRUCTURES[name] for name in ("LaneCopies", "LaneCopy", "CopiesArrival"))
#: What the core asks this unit.
ASKED = {CONSTANTS[name] for name in ("COPY_REFUSED", "COPY_UNORDERED", "MAKE_COPIES", "NAME_ARRIVAL")}


class CopyUnit:
    """The copies of one cluster."""

    def __init__(self, cluster: Surroundings) -> None:
        self.cluster = cluster
        self._warps: dict[WarpState, ctypes.Structure] = {}
        cluster.engine.words[CONSTANTS["WORK_LANE_COPY"]] = self._copy
        cluster.engine.words[CONSTANTS["WORK_COPIES_ARRIVE"]] = self._arrival

    def answer(self, what: int, fault: ctypes.Structure, warp: WarpState | None) -> None:
        """Does what the core asks for, one of `ASKED`. Raises IllegalAccess: sizes and places that are illegal;
        SharedMemoryRace, GlobalMemoryRace: an earlier access is not ordered before."""
        if what == CONSTANTS["MAKE_COPIES"]:
            copies = self._warps[warp] = LaneCopies()
            if warp.agent is not None:
                copies.column, copies.text = self.cluster.tracker.name_copies(warp.agent)
            warp.code.header.copies = ctypes.addressof(copies)
        elif what == CONSTANTS["NAME_ARRIVAL"]:
            labels = self.cluster.barriers.labels
            labels.append(_arrival_text(warp.label, fault.lane))
            fault.text = len(labels)
        elif what == CONSTANTS["COPY_UNORDERED"]:
            self._watch(warp, LaneCopy.from_address(fault.record))
        else:
            raise self._refused(LaneCopy.from_address(fault.record))

    def wait(self, warp: WarpState, lanes: int, newest: int) -> Wait:
        """cp.async.wait_group, wait_all (``newest`` EVERY_COPY)."""
        address, copies = self.cluster.engine.address, ctypes.addressof(self._warps[warp])
        first = functools.partial(library().copies_pending, address, copies, lanes, newest)  # that is not complete

        def describe() -> str:
            text = (copy := first()) and self._text(copy)
            return f"waits for all but the {max(newest, 0)} newest of its cp.async groups, first {text}"

        return Wait("cp.async", lambda: not first(), describe, ("cp.async", warp))

    def _text(self, address: int) -> str:
        """Name of a copy in reports."""
        copy = LaneCopy.from_address(address)
        label = self.cluster.barriers.labels[copy.work.warp]
        return f"cp.async of {copy.nbytes} bytes by {copy.lanes.bit_count()} lanes of {label}"

    def _copy(self, address: int) -> AsyncOp:
        copy = LaneCopy.from_address(address)
        warp = next(warp for warp, copies in self._warps.items() if ctypes.addressof(copies) == copy.copies)
        name = f"copy {copy.nbytes} B per lane"
        return AsyncOp(("cp.async",), None, self._text(address), name=name, signals=("cp.async", warp))

    def _arrival(self, address: int) -> AsyncOp:
        work = CopiesArrival.from_address(address)
        text = _arrival_text(self.cluster.barriers.labels[work.work.warp], work.lane)
        return AsyncOp(("cp.async",), None, text, name="arrive")

    def _watch(self, warp: WarpState, copy: ctypes.Structure) -> None:
        tracker, mine, nbytes = self.cluster.tracker, warp.cta.shared, copy.nbytes
        targets, sources, counts = _by_lane(copy)
        inside = (targets >> RANK_SHIFT == mine.cta_rank) & ((targets & OFFSET_MASK) + nbytes <= mine.size)
        for target in targets[~inside].tolist():
            rank, offset = self.cluster.memory.resolve(target)
            self.cluster.memory.ctas[rank].check_bounds(offset, nbytes)
        copies = self._warps[warp]
        identity = tracker.epochs.new(copies.column, copy.number, copies.text, GENERIC, warp.agent.executing())
        lanes = np.flatnonzero(block_lanes(copy.lanes))
        tracker.generic(warp.agent, lanes, "shared", targets, nbytes, True, identity=identity)
        if counts.any():
            tracker.generic(warp.agent, -1, "global", sources[counts > 0], nbytes, False)

    def _refused(self, copy: ctypes.Structure) -> EmulatorError:
        """The error of a copy: of its size or its addresses, else of what it reads or writes."""
        nbytes = copy.nbytes
        targets, sources, counts = _by_lane(copy)
        if (counts > nbytes).any():
            return IllegalAccess(f"cp.async of {nbytes} bytes with a src-size of {int(counts.max())}")
        if ((sources | targets) % nbytes).any():
            return IllegalAccess(f"cp.async of {nbytes} bytes between addresses that are not multiples of {nbytes}")
        try:
            for source, count in zip(sources.tolist(), counts.tolist()):
                if count:
                    self.cluster.gmem.view(source, count)
            for target in targets.tolist():
                self.cluster.memory.view(target, nbytes, write=True)
        except EmulatorError as error:
            return error
        raise AssertionError("the core refuses a copy that is legal")


def _by_lane(copy: ctypes.Structure) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 [executing lanes]: shared addresses, global addresses, bytes that are read."""
    chosen = block_lanes(copy.lanes)
    return tuple(np.array(row, np.int64)[chosen] for row in (copy.targets, copy.sources, copy.counts))


def _arrival_text(label: str, lane: int) -> str:
    return f"cp.async.mbarrier.arrive by {label} lane {lane}"
