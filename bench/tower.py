"""Images per second of a SigLIP tower: Hugging Face's and plain torch's, BF16, FP8 and INT8 in the MLP; error to FP32.

    python -m bench.tower                       # base, 64 images, and so400m-384, 16 images
    python -m bench.tower --sizes base-224      # one of them
    python -m bench.tower --errors              # errors alone, which need no CUDA graph

Weights are random, of the models' shapes. The tower is plain torch, so that all variants but Hugging Face's eager one
have the same attention; each is one CUDA graph, replayed in rounds whose order is shuffled, and the median counts.
Their blocks are compiled, which takes seconds once for all blocks; whole towers take as long for each.
Errors are those of the last hidden states to the same weights in FP32: the mean cosine and the norm of the difference
over the norm, of modules that are not compiled. "With outliers" some features that every MLP is given are 20 times as
large as they are otherwise, and their weights a twentieth: the same function.

FP8 is E4M3 with a number for each input, which was determined before, INT8 has one for each row, determined in every
call; weights have one for each of their features. Where `fc1` does not write E4M3, the activation is in its epilogue,
and the conversion a pass of its own.
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
from cute_kernels.explore.tuning import search

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
OUTLIERS, OUTLIER = 4, 20.0
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

# --- the MLP ---------------------------------------------------------------------------------------------------------


class Mlp(torch.nn.Module):
    """``fc2(gelu_tanh(fc1(x)))``, as the libraries write it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


@torch.library.custom_op("cute_kernels_bench::linear_gelu", mutates_args=())
def linear_gelu(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """cuBLASLt's GELU epilogue, which torch.compile would take apart."""
    return torch._addmm_activation(bias, rows, weight.T, use_gelu=True)


@linear_gelu.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


class CublasMlp(Mlp):
    """The same with the activation in cuBLASLt's epilogue."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.fc2(linear_gelu(_rows(x), self.fc1.weight, self.fc1.bias)).view(x.shape)


class GemmMlp(Mlp):
    """The same by two calls of `gemm`, in the type of the weights."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = gemm(_rows(x), self.fc1.weight, bias=self.fc1.bias, activation="gelu_tanh")
        return gemm(hidden, self.fc2.weight, bias=self.fc2.bias, residual=_rows(residual)).view(x.shape)


class NarrowMlp(torch.nn.Module):
    """The same of 8 bits.

    Attributes:
        dtype: E4M3 with a number for each input, or int8 with one for each of its rows.
        bounds: largest magnitudes that the two layers are given.
        narrow_hidden: ``fc1`` writes the numbers of ``fc2``, with a number for all of them.
    """

    def __init__(self, mlp: Mlp, dtype: torch.dtype, bounds: tuple[float, float], narrow_hidden: bool) -> None:
        super().__init__()
        self.dtype, self.narrow_hidden = dtype, narrow_hidden
        largest = LARGEST if dtype is E4M3 else 127.0
        device = mlp.fc1.weight.device
        self.register_buffer("bounds", torch.tensor(bounds, device=device) / largest, persistent=False)
        for name in ("fc1", "fc2"):
            layer = getattr(mlp, name)
            weight = layer.weight.detach().float()
            scale = weight.abs().amax(1, keepdim=True) / largest
            self.register_buffer(name, _narrowed(weight / scale, dtype))
            self.register_buffer(f"{name}_scale", scale.T.contiguous())
            self.register_buffer(f"{name}_bias", layer.bias.detach())

    def narrow(self, rows: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of 8 bits, and what they are multiplied by."""
        if self.dtype is E4M3:
            scale = self.bounds[layer]
        else:
            scale = rows.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return _narrowed(rows.float() / scale, self.dtype), scale

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        rows, scale = self.narrow(_rows(x), 0)
        first = {"bias": self.fc1_bias, "scale_a": scale, "scale_b": self.fc1_scale, "activation": "gelu_tanh"}
        if self.narrow_hidden:
            scale = self.bounds[1]
            hidden = gemm(rows, self.fc1, **first, out_dtype=E4M3, out_scale=scale)
        else:
            hidden, scale = self.narrow(gemm(rows, self.fc1, **first), 1)
        second = {"bias": self.fc2_bias, "scale_a": scale, "scale_b": self.fc2_scale, "residual": _rows(residual)}
        return gemm(hidden, self.fc2, **second).view(x.shape)


class ScaledMmMlp(NarrowMlp):
    """The same in E4M3 by `torch._scaled_mm`, which is cuBLASLt, with everything else in passes of their own."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self._layer(_rows(x), 0, self.fc1, self.fc1_scale, self.fc1_bias), approximate="tanh")
        return residual + self._layer(hidden, 1, self.fc2, self.fc2_scale, self.fc2_bias).view(x.shape)

    def _layer(self, rows: torch.Tensor, layer: int, *weight: torch.Tensor) -> torch.Tensor:
        narrow, scale = self.narrow(rows, layer)
        values, scale_b, bias = weight
        by_row = scale.expand(rows.shape[0], 1).contiguous()  # cuBLASLt takes numbers of rows and columns together
        return torch._scaled_mm(
            narrow, values.T, scale_a=by_row, scale_b=scale_b, bias=bias, out_dtype=rows.dtype, use_fast_accum=True
        )


def _narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype is E4M3:
        return values.clamp(-LARGEST, LARGEST).to(E4M3)
    return values.round().clamp(-127, 127).to(dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


# --- the tower -------------------------------------------------------------------------------------------------------


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


def tower(size: Size, device: str, outliers: bool = False) -> torch.nn.Sequential:
    """Blocks with random weights, FP32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(size) for _ in range(size.layers))).to(device).eval()
    if outliers:
        for block in model:
            features = torch.randperm(size.width)[:OUTLIERS].to(device)
            for numbers in (block.behind.weight, block.behind.bias):
                numbers[features] *= OUTLIER
            block.mlp.fc1.weight[:, features] /= OUTLIER
    return model


def hugging_face(model: torch.nn.Sequential, size: Size) -> torch.nn.Module:
    """The encoder of transformers with the same weights, as it is."""
    from transformers import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipEncoder

    config = SiglipVisionConfig(
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
    )
    config._attn_implementation = "sdpa"
    encoder = SiglipEncoder(config).to(next(model.parameters())).eval()
    for theirs, ours in zip(encoder.layers, model, strict=True):
        attention = theirs.self_attn
        for layer, weight, bias in zip(
            (attention.q_proj, attention.k_proj, attention.v_proj),
            ours.qkv.weight.chunk(3),
            ours.qkv.bias.chunk(3),
            strict=True,
        ):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        for layer, other in (
            (attention.out_proj, ours.out),
            (theirs.layer_norm1, ours.before),
            (theirs.layer_norm2, ours.behind),
            (theirs.mlp.fc1, ours.mlp.fc1),
            (theirs.mlp.fc2, ours.mlp.fc2),
        ):
            layer.load_state_dict(other.state_dict())
    return encoder


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


HUGGING_FACE, EAGER = "transformers, eager", "torch, eager"
OURS_OF_8_BITS: dict[str, tuple[torch.dtype, bool]] = {
    "FP8 by gemm": (E4M3, False),
    "FP8 by gemm, fc1 to FP8": (E4M3, True),
    "INT8 by gemm": (torch.int8, False),
}


def modules(model: torch.nn.Sequential, x: torch.Tensor) -> dict[str, torch.nn.Sequential]:
    """Towers that are compiled, by what they are called in the table."""
    plain = copy.deepcopy(model).bfloat16()
    found = {"BF16": plain}
    for name, kind in (("BF16, GELU by cuBLASLt", CublasMlp), ("BF16 by gemm", GemmMlp)):
        found[name] = copy.deepcopy(plain)
        for block in found[name]:
            block.mlp.__class__ = kind
    bounds = bounds_of(plain, x)
    kinds = {"FP8 by cuBLASLt": functools.partial(ScaledMmMlp, dtype=E4M3, narrow_hidden=False)}
    kinds |= {name: functools.partial(NarrowMlp, dtype=d, narrow_hidden=n) for name, (d, n) in OURS_OF_8_BITS.items()}
    for name, kind in kinds.items():
        found[name] = copy.deepcopy(plain)
        for block, largest in zip(found[name], bounds, strict=True):
            block.mlp = kind(block.mlp, bounds=largest)
    return found


# --- what is printed -------------------------------------------------------------------------------------------------


def main() -> int:
    """Times the towers and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--errors", action="store_true", help="errors alone, with and without outliers")
    parser.add_argument("--seconds", type=float, default=600.0, help="towers that begin later are left out")
    options = parser.parse_args()
    began = time.perf_counter()
    titles = ["tower", *([] if options.errors else ["images/s", "over transformers"])]
    titles += ["cosine to FP32", "error", "cosine with outliers", "error with outliers"]
    print(f"| {' | '.join(['variant', *titles])} |\n|{'---|' * (len(titles) + 1)}")
    for name in options.sizes:
        if time.perf_counter() - began > options.seconds:
            print("out of time", file=sys.stderr)
            break
        with torch.no_grad():
            report(name, SIZES[name], options.errors)
    return 0


def report(name: str, size: Size, errors_alone: bool) -> None:
    """Rows of the table of one tower."""
    device = "cuda"
    exactly = torch.randn(size.images, size.positions, size.width, device=device)
    errors = [errors_of(tower(size, device, outliers), exactly) for outliers in (False, True)]
    times = {} if errors_alone else times_of(tower(size, device), exactly.bfloat16(), size)
    for variant in times or errors[0]:
        columns = [variant, name]
        if times:
            rate, ratio = 1e3 * size.images / times[variant], times[HUGGING_FACE] / times[variant]
            columns += [f"{rate:,.0f}", f"{ratio:.2f}"]
        for found in errors:
            cosine, distance = found[variant if variant in found else "BF16"]
            columns += [f"{cosine:.5f}", f"{distance:.2%}"]
        print(f"| {' | '.join(columns)} |", flush=True)


def errors_of(model: torch.nn.Sequential, exactly: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Mean cosine of the last hidden states, and the norm of their difference over their norm, by variant."""
    expected = model(exactly)
    found = {}
    for variant, module in modules(model, exactly.bfloat16()).items():
        out = module(exactly.bfloat16()).float()
        cosine = functional.cosine_similarity(out, expected, dim=-1).mean().item()
        found[variant] = cosine, ((out - expected).norm() / expected.norm()).item()
    return found


def times_of(model: torch.nn.Sequential, x: torch.Tensor, size: Size) -> dict[str, float]:
    """Milliseconds of each variant."""
    compiled = modules(model, x)
    theirs = hugging_face(compiled["BF16"], size)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        HUGGING_FACE: lambda: theirs(x, attention_mask=None)[0],
        EAGER: functools.partial(compiled["BF16"], x),
    }
    difference = (calls[HUGGING_FACE]() - calls[EAGER]()).norm() / calls[EAGER]().norm()
    print(f"transformers and torch differ by {difference.item():.2%}", file=sys.stderr, flush=True)
    calls |= {name: functools.partial(module, x) for name, module in compiled.items()}
    timers = {}
    for name, call in calls.items():
        began = time.perf_counter()
        if name in compiled:
            torch.compiler.reset()  # otherwise one function is compiled for the blocks of too many towers
            for block in compiled[name]:
                block.compile(dynamic=False)
        call()
        torch.cuda.synchronize()
        timers[name] = search.graph_timer(lambda _, __, call=call: call())
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return search.interleaved(timers, _ROUNDS)


if __name__ == "__main__":
    sys.exit(main())
