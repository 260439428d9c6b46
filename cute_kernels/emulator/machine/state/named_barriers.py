"""Named barriers of one CTA: bar.sync, bar.arrive and bar.red, which the core counts (``core/barriers.c``).

This makes room for what the core keeps, and words what is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES, word_count
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.emulator.facts import DoubleArrival, Side
from cute_kernels.emulator.machine.state.warp import CtaState, WarpState

#: What the core finds wrong with an arrival.
FAULTS = {CONSTANTS[name] for name in ("WRONG_NUMBER", "WRONG_THREADS", "OTHER_THREADS")}
_NamedBarriers, _COUNT = STRUCTURES["NamedBarriers"], CONSTANTS["NAMED_BARRIERS"]
_BARRIERS = _NamedBarriers.barriers.offset // 8
_WORDS = _NamedBarriers.barriers.size // 8 // _COUNT  # of each


class Point(Protocol):
    """Synchronisation point of the race detector; ``address``: of a `Point` of the core."""

    address: int


class NamedBarriers:
    """The named barriers of a CTA. They count whole warps. ``address``: of a `NamedBarriers` of the core."""

    def __init__(self, cta: CtaState) -> None:
        self.cta = cta
        block = np.zeros(word_count("NamedBarriers"), np.int64)
        self._words, self.address = memoryview(block).cast("B").cast("q"), block.ctypes.data
        self._state = _NamedBarriers.from_buffer(block)
        self._state.waiting[:] = [CONSTANTS["NO_GENERATION"]] * len(self._state.waiting)
        self._points: dict[int, Point] = {}
        self._who: dict[int, np.ndarray] = {}

    def span(self) -> tuple[int, int]:
        """(address, bytes) of them."""
        return self.address, self._words.nbytes

    def recount(self) -> None:
        """Warps are there, or have exited: a barrier over all threads may be complete now."""
        completed = library().named_recount(self.address, self.cta.live_threads())
        for number in range(_COUNT if completed else 0):
            if completed >> number & 1:
                self.cta.cluster.events.completed(self.barrier(number).key)

    def barrier(self, number: int) -> NamedBarrier:
        return NamedBarrier(self, number)

    def generation(self, number: int) -> int:
        """How often a barrier has completed."""
        return self._words[_BARRIERS + number * _WORDS]

    def waits_in(self, warp: int) -> int:
        """The generation that a warp waits for."""
        return self._state.waiting[warp]

    def arrivals(self, number: int) -> list[str]:
        """Labels of the warps that have arrived, in order."""
        count = self._state.barriers[number].arrivals
        return [self.cta.warps[index].label for index in self._who[number][:count]] if count else []

    def threads(self, number: int) -> tuple[int, int]:
        """How many have arrived, and are expected."""
        state = self._state.barriers[number]
        return state.arrived, state.expected

    def point(self, number: int) -> Point:
        """The race detector's knowledge of a barrier."""
        return self._points[number]

    def double_arrivals(self) -> Iterator[DoubleArrival]:
        """The first one of each barrier that had any."""
        for number, state in enumerate(self._state.barriers):
            if found := state.first_double.warps:
                each, warps = state.first_double, self.cta.warps
                who = tuple(warp.label for index, warp in enumerate(warps) if found >> index & 1)
                at = self.cta.cluster.instruction(each.place)
                yield DoubleArrival(number, warps[each.warp].label, at, who)

    def make_room(self, number: int, new_point: Callable[[], Point] | None) -> None:
        """The core asks for it, and with detectors (``new_point``) for what passes order on."""
        state = self._state.barriers[number]
        who = np.zeros(max(64, 2 * state.room), np.int64)
        if number in self._who:
            who[: state.room] = self._who[number]
        self._who[number] = who
        state.who, state.room = who.ctypes.data, len(who)
        if new_point is not None and number not in self._points:
            self._points[number] = new_point()
            state.point = self._points[number].address

    def copy_room(self, number: int, target: ctypes.Array[ctypes.c_char]) -> None:
        """Makes known in a copy of them what `make_room` has made."""
        copy, state = _NamedBarriers.from_buffer(target).barriers[number], self._state.barriers[number]
        copy.who, copy.room, copy.point = state.who, state.room, state.point

    def fault(self, what: int, fault: ctypes.Structure, warp: WarpState) -> BarrierMisuse:
        """An arrival that must not be (``what``: WRONG_NUMBER and so on), in words."""
        number, threads = fault.number, fault.threads
        if what == CONSTANTS["WRONG_NUMBER"]:
            return BarrierMisuse(f"named barrier {number}; legal are 0 to {_COUNT - 1}")
        if what == CONSTANTS["WRONG_THREADS"]:
            message = f"barrier {number} with {threads} threads; legal are positive multiples of 32"
            return BarrierMisuse(message).know("barrier-threads")
        who, (_, expected) = self.arrivals(number), self.threads(number)
        first = self.cta.cluster.instruction(self._state.barriers[number].first)
        wanted = self.cta.live_threads() if threads < 0 else threads
        return BarrierMisuse(
            f"barrier {number} of CTA {self.cta.rank}: {warp.label} expects {wanted} threads where "
            f"{', '.join(who)} expected {expected}"
        ).know("barrier-threads", other=Side("expects", () if first is None else (first,), who[0]))


class NamedBarrier:
    """A named barrier, for the warps that wait there."""

    def __init__(self, barriers: NamedBarriers, number: int) -> None:
        self._barriers, self._number = barriers, number
        self.key = ("bar", barriers.cta.rank, number)

    @property
    def generation(self) -> int:
        """How often it has completed."""
        return self._barriers.generation(self._number)

    def missing(self) -> list[str]:
        """Labels of the running warps of the CTA that have not arrived."""
        cta, who = self._barriers.cta, self._barriers.arrivals(self._number)
        running = (warp for warp in cta.warps if warp in cta.cluster.running)
        return [warp.label for warp in running if warp.label not in who]

    def describe(self) -> str:
        arrived, expected = self._barriers.threads(self._number)
        waiting = ", ".join(self._barriers.arrivals(self._number)) or "nobody"
        return (
            f"named barrier {self._number} of CTA {self._barriers.cta.rank}: {arrived} of {expected} threads arrived "
            f"({waiting})"
        )
