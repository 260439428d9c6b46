"""Runs kernels that others wrote in the emulator: ``make programs``.

Each case of `tests.programs.cases` runs in a process of its own and is compared with the record, expected.json. The
command prints the table of docs/emulator/programs.md, and fails where an outcome is another one than recorded, or
where a result is wrong or a program crashes.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.programs.cases import cases
from tests.programs.outcome import Outcome, execute, record, table, write_record


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases whose names contain one of these; default: all")
    parser.add_argument("--seconds", type=float, default=900, help="for one case; default: %(default)s")
    parser.add_argument("--record", action="store_true", help="take the outcomes into the record")
    options = parser.parse_args()
    known, found = record(), {}
    for case in cases():
        if not options.names or any(name in case.name for name in options.names):
            began = time.monotonic()
            outcome = found[case.name] = execute(case, options.seconds)
            said = "" if outcome == known.get(case.name) else "  <- not as recorded"
            print(f"{case.name:44} {outcome.verdict:9} {time.monotonic() - began:5.0f} s{said}", flush=True)
            for each in outcome.reports:
                print(f"    {each}", flush=True)
    if not found:
        parser.error(f"no case has a name with {' or '.join(options.names)}")
    merged = {case.name: (known | found)[case.name] for case in cases() if case.name in known | found}
    print("\n".join(["", *table(merged)]))
    if options.record:
        write_record(merged)
    return 1 if any(_bad(outcome, merged if options.record else known, name) for name, outcome in found.items()) else 0


def _bad(outcome: Outcome, known: dict[str, Outcome], name: str) -> bool:
    return outcome.verdict in ("wrong", "crashed", "slow") or outcome != known.get(name)


if __name__ == "__main__":
    sys.exit(main())
