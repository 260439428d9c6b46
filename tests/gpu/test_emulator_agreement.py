"""The emulator and the GPU run the same PTX: equal bits where sums are exact, a measured difference elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import Sm90PatchEmbedConfig, patch_embed
from tests.gpu.harness import ACCUMULATION_ERROR, Call, random_call

CONFIGS = {
    "registers, position": Sm90PatchEmbedConfig(tile_rows=64),
    "registers, flat": Sm90PatchEmbedConfig(tile_rows=96, order="flat"),
    "streamed, position": Sm90PatchEmbedConfig(tile_rows=32, weight="streamed", order="position"),
    "streamed, 8 images x 2 positions": Sm90PatchEmbedConfig(tile_rows=16, weight="streamed", tile_positions=2),
    "streamed, flat, 3 warpgroups": Sm90PatchEmbedConfig(tile_rows=96, warpgroups=3, weight="streamed", order="flat"),
    "1 warpgroup, 1 CTA, bf16x2": Sm90PatchEmbedConfig(
        tile_rows=32, warpgroups=1, cluster=1, weight="streamed", order="flat", pingpong=False, epilogue="bf16x2"
    ),
}


def both(call: Call, config: Sm90PatchEmbedConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of the GPU and of the emulator, on the CPU."""
    tensors = (call.x, call.weight, call.bias, call.pos_embed)
    on_gpu = patch_embed(*tensors, scale_a=call.scale, config=config)
    host = (None if t is None else t.cpu() for t in tensors)
    return on_gpu.cpu(), patch_embed(*host, scale_a=call.scale, config=config, backend="emulator")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [(67, 2, 200, 768), (2, 49, 136, 592)])
def test_equal_bits_where_sums_are_exact(name, shape):
    on_gpu, emulated = both(random_call(*shape, small_integers=True), CONFIGS[name])
    assert torch.equal(on_gpu.view(torch.int16), emulated.view(torch.int16))


@pytest.mark.parametrize("k", [128, 768])
def test_difference_on_random_data(k, record_property):
    """FP8 WGMMA keeps fewer bits than the contract that the emulator follows: the figures go to the record."""
    call = random_call(67, 2, 200, k)
    call = dataclasses.replace(call, bias=None, pos_embed=None)
    on_gpu, emulated = both(call, CONFIGS["registers, position"])
    magnitude = call.scale * (call.x.double().abs() @ call.weight.double().abs().T).cpu()
    difference = (on_gpu.double() - emulated.double()).abs()
    record_property("elements that differ", float((difference > 0).double().mean()))
    record_property("largest difference / sum |x| |w|", float((difference / magnitude).max()))
    # Half a BF16 ulp each, and the accumulation.
    bound = ACCUMULATION_ERROR * magnitude + 2.0**-8 * (on_gpu.double().abs() + emulated.double().abs())
    assert bool((difference <= bound).all())
