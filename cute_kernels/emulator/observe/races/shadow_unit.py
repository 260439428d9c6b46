"""Shadow memory in the core: an access that races with nothing is checked and recorded in one call.

`races.tracker` and `races.tensor_memory` ask here first. What is found here is that every place of an access is in
order, and then the access is recorded as `shadow.Plane` would. Anything else (a race, places kept byte by byte, a new
layer of readers) leaves everything as it is and is for NumPy to decide, which words the report: both find the same
races.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cute_kernels.emulator.core.layout import STRUCTURES, word_count
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.observe.races.happens_before import Offset
from cute_kernels.emulator.observe.races.shadow import GRANULE, Rows
from cute_kernels.emulator.observe.races.sync_point import Row

if TYPE_CHECKING:
    from cute_kernels.emulator.observe.races.happens_before import Agent
    from cute_kernels.emulator.observe.races.shadow import Epochs, Plane, Shadow
    from cute_kernels.emulator.observe.races.tensor_memory import Operation, PipelinedAccess
    from cute_kernels.emulator.observe.races.tracker import RaceTracker

_ACQUIRED, _VISIBLE, _TENSOR = map(int, (Row.ACQUIRED, Row.VISIBLE, Row.TENSOR))
_READ = int(Offset.READ)
_MOST_CONSTANTS = 4096


class ShadowUnit:
    """The core's functions of the race detector, and the `Access` that they read: one at a time.

    Each cluster of a launch has its own: another thread may launch between the writing of an `Access` and the core's
    reading of it.
    """

    #: What is known of arrays that never change, with the array, so that no other one gets its identity.
    _constants: ClassVar[dict[int, tuple[tuple[int, int, int, int], np.ndarray]]] = {}
    _pieces: ClassVar[dict[int, tuple[np.ndarray, int, np.ndarray]]] = {}

    def __init__(self) -> None:
        self._access = np.zeros(word_count("Access"), np.int64)
        self._set = functools.partial(struct.Struct(f"{len(self._access)}q").pack_into, self._access, 0)
        self._decide = functools.partial(library().access_shadow, self._access.ctypes.data)

    @property
    def together(self) -> int:
        """How many loads and stores of warps were decided for all lanes at once."""
        return library().accesses_together()

    def _places(self, offsets: Any) -> tuple[int, int, int, int] | None:
        """OFFSETS, ROWS, BASE and STRIDE of what `Shadow.parts` is given; None if it is no contiguous array."""
        if isinstance(offsets, np.ndarray):
            return self._located(offsets)
        return (0, offsets.count, offsets.start, offsets.pitch) if isinstance(offsets, Rows) else (0, 1, offsets, 0)

    def _located(self, offsets: np.ndarray) -> tuple[int, int, int, int] | None:
        found = self._constants.get(id(offsets))
        if found is not None:
            return found[0]
        if not offsets.flags.c_contiguous:
            return None
        place = offsets.ctypes.data, offsets.size, 0, 0
        if not offsets.flags.writeable:  # kept by a cache, of MMA operands: it comes again
            if len(self._constants) > _MOST_CONSTANTS:
                self._constants.clear()
            self._constants[id(offsets)] = place, offsets
        return place

    def async_read(
        self, epochs: Epochs, shadow: Shadow, offsets: Any, nbytes: int, operation: Operation, fence: Row, cluster: int
    ) -> bool:
        """`RaceTracker.async_read` of an access that is in order. False: nothing is recorded, NumPy has to decide.

        Args: as there, and ``fence``, the row of fences that cover its memory; ``cluster``, that of a `View`.
        """
        places = self._places(offsets)
        if places is None:
            return False
        width, address = operation.clocks.shape[1], operation.address
        visible, fenced = address + 4 * width * _VISIBLE, address + 4 * width * int(fence)
        view = (visible, width, operation.own, 0, operation.lane, -1, cluster)
        record = (operation.identity, 0, fenced, 0, operation.column, 0)
        self._set(0, 0, shadow.address, GRANULE, *places, nbytes, 0, *view, epochs.address, *record)
        return self._decide() != 0

    def async_write(
        self, epochs: Epochs, shadow: Shadow, offsets: Any, nbytes: int, operation: Operation, fence: Row | None,
        cluster: int,
    ) -> bool:  # fmt: skip
        """`RaceTracker.async_write`; result and arguments as for `async_read`. ``fence`` None: none is asked for."""
        places = self._places(offsets)
        if places is None:
            return False
        own = operation.own
        exempt = own + _READ if own >= 0 else -1
        known, width = operation.address + 4 * operation.clocks.shape[1] * _ACQUIRED, operation.clocks.shape[1]
        fenced = 0 if fence is None else operation.address + 4 * width * int(fence)
        view = (known, width, own, 0, operation.lane, exempt, cluster)
        record = (operation.identity, 0, fenced, 0, 0, 0)
        strong = int(operation.reduces)
        self._set(1, strong, shadow.address, GRANULE, *places, nbytes, 0, *view, epochs.address, *record)
        return self._decide() != 0

    def tensor(
        self, epochs: Epochs, plane: Plane, place: tuple[slice, slice], operation: Operation, write: bool, exempt: int
    ) -> bool:
        """`TensorRaces.access`; result as for `async_read`."""
        places = _rectangle(plane, place)
        if places is None:
            return False
        width = operation.clocks.shape[1]
        known = operation.address + 4 * width * _TENSOR
        record = (operation.identity, 0, 0, known, operation.column, 0)
        view = (known, width, -1, 0, -1, exempt, 0)
        self._set(int(write), 0, plane.address, 1, 0, *places, 0, *view, epochs.address, *record)
        return self._decide() != 0

    def pipelined_list(
        self, tracker: RaceTracker, accesses: Sequence[PipelinedAccess]
    ) -> tuple[np.ndarray, ...] | None:
        """Arguments of `pipelined`: `PipelinedAccess` as int64, and arrays that have to live as long as it.

        None where the core has no such places.
        """
        lines, kept = [], []
        for access in accesses:
            if access.starts is not None:
                shadow, (starts, nbytes) = tracker.shared[access.rank], self.merged(access.starts, access.nbytes)
                lines.append((0, shadow.address, GRANULE, starts.ctypes.data, len(starts), 0, 0, nbytes))
                kept.append(starts)
                continue
            plane = tracker.tensor.planes[access.rank]
            places = _rectangle(plane, access.place)
            if places is None:
                return None
            lines.append((int(access.write), plane.address, 1, 0, *places))
        return np.array([(*line, tracker.epochs.address) for line in lines], np.int64), *kept

    def merged(self, starts: np.ndarray, nbytes: int) -> tuple[np.ndarray, int]:
        """Merges the bytes into longer pieces of one length, where they can be put together so."""
        found = self._pieces.get(id(starts))
        if found is None:
            ordered = np.unique(starts)
            breaks = np.flatnonzero(np.diff(ordered) != nbytes) + 1
            lengths = np.diff(np.concatenate([[0], breaks, [len(ordered)]]))
            pieces = starts, nbytes
            if (lengths == lengths[0]).all():
                pieces = ordered[:: lengths[0]].copy(), nbytes * int(lengths[0])
            if len(self._pieces) > _MOST_CONSTANTS:
                self._pieces.clear()
            found = self._pieces[id(starts)] = *pieces, starts  # with the array, so that no other one gets its identity
        return found[:2]

    def pipelined(self, accesses: int, count: int, agent: Agent, identity: int, lane: int, column: int) -> int:
        """Accesses of a tcgen05 operation of a lane: how many, from the first on, are in order and recorded.

        Args:
            accesses, count: host address of what `pipelined_list` returned, and how many they are.
            agent, lane: who issues it.
            identity, column: of the operation.
        """
        return library().access_pipelined(accesses, count, agent.block_address, identity, lane, column)

    @staticmethod
    def context(tracker: RaceTracker, agent: Agent) -> ctypes.Structure:
        """The `Context` that the core knows a warp by, good as long as the tracker."""
        return STRUCTURES["Context"](
            agent.block_address, tracker.epochs.address, tracker.shared[agent.rank].address,
            tracker.tensor.planes[agent.rank].address, tracker.launch.block.ctypes.data, tracker.cluster,
        )  # fmt: skip

    @staticmethod
    def observe(context: ctypes.Structure, log: np.ndarray, first: int) -> int:
        """Works off what a warp has logged (`memory_tables`), from an entry on.

        Args:
            context: of the warp.
            log: uint8 [entries, LOG_ENTRY].
            first: number of an entry.

        Returns:
            The number of the first entry that Python has to decide; the number of entries if there is none.
        """
        return library().log_observe(ctypes.addressof(context), log.ctypes.data, first, len(log))


def _rectangle(plane: Plane, place: tuple[slice, slice]) -> tuple[int, int, int, int] | None:
    """ROWS, BASE, STRIDE and COUNT of columns and groups of lanes; None for groups that are not neighbours."""
    columns, groups = place
    stride = plane.shape[1]
    start, stop, step = groups.indices(stride)
    if step != 1:
        return None
    rows, count = columns.stop - columns.start, stop - start
    if count == stride:  # one piece
        rows, count = 1, rows * count
    return rows, columns.start * stride + start, stride, count
