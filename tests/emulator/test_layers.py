"""The emulator's folders are layers: which imports which, at run time and in annotations."""

from __future__ import annotations

from pathlib import Path

import grimp
import pytest

from cute_kernels.emulator import instructions

EMULATOR = "cute_kernels.emulator"

LAYERS = (
    ("launch",),
    ("bytecode",),
    ("instructions",),
    ("units", "graph"),
    ("observe",),
    ("state",),
    ("ptx", "core"),
    ("options",),
    ("errors",),
    ("facts", "captured_launch", "steps"),
)
"""From the highest to the lowest; a part imports those below, at once or inside functions, and not its neighbours."""

OUTSIDE = {"cute_kernels.dsl.allocations", "cute_kernels.interrupts", "cute_kernels.trace_events"}
"""What the emulator uses of the rest of the package."""

UPWARD_TYPES = {
    # An error and the facts of one have the instruction at which it happened.
    ("errors", "ptx.program"),
    ("facts", "ptx.program"),
    # The registry holds the functions that lower, and what they are given.
    ("ptx.families", "graph.block"),
    # A warp knows the CTA that it is in, and so does what is kept of a cluster or shown of one.
    ("state.warp", "units.sm"),
    ("state.memory_tables", "units.sm"),
    ("state.named_barriers", "units.sm"),
    ("observe.trace", "units.sm"),
    ("observe.trace_log", "units.sm"),
    # State has a place for what observes it, which is there only when it does.
    ("state.warp", "observe.races.happens_before"),
    ("state.named_barriers", "observe.races.sync_point"),
    ("state.gmem", "observe.races.launch_shadow"),
    ("state.memory_tables", "observe.trace_log"),
    # A timeline knows the program that runs.
    ("observe.trace", "bytecode.execution"),
}
"""Imports under ``TYPE_CHECKING`` that point upwards, (importer, imported)."""

RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}


def name(module: str) -> str:
    """``"ptx.flow"`` of ``"cute_kernels.emulator.ptx.flow"``, "" of the package itself."""
    return module.removeprefix(EMULATOR).removeprefix(".")


def imports(graph: grimp.ImportGraph) -> set[tuple[str, str]]:
    """(importer, imported) of the emulator's modules, without what the package itself offers to users."""
    modules = {module for module in graph.modules if module.startswith(f"{EMULATOR}.")}
    found = {(name(a), name(b)) for a in modules for b in graph.find_modules_directly_imported_by(a) if b in modules}
    return {(a, b) for a, b in found if a != "__main__"}


def test_knows_no_other_part_of_the_package() -> None:
    """But for those three; and for what the package itself offers to users, and the page that its command prints."""
    graph = grimp.build_graph("cute_kernels", cache_dir=None)
    modules = {module for module in graph.modules if module.startswith(f"{EMULATOR}.")} - {f"{EMULATOR}.__main__"}
    imported = {b for a in modules for b in graph.find_modules_directly_imported_by(a)}
    assert {module for module in imported - graph.find_descendants(EMULATOR) if module != EMULATOR} == OUTSIDE


def upward(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those that do not point downwards, or stay in one part."""
    parts = {pair: (pair[0].split(".")[0], pair[1].split(".")[0]) for pair in pairs}
    return {pair for pair, (a, b) in parts.items() if a != b and RANK[a] >= RANK[b]}


@pytest.fixture(scope="module")
def at_run_time() -> set[tuple[str, str]]:
    return imports(grimp.build_graph("cute_kernels", cache_dir=None, exclude_type_checking_imports=True))


@pytest.fixture(scope="module")
def all_imports() -> set[tuple[str, str]]:
    return imports(grimp.build_graph("cute_kernels", cache_dir=None))


def test_every_part_has_its_layer(all_imports: set[tuple[str, str]]) -> None:
    assert len(all_imports) > 500
    assert {module.split(".")[0] for pair in all_imports for module in pair} == set(RANK)


def test_imports_point_downwards(at_run_time: set[tuple[str, str]]) -> None:
    assert sorted(upward(at_run_time)) == []


def test_types_from_above_are_known(all_imports: set[tuple[str, str]]) -> None:
    """None that is not in the list, and the list has none that is gone."""
    assert upward(all_imports) == UPWARD_TYPES


def test_no_circles_inside_a_folder_of_a_layer(at_run_time: set[tuple[str, str]]) -> None:
    """Races, copies and matrix units know what they are a part of, or it them, but not both."""
    folders = {(a.rpartition(".")[0], b.rpartition(".")[0]) for a, b in at_run_time}
    assert [(a, b) for a, b in folders if a < b and a and b and (b, a) in folders] == []


def test_every_opcode_family_is_registered() -> None:
    """By its folder, which imports each file that has one."""
    folder = Path(instructions.__file__).parent
    families = {path.stem for path in folder.glob("*.py") if "\n@family(" in path.read_text()}
    assert len(families) > 15 and set(instructions.__all__) == families
