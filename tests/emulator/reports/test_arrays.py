"""Reports name the arrays of shared memory: variables of CuTe DSL programs, symbols of any other PTX."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

from cute_kernels.dsl.allocations import Allocations
from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.programs import capture
from cute_kernels.emulator.programs.program_run import run_program
from cute_kernels.emulator.reports.arrays import array_at, assigned_variable, plain_name
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch

PROGRAM = Path(__file__).with_name("array_program.py")
WHERE = re.compile(r"128 bytes from byte (0|128) on of (\S+) \(offset (\d+) of the shared memory of CTA 0\): (.*)")


def reports(*arguments: str) -> list[EmulatorError]:
    """Whatever the emulator reports of the program."""
    found: list[EmulatorError] = []

    def note(error: EmulatorError) -> bool:
        found.append(error)
        return True

    with capture("sm_90a", Options(going_on=note, without=("uninitialised",))) as session:
        assert run_program(str(PROGRAM), [*arguments], session, pytest.fail) == 0
    return found


@pytest.fixture(scope="module")
def races() -> list[EmulatorError]:
    return reports("all")


def test_arrays_of_cute_dsl_have_the_names_of_their_variables(races: list[EmulatorError]) -> None:
    """Each array is written as a whole, one after the other, and races with its reader."""
    names: dict[str, set[int]] = {}
    for error in races:
        byte, name, offset, elements = WHERE.fullmatch(diagnose(error).memory).groups()
        assert elements == f"{name}[{int(byte) // 4}] to {name}[{int(byte) // 4 + 31}]"
        names.setdefault(name, set()).add(int(offset) - int(byte))
    order = ["first", "second", "third", "storage.early", "storage.late", "tensor", "inner", "reserved"]
    assert list(names) == order and all(len(starts) == 1 for starts in names.values())
    begin = {name: starts.pop() for name, starts in names.items()}
    dynamic = {name: begin[name] - 2048 for name in order[3:]}  # behind 768 bytes of static arrays, aligned to 1024
    # 256 bytes of the system, a structure aligned to 128 (24 bytes, 128 bytes from its start on two arrays), 20 bytes.
    assert dynamic == {
        "reserved": 0, "storage.early": 384, "storage.late": 640, "tensor": 916, "inner": 1536,
    }  # fmt: skip


def test_what_is_not_certain_has_no_name(races: list[EmulatorError]) -> None:
    """A static array that is not used, memory of another size, bytes of two arrays or of none, an unknown launch."""
    memories = {diagnose(error).memory for error in reports("unused")}
    assert memories == {f"128 bytes at offset {1024 + at} of the shared memory of CTA 0" for at in (512, 640)}
    error = races[0]
    ptx, kernel, made = error.ptx, error.kernel, error.launch
    inside = {"storage": (2048 + 256, 16), "tensor": (2048 + 916, 1), "inner": (2048 + 1536 + 252, 4)}
    for name, place in inside.items():
        found = array_at(ptx, kernel, made, *place)
        assert found is not None and found.name.partition(".")[0] == name
    for place in ((2048 + 892, 16), (2048 + 912, 8), (2048 + 1200, 4), (2048 + 1536 + 252, 8)):
        assert array_at(ptx, kernel, made, *place) is None
    for change in ({"dynamic_smem": made.dynamic_smem + 16}, {"allocations": ()}):
        other = made.__class__(**{**vars(made), **change})
        assert array_at(ptx, kernel, other, *inside["tensor"]) is None
    assert array_at(ptx, kernel, None, *inside["tensor"]) is None


def test_a_program_that_gives_the_size_has_names() -> None:
    (first, *_) = reports("tensor", "8000")
    assert isinstance(first.launch.allocations[0], Allocations) and first.launch.dynamic_smem == 8000
    assert " of tensor (offset " in diagnose(first).memory


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("keyword", "wait for ring[1]"),
        ("list", "wait for pair[1]"),
        ("never", "the mbarrier ring[byte 8] is used, and is not initialised"),
        ("cube", "cube[0, 0, 3]"),
        ("ring", "cube[0, 0, stage 1]"),
        ("sum", "if other warps of the CTA read or write this array, too, sync_threads or a named barrier"),
    ],
)
def test_barriers_and_stages_have_the_names_of_the_source(fault: str, words: str) -> None:
    """An mbarrier in an argument by name, in a list, or nowhere initialised; a third coordinate is a stage where
    something fills stages. A race of the lanes of one warp may be one of several warps."""
    found: list[EmulatorError] = []
    with capture("sm_90a") as session:
        assert run_program(str(PROGRAM.with_name("named_program.py")), [fault], session, found.append) != 0
    report = diagnose(found[0])
    assert words in report.sentence + report.memory + report.help


def test_symbols_of_ptx() -> None:
    """Static and dynamic arrays of any compiler, in the order and with the alignment of the PTX."""
    body = """
    .shared .align 4 .b8 _ZZ6kernelILi64EEvPfE4tile[68];
    .shared .align 16 .b8 plain[8];
    mov.u32 %r1, {array};
    ld.shared.u32 %r2, [%r1 + 4];
    ret;
    """
    for array, name, begin in (
        ("_ZZ6kernelILi64EEvPfE4tile", "tile", 1024), ("plain", "plain", 1104), ("dynamic", "dynamic", 2048),
    ):  # fmt: skip
        with pytest.raises(EmulatorError) as raised:
            launch(module(body.format(array=array)), np.zeros(4, np.uint32), np.zeros(4, np.uint32))
        expected = f"4 bytes from byte 4 on of {name} (offset {begin + 4} of the shared memory of CTA 0)"
        assert raised.value.kind == "uninitialised-read" and diagnose(raised.value).memory == expected


def test_names_of_cxx() -> None:
    """By the mangling of the Itanium C++ ABI; where a name can be read in two ways the symbol stays."""
    names = {
        "_ZN2ns12shared_in_nsE": "shared_in_ns", "_ZN12_GLOBAL__N_14tileE": "tile", "_ZZ1cE4tile_0": "tile",
        "_ZZ6kernelILi64EEvPfE4tile": "tile",
    }  # fmt: skip
    assert {symbol: plain_name(symbol) for symbol in names} == names
    for symbol in ("plain", "global_smem", "_ZZ1cE6E4tile", "_ZN3IntE4more", "_ZN1AILi3EE1bE"):
        assert plain_name(symbol) == symbol


def test_variables_of_expressions(tmp_path: Path) -> None:
    text = """
    a = f(alloc())
    self.b, (c, d) = alloc(), (alloc(), 1)
    e, g = alloc()
    h = i = alloc()
    alloc()
    k: object = f(
        alloc())
    use(m := alloc(), alloc())
    n = [alloc() for _ in range(2)]
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    found = [
        assigned_variable(str(path), number, place.start())
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for place in re.finditer(r"alloc", line)
    ]
    assert found == ["a", "b", "c", "", "", "", "k", "m", "", "n"]
    assert assigned_variable(str(tmp_path / "missing.py"), 1, 0) == ""
