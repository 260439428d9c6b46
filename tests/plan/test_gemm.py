"""Plans of the dense GEMM: the CUDA original's budgets and choices, limits, and the chooser of SM90."""

from __future__ import annotations

import dataclasses

import pytest

from bench.gemm_cases import siglip2, squares
from cute_kernels.common.chips import CTA_SMEM_BYTES
from cute_kernels.config import GemmProblem, Sm90GemmConfig, Sm100GemmConfig, Sm100PatchEmbedConfig
from cute_kernels.kernels.graph import sm90_gemm_graph, sm100_graph
from cute_kernels.plan import ARCHS, PLANNERS, candidate_plans, gemm_sm90, gemm_sm90_fit, make_plan
from cute_kernels.plan.gemm_sm90 import TILES
from cute_kernels.plan.gemm_sm100 import CANDIDATES as CANDIDATES_100
from cute_kernels.plan.gemm_sm100 import LEVEL_7, LEVEL_8, ONE_ACCUMULATOR, TUNED, WIDE


def square(size: int, **facts) -> GemmProblem:
    return GemmProblem(size, size, size, **facts)


def test_level_8_shared_memory_to_the_byte() -> None:
    """The original's budget: 1,024 of barriers, 8 stages of 24,576, two store stages of 128 x 128 bytes."""
    plan = make_plan(square(4096), LEVEL_8)
    assert plan.stage_bytes == 24_576 and plan.config.stages * plan.stage_bytes == 196_608
    assert plan.staging_bytes == 32_768 and plan.store_columns == 64
    assert [region.nbytes for region in plan.smem] == [1_024, 131_072, 65_536, 32_768]
    assert plan.smem_bytes == 230_400 <= plan.arch.smem_bytes == 232_448
    assert plan.tmem_columns == 2 * 128
    with pytest.raises(ValueError, match=r"stages = 9.*254,976 B.*232,448 B; nearest legal value: 8"):
        make_plan(square(4096), dataclasses.replace(LEVEL_8, stages=9))


def test_level_7_shared_memory_to_the_byte() -> None:
    """256 rows per CTA: 32,768 + 8,192 bytes a stage, and all 512 columns of tensor memory."""
    plan = make_plan(square(4096), LEVEL_7)
    assert plan.stage_bytes == 40_960 and plan.smem_bytes == 1_024 + 4 * 40_960 + 32_768
    assert plan.tmem_columns == 512 and plan.mma_tiles == 2
    assert plan.cluster_rows == 512


@pytest.mark.parametrize(
    ("config", "rows", "columns", "stage_bytes", "ctas"),
    [
        (WIDE, 256, 256, 32_768, 2),
        (ONE_ACCUMULATOR, 512, 256, 49_152, 2),
        (dataclasses.replace(WIDE, cluster_m=4), 512, 256, 32_768, 4),
        (dataclasses.replace(WIDE, cluster_n=2), 256, 512, 32_768, 4),
        (dataclasses.replace(WIDE, cluster_m=4, cluster_n=2), 512, 512, 32_768, 8),
    ],
)
def test_wide_tiles_fill_both_memories(config, rows: int, columns: int, stage_bytes: int, ctas: int) -> None:
    """All 512 columns of tensor memory and the same 196,608 bytes of stages as Level 8, in fewer, larger stages."""
    plan = make_plan(square(4096), config)
    assert (plan.cluster_rows, plan.cluster_columns, plan.ctas) == (rows, columns, ctas)
    assert plan.grid == (plan.clusters * ctas, 1, 1) and plan.cluster == (ctas, 1, 1)
    assert plan.clusters == min(148 // ctas, 4096 // rows * (4096 // columns))
    assert plan.stage_bytes == stage_bytes and plan.config.stages * stage_bytes == 196_608
    assert plan.smem_bytes == 230_400 and plan.tmem_columns == 512
    # A CTA holds all of its stage, whoever loads it: multicast adds no shared memory.
    assert plan.stage_tx_bytes == 2 * stage_bytes


@pytest.mark.parametrize(("size", "level"), [(4096, LEVEL_8), (6144, WIDE), (8192, WIDE), (12288, WIDE)])
def test_the_chooser_follows_the_table_of_the_original(size: int, level: Sm100GemmConfig) -> None:
    """Where Level 7 is the faster one there, the tile of the same size that does less of everything stands for it."""
    assert make_plan(square(size)).config == level
    level_7 = make_plan(square(size), LEVEL_7)
    assert make_plan(square(size), WIDE).tiles == level_7.tiles


def test_a_tuner_tries_every_kind_of_sm100_tile_and_cluster() -> None:
    """Those that fit: one cluster of eight multiprocessors at least, and a tile's stores in whole turns of the ring."""
    plans = candidate_plans(square(8192), "sm_100a")
    assert [plan.config for plan in plans] == list(dict.fromkeys([plans[0].config, *CANDIDATES_100, *TUNED]))
    assert plans[0] == make_plan(square(8192)) and len(plans) == len(CANDIDATES_100) + len(TUNED)
    few = candidate_plans(square(8192), "sm_100a", sm_count=4)
    assert {plan.ctas for plan in few} == {2, 4} and len(few) == len(plans) - 1


def test_the_chooser_takes_the_shape_that_fits() -> None:
    """Columns that Level 7's tiles fill and 256-wide ones do not; too few rows for tiles of 512 of them."""
    assert make_plan(GemmProblem(512 * 74, 128, 512)).config == LEVEL_7
    assert make_plan(GemmProblem(256, 256 * 74, 512)).config == WIDE
    assert make_plan(GemmProblem(256, 128 * 74, 512)).config == LEVEL_8


@pytest.mark.parametrize(("in_dtype", "block", "step"), [("bfloat16", 64, 16), ("float16", 64, 16), ("float32", 32, 8)])
def test_elements_of_a_stage_and_of_an_instruction(in_dtype: str, block: int, step: int) -> None:
    """128 bytes of K in a stage; K of an MMA is 16 elements of 16 bits or 8 of TF32 (PTX ISA, tcgen05.mma, wgmma)."""
    for arch in ("sm_100a", "sm_90a"):
        plan = make_plan(square(512, in_dtype=in_dtype), arch=arch)
        assert (plan.tile_k, plan.mma_k, plan.k_blocks) == (block, step, 512 // block)


@pytest.mark.parametrize(("out_dtype", "columns"), [("bfloat16", 64), ("float16", 64), ("float32", 32)])
def test_a_store_buffer_is_128_bytes_wide(out_dtype: str, columns: int) -> None:
    for arch, config in (("sm_100a", None), ("sm_90a", Sm90GemmConfig())):
        plan = make_plan(square(512, out_dtype=out_dtype), config, arch)
        assert plan.store_columns == columns
        assert plan.staging_bytes == plan.storing_warps * plan.config.store_stages * plan.store_rows * 128


@pytest.mark.parametrize("tile_n", [32, 80, 96, 160, 176, 224])
def test_columns_that_fill_no_128_bytes_are_stored_in_shorter_rows(tile_n: int) -> None:
    """Of BF16, 32 columns in 64 bytes, or 16 in 32; of FP32 the same columns have twice the bytes."""
    config = Sm90GemmConfig(128, tile_n, 2, store_stages=1)
    columns = 16 if tile_n % 32 else 32
    for out_dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
        plan = make_plan(square(512, out_dtype=out_dtype), config)
        assert (plan.store_row_bytes, plan.store_columns) == (columns * itemsize, columns)
        assert plan.regions_per_tile == tile_n // columns and plan.staging_bytes == 8 * 16 * columns * itemsize


def test_tiles_cover_every_row_column_and_batch() -> None:
    plan = make_plan(GemmProblem(257, 129, 72, batches=3), LEVEL_8)
    assert (plan.m_tiles, plan.n_tiles, plan.k_blocks, plan.tiles) == (2, 2, 2, 12)
    assert plan.clusters == 12 and plan.out_pitch == 136
    plan = make_plan(GemmProblem(257, 129, 72, out_dtype="float32"), Sm90GemmConfig(cluster_m=2))
    assert (plan.m_tiles, plan.n_tiles, plan.out_pitch) == (2, 1, 132)


def test_arrivals() -> None:
    """A stage is free when every warpgroup that reads it, in every CTA that shares it, has arrived."""
    for config, arrivals in (
        (Sm90GemmConfig(), 4),
        (Sm90GemmConfig(cluster_m=1), 2),
        (Sm90GemmConfig(128, 128, pingpong=True), 2),
        (Sm90GemmConfig(128, 128, cluster_m=1, pingpong=True), 1),
        (Sm90GemmConfig(128, 128, cluster_n=2), 8),
    ):
        plan = make_plan(square(512), config)
        full, empty = sm90_gemm_graph(plan).barriers()
        assert (full.arrivals, empty.arrivals) == (1, arrivals)
        assert sm90_gemm_graph(plan).edges[0].tx_bytes == plan.stage_bytes
    barriers = {b.name: b.arrivals for b in sm100_graph(make_plan(square(512), LEVEL_7)).barriers()}
    assert barriers == {"operands_full": 1, "operands_empty": 1, "accumulator_full": 1, "accumulator_empty": 8}


@pytest.mark.parametrize(("cluster_m", "cluster_n", "pairs"), [(2, 1, 1), (4, 1, 2), (2, 2, 2), (4, 2, 3)])
def test_a_shared_stage_is_free_when_every_pair_that_reads_it_has_committed(cluster_m, cluster_n, pairs: int) -> None:
    """Of 2 x 2 pairs, what one CTA loads goes to its row and to its column: three pairs."""
    graph = sm100_graph(make_plan(square(512), Sm100GemmConfig(stages=3, cluster_m=cluster_m, cluster_n=cluster_n)))
    barriers = {b.name: (b.stages, b.arrivals) for b in graph.barriers()}
    assert barriers == {
        "operands_full": (3, 1), "operands_empty": (3, pairs), "accumulator_full": (2, 1), "accumulator_empty": (2, 8)
    }  # fmt: skip
    assert ("SHARED_COMMIT" in graph.describe()[0]) == (pairs > 1)


def test_waves_are_handed_over_one_by_one() -> None:
    graph = sm100_graph(make_plan(square(512), ONE_ACCUMULATOR))
    assert [(b.name, b.stages) for b in graph.barriers()[2:]] == [("accumulator_full", 2), ("accumulator_empty", 2)]
    assert graph.describe()[1] == "mma --[accumulator x1 x2 parts: TCGEN05_COMMIT / WARP_ARRIVE]--> epilogue"
    graph = sm100_graph(make_plan(square(512), LEVEL_7))
    assert graph.slots == 2 * (4 + 2 * 2) == len(graph.barrier_names())


def test_a_split_of_k_shares_operands_within_a_slice_and_sums_between_slices() -> None:
    plan = make_plan(GemmProblem(200, 100, 1000), Sm90GemmConfig(128, 64, 4, 2, store_stages=1, split_k=4))
    assert (plan.ctas, plan.sharing_ctas, plan.tiles, plan.clusters) == (8, 2, 2, 2)
    graph = sm90_gemm_graph(plan)
    arrivals = {barrier.name: barrier.arrivals for barrier in graph.barriers()}
    assert arrivals == {"operands_full": 1, "operands_empty": 4, "partials_full": 1, "partials_empty": 1}
    # A warp's 16 rows of 64 columns in FP32 from each of three CTAs; two warps finish theirs in each CTA.
    assert graph.edges[1].tx_bytes == 3 * 4_096 and plan.smem[-1].nbytes == 2 * 3 * 4_096
    assert plan.smem_bytes == 1_024 + 4 * 24_576 + 16_384 + 24_576


def test_clusters_of_more_than_two_do_not_count_on_whole_gpcs() -> None:
    """An H200 holds 66 clusters of two, 30 of four and 15 of eight at once (cuOccupancyMaxActiveClusters)."""
    for cluster, count in (((2, 1), 66), ((2, 2), 30), ((4, 1), 30), ((4, 2), 15)):
        config = Sm90GemmConfig(128, 64, 4, *cluster, store_stages=1)
        assert make_plan(square(8192), config, sm_count=132).clusters == count
    assert make_plan(square(8192), Sm90GemmConfig(128, 64, 4, 2, 2, store_stages=1), sm_count=4).clusters == 1


def test_sm90_shared_memory_of_the_named_schedules() -> None:
    plan = make_plan(square(4096), Sm90GemmConfig())
    assert plan.stage_bytes == 49_152 and plan.smem_bytes == 230_400
    assert plan.accumulator_registers == 128 and plan.mma_tiles == 1
    plan = make_plan(square(4096), Sm90GemmConfig(128, 192, pingpong=True, store_stages=3))
    assert plan.accumulator_registers == 192 and plan.mma_tiles == 2


def test_every_candidate_is_legal_at_every_size() -> None:
    for out_dtype in ("bfloat16", "float32"):
        for m in (1, 64, 200, 4096):
            for n in (1, 100, 768, 4304):
                problem = GemmProblem(m, n, 768, out_dtype=out_dtype)
                chosen = make_plan(problem, arch="sm_90a")
                assert make_plan(problem, chosen.config) == chosen
    plans = gemm_sm90.candidates(square(4096), ARCHS["sm_90a"], 132)
    assert len({gemm_sm90.tile(plan.config) for plan in plans}) == len(plans) == len(gemm_sm90_fit.CANDIDATES)
    for plan in plans:
        assert make_plan(square(4096), plan.config, "sm_90a") == plan and plan.config.stages >= 3


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("size", [(1024, 1024, 1024), (196, 768, 3072), (1, 1, 8), (70_000, 4304, 1152)])
def test_what_a_tuner_times_is_legal_and_different(arch: str, size: tuple[int, int, int]) -> None:
    for facts in ({}, {"out_dtype": "float32", "batches": 3}):
        problem = GemmProblem(*size, **facts)
        plans = candidate_plans(problem, arch)
        assert plans == [make_plan(problem, plan.config, arch) for plan in plans] and len(set(plans)) == len(plans) >= 2
    with pytest.raises(ValueError, match="k = 12"):
        candidate_plans(GemmProblem(8, 8, 12), arch)
    with pytest.raises(ValueError, match="arch = 'sm_70'"):
        candidate_plans(problem, "sm_70")


@pytest.mark.parametrize("case", [*squares(), *siglip2()], ids=lambda case: case.name)
def test_the_last_wave_of_measured_sizes_is_nearly_full(case) -> None:
    """At most 4% of the device's time is lost to clusters without a tile, all that a stream-K order could win back.

    At 1024 it is more: 112 CTAs, in clusters of four, have all the tiles.
    """
    plan = make_plan(GemmProblem(case.m, case.n, case.k), arch="sm_90a")
    waves = -(-plan.tiles // plan.clusters)
    assert plan.tiles * plan.ctas / (waves * 132) >= (0.84 if case.m == 1024 else 0.96)


def test_k_is_split_where_tiles_are_few_and_k_is_long() -> None:
    assert make_plan(GemmProblem(196, 768, 3072), arch="sm_90a").config.split_k > 1
    assert make_plan(GemmProblem(1568, 768, 768), arch="sm_90a").config.split_k == 1
    assert make_plan(GemmProblem(196, 768, 3072), arch="sm_90a", sm_count=2).config.split_k == 1
    for size in (1024, 2048, 8192):
        assert make_plan(square(size), arch="sm_90a").config.split_k == 1
        assert all(plan.config.split_k == 1 for plan in candidate_plans(square(2 * size), "sm_90a")[:24])
    assert {plan.config.split_k for plan in candidate_plans(GemmProblem(196, 768, 3072), "sm_90a")} == {1, 2, 4, 8}


def test_the_sm90_chooser_fills_the_device() -> None:
    """Small problems get small tiles, large ones the tiles that fetch least."""
    small, large = make_plan(square(1024), arch="sm_90a"), make_plan(square(8192), arch="sm_90a")
    assert small.clusters * small.ctas >= 64
    assert large.config.tile_m * large.config.tile_n >= 128 * 192


@pytest.mark.parametrize(
    ("problem", "config", "message"),
    [
        (square(512, in_dtype="float64"), None, "in_dtype = 'float64': must be one of bfloat16, float16"),
        (GemmProblem(8, 8, 6, in_dtype="float32"), None, r"k = 6:? .*16 bytes.*nearest legal value: 8"),
        (square(512, out_dtype="float64"), None, "out_dtype = 'float64'"),
        (GemmProblem(8, 8, 12), None, r"k = 12:? .*16 bytes.*nearest legal value: 16"),
        (GemmProblem(0, 8, 8), None, "m = 0"),
        (GemmProblem(8, 8, 8, batches=0), None, "batches = 0"),
        (square(512), Sm100GemmConfig(block_m=192), "block_m = 192"),
        (square(512), Sm100GemmConfig(tile_n=96), "tile_n = 96"),
        (square(512), Sm100GemmConfig(block_m=256, tile_n=256, stages=2), "tile_n = 256:? .*512 TMEM columns"),
        (square(512), Sm100GemmConfig(cluster_m=1), "cluster_m = 1: must be one of 2, 4: .*; nearest legal value: 2"),
        (square(512), Sm100GemmConfig(cluster_n=4), "cluster_n = 4: must be one of 1, 2: .*; nearest legal value: 2"),
        (square(512), Sm100GemmConfig(accumulators=3), "accumulators = 3:? .*nearest legal value: 2"),
        (square(512), Sm100GemmConfig(tile_n=256), "stages = 8:? .*nearest legal value: 6"),
        (square(512), dataclasses.replace(ONE_ACCUMULATOR, stages=5), "stages = 5:? .*nearest legal value: 4"),
        (square(512), Sm100GemmConfig(store_stages=3), "store_stages = 3"),
        (square(512), Sm100GemmConfig(group_m=0), "group_m = 0"),
        (square(512), Sm100GemmConfig(stages=1), "stages = 1"),
        (square(512), Sm90GemmConfig(tile_m=192), "tile_m = 192"),
        (square(512), Sm90GemmConfig(tile_n=320), "tile_n = 320"),
        (square(512), Sm90GemmConfig(256, 256, stages=2), "256 registers of accumulators.*nearest legal value: 192"),
        (square(512), Sm90GemmConfig(stages=5), "stages = 5:? .*nearest legal value: 4"),
        (square(512), Sm90GemmConfig(cluster_m=3), "cluster_m = 3"),
        (square(512), Sm90GemmConfig(128, 64, cluster_m=4, cluster_n=4), "cluster_n = 4:? .*8 of a.*legal value: 2"),
        (square(512), Sm90GemmConfig(128, 64, cluster_m=2, split_k=8), "split_k = 8:.*8 of a cluster.*legal value: 4"),
        (square(512), Sm90GemmConfig(128, 64, split_k=3), "split_k = 3"),
        (square(192), Sm90GemmConfig(128, 64, split_k=4), "split_k = 4:? .*k = 192 has 3; nearest legal value: 2"),
        (square(512), Sm90GemmConfig(128, 64, pingpong=True, split_k=2), "split_k = 2:? .*take turns.*legal value: 1"),
        (square(512), Sm90GemmConfig(128, 256, 2, 1, store_stages=1, split_k=4), "split_k = 4:? .*spill.*value: 2"),
        (square(512), Sm90GemmConfig(128, 256, 4, 1, split_k=2), "stages = 4:? .*nearest legal value: 2"),
    ],
)
def test_limits_name_the_value_and_the_nearest_legal_one(problem, config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(problem, config)


@pytest.mark.parametrize(
    "config, settings",
    [
        (Sm90GemmConfig(split_k=4), {"tile_n": 128}),
        (Sm90GemmConfig(split_k=8, cluster_m=1, store_stages=4), {"tile_n": 128, "store_stages": 2}),
    ],
)
def test_a_split_that_the_default_tile_is_too_large_for_names_the_way(config, settings: dict[str, int]) -> None:
    named = ", ".join(f"{name}={value}" for name, value in settings.items())
    with pytest.raises(ValueError, match=f"spill; split_k={config.split_k} is possible with {named}; nearest"):
        make_plan(square(1024), config)
    assert make_plan(square(1024), dataclasses.replace(config, **settings)).config.split_k == config.split_k


def test_configs_of_other_kernels_and_architectures_are_refused() -> None:
    with pytest.raises(TypeError, match="Sm100PatchEmbedConfig, sm_100a takes Sm100GemmConfig"):
        make_plan(square(512), Sm100PatchEmbedConfig())
    with pytest.raises(TypeError, match="Sm90GemmConfig, sm_100a takes Sm100GemmConfig"):
        make_plan(square(512), Sm90GemmConfig(), "sm_100a")
    with pytest.raises(ValueError, match="sm_count = 0:? .*nearest legal value: 1"):
        make_plan(square(512), arch="sm_90a", sm_count=0)
    with pytest.raises(ValueError, match="sm_count = 1"):
        make_plan(square(512), Sm90GemmConfig(), sm_count=1)
    with pytest.raises(ValueError, match="sm_count = 6:? .*a cluster needs 8 multiprocessors"):
        make_plan(square(512), Sm100GemmConfig(cluster_m=4, cluster_n=2), sm_count=6)


def test_description_names_the_budget() -> None:
    rows = dict(make_plan(GemmProblem(4096, 4096, 4096, batches=2), LEVEL_8).describe())
    assert rows["problem"] == "2 x [4096, 4096] x [4096, 4096]^T, bfloat16 -> bfloat16, bias False"
    assert rows["SMEM total"] == "230,400 of 232,448 B"


@pytest.mark.parametrize("tile", TILES)
def test_tiles_that_a_tuner_tries_are_legal(tile: tuple[int, int, bool]) -> None:
    """Its search leaves out what the plan refuses, and would not miss a tile that is never legal."""
    tile_m, tile_n, pingpong = tile
    config = Sm90GemmConfig(tile_m, tile_n, 2, 1, 1, pingpong, 1)
    plan = make_plan(GemmProblem(4096, 4096, 4096), config)
    assert (plan.config.tile_m, plan.config.tile_n, plan.config.pingpong) == tile


@pytest.mark.parametrize("facts", [
    {}, {"bias": True}, {"in_dtype": "float8_e4m3fn", "row_scale": True, "column_scale": True, "bias": True},
], ids=["plain", "bias", "FP8"])  # fmt: skip
@pytest.mark.parametrize("m", [16, 32, 64])
def test_two_ctas_of_one_warpgroup_fit_a_multiprocessor(m, facts):
    """Numbers of a tile's columns stand beside the barriers, whose place is otherwise half empty: 256 bytes more, and
    64 rows took 1.2 times as long on an H100."""
    plan = make_plan(GemmProblem(m, 4096, 4096, **facts), arch="sm_90a")
    assert plan.resident_ctas == 2
    assert 2 * (plan.smem_bytes + CTA_SMEM_BYTES) <= plan.arch.sm_smem_bytes
    graph = sm90_gemm_graph(plan)
    assert 8 * sum(barrier.stages for barrier in graph.barriers()) <= plan.smem[0].nbytes


def test_small_store_buffers_of_8_bit_results_pay_where_a_tile_has_one_for_each_region() -> None:
    """Two layers of SigLIP with GELU to E4M3, where that took 8% and 6% less time on an H100: the model knows."""
    narrow = {"in_dtype": "float8_e4m3fn", "out_dtype": "float8_e4m3fn", "row_scale": True, "column_scale": True}
    few, all_ = (Sm90GemmConfig(128, 160, 4, 1, 1, True, stores) for stores in (2, 10))
    for size in ((1568, 3072, 768), (11664, 1152, 1152)):
        problem = GemmProblem(*size, activation="gelu_tanh", **narrow)
        plans = [make_plan(problem, config, "sm_90a") for config in (few, all_)]
        assert [plan.regions_per_tile for plan in plans] == [10, 10]
        assert 0.8 < gemm_sm90.modelled_clocks(plans[1]) / gemm_sm90.modelled_clocks(plans[0]) < 0.98


@pytest.mark.parametrize("cluster_n", [1, 2])
@pytest.mark.parametrize("tile_m", [64, 128, 256])
def test_rows_that_are_loaded_of_a_tile_that_m_does_not_fill(tile_m: int, cluster_n: int) -> None:
    """The smallest of 8, 16, 32, .. per CTA of a cluster that covers M, where that is half a tile at most."""
    legal = 0
    for m in (1, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 256):
        config = Sm90GemmConfig(tile_m, 128, cluster_m=1, cluster_n=cluster_n)
        try:
            plan = make_plan(GemmProblem(m, 4096, 4096), config)
        except ValueError:
            continue
        legal += 1
        shared = dataclasses.replace(plan, config=dataclasses.replace(plan.config, cluster_m=2))
        assert shared.loaded_rows == tile_m  # each CTA of a cluster loads a part of it
        covering = [rows for rows in (8, 16, 32, 64, 128) if rows >= m and rows >= 8 * cluster_n and 2 * rows <= tile_m]
        assert plan.loaded_rows == (covering[0] if covering else tile_m), m
        assert plan.loaded_bytes == plan.stage_bytes - (tile_m - plan.loaded_rows) * plan.k_block_bytes
    assert legal


def test_a_configuration_of_another_class_has_no_text() -> None:
    """That of a class derived from ours neither: read back, it would lose what that class adds."""

    @dataclasses.dataclass(frozen=True)
    class More(Sm90GemmConfig):
        extra: int = 1

    codec = PLANNERS["gemm"].codec
    with pytest.raises(TypeError, match="config is More: must be cute_kernels.*Sm90GemmConfig"):
        codec.encode(More(128, 128))
    assert codec.decode(codec.encode(Sm90GemmConfig(128, 128))) == Sm90GemmConfig(128, 128)
