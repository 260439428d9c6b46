"""Plans of the SM90a kernel over images: what is chosen; limits are in `tests.plan.image_limits`."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.config import (
    PatchEmbedImagesProblem,
    Sm80ImagesConfig,
    Sm90GemmConfig,
    Sm90ImagesConfig,
    Sm100ImagesConfig,
)
from cute_kernels.kernels.graph import graph_of
from cute_kernels.plan import PLANNERS, make_plan
from cute_kernels.plan.registry import MMA_SYNC

HEADLINE = PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768, table_rows=196)
replace = dataclasses.replace


def test_headline() -> None:
    """14 patches of a grid row in 8 images are 112 columns; three groups of clusters cover 768 features."""
    plan = make_plan(HEADLINE, None, "sm_90a")
    assert (plan.tile_patches, plan.tile_images, plan.tile_rows) == (14, 8, 112)
    assert (plan.config.warpgroups, plan.config.cluster, plan.feature_groups, plan.clusters) == (2, 2, 3, 66)
    assert (plan.image_tiles, plan.position_tiles, plan.tiles) == (592, 14, 8288)
    assert (plan.k_blocks, plan.tile_stages, plan.config.stages) == (6, 3, 6)
    assert plan.stage_box == (224, 8, 16, 1) and plan.stage_bytes == 28_672 and plan.stages_per_plane == 1
    halves = make_plan(HEADLINE, replace(plan.config, stage_blocks=1))
    assert halves.stage_box == (224, 8, 8, 1) and halves.stages_per_plane == 2
    assert (plan.weight_registers, plan.accumulator_registers, plan.table_registers) == (96, 56, 28)
    assert plan.holds_table and plan.table_shape == (14, 48, 7, 32, 4)
    assert plan.smem_bytes == 1024 + 6 * 28_672 + 2 * 112 * 128
    assert [barrier.stages for barrier in graph_of(plan).barriers()] == [6, 6]
    kinds = {arch: kernels[0].config for arch, kernels in PLANNERS["patch_embed_images"].kernels.items()}
    others = dict.fromkeys(MMA_SYNC, Sm80ImagesConfig)
    assert kinds == {"sm_90a": Sm90ImagesConfig, "sm_100a": Sm100ImagesConfig, **others}


@given(
    grid=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    batch=st.integers(1, 5000),
    channels=st.integers(1, 5),
    n=st.integers(1, 250).map(lambda i: 8 * i),
    table=st.sampled_from([0, 1, 2]),
    sm_count=st.sampled_from([1, 2, 78, 132]),
)
def test_every_size_has_a_default(grid, batch, channels, n, table, sm_count) -> None:
    """Tiles cover the images, the features and the table, and what the kernel relies on holds."""
    height, width = grid
    rows = {0: 0, 1: 1, 2: height * width}[table]
    problem = PatchEmbedImagesProblem(batch, channels, 16 * height, 16 * width, 16, n, table_rows=rows)
    plan = make_plan(problem, Sm90ImagesConfig(), "sm_90a", sm_count=sm_count)
    assert plan.tile_rows % 16 == 0 and 16 <= plan.tile_rows <= 256
    assert plan.tile_patches <= (16 if batch < 16 else max(width, plan.tile_patches)) <= max(width, 16)
    assert plan.tile_patches <= 16
    assert plan.row_tiles * plan.tile_patches >= width > (plan.row_tiles - 1) * plan.tile_patches
    assert plan.image_tiles * plan.tile_images >= batch > (plan.image_tiles - 1) * plan.tile_images
    assert plan.padded_n >= n and plan.smem_bytes <= plan.arch.smem_bytes
    assert plan.needed_registers + (plan.table_registers if plan.holds_table else 0) <= plan.consumer_registers
    streamed = 0 if plan.config.weight == "registers" else plan.features
    assert plan.config.stages >= 2 and plan.stage_bytes == (plan.tile_rows + streamed) * 128 * plan.config.stage_blocks
    assert 1 <= plan.clusters * plan.config.cluster <= max(sm_count, plan.feature_groups * plan.config.cluster)
    if rows > 1:
        tiles, blocks, period, lanes, values = plan.table_shape
        assert (tiles, 16 * blocks, lanes, values) == (plan.position_tiles, plan.padded_n, 32, 4)
        assert period * 8 % plan.tile_patches == 0 and period == math.lcm(8, plan.tile_patches) // 8
    assert make_plan(problem, plan.config, sm_count=sm_count) == plan


@pytest.mark.parametrize("width", [1, 5, 14, 17, 27, 33, 37])
def test_a_grid_row_is_cut_into_pieces_that_pad_little(width: int) -> None:
    """17 patches are no pieces of 16 and 1: a piece that is mostly beyond the image costs as much."""
    plan = make_plan(replace(HEADLINE, width=16 * width, table_rows=0), Sm90ImagesConfig(), "sm_90a")
    assert width <= plan.row_tiles * plan.tile_patches <= 1.1 * width


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_what_is_open_leaves_room_for_stages_that_are_given(stages: int) -> None:
    """A streamed weight in the largest tile of three warpgroups leaves room for two."""
    for batch in (5, 4736):
        plan = make_plan(replace(HEADLINE, batch=batch), Sm90ImagesConfig(stages=stages, warpgroups=3), "sm_90a")
        assert plan.config.stages == stages and plan.smem_bytes <= plan.arch.smem_bytes


@pytest.mark.parametrize("batch", [1, 7, 8, 9, 4736])
def test_tiles_are_whole_numbers(batch: int) -> None:
    plan = make_plan(replace(HEADLINE, batch=batch), Sm90ImagesConfig(tile_patches=14, tile_images=8), "sm_90a")
    numbers = (plan.image_tiles, plan.row_tiles, plan.position_tiles, plan.tiles, plan.clusters)
    assert plan.image_tiles == math.ceil(batch / 8) and all(type(number) is int for number in numbers)


def test_other_arguments() -> None:
    with pytest.raises(TypeError, match="Sm90ImagesConfig, sm_100a takes Sm100ImagesConfig"):
        make_plan(HEADLINE, Sm90ImagesConfig(), "sm_100a")
    with pytest.raises(TypeError, match="Sm90GemmConfig, sm_90a takes Sm90ImagesConfig"):
        make_plan(HEADLINE, Sm90GemmConfig(), "sm_90a")
    with pytest.raises(ValueError, match="pingpong"):
        Sm90ImagesConfig(pingpong=2)
    with pytest.raises(TypeError, match="batch"):
        PatchEmbedImagesProblem(1.0, 3, 224, 224, 16, 768)


def test_kernels_are_shared_between_sizes() -> None:
    """Images, their sizes, features and positions are launch arguments; what is compiled in has another key."""
    plan = make_plan(HEADLINE, None, "sm_90a")
    other = make_plan(replace(HEADLINE, batch=100, height=448, table_rows=392), plan.config)
    assert other.kernel_key == plan.kernel_key
    for change in ({"channels": 1}, {"table_rows": 1}, {"table_rows": 0}):
        assert make_plan(replace(HEADLINE, **change), plan.config).kernel_key != plan.kernel_key


def test_description_names_what_was_chosen() -> None:
    text = dict(make_plan(HEADLINE, None, "sm_90a").describe())
    assert "[4736, 3, 224, 224] uint8 NCHW, patches of 16" in text["problem"]
    assert (text["tile images"], text["tile rows"], text["features"]) == ("8", "112", "128")
    assert text["stage box"] == "(224, 8, 16, 1)" and text["holds table"] == "True"


@pytest.mark.parametrize("table, tiles", [(0, None), (1, 1), (4, 2)])
def test_the_table_has_a_tile_for_every_tile_of_positions(table: int, tiles: int | None) -> None:
    """Two rows of two patches; without bias and positions there is none, and nothing to be kept in registers."""
    for config in (Sm90ImagesConfig(tile_patches=2), Sm100ImagesConfig(tile_patches=2)):
        plan = make_plan(PatchEmbedImagesProblem(16, 3, 32, 32, 16, 64, table_rows=table), config)
        assert (plan.table_shape and plan.table_shape[0]) == tiles
        if isinstance(config, Sm90ImagesConfig):
            assert plan.holds_table == (table > 0) and (plan.table_registers > 0) == (table > 0)


@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_the_warp_that_loads_is_the_first_behind_the_consumers(warpgroups: int) -> None:
    plan = make_plan(HEADLINE, Sm90ImagesConfig(warpgroups=warpgroups, cluster=1))
    assert plan.roles.index("load") == plan.load_warp == 4 * warpgroups == plan.roles.count("mma")


@pytest.mark.parametrize(
    ("patch", "last", "multiplied", "stage"),
    [(14, False, 7, 14 * 16 * 128), (32, True, 3, 128 * 224 + 128 * 128), (16, True, 8, None)],
    ids=["14 rows of 16", "96 bytes of 128", "48 bytes of 64"],
)
def test_steps_of_zeros_are_left_out(patch: int, last: bool, multiplied: int, stage: int | None) -> None:
    """Those that have pixels are multiplied: of 64 bytes with 48 of a row each half has some."""
    problem = PatchEmbedImagesProblem(4736, 3, 224, 224, patch, 768, channels_last=last)
    source = None if patch != 16 else "gather"
    plan = make_plan(problem, Sm90ImagesConfig(source=source), "sm_90a")
    steps = [plan.multiplies(b, s) for b in range(plan.config.stage_blocks) for s in range(4)]
    assert steps == [i < multiplied for i in range(len(steps))]
    assert stage is None or plan.stage_bytes == stage
    assert plan.k_blocks * 128 == plan.weight_columns_of_k
