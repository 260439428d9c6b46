"""The SM90a kernel in the emulator: bit for bit against the torch reference of its contract, and broken on purpose."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import Sm90PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import (
    BarrierMisuse,
    EmulatorError,
    Hang,
    IllegalAccess,
    ProxyFenceMissing,
    SharedMemoryRace,
    UnsupportedPTX,
)
from cute_kernels.operations.compile import Artifact, compile_plan
from tests.emulator.cases import Case, check
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case
from tests.nightly import by_day, drawn, every_other, examples, nightly

POLICIES = ("eager", "lazy", "random")
BASE = Sm90PatchEmbedConfig(tile_rows=64, stages=3, stage_blocks=1)
CONFIGS = {
    "base": BASE,
    "streamed": dataclasses.replace(BASE, weight="streamed"),
    "flat": dataclasses.replace(BASE, order="flat"),
    "streamed, flat, bf16x2": dataclasses.replace(BASE, weight="streamed", order="flat", epilogue="bf16x2"),
    "bf16x2": dataclasses.replace(BASE, epilogue="bf16x2"),
    "1 warpgroup, 1 CTA": dataclasses.replace(BASE, warpgroups=1, cluster=1, pingpong=False),
    "3 warpgroups": dataclasses.replace(BASE, warpgroups=3, tile_rows=32, stages=8),
    "3 warpgroups, streamed, together": dataclasses.replace(BASE, warpgroups=3, weight="streamed", pingpong=False),
    "together": dataclasses.replace(BASE, pingpong=False),
    "2 stages": dataclasses.replace(BASE, stages=2),
    "stages of 2 blocks": dataclasses.replace(BASE, stages=4, stage_blocks=2),
    "stages of 2 blocks, streamed": dataclasses.replace(BASE, stage_blocks=2, weight="streamed"),
    "16 rows": dataclasses.replace(BASE, tile_rows=16, stages=12),
    "48 rows, 1 CTA": dataclasses.replace(BASE, tile_rows=48, cluster=1),
    "192 rows": dataclasses.replace(BASE, tile_rows=192, warpgroups=1, stages=2),
}


DAILY = (
    "base", "streamed, flat, bf16x2", "3 warpgroups", "1 warpgroup, 1 CTA", "stages of 2 blocks",
)  # fmt: skip
"""What differs in kind; the others run by night."""


@pytest.mark.parametrize("name", by_day(CONFIGS, DAILY))
def test_every_config_is_bit_exact(name: str) -> None:
    """Several tiles per cluster, so that stages and staging are used again; rows, N and K end inside a tile."""
    config = CONFIGS[name]
    images = config.tile_rows + 9
    case = make_case(batch=images, positions=3, n=200, k=272, config=config, sm_count=config.cluster, seed=1)
    assert case.plan.tiles >= 3
    check(case, Options(completion="lazy"))


SEVERAL_POSITIONS = {
    "8 images x 8": dataclasses.replace(BASE, tile_positions=8),
    "8 images x 8, streamed, together": dataclasses.replace(BASE, tile_positions=8, weight="streamed", pingpong=False),
    "32 images x 2, streamed, bf16x2": dataclasses.replace(
        BASE, tile_positions=2, weight="streamed", epilogue="bf16x2"
    ),
    "16 images x 3, 1 CTA": dataclasses.replace(BASE, tile_rows=48, tile_positions=3, cluster=1),
    "8 images x 16": Sm90PatchEmbedConfig(tile_positions=16, stages=3, weight="streamed"),
}
DAILY_POSITIONS = "8 images x 8", "32 images x 2, streamed, bf16x2", "16 images x 3, 1 CTA"


@pytest.mark.parametrize("images", [pytest.param(3, marks=nightly), 40])
@pytest.mark.parametrize("name", by_day(SEVERAL_POSITIONS, DAILY_POSITIONS))
def test_tiles_of_several_positions(name: str, images: int) -> None:
    """Images and positions end inside a tile, several tiles per cluster."""
    config = SEVERAL_POSITIONS[name]
    positions = config.tile_positions * 2 + 1
    case = make_case(batch=images, positions=positions, n=200, k=272, config=config, sm_count=config.cluster, seed=4)
    assert case.plan.tiles >= 3 and case.plan.prefetches_table
    check(case, Options(completion="lazy"))


def test_tiles_of_several_positions_whose_table_values_find_no_registers() -> None:
    config = Sm90PatchEmbedConfig(tile_rows=64, warpgroups=3, stages=4, tile_positions=8)
    case = make_case(batch=9, positions=17, n=264, k=768, config=config, sm_count=4, seed=5)
    assert not case.plan.prefetches_table
    check(case, Options(completion="random"))


ROW_WISE = {
    "rows, position order": (CONFIGS["base"], {"row_scale": True}),
    "rows and features, several positions": (
        SEVERAL_POSITIONS["8 images x 8"], {"row_scale": True, "feature_scale": True}
    ),
    "rows and features, flat, bf16x2": (
        CONFIGS["streamed, flat, bf16x2"], {"row_scale": True, "feature_scale": True}
    ),
    "features, one number in memory": (CONFIGS["3 warpgroups"], {"feature_scale": True, "scale_in_memory": True}),
    "rows, one number in memory, no table": (
        CONFIGS["16 rows"], {"row_scale": True, "scale_in_memory": True, "bias": False, "pos": False}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", every_other(ROW_WISE))
def test_scales_of_rows_and_features(name: str) -> None:
    """Rows, positions and features end inside a tile, beyond which no factor is there to be read."""
    config, facts = ROW_WISE[name]
    case = make_case(batch=19, positions=17, n=200, k=144, config=config, sm_count=config.cluster, seed=8, **facts)
    check(case, Options(completion="lazy"))


OTHER_ROWS = {
    "uint8, resident": (CONFIGS["base"], {"dtype": "uint8", "feature_scale": True, "scale": 1e-5}),
    "int8, streamed, flat, bf16x2": (
        CONFIGS["streamed, flat, bf16x2"],
        {"dtype": "int8", "row_scale": True, "feature_scale": True, "k": 1040},
    ),
    "uint8, sums beyond 24 bits": (CONFIGS["streamed"], {"dtype": "uint8", "scale": 1e-6, "k": 1040}),
    "bfloat16, resident": (CONFIGS["16 rows"], {"dtype": "bfloat16", "scale": 1.0, "k": 136}),
    "float16, streamed": (CONFIGS["stages of 2 blocks, streamed"], {"dtype": "float16", "scale": 1.0, "k": 200}),
}
"""K ends inside a block of 128 bytes."""


@pytest.mark.parametrize("name", every_other(OTHER_ROWS))
def test_rows_of_other_types(name: str) -> None:
    config, facts = OTHER_ROWS[name]
    facts = {"k": 272} | facts
    case = make_case(batch=21, positions=5, n=136, config=config, sm_count=config.cluster, seed=9, **facts)
    if "24 bits" in name:
        sums = case.tensors.x.double() @ case.tensors.weight.double().T
        assert (sums.to(torch.float32).double() != sums).any()
    check(case, Options(completion="lazy"))


def test_factors_of_rows_that_find_no_registers() -> None:
    config = Sm90PatchEmbedConfig(tile_rows=64, warpgroups=3, stages=4)
    case = make_case(batch=66, positions=3, n=200, k=640, config=config, sm_count=2, seed=5, row_scale=True)
    assert not case.plan.prefetches_rows and case.plan.config.order == "position"
    check(case)


@settings(max_examples=examples(5, 200), suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 70),
    positions=st.integers(16, 40),
    n=st.integers(1, 32).map(lambda i: 8 * i),
    k=drawn([272], [16, 128, 272]),
    bias=st.booleans(),
    config=drawn(map(SEVERAL_POSITIONS.get, DAILY_POSITIONS), SEVERAL_POSITIONS.values()),
    sm_count=st.sampled_from([2, 4, 132]),
    completion=st.sampled_from(POLICIES),
    interleave=st.sampled_from(["round_robin", "random"]),
    seed=st.integers(0, 2**20),
)
def test_several_positions_under_any_schedule(completion, interleave, seed, **facts) -> None:
    check(make_case(seed=seed, **facts), Options(seed=seed, completion=completion, interleave=interleave))


@settings(max_examples=examples(5, 200), suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 150),
    positions=st.integers(1, 6),
    n=st.integers(1, 48).map(lambda i: 8 * i),
    k=drawn([272, 304, 384], [16, 96, 128, 272, 384]),
    bias=st.booleans(),
    pos=drawn([True], [True, False]),
    scale=st.sampled_from([1.0, 0.37, 3e-5, 1e4]),
    scale_in_memory=drawn([False], [True, False]),
    row_scale=drawn([False], [True, False]),
    feature_scale=drawn([False], [True, False]),
    config=drawn(map(CONFIGS.get, DAILY), CONFIGS.values()),
    sm_count=st.sampled_from([2, 4, 132]),
    completion=st.sampled_from(POLICIES),
    interleave=st.sampled_from(["round_robin", "random"]),
    seed=st.integers(0, 2**20),
)
def test_any_problem_under_any_schedule(completion, interleave, seed, **facts) -> None:
    check(make_case(seed=seed, **facts), Options(seed=seed, completion=completion, interleave=interleave))


@pytest.mark.parametrize("weight", ["registers", "streamed"])
def test_result_does_not_depend_on_the_schedule(weight: str) -> None:
    config = dataclasses.replace(BASE, weight=weight)
    for completion in POLICIES:
        for seed in range(2):
            case = make_case(batch=70, positions=2, n=136, k=272, config=config, sm_count=2, seed=7)
            options = Options(
                seed=seed, completion=completion, interleave="random", spurious_try_wait_failures=bool(seed)
            )
            check(case, options)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Sm90PatchEmbedConfig(), id="default", marks=nightly),
        pytest.param(Sm90PatchEmbedConfig(weight="streamed", epilogue="bf16x2"), id="prefetched, bf16x2"),
        pytest.param(Sm90PatchEmbedConfig(tile_rows=16, cluster=1), id="16 rows"),
    ],
)
@pytest.mark.parametrize("positions", [1, 7, pytest.param(200, marks=nightly)])
def test_every_row_may_choose_its_position(config: Sm90PatchEmbedConfig, positions: int) -> None:
    """A number that is no position gives NaN, and M ends inside a tile, beyond which the index may not be read."""
    case = make_case(batch=33, positions=positions, n=200, k=144, indexed=True, config=config, sm_count=4, seed=3)
    assert case.plan.config.order == "flat" and case.expected.isnan().any()
    check(case, Options(completion="random"))


@pytest.mark.parametrize("tile_rows", [32, pytest.param(96, marks=nightly)])
def test_flat_tiles_larger_and_smaller_than_the_table(tile_rows: int) -> None:
    """A table of fewer rows than a tile needs a division per row, a longer one wraps at most once."""
    for positions in (5, tile_rows - 1, tile_rows, tile_rows + 3):
        config = Sm90PatchEmbedConfig(tile_rows=tile_rows, order="flat", cluster=1)
        case = make_case(batch=2 + 300 // positions, positions=positions, n=136, k=128, config=config, sm_count=3)
        assert case.plan.table_wraps_once == (positions >= tile_rows)
        check(case)


def test_model_width_with_the_default_config() -> None:
    """768 features from 768 inputs, 64 images at 2 positions."""
    check(make_case(batch=64, positions=2, n=768, k=768, config=Sm90PatchEmbedConfig(), sm_count=12, seed=768))


def test_counts() -> None:
    """What the emulator counts is what the plan says: a wgmma per K step, warpgroup and tile."""
    case = make_case(batch=64, positions=2, n=256, k=384, config=BASE, sm_count=2, seed=2)
    report = emulate(case.plan, case.tensors)
    plan = case.plan
    ctas = plan.clusters * plan.config.cluster
    assert plan.tiles % (plan.clusters // plan.feature_groups) == 0
    tiles_per_cta = plan.tiles // (plan.clusters // plan.feature_groups)
    assert report.mma_instructions == ctas * plan.config.warpgroups * tiles_per_cta * plan.k_blocks * 4
    assert report.by_role["idle"] < report.by_role["load"] < report.by_role["mma"]


# --- broken on purpose ----------------------------------------------------------------------------------------------


def _case(weight: str = "registers") -> Case:
    """Four tiles of five K blocks through three stages: stages are refilled in the middle of a tile."""
    config = dataclasses.replace(BASE, weight=weight)
    return make_case(batch=64, positions=4, n=256, k=640, config=config, sm_count=2, seed=11)


def _edited(case: Case, pattern: str, replacement: str = "") -> Artifact:
    """The kernel of a case with every match of a pattern replaced."""
    artifact = compile_plan(case.plan, emulated=True)
    ptx, count = re.subn(pattern, replacement, artifact.ptx)
    assert count, f"nothing matches {pattern}"
    return dataclasses.replace(artifact, ptx=ptx)


@pytest.mark.parametrize("weight", ["registers", "streamed"])
@pytest.mark.parametrize("completion", POLICIES)
def test_the_whole_kernel_is_clean(weight: str, completion: str) -> None:
    check(_case(weight), Options(completion=completion, interleave="random"))


@pytest.mark.parametrize("completion", POLICIES)
def test_missing_proxy_fence_before_the_tma_store(completion: str) -> None:
    case = _case()
    with pytest.raises(ProxyFenceMissing, match=r"\(mma\)"):
        artifact = _edited(case, r"fence\.proxy\.async.*;")
        emulate(case.plan, case.tensors, Options(completion=completion), artifact=artifact)


def test_stages_that_are_never_released_hang() -> None:
    """The producer waits for an empty stage, the consumers for a full one; the report names both and the barriers."""
    case = _case()
    artifact = _edited(case, r"mbarrier\.arrive\.shared::cluster\.b64.*;")
    with pytest.raises(Hang) as error:
        emulate(case.plan, case.tensors, artifact=artifact)
    report = error.value.report
    loads = [line for line in report.splitlines() if re.match(r"CTA [01] warp 8 \(load\) waits for parity", line)]
    assert len(loads) == 2
    arrivals = case.plan.config.cluster * case.plan.config.warpgroups
    assert all(f"{arrivals} of {arrivals} arrivals pending" in line for line in loads)
    assert all("mbarrier.try_wait" in line and ".py:" in line for line in loads)
    assert re.search(r"warp \d \(mma\) waits for", report)


def test_missing_turn_hangs_at_the_named_barrier() -> None:
    case = _case()
    with pytest.raises(Hang) as error:
        emulate(case.plan, case.tensors, artifact=_edited(case, r"bar\.arrive.*;"))
    assert re.search(r"\(mma\) waits at named barrier \d+ of CTA 0: 128 of 256 threads arrived", error.value.report)


@pytest.mark.parametrize("weight", ["registers", "streamed"])
@pytest.mark.parametrize("completion", POLICIES)
def test_a_stage_released_before_its_wgmmas_have_read_it(weight: str, completion: str) -> None:
    """Without the wait for all but the newest group, TMA refills a stage that a wgmma may still have to read."""
    case = _case(weight)
    artifact = _edited(case, r"wgmma\.wait_group\.sync\.aligned\s+1;")
    with pytest.raises(SharedMemoryRace, match=r"wgmma\.mma_async"):
        emulate(case.plan, case.tensors, Options(completion=completion), artifact=artifact)


@pytest.mark.parametrize("weight", ["registers", "streamed"])
def test_a_stage_released_too_early_gives_wrong_results(weight: str) -> None:
    """Detectors off: under lazy completion the wgmmas read what TMA has put into their stage since."""
    case = _case(weight)
    artifact = _edited(case, r"wgmma\.wait_group\.sync\.aligned\s+1;")
    emulate(case.plan, case.tensors, Options(completion="lazy", detectors=False), artifact=artifact)
    assert case.mismatches().float().mean() > 0.5
    emulate(case.plan, case.tensors, Options(completion="eager", detectors=False), artifact=artifact)
    assert not case.mismatches().any()  # a schedule that completes everything at once hides the fault


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"wgmma\.fence\.sync\.aligned;", r"without any wgmma\.fence"),
        (r"wgmma\.wait_group\.sync\.aligned\s+0;", "is an accumulator of the wgmma"),
        (r"wgmma\.commit_group\.sync\.aligned;", "is an accumulator of the wgmma"),
    ],
)
def test_missing_ordering_of_registers(pattern: str, message: str) -> None:
    case = _case()
    with pytest.raises(IllegalAccess, match=message):
        emulate(case.plan, case.tensors, artifact=_edited(case, pattern))


@pytest.mark.parametrize("count", [0, 16, 44, 264])
def test_illegal_register_counts(count: int) -> None:
    case = _case()
    with pytest.raises(UnsupportedPTX, match=f"{count} registers"):
        emulate(case.plan, case.tensors, artifact=_edited(case, r"(setmaxnreg\.dec\S+\s+)\d+", rf"\g<1>{count}"))


@pytest.mark.parametrize("weight", ["registers", "streamed"])
def test_a_stage_read_without_waiting_for_it(weight: str) -> None:
    """Everything completes at once and the load warp runs first: results would be right; the missing wait is found."""
    case = _case(weight)
    artifact = compile_plan(case.plan, emulated=True)
    text = artifact.ptx
    at = text.rindex("mbarrier.try_wait", 0, text.index("wgmma.mma_async"))
    wait = text[at : text.index(";", at) + 1]
    flag = re.search(r"\s(\S+),", wait)[1]
    changed = dataclasses.replace(artifact, ptx=text.replace(wait, f"setp.eq.u32 {flag}, 0, 0;"))
    with pytest.raises((SharedMemoryRace, BarrierMisuse), match=r"wgmma\.mma_async.* reads .* which the TMA load"):
        emulate(case.plan, case.tensors, artifact=changed)


def test_writing_staging_before_tma_has_read_it() -> None:
    case = _case()
    artifact = _edited(case, r"cp\.async\.bulk\.wait_group\.read.*;")
    with pytest.raises((SharedMemoryRace, IllegalAccess), match="store|read"):
        emulate(case.plan, case.tensors, Options(completion="lazy"), artifact=artifact)


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        (
            r"mbarrier\.arrive\.expect_tx.*;",
            Hang,
            r"\(mma\) waits for parity 0 .* 1 of 1 arrivals pending, -8192 transaction bytes pending",
        ),
        (
            r"cp\.async\.bulk\.tensor\.3d\.shared::cluster.*;",
            Hang,
            r"\(mma\) waits for parity 0 .* 0 of 1 arrivals pending, 8192 transaction bytes pending",
        ),
        (r"barrier\.cluster\.arrive.*;", BarrierMisuse, r"barrier\.cluster\.wait without barrier\.cluster\.arrive"),
        (r"bar\.sync.*;", SharedMemoryRace, r"TMA store .* reads .* which the store of CTA \d warp \d \(mma\) wrote"),
    ],
)
def test_other_missing_signals(pattern: str, error: type[EmulatorError], message: str) -> None:
    case = _case()
    with pytest.raises(error, match=message):
        emulate(case.plan, case.tensors, Options(interleave="random"), artifact=_edited(case, pattern))
