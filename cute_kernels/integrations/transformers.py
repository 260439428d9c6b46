"""Hugging Face models with this package's patch embedding.

    from cute_kernels.integrations import transformers
    transformers.enable()          # then AutoModel.from_pretrained(..) as always

`enable` registers replacements with `transformers.monkey_patching`, which puts them where a model is built from a
checkpoint or a config; `convert` changes a model that exists. Either way parameters keep their names and checkpoints
do not change.

Pixels: a processor with ``do_rescale=False`` and ``do_normalize=False`` gives uint8, which is normalised here, in the
kernel; what it normalised itself is multiplied as it is.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from cute_kernels.nn.availability import is_plain
from cute_kernels.nn.calls import change_class, check_reachable, reaches_class, why_called, why_own
from cute_kernels.nn.engine import PatchEngine, check_tensor
from cute_kernels.nn.layers import EngineMixin
from cute_kernels.nn.options import Backend, PatchOptions, Pixels, Precision
from cute_kernels.nn.positions import PositionCache, checked_grids

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class _Images(EngineMixin):
    """``SiglipVisionEmbeddings``: images, a convolution, positions for one grid."""

    order = "chw"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _equip(self)

    def engine_weight(self) -> torch.Tensor:
        return self.patch_embedding.weight

    def forward(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False) -> torch.Tensor:
        layer = self.patch_embedding
        check_tensor("pixel_values", pixel_values)
        if pixel_values.dim() != 4:  # the engine would take them for rows
            raise self._wrong_shape(pixel_values)
        takes_over = self._takes_over(pixel_values)
        self.engine.check_pixels(pixel_values, by_kernel=takes_over)
        if not takes_over:
            pixel_values = self.engine.normalised(pixel_values, layer.weight)
            return super().forward(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        if pixel_values.shape[1] != layer.in_channels or min(pixel_values.shape[2:]) < self.patch_size:
            raise self._wrong_shape(pixel_values)
        grid = tuple(extent // self.patch_size for extent in pixel_values.shape[2:])
        positions = self.position_embedding.weight
        if interpolate_pos_encoding:
            side = int(positions.shape[0] ** 0.5)
            positions = self.positions.table(positions, (side, side), grid)
        elif grid[0] * grid[1] != positions.shape[0]:
            raise ValueError(
                f"pixel_values has shape {list(pixel_values.shape)}, whose {grid[0]} x {grid[1]} patches are not the "
                f"model's {positions.shape[0]}; allowed with interpolate_pos_encoding=True"
            )
        return self.engine.images(pixel_values, layer.weight, layer.bias, positions)

    def _takes_over(self, pixel_values: torch.Tensor) -> bool:
        layer, positions = self.patch_embedding, self.position_embedding
        why = (
            why_called("patch_embedding", layer, torch.nn.Conv2d)
            or why_called("position_embedding", positions, torch.nn.Embedding)
            or why_own(self, "interpolate_pos_encoding")
        )
        numbers = why is None and is_plain(pixel_values)  # else the plain module runs, whatever the positions are
        if numbers and not self.positions.in_order(self.position_ids, positions.num_embeddings):
            why = "position_ids are not the positions in their order"
        return self.engine.takes_over_unless(
            why, pixel_values, lambda: (layer.weight, layer.bias, positions.weight), training=self.training
        )

    def _wrong_shape(self, pixel_values: torch.Tensor) -> ValueError:
        shape, channels, side = list(pixel_values.shape), self.patch_embedding.in_channels, self.patch_size
        hint = ": permute(0, 3, 1, 2) is needed" if len(shape) == 4 and shape[3] == channels != shape[1] else ""
        return ValueError(
            f"pixel_values has shape {shape}, allowed: [B, {channels}, H, W], H and W at least {side}{hint}"
        )


class _NaFlex(EngineMixin):
    """``Siglip2VisionEmbeddings``: padded rows of patches, a linear layer, positions for each image's grid."""

    order = "hwc"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        _equip(self)

    def engine_weight(self) -> torch.Tensor:
        return self.patch_embedding.weight

    def forward(self, pixel_values: torch.Tensor, spatial_shapes: torch.Tensor) -> torch.Tensor:
        check_tensor("pixel_values", pixel_values)
        layer, positions = self.patch_embedding, self.position_embedding.weight  # which the library does not call
        why = why_called("patch_embedding", layer, torch.nn.Linear) or why_own(self, "resize_positional_embeddings")
        takes_over = self.engine.takes_over_unless(
            why, pixel_values, lambda: (layer.weight, layer.bias, positions), training=self.training
        )
        self.engine.check_pixels(pixel_values, by_kernel=takes_over)
        if not takes_over:
            return super().forward(self.engine.normalised(pixel_values, layer.weight), spatial_shapes)
        length = pixel_values.shape[1]
        grids = checked_grids(spatial_shapes, pixel_values.shape[0], length)
        native = (self.position_embedding_size,) * 2
        table, index = self.positions.packed(positions, native, grids, length)
        return self.engine.rows(pixel_values, layer.weight, layer.bias, table, index)


class _Rows(EngineMixin):
    """``Qwen2VL`` and its successors: rows of patches, a convolution over each that is a linear layer."""

    order = "chw"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        _equip(self)

    def engine_weight(self) -> torch.Tensor:
        return self.proj.weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        layer = self.proj
        rows = hidden_states.reshape(-1, layer.weight[0].numel())
        takes_over = self.engine.takes_over_unless(
            why_called("proj", layer, torch.nn.Conv3d), rows, lambda: (layer.weight, layer.bias), training=self.training
        )
        self.engine.check_pixels(rows, by_kernel=takes_over)
        if not takes_over:
            return super().forward(self.engine.normalised(rows, layer.weight))
        return self.engine.rows(rows, layer.weight, layer.bias)


@dataclass(frozen=True)
class _Family:
    """A class of the library, what takes its place, and the normalisation of its models' processors."""

    module: str
    name: str
    mixin: type
    mean: float | tuple[float, ...] = 0.5
    std: float | tuple[float, ...] = 0.5


_FAMILIES = {
    "siglip": _Family("siglip", "SiglipVisionEmbeddings", _Images),
    "siglip2": _Family("siglip2", "Siglip2VisionEmbeddings", _NaFlex),
    "qwen2_vl": _Family("qwen2_vl", "PatchEmbed", _Rows, _CLIP_MEAN, _CLIP_STD),
    "qwen2_5_vl": _Family("qwen2_5_vl", "Qwen2_5_VisionPatchEmbed", _Rows, _CLIP_MEAN, _CLIP_STD),
    "qwen3_vl": _Family("qwen3_vl", "Qwen3VLVisionPatchEmbed", _Rows),
    "qwen3_vl_moe": _Family("qwen3_vl_moe", "Qwen3VLMoeVisionPatchEmbed", _Rows),
}
_active: dict[str, PatchOptions] = {}


def enable(
    precision: Precision = "bf16",
    *,
    models: Sequence[str] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    pixels: Pixels = "auto",
    backend: Backend = "auto",
) -> tuple[str, ...]:
    """From now on, models built by ``from_pretrained`` and ``from_config`` have this package's patch embedding.

    Called again, it changes the options for models to come. Models that exist stay as they are: `convert` is for them.

    Args:
        precision: what is multiplied, see `cute_kernels.nn.PatchOptions`. ``"int8"`` and ``"int16"`` take uint8 pixels,
            which reach the embedding in SigLIP and SigLIP2 only: Qwen's models cast what they are given, and are left
            alone with these precisions.
        models: which of ``"siglip"`` (SigLIP, and SigLIP2 of fixed resolution), ``"siglip2"`` (NaFlex), ``"qwen2_vl"``,
            ``"qwen2_5_vl"``, ``"qwen3_vl"`` and ``"qwen3_vl_moe"``; None takes all that this transformers has.
        mean, std: normalisation of the processor; None takes the default of each family's checkpoints.
        pixels, backend: see `cute_kernels.nn.PatchOptions`.

    Returns:
        The families that were enabled.

    Raises:
        ModuleNotFoundError: no transformers, or one without ``transformers.monkey_patching``.
        TypeError, ValueError: an argument that is not allowed; a class whose replacement somebody else registered.
    """
    options = {name: _options(name, precision, mean, std, pixels, backend) for name in _chosen(models, precision)}
    registry = _registry()
    names = {name: _FAMILIES[name].name for name in options if _original(name) is not None}
    for name in names.values():
        if name in registry.get_patch_mapping():
            raise ValueError(f"{name} has a replacement registered already: unregister_patch_mapping([{name!r}]) first")
    # Anchored: keys are searched for in class names as regular expressions.
    mapping = {f"^{_FAMILIES[name].name}$": _class(name) for name in names}
    registry.register_patch_mapping(mapping, overwrite=True)
    _active.update({name: options[name] for name in names})
    return tuple(names)


def disable() -> None:
    """Undoes `enable`; models that were built meanwhile keep their embedding."""
    if not _active:
        return
    registry = _registry()
    ours = [f"^{_FAMILIES[name].name}$" for name in _active]
    registry.unregister_patch_mapping([key for key in ours if key in registry.get_patch_mapping()])
    # The library leaves its modules patched when building a model fails.
    replaced = {_class(name): _original(name) for name in _active}
    for module in [module for name, module in sys.modules.items() if name.startswith("transformers.")]:
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value in replaced:
                setattr(module, attribute, replaced[value])
    _active.clear()


def convert(
    model: torch.nn.Module,
    precision: Precision = "bf16",
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    pixels: Pixels = "auto",
    backend: Backend = "auto",
) -> torch.nn.Module:
    """Gives a model that exists this package's patch embedding, in place, and returns it.

    Args:
        model: any model with an embedding of one of the families of `enable`.
        precision, mean, std, pixels, backend: as for `enable`.

    Raises:
        ModuleNotFoundError: no transformers.
        TypeError, ValueError: an argument that is not allowed; a model without such an embedding, or with one that the
            precision cannot serve, or whose instance has a forward of its own; accelerate's hooks are kept.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected torch.nn.Module")
    found = []
    for name in _FAMILIES:
        original = _original(name, loaded_only=True)
        for module in model.modules():
            if original is not None and type(module) in (original, _class(name)):
                _chosen((name,), precision)
                found.append((module, name, _options(name, precision, mean, std, pixels, backend)))
    if not found:
        raise ValueError(f"model is {type(model).__name__}, which has no embedding of {', '.join(_FAMILIES)}")
    for module, name, _ in found:
        check_reachable(module, f"the model's {name} embedding")
    for module, name, options in found:
        change_class(module, _class(name))
        _equip(module, options)
    return model


def revert(model: torch.nn.Module) -> torch.nn.Module:
    """Gives a model its library's embedding back, in place, and returns it."""
    for module in model.modules():
        for name in _FAMILIES:
            original = _original(name, loaded_only=True)
            if original is not None and type(module) is _class(name):
                change_class(module, original)
                del module.engine, module.positions
    return model


def is_converted(model: torch.nn.Module) -> bool:
    """Whether calls of a model's patch embeddings come to this package, and nothing stays to be converted.

    What stands in place of a layer in it (an adapter, hooks) is called by this package, so it counts as converted. A
    model that was not converted takes raw uint8 pixels for normalised ones without an error.

    Raises:
        TypeError: no module.
        ValueError: a model without an embedding of the families of `enable`, converted or not.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected torch.nn.Module")
    originals = {_original(name, loaded_only=True) for name in _FAMILIES} - {None}
    embeddings = [module for module in model.modules() if isinstance(module, tuple(originals))]
    found = [isinstance(module, EngineMixin) and reaches_class(module) for module in embeddings]
    if not found:
        raise ValueError(f"model is {type(model).__name__}, which has no embedding of {', '.join(_FAMILIES)}")
    return all(found)


def __getattr__(name: str) -> type:
    """The classes that `enable` puts in place, by name, for those who unpickle a model."""
    for family, known in _FAMILIES.items():
        if name == known.name:
            found = _class(family)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _equip(module: torch.nn.Module, options: PatchOptions | None = None) -> None:
    """Gives a module what its new class needs, with the options of `enable` when there are no others."""
    name = module.family
    if options is None:
        options = _active.get(name) or _options(name, "bf16", None, None, "auto", "auto")
    channels = getattr(getattr(module, "config", None), "num_channels", None) or getattr(module, "in_channels", 3)
    # One number for all channels fits models of another number of channels.
    mean, std = (value[0] if len(set(value)) == 1 else value for value in (options.mean, options.std))
    module.engine = PatchEngine(replace(options, order=module.order, channels=channels, mean=mean, std=std))
    module.positions = PositionCache("bilinear", antialias=True) if module.order == "hwc" else PositionCache("bicubic")


def _chosen(models: Sequence[str] | None, precision: str) -> tuple[str, ...]:
    """Families by name, of those that the precision can serve.

    Raises:
        TypeError, ValueError: as `enable`.
    """
    if isinstance(models, str) or (models is not None and not isinstance(models, Sequence)):
        raise TypeError(f"models is {type(models).__name__}, expected a sequence of names")
    for name in models or ():
        if name not in _FAMILIES:
            raise ValueError(f"models has {name!r}, allowed: {', '.join(map(repr, _FAMILIES))}")
    served = tuple(n for n, f in _FAMILIES.items() if f.mixin is not _Rows or precision not in ("int8", "int16"))
    for name in models or ():
        if name not in served:
            raise ValueError(
                f"precision = {precision!r} for {name!r}, whose model casts pixels to a floating-point type; allowed: "
                "'bf16', 'fp16', 'fp8'"
            )
    return served if models is None else tuple(models)


def _options(name: str, precision, mean, std, pixels, backend) -> PatchOptions:
    family = _FAMILIES[name]
    mean, std = (family.mean if mean is None else mean), (family.std if std is None else std)
    return PatchOptions(precision=precision, mean=mean, std=std, pixels=pixels, backend=backend)


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "transformers":
            raise ModuleNotFoundError("this needs transformers: pip install 'cute-kernels[hf]'") from error
        raise


def _registry() -> ModuleType:
    try:
        return _library("transformers.monkey_patching")
    except ModuleNotFoundError as error:
        if error.name != "transformers.monkey_patching":
            raise
        version = _library("transformers").__version__
        raise ModuleNotFoundError(
            f"transformers {version} has no transformers.monkey_patching: convert(model) works without it, or take a "
            "newer transformers: pip install 'cute-kernels[hf]'"
        ) from error


_originals: dict[str, type] = {}


def _original(name: str, *, loaded_only: bool = False) -> type | None:
    """The library's class, or None where this transformers has no such model (or has not loaded it yet)."""
    if name not in _originals:
        family = _FAMILIES[name]
        path = f"transformers.models.{family.module}.modeling_{family.module}"
        if loaded_only and path not in sys.modules:
            return None
        try:
            _originals[name] = getattr(_library(path), family.name)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name) or error.name == "transformers":
                raise
            return None
    return _originals[name]


@functools.cache
def _class(name: str) -> type | None:
    """Class that takes the place of a family's. It has that class's name, which device maps go by."""
    original = _original(name)
    if original is None:
        return None
    members = {"family": name, "__module__": __name__, "__doc__": _FAMILIES[name].mixin.__doc__}
    return type(original.__name__, (_FAMILIES[name].mixin, original), members)
