"""How often a tile order reads operands from DRAM: a model of L2, for the choice of ``group_m`` of the dense GEMM.

    python -m bench.tile_order          # the cases of bench.gemm: bytes over the fewest possible, by group_m

All clusters of a wave walk along K in step; L2 keeps what was used last, up to `L2_BYTES`. That is a model: real
clusters drift apart and L2 is not fully associative. It says which order reads more, not how long it takes.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

from bench.gemm_cases import GemmCase, siglip2, squares
from cute_kernels.config import GemmProblem
from cute_kernels.plan import GemmPlan, make_plan

L2_BYTES = 40 << 20
"""Assumed: two thirds of an H200's 60 MB, whose halves keep copies of what SMs of both sides read."""

_SLICE_BYTES = 1024
"""Along K, what is read at once."""

_WAVES = 40


def dram_ratio(plan: GemmPlan, rows: int, columns: int, group_m: int, l2_bytes: int = L2_BYTES) -> float:
    """Bytes that the first waves move to and from DRAM, over those of reading and writing everything once.

    Args:
        plan: problem and number of clusters.
        rows, columns: of the output, that a cluster computes at a time.
        group_m: of `cute_kernels.kernels.tiles.GroupedOrder`, whose order this follows.
        l2_bytes: what L2 keeps.
    """
    problem, clusters = plan.problem, plan.clusters
    m_tiles, n_tiles = -(-problem.m // rows), -(-problem.n // columns)
    waves = min(_WAVES, -(-m_tiles * n_tiles // clusters))
    kept: OrderedDict[tuple[str, int, int], int] = OrderedDict()
    held = missed = 0

    def touch(key: tuple[str, int, int], nbytes: int) -> None:
        nonlocal held, missed
        if key in kept:
            kept.move_to_end(key)
            return
        missed += nbytes
        held += nbytes
        kept[key] = nbytes
        while held > l2_bytes:
            held -= kept.popitem(last=False)[1]

    def place(tile: int) -> tuple[int, int]:
        if getattr(plan.config, "transposed", False):
            return coordinates(tile, n_tiles, m_tiles, group_m)[::-1]
        return coordinates(tile, m_tiles, n_tiles, group_m)

    last = min(m_tiles * n_tiles, waves * clusters)
    for wave in range(waves):
        tiles = [place(tile) for tile in range(wave * clusters, last)[:clusters]]
        for k in range(-(-2 * problem.k // _SLICE_BYTES)):
            for row, column in tiles:
                touch(("a", row, k), rows * _SLICE_BYTES)
                touch(("b", column, k), columns * _SLICE_BYTES)
        for row, column in tiles:
            touch(("out", row, column), rows * columns * 2)
    share = last / (m_tiles * n_tiles)
    return missed / (2 * (share * problem.m * (problem.k + problem.n) + problem.n * problem.k))


def coordinates(tile: int, m_tiles: int, n_tiles: int, group_m: int) -> tuple[int, int]:
    """(row block, column) of a tile in `GroupedOrder`."""
    group, rest = divmod(tile, group_m * n_tiles)
    rows = min(m_tiles - group * group_m, group_m)
    return group * group_m + rest % rows, rest // rows


def plan_of(case: GemmCase) -> GemmPlan:
    return make_plan(GemmProblem(case.m, case.n, case.k), arch="sm_90a")


def table(cases: Sequence[GemmCase], groups: Sequence[int] = (1, 2, 4, 8, 16)) -> str:
    """Markdown: per case the chosen tile and group, and the ratio for each of ``groups``."""
    header = f"| case | tile of a cluster | group_m | {' | '.join(map(str, groups))} |"
    lines = [header, "|---" * (len(groups) + 3) + "|"]
    for case in cases:
        plan = plan_of(case)
        rows, columns = plan.cluster_rows, plan.cluster_columns
        ratios = (f"{dram_ratio(plan, rows, columns, group):.2f}" for group in groups)
        lines.append(f"| {case.name} | {rows} x {columns} | {plan.config.group_m} | {' | '.join(ratios)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([*squares(), *siglip2()]))
    sys.exit(0)
