"""Damaged programs end as they should, those of `tests.emulator.fuzz` and what it has found; and the fuzzer notices."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re

import numpy as np
import pytest

from cute_kernels.emulator import EmulatorError, UnsupportedPTX, gpu
from cute_kernels.emulator.scheduler import Scheduler
from tests.emulator.fuzz import __main__ as fuzz
from tests.emulator.fuzz import judge as judging
from tests.emulator.fuzz.damage import draw_program
from tests.emulator.fuzz.judge import guarded, judge
from tests.emulator.fuzz.programs import programs
from tests.emulator.ptx import launch, module

#: Inputs that once ended otherwise, as (seed, number).
FOUND = [
    (0, 2), (0, 42), (0, 76), (0, 112), (0, 150), (0, 862), (0, 1066), (0, 1193), (11, 806), (11, 945), (11, 1627),
    (11, 1950), (11, 2606), (12, 887), (12, 1613), (12, 284), (12, 6755), (12, 19042),
    (31, 5476), (31, 17364), (31, 18736), (31, 24772),
]  # fmt: skip


def test_programs_work_before_they_are_damaged():
    """But for frozen launches, which take longer than the limit on instructions, and some large boxes of copies."""
    for kind in programs()[:-1]:
        results = [judge(program) for program in kind[:: max(1, len(kind) // 6)]]
        assert not any(result.finding for result in results)
        assert sum(result.outcome == "success" for result in results) >= 0.6 * len(results), kind[0].name


def test_damaged_programs():
    found = [each for each in fuzz.verdicts(1, 0, 60, jobs=1) if each[1].finding]
    assert not found


@pytest.mark.parametrize(("seed", "number"), FOUND)
def test_what_was_found_once(seed: int, number: int):
    assert not judge(draw_program(seed, number)).finding


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b32 [%d0];", "st.global.b32 takes 2 operands .a, b.; 1 are given"),
        ("shfl.sync.bfly.b32 %r24%p4, %r1, 1, 31, -1;", "cannot read the instruction"),
        ("@%r3 mov.b32 %r1, 0;", "the guard %r3 is no predicate"),
        ("st.global.b32 [%d0+18446744073709551616], %r1;", "18446744073709551616 of an address has more than 64 bits"),
        ("ld.global.b32 %r1, [%d0+;];", "a number is expected"),
        ("ld.param.u64 ;", "0 operands, not 2"),
        ("mov.b32 %r1, 08;", "`08` is no integer: behind a leading 0 are octal digits"),
        (".loc 1", ".loc needs 2 words or more on its line"),
        (".shared .align 549754815912 .b8 wide[4];", ".align 549754815912: a power of two up to 16777216 is needed"),
        (".shared .align 12 .b8 odd[4];", ".align 12: a power of two"),
        ("mov.u32 %r1;", "mov.u32 takes 2 operands .d, a.; 1 are given"),
        (".loc 1 x 3", "`.loc 1 x` needs the numbers"),
        (".reg .b32 %many<2147483647>;", "2147483647 registers %many<n>; at most 1048576"),
        (
            "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r6,%r7}, {%r0,%r1,%r2,%r3}, {%d0,%r5}, {%r6,%r7};",
            "operand b of mma.* has %d0, a register of type .b64; a list of registers of type .b32",
        ),
    ],
)
def test_errors_name_what_is_wrong(body: str, message: str):
    with pytest.raises(UnsupportedPTX, match=message) as error:
        launch(module(f"ld.param.u64 %d0, [p0];\n{body}\nret;", parameters=1), np.zeros(64, np.uint32))
    assert error.value.ptx_line is not None


def test_a_module_without_a_target():
    with pytest.raises(UnsupportedPTX, match=".target needs 1 words or more on its line"):
        launch(re.sub(r"\.target .*", ".target", module("ret;")), 0)


def test_parameter_without_a_type():
    with pytest.raises(UnsupportedPTX, match="a parameter without a type, 'p0'"):
        launch(module("ret;", parameters=1).replace(".u64 p0", "p0"), 0)


def test_more_parameters_than_a_launch_takes():
    text = module("ret;", parameters=1).replace(".u64 p0", ".align 8 .b8 p0[2147483648]")
    with pytest.raises(ValueError, match="takes 2147483648 bytes of parameters, a launch 32764 at most"):
        launch(text, 0)


def _hang(*_: object, **__: object) -> None:
    while True:
        pass


def _crash(*_: object, **__: object) -> None:
    os.abort()


def _beyond(*_: object, **__: object) -> None:
    memory = guarded(bytes(4096))
    ctypes.string_at(memory.ctypes.data + 4096, 1)


def _raiser(error: Exception):
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("body", "outcome", "finding"),
    [
        (_raiser(KeyError("x")), "KeyError", "KeyError: 'x'"),
        (_raiser(ValueError("of a library")), "ValueError", "ValueError: of a library"),
        (_raiser(EmulatorError("")), "EmulatorError", "an error without a message"),
        (_crash, "crash", "the process ended with status -6"),
        (_beyond, "crash", "the process ended with status -11"),
        (_hang, "no end", "no end after 2 s"),
    ],
)
def test_a_program_that_ends_otherwise_is_a_finding(body, outcome: str, finding: str, monkeypatch):
    """And the inputs after it are judged all the same."""
    monkeypatch.setattr(judging, "run", body)
    results = list(fuzz.verdicts(0, 5, 2, seconds=2))
    assert [number for number, _ in results] == [5, 6]
    assert {(verdict.outcome, verdict.finding) for _, verdict in results} == {(outcome, finding)}


def test_errors_inside_of_the_emulator_are_findings(monkeypatch):
    monkeypatch.setattr(Scheduler, "_look_for_livelock", _raiser(IndexError("inside")))
    monkeypatch.setattr(gpu.Cluster, "exit", _raiser(IndexError("inside")))
    program = dataclasses.replace(programs()[1][0], options={})
    assert "IndexError: inside" in judge(program).finding


def test_an_input_is_the_same_whenever_it_is_drawn():
    assert draw_program(3, 14) == draw_program(3, 14) != draw_program(3, 15)
