"""A recorded launch, run as far as one says: breakpoints, steps, and what registers and memories hold there.

``Debugger(recorder.launches[0])`` in a notebook, `cute_kernels.commands.debug` at a terminal::

    debugger = Debugger(recorded)
    debugger.break_at("kernel.py:42", warp="0.3")
    stop = debugger.go()
    print(stop, debugger.registers(stop.warp))

Kernels run one instruction after the other then, in the order that the schedule says; a launch without a debugger is
executed as if there were none.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.common.chips import chip_of
from cute_kernels.emulator.checking import inspection, watching
from cute_kernels.emulator.checking.provenance import Origin
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.machine.launch.scheduler import Scheduler
from cute_kernels.emulator.machine.units.sm import Warp
from cute_kernels.emulator.programs.recorded import Outcome, RecordedLaunch, Replay
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.emulator.reports.model import Diagnostic, Place

_LOOK = 0.1  # seconds
NONE_RUNS = "no warp runs: the launch has not begun, or is over"
_WARP = re.compile(r"(?:(?:(\d+)\.)?(\d+)\.)?(\d+)")


@dataclass(frozen=True)
class Breakpoint:
    """Where warps stop."""

    number: int  # from 1 on
    place: str  # as it was given
    instructions: tuple[int, ...]  # indices of those in front of which warps stop
    warp: str = ""  # the only one that does, or ""
    holds: Callable[[Warp], bool] = lambda warp: True  # its condition
    watch: watching.Watch | None = None  # what it stops behind a change of, in place of an instruction


@dataclass(frozen=True)
class Stop:
    """Where a launch stands."""

    # ``"breakpoint 1"``, ``"watchpoint 2: .."`` with the change, ``"step"``, ``"back"``, ``"interrupt"``, ``"exit"``
    # (of the warp that was to step), ``"fault"`` or ``"end"``
    reason: str
    warp: str = ""  # that stopped, as ``"CLUSTER.CTA.WARP"``; "" at the end
    instruction: Instruction | None = None  # that it executes next; None at the end
    error: EmulatorError | None = None  # what the emulator reports, of a fault

    def __str__(self) -> str:
        if self.instruction is None:
            return self.reason
        source = f" ({self.instruction.source})" if self.instruction.source else ""
        return f"{self.reason}: warp {self.warp} at PTX line {self.instruction.line} `{self.instruction.text}`{source}"


class _Abandoned(BaseException):
    """The launch is not to go on."""


class Debugger:
    """Runs one launch in a thread of its own, which stands still whenever a method returns; a context.

    Args:
        recorded: the launch, of a `Recorder`.
        schedule: under which it runs.
        options: further fields of `Options`.

    Attributes:
        breakpoints: by number.
        outcome: what the launch left, once it has ended without a fault.
    """

    def __init__(self, recorded: RecordedLaunch, schedule: Schedule | None = None, **options: Any) -> None:
        self.recorded = recorded
        self.breakpoints: dict[int, Breakpoint] = {}
        program = parse(recorded.launch.ptx)
        self.kernel, self._target = program.kernels[recorded.launch.kernel_name], program.target
        self._schedule = schedule or Schedule()
        self._making = functools.partial(self._schedule.options, **options)
        self._options = self._making(debugger=self)
        self._tile = functools.cache(functools.partial(inspection.find_tile, recorded.launch))  # watchpoints ask often
        self._offsets: dict[tuple[int, str], int] = {}
        self._numbers = 0
        self._error: BaseException | None = None
        self._stepping: Warp | None = None
        self._interrupted = False
        self._until: tuple[str, int] | None = None
        self._not_begun()

    def _not_begun(self) -> None:
        """State before the first instruction."""
        self.outcome: Outcome | None = None
        self._schedulers: dict[int, Scheduler] = {}
        self._stop: Stop | None = None
        self._went, self._stands = threading.Event(), threading.Event()
        self._abandoned = False
        self._seen: dict[Warp, tuple[int, int]] = {}
        self._completed: dict[int, watching.Completed] = {}
        self._ran: tuple[Warp, Instruction] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Debugger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- going on -------------------------------------------------------------------------------------------------

    def break_at(self, place: int | str, warp: str | int = "", condition: str = "") -> Breakpoint:
        """Has warps stop in front of what a line became.

        Args:
            place: a line of the PTX, or ``"FILE:LINE"`` of the source; of FILE the last parts of the path are enough.
            warp: the only one that stops: ``"WARP"`` of every CTA, ``"CTA.WARP"`` or ``"CLUSTER.CTA.WARP"``.
            condition: ``"%r5 == 3"``: only where that holds in a lane that executes.

        Raises:
            ValueError: nothing was made of the line, no such warp can be, or there is no such condition.
        """
        found = inspection.instructions_at(self.kernel.instructions, str(place))
        if warp != "" and _WARP.fullmatch(str(warp)) is None:
            raise ValueError(f"warp = {warp!r}: must be WARP, CTA.WARP or CLUSTER.CTA.WARP")
        fields = {"place": str(place), "instructions": found, "warp": str(warp)}
        if condition:
            fields |= {"place": f"{place} if {condition}", "holds": watching.condition(condition, self.kernel)}
        return self._added(**fields)

    def watch(self, what: str, warp: str = "") -> Breakpoint:
        """Stops behind each change of a value, with the operations that may have made it. ``what``: ``"register %r5"``,
        ``"tile NAME[INDEX]"``, ``"shared NAME"`` or ``"shared OFFSET COUNT"``, ``"memory ADDRESS COUNT"``, ``"barrier
        NAME"`` (its phase); ``warp``: whose, as in `step`; where it is "" that of the warp that stops. Raises
        ValueError: nothing that can be watched."""
        made = watching.watch(self, what, warp or (self._stop.warp if self._stop is not None else ""))
        return self._added(place=f"watch {what}", instructions=(), watch=made)

    def _added(self, **fields: Any) -> Breakpoint:
        self._numbers += 1
        made = self.breakpoints[self._numbers] = Breakpoint(self._numbers, **fields)
        self._place()
        return made

    def delete(self, number: int) -> None:
        """Removes a breakpoint. Raises ValueError: there is none with this number."""
        if number not in self.breakpoints:
            raise ValueError(f"breakpoint {number}: there are {', '.join(map(str, self.breakpoints)) or 'none'}")
        del self.breakpoints[number]
        self._place()

    def go(self) -> Stop:
        """Goes on, or begins, until a warp is at a breakpoint, there is a fault, or the launch ends.

        An interrupt (Ctrl-C, "stop" of a notebook) stops the next warp that executes anything.
        """
        if self._stop is not None and self._stop.reason in ("fault", "end"):
            return self._stop
        self._stands.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="debugged launch", daemon=True)
            self._thread.start()
        else:
            self._went.set()
        while True:
            try:
                if self._stands.wait(_LOOK):  # not for ever: a signal may have gone to the launch's thread
                    break
            except KeyboardInterrupt:
                self._interrupted = True
                self._place()
        self._stepping, self._interrupted = None, False
        if self._error is not None:
            raise self._error
        return self._stop

    def step(self, warp: str = "", count: int = 1) -> Stop:
        """Goes on until one warp has executed so many instructions; others run meanwhile where it is their turn.
        ``warp``: as ``"CLUSTER.CTA.WARP"``, or as in `break_at` of those that run; the one that stopped last if "";
        ``count``: instructions. Raises ValueError: no such warp runs."""
        if self._thread is None:
            first = self.break_at(self.kernel.instructions[0].line, warp)
            self.go()
            self.delete(first.number)
        chosen = self.warp(warp)
        stop = self._stop
        for _ in range(count):
            if stop.reason in ("exit", "fault", "end"):
                break
            self._stepping = chosen
            self._place()
            stop = self.go()
        self._place()
        return stop

    def back(self, warp: str = "", count: int = 1) -> Stop:
        """Goes back to before the last instructions of a warp: runs the launch again up to there. ``warp``: as in
        `step`; ``count``: instructions. Raises ValueError: it has not executed so many."""
        chosen = self.warp(warp)
        self._until = name_of(chosen), chosen.code.header.steps - count
        if self._until[1] < 0:
            raise ValueError(f"count = {count}: must be at most {chosen.code.header.steps}, as many as it has executed")
        self.restart()
        try:
            return self.go()
        finally:
            self._until = None
            self._place()

    def restart(self) -> None:
        """Goes back to before the first instruction; breakpoints stay."""
        self.close()
        self._not_begun()

    def close(self) -> None:
        """Abandons the launch."""
        self._abandoned = True
        self._went.set()
        if self._thread is not None:
            self._place()
            self._thread.join()

    # --- what is to be seen ---------------------------------------------------------------------------------------

    def warp(self, name: str | int = "") -> Warp:
        """A warp of a cluster that runs, or ran when there was a fault. ``name``: as in `step`; of several the first,
        and so where none has stopped. Raises ValueError: there is none."""
        name = str(name) or (self._stop.warp if self._stop is not None else "")
        for warp in self.warps():
            if not name or _means(name, warp):
                return warp
        if not self.warps():
            raise ValueError(NONE_RUNS)
        raise ValueError(f"warp {name!r} does not run; running are {', '.join(map(name_of, self.warps()))}")

    def warps(self) -> list[Warp]:
        """All that have begun and not exited, by cluster, CTA and number."""
        return [warp for scheduler in self._schedulers.values() for warp in scheduler.cluster.warps]

    def registers(self, warp: str = "", *names: str) -> dict[str, int | np.ndarray]:
        """Registers in front of the next instruction: what all lanes share as int, others as uint8 to uint64 [32].

        Args:
            warp: as in `step`.
            names: e.g. ``"%r5"``; those that are read later if none are given.

        Raises:
            ValueError: no such warp, or a register that is not read from here on: its value is not kept.
        """
        return inspection.registers(self.warp(warp), names or None)

    def shared(self, first: int | str = 0, nbytes: int | None = None, warp: str = "") -> np.ndarray:
        """Shared memory of the warp's CTA, uint8 [nbytes], from an offset or the beginning of a variable on."""
        return inspection.shared(self.recorded.launch, self.warp(warp), first, nbytes)

    def tile(self, name: str, index: tuple[int | slice, ...] = (), part: int = 0, warp: str = "") -> np.ndarray:
        """A tensor of the program in the shared or tensor memory of the warp's CTA, by its layout in the program.

        Args:
            name: its variable, or ``"NAME@PART[INDEX]"`` with both of the next: ``"a[0:8, :, 1]"``, ``"a[stage 1]"``.
            index: as of an array.
            part: which, of a tensor that begins where only the kernel knows: it may begin at every multiple of a step.
            warp: as in `step`.

        Raises:
            ValueError: no such tensor, or its layout is not known; PTX alone says nothing of tensors.
        """
        return inspection.tile(self._tile, self.warp(warp), name, index, part)

    def phase(self, barrier: str, warp: str = "") -> int:
        """Number of completed phases of an mbarrier in the warp's CTA, by its name or offset. Raises ValueError: there
        is none."""
        return inspection.phase(self.recorded.launch.ptx, self.warp(warp), barrier, self._offsets)

    def tensor(self, column: int = 0, columns: int = 512, warp: str = "") -> np.ndarray:
        """Tensor memory of the warp's CTA: uint32 [columns, 128 lanes]. Raises ValueError: the kernel is not for SM100
        and has none."""
        if not chip_of(self._target).tmem_columns:
            raise ValueError(f"tensor memory: a kernel for {self._target} has none")
        return self.warp(warp).cta.tmem.cells[column : column + columns].copy()

    def memory(self, address: int, nbytes: int) -> np.ndarray:
        """Global memory at an address, as registers and parameters have it: uint8 [nbytes]. Raises ValueError: it is
        not within one array of the device."""
        return inspection.device_memory(self.warp(), address, nbytes)

    def origin(self, array: str, byte: int | np.ndarray | RecordedLaunch) -> list[str]:
        """How a byte of an array of the device came about, by another run of the launch, a step per line.

        Args:
            array: parameter of the function that launches.
            byte: of the array; or what all of it must be, for the first element that is not (`Origin.first_wrong`); or
                another launch, for the first byte that differs, and how both came about (`Origin.against`).

        Raises:
            ValueError: no such array or byte, or nothing is wrong.
            EmulatorError: the launch is at fault.
        """
        found = Origin(self.recorded.launch, Replay(self.recorded), self._making)
        if isinstance(byte, RecordedLaunch):
            return found.against(array, Origin(byte.launch, Replay(byte), self._making))
        if not isinstance(byte, np.ndarray):
            return found.lines(array, byte)
        first, words = found.first_wrong(array, byte)
        return [words, *found.lines(array, first)]

    def barriers(self) -> list[str]:
        """States of all mbarriers of the clusters that run, in words."""
        found = []
        for cluster in (scheduler.cluster for scheduler in self._schedulers.values()):
            named = inspection.named_barriers(self.recorded.launch.ptx, cluster)
            texts = (cluster.barriers.describe(each.address) for each in cluster.barriers)
            found += [f"{name}: {text}" if name else text for (_, name), text in zip(named, texts)]
        return found

    def waiting(self) -> Diagnostic:
        """Who waits for whom in the cluster of the warp that stopped last, as in the report of a hang."""
        cluster = self.warp().cluster
        error = self._schedulers[cluster.index].standstill("")
        error.attach(self.recorded.launch.ptx, self.recorded.launch, self.recorded.number)
        return dataclasses.replace(
            diagnose(error), level="state", kind="waiting", sentence=f"cluster {cluster.index} stands still", help=""
        )

    def backtrace(self, warp: str = "") -> list[Place]:
        """Lines that the next instruction of a warp comes from: the innermost one, and the calls that it is inlined in.

        Without source lines, the PTX line alone.
        """
        return inspection.backtrace(self.recorded.launch.ptx, self.warp(warp))

    # --- in the thread of the launch ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.outcome = Replay(self.recorded).run(self._options, overlap=self._schedule.overlap)
            stop = Stop("end")
        except _Abandoned:
            return
        except EmulatorError as error:
            warp = next((warp for warp in self.warps() if warp.label == error.warp), None)
            place = inspection.standing(warp) if warp is not None else None
            stop = Stop("fault", name_of(warp) if warp is not None else "", place, error)
        except BaseException as error:  # noqa: BLE001 - `go` raises it
            self._error, stop = error, Stop("end")
        self._stop = stop
        self._stands.set()

    def begins(self, scheduler: Scheduler) -> None:
        """`Options.debugger`."""
        ended = [index for index, each in self._schedulers.items() if not each.cluster.running]
        for index in ended:
            del self._schedulers[index]
        self._schedulers[scheduler.cluster.index] = scheduler
        if any(each.watch is not None for each in self.breakpoints.values()):
            self._observe(scheduler)
        self._place()

    def _observe(self, scheduler: Scheduler) -> None:
        completed = self._completed[scheduler.cluster.index] = watching.Completed()
        scheduler.cluster.events.observe(completed)

    def _changes(self, warp: Warp) -> str:
        """The first watchpoint whose value has changed, and what may have changed it."""
        completed = []
        for index, scheduler in self._schedulers.items():
            if index not in self._completed:
                self._observe(scheduler)
            scheduler.cluster.events.read()
            completed += self._completed[index].take()
        ran, self._ran = self._ran, (warp, inspection.standing(warp))
        changes = {each.number: each.watch.change() for each in self.breakpoints.values() if each.watch is not None}
        number = next((number for number, change in changes.items() if change), None)
        if number is None:
            return ""
        if ran is not None:
            completed.insert(0, f"warp {name_of(ran[0])} at PTX line {ran[1].line} `{ran[1].text}`")
        return f"watchpoint {number}: {changes[number]}, by {' or '.join(completed) or 'another launch'}"

    def stops(self, warp: Warp) -> None:
        """`Options.debugger`."""
        if self._abandoned:
            raise _Abandoned
        at = (warp.code.standing, warp.code.header.steps)
        again, self._seen[warp] = self._seen.get(warp) == at, at  # it had to wait, and tries once more
        reason = self._reason(warp, again)
        if reason:
            self._stop = Stop(reason, name_of(warp), inspection.standing(warp))
            self._stands.set()
            self._went.wait()
            self._went.clear()
            if self._abandoned:
                raise _Abandoned

    def _reason(self, warp: Warp, again: bool) -> str:
        stepping = self._stepping
        if stepping is not None and stepping not in stepping.cluster.running:
            return "exit"
        if self._interrupted:
            return "interrupt"
        if self._until is not None:
            name, steps = self._until
            return "back" if name_of(warp) == name and warp.code.header.steps >= steps else ""
        if any(each.watch is not None for each in self.breakpoints.values()) and (changes := self._changes(warp)):
            return changes
        if again:
            return ""
        instruction = inspection.standing(warp).index
        for each in self.breakpoints.values():
            if instruction in each.instructions and (not each.warp or _means(each.warp, warp)):
                try:
                    if each.holds(warp):
                        return f"breakpoint {each.number}"
                except ValueError as error:
                    return f"breakpoint {each.number}, {error}"
        return "step" if warp is stepping else ""

    def _place(self) -> None:
        """Has warps stop where there are breakpoints, or everywhere."""
        everywhere = self._stepping is not None or self._interrupted or self._abandoned or self._until is not None
        everywhere |= any(each.watch is not None for each in self.breakpoints.values())
        wanted = {index for each in self.breakpoints.values() for index in each.instructions}
        for scheduler in list(self._schedulers.values()):
            blocks = scheduler.execution.flow.blocks
            scheduler.execution.bytecode.stop_at(
                [block.index for block in blocks if everywhere or block.start in wanted]
            )


def name_of(warp: Warp) -> str:
    """``"CLUSTER.CTA.WARP"``."""
    return f"{warp.cluster.index}.{warp.cta.rank}.{warp.index}"


def _means(name: str, warp: Warp) -> bool:
    """Whether a name of `Debugger.break_at` is that of a warp, or of several of which it is one."""
    found = _WARP.fullmatch(name)
    have = (warp.cluster.index, warp.cta.rank, warp.index)
    return found is not None and all(want is None or int(want) == own for want, own in zip(found.groups(), have))
