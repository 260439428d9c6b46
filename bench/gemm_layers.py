"""The dense GEMM on the layers of vision towers: BF16, with GELU, with a residual, FP8 and INT8, beside cuBLAS.

    python -m bench.gemm_layers                     # prints the table, on an SM90 or SM100 GPU

The linear layers of SigLIP's encoders in BF16 with a bias: qkv, out, fc1 and fc2 of base-p16 at 8 and 64 images, of
large-p16 at 64, of so400m-384 at 16; and few rows. All launches of a shape run in turn, in CUDA graphs, back to back
and in bursts after a pause; the median of the rounds counts. cuBLAS is the faster of torch's linear and the best of
what cuBLASLt's heuristic proposes, which has no bias. Operands of 8 bits have a multiplier for each row and column and
no bias; cuBLAS's FP8 is the faster of `torch._scaled_mm` with fast accumulation and without. A residual is read beside,
by torch's addmm, which copies it first. Results are compared.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bench.compile_ahead import compile_all
from bench.configs import arch_of
from bench.peers.cublaslt import Matmul, Operand
from cute_kernels import gemm
from cute_kernels.config import GemmProblem
from cute_kernels.explore.tuning import search
from cute_kernels.plan import make_plan

SHAPES = [
    (images * positions, n, k)
    for images, positions, width, hidden in ((8, 196, 768, 3072), (64, 196, 768, 3072), (64, 256, 1024, 4096),
                                             (16, 729, 1152, 4304))
    for n, k in ((3 * width, width), (width, width), (hidden, width), (width, hidden))
]  # fmt: skip
"""M, N, K."""

FEW_ROWS = [(m, 4096, 4096) for m in (16, 32, 64)]

OURS, OURS_GELU, LINEAR, LINEAR_GELU = "gemm", "gemm, gelu_tanh", "torch linear", "cuBLASLt, GELU epilogue"
OURS_RESIDUAL, ADDMM = "gemm, residual", "torch addmm"
ALGORITHM = "cuBLASLt algorithm"
FP8, FP8_GELU, INT8, FP8_PEER = "gemm, FP8", "gemm, FP8, gelu_tanh to FP8", "gemm, INT8", "cuBLAS FP8"
_ALGORITHMS = 9
_ROUNDS = 21  # of five milliseconds: the power limit makes what follows a hungry launch slower, and orders differ
_BURSTS = 7
_BURST = 10
_PAUSE_S = 0.01
_TOLERANCE = 0.01  # of the norm: BF16 keeps 8 bits


def launches(m: int, n: int, k: int) -> dict[str, Callable[[int, int], object]]:
    """Launches of a shape by name, of the inputs with a number, on a stream's handle; random normal operands.

    As many inputs that a launch finds none of its own in L2.
    """
    torch.manual_seed(0)
    count = max(1, search.ROTATED_BYTES // (2 * (m * k + n * k + m * n)))
    rows = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    residuals = [torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in rows]
    b, bias = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((n, k), (n,)))
    runs: dict[str, Callable[[int, int], object]] = {
        OURS: lambda i, _: gemm(rows[i % count], b, bias=bias),
        OURS_GELU: lambda i, _: gemm(rows[i % count], b, bias=bias, activation="gelu_tanh"),
        LINEAR: lambda i, _: torch.nn.functional.linear(rows[i % count], b, bias),
        OURS_RESIDUAL: lambda i, _: gemm(rows[i % count], b, residual=residuals[i % count]),
        ADDMM: lambda i, _: torch.addmm(residuals[i % count], rows[i % count], b.T),
        LINEAR_GELU: lambda i, _: torch._addmm_activation(bias, rows[i % count], b.T, use_gelu=True),
    }
    narrow = [each.to(torch.float8_e4m3fn) for each in (*rows, *(torch.randn_like(each) for each in rows))]
    whole = [torch.randint(-128, 128, (m, k), device="cuda", dtype=torch.int8) for _ in narrow]
    scales = {"scale_a": torch.rand(m, 1, device="cuda") + 0.5, "scale_b": torch.rand(1, n, device="cuda") + 0.5}
    narrow_b, whole_b = b.to(torch.float8_e4m3fn), torch.randint(-128, 128, (n, k), device="cuda", dtype=torch.int8)
    to_fp8 = {"activation": "gelu_tanh", "out_dtype": torch.float8_e4m3fn}
    runs |= {
        FP8: lambda i, _: gemm(narrow[i % len(narrow)], narrow_b, **scales),
        FP8_GELU: lambda i, _: gemm(narrow[i % len(narrow)], narrow_b, **scales, **to_fp8),
        INT8: lambda i, _: gemm(whole[i % len(whole)], whole_b, **scales),
    }
    for fast in (True, False):
        runs[f"{FP8_PEER} {fast}"] = lambda i, _, fast=fast: torch._scaled_mm(
            narrow[i % len(narrow)], narrow_b.T, **scales, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    operands = Operand(k, n, k, 0), Operand(k, m, k, 0), Operand(n, m, n, 0)
    matmul = Matmul(*operands, batch=1, alpha=1.0, device=torch.cuda.current_device(), kind="bf16")
    for number, algorithm in enumerate(matmul.algorithms(_ALGORITHMS)):
        runs[f"{ALGORITHM} {number}"] = lambda i, _, algorithm=algorithm: matmul.run(
            algorithm, b.data_ptr(), rows[i % count].data_ptr(), out.data_ptr(), out.data_ptr()
        )
    return runs


def problems(m: int, n: int, k: int) -> list[GemmProblem]:
    """The problems of the launches of ours that `launches` has."""
    plain = GemmProblem(m, n, k, bias=True, bias_dtype="bfloat16")
    scaled = GemmProblem(m, n, k, in_dtype="float8_e4m3fn", row_scale=True, column_scale=True)
    gelu: dict[str, Any] = {"activation": "gelu_tanh"}
    return [
        plain,
        replace(plain, **gelu),
        GemmProblem(m, n, k, residual="bfloat16"),
        scaled,
        replace(scaled, out_dtype="float8_e4m3fn", **gelu),
        replace(scaled, in_dtype="int8"),
    ]


def check(runs: dict[str, Callable[[int, int], object]]) -> None:
    """Raises RuntimeError where ours and cuBLAS's differ by more than rounding."""
    pairs = (OURS, LINEAR), (OURS_GELU, LINEAR_GELU), (OURS_RESIDUAL, ADDMM), (FP8, f"{FP8_PEER} False")
    for one, other in pairs:
        got, expected = runs[one](0, 0).double(), runs[other](0, 0).double()
        error = float((got - expected).norm() / expected.norm())
        if not error < _TOLERANCE:
            raise RuntimeError(f"{one} and {other} differ by {error:.2g} of the norm")


def bursts(timers: dict[str, search.Timer]) -> dict[str, float]:
    """Median milliseconds after a pause, in turn."""

    def rested(timer: search.Timer) -> float:
        time.sleep(_PAUSE_S)
        return timer()

    return search.interleaved({name: functools.partial(rested, timer) for name, timer in timers.items()}, _BURSTS)


def microseconds(shape: tuple[int, int, int]) -> dict[str, dict[str, float]]:
    """Back to back and in bursts: times of ours, of cuBLAS and of both with GELU."""
    runs = launches(*shape)
    check(runs)
    for run in runs.values():
        run(0, 0)
    found = {}
    sustained = {name: search.graph_timer(run) for name, run in runs.items()}
    burst = {name: search.replay_timer(run, _BURST) for name, run in runs.items()}
    for mode, times in (("sustained", search.interleaved(sustained, _ROUNDS)), ("burst", bursts(burst))):
        cublas = min(value for name, value in times.items() if name == LINEAR or name.startswith(ALGORITHM))
        named = {OURS: times[OURS], OURS_GELU: times[OURS_GELU], "cuBLAS": cublas, LINEAR_GELU: times[LINEAR_GELU]}
        named |= {name: times[name] for name in (OURS_RESIDUAL, ADDMM, FP8, FP8_GELU, INT8)}
        named[FP8_PEER] = min(value for name, value in times.items() if name.startswith(FP8_PEER))
        found[mode] = {name: 1e3 * value for name, value in named.items()}
    return found


RATIOS = (
    ("cuBLAS / ours", "cuBLAS", OURS),
    ("cuBLASLt with GELU / ours with GELU", LINEAR_GELU, OURS_GELU),
    ("ours with GELU / without", OURS_GELU, OURS),
    ("ours with a residual / without", OURS_RESIDUAL, OURS),
    ("torch addmm / ours with a residual", ADDMM, OURS_RESIDUAL),
    ("cuBLAS FP8 / ours", FP8_PEER, FP8),
    ("cuBLAS FP8 / our INT8", FP8_PEER, INT8),
    ("our FP8 with GELU, to FP8 / without", FP8_GELU, FP8),
)


def main() -> int:
    """Returns 0, or 2 without a GPU."""
    if not torch.cuda.is_available():
        print("bench.gemm_layers: no CUDA device", file=sys.stderr)
        return 2
    arch = arch_of(torch.cuda.get_device_capability())
    compile_all(make_plan(problem, arch=arch) for shape in SHAPES + FEW_ROWS for problem in problems(*shape))
    print(f"{torch.cuda.get_device_name()}: microseconds back to back / in a burst")
    names = OURS, OURS_GELU, "cuBLAS", LINEAR_GELU, OURS_RESIDUAL, ADDMM, FP8, FP8_GELU, INT8, FP8_PEER
    print(f"| M x N x K | {' | '.join(names)} |\n{'|---' * (len(names) + 1)}|")
    ratios: dict[tuple[str, str], list[float]] = {}
    for shape in SHAPES + FEW_ROWS:
        times = microseconds(shape)
        cells = [f"{value:.1f} / {times['burst'][name]:.1f}" for name, value in times["sustained"].items()]
        print(f"| {' | '.join([' x '.join(map(str, shape)), *cells])} |", flush=True)
        for mode, values in times.items():
            for title, over, under in RATIOS:
                part = title if shape in SHAPES else f"few rows, {title}"
                ratios.setdefault((mode, part), []).append(values[over] / values[under])
        torch.cuda.empty_cache()
    for (mode, title), values in ratios.items():
        mean = statistics.geometric_mean(values)
        print(f"{mode}, {title}: {mean:.3f} geometric mean, {min(values):.2f} least, {max(values):.2f} most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
