"""Photographs in, patch embeddings out: the whole way of a SigLIP2 image into its first layer, on any machine.

Preprocess, patchify, quantise to E4M3, run the fused kernel (on the GPU it was made for, or its PTX in the emulator),
compare with two references, draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cute_kernels import compile, files, reference, siglip
from cute_kernels.commands import report
from cute_kernels.config import PatchEmbedConfig, PatchEmbedProblem
from cute_kernels.emulator import Options
from cute_kernels.operations import patch_embed as ops
from cute_kernels.plan import make_plan
from cute_kernels.runtime import emulated, gpu

if TYPE_CHECKING:
    from cute_kernels.siglip import PatchEmbedding, Quantized

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


@dataclass(frozen=True)
class DemoOptions:
    """What to run.

    Attributes:
        images: image files; the photographs of scikit-image when empty.
        model: folder of a Hugging Face SigLIP or SigLIP2 checkpoint; seeded weights when None.
        architecture: which seeded weights, a key of `siglip_models.ARCHITECTURES`.
        image_size: input side in pixels, for seeded weights.
        seed: of the seeded weights and of the emulator's schedule.
        backend: ``"auto"`` takes a GPU of compute capability 10.0 for sm_100a, otherwise the emulator: Hopper's tensor
            cores keep fewer bits of a sum, so a comparison of all bits would fail there. ``"emulator"`` never looks for
            a GPU.
        arch: whose kernel, a key of `cute_kernels.plan.ARCHS`.
        config: tunables of the kernel; what the plan chooses for the problem when None.
        output: PNG file to write.
        trace: file for a timeline of the emulated launch, or None.
    """

    images: Sequence[Path] = ()
    model: Path | None = None
    architecture: str = "base-p16"
    image_size: int = 224
    seed: int = 0
    backend: str = "auto"
    arch: str = "sm_100a"
    config: PatchEmbedConfig | None = None
    output: Path = Path("demo.png")
    trace: Path | None = None


@dataclass(frozen=True)
class _Embedded:
    """What the kernel returned, how it was run, and with which kernel."""

    out: torch.Tensor
    backend: str
    remark: str
    prepared: ops.PreparedLaunch


def run_demo(options: DemoOptions, console: Console) -> int:
    """Runs the demo and prints what it finds.

    Returns:
        Number of output elements whose bits differ from the torch reference; 0 is the only good answer.

    Raises:
        ValueError, OSError, ModuleNotFoundError: unusable images, checkpoint, config or output.
    """
    # What no problem allows is refused before images and weights are loaded; a small one allows the most.
    make_plan(PatchEmbedProblem(m=1, n=8, k=16), options.config, options.arch)
    files.check_output(options.output)
    if options.trace is not None:
        files.check_output(options.trace)
    names, photos = _load_photographs(options.images)
    model = (
        siglip.seeded_patch_embedding(options.architecture, options.image_size, options.seed)
        if options.model is None
        else siglip.load_patch_embedding(options.model)
    )
    console.print(f"weights: {model.source}")
    console.print(
        f"images: {len(photos)} square {'crop' if len(photos) == 1 else 'crops'}, {model.preprocessing.resample} to "
        f"{model.image_size} × {model.image_size}, {model.grid} × {model.grid} patches of {model.patch_size}²"
    )
    if rest := model.image_size % model.patch_size:
        console.print(f"the checkpoint's convolution does not see the last {rest} rows and columns of pixels")

    positions, n, k = model.grid**2, model.weight.shape[0], model.rows().shape[1]
    problem = PatchEmbedProblem(m=len(photos) * positions, n=n, k=-(-k // 16) * 16, table_rows=positions)
    options = replace(options, config=make_plan(problem, options.config, options.arch).config)
    pixels = model.preprocessing(photos, model.image_size)
    x = siglip.quantize(siglip.patchify(pixels, model.patch_size, drop_rest=options.model is not None))
    weight = siglip.quantize(model.rows())
    console.print(f"quantised to E4M3: x × {x.scale:.4g}, weight × {weight.scale:.4g}")

    embedded = _run_kernel(x, weight, model, options, console)
    expected = ops.patch_embed(
        x.values, weight.values, model.bias, model.pos_embed,
        scale_a=x.scale, scale_b=weight.scale, config=options.config, backend="reference",
    )  # fmt: skip
    fp32 = reference.patch_embed_conv2d(pixels, model.weight, model.bias, model.pos_embed)
    rows = [
        report.compare("kernel", embedded.backend, embedded.out, expected, fp32),
        report.compare("torch reference", "torch, CPU", expected, None, fp32),
    ]

    plan = embedded.prepared.plan
    artifact = compile.compile_plan(plan, emulated=not embedded.prepared.operands.x.is_cuda)
    console.print(report.resource_table(plan, artifact.resources))
    console.print(report.accuracy_table(rows))
    console.print(
        f"FP32 is torch.nn.functional.conv2d + position embedding on the unquantised input. {embedded.remark}"
    )
    with files.writing(options.output):
        _draw(options.output, names, pixels, model, embedded, fp32, rows[0])
    console.print(f"picture: {options.output}")
    return rows[0].mismatches


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


def _run_kernel(
    x: Quantized, weight: Quantized, model: PatchEmbedding, options: DemoOptions, console: Console
) -> _Embedded:
    scale = float(np.float32(x.scale) * np.float32(weight.scale))
    operands = (x.values, weight.values, model.bias, model.pos_embed)
    capability = torch.cuda.get_device_capability() if options.backend == "auto" and torch.cuda.is_available() else None
    if options.arch == "sm_100a" and capability == (10, 0):
        prepared = ops.prepare_launch(*(t.cuda() for t in operands), scale, options.config)
        gpu.launch(prepared.plan, prepared.operands)
        out = prepared.operands.out.view(prepared.output_shape).cpu()
        return _Embedded(out, torch.cuda.get_device_name(), "", prepared)

    prepared = ops.prepare_launch(*operands, scale, options.config)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("emulating clusters", total=prepared.plan.clusters)
        result = emulated.launch(
            prepared.plan,
            prepared.operands,
            Options(seed=options.seed, trace=options.trace),
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    remark = (
        f"The emulator executed {result.warp_instructions:,} warp instructions of {prepared.plan.clusters} clusters in "
        f"{result.seconds:.1f} s; this says nothing about the speed of a GPU."
    )
    return _Embedded(
        prepared.operands.out.view(prepared.output_shape), f"emulator, {prepared.plan.arch.name} PTX", remark, prepared
    )


def _draw(
    path: Path,
    names: Sequence[str],
    pixels: torch.Tensor,
    model: PatchEmbedding,
    embedded: _Embedded,
    fp32: torch.Tensor,
    accuracy: report.Accuracy,
) -> None:
    basis = report.fit_rgb(fp32)

    def colours(embeddings: torch.Tensor) -> torch.Tensor:
        return basis(embeddings).unflatten(1, (model.grid, model.grid))

    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (model.preprocessing.mean, model.preprocessing.std))
    seen = (pixels * std + mean).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    report.save_figure(
        path,
        list(seen),
        {"FP8 kernel": colours(embedded.out), "FP32 conv2d": colours(fp32)},
        title="Patch embeddings: three principal components as red, green and blue, one basis for all",
        footnote=(
            f"{model.source}. Kernel: {embedded.backend}; {accuracy.mismatches:,} bit mismatches to its torch "
            f"reference; cosine to FP32 {accuracy.cosine:.5f}."
        ),
        names=names,
    )
