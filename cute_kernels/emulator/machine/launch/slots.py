"""Clusters of one CTA that run one after the other in the memory of one, in the core (``core/slots.c``).

What a cluster finds is kept, and put back before the next one begins. As soon as one needs Python, for an error, an
instruction that the core does not know, asynchronous work or a wait that is not for a named barrier, the cluster's
objects become those of that one, and its `Scheduler` goes on where the core stands. They are not used again.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from cute_kernels.common import interrupts
from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.facts import WarpName
from cute_kernels.emulator.machine.launch.launch import Launch
from cute_kernels.emulator.machine.launch.scheduler import SLICE, Scheduler
from cute_kernels.emulator.machine.state import memory_tables
from cute_kernels.emulator.machine.units.sm import Cluster, Warp
from cute_kernels.emulator.races.checks import GENERIC_KINDS

_MOST = 256  # clusters at a time
_PATIENCE = 1 << 20  # instructions until signals are looked for
_ATTEMPTS = 3  # clusters that need Python from the start, after which no other one is tried
_MAKE_ROOM = CONSTANTS["MAKE_ROOM"]
_REPORT = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)
_Tables, _SlotWarp, _Span = (STRUCTURES[name] for name in ("Tables", "SlotWarp", "Span"))


def suits(launch: Launch) -> bool:
    """Whether clusters of a launch may run in one slot, as far as that is known before."""
    options = launch.options
    in_turn = options.interleave == "round_robin" and options.interleave_clusters == "in_turn"
    watched = options.debugger or options.stepped or options.steps or options.trace is not None or options.counters
    alone = math.prod(launch.cluster) == 1 and not launch.execution.kernel.dependence
    return in_turn and not watched and alone and len(launch.waiting) > 1


class Slot:
    """Clusters of a launch in one slot, one after the other. ``tries``: whether it is worth while to try another one.
    ``executions``: of each basic block, by each warp of the clusters that have ended in the latest `run`."""

    def __init__(self, launch: Launch, make: Callable[[Cluster], Scheduler]) -> None:
        self._launch, self._make = launch, make
        self._count, self._attempts = 1, 0
        self.scheduler: Scheduler | None = None  # of the cluster that Python is to go on with, after `run`; or None
        self._core: ctypes.Structure | None = None
        self._call = memory_tables.CALLBACK(self._called)
        self._report = _REPORT(self._reported)

    @property
    def tries(self) -> bool:
        return self._attempts < _ATTEMPTS

    @property
    def tracks(self) -> list[str]:
        """`WarpState.track` of each warp."""
        return [warp.track for warp in self._warps]

    def run(self) -> int:
        """Runs clusters that have not begun; returns how many have ended. Of another one, Python is to go on with
        ``scheduler``, and it still counts as one that has not begun. Raises what handlers of signals do."""
        interrupts.check()
        launch = self._launch
        indices = launch.waiting[: self._count]
        if self._core is None:
            self._build(indices[0])
        core, races = self._core, launch.races
        self.executions = np.zeros((core.warps, core.blocks), np.int64)
        self._indices, values = indices, self._values(indices)
        core.values, core.totals = values.ctypes.data, self.executions.ctypes.data
        core.count, core.asked, self.scheduler = len(indices), 0, None
        if races is not None:
            core.number = self._cluster.tracker.cluster if core.fresh else races.clusters + 1
            label = functools.partial(_label, indices, [warp.role for warp in self._warps])
            core.text = races.epochs.later(len(GENERIC_KINDS) * core.warps * len(indices), label)
        self._cluster.barriers.tables.report = ctypes.cast(self._report, ctypes.c_void_p).value
        library().slot_run(ctypes.addressof(core), ctypes.cast(self._call, ctypes.c_void_p).value)
        taken = core.done < core.count
        if races is not None:
            races.clusters = core.number + core.done - (not taken)
        if taken:
            self._take()
        self._attempts = 0 if core.done else self._attempts + taken
        self._count = 1 if taken else min(2 * self._count, _MOST)
        return core.done

    # --- the slot -----------------------------------------------------------------------------------------------------

    def _build(self, index: int) -> None:
        """Makes the objects of a cluster, and keeps what it finds in its memory."""
        launch = self._launch
        execution, limit = launch.execution, launch.options.max_warp_instructions
        self._cluster = cluster = launch.make_cluster(index)
        self._made = self._make(cluster)
        self._made.begin()
        tables, (cta,), tracker = cluster.barriers.tables, cluster.ctas, cluster.tracker
        self._warps = cta.warps
        offsets = execution.translation.of_cluster
        self._offsets = np.array([offset for offset, _ in offsets], np.int64)
        self._each = (_SlotWarp * len(cta.warps))(*map(self._warp, cta.warps))
        self._core = STRUCTURES["Slot"](
            program=execution.bytecode.address, rows=execution.exchange, tables=cluster.barriers.address,
            each=ctypes.addressof(self._each), warps=len(cta.warps), blocks=len(execution.flow.blocks),
            local_bytes=execution.translation.local_bytes, offsets=self._offsets.ctypes.data,
            offset_count=len(offsets), slice=SLICE, most=_PATIENCE if limit is None else min(limit, _PATIENCE),
            patience=_PATIENCE, fresh=1,
        )  # fmt: skip
        if tracker is not None:
            tracker.shared[0].bound()
            self._core.epochs, self._core.shadow = tracker.epochs.address, tracker.shared[0].address
            self._core.clock_bytes = tracker.agents[0].clock_bytes
        moments = _Tables.moments
        start, end = ctypes.addressof(tables), moments.offset + moments.size
        tables.report = ctypes.cast(self._report, ctypes.c_void_p).value
        size = ctypes.sizeof(_Tables) + ctypes.sizeof(STRUCTURES["Cta"])
        self._found: dict[tuple[int, int], ctypes.Array[ctypes.c_char]] = {}
        spans = [(start, moments.offset), (start + end, size - end), *cta.spans()]
        spans += [span for warp in cta.warps for span in warp.code.spans()]
        self._keep(spans + ([] if tracker is None else tracker.spans()))

    def _keep(self, spans: Sequence[tuple[int, int]]) -> None:
        """Keeps what is in more spans of memory, (address, bytes), for clusters that follow."""
        for address, nbytes in spans:
            self._found[address, nbytes] = ctypes.create_string_buffer(ctypes.string_at(address, nbytes), nbytes)
        found = self._found.items()
        self._spans = (_Span * len(found))(*(_Span(at, ctypes.addressof(kept), nbytes) for (at, nbytes), kept in found))
        self._core.spans, self._core.span_count = ctypes.addressof(self._spans), len(found)

    @staticmethod
    def _warp(warp: Warp) -> ctypes.Structure:
        context = 0 if warp.agent is None else ctypes.addressof(warp.cluster.tracker.context(warp.agent))
        local = 0 if warp.local is None else warp.local.ctypes.data
        return _SlotWarp(state=warp.code.address, context=context, local=local)

    def _values(self, indices: Sequence[int]) -> np.ndarray:
        """Constants that differ between clusters, int64 [clusters, values]."""
        numbers = np.asarray(indices, np.int64)
        known = (*self._launch.coordinates(numbers), numbers)
        chosen = [known[which] for _, which in self._launch.execution.translation.of_cluster]
        return np.ascontiguousarray(np.array(chosen, np.int64).reshape(len(chosen), len(numbers)).T)

    # --- Python goes on -----------------------------------------------------------------------------------------------

    def _called(self, site: int, mask: int) -> int:
        self._become()
        return self._launch.execution.call(site, mask)

    def _reported(self, what: int) -> int:
        if what == _MAKE_ROOM and not self._core.asked:
            self._make_room(self._cluster.barriers.tables.fault.named.number)
            return 0
        self._become()
        return self._cluster.barriers.report(what)

    def _make_room(self, number: int) -> None:
        """Makes what a named barrier needs, which the clusters that follow find."""
        named, tracker = self._warps[0].cta.named, self._cluster.tracker
        named.make_room(number, None if tracker is None else tracker.named_point)
        self._keep([] if tracker is None else named.point(number).spans())
        named.copy_room(number, self._found[named.span()])

    def _become(self) -> None:
        """The objects of the cluster become those of the one that runs, where it stands."""
        core, cluster = self._core, self._cluster
        if core.asked:
            return
        core.asked = 1
        index = self._indices[core.done]
        cluster.become(index, self._launch.coordinates(index), core.number + core.done)
        cluster.barriers.tables.report = cluster.barriers.callback_address
        self._made.found = cluster.changes()
        for number, (warp, one) in enumerate(zip(self._warps, self._each)):
            if one.ended:
                cluster.exit(warp)
            elif number == core.warp:
                self._launch.execution.current, cluster.executing = warp.code, warp
            elif warp.code.header.waits:
                warp.code.wait(one.place)

    def _take(self) -> None:
        core, warps = self._core, self._warps
        self._become()
        self._cluster.executing = None
        if core.warp < core.warps:
            self._made.first = warp = warps[core.warp]
            warp.code.ran, warp.wait = (core.status, warp.wait), None
        self.scheduler, self._core = self._made, None


def _label(indices: Sequence[int], roles: Sequence[str], number: int) -> str:
    """Label of an epoch of a warp: number 0 is the first of those of the first warp."""
    warp, kind = divmod(number, len(GENERIC_KINDS))
    cluster, warp = divmod(warp, len(roles))
    return f"{GENERIC_KINDS[kind]} of {WarpName(indices[cluster], 0, warp, roles[warp], several=True)}"
