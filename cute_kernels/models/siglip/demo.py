"""Photographs in, patch embeddings out: the whole way of a SigLIP2 image into its first layer, on any machine.

Resize, run the fused kernels in the emulator, compare with two references, draw: uint8 images by integers and by BF16,
and rows that were made of them by FP8.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cute_kernels.common import files
from cute_kernels.models import siglip
from cute_kernels.models.siglip import demo_report as report
from cute_kernels.models.siglip.demo_candidates import SMALLEST, Candidate, make_candidate
from cute_kernels.operations import reference
from cute_kernels.plan import make_plan

if TYPE_CHECKING:
    from cute_kernels.models.siglip import PatchEmbedding

# Photographs that the scikit-image wheel holds: name of the loader -> label.
PHOTOGRAPHS = {
    "astronaut": "astronaut",
    "chelsea": "cat",
    "coffee": "coffee",
    "rocket": "rocket",
    "stereo_motorcycle": "motorcycle",
    "hubble_deep_field": "Hubble deep field",
    "retina": "retina",
    "immunohistochemistry": "stained tissue",
}


def run_demo(
    console: Console,
    *,
    images: Sequence[Path],
    image_size: int,
    arch: str,
    precisions: Sequence[str],
    config: Any,
    output: Path,
    trace: Path | None,
) -> int:
    """Runs the demo, prints what it finds on the console, and returns the number of output elements whose bits differ
    from the torch references; 0 is the only good answer.

    Without image files it takes the photographs of scikit-image; weights are seeded ones of a base model, of images of
    ``image_size``. ``precisions``: of `PRECISIONS`, in the order in which they are shown; with one
    of them ``config`` has tunables of its kernel, and ``trace`` names a file for a timeline of the emulated launch;
    ``output``: PNG file. Raises ValueError, OSError, ModuleNotFoundError: unusable images, config or output.
    """
    # What no problem allows is refused before images and weights are loaded; a small one allows the most.
    if config is not None:
        make_plan(SMALLEST[precisions[0]], config, arch)
    for path in filter(None, (output, trace)):
        files.check_output(path)
    names, photos = _load_photographs(images)
    weights = siglip.seeded_patch_embedding("base-p16", image_size, 0)
    console.print(f"weights: {weights.source}")
    console.print(
        f"images: {len(photos)} square {'crop' if len(photos) == 1 else 'crops'}, bilinear to "
        f"{weights.image_size} × {weights.image_size}, {weights.grid} × {weights.grid} patches of {weights.patch_size}²"
    )

    raw = weights.preprocessing.resized(photos, weights.image_size)
    pixels = weights.preprocessing.normalised(raw)
    fp32 = reference.patch_embed_conv2d(pixels, weights.weight, weights.bias, weights.pos_embed)
    outs, accuracies = [], []
    for precision in precisions:
        candidate = make_candidate(precision, raw, weights)
        expected = candidate.reference()
        out, backend = _run(candidate, expected, config, arch, trace, console)
        compared = None if out is expected else expected
        accuracies.append(report.compare(f"{precision}, {candidate.pixels}", backend, out, compared, fp32))
        outs.append(out)

    console.print(report.accuracy_table(accuracies))
    console.print("FP32 is torch.nn.functional.conv2d + position embedding on normalised, unquantised pixels.")
    with files.writing(output):
        _draw(output, names, raw, weights, list(zip(outs, accuracies, strict=True)), fp32)
    console.print(f"picture: {output}")
    return sum(accuracy.mismatches or 0 for accuracy in accuracies)


def _load_photographs(paths: Sequence[Path]) -> tuple[list[str], list[Image.Image]]:
    """Names and centred square RGB crops of the given files, or of scikit-image's photographs."""
    if paths:
        images = []
        for path in paths:
            if not Path(path).is_file():
                raise FileNotFoundError(f"no image file {path}")
            try:
                with Image.open(path) as image:
                    images.append(siglip.to_rgb(ImageOps.exif_transpose(image)))
            except Exception as error:  # decoders raise errors of many types on damaged files
                raise ValueError(f"{path} cannot be read as an image: {error}") from error
        names = [Path(path).stem for path in paths]
    else:
        import skimage.data

        arrays = [getattr(skimage.data, name)() for name in PHOTOGRAPHS]
        # The stereo pair comes as (left, right, disparity).
        images = [siglip.to_rgb(a[0] if isinstance(a, tuple) else a) for a in arrays]
        names = list(PHOTOGRAPHS.values())
    return names, [ImageOps.fit(image, (min(image.size),) * 2) for image in images]


def _run(
    candidate: Candidate, expected: torch.Tensor, config: Any, arch: str, trace: Path | None, console: Console
) -> tuple[torch.Tensor, str]:
    """The result, and what executed it: the emulator, or, where no kernel takes the images, the reference."""
    plan = candidate.plan(config, arch)
    if isinstance(plan, str):
        console.print(f"{candidate.precision}: no kernel of {arch} ({plan}); plain torch instead")
        return expected, "torch, CPU"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{candidate.precision}: emulating clusters", total=None)
        update = lambda done, total: progress.update(task, completed=done, total=total)  # noqa: E731
        out, done = candidate.emulate(plan, trace, update)
    console.print(f"{candidate.precision}: the emulator executed {done}; this says nothing about the speed of a GPU")
    return out, f"emulator, {plan.arch.name} PTX"


def _draw(
    path: Path,
    names: Sequence[str],
    raw: torch.Tensor,
    model: "PatchEmbedding",
    found: Sequence[tuple[torch.Tensor, report.Accuracy]],
    fp32: torch.Tensor,
) -> None:
    basis = report.fit_rgb(fp32)

    def colours(embeddings: torch.Tensor) -> torch.Tensor:
        return basis(embeddings).unflatten(1, (model.grid, model.grid))

    maps = {f"{each.name}\n{each.relative_error:.2%} off FP32": colours(out) for out, each in found}
    executed = "; ".join(
        f"{each.name.partition(',')[0]}: {each.backend}"
        + ("" if each.mismatches is None else f", {each.mismatches:,} numbers differ from its reference")
        for _, each in found
    )
    figure = report.draw_figure(
        list(raw.permute(0, 2, 3, 1).numpy()),
        maps | {"FP32 conv2d": colours(fp32)},
        title="Patch embeddings: three principal components as red, green and blue, one basis for all",
        footnote=f"{model.source}. {executed}. Off FP32: norm of the difference over the norm of FP32.",
        names=names,
    )
    figure.savefig(path, format="png")
