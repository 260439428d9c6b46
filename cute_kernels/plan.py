"""`(Problem, TileConfig, Arch) -> Plan`: the only place that knows a hardware limit.

`make_plan` either raises `ValueError` naming the limit, the value that broke it and the nearest legal value, or returns
a `Plan` that every later stage may trust without checking anything again. Planning is pure Python: no GPU, no torch, no
CuTe DSL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from cute_kernels.config import Problem, TileConfig

ITEMSIZE = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}

LANES = 32
"""Threads of a warp, and tensor-memory lanes that one warp may reach: quarter ``warp_id % 4`` (PTX ISA, tcgen05 access
restrictions)."""

VECTOR_BYTES = 16
"""Widest load or store of one thread that every supported architecture has."""


@dataclass(frozen=True)
class Arch:
    """Limits of one architecture, as the CUDA C++ programming guide and the PTX ISA state them.

    Attributes:
        name: compiler target, e.g. ``"sm_100a"``.
        compute_capability: what a device of this architecture reports.
        sm_count: multiprocessors of the part that plans are made for when no device is present (148: B200).
        smem_bytes: dynamic shared memory that one CTA may ask for.
        tmem_columns: columns of tensor memory, each 128 lanes of 32 bits.
        max_registers: registers that one thread may have.
        register_file: 32-bit registers of one multiprocessor.
    """

    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    smem_bytes: int
    tmem_columns: int
    max_registers: int = 255
    register_file: int = 65536


ARCHS = {
    "sm_100a": Arch("sm_100a", (10, 0), sm_count=148, smem_bytes=232_448, tmem_columns=512),
}


@dataclass(frozen=True)
class SmemRegion:
    """One named piece of dynamic shared memory of a CTA: byte offset, size and required alignment."""

    name: str
    offset: int
    nbytes: int
    alignment: int


@dataclass(frozen=True)
class Plan:
    """A legal way to run one problem. Every attribute is derived; construct it with `make_plan`.

    Tiles are 256 rows by ``tile_n`` columns and belong to a pair of CTAs (``cta_group::2``): each CTA holds 128 rows of
    the accumulator and loads its 128 rows of ``x`` and half of the tile's weight rows.
    """

    problem: Problem
    config: TileConfig
    arch: Arch
    sm_count: int

    cta_group: int = 2
    cta_m: int = 128
    k_block_bytes: int = 128
    mma_k_bytes: int = 32
    accumulators: int = 2
    load_warp: int = 0
    mma_warp: int = 1
    first_epilogue_warp: int = 2
    store_columns: int = 64
    swizzle_period: int = 1024
    barrier_bytes: int = 1024

    # ---- tiles -----------------------------------------------------------------------------------------------------

    @property
    def tile_m(self) -> int:
        return self.cta_m * self.cta_group

    @property
    def tile_n(self) -> int:
        return self.config.tile_n

    @property
    def tile_k(self) -> int:
        """Elements of K in one stage: the 128 bytes that one SWIZZLE_128B row holds."""
        return self.k_block_bytes // ITEMSIZE[self.problem.in_dtype]

    @property
    def m_tiles(self) -> int:
        return -(-self.problem.m // self.tile_m)

    @property
    def n_tiles(self) -> int:
        return -(-self.problem.n // self.tile_n)

    @property
    def tiles(self) -> int:
        return self.m_tiles * self.n_tiles

    @property
    def k_blocks(self) -> int:
        return -(-self.problem.k // self.tile_k)

    @property
    def clusters(self) -> int:
        """Persistent clusters: one per pair of multiprocessors, never more than there are tiles."""
        return min(self.sm_count // self.cta_group, self.tiles)

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.clusters * self.cta_group, 1, 1)

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (self.cta_group, 1, 1)

    # ---- warps -----------------------------------------------------------------------------------------------------

    @property
    def warps(self) -> int:
        return self.first_epilogue_warp + self.config.epilogue_warps

    @property
    def threads(self) -> int:
        return self.warps * LANES

    @property
    def roles(self) -> tuple[str, ...]:
        """Role of each warp of a CTA, by hardware warp index."""
        return ("load", "mma") + ("epilogue",) * self.config.epilogue_warps

    @cached_property
    def epilogue_columns(self) -> tuple[tuple[int, int], ...]:
        """Columns ``[begin, end)`` of the tile that each epilogue warp stores.

        A warp reaches only the tensor-memory lanes (= rows) of quarter ``warp_id % 4``, so the rows follow from the
        hardware warp id. Warps that share a quarter split its columns.
        """
        ids = range(self.first_epilogue_warp, self.warps)
        spans = []
        for warp in ids:
            sharers = [w for w in ids if w % 4 == warp % 4]
            width = self.tile_n // len(sharers)
            begin = sharers.index(warp) * width
            spans.append((begin, begin + width))
        return tuple(spans)

    # ---- memory ----------------------------------------------------------------------------------------------------

    @property
    def a_stage_bytes(self) -> int:
        return self.cta_m * self.k_block_bytes

    @property
    def b_stage_bytes(self) -> int:
        return self.tile_n // self.cta_group * self.k_block_bytes

    @property
    def stage_bytes(self) -> int:
        """Operand bytes of one stage in one CTA."""
        return self.a_stage_bytes + self.b_stage_bytes

    @property
    def stage_tx_bytes(self) -> int:
        """Bytes that the leader's full barrier expects per stage: TMA of both CTAs signals the leader."""
        return self.stage_bytes * self.cta_group

    @property
    def store_region_bytes(self) -> int:
        """One staging region: 32 rows of 64 output columns, 128 bytes a row as SWIZZLE_128B needs."""
        return LANES * self.store_columns * ITEMSIZE[self.problem.out_dtype]

    @cached_property
    def staging_regions(self) -> tuple[int, ...]:
        """First staging region of each epilogue warp, in units of `store_region_bytes`."""
        firsts, total = [], 0
        for begin, end in self.epilogue_columns:
            firsts.append(total)
            total += (end - begin) // self.store_columns
        return tuple(firsts)

    @property
    def staging_bytes(self) -> int:
        return self.cta_m * self.tile_n * ITEMSIZE[self.problem.out_dtype]

    @cached_property
    def smem(self) -> tuple[SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order."""
        sizes = (
            ("barriers and tensor-memory address", self.barrier_bytes, 128),
            (f"x: {self.config.stages} stages", self.config.stages * self.a_stage_bytes, self.swizzle_period),
            (f"weight: {self.config.stages} stages", self.config.stages * self.b_stage_bytes, self.swizzle_period),
            ("output staging", self.staging_bytes, self.swizzle_period),
        )
        regions, offset = [], 0
        for name, nbytes, alignment in sizes:
            offset = -(-offset // alignment) * alignment
            regions.append(SmemRegion(name, offset, nbytes, alignment))
            offset += nbytes
        return tuple(regions)

    @property
    def smem_bytes(self) -> int:
        last = self.smem[-1]
        return last.offset + last.nbytes

    @property
    def tmem_columns(self) -> int:
        """Columns allocated: both accumulators, in the powers of two that tcgen05.alloc hands out."""
        return self.accumulators * self.tile_n

    # ---- bias + position table -------------------------------------------------------------------------------------

    @property
    def table_dtype(self) -> str:
        return "float32" if self.config.epilogue == "f32" else "bfloat16"

    @property
    def padded_n(self) -> int:
        """Columns rounded up to whole tiles, so that table reads need no bounds check."""
        return self.n_tiles * self.tile_n

    @property
    def table_shape(self) -> tuple[int, int, int, int] | None:
        """``[ceil(rows / 32), padded_n / V, 32, V]`` with V elements in 16 bytes, or None without bias and positions.

        The 32 lanes of a warp hold 32 consecutive rows, so one 16-byte load per lane reads 512 consecutive bytes: four
        128-byte lines instead of the 32 of a row-major table and the 16 of a `[.., .., 32, 32]` blocked one.
        """
        if self.problem.table_rows == 0:
            return None
        vector = VECTOR_BYTES // ITEMSIZE[self.table_dtype]
        return (-(-self.problem.table_rows // LANES), self.padded_n // vector, LANES, vector)

    # ---- printing --------------------------------------------------------------------------------------------------

    def describe(self) -> list[tuple[str, str]]:
        """Rows (what, value) for people: tiles, launch, shared- and tensor-memory budget line by line."""
        p, c = self.problem, self.config
        rows = [
            ("problem", f"[{p.m}, {p.k}] x [{p.n}, {p.k}]^T, {p.in_dtype} -> {p.out_dtype}, table rows {p.table_rows}"),
            ("architecture", f"{self.arch.name}, {self.sm_count} SMs"),
            ("tile", f"{self.tile_m} x {self.tile_n} per CTA pair, {self.k_blocks} K blocks of {self.tile_k}"),
            ("tiles", f"{self.tiles} = {self.m_tiles} x {self.n_tiles} over {self.clusters} clusters"),
            ("threads", f"{self.threads} = {', '.join(self.roles)}"),
            ("epilogue columns by warp", ", ".join(f"{b}-{e}" for b, e in self.epilogue_columns)),
            ("epilogue", f"{c.epilogue}, tcgen05.ld.32x32b.x{c.tmem_load_width}, table {self.table_shape}"),
        ]
        rows += [(f"SMEM {r.name}", f"{r.nbytes:,} B at {r.offset:,}") for r in self.smem]
        rows += [
            ("SMEM total", f"{self.smem_bytes:,} of {self.arch.smem_bytes:,} B"),
            ("TMEM accumulators", f"{self.accumulators} x {self.tile_n} columns"),
            ("TMEM total", f"{self.tmem_columns} of {self.arch.tmem_columns} columns"),
        ]
        return rows


def make_plan(
    problem: Problem, config: TileConfig | None = None, arch: str = "sm_100a", *, sm_count: int | None = None
) -> Plan:
    """Checks every limit and returns the plan.

    Args:
        problem: what to compute.
        config: tunables; the default configuration when None.
        arch: a key of `ARCHS`.
        sm_count: multiprocessors of the device at hand; that of the architecture's usual part when None.

    Raises:
        ValueError: a limit is broken; the message names the limit, the value and the nearest legal value.
    """
    config = TileConfig() if config is None else config
    if arch not in ARCHS:
        _reject("arch", arch, f"supported architectures are {', '.join(ARCHS)}", next(iter(ARCHS)))
    limits = ARCHS[arch]
    sm_count = limits.sm_count if sm_count is None else sm_count
    _check_problem(problem)
    _check_config(config)
    plan = Plan(problem, config, limits, sm_count)
    if sm_count < plan.cta_group:
        _reject("sm_count", sm_count, f"a cluster needs {plan.cta_group} multiprocessors", plan.cta_group)
    _check_capacity(plan)
    return plan


def _reject(name: str, value: object, rule: str, nearest: object) -> None:
    raise ValueError(f"{name} = {value!r} is not possible: {rule}; nearest legal value: {nearest!r}")


def _nearest(value: int, legal: tuple[int, ...]) -> int:
    return min(legal, key=lambda candidate: (abs(candidate - value), candidate))


def _check_problem(p: Problem) -> None:
    if p.in_dtype != "float8_e4m3fn":
        _reject("in_dtype", p.in_dtype, "this kernel multiplies FP8 E4M3", "float8_e4m3fn")
    if p.out_dtype != "bfloat16":
        _reject("out_dtype", p.out_dtype, "this kernel stores BF16", "bfloat16")
    if p.scale_source not in ("value", "pointer"):
        _reject("scale_source", p.scale_source, "the scale is a launch parameter or one FP32 in memory", "value")
    # Row coordinates of TMA are 32-bit and a tile may begin one row before the end of the tensor.
    largest_m = 2**31 - 256
    for name, value, largest in (("m", p.m, largest_m), ("n", p.n, 2**31 - 256), ("k", p.k, 2**31 - 128)):
        if not 1 <= value <= largest:
            _reject(name, value, f"TMA coordinates allow 1 to {largest}", min(max(value, 1), largest))
    if p.k % VECTOR_BYTES:
        _reject("k", p.k, "a row must be a multiple of 16 bytes for TMA; zero-pad it", _round_up(p.k, VECTOR_BYTES))
    if p.n % 8:
        _reject("n", p.n, "an output row must be a multiple of 16 bytes for TMA", _round_up(p.n, 8))
    if p.table_rows < 0:
        _reject("table_rows", p.table_rows, "a table has 0 (absent), 1 (bias only) or S rows", 0)


def _check_config(c: TileConfig) -> None:
    for name, value, legal, rule in (
        ("tile_n", c.tile_n, (128, 256), "two accumulators of tile_n columns share 512 TMEM columns"),
        ("epilogue_warps", c.epilogue_warps, (4, 5), "four lane quarters, at most one of them shared"),
        ("tmem_load_width", c.tmem_load_width, (16, 32, 64), "a load must divide the columns of a warp"),
    ):
        if value not in legal:
            _reject(name, value, f"{rule}; legal: {', '.join(map(str, legal))}", _nearest(value, legal))
    if c.stages < 2:
        _reject("stages", c.stages, "TMA and tensor core overlap only with two stages or more", 2)
    if c.epilogue not in ("f32", "bf16x2"):
        _reject("epilogue", c.epilogue, "rounding contracts are 'f32' and 'bf16x2'", "f32")


def _check_capacity(plan: Plan) -> None:
    if plan.smem_bytes > plan.arch.smem_bytes:
        fixed = plan.smem_bytes - plan.config.stages * plan.stage_bytes
        fit = (plan.arch.smem_bytes - fixed) // plan.stage_bytes
        rule = (
            f"{plan.config.stages} stages of {plan.stage_bytes:,} B and {fixed:,} B of barriers and staging make "
            f"{plan.smem_bytes:,} B of shared memory, the limit is {plan.arch.smem_bytes:,} B"
        )
        _reject("stages", plan.config.stages, rule, fit)
    if plan.table_shape is not None and math.prod(plan.table_shape) >= 2**31:
        rule = f"the bias + position table is indexed with 32 bits and has {plan.padded_n} padded columns"
        largest = (2**31 - 1) // plan.padded_n // LANES * LANES
        _reject("table_rows", plan.problem.table_rows, rule, largest)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
