"""Plans of the SM100a kernel over rows whose weight stays on chip, and which design a problem gets."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig, Sm100ResidentConfig
from cute_kernels.kernels.graph import graph_of
from cute_kernels.plan import make_plan, predict
from cute_kernels.plan.b200 import RESOLUTION
from cute_kernels.plan.patch_embed_resident import Sm100ResidentPlan
from cute_kernels.plan.patch_embed_sm100 import Sm100PatchEmbedPlan

HEADLINE = PatchEmbedProblem(4736 * 196, 768, 768, 196)
replace = dataclasses.replace


def test_headline() -> None:
    """128 images at two positions on a pair: 37 x 98 tiles without padding, for each of three groups of features."""
    plan = make_plan(HEADLINE)
    config = plan.config
    assert (config.weight, config.order, config.cta_group) == ("tmem", "position", 2)
    assert (plan.columns, plan.tile_images, config.tile_positions, plan.cta_images) == (256, 128, 2, 64)
    assert (plan.row_tiles, plan.position_tiles, plan.feature_groups, plan.clusters) == (37, 98, 3, 72)
    assert (plan.weight_columns, plan.weight_column, plan.tmem_columns) == (192, 320, 512)
    assert config.accumulators == 1 and plan.mma_spans == ((0, 128), (128, 128))
    assert plan.smem_bytes == 1024 + 10 * 16_384 + 65_536 and plan.table_shape == (196, 24, 8, 4)
    assert make_plan(HEADLINE, config) == plan


def test_fewer_wavefronts_than_the_design_that_streams() -> None:
    """Per 256 x 256 outputs and CTA the row kernel of the CUDA original's design has 5,266 as the emulator counts."""
    plan = make_plan(HEADLINE)
    wavefronts = (plan.wavefronts + plan.table_wavefronts) * 256 / plan.columns
    assert wavefronts == 768 + 768 + 1024 + 8 <= 0.5 * 5266
    beside = make_plan(HEADLINE, Sm100ResidentConfig(weight="smem"))
    assert beside.config.accumulators == 2 and beside.wavefronts == 768 + 1536 + 1024 <= 0.65 * 5266


def test_rows_of_columns() -> None:
    """Half of a part's columns are each CTA's; 8 of them are one position's, and staging has positions one by one."""
    plan = make_plan(HEADLINE)
    assert [plan.row_of(0, c) for c in (0, 63, 64, 127)] == [0, 63, 128, 191]
    assert [plan.row_of(1, c) for c in (0, 64)] == [64, 192]
    assert [(plan.position_of(row), plan.image_of(row)) for row in (0, 63, 64, 128, 255)] == [
        (0, 0), (0, 63), (1, 0), (0, 64), (1, 127)
    ]  # fmt: skip
    staged = [plan.staged_row(part, c) for part, (_, columns) in enumerate(plan.mma_spans) for c in range(columns)]
    assert sorted(staged) == list(range(256)) and plan.staged_row(1, 64) == 128 + 64


def test_barriers() -> None:
    plan = make_plan(HEADLINE)
    graph = graph_of(plan)
    found = {barrier.name: (barrier.stages, barrier.arrivals) for barrier in graph.barriers()}
    assert found == {
        "operands_full": (10, 1), "operands_empty": (10, 1), "accumulator_full": (2, 1), "accumulator_empty": (2, 8),
        "weight_full": (1, 8),
    }  # fmt: skip
    assert plan.used_barrier_bytes == 8 * graph.slots + 4


@pytest.mark.parametrize(
    ("problem", "weight", "order"),
    [
        (HEADLINE, "tmem", "position"),
        (replace(HEADLINE, m=196), "smem", "flat"),
        (replace(HEADLINE, m=8 * 196), "smem", "position"),
        (replace(HEADLINE, m=928_255), "tmem", "flat"),
        (replace(HEADLINE, table_index=True), "tmem", "flat"),
        (replace(HEADLINE, k=1536), "tmem", "position"),
        (replace(HEADLINE, in_dtype="bfloat16"), "tmem", "position"),
        (replace(HEADLINE, k=4096), "streamed", "position"),
    ],
)
def test_which_design_a_problem_gets(problem: PatchEmbedProblem, weight: str, order: str) -> None:
    """Many tiles pay for the way into tensor memory; an index and rows that are no images leave the flat order."""
    plan = make_plan(problem)
    found = plan.config.weight if isinstance(plan, Sm100ResidentPlan) else "streamed"
    assert (found, plan.config.order) == (weight, order)


@pytest.mark.parametrize(("n", "groups"), [(768, 3), (1024, 4), (1152, 5), (1536, 6)])
@pytest.mark.parametrize("positions", [196, 256, 576, 729, 1024])
def test_model_sizes(n: int, groups: int, positions: int) -> None:
    """Many images: tiles of 256 rows on pairs, hardly any padding, whole groups of clusters."""
    plan = make_plan(PatchEmbedProblem(4736 * positions, n, 768, positions))
    assert (plan.config.weight, plan.feature_groups, plan.columns, plan.cta_group) == ("tmem", groups, 256, 2)
    assert plan.clusters == 74 // groups * groups
    assert plan.tiles * plan.columns <= 1.03 * plan.problem.m


@given(
    images=st.integers(1, 5000),
    positions=st.integers(1, 1100),
    rest=st.integers(0, 3),
    n=st.integers(1, 250).map(lambda i: 8 * i),
    k=st.integers(1, 130).map(lambda i: 16 * i),
    table=st.sampled_from([0, 1, 2]),
    indexed=st.booleans(),
    dtype=st.sampled_from(["float8_e4m3fn", "uint8", "bfloat16"]),
    sm_count=st.sampled_from([1, 2, 78, 148]),
)
def test_every_size_has_a_default(images, positions, rest, n, k, table, indexed, dtype, sm_count) -> None:
    """Tiles cover rows, positions and features; what the kernel relies on holds."""
    rows = {0: 0, 1: 1, 2: positions}[table]
    problem = PatchEmbedProblem(
        images * positions + rest, n, k, rows, dtype, table_index=indexed and rows > 0, feature_scale=True
    )
    plan = make_plan(problem, sm_count=sm_count)
    assert make_plan(problem, plan.config, sm_count=sm_count) == plan
    if isinstance(plan, Sm100PatchEmbedPlan):
        assert k * (2 if dtype == "bfloat16" else 1) > 1500 or sm_count == 1 or n * problem.m > 2**20
        return
    assert plan.row_tiles * plan.tile_images >= plan.rows_per_position and plan.padded_n >= n
    assert plan.position_tiles * plan.config.tile_positions >= plan.positions
    assert plan.cta_images * plan.config.tile_positions * plan.cta_group == plan.columns <= 256
    assert plan.cta_images % 8 == 0 and plan.cta_rows % 16 == 0
    assert plan.smem_bytes <= plan.arch.smem_bytes and plan.used_barrier_bytes <= plan.barrier_bytes
    assert plan.accumulator_columns + plan.weight_columns <= plan.tmem_columns <= 512
    assert len(plan.mma_spans) == 1 or plan.config.stages >= plan.tile_stages


MODELS = {(768, 768, 196), (768, 768, 256), (1024, 768, 256), (1152, 592, 256), (1152, 592, 729), (1536, 768, 256)}
"""N, K and positions."""


@pytest.mark.parametrize(("n", "k", "positions"), sorted(MODELS))
def test_the_weight_is_where_the_model_wants_it(n: int, k: int, positions: int) -> None:
    """It stays on chip, in tensor memory where each multiprocessor has many outputs; no other place is told to be
    quicker."""
    places = set()
    for images in (1, 8, 64, 512, 4736):
        problem = PatchEmbedProblem(images * positions, n, k, positions)
        plan = make_plan(problem)
        others = (Sm100ResidentConfig(weight="tmem"), Sm100ResidentConfig(weight="smem"), Sm100PatchEmbedConfig())
        quickest = min(predict(make_plan(problem, config)).microseconds for config in others)
        assert predict(plan).microseconds <= quickest * (1 + RESOLUTION)
        places.add(plan.config.weight)
    assert places == {"smem", "tmem"}


def test_the_weight_is_streamed_where_it_does_not_fit() -> None:
    """15 blocks of 128 bytes of K fill 480 of 512 columns; in shared memory 13 fit, so few images get the other."""
    assert make_plan(replace(HEADLINE, k=1920)).config.weight == "tmem"
    assert make_plan(replace(HEADLINE, m=196, k=1664)).config.weight == "smem"
    assert make_plan(replace(HEADLINE, m=196, k=1680)).config.weight == "tmem"
    streamed = make_plan(replace(HEADLINE, k=1936))
    assert isinstance(streamed, Sm100PatchEmbedPlan) and streamed.runs == "patch_embed: weight streamed"
    assert make_plan(HEADLINE).runs == "patch_embed: weight in tensor memory"


def test_a_config_of_another_design_is_taken() -> None:
    assert isinstance(make_plan(HEADLINE, Sm100PatchEmbedConfig()), Sm100PatchEmbedPlan)
    with pytest.raises(TypeError, match="sm_90a takes Sm90PatchEmbedConfig"):
        make_plan(HEADLINE, Sm100ResidentConfig(), "sm_90a")
