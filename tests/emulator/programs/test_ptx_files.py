"""PTX and CUDA files as programs of the commands, and in the fixture's session: results against NumPy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from cute_kernels.commands import cli
from cute_kernels.emulator import EmulatorError, GlobalMemory, run
from cute_kernels.emulator.errors import GlobalMemoryRace
from cute_kernels.emulator.options import Options
from cute_kernels.emulator.programs import ptx_files
from cute_kernels.emulator.programs.capturing import capture
from cute_kernels.emulator.programs.recorded import Recorder, Replay
from cute_kernels.testing.ptx import module
from tests.processes import run_python

#: Multiplies x by a number, and counts its launches in a variable of the module, which goes to out.
COUNTS = """.version 8.8
.target sm_90a
.address_size 64
.global .align 4 .u32 launches = 10;
.visible .entry scale(.param .u64 x, .param .f32 by, .param .u64 out) {
  .reg .b32 %r<4>; .reg .f32 %f<3>; .reg .b64 %d<4>; .reg .pred %p;
  ld.param.u64 %d0, [x]; ld.param.f32 %f0, [by]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1;
  ld.global.f32 %f1, [%d0]; mul.f32 %f1, %f1, %f0; st.global.f32 [%d0], %f1;
  setp.ne.u32 %p, %r0, 0; @%p ret;
  ld.global.u32 %r1, [launches]; add.u32 %r1, %r1, 1; st.global.u32 [launches], %r1;
  ld.param.u64 %d2, [out]; st.global.u32 [%d2], %r1; ret;
}
"""
DESCRIPTION = {
    "arrays": {"x": {"shape": [32], "fill": "arange"}, "out": {"dtype": "int32", "shape": [1]}},
    "launches": [{"grid": 1, "block": 32, "arguments": ["x", 2.5, "out"]}] * 3,
}
LOOKS = """
import torch
def launches():
    x, out = torch.arange(32, device="cuda", dtype=torch.float32), torch.zeros(1, dtype=torch.int32, device="cuda")
    for number in range(1, 4):
        yield {"kernel": "scale", "grid": 1, "block": 32, "arguments": [x, 2.0, out]}
        assert out.item() == 10 + number and (x.cpu() == torch.arange(32) * 2.0**number).all()
    print("looked")
"""
#: All CTAs store to the same place.
RACE = "ld.param.u64 %d0, [p0]; mov.u32 %r1, %ctaid.x; st.global.u32 [%d0], %r1; ret;"
#: Each thread hands a number to one of the other warp.
TURN = """.shared .align 4 .b8 mine[256]; ld.param.u64 %d0, [p0]; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2;
    mov.u32 %r3, mine; add.u32 %r4, %r3, %r2; st.shared.u32 [%r4], %r1; bar.sync 0; xor.b32 %r2, %r2, 128;
    add.u32 %r4, %r3, %r2; ld.shared.u32 %r5, [%r4]; mul.wide.u32 %d1, %r1, 4; add.s64 %d0, %d0, %d1;
    st.global.u32 [%d0], %r5; ret;"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "kernel.ptx").write_text(COUNTS)
    (tmp_path / "launches.json").write_text(json.dumps(DESCRIPTION))
    (tmp_path / "looks.py").write_text(LOOKS)
    (tmp_path / "race.ptx").write_text(module(RACE, parameters=1))
    race = {"arrays": {"x": {"shape": [1]}}, "launches": [{"grid": 2, "block": 1, "arguments": ["x"]}]}
    (tmp_path / "race.json").write_text(json.dumps(race))
    return tmp_path


def test_emulate_with_a_json_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "--arch", "sm_90a", str(files / "kernel.ptx"), str(files / "launches.json")]) == 0
    assert capsys.readouterr().out.count("scale: grid 1x1x1, block 32x1x1") == 3


@pytest.mark.parametrize("function", ["", ":launches"])
def test_emulate_with_a_function_that_looks_at_results(files: Path, function: str, capsys) -> None:
    assert cli.main(["emulate", "--quiet", str(files / "kernel.ptx"), f"{files / 'looks.py'}{function}"]) == 0
    assert "looked" in capsys.readouterr().out


def test_a_fault_is_reported_with_its_line(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "--quiet", str(files / "race.ptx"), str(files / "race.json")]) == 3
    assert "error[global-race]" in capsys.readouterr().err


def test_check_finds_it_too(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--seeds", "1", str(files / "race.ptx"), str(files / "race.json")]) == 3
    assert "global-race" in capsys.readouterr().err
    assert cli.main(["check", "--seeds", "1", str(files / "kernel.ptx"), str(files / "launches.json")]) == 0


def test_mutate_takes_a_ptx_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "turn.ptx").write_text(module(TURN, parameters=1))
    turn = {"arrays": {"x": {"shape": [64]}}, "launches": [{"grid": 1, "block": 64, "arguments": ["x"]}]}
    (files / "turn.json").write_text(json.dumps(turn))
    assert cli.main(["mutate", str(files / "turn.ptx"), str(files / "turn.json")]) == 0
    assert "1 mutant, 1 killed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[", "is no JSON"),
        ("a.json", "{}", "must be an object with a list 'launches'"),
        ("a.json", '{"launches": [{"grid": 1}]}', "without 'block'"),
        ("a.json", '{"launches": [{"grid": 1, "block": 1, "threads": 3}]}', "'threads' of a launch is not known"),
        ("a.json", '{"launches": [{"grid": 1, "block": 1, "arguments": ["y"]}]}', "'y' is none of the arrays"),
        ("a.json", '{"arrays": {"x": {"dtype": "f99"}}, "launches": []}', "'f99' of array x is none of torch"),
        ("a.json", '{"launches": [3]}', "each of 'launches' must be an object"),
        ("a.json", '{"launches": [{"grid": 1, "block": 1, "arguments": 5}]}', "its 'arguments' a list"),
        ("a.json", '{"launches": [{"grid": 1, "block": 1, "cooperative": "no"}]}', "cooperative is a str"),
        ("a.json", '{"launches": [{"grid": 1, "block": 1, "dynamic_smem": "4"}]}', "dynamic_smem is a str"),
        ("a.json", '{"arrays": {"x": 3}, "launches": []}', "'arrays' must be an object, and each array in it"),
        ("a.json", '{"arrays": {"x": {"dtype": 3}}, "launches": []}', "'3' of array x is none of torch"),
        ("a.json", '{"arrays": {"x": {"shape": "4"}}, "launches": []}', "shape '4' of array x"),
        ("a.json", '{"arrays": {"x": {"shape": [4], "fill": [1]}}, "launches": []}', "1 numbers: must be 4"),
        ("a.json", '{"launches": [{"grid": "x", "block": 1}]}', "a.json, launch 1: grid"),
        ("a.json", '{"launches": [{"grid": 1, "block": 2048, "arguments": [0, 1.5, 0]}]}', "2048 threads per CTA"),
        ("a.json", '{"launches": [{"grid": 1, "block": 1, "arguments": [0]}]}', "a.json, launch 1: "),
        ("a.json", '{"launches": [{"grid": 1, "block": 1, "arguments": [null, 1.5]}]}', "a.json, launch 1: "),
        ("a.py", "x = 1", "has no function 'launches'"),
        ("a.py", "def launches():\n    yield 3", "launch 1: a launch is described by a int"),
    ],
)
def test_descriptions_that_cannot_be_used(files: Path, name: str, text: str, message: str, capsys) -> None:
    (files / name).write_text(text)
    for command in (["emulate"], ["check", "--seeds", "1"], ["debug", "--command", "c"]):
        assert cli.main([*command, str(files / "kernel.ptx"), str(files / name)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("cute-kernels: error: ") and message in lines[0]


def test_memory_that_there_is_not(files: Path) -> None:
    """An array beyond a limit of the process, and one beyond any machine, in one line."""
    for shape, limit in (([1 << 28], 2 << 30), ([1 << 50], None)):
        launch = {"grid": 1, "block": 1, "arguments": ["x", 1.0, "x"]}
        described = {"arrays": {"x": {"shape": shape}}, "launches": [launch]}
        (files / "large.json").write_text(json.dumps(described))
        set_limit = "" if limit is None else (
            "import resource, torch, cute_kernels.emulator.programs.capturing as c\n"
            "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
            f"resource.setrlimit(resource.RLIMIT_AS, (now + {1 << 29}, now + {1 << 29}))\n"
        )  # fmt: skip
        code = (
            f"import cute_kernels.commands.cli as cli\n{set_limit}"
            f"raise SystemExit(cli.main(['emulate', {str(files / 'kernel.ptx')!r}, {str(files / 'large.json')!r}]))"
        )
        done = run_python("-c", code)
        assert done.returncode == 2, done.stderr
        line = done.stderr.splitlines()[-1]
        assert line.startswith("cute-kernels: error: not enough memory: ") and "the machine has" in line
        assert "Traceback" not in done.stderr


def test_without_a_description(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", str(files / "kernel.ptx")]) == 2
    assert "needs one argument" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_cuda_file(files: Path) -> None:
    (files / "add.cu").write_text(
        'extern "C" __global__ void add(int* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 3; }'
    )
    with capture("sm_90a") as session:
        x = torch.arange(32, dtype=torch.int32, device="cuda")
        session.launch_ptx(files / "add.cu", x, 20, grid=1, block=32)
        assert (x.cpu().numpy() == np.arange(32) + np.where(np.arange(32) < 20, 3, 0)).all()


def test_the_session_launches_ptx() -> None:
    with capture("sm_90a") as session:
        x, out = torch.ones(32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
        session.launch_ptx(COUNTS, x, 3.0, out, grid=1, block=32)
        assert (x.cpu() == 3).all() and out.item() == 11
        with pytest.raises(GlobalMemoryRace):
            session.launch_ptx(module(RACE, parameters=1, target="sm_90a"), x, grid=2, block=1)
        with pytest.raises(ValueError, match="2 arguments for the 3 parameters of scale"):
            session.launch_ptx(COUNTS, x, 3.0, grid=1, block=32)


@pytest.mark.parametrize(
    ("target", "arch"), [("sm_90a", "sm_100a"), ("sm_90", "sm_89"), ("sm_100f", "sm_90a"), ("sm_100f", "sm_110a")]
)
def test_a_chip_does_not_run_ptx_of_another(target: str, arch: str) -> None:
    with capture(arch) as session, pytest.raises(EmulatorError, match=f"its PTX is for {target}, which"):
        session.launch_ptx(module("ret;", parameters=1, target=target), 0, grid=1, block=1)


@pytest.mark.parametrize(("target", "arch"), [("sm_80", "sm_86"), ("sm_90a", "sm_90"), ("sm_100f", "sm_103a")])
def test_a_chip_runs_ptx_that_is_for_it(target: str, arch: str) -> None:
    body = "ld.param.u64 %d0, [p0]; mov.u32 %r1, 7; st.global.u32 [%d0], %r1; ret;"
    with capture(arch) as session:
        out = torch.zeros(1, dtype=torch.int32, device="cuda")
        session.launch_ptx(module(body, parameters=1, target=target), out, grid=1, block=1)
        assert out.item() == 7


def test_variables_keep_their_values_in_one_memory() -> None:
    memory, x, out = GlobalMemory(), np.ones(32, np.float32), np.zeros(1, np.uint32)
    for number in range(1, 4):
        run(COUNTS, grid=1, block=32, args=[x, 1.0, out], memory=memory)
        assert out[0] == 10 + number
    run(COUNTS, grid=1, block=32, args=[x, 1.0, out])  # another module
    assert out[0] == 11


def test_a_recorded_launch_finds_the_variables_of_its_time() -> None:
    recorder = Recorder()
    with capture("sm_90a", recorder=recorder) as session:
        x, out = torch.ones(32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
        for _ in range(3):
            session.launch_ptx(COUNTS, x, 1.0, out, grid=1, block=32)
    assert len(recorder.launches) == 3
    for number in (3, 1, 2):
        replay = Replay(recorder.launches[number - 1])
        for _ in range(2):
            left = {each.nbytes: each for each in replay.run(Options()).memory}
            assert left[4].view(np.int32)[0] == 10 + number


@pytest.mark.parametrize("deep", ["[" * 100_000 + "]" * 100_000, '{"launches":' * 100_000])
def test_a_description_that_is_too_deep_is_no_json(files: Path, deep: str, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "deep.json").write_text(deep)
    assert cli.main(["emulate", str(files / "kernel.ptx"), str(files / "deep.json")]) == 2
    assert "deep.json is no JSON: maximum recursion depth" in capsys.readouterr().err


def test_what_a_description_says_commands_no_terminal(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "a.json").write_text(json.dumps({"arrays": {"\x1b[2J": {"dtype": "\x1b]0;x\x07"}}, "launches": []}))
    assert cli.main(["emulate", str(files / "kernel.ptx"), str(files / "a.json")]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error and r"array \x1b[2J" in error


@pytest.mark.parametrize("suffix", [".cu", ".ptx"])
def test_options_behind_a_file_are_named(suffix: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They would be those of a Python program; of these files nobody reads them."""
    (files / "kernel.cu").touch()
    script = str(files / f"kernel{suffix}")
    assert cli.main(["emulate", script, "a.json", "--arch", "sm_100a"]) == 2
    assert f"needs one argument: a JSON file or FILE.py:FUNCTION that describes its launches; --arch has to stand " \
        f"before {script}" in capsys.readouterr().err  # fmt: skip


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an nvcc that writes what it was given to ``words``, and makes PTX of it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    text = f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    (folder / "nvcc").write_text(text)
    (folder / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.mark.parametrize("name", ["-X.cu", "--help.cu", "@words.cu", "a b'(;&|).cu", "é.cu"])
def test_names_of_files_are_no_options(name: str, compiler: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (name, f"./{name}"):
        ptx_files.read(path, "sm_90a")
        *options, source = (tmp_path / "words").read_text().splitlines()
        assert source == f"./{name}" and options[:3] == ["-ptx", "-lineinfo", "-arch=sm_90a"] and len(options) == 5
    ptx_files.read(tmp_path / name, "sm_90a")
    assert (tmp_path / "words").read_text().splitlines()[-1] == str(tmp_path / name)


@pytest.mark.parametrize("name", ["$(touch a).cu", "`touch a`.cu", '";touch a;".cu', "\\$(touch a).cu", "\n.cu"])
def test_names_that_nvcc_would_execute_are_refused(name: str, compiler: Path, tmp_path: Path) -> None:
    """nvcc puts names of files into command lines of a shell, in double quotes."""
    with pytest.raises(ValueError, match="nvcc gives names to a shell, and must not get"):
        ptx_files.read(tmp_path / name, "sm_90a")
    assert not (tmp_path / "words").exists()


def test_an_nvcc_that_fails_is_named(compiler: Path, tmp_path: Path) -> None:
    (compiler / "nvcc").write_text("#!/bin/sh\necho no >&2\nexit 1\n")
    with pytest.raises(ValueError, match=rf"{compiler}/nvcc does not compile \S*a.cu \(NVCC_APPEND_FLAGS adds .*:\nno"):
        ptx_files.read(tmp_path / "a.cu", "sm_90a")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_gets_options_from_the_environment(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """-D, -I and -std, by a variable that nvcc itself reads."""
    (files / "more").mkdir()
    (files / "more" / "more.h").write_text("#define NAME name_of_header\n")
    (files / "-k.cu").write_text('#include <more.h>\nextern "C" __global__ void NAME(int* x) { *x = VALUE; }')
    monkeypatch.setenv("NVCC_APPEND_FLAGS", f"-DVALUE=4711 -I{files}/more -std=c++20")
    monkeypatch.chdir(files)
    ptx = ptx_files.read("-k.cu", "sm_90a")
    assert ".entry name_of_header" in ptx and "4711" in ptx
