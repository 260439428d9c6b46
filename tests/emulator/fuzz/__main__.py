"""``python -m tests.emulator.fuzz --inputs N --seed S``: damaged programs, each of which has to end as it should.

Every program ends in success or in an error of the emulator that names what is wrong. Exits with 1 if one ends
otherwise: with another exception, a crash, or not at all. Programs run in processes of their own, so that a crash ends
one of them and is reported with its input, and a process has only so much memory. ``--first N --inputs 1`` repeats
input N of a seed, and ``--show`` prints its text.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import multiprocessing
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from cute_kernels.emulator.core.library import library
from tests.emulator.fuzz.damage import draw_program
from tests.emulator.fuzz.judge import Verdict, judge
from tests.emulator.fuzz.programs import programs

SECONDS = 60.0  # for one input, of which the slowest takes a few
MEMORY = 6 << 30  # bytes of address space that a process may have besides what it was given


@dataclass
class _Worker:
    """A process that judges every ``step``-th input from ``number`` on."""

    process: multiprocessing.Process
    connection: Connection
    number: int
    since: float


def _work(connection: Connection, seed: int, numbers: range) -> None:
    faulthandler.enable()
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for number in numbers:
        connection.send((number, judge(draw_program(seed, number))))


def _start(seed: int, numbers: range) -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_work, args=(theirs, seed, numbers), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours, numbers.start, time.monotonic())


def verdicts(
    seed: int, first: int, inputs: int, jobs: int = 1, seconds: float = SECONDS
) -> Iterator[tuple[int, Verdict]]:
    """(number, verdict) of each input, as they end."""
    programs()  # once, before processes are made
    stop = first + inputs
    workers = [_start(seed, range(first + i, stop, jobs)) for i in range(min(jobs, inputs))]
    while workers:
        ready = wait([worker.connection for worker in workers], timeout=1.0)
        for worker in list(workers):
            ended = None
            if worker.connection in ready:
                try:
                    number, verdict = worker.connection.recv()
                    yield number, verdict
                    worker.number, worker.since = number + jobs, time.monotonic()
                except EOFError:
                    worker.process.join()
                    if worker.number < stop:
                        ended = Verdict("crash", f"the process ended with status {worker.process.exitcode}")
                    else:
                        workers.remove(worker)
            elif time.monotonic() - worker.since > seconds:
                worker.process.kill()
                ended = Verdict("no end", f"no end after {seconds:.0f} s")
            if ended is not None:
                yield worker.number, ended
                workers.remove(worker)
                if worker.number + jobs < stop:
                    workers.append(_start(seed, range(worker.number + jobs, stop, jobs)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all of them (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of an input (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="print the inputs as well")
    options = parser.parse_args(arguments)
    for name in ("inputs", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1 is needed")
    library()  # compiled here where it has to be, not within the time of an input
    outcomes: collections.Counter[str] = collections.Counter()
    found: dict[tuple[str, str], list[int]] = {}
    start = time.monotonic()
    for number, verdict in verdicts(options.seed, options.first, options.inputs, options.jobs, options.seconds):
        outcomes[verdict.outcome] += 1
        if options.show:
            print(draw_program(options.seed, number), verdict, sep="\n")
        if verdict.finding:
            key = verdict.place, verdict.finding.split(":")[0]
            if key not in found:
                print(f"input {number} of seed {options.seed}: {verdict.finding} ({verdict.place})", flush=True)
            found.setdefault(key, []).append(number)
    seconds = time.monotonic() - start
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    print(f"{options.inputs} inputs of seed {options.seed} in {seconds:.0f} s: {counts}")
    for (place, kind), numbers in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(numbers)} times {kind} at {place}: inputs {', '.join(map(str, numbers[:8]))}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
