"""cuBLASLt, called directly: the best of many algorithms of its heuristic, for three ways of writing the problem.

cuBLASLt is column-major, so the row-major output ``[rows, N]`` is ``D^T = W x^T``: the weight is operand A (transposed,
as FP8 needs it), the patches are B, and a bias vector has one value per row of D^T, that is, per output feature.
"""

from __future__ import annotations

import torch

from bench.cases import CaseData
from bench.peers import Candidate, PeerUnavailable
from bench.peers.cublaslt import CublasError, Matmul, Operand
from bench.timing import elapsed_ms, fastest

REQUESTED = 32
"""Algorithms asked of the heuristic; all that it returns are timed."""


def build_position_major(data: CaseData) -> Candidate:
    """Batch = positions: consecutive images are S * K elements apart, and each batch has its own bias vector (BF16)."""
    case = data.case
    matmul = Matmul(
        a=Operand(case.k, case.n, case.k, 0),
        b=Operand(case.k, case.images, case.positions * case.k, case.k),
        d=Operand(case.n, case.images, case.positions * case.n, case.n),
        batch=case.positions, alpha=data.scale, device=_index(data), bias=data.table_bf16,
    )  # fmt: skip
    return _best(data, matmul, None)


def build_image_major(data: CaseData) -> Candidate:
    """Batch = images, and the BF16 table is operand C of every batch (stride 0, beta = 1)."""
    case = data.case
    matmul = Matmul(
        a=Operand(case.k, case.n, case.k, 0),
        b=Operand(case.k, case.positions, case.k, case.positions * case.k),
        d=Operand(case.n, case.positions, case.n, case.positions * case.n),
        c=Operand(case.n, case.positions, case.n, 0),
        batch=case.images, alpha=data.scale, device=_index(data),
    )  # fmt: skip
    return _best(data, matmul, data.table_bf16)


def build_gemm(data: CaseData) -> Candidate:
    """The product alone, flat."""
    case = data.case
    matmul = Matmul(
        a=Operand(case.k, case.n, case.k, 0),
        b=Operand(case.k, case.rows, case.k, 0),
        d=Operand(case.n, case.rows, case.n, 0),
        batch=1, alpha=data.scale, device=_index(data),
    )  # fmt: skip
    return _best(data, matmul, None)


def _index(data: CaseData) -> int:
    return torch.cuda.current_device() if data.device.index is None else data.device.index


def _best(data: CaseData, matmul: Matmul, c: torch.Tensor | None) -> Candidate:
    try:
        algorithms = matmul.algorithms(REQUESTED)
    except CublasError as error:
        raise PeerUnavailable(str(error)) from error

    def launcher(algorithm):
        addresses = [
            (data.weight.data_ptr(), x.data_ptr(), out.data_ptr() if c is None else c.data_ptr(), out.data_ptr())
            for x, out in zip(data.x, data.out, strict=True)
        ]

        def launch(slot: int) -> torch.Tensor:
            matmul.run(algorithm, *addresses[slot])
            return data.out[slot]

        return launch

    candidates = {}
    for index, algorithm in enumerate(algorithms):
        launch = launcher(algorithm)
        try:
            elapsed_ms(launch, 1, 1)
        except CublasError:
            continue
        candidates[f"algorithm {index + 1} of {len(algorithms)}"] = launch
    if not candidates:
        raise PeerUnavailable(f"none of {len(algorithms)} algorithms runs")
    best = fastest(candidates, data.case.slots)
    return Candidate(candidates[best], best)
