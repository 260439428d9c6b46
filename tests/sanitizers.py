"""Runs the emulator's tests with a core that AddressSanitizer and UndefinedBehaviorSanitizer watch.

`python -m tests.sanitizers [pytest's arguments]`; without arguments all of `tests/emulator`. Exits with 1 if a
sanitizer reports anything, in whatever process, or if a test fails. Needs GCC or Clang with its sanitizers' libraries.

The interpreter that loads the core is not compiled with a sanitizer, so its run-time library has to be preloaded.
PYTHONMALLOC=malloc gives every small object, a ctypes array for one, an allocation of its own with guarded edges.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cute_kernels.emulator.core import build

#: Of both sanitizers. A report ends the process, so that no test passes in spite of one.
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
_REPORTS = "log_path={}/report:halt_on_error=1:abort_on_error=1:print_stacktrace=1"
# Memory that Python keeps until it exits is no leak of ours; allocations of terabytes have to fail as without ASan.
_ADDRESS = "detect_leaks=0:allocator_may_return_null=1"


def runtime_libraries() -> list[str]:
    """What is loaded before the interpreter: ASan's run-time library, and the C++ library, whose exceptions it wraps.

    Raises:
        build.CoreNotBuilt: there is no compiler, or it has no AddressSanitizer.
    """
    command, found = build.compiler(), []
    for names in (("libasan.so", "libclang_rt.asan-x86_64.so", "libclang_rt.asan-aarch64.so"), ("libstdc++.so.6",)):
        paths = [subprocess.check_output([*command, f"-print-file-name={name}"], text=True).strip() for name in names]
        present = [path for path in paths if os.path.isabs(path) and os.path.exists(path)]
        if not present:
            raise build.CoreNotBuilt(f"{command[0]} has none of {', '.join(names)}: install its sanitizers")
        found.append(present[0])
    return found


def environment(reports: str) -> dict[str, str]:
    """Of processes whose core is watched, and which write what is found to files of a folder."""
    settings = _REPORTS.format(reports)
    return {
        **os.environ,
        build.FLAGS_VARIABLE: FLAGS,
        "LD_PRELOAD": ":".join(runtime_libraries()),
        "ASAN_OPTIONS": f"{settings}:{_ADDRESS}",
        "UBSAN_OPTIONS": settings,
        "PYTHONMALLOC": "malloc",
    }


def watched(command: list[str]) -> int:
    """Runs a command with a watched core and prints the reports: 1 if there is one or the command fails, else 0.

    GCC's UndefinedBehaviorSanitizer writes to standard error alone; its report shows in that the process ends.
    """
    with tempfile.TemporaryDirectory(prefix="cute-kernels-sanitizers-") as folder:
        status = subprocess.run(command, env=environment(folder)).returncode
        reports = sorted(Path(folder).glob("report*"))
        for report in reports:
            print(report.read_text(errors="replace"), file=sys.stderr)
    print(f"sanitizers: {len(reports)} reports of memory errors, exit status {status}")
    return int(bool(reports) or status != 0)


def main() -> int:
    # Compiled before anything is preloaded: the compiler itself is not to be watched.
    compile_first = {**os.environ, build.FLAGS_VARIABLE: FLAGS}
    code = "from cute_kernels.emulator.core import build, library; build.library(library.variant())"
    subprocess.run([sys.executable, "-c", code], env=compile_first, check=True)
    return watched([sys.executable, "-m", "pytest", "-q", *(sys.argv[1:] or ["tests/emulator"])])


if __name__ == "__main__":
    raise SystemExit(main())
