"""open_clip's models with this package's patch embedding.

    from cute_kernels.models import open_clip
    model = open_clip.convert(open_clip_model)

Vision towers of open_clip's own (``VisionTransformer.conv1``) and of timm, which its SigLIP and SigLIP2 configurations
use. Class tokens and positions stay the tower's; parameters keep their names, and checkpoints do not change.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from cute_kernels.models import timm
from cute_kernels.models.nn.options import Backend, PatchOptions, Pixels, Precision
from cute_kernels.models.replace import all_converted, check_model, convert_all

_TOWERS = "vision transformer of open_clip"


def convert(
    model: torch.nn.Module,
    precision: Precision = "bf16",
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    pixels: Pixels = "auto",
    backend: Backend = "auto",
) -> torch.nn.Module:
    """Gives an open_clip model this package's patch embedding, in place, and returns it.

    Args:
        model: what ``open_clip.create_model`` returned, or its vision tower.
        precision: what is multiplied, see `cute_kernels.models.nn.PatchOptions`.
        mean, std: the normalisation that uint8 images get; None takes the tower's ``image_mean`` and ``image_std``, and
            those of CLIP's processor where it has none.
        pixels, backend: see `cute_kernels.models.nn.PatchOptions`.

    Raises:
        ModuleNotFoundError: no open_clip.
        TypeError, ValueError: an argument that is not allowed; a model without a vision transformer.
    """
    check_model(model)
    own, of_timm = _kinds()
    constants = importlib.import_module("open_clip.constants")

    def normalisation(tower: torch.nn.Module) -> dict[str, float | Sequence[float]]:
        known_mean, known_std = getattr(tower, "image_mean", None), getattr(tower, "image_std", None)
        return {
            "mean": mean if mean is not None else known_mean or constants.OPENAI_DATASET_MEAN,
            "std": std if std is not None else known_std or constants.OPENAI_DATASET_STD,
        }

    found = []
    for name, module in model.named_modules():
        if isinstance(module, own):
            options = PatchOptions(
                precision=precision,
                channels=module.conv1.in_channels,
                pixels=pixels,
                backend=backend,
                **normalisation(module),
            )
            found.append((f"{name}.conv1".lstrip("."), module.conv1, options))
        elif isinstance(module, of_timm):
            inner = timm.find(module, precision, pixels=pixels, backend=backend, **normalisation(module))
            found += [(f"{name}.{layer_name}".lstrip("."), layer, options) for layer_name, layer, options in inner]
    convert_all(model, found, _TOWERS)
    if any(isinstance(module, of_timm) for module in model.modules()):
        timm.pad_raw_pixels(model)
    return model


def revert(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes `convert`, in place, and returns the model."""
    check_model(model)
    return timm.revert(model)


def is_converted(model: torch.nn.Module) -> bool:
    """Whether calls of a model's patch embeddings come to this package, see `cute_kernels.models.timm`.

    Raises:
        ModuleNotFoundError: no open_clip.
        TypeError: no module.
        ValueError: a model without a vision transformer.
    """
    check_model(model)
    own, of_timm = _kinds()
    found = [(module, module.conv1) for module in model.modules() if isinstance(module, own)]
    for tower in model.modules():
        if isinstance(tower, of_timm):
            found += [(module, module.proj) for _, module in timm.embeddings(tower)]
    return all_converted(model, found, _TOWERS)


def _kinds() -> tuple[type, type]:
    """Vision towers of open_clip's own, and of timm."""
    try:
        importlib.import_module("open_clip")  # whose name is the error's also where imports are blocked
        own = importlib.import_module("open_clip.transformer").VisionTransformer
        return own, importlib.import_module("open_clip.timm_model").TimmModel
    except ModuleNotFoundError as error:
        if error.name != "open_clip":
            raise
        raise ModuleNotFoundError("this needs open_clip: pip install open_clip_torch") from error
