"""A timeline of a launch in Chrome's JSON trace format, which https://ui.perfetto.dev opens (`Options.trace`).

The axis is not time. It counts steps: one per warp instruction, and one per asynchronous operation (a TMA copy, an MMA,
a commit) that takes effect, in the order in which this schedule executed them. One step is drawn as one microsecond.
Each cluster begins at step 0. Per CTA there is a track for every warp, one for the tensor core or for each warpgroup's,
and as many for TMA as copies are in flight at once:

* work of a warp between two waits, named after the source line where it begins; inside it single steps for the
  instructions that synchronise or start asynchronous work;
* waits, while a warp is descheduled;
* asynchronous operations from issue to completion (operations of one tensor core one after the other).

Arrows go from the instruction that starts an operation to the operation, and from what completes a barrier's phase or a
group (an arrival, bytes, a commit) to the first work of each warp that waited for it.

A timeline is an `Observer` of each cluster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cute_kernels.common.trace_events import TraceEvents, Track
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.isa.ptx.flow import Flow
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.state.async_engine import AsyncOp
from cute_kernels.emulator.machine.state.mbarrier import OPERATIONS
from cute_kernels.emulator.machine.state.smem import OFFSET_MASK, RANK_SHIFT
from cute_kernels.emulator.machine.state.warp import ClusterState, Wait, WarpState
from cute_kernels.emulator.observe.roles import activity

_UNIT_TRACKS = 1000  # thread ids of units begin here, after those of the warps
_IN_ORDER = ("tcgen05", "wgmma")  # engines whose operations run one after the other


class Timeline:
    """Collects the events of a launch. ``events``: what was recorded; ``open``: of clusters that have not ended."""

    def __init__(self) -> None:
        self.events = TraceEvents()
        self.open: dict[ClusterTrace, None] = {}

    def attach(self, cluster: ClusterState, flow: Flow) -> ClusterTrace:
        """Begins to record a cluster that has not run yet."""
        trace = ClusterTrace(self, cluster, flow)
        self.open[trace] = None
        return trace

    def write(self, path: str | Path) -> None:
        """Writes everything recorded so far, with what clusters left open: their warps may hang."""
        for trace in list(self.open):
            trace.close()
        note = "steps, not time: one microsecond is one warp instruction or one asynchronous operation of this schedule"
        self.events.write(path, note)


@dataclass
class _Waiting:
    """A warp that is descheduled: since when, why, and what released it."""

    since: int
    wait: Wait
    text: str
    release: tuple[Track, int] | None = None


@dataclass(slots=True)
class Flight:
    """An asynchronous operation that has been issued."""

    # name, what: short, and in full
    name: str
    what: str
    # unit, track: where it is drawn
    unit: str
    rank: int
    track: Track
    slot: int  # place of its track among those of the unit in the CTA of this rank, -1: operations run in order there
    issuer: tuple[Track, int] | None  # the instruction that issued it, and its step; None: none did
    # issued, done: first step after its issue, and that in which it took effect
    issued: int
    signals: Hashable  # key of the waits that its end may satisfy, see `AsyncOp`
    done: int = 0
    outer: tuple[Track, int] | None = None  # the operation that took effect when this one did, and its step


@contextlib.contextmanager
def recording(path: str | Path | None) -> Iterator[Timeline | None]:
    """A timeline that is written to ``path`` in the end, also when the launch fails; None without a path. Raises
    FileNotFoundError: no folder to write into; IsADirectoryError: the path is one; NotWritten: the file cannot be
    written; of a launch that fails, a note of its error says so."""
    if path is None:
        yield None
        return
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"trace = {str(path)!r}: there is no folder {Path(path).absolute().parent}")
    if Path(path).is_dir():  # what a launch reports would be lost behind that
        raise IsADirectoryError(f"trace = {str(path)!r}: must be the path of a file, and is a folder")
    timeline = Timeline()
    try:
        yield timeline
    except EmulatorError as error:
        try:
            timeline.write(path)
        except OSError as unwritten:  # what is wrong with the kernel comes first
            error.know("", f"there is no timeline: {unwritten}")
        raise
    timeline.write(path)


class ClusterTrace:
    """Records one cluster; a probe of the scheduler. ``timeline``: where events go. ``cluster``: whose units are
    wrapped. ``flow``: of the kernel that it runs."""

    def __init__(self, timeline: Timeline, cluster: ClusterState, flow: Flow) -> None:
        self._timeline, self._events = timeline, timeline.events
        self.cluster, self._flow_graph = cluster, flow
        blocks, instructions = flow.blocks, flow.kernel.instructions
        self._sizes = [block.end - block.start for block in blocks] + [0]
        self._places = [_place(instructions, block.start) for block in blocks] + [("end", 0)]
        #: Of every instruction, how many its block has from it on: the block is counted as a whole.
        self._left = [block.end - index for block in blocks for index in range(block.start, block.end)]
        self._first_process = 1 + cluster.index * len(cluster.ctas)
        self._tracks = {
            warp: Track(self._first_process + cta.rank, warp.index + 1) for cta in cluster.ctas for warp in cta.warps
        }
        self.steps = 0  # of everything that has ended
        self._operations = 0  # asynchronous operations that have taken effect
        self._warp: WarpState | None = None
        self._at: tuple[int, int] | None = None  # see `Observer.at`
        self._begin = self._operations_before = 0
        self._done: dict[WarpState, int] = {}  # instructions per warp in earlier turns
        self._where: tuple[str, int] = ("", 0)
        self._waiting: dict[WarpState, _Waiting] = {}
        self._operation: tuple[Track, int] | None = None  # the operation that takes effect now, and its step
        self._releases: dict[Hashable, tuple[Track, int]] = {}
        self._slots: dict[tuple[int, str], list[bool]] = {}  # tracks of a unit: in use?
        self._units: dict[tuple[Hashable, ...], Track] = {}
        self._pipe_ends: dict[Track, int] = {}
        self._barrier_names: dict[int, str] = {}
        self._last_step: tuple[Track, int] | None = None
        self._flights: dict[int, Flight] = {}  # by numbers of operations
        for cta in cluster.ctas:
            process = Track(self._first_process + cta.rank, 0)
            self._events.name("process", process, f"cluster {cluster.index}, CTA {cta.rank}")
        cluster.events.observe(self)

    # --- probe of the scheduler -------------------------------------------------------------------------------------

    def resume(self, warp: WarpState) -> None:
        """A warp is about to run."""
        self._warp, self._begin, self._operations_before = warp, self.steps, self._operations
        self._where = self._places[warp.code.standing or 0]

    def give_way(self, warp: WarpState) -> None:
        """The warp has stopped: it waits, has used up its turn, or has exited."""
        self.cluster.events.read()
        executed = warp.code.steps
        if warp.wait is None and warp in self.cluster.running and warp.code.counted:
            executed -= self._sizes[warp.code.standing]  # the next block is counted before it runs
        instructions = executed - self._done.get(warp, 0)
        self._done[warp] = executed
        begin, end = self._begin, self._begin + instructions + self._operations - self._operations_before
        self._warp, self._last_step, self.steps = None, None, end
        earlier = self._waiting.get(warp)
        if end > begin:
            track = self._tracks[warp]
            if earlier is not None:
                self._end_wait(warp, earlier, begin)
            name, line = self._where
            self._events.slice(track, name, "work", begin, end, instructions=instructions, ptx_line=line)
        if warp.wait is None:
            if end > begin:
                self._waiting.pop(warp, None)
        elif end > begin or earlier is None:
            self._waiting[warp] = _Waiting(end, warp.wait, warp.wait.describe())
        else:
            earlier.wait, earlier.release = warp.wait, None

    def close(self) -> None:
        """The waits of warps that never ran again; names of warps, which show what they did where they have no role."""
        self._timeline.open.pop(self, None)
        for warp, waiting in self._waiting.items():
            if self.steps > waiting.since:
                title = self._title(waiting.wait)
                self._events.slice(self._tracks[warp], title, "wait", waiting.since, self.steps, reason=waiting.text)
        self._waiting.clear()
        for warp in (warp for cta in self.cluster.ctas for warp in cta.warps):
            name = warp.role or activity(self._executed_opcodes(warp))
            self._events.name("thread", self._tracks[warp], f"warp {warp.index}" + (f" {name}" if name else ""))

    def _executed_opcodes(self, warp: WarpState) -> set[str]:
        blocks = zip(self._flow_graph.opcodes, warp.counts)
        return {opcode for opcodes, count in blocks if count for opcode, _ in opcodes}

    def _end_wait(self, warp: WarpState, waiting: _Waiting, end: int) -> None:
        track = self._tracks[warp]
        if end > waiting.since:
            self._events.slice(track, self._title(waiting.wait), "wait", waiting.since, end, reason=waiting.text)
        release = waiting.release
        if release is None and waiting.wait.kind == "bulk_group":
            # Whether a group is complete must not be asked before the scheduler does: asking ends it for the detectors.
            release = self._releases.get(waiting.wait.key)
        if release is not None:
            self._arrow("release", release, (track, end))

    def now(self) -> int:
        """The step of the instruction that is being executed, or the next one when none is."""
        warp = self._warp
        if warp is None:
            return self.steps
        executed, index = self._at or (warp.code.steps, warp.code.executing)
        # Lanes that meet others, or exit, stand behind the last instruction of their block: what that brings about
        # happens there.
        since = executed - self._done.get(warp, 0) - (self._left[index] if index >= 0 else 1)
        return self._begin + since + self._operations - self._operations_before

    # --- what happens (`Observer`) ------------------------------------------------------------------------------------

    def at(self, place: tuple[int, int] | None) -> None:
        self._at = place

    def issued(self, number: int, op: AsyncOp) -> None:
        name, queue = op.name or op.describe.split(" issued")[0], op.queue_key
        issuer = None
        rank = 0
        if self._warp is not None:
            rank = self._warp.cta.rank
            issuer = self._step(f"issue {name}", what=op.describe)
        issued = self.now() + (self._warp is not None)
        unit = queue[0] if isinstance(queue, tuple) else str(queue)
        pipe = queue if unit in _IN_ORDER else None
        slot = -1 if pipe else self._take_slot(rank, unit)
        track = self._unit_track(rank, unit, slot, pipe)
        self._flights[number] = Flight(name, op.describe, unit, rank, track, slot, issuer, issued, op.signals)

    def begins(self, number: int) -> None:
        """Makes the operation the cause of what happens until its end."""
        flight = self._flights[number]
        # The instruction that an eager operation interrupts takes its own step first.
        flight.done = self.now() + (self._warp is not None)
        self._operations += 1
        if self._warp is None:
            self.steps += 1
        flight.outer, self._operation = self._operation, (flight.track, flight.done)

    def ends(self, number: int, failed: bool) -> None:
        flight = self._flights.pop(number)
        if flight.signals is not None and not failed:
            self.completed(flight.signals, None)
        self._operation = flight.outer
        begin, end, track = flight.issued, flight.done + 1, flight.track
        if flight.slot < 0:
            begin = max(begin, self._pipe_ends.get(track, 0))
            self._pipe_ends[track] = end
        else:
            self._slots[flight.rank, flight.unit][flight.slot] = False
        self._events.slice(track, flight.name, flight.unit, begin, end, what=flight.what)
        if flight.issuer is not None:
            self._arrow("issue", flight.issuer, (track, begin))

    def passed(self, address: int, state: int, parity: bool) -> None:
        self._step(f"passed {self._barrier(address)}", **{"parity" if parity else "phase": state})

    def operated(self, operation: int, address: int, words: Sequence[int]) -> None:
        name = OPERATIONS[operation].removeprefix("mbarrier.")
        self._step(f"{name} {self._barrier(address)}", barrier=self.cluster.barriers.describe_as(address, *words))

    def completed(self, key: Hashable, count: int | None) -> None:
        """Whoever waits for it can go on from here."""
        if self._operation is not None:
            origin = self._operation
        elif self._warp is not None:
            origin = (self._tracks[self._warp], self.now())
        else:
            return
        self._releases[key] = origin
        for waiting in self._waiting.values():
            wait = waiting.wait
            if wait.key != key or wait.kind == "bulk_group" or waiting.release is not None:
                continue
            if wait.ready() if count is None else wait.ready_at(count):
                waiting.release = origin

    def _step(self, name: str, **details: object) -> tuple[Track, int]:
        """One step of the running warp. An instruction that does several things is one slice, its first."""
        place = (self._tracks[self._warp], self.now())
        if place != self._last_step:
            self._last_step = place
            self._events.slice(place[0], name, "instruction", place[1], place[1] + 1, **details)
        return place

    def _arrow(self, name: str, source: tuple[Track, int], target: tuple[Track, int]) -> None:
        """From inside a slice at one step to inside one at another."""
        (begins, begin), (ends, end) = source, target
        self._events.flow(name, (begins, begin + 0.5), (ends, end + 0.5))

    def _barrier(self, address: int) -> str:
        """Name of an mbarrier."""
        name = self._barrier_names.get(address)
        if name is None:
            name = self.cluster.barriers.name(address) or f"mbarrier {address & OFFSET_MASK:#x}"
            name += f" of CTA {address >> RANK_SHIFT}" if address >> RANK_SHIFT else ""
            self._barrier_names[address] = name
        return name

    def _title(self, wait: Wait) -> str:
        return f"wait {self._barrier(wait.key[1]) if wait.kind == 'mbarrier' else wait.kind}"

    def _take_slot(self, rank: int, unit: str) -> int:
        """The first track of a unit on which no operation is in flight."""
        slots = self._slots.setdefault((rank, unit), [])
        slot = slots.index(False) if False in slots else len(slots)
        slots[slot : slot + 1] = [True]
        return slot

    def _unit_track(self, rank: int, unit: str, slot: int, pipe: tuple[Hashable, ...] | None) -> Track:
        key = (rank, unit, slot, pipe)
        if key not in self._units:
            track = self._units[key] = Track(self._first_process + rank, _UNIT_TRACKS + len(self._units))
            name = {"tma": "TMA", "tcgen05": "tensor core", "wgmma": "tensor core"}.get(unit, unit)
            if unit == "wgmma":
                name += f", warpgroup {pipe[2]}"
            self._events.name("thread", track, f"{name} {slot}" if slot > 0 else name)
        return self._units[key]


def _place(instructions: Sequence[Instruction], start: int) -> tuple[str, int]:
    """Source line (or PTX line) and PTX line of the block that begins there."""
    if start >= len(instructions):
        return "end", 0
    instruction = instructions[start]
    return Path(instruction.source).name or f"PTX line {instruction.line}", instruction.line
