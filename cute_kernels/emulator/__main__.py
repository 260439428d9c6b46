"""``python -m cute_kernels.emulator``: what the emulator executes and reports, the page docs/emulator/families.md."""

from __future__ import annotations

import argparse
import os
import re
import sys

from cute_kernels.emulator.bytecode.lowering import lower
from cute_kernels.emulator.diagnostics.kinds import KINDS
from cute_kernels.emulator.ptx.families import FAMILIES, Family

PAGE = """# Instructions and kinds of reports

`python -m cute_kernels.emulator` prints this page. What else holds is in the [contract](contract.md).

## Instruction families

What is not here is refused with its PTX line.

{families}

## Kinds of reports

The stable names in reports, `--suppress` and [JSON](../agents.md), and the usual cause and mend that a report gives.
With `--keep-going` execution goes on after those of a detector.

{kinds}
"""


def page() -> str:
    """The page of both tables."""
    return PAGE.format(families=coverage(), kinds=kinds())


def kinds() -> str:
    """A Markdown table of the kinds of faults: a row per kind, with its help."""
    lines = ["| kind | detector | usual cause and mend |", "|---|---|---|"]
    for kind in KINDS.values():
        words = re.sub(r"\{(\w+)\}", r"\1", kind.help).replace("|", "\\|")
        lines.append(f"| `{kind.name}` | {'yes' if kind.detector else ''} | {words} |")
    return "\n".join(lines)


def coverage() -> str:
    """One row per family: opcode prefixes and what the family does. Everything else is refused with its PTX line."""
    assert lower  # importing it registers every family
    rows: dict[int, tuple[Family, list[str]]] = {}
    for prefix, family in FAMILIES.items():
        rows.setdefault(id(family.lower), (family, []))[1].append(".".join(prefix))
    lines = ["| PTX | what is executed |", "|---|---|"]
    for family, prefixes in sorted(rows.values(), key=lambda row: row[1][0]):
        summary = " ".join(family.doc.split("\n\n")[0].split()).replace("|", "\\|")
        lines.append(f"| {', '.join(f'`{p}`' for p in _shortened(prefixes))} | {summary} |")
    return "\n".join(lines)


def _shortened(prefixes: list[str]) -> list[str]:
    """Drops type suffixes where a family lists many: ``add.u32``, ``add.s32``, ... become ``add``."""
    if len(prefixes) <= 6:
        return sorted(prefixes)
    return sorted({p.split(".")[0] for p in prefixes})


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m cute_kernels.emulator",
        description="Prints what the emulator executes and reports, as the page docs/emulator/families.md.",
    ).parse_args()
    try:
        print(page(), end="", flush=True)
    except BrokenPipeError:
        # The reader has left. The interpreter flushes once more when it exits, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
