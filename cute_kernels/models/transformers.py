"""Hugging Face models with this package's patch embedding.

    from cute_kernels.models import transformers
    transformers.enable()          # then AutoModel.from_pretrained(..) as always

`enable` registers replacements with `transformers.monkey_patching`, which puts them where a model is built from a
checkpoint or a config; `convert` changes a model that exists. Either way parameters keep their names and checkpoints
do not change. Of some families the embedding is replaced, positions included; of the others the layer in it.

Pixels: `raw_processor` makes a processor hand out uint8, which is normalised here, in the kernel; what a processor
normalised itself is multiplied as it is.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from cute_kernels.models import processors
from cute_kernels.models.nn import layers
from cute_kernels.models.nn.availability import in_graph, is_plain, is_transformed
from cute_kernels.models.nn.calls import change_class, check_reachable, reaches_class, why_called, why_own
from cute_kernels.models.nn.engine import PatchEngine, check_tensor
from cute_kernels.models.nn.layer_norm import LayerNormEngine
from cute_kernels.models.nn.layers import EngineMixin
from cute_kernels.models.nn.options import Backend, Order, PatchOptions, Pixels, Precision
from cute_kernels.models.nn.positions import PositionCache, checked_grids
from cute_kernels.models.processors import PerChannel
from cute_kernels.models.replace import Found, check_model, convert_all


class _Embedding(EngineMixin):
    """An embedding of the library, whose forward is replaced.

    Attributes:
        library: the library's class.
        order: of a patch's pixels in rows and in the weight.
        layer_name: of the convolution or linear layer in it.
    """

    library: type
    order: Order
    layer_name: str

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        _equip(self)

    def engine_weight(self) -> torch.Tensor:
        return getattr(self, self.layer_name).weight


class _Images(_Embedding):
    """``SiglipVisionEmbeddings``: images, a convolution, positions for one grid."""

    order, layer_name = "chw", "patch_embedding"

    def forward(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False) -> torch.Tensor:
        layer = self.patch_embedding
        check_tensor("pixel_values", pixel_values)
        if pixel_values.dim() != 4:  # the engine would take them for rows
            raise self._wrong_shape(pixel_values)
        pixel_values = self.engine.as_said(pixel_values)
        if not self._takes_over(pixel_values):
            pixel_values = self.engine.normalised(pixel_values, layer.weight)
            return super().forward(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        patch, own = layer.weight.shape[-1], self.position_embedding.weight
        if pixel_values.shape[1] != layer.in_channels or min(pixel_values.shape[2:]) < patch:
            raise self._wrong_shape(pixel_values)
        grid = tuple(extent // patch for extent in pixel_values.shape[2:])
        positions, ids = own, self.position_ids
        if interpolate_pos_encoding:
            side = int(own.shape[0] ** 0.5)
            positions, ids = self.positions.table(own, (side, side), grid), None
        elif grid[0] * grid[1] != own.shape[0]:
            raise ValueError(
                f"pixel_values has shape {list(pixel_values.shape)}, whose {grid[0]} x {grid[1]} patches are not the "
                f"model's {own.shape[0]}; allowed with interpolate_pos_encoding=True"
            )
        if torch.promote_types(layer.weight.dtype, own.dtype) == layer.weight.dtype:
            return self.engine.images(pixel_values, layer.weight, layer.bias, positions, ids)
        positions = positions.to(own.dtype)
        return self.engine.images(pixel_values, layer.weight, layer.bias) + (positions if ids is None else own[ids])

    def _takes_over(self, pixel_values: torch.Tensor) -> bool:
        layer, positions, ids = self.patch_embedding, self.position_embedding, self.position_ids
        why = (
            why_called("patch_embedding", layer, torch.nn.Conv2d)
            or why_called("position_embedding", positions, torch.nn.Embedding)
            or why_own(self, self.library, torch.nn.Conv2d, torch.nn.Embedding)
        )
        if is_transformed(ids):
            return False
        numbers = why is None and is_plain(pixel_values)  # else the plain module runs, whatever the positions are
        if numbers and not in_graph() and not self.positions.in_order(ids, positions.num_embeddings):
            why = "position_ids are not the positions in their order"
        return self.engine.takes_over_unless(
            why, pixel_values, lambda: (layer.weight, layer.bias, positions.weight), training=self.training
        )

    def _wrong_shape(self, pixel_values: torch.Tensor) -> ValueError:
        shape, channels, side = list(pixel_values.shape), self.patch_embedding.in_channels, self.patch_size
        hint = ": permute(0, 3, 1, 2) is needed" if len(shape) == 4 and shape[3] == channels != shape[1] else ""
        return ValueError(
            f"pixel_values has shape {shape}: must be [B, {channels}, H, W], H and W at least {side}{hint}"
        )


class _NaFlex(_Embedding):
    """``Siglip2VisionEmbeddings``: padded rows of patches, a linear layer, positions for each image's grid."""

    order, layer_name = "hwc", "patch_embedding"

    def forward(self, pixel_values: torch.Tensor, spatial_shapes: torch.Tensor) -> torch.Tensor:
        check_tensor("pixel_values", pixel_values)
        layer, positions = self.patch_embedding, self.position_embedding.weight  # which the library does not call
        pixel_values = self.engine.as_said(pixel_values)
        why = why_called("patch_embedding", layer, torch.nn.Linear) or why_own(self, self.library, torch.nn.Linear)
        takes_over = self.engine.takes_over_unless(
            why, pixel_values, lambda: (layer.weight, layer.bias, positions), training=self.training
        )
        if not takes_over:
            return super().forward(self.engine.normalised(pixel_values, layer.weight), spatial_shapes)
        length = pixel_values.shape[1]
        grids = checked_grids(spatial_shapes, pixel_values.shape[0], length)
        native = (self.position_embedding_size,) * 2
        table, index = self.positions.packed(positions, native, grids, length)
        if torch.promote_types(layer.weight.dtype, positions.dtype) == layer.weight.dtype:
            return self.engine.rows(pixel_values, layer.weight, layer.bias, table, index)
        return self.engine.rows(pixel_values, layer.weight, layer.bias) + table.to(positions.dtype)[index.long()]


class _Rows(_Embedding):
    """``Qwen2VL`` and its successors: rows of patches, a convolution over each that is a linear layer."""

    order = "chw"

    def layer(self) -> tuple[str, type, torch.nn.Module]:
        """Name and kind of the layer, and itself: a convolution, or the linear one that the library's fusion makes."""
        name, kind = ("linear_proj", torch.nn.Linear) if "linear_proj" in self._modules else ("proj", torch.nn.Conv3d)
        return name, kind, self._modules[name]

    def engine_weight(self) -> torch.Tensor:
        return self.layer()[2].weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Embeddings of rows; those of one frame are of a still image, whose frames are equal."""
        (name, kind, layer), rows = self.layer(), self.engine.as_said(hidden_states)
        still = self.engine.is_still(rows, layer.weight)
        rows = rows.reshape(-1, rows.shape[-1] if still else layer.weight[0].numel())
        why = why_called(name, layer, kind) or why_own(self, self.library, kind)
        parameters = lambda: (layer.weight, layer.bias)  # noqa: E731
        if self.engine.takes_over_unless(why, rows, parameters, training=self.training):
            return self.engine.rows(rows, layer.weight, layer.bias)
        rows = self.engine.all_frames(rows, layer.weight)
        return super().forward(self.engine.normalised(rows, layer.weight))


class _Scaled(_Embedding):
    """``Gemma4VisionPatchEmbedder``: rows of pixels from 0 to 1, a linear layer, positions of two tables."""

    order, layer_name = "chw", "input_proj"  # of rows and of the weight alike; one mean serves any

    def forward(
        self, pixel_values: torch.Tensor, pixel_position_ids: torch.Tensor, padding_positions: torch.Tensor
    ) -> torch.Tensor:
        layer = self.input_proj
        check_tensor("pixel_values", pixel_values)
        pixels = self.engine.as_said(pixel_values)
        raw = pixels.dtype == torch.uint8 or self.engine.options.raw
        normalised = pixels if raw else 2 * (pixels - 0.5)
        takes_over = self.engine.takes_over_unless(
            why_called("input_proj", layer, torch.nn.Linear) or why_own(self, self.library, torch.nn.Linear),
            normalised,
            lambda: (layer.weight, layer.bias, self.position_embedding_table),
            training=self.training,
        )
        if not takes_over:
            return super().forward(pixels / 255 if raw else pixels, pixel_position_ids, padding_positions)
        out = self.engine.rows(normalised, layer.weight, layer.bias)
        return out + self._position_embeddings(pixel_position_ids, padding_positions)


class _Normed(_Embedding):
    """``Gemma4UnifiedVisionEmbedder``: LayerNorm of the pixels, a linear layer; norms and positions behind them."""

    order, layer_name = "hwc", "patch_dense"  # of rows and of the weight alike; one mean serves any
    engine_class = LayerNormEngine

    def engine_parameters(self) -> tuple[torch.Tensor | None, ...]:
        norm, layer = self.patch_ln1, self.patch_dense
        return layer.weight, layer.bias, getattr(norm, "weight", None), getattr(norm, "bias", None)

    def forward(self, pixel_values: torch.Tensor, image_position_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        norm, layer = self.patch_ln1, self.patch_dense
        check_tensor("pixel_values", pixel_values)
        pixels = self.engine.as_said(pixel_values)
        why = why_called("patch_ln1", norm, torch.nn.LayerNorm) or why_called("patch_dense", layer, torch.nn.Linear)
        why = why or why_own(self, self.library, torch.nn.LayerNorm, torch.nn.Linear)
        why = why or self.engine.why_no_kernel(layer.weight, norm.eps)
        takes_over = self.engine.takes_over_unless(why, pixels, self.engine_parameters, training=self.training)
        if not takes_over:
            return super().forward(self.engine.normalised(pixels, layer.weight), image_position_ids, *more, **named)
        # Late, for the integration is imported without the library.
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        padding = image_position_ids[..., None] == -1
        indices = image_position_ids.clamp(min=0).long().unbind(-1)
        x, y = (self.pos_embedding[at, axis] for axis, at in enumerate(indices))
        positions = torch.stack((x, y), -2).masked_fill(padding, 0).sum(-2)
        embedded = self.engine.normed(pixels, *self.engine_parameters(), norm.eps)
        hidden = self.pos_norm(self.patch_ln2(embedded) + positions)
        out = BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=self.multimodal_embedder(hidden))
        return out.to_tuple() if named.get("return_dict") is False else out


class _Conditioner:
    """``RadioInputConditioner``: leaves the normalisation of raw pixels to the layer.

    Attributes:
        raw: whether pixels of every type are.
    """

    raw: bool = False

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return pixel_values if self.raw or pixel_values.dtype == torch.uint8 else super().forward(pixel_values)


@dataclass(frozen=True)
class _Family:
    """A class of the library, and what is replaced: itself, or a layer in it.

    Attributes:
        module: where the class is.
        name: of the class.
        mixin: what takes its place; None where its layer does:
        layer: name of that convolution or linear layer.
        casts: whether pixels are cast on their way there: by the class or one of its module that holds it, which one
            differs between versions of the library.
        mean, std: normalisation of models whose processors have none.
    """

    module: str
    name: str
    mixin: type | None = None
    layer: str = ""
    casts: bool = False
    mean: float | None = None
    std: float | None = None


_FAMILIES = {
    "siglip": _Family("siglip", "SiglipVisionEmbeddings", _Images),
    "siglip2": _Family("siglip2", "Siglip2VisionEmbeddings", _NaFlex),
    "qwen2_vl": _Family("qwen2_vl", "PatchEmbed", _Rows, casts=True),
    "qwen2_5_vl": _Family("qwen2_5_vl", "Qwen2_5_VisionPatchEmbed", _Rows, casts=True),
    "qwen3_vl": _Family("qwen3_vl", "Qwen3VLVisionPatchEmbed", _Rows, casts=True),
    "qwen3_vl_moe": _Family("qwen3_vl_moe", "Qwen3VLMoeVisionPatchEmbed", _Rows, casts=True),
    "qwen3_5": _Family("qwen3_5", "Qwen3_5VisionPatchEmbed", _Rows, casts=True),
    "qwen3_5_moe": _Family("qwen3_5_moe", "Qwen3_5MoeVisionPatchEmbed", _Rows, casts=True),
    "gemma4": _Family("gemma4", "Gemma4VisionPatchEmbedder", _Scaled, mean=0.5, std=0.5),
    "gemma4_unified": _Family("gemma4_unified", "Gemma4UnifiedVisionEmbedder", _Normed, mean=0.0, std=1.0),
    "clip": _Family("clip", "CLIPVisionEmbeddings", layer="patch_embedding", casts=True),
    "metaclip_2": _Family("metaclip_2", "MetaClip2VisionEmbeddings", layer="patch_embedding", casts=True),
    "dinov2": _Family("dinov2", "Dinov2PatchEmbeddings", layer="projection", casts=True),
    "dinov2_with_registers": _Family(
        "dinov2_with_registers", "Dinov2WithRegistersPatchEmbeddings", layer="projection", casts=True
    ),
    "dinov3_vit": _Family("dinov3_vit", "DINOv3ViTEmbeddings", layer="patch_embeddings", casts=True),
    "aimv2": _Family("aimv2", "Aimv2VisionEmbeddings", layer="patch_embed"),
    "internvl": _Family("internvl", "InternVLVisionPatchEmbeddings", layer="projection", casts=True),
    "radio": _Family("radio", "RadioPatchEmbeddings", layer="patch_projection"),
}
# With what lies in front of an embedding.
_KNOWN = _FAMILIES | {"conditioner": _Family("radio", "RadioInputConditioner", _Conditioner)}
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
        precision: what is multiplied, see `cute_kernels.models.nn.PatchOptions`. ``"int8"`` takes raw pixels. Gemma 4
            Unified's LayerNorm and layer are replaced with it alone. ``"auto"`` follows the type of the weight.
        models: which of ``"siglip"`` (SigLIP, and SigLIP2 of fixed resolution), ``"siglip2"`` (NaFlex), ``"qwen2_vl"``,
            ``"qwen2_5_vl"``, ``"qwen3_vl"``, ``"qwen3_vl_moe"``, ``"qwen3_5"``, ``"qwen3_5_moe"``, ``"gemma4"`` and
            ``"gemma4_unified"``; None takes all that this transformers has.
        mean, std: normalisation of the processor; None takes that of the processor beside each checkpoint. Where there
            is none, calls with raw pixels raise ValueError.
        pixels, backend: see `cute_kernels.models.nn.PatchOptions`. Models that cast pixels before their embedding sees
            them (Qwen's) need ``"raw"`` for uint8.

    Returns:
        The families that were enabled.

    Raises:
        ModuleNotFoundError: no transformers, or one without ``transformers.monkey_patching``.
        TypeError, ValueError: an argument that is not allowed; a class whose replacement somebody else registered.
    """
    options = {name: _options(name, precision, mean, std, pixels, backend) for name in _chosen(models, precision)}
    registry = _registry()
    names = {name: _FAMILIES[name].name for name in options if _original(name) is not None}
    registered = registry.get_patch_mapping()
    for name in names.values():
        if name in registered and not _is_fused(registered[name]):
            raise ValueError(f"{name} has a replacement registered already: unregister_patch_mapping([{name!r}]) first")
    # Anchored: keys are searched for in class names as regular expressions.
    mapping = {f"^{_FAMILIES[name].name}$": _class(name) for name in names}
    registry.register_patch_mapping(mapping, overwrite=True)
    _active.update({name: options[name] for name in names})
    _fuse(lambda name, fused: _class(name, fused) if name in _active else fused)
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
    _fuse(None)


def _is_fused(kind: type) -> bool:
    """Whether a class is one that the library's fusion of patch embeddings made, or ours over it."""
    fusion = sys.modules.get("transformers.fusion_mapping")
    return fusion is not None and issubclass(kind, fusion._FusedPatchEmbeddingMixin)


def _fuse(over: Callable[[str, type], type] | None) -> None:
    """Has the library's fusion (``fusion_config={"patch_embeddings": True}``) make other classes.

    Args:
        over: gives the class for a family's name and the library's class; None leaves that one.
    """
    try:
        fusion = _library("transformers.fusion_mapping")
        registry, spec = fusion._FUSION_REGISTRY, fusion.PatchEmbeddingsFusionSpec
    except (ModuleNotFoundError, AttributeError):  # of a transformers before it
        return
    families = {_original(name, loaded_only=True): name for name, family in _FAMILIES.items() if family.mixin is _Rows}

    def replaced(fused: type) -> type:
        fused = fused.__bases__[-1] if issubclass(fused, EngineMixin) else fused
        name = families.get(fused.__bases__[-1])
        return fused if over is None or name is None else over(name, fused)

    class Spec(spec):
        def make_fused_class(self, original_cls: type) -> type:
            return replaced(super().make_fused_class(original_cls))

    registry["patch_embeddings"] = spec() if over is None else Spec()
    fusion._FUSION_DISCOVERY_CACHE.pop("patch_embeddings", None)  # which has classes as they were
    known = _registry().get_patch_mapping().items()
    mapping = {name: replaced(kind) for name, kind in known if _is_fused(kind)}
    _registry().register_patch_mapping(mapping, overwrite=True)


def convert(
    model: torch.nn.Module,
    precision: Precision = "bf16",
    *,
    processor: Any = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    pixels: Pixels = "auto",
    backend: Backend = "auto",
) -> torch.nn.Module:
    """Gives a model that exists this package's patch embedding, in place, and returns it.

    Args:
        model: any model with an embedding of one of the families of `enable`, or of CLIP, MetaCLIP 2, DINOv2, DINOv3,
            AIMv2, InternVL or C-RADIO, whose layer alone is replaced.
        precision: as for `enable`; all families take uint8 pixels.
        processor: the model's image processor or its configuration, which says how pixels are normalised.
        mean, std: the normalisation itself. Without it and a processor it is that of the processor's configuration
            beside the checkpoint of the model, or of the part of it that has the embedding, if that is on this machine.
        pixels, backend: see `cute_kernels.models.nn.PatchOptions`. With ``"auto"``, models that cast pixels have uint8
            normalised in front of them, by torch; with ``"raw"`` the kernel does it.

    Raises:
        ModuleNotFoundError: no transformers.
        TypeError, ValueError: an argument that is not allowed; a model without such an embedding, or whose instance has
            a forward of its own (accelerate's hooks are kept); a normalisation that raw pixels or ``"fp8"`` need and
            that is not known.
    """
    found = [each for each in _embeddings(model) if _is_replaceable(*each[1:])]
    if not found:
        raise _no_embedding(model)
    options = {}
    for path, _, name in found:
        known = _normalisation(model, path, name, processor)
        options[path] = _options(name, precision, mean, std, pixels, backend, known)
        if options[path].mean is None and (options[path].raw or precision == "fp8"):
            raise ValueError(
                f"mean and std of a {name} model are not known, for no processor's configuration lies beside its "
                "checkpoint: must be processor=.., or both of mean=.. and std=.."
            )
    for _, module, name in found:
        if not _FAMILIES[name].layer:
            check_reachable(module, f"the model's {name} embedding")
    inner = [_layer_in(path, module, name, options[path]) for path, module, name in found if _FAMILIES[name].layer]
    if inner:
        convert_all(model, inner, ", ".join(_FAMILIES))
    for path, module, name in found:
        if not _FAMILIES[name].layer:
            base = type(module).__bases__[-1] if isinstance(module, EngineMixin) else type(module)
            change_class(module, _class(name) if base is _original(name) else _class(name, base))
            _equip(module, options[path])
    for module in model.modules():
        if type(module) is _original("conditioner", loaded_only=True):
            change_class(module, _class("conditioner"))
        if isinstance(module, _Conditioner):
            module.raw = options[found[0][0]].pixels == "raw"
    _close_entries(model)
    for path, _, name in found:
        _open_entries(model, path, name, options[path])
    return model


def raw_processor(processor: Any, model: torch.nn.Module | None = None) -> Any:
    """A processor that hands out raw pixels as uint8, whatever it is called with: what embeddings normalise themselves.

    Args:
        processor: an image processor of transformers, or one of a model with text; it stays as it is. Pixels that it
            has as floating-point numbers, as those of PIL's backend, are rounded to uint8.
        model: a converted model, whose embeddings are told that pixels are raw, and get the processor's mean and
            standard deviation. ``convert(model, .., processor=..)`` takes either processor as well.

    Raises:
        TypeError: no processor.
        ValueError: a processor without mean and standard deviation; a model that is not converted.
    """
    raw = processors.raw_processor(processor)
    if model is not None:
        engines = [module.engine for module in model.modules() if isinstance(module, EngineMixin)]
        if not engines:
            raise ValueError(f"model is {type(model).__name__} without a converted embedding: convert it before")
        options = engines[0].options
        convert(model, options.precision, processor=processor, pixels="raw", backend=options.backend)
    return raw


def revert(model: torch.nn.Module) -> torch.nn.Module:
    """Gives a model its library's embedding back, in place, and returns it."""
    _close_entries(model)
    for module in model.modules():
        for name, family in _KNOWN.items():
            original = _original(name, loaded_only=True)
            if original is None or not isinstance(module, original):
                continue
            if family.layer:
                layers.revert_layer(getattr(module, family.layer))
            elif issubclass(type(module), family.mixin):
                change_class(module, type(module).__bases__[-1])
                for attribute in ("engine", "positions"):
                    vars(module).pop(attribute, None)
    return model


def is_converted(model: torch.nn.Module) -> bool:
    """Whether calls of a model's patch embeddings come to this package, and nothing stays to be converted.

    What stands in place of a layer in a replaced embedding (an adapter, hooks) is called by this package, so it counts
    as converted; an adapter around a layer that was replaced itself does not. A model that was not converted takes raw
    uint8 pixels for normalised ones without an error.

    Raises:
        TypeError: no module.
        ValueError: a model without an embedding of the families of `convert`, converted or not.
    """
    found = _embeddings(model)
    if not found:
        raise _no_embedding(model)
    return all(_reaches_us(module, _FAMILIES[name]) for _, module, name in found)


def _embeddings(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    """Embeddings in a model: where, themselves, and their family.

    Raises:
        TypeError: no module.
    """
    check_model(model)
    originals = {name: _original(name, loaded_only=True) for name in _FAMILIES}
    return [
        (path, module, name)
        for path, module in model.named_modules()
        for name, original in originals.items()
        if original is not None and isinstance(module, original)
    ]


def _no_embedding(model: torch.nn.Module) -> ValueError:
    return ValueError(f"model is {type(model).__name__}, which has no embedding of {', '.join(_FAMILIES)}")


def _is_replaceable(module: torch.nn.Module, name: str) -> bool:
    """Whether a module is the library's or ours, and nobody's subclass, where its forward is replaced."""
    kind = type(module)
    return bool(_FAMILIES[name].layer) or kind in (_original(name), _class(name)) or _is_fused(kind)


def _reaches_us(module: torch.nn.Module, family: _Family) -> bool:
    if family.layer:
        return reaches_class(module) and layers.is_converted(getattr(module, family.layer))
    return isinstance(module, EngineMixin) and reaches_class(module)


def _layer_in(path: str, module: torch.nn.Module, name: str, options: PatchOptions) -> Found:
    layer = getattr(module, _FAMILIES[name].layer)
    channels = getattr(layer, "in_channels", None) or getattr(module, "num_channels", options.channels)
    return f"{path}.{_FAMILIES[name].layer}".lstrip("."), layer, options.for_channels(channels)


@dataclass(frozen=True)
class _Entry:
    """Hook before a module that may cast pixels on their way to what was converted.

    Where their type still says that they are raw, they are normalised here, unless the layer behind expects raw ones.

    Attributes:
        path: of the layer or embedding, from this module.
        options: of it.
        last: whether no other such module lies between.
    """

    path: str
    options: PatchOptions
    last: bool

    def __call__(self, module: torch.nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict] | None:
        first = {0: self._given(module, arguments[0])} if arguments else {}
        given = {name: self._given(module, value) for name, value in named.items() if name.startswith("pixel_values")}
        return (*first.values(), *arguments[1:]), named | given

    def _given(self, module: torch.nn.Module, pixels: Any) -> Any:
        if not isinstance(pixels, torch.Tensor):
            return pixels
        target = module.get_submodule(self.path)
        within = [each for each in target.modules() if isinstance(each, EngineMixin)]
        adapted = not isinstance(target, EngineMixin) or (
            bool(target._forward_pre_hooks) and isinstance(target, tuple(layers._PLAIN))
        )
        for each in within:
            if each.engine.behind_adapter != adapted:
                each.engine.behind_adapter = adapted
        if self.options.pixels == "raw":
            normalises = adapted and self.last
        else:
            normalises = pixels.dtype == torch.uint8 and (adapted or not self.options.integer)
        if not normalises:
            return pixels
        weight = within[0].engine_weight() if within else next(target.parameters())
        engine = PatchEngine(self.options)
        return engine.normalised(engine.as_said(pixels), weight)


def _open_entries(model: torch.nn.Module, path: str, name: str, options: PatchOptions) -> None:
    """Hooks before all modules of the library's file that may cast the pixels of the embedding at ``path``."""
    family, file = _FAMILIES[name], _original(name).__module__
    embedding = model.get_submodule(path)
    weight_of = getattr(embedding, family.layer) if family.layer else embedding
    known = next((module.engine.options for module in weight_of.modules() if isinstance(module, EngineMixin)), options)
    holders = []
    for outer, holder in model.named_modules() if family.casts else ():
        of_file = any(kind.__module__ == file for kind in type(holder).__mro__)
        if not of_file or not f"{path}.".startswith(f"{outer}." if outer else ""):
            continue
        if path != outer or family.layer:  # not itself, which takes raw pixels
            holders.append((outer, holder))
    for outer, holder in holders:
        inner = f"{path[len(outer) :].strip('.')}.{family.layer}".strip(".")
        hook = _Entry(inner, known, last=outer == holders[-1][0])
        holder.register_forward_pre_hook(hook, with_kwargs=True)


def _close_entries(model: torch.nn.Module) -> None:
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _Entry):
                del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]


def _normalisation(
    model: torch.nn.Module, path: str, name: str, processor: Any
) -> tuple[PerChannel, PerChannel] | None:
    """Mean and standard deviation of the model itself, or of its processor; None where they are not known.

    Raises:
        ValueError: a processor that does not say.
    """
    if _FAMILIES[name].mean is not None:  # which no processor normalises
        return None
    conditioner = _original("conditioner", loaded_only=True)
    for module in model.modules() if conditioner is not None else ():
        if isinstance(module, conditioner):
            return tuple(tuple(values.flatten().tolist()) for values in (module.norm_mean, module.norm_std))
    if processor is None:  # the innermost checkpoint around the embedding has its processor
        owners = [model.get_submodule(path)]
        while path:
            path = path.rpartition(".")[0]
            owners.append(model.get_submodule(path))
        return next(filter(None, map(processors.of_checkpoint, owners)), None)
    known = processors.of_processor(processor)
    if known is None:
        raise ValueError(f"processor is {type(processor).__name__} without image_mean and image_std")
    return known


def __getattr__(name: str) -> type:
    """The classes that `enable` puts in place, by name, for those who unpickle a model."""
    for family, known in _KNOWN.items():
        if name == known.name and known.mixin is not None:
            found = _class(family)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _equip(module: torch.nn.Module, options: PatchOptions | None = None) -> None:
    """Gives a module what its new class needs, with the options of `enable` when there are no others."""
    name = module.family
    if options is None:
        options = _active.get(name) or _options(name, "bf16", None, None, "auto", "auto")
        if options.mean is None and (known := processors.of_model_being_built()) is not None:
            options = replace(options, mean=known[0], std=known[1])
    channels = getattr(getattr(module, "config", None), "num_channels", None) or getattr(module, "in_channels", 3)
    module.engine = module.engine_class(
        replace(
            options.for_channels(channels), order=module.order, frames=getattr(module, "temporal_patch_size", 1)
        )
    )
    module.positions = PositionCache("bilinear", antialias=True) if module.order == "hwc" else PositionCache("bicubic")


def _chosen(models: Sequence[str] | None, precision: str) -> tuple[str, ...]:
    """Families by name, of those that the precision can serve.

    Raises:
        TypeError, ValueError: as `enable`.
    """
    if isinstance(models, str) or (models is not None and not isinstance(models, Sequence)):
        raise TypeError(f"models is {type(models).__name__}: must be a sequence of names")
    whole = {name: family.mixin for name, family in _FAMILIES.items() if not family.layer}
    for name in models or ():
        if name not in whole:
            other = "; convert(model) serves it" if name in _FAMILIES else ""
            raise ValueError(f"models has {name!r}: must be one of {', '.join(map(repr, whole))}{other}")
    served = tuple(name for name, mixin in whole.items() if precision == "int8" or mixin is not _Normed)
    for name in models or ():
        if name not in served:
            raise _no_integers(name, precision)
    return served if models is None else tuple(models)


def _options(name: str, precision, mean, std, pixels, backend, known=None) -> PatchOptions:
    family = _FAMILIES[name]
    known_mean, known_std = known or (family.mean, family.std)
    mean, std = (known_mean if mean is None else mean), (known_std if std is None else std)
    options = PatchOptions(precision=precision, mean=mean, std=std, pixels=pixels, backend=backend)
    if family.mixin is _Normed:
        if not options.integer:
            raise _no_integers(name, precision)
        if len({*options.mean}) > 1 or len({*options.std}) > 1:
            raise ValueError(
                f"mean = {list(options.mean)} and std = {list(options.std)} of {name}, whose LayerNorm is over all "
                "channels together: must be one number for all of them"
            )
    return options


def _no_integers(name: str, precision: str) -> ValueError:
    return ValueError(
        f"precision = {precision!r} for {name!r}, which normalises rows of uint8 itself, exactly: must be 'int8'"
    )


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
        family = _KNOWN[name]
        path = f"transformers.models.{family.module}.modeling_{family.module}"
        if loaded_only and path not in sys.modules:
            return None
        try:
            _originals[name] = getattr(_library(path), family.name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name) or error.name == "transformers":
                raise
            return None
    return _originals[name]


@functools.cache
def _class(name: str, fused: type | None = None) -> type | None:
    """Class that takes the place of a family's, or of the one that the library's fusion made of it.

    It has that class's name, which device maps go by.
    """
    original = fused or _original(name)
    if original is None:
        return None
    mixin = _KNOWN[name].mixin
    members = {"family": name, "library": original, "__module__": __name__, "__doc__": mixin.__doc__}
    return type(original.__name__, (mixin, original), members)
