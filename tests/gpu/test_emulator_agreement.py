"""The emulator and the GPU run the same PTX: equal bits, and a measured difference from exact sums."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import emulator, patch_embed
from cute_kernels.config import PatchEmbedConfig
from cute_kernels.operations import reference
from tests.gpu import architecture
from tests.gpu.harness import ACCUMULATION_ERROR, Call, random_call, sized
from tests.gpu.patch_embed_configs import AT_HAND


def both(call: Call, config: PatchEmbedConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of the GPU and of the emulator, on the CPU."""
    tensors = (call.x, call.weight, call.bias, call.pos_embed)
    on_gpu = patch_embed(*tensors, scale_a=call.scale, config=config)
    host = (None if t is None else t.cpu() for t in tensors)
    return on_gpu.cpu(), patch_embed(*host, scale_a=call.scale, config=config, backend="emulator")


@pytest.mark.parametrize("name", AT_HAND.agreeing)
@pytest.mark.parametrize("shape", [(67, 2, 200, 768), (2, 49, 136, 592)])
def test_equal_bits_where_sums_are_exact(name, shape):
    on_gpu, emulated = both(random_call(*sized(*shape), small_integers=True), AT_HAND.agreeing[name])
    assert torch.equal(on_gpu.view(torch.int16), emulated.view(torch.int16))


@pytest.mark.parametrize("k", [128, 768])
def test_equal_bits_on_random_data(k):
    """With the sums of the chip's tensor cores, of the emulator and of the reference."""
    call = random_call(*sized(67, 2, 200, k))
    call = dataclasses.replace(call, bias=None, pos_embed=None)
    on_gpu, emulated = both(call, next(iter(AT_HAND.agreeing.values())))
    x, weight, scale = call.x.cpu(), call.weight.cpu(), call.scale
    plain = reference.patch_embed_f32(x.flatten(0, -2), weight, None, None, scale, arithmetic=architecture.at_hand())
    assert torch.equal(on_gpu.view(torch.int16), emulated.view(torch.int16))
    assert torch.equal(on_gpu.view(torch.int16).flatten(), plain.view(torch.int16).flatten())


@pytest.mark.parametrize("k", [128, 768])
def test_difference_of_exact_sums_on_random_data(k, record_property):
    """What the tensor cores lose of exact sums that are rounded once per instruction: the figures go to the record."""
    call = random_call(*sized(67, 2, 200, k))
    call = dataclasses.replace(call, bias=None, pos_embed=None)
    with emulator.default_options(emulator.Options(arithmetic="exact")):
        on_gpu, emulated = both(call, next(iter(AT_HAND.agreeing.values())))
    magnitude = call.scale * (call.x.double().abs() @ call.weight.double().abs().T).cpu()
    difference = (on_gpu.double() - emulated.double()).abs()
    record_property("elements that differ", float((difference > 0).double().mean()))
    record_property("largest difference / sum |x| |w|", float((difference / magnitude).max()))
    # Half a BF16 ulp each, and the accumulation.
    bound = ACCUMULATION_ERROR * magnitude + 2.0**-8 * (on_gpu.double().abs() + emulated.double().abs())
    assert bool((difference <= bound).all())
