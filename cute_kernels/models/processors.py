"""Normalisation of pixels as image processors of transformers and vLLM say it."""

import copy
import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

PerChannel = float | Sequence[float]
Normalisation = tuple[PerChannel, PerChannel]


def normalisation(mean: PerChannel, std: PerChannel, rescale_factor: float = 1 / 255) -> Normalisation:
    """Mean and standard deviation of pixels divided by 255, of a processor that multiplies by another factor."""
    scale = 1.0 if rescale_factor == 1 / 255 else 1 / (255 * rescale_factor)
    scaled = (scale * v if isinstance(v, (int, float)) else tuple(scale * each for each in v) for v in (mean, std))
    return tuple(scaled)


def of_processor(processor: Any) -> Normalisation | None:
    """Mean and standard deviation of an image processor, as `normalisation` has them; None where it does not say.
    ``processor``: of transformers, be it the one of a model with text; its configuration as a mapping; or torchvision's
    transforms."""
    processor = getattr(processor, "image_processor", processor)
    for step in getattr(processor, "transforms", ()):  # torchvision's, where `ToTensor` divides by 255
        if hasattr(step, "mean") and hasattr(step, "std"):
            return tuple(torch.as_tensor(value).flatten().tolist() for value in (step.mean, step.std))
    found = processor.get if isinstance(processor, Mapping) else lambda name: getattr(processor, name, None)
    factor = 1.0 if found("do_rescale") is False else found("rescale_factor") or 1 / 255
    if found("do_normalize") is False:
        return normalisation(0.0, 1.0, factor)
    mean, std = found("image_mean"), found("image_std")
    return None if mean is None or std is None else normalisation(mean, std, factor)


def of_checkpoint(model: object, channels: int = 3) -> Normalisation | None:
    """Mean and standard deviation of the processor beside the checkpoint of a model or a configuration, or None.

    Only what is on this machine is looked at, and of C-RADIO the module that normalises.
    """
    conditioner = getattr(model, "input_conditioner", None)
    if hasattr(conditioner, "norm_mean"):
        return tuple(tuple(values.flatten().tolist()) for values in (conditioner.norm_mean, conditioner.norm_std))
    config = getattr(model, "config", model)
    name = getattr(model, "name_or_path", None) or getattr(config, "_name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    mixin = importlib.import_module("transformers.image_processing_base").ImageProcessingMixin
    try:
        config, _ = mixin.get_image_processor_dict(name, local_files_only=True)
    except (OSError, ValueError):  # none there, or a name of the hub without such a file in the cache
        return None
    return of_processor(config)


def of_pretrained_cfg(model: object, channels: int) -> Normalisation | None:
    """Mean and standard deviation that a model of timm says of weights that are there to be loaded, or None.

    Of a model without any they are timm's defaults. They are of three channels, and averaged for other numbers.
    """
    config = getattr(model, "pretrained_cfg", None)
    config = config if isinstance(config, Mapping) else {}
    found = config.get("mean"), config.get("std")
    if not any(config.get(name) for name in ("url", "hf_hub_id", "file", "state_dict")):
        return None
    return None if None in found else tuple(v if len(v) == channels else sum(v) / len(v) for v in found)


def of_open_clip(tower: object, channels: int) -> Normalisation | None:
    """Mean and standard deviation that a tower of open_clip says, by which its own transforms normalise, or None.

    open_clip fills OpenAI's in where a checkpoint says none, so these say nothing.
    """
    found = getattr(tower, "image_mean", None), getattr(tower, "image_std", None)
    if None in found:
        return None
    constants = importlib.import_module("open_clip.constants")
    filled_in = constants.OPENAI_DATASET_MEAN, constants.OPENAI_DATASET_STD
    return None if tuple(map(tuple, found)) == tuple(map(tuple, filled_in)) else found


def of_model_being_built() -> Normalisation | None:
    """`of_checkpoint` of the model whose constructor calls this one's caller, or None.

    A part of a model does not know the checkpoint; the configuration that frames around have does.
    """
    frame = sys._getframe(1)
    while frame is not None:
        config = frame.f_locals.get("config")
        if config is not None and (known := of_checkpoint(config)) is not None:
            return known
        frame = frame.f_back
    return None


def raw_processor(processor: Any) -> Any:
    """See `cute_kernels.models.transformers.raw_processor`."""
    inner = getattr(processor, "image_processor", None)
    if inner is not None:
        outer = copy.copy(processor)
        outer.image_processor = raw_processor(inner)
        return outer
    if not callable(getattr(processor, "preprocess", None)):
        raise TypeError(f"processor is {type(processor).__name__}: must be an image processor of transformers")
    if of_processor(processor) is None:
        raise ValueError(f"processor is {type(processor).__name__} without image_mean and image_std")
    raw = copy.copy(processor)
    raw.__class__ = _raw_class(type(processor))
    return raw


class _Raw:
    """An image processor that neither rescales nor normalises."""

    def preprocess(self, *arguments: Any, **named: Any) -> Any:
        out = super().preprocess(*arguments, **named | {"do_rescale": False, "do_normalize": False})
        pads = named.get("do_pad", getattr(self, "do_pad", False)) and getattr(self, "do_normalize", True)
        # Zeros that are added to normalised pixels are their mean, and those added to raw ones the darkest colour.
        said = {name: value for name, value in named.items() if name not in ("do_rescale", "do_normalize")}
        plain = super().preprocess(*arguments, **said) if pads else {}
        for name in [name for name in out if name.startswith("pixel_values")]:
            out[name] = _bytes(out[name], plain.get(name), getattr(self, "image_mean", None))
        return out

    def __reduce__(self) -> tuple:
        plain = object.__new__(type(self).__bases__[-1])
        vars(plain).update(vars(self))
        return raw_processor, (plain,)


@functools.cache
def _raw_class(kind: type) -> type:
    return kind if issubclass(kind, _Raw) else type(kind.__name__, (_Raw, kind), {"__module__": kind.__module__})


def _bytes(pixels: Any, normalised: Any = None, mean: PerChannel | None = None) -> Any:
    """Pixels of 0 to 255 as uint8, be they a tensor, an array, or several in a list; the mean where both have zeros."""
    if isinstance(pixels, (list, tuple)):
        each = [None] * len(pixels) if normalised is None else normalised
        return type(pixels)(_bytes(*pair, mean) for pair in zip(pixels, each, strict=True))
    whole = torch.as_tensor(pixels)
    if normalised is not None:
        fill = 255 * torch.as_tensor(mean).view(-1, 1, 1)
        whole = torch.where((whole == 0) & (torch.as_tensor(normalised) == 0), fill, whole.to(torch.float32))
    if whole.dtype != torch.uint8:
        whole = whole.round().clamp(0, 255).to(torch.uint8)
    return whole if isinstance(pixels, torch.Tensor) else whole.numpy()
