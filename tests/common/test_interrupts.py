"""Signals at any moment of a launch end it as what their handler raises, and nothing else; the next launch is right."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cutlass.cute as cute
import numpy as np
import pytest
import torch

from cute_kernels import Sm90PatchEmbedConfig, Sm100PatchEmbedConfig, patch_embed
from cute_kernels.common import interrupts
from cute_kernels.common.executors import Workers
from cute_kernels.dsl import compiling
from cute_kernels.emulator import Options, default_options
from cute_kernels.emulator.programs import capture
from cute_kernels.testing.ptx import aligned, module
from tests.common import executor_tasks
from tests.emulator.machine.launch.test_cluster_processes import children
from tests.emulator.ptx_launch import launch
from tests.nightly import crossed, examples
from tests.processes import run_python


class Late(Exception):
    """What a handler raises that is no KeyboardInterrupt."""


@pytest.fixture
def alarms() -> Iterator[list[type[BaseException]]]:
    """SIGALRM raises the one type in the list; how often it did is its length less one."""
    raised: list[type[BaseException]] = [KeyboardInterrupt]

    def handler(*_: object) -> None:
        raised.append(raised[0])
        raise raised[0]

    before, callbacks = signal.signal(signal.SIGALRM, handler), gc.callbacks[:]
    gc.callbacks.clear()  # of hypothesis: what a handler raises in one of them, Python prints and drops
    yield raised
    gc.callbacks[:] = callbacks
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def operands() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    rows, weight = torch.randn(2, 64, 256).to(torch.float8_e4m3fn), torch.randn(256, 256).to(torch.float8_e4m3fn)
    return rows, weight, torch.randn(256), torch.randn(64, 256)


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(detectors=False),
        Options(strict=True, completion="random", interleave="random", seed=3),
        Options(counters=True),
        Options(processes=2),
    ],
    ids=["detectors", "none", "strict and random", "counters", "processes"],
)
@pytest.mark.parametrize(
    ("raises", "config"),
    crossed([KeyboardInterrupt, Late], [Sm90PatchEmbedConfig(), Sm100PatchEmbedConfig(epilogue_warps=4)]),
)
def test_random_moments(options, config, raises, alarms) -> None:
    given, before = operands(), children()

    def run() -> torch.Tensor:
        with default_options(options):
            return patch_embed(*given, scale_a=1.0, scale_b=1.0, config=config, backend="emulator")

    expected = run().view(torch.int16)
    shortest, generator = math.inf, random.Random(7)
    raised, wanted, alarms[0] = 0, examples(5, 100), raises
    for _ in range(20 * wanted):
        if raised == wanted:
            break
        count, start = len(alarms), time.perf_counter()
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-3, min(shortest, 60)))
                result = run()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except raises:
            raised += 1
        else:
            shortest = min(shortest, time.perf_counter() - start)  # an alarm that came too late comes earlier next time
            assert len(alarms) == count, "an interrupt was lost"
            assert torch.equal(result.view(torch.int16), expected)
        assert torch.equal(run().view(torch.int16), expected)  # the next launch
    assert raised == wanted
    assert children() <= before  # no process is left, no zombie either
    assert not interrupts.noted and not interrupts._replaced


ENDLESS = """
    mov.u32 %r1, 0;
LOOP:
    mad.lo.u32 %r1, %r1, 1664525, 1013904223;
    setp.ne.u32 %p1, %r1, 12345;
    @%p1 bra LOOP;
    mov.u32 %r1, 0;
    bra LOOP;
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loop_that_never_calls_python(alarms, processes) -> None:
    """The core alone runs, for ever."""
    options = Options(processes=processes, max_idle_blocks=None, max_warp_instructions=None)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        launch(module(ENDLESS, parameters=1), aligned(np.zeros(4, np.int32)), grid=(2, 1, 1), options=options)


@pytest.mark.parametrize("how", ["compiled", "called", "of the package"])
@pytest.mark.parametrize("raises", [KeyboardInterrupt, Late])
def test_a_compilation_is_left_at_its_end(how: str, raises: type[BaseException], alarms: list) -> None:
    """In its middle CuTe DSL aborts the process, or reports an internal error of its own."""
    steps: list[str] = []

    @cute.kernel
    def empty() -> None:
        steps.append("traced")

    @cute.jit
    def call() -> None:
        steps.append("signal")
        signal.raise_signal(signal.SIGALRM)
        empty().launch(grid=(1, 1, 1), block=(32, 1, 1))

    def once() -> None:
        if how == "of the package":
            assert compiling.ptx(compiling.compile_function(call, (), "sm_90a"))
            return
        with capture("sm_90a") as session:
            call() if how == "called" else cute.compile(call)()
        assert len(session.launches) == 1

    alarms[0] = raises
    with pytest.raises(raises):
        once()
    assert steps == ["signal", "traced"] and len(alarms) == 2
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    once()
    signal.signal(signal.SIGALRM, before)


def test_a_handler_that_raises_nothing_runs_and_the_launch_goes_on() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    try:
        given = operands()
        config = Sm90PatchEmbedConfig()
        expected = patch_embed(*given, scale_a=1.0, scale_b=1.0, config=config, backend="emulator")
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
        got = patch_embed(*given, scale_a=1.0, scale_b=1.0, config=config, backend="emulator")
        signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert torch.equal(got, expected) and set(seen) == {signal.SIGALRM}


def test_signals_in_their_order_at_the_end_of_the_outermost() -> None:
    seen: list[int] = []
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, lambda number, frame: seen.append(number)) for number in numbers]
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        with interrupts.deferred():
            with interrupts.deferred():
                os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not seen
            interrupts.check()
            assert seen == [signal.SIGUSR2, signal.SIGUSR1]
            os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR1]
        assert [signal.getsignal(number) for number in numbers] == handlers
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


@pytest.fixture
def handlers() -> Iterator[None]:
    """SIGUSR1, SIGUSR2 and SIGINT have the handlers of before again."""
    numbers = signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("checked", [True, False], ids=["in a launch", "at its end"])
def test_the_second_handler_runs_though_the_first_raises(checked) -> None:
    seen: list[int] = []

    def raising(*_: object) -> None:
        raise Late

    signal.signal(signal.SIGUSR1, raising)
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    with pytest.raises(Late), interrupts.deferred():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        if checked:
            interrupts.check()
    assert seen == [signal.SIGUSR2] and not interrupts.noted and not interrupts._replaced


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("checked", [True, False], ids=["in a launch", "at its end"])
def test_what_a_handler_installs_stays(checked) -> None:
    """The first interrupt asks a program to finish, the second one ends it."""
    found: list[object] = []

    def finish(*_: object) -> None:
        found.append(signal.getsignal(signal.SIGINT))
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, finish)
    with interrupts.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        if checked:
            interrupts.check()
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
    assert found == [finish] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("handlers")
def test_a_handler_that_leaves_the_next_signal_to_the_system() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: signal.signal(signal.SIGUSR2, signal.SIG_IGN))
    signal.signal(signal.SIGUSR2, lambda *_: pytest.fail("is ignored by now"))
    with interrupts.deferred():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


@pytest.mark.usefixtures("handlers")
def test_a_process_that_another_thread_forks_has_the_handlers() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(42))
    statuses: list[int] = []

    def fork() -> None:
        process = os.fork()
        if process == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(bool(interrupts.noted))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))

    with interrupts.deferred():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert statuses == [42]


def test_another_thread_defers_nothing() -> None:
    handler = signal.getsignal(signal.SIGINT)
    found: list[object] = []

    def work() -> None:
        with interrupts.deferred():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [handler] and signal.getsignal(signal.SIGINT) is handler


# --- programs --------------------------------------------------------------------------------------------------------

PROGRAM = """
import collections, os, random, signal, sys, threading
import cutlass, cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def spin(x: cute.Tensor, turns: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(turns, unroll=1):
        x[thread] = x[thread] * 3 + 1
        cute.arch.sync_threads()

@cute.jit
def call(x: cute.Tensor, turns: cutlass.Int32):
    spin(x, turns).launch(grid=(1, 1, 1), block=(64, 1, 1))

x = torch.zeros(64, dtype=torch.int32, device="cuda")
run = cute.compile(call, from_dlpack(x), 1)

def right(turns):
    x.zero_()
    run(from_dlpack(x), turns)
    value = 0
    for _ in range(turns):
        value = (value * 3 + 1) % 2**32
    return bool((x.cpu().to(torch.int64) % 2**32 == value).all())
"""
MOMENTS = PROGRAM + """
def alarm(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, alarm)
assert right(5)
outcomes, generator = collections.Counter(), random.Random(1)
for _ in range(int(sys.argv[1])):
    try:
        signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.001, 0.1))
        run(from_dlpack(x), 1 << 30)
        outcomes["lost"] += 1
    except KeyboardInterrupt:
        outcomes["interrupted"] += 1
    except BaseException as error:
        outcomes[type(error).__name__] += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    outcomes["right" if right(3) else "wrong"] += 1
print(dict(outcomes))
"""
THREADS = PROGRAM + """
import time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
seen, ended = collections.Counter(), threading.Event()
def work(turns):
    y = torch.zeros(64, dtype=torch.int32, device="cuda")
    while not ended.is_set():
        try:
            run(from_dlpack(y), turns)
            seen["thread", "right"] += 1
        except BaseException as error:
            seen["thread", type(error).__name__] += 1
def interrupted(count, longest, turns):
    for _ in range(count):
        threading.Timer(longest / 2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            run(from_dlpack(x), turns)
        except BaseException as error:
            seen["main", type(error).__name__] += 1
threads = [threading.Thread(target=work, args=(500,)) for _ in range(3)]
for thread in threads: thread.start()
interrupted(8, 0.1, 1 << 30)
ended.set()
for thread in threads: thread.join()
threading.Thread(target=run, args=(from_dlpack(torch.zeros_like(x)), 1 << 30), daemon=True).start()
time.sleep(0.2)
interrupted(1, 0.2, 3)  # behind that one, which never ends
print({key: seen[key] for key in seen if key != ("thread", "right")}, flush=True)
os._exit(0)
"""
ENDED = PROGRAM + """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
def test_spin():
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    run(from_dlpack(x), 1 << 30)
if __name__ == "__main__":
    test_spin()
"""


def test_random_moments_of_a_program(tmp_path: Path) -> None:
    (tmp_path / "moments.py").write_text(MOMENTS)
    count = examples(8, 200)
    words = ["--arch", "sm_90a", "--quiet", str(tmp_path / "moments.py"), str(count)]
    done = run_python("-m", "cute_kernels", "emulate", *words)
    assert done.returncode == 0, done.stderr
    assert f"{{'interrupted': {count}, 'right': {count}}}" in done.stdout


def test_an_interrupt_is_of_the_main_thread_alone(tmp_path: Path) -> None:
    """Other threads launch the same function, and the main thread does not wait for their launches."""
    (tmp_path / "threads.py").write_text(THREADS)
    words = ["emulate", "--arch", "sm_90a", "--quiet", str(tmp_path / "threads.py")]
    done = run_python("-m", "cute_kernels", *words, timeout=60)
    assert done.stdout == "{('main', 'KeyboardInterrupt'): 9}\n", done.stdout + done.stderr


@pytest.mark.parametrize("command", ["emulate", "check", "mutate"])
def test_commands_end_with_130(command: str, tmp_path: Path) -> None:
    (tmp_path / "ended.py").write_text(ENDED)
    done = run_python("-m", "cute_kernels", command, "--arch", "sm_90a", str(tmp_path / "ended.py"), timeout=120)
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr and "error" not in done.stdout and "Traceback" not in done.stderr


def test_an_interrupt_of_the_main_process_alone_ends_its_workers(tmp_path: Path, alarms: list) -> None:
    """As `kill -INT` sends it, and not the terminal, which interrupts the workers too."""
    before, alarms[0] = children(), Late
    with pytest.raises(Late), Workers(str, (), jobs=2) as workers:
        results = workers.each(executor_tasks.waits, [(str(tmp_path / "waits"),)])
        timer = threading.Thread(target=_alarm_when, args=(tmp_path / "waits",))
        timer.start()
        next(results)
    timer.join()
    assert len(children() - before) <= 1  # the tracker of multiprocessing's resources, which serves all pools


def _alarm_when(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGALRM)


CAPTURED = """
import pytest
from cute_kernels.emulator.programs import capturing
_session = capturing.capture('sm_90a')
_session.__enter__()
"""


def pytest_run(test: Path, *plugins: str) -> subprocess.CompletedProcess[str]:
    """With no other plugins: to import those of all packages takes longer than the test."""
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return run_python("-m", "pytest", "-q", *plugins, str(test), cwd=test.parent, env=environment)


def test_pytest_stops_with_2(tmp_path: Path) -> None:
    test = tmp_path / "test_ended.py"
    test.write_text(CAPTURED + ENDED + "\ndef test_never():\n    raise AssertionError('went on')\n")
    done = pytest_run(test)
    assert done.returncode == 2, done.stdout
    assert "KeyboardInterrupt" in done.stdout and "went on" not in done.stdout


def test_pytest_timeout_fails_one_test_and_the_next_one_runs(tmp_path: Path) -> None:
    test = tmp_path / "test_late.py"
    body = "@pytest.mark.timeout(0.3, method='signal')\ndef test_late():\n    run(from_dlpack(x), 1 << 30)\n"
    test.write_text(CAPTURED + PROGRAM + body + "def test_next():\n    assert right(3)\n")
    done = pytest_run(test, "-p", "pytest_timeout")
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout
    assert "Timeout" in done.stdout and "DSLCudaRuntimeError" not in done.stdout


