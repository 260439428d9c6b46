"""Which module may import which: no circles, layers, an emulator that stands alone, and no name imported late.

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

LAYERS = (
    ("commands",),
    ("pytest_plugin",),
    ("testing",),
    ("checking", "mutation", "sass"),
    ("integrations",),
    ("nn",),
    ("tuning", "siglip", "profiling"),
    ("operations",),
    ("runtime",),
    ("compile",),
    ("programs",),
    ("diagnostics",),
    ("kernels",),
    ("plan",),
    ("config_codec",),
    ("config", "model"),
)
"""From the highest to the lowest; a part may import those below, and not its neighbours."""

TOOLKIT = {"checking", "diagnostics", "mutation", "programs", "sass", "testing"}
"""Parts for any program's kernels: of the package they know the emulator and tools alone, and each other."""

TOOLS = {
    *("dsl", "executors", "extras", "files", "float_environment", "forks", "interrupts"),
    *("kernel_cache", "reference", "trace_events"),
}
"""Parts that import no layer, and that every layer may import."""

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


def test_layers(graph: grimp.ImportGraph) -> None:
    layers = [grimp.Layer(*(f"{PACKAGE}.{name}" for name in layer)) for layer in LAYERS]
    found = graph.find_illegal_dependencies_for_layers(layers)
    assert not [f"{d.importer} -> {d.imported}: {[r.middle for r in d.routes]}" for d in found]


def test_every_part_has_its_place(graph: grimp.ImportGraph) -> None:
    placed = {name for layer in LAYERS for name in layer} | TOOLS | {"emulator", "__main__", ""}
    assert {part(module) for module in graph.modules} == placed


def test_tools_and_emulator_stand_alone(graph: grimp.ImportGraph) -> None:
    """The emulator takes PTX of any origin, and must not need kernels, plans or operations."""
    for module in graph.modules:
        imported = {part(name) for name in graph.find_modules_directly_imported_by(module)}
        if part(module) in TOOLS:
            assert imported <= TOOLS, module
        if part(module) == "emulator" and module != "cute_kernels.emulator.__main__":  # a command, which prints a page
            assert imported <= {"emulator", *TOOLS} - {"executors", "kernel_cache", "reference"}, module
        if part(module) in TOOLKIT:
            assert imported <= {"emulator", *TOOLKIT, *TOOLS}, module
        if "emulator" in imported:
            assert part(module) in {"emulator", "compile", "runtime", "commands", *TOOLKIT}, module


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
