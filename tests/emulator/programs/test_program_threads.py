"""Threads of a program under `capture`: what they launch executes and counts; other threads stay outside."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass.cute.runtime import from_dlpack
from torch.multiprocessing.reductions import StorageWeakRef

from cute_kernels.common.chips import CHIPS
from cute_kernels.emulator.programs import capture
from cute_kernels.emulator.programs.cuda_tensors import CudaOnHost
from cute_kernels.emulator.programs.streams import Streams
from cute_kernels.emulator.programs.threads import ProgramThreads
from tests.emulator import exit_program


def arguments(offset: int) -> tuple:
    return cutlass.Int32(offset), cutlass.Int32(1), cuda.CUstream(0)


def test_launches_of_threads_execute_and_count(tmp_path) -> None:
    """Of a thread, of one that a thread starts, and of an executor's; with tensors that they make on the device."""
    with capture("sm_90a", keep_ptx=tmp_path) as session:
        y = torch.zeros(128, dtype=torch.int32, device="cuda")
        compiled = cutlass.cute.compile(exit_program.launch, from_dlpack(y), *arguments(0))
        made = []

        def fill(offset: int) -> str:
            compiled(from_dlpack(y), *arguments(offset))
            z = torch.zeros(32, dtype=torch.int32, device="cuda")
            compiled(from_dlpack(z), *arguments(0))
            made.append(z)
            return z.device.type

        def fill_two() -> None:
            inner = threading.Thread(target=fill, args=(32,))
            inner.start()
            fill(0)
            inner.join()

        outer = threading.Thread(target=fill_two)
        outer.start()
        with ThreadPoolExecutor(2) as executor:
            kinds = list(executor.map(fill, (64, 96)))
        outer.join()
        assert y.tolist() == [*range(32)] * 4 and all(z.tolist() == [*range(32)] for z in made)
        assert kinds == ["cuda", "cuda"] and len(session.launches) == 8 and not session.failures
    assert sorted(int(path.stem.split("-")[1]) for path in tmp_path.glob("*.json")) == list(range(1, 9))


def test_threads_of_others_stay_outside() -> None:
    go, found = threading.Event(), []

    def ask() -> None:
        go.wait(60)
        try:
            found.append(torch.zeros(1, device="cuda").device.type)
        except (AssertionError, RuntimeError) as error:  # no CUDA
            found.append(type(error).__name__)

    other = threading.Thread(target=ask)
    other.start()
    with capture("sm_90a") as session:
        go.set()
        other.join()
        assert not session.threads._threads
    assert torch.cuda.is_available() or found[0] != "cuda"


def test_the_end_waits_for_all_but_daemons() -> None:
    """As that of the interpreter: also for threads that start others, and for work that executors have not begun."""
    threads = ProgramThreads(contextlib.nullcontext)
    release, done = threading.Event(), []

    def work(name: str) -> None:
        release.wait(60)
        done.append(name)

    def start_another() -> None:
        release.wait(60)
        threading.Thread(target=work, args=("second",)).start()

    with threads.active():
        forever = threading.Event()
        threading.Thread(target=forever.wait, args=(60,), daemon=True).start()
        threading.Thread(target=start_another).start()
        executor = ThreadPoolExecutor(1)
        for name in ("a", "b"):
            executor.submit(work, name)
        threading.Timer(0.1, release.set).start()
        threads.wait()
        assert sorted(done) == ["a", "b", "second"]
        forever.set()
    assert threading.Thread.start.__qualname__ == "Thread.start"


def test_a_tensor_that_another_thread_makes_where_one_has_ended_stays_known() -> None:
    """Between finding that a storage has ended and forgetting it."""
    mode = CudaOnHost(CHIPS["sm_90a"], Streams())
    made = []

    class Ended:
        def expired(self) -> bool:
            mode._storages.clear()
            tensor = torch.ones(4)
            mode._storages[tensor.data_ptr()] = (StorageWeakRef(tensor.untyped_storage()), 16)
            mode._storages[16] = mode._storages[tensor.data_ptr()]
            made.append(tensor)
            return True

    mode._storages[16] = (Ended(), 8)
    assert list(mode.regions()) == []
    assert sorted(mode.regions()) == [(16, 16), (made[0].data_ptr(), 16)]
