"""Bugs of public projects in small: what is reported on each, nothing where it is fixed, and the table of the docs."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.public_bugs import BUGS, Bug

#: By `python -m tests.gpu.sanitized_bugs`: one entry for each version of the tool, the newest last.
SANITIZER = json.loads((Path(__file__).parent / "data" / "compute_sanitizer_h200.json").read_text())
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
PAGE = Path(__file__).parents[2] / "docs" / "emulator" / "evidence.md"
SCHEDULES = [
    Options(),
    Options(completion="lazy"),
    Options(seed=1, completion="random", interleave="random"),
    Options(seed=2, completion="random", interleave="starve"),
]
ONE = {"grid": (1, 1, 1), "block": (32, 1, 1), "cluster": (1, 1, 1)}


def launch(bug: Bug, options: Options, *, fixed: bool) -> list[int]:
    """Runs one of the two kernels; returns the first 64 words."""
    words = aligned(np.arange(100, 1124, dtype=np.uint32))
    memory = GlobalMemory()
    memory.register_tensor(words, "p0")
    shape = ONE | {"dynamic_smem": 8192, "params": struct.pack("<Q", words.ctypes.data)} | bug.shape
    if bug.behind:
        run(module(bug.behind, parameters=1), **shape, memory=memory, options=options)
    run(bug.kernel(fixed=fixed), **shape, memory=memory, options=options, programmatic=bool(bug.behind))
    return words[:64].tolist()


def schedules(bug: Bug) -> list[Options]:
    """Those under which it is reported."""
    return [dataclasses.replace(options, strict=bug.strict) for options in SCHEDULES]


@pytest.mark.parametrize("name", BUGS)
def test_the_fixed_kernel_is_silent_and_right(name: str):
    for options in [*SCHEDULES, *schedules(BUGS[name])]:
        assert launch(BUGS[name], options, fixed=True) == BUGS[name].expected, options


@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.kinds])
def test_the_faulty_kernel_is_reported(name: str):
    bug = BUGS[name]
    for number, options in enumerate(schedules(bug)):
        if number >= 2 and not bug.always:
            continue
        with pytest.raises(EmulatorError, match=re.compile(bug.message, re.S)) as error:
            launch(bug, options, fixed=False)
        kind = diagnose(error.value).kind
        assert kind in (bug.kinds[:1] if number < 2 else bug.kinds), options


@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.strict or not bug.kinds])
def test_what_is_not_reported(name: str):
    """If one of these is reported some day, the table has to say so."""
    for options in SCHEDULES:
        assert launch(BUGS[name], options, fixed=False) == BUGS[name].expected


def reporting_tools(name: str, form: str) -> list[str]:
    """Of compute-sanitizer, on one of the two kernels: a tool reports by its exit status."""
    return [tool for tool in TOOLS if SANITIZER[-1]["bugs"][name][form][tool]["ended"] == 9]


def sanitizer_cells(name: str) -> str:
    """What compute-sanitizer reports on the faulty kernel, and what becomes of that kernel on the GPU alone."""
    if name not in SANITIZER[-1]["bugs"]:
        return "|"
    tools = reporting_tools(name, "faulty")
    report = ", ".join(tools) or "nothing"
    if tools and reporting_tools(name, "fixed"):
        report += ", on the fixed one as well"
    alone = SANITIZER[-1]["bugs"][name]["faulty"]["alone"]
    return f"{report} | {'hangs' if alone['ended'] == 'never' else alone['wrong']}"


def rows() -> Iterator[str]:
    for name, bug in BUGS.items():
        report = f"`{bug.kinds[0]}`" if bug.kinds else "nothing"
        report += "" if bug.always else ", under some schedules"
        report += ", with `--strict`" if bug.strict else ""
        yield f"| [{bug.project} #{bug.number}]({bug.url}) | {bug.flaw} | {report} | {sanitizer_cells(name)} |"


def test_the_page_has_the_table():
    page = PAGE.read_text()
    table = [line for line in page.splitlines() if line.startswith("| [")]
    assert table == list(rows())
    page = " ".join(page.split())
    found = sum(bool(bug.kinds) for bug in BUGS.values())
    assert f"{found} of {len(BUGS)} are reported" in page
    of_sm_90 = SANITIZER[-1]["bugs"]
    here = sum(bool(BUGS[name].kinds) for name in of_sm_90)
    there = [name for name in of_sm_90 if reporting_tools(name, "faulty")]
    told_apart = sum(not reporting_tools(name, "fixed") for name in there)
    assert f"of these {len(of_sm_90)} the emulator reports {here} and compute-sanitizer {len(there)}" in page
    assert f"{told_apart} of them without a report on the fixed kernel" in page
    assert f"compute-sanitizer {SANITIZER[-1]['compute-sanitizer']}" in page


def test_the_fixed_kernels_are_right_on_a_gpu():
    """So that what the GPU does with the faulty ones is comparable."""
    for record in SANITIZER:
        assert list(record["bugs"]) == [name for name, bug in BUGS.items() if "tcgen05" not in bug.body]
        for name, entry in record["bugs"].items():
            assert entry["fixed"]["alone"] == {"ended": 0, "wrong": 0, "reported": []}, name
