"""Tables of the documentation that follow from the code: ``python docs/tables.py`` writes them into their pages.

A generated table stands between ``<!-- NAME: .. -->`` and ``<!-- end -->``; `TABLES` has the function for each name.
``python docs/tables.py modules`` prints the first line of every module's docstring.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

from cute_kernels.config import GemmProblem, PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.emulator.isa import instructions  # noqa: F401  whose import fills LOWERINGS
from cute_kernels.emulator.machine.graph.families import LOWERINGS
from cute_kernels.plan import make_plan
from cute_kernels.plan.gemm import B_TYPES
from cute_kernels.plan.images import PIXEL_TYPES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cute_kernels"
PAGES = ("architecture.md", "which_kernel.md")

LAYERS = (
    ".", "integrations", "nn", "siglip", "commands", "operations", "reference", "plan", "model",
    "kernels", "kernels/sm100", "kernels/sm90", "kernels/sm80", "dsl", "sass", "runtime", "tuning", "profiling",
    "programs", "checking", "mutation", "diagnostics", "testing", "emulator", "emulator/machine/launch", "emulator/machine/bytecode",
    "emulator/isa/instructions", "emulator/machine/units", "emulator/machine/units/copies", "emulator/machine/units/matrix", "emulator/machine/graph",
    "emulator/observe", "emulator/races", "emulator/machine/state", "emulator/isa/ptx", "emulator/core",
)  # fmt: skip
"""Folders of the package as docs/architecture.md draws them, the emulator's from the highest to the lowest."""

ARCHITECTURES = {
    "sm_90a": "sm_90a", "sm_100a": "sm_100a", "sm_80": "sm_80, sm_90", "sm_89": "sm_89, sm_120; sm_86 without E4M3"
}  # fmt: skip
"""One of those with the same kernels each, and what the column says."""
LAUNCH_SIZES = {"1 image": 1, "64 images": 64}
"""Images of a call: few, where a launch more counts, and many."""

PATCHES = (8, 14, 16, 28, 32, 48, 64, 96, 112, 128)
"""Pixels of a patch's side."""

POSITIONS = 196
ROWS = 64 * POSITIONS

LENGTHS = range(64, 2049, 64)
"""Values of K."""

SIDE = 224
"""Pixels of an image's side, rounded down to whole patches."""

FEATURES = 768


@functools.cache
def first_line(module: Path) -> str:
    """The first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return text.partition("\n")[0].rstrip()


def modules(folder: Path) -> list[Path]:
    """The modules of a folder but for ``__init__`` and ``__main__``."""
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("__"))


def folders() -> list[Path]:
    """The package and every package in it, by their paths."""
    return sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


def opcodes() -> dict[str, str]:
    """Module of emulator/isa/instructions/ -> its opcodes, each by what tells it from those of other modules."""
    prefixes: dict[str, list[tuple[str, ...]]] = {}
    for prefix, function in LOWERINGS.items():
        prefixes.setdefault(function.__module__.rpartition(".")[2], []).append(prefix)
    found = {}
    for module, own in prefixes.items():
        foreign = {p[:n] for other in prefixes.keys() - {module} for p in prefixes[other] for n in range(1, len(p) + 1)}
        names = []
        for parts in own:
            end = next((n for n in range(1, len(parts)) if parts[:n] not in foreign), len(parts))
            name = ".".join(part for part in parts[:end] if not re.fullmatch(r"[bsuf]\d+(x\d)?|pred|lo|hi|wide", part))
            names.append(re.sub(r"^(v[a-z]+)\d$", r"\1", name))  # vadd2 and vadd4 as vadd
        kept = [name for name in dict.fromkeys(names) if not any(name.startswith(f"{other}.") for other in names)]
        found[module] = "" if kept == [module] else f" ({', '.join(kept)})"
    return found


def module_names(folder: Path) -> str:
    """The modules of a folder, those of instructions with their opcodes, and its files in C."""
    names = [path.stem for path in modules(folder)]
    if folder.name == "instructions":
        of_module = opcodes()
        return ", ".join(name + of_module.get(name, "") for name in names)
    in_c = sorted(path.stem for path in folder.glob("*.c"))
    return grouped(names) + (f"; in C {grouped(in_c)}" if in_c else "")


def grouped(names: list[str]) -> str:
    """Names in one line, `a`, `a_b` and `a_c` as a (_b, _c)."""
    first = [name for name in names if not any(name.startswith(f"{other}_") for other in names)]
    longer = {name: [other.removeprefix(name) for other in names if other.startswith(f"{name}_")] for name in first}
    return ", ".join(name + (f" ({', '.join(rest)})" if rest else "") for name, rest in longer.items())


def folder_table() -> str:
    """One row for each folder, in the order of `LAYERS`.

    Raises:
        ValueError: a folder is in no layer.
    """
    rows = ["| folder | modules |", "|---|---|"]
    for folder in sorted(folders(), key=lambda folder: LAYERS.index(str(folder.relative_to(PACKAGE)))):
        name = folder.relative_to(PACKAGE.parent if folder == PACKAGE else PACKAGE)
        if names := module_names(folder):
            rows.append(f"| `{name}/` | {names} |")
    return "\n".join(rows)


def module_page() -> str:
    """A page with the first line of every module, folder by folder."""
    parts = ["# Modules\n\nThe first line of every module's docstring."]
    for folder in folders():
        lines = [f"* `{path.name}`: {first_line(path)}" for path in modules(folder)]
        parts.append(f"## `{folder.relative_to(ROOT)}/`\n\n{first_line(folder / '__init__.py')}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def kernel_files(problem: object, arch: str) -> str:
    """The files below ``kernels/`` that a call without a configuration runs, or a dash."""
    try:
        plan = make_plan(problem, arch=arch)
    except (ValueError, NotImplementedError):
        return "-"
    files = [launch.kernel.partition(":")[0].removeprefix("cute_kernels.kernels.") for launch in plan.launches]
    return " + ".join(f"`{file.replace('.', '/')}`" for file in files)


def cells(problems: dict[str, object]) -> tuple[str, ...]:
    """What runs on each architecture; problems are told apart where they get different kernels."""
    columns = []
    for arch in ARCHITECTURES:
        found = {what: kernel_files(problem, arch) for what, problem in problems.items()}
        same = len(set(found.values())) == 1
        columns.append(next(iter(found.values())) if same else "; ".join(f"{k}: {v}" for k, v in found.items()))
    return tuple(columns)


def heading(columns: str) -> list[str]:
    """The first lines of a table whose last columns are the architectures."""
    count = columns.count("|") + 1 + len(ARCHITECTURES)
    return [f"| {columns} | {' | '.join(ARCHITECTURES.values())} |", "|---" * count + "|"]


def lines(kinds: dict[str, dict[int, tuple[str, ...]]], shown: Callable[[list[int]], str]) -> list[str]:
    """Rows ``| kinds | values | cells |``, one for all kinds, and for all values, of the same cells."""
    by_cells: dict[tuple, list[str]] = {}
    for kind, of_values in kinds.items():
        by_cells.setdefault(tuple(of_values.items()), []).append(kind)
    rows = []
    for of_values, names in by_cells.items():
        of_cells: dict[tuple[str, ...], list[int]] = {}
        for value, found in of_values:
            of_cells.setdefault(found, []).append(value)
        kinds_shown = ", ".join(names)
        rows += [f"| {kinds_shown} | {shown(values)} | {' | '.join(found)} |" for found, values in of_cells.items()]
    return rows


def ranges(lengths: list[int]) -> str:
    """Values of `LENGTHS`, neighbours as a range."""
    step = LENGTHS.step
    firsts = [k for k in lengths if k - step not in lengths]
    lasts = [k for k in lengths if k + step not in lengths]
    return ", ".join(f"{first:,} to {last:,}" for first, last in zip(firsts, lasts, strict=True))


def images_problem(precision: str, channels_last: bool, patch: int, batch: int) -> PatchEmbedImagesProblem:
    """Square images of three channels with bias and positions."""
    side = SIDE // patch * patch
    return PatchEmbedImagesProblem(
        batch, 3, side, side, patch, FEATURES, PIXEL_TYPES[precision], channels_last, precision,
        table_rows=(side // patch) ** 2,
    )  # fmt: skip


def images_table() -> str:
    """`patch_embed_images`: precision and layout, patch, and what runs."""
    kinds = {f"`{precision}`": (precision, False) for precision in PIXEL_TYPES}
    kinds["`int8` channels_last"] = ("int8", True)
    found = {
        name: {
            patch: cells({size: images_problem(*kind, patch, n) for size, n in LAUNCH_SIZES.items()})
            for patch in PATCHES
        }
        for name, kind in sorted(kinds.items())
    }
    return "\n".join([*heading("precision | patch"), *lines(found, lambda patches: ", ".join(map(str, patches)))])


def rows_table() -> str:
    """`patch_embed` and `gemm`: element type, K, and what runs."""
    operations = {
        "patch_embed": (
            ("float8_e4m3fn", "uint8", "int8", "bfloat16", "float16"),
            lambda dtype, k: PatchEmbedProblem(ROWS, FEATURES, k, POSITIONS, in_dtype=dtype),
        ),
        "gemm": (tuple(B_TYPES), lambda dtype, k: GemmProblem(ROWS, FEATURES, k, in_dtype=dtype)),
    }
    rows = heading("operation | elements | K")
    for operation, (dtypes, problem) in operations.items():
        found = {dtype: {k: cells({"": problem(dtype, k)}) for k in LENGTHS} for dtype in dtypes}
        rows += [f"| `{operation}` {row}" for row in lines(found, ranges)]
    return "\n".join(rows)


TABLES = {"folders": folder_table, "images": images_table, "rows": rows_table}


def filled(page: str) -> str:
    """A page with its generated tables as they are now."""
    pattern = r"(<!-- (\w+): [^>]*-->)\n.*?(<!-- end -->)"
    return re.sub(pattern, lambda m: f"{m[1]}\n\n{TABLES[m[2]]()}\n\n{m[3]}", page, flags=re.DOTALL)


def main(arguments: list[str]) -> None:
    if arguments == ["modules"]:
        print(module_page())
        return
    for name in PAGES:
        path = ROOT / "docs" / name
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
