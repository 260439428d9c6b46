"""The SM90a plan against budgets worked out by hand, and every way to break a limit."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig, Sm100PatchEmbedConfig
from cute_kernels.kernels.graph import sm90_graph
from cute_kernels.plan import make_plan
from tests.plan.test_patch_embed_sm100 import repaired

HEADLINE = PatchEmbedProblem(m=928_256, n=768, k=768, table_rows=196)
SMEM = 232_448


def test_headline() -> None:
    """37 tiles of 128 images at 196 positions, six N tiles of 128 features in three groups of 22 clusters."""
    plan = make_plan(HEADLINE, arch="sm_90a")
    assert plan.config == Sm90PatchEmbedConfig(128, 2, 6, 2, 2, "registers", "position", True, "f32")
    assert (plan.row_tiles, plan.positions, plan.tiles) == (37, 196, 7252)
    assert (plan.n_tiles, plan.feature_groups, plan.clusters, plan.grid) == (6, 3, 66, (132, 1, 1))
    assert plan.smem_bytes == 1_024 + 6 * 32_768 + 2 * 16_384
    assert (plan.weight_registers, plan.accumulator_registers) == (96, 64)
    assert (plan.tile_stages, plan.handover_stage) == (3, 2)
    assert plan.table_shape == (196, 48, 8, 2)


@given(
    batch=st.integers(1, 5000),
    positions=st.integers(1, 1024),
    n=st.integers(1, 512).map(lambda i: 8 * i),
    k=st.integers(1, 200).map(lambda i: 16 * i),
    table=st.booleans(),
    sm_count=st.sampled_from([1, 2, 66, 132]),
)
def test_every_problem_has_a_default_plan_that_fits(batch, positions, n, k, table, sm_count) -> None:
    plan = make_plan(
        PatchEmbedProblem(batch * positions, n, k, positions if table else 0), arch="sm_90a", sm_count=sm_count
    )
    assert plan.smem_bytes <= SMEM
    registers = plan.consumer_registers * 128 * plan.config.warpgroups + plan.producer_registers * 128
    assert registers <= 65_536
    assert plan.row_tiles * plan.config.tile_rows >= plan.rows_per_position
    assert plan.rows_per_position * plan.positions == plan.problem.m
    assert plan.feature_groups * plan.config.cluster * plan.features == plan.padded_n >= n
    assert plan.clusters % plan.feature_groups == 0 and plan.clusters >= plan.feature_groups
    assert plan.tile_stages * plan.config.stage_blocks >= plan.k_blocks
    assert 0 <= plan.handover_stage < plan.tile_stages
    # Until a warpgroup gets its turn it frees no stage, so the one before must reach the hand-over within the ring.
    assert plan.config.stages >= plan.handover_stage + 1
    assert any("SMEM total" in name for name, _ in plan.describe())


@given(
    rows=st.integers(1, 16).map(lambda i: 16 * i),
    warpgroups=st.integers(1, 3),
    stages=st.integers(2, 40),
    stage_blocks=st.integers(1, 4),
    cluster=st.integers(1, 2),
    weight=st.sampled_from(["registers", "streamed"]),
    k=st.integers(1, 96).map(lambda i: 16 * i),
)
def test_configs_fit_or_name_what_does_not(rows, warpgroups, stages, stage_blocks, cluster, weight, k) -> None:
    config = Sm90PatchEmbedConfig(rows, warpgroups, stages, stage_blocks, cluster, weight)
    problem = dataclasses.replace(HEADLINE, k=k)
    k_blocks = -(-k // 128)
    registers = rows // 2 + 32 + (16 * k_blocks if weight == "registers" else 0)
    limit = {1: 240, 2: 232, 3: 160}[warpgroups]
    stage = stage_blocks * (rows * 128 + (64 * warpgroups * 128 if weight == "streamed" else 0))
    need = 1_024 + stages * stage + warpgroups * rows * 128
    try:
        plan = make_plan(problem, config)
    except ValueError as error:
        field = re.match(r"(\w+) = ", str(error)).group(1)
        expected = {
            "tile_rows": registers > limit or (cluster == 2 and rows % 16),
            "weight": registers > limit,
            "stages": need > SMEM,
            "stage_blocks": need > SMEM and (SMEM - need + stages * stage) // stage < 2,
        }
        assert expected[field], str(error)
    else:
        assert registers <= limit and need == plan.smem_bytes <= SMEM


@given(
    m=st.integers(-5, 5000),
    n=st.integers(-5, 5000),
    k=st.integers(-5, 5000),
    rows=st.integers(-5, 100),
    config=st.builds(
        Sm90PatchEmbedConfig,
        *[st.integers(-3, 400), st.integers(-1, 6), st.integers(-1, 40), st.integers(-1, 8), st.integers(-1, 9)],
        *[st.sampled_from(values) for values in (["registers", "streamed"], ["position", "flat", "snake"])],
        tile_positions=st.integers(-1, 40),
    ),
)
def test_nearest_values_are_legal(m, n, k, rows, config) -> None:
    repaired(PatchEmbedProblem(m, n, k, rows), config)


def test_a_stage_of_which_two_do_not_fit_is_made_smaller() -> None:
    """A stage of 4 blocks of 256 rows and 128 features is 196,608 B; beside 66,560 B two stages of one block fit."""
    config = Sm90PatchEmbedConfig(tile_rows=256, stages=2, stage_blocks=4, weight="streamed")
    with pytest.raises(ValueError, match=r"stage_blocks = 4:? .*nearest legal value: 1"):
        make_plan(HEADLINE, config)
    assert make_plan(HEADLINE, dataclasses.replace(config, stage_blocks=1)).smem_bytes == 66_560 + 2 * 49_152


@pytest.mark.parametrize(("rows", "wanted", "nearest"), [(16, 65, 64), (16, 10**9, 64), (128, 100, 13)])
def test_barriers_of_all_stages_fit_their_region(rows, wanted, nearest) -> None:
    """Two barriers of 8 B a stage in 1,024 B; of 128 rows, 13 stages of 16,384 B fit beside 17,408 B."""
    config = Sm90PatchEmbedConfig(tile_rows=rows, warpgroups=1, stage_blocks=1, cluster=1)
    with pytest.raises(ValueError, match=rf"^stages = {wanted}:? .*hold those of 64 stages; nearest .*: {nearest}$"):
        make_plan(HEADLINE, dataclasses.replace(config, stages=wanted))
    plan = make_plan(HEADLINE, dataclasses.replace(config, stages=nearest))
    assert sum(8 * barrier.stages for barrier in sm90_graph(plan).barriers()) <= plan.smem[1].offset


def test_the_table_is_indexed_with_32_bits() -> None:
    """Rows of 768 features, to 2**31 elements: 2,796,202 of them."""
    rows = 2_796_202
    config = make_plan(HEADLINE, arch="sm_90a").config
    assert math.prod(make_plan(dataclasses.replace(HEADLINE, m=rows, table_rows=rows), config).table_shape) < 2**31
    with pytest.raises(ValueError, match="table_rows = 2796203:"):
        make_plan(dataclasses.replace(HEADLINE, m=rows + 1, table_rows=rows + 1), config)


@pytest.mark.parametrize(
    ("field", "value", "limit", "nearest"),
    [
        ("tile_rows", 100, "N of a WGMMA", 96),
        ("tile_rows", 512, "N of a WGMMA", 256),
        ("tile_rows", 224, "96 registers of weight", 208),
        ("warpgroups", 4, "register file", 3),
        ("cluster", 4, "share x", 2),
        ("stages", 1, "two stages", 2),
        ("stages", 20, "232,448 B", 6),
        ("stage_blocks", 8, "K blocks of 128 bytes", 4),
        ("weight", "tmem", "weight operand", "'registers'"),
        ("order", "snake", "rows make a tile", "'position'"),
        ("epilogue", "fp16", "f32, bf16x2", "'f32'"),
        ("tile_positions", 32, "multiple of 8", 16),
        ("tile_positions", 0, "multiple of 8", 1),
    ],
)
def test_illegal_config_names_limit_value_and_nearest(field, value, limit, nearest) -> None:
    with pytest.raises(ValueError) as error:
        make_plan(HEADLINE, dataclasses.replace(Sm90PatchEmbedConfig(), **{field: value}))
    message = str(error.value)
    assert message.startswith(f"{field} = {value!r}") and limit in message
    assert message.endswith(f"nearest legal value: {nearest}")


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (Sm90PatchEmbedConfig(tile_rows=96, tile_positions=3), "each of 2 CTAs"),
        (Sm90PatchEmbedConfig(tile_positions=2, order="flat"), "in flat order the rows of a tile are consecutive ones"),
        (
            Sm90PatchEmbedConfig(256, weight="streamed", stage_blocks=1, tile_positions=32),
            "position order has 20 positions",
        ),
    ],
)
def test_positions_of_a_tile_are_shared_by_the_cluster_and_belong_to_position_order(config, rule) -> None:
    with pytest.raises(ValueError, match=rf"^tile_positions = {config.tile_positions}:? .*{rule}.*legal value: 1$"):
        make_plan(PatchEmbedProblem(20 * 4736, 768, 768, 20), config)


def test_tiles_of_several_positions_cover_all_rows() -> None:
    """37 images of 196 positions in tiles of 8 by 16: 5 x 13."""
    plan = make_plan(PatchEmbedProblem(37 * 196, 768, 768, 196), Sm90PatchEmbedConfig(tile_positions=16))
    assert (plan.config.order, plan.tile_images) == ("position", 8)
    assert (plan.row_tiles, plan.position_tiles, plan.tiles) == (5, 13, 65)
    described = dict(plan.describe())
    assert (described["tile images"], described["tile positions"]) == ("8", "16")
    assert (described["tiles"], described["row tiles"], described["position tiles"]) == ("65", "5", "13")


def test_flat_order_is_described_with_rows_as_images() -> None:
    """8 images of 196 positions are 24.5 times 64 rows; no tile holds 64 images."""
    described = dict(
        make_plan(
            PatchEmbedProblem(8 * 196, 768, 768, 196), Sm90PatchEmbedConfig(tile_rows=64, order="flat")
        ).describe()
    )
    assert (described["tile images"], described["tiles"], described["row tiles"]) == ("64", "25", "25")


def test_large_k_streams_the_weight() -> None:
    with pytest.raises(ValueError, match=r"weight = 'registers'.*nearest legal value: 'streamed'"):
        make_plan(dataclasses.replace(HEADLINE, k=2048), Sm90PatchEmbedConfig(tile_rows=16))
    assert make_plan(dataclasses.replace(HEADLINE, k=2048), arch="sm_90a").config.weight == "streamed"


def test_position_order_needs_whole_images() -> None:
    with pytest.raises(ValueError, match=r"order = 'position'.*196 positions.*nearest legal value: 'flat'"):
        make_plan(dataclasses.replace(HEADLINE, m=1000), Sm90PatchEmbedConfig(order="position"))
    assert make_plan(dataclasses.replace(HEADLINE, m=1000), arch="sm_90a").config.order == "flat"


def test_what_a_config_leaves_open_is_chosen_by_the_problem() -> None:
    """Position order for whole images that fill half a tile, and the stages of two tiles if they fit."""
    for images, order in ((63, "flat"), (64, "position")):
        assert make_plan(dataclasses.replace(HEADLINE, m=images * 196), Sm90PatchEmbedConfig()).config.order == order
    assert make_plan(dataclasses.replace(HEADLINE, m=1000), Sm90PatchEmbedConfig()).config.order == "flat"
    assert make_plan(dataclasses.replace(HEADLINE, table_index=True), Sm90PatchEmbedConfig()).config.order == "flat"
    assert make_plan(dataclasses.replace(HEADLINE, table_rows=1), Sm90PatchEmbedConfig()).config.order == "position"
    assert make_plan(HEADLINE, Sm90PatchEmbedConfig()).config.stages == 6  # two tiles of three stages
    assert make_plan(HEADLINE, Sm90PatchEmbedConfig(weight="streamed")).config.stages == 3  # what fits


def test_what_is_compiled_in_besides_config_and_types() -> None:
    """Loops over K are unrolled; a flat order wraps once in a tile, or divides, or has no table to walk."""
    flat, position = Sm90PatchEmbedConfig(order="flat"), Sm90PatchEmbedConfig(order="position")
    for config, change, wraps in (
        (flat, {}, True), (flat, {"table_rows": 127}, False), (flat, {"table_rows": 128}, True),
        (flat, {"table_rows": 0}, None), (flat, {"table_index": True}, None), (position, {}, None),
    ):  # fmt: skip
        plan = make_plan(dataclasses.replace(HEADLINE, **change), config)
        table = change.get("table_rows", 196) > 0
        assert plan.compiled_in == {"table": table, "k_blocks": 6, "table_wraps_once": wraps}
        assert ("k_blocks", 6) in plan.kernel_key and hash(plan.kernel_key)


def test_an_index_needs_flat_order_and_a_table() -> None:
    with pytest.raises(ValueError, match=r"order = 'position'.*own table row; nearest legal value: 'flat'"):
        make_plan(dataclasses.replace(HEADLINE, table_index=True), Sm90PatchEmbedConfig(order="position"))
    for arch in ("sm_90a", "sm_100a"):
        with pytest.raises(ValueError, match="table_index = True.*no table"):
            make_plan(dataclasses.replace(HEADLINE, table_rows=0, table_index=True), arch=arch)


def test_config_and_architecture_must_agree() -> None:
    assert make_plan(HEADLINE, Sm90PatchEmbedConfig()).arch.name == "sm_90a"
    assert make_plan(HEADLINE, Sm100PatchEmbedConfig()).arch.name == "sm_100a"
    with pytest.raises(TypeError, match="Sm90PatchEmbedConfig, sm_100a takes Sm100PatchEmbedConfig"):
        make_plan(HEADLINE, Sm90PatchEmbedConfig(), arch="sm_100a")


@pytest.mark.parametrize(("warpgroups", "cluster"), list(itertools.product((1, 2, 3), (1, 2))))
def test_arrivals_and_named_barriers(warpgroups: int, cluster: int) -> None:
    config = Sm90PatchEmbedConfig(tile_rows=64, warpgroups=warpgroups, cluster=cluster)
    graph = sm90_graph(make_plan(HEADLINE, config))
    counts = {b.name: (b.stages, b.arrivals) for b in graph.barriers()}
    assert counts == {"operands_full": (6, 1), "operands_empty": (6, warpgroups * cluster)}
    identifiers = [b.identifier for b in graph.named_barriers]
    # Barrier 0 belongs to __syncthreads, and a CTA has 16.
    assert len(set(identifiers)) == 2 * warpgroups and min(identifiers) >= 1 and max(identifiers) < 16


@pytest.mark.parametrize(("warpgroups", "largest"), [(1, 256), (2, 256), (3, 192)])
def test_accumulators_fit_the_registers_that_a_thread_starts_with(warpgroups: int, largest: int) -> None:
    """ptxas refuses tile_rows = 208 with three warpgroups: 512 threads begin with 128 registers each."""
    problem = PatchEmbedProblem(1000, 768, 768)
    config = Sm90PatchEmbedConfig(
        tile_rows=largest, warpgroups=warpgroups, stage_blocks=1, cluster=1, weight="streamed"
    )
    assert make_plan(problem, config).config.tile_rows == largest
    if largest < 256:
        with pytest.raises(ValueError, match=f"512 threads is 128; nearest legal value: {largest}"):
            make_plan(problem, dataclasses.replace(config, tile_rows=largest + 16))


def test_a_problem_that_fits_no_configuration_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="table_rows = 33.*32 bits"):
        make_plan(PatchEmbedProblem(33, 2**31 - 256, 768, 33), arch="sm_90a")


@pytest.mark.parametrize("dtype, elements", [("float8_e4m3fn", 128), ("int8", 128), ("bfloat16", 64), ("float16", 64)])
def test_a_block_of_k_is_128_bytes_of_any_element(dtype: str, elements: int) -> None:
    plan = make_plan(PatchEmbedProblem(256, 128, 768, in_dtype=dtype), arch="sm_90a")
    assert (plan.tile_k, plan.k_blocks) == (elements, 768 // elements)


def test_no_cluster_has_a_cta_without_features_whose_weight_is_streamed() -> None:
    """960 features are 15 CTAs of one warpgroup; with a 16th, 512 rows took 13.8 us, without it 8.0."""
    for images in (1, 2, 4, 8):
        plan = make_plan(PatchEmbedProblem(256 * images, 960, 592, 256), arch="sm_90a")
        assert plan.config.weight == "registers" or plan.n_tiles % plan.config.cluster == 0
