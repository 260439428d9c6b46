"""Plan of the SM90a dense GEMM: two consumer warpgroups, cooperative or in turn, multicast in small clusters.

There is no stream-K order: at the sizes of docs/performance.md the last turn of the clusters is so full that at most
4% of the multiprocessors' time is lost in all turns together (tests/plan/test_plan_gemm.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.config import GemmProblem, Sm90GemmConfig
from cute_kernels.plan.base import ITEMSIZE, Arch, Field, check_fields, reject, require, round_up
from cute_kernels.plan.gemm import GROUP_M, StagedGemmPlan, check_tile_order
from cute_kernels.plan.shared_operands import LEAST_ROW_BYTES, WgmmaPair, check_accumulators, check_stores_and_stages

SWIZZLE_ROWS = 8
"""Rows of a SWIZZLE_128B atom."""

MAX_CLUSTER = 8
"""CTAs of a cluster that every device of the architecture can hold (CUDA C++ programming guide)."""

SPLIT_REGISTERS = 128
"""Accumulators with which the sums of more than two slices of K do not fit a consumer thread."""


@dataclass(frozen=True)
class Sm90GemmPlan(StagedGemmPlan, WgmmaPair):
    """The persistent WGMMA kernel, as `WgmmaPair` says, with a split of K."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm90.gemm:Sm90GemmKernel"
    graph: ClassVar[str] = "cute_kernels.kernels.graph:sm90_gemm_graph"

    config: Sm90GemmConfig

    # ---- tiles -----------------------------------------------------------------------------------------------------

    @property
    def tile_m(self) -> int:
        return self.config.tile_m

    @property
    def sharing_ctas(self) -> int:
        """CTAs that load operands for each other: those of a cluster with the same slice of K."""
        return self.config.cluster_m * self.config.cluster_n

    @property
    def ctas(self) -> int:
        return self.sharing_ctas * self.config.split_k

    @property
    def cluster_rows(self) -> int:
        return self.config.tile_m * self.config.cluster_m

    @property
    def cluster_columns(self) -> int:
        return self.config.tile_n * self.config.cluster_n

    # ---- memory ----------------------------------------------------------------------------------------------------

    @property
    def loaded_rows(self) -> int:
        """Rows of a tile of ``a`` that are loaded: all, or a power of two that covers M where that is at most half.

        TMA is slow to fill rows that do not exist: 16 rows took 21.0 us in tiles of 128 rows where 128 rows took 9.7
        (4096 x 4096, two slices of K, one H200; bench/results: 2026-11-21-h200, gemm-tune.json). What is not loaded is
        cleared once per launch. Whole swizzle atoms for each of the CTAs that share the tile.
        """
        least = max(SWIZZLE_ROWS * self.config.cluster_n, 1 << (self.problem.m - 1).bit_length())
        return least if 2 * least <= self.config.tile_m and self.config.cluster_m == 1 else self.config.tile_m

    @property
    def loaded_bytes(self) -> int:
        """Bytes that complete on the barrier of a stage: its bytes but for the rows of ``a`` that are not loaded."""
        return self.stage_bytes - (self.config.tile_m - self.loaded_rows) * self.k_block_bytes

    @property
    def compiled_in(self) -> dict[str, Hashable]:
        return super().compiled_in | {"loaded_rows": self.loaded_rows}

    @property
    def finished_warps(self) -> int:
        """Consumer warps of a tile whose rows one CTA adds up and stores; the other CTAs' warps send it theirs."""
        return self.storing_warps // self.config.split_k

    @property
    def partial_bytes(self) -> int:
        """FP32 sums of one warp's rows over one slice of K."""
        return self.waves * self.store_rows * self.config.tile_n * 4

    @property
    def received_bytes(self) -> int:
        """Bytes that the other CTAs of a split send to one warp that finishes its rows."""
        return (self.config.split_k - 1) * self.partial_bytes

    @property
    def more_smem(self) -> tuple[tuple[str, int, int], ...]:
        if self.config.split_k == 1:
            return ()
        return (("partial sums", self.finished_warps * self.received_bytes, 128),)

    def describe_tiles(self) -> list[tuple[str, str]]:
        c = self.config
        schedule = "pingpong: a tile per warpgroup" if c.pingpong else "cooperative: half of a tile per warpgroup"
        registers = f"{self.accumulator_registers} of accumulators, {self.consumer_registers} per consumer thread"
        slices = f", {c.split_k} slices of K each" if c.split_k > 1 else ""
        return [
            ("tile", f"{c.tile_m} x {c.tile_n}, {self.k_blocks} K blocks of {self.tile_k}"),
            ("schedule", schedule),
            ("cluster", f"{c.cluster_m} x {c.cluster_n} CTAs, {self.cluster_rows} x {self.cluster_columns}{slices}"),
            ("tiles", f"{self.tiles} = {self.m_tiles} x {self.n_tiles} over {self.clusters} clusters"),
            ("order", f"groups of {c.group_m} blocks of rows"),
            *([("rows loaded", f"{self.loaded_rows} of a tile")] if self.loaded_rows < c.tile_m else []),
            ("registers", registers),
            ("epilogue", f"{c.store_stages} store stages of {self.store_rows} x {self.store_columns} per warp"),
        ]


FIELDS = {
    "tile_m": Field("64 rows or a multiple for each warpgroup", (64, 128, 192, 256)),
    "tile_n": Field("N of a WGMMA in whole store buffers", tuple(range(32, 257, 16))),
    "stages": Field("TMA and WGMMA overlap only with two stages or more", least=2),
    "cluster_m": Field("CTAs of a cluster along one dimension", (1, 2, 4)),
    "cluster_n": Field("CTAs of a cluster along one dimension", (1, 2, 4)),
    "group_m": GROUP_M,
    "split_k": Field("slices of K in one cluster, each finishing as many warps' rows", (1, 2, 4, 8)),
}


def plan_sm90_gemm(problem: GemmProblem, config: Sm90GemmConfig, arch: Arch, sm_count: int) -> Sm90GemmPlan:
    """The plan, or ValueError."""
    if sm_count < 1:
        reject("sm_count", sm_count, "a cluster needs a multiprocessor", 1)
    check_fields(config, FIELDS)
    rows = (64, 128, 192) if config.pingpong else (128, 256)
    require("tile_m", config.tile_m, rows, "64 rows or a multiple for each warpgroup")
    shared = SWIZZLE_ROWS * config.cluster_m
    if config.tile_n % shared:
        rule = f"each of cluster_m = {config.cluster_m} CTAs loads whole swizzle atoms of {SWIZZLE_ROWS} rows of b"
        reject("tile_n", config.tile_n, rule, round_up(config.tile_n, shared))
    if config.split_k > 1 and config.pingpong:
        reject("split_k", config.split_k, "warpgroups that take turns do not split K; use pingpong=False", 1)
    plan = Sm90GemmPlan(problem, config, arch, sm_count)
    if plan.ctas > MAX_CLUSTER:
        rule = f"{config.cluster_m} x {config.cluster_n} x {config.split_k} CTAs exceed the {MAX_CLUSTER} of a cluster"
        name = "split_k" if config.split_k > 1 else "cluster_n"
        reject(name, getattr(config, name), rule, max(1, MAX_CLUSTER * getattr(config, name) // plan.ctas))
    if config.split_k > plan.k_blocks:
        rule = f"every slice of K needs a block of {plan.tile_k}, and k = {problem.k} has {plan.k_blocks}"
        reject("split_k", config.split_k, rule, 1 << (plan.k_blocks.bit_length() - 1))
    if sm_count < plan.ctas:
        reject("sm_count", sm_count, f"a cluster needs {plan.ctas} multiprocessors", plan.ctas)
    check_accumulators(plan)
    if config.split_k > 2 and plan.accumulator_registers >= SPLIT_REGISTERS:
        rule = f"beside {plan.accumulator_registers} registers of accumulators, sums of more than two slices spill"
        reject("split_k", config.split_k, f"{rule}{_way_to_split(plan)}", 2)
    check_tile_order(plan)
    check_stores_and_stages(plan)
    return plan


def _way_to_split(plan: Sm90GemmPlan) -> str:
    """Setting for a split of K that the tile is too large for, for a report; "" if no smaller tile helps."""
    for tile_n in (192, 128, 64):
        for stores in dict.fromkeys((plan.config.store_stages, 2, 1)):
            config = dataclasses.replace(plan.config, tile_n=tile_n, store_stages=stores)
            if dataclasses.replace(plan, config=config).accumulator_registers >= SPLIT_REGISTERS:
                continue
            try:
                plan_sm90_gemm(plan.problem, config, plan.arch, plan.sm_count)
            except ValueError:
                continue
            settings = f"tile_n={tile_n}" + (f", store_stages={stores}" if stores != plan.config.store_stages else "")
            return f"; split_k={config.split_k} is possible with {settings}"
    return ""


_CANDIDATES = (
    (128, 256, False, 4, 2, ((2, 1),), (1,)),
    (256, 128, False, 4, 2, ((2, 1),), (1,)),
    (256, 192, False, 3, 2, ((1, 2), (2, 1), (1, 1)), (1,)),
    (256, 144, False, 4, 2, ((2, 1), (1, 2)), (1,)),
    (128, 192, True, 4, 2, ((2, 1), (1, 2), (1, 1)), (1,)),
    (128, 176, True, 5, 2, ((2, 1), (1, 2)), (1,)),
    (128, 160, True, 5, 2, ((2, 1), (1, 2), (1, 1)), (1,)),
    (128, 144, True, 6, 2, ((2, 1), (1, 2)), (1,)),
    (192, 128, True, 4, 2, ((2, 1), (1, 2)), (1,)),
    (192, 96, True, 5, 3, ((2, 1), (1, 2)), (1,)),
    (128, 128, True, 6, 2, ((2, 1), (1, 2), (1, 1), (1, 4)), (1,)),
    (128, 128, False, 5, 2, ((2, 1), (1, 2)), (1, 2)),
    (128, 96, False, 7, 3, ((1, 2), (1, 4)), (1,)),
    (128, 128, False, 4, 2, ((1, 1), (2, 1)), (4,)),
    (64, 192, True, 5, 3, ((2, 1), (1, 2), (4, 1), (1, 1)), (1,)),
    (64, 128, True, 8, 2, ((2, 1), (1, 2), (4, 1), (1, 4), (1, 1)), (1,)),
    (64, 64, True, 8, 1, ((2, 2), (2, 1), (1, 2), (1, 1)), (1,)),
    (128, 64, False, 8, 1, ((2, 1), (1, 1)), (1, 2)),
    (128, 64, False, 8, 1, ((1, 2), (1, 4)), (2,)),
    (128, 64, False, 7, 1, ((1, 1), (1, 2)), (4,)),
    (128, 64, False, 6, 1, ((1, 1),), (8,)),
)
"""Rows, columns and pingpong of a tile, stages, store stages, clusters and splits of K."""

CANDIDATES = tuple(
    Sm90GemmConfig(tile_m, tile_n, stages, *cluster, pingpong, store_stages, split_k=split_k)
    for tile_m, tile_n, pingpong, stages, store_stages, clusters, splits in _CANDIDATES
    for cluster in clusters
    for split_k in splits
)
"""Candidates that the chooser chooses from: what pays at some size, by the timings or by the model fitted to them."""

TILES = (
    *((128, n, False) for n in (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)),
    *((256, n, False) for n in (96, 112, 128, 144, 160, 176, 192)),
    *((64, n, True) for n in (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)),
    *((128, n, True) for n in (64, 80, 96, 112, 128, 144, 160, 176, 192)),
    *((192, n, True) for n in (64, 80, 96, 112, 128)),
)
"""Rows, columns and pingpong of the tiles that a tuner tries."""

CLUSTERS = ((2, 1), (1, 2), (1, 1), (2, 2), (4, 1), (1, 4))
"""Clusters that a tuner tries."""

MACS_PER_CLOCK = 2048
"""Multiply-adds of 16-bit operands per SM and clock: a wgmma of 64 x 256 x 16 takes 128 clocks."""

BLOCK_MACS = 64
"""Multiply-adds of 16-bit operands per output that take the time of one K block, of any element type: 128 bytes."""

# The constants from here on were fitted to the timings that `default_config` names (`python -m bench.tune fit
# --operation gemm`). They rank configurations; they do not predict microseconds.

FETCHED_BYTES_PER_CLOCK = 91
"""Operand bytes that a CTA gets from L2 per clock, while WGMMAs run."""

FIRST_BYTES_PER_CLOCK = 456
"""Rate at which operand bytes of its first tile add clocks to a launch: all CTAs fetch, nothing is in L2 yet."""

BLOCK_CLOCKS = 126
"""Clocks of every K block: its barriers, and the issue of its WGMMAs."""

PINGPONG_GAIN = 0.04
"""Share of its WGMMAs' time that a warpgroup saves which does not wait for another one at every K block."""

TILE_CLOCKS = 35
"""Clocks of every tile besides its WGMMAs and its epilogue: coordinates, first operands, hand-over."""

EPILOGUE_CLOCKS_PER_KELEMENT = 29.5
"""Clocks of a warpgroup to convert, stage and store 1024 output elements of a tile."""

ACTIVATION_CLOCKS_PER_KELEMENT = 56
"""Clocks of a warpgroup to apply an activation to 1024 elements: seven instructions for each, of any but ReLU."""

BUFFER_CLOCKS = 240
"""Clocks of a warpgroup for every store buffer of a tile, whatever its columns."""

LAUNCH_CLOCKS = 5000
"""Clocks of a launch, whatever it computes."""

CLUSTER_CLOCKS = 47
"""Clocks of a launch per CTA of a cluster: they start and end together."""

SPLIT_CLOCKS = 188
"""Clocks of an exchange of partial sums besides its bytes, per doubling of the slices."""

SPLIT_BYTES_PER_CLOCK = 8.75
"""Partial sums that a CTA receives through distributed shared memory per clock."""

NEAR_L2_BYTES = 16 << 20
"""Rows of ``a`` that clusters work on at the same time: if more than this, they are not found in L2 by a later turn."""

RESIDENT_B_BYTES = 12 << 20
"""``b`` up to this stays in L2 through a launch, whatever the order of the tiles."""


def modelled_clocks(plan: Sm90GemmPlan) -> float:
    """Modelled time of a launch: the turns of the busiest cluster, and what is left to do after its last WGMMA."""
    c = plan.config
    blocks = -(-plan.k_blocks // c.split_k)
    turns = -(-plan.tiles // plan.clusters)
    # In the only turn the other warpgroup has no tile, and nothing runs while this one waits.
    gain = PINGPONG_GAIN * c.pingpong * (1 if turns > 1 else -0.5)
    wgmma = blocks * BLOCK_MACS * c.tile_m * c.tile_n / MACS_PER_CLOCK * (1 - gain)
    fetched = (plan.loaded_rows / c.cluster_n + c.tile_n / c.cluster_m) * blocks * plan.k_block_bytes
    # Almost the larger of both: they overlap, but for where both take as long.
    mainloop = (wgmma**4 + (fetched / FETCHED_BYTES_PER_CLOCK) ** 4) ** 0.25 + TILE_CLOCKS + blocks * BLOCK_CLOCKS
    kelement = EPILOGUE_CLOCKS_PER_KELEMENT + ACTIVATION_CLOCKS_PER_KELEMENT * (plan.problem.activation != "none")
    epilogue = plan.warpgroup_rows * c.tile_n / 1024 * kelement + plan.regions_per_tile * BUFFER_CLOCKS
    once = LAUNCH_CLOCKS + CLUSTER_CLOCKS * plan.ctas + fetched / FIRST_BYTES_PER_CLOCK
    exchange = 0.0
    if c.split_k > 1:
        exchange = SPLIT_CLOCKS * math.log2(c.split_k)
        exchange += plan.finished_warps * plan.received_bytes / SPLIT_BYTES_PER_CLOCK
    if not c.pingpong:
        return once + turns * (mainloop + epilogue + exchange)
    # In turn, a warpgroup has the other one's mainloop to store in, but nothing hides the last tile's epilogue.
    return once + turns * max(mainloop, (mainloop + epilogue) / 2) + epilogue


def default_config(problem: GemmProblem, arch: Arch, sm_count: int) -> Sm90GemmConfig:
    """The candidate with the least modelled time.

    The constants were fitted to gemm-tune.json and gemm-configs.json of bench/results, 2026-11-21-h200, to
    gemm-few-rows.json of 2026-11-22-h200 and to gemm-layers-tune.json of 2026-11-26-h100;
    `python -m pytest tests/bench/test_gemm_choice.py` says how near to the fastest the choice is there.
    """
    costs = []
    for index, c in enumerate(CANDIDATES):
        idle = (c.cluster_m - 1) * c.tile_m >= problem.m or (c.cluster_n - 1) * c.tile_n >= problem.n
        plan = Sm90GemmPlan(problem, c, arch, sm_count)
        if idle or plan.ctas > sm_count or plan.k_blocks < c.split_k or plan.store_row_bytes < LEAST_ROW_BYTES:
            continue  # a CTA of every cluster would compute nothing, no cluster fits, or no swizzle is as narrow
        # Outputs of 8 bits have fewer store buffers in a tile, those of 32 more bytes in each.
        c = dataclasses.replace(c, store_stages=math.gcd(c.store_stages, plan.regions_per_tile))
        costs.append((modelled_clocks(plan), index, _with_stages_that_fit(plan, c)))
    if not costs:  # no cluster fits, which the plan of any says
        return Sm90GemmConfig()
    config = min(costs)[2]
    return dataclasses.replace(config, group_m=tile_group(Sm90GemmPlan(problem, config, arch, sm_count)))


def _with_stages_that_fit(plan: Sm90GemmPlan, config: Sm90GemmConfig) -> Sm90GemmConfig:
    plan = dataclasses.replace(plan, config=config)
    beyond = max(0, plan.smem_bytes - plan.arch.smem_bytes)
    return dataclasses.replace(config, stages=config.stages - -(-beyond // plan.stage_bytes))


def tile_group(plan: Sm90GemmPlan) -> int:
    """Row blocks down which the tiles run before the next column: 8, or 1 where that reads ``a`` from DRAM once.

    A group of rows that a turn of the clusters cuts in two is read twice, if the rows in flight do not stay in L2 that
    long. With groups of one row block at most one block is cut; ``b``, which is then read anew for every row block,
    has to stay in L2 (`python -m bench.tile_order` models both).
    """
    columns = -(-plan.problem.n // plan.cluster_columns)
    k_bytes = plan.problem.k * ITEMSIZE[plan.problem.in_dtype]
    in_flight = plan.clusters / columns * plan.cluster_rows * k_bytes
    tall = columns < plan.clusters and in_flight > NEAR_L2_BYTES
    return 1 if tall and plan.problem.n * k_bytes <= RESIDENT_B_BYTES else plan.config.group_m


def search_space(problem: GemmProblem, arch: Arch, sm_count: int) -> list[Sm90GemmPlan]:
    """Legal plans that are worth timing, the one with the least modelled time first."""
    plans = []
    for (tile_m, tile_n, pingpong), (cluster_m, cluster_n) in itertools.product(TILES, CLUSTERS):
        if (cluster_m - 1) * tile_m >= problem.m or (cluster_n - 1) * tile_n >= problem.n:
            continue  # a CTA of every cluster would have nothing to do
        tile = {"tile_m": tile_m, "tile_n": tile_n, "cluster_m": cluster_m, "cluster_n": cluster_n}
        config = Sm90GemmConfig(**tile, pingpong=pingpong, stages=2, store_stages=1)
        idle = Sm90GemmPlan(problem, config, arch, sm_count).tiles * config.cluster_m * config.cluster_n * 2 <= sm_count
        for split_k in (1, 2, 4, 8) if idle and not pingpong else (1,):
            plan = _filled(problem, dataclasses.replace(config, split_k=split_k), arch, sm_count)
            if plan is not None:
                plans.append(plan)
    return sorted(plans, key=modelled_clocks)


def _filled(problem: GemmProblem, config: Sm90GemmConfig, arch: Arch, sm_count: int) -> Sm90GemmPlan | None:
    """With as many stages as fit beside the fewest store buffers above one, or one; None if that is illegal."""
    regions = Sm90GemmPlan(problem, config, arch, sm_count).regions_per_tile
    buffers = next((count for count in range(2, regions + 1) if regions % count == 0), 1)
    config = dataclasses.replace(config, store_stages=buffers)
    least = Sm90GemmPlan(problem, config, arch, sm_count)
    stages = config.stages + (arch.smem_bytes - least.smem_bytes) // least.stage_bytes
    try:
        return plan_sm90_gemm(problem, dataclasses.replace(config, stages=min(stages, 8)), arch, sm_count)
    except ValueError:
        return None
