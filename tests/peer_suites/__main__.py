"""Runs samples of the test suites of other projects in the emulator: ``make peers PEERS=FOLDER``.

FOLDER has a checkout of each project, under the project's name. The command compares each test with the record,
expected.json, prints a table of what passed and of whose fault the others are, and fails where a test comes to
something else than recorded or fails for a reason that causes.json does not have.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.peer_suites import suites
from tests.peer_suites.outcome import PAGE, Cause, Found, Outcome, causes, judge, page, record, run, table, write_record
from tests.peer_suites.suites import Sampled, Suite, sample, sessions


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.peer_suites", description=__doc__)
    parser.add_argument("peers", type=Path, metavar="FOLDER", help="has the checkouts that are to be run")
    parser.add_argument("names", nargs="*", metavar="NAME", help="tests whose names contain one of these; default: all")
    parser.add_argument("--quick", action="store_true", help="a few tests")
    parser.add_argument("--seconds", type=float, default=600, help="for one test; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; default: %(default)s")
    parser.add_argument("--record", action="store_true", help="take the outcomes into the record")
    parser.add_argument("--page", action="store_true", help="run nothing, write the record's table into its page")
    options = parser.parse_intermixed_args(arguments)
    if options.page:
        PAGE.write_text(page())
        return 0
    if not options.peers.is_dir():
        parser.error(f"FOLDER = {options.peers}: must be a folder with checkouts")
    there = {suite.name: suite for suite in suites.SUITES if (options.peers / suite.name / suite.root).is_dir()}
    all_tests = sample()
    chosen = [
        each
        for each in all_tests
        if each.suite in there
        and (each.quick or not options.quick)
        and (not options.names or any(name in each.name for name in options.names))
    ]
    if not chosen:
        needed = ", ".join(f"{suite.name} ({suite.origin}, commit {suite.commit})" for suite in suites.SUITES)
        parser.error(f"FOLDER = {options.peers}: must have a checkout with tests that are asked for; of {needed}")
    for suite in there.values():
        _say_commit(suite, options.peers)
    known, reasons = record(), causes()
    outcomes = _run(there, chosen, known, reasons, options)
    print("\n".join(["", *table(chosen, outcomes, reasons)]))
    if options.record:
        known = {each.name: (known | outcomes)[each.name] for each in all_tests if each.name in known | outcomes}
        write_record(known)
    bad = [name for name, each in outcomes.items() if each != known.get(name) or each == Outcome("failed")]
    return 1 if bad else 0


def _run(
    there: Mapping[str, Suite],
    chosen: Sequence[Sampled],
    known: Mapping[str, Outcome],
    reasons: Mapping[str, Cause],
    options: argparse.Namespace,
) -> dict[str, Outcome]:
    """Outcomes by names of the record, in the order of the sample; says each as soon as its process has ended."""

    def one(tests: list[Sampled]) -> dict[str, Found]:
        return run(there[tests[0].suite], options.peers.resolve(), tests, options.seconds)

    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for results in pool.map(one, sessions(chosen)):
            for name, found in results.items():
                outcomes[name] = judge(found, reasons)
                _say(name, found, outcomes[name], known.get(name))
    return {each.name: outcomes[each.name] for each in chosen}


def _say(name: str, found: Found, outcome: Outcome, known: Outcome | None) -> None:
    """What a test came to, and what it was recorded to come to where that is something else."""
    changed = "" if outcome == known else f"  <- recorded: {'nothing' if known is None else known.verdict}"
    because = f", {outcome.cause}" if outcome.cause else ""
    print(f"{name}: {outcome.verdict}, {found.seconds:.0f} s{because}{changed}", flush=True)
    if outcome.verdict == "failed":
        print(f"    {found.said[:400]}", flush=True)


def _say_commit(suite: Suite, peers: Path) -> None:
    """A line where a checkout is known to be of another commit than the record."""
    head = subprocess.run(["git", "-C", peers / suite.name, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode == 0 and not head.stdout.startswith(suite.commit):
        print(f"{suite.name}: commit {head.stdout[:8]}; the record is of {suite.commit}")


if __name__ == "__main__":
    sys.exit(main())
