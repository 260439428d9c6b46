"""compute-sanitizer on the public bugs that a GPU of sm_90 can execute: which of its tools report which.

    python -m tests.gpu.sanitized_bugs [--sanitizer COMMAND] [--processes P] [--launches N] [--json FILE] [--logs DIR]

Each kernel of `tests.emulator.public_bugs` without instructions of tcgen05 runs with its fault and with the fix:
alone, N times, with its results compared, and once under each tool. Every run is a process of its own with a limit of
time, because some of the faulty kernels may never end. Prints a line for each kernel and writes all results as JSON.
The exit status is 1 where a fixed kernel leaves a wrong result or never ends: then the comparison is worth nothing.

Needs the driver, NumPy and, of the DSL, nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cute_kernels.testing.ptx import module
from tests.emulator.public_bugs import BUGS, Bug
from tests.emulator.record_matrix_on_gpu import Gpu

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FORMS = ("faulty", "fixed")
ON_SM_90 = {name: bug for name, bug in BUGS.items() if "tcgen05" not in bug.body}
FOUND = 9  # exit status where a tool has reported something
SECONDS = 40.0
SHARED_BYTES = 8192
CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint32 * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


def launch(gpu: Gpu, text: str, shape: dict[str, tuple[int, int, int]], words: ctypes.c_uint64, overlaps: bool) -> None:
    """Launches the kernel on the address of its words, without waiting for its end."""
    attributes = (Attribute * 2)()
    attributes[0].id = CLUSTER_DIMENSION
    attributes[0].value[:3] = shape.get("cluster", (1, 1, 1))
    attributes[1].id = PROGRAMMATIC_STREAM_SERIALIZATION
    attributes[1].value[0] = int(overlaps)
    grid, block = shape.get("grid", (1, 1, 1)), shape.get("block", (32, 1, 1))
    config = Config(grid, block, SHARED_BYTES, None, attributes, 2)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(words))
    gpu.call("cuLaunchKernelEx", ctypes.byref(config), gpu.load(for_sm_90(text)), pointers, None)


def for_sm_90(text: str) -> str:
    return text.replace(".target sm_100a", ".target sm_90a")


def wrong_launches(bug: Bug, *, fixed: bool, launches: int) -> int:
    """Of a number of launches of one kernel, how many left other words than the fixed one has to leave."""
    gpu, wrong = Gpu(), 0
    text, behind = bug.kernel(fixed=fixed), module(bug.behind, parameters=1) if bug.behind else ""
    before = np.arange(100, 1124, dtype=np.uint32)
    words = gpu.put(before)
    for _ in range(launches):
        gpu.call("cuMemcpyHtoD_v2", words, ctypes.c_void_p(before.ctypes.data), ctypes.c_size_t(before.nbytes))
        if behind:
            launch(gpu, behind, bug.shape, words, overlaps=False)
        launch(gpu, text, bug.shape, words, overlaps=bool(behind))
        gpu.call("cuCtxSynchronize")
        after = np.zeros(64, np.uint32)
        gpu.call("cuMemcpyDtoH_v2", ctypes.c_void_p(after.ctypes.data), words, ctypes.c_size_t(after.nbytes))
        wrong += after.tolist() != bug.expected
    return wrong


def run_alone(name: str, form: str, launches: int, command: list[str], log: Path | None) -> dict[str, Any]:
    """Runs one kernel in a process of its own behind ``command``; what became of it."""
    own = [sys.executable, "-m", "tests.gpu.sanitized_bugs", "--one", name, form, "--launches", str(launches)]
    try:
        ended = subprocess.run([*command, *own], capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"ended": "never"}
    output = ended.stdout + ended.stderr
    if log is not None:
        log.write_text(output)
    found = re.findall(r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY)(\S.*)$", output, re.M)
    counted = re.search(r"wrong (\d+) of (\d+)", output)
    return {
        "ended": ended.returncode,
        "wrong": int(counted[1]) if counted else None,
        "reported": found[:3],
    }


def examine(name: str, sanitizer: str, launches: int, logs: Path | None) -> dict[str, Any]:
    """Both kernels of a bug: alone, and under each tool."""
    record: dict[str, Any] = {}
    for form in FORMS:
        log = None if logs is None else logs / f"{name}-{form}.log"
        record[form] = {"alone": run_alone(name, form, launches, [], log)}
        for tool in TOOLS:
            command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
            log = None if logs is None else logs / f"{name}-{form}-{tool}.log"
            record[form][tool] = run_alone(name, form, 1, command, log)
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description="compute-sanitizer on the public bugs of sm_90.")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="its command (compute-sanitizer)")
    parser.add_argument("--processes", type=int, default=8, help="kernels examined at the same time (8)")
    parser.add_argument("--launches", type=int, default=1000, help="of each kernel alone (1000)")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--logs", type=Path, help="folder for the output of each run")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "FORM"), help="launch one kernel in this process")
    options = parser.parse_args()
    if options.one:
        name, form = options.one
        wrong = wrong_launches(BUGS[name], fixed=form == "fixed", launches=options.launches)
        print(f"wrong {wrong} of {options.launches}")
        return 0
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.processes) as pool:
        jobs = {
            name: pool.submit(examine, name, options.sanitizer, options.launches, options.logs) for name in ON_SM_90
        }
        records = {name: job.result() for name, job in jobs.items()}
    for name, record in records.items():
        for form in FORMS:
            print(name, form, {tool: entry["ended"] for tool, entry in record[form].items()}, record[form]["alone"])
    said = subprocess.run([options.sanitizer, "--version"], capture_output=True, text=True, check=False).stdout
    if options.json:
        version = re.findall(r"Version (\S+)", said)
        document = {"compute-sanitizer": version, "launches": options.launches, "bugs": records}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(record["fixed"]["alone"].get("wrong") != 0 for record in records.values()))


if __name__ == "__main__":
    sys.exit(main())
