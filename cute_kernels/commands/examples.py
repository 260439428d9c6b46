"""Random operands for a plan, laid out as its operation lays out those of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.config import GemmProblem, PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.operations.gemm import GEMM, GemmArguments
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES, PatchEmbedImagesArguments
from cute_kernels.operations.patch_weight import prepare_patch_weight
from cute_kernels.plan import Plan
from cute_kernels.runtime.operands import Operands
from cute_kernels.tuning.patch_embed import random_arguments

ALIGNMENT = 256
"""Alignment of addresses of device memory in bytes."""


def random_operands(plan: Plan, device: str = "cpu") -> Operands:
    """Random operands: the same for equal problems on equal devices; on the CPU placed as on a device."""
    with torch.random.fork_rng(devices=[] if device == "cpu" else [device]), torch.device(device):
        torch.manual_seed(0)
        operands = _OF[type(plan.problem)](plan).operands
    if device != "cpu":
        return operands
    return operands.replace(**{name: placed(tensor) for name, tensor in operands.tensors().items()})


def placed(tensor: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """A copy on a device whose address is a multiple of 256, as device memory is and host memory may not be: where the
    lines and sectors of an array begin decides how many of them an access touches."""
    nbytes = tensor.numel() * tensor.itemsize
    store = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -store.data_ptr() % ALIGNMENT
    copy = store[skip : skip + nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return copy.copy_(tensor)


def _gemm(plan: Plan) -> Any:
    p: GemmProblem = plan.problem
    dtype = getattr(torch, p.in_dtype)
    a, b = (torch.randn(p.batches, rows, p.k, dtype=dtype) for rows in (p.m, p.n))
    bias = torch.randn(p.n, dtype=torch.float32) if p.bias else None
    out_dtype = getattr(torch, p.out_dtype)
    return GEMM.prepare(GemmArguments(a, b, bias, out_dtype, "auto", None, True, p.activation), plan)


def _rows(plan: Plan) -> Any:
    (arguments,) = random_arguments(plan.problem, 1, torch.get_default_device().type)
    return PATCH_EMBED.prepare(arguments, plan)


def _images(plan: Plan) -> Any:
    p: PatchEmbedImagesProblem = plan.problem
    weight = prepare_patch_weight(
        torch.randn(p.n, p.channels, p.patch, p.patch, dtype=torch.float32), precision=p.precision, channels=p.channels
    )
    shape = (p.batch, p.channels, p.height, p.width)
    raw = p.in_dtype == "uint8"
    images = torch.randint(0, 256, shape, dtype=torch.uint8) if raw else torch.randn(shape, dtype=torch.float32)
    if p.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    with_positions = p.table_rows > 1
    arguments = PatchEmbedImagesArguments(
        images=images.to(getattr(torch, p.in_dtype)),
        weight=weight.raw if raw else weight.normalised,
        weight_low=weight.raw_low,
        weight_scale=weight.scale,
        weight_offset=weight.offset if raw and p.table_rows else None,
        bias=torch.randn(p.n, dtype=torch.float32) if p.table_rows else None,
        pos_embed=torch.randn(p.positions, p.n, dtype=torch.float32) if with_positions else None,
        patch=p.patch,
        out_dtype=getattr(torch, p.out_dtype),
        backend="auto",
        config=None,
    )
    return PATCH_EMBED_IMAGES.prepare(arguments, plan)


_OF: dict[type, Callable[[Plan], Any]] = {
    GemmProblem: _gemm, PatchEmbedProblem: _rows, PatchEmbedImagesProblem: _images,
}  # fmt: skip
