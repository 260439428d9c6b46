"""What torch offers: the product (of E4M3 `torch._scaled_mm`, with fast accumulation) and an add, and a copy."""

from __future__ import annotations

import torch

from bench.cases import CaseData
from bench.peers import Candidate


def _gemm(data: CaseData):
    if not data.case.fp8:
        return lambda x, out=None: torch.mm(x, data.weight.t(), out=out)
    # Scales are device tensors in this interface; bias + position goes into the add, so that the product has one pass.
    scale = torch.tensor(data.scale, device=data.device)
    one = torch.ones((), device=data.device)
    weight = data.weight.t()

    def gemm(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch._scaled_mm(
            x, weight, scale_a=scale, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True, out=out
        )

    return gemm


def build_gemm(data: CaseData) -> Candidate:
    """The product alone."""
    gemm = _gemm(data)
    return Candidate(lambda slot: gemm(data.x[slot], data.out[slot]))


def build_eager(data: CaseData) -> Candidate:
    """The product, then a broadcast add of the BF16 table in place: two passes over the output."""
    gemm, case, table = _gemm(data), data.case, data.table_bf16

    def launch(slot: int) -> torch.Tensor:
        out = gemm(data.x[slot], data.out[slot])
        return out.view(case.images, case.positions, case.n).add_(table)

    return Candidate(launch, "table in BF16")


def build_compiled(data: CaseData) -> Candidate:
    """The same expression under `torch.compile`, sizes compiled in."""
    case = data.case
    scale, one = torch.tensor(data.scale, device=data.device), torch.ones((), device=data.device)

    def product_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not case.fp8:
            return x @ weight.t()
        return torch._scaled_mm(
            x, weight.t(), scale_a=scale, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def expression(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        product = product_of(x, weight)
        return product.view(case.images, case.positions, case.n) + (bias + pos)

    torch._dynamo.reset()
    compiled = torch.compile(expression, fullgraph=True, dynamic=False)

    def launch(slot: int) -> torch.Tensor:
        return compiled(data.x[slot], data.weight, data.bias, data.pos)

    return Candidate(launch, "default mode")


def build_copy(data: CaseData) -> Candidate:
    """Device-to-device copy that reads and writes, together, as many bytes as the kernel must."""
    half = data.case.bytes // 2
    raw = [torch.empty(2 * half, dtype=torch.uint8, device=data.device).random_() for _ in range(data.case.slots)]

    def launch(slot: int) -> torch.Tensor:
        return raw[slot][half:].copy_(raw[slot][:half])

    return Candidate(launch, f"{data.case.bytes / 1e6:.0f} MB read + written")
