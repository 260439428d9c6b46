"""`PatchEmbed`: a patch embedding as a module, from the convolution or linear layer that it replaces."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from cute_kernels.models.nn import availability
from cute_kernels.models.nn.calls import hidden_by
from cute_kernels.models.nn.engine import PatchEngine, check_tensor
from cute_kernels.models.nn.layers import EngineMixin, check_frames, check_layer
from cute_kernels.models.nn.options import Backend, Order, PatchOptions, Pixels, Precision
from cute_kernels.models.nn.positions import Interpolation, PositionCache, checked_grid, checked_grids, two_integers
from cute_kernels.operations.patch_weight import PerChannel
from cute_kernels.operations.runtime.constants import Identity


class _Source:
    """The module that another one took its parameters from, not kept alive; copies of both belong together, too.

    Args:
        module: that module, or None when it is gone.
        taken: its parameters of then, by name; None for what is missing or gone.
        own: what the other module calls them, where that differs.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        taken: dict[str, torch.Tensor | None] | None = None,
        own: dict[str, str] | None = None,
    ) -> None:
        self._module = None if module is None else weakref.ref(module)
        taken, self._own = taken or {}, own or {}
        self._taken = {name: None if tensor is None else Identity(tensor) for name, tensor in taken.items()}

    def __reduce__(self) -> tuple:
        module = None if self._module is None else self._module()
        now = {name: getattr(module, name, None) for name in self._taken}
        kept = {name: tensor if self._has(name, tensor) else None for name, tensor in now.items()}
        return _Source, (module, kept, self._own)

    def _has(self, name: str, tensor: torch.Tensor | None) -> bool:
        """Whether the tensor was taken under this name."""
        taken = self._taken[name]
        return tensor is None if taken is None else tensor is not None and taken.is_of(tensor)

    def check(self, taker: torch.nn.Module) -> None:
        """Refuses a source whose parameters were replaced since, by others than those of ``taker``."""
        module = None if self._module is None else self._module()
        if module is None:
            return
        for name in self._taken:
            now = getattr(module, name, None)
            if now is not getattr(taker, self._own.get(name, name)) and not self._has(name, now):
                raise RuntimeError(
                    f"{name} of the {type(module).__name__} that this PatchEmbed was made from was replaced since (by "
                    "load_state_dict(assign=True), to_empty or an assignment), and this one has it not: call "
                    "PatchEmbed.from_module after loading, or convert the layer itself by "
                    "cute_kernels.models.nn.convert_layer"
                )


def _source_of(pos_embed: torch.Tensor | None, model: torch.nn.Module) -> _Source:
    """Where a model has these positions, as a parameter or buffer of its own or of a module in it.

    Raises:
        TypeError: no module.
        ValueError: it has them not.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}: must be torch.nn.Module")
    for module in (module for module in model.modules() if not isinstance(module, PatchEmbed)):
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor is pos_embed:
                return _Source(module, {name: pos_embed}, {name: "pos_embed"})
    raise ValueError(f"model is {type(model).__name__}, which has no parameter or buffer that is pos_embed")


def _check_replaceable(module: torch.nn.Module) -> None:
    """Refuses a layer of which a call does more than its class: its replacement would leave that out."""
    if module._forward_pre_hooks or module._forward_hooks or hidden_by(module) is not None:
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

    def __init__(
        self,
        module: torch.nn.Conv2d | torch.nn.Linear | None = None,
        options: PatchOptions | None = None,
        pos_embed: torch.Tensor | None = None,
        grid: tuple[int, int] | None = None,
        positions: PositionCache | None = None,
        model: torch.nn.Module | None = None,
        **unknown: object,
    ) -> None:
        """Makes a module like `from_module`, with checked options."""
        super().__init__()
        if unknown or not isinstance(options, PatchOptions):
            given = ", ".join(unknown) or f"options = {options!r}"
            raise TypeError(
                f"PatchEmbed is made from the layer whose place it takes, not from {given}: write "
                "PatchEmbed.from_module(torch.nn.Conv2d(3, features, patch, stride=patch), pos_embed=..), or take "
                "TimmPatchEmbed, which has the constructor of timm's"
            )
        check_frames(options)
        check_layer(module, options.channels, options.order)
        _check_replaceable(module)
        self.register_parameter("weight", module.weight)
        self.register_parameter("bias", module.bias)
        self.grid = None if pos_embed is None else checked_grid(pos_embed, grid, self.weight)
        if isinstance(pos_embed, torch.nn.Parameter):
            self.register_parameter("pos_embed", pos_embed)
        else:
            self.register_buffer("pos_embed", pos_embed)
        if pos_embed is None and grid is not None:
            self.grid = two_integers("grid", grid)
        self.engine = PatchEngine(options)
        self.positions = PositionCache() if positions is None else positions
        self._source = _Source(module, {"weight": module.weight, "bias": module.bias})
        self._source_of_positions = _Source() if model is None else _source_of(pos_embed, model)
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
        precision: Precision = "bf16",
        order: Order = "chw",
        channels: int = 3,
        mean: PerChannel = 0.5,
        std: PerChannel = 0.5,
        pixels: Pixels = "auto",
        interpolation: Interpolation = "bicubic",
        antialias: bool = False,
        backend: Backend = "auto",
    ) -> PatchEmbed:
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
            precision: what is multiplied, see `PatchOptions`.
            order: of a Linear weight, and of rows: ``"chw"`` or ``"hwc"``. A Conv2d's is ``"chw"``.
            channels: C of a Linear weight.
            mean, std: the normalisation of the model's processor, after pixels were divided by 255; one number or one
                per channel.
            pixels: what is promised, see `PatchOptions`.
            interpolation, antialias: how positions are resized for another grid, in FP32, by
                `torch.nn.functional.interpolate`. Once per grid, kept for 32 grids, forgotten when the parameter
                changes.
            backend: see `PatchOptions`.

        Raises:
            TypeError: another kind of module, or an argument of the wrong type.
            ValueError: a module that is no patch embedding, by name of what differs; a ``model`` without
                ``pos_embed``; a wrong value.
        """
        options = PatchOptions(
            precision=precision,
            order=order,
            channels=module.in_channels if isinstance(module, torch.nn.Conv2d) else channels,
            mean=mean,
            std=std,
            pixels=pixels,
            backend=backend,
        )
        return cls(module, options, pos_embed, grid, PositionCache(interpolation, antialias), model)

    def forward(
        self,
        pixels: torch.Tensor,
        pos_embed: torch.Tensor | None = None,
        *,
        spatial_shapes: torch.Tensor | Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Embeddings in the type of the weight.

        Args:
            pixels: images ``[B, C, H, W]``, contiguous or channels_last (others are copied once), or rows
                ``[B, L, C * p * p]`` in the order of the module. uint8 is raw and is normalised here; floating point is
                normalised already. Pixels beyond an image's last whole patch are left out, as a convolution does. One
                image needs a batch dimension, too: of a module made from a convolution, three dimensions that may be
                either ``[C, H, W]`` or rows are rows only with ``spatial_shapes``.
            pos_embed: in place of the module's own.
            spatial_shapes: of rows: ``[B, 2]`` patch grids (rows, columns), which rows need to get positions; the rest
                of an image's L rows is padding and gets the first position of the image. Without positions they say
                that these are rows, and no more.

        Returns:
            ``[B, S, N]`` of images, ``[B, L, N]`` of rows.

        Raises:
            TypeError: pixels of another type than the precision multiplies or than promised, or that are not strided.
            ValueError: a wrong shape or device; CPU pixels that look raw; grids that do not fit.
            RuntimeError: the module that this one was made from is still there and got other parameters since, or the
                ``model`` other positions.
        """
        self._source.check(self)
        if pos_embed is None:
            self._source_of_positions.check(self)
        check_tensor("pixels", pixels)
        if pixels.device != self.weight.device:
            raise ValueError(
                f"pixels is on {pixels.device} and weight is on {self.weight.device}: they must be on one device"
            )
        pos = self.pos_embed if pos_embed is None else pos_embed
        native = self.grid if pos_embed is None or self.grid is not None else None
        if pos is not None:
            native = checked_grid(pos, native, self.weight)
        if pixels.dim() == 3:
            self._check_rows(pixels, spatial_shapes)
        elif spatial_shapes is not None:
            raise ValueError(f"spatial_shapes is of rows, and pixels has shape {list(pixels.shape)}: must be None")
        pixels = self.engine.as_said(pixels)
        takes_over = self.engine.takes_over(pixels, self.weight, self.bias, pos, training=self.training)
        if takes_over:
            self.engine.check_magnitudes(pixels)
        if pixels.dim() == 4:
            return self._images(pixels, pos, native, takes_over)
        if pixels.dim() == 3:
            return self._rows(pixels, pos, native, spatial_shapes, takes_over)
        raise ValueError(f"pixels has shape {list(pixels.shape)}: must be [B, C, H, W] or [B, L, C * p * p]")

    def _images(self, images, pos, native, takes_over: bool) -> torch.Tensor:
        patch, channels = self.engine.patch(self.weight), self.engine.options.channels
        grid = (images.shape[2] // patch, images.shape[3] // patch)
        if images.shape[1] != channels or 0 in grid:
            raise ValueError(
                f"images has shape {list(images.shape)}: must be [B, {channels}, H, W] with H and W at least {patch}"
            )
        if takes_over:
            table = None if pos is None else self.positions.for_kernel(pos, native, grid)
            return self.engine.images(images, self.weight, self.bias, table)
        table = None if pos is None else self.positions.table(pos, native, grid)
        return self.engine.plain(images, self.weight, self.bias, table)

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
        matrix = self.weight.flatten(1)
        table = index = None
        if pos is not None:
            if spatial_shapes is None:
                raise ValueError("spatial_shapes is missing: rows with positions need the patch grid of every image")
            grids = checked_grids(spatial_shapes, *rows.shape[:2])
            table, index = self.positions.packed(pos, native, grids, rows.shape[1])
        if takes_over:
            return self.engine.rows(rows, self.weight, self.bias, table, index)
        out = torch.nn.functional.linear(self.engine.normalised(rows, self.weight), matrix, self.bias)
        return out if table is None else out + table.to(out.dtype)[index.long()]

    def extra_repr(self) -> str:
        options = self.engine.options
        return (
            f"features={self.weight.shape[0]}, channels={options.channels}, patch={self.engine.patch(self.weight)}, "
            f"precision={options.precision!r}, grid={self.grid}"
        )
