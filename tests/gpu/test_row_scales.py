"""Scales of rows and features, alone and together with a scale of the whole tensor."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import patch_embed
from cute_kernels.config import PatchEmbedConfig
from cute_kernels.operations import reference
from tests.gpu.harness import Call, random_call, sized
from tests.gpu.patch_embed_configs import AT_HAND, name

CONTRACTS = {"f32": reference.patch_embed_f32, "bf16x2": reference.patch_embed_bf16x2}


def factors(call: Call, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``[B, S, 1]`` and ``[1, N]``."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    images, positions, _ = call.x.shape
    rows = torch.rand(images, positions, 1, generator=generator, device="cuda") + 0.5
    return rows, torch.rand(1, call.weight.shape[0], generator=generator, device="cuda") + 0.5


def check(call: Call, out: torch.Tensor, rows: torch.Tensor | None, features: torch.Tensor | float, epilogue: str):
    """Bit for bit: the sums of small integers are exact."""
    expected = CONTRACTS[epilogue](
        call.x.view(-1, call.x.shape[-1]), call.weight, call.bias, call.pos_embed, features, None, rows
    )
    differ = int((out.view(-1, out.shape[-1]) != expected).sum())
    assert differ == 0, f"{differ} of {out.numel()} elements differ from the contract"


@pytest.mark.parametrize("which", ["rows", "features", "rows and features"])
@pytest.mark.parametrize("epilogue", ["f32", "bf16x2"])
@pytest.mark.parametrize("config", AT_HAND.addends, ids=name)
def test_configurations(config: PatchEmbedConfig, epilogue: str, which: str):
    config = dataclasses.replace(config, epilogue=epilogue)
    call = random_call(*sized(65, 13, 200, 256), small_integers=True)
    rows, features = factors(call)
    scale_a = rows if "rows" in which else call.scale
    scale_b = features if "features" in which else call.scale if "rows" in which else None
    out = patch_embed(call.x, call.weight, call.bias, call.pos_embed, scale_a=scale_a, scale_b=scale_b, config=config)
    if "rows" not in which:
        features = features * call.scale
    check(call, out, rows if "rows" in which else None, features if "features" in which else call.scale, epilogue)


@pytest.mark.parametrize(
    "shape", [(1, 196, 768, 768), (8, 196, 768, 768), (47, 49, 768, 3072), (65, 256, 1152, 588), (300, 3, 16, 48)]
)
def test_default_configuration(shape: tuple[int, int, int, int]):
    call = random_call(*sized(*shape), small_integers=True)
    rows, features = factors(call)
    out = patch_embed(call.x, call.weight, call.bias, call.pos_embed, scale_a=rows, scale_b=features)
    check(call, out, rows, features, "f32")
    flat = patch_embed(
        call.x.flatten(0, 1), call.weight, call.bias, call.pos_embed, scale_a=rows.view(-1, 1), scale_b=features
    )
    assert torch.equal(flat, out)


def test_warm_calls_read_new_factors_and_other_kinds_of_scales():
    call = random_call(50, 21, 264, 256, small_integers=True)
    arguments = (call.x, call.weight, call.bias, call.pos_embed)
    for seed in range(3):
        rows, features = factors(call, seed)
        check(call, patch_embed(*arguments, scale_a=rows, scale_b=features), rows, features, "f32")
        check(call, patch_embed(*arguments, scale_a=rows, scale_b=0.5), rows, 0.5, "f32")
        in_memory = torch.tensor(0.5, device="cuda")
        check(call, patch_embed(*arguments, scale_a=rows, scale_b=in_memory), rows, 0.5, "f32")
        check(call, patch_embed(*arguments, scale_a=in_memory, scale_b=features), None, features * 0.5, "f32")
        # Every other row of a larger tensor is copied, and never remembered as if it were contiguous.
        spread = torch.stack([rows, -rows], -1).view(50, 21, 2)[..., :1]
        check(call, patch_embed(*arguments, scale_a=spread, scale_b=features), rows, features, "f32")


def test_row_wise_scales_in_a_graph():
    call = random_call(50, 21, 264, 256, small_integers=True)
    rows, features = factors(call)
    arguments = (call.x, call.weight, call.bias, call.pos_embed)
    patch_embed(*arguments, scale_a=rows, scale_b=features)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = patch_embed(*arguments, scale_a=rows, scale_b=features)
    fresh, _ = factors(call, 1)
    rows.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    check(call, out, rows, features, "f32")
