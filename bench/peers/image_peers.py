"""From uint8 images to embeddings: our kernel, our kernel over rows, and the chains that people run today."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

import cute_kernels
from bench.image_cases import MEAN, STD, ImagesData
from bench.peers import OURS, Candidate, Peer, PeerUnavailable
from cute_kernels.config import ImagesConfig
from cute_kernels.operations import reference
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES, PatchEmbedImagesArguments
from cute_kernels.operations.patch_weight import PatchWeight
from cute_kernels.operations.runtime import gpu
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import Plan
from cute_kernels.plan.registry import PATCH_EMBED_IMAGES as PLANNER

Chain = Callable[[torch.Tensor], torch.Tensor]

_EXACT_IMAGES = 64
_FP8_MAX = 448.0
_MODULE = "image_peers"

PEERS: tuple[Peer, ...] = (
    Peer(OURS, "complete", _MODULE, "build_ours"),
    Peer("bf16 on normalised pixels", "rows given", _MODULE, "build_bf16"),
    Peer("patch_embed on FP8 rows", "rows given", _MODULE, "build_rows"),
    Peer("patch_embed on uint8 rows", "rows given", _MODULE, "build_integer_rows"),
    Peer("prepare compiled + patch_embed", "complete", _MODULE, "build_prepared"),
    Peer("gemm on BF16 rows", "GEMM only", _MODULE, "build_gemm"),
    Peer("patchify + linear compiled", "complete", _MODULE, "build_linear"),
    Peer("conv compiled", "complete", _MODULE, "build_conv_compiled"),
    Peer("conv", "complete", _MODULE, "build_conv"),
    Peer("conv channels_last compiled", "complete", _MODULE, "build_conv_channels_last_compiled"),
    Peer("conv channels_last", "complete", _MODULE, "build_conv_channels_last"),
    Peer("timm", "complete", _MODULE, "build_timm"),
    Peer("one kernel", "complete", _MODULE, "build_one_kernel"),
    Peer("pass + rows", "complete", _MODULE, "build_two_kernels"),
    Peer("pass in front alone", "copy", _MODULE, "build_pass"),
    Peer("copy of the same bytes", "copy", _MODULE, "build_copy"),
)


def _weight(data: ImagesData, precision: str | None = None) -> PatchWeight:
    precision = precision or data.case.multiplied
    return cute_kernels.prepare_patch_weight(data.weight, precision=precision, mean=MEAN, std=STD)


def _plan(data: ImagesData, weight: PatchWeight, config: ImagesConfig | None = None) -> Plan:
    raw = data.case.dtype == "uint8"
    return PATCH_EMBED_IMAGES.plan(PatchEmbedImagesArguments(
        data.images[0], weight.raw if raw else weight.normalised, weight.scale,
        weight.offset if raw else None, data.bias, data.pos, weight.patch, torch.bfloat16, "auto", config,
    ))  # fmt: skip


def build_ours(data: ImagesData, config: ImagesConfig | None = None, precision: str | None = None) -> Candidate:
    """`cute_kernels.patch_embed_images` with weights of the case's precision, or of another.

    With integers, every bit of the last images is compared.

    Raises:
        RuntimeError: a bit differs from the reference.
    """
    weight = _weight(data, precision)

    def launch(slot: int) -> torch.Tensor:
        return cute_kernels.patch_embed_images(data.images[slot], weight, data.bias, data.pos, config=config)

    if weight.scale is not None:
        some, out = data.images[0][-_EXACT_IMAGES:], launch(0)[-_EXACT_IMAGES:]
        shift = data.bias.float() + weight.offset
        expected = reference.patch_embed_images(some, weight.raw, weight.scale, shift, data.pos, weight.patch)
        wrong = int((out.view(torch.int16) != expected.view(torch.int16)).sum())
        if wrong:
            raise RuntimeError(f"{wrong} of {out.numel()} elements differ from the exact reference")
    plan = _plan(data, weight, config)
    chosen = dataclasses.asdict(plan.config)
    detail = ", ".join(f"{name} {value}" for name, value in chosen.items())
    if len(plan.launches) > 1:
        detail = f"{plan.launches[0].operation} in front, {detail}"
    return Candidate(launch, detail, cute_kernels.frozen_constants)


def build_bf16(data: ImagesData) -> Candidate:
    """Ours with BF16 weights, on BF16 pixels that are normalised already, where another precision is timed."""
    if data.case.multiplied == "bf16":
        raise PeerUnavailable("that is ours")
    weight = _weight(data, "bf16")
    normalised = [
        torch.cat([data.normalised(part, torch.float32).to(torch.bfloat16) for part in images.split(256)])
        for images in data.images
    ]

    def launch(slot: int) -> torch.Tensor:
        return cute_kernels.patch_embed_images(normalised[slot], weight, data.bias, data.pos)

    return Candidate(launch, "BF16 pixels", cute_kernels.frozen_constants)


def build_gemm(data: ImagesData) -> Candidate:
    """`cute_kernels.gemm` alone, on BF16 rows that exist already, without bias and positions."""
    weight = data.weight.view(data.case.n, -1)
    rows = [
        torch.cat([data.rows(data.normalised(part, torch.float32).to(torch.bfloat16)) for part in images.split(256)])
        for images in data.images
    ]

    def launch(slot: int) -> torch.Tensor:
        return cute_kernels.gemm(rows[slot].flatten(0, 1), weight).view(data.case.images, data.case.positions, -1)

    return Candidate(launch, "BF16", cute_kernels.frozen_constants)


def _fp8_weight(data: ImagesData) -> tuple[torch.Tensor, float]:
    weight = data.weight.float().view(data.case.n, -1)
    scale = float(weight.abs().max()) / _FP8_MAX
    return (weight / scale).to(torch.float8_e4m3fn), scale


def _fp8_rows(data: ImagesData, images: torch.Tensor) -> torch.Tensor:
    return data.rows((data.normalised(images, torch.float32) * _FP8_MAX).to(torch.float8_e4m3fn))


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Rows of 8-bit numbers, contiguous, with zeros up to whole 16 bytes: what rows are that exist already."""
    return torch.nn.functional.pad(rows.view(torch.uint8), (0, -rows.shape[-1] % 16)).view(rows.dtype).contiguous()


def build_rows(data: ImagesData) -> Candidate:
    """`cute_kernels.patch_embed` alone, on E4M3 rows that exist already."""
    weight, scale = _fp8_weight(data)
    rows = [_padded(torch.cat([_fp8_rows(data, part) for part in images.split(256)])) for images in data.images]
    weight = _padded(weight)

    def launch(slot: int) -> torch.Tensor:
        return cute_kernels.patch_embed(
            rows[slot], weight, data.bias, data.pos, scale_a=1 / _FP8_MAX, scale_b=scale
        )

    return Candidate(launch, "E4M3", cute_kernels.frozen_constants)


def build_integer_rows(data: ImagesData) -> Candidate:
    """`cute_kernels.patch_embed` alone, on the pixels of patches that are rows already, with int8 weights."""
    if data.case.dtype != "uint8":
        raise PeerUnavailable("normalised images are no integers")
    weight = cute_kernels.prepare_patch_weight(data.weight, mean=MEAN, std=STD)
    rows, matrix = [_padded(data.rows(images)) for images in data.images], _padded(weight.raw)
    bias, scale = data.bias.float() + weight.offset, weight.scale[None]

    def launch(slot: int) -> torch.Tensor:
        return cute_kernels.patch_embed(rows[slot], matrix, bias, data.pos, scale_b=scale)

    return Candidate(launch, "uint8 x int8", cute_kernels.frozen_constants)


def build_prepared(data: ImagesData) -> Candidate:
    """Normalise, patchify and cast to E4M3 in one compiled function, then `cute_kernels.patch_embed`."""
    weight, scale = _fp8_weight(data)
    prepare = _compiled(lambda images: _fp8_rows(data, images))

    def launch(slot: int) -> torch.Tensor:
        rows = prepare(data.images[slot])
        return cute_kernels.patch_embed(rows, weight, data.bias, data.pos, scale_a=1 / _FP8_MAX, scale_b=scale)

    return Candidate(launch, "E4M3", cute_kernels.frozen_constants)


def build_linear(data: ImagesData) -> Candidate:
    """Normalise, patchify, BF16 linear, positions: one compiled function."""
    weight = data.weight.view(data.case.n, -1)

    def chain(images: torch.Tensor) -> torch.Tensor:
        rows = data.rows(data.normalised(images, torch.float32).to(torch.bfloat16))
        return torch.nn.functional.linear(rows, weight, data.bias) + data.pos

    return _candidate(data, _compiled(chain), "BF16")


def _conv(data: ImagesData, channels_last: bool) -> Chain:
    """As Hugging Face's processor on the GPU and `SiglipVisionEmbeddings`: Conv2d, flatten, transpose, positions."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    weight = data.weight.contiguous(memory_format=layout)

    def chain(images: torch.Tensor) -> torch.Tensor:
        pixels = data.normalised(images, torch.float32).to(torch.bfloat16)
        pixels = pixels.contiguous(memory_format=layout)
        maps = torch.nn.functional.conv2d(pixels, weight, data.bias, stride=weight.shape[-1])
        return maps.flatten(2).transpose(1, 2) + data.pos

    return chain


def build_conv(data: ImagesData) -> Candidate:
    """Eager, NCHW."""
    return _candidate(data, _conv(data, False), "BF16, eager")


def build_conv_compiled(data: ImagesData) -> Candidate:
    """Compiled, NCHW."""
    return _candidate(data, _compiled(_conv(data, False)), "BF16, torch.compile")


def build_conv_channels_last(data: ImagesData) -> Candidate:
    """Eager, channels_last from the normalised pixels on."""
    return _candidate(data, _conv(data, True), "BF16, eager")


def build_conv_channels_last_compiled(data: ImagesData) -> Candidate:
    """Compiled, channels_last from the normalised pixels on."""
    return _candidate(data, _compiled(_conv(data, True)), "BF16, torch.compile")


def build_timm(data: ImagesData) -> Candidate:
    """As timm's prefetcher and `PatchEmbed`: normalised in place in BF16, projection, flatten, positions; eager."""
    mean, std = (torch.full((1, 3, 1, 1), 255 * x, dtype=torch.bfloat16, device=data.device) for x in (MEAN, STD))
    case = data.case
    projection = torch.nn.Conv2d(3, case.n, case.patch, case.patch, device=data.device, dtype=torch.bfloat16)
    with torch.no_grad():
        projection.weight.copy_(data.weight)
        projection.bias.copy_(data.bias)
    projection.requires_grad_(False)

    def chain(images: torch.Tensor) -> torch.Tensor:
        pixels = images.to(torch.bfloat16).sub_(mean).div_(std) if images.dtype == torch.uint8 else images
        return projection(pixels).flatten(2).transpose(1, 2) + data.pos

    return _candidate(data, chain, "BF16, eager")


def build_one_kernel(data: ImagesData) -> Candidate:
    """Ours, by the kernel that reads the images whatever the plan chooses.

    Raises:
        PeerUnavailable: there is none for these images.
    """
    return _ours_of(data, 1)


def build_two_kernels(data: ImagesData) -> Candidate:
    """Ours, by a pass and the kernel over rows whatever the plan chooses.

    Raises:
        PeerUnavailable: there is none for these images.
    """
    return _ours_of(data, 2)


def _ours_of(data: ImagesData, launches: int) -> Candidate:
    """Ours, by the first kernel of so many launches, rather one that takes such problems."""
    plan, reason = _plan(data, _weight(data)), ""
    problem, arch = plan.problem, plan.arch
    for kernel in sorted(PLANNER.of(arch.name), key=lambda kernel: bool(kernel.takes(problem, arch))):
        try:
            config = kernel.choose(problem, arch, plan.sm_count)
            found = kernel.plan(problem, config, arch, plan.sm_count)
        except ValueError as error:
            reason = reason or str(error)
            continue
        if len(found.launches) == launches:
            return build_ours(data, config)
    raise PeerUnavailable(reason or "none has so many launches")


def build_pass(data: ImagesData) -> Candidate:
    """What is launched in front where no kernel reads the images: their patches as rows."""
    plan = _plan(data, _weight(data))
    if len(plan.launches) == 1:
        raise PeerUnavailable("one kernel reads the images themselves")
    front = plan.launches[0]
    shape = (data.case.rows, front.row_elements)
    rows = torch.empty(shape, dtype=getattr(torch, front.problem.out_dtype), device=data.device)

    def launch(slot: int) -> torch.Tensor:
        gpu.launch(front, Operands(images=data.images[slot], x=rows))
        return rows

    return Candidate(launch, f"{front.problem.in_dtype} -> {front.problem.out_dtype}, {front.problem.order}")


def build_copy(data: ImagesData) -> Candidate:
    """Device-to-device copy that reads and writes, together, as many bytes as the kernel must."""
    half = data.case.bytes // 2
    raw = [torch.empty(2 * half, dtype=torch.uint8, device=data.device).random_() for _ in range(data.case.slots)]

    def launch(slot: int) -> torch.Tensor:
        return raw[slot][half:].copy_(raw[slot][:half])

    return Candidate(launch, f"{data.case.bytes / 1e6:.0f} MB read + written")


def _compiled(function: Chain) -> Chain:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _candidate(data: ImagesData, chain: Chain, detail: str) -> Candidate:
    def launch(slot: int) -> torch.Tensor:
        with torch.no_grad():
            return chain(data.images[slot])

    return Candidate(launch, detail)
