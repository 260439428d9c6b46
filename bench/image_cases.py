"""Sizes of the patch embed of images, their random inputs, and the reference that checks every peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.cases import BATCHES, MAX_SLOTS, ROTATED_BYTES, Check
from cute_kernels.config import PatchEmbedImagesProblem

MODELS: dict[str, tuple[int, int, int]] = {
    "vit-s16": (384, 224, 16), "base-p16": (768, 224, 16), "base-p16-256": (768, 256, 16),
    "base-p16-384": (768, 384, 16), "large-p16-256": (1024, 256, 16), "so400m-p16-384": (1152, 384, 16),
    "base-p14": (768, 224, 14), "vit-l14": (1024, 224, 14), "so400m-p14": (1152, 224, 14), "vit-b32": (768, 224, 32),
    "dinov2-g14": (1536, 224, 14),
}  # fmt: skip
"""Features, and pixels along a side of an image and of a patch; three channels."""

PRECISIONS = {"uint8": "int8", "bfloat16": "bf16"}
"""Precision of our weight by the type of the pixels."""

MEAN, STD = 0.5, 0.5
"""Of SigLIP's processor."""

_CHANNELS = 3
_CHUNK = 32


@dataclass(frozen=True)
class ImagesCase:
    """``images`` images of ``side`` x ``side`` pixels, ``n`` output features in BF16.

    ``dtype`` is that of the pixels: ``"uint8"`` raw ones, ``"bfloat16"`` normalised ones. ``requested_images`` differs
    from ``images`` if the size asked for does not fit the memory of the device. ``patch`` is a side in pixels;
    ``channels_last`` the memory order. ``precision`` is of our weight in recorded results, empty for the pixels' own.
    """

    model: str
    images: int
    side: int
    n: int
    requested_images: int
    dtype: str = "uint8"
    patch: int = 16
    channels_last: bool = False
    precision: str = ""

    @property
    def multiplied(self) -> str:
        """Precision of our weight."""
        return self.precision or PRECISIONS[self.dtype]

    @property
    def positions(self) -> int:
        return (self.side // self.patch) ** 2

    @property
    def rows(self) -> int:
        return self.images * self.positions

    @property
    def k(self) -> int:
        return _CHANNELS * self.patch**2

    @property
    def itemsize(self) -> int:
        """Bytes of a pixel of one channel, and of a number of our weight, of two terms of each."""
        return getattr(torch, self.dtype).itemsize

    @property
    def pixels(self) -> int:
        """Bytes of the images."""
        return self.images * _CHANNELS * self.side**2 * self.itemsize

    @property
    def name(self) -> str:
        pixels = "" if self.dtype == "uint8" else f", {self.dtype}"
        return f"{self.model} x {self.images}{pixels}{', channels last' * self.channels_last}"

    @property
    def reduced(self) -> bool:
        """Whether the size asked for did not fit."""
        return self.images != self.requested_images

    @property
    def title(self) -> str:
        """One line that says what was measured."""
        reduced = f", reduced from {self.requested_images} images: memory" if self.reduced else ""
        shape = f"[{self.images}, {_CHANNELS}, {self.side}, {self.side}]"
        out = f"[.., {self.positions}, {self.n}]"
        layout = " channels last" * self.channels_last
        images = f"{shape} {self.dtype}{layout}, patches of {self.patch}"
        return f"{self.model}: {images} -> {out}, {self.multiplied}, {self.slots} input sets{reduced}"

    @property
    def bytes(self) -> int:
        """Fewest bytes through device memory: every input read once, every output written once."""
        return self.pixels + 2 * self.rows * self.n + self.n * self.k * self.itemsize + 4 * self.positions * self.n

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.k * self.n

    @property
    def slots(self) -> int:
        """Input sets to rotate among."""
        return max(1, min(MAX_SLOTS, -(-ROTATED_BYTES // self.bytes)))

    @property
    def memory(self) -> int:
        """Device bytes while all peers are alive: images and rows, copies in FP32 and BF16 on the way, outputs."""
        return 2 * self.slots * self.pixels + 16 * self.pixels + 8 * self.rows * self.n + (3 << 30)


def make_cases(
    models: Sequence[str], batches: Sequence[int] = BATCHES, dtype: str = "uint8", channels_last: bool = False,
) -> list[ImagesCase]:
    """Cases in the order of the arguments.

    Raises:
        ValueError: an unknown model, or a batch below 1.
    """
    for model in models:
        if model not in MODELS:
            raise ValueError(f"model {model!r}: must be one of {', '.join(MODELS)}")
    if any(batch < 1 for batch in batches):
        raise ValueError(f"batches {list(batches)}: must be at least 1")
    sizes = [(model, *MODELS[model], batch) for model in models for batch in batches]
    return [
        ImagesCase(model, batch, side, n, batch, dtype, patch, channels_last)
        for model, n, side, patch, batch in sizes
    ]  # fmt: skip


def problem(case: ImagesCase) -> PatchEmbedImagesProblem:
    """What our kernel is asked for."""
    precision = case.multiplied
    return PatchEmbedImagesProblem(
        case.images, _CHANNELS, case.side, case.side, case.patch, case.n, case.dtype, precision=precision,
        channels_last=case.channels_last and precision == "int8", table_rows=case.positions,
    )  # fmt: skip


class ImagesCheck(Check):
    """As `Check`. E4M3 rows and weights alone differ by 0.04 of the product; a row at a wrong position by about 1."""

    LIMIT = 0.1


class ImagesData:
    """Random images with the statistics of photographs, on one device: power depends on the data.

    Attributes:
        images: one ``[B, 3, H, W]`` tensor per slot, of the case's type.
        weight: ``[N, 3, p, p]`` BF16, of a Conv2d. bias: ``[N]`` BF16. pos: ``[S, N]`` BF16.
    """

    def __init__(self, case: ImagesCase, device: torch.device, seed: int = 0) -> None:
        self.case, self.device = case, device
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        side, patch = case.side, case.patch
        layout = torch.channels_last if case.channels_last else torch.contiguous_format
        shape = (case.images, _CHANNELS, side, side)
        self.images = [
            torch.empty(shape, dtype=getattr(torch, case.dtype), device=device, memory_format=layout)
            for _ in range(case.slots)
        ]
        for images in self.images:
            for part in images.split(128):
                coarse = normal(len(part), _CHANNELS, side // patch, side // patch)
                smooth = torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear", align_corners=False)
                raw = (118 + 60 * smooth + 8 * normal(*part.shape)).clamp(0, 255).to(torch.uint8)
                part.copy_(raw if case.dtype == "uint8" else (raw.float() * (1 / 255) - MEAN) / STD)
        self.weight = (normal(case.n, _CHANNELS, patch, patch) * 0.02).to(torch.bfloat16)
        self.bias = (normal(case.n) * 0.1).to(torch.bfloat16)
        self.pos = (normal(case.positions, case.n) * 0.1).to(torch.bfloat16)

    def normalised(self, images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the processor gives, computed in ``dtype``; images that it gave already, in that type."""
        if self.case.dtype != "uint8":
            return images.to(dtype)
        return (images.to(dtype) * (1 / 255) - MEAN) / STD

    def rows(self, images: torch.Tensor) -> torch.Tensor:
        """``[B, S, K]`` in the order of the weight, as a view or a copy of any type."""
        patch, grid = self.case.patch, self.case.side // self.case.patch
        split = images.reshape(-1, _CHANNELS, grid, patch, grid, patch)
        return split.permute(0, 2, 4, 1, 3, 5).reshape(-1, self.case.positions, self.case.k)

    def poison(self) -> None:
        """NaN into the block that the allocator hands out next for an output."""
        case = self.case
        torch.full((case.rows, case.n), float("nan"), dtype=torch.bfloat16, device=self.device)

    def _reference(self, with_table: bool) -> Iterator[tuple[int, torch.Tensor]]:
        weight = self.weight.double().view(self.case.n, -1).T
        addend = self.bias.double() + self.pos.double() if with_table else 0.0
        for start in range(0, self.case.images, _CHUNK):
            rows = self.rows(self.normalised(self.images[0][start : start + _CHUNK], torch.float64))
            yield start, rows @ weight + addend

    def check(self, out: torch.Tensor, *, with_table: bool) -> Check:
        """Every element of the output of slot 0 against FP64.

        Raises:
            ValueError: wrong shape or element type.
        """
        case = self.case
        if out.dtype != torch.bfloat16 or tuple(out.shape) != (case.images, case.positions, case.n):
            expected = f"BF16 [{case.images}, {case.positions}, {case.n}]"
            raise ValueError(f"output {out.dtype} {list(out.shape)}, expected {expected}")
        worst, total, norm, unwritten = (torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(4))
        for start, ref in self._reference(with_table):
            part = out[start : start + ref.shape[0]].double()
            squares, scale = (part - ref).square().sum(-1), ref.square().sum(-1)
            worst = torch.maximum(worst, (squares / scale).max().sqrt())
            total, norm, unwritten = total + squares.sum(), norm + scale.sum(), unwritten + part.isnan().sum()
        return ImagesCheck(float(worst), float((total / norm).sqrt()), int(unwritten))
