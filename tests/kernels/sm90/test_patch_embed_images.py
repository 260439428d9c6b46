"""The SM90a kernel over images in the emulator: bit for bit against integer arithmetic, and broken on purpose."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import PatchEmbedImagesProblem, Sm90ImagesConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import Hang, ProxyFenceMissing, SharedMemoryRace
from cute_kernels.operations.runtime import emulated
from cute_kernels.plan import make_plan
from tests.emulator.cases import Case, check
from tests.emulator.image_inputs import edited, make_images_case, sums
from tests.nightly import drawn, every_other, examples

POLICIES = ("eager", "lazy", "random")
BASE = Sm90ImagesConfig(
    tile_patches=4, tile_images=4, warpgroups=2, cluster=2, stages=3, stage_blocks=1, weight="registers"
)
replace = dataclasses.replace
CONFIGS = {  # and the channels that they are compiled for
    "base": (BASE, 1),
    "whole channels": (replace(BASE, stages=2, stage_blocks=2), 3),
    "together, by image": (replace(BASE, pingpong=False, order="image"), 1),
    "1 warpgroup, 1 CTA": (replace(BASE, warpgroups=1, cluster=1, tile_patches=1, tile_images=16), 1),
    "3 warpgroups, table read": (
        replace(BASE, warpgroups=3, cluster=1, tile_patches=7, tile_images=16, stages=4, stage_blocks=2), 2,
    ),
    "256 bytes": (replace(BASE, tile_patches=16, tile_images=2, stages=4), 1),
    "streamed": (replace(BASE, stage_blocks=2, weight="streamed"), 2),
}  # fmt: skip
TABLES = {"positions": (True, True), "bias": (True, False), "none": (False, False)}


@pytest.mark.parametrize("name", every_other(CONFIGS))
def test_every_config_is_bit_exact(name: str) -> None:
    """Several tiles per cluster; images, grid rows and features end inside a tile."""
    config, channels = CONFIGS[name]
    grid = (2, config.tile_patches + 1)
    case = make_images_case(
        batch=config.tile_images + 1, channels=channels, grid=grid, n=72, config=config, sm_count=config.cluster, seed=1
    )
    assert case.plan.tiles // (case.plan.clusters // case.plan.feature_groups) >= 4
    assert case.plan.holds_table == ("table read" not in name)
    check(case, Options(completion="lazy"))


SIZES = {"n": st.integers(1, 18).map(lambda i: 8 * i), "sm_count": st.sampled_from([2, 6, 132])}
SCHEDULES = {
    "completion": st.sampled_from(POLICIES),
    "interleave": st.sampled_from(["round_robin", "random", "starve"]),
    "seed": st.integers(0, 2**20),
}

GATHERED = {  # facts of the problem, tunables, and bytes of a patch's row in memory and in shared memory
    "channels last": ({"channels_last": True}, replace(BASE, warpgroups=1, weight="streamed"), (48, 64)),
    "patches of 32": ({"patch": 32, "channels": 1}, replace(BASE, warpgroups=1, weight="streamed"), (32, 32)),
    "channels last, patches of 32": (
        {"patch": 32, "channels_last": True}, replace(BASE, warpgroups=1, stage_blocks=2, weight="streamed"), (96, 128),
    ),
    "channels last, patches of 32, shares of images": (
        {"patch": 32, "channels_last": True}, replace(BASE, warpgroups=1, weight="streamed"), (96, 128),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GATHERED)
def test_longer_rows_are_gathered(name: str) -> None:
    """Rows of 32 to 128 bytes, swizzled; images, grid rows and features end inside a tile. Between a row and what it
    takes in shared memory there are zeros in the pixels, so that no weight is multiplied there."""
    facts, config, (row, span) = GATHERED[name]
    case = make_images_case(batch=5, grid=(1, 5), n=72, config=config, sm_count=2, seed=1, **facts)
    assert (case.plan.row_bytes, case.plan.span, case.plan.config.source) == (row, span, "gather")
    check(case, Options(completion="lazy"))
    weight = case.tensors.weight.clone()
    weight.view(72, -1, span)[..., row:] = 77
    other = case.fresh()
    check(dataclasses.replace(other, tensors=other.tensors.replace(weight=weight)), Options(interleave="random"))


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(4, 60))
@given(
    name=st.sampled_from(list(GATHERED)),
    batch=st.integers(1, 9),
    grid=st.sampled_from([(1, 9), (2, 5), (1, 16), (3, 2)]),
    **SIZES,
    **SCHEDULES,
)
def test_any_gathered_images(name, completion, interleave, seed, **sizes) -> None:
    facts, config, _ = GATHERED[name]
    case = make_images_case(config=config, seed=seed, **facts, **sizes)
    check(case, Options(seed=seed, completion=completion, interleave=interleave))


# Another table is another kernel, so not every configuration has all three.
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(8, 100))
@given(
    kind=drawn(
        [*((name, "positions") for name in CONFIGS), ("256 bytes", "none")],
        [*((name, "positions") for name in CONFIGS), ("base", "bias"), ("256 bytes", "none")],
    ),
    batch=st.integers(1, 9),
    grid=st.sampled_from([(1, 24), (1, 17), (2, 9), (1, 16), (3, 5), (3, 2)]),  # some narrower than a tile
    **SIZES,
    **SCHEDULES,
)
def test_any_images_under_any_schedule(kind, grid, completion, interleave, seed, **facts) -> None:
    """Widths of 32 to 384 pixels; whole and partial tiles along grid rows and images."""
    config, channels = CONFIGS[kind[0]]
    bias, pos = TABLES[kind[1]]
    case = make_images_case(channels=channels, grid=grid, bias=bias, pos=pos, config=config, seed=seed, **facts)
    check(case, Options(seed=seed, completion=completion, interleave=interleave))


REPACKED = {  # and the channels
    "pair": (replace(BASE, tile_patches=8, tile_images=8, stages=2, stage_blocks=2), 1),
    "one CTA": (replace(BASE, tile_patches=16, tile_images=1, warpgroups=1, cluster=1, stage_blocks=2), 1),
    "pair, three strips": (replace(BASE, tile_patches=8, tile_images=8, stages=2, stage_blocks=2, raw_stages=3), 2),
    "two rounds": (replace(BASE, tile_patches=16, tile_images=9, warpgroups=1, cluster=1, stage_blocks=2), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", REPACKED)
def test_rows_of_14_bytes_are_repacked(name: str) -> None:
    """Strips end inside a tile, images too; the rows and columns that a patch of 14 lacks of 16 are zeros in the
    pixels, so that no weight is multiplied there."""
    config, channels = REPACKED[name]
    case = make_images_case(
        batch=config.tile_images + 1, channels=channels, grid=(2, 24), patch=14, n=72, config=config,
        sm_count=config.cluster, seed=1,
    )
    assert (case.plan.config.source, case.plan.operand_rows, case.plan.span) == ("repack", 16, 16)
    check(case, Options(completion="lazy", strict=True))  # the fence that covers loads of a strip
    weight = case.tensors.weight.clone().view(72, -1, 16, 16)
    weight[..., 14:, :], weight[..., 14:] = 77, 77
    other = case.fresh()
    tensors = other.tensors.replace(weight=weight.view(72, -1))
    check(dataclasses.replace(other, tensors=tensors), Options(interleave="random", seed=3))


@pytest.mark.parametrize(
    ("pattern", "error"),
    [(r"fence\.proxy\.async.*;", ProxyFenceMissing), (r"bar\.warp\.sync.*;", SharedMemoryRace)],
    ids=["proxy fence", "warp"],
)
def test_missing_synchronisation_of_repacking(pattern: str, error: type[Exception]) -> None:
    config, channels = REPACKED["pair"]
    case = make_images_case(batch=9, channels=channels, grid=(2, 8), patch=14, n=72, config=config, sm_count=2, seed=1)
    with pytest.raises(error):
        emulated.launch(case.plan, case.tensors, Options(interleave="random"), artifact=edited(case, pattern))


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(3, 60))
@given(
    name=st.sampled_from(list(REPACKED)),
    batch=st.integers(1, 9),
    grid=st.sampled_from([(1, 8), (2, 16), (3, 24), (1, 40)]),
    **SIZES,
    **SCHEDULES,
)
def test_any_repacked_images(name, completion, interleave, seed, **sizes) -> None:
    config, channels = REPACKED[name]
    case = make_images_case(config=config, channels=channels, patch=14, seed=seed, **sizes)
    check(case, Options(seed=seed, completion=completion, interleave=interleave))


def test_result_does_not_depend_on_the_schedule() -> None:
    case = make_images_case(batch=9, channels=1, grid=(2, 5), n=136, config=BASE, sm_count=2, seed=7)
    for completion, interleave in (("eager", "starve"), ("lazy", "random"), ("random", "starve")):
        options = Options(seed=3, completion=completion, interleave=interleave, spurious_try_wait_failures=True)
        check(case.fresh(), options)


@pytest.mark.parametrize("stages", [2, 5])
def test_rings_of_less_than_two_tiles(stages: int) -> None:
    """Warpgroups take turns, and a stage is free only when all of them have read it: the turn is passed on earlier."""
    config = replace(BASE, stages=stages, warpgroups=3)
    case = make_images_case(batch=8, channels=2, grid=(1, 4), n=192, config=config, sm_count=2, seed=stages)
    plan = case.plan
    assert plan.tile_stages == 4 and plan.handover_stage == max(0, stages - 3) < 3
    check(case, Options(interleave="starve"))


def test_sums_that_fp32_rounds() -> None:
    """Beyond 2^24 an FP32 number does not hold every integer: the conversion rounds to nearest, ties to even."""
    config, channels = CONFIGS["whole channels"]
    case = make_images_case(
        batch=4, channels=channels, grid=(1, 4), n=64, extreme=True, config=config, sm_count=2, seed=2
    )
    accumulators = sums(case.tensors.images, case.tensors.weight)
    assert accumulators.min() < -(2**24) and accumulators.max() > 2**24 and (accumulators % 2 == 1).any()
    check(case)


def test_default_config() -> None:
    """Three channels and a grid row of 224 pixels: the kernel of the headline, on one cluster."""
    headline = make_plan(PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768, table_rows=196), None, "sm_90a").config
    case = make_images_case(batch=9, grid=(1, 14), n=256, config=headline, sm_count=2, seed=224)
    config = case.plan.config
    assert (config.tile_patches, config.tile_images, config.warpgroups, config.cluster) == (14, 8, 2, 2)
    assert case.plan.holds_table
    check(case, Options(completion="lazy"))


def test_one_image() -> None:
    """What one image gets by itself on a whole device: tiles of 16 patches, wider than its grid row, and no pass."""
    one = make_plan(PatchEmbedImagesProblem(1, 3, 224, 224, 16, 768, table_rows=196), None, "sm_90a").config
    assert (one.tile_patches, one.tile_images, one.weight) == (16, 1, "streamed")
    check(make_images_case(batch=1, grid=(3, 14), n=128, config=one, seed=3), Options(completion="lazy"))


def test_counts() -> None:
    """What the emulator counts is what the plan says: a wgmma per K step, warpgroup and tile."""
    case = make_images_case(batch=8, channels=1, grid=(2, 4), n=256, config=BASE, sm_count=2, seed=2)
    report = emulated.launch(case.plan, case.tensors)
    assert report.mma_instructions == case.plan.tiles * 4 * case.plan.k_blocks * 4
    assert report.by_role["idle"] < report.by_role["load"] < report.by_role["mma"]


# --- broken on purpose ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs() -> Case:
    return make_images_case(batch=9, channels=1, grid=(2, 5), n=136, config=BASE, sm_count=2, seed=7)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [(r"\.s32\.s8\.u8", ".s32.s8.s8"), (r"cvt\.rn\.f32\.s32", "cvt.rn.f32.u32"), (r"ld\.global\.v4\.\w+.*;", "")],
    ids=["signed pixels", "unsigned sums", "no table"],
)
def test_wrong_arithmetic_gives_wrong_results(inputs: Case, pattern: str, replacement: str) -> None:
    case = inputs.fresh()
    emulated.launch(case.plan, case.tensors, artifact=edited(case, pattern, replacement))
    assert case.mismatches().float().mean() > 0.4


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        (r"fence\.proxy\.async.*;", ProxyFenceMissing, r"\(mma\)"),
        (r"mbarrier\.arrive\.shared::cluster\.b64.*;", Hang, r"\(load\) waits for parity"),
        (r"bar\.arrive.*;", Hang, r"\(mma\) waits at named barrier \d+ of CTA \d"),
        (r"wgmma\.wait_group\.sync\.aligned\s+1;", SharedMemoryRace, r"wgmma\.mma_async"),
        (r"bar\.sync.*;", SharedMemoryRace, r"TMA store .* reads"),
    ],
)
def test_missing_synchronisation(inputs: Case, pattern: str, error: type[Exception], message: str) -> None:
    case = inputs.fresh()
    with pytest.raises(error, match=message):
        emulated.launch(
            case.plan, case.tensors, Options(interleave="random"), artifact=edited(case, pattern)
        )
