"""`PatchEmbed`: a patch embedding as a module, from the convolution or linear layer that it replaces."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.models.nn import availability
from cute_kernels.models.nn.calls import has_hooks, hidden_by
from cute_kernels.models.nn.engine import PatchEngine, check_tensor
from cute_kernels.models.nn.layers import EngineMixin, check_frames, check_layer
from cute_kernels.models.nn.options import PatchOptions
from cute_kernels.models.nn.positions import Interpolation, PositionCache, checked_grid, checked_grids, two_integers


@dataclass
class _Source:
    """A module that has a parameter of a `PatchEmbed`, under which name, which it was, and its name here."""

    module: torch.nn.Module
    name: str
    taken: torch.Tensor | None
    own: str

    def check(self, taker: torch.nn.Module) -> None:
        """Refuses a parameter that was replaced since, by another than the one of ``taker``."""
        now = getattr(self.module, self.name, None)
        if now is not self.taken and now is not getattr(taker, self.own):
            raise RuntimeError(
                f"{self.name} of the {type(self.module).__name__} that this PatchEmbed was made from was replaced "
                "since (by load_state_dict(assign=True), to_empty or an assignment), and this one has it not: call "
                "PatchEmbed.from_module after loading, or convert the layer itself by "
                "cute_kernels.models.nn.convert_layer"
            )


def _source_of(pos_embed: torch.Tensor | None, model: torch.nn.Module) -> _Source:
    """Where a model has these positions, itself or in a part of it; raises TypeError or ValueError where it has not."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}: must be torch.nn.Module")
    for module in (module for module in model.modules() if not isinstance(module, PatchEmbed)):
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor is pos_embed:
                return _Source(module, name, pos_embed, "pos_embed")
    raise ValueError(f"model is {type(model).__name__}, which has no parameter or buffer that is pos_embed")


def _check_replaceable(module: torch.nn.Module) -> None:
    """Refuses a layer of which a call does more than its class: its replacement would leave that out."""
    if has_hooks(module) or hidden_by(module) is not None:
        raise ValueError(
            f"module is {type(module).__name__} with hooks or a forward of its own, which PatchEmbed would leave out: "
            "remove them, or take cute_kernels.models.nn.convert_layer, which keeps hooks"
        )


class PatchEmbed(EngineMixin, torch.nn.Module):
    """Images (or patches as rows) to embeddings with positions, in one call of a kernel; made by `from_module`.

    It takes the place of the module that it is made from, and holds the parameters of that module, the same objects,
    and the positions. All of them are its own: ``state_dict`` has ``weight``, ``bias`` and ``pos_embed``. What the
    kernels read is made from them, moves with the module, keeps its element types under ``.to(dtype)``, and is made
    anew after a write to them.

    In a model that also keeps the replaced module under its own name, every parameter has two names. Whatever puts
    another parameter under the first (``load_state_dict(assign=True)``, ``to_empty``, an assignment) parts the two,
    and a call raises RuntimeError. `convert_layer` is for such models: it leaves parameters and names alone.

    It trains through the kernel where parameters have the 16-bit type that is multiplied, or autocast has it; so do
    positions and bias alone, of every precision. Otherwise, while gradients are enabled and images or parameters
    require them, the plain torch module runs on the unquantised parameters. The same holds while a graph is traced or
    exported, and on devices without a kernel (with one warning).
    """

    def __init__(self, module: object = None, options: object = None, **given: Any) -> None:
        """The layer of `from_module`, with checked options."""
        super().__init__()
        allowed = given.keys() <= {"pos_embed", "model", "grid", "interpolation", "antialias"}
        if not allowed or not isinstance(options, PatchOptions):
            wrong = ", ".join(given) or f"options = {options!r}"
            raise TypeError(
                f"PatchEmbed is made from the layer whose place it takes, not from {wrong}: write "
                "PatchEmbed.from_module(torch.nn.Conv2d(3, features, patch, stride=patch), pos_embed=..)"
            )
        pos_embed, grid = given.get("pos_embed"), given.get("grid")
        self.positions = PositionCache(given.get("interpolation", "bicubic"), given.get("antialias", False))
        check_frames(options)
        check_layer(module, options.channels, options.order)
        _check_replaceable(module)
        self.register_parameter("weight", module.weight)
        self.register_parameter("bias", module.bias)
        self.grid = None if grid is None else two_integers("grid", grid)
        if pos_embed is not None:
            self.grid = checked_grid(pos_embed, grid, self.weight)
        if isinstance(pos_embed, torch.nn.Parameter):
            self.register_parameter("pos_embed", pos_embed)
        else:
            self.register_buffer("pos_embed", pos_embed)
        self.engine = PatchEngine(options)
        self._sources = [_Source(module, name, getattr(module, name), name) for name in ("weight", "bias")]
        if given.get("model") is not None:
            self._sources.append(_source_of(pos_embed, given["model"]))
        known = options.precision_for(self.weight.dtype) is not None
        if known and self.weight.dim() == 4 and availability.is_plain(self.weight):
            self.engine.prepared("images", self.weight)
        self.train(module.training)

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Conv2d | torch.nn.Linear,
        *,
        pos_embed: torch.Tensor | None = None,
        model: torch.nn.Module | None = None,
        grid: tuple[int, int] | None = None,
        interpolation: Interpolation = "bicubic",
        antialias: bool = False,
        **options: Any,
    ) -> "PatchEmbed":
        """Makes the same embedding as a module's, run by the kernels.

        Args:
            module: Conv2d ``[N, C, p, p]`` whose kernel is its stride, without padding, dilation or groups; or Linear
                ``[N, C * p * p]`` over flattened patches. N is a multiple of 8.
            pos_embed: ``[S, N]`` or ``[1, S, N]`` to be added, positions in row-major order of the patch grid, or None.
                It is held by this module from then on, as a Parameter or buffer, and saved and loaded with it. An
                object that replaces it in another module is seen with ``model`` only; positions of others can be
                passed to `forward`.
            model: the module that has ``pos_embed`` as a parameter or buffer, itself or in a part of it. When another
                object takes its place there, the next call raises RuntimeError.
            grid: (rows, columns) of ``pos_embed``; a square when None.
            interpolation, antialias: how positions are resized for another grid, in FP32, by
                `torch.nn.functional.interpolate`. Once per grid, kept for 32 grids, forgotten when the parameter
                changes.
            options: fields of `PatchOptions`; C of a convolution is the layer's.

        Raises:
            TypeError: another kind of module, or an argument of the wrong type.
            ValueError: a module that is no patch embedding, by name of what differs; a ``model`` without
                ``pos_embed``; a wrong value.
        """
        if isinstance(module, torch.nn.Conv2d):
            options["channels"] = module.in_channels
        more = {"pos_embed": pos_embed, "model": model, "grid": grid}
        return cls(module, PatchOptions(**options), **more, interpolation=interpolation, antialias=antialias)

    def forward(
        self,
        pixels: torch.Tensor,
        pos_embed: torch.Tensor | None = None,
        *,
        spatial_shapes: torch.Tensor | Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """``[B, S, N]`` of images or ``[B, L, N]`` of rows, in the type of the weight.

        Args:
            pixels: images ``[B, C, H, W]``, or rows ``[B, L, C * p * p]`` in the order of the module, as the options
                say that pixels are. Those beyond an image's last whole patch are left out, as a convolution does. One
                image needs a batch dimension, too.
            pos_embed: in place of the module's own.
            spatial_shapes: of rows: ``[B, 2]`` patch grids (rows, columns), which rows need to get positions; the rest
                of an image's L rows is padding and gets the first position of the image. They also tell rows from
                ``[C, H, W]`` where three dimensions may be either.

        Raises:
            TypeError: pixels of another type than the precision multiplies or than promised, or that are not strided.
            ValueError: a wrong shape or device; CPU pixels that look raw; grids that do not fit.
            RuntimeError: the module that this one was made from is still there and got other parameters since, or the
                ``model`` other positions.
        """
        for source in self._sources if pos_embed is None else self._sources[:2]:
            source.check(self)
        check_tensor("pixels", pixels)
        weight = self.weight
        if pixels.device != weight.device:
            raise ValueError(
                f"pixels is on {pixels.device} and weight is on {weight.device}: they must be on one device"
            )
        pos = self.pos_embed if pos_embed is None else pos_embed
        native = self.grid if pos_embed is None or self.grid is not None else None
        if pos is not None:
            native = checked_grid(pos, native, weight)
        if pixels.dim() == 3:
            self._check_rows(pixels, spatial_shapes)
        elif spatial_shapes is not None:
            raise ValueError(f"spatial_shapes is of rows, and pixels has shape {list(pixels.shape)}: must be None")
        pixels = self.engine.as_said(pixels)
        takes_over = self.engine.takes_over(
            None, pixels, lambda: (weight, self.bias, pos), training=self.training
        )
        if pixels.dim() == 4:
            return self._images(pixels, pos, native, takes_over)
        if pixels.dim() == 3:
            return self._rows(pixels, pos, native, spatial_shapes, takes_over)
        raise ValueError(f"pixels has shape {list(pixels.shape)}: must be [B, C, H, W] or [B, L, C * p * p]")

    def _images(self, images, pos, native, takes_over: bool) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        patch, channels = self.engine.patch(weight), self.engine.options.channels
        grid = (images.shape[2] // patch, images.shape[3] // patch)
        if images.shape[1] != channels or 0 in grid:
            raise ValueError(
                f"images has shape {list(images.shape)}: must be [B, {channels}, H, W] with H and W at least {patch}"
            )
        if takes_over:
            table = None if pos is None else self.positions.for_kernel(pos, native, grid)
            return self.engine.images(images, weight, bias, table)
        table = None if pos is None else self.positions.table(pos, native, grid)
        return self.engine.plain(images, weight, bias, table)

    def _check_rows(self, rows: torch.Tensor, spatial_shapes: object) -> None:
        """Refuses a row of another length, and an image without a batch that could be rows."""
        patch, channels, k = self.engine.patch(self.weight), self.engine.options.channels, self.weight[0].numel()
        batch, height, width = rows.shape
        image = "" if batch != channels else ": an image needs a batch dimension, [1, C, H, W]"
        if width != k:
            raise ValueError(f"rows has shape {list(rows.shape)}, K = {width}: must be [B, L, {k}]{image}")
        whole = height and height % patch == 0 and width % patch == 0
        if self.weight.dim() == 4 and image and whole and spatial_shapes is None:
            raise ValueError(
                f"pixels has shape {list(rows.shape)}, which may be [C, H, W] or rows [B, L, {k}]{image}; rows need "
                "spatial_shapes"
            )

    def _rows(self, rows, pos, native, spatial_shapes, takes_over: bool) -> torch.Tensor:
        table = index = None
        if pos is not None:
            if spatial_shapes is None:
                raise ValueError("spatial_shapes is missing: rows with positions need the patch grid of every image")
            grids = checked_grids(spatial_shapes, *rows.shape[:2])
            table, index = self.positions.packed(pos, native, grids, rows.shape[1])
        if takes_over:
            return self.engine.rows(rows, self.weight, self.bias, table, index)
        return self.engine.plain(rows, self.weight, self.bias, None if table is None else table[index.long()])
