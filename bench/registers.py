"""Registers, spills and shared memory of the kernels of ``mma.sync``, compiled for every target. Needs no GPU.

    python -m bench.registers                    # all targets, about a minute each; the table of docs/mma_sync.md
    python -m bench.registers --archs sm_86
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.configs import rows_type
from cute_kernels.compile import compile_plan
from cute_kernels.config import GemmProblem, PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.plan import Plan, make_plan
from cute_kernels.plan.registry import MMA_SYNC

SIDE, PATCH, N, K, POSITIONS = 224, 16, 768, 768, 196
"""Of the headline problems."""


def problems(arch: str) -> dict[str, GemmProblem | PatchEmbedProblem | PatchEmbedImagesProblem]:
    """What is compiled for a target, by what the table calls it."""
    images = {
        f"images {precision} x {batch}": PatchEmbedImagesProblem(
            batch, 3, SIDE, SIDE, PATCH, N, "uint8" if precision.startswith("int") else "bfloat16",
            precision=precision, table_rows=POSITIONS,
        )
        for precision in ("int8", "int16", "bf16") for batch in (64, 4736)
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


def tile_of(plan: Plan) -> str:
    """Rows, columns and bytes of K of a tile, stages, warps and CTAs of a multiprocessor."""
    c = plan.config
    tile = f"{c.tile_m} x {c.tile_n} x {c.row_bytes} B"
    return f"{tile}, {c.stages} stages, {c.warps_m} x {c.warps_n} warps, {c.resident_ctas} CTAs"


def rows_of(arch: str) -> list[tuple[str, ...]]:
    """Target, problem, the plan's tile, registers of a thread, bytes on the stack, shared memory of a CTA."""
    found = []
    for name, problem in problems(arch).items():
        plan = make_plan(problem, arch=arch)
        used = compile_plan(plan).resources
        spilled = used.stack_bytes + used.local_bytes
        found.append((arch, name, tile_of(plan), str(used.registers), str(spilled), f"{plan.smem_bytes >> 10} KB"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, each row when it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", nargs="+", choices=MMA_SYNC, default=MMA_SYNC, help="default: all")
    arguments = parser.parse_args(argv)
    header = ("target", "problem", "tile", "registers", "bytes spilled", "shared memory")
    print(f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", sep="\n")
    for arch in arguments.archs:
        for row in rows_of(arch):
            print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
