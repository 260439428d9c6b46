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
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

from cute_kernels import Sm90GemmConfig, Sm100GemmConfig, emulator
from cute_kernels.emulator import host
from cute_kernels.reference.activations import ACTIVATIONS
from tests.emulator.activation_kernel import ActivationKernel
from tests.emulator.gemm_inputs import check, make_gemm_case
from tests.nightly import nightly

EXACT = {
    "silu": lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0,
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def values(count: int = 6000) -> torch.Tensor:
    """Dense around zero, every exponent, and what is special."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (count // 2,), generator=generator).to(torch.int32).view(torch.float32)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 87.0, -87.5, 126.0]
    # Around the exponents at which the power becomes infinite, and at which 1 swallows it.
    edges = torch.linspace(-89.5, -86.5, 400), torch.linspace(-9.6, -8.6, 200), torch.linspace(16, 18, 100)
    return torch.cat([torch.randn(count // 2, generator=generator) * 6, bits, torch.tensor(special), *edges])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_device_function_gives_the_references_bits(activation, arch):
    source = values()
    target = torch.full_like(source, 77.0)
    pointers = [make_ptr(Float32, t.data_ptr(), AddressSpace.gmem, assumed_align=4) for t in (source, target)]
    arguments = (*pointers, Int32(source.numel()), driver.CUstream(0))
    with tempfile.TemporaryDirectory() as directory, host.recording_runtime():
        options = f"--gpu-arch={arch} --keep-ptx --dump-dir={directory}"
        function = cute.compile(ActivationKernel(activation), *arguments, options=options)
    launch = host.record(function, *arguments)
    memory = emulator.GlobalMemory()
    memory.register_tensor(source, "source", writable=False)
    memory.register_tensor(target, "target", writable=True)
    ptx = function.__ptx__
    emulator.run(
        ptx, re.search(r"\.entry\s+(\w+)", ptx).group(1), grid=launch.grid, block=launch.block,
        cluster=launch.cluster, dynamic_smem=launch.dynamic_smem, params=launch.params, memory=memory,
    )  # fmt: skip
    expected = ACTIVATIONS[activation](source)
    assert torch.equal(target.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(target[numbers].view(torch.int32), expected[numbers].view(torch.int32))


@pytest.mark.parametrize("activation", EXACT)
def test_the_reference_is_the_function_to_a_few_units(activation):
    x = torch.linspace(-10, 10, 4001)
    got = ACTIVATIONS[activation](x).double().numpy()
    expected = np.array([EXACT[activation](float(v)) for v in x])
    # Relative where the exponential is FP32's; GELU's tail falls faster than the cancellation in its exact form shows.
    error = np.abs(got - expected)
    bound = np.maximum(2e-6 * np.abs(expected), 1e-12) if activation == "silu" else 2e-6 * np.abs(expected) + 1e-12
    assert (error <= bound).all()
    torch_functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
    }
    torch.testing.assert_close(ACTIVATIONS[activation](x), torch_functions[activation](x), rtol=5e-6, atol=2e-6)


def test_gelu_keeps_its_bound_for_any_number():
    """Every exponent, and densely to where the tail keeps its value, which is below 1e-37."""
    x = torch.cat([values(20_000), torch.linspace(-14, 14, 40_001)])
    x = x[x.isfinite()]
    got = ACTIVATIONS["gelu"](x).double().numpy()
    exact = x.double().numpy()
    expected = np.array([EXACT["gelu"](v) for v in exact])
    kept = exact < -13
    assert (np.abs(got[kept]) < 1e-37).all() and (np.abs(expected[kept]) < 1e-37).all()
    tiny = np.abs(exact) < 1e-37  # of which half are no normal numbers
    assert (np.abs(got - expected)[tiny] <= 2e-45).all()
    numbers = ~kept & ~tiny
    bound = (5e-7 + 6e-8 * np.minimum(exact, 0)[numbers] ** 2) * np.abs(expected[numbers])
    assert (np.abs(got - expected)[numbers] <= bound).all()


@pytest.mark.parametrize("activation", EXACT)
def test_far_from_zero(activation):
    x = torch.tensor([0.0, -0.0, math.inf, 1e30, 3.4e38, -60.0, -1e4, -3.4e38])
    y = ACTIVATIONS[activation](x)
    assert torch.equal(y[:5], x[:5]) and torch.signbit(y[1])
    assert (y[5:].abs() < 1e-15).all() and torch.isnan(ACTIVATIONS[activation](torch.tensor(math.nan)))


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


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        pytest.param(
            config, activation, marks=() if (i + j) % 2 == 0 and i not in (1, 3, 5, 6) else nightly,
            id=f"{config}-{activation}",
        )
        for i, config in enumerate(GEMM_CONFIGS)
        for j, activation in enumerate(EXACT)
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
