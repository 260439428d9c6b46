"""The two layers that patch embeddings are made of, run by the kernels: what a model's own module becomes in place.

`convert_layer` changes the class of a `torch.nn.Conv2d` or `torch.nn.Linear` and nothing else: parameters, hooks,
``state_dict`` and ``isinstance`` checks stay what they were.
"""

from collections.abc import Callable
from typing import Any
from warnings import warn

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from cute_kernels.models.nn.calls import change_class, check_reachable, reaches_class, why_code, why_no_patches
from cute_kernels.models.nn.engine import PatchEngine, check_tensor
from cute_kernels.models.nn.options import Order, PatchOptions
from cute_kernels.models.nn.positions import Interpolation, PositionCache, checked_grid


class EngineMixin:
    """For a `torch.nn.Module` with an engine: what was made from its weight goes where the module goes.

    A class whose weight is another module's overrides `engine_weight`, one of which more is prepared than the weight
    `engine_parameters`.
    """

    engine_class: type[PatchEngine] = PatchEngine
    engine: PatchEngine
    positions: PositionCache | None = None

    def engine_weight(self) -> torch.Tensor:
        return self.weight

    def engine_parameters(self) -> tuple[torch.Tensor | None, ...]:
        return (self.engine_weight(),)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        kinds = self.engine.up_to_date(*self.engine_parameters())
        super()._apply(fn, recurse)
        self.engine.follow(self.engine_parameters(), kinds, fn)
        return self

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return f"{own}, precision={self.engine.options.precision!r}".removeprefix(", ")

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        """Shards of a parameter may be loaded without a trace in the whole one that a forward gathers (FSDP)."""
        super()._load_from_state_dict(*arguments, **named)
        self.engine._prepared.clear()


class _PatchLayer(EngineMixin):
    """A layer of `convert_layer`; with arguments, as an adapter around it makes its own layers (PEFT), a plain one."""

    def __new__(cls, *arguments: Any, **named: Any) -> torch.nn.Module:
        if not arguments and not named:  # a copy's empty object
            return super().__new__(cls)
        plain = PLAIN[cls]
        warn(
            f"a layer of a converted {plain.__name__}'s class is made as a plain {plain.__name__}, as an adapter "
            "around it does: raw pixels reach it as they are, but in a model that was converted as a whole",
            stacklevel=2,
        )
        return plain(*arguments, **named)


class PatchConv2d(_PatchLayer, torch.nn.Conv2d):
    """A convolution over whole patches, by `cute_kernels.patch_embed_images`; made by `convert_layer`."""

    def forward(
        self, input: torch.Tensor, pos_embed: torch.Tensor | None = None, *, grid: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """``[B, N, H // p, W // p]`` of ``[B, C, H, W]``, as a view whose memory is ``[B, S, N]``; B may be missing.

        Args:
            input: images, as the options say that pixels are. Those beyond the last whole patch are left out, as a
                convolution does.
            pos_embed: ``[S, N]`` or ``[1, S, N]`` to be added, in the same pass where a kernel for it exists, resized
                for the images' grid as `convert_layer` was told. It stays the caller's and is read at every call.
            grid: (rows, columns) of ``pos_embed``; a square when None.

        Raises:
            TypeError: pixels or positions of a type that is not allowed; pixels that are no strided tensor.
            ValueError: positions that do not fit; another shape, as the plain module refuses it: uint8 pixels are
                normalised before that one sees them, and would be broadcast to the channels of the mean.
        """
        check_tensor("input", input)
        channels, patch = self.weight.shape[1] * self.groups, self.weight.shape[-1]
        if input.dim() not in (3, 4) or input.shape[-3] != channels or min(input.shape[-2:]) < patch:
            shapes = f"[B, {channels}, H, W] or [{channels}, H, W] with H and W at least {patch}"
            raise ValueError(f"input has shape {list(input.shape)}: must be {shapes}")
        if pos_embed is None and grid is not None:
            raise ValueError(f"grid = {grid!r} without pos_embed: must be None")
        native = None if pos_embed is None else checked_grid(pos_embed, grid, self.weight)
        if input.dim() == 3:
            return self._batch(input.unsqueeze(0), pos_embed, native).squeeze(0)
        return self._batch(input, pos_embed, native)

    def _batch(
        self, images: torch.Tensor, pos_embed: torch.Tensor | None, native: tuple[int, int] | None
    ) -> torch.Tensor:
        images = self.engine.as_said(images)
        why = why_no_patches("the layer", self) or why_code(torch.nn.Conv2d)
        takes_over = self.engine.takes_over(
            why, images, lambda: (self.weight, self.bias, pos_embed), training=self.training
        )
        out = None if takes_over else super().forward(self.engine.normalised(images, self.weight))
        patch = self.weight.shape[-1]
        patches = (images.shape[2] // patch, images.shape[3] // patch) if out is None else tuple(out.shape[2:])
        if out is None:
            table = None if pos_embed is None else self.positions.for_kernel(pos_embed, native, patches)
            return self.engine.images(images, self.weight, self.bias, table).transpose(1, 2).unflatten(2, patches)
        table = None if pos_embed is None else self.positions.table(pos_embed, native, patches)
        return out if table is None else out + table.to(out.dtype).t().unflatten(1, patches)


class PatchLinear(_PatchLayer, torch.nn.Linear):
    """A linear layer over patches that are rows already, by `cute_kernels.gemm`; made by `convert_layer`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[.., N]`` of ``[.., C * p * p]``.

        Raises:
            TypeError: pixels of a type that is not allowed, or that are no strided tensor.
            ValueError: rows of another length.
        """
        check_tensor("input", input)
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(f"input has shape {list(input.shape)}: must be [.., {self.in_features}]")
        input = self.engine.as_said(input)
        takes_over = self.engine.takes_over(
            why_code(torch.nn.Linear), input, lambda: (self.weight, self.bias), training=self.training
        )
        if not takes_over:
            return super().forward(self.engine.normalised(input, self.weight))
        return self.engine.rows(input, self.weight, self.bias)


#: What the class was before, but for the subclasses that a converted module remembers.
PLAIN = {PatchConv2d: torch.nn.Conv2d, PatchLinear: torch.nn.Linear}
_FORWARDS = PatchConv2d.forward, PatchLinear.forward


def check_layer(module: torch.nn.Module, channels: int = 3, order: Order = "chw") -> None:
    """Refuses what is no Conv2d whose kernel is its stride, nor a Linear over flattened patches of so many channels, in
    this order.

    Raises TypeError: neither, or a subclass with a forward of its own; parametrised or lazy parameters; ValueError: an
    instance with a forward of its own, unless accelerate's hooks put it there; what is no square patch, by name of what
    differs; features that are no multiple of 8; an order that a Conv2d does not have.
    """
    if isinstance(module, torch.nn.Module):
        check_reachable(module)
    forward = getattr(type(module), "forward", None)
    if forward not in (torch.nn.Conv2d.forward, torch.nn.Linear.forward):
        kind = f"{type(module).__module__}.{type(module).__name__}"
        raise TypeError(f"module is {kind}: must be torch.nn.Conv2d or torch.nn.Linear")
    if getattr(type(module), "_conv_forward", None) not in (None, torch.nn.Conv2d._conv_forward):
        raise TypeError(f"module is {type(module).__name__}, which convolves in another way than torch.nn.Conv2d")
    if parametrize.is_parametrized(module):
        kind = f"parametrised in {', '.join(module.parametrizations)}"
        raise TypeError(f"module is {kind}: must be a plain layer: parametrise it after it was converted")
    if is_lazy(module.weight):
        raise TypeError(f"module is {type(module).__name__} without parameters yet: run it once before")
    if isinstance(module, torch.nn.Conv2d):
        _check_order(module, order)
        rows, columns = module.weight.shape[2:]
        if rows != columns:
            raise ValueError(f"module has kernel_size = {(rows, columns)}: must be square patches")
        if why := why_no_patches("module", module):
            raise ValueError(f"{why}: must be the patch as stride, no padding, dilation = 1, groups = 1")
    else:
        side = round((module.in_features / channels) ** 0.5)
        if not side or channels * side * side != module.in_features:
            raise ValueError(f"module has in_features = {module.in_features}: must be C * p * p with C = {channels}")
    n = module.weight.shape[0]
    if n % 8:
        raise ValueError(f"module has {n} features: must be multiples of 8")


def check_frames(options: PatchOptions) -> None:
    """Raises ValueError for options of several frames, which a layer by itself has not."""
    if options.frames != 1:
        raise ValueError(f"frames = {options.frames}: must be 1: rows of several frames are those of whole models")


def _check_order(module: torch.nn.Module, order: Order) -> None:
    if isinstance(module, torch.nn.Conv2d) and order != "chw":
        raise ValueError(f"order = {order!r} with a Conv2d: must be 'chw', the order of its weight")


def convert_layer(
    module: torch.nn.Module,
    options: PatchOptions | None = None,
    *,
    interpolation: Interpolation = "bicubic",
    antialias: bool = False,
    **unknown: Any,
) -> torch.nn.Module:
    """Makes ``module`` a `PatchConv2d` or `PatchLinear`, in place, and returns it; a converted one gets new options.

    Args:
        module: a Conv2d whose kernel is its stride, or a Linear over flattened patches.
        options: how to run it.
        interpolation, antialias: how positions that a `PatchConv2d` is given are resized for another grid, in FP32, by
            `torch.nn.functional.interpolate`. Once per grid, kept for 32 grids, forgotten when the parameter changes.

    Raises:
        TypeError, ValueError: as `check_layer`, `check_frames` and `options_of`.
    """
    if unknown:
        words = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        name = ", ".join(unknown)
        raise TypeError(f"convert_layer has no argument {name}: write convert_layer(module, PatchOptions({words}))")
    if not isinstance(options, PatchOptions):
        kind = type(options).__name__
        raise TypeError(f"options is {kind}: must be PatchOptions: convert_layer(module, PatchOptions(precision=..))")
    check_frames(options)
    positions = PositionCache(interpolation, antialias)
    if not isinstance(module, tuple(PLAIN)):
        check_layer(module, getattr(module, "in_channels", options.channels), options.order)
        options = options_of(module, options)
        module.plain_class = type(module)
        change_class(module, PatchConv2d if isinstance(module, torch.nn.Conv2d) else PatchLinear)
    else:
        check_reachable(module)
        _check_order(module, options.order)
        options = options_of(module, options)
    module.engine, module.positions = PatchEngine(options), positions
    return module


def options_of(module: torch.nn.Module, options: PatchOptions) -> PatchOptions:
    """``options`` with the channels of a convolution; raises ValueError as `PatchOptions.for_channels`."""
    return options.for_channels(module.in_channels) if isinstance(module, torch.nn.Conv2d) else options


def is_converted(module: torch.nn.Module) -> bool:
    """Whether calls of a module come to the forward that `convert_layer` gave it, parametrised since or not."""
    return getattr(type(module), "forward", None) in _FORWARDS and reaches_class(module)


def revert_layer(module: torch.nn.Module) -> bool:
    """Undoes `convert_layer`; returns whether there was anything to undo.

    Raises:
        TypeError: a converted module that was parametrised since, whose class holds the parametrisations.
    """
    if not isinstance(module, tuple(PLAIN)):
        return False
    if type(module) not in PLAIN:
        raise TypeError(f"module is {type(module).__name__}: must be {' or '.join(kind.__name__ for kind in PLAIN)}: "
                        "remove what was put around it after it was converted, such as parametrisations")
    change_class(module, vars(module).pop("plain_class", PLAIN[type(module)]))
    del module.engine, module.positions
    return True
