"""``cute-kernels emulate``: whose arguments are whose, how it ends, and the PTX that it keeps."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from cute_kernels.commands import cli
from cute_kernels.commands.emulate import replay_words
from cute_kernels.emulator import EmulatorError, Hang, IllegalAccess, Options, UnsupportedPTX, run
from cute_kernels.emulator.errors import error_behind
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.programs import capture, host
from cute_kernels.operations.runtime import emulated
from cute_kernels.testing.ptx import module
from tests.emulator import exit_program
from tests.emulator.kernel_inputs import make_case
from tests.nightly import by_day
from tests.processes import run_python

PROGRAM = str(Path(exit_program.__file__))


def emulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return run_python("-m", "cute_kernels", "emulate", *arguments)


def ended(*arguments: str) -> int:
    """Exit status of the command in this process."""
    try:
        return cli.main(["emulate", *arguments])
    except SystemExit as end:
        return end.code or 0


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--m", "1024"],  # a prefix of two of the command's options
        ["--comp", "lazy", "--see", "4"],  # of one
        ["--seed", "x", "--arch", "sm_75", "--quiet"],  # its options, with values that it would refuse
        ["--help"],
        ["-h"],
        ["--version", "--v"],
        ["--", "--seed", "1", "--"],
        ["-", "-1", "-x=3", "--unknown=1", "", "two words", "--trace"],
    ],
)
def test_what_follows_the_script_is_the_script_s(arguments: list[str]) -> None:
    options = cli._parser().parse_args(["emulate", "--seed", "7", "program.py", *arguments])
    assert (options.script, options.seed, options.completion) == ("program.py", 7, "eager")
    assert options.arguments == arguments


@pytest.mark.parametrize("script", ["program.py", "-dash.py"])
def test_the_replay_command_has_the_roles_and_the_same_script(script: str) -> None:
    roles = ["--roles", "load=4,add=0-2", "--roles", "gemm:tensor core=1"]
    options = cli._parser().parse_args(["emulate", *roles, "--", script, "--", "--roles", "x"])
    again = cli._parser().parse_args(replay_words(options, Schedule(seed=7))[1:])
    assert again.roles == [("", ("add", "add", "add", "", "load")), ("gemm", ("", "tensor core"))]
    assert (again.script, again.arguments, again.seed) == (script, ["--", "--roles", "x"], 7)


@pytest.mark.parametrize(
    "own, expected",
    [
        ([], {}),
        (["--comp", "lazy", "--quiet", "--se=3"], {"completion": "lazy", "quiet": True, "seed": 3}),
        (["--trace", "program.py"], {"trace": Path("program.py").absolute()}),
        (["--keep-ptx=folder", "--no-detectors"], {"keep_ptx": Path("folder"), "no_detectors": True}),
        (["--without", "exits", "--without=tensor_lanes"], {"without": ["exits", "tensor_lanes"]}),
        (["--max-idle-blocks", "-1", "--"], {"max_idle_blocks": -1}),
        (["--processes", "3"], {"processes": 3}),
    ],
)
def test_options_before_the_script_are_the_command_s(own: list[str], expected: dict) -> None:
    options = cli._parser().parse_args(["emulate", *own, "script.py", "--seed", "9", "script.py"])
    assert options.script == "script.py" and options.arguments == ["--seed", "9", "script.py"]
    for name, value in expected.items():
        assert getattr(options, name) == value


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: SCRIPT"),
        (["--"], "the following arguments are required: SCRIPT"),
        (["--quiet", "--seed"], "argument --seed: expected one argument"),
        (["--max", "4", "script.py"], "ambiguous option: --max"),
        (["--unknown", "script.py", "--m"], "unrecognized arguments: --unknown"),
        (["--arch", "sm_75", "script.py"], "invalid choice: 'sm_75'"),
        (["--processes", "0", "script.py"], "argument --processes: '0': must be a positive integer"),
    ],
)
def test_unusable_options_before_the_script(capsys, arguments: list[str], message: str) -> None:
    assert ended(*arguments) == 2 and message in capsys.readouterr().err


def test_the_program_sees_its_arguments_as_they_are(tmp_path, capsys) -> None:
    script = tmp_path / "program.py"
    script.write_text("import json, sys\nprint(json.dumps(sys.argv))\n")
    arguments = ["--m", "1024", "--help", "--", "--seed", "3"]
    assert cli.main(["emulate", "--quiet", str(script), *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == [str(script), *arguments]


# --- exit status ------------------------------------------------------------------------------------------------------


ENDINGS = {
    "normal": (0, ""),
    "exit": (0, ""),
    "exit-3": (3, ""),
    "exit-7": (7, ""),
    "raise": (1, "ValueError: the program's own"),
    "fault": (3, "error[out-of-bounds]: a store"),
    "fault-caught": (3, "note: the program caught the error, and went on"),
    "fault-thread": (3, "note: the program caught the error, and went on"),
    "fault-executor": (3, "note: the program caught the error, and went on"),
    "both-caught": (3, "error[unsupported]"),
    "fault-wrapped": (3, "ValueError: a kernel failed"),
    "fault-5": (5, ""),
    "illegal": (3, "is illegal: grid (0, 1, 1) has no CTA"),
    "hang": (3, "error[hang]: the kernel hangs: in CTA 0 warp 0 waits for barrier"),
    "refused": (4, "opcode 'alloca.u32' is not implemented"),
    "refused-caught": (4, "error[unsupported]"),
    "refused-thread": (4, "error[unsupported]"),
    "refused-wrapped": (4, "ValueError: a kernel failed"),
}
"""Of `exit_program`: argument -> exit status, and words on stderr."""


@pytest.mark.parametrize("how", by_day(["exit-7", "raise", "fault", "refused"], ["exit-7", "fault"]))
def test_exit_status_of_the_process(how: str) -> None:
    status, words = ENDINGS[how]
    done = emulate("--quiet", PROGRAM, how)
    assert done.returncode == status, done.stderr
    assert words in done.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ENDINGS)
def test_exit_status_says_who_failed(capsys, how: str) -> None:
    status, words = ENDINGS[how]
    found = ended("--quiet", PROGRAM, how)
    error = capsys.readouterr().err
    assert found == status and words in error and (words or not error)


@pytest.mark.parametrize(
    "folder, message",
    [
        ("", "argument --keep-ptx: the name is empty: must be that of a folder"),
        ("file", "cute-kernels: error: file is a file, and file is to be a folder"),
        ("file/below/it", "cute-kernels: error: file is a file, and file/below/it is to be a folder"),
    ],
)
def test_folders_that_cannot_be(tmp_path, monkeypatch, capsys, folder: str, message: str) -> None:
    """Nothing is run and nothing is written, the current folder included."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    assert ended("--keep-ptx", folder, PROGRAM, "normal") == 2 and message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and Path("file").read_text() == "mine"
    with pytest.raises(ValueError, match="keep_ptx is empty"), capture(keep_ptx=""):
        pytest.fail("reached")


def test_exit_status_of_arguments_and_files(tmp_path, capsys) -> None:
    assert ended("--keep-ptx", PROGRAM, PROGRAM, "normal") == 2
    assert ended(str(tmp_path / "missing.py")) == 2
    assert ended(str(tmp_path)) == 2
    assert f"{tmp_path}: must be the file of a program, and is a directory" in capsys.readouterr().err
    assert ended("--seed", "-1", PROGRAM, "normal") == 2
    assert "argument --seed: '-1' is not an integer from 0 to 2**63 - 1" in capsys.readouterr().err
    assert ended("--help") == 0 and capsys.readouterr().out.count("\n  3  a kernel is at fault") == 1


def test_an_error_behind_an_exception_is_found() -> None:
    fault = IllegalAccess("x")
    try:
        try:
            raise fault
        except IllegalAccess:
            raise KeyError("while handling")  # noqa: B904 - the context is what is tested
    except KeyError as error:
        assert error_behind(error) is fault
    try:
        try:
            raise fault
        except IllegalAccess:
            raise KeyError("instead of it") from None
    except KeyError as error:
        assert error_behind(error) is None
    assert error_behind(fault) is fault and error_behind(ValueError()) is None


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_every_launch_s_ptx_and_facts_are_kept(tmp_path, capsys) -> None:
    folder = tmp_path / "new" / "folder"
    arguments = ["emulate", "--arch", "sm_90a", "--keep-ptx", str(folder), PROGRAM]
    assert cli.main([*arguments, "fault"]) == 3
    first, second = (json.loads((folder / f"launch-{n}.json").read_text()) for n in (1, 2))
    assert sorted(path.name for path in folder.iterdir()) == sorted({first["ptx"], "launch-1.json", "launch-2.json",
                                                                     second["ptx"]})  # fmt: skip
    text = (folder / first["ptx"]).read_text()
    assert f".entry {first['kernel']}(" in text and ".target sm_90a" in text
    assert (first["grid"], first["block"], first["cluster"]) == ([1, 1, 1], [32, 1, 1], [1, 1, 1])
    assert (first["dynamic_smem_bytes"], first["programmatic_stream_serialisation"]) == (0, False)
    assert first["outcome"] == "complete" and second["outcome"] == "IllegalAccess"
    assert "exit_program.py:" in second["error"] and "launch 2" in capsys.readouterr().out
    offset = second["parameters"][-1]
    assert (offset["bytes"], bytes.fromhex(offset["value"]), offset["type"]) == (4, struct.pack("<i", 1 << 20), "u32")

    (folder / "notes.txt").write_text("mine")
    assert cli.main([*arguments, "illegal"]) == 3
    second = json.loads((folder / "launch-2.json").read_text())
    assert second["grid"] == [0, 1, 1] and "is illegal" in second["error"]
    assert cli.main([*arguments, "refused"]) == 4
    second = json.loads((folder / "launch-2.json").read_text())
    assert second["outcome"] == "UnsupportedPTX"
    assert f".entry {second['kernel']}(" in (folder / second["ptx"]).read_text()
    assert cli.main([*arguments, "normal"]) == 0
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == sorted(["notes.txt", "launch-1.json", first["ptx"]]), "those of the program before are gone"


def test_launches_of_one_ptx_share_its_file(tmp_path) -> None:
    with capture("sm_90a", keep_ptx=tmp_path) as session:
        y = torch.zeros(64, dtype=torch.int32, device="cuda")
        compiled = cutlass.cute.compile(exit_program.launch, from_dlpack(y), *arguments_of(0))
        for offset in (0, 32):
            compiled(from_dlpack(y), *arguments_of(offset))
        assert y.tolist() == [*range(32), *range(32)] and len(session.launches) == 2
    facts = [json.loads((tmp_path / f"launch-{n}.json").read_text()) for n in (1, 2)]
    assert len(list(tmp_path.glob("*.ptx"))) == 1 and facts[0]["ptx"] == facts[1]["ptx"]
    values = [bytes.fromhex(each["parameters"][-1]["value"]) for each in facts]
    assert values == [struct.pack("<i", offset) for offset in (0, 32)]


def arguments_of(offset: int) -> tuple:
    return cutlass.Int32(offset), cutlass.Int32(1), cuda.CUstream(0)


def test_the_error_carries_the_ptx_and_the_launch() -> None:
    with capture("sm_90a") as session:
        y = torch.zeros(32, dtype=torch.int32, device="cuda")
        tensor = from_dlpack(y)
        exit_program.launch(tensor, *arguments_of(0))
        (good,) = session.launches
        with pytest.raises(IllegalAccess) as fault:
            exit_program.launch(tensor, *arguments_of(1 << 20))
        assert fault.value.launch_number == 2 and fault.value.ptx == good.launch.ptx
        assert (fault.value.launch.grid, fault.value.launch.block) == ((1, 1, 1), (32, 1, 1))
        assert fault.value.launch.params[1] == struct.pack("<i", 1 << 20)
        with pytest.raises(UnsupportedPTX) as refusal:
            exit_program.launch_refused(tensor, cuda.CUstream(0))
        assert refusal.value.launch_number == 3 and f".entry {refusal.value.launch.kernel_name}(" in refusal.value.ptx
        with pytest.raises(Hang) as hang:
            exit_program.launch_hanging(tensor)
        assert hang.value.launch_number == 4 and "mbarrier.try_wait" in hang.value.ptx
        assert session.failures == [fault.value, refusal.value, hang.value]
        assert hang.value.launch_name() == f"launch 4, kernel {hang.value.launch.kernel_name}"


@pytest.mark.parametrize("body", ["trap;", "not_an_instruction.b32 %r1;"])
def test_the_error_of_a_bare_run_carries_the_ptx(body: str) -> None:
    text = module(body, parameters=0)
    with pytest.raises(EmulatorError) as caught:
        run(text, grid=1, block=32)
    assert caught.value.ptx == text and caught.value.launch is None and caught.value.launch_name() == ""


def test_the_error_of_a_planned_launch_carries_both() -> None:
    case = make_case()
    with pytest.raises(Hang) as caught:
        emulated.launch(case.plan, case.tensors, Options(max_warp_instructions=1))
    assert caught.value.launch.grid == case.plan.grid
    assert f".entry {caught.value.launch.kernel_name}(" in caught.value.ptx


def test_an_intercepted_launch_that_is_refused_is_handed_on() -> None:
    taken, refused = [], []
    with host.recording_runtime():
        with capture("sm_90a"):
            y = torch.zeros(32, dtype=torch.int32, device="cuda")
            with host.intercept(taken.append, lambda launch, error: refused.append((launch, error))):
                exit_program.launch(from_dlpack(y), *arguments_of(0))
                with pytest.raises(EmulatorError, match="is illegal") as caught:
                    exit_program.launch(from_dlpack(y), cutlass.Int32(0), cutlass.Int32(0), cuda.CUstream(0))
    assert len(taken) == 1 and refused == [(caught.value.launch, caught.value)]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"block": (2048, 1, 1)}, r"a block \(2048, 1, 1\) of 2,048 threads: must be 1 to 1,024$"),
        ({"grid": (4, 0, 1)}, r"grid \(4, 0, 1\) has no CTA$"),
        ({"dynamic_smem": 300_000}, "300,000 bytes of dynamic shared memory: must be 232,448$"),
    ],
)
def test_a_launch_that_no_gpu_takes_says_what_is_too_large(facts: dict, message: str) -> None:
    usual = {"kernel_name": "k", "grid": (4, 1, 1), "block": (128, 1, 1), "cluster": (1, 1, 1), "dynamic_smem": 0}
    host._check(SimpleNamespace(**usual), {})
    with pytest.raises(EmulatorError, match=f"launch of k is illegal: {message}"):
        host._check(SimpleNamespace(**(usual | facts)), {})


# --- files that are written when the program is over -----------------------------------------------------------------

FAULTY = """
import os, sys
import cutlass, cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def overflow(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    x[thread + 1] = thread

@cute.jit
def call(x: cute.Tensor):
    overflow(x).launch(grid=(1, 1, 1), block=(32, 1, 1))

os.chdir(sys.argv[1])
call(from_dlpack(torch.zeros(32, dtype=torch.int32, device="cuda")))
"""


def test_a_program_that_changes_the_directory_leaves_files_where_they_were_named(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "fäulty.py").write_text(FAULTY)
    names = ["--report", "report.json", "--sarif", "report.sarif", "--keep-ptx", "kept"]
    words = ["-m", "cute_kernels", "emulate", "--arch", "sm_90a", *names, "fäulty.py", "elsewhere"]
    done = run_python(*words, cwd=tmp_path, env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert done.returncode == 3, done.stderr
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"elsewhere", "fäulty.py", "kept", "report.json", "report.sarif"}
    assert not list((tmp_path / "elsewhere").iterdir())
    report = json.loads((tmp_path / "report.json").read_bytes().decode())
    assert report["status"] == 3 and report["diagnostics"][0]["kind"] == "out-of-bounds"
    assert "fäulty.py" in (tmp_path / "report.json").read_text(encoding="utf-8")


def test_one_file_for_two_reports_is_refused_before_the_program_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text("print('ran')\n")
    assert ended("--report", "report.json", "--sarif", f"../{tmp_path.name}/report.json", "program.py") == 2
    out, error = capsys.readouterr()
    assert "ran" not in out and "--report and --sarif are both" in error and "must be two files" in error
    assert ended("--report", "/dev/null", "--sarif", "/dev/null", "program.py") == 0


def test_a_program_that_removes_its_directory_keeps_its_report(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "faulty.py").write_text(FAULTY.replace("os.chdir(sys.argv[1])", "os.rmdir(os.getcwd())"))
    names = ["--report", "../report.json", "--sarif", "../report.sarif"]
    words = ["-m", "cute_kernels", "emulate", "--arch", "sm_90a", *names, "../faulty.py"]
    done = run_python(*words, cwd=tmp_path / "gone")
    assert done.returncode == 3 and "error[out-of-bounds]" in done.stderr, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())["diagnostics"][0]["place"]["source"]
    assert os.path.samefile(found["file"], tmp_path / "faulty.py")
    run = json.loads((tmp_path / "report.sarif").read_text())["runs"][0]
    assert len(run["results"]) == 1 and run["originalUriBaseIds"] == {}


def test_a_profile_is_printed_whatever_the_encoding(tmp_path: Path) -> None:
    right = FAULTY.replace("os.chdir(sys.argv[1])", 'sys.stdout.reconfigure(encoding="ascii")')
    (tmp_path / "right.py").write_text(right.replace("x[thread + 1] = thread", "x[thread] = thread  # größer"))
    done = run_python("-m", "cute_kernels", "emulate", "--arch", "sm_90a", "--profile", "right.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "# gr\\xf6\\xdfer" in done.stdout


def test_a_report_names_arguments_that_the_locale_cannot_decode(tmp_path: Path) -> None:
    (tmp_path / "drüben").mkdir()
    (tmp_path / "faulty.py").write_text(FAULTY)
    words = ["-m", "cute_kernels", "emulate", "--arch", "sm_90a", "--report", "report.json", "faulty.py", "drüben"]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_python(*words, cwd=tmp_path, env=os.environ | locale)
    assert done.returncode == 3, done.stderr
    assert json.loads((tmp_path / "report.json").read_bytes())["diagnostics"][0]["kind"] == "out-of-bounds"


def test_a_report_that_cannot_be_written_does_not_hide_a_fault(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("faulty.py").write_text(FAULTY)
    Path("right.py").write_text("")
    full = "/dev/full cannot be written: No space left on device"
    for words, status in ((("faulty.py", "."), 3), (("right.py",), 2)):
        assert ended("--arch", "sm_90a", "--report", "/dev/full", *words) == status
        assert full in capsys.readouterr().err
    for failing, others in (("report", ("sarif", "profile-json")), ("profile-json", ("report", "sarif"))):
        names = [word for name in others for word in (f"--{name}", f"{failing}-{name}")]
        assert ended("--arch", "sm_90a", f"--{failing}", "/dev/full", *names, "faulty.py", ".") == 3
        assert full in capsys.readouterr().err
        assert all(json.loads(Path(f"{failing}-{name}").read_text()) for name in others)
