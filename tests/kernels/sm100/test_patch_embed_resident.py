"""The SM100a kernel over rows whose weight stays on chip, in the emulator: bit for bit, and broken on purpose."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import PatchEmbedProblem, Sm100ResidentConfig
from cute_kernels.emulator import Options
from cute_kernels.operations.compile import Artifact, compile_plan
from cute_kernels.operations.registry import placed
from cute_kernels.plan import make_plan
from tests.emulator.cases import Case, check
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case
from tests.emulator.transposed_faults import MISSING_SYNCHRONISATION
from tests.nightly import by_day, examples

PAIR = Sm100ResidentConfig(weight="tmem", order="position", tile_rows=64, tile_positions=2, cta_group=2, stages=5)
replace = dataclasses.replace
CONFIGS = {
    "pair, two accumulators": PAIR,
    "pair, two parts of different size": replace(PAIR, tile_rows=96, tile_positions=1, accumulators=1, mma_columns=64),
    "pair, shared memory, wide loads": replace(
        PAIR, weight="smem", tile_rows=128, tile_positions=1, stage_blocks=2, tmem_load_width=64
    ),
    "pair, flat": replace(PAIR, order="flat", tile_positions=1),
    "one CTA, shared memory, many positions": replace(
        PAIR, weight="smem", cta_group=1, tile_rows=80, tile_positions=10, tmem_load_width=16
    ),
    "one CTA, parts, BF16 table": replace(
        PAIR, cta_group=1, tile_rows=48, tile_positions=3, accumulators=1, mma_columns=16, epilogue="bf16x2"
    ),
    "one CTA, flat, shared memory": replace(
        PAIR, weight="smem", order="flat", cta_group=1, tile_rows=16, tile_positions=1, accumulators=1
    ),
    "one CTA, flat, BF16 table": replace(
        PAIR, order="flat", cta_group=1, tile_rows=64, tile_positions=1, epilogue="bf16x2"
    ),
}

DAILY = (
    "pair, two parts of different size", "pair, shared memory, wide loads", "pair, flat",
    "one CTA, shared memory, many positions",
)  # fmt: skip


@pytest.mark.parametrize("name", by_day(CONFIGS, DAILY))
def test_every_config_is_bit_exact_without_spills(name: str) -> None:
    """Several tiles per cluster; images, positions, features and K end inside a tile; rings go round several times."""
    config = CONFIGS[name]
    positions = 7 if config.order == "flat" else config.tile_positions + 1
    batch = config.tile_rows // config.tile_positions + 9
    case = make_case(
        batch=batch, positions=positions, n=72, k=272, config=config, sm_count=config.cta_group, seed=1
    )
    plan = case.plan
    assert plan.tiles // (plan.clusters // plan.feature_groups) >= 3 and plan.problem.n < plan.padded_n
    check(case, Options(completion="lazy"))
    resources = compile_plan(plan, emulated=True).resources
    assert resources.stack_bytes == resources.local_bytes == 0 and resources.registers <= 255


SOURCES = [
    {},
    {"row_scale": True, "feature_scale": True},
    {"row_scale": True, "scale_in_memory": True},
    {"feature_scale": True, "bias": False, "pos": False},
    {"pos": False},
    {"dtype": "uint8", "feature_scale": True, "scale": 1e-6},
    {"dtype": "int8", "row_scale": True},
    {"dtype": "bfloat16", "scale": 1.0},
    {"dtype": "float16", "scale": 1.0, "bias": False},
    {"indexed": True},
]
"""Each is a kernel of its own; a row has a position of its own in flat order."""


# Other sources are other kernels, so that by day few of them are compiled.
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(2, 200))
@given(
    name=st.sampled_from(list(CONFIGS)),
    source=st.sampled_from(SOURCES),
    images=st.integers(1, 70),
    positions=st.sampled_from([1, 2, 5, 16, 49]),
    n=st.integers(1, 34).map(lambda i: 8 * i),
    k=st.integers(1, 20).map(lambda i: 16 * i),
    sm_count=st.sampled_from([2, 6, 148]),
    completion=st.sampled_from(["eager", "lazy", "random"]),
    interleave=st.sampled_from(["round_robin", "random", "starve"]),
    seed=st.integers(0, 2**20),
)
def test_any_rows_under_any_schedule(
    name, source, images, positions, completion, interleave, seed, **facts
) -> None:
    """Whole and partial tiles of images and positions; one group of features or two; blocks of K that are not full."""
    config = replace(CONFIGS[name], stages=None)
    if config.order == "position":
        source = {key: value for key, value in source.items() if key != "indexed"}
        rows = 1 if not source.get("pos", True) else positions
        config = replace(config, tile_positions=config.tile_positions if config.tile_positions <= rows else 1)
    batch = max(1, images * 5 // positions)
    case = make_case(batch=batch, positions=positions, config=config, seed=seed, **source, **facts)
    failures = seed % 2 == 1
    check(case, Options(seed=seed, completion=completion, interleave=interleave, spurious_try_wait_failures=failures))


@pytest.mark.parametrize("name", by_day([key for key, c in CONFIGS.items() if c.order == "flat"], ["pair, flat"]))
def test_every_row_may_choose_its_position(name: str) -> None:
    """A number that is no position gives NaN, and M ends inside a tile, beyond which the index may not be read."""
    case = make_case(batch=9, positions=31, n=200, k=144, indexed=True, config=CONFIGS[name], sm_count=4, seed=2)
    assert case.expected.isnan().any()
    check(case, Options(completion="random"))


@pytest.fixture(scope="module")
def inputs() -> Case:
    """10 tiles of one pair, in two parts each."""
    config = CONFIGS["pair, two parts of different size"]
    return make_case(batch=200, positions=3, n=136, k=272, config=config, sm_count=2, seed=7)


def test_result_does_not_depend_on_the_schedule(inputs: Case) -> None:
    for completion, interleave in (("eager", "starve"), ("lazy", "random"), ("random", "starve")):
        options = Options(seed=3, completion=completion, interleave=interleave, spurious_try_wait_failures=True)
        check(inputs.fresh(), options)


def aligned(case: Case) -> Case:
    """With the table on a line of 128 bytes, as device memory begins: how many lines a load touches depends on it."""
    return replace(case, tensors=case.tensors.replace(table=placed(case.tensors.table)))


HEADLINE = PatchEmbedProblem(4736 * 196, 768, 768, 196)


@pytest.mark.parametrize(
    ("weight", "operand_reads", "fill"), [("tmem", 768, 4 * 48 * 32), ("smem", 768 + 768, 0)]
)
def test_headline_tile_and_its_work(weight: str, operand_reads: int, fill: int) -> None:
    """256 rows x 256 features x 768 of a pair: the configuration of 4736 images with two of its tiles.

    Per CTA and tile, in wavefronts of 128 bytes: rows written by TMA and read by the MMAs of both parts, the output
    staged and read by TMA. The weight moves once, into tensor memory in 48 loads per thread of 32 lines, or by TMA
    into shared memory, from where the MMAs of each part read it again. The table takes a line per warp and position.
    """
    config = make_plan(HEADLINE, Sm100ResidentConfig(weight=weight), "sm_100a").config
    case = aligned(make_case(batch=128, positions=4, n=256, k=768, config=config, sm_count=2, seed=224))
    plan = case.plan
    assert (plan.columns, plan.cta_group, plan.config.tile_positions, plan.tiles, plan.clusters) == (256, 2, 2, 2, 1)
    report = check(case, Options(completion="lazy", counters=True))
    total, tiles = report.units.total, 2 * plan.tiles
    weight_bytes = 0 if fill else 2 * plan.weight_bytes
    assert total("wavefronts", "tma.load") == 768 * tiles + weight_bytes // 128
    assert total("operand_wavefronts", "mma") == operand_reads * tiles
    assert total("wavefronts", "stmatrix") == total("wavefronts", "tma.store") == 512 * tiles
    assert total("lines", "ld.global") == plan.table_wavefronts * tiles + 2 * fill == 8 * tiles + 2 * fill
    assert total("bank_conflicts") == 0 and total("wavefronts", "st.shared") == 0
    assert plan.wavefronts == 768 + operand_reads + 1024


def test_flat_order_reads_a_line_of_the_table_for_each_row_of_a_warp() -> None:
    config = CONFIGS["pair, flat"]
    case = aligned(make_case(batch=2, positions=64, n=256, k=272, config=config, sm_count=2, seed=5))
    report = check(case, Options(counters=True))
    fill = 2 * 4 * 17 * 32
    assert report.units.total("lines", "ld.global") == 2 * case.plan.tiles * case.plan.table_wavefronts + fill
    assert case.plan.table_wavefronts == 4 * 64


# --- broken on purpose ----------------------------------------------------------------------------------------------


def edited(case: Case, pattern: str, replacement: str = "") -> Artifact:
    artifact = compile_plan(case.plan, emulated=True)
    ptx, count = re.subn(pattern, replacement, artifact.ptx)
    assert count, f"nothing matches {pattern}"
    return replace(artifact, ptx=ptx)


@pytest.mark.parametrize(("pattern", "error", "message"), MISSING_SYNCHRONISATION)
def test_missing_synchronisation(inputs: Case, pattern: str, error: type[Exception], message: str) -> None:
    case = inputs.fresh()
    with pytest.raises(error, match=message):
        emulate(
            case.plan, case.tensors, Options(interleave="random", completion="lazy"), artifact=edited(case, pattern)
        )


def test_a_kernel_without_its_table_gives_wrong_results(inputs: Case) -> None:
    case = inputs.fresh()
    artifact = edited(case, r"fma\.rn\.f32x2\s+(\S+ \S+ \S+), \S+;", r"mul.rn.f32x2 \1;")
    emulate(case.plan, case.tensors, artifact=artifact)
    assert case.mismatches().float().mean() > 0.4
