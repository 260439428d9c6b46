"""The limit on NumPy's BLAS threads, as OpenBLAS itself reports it, with several threads inside the block."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cute_kernels.emulator import blas


@pytest.fixture
def count():
    """The library's own thread count, set to 3 before the test and to what it was after it."""
    functions = blas._functions()
    assert functions is not None, "NumPy's wheels bundle OpenBLAS"
    read, write = functions
    before = read()
    write(3)
    assert read() == 3
    yield read
    write(before)


def test_the_limit_holds_inside_and_ends_with_an_exception_too(count):
    with pytest.raises(KeyError), blas.one_thread():
        assert count() == 1
        with blas.one_thread():
            assert count() == 1
        assert count() == 1
        raise KeyError
    assert count() == 3


def test_the_first_to_leave_does_not_lift_the_limit_of_the_others(count):
    """Two threads: first in, second in, first out, second out; the library is asked after each step."""
    steps = [threading.Event() for _ in range(4)]
    counts = []

    def first():
        with blas.one_thread():
            steps[0].set()
            steps[1].wait(10)
        counts.append(count())
        steps[2].set()

    def second():
        steps[0].wait(10)
        with blas.one_thread():
            steps[1].set()
            steps[2].wait(10)
            counts.append(count())
        counts.append(count())

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1, 1, 3]


def test_many_threads_come_and_go(count):
    def work(_: int) -> set[int]:
        seen = set()
        for _ in range(300):
            with blas.one_thread():
                seen.add(count())
        return seen

    with ThreadPoolExecutor(8) as pool:
        assert set().union(*pool.map(work, range(8))) == {1}
    assert count() == 3
