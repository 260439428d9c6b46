"""Normalisation of pixels as image processors of transformers and vLLM say it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

PerChannel = float | Sequence[float]


def normalisation(mean: PerChannel, std: PerChannel, rescale_factor: float = 1 / 255) -> tuple[PerChannel, PerChannel]:
    """Mean and standard deviation of pixels divided by 255, of a processor that multiplies by another factor."""
    scale = 1.0 if rescale_factor == 1 / 255 else 1 / (255 * rescale_factor)
    scaled = (scale * v if isinstance(v, (int, float)) else tuple(scale * each for each in v) for v in (mean, std))
    return tuple(scaled)


def of_processor(processor: Any) -> tuple[PerChannel, PerChannel] | None:
    """Mean and standard deviation of an image processor, as `normalisation` has them; None where it does not say.

    Args:
        processor: of transformers, be it the one of a model with text; or its configuration as a mapping.
    """
    processor = getattr(processor, "image_processor", processor)
    found = processor.get if isinstance(processor, Mapping) else lambda name: getattr(processor, name, None)
    factor = 1.0 if found("do_rescale") is False else found("rescale_factor") or 1 / 255
    if found("do_normalize") is False:
        return normalisation(0.0, 1.0, factor)
    mean, std = found("image_mean"), found("image_std")
    return None if mean is None or std is None else normalisation(mean, std, factor)


def of_checkpoint(model: torch.nn.Module) -> tuple[PerChannel, PerChannel] | None:
    """Mean and standard deviation of the processor beside a model's checkpoint, if that is on this machine."""
    name = getattr(model, "name_or_path", None) or getattr(getattr(model, "config", None), "_name_or_path", None)
    if not name:
        return None
    mixin = importlib.import_module("transformers.image_processing_base").ImageProcessingMixin
    try:
        config, _ = mixin.get_image_processor_dict(name, local_files_only=True)
    except (OSError, ValueError):  # none there, or a name of the hub without such a file in the cache
        return None
    return of_processor(config)
