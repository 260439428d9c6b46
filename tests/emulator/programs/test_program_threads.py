"""Threads of a program under `capture`: what they launch executes and counts; other threads stay outside."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass.cute.runtime import from_dlpack

from cute_kernels.emulator.programs import capture
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


def test_memory_of_several_threads_is_known_while_they_make_and_free_it() -> None:
    with capture("sm_90a") as session:
        kept: list[torch.Tensor] = []

        def work(number: int) -> None:
            for i in range(200):
                tensor = torch.full((64,), float(number), device="cuda")
                assert (tensor + i).sum().item() == 64 * (number + i)
            kept.append(tensor)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            regions = sorted(session.device.regions())
            assert all(a + n < b for (a, n), (b, _) in zip(regions, regions[1:]))
        for thread in threads:
            thread.join()
        assert len(kept) == 4
        assert {(tensor.data_ptr(), 256) for tensor in kept} <= set(session.device.regions())
