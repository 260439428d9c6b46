"""The weight of a patch embedding, prepared once for the images that it will multiply.

What processors do to uint8 pixels is affine, ``(p / 255 - mean) / std`` per channel, so the product takes it over:
with ``w' = w / (255 std)``

    sum_k w (p / 255 - mean) / std  =  sum_k w' p  -  sum_k w' 255 mean

and the last sum is one number per feature, ``offset``, which is added with bias and position. It is computed from the
rounded ``w'``, so that a rounding error of ``w'`` is multiplied by the pixel's distance from the mean and not by the
pixel itself.
"""

import json
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch

from cute_kernels.config import check_choice
from cute_kernels.plan.images_strips import StripsPlan

Precision = Literal["int8", "bf16", "fp16"]
Order = Literal["chw", "hwc"]
PerChannel: TypeAlias = float | Sequence[float] | torch.Tensor
"""One number, or one per channel in a sequence, tensor or NumPy array of any shape."""

WIDE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Element type of pixels and weight for the precisions that multiply floating-point numbers."""

LARGEST = 127
"""Largest magnitude of an integer weight: scales are symmetric."""

_MOST_LOST = 0.01
"""Most that a weight loses by rounding, in the Euclidean norm. FP16 rounds to 2**-12, but below 2**-14 its steps stay
2**-24 wide; BF16 rounds to 2**-9 and has FP32's range."""

_MEANS = (-1.0, 2.0)
"""Range of means of pixels from 0 to 1, with room for odd models; those of 0 to 255 have means of 100."""

_STDS = (1e-3, 10.0)
"""Range of deviations: pixels of 0 to 255 have about 60, and one step of a pixel is 1 / 255 = 0.004."""

_FP8_IS_ELSEWHERE = "; FP8 images are taken by cute_kernels.models.nn.PatchConv2d, FP8 rows by cute_kernels.patch_embed"

_SCHEMA = 1


class PatchWeight(torch.nn.Module):
    """A prepared weight, made by `cute_kernels.prepare_patch_weight`: constants, and what they were made from.

    A module, so that it moves with a model's device and travels in its ``state_dict``, also as safetensors. As every
    module's, ``.to(device)`` moves this object itself and returns it: `copy.deepcopy` makes another for another device.
    ``.to(dtype)``, ``.half()`` and the like leave its element types alone. K is in the order (channel, row, column)
    whatever the order was before.

    Attributes:
        raw: ``[N, K]``, multiplies uint8 pixels: int8, bfloat16 or float16.
        scale: ``[N]`` float32 with ``"int8"``: multiplier of a feature's sum. Otherwise None.
        offset: ``[N]`` float32: what uint8 images' features are shifted by, ``-sum_k raw * 255 mean``.
        normalised: ``[N, K]`` bfloat16 or float16, multiplies normalised pixels; None with ``"int8"``.
        precision, order, patch, channels, mean, std: as given to `cute_kernels.prepare_patch_weight`.
    """

    raw: torch.Tensor
    scale: torch.Tensor | None
    offset: torch.Tensor
    normalised: torch.Tensor | None

    def __init__(
        self,
        constants: dict[str, torch.Tensor | None],
        *,
        precision: Precision,
        order: Order,
        patch: int,
        channels: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        """Takes constants that `cute_kernels.prepare_patch_weight` made; call that instead."""
        super().__init__()
        for name in ("raw", "scale", "offset", "normalised"):
            self.register_buffer(name, constants[name])
        self.precision, self.order, self.patch, self.channels = precision, order, patch, channels
        self.mean, self.std = mean, std

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """``[B, C, H, W]`` uint8 as the processor normalises it, in FP32 and then in the type of `normalised`."""
        mean, std = (of_channels(values, images)[:, None, None] for values in (self.mean, self.std))
        return ((images.to(torch.float32) / 255 - mean) / std).to(self.normalised.dtype)

    @property
    def features(self) -> int:
        return self.raw.shape[0]

    @property
    def device(self) -> torch.device:
        return self.raw.device

    def get_extra_state(self) -> torch.Tensor:
        """State that buffers do not hold, for ``state_dict``: JSON as uint8, since safetensors takes tensors alone."""
        state = {
            "schema": _SCHEMA,
            "precision": self.precision,
            "order": self.order,
            "patch": self.patch,
            "channels": self.channels,
            "mean": self.mean,
            "std": self.std,
        }
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: torch.Tensor | dict[str, Any]) -> None:
        """Takes what `get_extra_state` gave, or the dictionary that it gave before it gave a tensor. Raises ValueError:
        no such state, another schema, or the state of a weight of another precision, whose buffers differ."""
        state = self._checked_state(state)
        self.order, self.patch, self.channels = state["order"], state["patch"], state["channels"]
        self.mean, self.std = tuple(state["mean"]), tuple(state["std"])

    def _checked_state(self, state: torch.Tensor | dict[str, Any]) -> dict[str, Any]:
        if isinstance(state, torch.Tensor):
            try:
                state = json.loads(bytes(state.tolist()))
            except (ValueError, TypeError) as error:
                raise ValueError(f"state of a PatchWeight is not what get_extra_state gives: {error}") from error
        if not isinstance(state, dict):
            raise ValueError(f"state of a PatchWeight is {type(state).__name__}: must be what get_extra_state gives")
        if state.get("schema") != _SCHEMA:
            raise ValueError(f"state of a PatchWeight has schema {state.get('schema')!r}: must be {_SCHEMA}")
        if state["precision"] != self.precision:
            raise ValueError(f"state has precision {state['precision']!r}, this PatchWeight has {self.precision!r}")
        return state

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        """Loads a whole state or nothing: buffers of different weights mean nothing together.

        ``load_state_dict`` reports what does not fit as it does shapes that differ. Raises ValueError: as
        `set_extra_state`."""
        found = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        if "_extra_state" in found:
            self._checked_state(found["_extra_state"])
        own = {name: buffer for name, buffer in self._buffers.items() if buffer is not None} | {"_extra_state": None}
        if not own.keys().isdisjoint(found):
            problems = [f"{name} is missing" for name in own if name not in found]
            for name in own.keys() & found.keys() - {"_extra_state"}:
                given, expected = ((tuple(tensor.shape), tensor.dtype) for tensor in (found[name], own[name]))
                if given != expected:
                    problems.append(f"{name} has shape and dtype {given}: must be {expected}")
            if problems:
                error_msgs.append(f"PatchWeight {prefix.rstrip('.')!r} stays as it is: {'; '.join(sorted(problems))}")
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        return (
            f"features={self.features}, channels={self.channels}, patch={self.patch}, precision={self.precision!r}, "
            f"order={self.order!r}, mean={self.mean}, std={self.std}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PatchWeight":
        """Moves the buffers and keeps their types: a rounded weight means nothing with its scale when rounded again."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self

    def forward(self, *_: Any) -> None:
        """Raises TypeError: a weight is an argument, not a layer."""
        raise TypeError("a PatchWeight is an argument of cute_kernels.patch_embed_images and no layer")


def prepare_patch_weight(
    weight: torch.Tensor,
    *,
    precision: Precision = "int8",
    order: Order = "chw",
    channels: int = 3,
    mean: PerChannel = 0.5,
    std: PerChannel = 0.5,
) -> PatchWeight:
    """Rounds and lays out the weight of a patch embedding for `cute_kernels.patch_embed_images`.

    Args:
        weight: of a Conv2d, ``[N, C, p, p]``, or of a Linear over flattened patches, ``[N, C * p * p]``; a
            floating-point type, any stride. N is a multiple of 8. Later writes to it have no effect. With gradients
            enabled, they flow to it through a ``"bf16"`` or ``"fp16"`` weight, which is prepared anew for every step;
            then its numbers are not checked on a GPU, for which the host would wait. ``"int8"`` has none.
        precision: what is multiplied, and so which images are taken:

            * ``"int8"``: uint8 pixels by 8-bit weights with one scale per feature, `max|w'| / 127`; exact integer sums.
            * ``"bf16"``, ``"fp16"``: pixels and weights of that type, FP32 accumulation. uint8 pixels are exact in
              both; of normalised images, float32 and the other 16-bit type are rounded to it on the way.
        order: what a patch's pixels are flattened as in a Linear weight: ``"chw"`` (channel, row, column), or ``"hwc"``
            (row, column, channel), as NaFlex checkpoints have it. A Conv2d weight is ``"chw"``.
        channels: C of a Linear weight.
        mean: one number or one per channel (a sequence, tensor or array): what the model's processor subtracts from
            pixels that were divided by 255, from -1 to 2. It counts for uint8 images, whose normalisation this folds
            into the weight; images that are normalised already are multiplied by the weight as it is.
        std: what it divides by then, likewise, from 0.001 to 10.

    Returns:
        The prepared weight, on the device of ``weight``.

    Raises:
        TypeError: an argument of the wrong type, or a weight of another element type or on the meta device.
        ValueError: a shape that is no weight of square patches, N that is no multiple of 8, another precision or
            order, mean or std of the wrong length, not finite or of pixels that were not divided by 255; NaN or
            infinity in the weight, a feature whose scale leaves FP32's range, or numbers that FP16 rounds to infinity
            or, in all, by more than 1% because they are too small for it.
    """
    kernel = _convolution_order(weight, order, channels)
    check_choice("precision", precision, get_args(Precision), _FP8_IS_ELSEWHERE if precision == "fp8" else "")
    n, channels, patch, _ = kernel.shape
    means, stds = checked_normalisation(mean, std, channels)
    constants: dict[str, torch.Tensor | None] = {"scale": None, "normalised": None}
    if precision in WIDE_TYPES:
        constants |= _wide(kernel.reshape(n, -1).contiguous(), means, stds, WIDE_TYPES[precision])
    else:
        rows = kernel.detach().to(torch.float64).reshape(n, -1).contiguous()
        _check_finite(rows)
        folded = rows / _of_pixels(stds, patch, rows)
        integers, scale = to_integers(folded)
        effective = integers * scale.to(torch.float64)[:, None]
        constants |= {"scale": scale, "raw": integers.to(torch.int8)}
        constants["offset"] = -(effective @ _of_pixels(means, patch, rows)).to(torch.float32)
    return PatchWeight(
        constants, precision=precision, order=order, patch=patch, channels=channels, mean=means, std=stds
    )


def strip_weight(weight: torch.Tensor, plan: StripsPlan) -> torch.Tensor:
    """``[N, K]`` by (channel, row, column) as a kernel reads it that takes patches row by row: by (plane, row, place).

    Where the channels are last they belong to a row's places, which are zero-padded to the bytes that a row takes in
    shared memory, as the rows are to those that a patch takes there. The result, ``[N,
    StripsPlan.weight_columns_of_k]``, is ``weight`` itself where nothing changes.
    """
    p = plan.problem
    if not p.channels_last and not plan.splits and plan.weight_columns_of_k == p.k:
        return weight
    rows = weight.view(-1, p.channels, p.patch, p.patch)
    if p.channels_last:
        rows = rows.permute(0, 2, 3, 1).reshape(-1, 1, p.patch, p.patch * p.channels)
    columns = plan.weight_columns_of_k // (plan.planes * plan.operand_rows)
    padding = (0, columns - rows.shape[-1], 0, plan.operand_rows - p.patch)
    rows = torch.nn.functional.pad(rows, padding)
    if plan.splits:
        staged = rows.unflatten(2, (-1, plan.stage_rows))
        parts = [staged[..., part.offset : part.offset + part.span].flatten(3) for part in plan.row_parts]
        rows = torch.cat(parts, dim=3)
    return rows.reshape(weight.shape[0], -1)


def to_integers(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 integers up to `LARGEST`, and the FP32 multiplier of each row; a row of zeros has multiplier 1."""
    amax = rows.abs().amax(1)
    scale = torch.where(amax == 0, 1.0, amax / LARGEST).to(torch.float32)
    if bool((scale < torch.finfo(torch.float32).tiny).any()) or not bool(torch.isfinite(scale).all()):
        raise ValueError("weight has a feature whose scale is no normal FP32 number")
    integers = (rows / scale.to(torch.float64)[:, None]).round().clamp(-LARGEST, LARGEST)
    return integers, scale


def _wide(
    rows: torch.Tensor, means: tuple[float, ...], stds: tuple[float, ...], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Constants of 16-bit products from ``[N, K]``, with gradients; a weight that trains on a GPU is not looked at."""
    wide = rows if rows.dtype is torch.float64 else rows.to(torch.float32)
    patch = math.isqrt(rows.shape[1] // len(means))
    folded = wide / _of_pixels(stds, patch, wide)
    if not (rows.is_cuda and rows.requires_grad and torch.is_grad_enabled()):
        _check_finite(wide)
        for values in (wide, folded):
            _check_rounding(values.detach(), dtype)
    raw = folded.to(dtype)
    # No product, whose terms the device may round; neither FP32's few bits of a sum of some hundreds of terms.
    offset = -(raw.to(wide.dtype) * _of_pixels(means, patch, wide)).sum(1)
    return {"raw": raw, "normalised": rows.to(dtype, copy=True), "offset": offset.to(torch.float32)}


def _of_pixels(values: tuple[float, ...], patch: int, like: torch.Tensor) -> torch.Tensor:
    """``[K]``: a number of each channel, of pixels from 0 to 255."""
    return of_channels(values, like, like.dtype).repeat_interleave(patch * patch) * 255


def of_channels(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers as a tensor beside another, by fills: the host would wait for a copy, and CUDA graphs read it again."""
    return torch.cat([like.new_full((1,), value, dtype=dtype) for value in values])


def _check_finite(rows: torch.Tensor) -> None:
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("weight has NaN or infinity: must be finite numbers")


def _check_rounding(rows: torch.Tensor, dtype: torch.dtype) -> None:
    rounded = rows.to(dtype)
    if not bool(torch.isfinite(rounded).all()):
        raise ValueError(f"weight has numbers beyond the range of {dtype}")
    if float((rounded.to(torch.float64) - rows).norm()) > _MOST_LOST * float(rows.to(torch.float64).norm()):
        raise ValueError(
            f"weight has numbers too small for {dtype}, which would lose more than {_MOST_LOST:.0%} of them (those "
            "that uint8 pixels multiply are divided by 255 std): must be larger ones, or another precision"
        )


def _convolution_order(weight: torch.Tensor, order: str, channels: int) -> torch.Tensor:
    """``[N, C, p, p]`` of either kind of weight."""
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight is {type(weight).__name__}: must be torch.Tensor")
    if weight.is_nested:
        raise TypeError("weight is a nested tensor: must be a torch.Tensor of one shape")
    if weight.layout is not torch.strided or not weight.dtype.is_floating_point or weight.itemsize < 2:
        allowed = "a strided tensor of torch.float32, torch.float64, torch.bfloat16 or torch.float16"
        raise TypeError(f"weight has dtype {weight.dtype} and layout {weight.layout}: must be {allowed}")
    if weight.is_meta:
        raise TypeError("weight is on the meta device, where it has no values: must be a tensor with values")
    check_choice("order", order, get_args(Order))
    if isinstance(channels, bool) or not isinstance(channels, int):
        raise TypeError(f"channels is {type(channels).__name__}: must be int")
    if channels < 1:
        raise ValueError(f"channels = {channels}: must be at least 1")
    shapes = "[N, C, p, p] of a Conv2d or [N, C * p * p] of a Linear"
    if weight.dim() == 4:
        if weight.shape[2] != weight.shape[3] or 0 in weight.shape:
            raise ValueError(f"weight has shape {list(weight.shape)}: must be {shapes}")
        if order != "chw":
            raise ValueError(f"order = {order!r} with a weight of shape {list(weight.shape)}: must be 'chw'")
        kernel = weight
    elif weight.dim() == 2:
        patch = math.isqrt(weight.shape[1] // channels)
        if not patch or channels * patch**2 != weight.shape[1] or not weight.shape[0]:
            rule = f"{shapes} with C = channels = {channels}"
            raise ValueError(f"weight has shape {list(weight.shape)}: must be {rule}")
        if order == "hwc":
            kernel = weight.view(-1, patch, patch, channels).permute(0, 3, 1, 2)
        else:
            kernel = weight.view(-1, channels, patch, patch)
    else:
        raise ValueError(f"weight has shape {list(weight.shape)}: must be {shapes}")
    if kernel.shape[0] % 8:
        n = kernel.shape[0]
        raise ValueError(f"weight has N = {n}: must be multiples of 8, nearest {max(8, n - n % 8)} or {n + 8 - n % 8}")
    return kernel


def _per_channel(name: str, value: PerChannel, channels: int) -> tuple[float, ...]:
    if hasattr(value, "tolist"):  # a tensor, or what NumPy has, which need not be installed
        if getattr(value, "is_meta", False):
            raise TypeError(f"{name} is a tensor without values (on the meta device): must be numbers")
        value = value.reshape(-1).tolist() if value.shape else value.tolist()
    values = (value,) * channels if isinstance(value, numbers.Real) else value
    if isinstance(value, (bool, str)) or not isinstance(values, Sequence):
        kind = type(value).__name__
        raise TypeError(f"{name} is {kind}: must be a number, or {channels} numbers in a sequence, tensor or array")
    for number in values:
        if isinstance(number, torch.Tensor) and not number.dim():
            number = number.item()
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            raise TypeError(f"{name} has an element of type {type(number).__name__}: must be numbers")
        if not math.isfinite(number):
            raise ValueError(f"{name} = {list(values)}: must be finite numbers")
    if len(values) != channels:
        raise ValueError(f"{name} has {len(values)} numbers: must be one, or {channels}, one per channel")
    return tuple(map(float, values))


def checked_normalisation(
    mean: PerChannel, std: PerChannel, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """One mean and one standard deviation per channel, of pixels from 0 to 1. Raises TypeError, ValueError: what is no
    number for each channel; what belongs to pixels of 0 to 255, or leaves FP32's range when it is folded into a
    weight."""
    means, stds = (_per_channel(name, value, channels) for name, value in (("mean", mean), ("std", std)))
    for name, values, (low, high) in (("mean", means, _MEANS), ("std", stds, _STDS)):
        if name == "std" and min(values) <= 0:
            raise ValueError(f"std = {list(values)}: must be greater than 0")
        for value in values:
            if not low <= value <= high:
                raise ValueError(f"{name} = {value:g}: must be of pixels scaled to 0..1, from {low:g} to {high:g}")
    return means, stds
