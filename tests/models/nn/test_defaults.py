"""`torch.set_default_dtype` and `torch.set_default_device`: nothing depends on them, constants are FP32 on a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

import cute_kernels
from cute_kernels import testing
from cute_kernels.models.nn import PatchOptions, convert_layer
from cute_kernels.operations import reference
from cute_kernels.operations.patch_embed import PATCH_EMBED
from tests.models.nn.test_module import MEAN, STD, convolution, positions, uint8_images

CONVOLUTION, POSITIONS = convolution(), positions().detach()
IMAGES, ROWS = uint8_images(48, 64), torch.rand(4, 48, generator=torch.Generator().manual_seed(0))
MATRIX, BIAS = torch.rand(16, 48, generator=torch.Generator().manual_seed(1)), torch.rand(16)
WIDE = torch.randn(64, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 1e30


def converted(precision: str, backend: str) -> torch.Tensor:
    options = PatchOptions(precision=precision, mean=MEAN, std=STD, backend=backend)
    return convert_layer(copy.deepcopy(CONVOLUTION), options)(IMAGES, POSITIONS)


def of_rows(order: str) -> torch.Tensor:
    layer = torch.nn.Linear(768, 24, dtype=torch.float32, device="cpu")
    layer.weight.data, layer.bias.data = CONVOLUTION.weight.data.flatten(1), CONVOLUTION.bias.data
    options = PatchOptions(order=order, precision="fp8", mean=MEAN, std=STD)
    return convert_layer(layer, options)(IMAGES.flatten()[: 2 * 6 * 768].view(2, 6, 768))


def prepared(precision: str, **more) -> torch.Tensor:
    weight = cute_kernels.prepare_patch_weight(CONVOLUTION.weight, precision=precision, mean=MEAN, std=STD)
    return cute_kernels.patch_embed_images(IMAGES, weight, CONVOLUTION.bias, **more)


def of_type(dtype: torch.dtype, weight_dtype: torch.dtype, **more) -> torch.Tensor:
    rows, matrix = (ROWS * 50).to(dtype), (MATRIX * 50).to(weight_dtype)
    return cute_kernels.patch_embed(rows, matrix, BIAS, scale_a=ROWS[:, :1].contiguous(), scale_b=0.3, **more)


def product(dtype: torch.dtype, **more) -> torch.Tensor:
    return cute_kernels.gemm(ROWS.to(dtype), MATRIX.to(dtype), bias=BIAS, out_dtype=torch.float32, **more)


def tuned() -> torch.Tensor:
    problem = cute_kernels.config.PatchEmbedProblem(
        m=8, n=16, k=32, in_dtype="float8_e4m3fn", table_rows=4, row_scale=True, feature_scale=True
    )
    arguments = PATCH_EMBED.example(problem)
    assert arguments.scale_a.dtype is arguments.scale_b.dtype is arguments.pos_embed.dtype is torch.float32
    return torch.zeros(1, dtype=torch.float32, device="cpu")


CASES: dict[str, Callable[[], torch.Tensor]] = {
    **{
        f"{precision} {backend}": lambda precision=precision, backend=backend: converted(precision, backend)
        for precision in ("bf16", "fp16", "int8", "fp8")
        for backend in ("auto", "torch")
    },
    "emulated module": lambda: converted("int8", "emulator"),
    "rows of chw": lambda: of_rows("chw"),
    "rows of hwc": lambda: of_rows("hwc"),
    **{f"prepared {p}": lambda p=p: prepared(p) for p in ("bf16", "fp16", "int8")},
    "float8 rows": lambda: of_type(torch.float8_e4m3fn, torch.float8_e4m3fn),
    "float8 rows, emulated": lambda: of_type(torch.float8_e4m3fn, torch.float8_e4m3fn, backend="emulator"),
    "uint8 rows": lambda: of_type(torch.uint8, torch.int8),
    "bfloat16 rows": lambda: of_type(torch.bfloat16, torch.bfloat16),
    "gemm": lambda: product(torch.bfloat16),
    "gemm, silu": lambda: product(torch.float16, activation="silu"),
    "gemm, gelu": lambda: product(torch.float16, activation="gelu_tanh"),
    "gemm, tf32": lambda: product(torch.float32, allow_tf32=True),
    "gemm, emulated": lambda: product(torch.bfloat16, backend="emulator"),
    "granularity": lambda: reference.rounding.granularity(WIDE, 24),
    "tuned": tuned,
    "testing.varied": lambda: testing.varied((5, 7), torch.float32, device="cpu"),
    "testing.exact": lambda: testing.exact((5, 7), torch.float32, terms=8, device="cpu"),
}  # fmt: skip


def other_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def other_device() -> Iterator[None]:
    """One where nothing has a value, so that whatever is made there is missed."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


DEFAULTS = {
    "bfloat16": lambda: other_dtype(torch.bfloat16),
    "float16": lambda: other_dtype(torch.float16),
    "float64": lambda: other_dtype(torch.float64),
    "meta": other_device,
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_results_are_the_same_in_every_bit(case: str, default: str) -> None:
    expected = CASES[case]()
    other = DEFAULTS[default]()
    next(other)
    try:
        got = CASES[case]()
    finally:
        next(other, None)
    assert got.dtype is expected.dtype and got.device.type == "cpu"
    assert torch.equal(got, expected)
