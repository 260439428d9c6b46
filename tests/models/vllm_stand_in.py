"""A stand-in for the few names of vLLM that its plugin uses, and the beginnings of towers of three kinds."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from cute_kernels.models import vllm as integration
from cute_kernels.operations import reference
from cute_kernels.operations.patch_weight import prepare_patch_weight

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def vllm_names(monkeypatch: pytest.MonkeyPatch, videos: int = 999) -> types.SimpleNamespace:
    """``CustomOp`` creates what is registered under its class's name and dispatches to one of the forwards.

    Args:
        videos: how many a request may have.
    """
    registry: dict[str, type] = {}

    class CustomOp(torch.nn.Module):
        def __new__(cls, *_, **__):
            return super().__new__(registry.get(cls.__name__, cls))

        def __init__(self):
            super().__init__()
            self.chosen = self.forward_native

        def forward(self, *given):
            return self.chosen(*given)

        @classmethod
        def register_oot(cls, replacement):
            assert cls.__name__ not in registry
            replacement.name = cls.__name__
            registry[cls.__name__] = replacement
            return replacement

    class Conv2dLayer(CustomOp):
        dimensions, convolution = 2, staticmethod(torch.nn.functional.conv2d)

        def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, bias=True):
            super().__init__()
            each = lambda value: (value,) * self.dimensions if isinstance(value, int) else tuple(value)  # noqa: E731
            self.in_channels, self.groups = in_channels, 1
            self.kernel_size, self.stride = each(kernel_size), each(stride)
            self.padding, self.dilation = each(padding), each(1)
            self.weight = torch.nn.Parameter(torch.randn(out_channels, in_channels, *self.kernel_size) * 0.05)
            self.bias = torch.nn.Parameter(torch.randn(out_channels)) if bias else None

        def forward_native(self, x):
            return self.convolution(x, self.weight, self.bias, self.stride, self.padding)

        forward_cuda = forward_native

    class Conv3dLayer(Conv2dLayer):
        dimensions, convolution = 3, staticmethod(torch.nn.functional.conv3d)

    class FusedMMInputNorm(CustomOp):
        calls = 0

        def __init__(self, image_mean, image_std, rescale_factor, channel=3):
            super().__init__()
            mean, std = torch.tensor(image_mean), torch.tensor(image_std)
            self.register_buffer("weight", rescale_factor / std, persistent=False)
            self.register_buffer("bias", -mean / std, persistent=False)

        def forward_native(self, pixel_values, visual_dtype):
            FusedMMInputNorm.calls += 1
            x = pixel_values.reshape(len(pixel_values), 3, -1) * self.weight[:, None] + self.bias[:, None]
            return x.view(pixel_values.shape).to(visual_dtype)

        forward_cuda = forward_native

    names = ["vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fusion"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__path__ = []
    custom_op = types.ModuleType("vllm.model_executor.custom_op")
    custom_op.op_registry_oot = registry
    layers = types.ModuleType("vllm.model_executor.layers.conv")
    layers.Conv2dLayer, layers.Conv3dLayer = Conv2dLayer, Conv3dLayer
    norms = types.ModuleType("vllm.model_executor.layers.fusion.mm_input_norm")
    norms.FusedMMInputNorm = FusedMMInputNorm
    config = types.ModuleType("vllm.config")
    multimodal = types.SimpleNamespace(get_limit_per_prompt=lambda modality: {"image": 999}.get(modality, videos))
    config.get_current_vllm_config = lambda: types.SimpleNamespace(
        model_config=types.SimpleNamespace(multimodal_config=multimodal)
    )
    monkeypatch.setitem(sys.modules, config.__name__, config)
    monkeypatch.setitem(sys.modules, norms.__name__, norms)
    monkeypatch.setitem(sys.modules, custom_op.__name__, custom_op)
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    for variable in (integration.VARIABLE, integration.STILL):
        monkeypatch.delenv(variable, raising=False)
    return types.SimpleNamespace(layer=Conv2dLayer, rows=Conv3dLayer, norm=FusedMMInputNorm, registry=registry)


class Rows(torch.nn.Module):
    """As Qwen's towers are: rows of two frames."""

    shape = (16, 3 * 2 * 14 * 14)

    def __init__(self, vllm, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.input_norm = vllm.norm(MEAN, STD, 1 / 255)
        self.proj = vllm.rows(3, 32, (2, 14, 14), stride=(2, 14, 14)).to(dtype)
        self.layers = [self.proj]

    def forward(self, pixels):
        x = self.input_norm(pixels, self.proj.weight.dtype)
        return self.proj(x.view(len(x), -1, 2, 14, 14)).view(len(x), -1)


class Patches(Rows):
    """As Kimi's: images of one patch each."""

    shape = (16, 3, 14, 14)

    def __init__(self, vllm, dtype=torch.float32):
        super().__init__(vllm, dtype)
        self.proj = vllm.layer(3, 32, 14, stride=14).to(dtype)

    def forward(self, pixels):
        x = self.input_norm(pixels.flatten(1), self.proj.weight.dtype).view_as(pixels)
        return self.proj.forward_native(x).view(len(x), -1)


class Images(Patches):
    """As Llama Nemotron's: the tower casts what it gets."""

    shape = (2, 3, 42, 56)

    def forward(self, pixels):
        x = self.input_norm(pixels.flatten(1), self.proj.weight.dtype).view(pixels.shape)
        return self.proj(x.to(self.proj.weight.dtype)).flatten(2).transpose(1, 2)


class Weights(Images):
    """As Pixtral's: the layer's weight is used, and the layer is not called."""

    def forward(self, pixels):
        x = self.input_norm(pixels.flatten(1), self.proj.weight.dtype).view(pixels.shape)
        return torch.nn.functional.conv2d(x, self.proj.weight, self.proj.bias, stride=14)


def raw(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def still(rows: int, seed: int = 1) -> torch.Tensor:
    """Rows of two equal frames."""
    return raw((rows, 3, 1, 196), seed).expand(-1, -1, 2, -1).reshape(rows, -1)


def bits(tower: Rows, pixels: torch.Tensor, *, one_frame: bool = False) -> torch.Tensor:
    """What the reference gives for the weights that a tower has now, on the CPU; of the first frame of rows alone."""
    weight, bias, pixels = (tensor.detach().cpu() for tensor in (tower.proj.weight, tower.proj.bias, pixels))
    if one_frame:
        weight, pixels = weight.float().sum(2), pixels.unflatten(1, (3, 2, -1))[:, :, 0].flatten(1)
    frames = 2 if weight.dim() == 5 else 1
    weight = weight.flatten(1, 2) if frames == 2 else weight
    mean, std = ([value for value in values for _ in range(frames)] for values in (MEAN, STD))
    prepared = prepare_patch_weight(weight, precision="int8", channels=3 * frames, mean=mean, std=std)
    pixels = pixels.reshape(-1, 3 * frames, 14, 14) if pixels.dim() == 2 else pixels
    out = reference.patch_embed_images(
        pixels, prepared.raw, prepared.scale, prepared.offset + bias.float(), None, 14, torch.bfloat16
    ).to(weight.dtype)
    return out if isinstance(tower, Images) else out.flatten(0, 1)
