"""The kernels over images with weights of two terms: bit for bit against integer arithmetic, and broken on purpose."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import Sm90ImagesConfig, Sm100ImagesConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import SharedMemoryRace
from cute_kernels.operations.compile import compile_plan
from cute_kernels.operations.runtime import emulated
from tests.emulator.cases import Case, check
from tests.emulator.image_inputs import edited, make_images_case, sums
from tests.nightly import by_day, examples, nightly

BASE = Sm90ImagesConfig(tile_patches=4, tile_images=4, warpgroups=2, cluster=2, stages=3, stage_blocks=1)
HEADLINE = Sm90ImagesConfig(tile_patches=14, tile_images=8, warpgroups=2, cluster=1, stages=6, stage_blocks=1)
replace = dataclasses.replace
CONFIGS = {  # and channels, K blocks in registers and in shared memory
    "base": (BASE, 1, 2, 2),
    "both terms in shared memory": (HEADLINE, 3, 5, 7),
    "together, by image": (replace(BASE, stages=2, stage_blocks=2, pingpong=False, order="image"), 2, 4, 4),
    "nothing in registers": (
        replace(BASE, tile_patches=13, tile_images=16, warpgroups=1, cluster=1), 1, 0, 4,
    ),
    "3 warpgroups": (
        replace(BASE, tile_patches=6, tile_images=16, warpgroups=3, cluster=1), 2, 2, 6,
    ),
}  # fmt: skip
DAILY = ("base", "both terms in shared memory")

PAIR = Sm100ImagesConfig(
    tile_patches=4, tile_images=16, cta_group=2, accumulators=1, mma_columns=32, stages=3, stage_blocks=1
)
ONE_CTA = replace(PAIR, tile_images=8, cta_group=1, accumulators=2)
SM100_CONFIGS = {  # and channels
    "pair": (PAIR, 1),
    "one CTA": (ONE_CTA, 2),
    "wide loads, by image": (replace(ONE_CTA, tmem_load_width=32, stage_blocks=2, order="image"), 1),
    "14 patches": (replace(PAIR, tile_patches=14, mma_columns=128, stages=6), 3),
}


def two_terms(**facts) -> Case:
    return make_images_case(precision="int16", **facts)


@pytest.mark.parametrize("name", by_day(CONFIGS, DAILY))
def test_every_config_is_bit_exact_without_spills(name: str) -> None:
    """Several tiles per cluster; images, grid rows and features end inside a tile."""
    config, channels, held, shared = CONFIGS[name]
    grid = (1 if config == HEADLINE else 2, config.tile_patches + 1)
    case = two_terms(
        batch=config.tile_images + 1, channels=channels, grid=grid, n=72, config=config, sm_count=config.cluster, seed=1
    )
    plan = case.plan
    assert (plan.held_blocks, plan.shared_blocks) == (held, shared)
    assert plan.tiles // (plan.clusters // plan.feature_groups) >= 4
    check(case, Options(completion="lazy"))
    resources = compile_plan(plan, emulated=True).resources
    assert resources.stack_bytes == resources.local_bytes == 0
    assert resources.registers <= plan.entry_registers


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(5, 80))
@given(
    name=st.sampled_from([*CONFIGS] if examples(0, 1) else ["base"]),
    batch=st.integers(1, 9),
    grid=st.sampled_from([(1, 17), (2, 9), (1, 16), (3, 5), (3, 2)]),
    n=st.integers(1, 18).map(lambda i: 8 * i),
    sm_count=st.sampled_from([2, 6, 132]),
    completion=st.sampled_from(["eager", "lazy", "random"]),
    interleave=st.sampled_from(["round_robin", "random", "starve"]),
    seed=st.integers(0, 2**20),
)
def test_any_images_under_any_schedule(name, grid, completion, interleave, seed, **facts) -> None:
    config, channels, _, _ = CONFIGS[name]
    grid = (grid[0], max(grid[1], config.tile_patches))
    case = two_terms(channels=channels, grid=grid, config=config, seed=seed, **facts)
    check(case, Options(seed=seed, completion=completion, interleave=interleave))


def test_sums_that_fp32_rounds() -> None:
    """The high term's sums pass 2^24: each sum is rounded to FP32, then the fma rounds, then scale and table."""
    config, channels, _, _ = CONFIGS["both terms in shared memory"]
    case = two_terms(batch=8, channels=channels, grid=(1, 14), n=64, extreme=True, config=config, sm_count=1, seed=2)
    high, low = (sums(case.tensors.images, getattr(case.tensors, name)) for name in ("weight", "weight_low"))
    assert high.abs().max() > 2**24 and (high % 2 == 1).any()
    assert (high.float() * 256 + low.float() != (256 * high + low).float()).any()
    check(case)


@pytest.mark.parametrize("name", by_day(SM100_CONFIGS, ["pair"]))
def test_every_sm100_config_is_bit_exact_without_spills(name: str) -> None:
    """A CTA has 64 features, both terms of 16 in the lanes of each epilogue warp; features end inside a warp's."""
    config, channels = SM100_CONFIGS[name]
    grid = (2, config.tile_patches + 1)
    case = two_terms(
        batch=config.tile_images + 1, channels=channels, grid=grid, n=72, config=config, arch="sm_100a",
        sm_count=config.cta_group, seed=1,
    )  # fmt: skip
    assert (case.plan.features, case.plan.warp_features) == (64, 16)
    check(case, Options(completion="lazy"))
    resources = compile_plan(case.plan, emulated=True).resources
    assert resources.stack_bytes == resources.local_bytes == 0 and resources.registers <= 255


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(4, 80))
@given(
    name=st.sampled_from([*SM100_CONFIGS] if examples(0, 1) else ["pair"]),
    batch=st.integers(1, 20),
    grid=st.sampled_from([(1, 17), (2, 9), (3, 5), (3, 2)]),
    n=st.integers(1, 18).map(lambda i: 8 * i),
    sm_count=st.sampled_from([2, 6, 148]),
    completion=st.sampled_from(["eager", "lazy", "random"]),
    interleave=st.sampled_from(["round_robin", "random", "starve"]),
    extreme=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_images_on_sm100(name, completion, interleave, seed, **facts) -> None:
    config, channels = SM100_CONFIGS[name]
    case = two_terms(channels=channels, config=config, arch="sm_100a", seed=seed, **facts)
    check(case, Options(seed=seed, completion=completion, interleave=interleave))


@pytest.mark.parametrize("stages", [2, pytest.param(5, marks=nightly)])
def test_warpgroups_are_half_a_tile_apart(stages: int) -> None:
    """A ring as short as a tile is read by one warpgroup while the other one is half a tile behind, whatever runs."""
    case = two_terms(
        batch=8, channels=2, grid=(1, 4), n=128, config=replace(BASE, stages=stages, cluster=1), sm_count=1, seed=stages
    )
    assert case.plan.tile_stages == 4 and case.plan.handover_stage == stages // 2
    check(case, Options(interleave="starve"))


def test_counts() -> None:
    """What the emulator counts is what the plan says: two wgmmas per K step, warpgroup and tile."""
    case = two_terms(batch=8, channels=1, grid=(2, 4), n=256, config=BASE, sm_count=2, seed=2)
    report = emulated.launch(case.plan, case.tensors)
    assert report.mma_instructions == case.plan.tiles * 4 * case.plan.k_blocks * 4 * 2


# --- broken on purpose ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs() -> Case:
    return two_terms(batch=9, channels=1, grid=(2, 5), n=136, config=BASE, sm_count=2, seed=7)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [(r"\.s32\.s8\.u8", ".s32.s8.s8"), (r", 1132462080;", ", 1124073472;")],
    ids=["signed pixels", "128 for 256"],
)
def test_wrong_arithmetic_gives_wrong_results(inputs: Case, pattern: str, replacement: str) -> None:
    case = inputs.fresh()
    emulated.launch(case.plan, case.tensors, artifact=edited(case, pattern, replacement))
    assert case.mismatches().float().mean() > 0.4


def test_products_wait_for_the_weight(inputs: Case) -> None:
    """That wait alone, of the first phase, orders TMA's writes of the weight before the WGMMAs that read it."""
    case = inputs.fresh()
    wait = r"mbarrier\.try_wait\.parity\.shared\.b64\s+(\S+), \[[^]]+\], 0, \d+;"
    with pytest.raises(SharedMemoryRace, match=r"wgmma\.mma_async"):
        emulated.launch(case.plan, case.tensors, artifact=edited(case, wait, r"setp.eq.u32 \1, 0, 0;"))
