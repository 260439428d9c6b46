"""What an activation costs the dense GEMM: ours with and without GELU, beside cuBLASLt with its own GELU epilogue.

    python -m bench.gemm_activation                 # prints the table, on an SM90 or SM100 GPU

The linear layers of SigLIP's encoders in BF16 with a bias: qkv, out, fc1 and fc2 of base-p16 at 8 and 64 images, of
large-p16 at 64, of so400m-384 at 16. All four launches of a shape run in turn, in CUDA graphs; the median of the rounds
counts. Results of ours and cuBLAS's are compared before.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

from cute_kernels import gemm
from cute_kernels.tuning import search

SHAPES = [
    (images * positions, n, k)
    for images, positions, width, hidden in ((8, 196, 768, 3072), (64, 196, 768, 3072), (64, 256, 1024, 4096),
                                             (16, 729, 1152, 4304))
    for n, k in ((3 * width, width), (width, width), (hidden, width), (width, hidden))
]  # fmt: skip
"""M, N, K."""

OURS, OURS_GELU, CUBLAS, CUBLAS_GELU = "gemm", "gemm, gelu_tanh", "cuBLAS", "cuBLASLt, GELU epilogue"
_ROUNDS = 9
_TOLERANCE = 0.01  # of the norm: BF16 keeps 8 bits


def launches(m: int, n: int, k: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The four launches of a shape, on random normal operands."""
    torch.manual_seed(0)
    a, b, bias = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (n, k), (n,)))
    return {
        OURS: lambda: gemm(a, b, bias=bias),
        OURS_GELU: lambda: gemm(a, b, bias=bias, activation="gelu_tanh"),
        CUBLAS: lambda: torch.nn.functional.linear(a, b, bias),
        CUBLAS_GELU: lambda: torch._addmm_activation(bias, a, b.T, use_gelu=True),
    }


def check(runs: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Raises RuntimeError where ours and cuBLAS's differ by more than rounding."""
    for one, other in ((OURS, CUBLAS), (OURS_GELU, CUBLAS_GELU)):
        got, expected = runs[one]().double(), runs[other]().double()
        error = float((got - expected).norm() / expected.norm())
        if not error < _TOLERANCE:
            raise RuntimeError(f"{one} and {other} differ by {error:.2g} of the norm")


def main() -> int:
    """Returns 0, or 2 without a GPU."""
    if not torch.cuda.is_available():
        print("bench.gemm_activation: no CUDA device", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}: microseconds")
    print(f"| M x N x K | {OURS} | {OURS_GELU} | {CUBLAS} | {CUBLAS_GELU} |\n|---|---|---|---|---|")
    ratios: dict[str, list[float]] = {"ours with / without": [], "cuBLAS / ours": [], "both with GELU": []}
    for shape in SHAPES:
        runs = launches(*shape)
        check(runs)
        timers = {name: search.graph_timer(lambda _, __, run=run: run()) for name, run in runs.items()}
        times = {name: 1e3 * value for name, value in search.interleaved(timers, _ROUNDS).items()}
        cells = [" x ".join(map(str, shape)), *(f"{value:.1f}" for value in times.values())]
        print(f"| {' | '.join(cells)} |", flush=True)
        for name, over, under in zip(ratios, (OURS_GELU, CUBLAS, CUBLAS_GELU), (OURS, OURS, OURS_GELU)):
            ratios[name].append(times[over] / times[under])
    for name, values in ratios.items():
        mean = statistics.geometric_mean(values)
        print(f"{name}: {mean:.3f} geometric mean, {min(values):.2f} least, {max(values):.2f} most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
