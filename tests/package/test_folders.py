"""Tests lie (docs/architecture.md) in the folder of tests/ that has the name of what they test."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "cute_kernels", ROOT / "tests"

OF_NO_FOLDER = {
    ".", "bench", "package",  # modules beside the folders; bench/; documentation, CI and the suite itself
    "gpu", "models/other_torch", "dask_cluster", "ray_cluster",  # what `make test` has not
    "public_programs", "peer_suites", "source_mutation", "emulator/oracle",  # campaigns
}  # fmt: skip
"""Folders of tests that mirror no folder of the package."""


def folders_of_tests() -> set[str]:
    return {str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}


def test_every_folder_of_the_package_has_its_tests() -> None:
    packages = [path.parent for path in PACKAGE.rglob("__init__.py")]
    folders = {str(path.relative_to(PACKAGE)) for path in packages if len(list(path.glob("*.py"))) > 1}
    assert len(folders) > 30
    assert folders_of_tests() - OF_NO_FOLDER == folders - {"."}


def test_every_command_has_its_tests() -> None:
    commands = [path for path in (PACKAGE / "commands").glob("*.py") if "\ndef add_parser(" in path.read_text()]
    assert len(commands) > 8
    assert [path.stem for path in commands if not (TESTS / "commands" / f"test_{path.name}").exists()] == []


def test_modules_beside_the_folders_are_named_by_their_tests() -> None:
    tests = {path.stem.removeprefix("test_").removesuffix("_folder") for path in TESTS.glob("test_*.py")}
    assert tests <= {path.stem for path in PACKAGE.glob("*.py")}
