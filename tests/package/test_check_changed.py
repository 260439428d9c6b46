"""The action and the hook that check changed kernels: which programs they run, and what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github/actions/check"
SCRIPT = FOLDER / "check_changed.py"
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text())
HOOK = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())

KERNEL = """
import cutlass.cute as cute

@cute.kernel
def racing(x: cute.Tensor):
    x[cute.arch.thread_idx()[0]{}] = cute.arch.thread_idx()[0]

@cute.jit
def launch(x: cute.Tensor):
    racing(x).launch(grid=(1, 1, 1), block=(64, 1, 1))
"""
PROGRAM = """
import torch
from cutlass.cute.runtime import from_dlpack
{}
launch(from_dlpack(torch.zeros(64, dtype=torch.int32, device="cuda")))
"""

LATER = """
def later():
    from kernels.first import launch
    return launch

launch = later()
"""


def git(*words: str, folder: Path) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two programs, each with a module of its kernel: in a folder without __init__.py, and beside the program."""
    for name, text in {
        "kernels/first.py": KERNEL.format(""),
        "programs/second.py": KERNEL.format(""),
        "programs/run_first.py": PROGRAM.format(LATER),
        "programs/run_second.py": PROGRAM.format("from second import launch"),
        "notes.txt": "nothing",
    }.items():  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    git("init", "-q", "-b", "trunk", folder=tmp_path)
    git("add", ".", folder=tmp_path)
    git("commit", "-qm", "first", folder=tmp_path)
    return tmp_path


def commands(folder: Path) -> dict[str, str]:
    """The environment in which `cute-kernels` is this checkout's; programs find modules of the current folder."""
    tool = folder.parent / "bin" / "cute-kernels"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cute_kernels "$@"\n')
    tool.chmod(0o755)
    paths = f"{ROOT}{os.pathsep}{folder}"
    return os.environ | {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths}


def run_action(folder: Path, **inputs: str) -> subprocess.CompletedProcess:
    """The action's own step, with inputs as a workflow would give them."""
    defaults = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | {"since": ""}
    step = ACTION["runs"]["steps"][0]
    variables = {
        name: (defaults | inputs)[text[len("${{ inputs.") : -len(" }}")]] for name, text in step["env"].items()
    }
    environment = commands(folder) | variables | {"GITHUB_ACTION_PATH": str(FOLDER)}
    return subprocess.run(
        ["bash", "-e", "-c", step["run"]], cwd=folder, env=environment, capture_output=True, text=True
    )


def ran(ended: subprocess.CompletedProcess) -> list[str]:
    return [line.split()[-1] for line in ended.stdout.splitlines() if line.startswith("cute-kernels check ")]


def test_of_a_pull_request(repository: Path) -> None:
    """A change of one kernel has its program checked, and it alone; the report names the kernel's line."""
    git("checkout", "-qb", "change", folder=repository)
    (repository / "kernels/first.py").write_text(KERNEL.format(" * 0"))
    git("commit", "-qam", "all threads write one element", folder=repository)
    ended = run_action(repository, programs="programs/run_*.py\n", options="--seeds 0 --arch sm_90a", since="trunk")
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert ran(ended) == ["programs/run_first.py"]
    (run,) = json.loads((repository / "cute-kernels.sarif").read_text())["runs"]
    assert run["automationDetails"] == {"id": "cute-kernels/programs/run_first.py/"}
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("kernels/first.py", 6)


def test_of_a_change_that_concerns_no_kernel(repository: Path) -> None:
    git("checkout", "-qb", "change", folder=repository)
    (repository / "notes.txt").write_text("something")
    git("commit", "-qam", "notes", folder=repository)
    ended = run_action(repository, programs="programs/run_*.py", since="trunk")
    assert (ended.returncode, ran(ended)) == (0, [])
    assert json.loads((repository / "cute-kernels.sarif").read_text())["runs"] == []


def test_without_a_commit_to_compare_with(repository: Path) -> None:
    """All programs run, in order; the status is the first that is not 0, and one file has all reports."""
    (repository / "kernels/first.py").write_text(KERNEL.format(" * 0"))
    ended = run_action(repository, programs="programs/run_first.py\nprograms/run_second.py", options="--seeds 0")
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert ran(ended) == ["programs/run_first.py", "programs/run_second.py"]
    runs = json.loads((repository / "cute-kernels.sarif").read_text())["runs"]
    assert [(run["automationDetails"]["id"], bool(run["results"])) for run in runs] == [
        ("cute-kernels/programs/run_first.py/", True), ("cute-kernels/programs/run_second.py/", False),
    ]  # fmt: skip


def test_inputs_are_no_part_of_the_script(repository: Path) -> None:
    ended = run_action(repository, programs="$(touch seen)`touch seen`.py")
    assert ended.returncode == 2 and "must name a file; none matches" in ended.stderr
    assert not (repository / "seen").exists()


def test_the_hook(repository: Path) -> None:
    """As pre-commit runs it: the entry, the user's args, and the files of the commit."""
    (hook,) = HOOK
    assert hook["language"] == "script" and os.access(ROOT / hook["entry"], os.X_OK)
    words = ["--program=programs/run_*.py", "--options=--seeds 0"]
    for changed, expected in ((["programs/second.py"], ["programs/run_second.py"]), (["setup.py"], [])):
        command = [ROOT / hook["entry"], *words, *changed]
        ended = subprocess.run(command, cwd=repository, env=commands(repository), capture_output=True, text=True)
        assert (ended.returncode, ran(ended)) == (0, expected), ended.stdout + ended.stderr


def test_the_page_is_a_skill() -> None:
    """What coding agents read first: a name like the folder's, and when to use it, in at most 1,024 characters."""
    _, front, page = (ROOT / "docs/agents.md").read_text().split("---\n", 2)
    described = yaml.safe_load(front)
    assert sorted(described) == ["description", "name"] and described["name"] == "cute-kernels"
    assert "without a GPU. Use it when" in described["description"] and len(described["description"]) <= 1_024
    assert f"`id: {HOOK[0]['id']}`" in page and "/.github/actions/check@" in page
