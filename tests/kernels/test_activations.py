"""Activations: the device function bit for bit against the reference, and the reference against FP64."""

from __future__ import annotations

import math
import re
import tempfile

import cuda.bindings.driver as driver
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace
from scipy import special

from cute_kernels import Sm90GemmConfig, Sm100GemmConfig, emulator
from cute_kernels.emulator.programs import host
from cute_kernels.operations.reference.activations import ACTIVATIONS, gated_e4m3
from tests.emulator.cases import check
from tests.emulator.gemm_inputs import make_gemm_case
from tests.kernels.activation_kernel import ActivationKernel
from tests.nightly import examples, nightly

SHARES = {
    "silu": special.expit,
    "quick_gelu": lambda x: special.expit(1.702 * x),
    "gelu": special.ndtr,
    "gelu_tanh": lambda x: special.expit(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
}
"""What x is multiplied by, in FP64."""

BOUNDS = {torch.bfloat16: 7e-4, torch.float32: 8e-7}
"""Of the error over the magnitude of x, before the result is rounded."""


def values(count: int = 6000) -> torch.Tensor:
    """Dense around zero, every exponent, and what is special; an even number of them."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (count // 2,), generator=generator).to(torch.int32).view(torch.float32)
    unusual = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 65519.0, 65520.0, -65520.0]
    # Around where the steps end, in all arithmetics, and where FP16 is subnormal.
    edges = torch.linspace(-16, 16, 801)[:800], torch.linspace(-1e-4, 1e-4, 200)
    return torch.cat([torch.randn(count // 2, generator=generator) * 3, bits, torch.tensor(unusual), *edges])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", [BFloat16, Float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_device_function_gives_the_references_bits(activation, dtype, arch):
    source = values()
    target = torch.full_like(source, 77.0)
    pointers = [make_ptr(Float32, t.data_ptr(), AddressSpace.gmem, assumed_align=4) for t in (source, target)]
    arguments = (*pointers, Int32(source.numel()), driver.CUstream(0))
    with tempfile.TemporaryDirectory() as directory, host.recording_runtime():
        options = f"--gpu-arch={arch} --keep-ptx --dump-dir={directory}"
        kernel = ActivationKernel(activation, dtype, packed=arch == "sm_100a")
        function = cute.compile(kernel, *arguments, options=options)
    launch = host.record(function, *arguments)
    memory = emulator.GlobalMemory()
    memory.register_tensor(source, "source", writable=False)
    memory.register_tensor(target, "target", writable=True)
    ptx = function.__ptx__
    emulator.run(
        ptx, re.search(r"\.entry\s+(\w+)", ptx).group(1), grid=launch.grid, block=launch.block,
        cluster=launch.cluster, dynamic_smem=launch.dynamic_smem, params=launch.params, memory=memory,
    )  # fmt: skip
    expected = ACTIVATIONS[activation](source, torch.bfloat16 if dtype is BFloat16 else torch.float32)
    assert torch.equal(target.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(target[numbers].view(torch.int32), expected[numbers].view(torch.int32))


def errors(activation: str, x: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """Errors of a sigmoid's activation over |x|; a product that is no normal number may lose half of its last bit."""
    got, exact = ACTIVATIONS[activation](x, dtype).double().numpy(), x.double().numpy()
    error = np.abs(got - exact * SHARES[activation](exact)) - 2.0**-150
    return error / np.maximum(np.abs(exact), 1e-300)


@pytest.mark.parametrize("activation", SHARES)
def test_errors_of_all_fp32_numbers_where_the_share_is_fp16s(activation):
    """It depends on x rounded to FP16: what it differs from moves one way between the ends of what is rounded alike."""
    halves = torch.arange(0x7C01, dtype=torch.int32).to(torch.int16).view(torch.float16).to(torch.float64)
    ends = ((halves[:-2] + halves[1:-1]) / 2).to(torch.float32)
    x = torch.cat([halves[:-1].to(torch.float32), ends, torch.tensor([65520.0, 1e30, 3.4e38])])
    beside = torch.cat([x.nextafter(torch.tensor(toward)) for toward in (0.0, math.inf)])
    x = torch.cat([x, beside])
    x = torch.cat([x, -x])
    x = x[(x != 0) & x.isfinite()]
    assert errors(activation, x, torch.bfloat16).max() <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("activation", SHARES)
def test_errors_where_the_share_is_fp32s(activation):
    """Every exponent with 64 fractions, and densely where the steps are."""
    bits = torch.arange(0, 0x7F800000, 1 << 17, dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = torch.cat([bits, torch.linspace(2**-10, 16, examples(60_001, 300_001)), values(20_000)])
    x = torch.cat([x, -x])
    x = x[(x != 0) & x.isfinite()]
    assert errors(activation, x, torch.float32).max() <= BOUNDS[torch.float32]
    assert torch.equal(ACTIVATIONS[activation](x[::7], torch.float16), ACTIVATIONS[activation](x[::7], torch.float32))


@pytest.mark.parametrize("factor", [1.0, 0.37, 300.0, 2.0**-8])
@pytest.mark.parametrize("activation", SHARES)
def test_errors_of_products_for_e4m3(activation, factor):
    """Beside what the products' own range takes: FP16 ends at 65504, and its numbers are multiples of 2^-24."""
    x = torch.cat([torch.linspace(2**-10, 16, examples(60_001, 300_001)), torch.logspace(-3, 3, 10_001)])
    x = torch.cat([x, -x])
    got = gated_e4m3(activation, x, torch.tensor(factor)).double().numpy()
    exact = factor * x.double().numpy()
    finite = np.abs(exact) <= 65504
    errors = np.abs(got - exact * SHARES[activation](x.double().numpy()))[finite] - 2.0**-24
    assert (errors / np.abs(exact[finite])).max() <= 3e-3


@pytest.mark.parametrize("activation", SHARES)
def test_products_for_e4m3_are_finite(activation):
    """Also where a product with the share would be one of infinity and 0."""
    x = torch.tensor([-math.inf, -3e38, -70000.0, 70000.0, 3e38, math.inf, math.nan])
    got = gated_e4m3(activation, x, torch.tensor(8.0))
    expected = torch.tensor([-0.0, -0.0, -0.0, 65504.0, 65504.0, 65504.0], dtype=torch.float16)
    assert torch.equal(got[:6].view(torch.int16), expected.view(torch.int16)) and got[6].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", SHARES)
def test_monotone_from_zero_on_and_of_the_sign_of_x(activation, dtype):
    """In FP32; in BF16 to a unit in the last place. Beyond the step x or zero."""
    x = torch.linspace(0, 20, examples(80_001, 400_001))
    y, mirrored = (ACTIVATIONS[activation](values, dtype) for values in (x, -x))
    rounded = y.to(dtype).to(torch.float32)
    slack = 0.0 if dtype is torch.float32 else 2.0**-7
    assert (rounded[1:] >= rounded[:-1] - slack * rounded[:-1]).all()
    assert (y <= x).all() and (mirrored <= 0).all()
    assert torch.equal(y[x > 15], x[x > 15]) and (mirrored[x > 15] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", SHARES)
def test_far_from_zero(activation, dtype):
    """As in torch, NaN of -inf."""
    x = torch.tensor([0.0, -0.0, math.inf, 1e30, 3.4e38, -60.0, -1e5, -3.4e38, math.nan, -math.inf])
    y = ACTIVATIONS[activation](x, dtype)
    assert torch.equal(y[:5], x[:5]) and torch.signbit(y[1])
    assert (y[5:8] == 0).all() and y[5:8].signbit().all() and y[8:].isnan().all()


@pytest.mark.parametrize("activation", ["relu", "relu_squared"])
def test_relu_is_torchs(activation):
    x = values()
    expected = torch.relu(x) ** (2 if activation == "relu_squared" else 1)
    torch.testing.assert_close(ACTIVATIONS[activation](x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("activation", SHARES)
def test_no_further_from_torch_than_its_own_rounding(activation):
    """Of BF16 results, what rounding to BF16 adds, 2^-8 |x|, and less than a fifth of it."""
    x = torch.linspace(-10, 10, 4001)
    functions = {
        "silu": torch.nn.functional.silu,
        "quick_gelu": lambda v: v * torch.sigmoid(1.702 * v),
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
    }
    expected = functions[activation](x)
    torch.testing.assert_close(ACTIVATIONS[activation](x), expected, rtol=1.3e-6, atol=1e-5)
    error = (ACTIVATIONS[activation](x, torch.bfloat16).to(torch.bfloat16) - expected).abs()
    assert (error <= 1.2 * 2.0**-8 * x.abs()).all()


SMALL = Sm100GemmConfig(tile_n=64, stages=3, store_stages=1)
SMALL_SM90 = Sm90GemmConfig(128, 64, stages=3, cluster_m=1, store_stages=1)
GEMM_CONFIGS = [
    SMALL,
    Sm100GemmConfig(block_m=256, stages=4),
    SMALL_SM90,
    Sm90GemmConfig(64, 64, stages=3, cluster_m=1, store_stages=1, pingpong=True),
    Sm90GemmConfig(tile_n=64, cluster_m=1, split_k=2, store_stages=1),
    Sm100GemmConfig(),
    Sm90GemmConfig(),
]
"""Small tiles first: a kernel has an activation's code for each column of a tile."""

ACTIVATED = tuple(name for name in ACTIVATIONS if name != "none")


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        pytest.param(
            config, activation, marks=() if (i + j) % 2 == 0 and i not in (1, 3, 5, 6) else nightly,
            id=f"{config}-{activation}",
        )
        for i, config in enumerate(GEMM_CONFIGS)
        for j, activation in enumerate(ACTIVATED)
    ],
)
def test_the_gemm_applies_it_behind_the_bias(config, activation):
    check(make_gemm_case(m=150, n=72, k=192, activation=activation, config=config))


@pytest.mark.parametrize(
    ("out_dtype", "bias", "config"),
    [
        (torch.float32, True, SMALL),
        pytest.param(torch.float32, True, Sm90GemmConfig(), marks=nightly),
        pytest.param(torch.float16, False, Sm100GemmConfig(), marks=nightly),
        (torch.float16, False, SMALL_SM90),
        pytest.param(torch.bfloat16, False, Sm100GemmConfig(), marks=nightly),
        pytest.param(torch.bfloat16, False, Sm90GemmConfig(), marks=nightly),
    ],
)
def test_output_types_and_no_bias(out_dtype, bias, config):
    check(make_gemm_case(m=40, n=64, k=64, out_dtype=out_dtype, bias=bias, activation="gelu_tanh", config=config))
