"""Which room may import which: two halves with a border, no circles, and no name imported late.

Imports inside functions and under ``TYPE_CHECKING`` count. Kernels and graphs that plans name as strings do not: that
is how planning does without CuTe DSL.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

PACKAGE = "cute_kernels"
ROOT = Path(__file__).parents[2]

KERNELS = {"config", "plan", "kernels", "operations", "models"}
"""The half that computes on a GPU."""

MAY_IMPORT = {
    "common": set(),
    "dsl": {"common"},
    "emulator": {"common", "dsl"},
    "testing": {"common", "emulator"},
    "config": {"common"},
    "plan": {"common", "config"},
    "kernels": {"config", "dsl", "plan"},
    "operations": {"common", "config", "dsl", "plan", "kernels", "emulator"},
    "models": {"common", "config", "plan", "operations"},
    "explore": {"common", "config", "dsl", "plan", "operations", "models", "emulator"},
    "commands": {"", "common", "dsl", "emulator", "plan", "operations", "explore"},
    "pytest_plugin": {"common"},
    "__main__": {"commands"},
    "": {"config", "operations", "models", "explore"},
}
"""Room, or module beside the rooms -> the rooms that it imports; "" is the package itself, which users import."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, cache_dir=None)


def circle(imports: dict[str, set[str]]) -> list[str] | None:
    """Modules that import each other in this order, or None."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def part(module: str) -> str:
    """``"plan"`` of ``"cute_kernels.plan.base"``; "" of the package itself."""
    return ".".join(module.split(".")[1:2])


def test_no_circles(graph: grimp.ImportGraph) -> None:
    """Of the emulator, annotations alone may point back: warps, units and trackers name each other's types."""
    emulator = grimp.build_graph(PACKAGE, cache_dir=None, exclude_type_checking_imports=True)
    imports = {
        module: (emulator if part(module) == "emulator" else graph).find_modules_directly_imported_by(module)
        for module in graph.modules
    }
    assert circle(imports) is None


def test_rooms_import_what_they_may(graph: grimp.ImportGraph) -> None:
    found: dict[str, set[str]] = {part(module): set() for module in graph.modules}
    for module in graph.modules:
        found[part(module)] |= {part(name) for name in graph.find_modules_directly_imported_by(module)}
    assert {room: imported - {room} for room, imported in found.items()} == MAY_IMPORT


def test_the_border_between_the_halves() -> None:
    """The emulator takes PTX of any origin; of the other half, what runs a kernel or compares kernels knows it."""
    assert not MAY_IMPORT["emulator"] & {*KERNELS, "explore", "commands"}
    knows = {room for room, imported in MAY_IMPORT.items() if "emulator" in imported}
    assert knows == {"testing", "operations", "explore", "commands"}


def test_reference_and_runtime_are_below_the_operations(graph: grimp.ImportGraph) -> None:
    """A reference that used what it is compared with would prove nothing."""
    allowed = {"reference": {"reference"}, "runtime": {"runtime", "reference", "compile"}}
    for module in graph.modules:
        folder = module.removeprefix(f"{PACKAGE}.operations.").partition(".")[0]
        imported = graph.find_modules_directly_imported_by(module)
        if module.startswith(f"{PACKAGE}.operations.") and folder in allowed:
            inside = {name.split(".")[2] for name in imported if part(name) == "operations"}
            assert inside <= allowed[folder], module
        if folder == "reference":
            assert {part(name) for name in imported} <= {"operations", "common"}, module


def late_imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, module and name ("" of a plain import) of every import of ours inside a function."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("folder", ["cute_kernels", "bench", "tests"])
def test_no_name_of_ours_is_imported_late(folder: str) -> None:
    """It would keep whatever stood there at the first call, a test's replacement for example.

    Whole modules may be imported late, where start-up must not wait for torch, CuTe DSL or Triton.
    """
    names = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for line, module, name in late_imports(path):
            ours = module.split(".")[0] in ("cute_kernels", "bench", "tests")
            if ours and name and not is_module(f"{module}.{name}"):
                names.append(f"{path.relative_to(ROOT)}:{line}: from {module} import {name}")
    assert not names


def test_late_and_type_checking_imports_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "circular"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("def f():\n    from circular import b\n    return b\n")
    (package / "b.py").write_text("import circular.c\n")
    (package / "c.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from circular.a import f\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = grimp.build_graph("circular", cache_dir=None)
    imports = {module: found.find_modules_directly_imported_by(module) for module in found.modules}
    assert set(circle(imports) or ()) == {"circular.a", "circular.b", "circular.c"}
    assert "circular" not in sys.modules
    assert [name for _, _, name in late_imports(package / "a.py")] == ["b"]
