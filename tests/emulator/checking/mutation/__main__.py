"""``python -m tests.emulator.checking.mutation``: drops or weakens each synchronisation instruction of our kernels.

Prints what noticed each mutant and which survive, and writes it as Markdown and JSON. Exits with 1 if a survivor is not
reviewed (tests/emulator/checking/mutation/reviewed.py), a review is out of date, or the score is below the target.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from cute_kernels.emulator.checking.mutation.judge import Verdict
from cute_kernels.emulator.checking.mutation.mutants import mutants
from tests.emulator.checking.mutation.summary import as_json, markdown, summarise
from tests.emulator.checking.mutation.targets import TARGETS
from tests.emulator.checking.mutation.workers import judge_all

LEAST_SCORE = 0.95


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator.checking.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", nargs="+", choices=TARGETS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="two targets, every third mutant")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write FILE.md and FILE.json")
    parser.add_argument("--match", default="", help="only mutants whose key or place contains this")
    parser.add_argument(
        "--every", type=int, default=1, metavar="K", help="of each target, every K-th mutant (default: %(default)s)"
    )
    parser.add_argument(
        "--offset", type=int, default=0, metavar="J", help="begin with mutant J of each, 0 to K - 1 (default: 0)"
    )
    parser.add_argument("--lenient", action="store_true", help="without Options.strict")
    parser.add_argument(
        "--again", nargs="+", type=Path, metavar="FILE.json", help="only those that survived in what --output wrote"
    )
    parser.add_argument(
        "--recorded", nargs="+", type=Path, metavar="FILE.json",
        help="run nothing: judge what --output wrote by the reviews as they are now",
    )  # fmt: skip
    options = parser.parse_args()
    if options.every < 1:
        parser.error(f"--every {options.every}: at least 1 is needed")
    if not 0 <= options.offset < options.every:
        parser.error(f"--offset {options.offset}: 0 to {options.every - 1} are possible with --every {options.every}")
    if options.recorded is not None:
        verdicts = recorded(options.recorded)
        return report(verdicts, options.output, complete=keys(verdicts) == every_key())
    names = options.target or [name for name, target in TARGETS.items() if target.quick or not options.quick]
    again = None if options.again is None else keys(v for v in recorded(options.again) if v.survived)
    if again is not None:
        names = [name for name in names if name in {target for target, _ in again}]
    work = [
        (name, number)
        for name in names
        for number, mutant in enumerate(mutants(TARGETS[name].ptx))
        if options.match in f"{mutant.key} {mutant.line}"
        and not (options.quick and number % 3)
        and number % options.every == options.offset
        and (again is None or (name, mutant.key) in again)
    ]
    start = time.perf_counter()
    verdicts = judge_all(work, options.jobs, strict=not options.lenient)
    print(f"{len(work)} verdicts in {time.perf_counter() - start:.0f} s with {options.jobs} processes")
    part = options.quick or options.match or options.again or options.lenient or options.every > 1
    complete = names == list(TARGETS) and not part
    return report(verdicts, options.output, complete=complete)


def report(verdicts: list[Verdict], output: Path | None, *, complete: bool) -> int:
    """Prints (and writes) score and survivors; the exit status. ``complete``: on all mutants of all targets."""
    summary = summarise(verdicts)
    text = markdown(summary, verdicts)
    print(text)
    if output is not None:
        output.with_suffix(".md").write_text(text)
        output.with_suffix(".json").write_text(json.dumps(as_json(summary, verdicts), indent=1) + "\n")
    complaints = summary.complaints(least=LEAST_SCORE if complete else 0.0, complete=complete)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


def recorded(files: Iterable[Path]) -> list[Verdict]:
    """The verdicts in the JSON of earlier runs."""
    names = [field.name for field in dataclasses.fields(Verdict)]
    entries = [entry for file in files for entry in json.loads(file.read_text())["mutants"]]
    return [Verdict(**{name: entry[name] for name in names if name in entry}) for entry in entries]


def keys(verdicts: Iterable[Verdict]) -> set[tuple[str, str]]:
    """Target and key of each."""
    return {(verdict.target, verdict.key) for verdict in verdicts}


def every_key() -> set[tuple[str, str]]:
    """Target and key of all mutants of the kernels as they are now."""
    return {(name, mutant.key) for name, target in TARGETS.items() for mutant in mutants(target.ptx)}


if __name__ == "__main__":
    sys.exit(main())
