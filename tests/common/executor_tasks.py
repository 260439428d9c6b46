"""Functions that worker processes run."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from cute_kernels.common.executors import Workers


class State:
    """What a worker prepares; says where it was made, and whether two tasks ever had it at once."""

    def __init__(self, offset: int) -> None:
        self.offset, self.process, self.made = offset, os.getpid(), os.urandom(8).hex()
        self.busy = threading.Lock()


def square(state: State, number: int) -> tuple[int, int, str]:
    """A result, the process that has it, and which state it used."""
    assert state.process == os.getpid()
    assert state.busy.acquire(blocking=False), "two tasks at once"
    try:
        time.sleep(0.002)  # so that others could begin
        return number * number + state.offset, os.getpid(), state.made
    finally:
        state.busy.release()


def dies_once(state: State, number: int, mark: str) -> int:
    """Every sixth task ends its process, unless it has done so before."""
    if number % 6 == 3 and not Path(f"{mark}-{number}").exists():
        Path(f"{mark}-{number}").touch()
        os._exit(1)
    return number + state.offset


def dies(state: State, number: int) -> int:
    """Task 3 ends its process."""
    if number == 3:
        os._exit(1)
    return number


def fails(state: State, number: int) -> int:
    """Task 3 raises."""
    if number == 3:
        raise KeyError("task 3")
    return number


def sleeps(state: State, number: int) -> None:
    """Says that it has begun, and does not end by itself in the time of a test."""
    os.write(1, f"task {number}\n".encode())  # print writes the end of the line by itself: another task may be between
    time.sleep(600)


def waits(_: object, mark: str) -> None:
    """Leaves a file when it has begun, and does not end."""
    Path(mark).touch()
    threading.Event().wait()


if __name__ == "__main__":
    with Workers(State, (0,), jobs=2) as workers:
        list(workers.each(sleeps, [(number,) for number in range(4)]))
