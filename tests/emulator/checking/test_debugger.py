"""A launch step by step: stops, what is seen there, and that a schedule is the same with a debugger as without."""

from __future__ import annotations

import dataclasses
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.checking.debugger import Debugger
from cute_kernels.emulator.checking.mutation.target import SCHEDULES
from cute_kernels.emulator.machine.bytecode.execution import translate
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.machine.launch.scheduler import Scheduler
from cute_kernels.emulator.machine.units.sm import Warp
from cute_kernels.emulator.programs.capturing import capture
from cute_kernels.emulator.programs.program_run import run_program
from cute_kernels.emulator.programs.recorded import RecordedLaunch, Recorder, Replay
from tests.emulator.checking.mutation.targets import TARGETS
from tests.emulator.checking.planted import EXAMPLE, planted
from tests.emulator.checking.test_reduction import HEAD, write

GEMM = EXAMPLE.with_name("relu_gemm.py")


def recorded(program: Path | str, *arguments: str, arch: str = "sm_90a") -> list[RecordedLaunch]:
    """The launches of a program, also of one that fails."""
    recorder = Recorder()
    with capture(arch, Options(), recorder=recorder) as session:
        run_program(str(program), arguments, session, lambda *_: None)
    return recorder.launches


@pytest.fixture(scope="module")
def launch() -> RecordedLaunch:
    return recorded(EXAMPLE)[0]


COUNT = HEAD + """
.reg .b64 %rd<3>; .reg .b32 %r<5>; .reg .f32 %f<3>; .reg .pred %p<2>;
.shared .align 4 .b32 cell[32];
ld.param.u64 %rd1, [p];
mov.u32 %r1, %tid.x;
mov.u32 %r2, 0;
mov.u32 %r3, cell;
shl.b32 %r4, %r1, 2;
add.u32 %r3, %r3, %r4;
LOOP:
add.u32 %r2, %r2, 1;
st.shared.u32 [%r3], %r2;
setp.lt.u32 %p1, %r2, 3;
@%p1 bra LOOP;
cvt.rn.f32.u32 %f1, %r1;
mul.f32 %f2, %f1, 0f3F000000;
cvt.rzi.u32.f32 %r2, %f2;
setp.eq.u32 %p1, %r1, 1;
@%p1 st.global.u32 [%rd1], %r2;
ret;
}
"""
"""Each lane counts to three in shared memory; halves its number; lane 1 writes that. PTX line 15 is the add."""


@pytest.fixture
def count(tmp_path: Path) -> RecordedLaunch:
    return recorded(*write(tmp_path, COUNT, 1, 32))[0]


def test_breakpoints_steps_registers_and_shared_memory(count: RecordedLaunch) -> None:
    """Values at each stop are those that the text says."""
    with Debugger(count) as debugger:
        made = debugger.break_at(15)
        for turn in range(3):
            stop = debugger.go()
            assert (stop.reason, stop.warp, stop.instruction.line) == ("breakpoint 1", "0.0.0", 15)
            registers = debugger.registers()
            assert (registers["%r2"] == turn).all() and (registers["%r1"] == np.arange(32)).all()
            written = debugger.shared("cell").view(np.uint32)
            assert (written == turn).all() and len(written) == 32
        assert debugger.step().instruction.line == 16 and (debugger.registers("", "%r2")["%r2"] == 3).all()
        assert str(debugger.step("0", 2)) == "step: warp 0.0.0 at PTX line 18 `@%p1 bra LOOP`"
        assert not debugger.registers("", "%p1")["%p1"].any()
        debugger.delete(made.number)
        debugger.break_at(21)
        debugger.go()
        floats = debugger.registers("", "%f2")["%f2"].view(np.float32)
        assert (floats == np.arange(32) / 2).all()
        with pytest.raises(ValueError, match="register %f1: nothing from here on reads it"):
            debugger.registers("", "%f1")
        assert debugger.go().reason == "end" and debugger.go().reason == "end"
        assert debugger.outcome.memory[0].view(np.uint32)[0] == 0
        assert debugger.outcome.report.warp_instructions == 6 + 3 * 4 + 6
        debugger.restart()
        assert debugger.step("0").instruction.line == 9
        with pytest.raises(ValueError, match=r"warp '7' does not run; running are 0\.0\.0"):
            debugger.step("7")


@pytest.mark.parametrize(
    ("place", "warp", "words"),
    [
        ("1", "", "PTX line 1 has no instruction; those of the kernel are within lines 8 to 24"),
        ("k.cu:3", "", "the kernel has lines of no file: its PTX has no .loc"),
        ("here", "", "must be a line of the PTX or FILE:LINE"),
        ("15", "x", "must be WARP, CTA.WARP or CLUSTER.CTA.WARP"),
    ],
)
def test_places_that_are_none(place: str, warp: str, words: str, count: RecordedLaunch) -> None:
    with Debugger(count) as debugger, pytest.raises(ValueError, match=re.escape(words)):
        debugger.break_at(place, warp)


def test_source_lines_of_one_warp(launch: RecordedLaunch) -> None:
    """A breakpoint of a source line and one warp stops no other, and the stop names the line."""
    line = next(n for n, text in enumerate(EXAMPLE.read_text().splitlines(), start=1) if "mbarrier_wait(full" in text)
    with Debugger(launch) as debugger:
        debugger.break_at(f"bias_add.py:{line}", "1.0.2")
        stop = debugger.go()
        assert stop.warp == "1.0.2" and stop.instruction.source.endswith(f"bias_add.py:{line}")
        (place, *_) = debugger.backtrace()
        assert (place.source.line, place.source.function) == (line, "add_bias")
        assert "mbarrier_wait(full" in place.source.text
        waiting = debugger.waiting()
        assert {"can run"} < {each.what for each in waiting.waiting}
        assert any(re.match(r"full\[0\]: mbarrier at .* 1 of 1 arrivals", each) for each in debugger.barriers())
        with pytest.raises(ValueError, match="no instruction was made of line 1 of bias_add.py; lines 14, "):
            debugger.break_at("bias_add.py:1")


@pytest.mark.parametrize(("program", "arch"), [(EXAMPLE, "sm_90a"), (EXAMPLE, "sm_100a"), (GEMM, "sm_90a")])
def test_the_schedule_is_that_of_a_run_without_a_debugger(program: Path, arch: str) -> None:
    """Every turn and every completion is the same, and so is the memory, with warps that stop all the time."""
    one = recorded(program, arch=arch)[0]
    random = Schedule(3, "random", "random", spurious_timeouts=True)
    for schedule in (Schedule(), random, Schedule(5, "lazy", "starve")):
        alone_took, took = [], []
        alone = Replay(one).run(schedule.options(stepped=lambda step, _, to=alone_took: to.append(step)))
        with Debugger(one, schedule, stepped=lambda step, _, to=took: to.append(step)) as debugger:
            debugger.break_at(debugger.kernel.instructions[0].line)
            stops = 0
            while debugger.go().reason != "end":
                stops += 1
        assert stops >= one.warps and took == alone_took
        assert all(np.array_equal(a, b) for a, b in zip(alone.memory, debugger.outcome.memory))
        assert alone.report.warp_instructions == debugger.outcome.report.warp_instructions


def test_without_a_debugger_nothing_is_different(launch: RecordedLaunch) -> None:
    """Breakpoints are in code of their own, which other launches of the same PTX do not execute."""
    shape = launch.launch.block
    before = translate(launch.launch.ptx, launch.launch.kernel_name, shape)
    code = before.bytecode._arrays[0].copy()
    with Debugger(launch) as debugger:
        debugger.step("0.0.0", 3)
        after = translate(launch.launch.ptx, launch.launch.kernel_name, shape)
        assert after is before and np.array_equal(after.bytecode._arrays[0], code)
        assert len(debugger.warp().code.launch.flow.blocks) > 2 * len(before.flow.blocks)


def test_a_fault_can_be_looked_at(tmp_path: Path) -> None:
    """The warp that is at fault stands at the instruction that is reported, with its registers."""
    one = recorded(planted("out of bounds", tmp_path))[0]
    with Debugger(one) as debugger:
        stop = debugger.go()
        assert stop.reason == "fault" and stop.error.kind == "out-of-bounds"
        assert stop.instruction.line == stop.error.ptx_line
        address = next(each for each in re.findall(r"%rd\d+", stop.instruction.text))
        assert debugger.registers("", address)[address] is not None


def test_a_hang_says_who_waits(tmp_path: Path) -> None:
    one = recorded(planted("no arrival", tmp_path))[0]
    with Debugger(one) as debugger:
        assert debugger.go().error.kind == "hang"
        assert "waits for phase 0 (parity 0) of empty[0]" in [each.what for each in debugger.waiting().waiting]


def test_an_interrupt_stops_a_launch(tmp_path: Path) -> None:
    """Ctrl-C, here of a timer, stops a kernel that goes round for ever."""
    ptx = COUNT.replace("@%p1 bra LOOP", "bra LOOP")
    one = dataclasses.replace(recorded(*write(tmp_path, COUNT, 1, 32))[0])
    one = dataclasses.replace(one, launch=dataclasses.replace(one.launch, ptx=ptx))
    with Debugger(one, max_idle_blocks=None, max_warp_instructions=None) as debugger:
        timer = threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
        timer.start()
        assert debugger.go().reason == "interrupt"
        assert debugger.step().reason == "step"


class Everywhere:
    """A debugger that stops in front of every instruction, and goes on."""

    def __init__(self) -> None:
        self.stopped = 0

    def begins(self, scheduler: Scheduler) -> None:
        blocks = scheduler.execution.flow.blocks
        assert all(block.end == block.start + 1 for block in blocks)
        scheduler.execution.bytecode.stop_at(range(len(blocks)))

    def stops(self, warp: Warp) -> None:
        self.stopped += 1


@pytest.mark.parametrize("name", ["block-scaled", "sm100", "sm90-registers", "gemm-sm80"])
def test_kernels_of_all_architectures_are_executed_instruction_by_instruction(name: str) -> None:
    """Tensor memory, WGMMA with registers in flight and mma.sync give the same result and count."""
    target = TARGETS[name]
    options = SCHEDULES["random"]
    debugger = Everywhere()
    found = target.run(target.ptx, dataclasses.replace(options, debugger=debugger))
    assert found == target.run(target.ptx, options) and not found.difference
    assert debugger.stopped >= found.warp_instructions
