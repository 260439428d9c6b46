"""Rows of other types than FP8, bit for bit against their contracts: sums of integers are exact in any order."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import patch_embed
from cute_kernels.config import PatchEmbedConfig
from cute_kernels.operations import reference
from tests.gpu.harness import random_call, sized
from tests.gpu.patch_embed_configs import AT_HAND, name

SHAPES = ((65, 13, 200, 256), (8, 196, 768, 768), (47, 49, 768, 1024), (3, 5, 8, 18))


def draw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """All integers of a type; of floating-point types small ones, whose sums are exact."""
    if dtype.is_floating_point:
        return torch.randint(-2, 3, shape, device="cuda").to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, device="cuda").to(dtype)


def check(config: PatchEmbedConfig | None, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    images, positions, n, k = sized(*shape)
    call = random_call(images, positions, n, k)
    x, weight = draw(dtype, images, positions, k), draw(torch.int8 if not dtype.is_floating_point else dtype, n, k)
    features = torch.rand(1, n, device="cuda") * 1e-4
    epilogue = "f32" if config is None else config.epilogue
    contract = {"f32": reference.patch_embed_f32, "bf16x2": reference.patch_embed_bf16x2}[epilogue]
    out = patch_embed(x, weight, call.bias, call.pos_embed, scale_a=0.5, scale_b=features, config=config)
    expected = contract(x.view(-1, k), weight, call.bias, call.pos_embed, features * 0.5).view(out.shape)
    differ = int((out != expected).sum())
    assert differ == 0, f"{differ} of {out.numel()} elements differ from the contract"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", AT_HAND.addends, ids=name)
def test_configurations(config: PatchEmbedConfig, dtype: torch.dtype):
    check(config, SHAPES[0], dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_default_configuration(shape: tuple[int, int, int, int], dtype: torch.dtype):
    check(None, shape, dtype)
