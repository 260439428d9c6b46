"""How a patch embedding is to be run, checked where it is said and not at the first image."""

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from cute_kernels.config import check_choice
from cute_kernels.operations import patch_weight
from cute_kernels.operations.patch_weight import PerChannel

Precision = Literal["bf16", "fp16", "int8", "fp8", "auto"]
Order = Literal["chw", "hwc"]
Pixels = Literal["auto", "raw", "normalised"]
Backend = Literal["auto", "emulator", "reference", "torch"]

_FURTHEST = 2.64
"""`PatchOptions.bound` of ImageNet's mean and std, which of those in use reach furthest."""
_AUTOMATIC = {dtype: name for name, dtype in patch_weight.WIDE_TYPES.items()}


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """Options of the kernels beyond the weight.

    Attributes:
        precision: what is multiplied. ``"bf16"`` and ``"fp16"`` take normalised pixels and uint8; ``"int8"``
            takes uint8 pixels only, exactly; ``"fp8"`` rounds pixels and weight to E4M3. ``"auto"`` is that
            of the weight's type at each call, ``"bf16"`` or ``"fp16"``; with a float32 weight the plain module runs.
        order: what a patch's pixels are flattened as in a Linear weight and in rows: ``"chw"`` or ``"hwc"``.
            With a convolution it is ``"chw"``, and anything else is refused where the two meet.
        channels: C of a Linear weight; of a convolution's it is read from the weight.
        frames: T of rows ``[C, T, p, p]`` and their weight. Rows may have one frame instead, of a still image, whose T
            frames are equal: it is multiplied by the sum of the weight's frames. Layers have 1.
        mean, std: the normalisation of the model's processor, one number or one per channel, of pixels
            that were divided by 255. They also bound normalised pixels, which is the range that ``"fp8"`` represents:
            others raise ValueError on a CPU and give NaN on a GPU. None where they are not known: raw pixels and
            ``"fp8"`` are refused then.
        pixels: what they are. ``"raw"``: whole numbers from 0 to 255, as uint8 or in a floating-point type to which a
            model cast them; ``"int8"`` implies it. ``"normalised"`` refuses uint8, and looks at no values. ``"auto"``
            takes uint8 as raw and floating point as normalised, and refuses magnitudes of raw ones. Values that are
            refused raise ValueError on a CPU at once, on a GPU in a later call.
        backend: ``"auto"``, ``"emulator"`` and ``"reference"`` as for `cute_kernels.patch_embed_images`; ``"torch"``
            is the plain module, for comparison.

    Raises:
        TypeError, ValueError: a value that is not allowed.
    """

    precision: Precision = "bf16"
    order: Order = "chw"
    channels: int = 3
    frames: int = 1
    mean: PerChannel | None = 0.5
    std: PerChannel | None = 0.5
    pixels: Pixels = "auto"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name, kind in (("precision", Precision), ("order", Order), ("pixels", Pixels), ("backend", Backend)):
            check_choice(name, getattr(self, name), get_args(kind))
        for name, value in (("channels", self.channels), ("frames", self.frames)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {type(value).__name__}: must be int")
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if self.frames > 1 and self.order != "chw":
            raise ValueError(f"frames = {self.frames} with order = {self.order!r}: must be 1, or order = 'chw'")
        if self.integer and self.pixels == "normalised":
            raise ValueError(f"pixels = 'normalised' with precision = {self.precision!r}, which multiplies uint8")
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"mean = {self.mean!r} with std = {self.std!r}: must be both known, or both None")
        if self.mean is not None:
            mean, std = patch_weight.checked_normalisation(self.mean, self.std, self.channels)
            object.__setattr__(self, "mean", mean)
            object.__setattr__(self, "std", std)

    @property
    def integer(self) -> bool:
        """Whether raw pixels are the only ones that the precision multiplies."""
        return self.precision == "int8"

    @property
    def raw(self) -> bool:
        """Whether pixels are raw, of whatever type they come in."""
        return self.pixels == "raw" or self.integer

    @property
    def asks_normalisation(self) -> bool:
        """Whether mean and standard deviation are needed for any pixels, and not known."""
        return self.mean is None and (self.raw or self.precision == "fp8")

    def precision_for(self, weight: torch.dtype) -> str | None:
        """Precision of products with a weight of this type; None where they are left to the plain module."""
        return _AUTOMATIC.get(weight) if self.precision == "auto" else self.precision

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_text(cls, text: str) -> "PatchOptions":
        """Options that gave this `text`."""
        return cls(**json.loads(text))

    def for_channels(self, channels: int) -> "PatchOptions":
        """Options for so many channels, for which one mean and one standard deviation serve all. Raises ValueError:
        means or standard deviations that differ, of another number of channels."""
        if self.mean is None:
            return dataclasses.replace(self, channels=channels)
        mean, std = (values[0] if len(set(values)) == 1 else values for values in (self.mean, self.std))
        return dataclasses.replace(self, channels=channels, mean=mean, std=std)

    @functools.cached_property
    def bound(self) -> float:
        """The largest magnitude that a pixel between 0 and 255 has after normalisation."""
        if self.mean is None:
            return _FURTHEST
        return max(max(abs(mean), abs(1 - mean)) / std for mean, std in zip(self.mean, self.std, strict=True))
