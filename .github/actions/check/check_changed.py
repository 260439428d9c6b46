#!/usr/bin/env python3
"""Runs `cute-kernels check` on the programs that a change concerns: those that changed or import a file that did.

The action beside this file and the hook of .pre-commit-hooks.yaml call it. It needs the standard library, `git` where
`--since` is given, and `cute-kernels` on the PATH.
"""

from __future__ import annotations

import argparse
import ast
import glob
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


def main(words: list[str]) -> int:
    """Checks the programs concerned; returns the first exit status of `cute-kernels check` that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--program",
        action="append",
        required=True,
        metavar="GLOB",
        help="Python programs that launch kernels, which end by themselves; may be repeated",
    )
    parser.add_argument(
        "--options",
        default="--seconds 20",
        metavar="WORDS",
        help="options of `cute-kernels check` (default: %(default)s)",
    )
    parser.add_argument("--since", metavar="REF", help="files changed are those since the common ancestor with REF")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="write all reports as one SARIF 2.1.0 file")
    parser.add_argument("changed", nargs="*", metavar="CHANGED", help="changed files, where --since is not given")
    parsed = parser.parse_args(words)

    programs = sorted({name for each in parsed.program for name in glob.glob(each, recursive=True)})
    if not programs:
        parser.error(f"--program = {', '.join(parsed.program)}: must name a file; none matches in {os.getcwd()}")
    changed = {os.path.realpath(name) for name in parsed.changed or _changed_since(parsed.since)}
    status, runs = 0, []
    for program in programs:
        if changed.isdisjoint(_files_of(program)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.sarif")
            command = ["cute-kernels", "check", *shlex.split(parsed.options), "--sarif", str(report), "--", program]
            print(shlex.join(command[:2] + command[-1:]), flush=True)
            ended = subprocess.run(command).returncode
            runs += _runs(report, program)
        status = status or ended
    if parsed.sarif is not None:
        schema = "https://json.schemastore.org/sarif-2.1.0.json"
        parsed.sarif.write_text(json.dumps({"$schema": schema, "version": "2.1.0", "runs": runs}, indent=1))
    return status


def _changed_since(ref: str | None) -> list[str]:
    """Files that differ from the common ancestor with ``ref``; of no ``ref``, all that git knows."""
    command = ["git", "ls-files"] if ref is None else ["git", "diff", "--name-only", "--relative", f"{ref}...HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def _files_of(program: str) -> set[str]:
    """The program and what it imports from its own folder and the current one, inside functions, too.

    Not what `importlib` is given as a text. A file that cannot be parsed imports nothing: `check` says what is wrong.
    """
    own = os.path.dirname(os.path.realpath(program))
    found: set[str] = set()
    unread = [os.path.realpath(program)]
    while unread:
        path = unread.pop()
        if path in found:
            continue
        found.add(path)
        try:
            tree = ast.parse(Path(path).read_bytes())
        except (SyntaxError, ValueError):
            continue
        for folder, name in _imported(tree, path, [own, os.getcwd()]):
            stem = os.path.join(folder, *name.split("."))
            unread += [os.path.realpath(each) for each in (f"{stem}.py", f"{stem}/__init__.py") if os.path.isfile(each)]
    return found


def _imported(tree: ast.Module, path: str, roots: list[str]) -> Iterator[tuple[str, str]]:
    """Names that a file may import, `a`, `a.b` and `a.b.c` for the last, each with a folder to look in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            folders, names = roots, [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            folders = roots if not node.level else [str(Path(path).parents[node.level - 1])]
            module = [node.module] if node.module else []
            names = [".".join([*module, each.name]) for each in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from ((folder, ".".join(parts[:n])) for folder in folders for n in range(1, len(parts) + 1))


def _runs(report: Path, program: str) -> list[dict]:
    """The report's runs, each with a category of its own: code hosts refuse two runs of one category in a file."""
    if not report.exists():
        return []
    runs = json.loads(report.read_text())["runs"]
    for run in runs:
        run["automationDetails"] = {"id": f"cute-kernels/{program}/"}
    return runs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
