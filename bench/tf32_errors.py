"""How far TF32 products are from exact ones, by how operands were rounded: a page of the documentation.

    python -m bench.tf32_errors > docs/tf32.md

Operands are normal numbers of both signs. The sums are those of ``mma.sync`` on sm_80, as the emulator has them, for a
block of the output: its errors are those of the whole one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
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
SHOWN = SIZES[::3]
"""Sizes of the table."""

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


def number(value: float) -> str:
    """With two digits: ``"7.7e-4"``, ``"0.035"``, ``"170"``."""
    if abs(value) >= 10:
        return f"{value:,.0f}"
    return re.sub(r"e([+-])0*(\d+)$", r"e\1\2", f"{value:.1e}") if abs(value) < 1e-3 else f"{value:.2g}"


def table() -> Iterator[str]:
    """The lines of the table."""
    yield "| rounding | size | largest | RMS | relative: median | 99% below | largest | shift | of bound |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for rounding in ROUNDINGS:
        for size in SHOWN:
            e = measure(size, rounding)
            numbers = (e.largest, e.rms, *e.relative, e.shift, e.of_bound)
            yield f"| {rounding} | {size:,} | {' | '.join(map(number, numbers))} |"


PAGE = """# Errors of TF32

`gemm(allow_tf32=True)` rounds both operands to TF32, to nearest and ties to even, on every GPU: each by 2^-11 of its
value at most. Products are exact, and sums are FP32's of tensor cores, which [cut](emulator/arithmetic.md) instead of
rounding. So every result is within `(2^-10 + 2^-22 + K * 2^-23) * (|a| @ |b|)` of the exact one, before bias and
activation, for operands and results of normal size. Nothing bounds the error relative to a single result, which may be
0 where large products cancel.

`Sm80GemmConfig(rounding=..)` has other roundings, of the kernels of `mma.sync` alone:

* `"truncate"` rounds nothing: the tensor core ignores 13 bits of both operands. 2^-9 stands in the place of
  2^-10 + 2^-22, and the error has a direction: results are closer to 0.
* `"nearest_a"` rounds `a` alone. With a `b` that is TF32 already it has the bits of `"nearest"`; with any other `b` the
  rounding is one-sided, with 2^-10 + 2^-11, and half as far toward 0.

A weight is rounded once by `cute_kernels.round_tf32`. That gives the same bits with every `rounding` but
`"truncate"`, and `"nearest_a"` saves the rounding of `b` in each call:

```python
import dataclasses

import torch
from cute_kernels import GemmProblem, gemm, round_tf32
from cute_kernels.plan import make_plan

x, weight = torch.randn(128, 768), torch.randn(768, 768)
problem = GemmProblem(128, 768, 768, in_dtype="float32", out_dtype="float32")
config = dataclasses.replace(make_plan(problem, arch="sm_80").config, rounding="nearest_a")
b = round_tf32(weight)  # once
y = gemm(x, b, allow_tf32=True, config=config)
```

Errors against FP64 of square matrices of normal numbers of deviation 1, in a block of 128 x 128 results, with the sums
of sm_80 (`python -m bench.tf32_errors` writes this page). RMS is in parts of the RMS of the results, relative errors
are those of single results, the shift is by how much results are too large (least squares), and the last column has the
largest error in parts of its bound.

{table}

Absolute errors grow with the square root of K, as results do, so that the RMS stays: 1 in 3,400 with `"nearest"`.
"""


def main() -> int:
    print(PAGE.format(table="\n".join(table())), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
