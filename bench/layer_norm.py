"""LayerNorm of uint8 rows and the linear layer behind it, Gemma 4 Unified's first, beside compiled torch.

    python -m bench.layer_norm                      # prints the table, on a GPU

280 rows of 6,912 pixels for each image, and a Linear(6912, 3840) in bfloat16. "library" is the model's own: LayerNorm
and linear layer of bfloat16 pixels, which its processor made, compiled together; "library, uint8" begins with uint8
rows and divides them by 255. Launches run in turn, in CUDA graphs; the median of the rounds counts. First, results are
compared with those of the reference on the CPU, bit for bit, and with FP64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from bench.compile_ahead import compile_all
from bench.configs import arch_of
from cute_kernels import layer_norm_linear, prepare_layer_norm_weight
from cute_kernels.config import GemmProblem
from cute_kernels.explore.tuning import search
from cute_kernels.operations.layer_norm import LayerNormWeight
from cute_kernels.plan import ARCHS, make_plan
from cute_kernels.plan.layer_norm import LayerNormScaleProblem, plan_layer_norm_scale

IMAGES = (1, 8, 32)
ROWS, K, N = 280, 6912, 3840
LIBRARY, LIBRARY_RAW, INT8, SCALE = "library", "library, uint8", "int8", "of it, the pass over rows"
_ROUNDS = 9
_COMPARED = 280


def parameters() -> list[torch.Tensor]:
    """Weight and bias of the layer and of the norm, bfloat16, on the CPU."""
    torch.manual_seed(0)
    shapes = ((N, K), 0.02, 0.0), ((N,), 0.1, 0.0), ((K,), 0.2, 1.0), ((K,), 0.1, 0.0)
    return [(torch.randn(*shape) * deviation + mean).bfloat16() for shape, deviation, mean in shapes]


def library(pixels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *norm: torch.Tensor) -> torch.Tensor:
    """The model's own."""
    return torch.nn.functional.linear(torch.nn.functional.layer_norm(pixels, (pixels.shape[-1],), *norm), weight, bias)


def library_raw(pixels: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    """The model's own, behind its processor's arithmetic."""
    return library((pixels.float() / 255).to(given[0].dtype), *given)


def compared(given: list[torch.Tensor]) -> LayerNormWeight:
    """The prepared weight on the GPU.

    Raises:
        RuntimeError: another result than on the CPU.
    """
    rows = torch.randint(0, 256, (_COMPARED, K), dtype=torch.uint8)
    rows[: _COMPARED // 2] = rows[: _COMPARED // 2] // 32 + 180  # of low contrast
    rows[0], rows[1] = 77, 0
    on_gpu = [tensor.cuda() for tensor in given]
    wide = [tensor.double() for tensor in on_gpu]
    expected = library(rows.cuda().double() / 255, *wide)
    host, weight = prepare_layer_norm_weight(*given), prepare_layer_norm_weight(*on_gpu)
    if not torch.equal(weight.values.cpu(), host.values) or not torch.equal(weight.scale.cpu(), host.scale):
        raise RuntimeError("the weight is another one than on the CPU")
    out = layer_norm_linear(rows.cuda(), weight)
    if not torch.equal(out.cpu(), layer_norm_linear(rows, host)):
        raise RuntimeError("other bits than on the CPU")
    print(f"int8: bits as on the CPU, error {_error(out, expected):.2e}")
    print(f"library: error {_error(library_raw(rows.cuda(), *on_gpu), expected):.2e}")
    return weight


def _error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def launches(
    m: int, given: list[torch.Tensor], weight: LayerNormWeight
) -> dict[str, Callable[[int, int], object]]:
    """Launches by name, of the inputs with a number; as many inputs that a launch finds none of its own in L2."""
    count = max(1, search.ROTATED_BYTES // (m * K))
    rows = [torch.randint(0, 256, (m, K), device="cuda", dtype=torch.uint8) for _ in range(count)]
    pixels = [(each.float() / 255).bfloat16() for each in rows]
    plain, raw = torch.compile(library, dynamic=False), torch.compile(library_raw, dynamic=False)
    arch = arch_of(torch.cuda.get_device_capability())
    return {
        LIBRARY: lambda i, _: plain(pixels[i % count], *given),
        LIBRARY_RAW: lambda i, _: raw(rows[i % count], *given),
        INT8: lambda i, _: layer_norm_linear(rows[i % count], weight),
        SCALE: lambda i, _: torch.ops.cute_kernels.layer_norm_scale(rows[i % count], weight.eps, "auto", arch),
    }


def main() -> int:
    """Returns 0, or 2 without a GPU."""
    if not torch.cuda.is_available():
        print("bench.layer_norm: no CUDA device", file=sys.stderr)
        return 2
    arch = arch_of(torch.cuda.get_device_capability())
    sizes = [_COMPARED, *(images * ROWS for images in IMAGES)]
    scaled = {"in_dtype": "uint8", "row_scale": True, "column_scale": True}
    problems = [GemmProblem(m, N, K, **scaled, bias=True) for m in sizes]
    plans = [make_plan(problem, arch=arch) for problem in problems]
    compile_all([*plans, plan_layer_norm_scale(LayerNormScaleProblem(_COMPARED, K), ARCHS[arch])])
    given = parameters()
    weight = compared(given)
    given = [tensor.cuda() for tensor in given]
    names = LIBRARY, LIBRARY_RAW, INT8, SCALE
    print(f"{torch.cuda.get_device_name()}: microseconds")
    print(f"| images | {' | '.join(names)} |\n{'|---' * (len(names) + 1)}|")
    for images in IMAGES:
        torch.compiler.reset()
        runs = launches(images * ROWS, given, weight)
        for run in runs.values():
            run(0, 0)
        times = search.interleaved({name: search.graph_timer(run) for name, run in runs.items()}, _ROUNDS)
        print(f"| {images} | {' | '.join(f'{1e3 * times[name]:.1f}' for name in names)} |", flush=True)
    return 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
