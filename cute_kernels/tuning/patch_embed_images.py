"""Timings of the patch embedding of images, of kernels that read them and of those behind a pass over them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from cute_kernels.config import PatchEmbedImagesProblem
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES, PatchEmbedImagesArguments
from cute_kernels.operations.patch_weight import prepare_patch_weight
from cute_kernels.plan import ImagesPlan
from cute_kernels.plan.images_chain import RowsChainPlan
from cute_kernels.runtime.gpu import bound_launch
from cute_kernels.runtime.operands import Operands
from cute_kernels.tuning import search

AnyPlan: TypeAlias = "ImagesPlan | RowsChainPlan"


def random_arguments(problem: PatchEmbedImagesProblem, device: str = "cuda") -> PatchEmbedImagesArguments:
    """Arguments of a call that has this problem, its configuration left open."""
    normal = functools.partial(torch.randn, dtype=torch.float32, device=device)
    kernel = normal(problem.n, problem.channels, problem.patch, problem.patch) * 0.02
    held = prepare_patch_weight(kernel, precision=problem.precision)._buffers
    raw, table = problem.in_dtype == "uint8", problem.table_rows
    return PatchEmbedImagesArguments(
        images=_images(problem, device),
        weight=held["raw"] if raw else held["normalised"],
        weight_low=held["raw_low"],
        weight_scale=held["scale"],
        weight_offset=held["offset"] if raw and table else None,
        bias=normal(problem.n) if table == 1 else None,
        pos_embed=normal(table, problem.n) if table > 1 else None,
        patch=problem.patch,
        out_dtype=getattr(torch, problem.out_dtype),
        backend="auto",
        config=None,
    )


def _images(problem: PatchEmbedImagesProblem, device: str) -> torch.Tensor:
    shape = (problem.batch, problem.channels, problem.height, problem.width)
    if problem.in_dtype == "uint8":
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    else:
        images = torch.randn(shape, dtype=torch.float32, device=device).to(getattr(torch, problem.in_dtype))
    return images.contiguous(memory_format=torch.channels_last) if problem.channels_last else images


def images_timers(
    problem: PatchEmbedImagesProblem, plans: Sequence[AnyPlan], device: str = "cuda"
) -> dict[AnyPlan, search.Timer]:
    """A timer for every plan, after its result was compared with that of the first one.

    Args:
        problem: that of the plans.
        plans: for the current device. Of a pass and the kernel behind it both are timed, as one launch.
        device: where tensors lie.

    Raises:
        RuntimeError: a plan computes something else.
    """
    if not plans:
        return {}
    given = random_arguments(problem, device)
    shape, dtype = PATCH_EMBED_IMAGES.output_shape(given), given.out_dtype
    nbytes = given.images.nbytes + given.weight.nbytes + problem.batch * problem.positions * problem.n * dtype.itemsize
    sets = max(1, -(-search.ROTATED_BYTES // nbytes))
    inputs = [given.images, *(_images(problem, device) for _ in range(sets - 1))]
    outputs = [torch.empty(shape, dtype=dtype, device=device) for _ in inputs]

    def prepare(plan: AnyPlan) -> tuple[Callable[[int, int], None], torch.Tensor]:
        operands = PATCH_EMBED_IMAGES.prepare(given, plan).operands
        slots = [
            operands.replace(images=images, out=out.view(operands.out.shape)) for images, out in zip(inputs, outputs)
        ]
        calls = [calls_of(plan, slot) for slot in slots]

        def launch(i: int, stream: int, calls=calls, slots=slots) -> None:  # slots: calls have addresses only
            for call in calls[i % len(slots)]:
                call(stream)

        return launch, outputs[0]

    return search.checked_timers(plans, prepare)


def calls_of(plan: AnyPlan, operands: Operands) -> list[Callable[[int], None]]:
    """The launches of a plan's kernels in turn, each a function of the stream's handle.

    ``operands`` has to live as long as these.
    """
    return [
        bound_launch(kernel).with_constants(("stream",), **operands.of(kernel).addresses())
        for kernel in plan.launches
    ]
