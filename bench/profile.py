"""Phases of the warps of the patch embeds on the GPU at hand, from clock stamps that the kernels write.

    python -m bench.profile --output build/results/profile        under a minute

Writes OUTPUT.md, what `cute-kernels profile` prints of each case, OUTPUT-CASE.json, the statistics of every warp, and
OUTPUT-CASE.trace.json, a timeline of two clusters for https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

from cute_kernels.commands import cli

CASES = {
    "rows": ("patch-embed", "--batch", "4736"),
    "rows-flat": ("patch-embed", "--batch", "4736", "--set", "order=flat"),
    "rows-64": ("patch-embed", "--batch", "64"),
    "images": ("patch-embed-images", "--batch", "4736"),
}
"""Arguments of the command by name: the headline problem in both orders of rows, few images, uint8 images."""


def commands(output: Path, cases: Sequence[str], extra: Sequence[str] = ()) -> dict[str, list[str]]:
    """Arguments of the command line for each case.

    Args:
        output: beginning of the names of all files.
        cases: keys of `CASES`.
        extra: more arguments for all of them.
    """
    return {
        name: [
            "profile", *CASES[name], "--warps", "--json", f"{output}-{name}.json",
            "--trace", f"{output}-{name}.trace.json", *extra,
        ]
        for name in cases
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every case, prints it and writes the files; the first status that is not 0 ends it."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description="Phases of the patch embeds' warps.")
    parser.add_argument("--output", type=Path, required=True, metavar="NAME", help="beginning of the files' names")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), help="default: all")
    parser.add_argument("--device", choices=("gpu", "emulator"), default="gpu", help="default: %(default)s")
    options = parser.parse_args(arguments)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    sections = []
    for name, command in commands(options.output, options.cases, ("--device", options.device)).items():
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            status = cli.main(command)
        print(text.getvalue())
        if status:
            return status
        shown = " ".join(("cute-kernels", "profile", *CASES[name], "--warps"))
        sections.append(f"## {name}\n\n`{shown}`\n\n```\n{text.getvalue().strip()}\n```\n")
    Path(f"{options.output}.md").write_text("# Phases of warps\n\n" + "\n".join(sections))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
