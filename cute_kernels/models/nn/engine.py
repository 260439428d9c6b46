"""The link between a module's parameters and the operations: prepared weights, positions, and when to stay out.

A module keeps its parameters, so that checkpoints, optimisers and initialisation see what they always saw. What the
kernels read is made from them, kept beside them and made anew when they change.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from warnings import warn

import torch

from cute_kernels.models.nn import availability, traced
from cute_kernels.models.nn.calls import why_seen
from cute_kernels.models.nn.options import PatchOptions
from cute_kernels.models.nn.origin import Origin
from cute_kernels.models.nn.pixels import Contradictions
from cute_kernels.operations import gemm as gemm_operation
from cute_kernels.operations import patch_embed as patch_embed_operation
from cute_kernels.operations import patch_embed_images as images_operation
from cute_kernels.operations import patch_weight
from cute_kernels.operations.reference.images import patch_rows
from cute_kernels.operations.runtime.constants import DERIVED, in_autograd_function, outside_of_pools
from cute_kernels.plan.base import VECTOR_BYTES

E4M3_MAX = 448.0
_E4M3_REACH = 464.0
"""Largest magnitude that is rounded to 448; what lies further is not: it would be 480 if E4M3 had it."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_RAW_FACTOR = 8.0
"""Normalised pixels this many times as large as mean and std allow are taken for pixels that nobody normalised."""


def check_tensor(name: str, value: object) -> None:
    """Refuses what is no strided tensor. Raises TypeError: naming it."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {type(value).__name__}: must be torch.Tensor")
    if value.is_nested or value.layout is not torch.strided:
        kind = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
        raise TypeError(f"{name} is {kind}: must be a strided tensor")


def _cast(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A kernel's result in the type of the weight; largest numbers of float16 stay finite."""
    cast = out.to(dtype)
    if dtype == torch.float16 and out.dtype == torch.bfloat16:
        return torch.where(out.abs() == 2**16, out.sign().to(dtype) * torch.finfo(dtype).max, cast)
    return cast


@dataclass(frozen=True)
class Fp8Weight:
    """``[N, K]`` E4M3 values and ``[1, N]`` FP32 multipliers, K in the order of the rows that they multiply."""

    values: torch.Tensor
    scale: torch.Tensor

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> "Fp8Weight":
        """Moves and never casts."""
        device = fn(self.values).device
        return Fp8Weight(self.values.to(device), self.scale.to(device))

    @classmethod
    def of(cls, rows: torch.Tensor) -> "Fp8Weight":
        """Rounded with a multiplier for each feature, so that a feature's errors do not depend on the others. Raises
        ValueError: NaN or infinity."""
        wide = rows.to(torch.float32)
        largest = wide.abs().amax(1, keepdim=True)
        if not bool(torch.isfinite(largest).all()):
            raise ValueError("weight has NaN or infinity: must be finite numbers")
        # Not smaller than what keeps the quotient by a multiplier finite.
        scale = torch.where(largest == 0, 1.0, (largest / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny))
        values = (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return cls(values.contiguous(), scale.T.contiguous())


class PatchEngine:
    """Runs one patch embedding whose parameters live in a module; a copy or a pickle of it has the options alone."""

    def __init__(self, options: PatchOptions) -> None:
        self.options = options
        adapted = options if options.integer else replace(options, pixels="normalised")
        self.texts = options.text(), adapted.text()  # in graphs, and in those behind an adapter
        self.contradictions = Contradictions()
        # Whether whatever stands around the layer is given normalised pixels, and gives it those.
        self.behind_adapter = False
        self._prepared: dict[str, tuple[Origin, Any]] = {}  # of a kind, of which parameters, and what was made

    def __reduce__(self) -> tuple:
        return type(self), (self.options,)

    def _text(self) -> str:
        """By an `if`: torch.compile of torch 2.11 refuses a bool as an index."""
        return self.texts[1] if self.behind_adapter else self.texts[0]

    def takes_over(
        self,
        why: str | None,
        pixels: torch.Tensor,
        parameters: Callable[[], tuple[torch.Tensor | None, ...]],
        *,
        training: bool = True,
    ) -> bool:
        """Whether the kernels compute this call, whose magnitudes are checked then; otherwise the plain module does.

        A warning tells of devices without a kernel and of modes of torch; and outside of ``training`` of gradients, and
        of ``why`` something has to be called. ``parameters`` gives the weight, and what else is read or None, where
        nothing has to be called."""
        if why is None:
            takes_over = self._computes(pixels, *parameters(), training=training)
            if takes_over:
                self._check_magnitudes(pixels)
            return takes_over
        if not training and self.options.backend != "torch":
            warn(f"{why}, and is called. The plain torch module runs instead.", stacklevel=3)
        return False

    def _computes(self, pixels: torch.Tensor, *parameters: torch.Tensor | None, training: bool) -> bool:
        tensors = [pixels, *(parameter for parameter in parameters if parameter is not None)]
        if self.options.backend == "torch" or availability.plain_torch_wanted():
            return False
        traced = availability.traced()
        for tensor in tensors:
            if not availability.is_plain(tensor) or (not traced and availability.is_transformed(tensor)):
                return False
        if any(parameter.dtype not in _FLOATS for parameter in tensors[1:]) or tensors[1].shape[0] % 8:
            return False
        if self.options.precision_for(tensors[1].dtype) is None or (self.behind_adapter and self.options.integer):
            return False
        if not traced and not pixels.numel():
            return False
        if self.wants_gradients(*tensors) and not self._trains(*tensors[:2]):
            if torch.is_grad_enabled() and not training and not pixels.requires_grad:
                warn(
                    "A patch embedding in eval mode runs the plain torch module, for gradients are enabled and its "
                    f"weight, of precision {self.options.precision!r}, requires them: use torch.no_grad() or "
                    "torch.inference_mode(), or freeze it.",
                    stacklevel=4,
                )
            return False
        reason = None if traced else why_seen()
        reason = reason or availability.no_device(pixels.device, self.options.backend)
        reason = reason or availability.no_product(pixels.device, self.options.backend, self.options.precision)
        if reason is None and self.options.integer and pixels.dtype == torch.uint8 and not traced:
            reason = self._no_integer_kernel(pixels, parameters[0])
        if reason is not None:
            warn(f"{reason}. The plain torch module runs instead.", stacklevel=4)
        return reason is None

    @staticmethod
    def wants_gradients(*tensors: torch.Tensor | None) -> bool:
        """Whether gradients are enabled and a tensor requires them, or were when this call was made: the first pass of
        reentrant checkpointing is part of a `torch.autograd.Function`, and has to give the second one's numbers."""
        wanted = any(tensor is not None and tensor.requires_grad for tensor in tensors)
        return wanted and (torch.is_grad_enabled() or in_autograd_function())

    def _trains(self, pixels: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether gradients go through the operations: of weights and pixels of 16 bits; of positions and bias always,
        but in a graph, where other weights are prepared inside an operator that has none."""
        if self._training_type(weight) is not None:
            return True
        return not (pixels.requires_grad or weight.requires_grad or availability.traced())

    def _no_integer_kernel(self, pixels: torch.Tensor, weight: torch.Tensor) -> str | None:
        """Floating-point precisions can always be a product of rows; integers need a kernel that takes the images."""
        images = self._whole(pixels, weight) if pixels.dim() == 4 else self._one_patch_images(pixels, weight)
        if self._images_out_dtype(images, weight) is not None:
            return None
        kind = f"images of shape {list(images.shape[1:])}" if pixels.dim() == 4 else "rows"
        facts = f"patches of {self.patch(weight)} and precision {self.options.precision!r} on {pixels.device}"
        return f"no kernel takes {kind} with {facts}"

    def _images_out_dtype(self, images: torch.Tensor, weight: torch.Tensor) -> torch.dtype | None:
        options, features = self.options, weight.shape[0]
        precision = options.precision_for(weight.dtype)
        return availability.images_out_dtype(
            images, self.patch(weight), features, precision, weight.dtype, options.backend
        )

    def as_said(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels as the options say that they are: raw ones as uint8, also where a model cast them, but in graphs,
        under transformations and where gradients of them are wanted.

        Raises:
            TypeError: another type than promised.
            ValueError: raw pixels that are no whole numbers from 0 to 255, on a GPU those of an earlier call; pixels to
                be normalised with mean and standard deviation that are not known.
        """
        options, raw = self.options, self.options.raw and not self.behind_adapter
        if not availability.traced():
            self.contradictions.report()
        if pixels.dtype == torch.uint8 and options.pixels == "normalised":
            raise TypeError(
                "images has dtype torch.uint8, which is raw, and normalised pixels were promised: normalise them, "
                "or say pixels='auto' to have them normalised here with mean and std"
            )
        if pixels.dtype != torch.uint8 and not pixels.is_floating_point():
            raise TypeError(f"images has dtype {pixels.dtype}: must be torch.uint8 and floating-point types")
        if options.mean is None and (raw or pixels.dtype == torch.uint8 or options.precision == "fp8"):
            raise ValueError(
                f"mean and std are not known, which precision {options.precision!r} needs for {pixels.dtype} pixels: "
                "must be given when the model is converted, by processor=.., or by mean=.. and std=.."
            )
        if pixels.dtype == torch.uint8 or not raw or availability.in_graph():
            return pixels
        if not availability.is_plain(pixels) or availability.is_transformed(pixels):
            return pixels
        given = pixels.detach()
        given = given.to(torch.float32) if given.dtype.itemsize == 1 else given  # E4M3 is compared with nothing
        out = given.to(torch.uint8)
        promise = "pixels = 'raw'" if options.pixels == "raw" else f"precision is {options.precision!r}"
        dtype = pixels.dtype
        self.contradictions.note(
            (out != given).any(),
            0,
            lambda: f"images has dtype {dtype} and {promise}, and there are others than whole numbers from 0 to 255: "
            "must be raw pixels (of a processor with do_rescale=False and do_normalize=False); 'bf16', 'fp16' and "
            "'fp8' take normalised ones",
        )
        return pixels if pixels.requires_grad and torch.is_grad_enabled() else out

    def _check_magnitudes(self, pixels: torch.Tensor) -> None:
        """Refuses floating-point pixels that nobody normalised, on a GPU at the next call, or that FP8 does not
        represent: there they give NaN. The plain module takes what it always took."""
        options = self.options
        fp8 = options.precision == "fp8"
        if availability.traced() or not pixels.is_floating_point() or not pixels.numel():
            return
        if options.pixels == "normalised" and not (fp8 and not pixels.is_cuda):
            return
        values = pixels.detach()
        values = values.to(torch.float32) if values.dtype.itemsize == 1 else values  # E4M3 has no maximum
        largest, bound = torch.linalg.vector_norm(values, math.inf), options.bound
        here = "" if pixels.is_cuda else f" up to {float(largest):.4g}"

        def reach() -> str:
            which = "of the mean and std of any model in use"
            if options.mean is not None:
                which = f"normalised with mean {list(options.mean)} and std {list(options.std)}"
            return f"images has magnitudes{here}, and pixels {which} reach {bound:.4g}"

        if options.pixels != "normalised":  # a NaN, which is larger than nothing, hides magnitudes
            self.contradictions.note(
                largest,
                _RAW_FACTOR * bound,
                lambda: f"{reach()}: they look raw, or have NaN. Allowed: raw pixels as torch.uint8 or with "
                "pixels='raw', or normalised ones, which pixels='normalised' promises whatever their magnitude",
            )
        if fp8 and not pixels.is_cuda and float(largest) * (E4M3_MAX / bound) > _E4M3_REACH:
            raise ValueError(
                f"{reach()}, which is all that precision = 'fp8' represents. Allowed: the mean and std that these "
                "pixels were normalised with, or another precision"
            )

    def images(
        self,
        images: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pos_embed: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[B, S, N]`` in the type of ``weight``, ``[N, C, p, p]``, of images ``[B, C, H, W]``; pixels beyond the last
        whole patch are left out, as a convolution does.

        ``pos_embed``: ``[S, N]`` or None; in a graph that is traced also ``[1, S, N]``, and with ``position_ids`` ``[1,
        S]``, which of them each patch gets; elsewhere they are in order.
        """
        dtype = self._training_type(weight)
        if dtype is not None and self.wants_gradients(images, weight, bias, pos_embed):
            return self._training_images(images, weight, bias, pos_embed, position_ids, dtype)
        if availability.traced():
            call = torch.ops.cute_kernels.embed_patches
            return call(images, weight, bias, pos_embed, position_ids, self._text())
        return self._images(images, weight, bias, pos_embed)

    def _training_type(self, weight: torch.Tensor) -> torch.dtype | None:
        """Type of the products where plain torch would multiply in it, too, as of the weight or of autocast; or None:
        a float32 model is not trained with weights that are rounded."""
        wide, device = patch_weight.WIDE_TYPES.get(self.options.precision_for(weight.dtype)), weight.device.type
        if weight.dtype is wide or (torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is wide):
            return wide
        return None

    def _training_images(self, images, weight, bias, pos_embed, position_ids, dtype: torch.dtype) -> torch.Tensor:
        """`images` from the weight as it is: nothing is prepared, kept, or compared, which a GPU would wait for."""
        images = self._normalised(self._whole(images, weight)).to(dtype)
        matrix, patch = weight.flatten(1).to(dtype).contiguous(), self.patch(weight)
        if pos_embed is not None:
            pos_embed = pos_embed.reshape(-1, pos_embed.shape[-1])
            pos_embed = pos_embed if position_ids is None else pos_embed[position_ids[0]]
        # A graph must not ask which kernels there are; all give bfloat16.
        traced, out_dtype = availability.traced(), weight.dtype
        if out_dtype is not torch.bfloat16:
            out_dtype = None if traced else self._images_out_dtype(images, weight)
        if out_dtype is not None:
            # In a graph the compiler fuses the sum of both, and rows of the table that `call` reads would be guards.
            if traced and bias is not None and pos_embed is not None:
                bias, pos_embed = None, pos_embed.to(torch.float32) + bias.to(torch.float32)
            given = images, matrix, None, None, bias, pos_embed, patch, out_dtype, self.options.backend, None
            operator = torch.ops.cute_kernels.patch_embed_images
            return (operator(*given) if traced else images_operation.PATCH_EMBED_IMAGES.call(given)).to(weight.dtype)
        out = self._product(self._patches(images, patch), matrix, bias, weight.dtype)
        return out if pos_embed is None else out + pos_embed.to(out.dtype)

    def _images(self, images, weight: torch.Tensor, bias, pos_embed) -> torch.Tensor:
        prepared = self.prepared("images", weight)
        patch = self.patch(weight)
        if pos_embed is not None and weight.dtype == torch.float16 and self.options.precision in ("int8", "fp8"):
            return self._images(images, weight, bias, None).add_(pos_embed.to(weight.dtype))  # past BF16's rounding
        if images.is_floating_point() and images.dtype not in _FLOATS:
            images = images.to(torch.float32)
        if isinstance(prepared, Fp8Weight):
            rows = self._patches(self._e4m3(self._normalised(self._whole(images, weight))), patch)
            if not images.shape[0]:
                return rows.new_empty(*rows.shape[:2], weight.shape[0], dtype=weight.dtype)
            return _cast(self._fp8(rows, prepared, bias, pos_embed), weight.dtype)
        images = self._whole(images, weight)
        out_dtype = self._images_out_dtype(images, weight)
        if out_dtype is not None:
            return _cast(self._by_images(images, prepared, bias, pos_embed, out_dtype), weight.dtype)
        rows = self._patches(self._normalised(images).to(prepared.normalised.dtype), patch)
        out = self._product(rows, prepared.normalised, bias, weight.dtype)
        return out if pos_embed is None else out.add_(pos_embed.to(out.dtype))

    def rows(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        table: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[.., N]`` in the type of ``weight``, of patches that are rows already: ``[.., C * T * p * p]`` in the order
        of the options, T frames of them, or one for T equal ones.

        ``weight``, ``bias``: as in `images`; of T frames ``[N, C * T * p * p]``, or a Conv3d's ``[N, C, T, p, p]``;
        ``table``, ``index``: positions ``[T, N]``, and ``[..]`` int32, which of them each row gets.
        """
        dtype = self._training_type(weight)
        if dtype is not None and self.wants_gradients(rows, weight, bias, table):
            pixels, matrix = self._normalised(rows).to(dtype), weight.flatten(1)
            if self.is_still(rows, weight):
                matrix = self._one_frame(matrix)
            out = self._product(pixels, matrix.to(dtype).contiguous(), bias, weight.dtype)
            return out if table is None else out + table.to(out.dtype)[index.long()]
        if availability.traced():
            call = torch.ops.cute_kernels.embed_patches
            return call(rows, weight, bias, table, index, self._text())
        return self._rows(rows, weight, bias, table, index)

    def _rows(self, rows, weight: torch.Tensor, bias, table=None, index=None) -> torch.Tensor:
        flat, n, still = rows.reshape(-1, rows.shape[-1]).contiguous(), weight.shape[0], self.is_still(rows, weight)
        if not flat.shape[0]:
            return torch.empty(*rows.shape[:-1], n, dtype=weight.dtype, device=rows.device)
        if table is not None and weight.dtype == torch.float16 and self.options.precision == "fp8":
            return self._rows(rows, weight, bias).add_(table.to(weight.dtype)[index.long()])
        if self.options.precision == "fp8":
            values = self._e4m3(self._normalised(flat))
            where = None if index is None else index.reshape(-1)
            out = self._fp8(values, self.prepared("rows", weight, still), bias, table, where)
            return _cast(out, weight.dtype).view(*rows.shape[:-1], n)
        images = self._one_patch_images(flat, weight) if rows.dtype == torch.uint8 else None
        out_dtype = None if images is None else self._images_out_dtype(images, weight)
        if out_dtype is not None:
            prepared = self.prepared("images", weight, still)
            if self._reads_rows(flat):
                out = self._by_rows(flat, prepared, bias)
            else:
                out = self._by_images(images, prepared, bias, None, out_dtype)
            out = _cast(out, weight.dtype)
        else:
            matrix = self.prepared("rows", weight, still)
            out = self._product(self._normalised(flat).to(matrix.dtype), matrix, bias, weight.dtype)
        out = out.view(*rows.shape[:-1], n)
        return out if table is None else out.add_(table.to(out.dtype)[index.long()])

    def run(self, pixels: torch.Tensor, weight: torch.Tensor, bias, table, index=None) -> torch.Tensor:
        """`images`, or `rows` where there is an ``index`` of positions or none, of pixels as they are in a graph; by
        plain torch where integers have no kernel."""
        pixels = self.as_said(pixels)
        self._check_magnitudes(pixels)
        if self.options.integer and (reason := self._no_integer_kernel(pixels, weight)) is not None:
            warn(f"{reason}. The plain torch module runs instead.", stacklevel=2)
            return self.plain(pixels, weight, bias, table if index is None else table[index.long()])
        if pixels.dim() == 4:
            return self._images(pixels, weight, bias, table)
        return self._rows(pixels, weight, bias, table, index)

    def plain(self, pixels, weight: torch.Tensor, bias, table: torch.Tensor | None) -> torch.Tensor:
        """``[B, S, N]`` of images, or ``[.., N]`` of rows, by plain torch, from uint8 or normalised pixels."""
        pixels, patch = self.normalised(pixels, weight), self.patch(weight)
        if pixels.dim() == 4:
            out = torch.nn.functional.conv2d(pixels, weight, bias, stride=patch).flatten(2).transpose(1, 2).contiguous()
        else:
            out = torch.nn.functional.linear(self.all_frames(pixels, weight), weight.flatten(1), bias)
        return out if table is None else out + table.to(out.dtype)

    def normalised(self, pixels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Pixels for the plain module: raw ones normalised in FP32, in the type of ``weight``. Raises TypeError: raw
        pixels, and a weight that is stored in another type than its layer computes in."""
        computes = weight.dtype in (*_FLOATS, torch.float64)
        if pixels.dtype != torch.uint8 and (self.behind_adapter or not self.options.raw):
            return pixels.to(weight.dtype) if computes else pixels
        if not computes:
            raise TypeError(
                f"images has dtype {pixels.dtype}, raw, and the layer's weight is stored as {weight.dtype}, which does "
                "not say in what type its pixels are to be: must be normalised pixels of a floating-point type"
            )
        return self._scaled(pixels).to(weight.dtype)

    def patch(self, weight: torch.Tensor) -> int:
        """Side of a patch in pixels."""
        planes = self.options.channels * self.options.frames
        return weight.shape[-1] if weight.dim() > 2 else round((weight.shape[1] / planes) ** 0.5)

    def is_still(self, rows: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether rows have one frame where the weight has several."""
        frames = self.options.frames
        return frames > 1 and rows.shape[-1] * frames == weight[0].numel()

    def _one_frame(self, matrix: torch.Tensor) -> torch.Tensor:
        """``[N, C * p * p]`` FP32, of equal frames, from ``[N, C * T * p * p]``."""
        return matrix.unflatten(1, (self.options.channels, self.options.frames, -1)).float().sum(2).flatten(1)

    def all_frames(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rows with all frames of the weight; of a still image they are equal."""
        if not self.is_still(rows, weight):
            return rows
        frames = rows.unflatten(-1, (self.options.channels, 1, -1))
        return frames.expand(*[-1] * rows.dim(), self.options.frames, -1).flatten(-3)

    def prepared(self, kind: str, weight: torch.Tensor, still: bool = False) -> Any:
        """Prepared ``weight``: for ``"images"`` a `PatchWeight`, for ``"rows"`` a matrix, for either an `Fp8Weight`; of
        ``still`` images its frames are summed, in FP32."""
        frames = self.options.frames

        def prepare() -> Any:
            own = weight.detach()
            if not still:
                return self._prepare(kind, own, weight.dtype, frames)
            return self._prepare(kind, self._one_frame(own.flatten(1)), weight.dtype, 1)

        return self.made_from((weight,), f"{kind}, of one frame" if still else kind, prepare)

    @torch.compiler.disable
    def made_from(self, parameters: tuple[torch.Tensor | None, ...], kind: str, make: Callable[[], Any]) -> Any:
        """The result of ``make``, which is called anew when a parameter is another one or was written to.

        `cute_kernels.models.nn.origin` says what is noticed.
        """
        found = self._prepared.get(kind)
        if found is not None and found[0].is_unchanged(*parameters):
            return found[1]
        origin = Origin(*parameters)
        # Not tensors of inference mode, which operations could not find again: these have no version counter.
        with torch.inference_mode(False), torch.no_grad():
            value = outside_of_pools(make, *parameters)
        self._prepared[kind] = (origin, value)
        return value

    def _prepare(self, kind: str, weight: torch.Tensor, dtype: torch.dtype, frames: int) -> Any:
        """The prepared operand of ``frames`` frames of a weight, whose layer has this ``dtype``."""
        options = self.options
        if options.precision == "fp8":
            return Fp8Weight.of(weight.flatten(1))
        precision = options.precision_for(dtype)
        half = (0.5,) * options.channels  # with no pixels to normalise
        if kind == "rows":
            return weight.flatten(1).to(patch_weight.WIDE_TYPES[precision]).contiguous()
        if weight.dim() == 5:
            weight = weight.flatten(1, 2)
        return patch_weight.prepare_patch_weight(
            weight,
            precision=precision,
            order=options.order if weight.dim() == 2 else "chw",
            channels=weight.shape[1] if weight.dim() == 4 else options.channels * frames,
            mean=[value for value in options.mean or half for _ in range(frames)],
            std=[value for value in options.std or half for _ in range(frames)],
        )

    def up_to_date(self, *parameters: torch.Tensor | None) -> list[str]:
        """Kinds of what was made from these parameters as they are now."""
        return [kind for kind, (origin, _) in self._prepared.items() if origin.is_unchanged(*parameters)]

    def follow(
        self,
        parameters: tuple[torch.Tensor | None, ...],
        kinds: list[str],
        fn: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """After ``module._apply(fn)``: what was up to date moves along, and keeps its element types.

        So ``model.to(torch.bfloat16)`` leaves an int8 weight alone that was made from the float32 one. On the meta
        device nothing is kept, nor with precision "auto", which follows the weight's type. ``kinds`` were `up_to_date`.
        """
        made, self._prepared = self._prepared, {}
        for kind in () if parameters[0].is_meta or self.options.precision == "auto" else kinds:
            value = made[kind][1]
            moved = value.to(fn(value).device) if isinstance(value, torch.Tensor) else value._apply(fn)
            self._prepared[kind] = (Origin(*parameters), moved)

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        return self._scaled(pixels) if pixels.dtype == torch.uint8 else pixels

    def _scaled(self, pixels: torch.Tensor) -> torch.Tensor:
        """Raw images, or rows of any number of frames, in FP32 as a processor has them. Raises ValueError: other
        channels than there are means, for a layer that was put in place of another."""
        options = self.options
        if pixels.dim() == 4 and pixels.shape[1] != options.channels:
            options = options.for_channels(pixels.shape[1])
        mean, std = (patch_weight.of_channels(values, pixels) for values in (options.mean, options.std))
        scaled = pixels.to(torch.float32) / 255
        if pixels.dim() == 4:
            return (scaled - mean[:, None, None]) / std[:, None, None]
        count, chw = pixels.shape[-1] // len(options.mean), options.order == "chw"
        mean, std = (each.repeat_interleave(count) if chw else each.repeat(count) for each in (mean, std))
        return (scaled - mean) / std

    def _e4m3(self, normalised: torch.Tensor) -> torch.Tensor:
        """Rounded with the fixed multiplier ``bound / 448``: no maximum is looked for, so an image's rows do not depend
        on the others of its batch. What lies beyond the bound becomes NaN, and so does its patch's embedding."""
        scaled = normalised.to(torch.float32) * (E4M3_MAX / self.options.bound)
        # A conversion saturates or not, depending on who compiles it.
        return scaled.masked_fill(scaled.abs() > _E4M3_REACH, torch.nan).to(torch.float8_e4m3fn)

    def _by_images(self, images, prepared, bias, pos_embed, out_dtype: torch.dtype) -> torch.Tensor:
        more = {"out_dtype": out_dtype, "backend": self.options.backend}
        return images_operation.patch_embed_images(images, prepared, bias, pos_embed, **more)

    def _reads_rows(self, rows: torch.Tensor) -> bool:
        """Whether the kernel over rows reads them as they are: in 0.45 to 0.7 of the time of that over images, of one
        patch each (H100, 1,024 to 32,768 rows of 1,536 bytes, 1,152 features)."""
        return self.options.precision == "int8" and self.options.order == "chw" and rows.shape[1] % VECTOR_BYTES == 0

    def _by_rows(self, rows, prepared, bias) -> torch.Tensor:
        sources, offset = (prepared.offset, bias), prepared.offset
        if bias is not None and self.wants_gradients(bias):
            shift = offset + bias.to(torch.float32)  # not kept: gradients flow through it, once
        else:
            shift = offset if bias is None else DERIVED.get("shift", sources, lambda: offset + bias.to(torch.float32))
        return patch_embed_operation.patch_embed(
            rows, prepared.raw, shift, scale_b=prepared.scale[None], backend=self.options.backend
        )

    def _product(self, rows, matrix: torch.Tensor, bias, out_dtype: torch.dtype) -> torch.Tensor:
        """``[.., N]`` by `cute_kernels.gemm`, with K filled up by zeros to the whole 16 bytes that it reads."""
        flat = rows.reshape(-1, rows.shape[-1])
        if not flat.shape[0]:
            return torch.empty(*rows.shape[:-1], matrix.shape[0], dtype=out_dtype, device=rows.device)
        if missing := -flat.shape[1] % 8:
            flat, matrix = (torch.nn.functional.pad(operand, (0, missing)) for operand in (flat, matrix))
        more = {"bias": bias, "out_dtype": out_dtype, "backend": self.options.backend}
        out = gemm_operation.gemm(flat.contiguous(), matrix, **more)
        return out.view(*rows.shape[:-1], matrix.shape[0])

    def _fp8(self, rows, weight: Fp8Weight, bias, pos_embed, pos_index=None) -> torch.Tensor:
        more = {"scale_a": self.options.bound / E4M3_MAX, "scale_b": weight.scale, "backend": self.options.backend}
        return patch_embed_operation.patch_embed(rows, weight.values, bias, pos_embed, pos_index=pos_index, **more)

    @staticmethod
    def _patches(images: torch.Tensor, patch: int) -> torch.Tensor:
        """``[B, S, K]`` in the order of the images."""
        positions = images.shape[2] // patch * (images.shape[3] // patch)
        return patch_rows(images, patch).view(images.shape[0], positions, images.shape[1] * patch**2)

    def _whole(self, images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Without the pixels beyond the last whole patch."""
        patch = self.patch(weight)
        height, width = (extent - extent % patch for extent in images.shape[2:])
        if (height, width) == tuple(images.shape[2:]):
            return images
        return images[:, :, :height, :width].contiguous()

    def _one_patch_images(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rows as images of one patch each: contiguous or channels_last, as the order of the rows is."""
        patch = self.patch(weight)
        if rows.shape[-1] != weight[0].numel() and not self.is_still(rows, weight):
            raise ValueError(f"rows has K = {rows.shape[-1]}: must be {weight[0].numel()}")
        rows = rows.reshape(-1, rows.shape[-1]).contiguous()
        if self.options.order == "hwc":
            return rows.view(-1, patch, patch, rows.shape[-1] // patch**2).permute(0, 3, 1, 2)
        return rows.view(-1, rows.shape[-1] // patch**2, patch, patch)


traced.define(lambda text: PatchEngine(PatchOptions.of_text(text)))
