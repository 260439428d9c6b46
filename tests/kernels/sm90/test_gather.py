"""The SM90a kernel that gathers 16-bit patches, in the emulator: bit for bit, and broken on purpose."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import Sm90GatherConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import Hang, IllegalAccess, SharedMemoryRace
from cute_kernels.operations.compile import Artifact, compile_plan
from tests.emulator.cases import Case, check
from tests.emulator.exact_sums import emulate
from tests.emulator.gather_inputs import make_gather_case
from tests.nightly import by_day, drawn, examples, nightly

PAIRS = Sm90GatherConfig(2, 1, 64, 2, 64, 2, stages=3)
IN_TURN = Sm90GatherConfig(4, 1, 16, 1, 64, 1, stages=3, pingpong=True)
replace = dataclasses.replace
CONFIGS = {  # with patch, grid, and what else is not as usual
    "pairs of patches": (PAIRS, 16, (1, 4), {}),
    "single patches, images first": (replace(PAIRS, row_patches=1, order="row"), 16, (1, 3), {"n": 96}),
    "256 x 192, cluster of 2": (Sm90GatherConfig(2, 1, 128, 2, 192, 2), 16, (1, 4), {}),
    "four patches": (
        Sm90GatherConfig(8, 2, 16, 4, 64, 2, stages=2, store_stages=2), 16, (3, 12),
        {"out_dtype": torch.float32, "n": 96, "batch": 5},
    ),
    "in turn, pairs": (Sm90GatherConfig(2, 1, 64, 2, 64, 2, stages=3, pingpong=True), 16, (3, 2), {"n": 96}),
    "in turn, a piece of an image, four CTAs": (
        replace(IN_TURN, tile_patches=16, tile_rows=4, tile_images=1, cluster=4), 16, (5, 14),
        {"dtype": torch.float16, "n": 200},
    ),
    "p = 32, pairs": (Sm90GatherConfig(4, 2, 16, 2, 64, 2), 32, (3, 4), {"out_dtype": torch.float16, "n": 96}),
    "p = 64": (Sm90GatherConfig(2, 2, 32, 1, 64, 2, stages=2), 64, (3, 2), {"n": 96}),
}  # fmt: skip
AT_NIGHT = {"single patches, images first", "256 x 192, cluster of 2", "p = 64", "pairs of patches", "in turn, pairs"}
"""Long, and of a kind with the others or with `tests/kernels/sm90/test_gemm.py`."""


@pytest.mark.parametrize("name", by_day(CONFIGS, CONFIGS.keys() - AT_NIGHT))
def test_every_config_is_bit_exact_without_spills(name: str) -> None:
    """Several tiles of one cluster; images, grid and features end inside a tile."""
    config, patch, grid, others = CONFIGS[name]
    facts = {"batch": config.tile_images + 1, "n": config.cluster * config.tile_n + 24} | others
    case = make_gather_case(grid=grid, patch=patch, config=config, sm_count=config.cluster, seed=1, **facts)
    assert case.plan.clusters == 1 and case.plan.tiles >= 4
    check(case, Options(completion="lazy"))
    resources = compile_plan(case.plan, emulated=True).resources
    assert resources.stack_bytes == 0 and resources.local_bytes == 0


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(2, 30))
@given(
    config=drawn([PAIRS], [PAIRS, IN_TURN]),
    batch=st.integers(1, 70),
    channels=st.integers(1, 2),
    grid=st.tuples(st.integers(1, 3), st.sampled_from([2, 4, 6])),
    n=st.integers(1, 20).map(lambda i: 8 * i),
    table=drawn([(False, False)], [(True, True), (True, False), (False, False)]),
    sm_count=st.sampled_from([2, 6, 132]),
    completion=st.sampled_from(["eager", "lazy", "random"]),
    interleave=st.sampled_from(["round_robin", "random", "starve"]),
    seed=st.integers(0, 2**20),
)
def test_any_images_under_any_schedule(completion, interleave, table, seed, **facts) -> None:
    case = make_gather_case(bias=table[0], pos=table[1], seed=seed, **facts)
    check(case, Options(seed=seed, completion=completion, interleave=interleave))


@pytest.mark.parametrize(
    "facts", [{"batch": 1, "grid": (3, 5)}, pytest.param({"batch": 40, "grid": (2, 6)}, marks=nightly)], ids=str
)
def test_default_config(facts: dict) -> None:
    """What is chosen for few and for more images, on a device of 12 multiprocessors."""
    check(make_gather_case(n=200, sm_count=12, seed=3, **facts), Options(interleave="random"))


@nightly
def test_result_does_not_depend_on_the_schedule() -> None:
    case = make_gather_case(batch=65, grid=(1, 4), n=136, config=PAIRS, sm_count=2, seed=7)
    for completion, interleave in (("eager", "starve"), ("lazy", "random"), ("random", "starve")):
        options = Options(seed=3, completion=completion, interleave=interleave, spurious_try_wait_failures=True)
        check(case.fresh(), options)


def test_counts() -> None:
    """One wgmma per 64 patches, 64 features and 16 pixels; pixels are loaded once for the CTAs of a cluster."""
    for config in (PAIRS, IN_TURN):
        case = make_gather_case(batch=64, grid=(1, 4), n=128, config=config, sm_count=2, seed=2)
        report = emulate(case.plan, case.tensors)
        assert report.mma_instructions == (64 * 4 // 64) * (128 // 64) * (256 // 16)
        assert report.by_role["idle"] < report.by_role["load"] < report.by_role["mma"]


# --- broken on purpose ----------------------------------------------------------------------------------------------


def _case(config: Sm90GatherConfig = PAIRS) -> Case:
    """Four blocks of K in a tile through three stages: stages are refilled in the middle of a tile."""
    return make_gather_case(batch=64, grid=(1, 6), n=128, config=config, sm_count=2, seed=11)


def _edited(case: Case, pattern: str, replacement: str = "") -> Artifact:
    artifact = compile_plan(case.plan, emulated=True)
    ptx, count = re.subn(pattern, replacement, artifact.ptx)
    assert count, f"nothing matches {pattern}"
    return dataclasses.replace(artifact, ptx=ptx)


@pytest.mark.parametrize("pattern", [r"ld\.global\.v2\.\w+.*;"], ids=["no table"])
def test_wrong_arithmetic_gives_wrong_results(pattern: str) -> None:
    case = _case()
    emulate(case.plan, case.tensors, artifact=_edited(case, pattern))
    assert case.mismatches().float().mean() > 0.4


@pytest.mark.parametrize(
    ("config", "pattern", "error", "message"),
    [
        (PAIRS, r"wgmma\.wait_group\.sync\.aligned\s+1;", SharedMemoryRace, r"wgmma\.mma_async"),
        (IN_TURN, r"wgmma\.wait_group\.sync\.aligned\s+1;", SharedMemoryRace, r"wgmma\.mma_async"),
        (PAIRS, r"wgmma\.fence\.sync\.aligned;", IllegalAccess, r"without any wgmma\.fence"),
        (PAIRS, r"mbarrier\.arrive\.shared::cluster\.b64.*;", Hang, r"\(load\) waits for parity"),
        (IN_TURN, r"bar\.arrive.*;", Hang, r"\(mma\) waits at named barrier \d+ of CTA 0"),
    ],
)
def test_missing_synchronisation(
    config: Sm90GatherConfig, pattern: str, error: type[Exception], message: str
) -> None:
    case = _case(config)
    with pytest.raises(error) as raised:
        emulate(case.plan, case.tensors, Options(completion="lazy"), artifact=_edited(case, pattern))
    assert re.search(message, getattr(raised.value, "report", str(raised.value)))
