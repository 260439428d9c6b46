"""Plans of the SM100a kernel over images: what is chosen; limits are in `tests.plan.image_limits_sm100`."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.config import PatchEmbedImagesProblem, Sm100ImagesConfig
from cute_kernels.kernels.graph import graph_of
from cute_kernels.plan import make_plan

HEADLINE = PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768, table_rows=196)
replace = dataclasses.replace


def test_headline() -> None:
    """A grid row of 16 images on a pair; two accumulators do not fit beside the weight, so one is computed in parts."""
    plan = make_plan(HEADLINE, None, "sm_100a")
    assert (plan.cta_group, plan.tile_patches, plan.tile_images, plan.columns) == (2, 14, 16, 224)
    assert (plan.cta_images, plan.cta_patches, plan.stage_box, plan.stage_bytes) == (8, 112, (224, 8, 16, 1), 28_672)
    assert (plan.config.weight, plan.weight_columns, plan.weight_column, plan.tmem_columns) == ("tmem", 192, 320, 512)
    assert plan.config.accumulators == 1 and plan.mma_spans == ((0, 128), (128, 96))
    assert (plan.feature_groups, plan.clusters, plan.tiles, plan.padded_n) == (3, 72, 296 * 14, 768)
    assert (plan.k_blocks, plan.tile_stages, plan.config.stages) == (6, 3, 6)
    assert plan.smem_bytes == 1024 + 6 * 28_672 + 4 * 224 * 64
    assert plan.table_shape == (14, 48, 7, 32, 4)
    assert make_plan(HEADLINE, plan.config) == plan


def test_patches_of_columns() -> None:
    """The first half of a part's columns are patches of the leader, the others of its neighbour; each exactly once."""
    plan = make_plan(HEADLINE, None, "sm_100a")
    assert [plan.row_of(0, column) for column in (0, 63, 64, 127)] == [0, 63, 112, 175]
    assert [plan.row_of(1, column) for column in (0, 47, 48, 95)] == [64, 111, 176, 223]
    patches = [plan.row_of(part, c) for part, (_, columns) in enumerate(plan.mma_spans) for c in range(columns)]
    assert sorted(patches) == list(range(224))


def test_barriers() -> None:
    """The weight is handed over once, by the epilogue warps of both CTAs or by TMA, and nobody waits to refill it."""
    plan = make_plan(HEADLINE, None, "sm_100a")
    graph = graph_of(plan)
    found = {barrier.name: (barrier.stages, barrier.arrivals) for barrier in graph.barriers()}
    assert found == {
        "operands_full": (6, 1), "operands_empty": (6, 1), "accumulator_full": (2, 1), "accumulator_empty": (2, 8),
        "weight_full": (1, 8),
    }  # fmt: skip
    assert graph.slots == sum(stages for stages, _ in found.values())
    assert plan.used_barrier_bytes == 8 * graph.slots + 4
    assert graph.describe()[2] == "epilogue --[weight x1: WARP_ARRIVE / once]--> mma"
    streamed = graph_of(make_plan(HEADLINE, Sm100ImagesConfig(weight="smem")))
    assert streamed.describe()[2] == "load --[weight x1: TMA_BYTES 196608 B / once]--> mma"


@pytest.mark.parametrize(("n", "groups"), [(768, 3), (1024, 4), (1152, 5), (1536, 6)])
@pytest.mark.parametrize("side", [224, 256, 384])
def test_model_sizes(n: int, groups: int, side: int) -> None:
    """Many images go to pairs, with the weight in tensor memory and hardly any padding, whole groups on 148 SMs."""
    problem = PatchEmbedImagesProblem(4736, 3, side, side, 16, n, table_rows=(side // 16) ** 2)
    plan = make_plan(problem, None, "sm_100a")
    assert (plan.cta_group, plan.config.weight, plan.feature_groups) == (2, "tmem", groups)
    assert plan.columns >= 192 and len(plan.mma_spans) * plan.config.accumulators == 2
    assert plan.row_tiles * plan.tile_patches == side // 16
    assert plan.clusters == 74 // groups * groups
    assert plan.config.stages >= plan.tile_stages


@pytest.mark.parametrize("batch", [1, 2, 8, 15])
def test_few_images_have_small_tiles(batch: int) -> None:
    """A tile has no more images than there are, or a few more, and one image is the matter of single CTAs."""
    plan = make_plan(replace(HEADLINE, batch=batch), None, "sm_100a")
    assert plan.tile_images <= batch + 1 and plan.image_tiles * plan.tile_images <= batch + 1
    assert plan.clusters * plan.ctas >= 84 and plan.tiles * plan.feature_groups == plan.clusters
    if batch == 1:
        assert (plan.cta_group, plan.tile_patches, plan.columns) == (1, 16, 16)


@given(
    grid=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    batch=st.integers(1, 5000),
    channels=st.integers(1, 7),
    n=st.integers(1, 250).map(lambda i: 8 * i),
    table=st.sampled_from([0, 1, 2]),
    sm_count=st.sampled_from([1, 2, 78, 148]),
)
def test_every_size_has_a_default(grid, batch, channels, n, table, sm_count) -> None:
    """Tiles cover the images, the features and the table, and what the kernel relies on holds."""
    height, width = grid
    rows = {0: 0, 1: 1, 2: height * width}[table]
    problem = PatchEmbedImagesProblem(batch, channels, 16 * height, 16 * width, 16, n, table_rows=rows)
    plan = make_plan(problem, None, "sm_100a", sm_count=sm_count)
    assert plan.cta_patches % 16 == 0 and plan.columns == plan.cta_group * plan.cta_patches <= 256
    assert plan.row_tiles * plan.tile_patches >= width > (plan.row_tiles - 1) * plan.tile_patches
    assert plan.image_tiles * plan.tile_images >= batch > (plan.image_tiles - 1) * plan.tile_images
    assert plan.padded_n >= n and plan.smem_bytes <= plan.arch.smem_bytes
    assert plan.accumulator_columns + plan.weight_columns <= plan.tmem_columns <= 512
    assert plan.weight_column >= plan.accumulator_columns and plan.tmem_columns.bit_count() == 1
    assert sum(columns for _, columns in plan.mma_spans) == plan.columns
    assert len(plan.mma_spans) == 1 or plan.config.stages >= plan.tile_stages
    assert plan.used_barrier_bytes <= plan.barrier_bytes and plan.stage_bytes % 2048 == 0
    assert 1 <= plan.clusters * plan.ctas <= max(sm_count, plan.feature_groups * plan.ctas)
    if rows > 1:
        tiles, blocks, period, lanes, values = plan.table_shape
        assert (tiles, 16 * blocks, lanes, values) == (plan.position_tiles, plan.padded_n, 32, 4)
        assert period * 8 % plan.tile_patches == 0 and period == math.lcm(8, plan.tile_patches) // 8
    assert make_plan(problem, plan.config, sm_count=sm_count) == plan


def test_kernels_are_shared_between_sizes() -> None:
    """Images, their sizes, features and positions are launch arguments; what is compiled in has another key."""
    plan = make_plan(HEADLINE, None, "sm_100a")
    other = make_plan(replace(HEADLINE, batch=100, height=448, table_rows=392), plan.config)
    assert other.kernel_key == plan.kernel_key
    for change in ({"channels": 1}, {"table_rows": 1}, {"table_rows": 0}):
        assert make_plan(replace(HEADLINE, **change), plan.config).kernel_key != plan.kernel_key


def test_description_names_what_was_chosen() -> None:
    text = dict(make_plan(HEADLINE, None, "sm_100a").describe())
    assert (text["tile images"], text["columns"], text["features"]) == ("16", "224", "128")
    assert text["mma spans"] == "((0, 128), (128, 96))" and text["stage box"] == "(224, 8, 16, 1)"
    assert (text["weight bytes"], text["TMEM weight"]) == ("98,304", "192 columns from 320 on")
    assert text["TMEM total"] == "512 of 512 columns"
