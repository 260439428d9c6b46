"""What the emulator costs: milliseconds per 256 x 256 x 768 FP8 tile of the patch-embed kernel, at growing tile counts.

Run with ``python bench/emulator.py``. One cluster works through all tiles on one core; compilation and the translation
of PTX happen before the clock starts. The target of the default configuration is 150 ms per tile.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from rich.console import Console
from rich.table import Table

from cute_kernels.config import Problem, TileConfig
from cute_kernels.emulator import Options
from cute_kernels.launch import LaunchTensors, emulate
from cute_kernels.plan import make_plan

POSITIONS, FEATURES = 196, 768


def seconds_per_launch(tiles: int, config: TileConfig, options: Options, repeats: int) -> tuple[list[float], int]:
    """Wall-clock seconds of each repeat for ``tiles`` tiles of 256 x 256 x 768, and warp instructions of one launch."""
    rows = 256 * tiles
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, FEATURES, generator=generator).to(torch.float8_e4m3fn)
    weight = torch.randn(256, FEATURES, generator=generator).to(torch.float8_e4m3fn)
    plan = make_plan(Problem(rows, 256, FEATURES, POSITIONS), config, sm_count=2)
    table = torch.randn(plan.table_shape, generator=generator).to(getattr(torch, plan.table_dtype))
    out = torch.empty(rows, 256, dtype=torch.bfloat16)
    tensors = LaunchTensors(x, weight, table, 0.5, out)
    emulate(plan, tensors, options)
    times, instructions = [], 0
    for _ in range(repeats):
        start = time.perf_counter()
        instructions = emulate(plan, tensors, options).warp_instructions
        times.append(time.perf_counter() - start)
    return times, instructions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    table = Table(title="emulator, 256 x 256 x 768 FP8 tiles, one cluster")
    columns = ("tiles", "config", "options", "ms per tile (median)", "min", "max", "warp instructions per tile")
    for column in columns:
        table.add_column(column, justify="right")
    last = arguments.tiles[-1]
    cases = [(tiles, TileConfig(), "default", {}) for tiles in arguments.tiles]
    cases.append((last, TileConfig(epilogue="bf16x2"), "default", {}))
    cases.append((last, TileConfig(), "no detectors", {"detectors": False}))
    with tempfile.TemporaryDirectory() as folder:
        cases.append((last, TileConfig(), "counters", {"counters": True}))
        cases.append((last, TileConfig(), "trace", {"trace": f"{folder}/trace.json"}))
        for tiles, config, name, options in cases:
            times, instructions = seconds_per_launch(tiles, config, Options(**options), arguments.repeats)
            per_tile = [1e3 * t / tiles for t in times]
            table.add_row(
                str(tiles), config.epilogue, name, f"{statistics.median(per_tile):.1f}",
                f"{min(per_tile):.1f}", f"{max(per_tile):.1f}", f"{instructions / tiles:,.0f}",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
