"""Two launches that programmatic dependent launch lets overlap, executed so that they do.

The clusters of the first run until each of their CTAs has executed griddepcontrol.launch_dependents or exited, those of
the second until nothing but griddepcontrol.wait is left to them; then the first goes on to its end, and the second
behind it. So the second reads, before it waits, what the first has not written yet, and what it writes there the first
may overwrite.

Race reports come from running the launches one after the other, which needs no particular order of events. Here results
are made, and no detector looks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cute_kernels.common.float_environment import default_environment
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import EmulatorError, Hang
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.machine.bytecode.execution import Execution
from cute_kernels.emulator.machine.launch.arguments import extents
from cute_kernels.emulator.machine.launch.launch import Launch
from cute_kernels.emulator.machine.launch.scheduler import Scheduler
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.options import Options

_MOST_HELD = 64  # clusters of a launch that stand still with all their memories


class Snapshot:
    """Contents of device memory. ``regions``: (address, bytes) of it."""

    def __init__(self, regions: Iterable[tuple[int, int]]) -> None:
        self._memory = GlobalMemory()
        self.contents: dict[tuple[int, int], np.ndarray] = {}
        for region in regions:
            self._memory.register(*region)
            self.contents[region] = self._now(region).copy()

    def restore(self) -> None:
        """Memory contains it again."""
        for region, content in self.contents.items():
            self._now(region)[:] = content

    def holds(self) -> bool:
        """Whether memory contains it now."""
        return all(np.array_equal(self._now(region), content) for region, content in self.contents.items())

    def _now(self, region: tuple[int, int]) -> np.ndarray:
        return self._memory.view(*region) if region[1] else np.empty(0, np.uint8)


@dataclass(frozen=True)
class Finished:
    """A launch that has run, which of the program's launches it is, and the memory that it found."""

    launch: CapturedLaunch
    number: int
    found: Snapshot

    def let_overlap(self, second: Finished, memory: GlobalMemory, options: Options) -> bool:
        """Runs this launch and ``second``, one with programmatic stream serialisation that ran right behind it, again
        so that they overlap. Returns whether memory now contains what it did before: what launches in turn leave.

        Nothing happens where this launch never lets another one begin, or where memory of it has been freed since.
        Raises EmulatorError: a launch that hangs or does what is illegal in this order."""
        if not lets_overlap(self.launch) or not self.found.contents.keys() <= second.found.contents.keys():
            return True
        in_turn = Snapshot(second.found.contents)
        second.found.restore()
        self.found.restore()
        run_overlapping(self.launch, second.launch, memory, options, (self.number, second.number))
        return in_turn.holds()


def lets_overlap(launch: CapturedLaunch) -> bool:
    return "griddepcontrol.launch_dependents" in launch.ptx


@default_environment()
def run_overlapping(
    first: CapturedLaunch, second: CapturedLaunch, memory: GlobalMemory, options: Options,
    numbers: Iterable[int] = (0, 0),
) -> None:
    """Executes two launches of a stream of which the second begins as soon as the first lets it, without detectors,
    timeline and counters. ``numbers``: which of the program's launches the two are, for errors; 0: not known.

    With ``options.interleave`` ``"round_robin"`` as many clusters as possible overlap, up to 64 of each launch;
    otherwise the seed draws how many do. Raises EmulatorError: what a launch does wrong whatever the detectors; it
    carries the launch."""
    options = dataclasses.replace(
        options, detectors=False, trace=None, counters=False, going_on=None, steps=(), stepped=None,
        debugger=None,
    )
    rng = random.Random(options.seed) if options.interleave != "round_robin" else None
    pair = zip((first, second), numbers)
    before, behind = (_Grid(launch, number, memory, options, rng) for launch, number in pair)
    before.up_to_trigger()
    behind.up_to_wait()
    before.finish()
    behind.finish()


class _Grid:
    """A launch whose clusters can stand still in between."""

    def __init__(
        self, launch: CapturedLaunch, number: int, memory: GlobalMemory, options: Options, rng: random.Random | None
    ) -> None:
        self.captured, self.number, self.options = launch, number, options
        with self._attached():
            block = extents("block", launch.block)
            self.execution = Execution(launch.ptx, launch.kernel_name, block, options)
            self.launch = Launch(
                self.execution, launch.grid, launch.block, launch.cluster, launch.dynamic_smem, launch.params, memory,
                options, parse(launch.ptx).target,
            )  # fmt: skip
            self.launch.prepare(launch.ptx, cooperative=launch.cooperative)
        most = min(len(self.launch.waiting), _MOST_HELD)
        self.overlapping = most if rng is None else rng.randint(0, most)
        self.held: list[Scheduler] = []

    def up_to_trigger(self) -> None:
        """All clusters have run, the last ones no further than they must to let dependents begin."""
        with self._attached():
            while self.launch.waiting:
                holds = len(self.launch.waiting) <= self.overlapping
                scheduler = self._next("launch_dependents" if holds else "")
                if holds:
                    self._trigger(scheduler)
                else:
                    scheduler.run()

    def up_to_wait(self) -> None:
        """The first clusters have run as far as they can while the launch before has not ended."""
        with self._attached():
            for _ in range(self.overlapping):
                if not self.launch.waiting:  # another cluster may have taken over its work
                    return
                scheduler = self._next("wait")
                scheduler.pause = lambda: False
                try:
                    scheduler.run()
                except Hang:  # it waits for what the launch before does, or hangs again at last
                    pass
                self._hold(scheduler)

    def finish(self) -> None:
        """All clusters run to their end."""
        with self._attached():
            for scheduler in self.held:
                scheduler.cluster.held_at, scheduler.pause = "", None
                scheduler.run()
            while self.launch.waiting:
                self._next("").run()

    def _next(self, held_at: str) -> Scheduler:
        cluster = self.launch.make_cluster(self.launch.take())
        cluster.held_at = held_at
        return Scheduler(cluster, self.execution, self.options, None, len(self.launch.waiting))

    def _trigger(self, scheduler: Scheduler) -> None:
        cluster = scheduler.cluster
        scheduler.pause = cluster.allows_dependents
        while cluster.running and not cluster.allows_dependents():
            # CTAs that have not come so far, where nothing else can run, wait for warps that are held.
            cluster.excused |= {warp for warp in cluster.warps if warp.waits_for_launch()}
            try:
                scheduler.run()
            except Hang:
                if not any(warp.waits_for_launch() for warp in cluster.warps):
                    raise
        self._hold(scheduler)

    def _hold(self, scheduler: Scheduler) -> None:
        if scheduler.cluster.running:
            self.held.append(scheduler)

    @contextlib.contextmanager
    def _attached(self) -> Iterator[None]:
        """Errors carry the launch."""
        try:
            yield
        except EmulatorError as error:
            error.attach(self.captured.ptx, self.captured, self.number)
            raise
