"""The plan against budgets worked out by hand, the hardware limits, and every way to break them."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig, Sm100PatchEmbedConfig
from cute_kernels.plan import ARCHS, make_plan

HEADLINE = PatchEmbedProblem(m=928_256, n=768, k=768, table_rows=196)

SM100_SMEM = 232_448
SM100_TMEM_COLUMNS = 512


def test_headline_matches_the_seed_documents() -> None:
    """4736 images x 196 patches: 10,878 tiles over 74 clusters, 4 stages of 32 KiB a CTA (docs/experiments.md)."""
    plan = make_plan(HEADLINE, Sm100PatchEmbedConfig(order="flat"))
    assert (plan.m_tiles, plan.n_tiles, plan.tiles, plan.k_blocks) == (3626, 3, 10_878, 6)
    assert (plan.clusters, plan.grid, plan.cluster) == (74, (148, 1, 1), (2, 1, 1))
    assert plan.config.stages * plan.stage_bytes == 131_072
    assert plan.stage_tx_bytes == 65_536
    assert plan.tmem_columns == 512
    assert plan.smem_bytes == 1_024 + 131_072 + 65_536
    assert plan.table_shape == (7, 192, 32, 4)


def test_epilogue_rows_follow_the_lane_quarter_and_columns_are_covered_once() -> None:
    for tile_n, warps in itertools.product((128, 256), (4, 5)):
        plan = make_plan(HEADLINE, Sm100PatchEmbedConfig(tile_n=tile_n, epilogue_warps=warps))
        covered = {(quarter, column): 0 for quarter in range(4) for column in range(tile_n)}
        for i, (begin, end) in enumerate(plan.epilogue_columns):
            for column in range(begin, end):
                covered[(plan.first_epilogue_warp + i) % 4, column] += 1
        assert set(covered.values()) == {1}
    columns = make_plan(HEADLINE, Sm100PatchEmbedConfig()).epilogue_columns
    assert columns == ((0, 128), (0, 256), (0, 256), (0, 256), (128, 256))


@given(
    m=st.integers(1, 2**31 - 256),
    n=st.integers(1, 4096).map(lambda i: 8 * i),
    k=st.integers(1, 4096).map(lambda i: 16 * i),
    rows=st.integers(0, 1024),
    tile_n=st.sampled_from([128, 256]),
    stages=st.integers(2, 8),
    warps=st.sampled_from([4, 5]),
    width=st.sampled_from([16, 32, 64]),
    epilogue=st.sampled_from(["f32", "bf16x2"]),
)
def test_every_plan_fits_the_hardware(m, n, k, rows, tile_n, stages, warps, width, epilogue) -> None:
    config = Sm100PatchEmbedConfig(tile_n, stages, warps, width, epilogue, order="flat")
    staging = 128 * tile_n * 2
    need = 1_024 + stages * (16_384 + 64 * tile_n) + staging
    if need > SM100_SMEM:
        with pytest.raises(ValueError, match="stages") as error:
            make_plan(PatchEmbedProblem(m, n, k, rows), config)
        fit = int(re.search(r"nearest legal value: (\d+)", str(error.value)).group(1))
        make_plan(PatchEmbedProblem(m, n, k, rows), dataclasses.replace(config, stages=fit))
        with pytest.raises(ValueError):
            make_plan(PatchEmbedProblem(m, n, k, rows), dataclasses.replace(config, stages=fit + 1))
        return
    plan = make_plan(PatchEmbedProblem(m, n, k, rows), config)
    assert plan.smem_bytes == need
    assert plan.tmem_columns <= SM100_TMEM_COLUMNS and plan.tmem_columns & (plan.tmem_columns - 1) == 0
    ends = [region.offset + region.nbytes for region in plan.smem]
    for region, previous_end in zip(plan.smem, [0, *ends], strict=False):
        assert region.offset % region.alignment == 0 and region.offset >= previous_end
    assert plan.m_tiles * plan.tile_m >= m > (plan.m_tiles - 1) * plan.tile_m
    assert plan.n_tiles * plan.tile_n >= n > (plan.n_tiles - 1) * plan.tile_n
    assert plan.k_blocks * 128 >= k > (plan.k_blocks - 1) * 128
    assert 1 <= plan.clusters <= min(74, plan.tiles)
    assert all((end - begin) % max(64, width) == 0 for begin, end in plan.epilogue_columns)
    if rows:
        blocks, chunks, lanes, vector = plan.table_shape
        assert blocks * 32 >= rows and chunks * vector == plan.n_tiles * tile_n and lanes == 32
    assert any("SMEM total" in name for name, _ in plan.describe())


@pytest.mark.parametrize(
    ("field", "value", "limit", "nearest"),
    [
        ("tile_n", 192, "512 TMEM columns", 128),
        ("tile_n", 512, "512 TMEM columns", 256),
        ("epilogue_warps", 3, "lane quarters", 4),
        ("epilogue_warps", 8, "lane quarters", 5),
        ("tmem_load_width", 8, "16, 32, 64", 16),
        ("tmem_load_width", 128, "16, 32, 64", 64),
        ("stages", 1, "two stages", 2),
        ("stages", 6, "232,448 B", 5),
        ("epilogue", "fp16", "f32, bf16x2", "'f32'"),
    ],
)
def test_illegal_config_names_limit_value_and_nearest(field, value, limit, nearest) -> None:
    with pytest.raises(ValueError) as error:
        make_plan(HEADLINE, dataclasses.replace(Sm100PatchEmbedConfig(), **{field: value}))
    message = str(error.value)
    assert message.startswith(f"{field} = {value!r}") and limit in message
    assert message.endswith(f"nearest legal value: {nearest}")


@pytest.mark.parametrize(
    ("field", "value", "limit", "nearest"),
    [
        ("m", 0, "1 to", 1),
        ("m", -5, "1 to", 1),
        ("m", 2**31, "TMA coordinates", 2**31 - 256),
        ("n", 770, "16 bytes", 776),
        ("n", 0, "1 to", 8),
        ("n", 2**31 - 257, "16 bytes", 2**31 - 256),
        ("n", 2**40, "TMA coordinates", 2**31 - 256),
        ("k", 588, "zero-pad", 592),
        ("k", 0, "1 to", 16),
        ("k", -592, "1 to", 16),
        ("k", 2**31 - 129, "zero-pad", 2**31 - 128),
        ("k", 2**31, "TMA coordinates", 2**31 - 128),
        ("table_rows", -1, "absent", 0),
        ("table_rows", 2**30, "32 bits", 2_796_192),
        ("in_dtype", "float8_e5m2", "have a kernel", "'float8_e4m3fn'"),
        ("out_dtype", "float16", "BF16", "'bfloat16'"),
        ("scale_source", "row", "launch parameter", "'value'"),
    ],
)
def test_illegal_problem_names_limit_value_and_nearest(field, value, limit, nearest) -> None:
    with pytest.raises(ValueError) as error:
        make_plan(dataclasses.replace(HEADLINE, **{field: value}))
    message = str(error.value)
    assert message.startswith(f"{field} = {value!r}") and limit in message
    assert message.endswith(f"nearest legal value: {nearest}")


def repaired(problem: PatchEmbedProblem, config: Sm100PatchEmbedConfig | Sm90PatchEmbedConfig) -> None:
    """Sets each field that the plan refuses to what it calls the nearest legal value, until there is a plan.

    A size has to be legal at once. A tunable may meet another limit later: rows of a tile are multiples of 16, and must
    fit the registers beside the weight, after which the positions of a tile must divide them anew.
    """
    named: list[str] = []
    while True:
        try:
            make_plan(problem, config)
            return
        except ValueError as error:
            message = str(error)
        field, value = re.match(r"(\w+) = .* nearest legal value: (.+)$", message).groups()
        named.append(field)
        of_problem = hasattr(problem, field)
        assert named.count(field) <= (1 if of_problem else 3), message
        change = {field: ast.literal_eval(value)}
        if of_problem:
            problem = dataclasses.replace(problem, **change)
        else:
            config = dataclasses.replace(config, **change)


SIZES = st.one_of(st.integers(-100, 2000), st.integers(2**31 - 600, 2**31 + 600), st.integers(-(2**70), 2**70))


@given(
    m=SIZES,
    n=SIZES,
    k=SIZES,
    config=st.builds(
        Sm100PatchEmbedConfig,
        *[st.integers(-300, 600)] * 4,
        st.sampled_from(["f32", "bf16x2", "f16"]),
    ),
)
def test_nearest_values_are_legal(m, n, k, config) -> None:
    repaired(PatchEmbedProblem(m, n, k), config)


def test_the_table_is_indexed_with_32_bits() -> None:
    """Blocks of 32 rows by 768 columns: 2,796,192 rows are 87,381 blocks with 2,147,475,456 elements, under 2**31."""
    kernel = Sm100PatchEmbedConfig()
    plan = make_plan(dataclasses.replace(HEADLINE, m=2_796_192, table_rows=2_796_192), kernel)
    assert math.prod(plan.table_shape) == 2_147_475_456 < 2**31
    with pytest.raises(ValueError, match=r"table_rows = 2796193:? .*nearest legal value: 2796192"):
        make_plan(dataclasses.replace(HEADLINE, m=2_796_193, table_rows=2_796_193), kernel)


def test_elements_of_a_stage() -> None:
    """128 bytes of K in a stage, and an FP8 element has one."""
    for arch in ("sm_100a", "sm_90a"):
        plan = make_plan(dataclasses.replace(HEADLINE, k=592), arch=arch)
        assert (plan.tile_k, plan.k_blocks) == (128, 5)


def test_unknown_architecture_and_too_small_device() -> None:
    with pytest.raises(ValueError, match=r"arch = 'sm_70'.*sm_100a"):
        make_plan(HEADLINE, arch="sm_70")
    with pytest.raises(ValueError, match=r"sm_count = 1:? .*nearest legal value: 2"):
        make_plan(HEADLINE, Sm100PatchEmbedConfig(), sm_count=1)


def test_grid_follows_the_device() -> None:
    streamed = Sm100PatchEmbedConfig()
    assert make_plan(HEADLINE, streamed, sm_count=20).grid == (20, 1, 1)
    assert make_plan(HEADLINE, streamed, sm_count=21).grid == (20, 1, 1)
    assert make_plan(dataclasses.replace(HEADLINE, m=1, n=8), streamed).grid == (2, 1, 1)


def test_every_model_of_the_table_has_a_plan() -> None:
    """SigLIP and SigLIP2: (K padded to 16 bytes, N, positions) of each published size."""
    models = [(768, 768, (196, 256, 576, 1024)), (768, 1024, (256, 576, 1024)), (768, 1152, (256, 576, 1024)),
              (592, 1152, (256, 729)), (768, 1536, (256, 576))]  # fmt: skip
    for k, n, positions in models:
        for s, batch in itertools.product(positions, (1, 8, 64, 512, 4736)):
            for tile_n in (128, 256):
                plan = make_plan(PatchEmbedProblem(batch * s, n, k, s), Sm100PatchEmbedConfig(tile_n=tile_n))
                assert plan.tiles * plan.tile_m * plan.tile_n >= batch * s * n


def test_arch_limits_match_the_programming_guide() -> None:
    """227 KiB of shared memory per CTA and 512 TMEM columns on compute capability 10.0."""
    arch = ARCHS["sm_100a"]
    assert (arch.smem_bytes, arch.tmem_columns, arch.compute_capability) == (227 * 1024, 512, (10, 0))
