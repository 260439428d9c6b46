"""A process that is forked while another thread has a lock of the package is not kept waiting for that thread."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.common import executors, files, forks
from cute_kernels.config import GemmProblem
from cute_kernels.dsl import host_code, kernel_cache
from cute_kernels.emulator import TensorMap
from cute_kernels.emulator.programs import host
from cute_kernels.models.nn.positions import PositionCache
from cute_kernels.operations import compile
from cute_kernels.operations.gemm import GEMM
from cute_kernels.operations.runtime import tuned
from cute_kernels.operations.runtime.constants import DERIVED
from cute_kernels.plan import make_plan

CALLS, CACHE = GEMM.repeated, PositionCache()
GIVEN = torch.zeros(1, 8)


def record() -> None:
    with host.recording_runtime():
        pass


LOCKS = {
    "hooks of CuTe DSL": (host_code._HOOK_LOCK, record),
    "tuned configurations": (tuned._LOCK, lambda: tuned.lookup(None, None)),
    "states of workers": (executors._lock, lambda: executors._perform(Here(), lambda state: None, ())),
    "repeated calls": (CALLS._lock, CALLS.clear),
    "positions": (CACHE._lock, lambda: CACHE.table(GIVEN, (1, 1), (2, 2))),
    "what is made of constants": (DERIVED._lock, DERIVED.clear),
}
if hasattr(TensorMap.__dict__["box_bytes"], "lock"):  # before Python 3.12
    LOCKS["cached properties"] = (TensorMap.__dict__["box_bytes"].lock, lambda: tensor_map().box_bytes)


def tensor_map() -> TensorMap:
    return TensorMap(1 << 20, "u32", (32,), (), (32,), (1,))


class Here:
    """A state that is there."""

    def state(self) -> None:
        """Nothing."""


def forked(use: Any) -> int:
    """Exit status of a child that makes a call; that of a signal if it takes longer than five seconds."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            use()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
@pytest.mark.parametrize("name", LOCKS)
def test_a_child_is_not_kept_waiting(name: str) -> None:
    lock, use = LOCKS[name]
    use()
    held = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert forked(use) == 0
    thread.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_what_a_lock_guards_is_put_right_where_another_thread_had_it() -> None:
    """Not where the thread that forks has it, whose work goes on."""
    put_right = []
    lock = forks.lock(lambda: put_right.append(1))
    done, held = threading.Event(), threading.Event()

    def check(times: int) -> None:
        with lock:
            if len(put_right) != times:
                os.kill(os.getpid(), signal.SIGKILL)

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    with lock:
        assert forked(lambda: check(0)) == 0
    assert forked(lambda: check(0)) == 0
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert forked(lambda: check(1)) == 0
    done.set()
    thread.join()
    assert not put_right


class Meanwhile:
    """Of whose class one cannot ask without that another thread goes on importing its module."""

    def __init__(self, module: types.ModuleType) -> None:
        self._names = vars(module)

    @property
    def __class__(self) -> type:
        self._names[f"name{len(self._names)}"] = None
        return Meanwhile


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cached properties have no lock")
@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_locks_of_a_module_that_another_thread_is_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork while it is imported, and one when it has all its classes: the number of modules is the same."""
    module = types.ModuleType("cute_kernels.meanwhile")
    module.first = Meanwhile(module)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    assert forked(lambda: None) == 0
    assert not unraisable

    class Late:
        value = functools.cached_property(lambda self: 3)

    module.Late = Late
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with Late.value.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    status = forked(lambda: Late().value)
    done.set()
    thread.join()
    assert status == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_an_interrupt_ends_a_fork_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent has it, the child ends, and who holds the lock gives it back once."""
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    lock, held, done, errors = forks.awaited_lock(), threading.Event(), threading.Event(), []

    def hold() -> None:
        try:
            with lock:
                held.set()
                done.wait(10)
        except RuntimeError as error:  # released by somebody else
            errors.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    child = None
    with pytest.raises(KeyboardInterrupt):
        child = os.fork()
        if not child:
            os._exit(7)
        time.sleep(5)
    assert not done.is_set() and thread.is_alive()
    assert child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    done.set()
    thread.join()
    assert not errors and not lost
    assert forked(lambda: lock.acquire()) == 0
    assert lock.acquire(blocking=False)
    lock.release()


@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_a_fork_does_not_wait_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads, one waits for a kernel that another process compiles, and one forks meanwhile."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "_CACHE", {})
    monkeypatch.setattr(compile, "_BUILT", {})
    monkeypatch.setattr(kernel_cache, "LOCK_SECONDS", 20)
    plan, built, waits = make_plan(GemmProblem(64, 64, 64), arch="sm_90a"), threading.Event(), threading.Event()
    kernel = kernel_cache.CompiledKernel("k", "ptx", b"cubin", b"object", "prefix")
    monkeypatch.setattr(compile, "build", lambda _: built.set() or kernel)
    path = kernel_cache.entry_path(tmp_path, plan.kernel_key).with_suffix(".lock")
    monkeypatch.setattr(files.time, "sleep", lambda seconds, sleep=time.sleep: waits.set() or sleep(seconds))
    with files.locked(path):
        thread = threading.Thread(target=compile.compile_plan, args=(plan,))
        thread.start()
        waits.wait()
        assert forked(lambda: None) == 0 and not built.is_set()
    thread.join()
    assert built.is_set() and compile.compile_plan(plan).ptx == "ptx"


def test_a_forked_process_ends_with_its_parent() -> None:
    """Which a signal ends that it cannot answer."""
    reader, writer = os.pipe()
    parent = os.fork()
    if not parent:
        me = os.getpid()
        if not os.fork():
            forks.end_with_parent(me)
            os.write(writer, b"began")
            time.sleep(60)
        signal.pause()
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 5) == b"began"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert os.read(reader, 5) == b""  # the last end for writing is closed
    os.close(reader)


def test_what_the_main_thread_has_lives_on_in_a_process_that_another_thread_forks() -> None:
    read, write = os.pipe()
    parent, local = os.getpid(), threading.local()

    class Destroyed:
        def __del__(self) -> None:
            if os.getpid() != parent:
                os.write(write, b"!")

    def fork() -> None:
        process = os.fork()
        if process == 0:
            os.write(write, b".")
            os._exit(0)
        os.waitpid(process, 0)

    assert threading.current_thread() is threading.main_thread()
    local.of_this_thread = Destroyed()
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert os.read(read, 2) == b"."
