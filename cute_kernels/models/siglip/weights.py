"""The patch embedding's weights: a local Hugging Face checkpoint's, or seeded random ones.

NaFlex checkpoints store a ``Linear`` weight as ``(row, column, channel)``; `load_patch_embedding` reorders it. K is the
same either way, so a wrong order would fail silently.
"""

import functools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from cute_kernels.common import extras
from cute_kernels.config import check_choice
from cute_kernels.models.siglip.preprocessing import RESAMPLING, Preprocessing

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

    def rows(self) -> torch.Tensor:
        """``[N, K]`` float32 weight rows, K in the order of `patchify`."""
        return self.weight.flatten(1)


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


def load_patch_embedding(directory: str | Path) -> PatchEmbedding:
    """Reads the patch embedding of a local Hugging Face SigLIP or SigLIP2 checkpoint, NaFlex included.

    It raises MissingExtra without transformers, FileNotFoundError without ``config.json``, and ValueError for another
    model type, damaged files, weights missing from the checkpoint, or preprocessing that is not supported."""
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} holds no config.json; expected a Hugging Face checkpoint")
    extras.require("hf", "loading a checkpoint")
    import transformers

    kind = _read_json(directory / "config.json").get("model_type")
    classes = dict.fromkeys(("siglip", "siglip_vision_model"), transformers.SiglipVisionModel)
    classes |= dict.fromkeys(("siglip2", "siglip2_vision_model"), transformers.Siglip2VisionModel)
    if kind not in classes:
        raise ValueError(f"{directory} holds a {kind!r} model: must be one of {', '.join(map(repr, classes))}")
    try:
        options = {"local_files_only": True, "output_loading_info": True, "dtype": torch.float32}
        model, info = classes[kind].from_pretrained(directory, **options)
    except Exception as error:  # readers raise errors of many types on damaged files
        raise ValueError(f"{directory} cannot be read as a checkpoint: {error}") from error
    # from_pretrained fills what the checkpoint lacks with random numbers and only warns.
    absent = sorted(name for name in info["missing_keys"] if ".embeddings." in f".{name}")
    if absent:
        raise ValueError(f"{directory} lacks {', '.join(absent)}")

    state = model.state_dict()
    state = {name.split("embeddings.", 1)[1]: value for name, value in state.items() if "embeddings." in name}
    weight = state["patch_embedding.weight"]
    patch = model.config.patch_size
    if weight.dim() == 2:
        # NaFlex: Linear over (row, column, channel).
        weight = weight.view(-1, patch, patch, CHANNELS).permute(0, 3, 1, 2).contiguous()
        image_size = math.isqrt(model.config.num_patches) * patch
    else:
        image_size = model.config.image_size
    return PatchEmbedding(
        weight=weight,
        bias=state["patch_embedding.bias"],
        pos_embed=state["position_embedding.weight"],
        image_size=image_size,
        source=f"{type(model).__name__} checkpoint {directory.name}",
        preprocessing=_load_preprocessing(directory, image_size),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}: must be an object")
    return content


def _load_preprocessing(directory: Path, image_size: int) -> Preprocessing:
    path = directory / "preprocessor_config.json"
    if not path.is_file():
        return Preprocessing()
    config = _read_json(path)
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if config.get(step, True) is not True:
            raise ValueError(f"{path.name} has {step} = {config[step]}: must be true")
    factor = config.get("rescale_factor", 1 / 255)
    if not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ValueError(f"{path.name} has rescale_factor = {factor}: must be 1/255")
    size = config.get("size")
    if size is not None and size != {"height": image_size, "width": image_size}:
        raise ValueError(f"{path.name} has size = {size}, but the model takes {image_size} x {image_size} pixels")
    names = {int(value): name for name, value in RESAMPLING.items()}
    resample = config.get("resample", int(Image.Resampling.BILINEAR))
    if resample not in names:
        raise ValueError(f"{path.name} has resample = {resample}: must be {names}")
    defaults = Preprocessing()
    mean, std = config.get("image_mean", defaults.mean), config.get("image_std", defaults.std)
    return Preprocessing(names[resample], tuple(mean), tuple(std))
