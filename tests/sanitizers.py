"""Runs the emulator's tests with a core that AddressSanitizer and UndefinedBehaviorSanitizer watch.

`python -m tests.sanitizers --processes N [files, pytest's arguments]`; without files those of `WATCHED`. Prints a
line for each file as soon as its tests are over. Exits with 1 if a sanitizer reports anything, in whatever process, if
a test fails, or if tests are left when ``--seconds`` are over; with 2 where there is no compiler with sanitizers.
`python -m tests.sanitizers --module NAME ARGUMENTS` watches another command, `tests.emulator.fuzz` for one.

The interpreter that loads the core is not compiled with a sanitizer, so its run-time library has to be preloaded.
PYTHONMALLOC=malloc gives every small object, a ctypes array for one, an allocation of its own with guarded edges.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cute_kernels.emulator.core import build
from tests.sanitizer_record import RECORD

_HEADER = Path(__file__).with_name("sanitizer_reports.h")
WATCHED = ("tests/emulator", "tests/kernels")
"""Folders of tests whose programs the core executes."""

#: Of both sanitizers. A report ends the process, so that no test passes in spite of one.
FLAGS = (
    "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1 "
    f"-include {shlex.quote(str(_HEADER))}"
)
_REPORTS = "log_path={}:halt_on_error=1:abort_on_error=1:print_stacktrace=1"
# Memory that Python keeps until it exits is no leak of ours; allocations of terabytes have to fail as without ASan; and
# a test that has a process read a guarded page on purpose expects it to end by that signal.
_ADDRESS = "detect_leaks=0:allocator_may_return_null=1:handle_segv=0"
_PRELOADED = (("libasan.so", "libclang_rt.asan-x86_64.so", "libclang_rt.asan-aarch64.so"), ("libstdc++.so.6",))
_now = time.monotonic
_TEST_SECONDS = 3600  # limit of one test: watched code is several times slower


def runtime_libraries() -> list[str]:
    """What is loaded before the interpreter: ASan's run-time library, and the C++ library, whose exceptions it wraps.

    Raises:
        build.CoreNotBuilt: there is no compiler, or it has no AddressSanitizer.
    """
    command, found = build.compiler(), []
    for names in _PRELOADED:
        paths = [subprocess.check_output([*command, f"-print-file-name={name}"], text=True).strip() for name in names]
        present = [path for path in paths if os.path.isabs(path) and os.path.exists(path)]
        if not present:
            raise build.CoreNotBuilt(f"{command[0]} has none of {', '.join(names)}: install its sanitizers")
        found.append(present[0])
    return found


def environment(reports: str) -> dict[str, str]:
    """Of processes whose core is watched, and which write what is found to files of a folder."""
    path = f"{reports}/report"
    settings = _REPORTS.format(path)
    return {
        **os.environ,
        build.FLAGS_VARIABLE: FLAGS,
        "LD_PRELOAD": ":".join(runtime_libraries()),
        "ASAN_OPTIONS": f"{settings}:{_ADDRESS}",
        "UBSAN_OPTIONS": settings,
        "CUTE_KERNELS_SANITIZER_REPORTS": path,
        "PYTHONMALLOC": "malloc",
    }


class Tally:
    """What a run has said of its tests so far, by file.

    Args:
        record: what `tests.sanitizer_record` writes.
    """

    def __init__(self, record: Path) -> None:
        self._record, self._offset = record, 0
        self.left: dict[str, set[str]] = {}
        self.tests: collections.Counter[str] = collections.Counter()
        self.seconds: collections.Counter[str] = collections.Counter()
        self.failed: dict[str, list[str]] = {}

    def read(self) -> list[str]:
        """Reads what is new; the files that are complete since the last call."""
        if not self._record.exists():
            return []
        with self._record.open() as file:
            file.seek(self._offset)
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith("\n")]
        self._offset += sum(len(line.encode()) for line in lines)
        complete = []
        for entry in map(json.loads, lines):
            if "tests" in entry:
                self._collected(entry["tests"])
            elif self._ended(entry):
                complete.append(_file(entry["test"]))
        return complete

    def _collected(self, tests: list[str]) -> None:
        for test in tests:
            self.left.setdefault(_file(test), set()).add(test)
        self.tests.update(map(_file, tests))

    def _ended(self, entry: dict[str, Any]) -> bool:
        """Whether the file's last test is over."""
        file, test = _file(entry["test"]), entry["test"]
        self.seconds[file] += entry["seconds"]
        if entry["outcome"] == "failed" and test not in self.failed.setdefault(file, []):
            self.failed[file].append(test)
        if entry["when"] == "call" or entry["outcome"] == "failed" or entry["outcome"] == "skipped":
            left = self.left.get(file, set())
            over = test in left
            left.discard(test)
            return over and not left
        return False

    def line(self, file: str) -> str:
        """Seconds, tests and outcome of a file."""
        failed, left = len(self.failed.get(file, ())), len(self.left.get(file, ()))
        parts = [f"{failed} failed"] * bool(failed) + [f"{left} not run"] * bool(left)
        return f"{self.seconds[file]:7.1f} s {self.tests[file]:5d} tests  {file}  {', '.join(parts) or 'passed'}"

    def unfinished(self) -> list[str]:
        """Files with tests that have not run."""
        return sorted(file for file, left in self.left.items() if left)


def _file(test: str) -> str:
    return test.split("::")[0]


def watched(command: list[str]) -> int:
    """Runs a command with a watched core and prints the reports: 1 if there is one or the command fails, else 0."""
    with tempfile.TemporaryDirectory(prefix="cute-kernels-sanitizers-") as folder:
        status = subprocess.run(command, env=environment(folder)).returncode
        return _outcome(Path(folder), status)


def _outcome(folder: Path, status: int) -> int:
    reports = sorted(folder.glob("report*"))
    for report in reports:
        print(report.read_text(errors="replace"), file=sys.stderr)
    print(f"sanitizers: {len(reports)} reports, exit status {status}", flush=True)
    return int(bool(reports) or status != 0)


def watched_tests(arguments: list[str], processes: int, seconds: float) -> int:
    """Runs tests with a watched core in several processes, and prints a line for each file: 1 if anything is wrong.

    A process that a report ends is replaced, and the test that it ran counts as failed.

    Args:
        arguments: of pytest.
        processes: that run tests.
        seconds: after which all of them are ended.
    """
    with tempfile.TemporaryDirectory(prefix="cute-kernels-sanitizers-") as folder:
        record, log = Path(folder, "tests.jsonl"), Path(folder, "pytest.log")
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "tests.sanitizer_record", "-n", str(processes),
            "--dist", "worksteal", "--max-worker-restart=1000000", f"--timeout={_TEST_SECONDS}",
            "-o", f"testpaths={' '.join(WATCHED)}", *arguments,
        ]  # fmt: skip
        tally = Tally(record)
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env={**environment(folder), RECORD: str(record)}, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                in_time = _follow(process, tally, _now() + seconds)
            finally:  # an interrupt ends what it started
                if process.poll() is None:
                    _end(process)
        unfinished = tally.unfinished()
        for file in unfinished:
            print(tally.line(file))
        status = process.returncode
        if status or not in_time:
            print(log.read_text(errors="replace"))
        if not in_time:
            print(f"ended after {seconds:.0f} s with tests left in {len(unfinished)} files")
        print(
            f"{len(tally.tests)} files, {sum(tally.tests.values())} tests, {sum(tally.seconds.values()):.0f} s of all "
            f"processes, {sum(map(len, tally.failed.values()))} failed, {sum(map(len, tally.left.values()))} not run"
        )
        return _outcome(Path(folder), status)


def _follow(process: subprocess.Popen[bytes], tally: Tally, deadline: float) -> bool:
    """Prints files as they become complete, until the process ends, which may be before its time or by that."""
    while process.poll() is None:
        for file in tally.read():
            print(tally.line(file), flush=True)
        if _now() > deadline:
            _end(process)
            tally.read()
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    for file in tally.read():
        print(tally.line(file), flush=True)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and what it has started, which is in a session of its own."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _compile() -> None:
    """Before anything is preloaded: the compiler itself is not to be watched.

    Raises:
        build.CoreNotBuilt: it cannot be compiled with sanitizers.
    """
    code = "from cute_kernels.emulator.core import build, library; build.library(library.variant())"
    environment = {**os.environ, build.FLAGS_VARIABLE: FLAGS}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise build.CoreNotBuilt(done.stderr.strip() or f"exit status {done.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitizers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1, help="processes of tests (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="limit of all tests together (none)")
    parser.add_argument("--module", nargs=argparse.REMAINDER, help="a module and its arguments, in place of tests")
    options, arguments = parser.parse_known_args()
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: must be at least 1")
    try:
        runtime_libraries()
        _compile()
    except build.CoreNotBuilt as error:
        print(f"no test ran: {error}", file=sys.stderr)
        return 2
    if options.module:
        return watched([sys.executable, "-m", *options.module])
    return watched_tests(arguments, options.processes, options.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
