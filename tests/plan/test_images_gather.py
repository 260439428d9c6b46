"""Plans of the SM90a kernel over 16-bit images: what is chosen; limits are in `tests.plan.gather_limits`."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.config import PatchEmbedImagesProblem, Sm90GatherConfig
from cute_kernels.plan import PLANNERS, make_plan, predict
from cute_kernels.plan.base import ARCHS
from cute_kernels.plan.images_gather import search_space

HEADLINE = PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768, "bfloat16", precision="bf16", table_rows=196)
replace = dataclasses.replace


def test_headline() -> None:
    """Pairs of patches in 64 images for each warpgroup by turns; two clusters of two cover 768 features."""
    plan = make_plan(HEADLINE, None, "sm_90a")
    c = plan.config
    assert (c.tile_patches, c.tile_rows, c.tile_images, c.row_patches) == (2, 1, 64, 2)
    assert (c.tile_n, c.cluster, c.pingpong, c.order) == (192, 2, True, "image")
    assert (plan.tile_m, plan.box_rows, plan.pieces, plan.n_tiles) == (128, 64, 1, 2)
    assert (plan.image_tiles, plan.row_tiles, plan.column_tiles) == (74, 7, 14)
    assert (plan.tiles, plan.clusters) == (74 * 7 * 14 * 2, 66)
    assert plan.k_blocks == 12 and plan.box == (32, 1, 1, 64, 4) and plan.row_bytes == 64
    # Stages of 128 patches and 192 features by 128 bytes; eight warps stage 2 x 16 rows of 128 bytes each.
    assert (c.stages, c.store_stages, plan.stage_bytes) == (4, 2, (128 + 192) * 128)
    assert plan.smem_bytes == 1024 + 4 * 40_960 + 8 * 2 * 2048
    assert plan.table_shape == (196, 768) and plan.one_position


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (64, Sm90GatherConfig(2, 1, 64, 2, 192, 2, 4, 2, True)),
        (8, Sm90GatherConfig(16, 1, 4, 1, 192, 4, 5, 3, True)),
        (1, Sm90GatherConfig(16, 4, 1, 1, 64, 4, 8, 1, True)),
    ],
)
def test_few_images_get_what_was_fastest_on_an_h200(batch: int, expected: Sm90GatherConfig) -> None:
    """In a CUDA graph, to within 2.5% (bench/results, 2026-11-22-h200, images-bf16-few.json)."""
    assert make_plan(replace(HEADLINE, batch=batch), None, "sm_90a").config == expected


@given(
    grid=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    patch=st.sampled_from([16, 32, 64]),
    batch=st.integers(1, 5000),
    channels=st.integers(1, 5),
    n=st.integers(1, 250).map(lambda i: 8 * i),
    table=st.sampled_from([0, 1, 2]),
    out_dtype=st.sampled_from(["bfloat16", "float32"]),
    sm_count=st.sampled_from([1, 2, 78, 132]),
    pingpong=st.booleans(),
)
def test_every_size_has_a_default(grid, patch, batch, channels, n, table, out_dtype, sm_count, pingpong) -> None:
    """Tiles cover the images and the features, and what the kernel relies on holds."""
    height, width = grid
    problem = PatchEmbedImagesProblem(
        batch, channels, patch * height, patch * width, patch, n, "float16", precision="fp16",
        table_rows={0: 0, 1: 1, 2: height * width}[table], out_dtype=out_dtype,
    )  # fmt: skip
    plan = make_plan(problem, Sm90GatherConfig(pingpong=pingpong), "sm_90a", sm_count=sm_count)
    c = plan.config
    assert plan.tile_m == c.tile_patches * c.tile_rows * c.tile_images == plan.box_rows * c.row_patches
    assert plan.tile_m in ((64, 128) if c.pingpong else (128, 256)) and plan.box_rows % 64 == 0
    assert width % c.row_patches == 0 and c.tile_patches % c.row_patches == 0
    for tiles, extent, covered in (
        (plan.row_tiles, c.tile_patches, width),
        (plan.column_tiles, c.tile_rows, height),
        (plan.image_tiles, c.tile_images, batch),
        (plan.n_tiles, c.cluster * c.tile_n, n),
    ):
        assert tiles * extent >= covered > (tiles - 1) * extent
    assert plan.box[0] * plan.pixel_rows == 64 * c.row_patches and 32 <= plan.row_bytes <= 128
    assert plan.smem_bytes <= plan.arch.smem_bytes and 2 <= c.stages <= 8
    assert plan.regions_per_tile % c.store_stages == 0
    assert plan.accumulator_registers + 40 <= plan.consumer_registers
    assert plan.clusters * c.cluster <= sm_count and plan.clusters <= plan.tiles
    assert make_plan(problem, c, sm_count=sm_count) == plan


@pytest.mark.parametrize("fields", [{"tile_n": 64}, {"cluster": 1, "row_patches": 1}, {"tile_images": 8}], ids=str)
def test_given_fields_stay_and_the_others_are_chosen(fields: dict) -> None:
    config = make_plan(HEADLINE, Sm90GatherConfig(**fields)).config
    assert {name: getattr(config, name) for name in fields} == fields
    numbers = (config.tile_patches, config.tile_rows, config.tile_images, config.row_patches, config.tile_n)
    assert all((*numbers, config.cluster, config.stages, config.store_stages)) and not config.pingpong


def test_candidates_for_the_tuner() -> None:
    """Legal, each once, the default first, in both orders; none is modelled to be faster."""
    arch = ARCHS["sm_90a"]
    plans = search_space(HEADLINE, arch, 132)
    assert len({plan.config for plan in plans}) == len(plans) > 20
    assert plans[0] == make_plan(HEADLINE, None, "sm_90a", sm_count=132)
    assert plans[1].config == replace(plans[0].config, order="row")
    times = [predict(plan).microseconds for plan in plans]
    assert times == sorted(times)
    for plan in plans:
        assert make_plan(HEADLINE, plan.config, "sm_90a", sm_count=132) == plan


def test_precisions_that_multiply_floats_have_these_plans() -> None:
    planner, arch = PLANNERS["patch_embed_images"], ARCHS["sm_90a"]
    kinds = {precision: type(planner.usual(replace(HEADLINE, precision=precision), arch)[1])
             for precision in ("bf16", "fp16", "int8")}  # fmt: skip
    assert kinds["bf16"] is kinds["fp16"] is Sm90GatherConfig is not kinds["int8"]
    assert planner.kinds[Sm90GatherConfig] == "sm_90a"
