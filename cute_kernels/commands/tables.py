"""Results of commands for programs: the options ``--json`` and ``--csv``, which write records."""

import argparse
import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cute_kernels.common import files


def add_formats(parser: argparse.ArgumentParser) -> None:
    for name in FORMATS:
        help = f"write the rows as {name.upper()}; - prints them instead of text"
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=help)


def check(options: argparse.Namespace) -> None:
    """Checks the files of the options, before anything is made. Raises ValueError: both are printed; OSError: as
    `files.check_output`."""
    found = _files(options)
    if len(found) == len(FORMATS) and set(found.values()) == {PRINTED}:
        raise ValueError("--json - and --csv -: one of them is printed")
    for path in found.values():
        if path != PRINTED:
            files.check_output(path)


def show(options: argparse.Namespace, records: Sequence[Mapping[str, Any]], lines: Sequence[str]) -> None:
    """Writes the records, all with the names of the first, as the options of `add_formats` say, and prints the lines
    unless records are printed."""
    found = _files(options)
    if PRINTED not in found.values():
        files.show("\n".join(lines))
    for name, path in found.items():
        text = FORMATS[name](records)
        if path == PRINTED:
            files.show(text.removesuffix("\n"))
        else:
            files.write_text(path, text)


def _files(options: argparse.Namespace) -> dict[str, Path]:
    given = {name: getattr(options, name) for name in FORMATS}
    return {name: path for name, path in given.items() if path is not None}


def _as_json(records: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(records, indent=1, default=str) + "\n"


def _as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


FORMATS = {"json": _as_json, "csv": _as_csv}
PRINTED = Path("-")
