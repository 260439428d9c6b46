"""``python -m tests.emulator.checking.certified [NAME ..]``: how many launches of sound kernels have a certificate.

Writes the table of docs/emulator/evidence.md: our kernels as they are mutated, the examples of the documentation, and
small kernels that public fixes were made to. With names: those of our kernels alone, and nothing is written.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from cute_kernels.commands import cli
from cute_kernels.emulator import Options
from cute_kernels.emulator.machine.launch import run as runs
from cute_kernels.emulator.races.certificate import Certificate, judge
from tests.emulator import test_public_bugs
from tests.emulator.checking.mutation.targets import TARGETS
from tests.emulator.public_bugs import BUGS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "emulator" / "evidence.md"
BEGIN, END = "<!-- certified: written by `python -m tests.emulator.checking.certified` -->\n", "<!-- certified: end -->"
EXAMPLES = {"bias_add.py": "sm_100a", "relu_gemm.py": "sm_90a"}


@contextlib.contextmanager
def collected() -> Iterator[list[Certificate]]:
    """The certificates of all launches that are made meanwhile."""
    found: list[Certificate] = []

    def keep(*arguments: object) -> Certificate:
        found.append(judge(*arguments))
        return found[-1]

    with mock.patch.object(runs, "judge", keep):
        yield found


def example(name: str) -> None:
    """Runs an example of the documentation."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main(["emulate", "--quiet", "--arch", EXAMPLES[name], str(ROOT / "docs" / "examples" / name)])


def groups(names: list[str]) -> dict[str, dict[str, Callable[[], object]]]:
    """Programs to run, by name, in groups."""
    ours: dict[str, dict[str, Callable[[], object]]] = {}
    for name, target in TARGETS.items():
        arch = next((part for part in name.split("-") if part.startswith("sm")), "sm100")
        if not names or name in names:
            ours.setdefault(f"our kernels, {arch}", {})[name] = lambda one=target: one.run(one.ptx, Options())
    if names:
        return ours
    examples = {name: lambda one=name: example(one) for name in EXAMPLES}
    fixed = {name: lambda bug=bug: test_public_bugs.launch(bug, Options(), fixed=True) for name, bug in BUGS.items()}
    return {**ours, "examples of the documentation": examples, "public bugs, fixed": fixed}


def row(group: str, programs: dict[str, Callable[[], object]]) -> str:
    """A row of the table."""
    verdicts, reasons, refused = Counter(), Counter(), []
    for name, run in programs.items():
        with collected() as found:
            run()
        for certificate in found:
            verdict = "certified" if certificate.given else "draws" if certificate.for_draws else "refused"
            verdicts[verdict] += 1
            reasons.update({f"{place.text.split(':')[0]} (`{place.kind}`)" for place in certificate.places})
            if verdict != "certified":
                refused.append(name)
                print(name, *certificate.lines(), sep="\n  ", file=sys.stderr)
    why = "; ".join(f"{text}: {count}" for text, count in reasons.most_common(4))
    counts = (str(verdicts[each]) for each in ("certified", "draws", "refused"))
    return f"| {group} | {' | '.join(counts)} | {why} |"


def main(names: list[str]) -> None:
    """Prints the table, and writes it into the page if it is of all programs."""
    rows = ["| launches of | certified | for these draws | refused | why |", "|---|---|---|---|---|"]
    rows += [row(*each) for each in groups(names).items()]
    table = "\n".join(rows) + "\n"
    print(table)
    if not names:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
