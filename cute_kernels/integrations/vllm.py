"""A vLLM plugin: patch embeddings of vLLM's vision towers by this package's kernels.

vLLM finds `plugin` through the entry point ``vllm.general_plugins`` in every one of its processes. It does nothing
unless the environment variable ``CUTE_KERNELS_VLLM`` names a precision:

    CUTE_KERNELS_VLLM=bf16 vllm serve ...

It registers a replacement of vLLM's ``Conv2dLayer`` (``CustomOp.register_oot``), which runs the kernels where such a
layer is a patch embedding of images of three channels and vLLM's own code everywhere else: layers of other channels
have features or spectrograms for inputs, which no normalisation bounds. vLLM's towers cast pixels to the type of the
weights, so the precisions are those of normalised pixels.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.nn.engine import PatchEngine
from cute_kernels.nn.layers import EngineMixin
from cute_kernels.nn.options import PatchOptions

VARIABLE = "CUTE_KERNELS_VLLM"
_ALLOWED = ("bf16", "fp16", "fp8")
_LAYER = "Conv2dLayer"
# ImageNet's, which of the normalisations in use reaches furthest, 2.64 against CLIP's 2.15 and SigLIP's 1: FP8's fixed
# scale covers the others too.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def plugin() -> None:
    """vLLM's entry point: `register` with the precision that the environment names, or nothing.

    Raises:
        ValueError: another precision.
    """
    precision = os.environ.get(VARIABLE, "")
    if precision:
        register(precision)


def register(precision: str = "bf16") -> type:
    """Replaces vLLM's ``Conv2dLayer`` for layers to come; again, it changes the precision of layers to come.

    Returns:
        The class that takes its place.

    Raises:
        ModuleNotFoundError: no vLLM, or one without ``vllm.model_executor.layers.conv``.
        ValueError: another precision, or somebody else's replacement is registered.
    """
    if precision not in _ALLOWED:
        raise ValueError(
            f"{VARIABLE} = {precision!r}, allowed: {', '.join(map(repr, _ALLOWED))} (vLLM's towers cast uint8 pixels)"
        )
    try:
        layers = importlib.import_module("vllm.model_executor.layers.conv")
        registry = importlib.import_module("vllm.model_executor.custom_op").op_registry_oot
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "vllm":
            raise
        raise ModuleNotFoundError(
            "this needs vLLM with model_executor.layers.conv: https://docs.vllm.ai says how to install it"
        ) from error
    options = PatchOptions(precision=precision, mean=_MEAN, std=_STD)
    known = registry.get(_LAYER)
    if known is None:
        known = _replacement(getattr(layers, _LAYER))
        getattr(layers, _LAYER).register_oot(known)
    elif not issubclass(known, EngineMixin):
        raise ValueError(f"vLLM's {_LAYER} has a replacement already: {known.__module__}.{known.__qualname__}")
    known.options = options
    return known


def _replacement(base: type) -> type:
    class PatchConv2dLayer(EngineMixin, base):
        options: PatchOptions

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.engine = PatchEngine(self.options)
            self.is_patch_embedding = (
                self.in_channels == self.options.channels
                and tuple(self.kernel_size) == tuple(self.stride)
                and self.kernel_size[0] == self.kernel_size[1]
                and not any(self.padding)
                and set(self.dilation) == {1}
                and self.groups == 1
            )

        def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
            """vLLM's reloading takes parameters out and puts the same ones back, with other numbers."""
            super().register_parameter(name, param)
            if param is not None:
                if not param.is_inference():
                    torch.autograd.graph.increment_version([param])
                if not hasattr(param, "weight_loader"):
                    param.weight_loader = _load

        # vLLM calls one of these, by platform and by whether its custom operations are enabled.
        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return self._embed(x, super().forward_native)

        def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
            return self._embed(x, super().forward_cuda)

        def _embed(self, x: torch.Tensor, otherwise: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            patch = self.weight.shape[-1]
            fits = x.dim() == 4 and x.shape[1] == self.in_channels and min(x.shape[2:]) >= patch
            if not (self.is_patch_embedding and fits):
                return otherwise(x)
            if x.dtype == torch.uint8:  # which normalisation a model has nobody tells its layers
                raise TypeError("x is torch.uint8, allowed: normalised pixels of a floating-point type")
            takes_over = self.engine.takes_over(x, self.weight, self.bias)
            self.engine.check_pixels(x, by_kernel=takes_over)
            if not takes_over:
                return otherwise(self.engine.normalised(x, self.weight))
            out = self.engine.images(x, self.weight, self.bias)
            return out.transpose(1, 2).unflatten(2, (x.shape[2] // patch, x.shape[3] // patch))

    return PatchConv2dLayer


def _load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """vLLM's loader of a parameter, whose write autograd's version counter sees: vLLM's default writes to ``.data``.

    Args:
        param, loaded_weight: as vLLM names them, of equal shapes.

    Raises:
        ValueError: other shapes.
    """
    if param.shape != loaded_weight.shape:
        raise ValueError(f"loaded_weight has shape {list(loaded_weight.shape)}, allowed: {list(param.shape)}")
    with torch.no_grad():
        param.copy_(loaded_weight)
