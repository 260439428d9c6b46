"""On a GPU nobody waits for pixels to be looked at: what contradicts is counted, and a later call raises."""

from __future__ import annotations

import copy

import pytest
import torch

from cute_kernels.models.nn import PatchOptions, convert_layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("wrong", [0.5, 256.0, -1.0, float("nan")])
@torch.no_grad()
def test_pixels_that_are_not_raw(wrong: float) -> None:
    layer = torch.nn.Conv2d(3, 64, 16, stride=16).cuda().bfloat16()
    ours = convert_layer(copy.deepcopy(layer), PatchOptions(precision="int8"))
    raw = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8, device="cuda")
    expected = ours(raw)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(ours(raw.to(dtype)), expected)
    bad = raw.float()
    bad[1, 2, 3, 4] = wrong
    ours(bad)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="an earlier call on cuda.* gave wrong results: .*whole numbers"):
        ours(raw)
    assert torch.equal(ours(raw), expected)  # reported once


@torch.no_grad()
def test_raw_pixels_that_were_taken_for_normalised() -> None:
    ours = convert_layer(torch.nn.Conv2d(3, 64, 16, stride=16).cuda().bfloat16(), PatchOptions())
    raw = torch.randint(0, 256, (4, 3, 64, 64), device="cuda").float()
    ours(raw / 127.5 - 1)
    ours(raw)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="an earlier call on cuda.*look raw"):
        ours(raw / 127.5 - 1)
