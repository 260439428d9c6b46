"""The weights of a patch embedding: seeded random ones."""

import functools
import math
from dataclasses import dataclass, field

import torch

from cute_kernels.config import check_choice
from cute_kernels.models.siglip.preprocessing import Preprocessing

ARCHITECTURES = {
    "base-p16": (768, 16),
    "large-p16": (1024, 16),
    "so400m-p14": (1152, 14),
    "so400m-p16": (1152, 16),
    "giant-opt-p16": (1536, 16),
}
"""Hidden size and patch size of the SigLIP models."""

CHANNELS = 3


@dataclass(frozen=True)
class PatchEmbedding:
    """The weights of a patch embedding, unquantised, and the images it expects.

    Attributes:
        weight: ``[N, 3, p, p]`` float32, convolution order.
        bias: ``[N]`` float32.
        pos_embed: ``[S, N]`` float32, positions in row-major order of the patch grid.
        image_size: side of the square input in pixels; ``S = (image_size // p) ** 2``.
        source: where the weights come from, for people.
        preprocessing: how the model's images are prepared.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    pos_embed: torch.Tensor
    image_size: int
    source: str
    preprocessing: Preprocessing = field(default_factory=Preprocessing)

    def __post_init__(self) -> None:
        n, channels, height, width = self.weight.shape
        if channels != CHANNELS or height != width:
            raise ValueError(f"weight has shape {list(self.weight.shape)}: must be [N, 3, p, p]")
        if tuple(self.bias.shape) != (n,) or tuple(self.pos_embed.shape) != (self.grid**2, n):
            raise ValueError(
                f"bias {list(self.bias.shape)} and pos_embed {list(self.pos_embed.shape)} do not fit "
                f"N = {n} and a {self.grid} x {self.grid} grid"
            )

    @property
    def patch_size(self) -> int:
        return self.weight.shape[-1]

    @property
    def grid(self) -> int:
        """Patches along one side; a convolution without padding does not see pixels beyond the last whole patch."""
        return self.image_size // self.patch_size


def seeded_patch_embedding(architecture: str = "base-p16", image_size: int = 224, seed: int = 0) -> PatchEmbedding:
    """Random weights with the shapes and scales that Hugging Face initialises SigLIP with, and a random bias.

    Raises:
        ValueError: unknown architecture, or an image that is not a whole number of patches.
    """
    check_choice("architecture", architecture, ARCHITECTURES)
    features, patch = ARCHITECTURES[architecture]
    if image_size < patch:
        raise ValueError(f"image_size = {image_size}: must be at least a patch of {patch}")
    if image_size % patch:
        below = image_size // patch * patch
        nearest = f"nearest {below} or {below + patch}"
        raise ValueError(f"image_size = {image_size}: must be a whole number of patches of {patch}; {nearest}")
    positions = (image_size // patch) ** 2
    generator = torch.Generator("cpu").manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    fan_in = CHANNELS * patch**2
    return PatchEmbedding(
        weight=normal(features, CHANNELS, patch, patch) / math.sqrt(fan_in),
        bias=normal(features) * 0.02,
        pos_embed=normal(positions, features) / math.sqrt(features),
        image_size=image_size,
        source=f"seeded random weights of SigLIP2 {architecture} (seed {seed})",
    )
