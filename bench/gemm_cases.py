"""Sizes of the dense GEMM that are measured, their random inputs, and the check of every peer."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from bench.cases import ROTATED_BYTES, Check

SQUARES = (1024, 2048, 4096, 6144, 8192, 10240, 12288)

LAYERS: dict[str, tuple[int, int, int]] = {
    # Positions, width, hidden width of the MLP of SigLIP2's vision encoders.
    "base-p16": (196, 768, 3072),
    "so400m-p16": (256, 1152, 4304),
}
BATCHES = (64, 4736)

DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32}
"""What is multiplied, and the torch type that holds it and the result."""

_CHECK_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class GemmCase:
    """``[m, k] x [n, k]^T`` of BF16 values, BF16 output; or of FP32 values, multiplied as TF32, FP32 output.

    ``dtype`` is a key of `DTYPES`.
    """

    name: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"

    @property
    def title(self) -> str:
        """One line that says what was measured."""
        shapes = f"[{self.m}, {self.k}] x [{self.n}, {self.k}]^T"
        return f"{self.name}: {shapes}, {self.dtype.upper()}, {self.slots} input sets"

    @property
    def reduced(self) -> bool:
        """Sizes are never changed to fit a device."""
        return False

    @property
    def bytes(self) -> int:
        """Fewest bytes through device memory: every input read once, every output written once."""
        return DTYPES[self.dtype].itemsize * (self.m * self.k + self.n * self.k + self.m * self.n)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def slots(self) -> int:
        """Input sets to rotate among."""
        return max(1, -(-ROTATED_BYTES // self.bytes))


def squares(sizes: tuple[int, ...] = SQUARES) -> list[GemmCase]:
    return [GemmCase(str(size), size, size, size) for size in sizes]


def siglip2(batches: tuple[int, ...] = BATCHES) -> list[GemmCase]:
    """The linear layers of SigLIP2's vision encoders: attention projections, both layers of the MLP."""
    cases = []
    for images in batches:
        for model, (positions, width, hidden) in LAYERS.items():
            for n, k in ((width, width), (hidden, width), (width, hidden)):
                cases.append(GemmCase(f"{model} {n}x{k}, {images} images", images * positions, n, k))
    return cases


class GemmData:
    """Random normal inputs of a case on one device.

    Attributes:
        a: one ``[m, k]`` tensor of the case's type per slot. b: ``[n, k]``.
        out: one ``[m, n]`` tensor per slot, for the peers that write into a given output.
    """

    def __init__(self, case: GemmCase, device: torch.device, seed: int = 0) -> None:
        self.case, self.device = case, device
        generator = torch.Generator(device).manual_seed(seed)
        dtype = DTYPES[case.dtype]
        normal = functools.partial(torch.randn, generator=generator, device=device, dtype=dtype)
        self.a = [normal(case.m, case.k) for _ in range(case.slots)]
        self.b = normal(case.n, case.k)
        self.out = [torch.empty(case.m, case.n, dtype=dtype, device=device) for _ in range(case.slots)]

    def poison(self) -> None:
        """NaN into the output of slot 0 and into the block that the allocator hands out next for an output."""
        self.out[0].fill_(float("nan"))
        torch.full_like(self.out[0], float("nan"))

    def check(self, out: torch.Tensor, *, with_table: bool = True) -> Check:
        """Every element of the output of slot 0 against FP64; ``with_table`` has no meaning here.

        Raises:
            ValueError: wrong shape or element type.
        """
        dtype, shape = DTYPES[self.case.dtype], (self.case.m, self.case.n)
        if out.dtype != dtype or tuple(out.shape) != shape:
            raise ValueError(f"output {out.dtype} {list(out.shape)}, expected {dtype} {list(shape)}")
        b = self.b.double().T
        worst, total, norm, unwritten = (torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(4))
        step = max(1, _CHECK_ELEMENTS // max(self.case.n, self.case.k))
        for start in range(0, self.case.m, step):
            reference = self.a[0][start : start + step].double() @ b
            part = out[start : start + step].double()
            squares_, scale = (part - reference).square().sum(1), reference.square().sum(1)
            worst = torch.maximum(worst, (squares_ / scale).max().sqrt())
            total, norm, unwritten = total + squares_.sum(), norm + scale.sum(), unwritten + part.isnan().sum()
        return Check(float(worst), float((total / norm).sqrt()), int(unwritten))
