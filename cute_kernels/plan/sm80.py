"""Common parts of the plans of ``mma.sync`` kernels, for any GPU since Ampere: warps, stages, limits, the choice.

A CTA computes tiles of ``A [rows, K] x B [columns, K]^T`` in turn, and all of its warps do the same: they copy 16 bytes
at a time by ``cp.async``, read fragments by ``ldmatrix`` and multiply. A step of K is 32 bytes of any element type.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from cute_kernels.common.chips import CTA_SMEM_BYTES
from cute_kernels.common.facts import fact, flag, number, text
from cute_kernels.config import Sm80Config
from cute_kernels.plan import base

STEP_BYTES = 32
"""K of one ``mma.sync``: 8 elements of TF32, 16 of 16 bits, 32 of 8 (PTX ISA, mma.m16n8k8, k16 and k32)."""

FP8_ARCHS = ("sm_89", "sm_120")
"""Architectures that multiply E4M3 by ``mma.sync``. For sm_90 the assembler makes two of FP16 and conversions of each,
which takes longer than BF16; earlier ones have no such instruction."""

MOST_ACCUMULATORS = 128
"""Sums of a thread: a warp's tile of 64 x 64. The assembler then takes 210 to 255 registers; of some tiles a register
is kept in memory from tile to tile."""

ADDRESSING_REGISTERS = 40
"""Registers that a thread needs besides accumulators and two steps of fragments."""


@dataclass(frozen=True)
class Sm80Plan(base.Plan):
    """A persistent plan. Attributes of a subclass say what is multiplied and where the results go."""

    graph: ClassVar[str] = "cute_kernels.kernels.graph:no_graph"

    config: Sm80Config

    multiplied = text(lambda self: self.problem.in_dtype)
    """Element type of A, as torch names it."""

    tiles = number(lambda self: self.m_tiles * self.n_tiles)
    """Turns of a CTA, all CTAs together."""
    rounds = fact(lambda self: (False, False))
    """Whether the CTA rounds what it has copied of A, and of B."""
    rounds_fragments = flag(lambda self: self.arch.compute_capability >= (9, 0))
    """Fragments are rounded, by one instruction a register; before it existed, stages are in shared memory.

    ``cvt.rn.tf32`` is of sm_90 and later (PTX ISA). Every warp rounds what it reads again, but shared memory, which
    the products keep busy, is not read and written once more.
    """
    clusters = number(lambda self: min(self.tiles, self.sm_count * self.config.resident_ctas))
    """CTAs that are resident at once and take tiles in turn."""
    overlaps = flag(lambda self: self.k_blocks >= self.config.stages - 1)
    """A tile has as many blocks of K as are copied ahead: then those of the next tile are, under its end."""
    compiled_in = fact(lambda self: super().compiled_in | {"overlaps": self.overlaps})
    teams: ClassVar[int] = 1
    """Groups of warps of a CTA that take tiles of their own."""
    keeps_b = flag(lambda self: self.teams > 1)
    """B of all K is copied once and serves all teams: the tiles of a CTA have the same columns."""
    team_threads = number(lambda self: self.config.warps_m * self.config.warps_n * base.LANES)
    """Threads that compute a tile."""
    roles = fact(lambda self: ("mma",) * (self.config.warps_m * self.config.warps_n * self.teams))

    # ---- a warp's tile ----------------------------------------------------------------------------------------------
    warp_m = number(lambda self: self.config.tile_m // self.config.warps_m)
    warp_n = number(lambda self: self.config.tile_n // self.config.warps_n)
    lane_columns = number(lambda self: base.VECTOR_BYTES // self.out_bytes)
    """Neighbouring columns that a lane's accumulators hold: 16 bytes of output, so that nothing is exchanged."""
    accumulators = number(lambda self: self.warp_m * self.warp_n // base.LANES)
    """Registers of a thread that hold sums."""

    # ---- shared memory ----------------------------------------------------------------------------------------------
    k_bytes = number(lambda self: self.problem.k * base.ITEMSIZE[self.multiplied])
    k_blocks = number(lambda self: -(-self.k_bytes // self.config.row_bytes))
    """Stages that a tile takes."""
    chunks = number(lambda self: self.config.row_bytes // base.VECTOR_BYTES)
    """Copies of 16 bytes in a row of a stage."""
    pass_rows = number(lambda self: self.team_threads // self.chunks)
    """Rows of an operand that all threads copy at a time."""
    stage_rows = number(lambda self: self.config.tile_m + (0 if self.keeps_b else self.config.tile_n))
    stage_bytes = number(lambda self: self.stage_rows * self.config.row_bytes)
    ring_bytes = number(lambda self: self.config.stages * self.stage_bytes)
    """Bytes of all stages."""
    kept_block_bytes = number(lambda self: self.config.tile_n * self.config.row_bytes)
    """Bytes of a block of B that is kept."""
    kept_bytes = number(lambda self: self.k_blocks * self.kept_block_bytes if self.keeps_b else 0)
    """Bytes of B in front of the stages, if it is kept."""
    beside_clocks = number(lambda self: self.kept_bytes * KEPT_BYTE_CLOCKS)
    """Modelled clocks of a launch besides its stages and the stores of its tiles."""
    team_bytes = number(lambda self: sum(region.nbytes for region in self.team_smem(0)))
    """Bytes of shared memory that a team has for itself."""

    @cached_property
    def smem(self) -> tuple[base.SmemRegion, ...]:
        kept = (base.SmemRegion("b", 0, self.kept_bytes, 128),) if self.keeps_b else ()
        of_teams = (self.team_smem(self.kept_bytes + team * self.team_bytes) for team in range(self.teams))
        return (*kept, *itertools.chain.from_iterable(of_teams))

    def team_smem(self, start: int) -> tuple[base.SmemRegion, ...]:
        """Regions of a team from this offset on: stages, and whatever a subclass puts behind them."""
        what = "a" if self.keeps_b else "operands"
        return (base.SmemRegion(f"{what}: {self.config.stages} stages", start, self.ring_bytes, 128),)


FIELDS = {
    "tile_m": base.Field("rows of a tile, 16 or a multiple for each warp", (32, 64, 128, 192, 256)),
    "tile_n": base.Field("columns of a tile, 32 or a multiple for each warp", (64, 128, 192, 256)),
    "warps_m": base.Field("warps of a CTA along one dimension", (1, 2, 4)),
    "warps_n": base.Field("warps of a CTA along one dimension", (1, 2, 4)),
    "row_bytes": base.Field("a row of a stage is swizzled in 4 or 8 pieces of 16 bytes", (64, 128)),
    "stages": base.Field("copies and products overlap with 2 to 8 stages", least=2, most=8),
    "resident_ctas": base.Field("CTAs of a multiprocessor", least=1, most=16),
}


def check_tiles(plan: Sm80Plan) -> None:
    """Every limit that a configuration of `Sm80Config` has."""
    c = plan.config
    warps = c.warps_m * c.warps_n * plan.teams
    base.require("warps_n", warps, (4, 8), "128 or 256 threads of a CTA copy whole passes of rows: warps_m * warps_n")
    for name, warps_along, least in (("tile_m", c.warps_m, 16), ("tile_n", c.warps_n, 32)):
        legal = tuple(size for size in FIELDS[name].legal if size % (least * warps_along) == 0)
        base.require(name, getattr(c, name), legal, f"{warps_along} warps along it have multiples of {least} each")
        rows = max(plan.pass_rows, 1)
        if getattr(c, name) % rows:
            base.reject(name, getattr(c, name), f"threads copy {rows} rows of {c.row_bytes} bytes at a time", rows)
    if plan.accumulators > MOST_ACCUMULATORS:
        rule = f"a warp's {plan.warp_m} x {plan.warp_n} are {plan.accumulators} sums a thread, {MOST_ACCUMULATORS} fit"
        base.reject("tile_n", c.tile_n, rule, c.tile_n * MOST_ACCUMULATORS // plan.accumulators)
    base.check_smem(plan)
    check_residents(plan)
    if plan.k_bytes > 2**31 - 1024:
        rule = "offsets in a row are 32-bit"
        base.reject("k", plan.problem.k, rule, (2**31 - 1024) // base.ITEMSIZE[plan.multiplied])
    if plan.tiles + plan.clusters >= 2**31:
        base.reject("tile_m", c.tile_m, f"tile numbers are 32-bit and there are {plan.tiles} tiles", 256)


def check_residents(plan: Sm80Plan) -> None:
    """Registers and shared memory of a multiprocessor hold as many CTAs as the configuration says."""
    c, arch = plan.config, plan.arch
    shared = arch.sm_smem_bytes // (plan.smem_bytes + CTA_SMEM_BYTES)
    registers = arch.register_file // (plan.threads * (plan.accumulators + ADDRESSING_REGISTERS))
    fit = max(1, min(shared, registers))
    if c.resident_ctas > fit:
        rule = (
            f"{plan.smem_bytes:,} B of shared memory and {plan.threads} threads with {plan.accumulators} sums each fit "
            f"a multiprocessor {f'{fit} times' if fit > 1 else 'once'}"
        )
        base.reject("resident_ctas", c.resident_ctas, rule, fit)


def require_fp8(arch: str, dtype: str) -> None:
    """Refuses E4M3 where `FP8_ARCHS` says so."""
    if dtype == "float8_e4m3fn" and arch not in FP8_ARCHS:
        rule = f"mma.sync multiplies E4M3 on {' and '.join(FP8_ARCHS)}, not on {arch}"
        base.reject("in_dtype", dtype, rule, "bfloat16")


TILES = (
    (128, 256, 2, 4, 128, 3, 1),
    (256, 128, 4, 2, 128, 3, 1),
    (128, 256, 2, 4, 64, 4, 1),
    (256, 128, 4, 2, 64, 4, 1),
    (128, 192, 4, 2, 128, 3, 1),
    (128, 192, 4, 2, 64, 4, 1),
    (128, 128, 2, 2, 128, 3, 1),
    (128, 128, 2, 2, 64, 4, 2),
    (128, 128, 2, 2, 64, 3, 2),
    (64, 128, 2, 2, 128, 3, 2),
    (64, 128, 2, 2, 64, 4, 2),
    (64, 64, 2, 2, 128, 4, 2),
    (64, 64, 2, 2, 64, 4, 2),
    (32, 64, 2, 2, 128, 6, 2),
    (32, 64, 2, 2, 128, 4, 2),
    (32, 128, 1, 4, 128, 4, 2),
    (32, 128, 1, 4, 64, 4, 2),
)
"""Rows, columns, warps along both, bytes of K in a stage, stages and resident CTAs: what an H100's mma.sync was fastest
with at some size, and what fits the 99 KB of sm_86, sm_89 and sm_120."""

STAGE_CLOCKS = 60
"""Clocks of a stage besides its products: the barrier, and what no product hides."""

SUM_CLOCKS = 1 / 512
"""Clocks of one sum over 32 bytes of K on a multiprocessor: 16 x 8 in a quarter of it take about a clock."""

BYTE_CLOCKS = 1 / 48
"""Clocks of an operand's byte from L2 to a multiprocessor."""

KEPT_BYTE_CLOCKS = 2 * BYTE_CLOCKS
"""Clocks of a byte that is copied before the first product, when all CTAs ask for it: on an H100, 64 images of 224 x
224 are as fast without."""

C = TypeVar("C", bound=Sm80Config)


def candidates(kind: type[C], **others: object) -> Iterator[C]:
    """Configurations that the chooser and tuners try."""
    names = ("tile_m", "tile_n", "warps_m", "warps_n", "row_bytes", "stages", "resident_ctas")
    for values in TILES:
        yield kind(**dict(zip(names, values, strict=True)), **others)


def clocks(plan: Sm80Plan) -> float:
    """Modelled time of a launch: waves of CTAs, each as long as the products or the copies of its CTAs."""
    c = plan.config
    area, copied = c.tile_m * c.tile_n, plan.stage_bytes // c.row_bytes
    resident = c.resident_ctas * plan.teams
    products = area * (c.row_bytes // STEP_BYTES) * SUM_CLOCKS * resident
    copies = copied * c.row_bytes * BYTE_CLOCKS * resident
    stage = max(products, copies) + STAGE_CLOCKS
    waves = -(-plan.tiles // (plan.sm_count * resident))
    if waves == 1:  # few CTAs, which have a multiprocessor for themselves
        share = min(resident, -(-plan.tiles // plan.sm_count))
        stage = stage * share / resident
    return plan.beside_clocks + waves * (stage * plan.k_blocks + area * resident / 256)


Configs = Callable[[Any], Iterable[C]]
Choice = tuple[Callable[[Any, base.Arch, int], C], Callable[[Any, base.Arch, int], list[Sm80Plan]]]


def choice(kind: type[C], checked_plan: base.Checked, configs: Configs) -> Choice:
    """``default_config`` and ``search_space`` of a kernel, from the configurations to be tried of a problem."""

    def search_space(problem: Any, arch: base.Arch, sm_count: int) -> list[Sm80Plan]:
        """Plans that are worth timing, the one with the least modelled time first."""
        return sorted(base.legal_plans(checked_plan, problem, configs(problem), arch, sm_count), key=clocks)

    def default_config(problem: Any, arch: base.Arch, sm_count: int) -> C:
        """The first plan's configuration; without plans the default, whose own plan says what is wrong."""
        plans = search_space(problem, arch, sm_count)
        return plans[0].config if plans else kind()

    return default_config, search_space
