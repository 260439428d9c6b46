"""Plan of the SM90a kernel that multiplies 16-bit patches out of images, both operands from shared memory.

A piece is ``row_patches`` neighbouring patches of a grid row. A TMA box has some rows of the pixels of a few pieces of
a grid row, in a few grid rows and images. It lands as ``[row][image][grid row][piece][pixels]``, swizzled by the bytes
of the last mode: a K-major operand whose rows hold the patches of a piece side by side. So WGMMAs of 64 rows take the
patches of a tile by their place in their pieces, and nothing has to be rearranged.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.common.facts import fact, number
from cute_kernels.config import PatchEmbedImagesProblem, Sm90GatherConfig
from cute_kernels.plan import base, shared_operands
from cute_kernels.plan.images import GATHERED_PATCHES, TILE_ORDER, GridTilesPlan
from cute_kernels.plan.patches_sm90 import BLOCK_MACS, MACS_PER_CLOCK, Work, by_time, waves

BLOCK_PIXELS = 64
"""Pixels of a patch in one stage: 128 bytes of K."""

ROW_PATCHES = (1, 2, 4)
"""Patches of a piece that a configuration may ask for."""


@dataclass(frozen=True)
class Sm90GatherPlan(GridTilesPlan, shared_operands.WgmmaPair):
    """The persistent WGMMA kernel over gathered patches: rows of a tile are patches, columns features."""

    kernel: ClassVar[str] = "cute_kernels.kernels.sm90.gather:Sm90GatherKernel"
    graph: ClassVar[str] = "cute_kernels.kernels.graph:sm90_gather_graph"

    operand_names: ClassVar[tuple[str, str]] = ("patches", "weight")

    config: Sm90GatherConfig

    # ---- tiles -----------------------------------------------------------------------------------------------------
    tile_m = number(lambda self: self.config.tile_patches * self.config.tile_rows * self.config.tile_images)
    pieces = number(lambda self: self.config.tile_patches // self.config.row_patches)
    """Pieces of a grid row in a tile, each of ``row_patches`` patches."""
    box_rows = number(lambda self: self.tile_m // self.config.row_patches)
    """Pieces of a tile: rows of the operand in shared memory."""
    pixel_rows = number(lambda self: BLOCK_PIXELS // self.problem.patch)
    """Rows of a patch's pixels in one stage."""

    @property
    def box(self) -> tuple[int, int, int, int, int]:
        """Pixels, pieces, grid rows, images and rows of pixels that fill a stage."""
        c = self.config
        return (c.row_patches * self.problem.patch, self.pieces, c.tile_rows, c.tile_images, self.pixel_rows)

    row_bytes = number(lambda self: 2 * self.box[0])
    """Bytes of a row of the operand in shared memory, and so of its swizzle: 32, 64 or 128."""
    k_blocks = number(lambda self: self.problem.k // BLOCK_PIXELS)
    position_tiles = number(lambda self: self.row_tiles * self.column_tiles)
    column_tiles = number(lambda self: -(-self.problem.grid_height // self.config.tile_rows))
    """Tiles along a column of the patch grid."""
    n_tiles = number(lambda self: -(-self.problem.n // (self.config.cluster * self.config.tile_n)))
    tiles = number(lambda self: self.image_tiles * self.position_tiles * self.n_tiles)
    """Turns of a cluster, whose CTAs take neighbouring features of the same patches."""
    padded_n = number(lambda self: self.n_tiles * self.config.cluster * self.config.tile_n)
    """Features rounded up to whole tiles, so that table reads need no bounds check."""
    sharing_ctas = number(lambda self: self.config.cluster)
    ctas = number(lambda self: self.config.cluster)

    # ---- output and table ------------------------------------------------------------------------------------------
    @property
    def store_box(self) -> tuple[int, int, int, int, int]:
        """Features, patches of a piece, pieces, grid rows and images that a warp stores from one buffer."""
        pieces = min(self.pieces, self.store_rows)
        rows = min(self.config.tile_rows, self.store_rows // pieces)
        return (self.store_columns, 1, pieces, rows, self.store_rows // (pieces * rows))

    @property
    def one_position(self) -> bool:
        """A thread's two rows of a WGMMA, eight apart, are of the same position in two images, or of one bias."""
        return self.problem.table_rows == 1 or self.pieces * self.config.tile_rows <= self.store_rows // 2

    table_shape = fact(lambda self: (self.problem.table_rows, self.padded_n) if self.problem.table_rows else None)
    """``[rows, padded_n]``: the positions in row-major order of the patch grid, or one row for a bias alone."""


def check_gather_problem(p: PatchEmbedImagesProblem) -> None:
    """Checks what this kernel can gather."""
    base.require("precision", p.precision, ("bf16", "fp16"), "both operands of the WGMMAs are floating-point numbers")
    rule = "a patch's row of pixels is 32, 64 or 128 bytes, which TMA swizzles"
    base.require("patch", p.patch, GATHERED_PATCHES, rule)


def check_gather(plan: Sm90GatherPlan) -> None:
    """Every limit of a configuration that leaves nothing open, but for those of `check_numbers`."""
    c, p = plan.config, plan.problem
    base.check_sm_count(plan.sm_count, c.cluster)
    _check_tile(plan)
    if p.grid_width % c.row_patches:
        rule = f"TMA reads whole pieces, and a grid row has {p.grid_width} patches"
        base.reject("row_patches", c.row_patches, rule, math.gcd(c.row_patches, p.grid_width))
    if plan.row_bytes > shared_operands.SWIZZLE_BYTES:
        rule = f"{c.row_patches} patches of {p.patch} pixels are {plan.row_bytes} bytes, those of a swizzled row 128"
        base.reject("row_patches", c.row_patches, rule, BLOCK_PIXELS // p.patch)
    shared = next(extent for extent in (*reversed(plan.box), c.cluster) if extent > 1)
    if shared % c.cluster:
        rule = f"CTAs load equal shares of {shared} rows, images or patches of a box"
        base.reject("cluster", c.cluster, rule, math.gcd(c.cluster, shared))
    shared_operands.check_accumulators(plan)
    shared_operands.check_store_stages(plan)
    shared_operands.check_stores_and_stages(plan)


def check_numbers(plan: Sm90GatherPlan) -> None:
    """Tiles and table, which are counted with 32 bits."""
    c, p = plan.config, plan.problem
    if plan.tiles + plan.clusters >= 2**31:
        fit = (2**31 - 1 - plan.clusters) // (plan.position_tiles * plan.n_tiles) * c.tile_images
        base.reject("batch", p.batch, f"tile numbers are 32-bit and there are {plan.tiles} tiles", fit)
    if plan.table_shape is not None and math.prod(plan.table_shape) >= 2**31:
        rule = f"the table is indexed with 32 bits and has {plan.padded_n} padded columns"
        base.reject("height", p.height, rule, (2**31 - 1) // (plan.padded_n * p.grid_width) * p.patch)


def _check_tile(plan: Sm90GatherPlan) -> None:
    """Powers of two, so that what a warp stores is a box; as many patches as the warpgroups take."""
    c = plan.config
    for name in ("tile_patches", "tile_rows", "tile_images"):
        value = getattr(c, name)
        if value & (value - 1) or value > 256:
            nearest = min(256, 1 << max(0, value.bit_length() - 1))
            base.reject(name, value, _POWERS, nearest)
    if c.tile_patches % c.row_patches:
        rule = f"a tile has whole pieces of {c.row_patches} patches"
        base.reject("tile_patches", c.tile_patches, rule, c.row_patches)
    legal = (64, 128) if c.pingpong else (128, 256)
    rows = c.tile_patches * c.tile_rows
    if plan.tile_m not in legal:
        fit = [count // rows for count in legal if count >= rows]
        rule = f"{plan.tile_m} patches of a tile, {' or '.join(map(str, legal))} are what two warpgroups take"
        if fit:
            base.reject("tile_images", c.tile_images, rule, min(fit, key=lambda images: abs(images - c.tile_images)))
        base.reject("tile_rows", c.tile_rows, rule, max(1, legal[-1] // c.tile_patches))
    if plan.box_rows < shared_operands.WARPGROUP_ROWS:
        pieces = shared_operands.WARPGROUP_ROWS
        rule = f"a WGMMA takes a patch of each of {pieces} pieces, a tile of {plan.tile_m} has {plan.box_rows}"
        base.reject("row_patches", c.row_patches, rule, plan.tile_m // pieces)


# --- which tiles the SM90a kernel over gathered patches gets, where its configuration leaves that open ---------------

MOST_STAGES = 8
"""More have made no GEMM of this package faster."""

TILE_N = (64, 128, 192, 256)
CLUSTERS = (1, 2, 4)


_POWERS = "extents of a tile are powers of two up to 256, of TMA's boxes"
_POWER = base.Field(_POWERS, least=1)

FIELDS = {
    "tile_patches": _POWER,
    "tile_rows": _POWER,
    "tile_images": _POWER,
    "row_patches": base.Field("patches of which TMA reads one row of pixels", ROW_PATCHES),
    "tile_n": base.Field("N of a WGMMA in whole store buffers", TILE_N),
    "cluster": base.Field("CTAs that share the patches of a tile", CLUSTERS),
    "stages": base.Field("TMA and WGMMA overlap only with two stages or more", least=2, open="what fits, up to 8"),
    "store_stages": base.Field("store buffers of a warp", least=1, open="two, or what divides a tile"),
    "order": TILE_ORDER,
}


def checked_plan(
    problem: PatchEmbedImagesProblem, config: Sm90GatherConfig, arch: base.Arch, sm_count: int
) -> Sm90GatherPlan:
    """The plan, or ValueError; what a config leaves open is what the model finds fastest."""
    check_gather_problem(problem)
    base.check_fields(config, FIELDS)
    plan = _resolve(problem, config, arch, sm_count)
    check_gather(plan)
    check_numbers(plan)
    return plan


def why_not_gathered(problem: PatchEmbedImagesProblem) -> str:
    """Why a problem is not one of this kernel's; empty where it is."""
    if problem.precision not in ("bf16", "fp16"):
        return "weights are integers"
    if problem.patch not in GATHERED_PATCHES:
        return f"a row of {problem.patch} pixels of 16 bits is not the 32, 64 or 128 bytes that TMA swizzles"
    return ""


def default_config(problem: PatchEmbedImagesProblem, arch: base.Arch, sm_count: int) -> Sm90GatherConfig:
    """With the tiles of the schedule that the model finds faster."""
    plans = [_resolve(problem, Sm90GatherConfig(pingpong=pingpong), arch, sm_count) for pingpong in (False, True)]
    legal = [plan for plan in plans if base.is_legal(plan, check_gather)]
    return by_time(legal or plans, work)[0].config


@functools.lru_cache(maxsize=4096)
def _resolve(
    problem: PatchEmbedImagesProblem, config: Sm90GatherConfig, arch: base.Arch, sm_count: int
) -> Sm90GatherPlan:
    """The plan of least modelled time among those that leave given fields as they are; a wrong one where all are."""
    plans = [
        _filled(Sm90GatherPlan(problem, candidate, arch, sm_count), config)
        for candidate in _candidates(problem, config)
    ]
    legal = [plan for plan in plans if base.is_legal(plan, check_gather)]
    return by_time(legal or plans, work)[0]


def _candidates(problem: PatchEmbedImagesProblem, c: Sm90GatherConfig) -> Iterator[Sm90GatherConfig]:
    """Complete but for stages and store buffers."""
    tile_n = (c.tile_n,) if c.tile_n else TILE_N
    clusters = (c.cluster,) if c.cluster else CLUSTERS
    side = BLOCK_PIXELS // problem.patch
    fit = [q for q in ROW_PATCHES if q <= side and problem.grid_width % q == 0]
    row_patches = (c.row_patches,) if c.row_patches else (fit[-1], fit[0]) if len(fit) > 1 else tuple(fit)
    for q, tile_m in itertools.product(row_patches, (64, 128) if c.pingpong else (128, 256)):
        shape = _shape(problem, c, q, tile_m)
        if tile_m < q * shared_operands.WARPGROUP_ROWS and not c.row_patches:
            continue
        for n, cluster in itertools.product(tile_n, clusters):
            yield dataclasses.replace(
                c, **shape, row_patches=q, tile_n=n, cluster=cluster, stages=c.stages or 2,
                store_stages=c.store_stages or 1
            )


def _shape(problem: PatchEmbedImagesProblem, c: Sm90GatherConfig, row_patches: int, tile_m: int) -> dict[str, int]:
    """Extents of a tile of ``tile_m`` patches: the fewest tiles cover the images, of these the longest pieces of rows.
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
    stages = max(2, min(base.room_for_stages(plan), MOST_STAGES))
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, stages=stages))


def search_space(problem: PatchEmbedImagesProblem, arch: base.Arch, sm_count: int) -> list[Sm90GatherPlan]:
    """Legal plans that are worth timing, the one with the least modelled time first; of each, both orders."""
    if why_not_gathered(problem):
        return []
    plans = [
        _filled(Sm90GatherPlan(problem, c, arch, sm_count), given)
        for given in (Sm90GatherConfig(), Sm90GatherConfig(pingpong=True))
        for c in _candidates(problem, given)
    ]
    found = []
    for plan in by_time((p for p in plans if base.is_legal(p, check_gather)), work):
        configs = [dataclasses.replace(plan.config, order=order) for order in ("image", "row")]
        found += [dataclasses.replace(plan, config=config) for config in configs]
    return found


def work(plan: Sm90GatherPlan) -> Work:
    """The work of a launch, for the model of its time."""
    c, p = plan.config, plan.problem
    loaded = plan.pixel_rows * plan.box_rows / c.cluster
    beyond = plan.image_tiles * c.tile_images - p.batch
    if plan.image_tiles > 1 and plan.tiles > plan.most_clusters:
        beyond /= plan.image_tiles
    pixels = math.prod((p.batch, p.channels, p.height, p.width))
    return Work(
        once=(0, 0, 1, c.cluster > 1, 0, 0),
        epilogue=(0, plan.warpgroup_rows * c.tile_n / 1024, 0, 0, 0),
        boxes=(0, 0, 0, 0, loaded, loaded * c.cluster, loaded * plan.row_bytes),
        block=(0, 1, 0),
        wgmma=plan.tile_m * c.tile_n * BLOCK_MACS / MACS_PER_CLOCK,
        fetched=(plan.tile_m / c.cluster + c.tile_n) * plan.k_block_bytes,
        shared=0,
        beyond=beyond / c.tile_images * loaded + min(c.tile_n, plan.padded_n - p.n),
        ragged=0,
        of_stage=1,
        stages=c.stages,
        groups=1,
        in_turn=(0, c.pingpong),
        k_blocks=plan.k_blocks,
        waves=waves(plan.tiles, plan.most_clusters),
        share=plan.clusters * c.cluster / plan.sm_count,
        memory=(pixels + p.n * p.k) * plan.in_bytes + p.batch * p.positions * p.n * plan.out_bytes,
    )
