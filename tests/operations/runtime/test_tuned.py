"""Configurations that were found fastest: who finds them again, and what of a file is not believed."""

from __future__ import annotations

import json

import pytest

from cute_kernels import (
    Sm90GemmConfig,
    Sm90PatchEmbedConfig,
)
from cute_kernels.commands.cli import main
from cute_kernels.config import GemmProblem, PatchEmbedProblem
from cute_kernels.operations.runtime import tuned
from cute_kernels.plan import make_plan

H200 = tuned.Device("NVIDIA H200", "sm_90a", 132)

PROBLEM = GemmProblem(100, 200, 640)

CONFIG = Sm90GemmConfig(128, 64, 3, 1, store_stages=1, split_k=2)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "_KNOWN", {})
    return tmp_path / "cache"


def forget(monkeypatch) -> None:
    """As in another process."""
    monkeypatch.setattr(tuned, "_KNOWN", {})


def test_a_configuration_is_found_by_later_processes(root, monkeypatch):
    assert tuned.lookup(PROBLEM, H200) is None
    path = tuned.store(PROBLEM, H200, CONFIG, 12.5)
    assert tuned.lookup(PROBLEM, H200) == CONFIG
    forget(monkeypatch)
    assert tuned.lookup(PROBLEM, H200) == CONFIG and tuned.files() == [path]
    assert json.loads(path.read_text())["microseconds"] == 12.5
    assert root.stat().st_mode & 0o777 == 0o700


def test_configurations_of_another_operation_are_kept_beside_them(root, monkeypatch):
    problem = PatchEmbedProblem(100, 200, 640)
    config = Sm90PatchEmbedConfig(tile_rows=64, warpgroups=2, stages=3, cluster=1, weight="streamed", order="flat")
    tuned.store(PROBLEM, H200, CONFIG, 1.0)
    tuned.store(problem, H200, config, 1.0)
    forget(monkeypatch)
    assert tuned.lookup(PROBLEM, H200) == CONFIG
    assert tuned.lookup(problem, H200) == make_plan(problem, config, "sm_90a").config


@pytest.mark.parametrize(
    ("problem", "device"),
    [
        (GemmProblem(101, 200, 640), H200),
        (GemmProblem(100, 200, 640, bias=True), H200),
        (PROBLEM, tuned.Device("NVIDIA H100", "sm_90a", 132)),
        (PROBLEM, tuned.Device("NVIDIA H200", "sm_90a", 114)),
    ],
)
def test_other_problems_and_devices_have_their_own(root, monkeypatch, problem, device):
    path = tuned.store(PROBLEM, H200, CONFIG, 1.0)
    forget(monkeypatch)
    assert tuned.lookup(problem, device) is None
    # Nor under another one's name.
    path.rename(tuned._path(root, problem, device))
    forget(monkeypatch)
    assert tuned.lookup(problem, device) is None


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "cute-kernels/tuned/0"},
        {"config": "Sm100PatchEmbedConfig:"},
        {"config": "Sm90GemmConfig:tile_m=100"},
        {"config": "Sm90GemmConfig:tile_m=many"},
        {"config": "Sm90GemmConfig:tile_k=64"},
        {"config": {"tile_m": 128}},
        {"config": None},
    ],
)
def test_a_file_that_does_not_hold_a_legal_configuration_is_as_good_as_none(root, monkeypatch, change):
    path = tuned.store(PROBLEM, H200, CONFIG, 1.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    forget(monkeypatch)
    assert tuned.lookup(PROBLEM, H200) is None


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00", "[" * 100_000])
def test_neither_is_a_damaged_file(root, monkeypatch, content):
    tuned.store(PROBLEM, H200, CONFIG, 1.0).write_text(content)
    forget(monkeypatch)
    assert tuned.lookup(PROBLEM, H200) is None


def test_a_file_that_others_may_write_is_not_read(root, monkeypatch):
    tuned.store(PROBLEM, H200, CONFIG, 1.0).chmod(0o666)
    forget(monkeypatch)
    assert tuned.lookup(PROBLEM, H200) is None


def test_without_a_disk_cache_this_process_remembers(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "off")
    forget(monkeypatch)
    assert tuned.store(PROBLEM, H200, CONFIG, 1.0) is None and tuned.files() == []
    assert tuned.lookup(PROBLEM, H200) == CONFIG
    forget(monkeypatch)
    assert tuned.lookup(PROBLEM, H200) is None


def test_the_cache_command_counts_and_forgets(root, capsys):
    path = tuned.store(PROBLEM, H200, CONFIG, 1.0)
    run = path.parent / f"{'a' * 40}.run"
    run.write_text("{}")
    assert main(["cache"]) == 0
    assert ", 1 tuned configuration and 1 run of programs in" in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 0
    assert "; 1 tuned configuration and 1 run of programs too;" in capsys.readouterr().out
    assert not path.exists() and not run.exists() and tuned.lookup(PROBLEM, H200) is None
