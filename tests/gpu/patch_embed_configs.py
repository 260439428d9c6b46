"""What the tests of the patch embed run on each architecture: one `Selection` of configurations per kernel.

A test takes its configurations from `AT_HAND`, so that it says the same of every kernel.
`tests/package/test_gpu_suite.py` checks, without a GPU, that every selection is legal and that no test has fewer cases
on one architecture.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from cute_kernels.config import PatchEmbedConfig, Sm90PatchEmbedConfig, Sm100PatchEmbedConfig, Sm100ResidentConfig
from tests.gpu import architecture

Shape = tuple[int, int, int, int]
"""Images, positions, N, K."""


@dataclass(frozen=True)
class Case:
    """One call of one configuration on seeded data."""

    config: PatchEmbedConfig
    shape: Shape
    seed: int


Cases = dict[str, tuple[Case, ...]]
"""By the name of the test case: what it runs."""


@dataclass(frozen=True)
class Selection:
    """Configurations of one kernel, by what they are for.

    Attributes:
        base: a small one; ``alternative`` differs in the rows or columns of a tile.
        variants: every combination of the tunables that select code.
        inner_extent: run with many K; ``long_inner_extent`` with K up to 4096.
        addends: run with every combination of bias, position, scale and rounding.
        tile_edges: one row more and one row less than whole tiles.
        positions: positions and images that end inside a tile and at its edge.
        rings: of fewer and more stages than one and two tiles take.
        stage_shapes: what the warps of a CTA do with one stage, at tiles of 1 to 5 K blocks.
        schedules: all give the same bits on random data.
        indexed: by name, for packed rows.
        chained: by name, for launches that begin before the one in front of them has ended.
        agreeing: by name, compared with the emulator.
        threads: kernels that no other test compiles.
        sanitized: small launches for compute-sanitizer; all but those of another rounding give the same bits.
    """

    base: PatchEmbedConfig
    alternative: PatchEmbedConfig
    variants: tuple[PatchEmbedConfig, ...]
    inner_extent: tuple[PatchEmbedConfig, ...]
    long_inner_extent: PatchEmbedConfig
    addends: tuple[PatchEmbedConfig, ...]
    tile_edges: Cases
    positions: Cases
    rings: Cases
    stage_shapes: Cases
    schedules: tuple[PatchEmbedConfig, ...]
    indexed: dict[str, PatchEmbedConfig | None]
    chained: dict[str, PatchEmbedConfig]
    agreeing: dict[str, PatchEmbedConfig]
    threads: tuple[PatchEmbedConfig, ...]
    sanitized: tuple[PatchEmbedConfig, ...]


def name(config: PatchEmbedConfig | None) -> str:
    return "default" if config is None else "-".join(map(str, dataclasses.astuple(config)))


def _named(groups: Iterable[tuple[str, Iterable[Case]]]) -> Cases:
    return {key: tuple(cases) for key, cases in groups}


# --- SM90 ------------------------------------------------------------------------------------------------------------

_ORDERS, _WEIGHTS = ("position", "flat"), ("registers", "streamed")
_SM90 = Sm90PatchEmbedConfig(tile_rows=64, stages=3)
_STREAMED = dataclasses.replace(_SM90, weight="streamed")


def _sm90_variants() -> Iterable[Sm90PatchEmbedConfig]:
    choices = itertools.product(_WEIGHTS, _ORDERS, (1, 2, 3), (1, 2), (True, False), ("f32", "bf16x2"))
    for weight, order, warpgroups, cluster, pingpong, epilogue in choices:
        if warpgroups == 1 and not pingpong:
            continue  # one warpgroup takes no turns: both compile to the same kernel
        blocks = 2 if epilogue == "f32" else 1
        yield Sm90PatchEmbedConfig(64, warpgroups, 3, blocks, cluster, weight, order, pingpong, epilogue)


def _sm90_tile_edges() -> Iterable[tuple[str, list[Case]]]:
    """Every WGMMA width."""
    for order, tile_rows in itertools.product(_ORDERS, range(16, 257, 16)):
        weight = "registers" if tile_rows <= 128 else "streamed"
        config = Sm90PatchEmbedConfig(tile_rows, 1, 3, 1, 1, weight, order)
        cases = [Case(config, (rows, 3, 136, 384), rows) for rows in (2 * tile_rows - 1, tile_rows + 1)]
        yield f"{tile_rows}-{order}", cases


def _sm90_positions() -> Iterable[tuple[str, list[Case]]]:
    """Tiles of several positions, with two and three warpgroups."""
    tiles = ((128, 16, 1), (128, 16, 2), (128, 4, 2), (96, 12, 2), (96, 3, 1), (64, 2, 2), (48, 6, 1), (16, 2, 2))
    for weight, (rows, positions, cluster) in itertools.product(_WEIGHTS, tiles):
        cases = []
        for warpgroups in (2, 3) if rows <= 64 or weight == "streamed" else (2,):
            config = Sm90PatchEmbedConfig(
                rows, warpgroups, None, 1, cluster, weight, "position", tile_positions=positions
            )  # fmt: skip
            shapes = ((8, 32, 768, 768), (13, 37, 264, 768), (70, 17, 200, 592))
            cases += [Case(config, shape, positions) for shape in shapes]
        yield f"{rows}-{positions}-{cluster}-{weight}", cases


def _sm90_rings() -> Iterable[tuple[str, list[Case]]]:
    """Around one and two tiles of 6 K blocks, which moves the hand-over between warpgroups.

    With 4 blocks a stage the last one of a tile is half full.
    """
    rings = [(2, 1), (3, 1), (5, 1), (6, 1), (7, 1), (12, 1), (16, 1), (2, 2), (3, 2), (4, 2), (6, 2), (8, 2)]
    for (stages, blocks), cluster in itertools.product([*rings, (3, 3), (2, 4)], (1, 2)):
        schedules = ((2, True), (3, True), (2, False))
        configs = [Sm90PatchEmbedConfig(64, groups, stages, blocks, cluster, pingpong=p) for groups, p in schedules]
        yield f"{stages}-{blocks}-{cluster}", [Case(config, (200, 12, 768, 768), stages) for config in configs]


def _sm90_stage_shapes() -> Iterable[tuple[str, list[Case]]]:
    """Whole stages, partial ones and a stage larger than the tile."""
    for k, blocks, weight in itertools.product((128, 400, 640), (1, 2, 3, 4), _WEIGHTS):
        config = Sm90PatchEmbedConfig(64, 2, 2, blocks, weight=weight)
        yield f"{k}-{blocks}-{weight}", [Case(config, (130, 9, 384, k), blocks)]


SM90 = Selection(
    base=_SM90,
    alternative=dataclasses.replace(_SM90, tile_rows=128, order="flat"),
    variants=tuple(_sm90_variants()),
    inner_extent=tuple(
        dataclasses.replace(_SM90, weight=weight, order=order) for weight in _WEIGHTS for order in _ORDERS
    ),
    long_inner_extent=dataclasses.replace(_STREAMED, tile_rows=128),
    addends=tuple(dataclasses.replace(_SM90, order=order) for order in _ORDERS),
    tile_edges=_named(_sm90_tile_edges()),
    positions=_named(_sm90_positions()),
    rings=_named(_sm90_rings()),
    stage_shapes=_named(_sm90_stage_shapes()),
    schedules=(
        Sm90PatchEmbedConfig(128, 2, 6, 2, 2),
        Sm90PatchEmbedConfig(48, 3, 9, 1, 1, "registers", "flat"),
        Sm90PatchEmbedConfig(64, 1, 3, 3, 2, "registers", "flat", False),
        Sm90PatchEmbedConfig(96, 2, 3, 1, 2, "streamed", "position"),
        Sm90PatchEmbedConfig(128, 2, 3, 1, 2, "streamed", "position", tile_positions=16),
        Sm90PatchEmbedConfig(256, 1, 2, 1, 1, "streamed", "flat", False),
    ),
    indexed={
        "default": None,
        "registers": Sm90PatchEmbedConfig(),
        "streamed": Sm90PatchEmbedConfig(tile_rows=32, warpgroups=1, cluster=1, weight="streamed"),
        "bf16x2": Sm90PatchEmbedConfig(tile_rows=96, warpgroups=3, weight="streamed", epilogue="bf16x2"),
    },
    chained={
        "1 CTA": Sm90PatchEmbedConfig(32, 1, cluster=1, weight="streamed", order="flat", pingpong=False),
        "2 CTAs": Sm90PatchEmbedConfig(64, 2, cluster=2, order="flat"),
    },
    agreeing={
        "registers, position": Sm90PatchEmbedConfig(tile_rows=64),
        "registers, flat": Sm90PatchEmbedConfig(tile_rows=96, order="flat"),
        "streamed, position": Sm90PatchEmbedConfig(tile_rows=32, weight="streamed", order="position"),
        "streamed, 8 images x 2 positions": Sm90PatchEmbedConfig(tile_rows=16, weight="streamed", tile_positions=2),
        "streamed, flat, 3 warpgroups": Sm90PatchEmbedConfig(96, 3, weight="streamed", order="flat"),
        "1 warpgroup, 1 CTA, bf16x2": Sm90PatchEmbedConfig(
            32, 1, cluster=1, weight="streamed", order="flat", pingpong=False, epilogue="bf16x2"
        ),
    },
    threads=tuple(Sm90PatchEmbedConfig(16 * i, 1, 5, 1, 1) for i in (2, 3, 5, 7)),
    sanitized=(
        _SM90,
        Sm90PatchEmbedConfig(tile_rows=64, stages=5, stage_blocks=1, warpgroups=3, order="flat"),
        Sm90PatchEmbedConfig(tile_rows=128, stages=2, weight="streamed", epilogue="bf16x2"),
        Sm90PatchEmbedConfig(tile_rows=48, stages=2, warpgroups=1, cluster=1, weight="streamed", order="flat"),
        Sm90PatchEmbedConfig(tile_rows=32, stages=4, pingpong=False),
        Sm90PatchEmbedConfig(tile_rows=32, stages=4, tile_positions=4),
    ),
)

# --- SM100 -----------------------------------------------------------------------------------------------------------

_SM100 = Sm100PatchEmbedConfig(tile_n=128, stages=3, epilogue_warps=4)
_COLUMNS, _WARPS, _WIDTHS = (128, 256), (4, 5), (16, 32, 64)
_MOST_STAGES = {128: 8, 256: 5}
"""What shared memory holds beside the output staging, by columns of a tile."""

_PAIR_ROWS = 256


def _sm100_variants() -> Iterable[Sm100PatchEmbedConfig]:
    for columns, warps, width, epilogue in itertools.product(_COLUMNS, _WARPS, _WIDTHS, ("f32", "bf16x2")):
        for stages in (2, 3, 4, _MOST_STAGES[columns]):
            yield Sm100PatchEmbedConfig(columns, stages, warps, width, epilogue)
    for group, order in itertools.product((1, 2), ("position", "flat")):
        config = Sm100PatchEmbedConfig(stages=3, cta_group=group, order=order, snake=group == 1)
        for table in ("row_major", "interleaved") if order == "flat" else ("row_major",):
            yield dataclasses.replace(config, table=table)
            yield dataclasses.replace(config, table=table, stagger_clocks=0)
    for buffers in (1, 2):
        yield Sm100PatchEmbedConfig(store_buffers=buffers, tmem_load_width=16)


def _sm100_on_chip() -> Iterable[Sm100ResidentConfig]:
    """Both memories and orders, pairs and single CTAs, one accumulator in parts and two, every width of a load."""
    for weight, order, group in itertools.product(("tmem", "smem"), ("position", "flat"), (1, 2)):
        config = Sm100ResidentConfig(weight=weight, order=order, cta_group=group)
        yield config
        yield dataclasses.replace(config, tile_rows=96, accumulators=1, mma_columns=32 * group, tmem_load_width=16)
        yield dataclasses.replace(config, tile_rows=128, tmem_load_width=64, stage_blocks=2, epilogue="bf16x2")
    for positions in (1, 2, 4):
        yield Sm100ResidentConfig(order="position", tile_rows=64, tile_positions=positions, cta_group=2)


def _sm100_tile_edges() -> Iterable[tuple[str, list[Case]]]:
    """Rows that end inside each of the eight spans of 32 rows that an epilogue warp of a pair stores."""
    for columns, rest in itertools.product(_COLUMNS, range(16, _PAIR_ROWS + 1, 16)):
        config = Sm100PatchEmbedConfig(columns, 3, 5 if rest % 32 else 4)
        cases = [Case(config, (rows, 1, 136, 384), rows) for rows in (_PAIR_ROWS + rest - 1, rest + 1)]
        yield f"{rest}-{columns}", cases


def _sm100_positions() -> Iterable[tuple[str, list[Case]]]:
    """Tables of less than a warp's 32 rows, of whole and partial ones, and of more than a tile has."""
    for positions, columns in itertools.product((2, 3, 17, 31, 32, 33, 64, 300), _COLUMNS):
        config = Sm100PatchEmbedConfig(columns, 3, tmem_load_width=16)
        shapes = ((8, positions, 768, 768), (13, positions, 264, 768), (-(-600 // positions), positions, 200, 592))
        cases = [Case(config, shape, positions) for shape in shapes]
        for count in (count for count in (1, 2, 4, 8) if count <= positions):
            config = dataclasses.replace(config, order="position", tile_positions=count)
            cases += [Case(config, (images, positions, 200, 400), count) for images in (31, 256 // count, 257)]
        yield f"{positions}-{columns}", cases


def _sm100_rings() -> Iterable[tuple[str, list[Case]]]:
    """Tiles of 1, 6 and 9 K blocks."""
    for columns, k in itertools.product(_COLUMNS, (128, 768, 1152)):
        for stages in range(2, _MOST_STAGES[columns] + 1):
            configs = [Sm100PatchEmbedConfig(columns, stages, warps) for warps in _WARPS]
            yield f"{stages}-{columns}-{k}", [Case(config, (200, 12, 768, k), stages) for config in configs]


def _sm100_stage_shapes() -> Iterable[tuple[str, list[Case]]]:
    """Tiles of 1, 4 and 5 K blocks, and how the epilogue's warps divide their columns."""
    for k, columns, warps, width in itertools.product((128, 400, 640), _COLUMNS, _WARPS, _WIDTHS):
        case = Case(Sm100PatchEmbedConfig(columns, 2, warps, width), (130, 9, 384, k), warps)
        yield f"{k}-{columns}-{warps}-{width}", [case]


SM100 = Selection(
    base=_SM100,
    alternative=Sm100PatchEmbedConfig(tile_n=256, stages=5),
    variants=(*_sm100_variants(), *_sm100_on_chip()),
    inner_extent=tuple(
        Sm100PatchEmbedConfig(columns, 3, warps) for columns in _COLUMNS for warps in _WARPS
    ),
    long_inner_extent=Sm100PatchEmbedConfig(tile_n=256, stages=5),
    addends=(_SM100, Sm100PatchEmbedConfig(tile_n=256, stages=3)),
    tile_edges=_named(_sm100_tile_edges()),
    positions=_named(_sm100_positions()),
    rings=_named(_sm100_rings()),
    stage_shapes=_named(_sm100_stage_shapes()),
    schedules=(
        Sm100PatchEmbedConfig(),
        Sm100PatchEmbedConfig(stages=5, epilogue_warps=4),
        Sm100PatchEmbedConfig(stages=2, tmem_load_width=64),
        Sm100PatchEmbedConfig(tile_n=128, stages=8, tmem_load_width=16),
        Sm100PatchEmbedConfig(tile_n=128, stages=2),
        Sm100PatchEmbedConfig(tile_n=128, stages=5, epilogue_warps=4, tmem_load_width=64),
    ),
    indexed={
        "default": None,
        "128 columns": Sm100PatchEmbedConfig(tile_n=128, stages=6),
        "4 epilogue warps": Sm100PatchEmbedConfig(epilogue_warps=4, tmem_load_width=64),
        "bf16x2": Sm100PatchEmbedConfig(tile_n=128, epilogue="bf16x2"),
        "weight in tensor memory": Sm100ResidentConfig(weight="tmem", order="flat"),
        "weight in shared memory": Sm100ResidentConfig(weight="smem", order="flat"),
    },
    chained={
        "128 columns": Sm100PatchEmbedConfig(tile_n=128, epilogue_warps=4),
        "256 columns": Sm100PatchEmbedConfig(),
        "weight on chip": Sm100ResidentConfig(),
    },
    agreeing={
        "default": Sm100PatchEmbedConfig(),
        "128 columns": Sm100PatchEmbedConfig(tile_n=128, stages=8),
        "4 epilogue warps": Sm100PatchEmbedConfig(epilogue_warps=4),
        "16 columns a load": Sm100PatchEmbedConfig(stages=2, tmem_load_width=16),
        "64 columns a load": Sm100PatchEmbedConfig(tile_n=128, tmem_load_width=64),
        "bf16x2": Sm100PatchEmbedConfig(stages=5, epilogue="bf16x2"),
        "weight in tensor memory": Sm100ResidentConfig(weight="tmem"),
        "weight in shared memory": Sm100ResidentConfig(weight="smem"),
    },
    threads=tuple(Sm100PatchEmbedConfig(128, stages, 4, 16) for stages in (4, 5, 6, 7)),
    sanitized=(
        _SM100,
        Sm100PatchEmbedConfig(),
        Sm100PatchEmbedConfig(stages=2, epilogue="bf16x2"),
        Sm100PatchEmbedConfig(tile_n=128, stages=8, tmem_load_width=64),
        Sm100PatchEmbedConfig(stages=5, epilogue_warps=4, tmem_load_width=16),
        Sm100PatchEmbedConfig(tile_n=128, stages=2),
    ),
)

SELECTIONS = {"sm_90a": SM90, "sm_100a": SM100}

AT_HAND = SELECTIONS[architecture.at_hand() or "sm_90a"]
"""Of the device that the tests run on; without one they are not collected."""
