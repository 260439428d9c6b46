"""The kernels of ``mma.sync`` in the emulator: bit for bit against the torch reference, on every architecture."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels import reference
from cute_kernels.compile import compile_plan
from cute_kernels.config import Sm80GemmConfig, Sm80ImagesConfig, Sm80PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.plan import Plan
from cute_kernels.plan.registry import MMA_SYNC
from tests.emulator.exact_sums import emulate
from tests.emulator.gemm_inputs import check, make_gemm_case
from tests.emulator.mma_sync_inputs import SMALL, make_image_case, make_rows_case
from tests.emulator.mma_sync_inputs import check as check_operation
from tests.nightly import by_day, drawn, examples

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ANY_ORDER = Options(completion="random", interleave="random", seed=3)
TILES = {
    "64 x 64": SMALL | {"stages": 3},
    "64 x 64, 128 bytes": SMALL | {"row_bytes": 128, "stages": 2},
    "32 x 128, 1 x 4 warps": {"tile_m": 32, "tile_n": 128, "warps_m": 1, "warps_n": 4, "row_bytes": 128, "stages": 2},
    "128 x 128, 8 warps": {"warps_m": 4, "row_bytes": 128, "stages": 3},
    "128 x 256": {"tile_n": 256, "warps_n": 4, "stages": 3},
    "256 x 128": {"tile_m": 256, "warps_m": 4, "stages": 3},
    "128 x 192": {"tile_n": 192, "warps_m": 4, "stages": 3},
}  # fmt: skip
DAILY = ("64 x 64", "64 x 64, 128 bytes", "32 x 128, 1 x 4 warps")

# --- the dense GEMM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_day(TILES, DAILY))
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_tile_is_bit_exact(name: str, dtype: torch.dtype) -> None:
    """Rows, columns and K end inside a tile; one CTA takes all tiles, and copies the next one's blocks under each."""
    config = Sm80GemmConfig(**TILES[name])
    k = 200 if dtype is BF16 else 84
    sizes = {"m": config.tile_m + 9, "n": config.tile_n // 2 + 9, "k": k}
    case = make_gemm_case(**sizes, in_dtype=dtype, out_dtype=dtype, config=config, sm_count=1, seed=1)
    assert case.plan.overlaps and case.plan.tiles > case.plan.clusters == config.resident_ctas
    check(case, ANY_ORDER)


@pytest.mark.parametrize("arch", MMA_SYNC)
def test_every_architecture(arch: str) -> None:
    """The plan's own choice of each, whose kernels are compiled for it."""
    case = make_gemm_case(m=40, n=72, k=72, in_dtype=FP16, out_dtype=FP32, activation="silu", arch=arch)
    assert f".target {arch}" in compile_plan(case.plan, emulated=True).ptx
    check(case, ANY_ORDER)


@settings(max_examples=examples(5, 100), suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 150),
    n=st.integers(1, 150),
    k=st.integers(1, 30).map(lambda i: 8 * i),
    batches=st.integers(1, 2),
    types=drawn([(BF16, FP16), (FP32, FP32)], itertools.product((BF16, FP16, FP32), (BF16, FP16, FP32))),
    bias=drawn([True], [True, False]),
    tile=st.sampled_from(DAILY),
    arch=drawn(["sm_80"], MMA_SYNC),
    sm_count=st.sampled_from([1, 2, 100]),
    seed=st.integers(0, 2**20),
)
def test_any_product(types, tile, seed, **facts) -> None:
    config = Sm80GemmConfig(**TILES[tile])
    case = make_gemm_case(in_dtype=types[0], out_dtype=types[1], config=config, seed=seed, **facts)
    check(case, Options(seed=seed, completion="random", interleave="random"))


@pytest.mark.parametrize(("arch", "instruction"), [("sm_86", False), ("sm_90", True), ("sm_120", True)])
def test_tf32_is_rounded_to_nearest_as_everywhere(arch: str, instruction: bool) -> None:
    """Ties to even, over the largest number to infinity, NaN of any payload; the reference has the same bits.

    From sm_90 on there is an instruction for it, and fragments are rounded.
    """
    config = Sm80GemmConfig(**SMALL)
    case = make_gemm_case(m=40, n=40, k=40, in_dtype=FP32, out_dtype=FP32, config=config, bias=False, arch=arch)
    assert ("cvt.rn.tf32.f32" in compile_plan(case.plan, emulated=True).ptx) == instruction
    a = torch.zeros(1, 40, 40)
    bits = [0x3F801000, 0x3F803000, 0xBF801000, 0x3F800FFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x00000FFF, 0xFFFFFFFF]
    a[0, : len(bits), 0] = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(FP32)
    b = torch.zeros(1, 40, 40)
    b[0, 0, 0], b[0, 1, 0] = 1.0, 1 + 2**-11 + 2**-20  # rounded up
    emulate(case.plan, case.tensors.replace(a=a, b=b), ANY_ORDER)
    expected = reference.gemm(a, b)
    torch.testing.assert_close(case.tensors.out, expected, rtol=0, atol=0, equal_nan=True)
    assert case.tensors.out[0, : len(bits), 0].isnan().tolist() == [False] * 6 + [True, False, True]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("rounding", ["truncate", "nearest_a"])
def test_other_roundings_cut_what_they_do_not_round(rounding: str, arch: str) -> None:
    config = Sm80GemmConfig(**SMALL, rounding=rounding)
    case = make_gemm_case(m=40, n=40, k=40, in_dtype=FP32, out_dtype=FP32, config=config, bias=False, arch=arch)
    a, b = (tensor.view(torch.int32).bitwise_and(~0x1FFF).view(FP32) for tensor in (case.tensors.a, case.tensors.b))
    assert not torch.equal(a, case.tensors.a)
    emulate(case.plan, case.tensors, ANY_ORDER)
    assert torch.equal(case.tensors.out, reference.gemm(case.tensors.a if rounding == "nearest_a" else a, b))


# --- the patch embed of rows -----------------------------------------------------------------------------------------


def rows_case(dtype: str, **facts: Any) -> None:
    check_operation(make_rows_case(dtype, **facts), ANY_ORDER)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bfloat16", "float16"])
def test_rows_of_every_type(dtype: str) -> None:
    rows_case(dtype)


@pytest.mark.parametrize("arch", ["sm_89", "sm_120"])
def test_rows_of_fp8_where_tensor_cores_multiply_them(arch: str) -> None:
    rows_case("float8_e4m3fn", arch=arch, pos_index=None, scale_a=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": None, "pos_embed": None, "pos_index": None, "scale_a": None, "scale_b": 0.37},
        {"pos_embed": None, "pos_index": None, "scale_b": None},
        {"pos_index": None, "scale_a": torch.tensor([0.25]), "scale_b": None},
        {"config": Sm80PatchEmbedConfig(**SMALL, epilogue="bf16x2"), "scale_a": 0.5},
    ],
    ids=["a number", "factors of rows", "in memory", "bf16x2"],
)
def test_epilogues_of_rows(changes: dict[str, Any]) -> None:
    rows_case("int8", **changes)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_sums_of_bf16_where_there_is_an_instruction_and_where_not(arch: str) -> None:
    config = Sm80PatchEmbedConfig(**SMALL, epilogue="bf16x2")
    rows_case("bfloat16", arch=arch, config=config, scale_a=None, pos_index=None)


# --- the patch embed of images ---------------------------------------------------------------------------------------


def images_case(precision: str, **facts: Any) -> Plan:
    case = make_image_case(precision, **facts)
    check_operation(case, ANY_ORDER)
    return case.plan


ONE = Sm80ImagesConfig(**SMALL, tile_images=1)
EIGHT = Sm80ImagesConfig(**SMALL)
WIDE = Sm80ImagesConfig(**SMALL | {"tile_n": 128})


@pytest.mark.parametrize(
    ("precision", "config", "changes"),
    [
        ("int8", EIGHT, {"sm_count": 1}),
        ("int8", ONE, {"batch": 3, "pos": False, "out_dtype": FP32}),
        ("int8", dataclasses.replace(EIGHT, row_bytes=128, stages=3, resident_ctas=2), {"channels": 4}),
        ("int8", dataclasses.replace(EIGHT, warps_m=4, tile_m=128, row_bytes=128, stages=2), {}),
        ("int16", WIDE, {"sm_count": 1}),
        ("int16", ONE, {"batch": 2, "out_dtype": FP32, "n": 40, "pos": False}),
        ("bf16", EIGHT, {"grid": (1, 3)}),
        ("bf16", dataclasses.replace(ONE, row_bytes=128, stages=2), {"batch": 2, "pos": False}),
        ("fp16", ONE, {"batch": 1, "out_dtype": FP16}),
        ("int8", ONE, {"batch": 2, "patch": 32}),
        ("int16", dataclasses.replace(WIDE, tile_images=1), {"batch": 2, "patch": 32, "grid": (1, 2)}),
        ("bf16", ONE, {"batch": 2, "patch": 32, "grid": (2, 1), "channels": 1}),
        ("fp16", dataclasses.replace(ONE, row_bytes=128, stages=2), {"batch": 1, "patch": 32, "channels": 1}),
    ],
    ids=str,
)
def test_images(precision: str, config: Sm80ImagesConfig, changes: dict[str, Any]) -> None:
    images_case(precision, config=config, **changes)


@pytest.mark.parametrize("arch", by_day(dict.fromkeys(MMA_SYNC), ("sm_86", "sm_120")))
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_images_of_every_architecture(arch: str, precision: str) -> None:
    images_case(precision, arch=arch, batch=2, grid=(1, 2), n=40, channels=1)


@pytest.mark.parametrize(
    ("precision", "changes"),
    [("int8", {"patch": 14}), ("fp16", {"patch": 14, "grid": (1, 2), "batch": 2}), ("int8", {"channels_last": True})],
    ids=str,
)
def test_rows_of_other_lengths_and_channels_last_take_a_pass_in_front(precision: str, changes: dict[str, Any]) -> None:
    plan = images_case(precision, **changes)
    assert [kernel.operation for kernel in plan.launches] == ["patchify", "patch_embed"]
    assert "griddepcontrol" not in compile_plan(plan.launches[0], emulated=True).ptx  # exists from sm_90 on


@settings(max_examples=examples(3, 60), suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 20),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    n=st.integers(1, 12).map(lambda i: 8 * i),
    channels=st.integers(1, 4),
    precision=drawn(["int8", "int16"], ["int8", "int16", "bf16", "fp16"]),
    images=st.sampled_from([1, 8]),
    bias=st.booleans(),
    pos=st.booleans(),
    sm_count=st.sampled_from([1, 100]),
    seed=st.integers(0, 2**20),
)
def test_any_images(images: int, **facts: Any) -> None:
    images_case(config=dataclasses.replace(WIDE, tile_images=images), **facts)
