"""How far TF32 products are from exact ones, by how operands were rounded.

Operands are normal numbers of both signs. The sums are those of ``mma.sync`` on sm_80, as the emulator has them, for a
block of the output: its errors are those of the whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.machine.units.matrix.operands import TF32
from cute_kernels.emulator.machine.units.matrix.products import Kind, multiply_rows
from cute_kernels.operations.reference.rounding import round_tf32

BLOCK = 128
"""Rows and columns of the output that are looked at."""

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
_STEP = 8  # elements of K in an mma.sync


def cut_tf32(values: torch.Tensor) -> torch.Tensor:
    """FP32 numbers without their last 13 bits, which the tensor core does not read."""
    return values.view(torch.int32).bitwise_and(~0x1FFF).view(torch.float32)


Rounding = Callable[[torch.Tensor], torch.Tensor]
ROUNDINGS: dict[str, tuple[Rounding, Rounding, float]] = {
    "truncate": (cut_tf32, cut_tf32, 2**-9),
    "one-sided": (round_tf32, cut_tf32, 2**-10 + 2**-11),
    "nearest": (round_tf32, round_tf32, 2**-10 + 2**-22),
}
"""What becomes of ``a`` and of ``b``, and by what part of ``|a| @ |b|`` a product is wrong then, at most."""


def bound(rounding: str, k: int) -> float:
    """The largest error of a result, in parts of ``|a| @ |b|``.

    A step of four products and a sum cuts five terms and the result: less than 7 units of 2^-24 in K / 4 steps on
    sm_80, 6.5 in K / 8 on sm_90 and sm_120.
    """
    return ROUNDINGS[rounding][2] + k * 2**-23


def product(a: torch.Tensor, b: torch.Tensor, target: str) -> torch.Tensor:
    """``a @ b.T`` of FP32 ``[128 at most, K]``, added by the ``mma.sync`` of a target, which cuts what is not TF32."""
    sums = Arithmetic("silicon", target).sums("mma", TF32.name, "f32")
    cells = np.zeros((1, len(b), len(a)), np.uint32)
    steps = (tensor.split(_STEP, dim=1) for tensor in (a, b))
    for parts in zip(*steps, strict=True):
        rows = (part.contiguous().numpy().view(np.uint8)[None] for part in parts)
        multiply_rows(*rows, cells, (Kind(TF32), Kind(TF32)), "f32", add=True, sums=sums)
    return torch.from_numpy(cells[0].view(np.float32)).T


def operands(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's rows of ``a`` and of ``b``, ``[BLOCK, size]``."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(BLOCK, size, generator=generator), torch.randn(BLOCK, size, generator=generator)


@dataclass(frozen=True)
class Errors:
    """Errors of a block against FP64.

    Attributes:
        largest: absolute.
        rms: in parts of the RMS of the results.
        relative: of single results: the median, what 99 of 100 are below, the largest one.
        shift: by what part results are larger than exact ones (smaller: below 0), by least squares.
        of_bound: the largest one, in parts of its bound.
    """

    largest: float
    rms: float
    relative: tuple[float, float, float]
    shift: float
    of_bound: float


def measure(size: int, rounding: str, target: str = "sm_80") -> Errors:
    """Errors for square matrices of this size, rounded as `ROUNDINGS` says."""
    a, b = operands(size)
    of_a, of_b, _ = ROUNDINGS[rounding]
    exact = a.double() @ b.double().T
    error = product(of_a(a), of_b(b), target).double() - exact
    relative = (error / exact).abs().flatten()
    limits = bound(rounding, size) * (a.double().abs() @ b.double().abs().T)
    return Errors(
        largest=error.abs().max().item(),
        rms=(error.square().mean() / exact.square().mean()).sqrt().item(),
        relative=(relative.median().item(), relative.quantile(0.99).item(), relative.max().item()),
        shift=((error * exact).sum() / exact.square().sum()).item(),
        of_bound=(error.abs() / limits).max().item(),
    )
