"""Models that nobody chose, of `patch_embed_images` and `patch_embed`: drawn at random, as `bench.choices` times them.

A model is a width, a side of patches and one of images, drawn at random; a shape is one at some number of images, of
which there are 1 to 777. Beside the default and the most promising of `candidate_plans`, some by chance are timed, and
what computes the same: of images a compiled function of normalisation, patches and linear layer, and a convolution of
normalised pixels; of FP8 rows all that cuBLASLt's heuristic proposes, by image with the table as a C operand of stride
0 and by position with biases.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from bench import archive, choices_fit, tune
from bench.configs import parse_first
from bench.peers.cublaslt import CublasError, Matmul, Operand
from cute_kernels.config import (
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Sm90GatherConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
)
from cute_kernels.operations.base import Operation
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES
from cute_kernels.plan import (
    PLANNERS,
    Plan,
    candidate_plans,
    images_chain,
    images_gather,
    images_sm90,
    make_plan,
    patch_embed_sm90,
    patches_sm90,
)
from cute_kernels.plan.images_chain import RowsChainPlan
from cute_kernels.plan.images_gather import Sm90GatherPlan
from cute_kernels.plan.images_sm90 import Sm90ImagesPlan
from cute_kernels.plan.patch_embed_sm90 import Sm90PatchEmbedPlan

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
    """Shapes in the order in which they are timed, and their candidates."""
    return [(shape, candidates(shape)) for shape in draw(seed, count)]


PASSES = (
    (3, 16, 704, "bf16 images"), (2, 37, 384, "bf16 images"), (2, 16, 960, "bf16 images"),
    (3, 18, 2112, "uint8 images"), (1, 16, 768, "uint8 images"), (16, 16, 1152, "bf16 images"),
    (64, 16, 1024, "bf16 images"), (512, 16, 768, "bf16 images"),
)  # fmt: skip
"""Images in patches of 14, patches along a side, features and kind: few of which a pass lays out, and some of many."""


def passes() -> list[tuple[ImagesShape, list[Plan]]]:
    """`PASSES`, each with the three most promising chains of a pass and the kernel over rows."""
    found = []
    for images, grid, n, kind in PASSES:
        problem = problem_of(kind, images, grid**2, "14", 3 * 14**2, n)
        chains = [plan for plan in candidate_plans(problem, "sm_90a") if isinstance(plan, RowsChainPlan)]
        found.append((ImagesShape(len(found), kind, problem), chains[:3]))
    return found


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


# --- fits and regrets ------------------------------------------------------------------------------------------------


RECORDED = tuple(
    archive.recorded(name)
    for name in (
        "2026-11-29-h200/images-*.csv", "2026-11-30-h200/images-*.csv", "2026-11-21-h200/tune.json",
        "2026-11-22-h200/tune-few.json",
        *(f"2026-11-22-h200/images-{name}.json" for name in ("few", "b32-tiles", "bf16", "bf16-few", "split")),
        "2026-11-23-h200/images-channels-last.json",
    )
)  # fmt: skip
"""What the model is fitted to but for the models that are kept out."""

AFTER = (archive.recorded("2026-11-30-h200/after-images-*.csv"),)
"""Models that were drawn after a fit."""


def problem_of(kind: str, images: int, positions: int, patch: str, k: int, n: int) -> Any:
    """The inverse of `ImagesShape.row`."""
    if kind == "fp8 rows":
        return PatchEmbedProblem(images * positions, n, k, positions)
    side = int(patch) * math.isqrt(positions)
    pixels, precision = PIXELS[kind]
    return PatchEmbedImagesProblem(
        images, 3, side, side, int(patch), n, pixels, precision=precision, table_rows=positions
    )


def parsed(row: dict[str, str]) -> tuple[Any, Any]:
    """Of a row of a file."""
    images, positions, k, n = (int(row[name]) for name in ("images", "positions", "k", "n"))
    problem = problem_of(row["kind"], images, positions, row["patch"], k, n)
    operation = PATCH_EMBED if row["kind"] == "fp8 rows" else PATCH_EMBED_IMAGES
    return problem, PLANNERS[operation.name].codec.decode(row["config"]) if row["config"] else None


def read(paths: Iterable[Path]) -> list[choices_fit.Timed]:
    """Models of files of ``time --images``, of ``images*.csv`` in archives, and cases of `bench.tune` and
    `bench.images`."""
    shapes = []
    for file in choices_fit.files_of(paths, "images*.csv"):
        if file.suffix == ".csv":
            shapes += choices_fit.read([file], parsed)
        else:
            shapes += _of_bench_images(file) if file.name.startswith("images") else _of_tune(file)
    return shapes


def _of_tune(file: Path) -> Iterator[choices_fit.Timed]:
    for case, timings in tune.read(file)[1].items():
        shape = choices_fit.Timed("fp8 rows", tune.problem(case))
        shape.times["sustained"].update((config, time) for time, config in timings)
        yield shape


FEW_IMAGES = 128
"""Up to which the time in a CUDA graph is the launch's, and not that of its host."""


def _of_bench_images(file: Path) -> Iterator[choices_fit.Timed]:
    """Cases of which several configurations were timed; also of images whose channels are last."""
    for entry in json.loads(archive.read_text(file))["cases"]:
        case = entry["case"]
        patch, pixels, last = case.get("patch", 16), case.get("dtype", "uint8"), case.get("channels_last", False)
        kind = next(name for name, (dtype, _) in PIXELS.items() if dtype == pixels)
        problem = PatchEmbedImagesProblem(
            case["images"], 3, case["side"], case["side"], patch, case["n"], pixels, precision=PIXELS[kind][1],
            table_rows=(case["side"] // patch) ** 2, channels_last=last,
        )  # fmt: skip
        shape = choices_fit.Timed(kind + ", channels last" * last, problem)
        for peer in entry["peers"]:
            settings = peer["detail"].removeprefix("patchify in front, ").replace(", ", ",").replace(" ", "=")
            if peer["reason"] or not peer["name"].startswith("cute_kernels") or "tile_" not in settings:
                continue
            kinds = Sm90ImagesConfig, Sm90GatherConfig, Sm90PatchEmbedConfig
            config = parse_first(settings.replace("True", "true").replace("False", "false"), kinds)
            runs = [1e3 * run["ms"] for run in peer["runs"] if run["mode"] == "sustained"]
            graph = (peer["cost"] or {}).get("graph")
            time = graph if graph and case["images"] <= FEW_IMAGES else statistics.median(runs)
            shape.times["sustained"][make_plan(problem, config, "sm_90a").config] = time
        if len(shape.times["sustained"]) > 1:
            yield shape


class PatchData(choices_fit.Data):
    start = {
        "once": (2400, 4200, 1300, 480, 470, 6500),
        "epilogue": (11, 150, 220, 4.5, 18),
        "boxes": (2.5, 1.6, 0.5, 0.01, 0.4, 1.2, 0.0023),
        "block": (55, 71, 70),
        "in_turn": (0.57, 0.85),
        "rates": (830, 0.011, 0.0024, 1.8, 2.5, 2.2, 0.8, 0.016),
    }  # fmt: skip

    def __init__(self, shapes: Sequence[choices_fit.Timed]) -> None:
        super().__init__(shapes)
        works = zip(*map(work_of, self.plans), strict=True)
        self.work = patches_sm90.Work(*map(_tensors, works))

    def clocks(self, constants: Any, factors: torch.Tensor) -> torch.Tensor:
        return sum(patches_sm90.parts(self.work, constants))


def work_of(plan: Plan) -> patches_sm90.Work:
    modules = {Sm90ImagesPlan: images_sm90, Sm90GatherPlan: images_gather, Sm90PatchEmbedPlan: patch_embed_sm90}
    return images_chain.work_on_sm90(plan) if isinstance(plan, RowsChainPlan) else modules[type(plan)].work(plan)


def _tensors(values: tuple) -> Any:
    if isinstance(values[0], tuple):
        return tuple(map(choices_fit.tensor, zip(*values, strict=True)))
    return choices_fit.tensor(values)


def text(data: PatchData, model: choices_fit.Model) -> str:
    """The module `cute_kernels.plan.patches_sm90` with a model."""
    modelled = data.clocks({name: torch.tensor(values) for name, values in model[0].items()}, torch.empty(0))
    times = [data.shapes[owner].times["sustained"][plan.config] for owner, plan in zip(data.owners, data.plans)]
    rate = float((modelled / torch.tensor(times)).median())
    lines = f"{choices_fit.constants_text(model)}CLOCKS_PER_MICROSECOND = {rate:.0f}\n"
    return choices_fit.between_marks(Path(patches_sm90.__file__), lines)
