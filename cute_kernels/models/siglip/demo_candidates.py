"""The ways from pixels to embeddings that the demo compares: one per precision, with its kernel if there is one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cute_kernels.config import PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.models.siglip import PatchEmbedding
from cute_kernels.operations import reference
from cute_kernels.operations.base import Operation
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES
from cute_kernels.operations.patch_weight import prepare_patch_weight
from cute_kernels.operations.runtime import emulated
from cute_kernels.plan import Plan, make_plan

PRECISIONS = ("int8", "fp8", "bf16")

SMALLEST = {
    "int8": PatchEmbedImagesProblem(1, 3, 16, 16, 16, 8, table_rows=1),
    "fp8": PatchEmbedProblem(m=1, n=8, k=16),
    "bf16": PatchEmbedImagesProblem(1, 3, 16, 64, 16, 8, "bfloat16", precision="bf16", table_rows=1),
}
"""Problems that allow the most of a configuration."""


@dataclass(frozen=True)
class Candidate:
    """One precision, given the photographs and the model: ``pixels`` is what it reads, for people."""

    precision: str
    pixels: str
    operation: Operation
    arguments: Any

    def reference(self) -> torch.Tensor:
        """``[B, S, N]`` by the contract of the operation, in plain torch."""
        self.operation.check(self.arguments)
        return self.operation.reference(self.arguments)

    def plan(self, config: Any, arch: str) -> Plan | str:
        """The plan, or why there is no kernel. Raises ValueError: the configuration is not legal."""
        problem = self.operation.problem(self.arguments)
        try:
            plan = make_plan(problem, None, arch)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        return plan if config is None else make_plan(problem, config, arch)

    def emulate(
        self, plan: Plan, trace: Path | None, progress: Callable[[int, int], None]
    ) -> tuple[torch.Tensor, str]:
        """Result of the kernel in the emulator, with the reference's exact sums, and a remark on that."""
        prepared = self.operation.prepare(self.arguments, plan)
        options = emulated.emulator.Options(trace=trace, arithmetic="exact", progress=progress)
        report = emulated.launch(prepared.plan, prepared.operands, options)
        done = f"{report.warp_instructions:,} warp instructions of {report.clusters} clusters in {report.seconds:.1f} s"
        if len(plan.launches) > 1:
            done += f" (by the last of {len(plan.launches)} kernels)"
        return prepared.result(), done


def make_candidate(precision: str, raw: torch.Tensor, model: PatchEmbedding) -> Candidate:
    """The operation and its arguments for uint8 images ``[B, 3, H, W]``."""
    if precision == "fp8":
        return _rows_in_fp8(raw, model)
    side = model.grid * model.patch_size
    normalisation = {"mean": model.preprocessing.mean, "std": model.preprocessing.std}
    weight = prepare_patch_weight(model.weight, precision=precision, **normalisation)
    arguments = PATCH_EMBED_IMAGES.given(
        images=raw[:, :, :side, :side].contiguous(),
        weight=weight.raw,
        weight_scale=weight.scale,
        weight_offset=weight.offset,
        bias=model.bias,
        pos_embed=model.pos_embed,
        patch=model.patch_size,
        out_dtype=torch.bfloat16,
    )
    return Candidate(precision, "uint8 images", PATCH_EMBED_IMAGES, arguments)


def _rows_in_fp8(raw: torch.Tensor, model: PatchEmbedding) -> Candidate:
    """Images normalised and laid out as rows in FP32, which is what a program without `patch_embed_images` does."""
    side = model.grid * model.patch_size
    pixels = model.preprocessing.normalised(raw)[:, :, :side, :side]
    rows = reference.patch_rows(pixels, model.patch_size).unflatten(0, (raw.shape[0], -1))
    (x, scale_a), (weight, scale_b) = _e4m3(rows), _e4m3(model.weight.flatten(1))
    arguments = PATCH_EMBED.given(
        x=x, weight=weight, bias=model.bias, pos_embed=model.pos_embed, scale_a=scale_a, scale_b=scale_b
    )
    return Candidate("fp8", "E4M3 rows", PATCH_EMBED, arguments)


def _e4m3(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Values and their one multiplier, with which the largest magnitude is 448."""
    scale = float(tensor.abs().amax()) / 448
    return (tensor / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
