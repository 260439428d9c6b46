"""Embeddings of other libraries' models, replaced in place: a family is a row of data, and one place serves all."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from warnings import warn

import torch

from cute_kernels.models import processors
from cute_kernels.models.nn import layers
from cute_kernels.models.nn.calls import change_class, check_reachable, reaches_class, why_holder
from cute_kernels.models.nn.engine import PatchEngine
from cute_kernels.models.nn.layers import EngineMixin
from cute_kernels.models.nn.options import Backend, PatchOptions, Pixels, Precision
from cute_kernels.models.nn.positions import PositionCache
from cute_kernels.models.processors import Normalisation, PerChannel


@dataclass(frozen=True)
class Family:
    """A class of a library, and what is replaced: its forward, or a layer in it.

    Attributes:
        module: where the class is.
        name: of the class.
        mixin: what takes the place of its forward; None where the layer is replaced:
        layer: name of that convolution or linear layer.
        order: of a patch's pixels in rows of a linear layer.
        entry: method that calls the layer, where others of the class than its forward call that one.
        casts: whether pixels are cast on their way there: by the class or one of its module that holds it, which one
            differs between versions of the library.
        mean, std: normalisation of models that do it themselves, whose processors only divide by 255.
    """

    module: str
    name: str
    mixin: type | None = None
    layer: str = ""
    order: str = "chw"
    entry: str = ""
    casts: bool = False
    mean: float | None = None
    std: float | None = None

    @property
    def model(self) -> str:
        """The models' name, for texts."""
        library, *parts = self.module.split(".")
        return parts[1] if library == "transformers" else library

    def original(self, *, loaded_only: bool = True) -> type | None:
        """The library's class, or None where the library has no such model (or has not loaded it yet)."""
        if self not in _ORIGINALS:
            if loaded_only and self.module not in sys.modules:
                return None
            try:
                _ORIGINALS[self] = getattr(importlib.import_module(self.module), self.name, None)
            except ModuleNotFoundError as error:
                if error.name is None or not self.module.startswith(error.name) or "." not in error.name:
                    raise
                return None
        return _ORIGINALS[self]

    def replacement(self, fused: type | None = None) -> type | None:
        """Class that takes the place of the library's, or of the one that the library's fusion made of it."""
        original = fused or self.original(loaded_only=False)
        return None if original is None else _replacement(self, original)

    def options(self, known: Normalisation | None = None, **said: Any) -> PatchOptions:
        """Options with the normalisation that is said, else with the known one. Raises ValueError: one of a processor,
        where the model normalises by itself."""
        known = known or (None, None) if self.mean is None else known or (0.0, 1.0)
        for name, found in zip(("mean", "std"), known, strict=True):
            if said.get(name) is None:
                said[name] = found
        options = PatchOptions(**said)
        if self.mean is not None:
            if {*options.mean} != {0.0} or {*options.std} != {1.0}:
                raise ValueError(
                    f"mean = {list(options.mean)} and std = {list(options.std)} of {self.model}, which normalises "
                    "pixels of 0 to 1 itself: must be left out, and its processor must only divide by 255"
                )
            options = replace(options, mean=self.mean, std=self.std)
        if self.mixin is not None:
            self.mixin.check_options(self, options)
        return options


@functools.cache
def _replacement(family: Family, original: type) -> type:
    """The class that replaces another one, under its name, which device maps go by."""
    members = {"family": family, "library": original, "__doc__": family.mixin.__doc__}
    return type(original.__name__, (family.mixin, original), members | {"__module__": family.mixin.__module__})


_ORIGINALS: dict[Family, type | None] = {}
_COMPARES = ("ViTMAEForPreTraining", "ViTForMaskedImageModeling", "DeiTForMaskedImageModeling")
"""Models whose loss compares what they predict with the pixels that they were given."""


class Embedding(EngineMixin):
    """An embedding whose forward is replaced, of a ``family`` and in place of the ``library``'s class; ``order`` is
    that of a patch's pixels in rows and in the weight of the layer ``layer_name``."""

    family: Family
    library: type
    order: str
    layer_name: str

    def engine_weight(self) -> torch.Tensor:
        return getattr(self, self.layer_name).weight

    def __setattr__(self, name: str, value: Any) -> None:
        """A forward that somebody gives the instance gets normalised pixels, as the library's forward does."""
        super().__setattr__(name, value)
        if name == "forward" and self.family.mean is None and not reaches_class(self):
            _close_entries(self)
            entry = _Entry("", self.engine.options, casts=False, last=True, family=None)
            self.register_forward_pre_hook(entry, with_kwargs=True)

    @staticmethod
    def check_options(family: Family, options: PatchOptions) -> None:
        """Raises ValueError for options that the class does not serve."""

    def equip(self, options: PatchOptions) -> None:
        """Gives a module what its new class needs."""
        options, frames = options.for_channels(_channels(self)), getattr(self, "temporal_patch_size", 1)
        self.engine = self.engine_class(replace(options, order=self.order, frames=frames))
        self.positions = PositionCache("bilinear", antialias=True) if self.order == "hwc" else PositionCache("bicubic")


def _channels(module: torch.nn.Module, layer: torch.nn.Module | None = None) -> int:
    """Channels of the images of an embedding, or of the layer in it."""
    names = ((layer, "in_channels"), (getattr(module, "config", None), "num_channels"))
    names += tuple((module, name) for name in ("num_channels", "in_chans", "in_channels"))
    return next(filter(None, (getattr(holder, name, None) for holder, name in names)), 3)


class Found(NamedTuple):
    """An embedding in a model: where, itself, and its family."""

    path: str
    module: torch.nn.Module
    family: Family

    @property
    def layer(self) -> torch.nn.Module | None:
        layer = getattr(self.module, self.family.layer) if self.family.layer else None
        return getattr(layer, "_orig_mod", layer)  # in `torch.compile`'s

    @property
    def channels(self) -> int:
        return _channels(self.module, self.layer)

    @property
    def layer_path(self) -> str:
        return f"{self.path}.{self.family.layer}".strip(".")

    def owners(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The embedding, and what is around it in ``model``, from the inside out."""
        yield self.module
        path = self.path
        while path:
            path = path.rpartition(".")[0]
            yield model.get_submodule(path)

    def is_converted(self) -> bool:
        own = isinstance(self.module, EngineMixin) if self.family.mixin else layers.is_converted(self.layer)
        return own and reaches_class(self.module)

    def options(self, known: Normalisation | None, **said: Any) -> PatchOptions:
        """Options of the family; those of a layer with its channels and the order of its rows. Raises ValueError: a
        normalisation that raw pixels or ``"fp8"`` need and that is not known."""
        rows = isinstance(self.layer, torch.nn.Linear) and getattr(self.module, "channels_last", True)
        order = self.family.order if rows else "chw"
        options = self.family.options(known, **said, channels=self.channels, order=order)
        if options.asks_normalisation:
            model = f"{'an' if self.family.model[0] in 'aio' else 'a'} {self.family.model} model"
            raise ValueError(
                f"mean and std of {model} are not known, for its checkpoint does not say them: "
                "must be processor=.., or both of mean=.. and std=.."
            )
        return options


@dataclass(frozen=True)
class Library:
    """A library with such models.

    Attributes:
        name: of its module.
        package: to install.
        families: its rows, by name.
        expected: what its models have, for texts of errors.
        said: gives the mean and standard deviation that a module around an embedding says of its checkpoint, for a
            number of channels, or None.
        front: a class that normalises pixels in front of embeddings, and has a mixin with an attribute ``raw``.
    """

    name: str
    package: str
    families: Mapping[str, Family]
    expected: str
    said: Callable[[torch.nn.Module, int], Normalisation | None]
    front: Family | None = None

    def require(self) -> None:
        """Raises ModuleNotFoundError, with the package, where the library is not installed."""
        try:
            importlib.import_module(self.name)
        except ModuleNotFoundError as error:
            if error.name != self.name:
                raise
            raise ModuleNotFoundError(f"this needs {self.name}: pip install {self.package}") from error

    def embeddings(self, model: torch.nn.Module) -> list[Found]:
        """Embeddings in a model. Raises ModuleNotFoundError: as `require`; TypeError: no module; ValueError: none
        there."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is {type(model).__name__}: must be torch.nn.Module")
        self.require()
        kinds = [(family, kind) for family in self.families.values() if (kind := family.original()) is not None]
        modules = model.named_modules()
        found = [Found(*each, family) for each in modules for family, kind in kinds if isinstance(each[1], kind)]
        return found or self._none(model)

    def _none(self, model: torch.nn.Module) -> Any:
        raise ValueError(f"model is {type(model).__name__}, which has no {self.expected}")

    def convert(
        self,
        model: torch.nn.Module,
        precision: Precision = "bf16",
        *,
        processor: Any = None,
        mean: PerChannel | None = None,
        std: PerChannel | None = None,
        pixels: Pixels = "auto",
        backend: Backend = "auto",
    ) -> torch.nn.Module:
        """Gives a model that exists this package's patch embedding, in place, and returns it.

        Args:
            model: any module with a model of the library in it, whose embeddings are all converted, or none.
            precision: what is multiplied, see `cute_kernels.models.nn.PatchOptions`.
            processor: the model's image processor, its configuration or its transforms, which say how pixels are
                normalised.
            mean, std: the normalisation itself. Without it and a processor it is the one that the model's checkpoint
                says: beside it on this machine (transformers), in ``pretrained_cfg`` of a model that has weights to be
                loaded (timm), in ``image_mean`` and ``image_std`` of the tower (open_clip).
            pixels, backend: see `cute_kernels.models.nn.PatchOptions`. With ``"auto"``, models of transformers that
                cast pixels have uint8 normalised in front of them, by torch; with ``"raw"`` the kernel does it.

        Raises:
            ModuleNotFoundError: the library is not installed.
            TypeError, ValueError: an argument that is not allowed; a model without such an embedding, or whose instance
                has a forward of its own (accelerate's hooks are kept), or whose layer is no patch embedding; a
                normalisation that raw pixels or ``"fp8"`` need and that is not known.
        """
        found = [each for each in self.embeddings(model) if _is_replaceable(each)] or self._none(model)
        if pixels == "raw" or precision == "int8":
            for kind in (kind.__name__ for module in model.modules() for kind in type(module).__mro__):
                if kind in _COMPARES:
                    raise ValueError(f"{kind} compares with normalised pixels: must be pixels='auto', and not int8")
        said = {"precision": precision, "mean": mean, "std": std, "pixels": pixels, "backend": backend}
        options = [each.options(self._normalisation(model, each, processor), **said) for each in found]
        for each, chosen in zip(found, options, strict=True):
            if each.family.mixin is not None:
                check_reachable(each.module, f"the model's {each.family.model} embedding")
            elif not layers.is_converted(each.layer):  # which gets other options
                try:
                    layers.check_layer(each.layer, chosen.channels, chosen.order)
                    layers.options_of(each.layer, chosen)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{each.layer_path} cannot be converted: {error}") from error
        _close_entries(model)
        for each, chosen in zip(found, options, strict=True):
            if each.family.mixin is None:
                layers.convert_layer(each.layer, chosen)
            else:
                kind, original = type(each.module), each.family.original()
                base = kind.__bases__[-1] if isinstance(each.module, EngineMixin) else kind
                change_class(each.module, each.family.replacement(None if base is original else base))
                each.module.equip(chosen)
        for each, chosen in zip(found, options, strict=True):
            _open_entries(model, each, chosen)
        for module in model.modules() if self.front is not None else ():
            if type(module) is self.front.original():
                change_class(module, self.front.replacement())
            if isinstance(module, self.front.mixin):
                module.raw = pixels == "raw"
        return model

    def _normalisation(self, model: torch.nn.Module, found: Found, processor: Any) -> Normalisation | None:
        """Mean and standard deviation of a processor, or of the innermost module around an embedding that says them.
        Raises ValueError: a processor that does not say."""
        if processor is None:
            said = (self.said(owner, found.channels) for owner in found.owners(model))
            return next(filter(None, said), None)
        known = processors.of_processor(processor)
        if known is None and found.family.mean is None:
            raise ValueError(f"processor is {type(processor).__name__} without image_mean and image_std")
        return known

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Gives a model its library's embedding back, in place, and returns it."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is {type(model).__name__}: must be torch.nn.Module")
        _close_entries(model)
        for module in model.modules():
            kind = type(module)
            if not isinstance(getattr(kind, "family", None), Family):
                layers.revert_layer(module)
                continue
            if "family" not in vars(kind):
                raise TypeError(f"module is {kind.__name__}: remove what was put around it after it was converted")
            change_class(module, kind.__bases__[-1])
            for attribute in ("engine", "positions"):
                vars(module).pop(attribute, None)
        return model

    def is_converted(self, model: torch.nn.Module) -> bool:
        """Whether calls of a model's patch embeddings come to this package, and nothing stays to be converted.

        What stands in place of a layer in an embedding whose forward is replaced (an adapter, hooks) is called by this
        package, so it counts as converted; an adapter around a layer that was replaced itself does not. A model that
        was not converted takes raw uint8 pixels for normalised ones without an error. Raises ModuleNotFoundError,
        TypeError, ValueError: as `convert`, for the model."""
        return all(each.is_converted() for each in self.embeddings(model))


def _is_replaceable(found: Found) -> bool:
    """Whether a module is the library's or ours, and nobody's subclass, where its forward is replaced."""
    family, kind = found.family, type(found.module)
    return family.mixin is None or kind in (family.original(), family.replacement()) or is_fused(kind)


def is_fused(kind: type) -> bool:
    """Whether a class is one that transformers' fusion of patch embeddings made, or ours over it."""
    fusion = sys.modules.get("transformers.fusion_mapping")
    return fusion is not None and issubclass(kind, fusion._FusedPatchEmbeddingMixin)


_PIXELS = ("hidden_states", "image", "images", "patches", "x")
"""Names of arguments that are pixels where modules get them, beside those that begin with ``pixel_values``."""


@dataclass(frozen=True)
class _Entry:
    """Hook before a module through which pixels come to the layer or embedding at ``path``.

    Raw pixels are normalised here where what stands there is not ours, or is in an adapter or behind hooks of others:
    by the ``last`` such module. Those that only their type tells to be raw are so by the first where modules
    ``cast``. A module that pads adds zeros, which are the mean of normalised images alone. Code that is not the
    library's may use the layer's weight instead of calling it: ``family`` says whose the module has to be."""

    path: str
    options: PatchOptions
    casts: bool
    last: bool
    family: Family | None

    def __call__(self, module: torch.nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict] | None:
        first = {0: self._given(module, arguments[0])} if arguments else {}
        names = (name for name in named if name.startswith("pixel_values") or name in _PIXELS)
        return (*first.values(), *arguments[1:]), named | {name: self._given(module, named[name]) for name in names}

    def _given(self, module: torch.nn.Module, pixels: Any) -> Any:
        options = self.options
        if not isinstance(pixels, torch.Tensor) or not (options.raw or pixels.dtype == torch.uint8):
            return pixels
        if getattr(module, "dynamic_img_pad", False) and pixels.dim() == 4:
            pixels = _padded(module, pixels, options.mean)
        target = module.get_submodule(self.path)
        target = target if isinstance(target, EngineMixin) else getattr(target, "_orig_mod", target)
        within = [each for each in target.modules() if isinstance(each, EngineMixin)]
        adapted = not isinstance(target, EngineMixin) or not reaches_class(target)
        adapted = adapted or (bool(target._forward_pre_hooks) and isinstance(target, tuple(layers.PLAIN)))
        # timm's, which multiplies patches of any size by weights that it makes of the layer's.
        adapted = adapted or (pixels.dim() == 5 and getattr(module, "enable_patch_interpolator", False))
        if self.family is not None:
            why = why_holder(module, self.family.module.partition(".")[0], self.family.entry)
            if why is not None and not module.training:
                warn(f"{why}, and is given normalised pixels. The plain torch module runs for int8.", stacklevel=2)
            adapted = adapted or why is not None
        for each in within:
            if each.engine.behind_adapter != adapted:
                each.engine.behind_adapter = adapted
        if not (adapted and self.last if options.raw else adapted or self.casts):
            return pixels
        weight = within[0].engine_weight() if within else next(target.parameters())
        engine, rows = PatchEngine(options), pixels.flatten(2) if pixels.dim() == 5 else pixels
        return engine.normalised(engine.as_said(rows), weight).view(pixels.shape)


def _enter(module: torch.nn.Module, entry: _Entry, pixels: torch.Tensor) -> Any:
    """The method of a module that calls its layer, behind an entry."""
    return getattr(type(module), entry.family.entry)(module, entry._given(module, pixels))


def _padded(module: torch.nn.Module, images: torch.Tensor, mean: Sequence[float] | None) -> torch.Tensor:
    """Raw images to whole patches, to the right and below, with the mean rounded to a pixel's value."""
    batch, channels, *sizes = images.shape
    height, width = (-(-size // patch) * patch for size, patch in zip(sizes, module.patch_size, strict=True))
    if [height, width] == sizes or mean is None:
        return images
    fill = torch.tensor(mean, dtype=torch.float32, device=images.device).mul(255).round().to(images.dtype)
    padded = fill[None, :, None, None].repeat(batch, 1, height, width)
    padded[:, :, : sizes[0], : sizes[1]] = images
    return padded


def _open_entries(model: torch.nn.Module, found: Found, options: PatchOptions) -> None:
    """Hooks before an embedding whose layer is replaced, and before all modules of the library's file around an
    embedding that may cast its pixels."""
    path, family, file = found.path, found.family, found.family.original().__module__
    within = (found.layer if family.layer else found.module).modules()
    known = next((module.engine.options for module in within if isinstance(module, EngineMixin)), options)
    holders = []
    for outer, holder in model.named_modules():
        around = f"{path}.".startswith(f"{outer}." if outer else "")
        of_file = family.casts and any(kind.__module__ == file for kind in type(holder).__mro__)
        if around and (family.layer if path == outer else of_file):  # a replaced forward takes raw pixels
            holders.append((outer, holder))
    for outer, holder in holders:
        inner = f"{path[len(outer) :].strip('.')}.{family.layer}".strip(".")
        direct = family if family.layer and outer == path else None
        entry = _Entry(inner, known, casts=family.casts, last=outer == holders[-1][0], family=direct)
        if direct is not None and hasattr(holder, family.entry):
            setattr(holder, family.entry, functools.partial(_enter, holder, entry))
        else:
            holder.register_forward_pre_hook(entry, with_kwargs=True)


def _close_entries(model: torch.nn.Module) -> None:
    for module in model.modules():
        for name in [name for name, value in vars(module).items() if getattr(value, "func", None) is _enter]:
            delattr(module, name)
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _Entry):
                del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]
