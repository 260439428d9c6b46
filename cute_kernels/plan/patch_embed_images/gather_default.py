"""Which tiles the SM90a kernel over gathered patches gets, where its configuration leaves that open."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from cute_kernels.config import PatchEmbedImagesProblem, Sm90GatherConfig
from cute_kernels.plan.base import Arch, reject, require
from cute_kernels.plan.gemm import sm90 as dense
from cute_kernels.plan.patch_embed_images.gather import (
    BLOCK_PIXELS,
    ROW_PATCHES,
    Sm90GatherPlan,
    check_gather,
    check_gather_problem,
    check_numbers,
)
from cute_kernels.plan.shared_operands import WARPGROUP_ROWS

MOST_STAGES = 8
"""More have made no GEMM of this package faster."""

GATHER_CLOCKS = 2.2
"""Of a row of a box, whatever its bytes up to 128: the loads alone of 4736 BF16 images of 224 x 224 in boxes of 32-byte
rows took 0.44 to 0.50 ms on an H200."""

TILE_N = (64, 128, 192, 256)
CLUSTERS = (1, 2, 4)


def plan_sm90_gather(
    problem: PatchEmbedImagesProblem, config: Sm90GatherConfig | None, arch: Arch, sm_count: int
) -> Sm90GatherPlan:
    """The plan, or ValueError; what a config leaves open is what the model finds fastest."""
    check_gather_problem(problem)
    if sm_count < 1:
        reject("sm_count", sm_count, "a cluster needs a multiprocessor", 1)
    if config is not None:
        _check_fields(config)
    plan = _resolve(problem, config, arch, sm_count)
    check_gather(plan)
    check_numbers(plan)
    return plan


def _check_fields(c: Sm90GatherConfig) -> None:
    """What can be told of a field by itself."""
    for name in ("tile_patches", "tile_rows", "tile_images"):
        if getattr(c, name) < 0:
            reject(name, getattr(c, name), "powers of two; 0 chooses", 0)
    require("row_patches", c.row_patches, (0, *ROW_PATCHES), "patches of which TMA reads one row of pixels; 0 chooses")
    require("tile_n", c.tile_n, (0, *TILE_N), "N of a WGMMA in whole store buffers; 0 chooses")
    require("cluster", c.cluster, (0, *CLUSTERS), "CTAs that share the patches of a tile; 0 chooses")
    require("order", c.order, ("row", "image"), "images or positions run fastest")
    if c.store_stages < 0:
        reject("store_stages", c.store_stages, "store buffers of a warp; 0 chooses", 0)
    if c.stages < 2 and c.stages != 0:
        reject("stages", c.stages, "TMA and WGMMA overlap only with two stages or more; 0 fills the memory", 2)


@functools.lru_cache(maxsize=4096)
def _resolve(
    problem: PatchEmbedImagesProblem, config: Sm90GatherConfig | None, arch: Arch, sm_count: int
) -> Sm90GatherPlan:
    """The plan of least modelled time among those that leave given fields as they are; a wrong one where all are."""
    plans = [
        _filled(Sm90GatherPlan(problem, candidate, arch, sm_count), config or Sm90GatherConfig())
        for candidate in _candidates(problem, config)
    ]
    legal = [plan for plan in plans if _is_legal(plan)]
    return min(legal or plans, key=modelled_clocks)


def _is_legal(plan: Sm90GatherPlan) -> bool:
    try:
        check_gather(plan)
    except ValueError:
        return False
    return True


def _candidates(problem: PatchEmbedImagesProblem, config: Sm90GatherConfig | None) -> Iterator[Sm90GatherConfig]:
    c = config or Sm90GatherConfig()
    schedules = (c.pingpong,) if config is not None else (False, True)
    tile_n = (c.tile_n,) if c.tile_n else TILE_N
    clusters = (c.cluster,) if c.cluster else CLUSTERS
    side = BLOCK_PIXELS // problem.patch
    fit = [q for q in ROW_PATCHES if q <= side and problem.grid_width % q == 0]
    row_patches = (c.row_patches,) if c.row_patches else (fit[-1], fit[0]) if len(fit) > 1 else tuple(fit)
    for pingpong, q in itertools.product(schedules, row_patches):
        for tile_m in (64, 128) if pingpong else (128, 256):
            shape = _shape(problem, c, q, tile_m)
            if tile_m < q * WARPGROUP_ROWS and not c.row_patches:
                continue
            for n, cluster in itertools.product(tile_n, clusters):
                yield dataclasses.replace(
                    c, **shape, row_patches=q, tile_n=n, cluster=cluster, pingpong=pingpong, stages=c.stages or 2,
                    store_stages=c.store_stages or 1,
                )  # fmt: skip


def _shape(problem: PatchEmbedImagesProblem, c: Sm90GatherConfig, row_patches: int, tile_m: int) -> dict[str, int]:
    """Extents of a tile of ``tile_m`` patches that cover the images with the fewest tiles.

    Of those, the one with the longest pieces of grid rows, whose pixels are neighbours in memory.
    """
    shapes = []
    for patches in (c.tile_patches,) if c.tile_patches else _powers(row_patches, tile_m):
        for rows in (c.tile_rows,) if c.tile_rows else _powers(1, max(1, tile_m // patches)):
            images = c.tile_images or max(1, tile_m // (patches * rows))
            tiles = -(-problem.grid_width // patches) * -(-problem.grid_height // rows) * -(-problem.batch // images)
            wrong = patches * rows * images != tile_m
            shapes.append(((wrong, tiles, -patches, rows), (patches, rows, images)))
    return dict(zip(("tile_patches", "tile_rows", "tile_images"), min(shapes)[1], strict=True))


def _powers(first: int, most: int) -> list[int]:
    """``first`` times powers of two up to ``most``; ``first`` in any case."""
    values = [first]
    while 2 * values[-1] <= most:
        values.append(2 * values[-1])
    return values


def _filled(plan: Sm90GatherPlan, given: Sm90GatherConfig) -> Sm90GatherPlan:
    """With store buffers, and as many stages as shared memory holds beside them, at least two, where these are open."""
    if not given.store_stages:
        stores = next(count for count in (2, 3, 1) if plan.regions_per_tile % count == 0)
        plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, store_stages=stores))
    if given.stages:
        return plan
    room = plan.config.stages + (plan.arch.smem_bytes - plan.smem_bytes) // plan.stage_bytes
    stages = max(2, min(room, MOST_STAGES))
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, stages=stages))


def search_space(problem: PatchEmbedImagesProblem, arch: Arch, sm_count: int) -> list[Sm90GatherPlan]:
    """Legal plans that are worth timing, the one with the least modelled time first; of each, both orders."""
    given = Sm90GatherConfig()
    plans = [_filled(Sm90GatherPlan(problem, c, arch, sm_count), given) for c in _candidates(problem, None)]
    found = []
    for plan in sorted(filter(_is_legal, plans), key=modelled_clocks):
        configs = [dataclasses.replace(plan.config, order=order) for order in ("image", "row")]
        found += [dataclasses.replace(plan, config=config) for config in configs]
    return found


def modelled_clocks(plan: Sm90GatherPlan) -> float:
    """Modelled time of a launch: `cute_kernels.plan.gemm.sm90.modelled_clocks`, and the rows that TMA gathers."""
    c = plan.config
    wgmma = plan.k_blocks * dense.BLOCK_MACS * plan.tile_m * c.tile_n / dense.MACS_PER_CLOCK
    gather = plan.k_blocks * plan.pixel_rows * plan.box_rows * GATHER_CLOCKS / c.cluster
    fetched = plan.k_blocks * plan.k_block_bytes * (plan.tile_m / c.cluster + c.tile_n) / dense.FETCHED_BYTES_PER_CLOCK
    # Almost the largest of them: they overlap, but for where several take as long.
    mainloop = (wgmma**4 + gather**4 + fetched**4) ** 0.25 + dense.TILE_CLOCKS + plan.k_blocks * dense.BLOCK_CLOCKS
    epilogue = plan.warpgroup_rows * c.tile_n / 1024 * dense.EPILOGUE_CLOCKS_PER_KELEMENT
    once = dense.LAUNCH_CLOCKS + dense.CLUSTER_CLOCKS * c.cluster
    turns = -(-plan.tiles // plan.clusters)
    if not c.pingpong:
        return once + turns * (mainloop + epilogue)
    return once + turns * max(mainloop, (mainloop + epilogue) / 2) + epilogue
