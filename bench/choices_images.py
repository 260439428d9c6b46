"""Models that nobody chose, of `patch_embed_images` and `patch_embed`: drawn at random, as `bench.choices` times them.

A model is a width, a side of patches and one of images, drawn at random; a shape is one at some number of images, of
which there are 1 to 777. Beside the default and the most promising of `candidate_plans`, some by chance are timed, and
what computes the same: of images a compiled function of normalisation, patches and linear layer, and a convolution of
normalised pixels; of FP8 rows all that cuBLASLt's heuristic proposes, by image with the table as a C operand of stride
0 and by position with biases.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bench.choices_fit import percentile
from bench.peers.cublaslt import CublasError, Matmul, Operand
from cute_kernels.config import PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.operations.base import Operation
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES
from cute_kernels.plan import PLANNERS, Plan, candidate_plans, make_plan

Launch = Callable[[int, int], object]

KINDS = {"uint8 images": 5, "bf16 images": 3, "fp8 rows": 4}
"""Shares of the models."""

PIXELS = {"uint8 images": ("uint8", "int8"), "bf16 images": ("bfloat16", "bf16")}
"""Element type of the pixels, and precision."""

PATCHES = (14, 16, 16, 32)
SIDES = (16, 14, 18, 24, 32, 37, 9, 12)
"""Patches along the side of an image."""

IMAGES_OF_A_MODEL = 3
"""Numbers of images that a model is timed at: kernels of the same model are the same."""

SHOWN = (
    (4736, 224, 16, 768), (512, 224, 16, 768), (64, 224, 16, 768), (64, 384, 16, 1152), (512, 384, 16, 1152),
    (4736, 224, 14, 768), (512, 224, 14, 1024), (512, 224, 32, 768), (64, 256, 16, 1024), (512, 256, 16, 768),
)  # fmt: skip
"""Images of uint8 pixels, their side, that of patches and features, most of them on docs/performance.md."""

MOST_IMAGES = 777
MOST_MACS = 3e11
MOST_BYTES = 1 << 30

_PROMISING = 14
_BY_CHANCE = 8
_ALGORITHMS = 6


@dataclass(frozen=True)
class ImagesShape:
    """Images, or rows of their patches, of a drawn model."""

    number: int
    kind: str
    problem: PatchEmbedImagesProblem | PatchEmbedProblem

    columns: ClassVar[tuple[str, ...]] = (
        "number", "kind", "images", "positions", "patch", "k", "n", "candidate", "config", "chosen", "mode", "rounds",
        "microseconds", "failure",
    )  # fmt: skip

    @property
    def operation(self) -> Operation:
        return PATCH_EMBED_IMAGES if isinstance(self.problem, PatchEmbedImagesProblem) else PATCH_EMBED

    @property
    def row(self) -> list[Any]:
        p = self.problem
        if isinstance(p, PatchEmbedImagesProblem):
            return [self.number, self.kind, p.batch, p.positions, p.patch, p.k, p.n]
        return [self.number, self.kind, p.m // p.table_rows, p.table_rows, "", p.k, p.n]

    def cells(self, config: Any) -> list[str]:
        """Of a configuration; of a peer, None."""
        return ["" if config is None else PLANNERS[self.operation.name].codec.encode(config)]

    def peers(self, inputs: Sequence[Any]) -> dict[str, Launch]:
        return _of_images(self.problem, inputs) if self.operation is PATCH_EMBED_IMAGES else _of_rows(self, inputs)


def draw(seed: int, count: int) -> list[ImagesShape]:
    """Shapes of a seed, `IMAGES_OF_A_MODEL` of each model."""
    generator, shapes = random.Random(seed), []
    while len(shapes) < count:
        (kind,) = generator.choices(list(KINDS), list(KINDS.values()))
        patch, grid, width = generator.choice(PATCHES), generator.choice(SIDES), 64 * generator.randint(6, 64)
        if width > 1024 and generator.random() < 0.5:
            width //= 4
            width = max(384, -(-width // 64) * 64)
        for _ in range(IMAGES_OF_A_MODEL):
            images = round(math.exp(generator.uniform(0, math.log(MOST_IMAGES))))
            rows, k = images * grid**2, 3 * patch**2
            while rows * k * width > MOST_MACS or 3 * rows * (k + width) > MOST_BYTES:
                images, rows = images // 2, images // 2 * grid**2
            if kind == "fp8 rows":
                problem = PatchEmbedProblem(rows, width, -(-k // 16) * 16, grid**2)
            else:
                pixels, precision = PIXELS[kind]
                problem = PatchEmbedImagesProblem(
                    images, 3, grid * patch, grid * patch, patch, width, pixels, precision=precision,
                    table_rows=grid**2,
                )  # fmt: skip
            shapes.append(ImagesShape(len(shapes), kind, problem))
    return shapes[:count]


def candidates(shape: ImagesShape, arch: str = "sm_90a", sm_count: int = 132) -> list[Plan]:
    """The default first, then the most promising, then some by chance, for many shapes the same."""
    plans = candidate_plans(shape.problem, arch, sm_count=sm_count)
    others = sorted(plans[_PROMISING:], key=lambda plan: zlib.crc32(str(plan.config).encode()))
    own = make_plan(shape.problem, arch=arch, sm_count=sm_count)
    return list(dict.fromkeys([own, *plans[:_PROMISING], *others[:_BY_CHANCE]]))


def work(seed: int, count: int) -> list[tuple[ImagesShape, list[Plan]]]:
    """The shapes that are drawn, and `SHOWN` behind the first half of them."""
    drawn = draw(seed, count)
    shown = []
    for number, (images, side, patch, n) in enumerate(SHOWN, count):
        problem = PatchEmbedImagesProblem(images, 3, side, side, patch, n, "uint8", table_rows=(side // patch) ** 2)
        shown.append(ImagesShape(number, "uint8 images", problem))
    return [(shape, candidates(shape)) for shape in (*drawn[: count // 2], *shown, *drawn[count // 2 :])]


# --- what computes the same ------------------------------------------------------------------------------------------


def _of_images(p: PatchEmbedImagesProblem, inputs: Sequence[Any]) -> dict[str, Launch]:
    first, grid, count = inputs[0], p.height // p.patch, len(inputs)
    images = [each.images for each in inputs]
    kernel = torch.randn(p.n, 3, p.patch, p.patch, device=images[0].device, dtype=torch.bfloat16)
    weight, bias = kernel.view(p.n, -1), first.bias.to(torch.bfloat16)
    table = first.pos_embed.to(torch.bfloat16)

    def normalised(pixels: torch.Tensor) -> torch.Tensor:
        return ((pixels.float() * (1 / 255) - 0.5) / 0.5).bfloat16() if pixels.dtype == torch.uint8 else pixels

    def linear(pixels: torch.Tensor) -> torch.Tensor:
        split = normalised(pixels).reshape(-1, 3, grid, p.patch, grid, p.patch)
        rows = split.permute(0, 2, 4, 1, 3, 5).reshape(-1, grid * grid, p.k)
        return torch.nn.functional.linear(rows, weight, bias) + table

    def convolution(pixels: torch.Tensor) -> torch.Tensor:
        maps = torch.nn.functional.conv2d(pixels, kernel, bias, stride=p.patch)
        return maps.flatten(2).transpose(1, 2) + table

    torch._dynamo.reset()  # a size is compiled in
    compiled = torch.compile(linear, fullgraph=True, dynamic=False)
    found: dict[str, Launch] = {"patchify + linear compiled": lambda i, _: compiled(images[i % count])}
    pixels = [normalised(each) for each in images]
    return found | {"convolution of normalised": lambda i, _: convolution(pixels[i % count])}


def _of_rows(shape: ImagesShape, inputs: Sequence[Any]) -> dict[str, Launch]:
    p, count = shape.problem, len(inputs)
    s, images = p.table_rows, p.m // p.table_rows
    first = inputs[0]
    table = first.pos_embed.to(torch.bfloat16).contiguous()
    out = [torch.empty(p.m, p.n, device="cuda", dtype=torch.bfloat16) for _ in inputs]
    weight, device = Operand(p.k, p.n, p.k, 0), torch.cuda.current_device()
    by_image = {
        "b": Operand(p.k, s, p.k, s * p.k), "d": Operand(p.n, s, p.n, s * p.n), "c": Operand(p.n, s, p.n, 0),
        "batch": images,
    }  # fmt: skip
    by_position = {
        "b": Operand(p.k, images, s * p.k, p.k), "d": Operand(p.n, images, s * p.n, p.n), "batch": s, "bias": table,
    }  # fmt: skip
    found: dict[str, Launch] = {}
    for name, layout in {"image-major": by_image, "position-major": by_position}.items():
        with contextlib.suppress(CublasError):
            matmul = Matmul(a=weight, alpha=0.05, device=device, **layout)
            for number, algorithm in enumerate(matmul.algorithms(_ALGORITHMS)):
                added = table if "c" in layout else None

                def launch(i: int, _: int, algorithm=algorithm, matmul=matmul, added=added) -> None:
                    x, result = inputs[i % count].x.data_ptr(), out[i % count].data_ptr()
                    c = result if added is None else added.data_ptr()
                    matmul.run(algorithm, first.weight.data_ptr(), x, c, result)

                found[f"cuBLASLt {name} {number}"] = launch
    return found


# --- regret ----------------------------------------------------------------------------------------------------------


def problem_of(kind: str, images: int, positions: int, patch: str, k: int, n: int) -> Any:
    """The inverse of `ImagesShape.row`."""
    if kind == "fp8 rows":
        return PatchEmbedProblem(images * positions, n, k, positions)
    side = int(patch) * math.isqrt(positions)
    pixels, precision = PIXELS[kind]
    return PatchEmbedImagesProblem(
        images, 3, side, side, int(patch), n, pixels, precision=precision, table_rows=positions
    )


Judged = dict[tuple[str, str], list[tuple[str, float, float]]]
"""By kind and mode, of each shape: what it is, the choice's time over the fastest candidate's, peers' over it."""


def judged(rows: Iterable[dict[str, str]]) -> Judged:
    """The choice is today's; shapes where that was not timed are left out. Without a peer its ratio is infinite."""
    times: dict[tuple[str, str, tuple], dict[str, dict[str, float]]] = {}
    for row in rows:
        if row["mode"]:
            shape = tuple(row[name] for name in ("images", "positions", "patch", "k", "n"))
            found = times.setdefault((row["kind"], row["mode"], shape), defaultdict(dict))
            found["ours" if row["config"] else "peer"][row["config"] or row["candidate"]] = float(row["microseconds"])
    groups: Judged = defaultdict(list)
    for (kind, mode, shape), found in times.items():
        images, positions, patch, k, n = shape
        problem = problem_of(kind, int(images), int(positions), patch, int(k), int(n))
        operation = PATCH_EMBED if kind == "fp8 rows" else PATCH_EMBED_IMAGES
        chosen = PLANNERS[operation.name].codec.encode(make_plan(problem, arch="sm_90a").config)
        if chosen in found["ours"]:
            own, peer = found["ours"][chosen], min(found["peer"].values(), default=math.inf)
            groups[kind, mode].append((" ".join(shape), own / min(found["ours"].values()), peer / own))
    return groups


def report(groups: Judged) -> None:
    """Prints mean, 95th percentile and most of the regrets, and where peers are nearest."""
    for (kind, mode), values in groups.items():
        regrets = sorted(regret for _, regret, _ in values)
        print(
            f"{kind}, {mode}: {len(values)} shapes, chosen / fastest mean {statistics.mean(regrets):.3f}, "
            f"95% {percentile(regrets):.2f}, most {regrets[-1]:.2f}"
        )
        beside = sorted(each for each in values if each[2] < math.inf)
        if beside:
            ratios = [ratio for *_, ratio in beside]
            print(f"    fastest peer / chosen, {len(beside)}: mean {statistics.geometric_mean(ratios):.2f}", end="")
            print(f", least {min(ratios):.3f}")
        for shape, regret, ratio in sorted(beside, key=lambda each: each[2])[:6]:
            print(f"    images, positions, patch, k, n {shape}: {regret:.3f}, {ratio:.3f}")
