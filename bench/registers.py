"""Tiles, registers and spills of the kernels of ``mma.sync``, compiled for every target. Needs no GPU.

    python -m bench.registers                    # all targets, about a minute each
    python -m bench.registers --archs sm_86
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.configs import rows_type
from bench.results import markdown
from cute_kernels.config import GemmProblem, PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.operations.compile import compile_plan
from cute_kernels.plan import make_plan
from cute_kernels.plan.registry import MMA_SYNC
from cute_kernels.plan.sm80 import Sm80Plan

SIDE, PATCH, N, K, POSITIONS = 224, 16, 768, 768, 196
"""Of the headline problems."""


def problems(arch: str) -> dict[str, GemmProblem | PatchEmbedProblem | PatchEmbedImagesProblem]:
    """What is compiled for a target, by what the table calls it."""
    images = {
        f"images {precision} x {batch}": PatchEmbedImagesProblem(
            batch, 3, SIDE, SIDE, PATCH, N, "uint8" if precision.startswith("int") else "bfloat16",
            precision=precision, table_rows=POSITIONS,
        )
        for precision in ("int8", "bf16") for batch in (64, 4736)
    }  # fmt: skip
    rows = {
        f"rows {dtype}": PatchEmbedProblem(4736 * POSITIONS, N, K, POSITIONS, in_dtype=dtype)
        for dtype in dict.fromkeys(("int8", "bfloat16", rows_type(arch)))
    }
    products = {
        f"gemm {dtype} {size}": GemmProblem(size, size, size, 1, dtype, dtype)
        for dtype in ("float32", "bfloat16") for size in (512, 4096)
    }  # fmt: skip
    return images | rows | products


def cell_of(plan: Sm80Plan) -> str:
    """Rows, columns, bytes of K and stages of a tile, registers of a thread, and bytes of them on the stack if any."""
    c, used = plan.config, compile_plan(plan).resources
    spilled = used.stack_bytes + used.local_bytes
    tile = f"{c.tile_m} x {c.tile_n} x {c.row_bytes}, {c.stages}"
    tile += " of two teams" if plan.teams > 1 else ""
    return f"{tile}: {used.registers}" + (f", {spilled} B spilled" if spilled else "")


def table_of(archs: Sequence[str]) -> str:
    """One row per problem, one column per target."""
    cells: dict[str, dict[str, str]] = {}
    for arch in archs:
        for name, problem in problems(arch).items():
            cells.setdefault(name, {})[arch] = cell_of(make_plan(problem, arch=arch))
    rows = ([name, *(row.get(arch, "") for arch in archs)] for name, row in cells.items())
    return markdown(["problem", *archs], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", nargs="+", choices=MMA_SYNC, default=MMA_SYNC, help="default: all")
    print(table_of(parser.parse_args(argv).archs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
