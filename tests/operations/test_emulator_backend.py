"""`patch_embed` on the emulator backend: what the operator does to its arguments before the kernel sees them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import Sm90PatchEmbedConfig, Sm100PatchEmbedConfig, patch_embed
from cute_kernels.emulator import Options, current_options, default_options
from cute_kernels.operations import reference
from cute_kernels.operations.runtime.constants import DERIVED
from tests.nightly import drawn, examples

FP8 = torch.float8_e4m3fn


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def assert_same_bits(*arguments, **keywords) -> torch.Tensor:
    out = patch_embed(*arguments, **keywords, backend="emulator")
    expected = patch_embed(*arguments, **keywords, backend="reference")
    assert out.shape == expected.shape
    assert out.is_contiguous()
    wrong = bits(out) != bits(expected)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {wrong.nonzero()[0]}"
    return out


def fp8(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(FP8)


@settings(max_examples=examples(4, 200))
@given(
    seed=st.integers(0, 2**32),
    images=st.integers(1, 3),
    positions=st.integers(1, 70),
    n=st.integers(1, 20).map(lambda i: 8 * i),
    k=st.integers(1, 200),
    flat=st.booleans(),
    addend=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    with_bias=st.booleans(),
    with_pos=st.booleans(),
    scale_a=st.sampled_from([None, 0.013, torch.tensor(0.7), torch.tensor([[3.0]])]),
    epilogue=drawn(["f32"], ["f32", "bf16x2"]),
)
def test_any_call(seed, images, positions, n, k, flat, addend, with_bias, with_pos, scale_a, epilogue):
    generator = torch.Generator().manual_seed(seed)
    x = fp8(generator, images, positions, k)
    bias = torch.randn(n, generator=generator).to(addend) if with_bias else None
    pos = torch.randn(positions, n, generator=generator).to(addend) if with_pos else None
    config = Sm100PatchEmbedConfig(tile_n=128, epilogue=epilogue)
    x = x.view(-1, k) if flat else x
    assert_same_bits(x, fp8(generator, n, k), bias, pos, scale_a=scale_a, scale_b=0.25, config=config)


@pytest.mark.parametrize("offset", [1, 8, 16])
def test_slices_that_start_anywhere(offset):
    """TMA reads 16-byte-aligned addresses: other slices are copied, not misread."""
    generator = torch.Generator().manual_seed(offset)
    x = fp8(generator, 4 * 48 + offset)[offset:].view(1, 4, 48)
    weight = fp8(generator, 16 * 48 + offset)[offset:].view(16, 48)
    assert (x.data_ptr() % 16, weight.data_ptr() % 16) == (offset % 16, offset % 16)
    assert_same_bits(x, weight, torch.randn(16, generator=generator), scale_a=0.1)


def test_weight_is_padded_once_and_its_update_is_seen():
    generator = torch.Generator().manual_seed(0)
    x, weight = fp8(generator, 1, 3, 60), fp8(generator, 8, 60)
    bias, pos = torch.randn(8, generator=generator), torch.randn(3, 8, generator=generator)
    assert_same_bits(x, weight, bias, pos)
    misses = DERIVED.misses
    first = assert_same_bits(x, weight, bias, pos)
    assert DERIVED.misses == misses
    weight.copy_(fp8(generator, 8, 60))
    bias.mul_(2)
    second = assert_same_bits(x, weight, bias, pos)
    assert DERIVED.misses == misses + 2  # padded weight and table
    assert not torch.equal(first, second)


def test_tensor_cores_add_as_the_chip_does_unless_options_say_otherwise():
    generator = torch.Generator().manual_seed(2)
    x, weight, config = fp8(generator, 1, 64, 256), fp8(generator, 16, 256), Sm90PatchEmbedConfig()
    exact = assert_same_bits(x, weight, config=config)
    with default_options(Options()):
        assert current_options().arithmetic == "silicon"
        out = patch_embed(x, weight, config=config, backend="emulator")
    assert current_options().arithmetic == "exact"  # of the fixture
    expected = reference.patch_embed_f32(x[0], weight, None, None, 1.0, arithmetic="sm_90a")
    assert torch.equal(bits(out[0]), bits(expected))
    assert not torch.equal(out, exact)
    with pytest.raises(TypeError, match="options is a str: must be cute_kernels.emulator.Options"):
        with default_options("exact"):
            pass


def test_a_plan_that_cannot_be_is_refused_before_compilation(nothing_compiles):
    x = torch.zeros(1, 1, 16).to(FP8)
    with pytest.raises(ValueError, match="stages = 40:? .* nearest legal value: 5"):
        patch_embed(x, x[0].expand(8, 16).contiguous(), config=Sm100PatchEmbedConfig(stages=40), backend="emulator")


def test_compiled_graph_reaches_the_emulator():
    generator = torch.Generator().manual_seed(1)
    x, weight, pos = fp8(generator, 2, 5, 32), fp8(generator, 16, 32), torch.randn(5, 16, generator=generator)

    def embed(x, weight, pos):
        return patch_embed(x, weight, None, pos, scale_a=0.5, backend="emulator") * 2

    compiled = torch.compile(embed, backend="aot_eager", fullgraph=True)
    expected = patch_embed(x, weight, None, pos, scale_a=0.5, backend="reference") * 2
    assert torch.equal(compiled(x, weight, pos), expected)
    torch.compiler.reset()
