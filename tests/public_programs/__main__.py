"""Runs kernels that others wrote in the emulator: ``make programs``.

Each case of `cases.py` runs in a process of its own and is compared with the record, expected.json. The command prints
a table, and fails where an outcome is another one than recorded, or where a result is wrong or a program crashes. With
--nvidia-examples or --triton-tutorials it does the same for the programs of a public repository that was cloned
before. With --page it writes the record's tables into docs/emulator/programs.md instead.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.public_programs import page
from tests.public_programs.cases import HERE, Case, cases
from tests.public_programs.clones import CLONES
from tests.public_programs.outcome import PASSED, Outcome, execute, record, table, write_record


@dataclass(frozen=True)
class Suite:
    """Cases that one call runs: those of a clone, or of packages.

    Attributes:
        cases: in the order of the table.
        folder: of the programs.
        passed: how they say that their check has passed.
        asserts: those that have assertions may say nothing.
    """

    cases: tuple[Case, ...]
    folder: Path
    passed: tuple[str, ...]
    asserts: bool


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.public_programs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases whose names contain one of these; default: all")
    parser.add_argument("--seconds", type=float, default=900, help="for one case; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time; default: %(default)s")
    parser.add_argument("--record", action="store_true", help="take the outcomes into the record")
    parser.add_argument("--page", action="store_true", help="run nothing, write the record's tables into their page")
    which = parser.add_mutually_exclusive_group()
    for clone in CLONES:
        which.add_argument(f"--{clone.option}", type=Path, metavar="FOLDER", help=f"a clone of {clone.origin}")
    options = parser.parse_args(arguments)
    if options.page:
        page.PAGE.write_text(page.render())
        return 0
    try:
        suite = _suite(options)
    except ValueError as error:
        parser.error(str(error))
    chosen = [case for case in suite.cases if not options.names or any(name in case.name for name in options.names)]
    if not chosen:
        parser.error(f"no case has a name with {' or '.join(options.names)}")
    known = record()
    found = _run(suite, chosen, known, options)
    merged = {name: (known | found)[name] for name in _all_names() if name in known | found}
    print("\n".join(["", *table(suite.cases, merged)]))
    if options.record:
        write_record(merged)
    return 1 if any(_bad(outcome, merged if options.record else known, name) for name, outcome in found.items()) else 0


def _suite(options: argparse.Namespace) -> Suite:
    for clone in CLONES:
        given = getattr(options, clone.option.replace("-", "_"))
        if given is not None:
            return Suite(tuple(clone.cases()), clone.folder(given), clone.passed, not clone.driver)
    return Suite(tuple(cases()), HERE, PASSED, False)


def _run(
    suite: Suite, chosen: list[Case], known: dict[str, Outcome], options: argparse.Namespace
) -> dict[str, Outcome]:
    def one(case: Case) -> tuple[Case, Outcome, float]:
        began = time.monotonic()
        silent = suite.asserts and "assert_close(" in (suite.folder / case.program).read_text()
        outcome = execute(case.arch, case.command(suite.folder), options.seconds, suite.passed, silent)
        return case, outcome, time.monotonic() - began

    found = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for case, outcome, seconds in pool.map(one, chosen):
            found[case.name] = outcome
            said = "" if outcome == known.get(case.name) else "  <- not as recorded"
            print(f"{case.name:44} {outcome.verdict:9} {seconds:5.0f} s{said}", flush=True)
            for each in outcome.reports:
                print(f"    {each}", flush=True)
    return found


def _all_names() -> Iterable[str]:
    yield from (case.name for case in cases())
    for clone in CLONES:
        yield from (case.name for case in clone.cases())


def _bad(outcome: Outcome, known: dict[str, Outcome], name: str) -> bool:
    return outcome.verdict in ("wrong", "crashed", "slow") or outcome != known.get(name)


if __name__ == "__main__":
    sys.exit(main())
