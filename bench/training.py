"""Forward and backward passes of SigLIP's first layer in BF16, beside plain torch; and losses beside plain torch's.

    python -m bench.training                # on an SM90 GPU, about a minute: both tables
    python -m bench.training --losses       # losses alone, on any machine

Images of 224 x 224 in patches of 16 x 16, 768 features, bias and positions; derivatives for all of the three, none for
images. "convolution" is what models run; "patchify + linear" is one compiled graph; "ours" is the converted module,
compiled whole and as it is. Calls run in turn, in rounds of shuffled order; the median of the rounds counts. First,
gradients are compared with those of the plain module in float64.

Losses: the layer, a mean over positions and a linear classifier, by AdamW, all in BF16, from equal weights and with
equal batches. Two runs of plain torch sum the products of a patch in other orders; one in float32 says what BF16 costs.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import random
import statistics
from collections.abc import Callable, Mapping

import torch

from cute_kernels.models.nn import PatchOptions, convert_layer
from cute_kernels.operations.reference import patch_rows

IMAGES = (64, 512, 4096)
SIZE, PATCH, FEATURES = 224, 16, 768
STEPS, CLASSES, BATCH = 200, 10, 64
_ROUNDS, _MS_PER_RUN = 7, 40.0


class Convolution(torch.nn.Module):
    """The layer as models have it."""

    def __init__(self, size: int = SIZE, features: int = FEATURES) -> None:
        super().__init__()
        self.proj = torch.nn.Conv2d(3, features, PATCH, stride=PATCH)
        self.pos_embed = torch.nn.Parameter(torch.randn((size // PATCH) ** 2, features) * 0.02)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.proj(images).flatten(2).transpose(1, 2) + self.pos_embed


class Product(Convolution):
    """The same as a product of rows, whose sums have the order of a permutation, or the one that patches have."""

    order: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows, weight = patch_rows(images, PATCH), self.proj.weight.flatten(1)
        if self.order is not None:
            rows, weight = rows[:, self.order], weight[:, self.order]
        out = torch.nn.functional.linear(rows, weight, self.proj.bias)
        return out.view(images.shape[0], -1, out.shape[1]) + self.pos_embed


def product(plain: Convolution, seed: int | None = None) -> Product:
    """With the parameters of another, copied; a seed permutes the order of its sums."""
    made = copy.deepcopy(plain)
    made.__class__ = Product
    if seed is not None:
        k = plain.proj.weight[0].numel()
        made.order = torch.randperm(k, generator=torch.Generator().manual_seed(seed)).to(plain.pos_embed.device)
    return made


class Converted(Convolution):
    """The same by a converted layer, which is given the positions."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.proj(images, self.pos_embed).flatten(2).transpose(1, 2)


def ours(plain: Convolution) -> Converted:
    """With the parameters of another, copied."""
    made = copy.deepcopy(plain)
    made.__class__ = Converted
    convert_layer(made.proj, PatchOptions())
    return made


# --- times -----------------------------------------------------------------------------------------------------------


def gradients(module: torch.nn.Module, images: torch.Tensor, direction: torch.Tensor) -> list[torch.Tensor]:
    """Of weight, bias and positions, after a forward and a backward pass."""
    module.zero_grad(set_to_none=True)
    module(images).backward(direction)
    found = {name.rpartition(".")[2]: parameter.grad for name, parameter in module.named_parameters()}
    return [found[name].reshape(-1) for name in ("weight", "bias", "pos_embed")]


def largest_error(got: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Norm of the difference over the norm, of the gradient that is furthest off."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True))


def medians(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def ms(call: Callable[[], object], count: int) -> float:
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    for call in calls.values():
        ms(call, 2)
    counts = {name: max(1, math.ceil(_MS_PER_RUN / ms(call, 1))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    generator = random.Random(0)
    for _ in range(_ROUNDS):
        for name in generator.sample(list(calls), len(calls)):
            times[name].append(ms(calls[name], counts[name]))
    return {name: statistics.median(each) for name, each in times.items()}


def time_table() -> str:
    torch.manual_seed(0)
    plain = Convolution().to("cuda", torch.bfloat16)
    lines = ["| images | " + " | ".join(_candidates(plain)) + " |", "|---" * 5 + "|"]
    for count in IMAGES:
        images = torch.randn(count, 3, SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
        direction = torch.randn(count, plain.pos_embed.shape[0], FEATURES, dtype=torch.bfloat16, device="cuda")
        modules = _candidates(plain)
        if count == IMAGES[0]:
            exact = gradients(copy.deepcopy(plain).double(), images.double(), direction.double())
            for name, module in modules.items():
                print(f"{name}: error of gradients {largest_error(gradients(module, images, direction), exact):.2e}")
        given = {"images": images, "direction": direction}
        times = medians({name: functools.partial(gradients, module, **given) for name, module in modules.items()})
        lines.append(f"| {count} | " + " | ".join(f"{time:.3f}" for time in times.values()) + " |")
        torch.compiler.reset()
    return "\n".join(lines)


def _candidates(plain: Convolution) -> dict[str, torch.nn.Module]:
    compiled = {"patchify + linear, compiled": product(plain), "ours, compiled": ours(plain)}
    made = {name: torch.compile(module, fullgraph=True, dynamic=False) for name, module in compiled.items()}
    return {"convolution": copy.deepcopy(plain), **made, "ours": ours(plain)}


# --- losses ----------------------------------------------------------------------------------------------------------


def losses(layer: torch.nn.Module, size: int, steps: int, batch: int) -> torch.Tensor:
    """Of every step, in the type and on the device of the layer's parameters."""
    weight = next(layer.parameters())
    where = {"device": weight.device, "dtype": weight.dtype}
    features = layer.pos_embed.shape[-1]
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    head = torch.nn.Linear(features, CLASSES)
    with torch.no_grad():
        head.weight.copy_(draw(CLASSES, features) * 0.05)
        head.bias.zero_()
    head.to(**where)
    optimiser = torch.optim.AdamW([*layer.parameters(), *head.parameters()], lr=1e-4)
    kinds, found = draw(CLASSES, 3, size, size) * 0.2, []
    for _ in range(steps):
        labels = torch.randint(CLASSES, (batch,), generator=generator)
        images = (kinds[labels] + draw(batch, 3, size, size)).to(**where)
        loss = torch.nn.functional.cross_entropy(head(layer(images).mean(1)).float(), labels.to(weight.device))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        found.append(loss.detach())
    return torch.stack(found).cpu()


def loss_table(device: str, size: int = SIZE, features: int = FEATURES, steps: int = STEPS, batch: int = BATCH) -> str:
    torch.manual_seed(0)
    plain = Convolution(size, features).to(device, torch.bfloat16)
    runs = {"another order": product(plain, 1), "a third order": product(plain, 2), "ours": ours(plain)}
    runs["plain, all in float32"] = copy.deepcopy(plain).float()
    first = losses(copy.deepcopy(plain), size, steps, batch)
    lines = [f"losses of {steps} steps: {first[0]:.4f} to {first[-1]:.4f}; differences from the plain module's"]
    lines += ["", "| run | largest | RMS |", "|---|---|---|"]
    for name, layer in runs.items():
        apart = losses(layer, size, steps, batch) - first
        lines.append(f"| {name} | {apart.abs().max():.5f} | {apart.square().mean().sqrt():.5f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", action="store_true", help="losses alone, of small images without a GPU")
    on_gpu = torch.cuda.is_available()
    if not parser.parse_args().losses:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds, forward and backward")
        print(time_table())
    small = {} if on_gpu else {"size": 32, "features": 64, "batch": 16}
    print(loss_table("cuda" if on_gpu else "cpu", **small))


if __name__ == "__main__":
    main()
