"""The SM100a kernel over images in the emulator: bit for bit against integer arithmetic, and broken on purpose."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import PatchEmbedImagesProblem, Sm100ImagesConfig
from cute_kernels.emulator import Options
from cute_kernels.operations.compile import compile_plan
from cute_kernels.operations.runtime import emulated
from cute_kernels.plan import make_plan
from tests.emulator.cases import Case, check
from tests.emulator.image_inputs import edited, make_images_case, sums
from tests.emulator.transposed_faults import MISSING_SYNCHRONISATION
from tests.nightly import drawn, every_other, examples

BASE = Sm100ImagesConfig(tile_patches=4, tile_images=8, cta_group=2, stages=3, stage_blocks=1)
replace = dataclasses.replace
PARTS = replace(BASE, tile_images=24, accumulators=1, mma_columns=64)
CONFIGS = {  # and the channels that they are compiled for
    "pair, two accumulators": (BASE, 1),
    "pair, two parts of different size": (PARTS, 1),
    "pair, shared memory, three channels": (replace(BASE, weight="smem", stages=4, stage_blocks=2), 3),
    "pair, both, by image": (replace(BASE, weight="smem", tile_images=16, mma_columns=32, order="image"), 1),
    "one CTA, tile wider than the grid row": (
        replace(BASE, cta_group=1, tile_patches=16, tile_images=1, stages=2, stage_blocks=2), 2,
    ),
    "one CTA, wide loads in parts": (
        replace(PARTS, cta_group=1, tile_patches=7, tile_images=16, tmem_load_width=16, mma_columns=48), 1,
    ),
    "one CTA, 32 columns a load": (
        replace(PARTS, cta_group=1, tile_patches=6, tile_images=16, tmem_load_width=32, mma_columns=64), 1,
    ),
}  # fmt: skip
TABLES = {"positions": (True, True), "bias": (True, False), "none": (False, False)}


def case_of(config: Sm100ImagesConfig, **facts) -> Case:
    return make_images_case(config=config, arch="sm_100a", **facts)


@pytest.mark.parametrize("name", every_other(CONFIGS))
def test_every_config_is_bit_exact_without_spills(name: str) -> None:
    """Several tiles per cluster; images, grid rows and features end inside a tile; rings go round several times."""
    config, channels = CONFIGS[name]
    grid = (2, 5 if config.tile_patches == 16 else config.tile_patches + 1)
    case = case_of(
        config, batch=config.tile_images + 1, channels=channels, grid=grid, n=72, sm_count=config.cta_group, seed=1
    )
    plan = case.plan
    assert plan.tiles // (plan.clusters // plan.feature_groups) >= 4 and plan.problem.n < plan.padded_n
    check(case, Options(completion="lazy"))
    resources = compile_plan(plan, emulated=True).resources
    assert resources.stack_bytes == resources.local_bytes == 0 and resources.registers <= 255


# Another table is another kernel, so not every configuration has all three.
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(4, 100))
@given(
    kind=drawn(
        [("one CTA, tile wider than the grid row", "none"), (next(iter(CONFIGS)), "positions")],
        [*((name, "positions") for name in CONFIGS), ("pair, two accumulators", "bias"),
         ("one CTA, tile wider than the grid row", "none")],
    ),
    batch=st.integers(1, 26),
    grid=st.sampled_from([(1, 24), (1, 17), (2, 9), (1, 16), (3, 5), (3, 2)]),
    n=st.integers(1, 34).map(lambda i: 8 * i),
    sm_count=st.sampled_from([2, 6, 148]),
    completion=st.sampled_from(["eager", "lazy", "random"]),
    interleave=st.sampled_from(["round_robin", "random", "starve"]),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_any_images_under_any_schedule(kind, completion, interleave, seed, **facts) -> None:
    """Widths of 32 to 384 pixels; whole and partial tiles along grid rows and images; one group of features or two."""
    config, channels = CONFIGS[kind[0]]
    bias, pos = TABLES[kind[1]]
    check(
        case_of(config, channels=channels, bias=bias, pos=pos, seed=seed, **facts),
        Options(seed=seed, completion=completion, interleave=interleave, spurious_try_wait_failures=seed % 2 == 1),
    )


@pytest.fixture(scope="module")
def inputs() -> Case:
    """8 tiles of one pair."""
    return case_of(PARTS, batch=25, channels=1, grid=(2, 5), n=136, sm_count=2, seed=7)


def test_result_does_not_depend_on_the_schedule(inputs: Case) -> None:
    for completion, interleave in (("eager", "starve"), ("lazy", "random"), ("random", "starve")):
        options = Options(seed=3, completion=completion, interleave=interleave, spurious_try_wait_failures=True)
        check(inputs.fresh(), options)


def test_sums_that_fp32_rounds() -> None:
    """Beyond 2^24 an FP32 number does not hold every integer: the conversion rounds to nearest, ties to even."""
    config, channels = CONFIGS["pair, shared memory, three channels"]
    case = case_of(config, batch=4, channels=channels, grid=(1, 4), n=64, extreme=True, sm_count=2, seed=2)
    accumulators = sums(case.tensors.images, case.tensors.weight)
    assert accumulators.min() < -(2**24) and accumulators.max() > 2**24 and (accumulators % 2 == 1).any()
    check(case)


def test_default_config_and_its_work() -> None:
    """The kernel of 224 x 224 images, three channels, on one pair: 256 features x 224 patches, a second partial tile.

    Per CTA and tile, in wavefronts of 128 bytes: strips written by TMA and read by the MMAs of both parts, the output
    staged and read by TMA; the weight moves once, into tensor memory.
    """
    headline = PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768, table_rows=196)
    config = make_plan(headline, None, "sm_100a").config
    case = case_of(config, batch=20, channels=3, grid=(1, 14), n=256, sm_count=2, seed=224)
    plan = case.plan
    assert (plan.cta_group, plan.tile_patches, plan.tile_images, plan.config.weight) == (2, 14, 16, "tmem")
    assert plan.mma_spans == ((0, 128), (128, 96)) and plan.tiles == 2 and plan.clusters == 1
    report = check(case, Options(completion="lazy", counters=True))
    units, tiles = report.units, 2 * plan.tiles
    for kind, metric, wavefronts in (
        ("tma.load", "wavefronts", 672), ("mma", "operand_wavefronts", 672), ("stmatrix", "wavefronts", 448),
        ("tma.store", "wavefronts", 448),
    ):  # fmt: skip
        assert units.total(metric, kind) == wavefronts * tiles, kind
    assert units.total("bank_conflicts") == 0 and units.total("wavefronts", "st.shared") == 0
    assert report.mma_instructions == 2 * 4 * plan.k_blocks * plan.tiles
    assert report.by_role["load"] < report.by_role["mma"] < report.by_role["epilogue"]


# --- broken on purpose ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"cvt\.rn\.f32\.s32", "cvt.rn.f32.u32"),
        (r"fma\.rn\.f32x2\s+(\S+ \S+ \S+), \S+;", r"mul.rn.f32x2 \1;"),
        (r"ld\.global\.b32.*;", ""),
    ],
    ids=["unsigned sums", "no table", "no scales"],
)
def test_wrong_arithmetic_gives_wrong_results(inputs: Case, pattern: str, replacement: str) -> None:
    case = inputs.fresh()
    emulated.launch(case.plan, case.tensors, artifact=edited(case, pattern, replacement))
    assert case.mismatches().float().mean() > 0.4


@pytest.mark.parametrize(("pattern", "error", "message"), MISSING_SYNCHRONISATION)
def test_missing_synchronisation(inputs: Case, pattern: str, error: type[Exception], message: str) -> None:
    case = inputs.fresh()
    with pytest.raises(error, match=message):
        emulated.launch(
            case.plan, case.tensors, Options(interleave="random", completion="lazy"), artifact=edited(case, pattern)
        )
