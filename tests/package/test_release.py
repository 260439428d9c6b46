"""`make release` and the workflows: what is built and what refuses to be, without building it here."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}


def of_ci(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The build hook; hatchling is installed where packages are built alone."""
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object
    for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    yield of_ci("hatch_build")
    for name in [name for name in sys.modules if name.partition(".")[0] == "emulator_core"]:
        del sys.modules[name]


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_an_installation_without_a_compiler(
    hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """GPUs need nothing that is compiled: it goes on, and says what the emulator will need."""
    core = tmp_path / hook.CORE
    core.mkdir(parents=True)
    for path in (ROOT / hook.CORE).glob("*.[chp]*"):
        core.joinpath(path.name).write_text(path.read_text())
    monkeypatch.setenv("CC", "no-compiler")
    said: list[str] = []
    builder = hook.CoreBuildHook()
    builder.root, builder.app = str(tmp_path), types.SimpleNamespace(display_warning=said.append)
    data: dict = {"artifacts": []}
    builder.initialize(version, data)
    assert data == {"artifacts": []}  # a wheel for any machine
    assert len(said) == 1 and "which the emulator will need" in said[0] and "'no-compiler', is not there" in said[0]


def wheel(folder: Path, tag: str, *more: str, cores: tuple[str, ...] = ("baseline", "avx2", "avx512")) -> Path:
    path = folder / f"cute_kernels-0.1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("cute_kernels/__init__.py", "cute_kernels-0.1.0.dist-info/RECORD", *more):
            archive.writestr(name, "")
        for core in cores:
            archive.writestr(f"cute_kernels/emulator/core/build/x/{core}.so", "")
    return path


def test_wheels_that_are_not_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, right = of_ci("release"), "py3-none-manylinux_2_17_x86_64"
    monkeypatch.setattr(release, "run", lambda *_: json.dumps({"overall_tag": "manylinux_2_17_x86_64"}))
    assert release.check_wheel(wheel(tmp_path, right), "x86_64") == "manylinux_2_17_x86_64"
    for tag in ("py3-none-any", "py3-none-linux_x86_64", "cp312-cp312-manylinux_2_17_x86_64"):
        with pytest.raises(SystemExit, match="auditwheel finds manylinux_2_17_x86_64"):
            release.check_wheel(wheel(tmp_path, tag), "x86_64")
    for more in ("tests/test_x.py", "cute_kernels/emulator/core/build/x/avx2.warnings"):
        with pytest.raises(SystemExit, match=f"has {more}"):
            release.check_wheel(wheel(tmp_path, right, more), "x86_64")
    with pytest.raises(SystemExit, match=r"has the cores \['avx2', 'baseline'\], expected"):
        release.check_wheel(wheel(tmp_path, right, cores=("baseline", "avx2")), "x86_64")


def test_a_folder_keeps_what_no_release_left_there(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    for name in ("a-1-py3-none-any.whl", "a-1.tar.gz", "SHA256SUMS", "notes.txt", "hub/build.toml"):
        (tmp_path / name).write_text("")
    of_ci("release").empty(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["build.toml", "hub", "notes.txt"]
    of_ci("release").empty(tmp_path / "none")


def test_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    release, version = of_ci("release"), "{}.{}".format(*sys.version_info)
    monkeypatch.setattr(release.shutil, "which", lambda name: sys.executable)
    assert list(release.interpreters(None)) == [version]
    assert release.interpreters("none") == {}
    with pytest.raises(SystemExit, match=r"Python 3\.9 is not found"):
        release.interpreters("3.9")
    minors = [int(each.partition(".")[2]) for each in release.PYTHONS]
    assert minors == list(range(10, 15)) and 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()


def test_the_check_of_an_installation_without_torch() -> None:
    run = subprocess.run([sys.executable, ROOT / ".ci/checks/without_torch.py"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"PTX on {platform.machine()}, core " in run.stdout
    names = {check[3] for check in of_ci("release").CHECKS}
    assert names == {path.name for path in (ROOT / ".ci/checks").glob("*.py")}


def test_workflows() -> None:
    """They run targets of the Makefile; one job may ask the index for an upload, and none has a secret."""
    assert set(WORKFLOWS) == {"publish", "newest-dsl"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = {f"{name}/{job}": value for name, flow in WORKFLOWS.items() for job, value in flow["jobs"].items()}
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    used = set(re.findall(r"\bmake ([a-z-]+)", " ".join(commands)))
    assert used == {"release", "dsl-versions"} <= targets
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish/upload"]
    assert all(flow["permissions"] == {"contents": "read"} for flow in WORKFLOWS.values())
    assert jobs["publish/upload"]["needs"] == "build" and jobs["newest-dsl/newest"]["continue-on-error"] is True
    assert not any("secrets." in path.read_text() for path in (ROOT / ".github/workflows").iterdir())
