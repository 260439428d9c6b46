"""Two accesses that race, for reports: where, the kind of fault, and which lanes of both sides."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.facts import Side
from cute_kernels.emulator.races.happens_before import LANES, Agent
from cute_kernels.emulator.races.operations import Operation
from cute_kernels.emulator.races.shadow import LANE_BITS, Epochs, Plane, Shadow


@dataclass(frozen=True)
class Part:
    """Places of one access that are of one plane."""

    plane: Plane | None  # by granules or by bytes; None: of tensor memory
    unit: int  # bytes of a place
    # places, lanes: of each; lane -1: of the warp
    places: np.ndarray
    lanes: np.ndarray
    before: np.ndarray  # identities of earlier accesses
    late: np.ndarray  # which of them are not ordered before

    @staticmethod
    def of(conflict: ctypes.Structure, access: ctypes.Structure, shadow: Shadow | None) -> Part:
        """Copies of what the core tells of."""
        arrays = (
            array_at(getattr(conflict, name), conflict.count, dtype).copy()
            for name, dtype in (("places", np.int64), ("lanes", np.int64), ("before", np.int32), ("late", np.bool_))
        )
        plane = None if shadow is None else shadow.fine if conflict.unit == 1 else shadow.coarse
        return Part(plane, conflict.unit, *arrays)


def array_at(address: int, count: int, dtype: type[np.generic]) -> np.ndarray:
    """Items that are at a host address."""
    return np.frombuffer((ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address), dtype)


@dataclass(frozen=True)
class Conflict:
    """A later access, to be compared with the earlier ones that it races with."""

    epochs: Epochs  # what accesses are known by
    first: int  # first epoch of this launch
    agents: Sequence[Agent]  # warps of the cluster
    who: Agent | Operation  # makes the later access
    verb: str  # "reads" or "writes"
    lanes: np.ndarray | None = None  # of the later access, by place; None: they are not known
    cluster: int = 0  # number of it; 0: no other one accesses this memory
    weak: bool = False  # the accesses are synchronised, but by relaxed operations or at too narrow a scope

    def facts(self, before: np.ndarray, late: np.ndarray, number: int, other: Side) -> dict[str, object]:
        """Fields of `cute_kernels.emulator.errors.EmulatorError.know`. ``before``: identities of the earlier accesses,
        by place. ``late``: which of them are not ordered before. ``number``: of the epoch that is reported. ``other``:
        it."""
        chosen = late & (before >> LANE_BITS == number)
        return {
            "kind": self.kind(number, wrote=other.verb == "wrote"),
            "side": self.side(chosen),
            "other": self.earlier(before, late, number, other),
        }

    def side(self, chosen: np.ndarray | None) -> Side:
        """The later access, at the ``chosen`` places."""
        if isinstance(self.who, Agent):
            return Side(self.verb, (), self.who.label, self._lanes(chosen))
        return Side(self.verb, what=self.epochs.label(self.who.identity))

    def earlier(self, before: np.ndarray, late: np.ndarray, number: int, other: Side) -> Side:
        """``other`` with its lanes, where it is a store by single lanes."""
        column = int(self.epochs.columns[number])
        if other.verb != "wrote" or number < self.first or not any(agent.base == column for agent in self.agents):
            return other
        chosen = late & (before >> LANE_BITS == number)
        lanes = np.unique(before[chosen] & (LANES - 1)).tolist()
        return dataclasses.replace(other, lanes=tuple(lanes))

    def _lanes(self, chosen: np.ndarray | None) -> tuple[int, ...]:
        if self.lanes is None or chosen is None:
            return ()
        lanes = np.unique(self.lanes[chosen]).tolist()
        return () if lanes[0] < 0 else tuple(lanes)

    def _own_warp(self, number: int) -> bool:
        """Whether the earlier access is one of a lane of the same warp."""
        if not isinstance(self.who, Agent) or number < self.first:
            return False
        if self.epochs.foreign(number, self.cluster):
            return False  # a warp of another cluster has the columns of this cluster's of the same number
        return 0 <= int(self.epochs.columns[number]) - self.who.base < LANES

    def kind(self, number: int, *, wrote: bool) -> str:
        """The fault where an earlier access, by its epoch, is not ordered before; "": that of the memory."""
        if number < self.first:
            return "launch-overlap"
        if self.weak:
            return "weak-order"
        if self._own_warp(number):
            return "lanes-race"
        if isinstance(self.who, Operation):
            return "stage-in-use" if self.verb == "writes" else ""
        if self.epochs.generic[number] == 0:  # an asynchronous operation
            return "unfinished-copy" if wrote else "source-in-use"
        return "copy-in-flight" if self._not_waited_for(number) else ""

    def _not_waited_for(self, number: int) -> bool:
        """Whether the earlier access is a cp.async whose own warp has not waited for its group."""
        label = self.epochs.label(number << LANE_BITS)
        copiers = (agent for agent in self.agents if label == f"cp.async of {agent.label}")
        column, clock = int(self.epochs.columns[number]), int(self.epochs.clocks[number])
        return any(agent.clocks[0, column] < clock for agent in copiers)
