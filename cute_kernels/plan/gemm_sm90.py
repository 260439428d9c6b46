"""Plan of the SM90a dense GEMM: consumer warpgroups together or in turn, multicast in small clusters.

There is no stream-K order. At large squares and layers of SigLIP2 the last wave of clusters is so full that at most
4% of the multiprocessors' time is lost in all waves together, 16% at 1024 (tests/plan/test_gemm.py). Products of few
columns lose more: docs/performance.md says how far behind the fastest tile they are.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.common.chips import CTA_SMEM_BYTES
from cute_kernels.common.facts import fact, number
from cute_kernels.config import GemmProblem, Sm90GemmConfig
from cute_kernels.plan import base
from cute_kernels.plan import gemm_sm90_fit as fitted
from cute_kernels.plan.base import ITEMSIZE, Arch, Field, check_fields, check_sm_count, reject, require, round_up
from cute_kernels.plan.gemm import GROUP_M, MOST_TILES, StagedGemmPlan, check_tile_order
from cute_kernels.plan.shared_operands import (
    SWIZZLE_BYTES,
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

EARLIER = 0.11
"""Share of a wave's missing tiles by which a last wave that is not full takes less."""

MANY = 1 << 13
"""An extent that says nothing about which candidates are legal."""

NEAR_L2_BYTES = 16 << 20
"""Rows of ``a`` that clusters work on at the same time. If they are more than this, they are not found in L2 by a later
wave, and operands take twice as long to come."""

ROWS_TOGETHER = 8
"""Blocks of rows in a group of tiles otherwise."""

ALL_COLUMNS = 64
"""Blocks of columns in a group of transposed tiles, where all of ``b`` stays in L2: rows are then read once."""

RESIDENT_B_BYTES = 12 << 20
"""``b`` up to this stays in L2 through a launch, whatever the order of the tiles."""


LINE_BYTES, SECTOR_BYTES = 128, 32
"""Bytes of a line of L2, and of the parts that are read of it."""


Numbers = tuple[float, ...]
Parts = tuple[Numbers, ...]


def parts(plan: Sm90GemmPlan) -> Parts:
    """Numbers that the constants of the model multiply: of a configuration and of element types, whatever the sizes.

    Those of a launch; of a tile besides its K blocks and its epilogue; of an epilogue, elements in thousands and store
    buffers; of a K block and of what hides what.
    """
    c, p = plan.config, plan.problem
    elements = plan.warpgroup_rows * c.tile_n / 1024
    active, wide = p.activation != "none", plan.out_bytes == 4
    each = (1, wide, p.residual is not None, p.scaled, p.scaled and c.transposed, active and not plan.narrows,
            active and plan.narrows)  # fmt: skip
    waited = c.store_stages < plan.regions_per_tile
    buffers = (1, c.transposed, plan.narrows, plan.narrows and waited)
    return (
        (1, plan.resident_ctas == 2, c.pingpong, plan.ctas),
        (1, math.log2(c.split_k), plan.finished_warps * plan.received_bytes / 1024),
        (*(elements * there for there in each), *(plan.regions_per_tile * there for there in buffers)),
        (
            BLOCK_MACS * c.tile_m * c.tile_n / MACS_PER_CLOCK,
            (plan.loaded_rows / c.cluster_n + c.tile_n / c.cluster_m) * plan.k_block_bytes,
            1 / c.stages,
            c.pingpong,
            plan.most_clusters * plan.ctas / plan.sm_count,
        ),
    )


def terms(parts: Parts, constants: Mapping[str, Numbers], factors: Numbers = (1, 1, 1)) -> Numbers:
    """Clocks of a configuration's launch, first operands, K blocks and tiles, as `clocks` takes them. ``factors``: of
    the clocks of K blocks, of epilogues and of what comes once: what the tile has of its own."""

    def total(name: str, numbers: Numbers) -> float:
        return sum(constant * number for constant, number in zip(constants[name], numbers, strict=True))

    of_launch, of_tile, of_epilogue, (wgmma, fetched, slack, pingpong, share) = parts
    overlap, latency, gain, fetch, first, alone, in_turn, _, _, heat = constants["rates"]
    of_block, of_stores, once = factors
    epilogue = total("epilogue", of_epilogue) * of_stores
    hidden = alone + (in_turn - alone) * pingpong
    busy = ((wgmma * (1 - gain * pingpong)) ** 4 + (latency * slack) ** 4) * of_block**4
    return (
        total("launch", of_launch) * once + hidden * epilogue,
        fetched * first * once,
        busy,
        (fetched * fetch * of_block) ** 4,
        overlap * of_block,
        total("tile", of_tile) + (1 - hidden) * epilogue,
        heat * share * busy**0.25,
    )


def clocks(terms: Numbers, blocks: float, waves: float, fill: float, stretch: float) -> float:
    """Modelled time of a launch: the tiles of the busiest cluster, one after the other, and what comes once. ``terms``:
    of `terms`. ``blocks``: K blocks of a tile. ``waves``: tiles of a cluster. ``fill``: share of the clusters that have
    a tile; fewer get their operands faster, and leave power to each other. ``stretch``: of `stretch`."""
    launch, first, of_blocks, of_tiles = shares(terms, blocks, waves, fill, stretch)
    return launch + first + of_blocks + of_tiles


SHARES = ("launch", "first operands", "K blocks", "epilogues and starts of tiles")


def shares(terms: Numbers, blocks: float, waves: float, fill: float, stretch: float) -> Numbers:
    """Parts of `clocks`, in the order of `SHARES`."""
    launch, first, busy, fetched, block, tile, heat = terms
    # Of products and operands almost the larger: they overlap, but for where both take as long.
    of_block = (busy + fetched * (fill * stretch * stretch) ** 2) ** 0.25 + block + heat * fill
    return launch, blocks * first * fill**0.5 * stretch, waves * blocks * of_block, waves * tile


def stretch(row_bytes: int) -> float:
    """Factor of the time that operands take to come: of rows that begin inside a line of L2, or inside a sector of it,
    more of them are read."""
    of_lines, of_sectors = fitted.CONSTANTS["rates"][7:9]
    return 1 + of_lines * (row_bytes % LINE_BYTES > 0) + of_sectors * (row_bytes % SECTOR_BYTES > 0)


def waves(ratio: float) -> float:
    """Tiles of the busiest cluster, from tiles per cluster; a last wave that is not full ends a little earlier."""
    return 1.0 if ratio <= 1 else (1 - EARLIER) * math.ceil(ratio) + EARLIER * ratio


def tile(config: Sm90GemmConfig) -> tuple[int, ...]:
    """A candidate's key: what is chosen of a configuration; the rest follows."""
    c = config
    return (c.tile_m, c.tile_n, c.cluster_m, c.cluster_n, c.pingpong, c.split_k, c.transposed)


def modelled_clocks(plan: Sm90GemmPlan) -> float:
    """Modelled time of a launch."""
    return sum(_shares(plan))


def _shares(plan: Sm90GemmPlan) -> Numbers:
    ratio = plan.tiles / plan.most_clusters
    blocks = -(-plan.k_blocks // plan.config.split_k)
    return shares(_terms(plan), blocks, waves(ratio), min(1.0, ratio), stretch(plan.problem.k * plan.in_bytes))


MEMORY_BYTES_PER_CLOCK = 2800
"""4.8 TB/s of an H200 at 1.7 GHz."""

CLOCKS_PER_MICROSECOND = 1671
"""The fit knows ratios within a shape only: the median of modelled clocks over sustained microseconds, of what it has
seen."""

ERRORS, LONG = (0.28, 0.15), 150
"""Largest error of nine launches in ten of shapes that no fit has seen: modelled to take less than so many
microseconds, and others."""

RATIO_ERRORS = (0.20, 0.28)
"""Largest error of nine in ten ratios of two times of one product: of plans that differ in one field, and of any."""

CAVEAT = (
    "Modelled, from sustained launches on an H200 that were measured: of shapes that no fit had seen, error 10% in the "
    "median and 94% at the most, rank correlation within a shape 0.91 in the median; the first choice took 1.02 to "
    "1.04 of the fastest's time in the mean. Ratios of two configurations: 20% off in nine pairs of ten that differ in "
    "one field, all fields together, 28% in nine of ten of all."
)
"""`python -m bench.model` prints these figures."""


def memory_clocks(plan: Sm90GemmPlan) -> float:
    """Time that device memory takes for operands and output, which hides the rest where it is longer."""
    p = plan.problem
    return ((p.m + p.n) * p.k * plan.in_bytes + p.m * p.n * plan.out_bytes) / MEMORY_BYTES_PER_CLOCK


def predict(plan: Sm90GemmPlan) -> base.Prediction | None:
    """The modelled time of a launch; None of several products, of which none was timed."""
    if plan.problem.batches > 1:
        return None
    clocks = modelled_clocks(plan)
    found = dict(zip(SHARES, _shares(plan), strict=True))
    found["device memory"] = (clocks**4 + memory_clocks(plan) ** 4) ** 0.25 - clocks
    parts = {name: value / CLOCKS_PER_MICROSECOND for name, value in found.items()}
    time = sum(parts.values())
    return base.Prediction(time, parts, CAVEAT, ERRORS[time >= LONG], RATIO_ERRORS)


def _terms(plan: Sm90GemmPlan) -> Numbers:
    """With the factors of its tile where it is a candidate."""
    _, factors = fitted.CANDIDATES.get(tile(plan.config), (0, (1.0, 1.0, 1.0)))
    return terms(parts(plan), fitted.CONSTANTS, factors)


def _rows_in_flight(plan: Sm90GemmPlan) -> float:
    """Bytes of the rows of ``a`` that the clusters work on at the same time."""
    columns = -(-plan.problem.n // plan.cluster_columns)
    return plan.clusters / columns * plan.cluster_rows * plan.problem.k * plan.in_bytes


def candidates(problem: GemmProblem, arch: Arch, sm_count: int) -> list[Sm90GemmPlan]:
    """Legal plans of `gemm_sm90_fit.CANDIDATES`, in their order, in which no CTA of a cluster idles."""
    plans = []
    for (tile_m, tile_n, *cluster, pingpong, split_k, transposed), (stores, _) in fitted.CANDIDATES.items():
        config = Sm90GemmConfig(
            tile_m, tile_n, 2, *cluster, bool(pingpong), stores, split_k=split_k, transposed=bool(transposed)
        )
        plan = None if _idles(problem, config) else _filled(problem, config, arch, sm_count)
        if plan is not None:
            plans.append(plan)
    return plans


_kind = operator.attrgetter(*(each.name for each in dataclasses.fields(GemmProblem)[4:]))
"""Fields of a problem that are no sizes, in their order."""


@functools.lru_cache(maxsize=256)
def _choices(few: int, kind: tuple, arch: Arch, sm_count: int) -> list[tuple]:
    """Numbers of each candidate that a choice needs, for all problems that differ in nothing but their sizes.

    Configuration, rows and columns of a cluster, those that have to be there for none of its CTAs to idle, clusters
    that are resident, slices of K, terms.
    """
    found = []
    for plan in candidates(GemmProblem(few, MANY, MANY, 1, *kind), arch, sm_count):
        c = plan.config
        needed = ((c.cluster_m - 1) * c.tile_m, (c.cluster_n - 1) * c.tile_n)
        needed = needed[::-1] if c.transposed else needed
        extents = (plan.cluster_rows, plan.cluster_columns, *needed)
        found.append((c, *extents, plan.most_clusters, c.split_k, _terms(plan)))
    return found


def default_config(problem: GemmProblem, arch: Arch, sm_count: int) -> Sm90GemmConfig:
    """The candidate with the least modelled time.

    The model has constants, and for each candidate three factors, which `python -m bench.choices fit` has fitted to
    timings of shapes that were drawn at random, of squares and of layers; `python -m bench.choices regret` says how
    near to the fastest the choice is where no fit has looked.
    """
    m, n, batches = problem.m, problem.n, problem.batches
    few = MANY if m > FIELDS["tile_m"].legal[-1] // 2 else 1 << (m - 1).bit_length()  # `loaded_rows` depends on them
    row_bytes = problem.k * ITEMSIZE[problem.in_dtype]
    k_blocks, stretched = -(-row_bytes // SWIZZLE_BYTES), stretch(row_bytes)
    least, chosen = math.inf, Sm90GemmConfig()
    known = _choices(few, _kind(problem), arch, sm_count)
    for config, rows, columns, more_rows, more_columns, most, slices, of_candidate in known:
        if m <= more_rows or n <= more_columns or slices > k_blocks:
            continue
        tiles = -(-m // rows) * -(-n // columns) * batches
        if tiles + most >= MOST_TILES:
            continue
        ratio = tiles / most
        blocks = -(-k_blocks // slices)
        full = ratio > 1
        time = clocks(of_candidate, blocks, waves(ratio) if full else 1.0, 1.0 if full else ratio, stretched)
        if time < least:
            least, chosen = time, config
    group = tile_group(Sm90GemmPlan(problem, chosen, arch, sm_count))
    return chosen if chosen.group_m == group else dataclasses.replace(chosen, group_m=group)


def _idles(problem: GemmProblem, config: Sm90GemmConfig) -> bool:
    """A CTA of every cluster would compute nothing."""
    rows, columns = (problem.n, problem.m) if config.transposed else (problem.m, problem.n)
    return (config.cluster_m - 1) * config.tile_m >= rows or (config.cluster_n - 1) * config.tile_n >= columns


def _store_stages(plan: Sm90GemmPlan, wanted: int) -> int:
    """So many store buffers, or more where they do not divide those of a tile: outputs of 8 bits have fewer of them; or
    as many as a residual's barriers allow."""
    regions = plan.regions_per_tile
    most = MAX_RESIDUAL_BUFFERS if plan.tma_residual else regions
    legal = [count for count in range(1, min(regions, most) + 1) if regions % count == 0]
    return next((count for count in legal if count >= wanted), legal[-1])


def _room(plan: Sm90GemmPlan) -> int:
    """Shared memory of a CTA, of which as many are resident as the plan says."""
    return min(plan.arch.smem_bytes, plan.arch.sm_smem_bytes // plan.resident_ctas - CTA_SMEM_BYTES)


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
        return ALL_COLUMNS if plan.problem.n * k_bytes <= RESIDENT_B_BYTES else ROWS_TOGETHER
    tall = columns < plan.clusters and _rows_in_flight(plan) > NEAR_L2_BYTES
    return 1 if tall and plan.problem.n * k_bytes <= RESIDENT_B_BYTES else ROWS_TOGETHER


def search_space(problem: GemmProblem, arch: Arch, sm_count: int) -> list[Sm90GemmPlan]:
    """Legal plans that are worth timing: the chooser's candidates and then others, both by modelled time."""
    plans = []
    for transposed, tile, cluster in itertools.product((False, True), TILES, CLUSTERS):
        tile_m, tile_n, pingpong = tile
        config = Sm90GemmConfig(tile_m, tile_n, 2, *cluster, pingpong, transposed=transposed)
        if _idles(problem, config):
            continue
        idle = Sm90GemmPlan(problem, config, arch, sm_count).tiles * config.cluster_m * config.cluster_n * 2 <= sm_count
        for split_k in (1, 2, 4, 8) if idle and not pingpong else (1,):
            plan = _filled(problem, dataclasses.replace(config, split_k=split_k), arch, sm_count)
            if plan is not None:
                plans.append(plan)
    known = candidates(problem, arch, sm_count)
    return list(dict.fromkeys(plan for found in (known, plans) for plan in sorted(found, key=modelled_clocks)))


def _filled(problem: GemmProblem, config: Sm90GemmConfig, arch: Arch, sm_count: int) -> Sm90GemmPlan | None:
    """With at least as many store buffers as it has, and as many stages as fit beside them, at most eight; None if that
    is illegal."""
    plan = Sm90GemmPlan(problem, config, arch, sm_count)
    stores = _store_stages(plan, config.store_stages)
    config = dataclasses.replace(config, group_m=tile_group(plan), store_stages=stores)
    least = Sm90GemmPlan(problem, config, arch, sm_count)
    stages = config.stages + (_room(least) - least.smem_bytes) // least.stage_bytes
    try:
        return checked_plan(problem, dataclasses.replace(config, stages=min(stages, 8)), arch, sm_count)
    except ValueError:
        return None
