"""What the SM100 dense GEMM does per FLOP, by configuration, counted in the emulator (`bench.counters gemm`)."""

from __future__ import annotations

import dataclasses

import torch

from cute_kernels.config import GemmProblem, Sm100GemmConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.observe.counters import UnitCounts
from cute_kernels.operations.runtime.emulated import launch as emulate
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import make_plan
from cute_kernels.plan.gemm_sm100 import LEVEL_7, LEVEL_8, ONE_ACCUMULATOR, WIDE, Sm100GemmPlan

CONFIGS = {
    "Level 8": LEVEL_8,
    "Level 8, 4 x 1 CTAs": dataclasses.replace(LEVEL_8, cluster_m=4),
    "Level 7": LEVEL_7,
    "`WIDE`": WIDE,
    "`WIDE`, 4 x 1 CTAs": dataclasses.replace(WIDE, cluster_m=4),
    "`WIDE`, 2 x 2 CTAs": dataclasses.replace(WIDE, cluster_n=2),
    "`WIDE`, 4 x 2 CTAs": dataclasses.replace(WIDE, cluster_m=4, cluster_n=2),
    "`ONE_ACCUMULATOR`": ONE_ACCUMULATOR,
}
PROBLEM = GemmProblem(m=1024, n=512, k=4096)
"""A whole number of tiles in every configuration: then nothing of the table depends on M, N and the multiprocessors."""

COLUMNS = (
    *("tile of a pair", "UMMA operand reads", "TMA fill", "L2 bytes read", "L2 bytes per clock and SM", "MMAs"),
    *("TMA loads", "warp instructions", "of them load and mma warps", "TMEM loads"),
)

FLOP_PER_CLOCK = 8192
"""Dense BF16 of one SM of a B200 per clock: half of the FP8 rate of 4.5 PFLOP/s on 148 SMs at 1.85 GHz."""


def unit_counts(plan: Sm100GemmPlan) -> UnitCounts:
    """Of one launch on random operands."""
    problem = plan.problem
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, problem.in_dtype)
    a, b = (torch.randn(1, rows, problem.k, generator=generator).to(dtype) for rows in (problem.m, problem.n))
    out = torch.empty(1, problem.m, plan.out_pitch, dtype=getattr(torch, problem.out_dtype))
    return emulate(plan, Operands(a=a, b=b, out=out), Options(counters=True, detectors=False)).units


def issued(units: UnitCounts) -> dict[str, int]:
    """Warp instructions by role."""
    return {role: sum(kinds.values()) for role, kinds in units.instructions.items()}


def counts(config: Sm100GemmConfig, problem: GemmProblem = PROBLEM) -> dict[str, float]:
    """Of one launch in the emulator, per 10^6 FLOP, by `COLUMNS` (but for the tile); wavefronts are of 128 bytes."""
    units = unit_counts(make_plan(problem, config))
    million = 2 * problem.m * problem.n * problem.k / 1e6
    instructions = issued(units)
    l2_bytes = units.total("l2_bytes_read") / million
    values = (
        units.total("operand_wavefronts", "mma") / million,
        units.total("wavefronts", "tma.load") / million,
        l2_bytes,
        l2_bytes * FLOP_PER_CLOCK / 1e6,
        units.total("instructions", "mma") / million,
        units.total("instructions", "tma.load") / million,
        sum(instructions.values()) / million,
        (instructions["load"] + instructions["mma"]) / million,
        units.total("bytes", "tmem.ld") / 128 / million,
    )
    return dict(zip(COLUMNS[1:], values, strict=True))


def k_block_instructions(config: Sm100GemmConfig) -> dict[str, float]:
    """PTX instructions of one warp of each role that runs once per K block: load, and the leader's mma."""
    short, long = (make_plan(dataclasses.replace(PROBLEM, k=k), config) for k in (512, 1024))
    before, after = issued(unit_counts(short)), issued(unit_counts(long))
    blocks = short.tiles * (long.k_blocks - short.k_blocks) * short.ctas // short.cta_group
    return {role: (after[role] - before[role]) / (blocks * warps) for role, warps in (("load", 2), ("mma", 1))}


def k_block_table() -> str:
    """Markdown: what the two warps issue while the tensor cores work on one K block."""
    lines = ["| configuration | load warp | mma warp | tensor-core clocks |", "|---|---|---|---|"]
    for name, config in CONFIGS.items():
        plan, found = make_plan(PROBLEM, config), k_block_instructions(config)
        clocks = 2 * plan.mma_tiles * plan.cta_m * config.tile_n * plan.tile_k // FLOP_PER_CLOCK
        lines.append(f"| {name} | {found['load']:.1f} | {found['mma']:.1f} | {clocks} |")
    return "\n".join(lines)


def table() -> str:
    """Markdown: a row per configuration."""
    lines = [f"| configuration | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, config in CONFIGS.items():
        plan: Sm100GemmPlan = make_plan(PROBLEM, config)
        cells = (f"{value:,.{1 if value >= 10 else 2}f}" for value in counts(config).values())
        lines.append(f"| {name} | {plan.mma_tiles * plan.mma_m} x {config.tile_n} | {' | '.join(cells)} |")
    return "\n".join(lines)
