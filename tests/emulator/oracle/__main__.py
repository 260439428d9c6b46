"""``python -m tests.emulator.oracle``: freezes what the emulator does, or compares it with what was frozen.

``record`` compiles the kernels of the mutation targets, keeps their launches as data and what the emulator makes of
them, unchanged under every schedule and with mutants. ``compare`` runs the same again, and exits with 1 if anything
differs: a verdict, an error, its PTX line, a word of a report, a byte of a result, a count.

For each target ``data.tar.xz`` has the launch (``NAME.ptx``, shape, parameters, and buffers that are filled from a seed
by integer arithmetic, so that CuTe DSL, plans and kernels may change) and one line of ``NAME.jsonl`` for each run: the
unchanged kernel under every schedule, with counters, without detectors and without ``Options.strict``, and mutants of
it. A line says what was executed (a digest of the written bytes, instructions by role, bytes, MMAs, the work of every
unit) or what was reported: error, PTX line, place, words, and a digest of the whole message. The first hang of each
target is kept with all its lines. Under schedules that draw at random a mutant may be noticed elsewhere when the
emulator draws at other moments: then the error must still be one that the mutant explains.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import multiprocessing
import sys
import time

from tests.emulator.checking.mutation.targets import TARGETS
from tests.emulator.oracle import records
from tests.emulator.oracle.launches import ARCHIVE, write_archive
from tests.emulator.oracle.records import Record, differences, without_repeated_reports


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator.oracle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("--target", nargs="+", choices=TARGETS, help="default: all, or all that are recorded")
    parser.add_argument("--mutants", type=int, metavar="N", help="record at most N mutants of each (default: all)")
    parser.add_argument("--kept-launches", action="store_true", help="record anew what launches do that are frozen")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in ("mutants", "jobs"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    start = time.perf_counter()
    with processes(options.jobs) as pool:
        status = (record if options.action == "record" else compare)(pool, options)
    print(f"{time.perf_counter() - start:.0f} s with {options.jobs} processes")
    return status


def processes(jobs: int) -> concurrent.futures.Executor:
    """CuTe DSL has threads of its own, which a forked process would lose."""
    return concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


def record(pool: concurrent.futures.Executor, options: argparse.Namespace) -> int:
    """Writes the files of the targets."""
    targets = options.target or (records.names() if options.kept_launches else list(TARGETS))
    if not options.kept_launches:
        for launch, ptx in pool.map(records.freeze_target, targets):
            write_archive(ARCHIVE, {f"{launch.name}.ptx": ptx.encode()})
            Record(launch, {}).write()
    for name in targets:
        launch = records.read(name).launch
        runs = records.runs(launch, options.mutants)
        found = pool.map(functools.partial(records.outcome_now, name), runs)
        written = Record(launch, without_repeated_reports(zip(runs, found)))
        written.write()
        reported = sum("error" in entry for entry in written.outcomes.values())
        print(f"{name}: {len(runs)} runs, {reported} reported", flush=True)
    return 0


def compare(pool: concurrent.futures.Executor, options: argparse.Namespace) -> int:
    """Prints what differs from the files; 1 if anything does."""
    complaints = 0
    for name in options.target or records.names():
        expected = records.read(name).outcomes
        found = pool.map(functools.partial(records.outcome_now, name), expected)
        for (run, frozen), now in zip(expected.items(), found):
            if different := differences(frozen, now):
                complaints += 1
                print(f"{name}, {run.mutant or 'unchanged'}, {run.schedule}:")
                for what, (before, after) in different.items():
                    print(f"  {what}: recorded {before}\n  {' ' * len(what)}  found    {after}")
        print(f"{name}: {len(expected)} runs", flush=True)
    return int(complaints > 0)


if __name__ == "__main__":
    sys.exit(main())
