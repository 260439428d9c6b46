"""``python -m cute_kernels.emulator``: the instruction families that the emulator executes, as a Markdown table."""

from __future__ import annotations

import argparse
import os
import sys

from cute_kernels.emulator.bytecode.lowering import lower
from cute_kernels.emulator.ptx.families import FAMILIES, Family


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
        description="Prints the PTX instruction families that the emulator executes, as a Markdown table.",
    ).parse_args()
    try:
        print(coverage(), flush=True)
    except BrokenPipeError:
        # The reader has left. The interpreter flushes once more when it exits, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
