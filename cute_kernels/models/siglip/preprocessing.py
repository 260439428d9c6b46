"""Images -> pixels, as SigLIP2's processor orders them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes pixels: resized to a square (bilinear), scaled to [0, 1], normalised per channel. The
    defaults are those of the SigLIP2 checkpoints."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def resized(self, images: Sequence[Image.Image | np.ndarray], size: int) -> torch.Tensor:
        """Returns ``[len(images), 3, size, size]`` uint8: squares, before they are normalised; raises as `to_rgb`, and
        ValueError without an image."""
        if not images:
            raise ValueError("no images")
        pixels = [np.asarray(to_rgb(image).resize((size, size), Image.Resampling.BILINEAR)) for image in images]
        return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """``[B, 3, H, W]`` float32 of uint8 pixels: divided by 255, minus the mean, divided by the deviation."""
        mean, std = torch.tensor((self.mean, self.std), dtype=torch.float32, device=pixels.device)[..., None, None]
        return (pixels.to(torch.float32) / 255 - mean) / std


_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV", "LAB")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")


def to_rgb(image: Image.Image | np.ndarray) -> Image.Image:
    """An 8-bit RGB image of a PIL image, or of a uint8 array ``[H, W]``, ``[H, W, 3]`` or ``[H, W, 4]``; alpha is
    dropped.

    Of 16-bit grey values the upper byte is kept, which is what Pillow makes of 16-bit colour when it reads a file; its
    own conversion of 16-bit grey makes everything from 255 upwards white. 32-bit integers and floats have no range that
    says which value is white. All else raises TypeError or ValueError."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8:
            raise ValueError(f"image has dtype {image.dtype}: must be uint8")
        if image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,), (4,)) or 0 in image.shape:
            raise ValueError(f"image has shape {list(image.shape)}: must be [H, W], [H, W, 3] or [H, W, 4]")
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise TypeError(f"image is {type(image).__name__}: must be PIL.Image.Image or numpy.ndarray")
    if image.mode in _SIXTEEN_BITS:
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode not in _EIGHT_BITS:
        allowed = ", ".join((*_EIGHT_BITS, *_SIXTEEN_BITS))
        raise ValueError(f"image has mode {image.mode}: must be {allowed}")
    return image.convert("RGB")
