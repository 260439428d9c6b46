"""``python -m cute_kernels.emulator`` prints instructions and kinds of reports, a page of the site (`make docs`)."""

import argparse
import os
import re
import sys

from cute_kernels.emulator.isa.ptx.families import FAMILIES, Family
from cute_kernels.emulator.machine.bytecode.lowering import lower
from cute_kernels.emulator.machine.graph.families import LOWERINGS
from cute_kernels.emulator.reports.kinds import KINDS, Kind

PAGE = """# Instructions and kinds of reports

`python -m cute_kernels.emulator` prints this page. How exactly instructions are executed: [contract](contract.md).

## Instruction families

Other instructions are refused with their PTX line. In all their forms: {plain}.

{families}

## Kinds of reports

These stable names stand in reports, `--suppress` and [JSON](../agents.md). A report explains its kind, the usual cause
and the mend, and so does `python -m cute_kernels.emulator KIND`.

Reports of detectors, after which `--keep-going` goes on: {detectors}.

Reports that end the kernel or the check: {others}.
"""


def page() -> str:
    """The page of instruction families and kinds of reports."""
    plain, families = coverage()
    kinds = [[f"`{kind.name}`" for kind in KINDS.values() if kind.detector is detector] for detector in (True, False)]
    return PAGE.format(
        plain=", ".join(plain), families="\n".join(families), detectors=", ".join(kinds[0]), others=", ".join(kinds[1])
    )


ANY = {
    "later": "an access", "earlier": "an earlier access", "reads": "reads or writes", "read": "read or wrote",
    "space": "the", "barrier": "an mbarrier", "operation": "asynchronous operation",
}  # fmt: skip
"""Words for the fields of a kind's sentences where there is no report."""


def explained(kind: Kind) -> str:
    """A line on the meaning of a kind of reports, and one on usual cause and mend, where its name does not say it."""
    return "".join(f"{text.format(**ANY)}\n" for text in (kind.sentence, kind.help) if text) or f"{kind.name}\n"


def coverage() -> tuple[list[str], list[str]]:
    """Names of the families of which nothing else is to be said, and a list of what the others do."""
    assert lower  # importing it registers every family
    rows: dict[int, tuple[Family, list[str]]] = {}
    for prefix, family in FAMILIES.items():
        rows.setdefault(id(LOWERINGS[prefix]), (family, []))[1].append(".".join(prefix))
    plain, lines = [], []
    for family, prefixes in sorted(rows.values(), key=lambda row: row[1][0]):
        summary = " ".join(family.doc.split("\n\n")[0].split())
        opcodes = dict.fromkeys(prefix.partition(".")[0] for prefix in prefixes)
        unsaid = [f"`{opcode}`" for opcode in opcodes if not re.search(rf"\b{opcode}\b", summary)]
        names = summary.removesuffix(".").split(", ")
        if all(name.partition(".")[0] in opcodes and re.fullmatch(r"[\w.:]+", name) for name in names):
            plain += names
        else:
            lines.append(f"* {', '.join(unsaid)}{': ' if unsaid else ''}{summary}")
    return plain, lines


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cute_kernels.emulator",
        description="Prints the instructions and the kinds of reports that the emulator knows, as a Markdown page.",
    )
    parser.add_argument("kind", nargs="?", choices=KINDS, metavar="KIND", help="explain this kind of reports instead")
    kind = parser.parse_args().kind
    text = explained(KINDS[kind]) if kind else page()
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # The reader has left. The interpreter flushes once more when it exits, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
