"""Recorded results: ``bench/results`` has one compressed archive per date and card, and `index.json`.

A file in an archive is named by a path through it, as if the archive were a folder:

    python -m bench.archive                                                     lists every file with its command
    python -m bench.archive bench/results/2026-11-24-h200.tar.xz/host-time.txt  prints a file
    tar -cJf bench/results/2026-12-01-h100.tar.xz -C build/results headline.json    a new archive

The index holds, for every file, what it shows, and the command where the file does not hold it itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import tarfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
OUTPUT = Path("build/results")
"""Where benches write unless told otherwise; Git ignores it."""

SUFFIX = ".tar.xz"


@functools.cache
def contents(archive: Path) -> dict[str, str]:
    """The text of every file in an archive, by its name there."""
    with tarfile.open(archive, "r:xz") as opened:
        files = ((member.name, opened.extractfile(member)) for member in opened if member.isfile())
        return {name.removeprefix("./"): file.read().decode() for name, file in files if file}


def read_text(path: Path) -> str:
    """The text of a file, which may lie in an archive.

    Raises:
        FileNotFoundError: no such file, or no such archive.
    """
    if not path.parent.name.endswith(SUFFIX):
        return path.read_text()
    files = contents(path.parent)
    if path.name not in files:
        raise FileNotFoundError(f"{path.parent} has no {path.name}, only {', '.join(files)}")
    return files[path.name]


def recorded(name: str) -> Path:
    """Path of a recorded file, ``"2026-11-21-h200/tune.json"``."""
    archive, _, member = name.partition("/")
    return RESULTS / f"{archive}{SUFFIX}" / member


def expand(path: Path) -> list[Path]:
    """The files in an archive that a path with ``*`` or ``?`` in its last part names; any other path alone."""
    if not path.parent.name.endswith(SUFFIX) or not set("*?") & set(path.name):
        return [path]
    return [path.parent / name for name in contents(path.parent) if fnmatch(name, path.name)]


def index() -> dict[str, dict[str, dict[str, str]]]:
    """By archive and file: ``shows``, and ``command``."""
    entries = json.loads((RESULTS / "index.json").read_text())
    for archive, files in entries.items():
        for name, entry in files.items():
            if "command" not in entry:
                entry["command"] = json.loads(read_text(recorded(f"{archive}/{name}")))["command"]
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="ARCHIVE/FILE, FILE with * or ? for several")
    files = parser.parse_args(argv).files
    for file in files:
        for path in expand(file):
            print(read_text(path), end="")
    if not files:
        for archive, entries in index().items():
            for name, entry in entries.items():
                print(f"bench/results/{archive}{SUFFIX}/{name}\n    {entry['command']}\n    {entry['shows']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
