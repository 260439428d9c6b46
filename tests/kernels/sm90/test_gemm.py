"""The dense GEMM of SM90a in the emulator: bit for bit against the torch reference, and broken on purpose."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import Sm90GemmConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import Hang, IllegalAccess, SharedMemoryRace
from cute_kernels.operations.compile import Artifact, compile_plan
from tests.emulator.cases import Case, check
from tests.emulator.exact_sums import emulate
from tests.emulator.gemm_inputs import columns, make_gemm_case
from tests.nightly import by_day, drawn, examples, nightly

POLICIES = ("eager", "lazy", "random")
TOGETHER = Sm90GemmConfig(128, 64, stages=3, store_stages=1)
IN_TURN = Sm90GemmConfig(64, 64, stages=3, pingpong=True, store_stages=1)
SPLIT = dataclasses.replace(TOGETHER, cluster_m=1, split_k=2)
ONE = Sm90GemmConfig(64, 64, stages=3, cluster_m=1, store_stages=1)
TRANSPOSED = dataclasses.replace(TOGETHER, tile_n=48, transposed=True)
CONFIGS = {
    "128 x 256 cooperative": Sm90GemmConfig(),
    "256 x 128 cooperative": Sm90GemmConfig(256, 128),
    "256 x 192 cooperative, 1 x 2": Sm90GemmConfig(256, 192, stages=3, cluster_m=1, cluster_n=2),
    "128 x 192 pingpong": Sm90GemmConfig(128, 192, pingpong=True),
    "64 x 256 pingpong": Sm90GemmConfig(64, 256, pingpong=True),
    "128 x 96 cooperative": Sm90GemmConfig(128, 96, stages=3, store_stages=3),
    "64 x 160 pingpong, 1 x 2": Sm90GemmConfig(64, 160, 3, 1, 2, pingpong=True, store_stages=5),
    "192 x 48 pingpong": Sm90GemmConfig(192, 48, stages=3, pingpong=True, store_stages=3),
    "cooperative, 1 x 2": dataclasses.replace(TOGETHER, cluster_m=1, cluster_n=2),
    "cooperative, 2 x 2": dataclasses.replace(TOGETHER, cluster_n=2, group_m=1),
    "pingpong, 1 CTA": dataclasses.replace(IN_TURN, cluster_m=1, stages=2),
    "pingpong, 2 x 2": dataclasses.replace(IN_TURN, cluster_n=2, group_m=3),
    "pingpong, 4 x 1": dataclasses.replace(IN_TURN, cluster_m=4),
    "split of 2, 1 x 1": SPLIT,
    "split of 2, 1 x 2": dataclasses.replace(SPLIT, cluster_n=2),
    "split of 4, 2 x 1": dataclasses.replace(SPLIT, cluster_m=2, split_k=4),
    "split of 8, 1 x 1": dataclasses.replace(SPLIT, split_k=8, stages=2),
    "one warpgroup": ONE,
    "one warpgroup, split of 4": dataclasses.replace(ONE, split_k=4),
    "transposed, cooperative": TRANSPOSED,
    "transposed, pingpong, 160 x 128": Sm90GemmConfig(128, 160, 4, 1, 1, True, 2, transposed=True),
    "transposed, pingpong, 192 x 128": Sm90GemmConfig(128, 192, 4, 1, 1, True, 2, transposed=True),
    "transposed, pingpong, 1 x 4": Sm90GemmConfig(64, 96, 2, 1, 4, True, 2, transposed=True),
    "transposed, 112 x 256": Sm90GemmConfig(256, 112, 4, 1, 1, store_stages=2, transposed=True),
    "transposed, one warpgroup, split of 2": dataclasses.replace(ONE, tile_n=16, split_k=2, transposed=True),
    "transposed, one warpgroup, split of 4": dataclasses.replace(ONE, tile_n=32, split_k=4, transposed=True),
}
IN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


DAILY = (
    "64 x 256 pingpong", "128 x 96 cooperative", "192 x 48 pingpong", "cooperative, 2 x 2", "pingpong, 2 x 2",
    "split of 2, 1 x 2", "one warpgroup, split of 4", "transposed, cooperative", "transposed, pingpong, 1 x 4",
    "transposed, one warpgroup, split of 2",
)  # fmt: skip


@pytest.mark.parametrize("name", by_day(CONFIGS, DAILY))
def test_every_config_is_bit_exact_without_spills(name: str) -> None:
    """Several tiles of one cluster, an odd number of stages in each; rows, columns and K end inside a tile."""
    config = CONFIGS[name]
    rows, columns = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n
    if config.transposed:
        rows, columns = columns, rows
    sm_count = config.cluster_m * config.cluster_n * config.split_k
    others = {"out_dtype": torch.float32} if "1 x 2" in name or "1 CTA" in name else {}
    if name == "64 x 256 pingpong":
        others = {"in_dtype": torch.float16, "out_dtype": torch.float16, "bias": False}
    # With a split, slices of two and of three stages.
    k = 72 if config.split_k == 1 else 128 * config.split_k + 8
    m, n = rows + min(17, rows), columns + min(25, columns)
    case = make_gemm_case(m=m, n=n, k=k, config=config, sm_count=sm_count, seed=1, **others)
    assert case.plan.tiles == 4 and case.plan.clusters == 1
    check(case, Options(completion="lazy"))
    resources = compile_plan(case.plan, emulated=True).resources
    assert resources.stack_bytes == 0 and resources.local_bytes == 0


@settings(max_examples=examples(6, 100), suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 400),
    n=columns(200),
    k=st.integers(1, 30).map(lambda i: 8 * i),
    batches=st.integers(1, 2),
    types=drawn([(torch.bfloat16, torch.bfloat16)], itertools.product(IN_DTYPES, OUT_DTYPES)),
    bias=drawn([True], [True, False]),
    config=st.sampled_from([TOGETHER, IN_TURN]),
    sm_count=st.sampled_from([2, 4, 132]),
    completion=st.sampled_from(POLICIES),
    interleave=st.sampled_from(["round_robin", "random"]),
    seed=st.integers(0, 2**20),
)
def test_any_problem_under_any_schedule(types, completion, interleave, seed, **facts) -> None:
    case = make_gemm_case(in_dtype=types[0], out_dtype=types[1], seed=seed, **facts)
    check(case, Options(seed=seed, completion=completion, interleave=interleave))


@settings(max_examples=examples(4, 100), suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 300),
    n=columns(150),
    k=st.integers(9, 50).map(lambda i: 8 * i),
    bias=drawn([True], [True, False]),
    out_dtype=drawn([torch.bfloat16], OUT_DTYPES),
    sm_count=st.sampled_from([2, 4, 132]),
    completion=st.sampled_from(POLICIES),
    seed=st.integers(0, 2**20),
)
def test_any_problem_split_along_k(completion, seed, **facts) -> None:
    """Sums of the slices in the order of the contract; random data, of which no other order gives the same bits."""
    check(make_gemm_case(seed=seed, config=SPLIT, **facts), Options(seed, completion, "random"))


@pytest.mark.parametrize(
    ("m", "batches", "config", "loaded"),
    [
        (16, 1, SPLIT, 16),
        (3, 2, dataclasses.replace(IN_TURN, cluster_m=1, cluster_n=2), 16),
        pytest.param(33, 1, dataclasses.replace(SPLIT, tile_n=128, stages=2), 64, marks=nightly),
    ],
)
def test_of_few_rows_only_those_are_loaded(m: int, batches: int, config: Sm90GemmConfig, loaded: int) -> None:
    """The rest of a tile is cleared and never loaded: stages are used again, and all tiles of a batch are right."""
    case = make_gemm_case(m=m, n=200, k=1032, batches=batches, config=config, sm_count=4, seed=11)
    assert case.plan.loaded_rows == loaded and case.plan.k_blocks > 2 * config.stages
    check(case, Options(completion="random", interleave="random"))


def test_tiles_that_are_filled_by_more_than_half_are_loaded_whole() -> None:
    for m, config in ((65, SPLIT), (33, IN_TURN), (5, TOGETHER)):
        assert make_gemm_case(m=m, n=64, k=128, config=config).plan.loaded_rows == config.tile_m


def test_a_split_changes_the_order_of_the_additions() -> None:
    """The reference that the split is compared with is not that of a kernel without one."""
    facts = {"m": 128, "n": 64, "k": 512, "out_dtype": torch.float32, "seed": 4}
    expected = [
        make_gemm_case(config=dataclasses.replace(SPLIT, split_k=slices), **facts).expected for slices in (1, 2, 4, 8)
    ]
    assert all(not torch.equal(x, y) for x, y in itertools.combinations(expected, 2))


@pytest.mark.parametrize("config", [TOGETHER, IN_TURN, SPLIT], ids=["cooperative", "pingpong", "split"])
def test_result_does_not_depend_on_the_schedule(config: Sm90GemmConfig) -> None:
    case = make_gemm_case(m=2 * config.tile_m, n=128, k=264, config=config, sm_count=2, seed=7)
    for seed, completion in enumerate(POLICIES):
        check(case.fresh(), Options(seed, completion, "random", spurious_try_wait_failures=seed == 2))


@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_warpgroups_without_a_tile_or_with_one_more(tiles: int) -> None:
    """In turn: with one tile the second warpgroup has none, with three the first has two."""
    case = make_gemm_case(m=64, n=64 * tiles, k=72, config=dataclasses.replace(IN_TURN, cluster_m=1), sm_count=1)
    assert case.plan.tiles == tiles
    check(case, Options(completion="lazy", interleave="random"))


def test_counts() -> None:
    """One wgmma per 64 rows, 64 columns and 16 elements of K, however they are shared out."""
    for config in (TOGETHER, IN_TURN, dataclasses.replace(IN_TURN, tile_m=128), SPLIT):
        case = make_gemm_case(m=256, n=128, k=128, config=config, sm_count=2, seed=2)
        report = emulate(case.plan, case.tensors)
        assert report.mma_instructions == (256 // 64) * (128 // 64) * (128 // 16)
        assert report.by_role["idle"] < report.by_role["load"] < report.by_role["mma"]


# --- broken on purpose ----------------------------------------------------------------------------------------------


def _case(config: Sm90GemmConfig = TOGETHER) -> Case:
    """Four tiles of four K blocks through three stages: stages are refilled in the middle of a tile."""
    return make_gemm_case(m=4 * config.tile_m, n=128, k=256, config=config, sm_count=2, seed=11)


def _edited(case: Case, pattern: str, replacement: str = "") -> Artifact:
    artifact = compile_plan(case.plan, emulated=True)
    ptx, count = re.subn(pattern, replacement, artifact.ptx)
    assert count, f"nothing matches {pattern}"
    return dataclasses.replace(artifact, ptx=ptx)


@pytest.mark.parametrize(("config", "completion"), [(TOGETHER, "eager"), (IN_TURN, "lazy")])
def test_a_stage_released_before_its_wgmmas_have_read_it(config: Sm90GemmConfig, completion: str) -> None:
    case = _case(config)
    artifact = _edited(case, r"wgmma\.wait_group\.sync\.aligned\s+1;")
    with pytest.raises(SharedMemoryRace, match=r"wgmma\.mma_async"):
        emulate(case.plan, case.tensors, Options(completion=completion), artifact=artifact)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"wgmma\.fence\.sync\.aligned;", r"without any wgmma\.fence"),
        (r"wgmma\.wait_group\.sync\.aligned\s+0;", "is an accumulator of the wgmma"),
    ],
)
def test_missing_ordering_of_registers(pattern: str, message: str) -> None:
    case = _case()
    with pytest.raises(IllegalAccess, match=message):
        emulate(case.plan, case.tensors, artifact=_edited(case, pattern))


def test_missing_turn_hangs_at_the_named_barrier() -> None:
    case = _case(IN_TURN)
    with pytest.raises(Hang) as error:
        emulate(case.plan, case.tensors, artifact=_edited(case, r"bar\.arrive.*;"))
    assert re.search(r"\(mma\) waits at named barrier \d+ of CTA 0: 128 of 256 threads arrived", error.value.report)


def test_stages_that_are_never_released_hang() -> None:
    """The report names the arrivals that are missing: with pingpong of the one warpgroup whose tile it was."""
    case = _case(IN_TURN)
    with pytest.raises(Hang) as error:
        emulate(case.plan, case.tensors, artifact=_edited(case, r"mbarrier\.arrive\.shared::cluster\.b64.*;"))
    assert "2 of 2 arrivals pending" in error.value.report


_WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 (\w+), [^;]*;"
_BEFORE_SENDING = r"(?=(?:(?!try_wait)[\s\S])*?st\.async)"
_ALWAYS = r"setp.eq.u32 \1, 0, 0;"


@pytest.mark.parametrize(
    ("pattern", "replacement", "error", "message"),
    [
        (r"try_wait\.parity\.acquire\.cluster", "try_wait.parity.relaxed.cluster", SharedMemoryRace, "st.async"),
        (r"mbarrier\.try_wait\.parity\.acquire\.cluster.*? (\w+), .*;", _ALWAYS, IllegalAccess, "uninitialised"),
        (_WAIT + _BEFORE_SENDING, _ALWAYS, SharedMemoryRace, "st.async"),
        (r"st\.async.*;", "", Hang, r"partials_full\[\d\].* 4096 transaction bytes pending"),
        (r"mbarrier\.arrive\.shared::cluster\.b64.*;", "", Hang, r"partials_empty\[\d\]"),
    ],
    ids=["not acquired", "not received", "sent too early", "not sent", "not released"],
)
def test_partial_sums_out_of_order(pattern: str, replacement: str, error: type[Exception], message: str) -> None:
    """Two tiles of one cluster, so that each buffer of sums is used twice."""
    case = make_gemm_case(m=256, n=64, k=256, config=SPLIT, sm_count=2, seed=11)
    with pytest.raises(error) as raised:
        emulate(case.plan, case.tensors, Options(completion="lazy"), artifact=_edited(case, pattern, replacement))
    assert re.search(message, getattr(raised.value, "report", str(raised.value)))


_RESIDUALS = (
    dataclasses.replace(TRANSPOSED, cluster_m=1, tile_n=96), dataclasses.replace(IN_TURN, cluster_m=1, tile_n=128),
)  # fmt: skip


@pytest.mark.parametrize("config", _RESIDUALS, ids=["transposed", "pingpong"])
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (_WAIT + r"(?=(?:(?!try_wait)[\s\S])*?ldmatrix)", _ALWAYS),
        (r"cp\.async\.bulk\.wait_group\.read\s+[01];", ""),
    ],
    ids=["not loaded", "not stored"],
)
def test_residuals_in_store_buffers_out_of_order(pattern: str, replacement: str, config: Sm90GemmConfig) -> None:
    """By TMA into a ring of one buffer: read before they are there, loaded before the buffer has been stored."""
    case = make_gemm_case(m=300, n=300, k=136, residual=torch.bfloat16, config=config, sm_count=1, seed=11)
    assert case.plan.regions_per_tile > config.store_stages
    with pytest.raises(SharedMemoryRace, match="TMA load"):
        emulate(case.plan, case.tensors, Options(completion="lazy"), artifact=_edited(case, pattern, replacement))


def test_warps_that_store_together_wait_for_each_other() -> None:
    """Without their named barrier one stores what the others have not written."""
    case = make_gemm_case(m=100, n=128, k=64, config=dataclasses.replace(TRANSPOSED, cluster_m=1), sm_count=1, seed=11)
    artifact = _edited(case, r"bar\.sync\s+%\w+, 128;")
    with pytest.raises((SharedMemoryRace, IllegalAccess), match=r"cp\.async\.bulk|uninitialised"):
        emulate(case.plan, case.tensors, Options(seed=1, interleave="random"), artifact=artifact)


_SYNC = r"bar\.sync\s+(\d+, 256|%\w+, 128);"


@pytest.mark.parametrize(
    ("pattern", "config"),
    [
        (_SYNC + rf"(?=[\s\S]*{_SYNC})", TOGETHER),
        (_SYNC + rf"(?![\s\S]*{_SYNC})", TOGETHER),
        (_SYNC, IN_TURN),
    ],
    ids=["overwritten", "not written", "not written, in turn"],
)
@pytest.mark.parametrize("bias", [False, True], ids=["factors", "bias"])
def test_numbers_of_columns_that_warps_share(pattern: str, config: Sm90GemmConfig, bias: bool) -> None:
    """Each warp reads what the others write: after they have, and before they write those of the next tile."""
    scales = "" if bias else "column"
    case = make_gemm_case(m=300, n=300, k=136, bias=bias, scales=scales, config=config, sm_count=2, seed=11)
    assert case.plan.kept == (("bias",) if bias else ("scale",))
    with pytest.raises((SharedMemoryRace, IllegalAccess)):
        emulate(case.plan, case.tensors, artifact=_edited(case, pattern))


def test_tf32_in_tiles_whose_columns_are_no_multiple_of_32() -> None:
    config = Sm90GemmConfig(tile_m=128, tile_n=144, stages=2, cluster_m=1, cluster_n=1, pingpong=True, store_stages=1)
    check(make_gemm_case(m=130, n=200, k=96, in_dtype=torch.float32, out_dtype=torch.float32, config=config))
