"""`Options.arithmetic`, through whole kernels: against the torch reference of the same sums."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.config import Sm90PatchEmbedConfig, Sm100PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.operations import reference
from cute_kernels.operations.runtime.emulated import launch as emulate
from tests.emulator.gemm_inputs import make_gemm_case
from tests.emulator.kernel_inputs import make_case
from tests.nightly import crossed


@pytest.mark.parametrize(("arch", "config"), [("sm_90a", Sm90PatchEmbedConfig()), ("sm_100a", Sm100PatchEmbedConfig())])
def test_patch_embed(arch: str, config: Sm90PatchEmbedConfig | Sm100PatchEmbedConfig) -> None:
    """FP8: 13 bits on Hopper, which changes BF16 results, and 25 on Blackwell, which hardly does."""
    case = make_case(bias=False, pos=False, config=config)
    expected = reference.patch_embed_f32(
        case.tensors.x, case.tensors.weight, None, None, case.tensors.scale, arithmetic=arch
    )
    assert arch == "sm_100a" or (expected != case.expected).any()
    emulate(case.plan, case.tensors, Options(arithmetic="silicon"))
    assert torch.equal(case.tensors.out.view(torch.int16), expected.view(torch.int16))
    emulate(case.plan, case.tensors, Options(arithmetic="exact"))
    assert torch.equal(case.tensors.out.view(torch.int16), case.expected.view(torch.int16))


@pytest.mark.parametrize(
    ("dtype", "arch"), crossed([torch.bfloat16, torch.float16, torch.float32], ["sm_90a", "sm_100a"])
)
def test_gemm_into_fp32(arch: str, dtype: torch.dtype) -> None:
    case = make_gemm_case(m=96, n=64, k=200, in_dtype=dtype, out_dtype=torch.float32, bias=False, arch=arch)
    exact = case.expected[..., :64].clone()
    split = getattr(case.plan.config, "split_k", 1)
    case.expected[..., :64] = reference.gemm(
        case.tensors.a, case.tensors.b, None, torch.float32, split, arithmetic=arch
    )
    assert (case.expected[..., :64] != exact).float().mean() > 0.3
    emulate(case.plan, case.tensors, Options(arithmetic="silicon"))
    assert not case.mismatches().any()


def test_other_arithmetic_is_refused() -> None:
    with pytest.raises(ValueError, match="arithmetic = 'fast': must be .*'silicon', 'exact'"):
        Options(arithmetic="fast")
