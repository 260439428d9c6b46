"""NVIDIA's GEMM kernels in CuTe DSL against torch: a program for a GPU, and for ``cute-kernels emulate``.

    pip install nvidia-cutlass-operators==0.3.0
    cute-kernels emulate --arch sm_100a tests/public_programs/nvidia_operators.py persistent

The kernels are those of the package's ``providers/cutedsl/gemm``, which stem from the examples of CUTLASS. Of each kind
the program takes a few of its configurations. The operands are small integers: every sum is one that FP16 has, whatever
the order of additions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cutlass.operators as nvidia
import torch
from comparison import Comparison, main

M, N, K = 192, 320, 320
"""No multiples of most tiles."""

CONFIGURATIONS = 3
TARGETS = {(8, 0): "80", (9, 0): "90a", (10, 0): "100a"}


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).to(torch.float16).cuda()


def spread(items: list[Any], count: int) -> list[Any]:
    """The first, the last and what lies evenly in between."""
    last = len(items) - 1
    return [items[place] for place in dict.fromkeys(last * n // (count - 1) for n in range(count))]


def run(kind: str, to: Comparison) -> None:
    """Some configurations of a class of operators."""
    a, b = integers(M, K), integers(K, N)
    expected = a.cpu().double() @ b.cpu().double()
    out = torch.empty(M, N, dtype=torch.float16, device="cuda")
    arguments = nvidia.GemmArguments(A=a, B=b, out=out, accumulator_type=torch.float32)
    target = TARGETS[torch.cuda.get_device_capability()]
    found = [o for o in nvidia.get_operators(arguments, target_sm=target) if type(o).__name__ == kind]
    if not found:
        raise SystemExit(f"no {kind} for sm_{target}")
    found.sort(key=lambda operator: operator.metadata.operator_name)
    for operator in spread(found, CONFIGURATIONS):
        out.fill_(torch.nan)
        operator.run(arguments)
        to.equal(operator.metadata.operator_name.split("outFloat16_accFloat32_")[-1], out, expected)


OPERATORS: dict[str, Callable[[Comparison], None]] = {
    name: functools.partial(run, kind)
    for name, kind in {
        "tensorop": "Sm80TensorOpGemmOperator",
        "static-persistent": "Sm90StaticPersistentGemmOperator",
        "persistent": "PersistentDenseGemmOperator",
        "fused-epilogue": "PersistentDenseGemmEFCOperator",
    }.items()
}


if __name__ == "__main__":
    main(__doc__, OPERATORS)
