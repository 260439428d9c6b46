"""What the swap of a patch embedding costs a vision tower in accuracy, and with ``--time`` what it saves in time.

    python -m bench.swap            # error, on any machine: the table of docs/use_in_your_model.md
    python -m bench.swap --time     # milliseconds, on an SM90 GPU

Accuracy: the photographs of scikit-image through a small SigLIP2 tower with seeded weights, in FP32, so that nothing
but the patch embedding differs; and through the library's own tower in bfloat16, which says how much that is.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from unittest import mock

import torch
import transformers
from PIL import Image
from skimage import data

from bench import timing
from bench.compile_ahead import compile_all
from cute_kernels.models import transformers as integration
from cute_kernels.operations.runtime import gpu
from cute_kernels.operations.runtime.repeat import RepeatedCalls
from cute_kernels.plan import Plan

PRECISIONS = ("fp16", "bf16", "int8", "fp8")
PHOTOGRAPHS = (
    "astronaut", "chelsea", "coffee", "rocket", "stereo_motorcycle", "hubble_deep_field", "retina",
    "immunohistochemistry",
)  # fmt: skip
"""Photographs that the scikit-image wheel holds."""

_TOWER = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 3}


@dataclass(frozen=True)
class Agreement:
    """Of two tensors whose last dimension is a vector each.

    Attributes:
        error: norm of the difference over the norm of what is expected.
        cosine: the smallest of all vectors.
        largest: the largest difference of two numbers.
    """

    error: float
    cosine: float
    largest: float

    @classmethod
    def of(cls, got: torch.Tensor, expected: torch.Tensor) -> Agreement:
        got, expected = got.double(), expected.double()
        cosine = torch.nn.functional.cosine_similarity(got, expected, dim=-1).min()
        difference = got - expected
        return cls(float(difference.norm() / expected.norm()), float(cosine), float(difference.abs().max()))


def tower(seed: int = 0, **config: int) -> torch.nn.Module:
    """A SigLIP2 vision tower of 224 x 224 pixels in patches of 16 x 16, FP32, in the library's initialisation."""
    torch.manual_seed(seed)
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**(_TOWER | config))).eval()


def photographs(size: int = 224) -> torch.Tensor:
    """``[8, 3, size, size]`` uint8, what the processor gives without rescaling and normalisation."""
    arrays = [getattr(data, name)() for name in PHOTOGRAPHS]
    images = [Image.fromarray(each[0] if isinstance(each, tuple) else each).convert("RGB") for each in arrays]
    processor = transformers.SiglipImageProcessorPil(
        size={"height": size, "width": size}, do_rescale=False, do_normalize=False
    )
    return processor(images=images, return_tensors="pt")["pixel_values"]


@torch.no_grad()
def agreements(raw: torch.Tensor, plain: torch.nn.Module) -> dict[str, tuple[Agreement, Agreement]]:
    """By what runs the embedding: agreement of embeddings, and of the tower's last hidden states, with FP32.

    Args:
        raw: ``[B, 3, H, W]`` uint8.
        plain: what `tower` returned.
    """
    normalised = raw / 127.5 - 1
    expected = plain.embeddings(normalised), plain(normalised).last_hidden_state
    results = {}
    half = copy.deepcopy(plain).to(torch.bfloat16)
    got = half.embeddings(normalised), half(normalised.bfloat16()).last_hidden_state
    results["library, whole model in bfloat16"] = got
    for precision in PRECISIONS:
        ours = integration.convert(copy.deepcopy(plain), precision, mean=0.5, std=0.5)
        for name, pixels in (("uint8", raw), ("normalised", normalised)):
            if pixels.is_floating_point() and precision.startswith("int"):
                continue
            results[f"{precision}, {name} pixels"] = ours.embeddings(pixels), ours(pixels).last_hidden_state
    return {
        name: tuple(Agreement.of(mine, theirs) for mine, theirs in zip(outputs, expected, strict=True))
        for name, outputs in results.items()
    }


def error_table() -> str:
    lines = [
        "| embedding | its error | its cosine, least | tower's cosine, least | tower's error, most |",
        "|---|---|---|---|---|",
    ]
    for name, (embedding, whole) in agreements(photographs(), tower()).items():
        lines.append(
            f"| {name} | {embedding.error:.1e} | {embedding.cosine:.6f} | {whole.cosine:.6f} | {whole.largest:.1e} |"
        )
    return "\n".join(lines)


def kernels_of(calls: Iterable[Callable[[int], object]]) -> list[Plan]:
    """What calls on a GPU would launch, without launching or compiling it; their results are of no use."""
    found: list[Plan] = []
    with (
        mock.patch.object(gpu, "launch", lambda plan, _: found.extend(plan.launches)),
        mock.patch.object(RepeatedCalls, "put", lambda *_: None),
    ):
        for call in calls:
            call(0)
    return found


@torch.no_grad()
def time_table(batches: tuple[int, ...] = (1, 64, 512)) -> str:
    """Of the embeddings of a base model in bfloat16, medians of sustained runs in one set of rounds per batch.

    Kernels are compiled before, one process for each core of the host.
    """
    device = torch.device("cuda")
    plain = tower(hidden_size=768, num_hidden_layers=1, num_attention_heads=12).to(device, torch.bfloat16)
    lines = ["| embedding | " + " | ".join(f"{batch} images, ms" for batch in batches) + " |"]
    lines.append("|---" * (len(batches) + 1) + "|")
    columns: dict[str, list[float]] = {}
    convert = functools.partial(integration.convert, mean=0.5, std=0.5)
    modules = {precision: convert(copy.deepcopy(plain), precision).embeddings for precision in PRECISIONS}
    cases = {}
    for batch in batches:
        raw = torch.randint(0, 256, (batch, 3, 224, 224), dtype=torch.uint8, device=device)
        normalised = (raw / 127.5 - 1).bfloat16()
        candidates = {"library, normalised pixels": lambda _, x=normalised: plain.embeddings(x)}
        for precision, module in modules.items():
            candidates[f"{precision}, uint8 pixels"] = lambda _, m=module, x=raw: m(x)
            if not precision.startswith("int"):
                candidates[f"{precision}, normalised pixels"] = lambda _, m=module, x=normalised: m(x)
        cases[batch] = candidates
    ours = (call for candidates in cases.values() for name, call in candidates.items() if "library" not in name)
    compile_all(kernels_of(ours))
    for batch, candidates in cases.items():
        for launch in candidates.values():
            launch(0)
        torch.cuda.synchronize()
        sampler = timing.DeviceSampler(device)
        protocol = timing.Protocol(rounds=3, sustained_s=0.08)
        runs = timing.measure(candidates, protocol, sampler, 1, ("sustained",), case=f"swap {batch}")
        for name, results in runs.items():
            columns.setdefault(name, []).append(timing.summarize([run.ms for run in results]).median)
    lines += [f"| {name} | " + " | ".join(f"{ms:.3f}" for ms in times) + " |" for name, times in columns.items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", action="store_true", help="milliseconds on a GPU instead of errors")
    options = parser.parse_args(arguments)
    if options.time and not torch.cuda.is_available():
        parser.error("--time needs a CUDA device")
    print(time_table() if options.time else error_table())


if __name__ == "__main__":
    main()
