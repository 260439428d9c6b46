"""Hugging Face models with this package's patch embedding.

    from cute_kernels.models import transformers
    transformers.enable()          # then AutoModel.from_pretrained(..) as always

`enable` registers replacements with `transformers.monkey_patching`, which puts them where a model is built from a
checkpoint or a config; `convert` changes a model that exists. Either way parameters keep their names and checkpoints
do not change. Of some families the embedding is replaced, positions included; of the others the layer in it.

Pixels: `raw_processor` makes a processor hand out uint8, which is normalised here, in the kernel; what a processor
normalised itself is multiplied as it is.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any
from warnings import warn

import torch

from cute_kernels.models import processors
from cute_kernels.models.nn.availability import in_graph, is_plain, is_transformed, traced
from cute_kernels.models.nn.calls import why_called, why_own
from cute_kernels.models.nn.engine import check_tensor
from cute_kernels.models.nn.layer_norm import LayerNormEngine
from cute_kernels.models.nn.layers import EngineMixin
from cute_kernels.models.nn.options import Backend, PatchOptions, Pixels, Precision
from cute_kernels.models.nn.positions import checked_grids
from cute_kernels.models.replace import Embedding, Family, Library, is_fused


class _Embedding(Embedding):
    """An embedding of the library, with the options of `enable` where a model is built."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        options = _active.get(self.family) or self.family.options()
        if options.mean is None and (known := processors.of_model_being_built()) is not None:
            options = replace(options, mean=known[0], std=known[1])
        if options.asks_normalisation:
            warn(
                f"mean and std of {self.family.model} are not known, for no processor lies beside its checkpoint: must "
                "be given before the first call, by raw_processor(processor, model) or convert(.., processor=..)",
                stacklevel=2,
            )
        self.equip(options)


def _is_added_inside(positions: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel can add positions: as wide as its result, and of a type that leaves the result's as it is."""
    return positions.shape[1] == weight.shape[0] and torch.promote_types(weight.dtype, positions.dtype) == weight.dtype


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
        if _is_added_inside(own, layer.weight):
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
        if not traced() and is_transformed(ids):
            return False
        numbers = why is None and is_plain(pixel_values)  # else the plain module runs, whatever the positions are
        if numbers and not in_graph() and not self.positions.in_order(ids, positions.num_embeddings):
            why = "position_ids are not the positions in their order"
        return self.engine.takes_over(
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
        takes_over = self.engine.takes_over(
            why, pixel_values, lambda: (layer.weight, layer.bias, positions), training=self.training
        )
        if not takes_over:
            return super().forward(self.engine.normalised(pixel_values, layer.weight), spatial_shapes)
        length = pixel_values.shape[1]
        grids = checked_grids(spatial_shapes, pixel_values.shape[0], length)
        native = (self.position_embedding_size,) * 2
        table, index = self.positions.packed(positions, native, grids, length)
        if _is_added_inside(positions, layer.weight):
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
        if self.engine.takes_over(why, rows, parameters, training=self.training):
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
        takes_over = self.engine.takes_over(
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

    @staticmethod
    def check_options(family: Family, options: PatchOptions) -> None:
        if not options.integer:
            raise ValueError(
                f"precision = {options.precision!r} for {family.model!r}, which normalises rows of uint8 itself: "
                "must be 'int8'"
            )

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
        takes_over = self.engine.takes_over(why, pixels, self.engine_parameters, training=self.training)
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
    """``RadioInputConditioner``: leaves the normalisation of raw pixels to the layer; all are where ``raw`` says so."""

    raw: bool = False

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return pixel_values if self.raw or pixel_values.dtype == torch.uint8 else super().forward(pixel_values)


_PATH = "transformers.models.{0}.modeling_{0}"
_FAMILIES = {
    name: Family(_PATH.format(name), kind, mixin, casts=mixin is _Rows, mean=mean, std=std)
    for name, kind, mixin, mean, std in (
        ("siglip", "SiglipVisionEmbeddings", _Images, None, None),
        ("siglip2", "Siglip2VisionEmbeddings", _NaFlex, None, None),
        ("qwen2_vl", "PatchEmbed", _Rows, None, None),
        ("qwen2_5_vl", "Qwen2_5_VisionPatchEmbed", _Rows, None, None),
        ("qwen3_vl", "Qwen3VLVisionPatchEmbed", _Rows, None, None),
        ("qwen3_vl_moe", "Qwen3VLMoeVisionPatchEmbed", _Rows, None, None),
        ("qwen3_5", "Qwen3_5VisionPatchEmbed", _Rows, None, None),
        ("qwen3_5_moe", "Qwen3_5MoeVisionPatchEmbed", _Rows, None, None),
        ("gemma4", "Gemma4VisionPatchEmbedder", _Scaled, 0.5, 0.5),
        ("gemma4_unified", "Gemma4UnifiedVisionEmbedder", _Normed, 0.0, 1.0),
    )
}
_LAYERS = {
    name: Family(_PATH.format(name), kind, layer=layer, casts=casts)
    for name, kind, layer, casts in (
        ("clip", "CLIPVisionEmbeddings", "patch_embedding", True),
        ("metaclip_2", "MetaClip2VisionEmbeddings", "patch_embedding", True),
        ("dinov2", "Dinov2PatchEmbeddings", "projection", True),
        ("dinov2_with_registers", "Dinov2WithRegistersPatchEmbeddings", "projection", True),
        ("dinov3_vit", "DINOv3ViTEmbeddings", "patch_embeddings", True),
        ("aimv2", "Aimv2VisionEmbeddings", "patch_embed", False),
        ("internvl", "InternVLVisionPatchEmbeddings", "projection", True),
        ("radio", "RadioPatchEmbeddings", "patch_projection", False),
        ("vit", "ViTPatchEmbeddings", "projection", True),
        ("deit", "DeiTPatchEmbeddings", "projection", True),
        ("vit_mae", "ViTMAEPatchEmbeddings", "projection", True),
        ("beit", "BeitPatchEmbeddings", "projection", False),
        ("sam", "SamPatchEmbeddings", "projection", False),
        ("ijepa", "IJepaPatchEmbeddings", "projection", True),
    )
}
_CONDITIONER = Family(_PATH.format("radio"), "RadioInputConditioner", _Conditioner)
_MODELS = Library(
    "transformers",
    "'cute-kernels[hf]'",
    _FAMILIES | _LAYERS,
    f"embedding of {', '.join(_FAMILIES | _LAYERS)}",
    processors.of_checkpoint,
    _CONDITIONER,
)
convert, revert, is_converted = _MODELS.convert, _MODELS.revert, _MODELS.is_converted
_active: dict[Family, PatchOptions] = {}


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
        precision: what is multiplied, see `cute_kernels.models.nn.PatchOptions`. Gemma 4 Unified's LayerNorm and layer
            are replaced with ``"int8"`` alone.
        models: names of families, which an error lists; None takes all that this transformers has.
        mean, std: normalisation of the processor; None takes that of the processor beside each checkpoint. Where there
            is none, building a model warns if the precision or ``pixels`` need it, and calls that do raise ValueError.
        pixels, backend: see `cute_kernels.models.nn.PatchOptions`. Models that cast pixels before their embedding sees
            them (Qwen's) need ``"raw"`` for uint8.

    Returns:
        The families that were enabled.

    Raises:
        ModuleNotFoundError: no transformers, or one without ``transformers.monkey_patching``.
        TypeError, ValueError: an argument that is not allowed; a class whose replacement somebody else registered.
    """
    said = {"precision": precision, "pixels": pixels, "backend": backend}
    options = {}
    for family in _chosen(models, precision):  # of all families, no processor normalises for those that do it
        of_all = models is None and family.mean is not None
        options[family] = family.options(**said, mean=None if of_all else mean, std=None if of_all else std)
    registry = _registry()
    options = {family: each for family, each in options.items() if family.original(loaded_only=False) is not None}
    registered = registry.get_patch_mapping()
    for family in options:
        if family.name in registered and not is_fused(registered[family.name]):
            fix = f"unregister_patch_mapping([{family.name!r}]) first"
            raise ValueError(f"{family.name} has a replacement registered already: {fix}")
    # Anchored: keys are searched for in class names as regular expressions.
    mapping = {f"^{family.name}$": family.replacement() for family in options}
    registry.register_patch_mapping(mapping, overwrite=True)
    _active.update(options)
    _fuse(lambda family, fused: family.replacement(fused) if family in _active else fused)
    return tuple(name for name, family in _FAMILIES.items() if family in options)


def disable() -> None:
    """Undoes `enable`; models that were built meanwhile keep their embedding."""
    if not _active:
        return
    registry = _registry()
    ours = [f"^{family.name}$" for family in _active]
    registry.unregister_patch_mapping([key for key in ours if key in registry.get_patch_mapping()])
    # The library leaves its modules patched when building a model fails.
    replaced = {family.replacement(): family.original() for family in _active}
    for module in [module for name, module in sys.modules.items() if name.startswith("transformers.")]:
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value in replaced:
                setattr(module, attribute, replaced[value])
    _active.clear()
    _fuse(None)


def _fuse(over: Callable[[Family, type], type] | None) -> None:
    """Has the library's fusion (``fusion_config={"patch_embeddings": True}``) make other classes: those that ``over``
    gives for a family and the library's class, or that one."""
    try:
        fusion = importlib.import_module("transformers.fusion_mapping")
        registry, spec = fusion._FUSION_REGISTRY, fusion.PatchEmbeddingsFusionSpec
    except (ModuleNotFoundError, AttributeError):  # of a transformers before it
        return
    families = {family.original(): family for family in _FAMILIES.values() if family.mixin is _Rows}

    def replaced(fused: type) -> type:
        fused = fused.__bases__[-1] if issubclass(fused, EngineMixin) else fused
        family = families.get(fused.__bases__[-1])
        return fused if over is None or family is None else over(family, fused)

    class Spec(spec):
        def make_fused_class(self, original_cls: type) -> type:
            return replaced(super().make_fused_class(original_cls))

    registry["patch_embeddings"] = spec() if over is None else Spec()
    fusion._FUSION_DISCOVERY_CACHE.pop("patch_embeddings", None)  # which has classes as they were
    known = _registry().get_patch_mapping().items()
    mapping = {name: replaced(kind) for name, kind in known if is_fused(kind)}
    _registry().register_patch_mapping(mapping, overwrite=True)


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


def __getattr__(name: str) -> type:
    """The classes that `enable` puts in place, by name, for those who unpickle a model."""
    for family in (*_FAMILIES.values(), _CONDITIONER):
        if name == family.name and (found := family.replacement()) is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _chosen(models: Sequence[str] | None, precision: str) -> tuple[Family, ...]:
    """Families of `enable`, of those that the precision can serve where no names are given; raises as `enable`."""
    if isinstance(models, str) or (models is not None and not isinstance(models, Sequence)):
        raise TypeError(f"models is {type(models).__name__}: must be a sequence of names")
    for name in models or ():
        if name not in _FAMILIES:
            other = "; convert(model) serves it" if name in _LAYERS else ""
            raise ValueError(f"models has {name!r}: must be one of {', '.join(map(repr, _FAMILIES))}{other}")
    if models is not None:
        return tuple(_FAMILIES[name] for name in models)
    return tuple(each for each in _FAMILIES.values() if precision == "int8" or each.mixin is not _Normed)


def _registry() -> ModuleType:
    _MODELS.require()
    try:
        return importlib.import_module("transformers.monkey_patching")
    except ModuleNotFoundError as error:
        if error.name != "transformers.monkey_patching":
            raise
        version = importlib.import_module("transformers").__version__
        raise ModuleNotFoundError(
            f"transformers {version} has no transformers.monkey_patching: convert(model) works without it, or take a "
            "newer transformers: pip install 'cute-kernels[hf]'"
        ) from error
