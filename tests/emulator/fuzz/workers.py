"""Processes that judge damaged programs, each of which a program may end or keep."""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from tests.emulator.fuzz.damage import draw_program
from tests.emulator.fuzz.judge import Verdict, judge
from tests.emulator.fuzz.programs import programs

INPUT_SECONDS = 60.0  # for one input, of which the slowest takes a few
MEMORY = 6 << 30  # bytes of address space that a process may have besides what it was given

Input = tuple[int, int]
"""Seed and number."""


@dataclass
class _Worker:
    """A process that judges these inputs; ``ended``: how many of them."""

    process: multiprocessing.Process
    connection: Connection
    inputs: Sequence[Input]
    since: float
    ended: int = 0


def _work(connection: Connection, inputs: Sequence[Input]) -> None:
    faulthandler.enable()
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for seed, number in inputs:
        connection.send(judge(draw_program(seed, number)))


def _start(inputs: Sequence[Input]) -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_work, args=(theirs, inputs), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours, inputs, time.monotonic())


def verdicts(
    inputs: Sequence[Input], jobs: int = 1, input_seconds: float = INPUT_SECONDS, seconds: float = math.inf
) -> Iterator[tuple[Input, Verdict]]:
    """What becomes of each input, as they end.

    Args:
        inputs: seeds and numbers of damaged programs.
        jobs: processes.
        input_seconds: limit of one input, which is a finding if it takes longer.
        seconds: limit of all, after which no more are judged.
    """
    programs()  # once, before processes are made
    deadline = time.monotonic() + seconds
    workers = [_start(inputs[i::jobs]) for i in range(min(jobs, len(inputs)))]
    try:
        while workers and time.monotonic() < deadline:
            ready = wait([worker.connection for worker in workers], timeout=min(1.0, seconds))
            for worker in list(workers):
                ended = None
                if worker.connection in ready:
                    ended = _received(worker)
                elif time.monotonic() - worker.since > input_seconds:
                    worker.process.kill()
                    ended = Verdict("no end", f"no end after {input_seconds:.0f} s")
                if ended is not None:
                    yield worker.inputs[worker.ended], ended
                    worker.ended, worker.since = worker.ended + 1, time.monotonic()
                if ended is not None and ended.outcome in ("crash", "no end") or _is_done(worker):
                    workers.remove(worker)
                    worker.process.join()
                    if not _is_done(worker):
                        workers.append(_start(worker.inputs[worker.ended :]))
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def _is_done(worker: _Worker) -> bool:
    return worker.ended == len(worker.inputs)


def _received(worker: _Worker) -> Verdict:
    try:
        return worker.connection.recv()
    except EOFError:
        worker.process.join()
        return Verdict("crash", f"the process ended with status {worker.process.exitcode}")
