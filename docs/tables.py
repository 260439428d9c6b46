"""Tables of the documentation that follow from the code: ``python docs/tables.py`` writes them into their pages.

A generated table stands between ``<!-- NAME: .. -->`` and ``<!-- end -->``; `TABLES` has the function for each name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from cute_kernels.config import GemmProblem, PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.plan import make_plan
from cute_kernels.plan.gemm import B_TYPES
from cute_kernels.plan.images import PIXEL_TYPES

ROOT = Path(__file__).parents[1]
PAGES = ("which_kernel.md",)

COLUMNS = (("sm_90a",), ("sm_100a",), ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120"))
"""Architectures that mostly get the same kernels."""

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


def kernel_files(problem: object, arch: str) -> str:
    """The files below ``kernels/`` that a call without a configuration runs, or a dash."""
    try:
        plan = make_plan(problem, arch=arch)
    except (ValueError, NotImplementedError):
        return "-"
    files = [launch.kernel.partition(":")[0].removeprefix("cute_kernels.kernels.") for launch in plan.launches]
    return " + ".join(f"`{file.replace('.', '/')}`" for file in files)


def cells(problems: dict[str, object]) -> tuple[str, ...]:
    """What runs in each column; problems and architectures are told apart where they get different kernels."""

    def of_arch(arch: str) -> str:
        return apart({size: kernel_files(problem, arch) for size, problem in problems.items()})

    return tuple(apart({arch: of_arch(arch) for arch in archs}) for archs in COLUMNS)


def apart(found: dict[str, str]) -> str:
    """The one text of all names, or each text behind its names."""
    names: dict[str, list[str]] = {}
    for name, text in found.items():
        names.setdefault(text, []).append(name)
    return text if len(names) == 1 else "; ".join(f"{', '.join(names[text])}: {text}" for text in names)


def heading(columns: str) -> list[str]:
    """The first lines of a table whose last columns are the architectures."""
    count = columns.count("|") + 1 + len(COLUMNS)
    return [f"| {columns} | {' | '.join(map(', '.join, COLUMNS))} |", "|---" * count + "|"]


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


TABLES = {"images": images_table, "rows": rows_table}


def filled(page: str) -> str:
    """A page with its generated tables as they are now."""
    pattern = r"(<!-- (\w+): [^>]*-->)\n.*?(<!-- end -->)"
    return re.sub(pattern, lambda m: f"{m[1]}\n\n{TABLES[m[2]]()}\n\n{m[3]}", page, flags=re.DOTALL)


def main() -> None:
    for name in PAGES:
        path = ROOT / "docs" / name
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
