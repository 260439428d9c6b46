"""The dense GEMM of SM100a in the emulator: bit for bit against the torch reference, and broken on purpose."""

from __future__ import annotations

import dataclasses
import re
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import Sm100GemmConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import Hang, ProxyFenceMissing, SharedMemoryRace, TensorMemoryRace
from cute_kernels.kernels.sm100.cta_pair import ClusterPlace
from cute_kernels.operations import reference
from cute_kernels.operations.compile import Artifact, compile_plan, compile_uncached
from cute_kernels.plan.gemm_sm100 import LEVEL_7, LEVEL_8, ONE_ACCUMULATOR, WIDE, Sm100GemmPlan
from tests.emulator.cases import Case, check
from tests.emulator.exact_sums import emulate
from tests.emulator.gemm_inputs import columns, make_gemm_case
from tests.nightly import by_day, drawn, examples, nightly

POLICIES = ("eager", "lazy", "random")
CONFIGS = {
    "level 8": LEVEL_8,
    "level 7": LEVEL_7,
    "tile_n=64": Sm100GemmConfig(tile_n=64, stages=3, store_stages=1, group_m=1),
    "tile_n=256": Sm100GemmConfig(tile_n=256, stages=5, store_stages=4, group_m=2),
    "level 7, tile_n=64": Sm100GemmConfig(256, 64, stages=2, store_stages=2, group_m=3),
    "256 x 256": WIDE,
    "512 x 256, one accumulator": ONE_ACCUMULATOR,
    "256 x 256, two pairs share b": dataclasses.replace(WIDE, cluster_m=4, stages=3),
    "256 x 128, two pairs share a": dataclasses.replace(LEVEL_8, cluster_n=2, stages=3),
    "512 x 64, four pairs": Sm100GemmConfig(256, 64, stages=2, store_stages=1, group_m=1, cluster_m=4, cluster_n=2),
}
CLUSTERS = [
    Sm100GemmConfig(tile_n=64, stages=2, store_stages=1, cluster_m=4),
    Sm100GemmConfig(tile_n=64, stages=3, store_stages=1, cluster_n=2),
    Sm100GemmConfig(256, 64, stages=2, store_stages=1, cluster_n=2, accumulators=1),
    Sm100GemmConfig(tile_n=64, stages=2, store_stages=1, cluster_m=4, cluster_n=2),
]
IN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

OTHER_TYPES = {
    "tile_n=256": {"in_dtype": torch.float16, "out_dtype": torch.float32},
    "tile_n=64": {"out_dtype": torch.float32},
}
"""Of BF16 with a bias are the others."""

DAILY = "tile_n=256", "512 x 64, four pairs"


@pytest.mark.parametrize("name", by_day(CONFIGS, DAILY))
def test_every_config_is_bit_exact_without_spills(name: str) -> None:
    """Several tiles of one cluster, so that stages, accumulators and store buffers are used again."""
    config = CONFIGS[name]
    others = OTHER_TYPES.get(name, {})
    ctas = config.cluster_m * config.cluster_n
    m, n = config.cluster_m * config.block_m + 44, config.cluster_n * config.tile_n + 9
    case = make_gemm_case(m=m, n=n, k=136, config=config, sm_count=ctas, seed=1, **others)
    assert case.plan.tiles == 4 and case.plan.clusters == 1
    check(case, Options(completion="lazy"))
    resources = compile_plan(case.plan, emulated=True).resources
    assert resources.stack_bytes == 0 and resources.local_bytes == 0 and resources.registers <= 255


@settings(max_examples=examples(6, 100), suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 560),
    n=columns(200),
    k=st.integers(1, 20).map(lambda i: 8 * i),
    batches=st.integers(1, 2),
    types=drawn([(torch.bfloat16, torch.bfloat16)], product(IN_DTYPES, OUT_DTYPES)),
    bias=drawn([True], [True, False]),
    config=drawn([LEVEL_8, LEVEL_7, WIDE], [LEVEL_8, LEVEL_7, WIDE, ONE_ACCUMULATOR, None]),
    sm_count=st.sampled_from([2, 4, 148]),
    completion=st.sampled_from(POLICIES),
    interleave=st.sampled_from(["round_robin", "random"]),
    seed=st.integers(0, 2**20),
)
def test_any_problem_under_any_schedule(types, completion, interleave, seed, **facts) -> None:
    check(
        make_gemm_case(in_dtype=types[0], out_dtype=types[1], seed=seed, arch="sm_100a", **facts),
        Options(seed=seed, completion=completion, interleave=interleave),
    )


@settings(max_examples=examples(6, 100), suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 700),
    n=columns(200),
    k=st.integers(1, 40).map(lambda i: 8 * i),
    batches=st.integers(1, 2),
    config=drawn([CLUSTERS[0], CLUSTERS[3]], CLUSTERS),
    sm_count=st.sampled_from([8, 16]),
    completion=st.sampled_from(POLICIES),
    interleave=st.sampled_from(["round_robin", "random", "starve"]),
    seed=st.integers(0, 2**20),
)
def test_clusters_of_several_pairs_under_any_schedule(completion, interleave, seed, **facts) -> None:
    check(make_gemm_case(seed=seed, **facts), Options(seed=seed, completion=completion, interleave=interleave))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LEVEL_8, id="level 8"),
        pytest.param(LEVEL_7, id="level 7", marks=nightly),
        pytest.param(ONE_ACCUMULATOR, id="one accumulator", marks=nightly),
        pytest.param(CLUSTERS[0], id="4 x 1 CTAs", marks=nightly),
        pytest.param(CLUSTERS[1], id="2 x 2 CTAs", marks=nightly),
        pytest.param(CLUSTERS[2], id="2 x 2, one accumulator"),
        pytest.param(CLUSTERS[3], id="4 x 2 CTAs"),
    ],
)
def test_result_does_not_depend_on_the_schedule(config: Sm100GemmConfig) -> None:
    """The ring of operands has as few stages as possible, and its length is no divisor of the K blocks of a tile."""
    config = dataclasses.replace(config, stages=2)
    ctas = config.cluster_m * config.cluster_n
    case = make_gemm_case(m=config.cluster_m * config.block_m, n=200, k=200, config=config, sm_count=ctas, seed=7)
    for seed, completion in enumerate(POLICIES):
        check(case.fresh(), Options(seed, completion, "random", spurious_try_wait_failures=seed == 2))


def test_values_of_every_magnitude() -> None:
    """Products from 2^-60 to 2^60: sums in which float64 itself would round, and many that cancel."""
    generator = torch.Generator().manual_seed(5)
    case = make_gemm_case(m=130, n=40, k=64, config=LEVEL_8, sm_count=2, seed=5, bias=False, out_dtype=torch.float32)
    for tensor in (case.tensors.a, case.tensors.b):
        scale = torch.randint(-30, 31, tensor.shape, generator=generator)
        tensor.copy_(torch.ldexp(tensor.float(), scale).to(tensor.dtype))
    case.expected[..., :40] = reference.gemm(case.tensors.a, case.tensors.b, None, torch.float32)
    check(case)


def test_counts() -> None:
    """One tcgen05.mma per MMA tile, K step, tile; the MMA warp of the other CTA issues none."""
    for config, mma_tiles in ((LEVEL_8, 1), (LEVEL_7, 2)):
        case = make_gemm_case(m=512, n=128, k=128, config=config, sm_count=2)
        report = emulate(case.plan, case.tensors)
        assert report.mma_instructions == case.plan.tiles * case.plan.k_blocks * 4 * mma_tiles
        assert report.mma_instructions == 512 // 256 * (128 // 16)


@pytest.mark.parametrize(
    ("config", "reads_of_a", "reads_of_b"),
    [
        (LEVEL_8, 2, 2),
        (LEVEL_7, 2, 1),
        (WIDE, 1, 2),
        (CONFIGS["256 x 256, two pairs share b"], 1, 1),
        (CONFIGS["512 x 64, four pairs"], 2, 1),
        pytest.param(dataclasses.replace(LEVEL_8, cluster_m=4), 2, 1, marks=nightly),
        pytest.param(dataclasses.replace(LEVEL_8, cluster_n=2), 1, 2, marks=nightly),
        pytest.param(dataclasses.replace(LEVEL_8, cluster_m=4, cluster_n=2), 1, 1, marks=nightly),
    ],
)
def test_what_is_shared_is_read_from_l2_once(config: Sm100GemmConfig, reads_of_a: int, reads_of_b: int) -> None:
    """512 x 256 outputs: every operand is fetched once per tile that needs it and does not share it."""
    k = 128
    case = make_gemm_case(m=512, n=256, k=k, config=config, sm_count=16)
    units = emulate(case.plan, case.tensors, Options(counters=True)).units
    assert not case.mismatches().any()
    assert units.total("l2_bytes_read", "tma.load") == 2 * k * (512 * reads_of_a + 256 * reads_of_b)
    # Every CTA receives all that it multiplies, whoever loaded it.
    tiles, plan = case.plan.tiles * case.plan.ctas, case.plan
    assert units.total("bytes", "tma.load") == tiles * plan.k_blocks * plan.stage_bytes


# --- broken on purpose ----------------------------------------------------------------------------------------------


def _case(config: Sm100GemmConfig = LEVEL_8) -> Case:
    """Three tiles of one pair of CTAs whose K blocks go around a ring of two stages."""
    config = dataclasses.replace(config, stages=2)
    return make_gemm_case(m=2 * config.block_m, n=384, k=192, config=config, sm_count=2, seed=11)


def _edited(case: Case, pattern: str, replacement: str = "") -> Artifact:
    artifact = compile_plan(case.plan, emulated=True)
    ptx, count = re.subn(pattern, replacement, artifact.ptx)
    assert count, f"nothing matches {pattern}"
    return dataclasses.replace(artifact, ptx=ptx)


def test_missing_proxy_fence_before_the_tma_store() -> None:
    case = _case()
    with pytest.raises(ProxyFenceMissing, match=r"\(epilogue\)"):
        emulate(case.plan, case.tensors, artifact=_edited(case, r"fence\.proxy\.async.*;"))


def test_a_ring_of_two_that_waits_as_if_it_had_three_buffers() -> None:
    """A buffer is written while a lazy store reads it."""
    case = _case()
    artifact = _edited(case, r"(cp\.async\.bulk\.wait_group\.read\s+)1;", r"\g<1>2;")
    with pytest.raises(SharedMemoryRace, match="store"):
        emulate(case.plan, case.tensors, Options(completion="lazy"), artifact=artifact)


def test_an_accumulator_that_is_never_released_hangs_the_mma_warp() -> None:
    case = _case()
    with pytest.raises(Hang) as error:
        emulate(case.plan, case.tensors, artifact=_edited(case, r"mbarrier\.arrive\.relaxed\.cluster.*;"))
    mma = next(line for line in error.value.report.splitlines() if line.startswith("CTA 0 warp 1 (mma)"))
    assert "8 of 8 arrivals pending" in mma


def test_a_stage_freed_before_its_mmas_have_read_it() -> None:
    """Plain arrivals in place of tcgen05.commit: TMA refills what a lazy MMA has still to read."""
    case = _case()
    commit = r"tcgen05\.commit[^;]*\[(%\w+)\+(\d+)\][^;]*;"
    (register, offset), _accumulator = re.findall(commit, compile_plan(case.plan, emulated=True).ptx)
    arrive = "mapa.shared::cluster.u32 remote, own, {}; mbarrier.arrive.shared::cluster.b64 _, [remote];"
    both = f"{{ .reg .b32 own, remote; add.s32 own, {register}, {offset}; {arrive.format(0)} {arrive.format(1)} }}"
    artifact = _edited(case, rf"tcgen05\.commit[^;]*\[{register}\+{offset}\][^;]*;", both)
    # In order of issue an MMA always completes before the load that overwrites its operands; at random it does not.
    with pytest.raises(SharedMemoryRace, match=r"tcgen05\.mma"):
        emulate(case.plan, case.tensors, Options(completion="random"), artifact=artifact)


@pytest.mark.parametrize("config", CLUSTERS[:2], ids=["b is shared", "a is shared"])
def test_a_shared_stage_freed_by_one_pair_alone(config: Sm100GemmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair frees its own CTAs' stages only: what a CTA multicasts overwrites what the other pair has to read."""
    config = dataclasses.replace(config, stages=2)
    case = make_gemm_case(m=1024, n=128, k=448, config=config, sm_count=4, seed=3)
    monkeypatch.setattr(ClusterPlace, "load_mask", ClusterPlace.pair_mask)
    monkeypatch.setattr(Sm100GemmPlan, "sharing_pairs", 1)
    artifact = compile_uncached(case.plan, emulated=True)
    with pytest.raises(SharedMemoryRace):
        emulate(case.plan, case.tensors, Options(seed=1, completion="random", interleave="random"), artifact=artifact)


def test_a_wave_whose_accumulator_is_overwritten_while_it_is_drained() -> None:
    """Without the MMA warp's wait for the second MMA tile of the only accumulator."""
    config = Sm100GemmConfig(256, 64, stages=2, store_stages=1, accumulators=1)
    case = make_gemm_case(m=1024, n=128, k=192, config=config, sm_count=2, seed=3)
    check(case)
    artifact = compile_plan(case.plan, emulated=True)
    wait = r"mbarrier\.try_wait\.parity\.relaxed\.cluster[^;]*\[(%\w+)\][^;]*;"
    sites = [match.span() for match in re.finditer(wait, artifact.ptx)]
    assert len(sites) == 2, "one wait per MMA tile"
    for begin, end in sites:
        ptx = artifact.ptx[:begin] + "setp.eq.u32 complete, 0, 0;" + artifact.ptx[end:]
        with pytest.raises(TensorMemoryRace):
            emulate(case.plan, case.tensors, artifact=dataclasses.replace(artifact, ptx=ptx))
