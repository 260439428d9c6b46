"""Run where the package is installed with all extras: a product in the emulator, and a model of transformers."""

from __future__ import annotations

import torch
import transformers

import cute_kernels
from cute_kernels.models import transformers as fast_patches
from cute_kernels.testing import emulation  # what pytest's plugin imports

generator = torch.Generator().manual_seed(0)
a, b = (torch.randint(-2, 3, shape, generator=generator) for shape in ((32, 64), (48, 64)))
assert torch.equal(cute_kernels.gemm(a.bfloat16(), b.bfloat16(), backend="emulator").long(), a @ b.T)
small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**small, image_size=64, patch_size=16)).eval()
images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=generator)
with torch.no_grad():
    expected = model(pixel_values=images / 127.5 - 1).last_hidden_state
    got = fast_patches.convert(model, "int8", mean=0.5, std=0.5)(pixel_values=images).last_hidden_state
assert (got - expected).norm() / expected.norm() < 4e-2
print(f"transformers {transformers.__version__}: emulator ({emulation.__name__}), converted model")
