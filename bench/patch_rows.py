"""Rows of uint8 pixels as Qwen-VL, GLM and Kimi have them, and the layer behind them, beside compiled torch.

    python -m bench.patch_rows                      # prints the table, on a GPU

A row is two frames of a patch, three channels each; the layer is a convolution of bfloat16 weights. "two kernels" is a
compiled normalisation, then torch's linear layer, as vLLM runs them; "of one frame" has a still image's first frame
alone. In brackets is the difference from "two kernels". Launches run in turn,
in CUDA graphs with `cute_kernels.frozen_constants`; the median of the rounds counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from cute_kernels import frozen_constants
from cute_kernels.explore.tuning import search
from cute_kernels.models.nn import PatchOptions
from cute_kernels.models.nn.engine import PatchEngine

LAYERS = ((14, 1280), (16, 1152))
"""Side of a patch, features."""

ROWS = (1024, 32768)
FRAMES, COLOURS = 2, 3
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
LIBRARY, INT8, STILL = "two kernels", "int8", "int8, of one frame"
_ROUNDS = 9


def _repeated(values: tuple[float, ...], times: int) -> list[float]:
    return [value for value in values for _ in range(times)]


def still_rows(rows: int, patch: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows ``[rows, 3 * 2 * patch * patch]`` of two equal frames, and ``[rows, 3 * patch * patch]`` of one."""
    one = torch.randint(0, 256, (rows, COLOURS, 1, patch * patch), dtype=torch.uint8, device=device)
    return one.expand(-1, -1, FRAMES, -1).reshape(rows, -1).contiguous(), one.reshape(rows, -1).contiguous()


def normalise(rows: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Pixels of bfloat16, as a processor makes them: ``(pixel / 255 - mean) / std`` with a factor and an offset."""
    return (rows * (1 / 255 / std) - mean / std).to(torch.bfloat16)


def launches(patch: int, features: int, rows: int, device: str) -> dict[str, Callable[[int, int], torch.Tensor]]:
    """Launches by name; what they are called with does not matter."""
    torch.manual_seed(0)
    shape = (FRAMES, patch, patch)
    layer = torch.nn.Conv3d(COLOURS, features, shape, stride=shape).to(device, torch.bfloat16)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    engine = PatchEngine(PatchOptions(precision="int8", channels=COLOURS, frames=FRAMES, mean=MEAN, std=STD))
    mean, std = (torch.tensor(_repeated(v, FRAMES * patch * patch), device=device) for v in (MEAN, STD))
    compiled = torch.compile(normalise) if device == "cuda" else normalise
    both, one = still_rows(rows, patch, device)
    return {
        LIBRARY: lambda i, _: torch.nn.functional.linear(compiled(both, mean, std), weight.flatten(1), bias),
        INT8: lambda i, _: engine.rows(both, weight, bias),
        STILL: lambda i, _: engine.rows(one, weight, bias),
    }


def main() -> int:
    """Returns 0, or 2 without a GPU."""
    if not torch.cuda.is_available():
        print("bench.patch_rows: no CUDA device", file=sys.stderr)
        return 2
    names = LIBRARY, INT8, STILL
    print(f"{torch.cuda.get_device_name()}: microseconds (relative difference)")
    print(f"| patch, features, rows | {' | '.join(names)} |\n{'|---' * (len(names) + 1)}|")
    for patch, features in LAYERS:
        for rows in ROWS:
            torch.compiler.reset()
            runs = launches(patch, features, rows, "cuda")
            expected = runs[LIBRARY](0, 0).double()
            errors = {
                name: float((run(0, 0).double() - expected).norm() / expected.norm()) for name, run in runs.items()
            }
            with frozen_constants():
                times = search.interleaved({name: search.graph_timer(run) for name, run in runs.items()}, _ROUNDS)
            cells = (f"{1e3 * times[name]:.1f} ({errors[name]:.1e})" for name in names)
            print(f"| {patch}, {features}, {rows:,} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
