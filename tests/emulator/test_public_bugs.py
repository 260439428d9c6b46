"""Bugs of public projects in small: what is reported on each, nothing where it is fixed, and the table of the docs."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.emulator.diagnostics.diagnosis import diagnose
from cute_kernels.emulator.errors import EmulatorError
from tests.emulator.ptx import aligned, module
from tests.emulator.public_bugs import BUGS, Bug

PAGE = Path(__file__).parents[2] / "docs" / "emulator" / "public_bugs.md"
SCHEDULES = [
    Options(native=False),
    Options(native=True),
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


@pytest.mark.parametrize("name", BUGS)
def test_the_fixed_kernel_is_silent_and_right(name: str):
    for options in SCHEDULES:
        assert launch(BUGS[name], options, fixed=True) == BUGS[name].expected, options


@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.kinds])
def test_the_faulty_kernel_is_reported(name: str):
    bug = BUGS[name]
    for number, options in enumerate(SCHEDULES):
        if number >= 2 and not bug.always:
            continue
        with pytest.raises(EmulatorError, match=re.compile(bug.message, re.S)) as error:
            launch(bug, options, fixed=False)
        kind = diagnose(error.value).kind
        assert kind in (bug.kinds[:1] if number < 2 else bug.kinds), options


@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if not bug.kinds])
def test_what_is_not_reported(name: str):
    """If one of these is reported some day, the table has to say so."""
    for options in SCHEDULES:
        assert launch(BUGS[name], options, fixed=False) == BUGS[name].expected


def rows() -> Iterator[str]:
    for bug in BUGS.values():
        report = f"`{bug.kinds[0]}`" if bug.kinds else "nothing"
        report += "" if bug.always else ", under some schedules"
        yield f"| [{bug.project} #{bug.number}]({bug.url}) | {bug.flaw} | {report} |"


def test_the_page_has_the_table():
    page = PAGE.read_text()
    table = [line for line in page.splitlines() if line.startswith("| [")]
    assert table == list(rows())
    found = sum(bool(bug.kinds) for bug in BUGS.values())
    assert f"{found} of {len(BUGS)} are reported" in page
