"""Photographs through the first layer of SigLIP2 in int8, BF16 and FP8: kernels in the emulator, references, a picture.

    python docs/examples/photographs.py --images photo.jpg --output photo.png

Weights are random. Exits with 1 if a bit differs from the references. docs/demo.md
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from cute_kernels import patch_embed, patch_embed_images, prepare_patch_weight
from cute_kernels.emulator import Options, default_options
from cute_kernels.operations.reference import patch_embed_conv2d, patch_rows

FEATURES, PATCH = 768, 16  # of SigLIP2's base models
PHOTOGRAPHS = (
    "astronaut", "chelsea", "coffee", "rocket", "stereo_motorcycle", "hubble_deep_field", "retina",
    "immunohistochemistry",
)  # fmt: skip
"""Photographs that the scikit-image wheel holds."""

Layer = dict[str, torch.Tensor]


def photographs(paths: Sequence[Path]) -> tuple[list[str], list[Image.Image]]:
    """Names and centred square RGB crops of files, or of scikit-image's photographs. Raises OSError: no image."""
    if paths:
        images = [ImageOps.exif_transpose(Image.open(path)).convert("RGB") for path in paths]
    else:
        import skimage.data

        arrays = [getattr(skimage.data, name)() for name in PHOTOGRAPHS]
        # The stereo pair comes as (left, right, disparity).
        images = [Image.fromarray(each[0] if isinstance(each, tuple) else each).convert("RGB") for each in arrays]
    names = [path.stem for path in paths] or [name.replace("_", " ") for name in PHOTOGRAPHS]
    return names, [ImageOps.fit(image, (min(image.size),) * 2) for image in images]


def random_layer(image_size: int) -> Layer:
    """Weight ``[N, 3, p, p]``, bias ``[N]`` and positions ``[S, N]``, float32, of square images of this side."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(FEATURES, 3, PATCH, PATCH, generator=random) / (3 * PATCH**2) ** 0.5
    positions = torch.randn((image_size // PATCH) ** 2, FEATURES, generator=random) / FEATURES**0.5
    return {"weight": weight, "bias": torch.randn(FEATURES, generator=random) * 0.02, "pos_embed": positions}


def of_images(precision: str, images: torch.Tensor, layer: Layer, backend: str) -> torch.Tensor:
    """``[B, S, N]`` of uint8 images ``[B, 3, H, W]``; the normalisation of their pixels is in the weight."""
    weight = prepare_patch_weight(layer["weight"], precision=precision, mean=0.5, std=0.5)
    return patch_embed_images(images, weight, layer["bias"], layer["pos_embed"], backend=backend)


def of_rows(images: torch.Tensor, layer: Layer, backend: str) -> torch.Tensor:
    """``[B, S, N]`` of rows of patches that were normalised and rounded to E4M3 before, as the weight was."""
    rows = patch_rows(images / 127.5 - 1, PATCH).unflatten(0, (len(images), -1))
    (x, scale_a), (weight, scale_b) = e4m3(rows), e4m3(layer["weight"].flatten(1))
    scales = {"scale_a": scale_a, "scale_b": scale_b}
    return patch_embed(x, weight, layer["bias"], layer["pos_embed"], **scales, backend=backend)


def e4m3(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Values and their one multiplier, with which the largest magnitude is 448."""
    scale = float(tensor.abs().amax()) / 448
    return (tensor / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


EMBEDDINGS: dict[str, Callable[[torch.Tensor, Layer, str], torch.Tensor]] = {
    "int8": lambda *given: of_images("int8", *given),
    "fp8": of_rows,
    "bf16": lambda *given: of_images("bf16", *given),
}


def colours_of(embeddings: torch.Tensor) -> Callable[[torch.Tensor], np.ndarray]:
    """What makes ``[B, S, N]`` colours ``[B, grid, grid, 3]``: three principal components of these embeddings, of which
    the 1st and 99th percentile become 0 and 1."""
    points = embeddings.flatten(0, 1).double()
    mean = points.mean(0)
    axes = torch.linalg.eigh((points - mean).T @ (points - mean)).eigenvectors[:, -3:].flip(1)
    ends = torch.quantile((points - mean) @ axes, torch.tensor([0.01, 0.99], dtype=torch.float64), dim=0)

    def colours(found: torch.Tensor) -> np.ndarray:
        grid = round(found.shape[1] ** 0.5)
        scaled = ((found.double() - mean) @ axes - ends[0]) / (ends[1] - ends[0]).clamp(min=1e-12)
        return scaled.clamp(0, 1).unflatten(1, (grid, grid)).numpy()

    return colours


def draw(output: Path, names: Sequence[str], photos: np.ndarray, maps: dict[str, np.ndarray]) -> None:
    """Each photo beside its maps, a PNG file."""
    from matplotlib.figure import Figure

    pictures = {"photo": photos} | maps
    size = 1.8 * len(pictures), 0.6 + 1.8 * len(names)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    figure.suptitle("Patch embeddings: three principal components as red, green and blue", fontsize=11)
    for line, axes in enumerate(figure.subplots(len(names), len(pictures), squeeze=False)):
        axes[0].set_ylabel(names[line][:24], fontsize=8, parse_math=False)
        for axis, (title, found) in zip(axes, pictures.items()):
            axis.imshow(found[line], interpolation="nearest")
            axis.set(xticks=[], yticks=[], frame_on=False)
            if not line:
                axis.set_title(title, fontsize=9)
    figure.savefig(output, format="png")


def main(words: Sequence[str] | None = None) -> int:
    """Embeds, compares and draws; 1 if a bit differs from the reference of its precision."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", nargs="+", type=Path, default=[], metavar="FILE", help="default: scikit-image's")
    parser.add_argument("--image-size", type=int, default=224, help=f"pixels per side, a multiple of {PATCH}")
    parser.add_argument("--precision", nargs="+", choices=EMBEDDINGS, default=EMBEDDINGS, help="default: all")
    parser.add_argument("--output", type=Path, default=Path("demo.png"), metavar="FILE", help="default: %(default)s")
    options = parser.parse_args(words)
    if options.image_size < PATCH or options.image_size % PATCH:
        parser.error(f"--image-size {options.image_size}: must be a multiple of {PATCH}")
    names, photos = photographs(options.images)
    size = options.image_size, options.image_size
    pixels = np.stack([np.asarray(each.resize(size, Image.Resampling.BILINEAR)) for each in photos])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    layer = random_layer(options.image_size)
    fp32 = patch_embed_conv2d(images / 127.5 - 1, **layer)
    colours, maps, differing = colours_of(fp32), {}, 0
    for precision in dict.fromkeys(options.precision):
        embed = EMBEDDINGS[precision]
        with default_options(Options(arithmetic="exact")):  # sums as the references have them
            out = embed(images, layer, "emulator")
        different = int((out != embed(images, layer, "reference")).sum())
        error = float((out.double() - fp32).norm() / fp32.double().norm())
        print(f"{precision}: {different:,} of {out.numel():,} numbers differ from the reference; {error:.2%} off FP32")
        maps[f"{precision}\n{error:.2%} off FP32"] = colours(out)
        differing += different
    draw(options.output, names, pixels, maps | {"FP32 conv2d": colours(fp32)})
    print(f"picture: {options.output}")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
