"""Plan of the SM90a dense GEMM: consumer warpgroups together or in turn, multicast in small clusters.

There is no stream-K order: at the sizes of docs/performance.md the last wave of clusters is so full that at most
4% of the multiprocessors' time is lost in all waves together (tests/plan/test_gemm.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.common.chips import CTA_SMEM_BYTES
from cute_kernels.common.facts import fact, number
from cute_kernels.config import GemmProblem, Sm90GemmConfig
from cute_kernels.plan.base import ITEMSIZE, Arch, Field, check_fields, check_sm_count, reject, require, round_up
from cute_kernels.plan.gemm import GROUP_M, StagedGemmPlan, check_tile_order
from cute_kernels.plan.shared_operands import (
    LEAST_ROW_BYTES,
    WARP_ROWS,
    WgmmaPair,
    check_accumulators,
    check_stores_and_stages,
)

SWIZZLE_ROWS = 8
"""Rows of a SWIZZLE_128B atom."""

MAX_CLUSTER = 8
"""CTAs of a cluster that every device of the architecture can hold (CUDA C++ programming guide)."""

TRANSPOSED_BYTES = 2
"""Bytes of an element that ``stmatrix`` and ``ldmatrix`` transpose."""

MAX_RESIDUAL_BUFFERS = 12
"""Store buffers of a warp whose barriers, beside those of stages and of sums, fit 1024 bytes."""

SPLIT_REGISTERS = 128
"""Accumulators with which the sums of more than two slices of K do not fit a consumer thread."""


@dataclass(frozen=True)
class Sm90GemmPlan(StagedGemmPlan, WgmmaPair):
    """The persistent WGMMA kernel, as `WgmmaPair` says, with a split of K."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm90.gemm:Sm90GemmKernel"
    graph: ClassVar[str] = "cute_kernels.kernels.graph:sm90_gemm_graph"

    config: Sm90GemmConfig

    # A thread loads single factors and values of the bias; others find them in shared memory.
    column_vector: ClassVar[int] = 1
    bias_vector: ClassVar[int] = 1

    # ---- tiles -----------------------------------------------------------------------------------------------------
    tile_m = number(lambda self: self.config.tile_m)
    sharing_ctas = number(lambda self: self.config.cluster_m * self.config.cluster_n)
    """CTAs that load operands for each other: those of a cluster with the same slice of K."""
    ctas = number(lambda self: self.sharing_ctas * self.config.split_k)

    @property
    def cluster_rows(self) -> int:
        c = self.config
        return c.tile_n * c.cluster_n if c.transposed else c.tile_m * c.cluster_m

    @property
    def cluster_columns(self) -> int:
        c = self.config
        return c.tile_m * c.cluster_m if c.transposed else c.tile_n * c.cluster_n

    # ---- memory ----------------------------------------------------------------------------------------------------
    @property
    def loaded_rows(self) -> int:
        """Rows of a tile of ``a`` that are loaded: all, or a power of two that covers M where that is at most half.

        TMA is slow to fill rows that do not exist: 16 rows took 21.0 us in tiles of 128 rows where 128 rows took 9.7
        (4096 x 4096, two slices of K, one H200; bench/results: 2026-11-21-h200, gemm-tune.json). What is not loaded is
        cleared once per launch. Whole swizzle atoms for each of the CTAs that share the tile.
        """
        if self.config.transposed:
            return self.config.tile_m
        least = max(SWIZZLE_ROWS * self.config.cluster_n, 1 << (self.problem.m - 1).bit_length())
        return least if 2 * least <= self.config.tile_m and self.config.cluster_m == 1 else self.config.tile_m

    loaded_bytes = number(lambda self: self.stage_bytes - (self.config.tile_m - self.loaded_rows) * self.k_block_bytes)
    """Bytes that complete on the barrier of a stage: its bytes but for the rows of ``a`` that are not loaded."""
    compiled_in = fact(lambda self: super().compiled_in | {"loaded_rows": self.loaded_rows})

    @property
    def tma_residual(self) -> bool:
        """Where it is as wide as the output, whose place in a store buffer it takes first."""
        residual = self.problem.residual
        return residual is not None and ITEMSIZE[residual] == self.out_bytes

    store_warps = number(lambda self: max(1, min(4, self.finished_warps)) if self.config.transposed else 1)
    """Warps that fill a store buffer together: of a transposed tile each has 16 of its columns."""

    @property
    def store_row_bytes(self) -> int:
        if self.config.transposed:
            return self.store_warps * WARP_ROWS * self.out_bytes
        return super().store_row_bytes

    @property
    def store_rows(self) -> int:
        if self.config.transposed:
            return max(rows for rows in (16, 32, 48, 64) if self.config.tile_n % rows == 0)
        return super().store_rows

    store_span = number(lambda self: self.store_rows if self.config.transposed else self.store_columns)
    """Columns of the accumulators that a store buffer takes."""
    regions_per_tile = number(lambda self: self.mma_tiles * (self.config.tile_n // self.store_span))
    staging_bytes = number(lambda self: super().staging_bytes // self.store_warps)
    store_buffer_bytes = number(lambda self: self.store_rows * self.store_row_bytes)
    finished_warps = number(lambda self: self.storing_warps // self.config.split_k)
    """Consumer warps of a tile whose rows one CTA adds up and stores; the other CTAs' warps send it theirs."""
    partial_bytes = number(lambda self: self.mma_tiles * WARP_ROWS * self.config.tile_n * 4)
    """FP32 sums of one warp's rows over one slice of K."""
    received_bytes = number(lambda self: (self.config.split_k - 1) * self.partial_bytes)
    """Bytes that the other CTAs of a split send to one warp that finishes its rows."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Numbers of the columns of a tile's WGMMAs that shared memory keeps."""
        p = self.problem
        there = {"scale": p.row_scale} if self.config.transposed else {"scale": p.column_scale, "bias": p.bias}
        return tuple(kind for kind, is_there in there.items() if is_there)

    keeping_groups = number(lambda self: self.warpgroups if self.config.pingpong else 1)
    """Groups of warps that each keep their own: those of a tile."""
    kept_bytes = number(lambda self: len(self.kept) * self.config.tile_n * ITEMSIZE["float32"])
    """Memory of one group."""
    spare_barrier_bytes = number(lambda self: self.barrier_bytes // 2 if self.kept and not self.tma_residual else 0)
    """Half, but for a residual's: 22 stages of the smallest tile and the sums of eight warps need 480 bytes.

    Two CTAs of one warpgroup, six stages and two slices of K fill a multiprocessor to the byte.
    """

    @property
    def first_smem(self) -> tuple[tuple[str, int, int], ...]:
        return (("numbers of columns", self.keeping_groups * self.kept_bytes, 128),) if self.kept else ()

    @property
    def more_smem(self) -> tuple[tuple[str, int, int], ...]:
        sums = ("partial sums", self.finished_warps * self.received_bytes, 128)
        return (sums,) if self.config.split_k > 1 else ()

    def describe_tiles(self) -> list[tuple[str, str]]:
        c = self.config
        share = "half of a tile per warpgroup" if self.warpgroups > 1 else "one warpgroup"
        schedule = "pingpong: a tile per warpgroup" if c.pingpong else f"cooperative: {share}"
        registers = f"{self.accumulator_registers} of accumulators, {self.consumer_registers} per consumer thread"
        by = "warp" if self.store_warps == 1 else f"{self.store_warps} warps"
        slices = f", {c.split_k} slices of K each" if c.split_k > 1 else ""
        shape = f"{c.tile_n} x {c.tile_m}, transposed" if c.transposed else f"{c.tile_m} x {c.tile_n}"
        return [
            ("tile", f"{shape}, {self.k_blocks} K blocks of {self.tile_k}"),
            ("schedule", schedule),
            ("cluster", f"{self.sharing_ctas} CTAs, {self.cluster_rows} x {self.cluster_columns}{slices}"),
            ("tiles", f"{self.tiles} = {self.m_tiles} x {self.n_tiles} over {self.clusters} clusters"),
            ("order", f"groups of {c.group_m} blocks of rows"),
            *([("rows loaded", f"{self.loaded_rows} of a tile")] if self.loaded_rows < c.tile_m else []),
            ("registers", registers),
            ("epilogue", f"{c.store_stages} store stages of {self.store_rows} x {self.store_columns} per {by}"),
        ]


FIELDS = {
    "tile_m": Field("64 rows or a multiple for each warpgroup; 192 with pingpong, 256 without", (64, 128, 192, 256)),
    "tile_n": Field("N of a WGMMA in whole store buffers", tuple(range(16, 257, 16))),
    "stages": Field("TMA and WGMMA overlap only with two stages or more", least=2),
    "cluster_m": Field("CTAs of a cluster along one dimension", (1, 2, 4)),
    "cluster_n": Field("CTAs of a cluster along one dimension", (1, 2, 4)),
    "group_m": GROUP_M,
    "split_k": Field("slices of K in one cluster, each finishing as many warps' rows", (1, 2, 4, 8)),
}


def checked_plan(problem: GemmProblem, config: Sm90GemmConfig, arch: Arch, sm_count: int) -> Sm90GemmPlan:
    """The plan, or ValueError."""
    check_fields(config, FIELDS)
    rows = (64, 128, 192) if config.pingpong else (64, 128, 256)
    require("tile_m", config.tile_m, rows, FIELDS["tile_m"].rule)
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
    if config.transposed:
        _check_transposed(problem)
    if plan.storing_warps % config.split_k:
        rule = f"each slice of K finishes the rows of as many of the {plan.storing_warps} consumer warps"
        reject("split_k", config.split_k, rule, plan.storing_warps)
    if config.split_k > plan.k_blocks:
        rule = f"every slice of K needs a block of {plan.tile_k}, and k = {problem.k} has {plan.k_blocks}"
        reject("split_k", config.split_k, rule, 1 << (plan.k_blocks.bit_length() - 1))
    check_sm_count(sm_count, plan.ctas)
    check_accumulators(plan)
    if config.split_k > 2 and plan.accumulator_registers >= SPLIT_REGISTERS:
        rule = f"beside {plan.accumulator_registers} registers of accumulators, sums of more than two slices spill"
        reject("split_k", config.split_k, f"{rule}{_way_to_split(plan)}", 2)
    check_tile_order(plan)
    if plan.tma_residual and plan.config.store_stages > MAX_RESIDUAL_BUFFERS:
        rule = "every store buffer that TMA brings a residual to has a barrier"
        legal = [n for n in range(1, MAX_RESIDUAL_BUFFERS + 1) if plan.regions_per_tile % n == 0]
        reject("store_stages", plan.config.store_stages, rule, max(legal))
    check_stores_and_stages(plan)
    return plan


def _staged(problem: GemmProblem) -> dict[str, str]:
    """Element types of what store buffers hold."""
    return {"out_dtype": problem.out_dtype} | ({"residual": problem.residual} if problem.residual else {})


def _check_transposed(problem: GemmProblem) -> None:
    for name, dtype in _staged(problem).items():
        if ITEMSIZE[dtype] != TRANSPOSED_BYTES:
            reject("transposed", True, f"stmatrix transposes elements of 16 bits, and {name} is {dtype}", False)


def _way_to_split(plan: Sm90GemmPlan) -> str:
    """Setting for a split of K that the tile is too large for, for a report; "" if no smaller tile helps."""
    for tile_n in (192, 128, 64):
        for stores in dict.fromkeys((plan.config.store_stages, 2, 1)):
            config = dataclasses.replace(plan.config, tile_n=tile_n, store_stages=stores)
            if dataclasses.replace(plan, config=config).accumulator_registers >= SPLIT_REGISTERS:
                continue
            try:
                checked_plan(plan.problem, config, plan.arch, plan.sm_count)
            except ValueError:
                continue
            settings = f"tile_n={tile_n}" + (f", store_stages={stores}" if stores != plan.config.store_stages else "")
            return f"; split_k={config.split_k} is possible with {settings}"
    return ""


_CANDIDATES = (
    (128, 256, False, 4, 2, ((2, 1),), 1),
    (256, 192, False, 3, 2, ((1, 2),), 1),
    (128, 192, True, 4, 2, ((2, 1),), 1),
    (128, 160, True, 5, 2, ((1, 2),), 1),
    (128, 160, True, 4, 10, ((1, 1),), 1),
    (192, 128, True, 4, 2, ((1, 2),), 1),
    (192, 96, True, 5, 3, ((1, 2),), 1),
    (128, 128, True, 6, 2, ((2, 1), (1, 2), (1, 4)), 1),
    (128, 96, False, 7, 3, ((1, 4),), 1),
    (64, 192, True, 5, 3, ((4, 1), (1, 1)), 1),
    (64, 128, True, 8, 2, ((4, 1), (1, 4)), 1),
    (64, 64, True, 8, 1, ((2, 2),), 1),
    (128, 64, False, 8, 1, ((2, 1),), 1),
    (128, 64, False, 8, 1, ((1, 1), (1, 4)), 2),
    (64, 96, True, 8, 3, ((4, 2),), 1),
    (64, 64, False, 6, 1, ((1, 1), (2, 2)), 2),
    (64, 64, False, 6, 1, ((1, 2),), 1),
    (64, 32, False, 8, 1, ((1, 1),), 4),
    (64, 32, False, 8, 1, ((1, 2),), 2),
    (64, 16, False, 8, 1, ((1, 1),), 4),
    (128, 32, False, 8, 1, ((1, 1),), 8),
    (128, 160, False, 5, 5, ((2, 1),), 1),
    (128, 208, False, 4, 13, ((2, 1),), 1),
)
"""Rows, columns and pingpong of a tile, stages, store stages, clusters and split of K."""

_TRANSPOSED_CANDIDATES = (
    (128, 224, False, 4, 1, ((1, 1),), 1),
    (128, 192, True, 4, 2, ((1, 1), (2, 1)), 1),
    (192, 112, True, 5, 3, ((1, 2),), 1),
    (128, 160, True, 5, 2, ((1, 1), (2, 1)), 1),
    (128, 160, False, 5, 5, ((2, 1),), 1),
    (128, 144, True, 5, 3, ((1, 1),), 1),
    (64, 144, True, 7, 3, ((1, 1),), 1),
    (128, 80, True, 8, 2, ((2, 4),), 1),
    (128, 112, False, 6, 7, ((1, 2),), 1),
    (64, 128, True, 8, 2, ((4, 2),), 1),
    (64, 64, False, 6, 1, ((1, 1),), 1),
    (64, 32, False, 8, 1, ((1, 1),), 2),
    (64, 16, False, 8, 1, ((1, 1),), 2),
)
"""Transposed tiles, by the same columns."""

CANDIDATES = tuple(
    Sm90GemmConfig(tile_m, tile_n, stages, *cluster, pingpong, stores, split_k=split_k, transposed=transposed)
    for transposed, candidates in ((False, _CANDIDATES), (True, _TRANSPOSED_CANDIDATES))
    for tile_m, tile_n, pingpong, stages, stores, clusters, split_k in candidates
    for cluster in clusters
)
"""Candidates that the chooser chooses from: what pays at some size, by the timings or by the model fitted to them."""

TILES = (
    *((64, n, False) for n in (16, 32, 48, 64, 96, 128)),
    *((128, n, False) for n in (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)),
    *((256, n, False) for n in (96, 112, 128, 144, 160, 176, 192)),
    *((64, n, True) for n in (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)),
    *((128, n, True) for n in (64, 80, 96, 112, 128, 144, 160, 176, 192)),
    *((192, n, True) for n in (64, 80, 96, 112, 128)),
)
"""Rows, columns and pingpong of the tiles that a tuner tries, transposed and not."""

CLUSTERS = ((2, 1), (1, 2), (1, 1), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4))
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

TRANSPOSED_GAIN = 0.03
"""Share of its time that a launch with transposed tiles saves: a bias in registers, fewer stores, rows read once."""

SCALED_LOSS = 0.25
"""Share that it loses with multipliers, where tiles follow each other: its epilogue reads them for longer than products
of 8 bits hide, and launches took 12 to 37% longer."""

TILE_CLOCKS = 35
"""Clocks of every tile besides its WGMMAs and its epilogue: coordinates, first operands, hand-over."""

EPILOGUE_CLOCKS_PER_KELEMENT = 29.5
"""Clocks of a warpgroup to convert, stage and store 1024 output elements of a tile."""

ACTIVATION_CLOCKS_PER_KELEMENT = 56
"""Clocks of a warpgroup to apply an activation to 1024 elements: seven instructions for each, of any but ReLU."""

NARROW_ACTIVATION_CLOCKS_PER_KELEMENT = 30
"""Clocks of a warpgroup for that where results have 8 bits."""

BUFFER_CLOCKS = 240
"""Clocks of a warpgroup for every store buffer of a tile, whatever its columns."""

WAITING_SHARE = 0.35
"""Share of that which it takes more where warps that fill a buffer together wait for each other."""

NARROW_BUFFER_SHARES = (1.5, 0.5)
"""Shares of that which buffers of 8-bit results take: where they are waited for, and where a tile has one for each
region. By launches of twelve layers with GELU in other tiles on an H100."""

LAUNCH_CLOCKS = 5000
"""Clocks of a launch, whatever it computes."""

CLUSTER_CLOCKS = 47
"""Clocks of a launch per CTA of a cluster: they start and end together."""

SPLIT_CLOCKS = 188
"""Clocks of an exchange of partial sums besides its bytes, per doubling of the slices."""

SPLIT_BYTES_PER_CLOCK = 8.75
"""Partial sums that a CTA receives through distributed shared memory per clock."""

NEAR_L2_BYTES = 16 << 20
"""Rows of ``a`` that clusters work on at the same time. If they are more than this, they are not found in L2 by a later
wave, and operands take twice as long to come."""

ALL_COLUMNS = 64
"""Blocks of columns in a group of transposed tiles, where all of ``b`` stays in L2: rows are then read once."""

RESIDENT_B_BYTES = 12 << 20
"""``b`` up to this stays in L2 through a launch, whatever the order of the tiles."""


def modelled_clocks(plan: Sm90GemmPlan) -> float:
    """Modelled time of a launch: the tiles of the busiest cluster, and what is left to do after its last WGMMA."""
    c = plan.config
    blocks = -(-plan.k_blocks // c.split_k)
    waves = -(-plan.tiles // plan.clusters)
    # In the only wave the other warpgroup has no tile, and nothing runs while this one waits.
    gain = PINGPONG_GAIN * c.pingpong * (1 if waves > 1 else -0.5)
    wgmma = blocks * BLOCK_MACS * c.tile_m * c.tile_n / MACS_PER_CLOCK * (1 - gain)
    fetched = (plan.loaded_rows / c.cluster_n + c.tile_n / c.cluster_m) * blocks * plan.k_block_bytes
    rate = FETCHED_BYTES_PER_CLOCK
    b_bytes = plan.problem.n * plan.problem.k * plan.in_bytes
    alone = c.transposed and plan.sharing_ctas == 1 and waves > 1  # every CTA loads all of both operands, anew
    if _rows_in_flight(plan) > NEAR_L2_BYTES or (alone and b_bytes > RESIDENT_B_BYTES):
        rate /= 2
    # Almost the larger of both: they overlap, but for where both take as long.
    mainloop = (wgmma**4 + (fetched / rate) ** 4) ** 0.25 + TILE_CLOCKS + blocks * BLOCK_CLOCKS
    activation = NARROW_ACTIVATION_CLOCKS_PER_KELEMENT if plan.narrows else ACTIVATION_CLOCKS_PER_KELEMENT
    kelement = EPILOGUE_CLOCKS_PER_KELEMENT + activation * (plan.problem.activation != "none")
    epilogue = plan.warpgroup_rows * c.tile_n / 1024 * kelement
    epilogue += plan.regions_per_tile * BUFFER_CLOCKS * _buffer_share(plan)
    once = LAUNCH_CLOCKS + CLUSTER_CLOCKS * plan.ctas + fetched / FIRST_BYTES_PER_CLOCK
    exchange = 0.0
    if c.split_k > 1:
        exchange = SPLIT_CLOCKS * math.log2(c.split_k)
        exchange += plan.finished_warps * plan.received_bytes / SPLIT_BYTES_PER_CLOCK
    if c.pingpong:
        # In turn, a warpgroup has the other one's mainloop to store in, but nothing hides the last tile's epilogue.
        clocks = once + waves * max(mainloop, (mainloop + epilogue) / 2) + epilogue
    else:
        clocks = once + waves * (mainloop + epilogue + exchange)
    if not c.transposed:
        return clocks
    follow = waves > 1 + c.pingpong  # of a warpgroup
    return clocks * (1 + SCALED_LOSS if plan.problem.scaled and follow else 1 - TRANSPOSED_GAIN)


def _buffer_share(plan: Sm90GemmPlan) -> float:
    """Share of `BUFFER_CLOCKS` that a store buffer of a plan takes."""
    if plan.narrows:
        return NARROW_BUFFER_SHARES[plan.config.store_stages >= plan.regions_per_tile]
    return 1 + WAITING_SHARE * plan.config.transposed


def _rows_in_flight(plan: Sm90GemmPlan) -> float:
    """Bytes of the rows of ``a`` that the clusters work on at the same time."""
    columns = -(-plan.problem.n // plan.cluster_columns)
    return plan.clusters / columns * plan.cluster_rows * plan.problem.k * plan.in_bytes


def default_config(problem: GemmProblem, arch: Arch, sm_count: int) -> Sm90GemmConfig:
    """The candidate with the least modelled time.

    The constants were fitted to gemm-tune.json and gemm-configs.json of bench/results, 2026-11-21-h200, to
    gemm-few-rows.json of 2026-11-22-h200, gemm-layers-tune.json and gemm-small-tune.json of 2026-11-26-h100;
    `python -m pytest tests/plan/test_gemm_choice.py` says how near to the fastest the choice is there.
    """
    costs = []
    for index, c in enumerate(CANDIDATES):
        plan = Sm90GemmPlan(problem, c, arch, sm_count)
        if _idles(problem, c) or plan.ctas > sm_count or plan.k_blocks < c.split_k or not _storable(plan):
            continue
        c = dataclasses.replace(c, store_stages=_store_stages(plan, c.store_stages))
        costs.append((modelled_clocks(plan), index, _with_stages_that_fit(plan, c)))
    if not costs:  # no cluster fits, which the plan of any says
        return Sm90GemmConfig()
    config = min(costs)[2]
    return dataclasses.replace(config, group_m=tile_group(Sm90GemmPlan(problem, config, arch, sm_count)))


def _idles(problem: GemmProblem, config: Sm90GemmConfig) -> bool:
    """A CTA of every cluster would compute nothing."""
    rows, columns = (problem.n, problem.m) if config.transposed else (problem.m, problem.n)
    return (config.cluster_m - 1) * config.tile_m >= rows or (config.cluster_n - 1) * config.tile_n >= columns


def _storable(plan: Sm90GemmPlan) -> bool:
    """A swizzle is as narrow as the rows of a store buffer; what is transposed has 16 bits."""
    if plan.config.transposed:
        return all(ITEMSIZE[dtype] == TRANSPOSED_BYTES for dtype in _staged(plan.problem).values())
    return plan.store_row_bytes >= LEAST_ROW_BYTES


def _store_stages(plan: Sm90GemmPlan, wanted: int) -> int:
    """So many store buffers, or more where they do not divide those of a tile: outputs of 8 bits have fewer of them."""
    regions = plan.regions_per_tile
    return next((count for count in range(min(wanted, regions), regions) if regions % count == 0), regions)


def _room(plan: Sm90GemmPlan) -> int:
    """Shared memory of a CTA, of which as many are resident as the plan says."""
    return min(plan.arch.smem_bytes, plan.arch.sm_smem_bytes // plan.resident_ctas - CTA_SMEM_BYTES)


def _with_stages_that_fit(plan: Sm90GemmPlan, config: Sm90GemmConfig) -> Sm90GemmConfig:
    plan = dataclasses.replace(plan, config=config)
    beyond = max(0, plan.smem_bytes - _room(plan))
    return dataclasses.replace(config, stages=config.stages - -(-beyond // plan.stage_bytes))


def tile_group(plan: Sm90GemmPlan) -> int:
    """Row blocks down which the tiles run before the next column: 8, or 1 where that reads ``a`` from DRAM once.

    A group of rows that a wave of clusters cuts in two is read twice, if the rows in flight do not stay in L2 that
    long. With groups of one row block at most one block is cut; ``b``, which is then read anew for every row block,
    has to stay in L2. In a model of L2, 11 of SigLIP2's layers read less from DRAM in this order: at most 1.23 times
    their operands.
    """
    columns = -(-plan.problem.n // plan.cluster_columns)
    k_bytes = plan.problem.k * plan.in_bytes
    if plan.config.transposed:
        return ALL_COLUMNS if plan.problem.n * k_bytes <= RESIDENT_B_BYTES else plan.config.group_m
    tall = columns < plan.clusters and _rows_in_flight(plan) > NEAR_L2_BYTES
    return 1 if tall and plan.problem.n * k_bytes <= RESIDENT_B_BYTES else plan.config.group_m


def search_space(problem: GemmProblem, arch: Arch, sm_count: int) -> list[Sm90GemmPlan]:
    """Legal plans that are worth timing, the one with the least modelled time first."""
    plans = []
    for transposed, tile, cluster in itertools.product((False, True), TILES, CLUSTERS):
        tile_m, tile_n, pingpong = tile
        config = Sm90GemmConfig(tile_m, tile_n, 2, *cluster, pingpong, store_stages=1, transposed=transposed)
        if _idles(problem, config):
            continue
        idle = Sm90GemmPlan(problem, config, arch, sm_count).tiles * config.cluster_m * config.cluster_n * 2 <= sm_count
        for split_k in (1, 2, 4, 8) if idle and not pingpong else (1,):
            plan = _filled(problem, dataclasses.replace(config, split_k=split_k), arch, sm_count)
            if plan is not None:
                plans.append(plan)
    return sorted(plans, key=modelled_clocks)


def _filled(problem: GemmProblem, config: Sm90GemmConfig, arch: Arch, sm_count: int) -> Sm90GemmPlan | None:
    """With as many stages as fit beside the fewest store buffers above one, or one; None if that is illegal."""
    plan = Sm90GemmPlan(problem, config, arch, sm_count)
    if config.transposed:
        config = dataclasses.replace(config, group_m=tile_group(plan))
    config = dataclasses.replace(config, store_stages=_store_stages(plan, 2))
    least = Sm90GemmPlan(problem, config, arch, sm_count)
    stages = config.stages + (_room(least) - least.smem_bytes) // least.stage_bytes
    try:
        return checked_plan(problem, dataclasses.replace(config, stages=min(stages, 8)), arch, sm_count)
    except ValueError:
        return None
