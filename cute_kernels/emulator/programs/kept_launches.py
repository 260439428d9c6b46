"""A folder with the PTX and the facts of every launch of a program."""

import json
import os
import re
from pathlib import Path

from cute_kernels.common.files import make_folder, write_text
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.isa.ptx.decode import parse

_OURS = re.compile(r"launch-\d+(-[\w.-]+)?\.(ptx|json)")
_LONGEST_NAME = 100  # of a kernel in a file name: names of CuTe DSL's kernels exceed what file systems allow


class KeptLaunches:
    """Writes ``launch-N-KERNEL.ptx`` and ``launch-N.json`` for launch N of a program, counted from 1.

    Launches of the same PTX share the file of the first. The facts are written before the launch runs, with "outcome"
    "started", and again with "complete", or the error, afterwards. ``folder``: made if it is missing. Files of an
    earlier program with such names are deleted, others stay. Raises ValueError: an empty name; OSError: it cannot be
    made or written into."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not os.fspath(folder):  # which pathlib takes for the current folder
            raise ValueError("keep_ptx is empty: must be the name of a folder")
        make_folder(Path(folder))
        self.folder = Path(folder).absolute()  # the program may change the current folder
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink()
        self._files: dict[str, str] = {}  # by PTX

    def write(self, number: int, launch: CapturedLaunch, **outcome: str) -> None:
        """Writes the PTX, if it is new, and the facts with the outcome."""
        if launch.ptx not in self._files:
            kernel = re.sub(r"[^\w.-]", "_", launch.kernel_name)[:_LONGEST_NAME]
            self._files[launch.ptx] = name = f"launch-{number}-{kernel}.ptx"
            write_text(self.folder / name, launch.ptx)
        facts = {
            "launch": number,
            "kernel": launch.kernel_name,
            "ptx": self._files[launch.ptx],
            "grid": launch.grid,
            "block": launch.block,
            "cluster": launch.cluster,
            "dynamic_smem_bytes": launch.dynamic_smem,
            "programmatic_stream_serialisation": launch.programmatic,
            "cooperative": launch.cooperative,
            "parameters": _parameters(launch),
            **outcome,
        }
        write_text(self.folder / f"launch-{number}.json", json.dumps(facts, indent=2) + "\n")


def _parameters(launch: CapturedLaunch) -> list[dict[str, object]]:
    """Each parameter's bytes in hexadecimal; its name and type too where the PTX can be read."""
    values = [{"bytes": len(value), "value": value.hex()} for value in launch.params]
    try:
        declared = parse(launch.ptx).kernels[launch.kernel_name].parameters
    except (EmulatorError, KeyError):  # a refused launch is kept as well
        return values
    return [{"name": parameter.name, "type": parameter.element, **value} for parameter, value in zip(declared, values)]
