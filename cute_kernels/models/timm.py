"""timm's vision transformers with this package's patch embedding.

    from cute_kernels.models import timm
    model = timm.convert(timm_model)

The layer ``proj`` of timm's ``PatchEmbed`` and ``NaFlexEmbeds`` is run by the kernels; positions and class tokens stay
timm's, an addition of their own. Parameters keep their names, and checkpoints do not change.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cute_kernels.models.nn import layers
from cute_kernels.models.nn.options import Backend, PatchOptions, Pixels, Precision
from cute_kernels.models.replace import Found, all_converted, check_model, convert_all, revert_all

_EMBEDDINGS = "PatchEmbed or NaFlexEmbeds of timm"


def convert(
    model: torch.nn.Module,
    precision: Precision = "bf16",
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    pixels: Pixels = "auto",
    backend: Backend = "auto",
) -> torch.nn.Module:
    """Gives a timm model this package's patch embedding, in place, and returns it.

    Args:
        model: what ``timm.create_model`` returned, or a module with such a model in it.
        precision: what is multiplied, see `cute_kernels.models.nn.PatchOptions`.
        mean, std: the normalisation that uint8 images get; None takes that of the model's ``pretrained_cfg``, and 0.5
            where it has none.
        pixels, backend: see `cute_kernels.models.nn.PatchOptions`.

    Raises:
        ModuleNotFoundError: no timm.
        TypeError, ValueError: an argument that is not allowed; a model without a ``PatchEmbed`` or ``NaFlexEmbeds``;
            one whose layer is no patch embedding (patches that overlap, a stem of several convolutions).
    """
    check_model(model)
    found = find(model, precision, mean=mean, std=std, pixels=pixels, backend=backend)
    convert_all(model, found, _EMBEDDINGS)
    pad_raw_pixels(model)
    return model


def revert(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes `convert`, in place, and returns the model."""
    revert_all(model)
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is _pad:
                del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]
    return model


def is_converted(model: torch.nn.Module) -> bool:
    """Whether calls of a model's patch embeddings come to this package, and nothing stays to be converted.

    An adapter around a layer (PEFT) is given raw pixels as they are, so a model with one does not count as converted.

    Raises:
        ModuleNotFoundError: no timm.
        TypeError: no module.
        ValueError: a model without a ``PatchEmbed`` or ``NaFlexEmbeds``.
    """
    check_model(model)
    return all_converted(model, ((module, module.proj) for _, module in embeddings(model)), _EMBEDDINGS)


def embeddings(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Patch embeddings of timm in a model, with their names."""
    kinds = _kinds()
    return ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))


def pad_raw_pixels(model: torch.nn.Module) -> None:
    """Has converted embeddings of ``dynamic_img_pad`` pad uint8 images with the mean.

    timm pads what it is given with zeros. Of normalised pixels that is the mean, of raw ones the darkest colour.
    """
    for _, module in embeddings(model):
        padded = getattr(module, "dynamic_img_pad", False)
        if padded and layers.is_converted(module.proj) and _pad not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_pad, with_kwargs=True)


def _pad(module: torch.nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """uint8 images to whole patches, to the right and below; the mean is rounded to a pixel's value."""
    images = arguments[0] if arguments else None
    if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8 or images.dim() != 4:
        return None
    batch, channels, *sizes = images.shape
    height, width = (-(-size // patch) * patch for size, patch in zip(sizes, module.patch_size, strict=True))
    if [height, width] == sizes:
        return None
    mean = torch.tensor(module.proj.engine.options.mean, dtype=torch.float32, device=images.device)
    mean = mean.mul(255).round().to(torch.uint8)
    padded = mean[None, :, None, None].repeat(batch, 1, height, width)
    padded[:, :, : sizes[0], : sizes[1]] = images
    return (padded, *arguments[1:]), named


def find(
    model: torch.nn.Module,
    precision: Precision,
    *,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
    pixels: Pixels,
    backend: Backend,
) -> list[Found]:
    """The layers that `convert` would convert, with their options.

    Raises:
        ModuleNotFoundError: no timm.
        TypeError, ValueError: an argument that is not allowed.
    """
    found = []
    for name, module in embeddings(model):
        layer = module.proj
        channels = layer.in_channels if isinstance(layer, torch.nn.Conv2d) else getattr(module, "in_chans", 3)
        config = _pretrained_config(model, name)
        linear = isinstance(layer, torch.nn.Linear)
        options = PatchOptions(
            precision=precision,
            order="hwc" if linear and getattr(module, "channels_last", True) else "chw",
            channels=channels,
            mean=_for_channels(config.get("mean", 0.5), channels) if mean is None else mean,
            std=_for_channels(config.get("std", 0.5), channels) if std is None else std,
            pixels=pixels,
            backend=backend,
        )
        found.append((f"{name}.proj".lstrip("."), layer, options))
    return found


def _kinds() -> tuple[type, ...]:
    try:
        importlib.import_module("timm")  # whose name is the error's also where imports are blocked
        kinds = [importlib.import_module("timm.layers").PatchEmbed]
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise ModuleNotFoundError("this needs timm: pip install timm") from error
    try:
        kinds.append(importlib.import_module("timm.models.naflexvit").NaFlexEmbeds)
    except (ModuleNotFoundError, AttributeError):  # of a timm before NaFlex
        pass
    return tuple(kinds)


def _pretrained_config(model: torch.nn.Module, name: str) -> dict:
    """Configuration of the pretrained weights: that of the innermost module around the layer that has one."""
    while True:
        owner = model.get_submodule(name) if name else model
        if isinstance(getattr(owner, "pretrained_cfg", None), dict):
            return owner.pretrained_cfg
        if not name:
            return {}
        name = name.rpartition(".")[0]


def _for_channels(value: float | Sequence[float], channels: int) -> float | Sequence[float]:
    """A model of other than three channels has the configuration of three all the same."""
    return value if isinstance(value, float) or len(value) == channels else sum(value) / len(value)
