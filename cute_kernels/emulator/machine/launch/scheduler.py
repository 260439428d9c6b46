"""Runs the warps of a cluster in an order that a seed decides, and reports hangs.

All warps run interleaved: a warp runs until it has to wait or its budget of basic blocks is used up. When no warp can
run, pending asynchronous work completes; when there is none, suspended try_waits time out; when that changes nothing
either, the cluster waits for another one (see `residents`), or hangs.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from cute_kernels.common import interrupts
from cute_kernels.emulator.errors import EmulatorError, Hang
from cute_kernels.emulator.facts import WaitState
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.bytecode.execution import Execution
from cute_kernels.emulator.machine.launch.holds import Holds
from cute_kernels.emulator.machine.launch.schedule import draw_starved
from cute_kernels.emulator.machine.state.warp import NamedWait, PhaseWait, Wait
from cute_kernels.emulator.machine.units.sm import Cluster, Warp
from cute_kernels.emulator.observe.counters import Counters
from cute_kernels.emulator.observe.trace import Timeline
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.steps import Step

SLICE = 20_000  # basic blocks until a warp that never waits gives way
_RANDOM_SLICE = 24
_PATIENCE = 3  # rounds in which every suspended wait timed out and nothing changed
_SLEEPING_PATIENCE = 10_000  # the same while a warp sleeps: how often it does before it goes on is its own affair
_FRUITLESS = 64  # rounds without any effect after which starved warps run
_SUSPICIOUS = 200_000  # basic blocks without any effect after which a repetition is looked for
_LONGEST_LOOP = 20_000  # basic blocks of the longest endless loop that is recognised
_LONGEST_POLLING = 500  # strong loads in it
_POLL = 250  # blocks that a strong load counts as: a kernel that does nothing but look waits for something
_GLANCES = 16  # strong loads without any effect, after which other clusters run
_MOST_OTHERS = 3  # clusters that are described besides one that hangs
_LIMIT_CHECK = 256  # rounds of short slices between two looks at the number of instructions


class _Stuck(Exception):
    """The cluster cannot go on by itself: why, and the kind of its hang."""


def is_over(wait: Wait) -> bool:
    """Whether what a warp waited for has come, of waits of which that can be asked without any effect."""
    if isinstance(wait, PhaseWait):
        return wait.ready_at(wait.barriers.phase(wait.address))
    return isinstance(wait, NamedWait) and wait.ready()


class Scheduler:
    """Runs one cluster to its end. ``timeline``: takes what happens, or None; ``later``: clusters that have not
    started.

    Attributes:
        helped: other clusters may bring about what this one waits for: `run` then returns where it cannot go on by
            itself, with ``stuck`` set, and goes on when it is called again.
        patient: `run` returns so only where nothing has happened for so long that the cluster would hang alone.
        seen: what warps saw in global memory when it was stuck, see `Cluster.looked_at`.
        others, most: other resident clusters, and how many there may be, for reports.
        steps: of the launch that come next, `Options.steps`; `run` returns where the next one is of another cluster.
        pause: asked after each turn of a warp whether to leave off; `run` then returns, also where warps wait only for
            another launch, and goes on when it is called again. None: it runs to the end.
        first, found: of a cluster whose first round is under way: the warp that goes on with it (None: all do), and
            `Cluster.changes` before it.
    """

    def __init__(
        self, cluster: Cluster, execution: Execution, options: Options, timeline: Timeline | None, later: int
    ) -> None:
        self.later, self.most = later, 1
        self.helped = self.patient = False
        self.stuck: _Stuck | None = None  # None, or why it cannot go on, for `hang`
        self.seen: dict[tuple[int, int], bytes] = {}
        self.others: Sequence[Scheduler] = ()
        self.polls_before = 0  # strong loads until anything happened last
        self.pause: Callable[[], bool] | None = None
        self.first: Warp | None = None
        self.found: tuple[int, int, int] | None = None
        self.steps: deque[Step] = deque()
        self.holds: Holds | None = None  # of the launch, or None
        self.cluster, self.execution, self.options = cluster, execution, options
        self.rng = cluster.rng
        self.random = options.interleave != "round_robin"
        self.starved = draw_starved(self.rng, cluster.warps) if options.interleave == "starve" else frozenset()
        self.fruitless_rounds = 0
        self.idle_blocks = 0  # since livelocks were looked for
        self.idle_since = 0  # all, since anything happened
        self.rounds = 0
        self.long_slice = False
        self.suspicious = _SUSPICIOUS
        if timeline is not None:
            cluster.trace = timeline.attach(cluster, execution.flow)
        if options.debugger is not None:
            options.debugger.begins(self)
        self.probes = tuple(probe for probe in (cluster.meter, cluster.trace) if probe is not None)

    def run(self) -> None:
        """Runs all warps to their end, or until it pauses. Raises EmulatorError: what a warp or a detector reports, or
        a hang."""
        cluster = self.cluster
        if self.stuck is not None:  # others have run since
            self.stuck, self.idle_blocks, self.idle_since, self.polls_before = None, 0, 0, cluster.polls
        cluster.barriers.tables.gives_way = self.helped
        if cluster.tracker is not None:
            cluster.tracker.enter_cluster()
        try:
            self._run()
        except _Stuck as stuck:
            self.stuck = stuck
            if not self.helped:
                self.hang()
            self.seen = cluster.looked_at()
        except EmulatorError as error:
            cluster.tell_past(error)
            raise
        if not cluster.running and cluster.trace is not None:
            cluster.trace.close()

    def begin(self) -> None:
        """All warps are before their first instruction, unless they have begun."""
        for warp in self.cluster.warps:
            warp.code = warp.code or self.execution.start(warp)

    def _run(self) -> None:
        cluster = self.cluster
        self.begin()
        idle_rounds = 0
        if self.patient:
            self.suspicious = SLICE
        while cluster.running:
            interrupts.check()  # where only asynchronous work goes on, no warp has a turn
            if self._pauses():
                return
            before, self.found = self.found or cluster.changes(), None
            ran = self._round()
            self._check_limit()
            if cluster.changes() != before:
                idle_rounds = self.idle_blocks = self.idle_since = 0
                self.polls_before = cluster.polls
            elif self.helped and not self.patient and self._only_looks():
                raise _Stuck("its warps wait for another cluster", "livelock")
            elif self.idle_blocks > self.suspicious or (self.polls and self._idle_for_too_long()):
                self._look_for_livelock()
            if ran or not cluster.running or cluster.engine.step():
                continue
            idle_rounds += 1
            sleeping = any(getattr(warp.wait, "key", None) == "nanosleep" for warp in cluster.warps)
            if idle_rounds > (_SLEEPING_PATIENCE if sleeping else _PATIENCE) or not self._time_out():
                if not sleeping and not self.polls and not any(cta.tmem.held_by_others for cta in cluster.ctas):
                    self.helped = False  # no other cluster can change that
                raise _Stuck("no warp can run and no asynchronous work is pending", "hang")
        cluster.finish()

    @property
    def polls(self) -> int:
        """Strong loads since anything happened."""
        return self.cluster.polls - self.polls_before

    def _only_looks(self) -> bool:
        """Whether warps look again and again at what does not change; no asynchronous work changes it, either."""
        if self.fruitless_rounds or (self.polls <= _GLANCES and self.idle_blocks <= _SUSPICIOUS):
            return False
        return not self.cluster.engine.step()

    def _pauses(self) -> bool:
        if self.holds is not None and self.holds.freed:
            return True
        if self.steps:
            return self.steps[0].cluster != self.cluster.index
        return self.pause is not None and self.pause()

    def _round(self) -> bool:
        """Lets every warp that can run do so once. Returns whether there was one."""
        if self.steps:
            self._take(self.steps.popleft())
            return True
        warps = self.cluster.warps
        if self.first is not None:
            warps, self.first = warps[warps.index(self.first) :], None
        self.long_slice = False
        if self.random:
            self.rng.shuffle(warps)
        if not self.starved and self.holds is None:
            return self._let_run(warps)
        before = self.cluster.changes()
        ran = self._let_run([warp for warp in warps if warp not in self.starved])
        # Warps that poll memory can always run; the limit on rounds without effect lets the starved ones bring about
        # what is polled for.
        self.fruitless_rounds = 0 if self.cluster.changes() != before else self.fruitless_rounds + 1
        if (ran and self.fruitless_rounds < _FRUITLESS) or self.cluster.engine.step():
            return True
        self.fruitless_rounds = 0
        return self._let_go() or self._let_run([warp for warp in warps if warp in self.starved]) or ran

    def _holds(self, warp: Warp) -> Step | None:
        """The step that holds a warp where it stands."""
        return self.holds.of(self.cluster.index, warp.number, warp.code) if self.holds is not None else None

    def _let_go(self) -> bool:
        """Nothing but warps that are held can run: the first goes on, if other clusters do not. Returns whether."""
        step = next(filter(None, map(self._holds, self.cluster.warps)), None)
        if step is not None and self.helped and not self.patient:
            raise _Stuck("a warp is held until another one has gone on", "hang")
        if step is not None:
            self.holds.left.remove(step)
        return step is not None

    def _let_run(self, warps: list[Warp]) -> bool:
        """Lets each of these warps run once that can. Returns whether there was one."""
        ran = False
        for warp in list(warps):
            if warp.wait is not None and not warp.timed_out and not self._ready(warp):
                continue
            if warp not in self.cluster.running or self._holds(warp) is not None:
                continue
            ran = True
            budget = self.rng.randrange(1, _RANDOM_SLICE) if self.random else SLICE
            self._turn(warp, Step(self.cluster.index, "w", warp.number, budget))
            if warp.wait is None:
                self.idle_blocks += budget
                self.long_slice |= budget == SLICE
            if self.options.completion == "random":
                self.cluster.engine.tick()
            if self._pauses():
                break
        return ran

    def _take(self, step: Step) -> None:
        """Takes one of `Options.steps`, if it is possible now."""
        if step.kind == "a":
            self.cluster.engine.step(step.who)
        warp = next((warp for warp in self.cluster.warps if step.kind == "w" and warp.number == step.who), None)
        if warp is not None and (warp.wait is None or warp.timed_out or self._ready(warp)):
            self._turn(warp, step)

    def _turn(self, warp: Warp, step: Step) -> None:
        stop = self.holds.stop(self.cluster.index, warp.number) if self.holds is not None else None
        try:
            if stop is None:
                self._resume(warp, SLICE if step.count is None else step.count)
            else:
                step = self._go_up_to(warp, step, stop)
        finally:
            if self.options.stepped is not None:
                self.options.stepped(step, self._came_to(warp))
        if self.holds is not None:
            self._after_turn(warp)

    def _go_up_to(self, warp: Warp, step: Step, stop: int) -> Step:
        """A turn that ends in front of the block with which the warp has executed so many instructions. Returns it."""
        longest = max(block.end - block.start for block in self.execution.flow.blocks)
        spent, budget = 0, SLICE if step.count is None else step.count
        while spent < budget:
            part = max(1, min(budget - spent, (stop - warp.code.steps) // longest))
            self._resume(warp, part)
            spent += part
            stands = warp.code.counted and warp.code.steps >= stop
            if stands or warp.wait is not None or warp not in self.cluster.running:
                break
        return dataclasses.replace(step, count=spent)

    def _after_turn(self, warp: Warp) -> None:
        """Warps that this turn was to come before go on at once."""
        going = self.holds.passed(self.cluster.index, warp.number, warp.code if warp in self.cluster.running else None)
        for each in self.cluster.warps:
            if each.number in going:
                self._turn(each, Step(self.cluster.index, "w", each.number, SLICE))

    def _ready(self, warp: Warp) -> bool:
        try:
            return warp.wait.ready()
        except EmulatorError as error:
            raise error.at(self._standing_at(warp), warp.label) from None

    def _resume(self, warp: Warp, budget: int) -> None:
        """Runs a warp until it waits, exits, or has executed ``budget`` basic blocks; before, handlers of signals."""
        interrupts.check()
        for probe in self.probes:
            probe.resume(warp)
        warp.wait, self.cluster.executing = None, warp
        try:
            warp.code.send(budget)
        except StopIteration:
            self.cluster.exit(warp)
        except EmulatorError as error:
            raise error.at(self.cluster.place_of(warp), warp.label) from None
        except MemoryError:
            raise
        except Exception as error:
            wrapped = EmulatorError(f"internal error: {type(error).__name__}: {error}")
            raise wrapped.at(self.cluster.place_of(warp), warp.label) from error
        finally:
            self.cluster.executing = None
            for probe in self.probes:
                probe.give_way(warp)

    def _look_for_livelock(self) -> None:
        """Warps have run for long without effect: raises Hang if each returns to a state in which it was before."""
        self.idle_since += self.idle_blocks
        self.idle_blocks = 0
        if self.cluster.engine.step():  # what is polled for may be what completes at last
            self.idle_since, self.polls_before = 0, self.cluster.polls
            return
        self.suspicious *= 2
        spinning = [warp for warp in self.cluster.warps if warp.wait is None and self._holds(warp) is None]
        repeats = bool(spinning) and all(self._repeats(warp) for warp in spinning)
        if (repeats or self._idle_for_too_long()) and self._let_go():
            self.idle_since, self.polls_before = 0, self.cluster.polls
            return
        if repeats:
            raise _Stuck("livelock: warps go round in loops that have no effect", "livelock")
        if self._idle_for_too_long():
            raise _Stuck(
                f"{self.idle_since} basic blocks with {self.polls} strong loads have run without effect, "
                f"more than max_idle_blocks = {self.options.max_idle_blocks} allows. A kernel that computes for "
                "so long needs a larger limit",
                "limit",
            )

    def _idle_for_too_long(self) -> bool:
        limit = self.options.max_idle_blocks
        if limit is None:
            return False
        spinning = sum(warp.wait is None for warp in self.cluster.warps)
        return self.idle_since + self.idle_blocks + _POLL * self.polls > limit * max(spinning, 1)

    def _repeats(self, warp: Warp) -> bool:
        """Whether a warp comes to a state in which it was before, and nothing happens; which is a turn of it."""
        before = self.cluster.changes()
        state = warp.code.snapshot()
        tables, polls, blocks = self.cluster.barriers.tables, self.cluster.polls, 0
        clock = tables.clock
        try:
            while blocks < _LONGEST_LOOP:
                blocks += 1
                self._resume(warp, 1)
                if warp.wait is not None or warp not in self.cluster.running or self.cluster.changes() != before:
                    return False
                if tables.clock != clock:  # it looks at the clock, which goes on: it may wait for a time
                    return False
                if self.cluster.polls > polls + _LONGEST_POLLING:
                    return False
                if state == warp.code.snapshot():
                    return True
            return False
        finally:
            if self.options.stepped is not None:
                self.options.stepped(Step(self.cluster.index, "w", warp.number, blocks), self._came_to(warp))

    def _time_out(self) -> bool:
        """All suspended try_waits reach their time limit."""
        waiting = [warp for warp in self.cluster.warps if warp.wait is not None and warp.wait.may_time_out]
        for warp in waiting:
            warp.timed_out = True
        return bool(waiting)

    def _check_limit(self) -> None:
        limit = self.options.max_warp_instructions
        self.rounds += 1
        if limit is None or not (self.long_slice or self.rounds % _LIMIT_CHECK == 0):
            return
        counters = Counters(self.execution.flow)
        counters.add(warp for cta in self.cluster.ctas for warp in cta.warps)
        if counters.total > limit:
            raise _Stuck(
                f"more than max_warp_instructions = {limit} instructions in cluster {self.cluster.index}. A kernel "
                "that needs more needs a larger limit",
                "limit",
            )

    def hang(self) -> NoReturn:
        """Raises Hang: the cluster is stuck for ever."""
        why, kind = self.stuck.args
        raise self.standstill(f"cluster {self.cluster.index} hangs: {why}", kind)

    def standstill(self, message: str, kind: str = "hang") -> Hang:
        """Where all warps stand, and what they wait for."""
        lines = [self._describe(warp) for warp in self.cluster.warps]
        exited = [w.label for cta in self.cluster.ctas for w in cta.warps if w not in self.cluster.running]
        if exited:
            lines.append(f"exited: {', '.join(exited)}")
        pending = self.cluster.engine.pending()
        lines.append("pending asynchronous work: " + ("; ".join(pending) or "none"))
        barriers = [self.cluster.barriers.describe(barrier.address) for barrier in self.cluster.barriers]
        lines.extend(barriers)
        lines += [
            f"cluster {other.cluster.index} waits, too: {other._describe(other.cluster.warps[0])}"
            for other in self.others[:_MOST_OTHERS]
        ]
        if len(self.others) > _MOST_OTHERS:
            lines.append(f"and {len(self.others) - _MOST_OTHERS} other clusters")
        if self.later:
            lines.append(f"{self.later} clusters have not started: {self.most} are resident at most at the same time")
        return Hang(message, "\n".join(lines)).know(
            kind, waits=tuple(self._waiting(warp) for warp in self.cluster.warps), exited=tuple(exited),
            pending=tuple(pending), barriers=self.cluster.barriers.states(), past=self.cluster.past(),
        )

    def _waiting(self, warp: Warp) -> WaitState:
        instruction = self._standing_at(warp)
        wait = warp.wait
        if wait is None or is_over(wait):
            return WaitState(warp.label, instruction, text="can run")
        state = WaitState(warp.label, instruction, wait.kind, wait.describe())
        if isinstance(wait, PhaseWait):
            barrier = self.cluster.barriers.state(wait.address)
            return dataclasses.replace(state, barrier=barrier, state=wait.state, by_parity=wait.parity)
        if isinstance(wait, NamedWait):
            return dataclasses.replace(state, missing=tuple(wait.barrier.missing()))
        return state

    def _describe(self, warp: Warp) -> str:
        return f"{warp.label} {warp.wait.describe() if warp.wait is not None else 'can run'}{self._where(warp)}"

    def _came_to(self, warp: Warp) -> str:
        """End of a turn of a warp, in words."""
        if warp not in self.cluster.running:
            return f"{warp.label} runs to its end"
        if warp.wait is not None:
            return f"{warp.label} runs until it {warp.wait.describe()}{self._where(warp)}"
        return f"{warp.label} runs{self._where(warp).replace(' at ', ' up to ', 1)}"

    def _where(self, warp: Warp) -> str:
        instruction = self._standing_at(warp)
        where = ""
        if instruction is not None:
            where = f" at PTX line {instruction.line} `{instruction.text}`"
            where += f" ({instruction.source})" if instruction.source else ""
        return where

    def _standing_at(self, warp: Warp) -> Instruction | None:
        """Where a warp stands that is not running; None: it has not begun, or has ended."""
        blocks = self.execution.flow.blocks
        if warp.code is None or warp.code.standing >= len(blocks):
            return None
        return self.execution.kernel.instructions[blocks[warp.code.standing].start]
