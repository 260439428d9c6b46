"""The SM100a kernel over BF16 and FP16 images in the emulator: bit for bit against one rounding per MMA."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import Sm100ImagesConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import TensorMemoryRace
from cute_kernels.operations.compile import compile_plan
from cute_kernels.operations.runtime import emulated
from tests.emulator.cases import Case, check
from tests.emulator.gather_inputs import make_gather_case
from tests.emulator.image_inputs import edited
from tests.nightly import drawn, every_other, examples

FP16, BF16 = torch.float16, torch.bfloat16
PAIR = Sm100ImagesConfig(tile_patches=4, tile_images=8, cta_group=2, stages=3, stage_blocks=1)
PARTS = dataclasses.replace(PAIR, tile_images=24, accumulators=1, mma_columns=64, stages=5)
CONFIGS = {  # and what else is not as usual
    "pair, two accumulators": (PAIR, {}),
    "pair, two parts of different size": (PARTS, {"dtype": FP16, "out_dtype": FP16}),
    "pair, shared memory, two channels": (dataclasses.replace(PAIR, weight="smem", stage_blocks=2), {"channels": 2}),
    "one CTA, tile wider than the grid row": (
        Sm100ImagesConfig(cta_group=1, tile_patches=16, tile_images=2, tmem_load_width=32, stages=2, order="image"),
        {"dtype": FP16, "out_dtype": BF16},
    ),
}  # fmt: skip


def case_of(config: Sm100ImagesConfig | None, **facts) -> Case:
    return make_gather_case(config=config, arch="sm_100a", **facts)


@pytest.mark.parametrize("name", every_other(CONFIGS))
def test_every_config_is_bit_exact_without_spills(name: str) -> None:
    """Several tiles per cluster; images, grid rows and features end inside a tile; stages are refilled within one."""
    config, facts = CONFIGS[name]
    case = case_of(config, batch=config.tile_images + 1, grid=(2, 5), n=72, sm_count=config.cta_group, seed=1, **facts)
    assert case.plan.tiles >= 4 and case.plan.config.stages < 2 * case.plan.tile_stages
    check(case, Options(completion="lazy"))
    resources = compile_plan(case.plan, emulated=True).resources
    assert resources.stack_bytes == resources.local_bytes == 0 and resources.registers <= 255


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(4, 100))
@given(
    name=drawn(["pair, two accumulators"], CONFIGS),
    batch=st.integers(1, 26),
    grid=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    n=st.integers(1, 34).map(lambda i: 8 * i),
    table=drawn([(True, True), (False, False)], [(True, True), (True, False), (False, False)]),
    sm_count=st.sampled_from([2, 6, 148]),
    completion=st.sampled_from(["eager", "lazy", "random"]),
    interleave=st.sampled_from(["round_robin", "random", "starve"]),
    seed=st.integers(0, 2**20),
)
def test_any_images_under_any_schedule(name, completion, interleave, table, seed, **facts) -> None:
    config, more = CONFIGS[name]
    case = case_of(config, bias=table[0], pos=table[1], seed=seed, **facts, **more)
    failures = seed % 2 == 1
    check(case, Options(seed=seed, completion=completion, interleave=interleave, spurious_try_wait_failures=failures))


def test_default_config() -> None:
    """384 of 512 columns have the weight of three channels, the others the accumulators."""
    case = case_of(None, batch=9, channels=3, grid=(1, 14), n=136, sm_count=2, seed=3)
    plan = case.plan
    assert plan.config.source == "gather" and plan.weight_columns == 384 and plan.accumulator_columns <= 128
    check(case, Options(interleave="random"))


@pytest.mark.parametrize(
    ("pattern", "error"),
    [(r"tcgen05\.wait::st.*;", TensorMemoryRace), (r"fma\.rn\.f32x2\s+(\S+) (\S+), .*;", None)],
    ids=["the weight is not waited for", "no table"],
)
def test_broken_on_purpose(pattern: str, error: type[Exception] | None) -> None:
    case = case_of(PAIR, batch=9, grid=(2, 5), n=72, sm_count=2, seed=1)
    broken = edited(case, pattern, r"mov.b64 \1 \2;" if error is None else "")
    if error is not None:
        with pytest.raises(error):
            emulated.launch(case.plan, case.tensors, Options(completion="lazy"), artifact=broken)
    else:
        emulated.launch(case.plan, case.tensors, artifact=broken)
        assert case.mismatches().float().mean() > 0.4
