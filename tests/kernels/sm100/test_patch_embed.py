"""The real kernel, from the PTX that CuTe DSL generates, bit for bit against the torch reference of its contract."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.config import PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.machine.state.async_engine import AsyncEngine, Work
from cute_kernels.emulator.machine.units.copies.bulk import BulkCopy
from cute_kernels.operations import reference
from cute_kernels.operations.compile import compile_plan, compile_uncached
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.table import build_table
from cute_kernels.plan import make_plan
from tests.emulator.cases import check
from tests.emulator.exact_sums import emulate
from tests.emulator.kernel_inputs import make_case
from tests.nightly import drawn, every_other, examples, nightly

AS_THE_ORIGINAL = Sm100PatchEmbedConfig(epilogue="bf16x2", order="flat", table="row_major")
"""Rows and table of the CUDA original at 0.633 ms (docs/experiments.md)."""

CONFIGS = {
    "default": Sm100PatchEmbedConfig(),
    "tile_n=128": Sm100PatchEmbedConfig(tile_n=128),
    "as the original": AS_THE_ORIGINAL,
    "stages=3": Sm100PatchEmbedConfig(stages=3, snake=False, stagger_clocks=0),
    "stages=6, position order": Sm100PatchEmbedConfig(
        stages=6, order="position", tile_positions=2, store_buffers=1
    ),
    "stages=8, tile_n=128": Sm100PatchEmbedConfig(stages=8, tile_n=128),
    "one CTA of four warps, position order": Sm100PatchEmbedConfig(
        tile_n=128, epilogue_warps=4, cta_group=1, order="position", tile_positions=4, store_buffers=2
    ),
    "epilogue_warps=4, tile_n=128": Sm100PatchEmbedConfig(epilogue_warps=4, tile_n=128),
    "narrow loads, interleaved table": Sm100PatchEmbedConfig(
        tile_n=128, stages=2, tmem_load_width=16, order="flat", table="interleaved", snake=False
    ),
    "tmem_load_width=64": Sm100PatchEmbedConfig(tmem_load_width=64),
    "wide loads, eight positions": Sm100PatchEmbedConfig(
        tile_n=128, stages=7, order="position", tile_positions=8, tmem_load_width=64
    ),
    "epilogue=bf16x2": Sm100PatchEmbedConfig(epilogue="bf16x2", epilogue_warps=4, stages=5),
    "epilogue=bf16x2, tmem_load_width=64, tile_n=128": Sm100PatchEmbedConfig(128, 6, 4, 64, "bf16x2"),
    "one position": Sm100PatchEmbedConfig(order="position", tile_positions=1),
    "one CTA, interleaved table": Sm100PatchEmbedConfig(tile_n=128, cta_group=1, stages=3, order="flat"),
    "four positions": Sm100PatchEmbedConfig(tile_n=128, order="position", tile_positions=4),
}


def sizes(config: Sm100PatchEmbedConfig) -> dict[str, int]:
    """Tiles of one cluster that use both accumulators, one of them twice; M, N and K end inside a tile."""
    rows = {"batch": 3, "positions": 100}
    if config.order == "position":
        images = 128 * config.cta_group // config.tile_positions
        rows = {"batch": images - 3, "positions": max(2 * config.tile_positions - 1, 2)}
    return rows | {"n": config.tile_n + 80, "k": 400, "sm_count": config.cta_group}


@pytest.mark.parametrize("name", every_other(CONFIGS))
def test_every_config_is_bit_exact(name: str) -> None:
    case = make_case(**sizes(CONFIGS[name]), config=CONFIGS[name], seed=1)
    assert case.plan.tiles >= 4 and case.plan.clusters == 1
    check(case)


@pytest.mark.parametrize("name", every_other(CONFIGS))
def test_every_config_has_no_spills_and_fits(name: str) -> None:
    """Of the kernel that the emulator runs: host functions differ, the core does not."""
    case = make_case(**sizes(CONFIGS[name]), config=CONFIGS[name])
    resources = compile_plan(case.plan, emulated=True).resources
    assert resources.registers <= 255
    assert resources.stack_bytes == 0 and resources.local_bytes == 0
    # CuTe DSL asks for all of its shared memory dynamically; the 1,024 static bytes are the system's.
    assert resources.static_smem_bytes == 1024
    assert case.plan.smem_bytes <= 232_448
    if name == "default":
        assert compile_uncached(case.plan).ptx == compile_plan(case.plan, emulated=True).ptx


@settings(max_examples=examples(3, 400), suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 5),
    positions=st.sampled_from([1, 5, 32, 49, 100, 128, 196, 257]),
    n=st.integers(1, 48).map(lambda i: 8 * i),
    k=st.integers(1, 40).map(lambda i: 16 * i),
    bias=st.booleans(),
    pos=drawn([True], [True, False]),
    scale=st.sampled_from([1.0, 0.37, 3e-5, 1e4]),
    scale_in_memory=drawn([False], [True, False]),
    row_scale=drawn([False], [True, False]),
    feature_scale=drawn([False], [True, False]),
    dtype=drawn(["float8_e4m3fn"], ["float8_e4m3fn", "uint8", "int8", "bfloat16", "float16"]),
    config=drawn(list(CONFIGS.values())[::2], CONFIGS.values()),
    sm_count=st.sampled_from([2, 4, 148]),
    completion=st.sampled_from(["eager", "lazy", "random"]),
    interleave=st.sampled_from(["round_robin", "random", "starve"]),
    seed=st.integers(0, 2**20),
)
def test_any_problem_under_any_schedule(completion, interleave, seed, **facts) -> None:
    config = facts["config"]
    if config.order == "position":  # of few images most tiles would be empty
        facts |= {"batch": 23 * facts["batch"], "positions": max(facts["positions"] % 9, config.tile_positions)}
    check(make_case(seed=seed, **facts), Options(seed=seed, completion=completion, interleave=interleave))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Sm100PatchEmbedConfig(), id="f32", marks=nightly),
        pytest.param(Sm100PatchEmbedConfig(tile_n=128), id="f32, tile_n=128"),
        pytest.param(AS_THE_ORIGINAL, id="as the original"),
    ],
)
def test_every_row_may_choose_its_position(config: Sm100PatchEmbedConfig) -> None:
    """A number that is no position gives NaN, and M ends inside a tile, beyond which the index may not be read."""
    for positions in (31, 32, 70):
        case = make_case(batch=300 // positions, positions=positions, n=200, k=144, indexed=True, config=config, seed=2)
        assert case.expected.isnan().any()
        check(case, Options(completion="random"))


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        pytest.param("default", {"row_scale": True, "feature_scale": True}, marks=nightly),
        pytest.param("tile_n=128", {"row_scale": True, "feature_scale": True}, marks=nightly),
        pytest.param(
            "epilogue=bf16x2, tmem_load_width=64, tile_n=128", {"row_scale": True, "scale_in_memory": True},
            marks=nightly,
        ),
        ("narrow loads, interleaved table", {"feature_scale": True, "bias": False, "pos": False}),
        ("stages=6, position order", {"row_scale": True, "feature_scale": True, "scale_in_memory": True}),
    ],
)
def test_scales_of_rows_and_features(name: str, facts: dict[str, bool]) -> None:
    """M and N end inside a tile, beyond which no factor is there to be read."""
    case = make_case(**sizes(CONFIGS[name]) | {"n": 200, "k": 144}, config=CONFIGS[name], seed=8, **facts)
    check(case, Options(completion="lazy"))
    resources = compile_plan(case.plan, emulated=True).resources
    assert resources.stack_bytes == 0 and resources.local_bytes == 0


@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": "uint8", "k": 1040, "feature_scale": True, "scale": 1e-6},
        pytest.param({"dtype": "int8", "k": 272, "row_scale": True, "feature_scale": True}, marks=nightly),
        pytest.param({"dtype": "bfloat16", "k": 200, "scale": 1.0}, marks=nightly),
        {"dtype": "float16", "k": 136, "scale": 1.0, "pos": False},
    ],
    ids=str,
)
def test_rows_of_other_types(facts: dict) -> None:
    """K ends inside a block of 128 bytes; sums of uint8 rows leave the 24 bits of FP32."""
    case = make_case(batch=3, positions=90, n=136, config=CONFIGS["tile_n=128"], sm_count=2, seed=9, **facts)
    check(case, Options(completion="lazy"))
    resources = compile_plan(case.plan, emulated=True).resources
    assert resources.stack_bytes == 0 and resources.local_bytes == 0


def test_tiles_are_walked_in_a_snake(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 x 3 tiles of one cluster, as TMA loads them: a row turns round at its end and takes the last weight again."""
    loaded: dict[tuple[int, ...], dict[int, int]] = {}
    step = AsyncEngine.step

    def record(engine: AsyncEngine, index: int | None = None) -> bool:
        for address in engine._pending():
            if Work.from_address(address).kind == CONSTANTS["WORK_BULK_LOAD"]:
                copy = BulkCopy.from_address(address)
                loaded.setdefault(tuple(copy.map.extents[: copy.rank]), {})[copy.work.number] = copy.coordinates[1]
        return step(engine, index)

    monkeypatch.setattr(AsyncEngine, "step", record)
    case = make_case(batch=6, positions=100, n=520, k=16, sm_count=2, seed=3)
    check(case, Options(completion="lazy"))  # a copy waits for a step
    # Each CTA of the pair loads 128 rows of x and of the weight of every tile, the second one 128 rows further.
    for matrix, tiles in (((16, 600), (0, 0, 0, 1, 1, 1, 2, 2, 2)), ((16, 520), (0, 1, 2, 2, 1, 0, 0, 1, 2))):
        for cta in (0, 1):
            rows = [row for _, row in sorted(loaded[matrix].items()) if row // 128 % 2 == cta]
            assert [row // 256 for row in rows] == list(tiles)


def test_result_does_not_depend_on_the_schedule() -> None:
    for completion in ("eager", "lazy", "random"):
        for seed in range(3):
            case = make_case(batch=2, positions=196, n=264, k=272, sm_count=2, seed=7)
            check(case, Options(seed=seed, completion=completion, interleave="random"))


@pytest.mark.parametrize(
    ("n", "k", "positions"),
    [(768, 768, 196), (1024, 768, 256), (1152, 768, 256), (1152, 592, 729), (1536, 768, 256)],
)
def test_model_widths(n: int, k: int, positions: int) -> None:
    """One image of each published model size; K = 588 arrives here padded to 592."""
    check(make_case(batch=1, positions=positions, n=n, k=k, sm_count=148, seed=n))


@pytest.mark.parametrize("order", ["flat", pytest.param("position", marks=nightly)])
def test_more_than_two_to_the_31_output_elements(order: str) -> None:
    """The last tiles of an output of 4.3 GB: offsets beyond 32 bits, one tile per cluster, only the last ones run."""
    positions, n, k = 196, 768, 16
    images = 14_300
    m = positions * images
    assert m * n > 2**31
    # The last 112 rows, or the last position of the last 220 images.
    rows = torch.arange(m - 112, m) if order == "flat" else torch.arange(images - 220, images) * positions + 195
    generator = torch.Generator().manual_seed(3)
    x = torch.empty(m, k, dtype=torch.uint8)
    x[rows] = torch.randn(len(rows), k, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    x = x.view(torch.float8_e4m3fn)
    weight = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    pos = torch.randn(positions, n, generator=generator)
    config = Sm100PatchEmbedConfig(order=order, tile_positions=1)
    problem = PatchEmbedProblem(m, n, k, positions)
    plan = make_plan(problem, config, sm_count=2 * make_plan(problem, config).tiles)
    assert plan.clusters == plan.tiles
    table = build_table(None, pos, plan.table_shape, plan.table_layout)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    last = range(plan.tiles - 3, plan.tiles)
    emulate(plan, Operands(x=x, weight=weight, table=table, scale=1.0, out=out), Options(clusters=tuple(last)))
    expected = reference.patch_embed_f32(x.view(torch.uint8)[rows].view(x.dtype), weight, None, pos[rows % positions])
    assert torch.equal(out[rows].view(torch.int16), expected.view(torch.int16))
