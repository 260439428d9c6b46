"""The embedding with timm's constructor; tests/models/other_torch/test_timm.py has it in timm's models."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.models.nn import PatchOptions, TimmPatchEmbed


@pytest.mark.parametrize("flatten", [True, False])
@torch.no_grad()
def test_what_it_computes(flatten: bool) -> None:
    module = TimmPatchEmbed((32, 48), 16, embed_dim=24, flatten=flatten, options=PatchOptions(precision="fp16"))
    assert list(module.state_dict()) == ["proj.weight", "proj.bias"]
    assert (module.grid_size, module.num_patches, module.feat_ratio()) == ((2, 3), 6, 16)
    images = torch.randint(0, 256, (2, 3, 32, 48), dtype=torch.uint8)
    expected = torch.nn.functional.conv2d(images / 127.5 - 1, module.proj.weight, module.proj.bias, stride=16)
    expected = expected.flatten(2).transpose(1, 2) if flatten else expected
    assert torch.allclose(module(images), expected, atol=1e-3)


@torch.no_grad()
def test_a_norm_a_type_and_another_size() -> None:
    module = TimmPatchEmbed(
        None, 16, 1, 24, torch.nn.LayerNorm, bias=False, dtype=torch.bfloat16, options=PatchOptions(mean=0.2)
    )
    images = torch.randint(0, 256, (2, 1, 32, 64), dtype=torch.uint8)
    out = module(images)
    assert out.shape == (2, 8, 24) and out.dtype == torch.bfloat16 and module.num_patches is None
    plain = torch.nn.functional.conv2d((images / 255 - 0.2) / 0.5, module.proj.weight.float(), stride=16)
    expected = torch.nn.functional.layer_norm(plain.flatten(2).transpose(1, 2), (24,))
    assert (out - expected).norm() / expected.norm() < 2e-2


def test_sizes_that_are_refused() -> None:
    module = TimmPatchEmbed(32, 16, embed_dim=24)
    with pytest.raises(ValueError, match=r"x has H x W = \[32, 48\]: must be \[32, 32\]"):
        module(torch.zeros(1, 3, 32, 48))
    with pytest.raises(ValueError, match=r"must be multiples of \[16, 16\]"):
        TimmPatchEmbed(32, 16, embed_dim=24, strict_img_size=False)(torch.zeros(1, 3, 40, 32))
    for keywords in ({"output_fmt": "NHWC"}, {"dynamic_img_pad": True}):
        with pytest.raises(ValueError, match="models.timm.convert keeps"):
            TimmPatchEmbed(32, **keywords)
    with pytest.raises(ValueError, match="12 features"):
        TimmPatchEmbed(32, embed_dim=12)
    with pytest.raises(ValueError, match="patch_size has"):
        TimmPatchEmbed(32, 0)
