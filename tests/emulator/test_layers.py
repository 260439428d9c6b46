"""The emulator's folders are layers: imports, of names of types too, point downwards and make no circles."""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import pytest

from cute_kernels.emulator.isa import instructions

EMULATOR = "cute_kernels.emulator"

LAYERS = (
    ("__main__",),
    ("checking",),
    ("programs",),
    ("reports",),
    ("machine.launch",),
    ("machine.bytecode",),
    ("isa.instructions",),
    ("machine.units", "machine.graph"),
    ("races", "observe"),
    ("machine.state",),
    ("isa.ptx", "core"),
    ("options",),
    ("errors",),
    ("facts", "captured_launch", "steps"),
)
"""From the highest to the lowest; a part imports those below, at once or inside functions, and not its neighbours."""

RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}


def name(module: str) -> str:
    """``"isa.ptx.flow"`` of ``"cute_kernels.emulator.isa.ptx.flow"``, "" of the package itself."""
    return module.removeprefix(EMULATOR).removeprefix(".")


def imports(graph: grimp.ImportGraph) -> set[tuple[str, str]]:
    """(importer, imported) of the emulator's modules, without what the package itself offers to users."""
    modules = {module for module in graph.modules if module.startswith(f"{EMULATOR}.")}
    return {(name(a), name(b)) for a in modules for b in graph.find_modules_directly_imported_by(a) if b in modules}


def part(module: str) -> str:
    """``"machine.state"`` of ``"machine.state.warp"``, ``"core"`` of ``"core.layout"``."""
    return next(found for found in RANK if f"{module}.".startswith(f"{found}."))


def upward(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those that do not point downwards, or stay in one part."""
    parts = {pair: (part(pair[0]), part(pair[1])) for pair in pairs}
    return {pair for pair, (a, b) in parts.items() if a != b and RANK[a] >= RANK[b]}


def circles(pairs: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those that lead back to where they begin."""
    graph = {a: {target for source, target in pairs if source == a} for a, _ in pairs}
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, open_ = set(), [start]
        while open_:
            new = graph.get(open_.pop(), set()) - found
            found |= new
            open_ += new
        reached[start] = found
    return sorted((a, b) for a, b in pairs if a in reached.get(b, ()))


@pytest.fixture(scope="module")
def at_run_time() -> set[tuple[str, str]]:
    return imports(grimp.build_graph("cute_kernels", cache_dir=None, exclude_type_checking_imports=True))


@pytest.fixture(scope="module")
def all_imports() -> set[tuple[str, str]]:
    """With those of names of types."""
    return imports(grimp.build_graph("cute_kernels", cache_dir=None))


def test_every_part_has_its_layer(all_imports: set[tuple[str, str]]) -> None:
    assert len(all_imports) > 500
    assert {part(module) for pair in all_imports for module in pair} == set(RANK)


def test_imports_point_downwards(all_imports: set[tuple[str, str]]) -> None:
    assert sorted(upward(all_imports)) == []


def test_no_modules_import_each_other(all_imports: set[tuple[str, str]]) -> None:
    """Inside folders as well."""
    assert circles(all_imports) == []


def test_circles_are_found() -> None:
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == [("a", "b"), ("b", "c"), ("c", "a")]


def test_no_circles_inside_a_folder_of_a_layer(at_run_time: set[tuple[str, str]]) -> None:
    """Races, copies and matrix units know what they are a part of, or it them, but not both."""
    folders = {(a.rpartition(".")[0], b.rpartition(".")[0]) for a, b in at_run_time}
    assert [(a, b) for a, b in folders if a < b and a and b and (b, a) in folders] == []


def test_every_opcode_family_is_registered() -> None:
    """By its folder, which imports each file that has one."""
    folder = Path(instructions.__file__).parent
    families = {path.stem for path in folder.glob("*.py") if "\n@family(" in path.read_text()}
    body = ast.parse(Path(instructions.__file__).read_text()).body
    imports = [each for each in body if isinstance(each, ast.ImportFrom) and each.module == instructions.__name__]
    assert len(families) > 15 and {alias.name for each in imports for alias in each.names} == families
