"""A vLLM plugin: patch embeddings of vLLM's vision towers by this package's kernels.

vLLM finds `plugin` through the entry point ``vllm.general_plugins`` in every one of its processes. It does nothing
unless the environment variable ``CUTE_KERNELS_VLLM`` names a precision:

    CUTE_KERNELS_VLLM=auto vllm serve ...

It registers replacements of vLLM's layers (``CustomOp.register_oot``), which run the kernels where such a layer is a
patch embedding of images of three channels and vLLM's own code everywhere else: layers of other channels have features
or spectrograms for inputs, which no normalisation bounds.

* ``bf16``, ``fp16``, ``fp8``: ``Conv2dLayer`` over normalised pixels.
* ``int8``: ``FusedMMInputNorm``, which normalises uint8 pixels on the device (``mm_device_do_normalize``), and the
  ``Conv2dLayer`` or ``Conv3dLayer`` behind it are one kernel over the uint8 pixels. Which layer that is, the first call
  shows: the one that gets the memory that the normalisation wrote.
* ``auto``: ``int8`` where there is such a pair, and the type of the weights elsewhere.

``CUTE_KERNELS_VLLM_STILL=1`` says that such a pair gets still images alone, whose frames are equal (Qwen-VL's and GLM's
rows have each patch twice): one is multiplied by the sum of the weight's frames. vLLM has to be told to take no videos.
"""

import importlib
import os
import threading
from collections.abc import Callable
from typing import Any
from warnings import warn

import torch

from cute_kernels.config import check_choice
from cute_kernels.models.nn.engine import PatchEngine
from cute_kernels.models.nn.layers import EngineMixin
from cute_kernels.models.nn.options import PatchOptions
from cute_kernels.models.processors import normalisation

VARIABLE, STILL = "CUTE_KERNELS_VLLM", "CUTE_KERNELS_VLLM_STILL"
_RAW = ("int8", "auto")
_ALLOWED = ("bf16", "fp16", "fp8", *_RAW)
_LAYERS, _NORM = ("Conv2dLayer", "Conv3dLayer"), "FusedMMInputNorm"
# ImageNet's, which of the normalisations in use reaches furthest, 2.64 against CLIP's 2.15 and SigLIP's 1: FP8's fixed
# scale covers the others too.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def plugin() -> None:
    """vLLM's entry point: `register` with the precision that the environment names, or nothing. Raises ValueError:
    another value of a variable."""
    precision, still = os.environ.get(VARIABLE, ""), os.environ.get(STILL, "0")
    check_choice(STILL, still, ("0", "1"))
    if precision:
        register(precision, still=still == "1")


def register(precision: str = "bf16", *, still: bool = False) -> type:
    """Replaces vLLM's layers for layers to come, and returns the class in place of ``Conv2dLayer``; again, it changes
    the precision of layers to come.

    Args:
        precision: ``"bf16"``, ``"fp16"``, ``"fp8"``, ``"int8"`` or ``"auto"``.
        still: whether pixels that a layer of several frames gets raw are still images', whose frames are equal.

    Raises:
        ModuleNotFoundError: no vLLM, or one without these layers, or for ``"int8"`` without a normalisation on devices.
        ValueError: another precision, or somebody else's replacement is registered.
    """
    check_choice(VARIABLE, precision, _ALLOWED)
    conv = _part("layers.conv")
    norm = _part("layers.fusion.mm_input_norm") if precision in _RAW else None
    if conv is None or (norm is None and precision == "int8"):
        version = "0.33 or later" if precision == "int8" else "with model_executor.layers.conv"
        raise ModuleNotFoundError(f"this needs vLLM {version}: https://docs.vllm.ai says how to install it")
    bases = [(getattr(conv, name), _PatchLayer) for name in (_LAYERS if norm is not None else _LAYERS[:1])]
    if norm is not None:
        bases.append((getattr(norm, _NORM), _PassesRawPixels))
    registry = _part("custom_op").op_registry_oot
    for base, _ in bases:
        known = registry.get(base.__name__)
        if known is not None and not issubclass(known, (EngineMixin, _PassesRawPixels)):
            other = f"{known.__module__}.{known.__qualname__}"
            raise ValueError(f"vLLM's {base.__name__} has a replacement already: {other}")
    for base, mixin in bases:
        if base.__name__ not in registry:
            members = {"__module__": __name__, "__doc__": mixin.__doc__}
            base.register_oot(type(f"Patch{base.__name__}", (mixin, base), members))
    for name in _LAYERS:
        if name in registry:
            registry[name].options = PatchOptions(precision=precision, mean=_MEAN, std=_STD)
            registry[name].still = still
    return registry[_LAYERS[0]]


def _part(name: str) -> Any:
    """A module of ``vllm.model_executor``, or None where there is none such."""
    try:
        return importlib.import_module(f"vllm.model_executor.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "vllm":
            raise
        return None


_last = threading.local()
"""``call`` of a thread: a normalisation whose layer is not known yet, the pixels it got, and what it made of them."""


class _PassesRawPixels:
    """``FusedMMInputNorm`` that leaves uint8 pixels as they are once it is known who gets them (``pair``, None before).

    ``under_way`` counts raw pixels that were left as they were and have not reached that layer.
    """

    def __init__(self, image_mean: list[float], image_std: list[float], rescale_factor: float, channel: int = 3):
        super().__init__(image_mean, image_std, rescale_factor, channel)
        self.mean, self.std = normalisation(image_mean, image_std, rescale_factor)
        self.pair: bool | None = None
        self.under_way = 0

    def forward_native(self, pixel_values: torch.Tensor, visual_dtype: torch.dtype) -> torch.Tensor:
        return self._pass(pixel_values, visual_dtype, super().forward_native)

    def forward_cuda(self, pixel_values: torch.Tensor, visual_dtype: torch.dtype) -> torch.Tensor:
        return self._pass(pixel_values, visual_dtype, super().forward_cuda)

    def _pass(self, pixels: torch.Tensor, dtype: torch.dtype, normalise: Callable[..., torch.Tensor]) -> torch.Tensor:
        before, _last.call = getattr(_last, "call", None), None
        if before is not None and before[0] is self:  # and nobody took it
            self.pair = False
        if self.pair is True and pixels.dtype == torch.uint8:
            self.under_way += pixels.numel()
            return pixels
        out = normalise(pixels, dtype)
        if self.pair is None and pixels.dtype == torch.uint8 and pixels.numel():
            _last.call = self, pixels, out
        return out

    def normalised(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Pixels that were left as they were, as vLLM gives them to its own layer."""
        forward = super().forward_cuda if pixels.is_cuda else super().forward_native
        return forward(pixels.flatten(1), dtype).view(pixels.shape)


class _PatchLayer(EngineMixin):
    """vLLM's layer, run by the kernels where it is a patch embedding; of its equal ``still`` frames one is multiplied.

    ``norm`` is empty, or has the normalisation in front of it, which is not a module of this one.
    """

    options: PatchOptions
    still: bool = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.engine = PatchEngine(self.options)
        self.norm: tuple[_PassesRawPixels, ...] = ()
        self.is_patch_embedding = (
            self.in_channels == self.options.channels
            and tuple(self.kernel_size) == tuple(self.stride)
            and self.kernel_size[-1] == self.kernel_size[-2]
            and not any(self.padding)
            and set(self.dilation) == {1}
            and self.groups == 1
        )
        self.frames = self.kernel_size[0] if len(self.kernel_size) == 3 else 1
        self.still = self.still and self.frames > 1
        if self.still and _most_videos() != 0:
            raise ValueError(
                f"{STILL} = '1' and vLLM takes videos, whose frames differ; allowed with "
                "--limit-mm-per-prompt '{\"video\": 0}'"
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
        fits = x.dim() == self.weight.dim() and x.shape[1] == self.in_channels and min(x.shape[-2:]) >= patch
        if not (self.is_patch_embedding and fits):
            return otherwise(x)
        if (raw := self._raw(x)) is not None:
            if self._takes_over(raw):
                return self._product(raw)
            return otherwise(self.norm[0].normalised(raw, self.weight.dtype))
        if x.dtype == torch.uint8:  # which normalisation a model has nobody tells its layers
            raise TypeError("x is torch.uint8: must be normalised pixels of a floating-point type")
        if self.options.precision == "int8" and not self.norm:
            warn(
                f"{VARIABLE} = 'int8' and pixels that were normalised before: vLLM's own layer runs. "
                "mm_device_do_normalize leaves them raw, in models that have it.",
                stacklevel=2,
            )
        if self.norm or self.options.precision == "int8" or x.dim() == 5:
            return otherwise(x)
        x = self.engine.as_said(x)
        if not self._takes_over(x):
            return otherwise(self.engine.normalised(x, self.weight))
        return self._product(x)

    def _takes_over(self, x: torch.Tensor) -> bool:
        whole = x.dim() == 4 or tuple(x.shape[2:]) == tuple(self.kernel_size)
        return whole and self.engine.takes_over(
            None, x if x.dim() == 4 else x.flatten(1), lambda: (self.weight, self.bias)
        )

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 5:
            x = x[:, :, :1] if self.still and x.dtype == torch.uint8 else x
            return self.engine.rows(x.flatten(1), self.weight, self.bias)[:, :, None, None, None]
        patch = self.weight.shape[-1]
        out = self.engine.images(x, self.weight, self.bias)
        return out.transpose(1, 2).unflatten(2, (x.shape[2] // patch, x.shape[3] // patch))

    def _raw(self, x: torch.Tensor) -> torch.Tensor | None:
        """The uint8 pixels that ``x`` is, or comes from; None where it does not come from any."""
        if torch.compiler.is_compiling():
            return None
        call, _last.call = getattr(_last, "call", None), None
        if call is not None and self.options.precision in _RAW and not self.norm and _is_whole(x, call[2]):
            norm, pixels, _ = call
            extents = {"channels": self.in_channels, "frames": self.frames}
            self.engine = PatchEngine(PatchOptions(precision="int8", **extents, mean=norm.mean, std=norm.std))
            self.norm, norm.pair = (norm,), True
            return pixels.reshape(x.shape)
        if not self.norm or (x.dtype != torch.uint8 and not self.norm[0].under_way):
            return None
        self.norm[0].under_way = max(0, self.norm[0].under_way - x.numel())
        return self.engine.as_said(x)  # back from the type to which its tower cast it


def _most_videos() -> int | None:
    """Videos of a request at most, as the vLLM that is being started is told; None where it does not say."""
    config = importlib.import_module("vllm.config").get_current_vllm_config().model_config
    multimodal = getattr(config, "multimodal_config", None)
    return None if multimodal is None else multimodal.get_limit_per_prompt("video")


def _is_whole(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether ``x`` is all of ``out`` in another shape."""
    where = (tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize for tensor in (x, out))
    return len(set(where)) == 1 and x.is_contiguous() and x.numel() == out.numel()


def _load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """vLLM's loader of a parameter, whose write autograd's version counter sees: vLLM's default writes to ``.data``.
    Raises ValueError: unequal shapes."""
    if param.shape != loaded_weight.shape:
        raise ValueError(f"loaded_weight has shape {list(loaded_weight.shape)}: must be {list(param.shape)}")
    with torch.no_grad():
        param.copy_(loaded_weight)
