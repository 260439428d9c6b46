"""Compiles many plans into the disk cache, before anything is timed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from cute_kernels.operations.compile import compile_plan
from cute_kernels.plan import Plan

_ROOT = Path(__file__).resolve().parent.parent


def _compile(plan: Plan) -> str:
    """What went wrong, or nothing."""
    try:
        compile_plan(plan)
    except Exception as error:
        return f"{plan.config}: {type(error).__name__}: {error}"
    return ""


def compile_all(plans: Iterable[Plan]) -> int:
    """Fills the disk cache with every plan's kernel, one process per core; returns their number.

    The processes are those of this module's command: they would import that of the caller, with all that it imports.

    Raises:
        subprocess.CalledProcessError: a kernel was not compiled.
    """
    different = list({plan.kernel_key: plan for plan in plans}.values())
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "bench.compile_ahead"]
    subprocess.run(command, input=pickle.dumps(different), env=environment, check=True)
    return len(different)


def main() -> int:
    """Compiles what is on standard input, a pickled list of plans, in its order; 1 if one was not compiled."""
    plans: list[Plan] = pickle.load(sys.stdin.buffer)
    with multiprocessing.get_context("spawn").Pool(min(len(plans) or 1, os.cpu_count() or 1)) as pool:
        failures = [failure for failure in pool.imap_unordered(_compile, plans) if failure]
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
