"""Damaged programs end as they should, those of `tests.emulator.fuzz` and what it has found; and the fuzzer notices."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.emulator import EmulatorError, UnsupportedPTX
from cute_kernels.emulator.machine.launch import launch as launches
from cute_kernels.emulator.machine.launch.scheduler import Scheduler
from cute_kernels.testing.ptx import module
from tests.emulator.fuzz import __main__ as fuzz
from tests.emulator.fuzz import judge as judging
from tests.emulator.fuzz import workers
from tests.emulator.fuzz.damage import DAMAGE, draw_program
from tests.emulator.fuzz.judge import guarded, judge
from tests.emulator.fuzz.programs import kind_of, program_of, programs
from tests.emulator.ptx_launch import launch

#: Inputs that once ended otherwise; each is named by seed and number that drew it at that time.
FOUND = sorted((Path(fuzz.__file__).parent / "found").glob("*.json"))
#: Each kind of program has so many that take longer than the limit on instructions, or have a fault on purpose.
ENDS_OTHERWISE = {"synchronisation": 0.5, "kernels": 1.0, "tensor copies": 0.4}


@pytest.mark.parametrize("kind", programs())
def test_programs_work_before_they_are_damaged(kind: str):
    members = programs()[kind]
    results = [judge(program) for program in members[:: max(1, len(members) // 6)]]
    assert not any(result.finding for result in results)
    assert sum(result.outcome == "success" for result in results) >= (1 - ENDS_OTHERWISE.get(kind, 0.2)) * len(results)


def test_damaged_programs():
    results = list(workers.verdicts(list(fuzz.inputs_of(range(1, 3), 0, 60))))
    assert len(results) == 60
    assert not [each for each in results if each[1].finding]


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_was_found_once(path: Path):
    assert not judge(fuzz.read_finding(path)).finding


def test_every_kind_of_damage_damages():
    """And every kind of program is drawn."""
    drawn = [draw_program(5, number) for number in range(400)]
    assert {kind_of(program.name) for program in drawn} == set(programs())
    for kind in DAMAGE:
        alone = [program for program in drawn if program.damage == (kind,)]
        assert alone
        for program in alone:
            before = program_of(program.name)
            changed = {
                name for name in ("text", "params", "buffers", "grid", "block", "cluster", "shared")
                if getattr(program, name) != getattr(before, name)
            }  # fmt: skip
            assert changed <= CHANGES.get(kind, {"text"})


CHANGES = {
    "descriptors": {"text", "params"}, "shape": {"grid", "block", "cluster", "shared"}, "parameters": {"params"},
    "tensor maps": {"params", "buffers"}, "contents": {"buffers"}, "options": set(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b32 [%d0];", "st.global.b32 takes 2 operands .a, b.; 1 are given"),
        ("shfl.sync.bfly.b32 %r24%p4, %r1, 1, 31, -1;", "cannot read the instruction"),
        ("@%r3 mov.b32 %r1, 0;", "the guard %r3 is no predicate"),
        ("st.global.b32 [%d0+18446744073709551616], %r1;", "the integer 18446744073709551616 has more than 64 bits"),
        (
            "st.global.b32 [%d0+18446744073709551615+1], %r1;",
            "the offset 18446744073709551616 of an address has more than 64 bits",
        ),
        ("ld.global.b32 %r1, [%d0+;];", "a number is expected"),
        ("ld.param.u64 ;", "0 operands, not 2"),
        (
            "cp.async.bulk.wait_group 18446744073709551615;",
            "operand N of .* is the integer literal 18446744073709551615: must be an integer literal of 32 bits",
        ),
        ("ld.global.b32 %r1, [%d0+08];", "`08` is no integer"),
        ("mov.b32 %r1, 08;", "`08` is no integer: behind a leading 0 are octal digits"),
        (".loc 1", ".loc needs 2 words or more on its line"),
        (".shared .align 549754815912 .b8 wide[4];", ".align 549754815912: must be a power of two up to 16777216"),
        (".shared .align 12 .b8 odd[4];", ".align 12: must be a power of two"),
        ("mov.u32 %r1;", "mov.u32 takes 2 operands .d, a.; 1 are given"),
        (".loc 1 x 3", "`.loc 1 x` needs the numbers"),
        (".reg .b32 %many<2147483647>;", r"2147483647 registers %many<n> besides \d+; at most 1048576"),
        (
            "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r6,%r7}, {%r0,%r1,%r2,%r3}, {%d0,%r5}, {%r6,%r7};",
            "operand b of mma.* has %d0, a register of type .b64: must be a list of 2 registers of type .b32",
        ),
    ],
)
def test_errors_name_what_is_wrong(body: str, message: str):
    with pytest.raises(UnsupportedPTX, match=message) as error:
        launch(module(f"ld.param.u64 %d0, [p0];\n{body}\nret;", parameters=1), np.zeros(64, np.uint32))
    assert error.value.ptx_line is not None


def test_a_module_without_a_target():
    with pytest.raises(UnsupportedPTX, match=".target .address_size: there is no such target"):
        launch(re.sub(r"\.target .*", ".target", module("ret;")), 0)


def test_parameter_without_a_type():
    with pytest.raises(UnsupportedPTX, match="a parameter without a type, 'p0'"):
        launch(module("ret;", parameters=1).replace(".u64 p0", "p0"), 0)


def test_more_parameters_than_a_launch_takes():
    text = module("ret;", parameters=1).replace(".u64 p0", ".align 8 .b8 p0[2147483648]")
    with pytest.raises(UnsupportedPTX, match="parameters of 2147483648 bytes; a launch takes 32764 at most") as error:
        launch(text, 0)
    assert error.value.ptx_line is not None


def test_more_static_shared_memory_than_a_cta_has():
    head = ".shared .b8 a[200000]; .shared .b8 b[200000];"
    with pytest.raises(ValueError, match="400000 bytes of static shared memory: must be at most 232448"):
        launch(module("mov.u32 %r1, a; mov.u32 %r2, b; ret;", parameters=1, head=head), 0)


def test_global_variables_that_no_memory_is_left_for(monkeypatch):
    zeros = np.zeros

    def few(shape, *rest):
        if shape == 4001:
            raise MemoryError
        return zeros(shape, *rest)

    monkeypatch.setattr(launches.np, "zeros", few)
    with pytest.raises(ValueError, match=r"the .global variable a has 4000 bytes, for which there is no memory"):
        launch(module("ret;", parameters=1, head=".global .b8 a[4000];"), 0)


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
        (_raiser(EmulatorError("x")), "EmulatorError", "an error that names no line of the PTX: x"),
        (_crash, "crash", "the process ended with status -6"),
        (_beyond, "crash", "the process ended with status -11"),
        (_hang, "no end", "no end after 1 s"),
    ],
)
def test_a_program_that_ends_otherwise_is_a_finding(body, outcome: str, finding: str, monkeypatch):
    """And the inputs after it are judged all the same."""
    monkeypatch.setattr(judging, "run", body)
    results = list(workers.verdicts([(0, 5), (3, 6)], input_seconds=1 if body is _hang else 60))
    assert [which for which, _ in results] == [(0, 5), (3, 6)]
    assert {(verdict.outcome, verdict.finding) for _, verdict in results} == {(outcome, finding)}


def test_errors_inside_of_the_emulator_are_findings(monkeypatch):
    monkeypatch.setattr(Scheduler, "_look_for_livelock", _raiser(IndexError("inside")))
    monkeypatch.setattr(launches.Cluster, "exit", _raiser(IndexError("inside")))
    assert "IndexError: inside" in judge(programs()["instructions"][0]).finding


def test_an_input_is_the_same_whenever_it_is_drawn():
    assert draw_program(3, 14) == draw_program(3, 14) != draw_program(3, 15)


def test_an_error_of_a_launch_has_to_name_a_value(monkeypatch):
    monkeypatch.setattr(judging, "run", lambda *_, **__: None)
    monkeypatch.setattr(judging, "_on_purpose", lambda error: True)
    for message, finding in (("too many", "an error that names no value: too many"), ("7 are too many", "")):
        monkeypatch.setattr(judging, "run", _raiser(ValueError(message)))
        assert judge(programs()["instructions"][0]).finding == finding


def test_findings_are_written_and_run_again(tmp_path: Path, monkeypatch, capfd):
    """And counted by kind of program and of damage; the exit status says that there are some."""
    with monkeypatch.context() as patched:
        patched.setattr(judging, "run", _raiser(KeyError("x")))
        assert fuzz.main(["--inputs", "6", "--seed", "3-4", "--findings", str(tmp_path)]) == 1
    output = capfd.readouterr().out
    names = sorted(path.stem for path in tmp_path.glob("*.json"))
    assert names == ["3-0", "3-1", "3-2", "4-0", "4-1", "4-2"]
    rows = {line[:16].strip(): [int(word) for word in line[16:].split()] for line in output.splitlines()
            if re.fullmatch(r"[a-z0-9 ]{16}  (?: *\d+){4}", line)}  # fmt: skip
    assert set(rows) == {*programs(), *DAMAGE}
    assert sum(rows[kind][0] for kind in programs()) == sum(rows[kind][3] for kind in programs()) == 6
    assert "6 times KeyError at" in output
    for path in tmp_path.glob("*.json"):
        seed, number = map(int, path.stem.split("-"))
        drawn, read = draw_program(seed, number), fuzz.read_finding(path)
        assert (read.text, read.params, read.buffers) == (drawn.text, drawn.params, drawn.buffers)
        assert path.with_suffix(".ptx").read_text() == drawn.text
    paths = [str(path) for path in tmp_path.glob("*.json")]
    assert fuzz.main(["--repeat", *paths]) == 0
    assert "6 inputs" in capfd.readouterr().out


def test_no_more_inputs_than_there_is_time_for(capfd):
    assert fuzz.main(["--inputs", "1000000", "--seconds", "1"]) == 0
    tried = int(re.search(r"(\d+) inputs in", capfd.readouterr().out)[1])
    assert tried < 1000


@pytest.mark.parametrize("given", ["", "x", "5-4", "-1", "1-2-3"])
def test_a_seed_that_is_none(given: str, capsys):
    with pytest.raises(SystemExit):
        fuzz.main([f"--seed={given}"])
    assert f"{given!r}: must be a number such as 7, or a range such as 3-9" in capsys.readouterr().err
