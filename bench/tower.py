"""Images per second of a SigLIP tower: torch eager and compiled, BF16 by `gemm`, and FP8 in the MLP; error to FP32.

    python -m bench.tower                       # base, 64 images, and so400m-384, 16 images
    python -m bench.tower --seconds 120         # ends after about so long

Weights are random, of the models' shapes; the tower is plain torch, so that all variants have the same attention. Each
variant is one CUDA graph, replayed in rounds whose order is shuffled; the median counts. Errors are the mean cosine of
the last hidden states to those of the same weights in FP32.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from cute_kernels import gemm
from cute_kernels.tuning import search

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
_ROUNDS = 7


@dataclass(frozen=True)
class Size:
    """Shape of a tower and its batch."""

    images: int
    positions: int
    width: int
    hidden: int
    heads: int
    layers: int


SIZES = {"base-224": Size(64, 196, 768, 3072, 12, 12), "so400m-384": Size(16, 729, 1152, 4304, 16, 27)}


class Mlp(torch.nn.Module):
    """``fc2(gelu_tanh(fc1(x)))``, as the libraries write it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


class GemmMlp(Mlp):
    """The same by two calls of `gemm`, in the type of the weights."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = gemm(_rows(x), self.fc1.weight, bias=self.fc1.bias, activation="gelu_tanh")
        return gemm(hidden, self.fc2.weight, bias=self.fc2.bias, residual=_rows(residual)).view(x.shape)


class Fp8Mlp(torch.nn.Module):
    """The same in E4M3, of which ``fc1`` writes what ``fc2`` reads: docs/fp8_mlp.md."""

    def __init__(self, mlp: Mlp, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.scales = tuple(bound / LARGEST for bound in bounds)
        for name in ("fc1", "fc2"):
            layer = getattr(mlp, name)
            weight = layer.weight.detach().float()
            scale = weight.abs().amax(1, keepdim=True) / LARGEST
            self.register_buffer(name, (weight / scale).to(E4M3))
            self.register_buffer(f"{name}_scale", scale.T.contiguous())
            self.register_buffer(f"{name}_bias", layer.bias.detach())

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        rows = (_rows(x).float() / self.scales[0]).clamp(-LARGEST, LARGEST).to(E4M3)
        hidden = gemm(
            rows,
            self.fc1,
            bias=self.fc1_bias,
            scale_a=self.scales[0],
            scale_b=self.fc1_scale,
            activation="gelu_tanh",
            out_dtype=E4M3,
            out_scale=self.scales[1],
        )
        out = gemm(
            hidden,
            self.fc2,
            bias=self.fc2_bias,
            scale_a=self.scales[1],
            scale_b=self.fc2_scale,
            residual=_rows(residual),
        )
        return out.view(x.shape)


class Block(torch.nn.Module):
    """Attention and MLP, each behind a normalisation and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before, self.behind = torch.nn.LayerNorm(size.width, 1e-6), torch.nn.LayerNorm(size.width, 1e-6)
        self.qkv, self.out = torch.nn.Linear(size.width, 3 * size.width), torch.nn.Linear(size.width, size.width)
        self.mlp = Mlp(size.width, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images, positions, width = x.shape
        qkv = self.qkv(self.before(x)).view(images, positions, 3, self.heads, width // self.heads)
        attended = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return self.mlp(self.behind(x), x)


def tower(size: Size, device: str) -> torch.nn.Sequential:
    """Blocks with random weights, FP32."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(size) for _ in range(size.layers))).to(device).eval()


def bounds_of(model: torch.nn.Sequential, x: torch.Tensor) -> list[tuple[float, float]]:
    """Largest magnitudes that the two layers of every MLP are given."""
    found: list[list[float]] = []
    layers = [layer for block in model for layer in (block.mlp.fc1, block.mlp.fc2)]
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].abs().max().item()))
        for layer in layers
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return list(zip(found[::2], found[1::2], strict=True))


def variants(model: torch.nn.Sequential, x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls that compute the last hidden states, by what they are called in the table."""
    plain = copy.deepcopy(model).bfloat16()
    ours, narrow = copy.deepcopy(plain), copy.deepcopy(plain)
    for block in ours:
        block.mlp.__class__ = GemmMlp
    for block, bounds in zip(narrow, bounds_of(plain, x), strict=True):
        block.mlp = Fp8Mlp(block.mlp, bounds)
    compiled = {"compiled": plain, "compiled, BF16 by gemm": ours, "compiled, FP8 by gemm": narrow}
    towers = {"eager": plain} | {name: torch.compile(module, dynamic=False) for name, module in compiled.items()}
    return {name: functools.partial(module, x) for name, module in towers.items()}


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def main() -> int:
    """Times the towers and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    began = time.perf_counter()
    print("| tower | variant | images/s | over eager | mean cosine to FP32 |\n|---|---|---|---|---|")
    for name in options.sizes:
        if time.perf_counter() - began > options.seconds:
            print("out of time", file=sys.stderr)
            break
        with torch.no_grad():
            report(name, SIZES[name])
    return 0


def report(name: str, size: Size) -> None:
    """Rows of the table of one tower."""
    model = tower(size, "cuda")
    exactly = torch.randn(size.images, size.positions, size.width, device="cuda")
    expected = model(exactly)
    calls = variants(model, exactly.bfloat16())
    cosines = {
        variant: functional.cosine_similarity(call().float(), expected, dim=-1).mean().item()
        for variant, call in calls.items()
    }
    timers = {variant: search.graph_timer(lambda _, __, call=call: call()) for variant, call in calls.items()}
    times = search.interleaved(timers, _ROUNDS)
    for variant, milliseconds in times.items():
        rate, ratio = 1e3 * size.images / milliseconds, times["eager"] / milliseconds
        print(f"| {name} | {variant} | {rate:,.0f} | {ratio:.2f} | {cosines[variant]:.5f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
