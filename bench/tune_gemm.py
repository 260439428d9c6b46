"""The dense GEMM's part of `bench.tune`: what every configuration of the search space takes, and what it says.

Times are those of `cute_kernels.explore.tuning.search`: launches in CUDA graphs, all candidates and torch's own product
in turn, medians of the rounds. The device is hardly ever idle, so that large sizes are timed at the clocks of its power
limit, which moves them by several percent. What the chooser is fitted to is in `bench.choices`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import archive
from bench.compile_ahead import compile_all
from bench.configs import CONFIG_TYPES, arch_of
from bench.gemm_cases import GemmCase, siglip2, squares
from cute_kernels.config import GemmConfig, GemmProblem
from cute_kernels.explore.tuning import search
from cute_kernels.operations.gemm import GEMM
from cute_kernels.plan import candidate_plans, gemm_sm90_fit, make_plan
from cute_kernels.plan import gemm_sm90 as sm90_gemm
from cute_kernels.plan.gemm import GemmPlan

CASES = (
    *squares((512, 1024, 1536, 2048, 3072, 4096)),
    *siglip2((1, 2, 8, 24, 64)),
    *(
        GemmCase(f"{m}x{n}x{k}", m, n, k)
        for m in (16, 128, 512, 2048)
        for n, k in ((4096, 4096), (14336, 4096), (4096, 14336))
    ),
    *siglip2((4736,)),
    *squares((6144, 8192, 10240, 12288)),
)
"""The cases of `bench.gemm` and smaller ones, and linear layers of language models."""

CANDIDATES = 60
"""Of a case, the most promising first; the chooser's own is always among them."""

ROUNDS = 5
TORCH = "torch"


@dataclass(frozen=True)
class Timings:
    """Of one case: microseconds of torch's product, and of each configuration, fastest first."""

    case: GemmCase
    torch: float
    ours: tuple[tuple[float, GemmConfig], ...]


def of_sizes(sizes: Sequence[tuple[int, ...]]) -> list[GemmCase]:
    """Cases of M, N and K, named after them."""
    return [GemmCase("x".join(map(str, size)), *size) for size in sizes]


def problem(case: GemmCase) -> GemmProblem:
    return GemmProblem(case.m, case.n, case.k)


def plans(case: GemmCase, sm_count: int | None = None, arch: str = "sm_90a") -> list[GemmPlan]:
    """What is timed of a case, the chooser's own first."""
    own = make_plan(problem(case), arch=arch, sm_count=sm_count)
    found = candidate_plans(problem(case), arch, sm_count=sm_count)
    return list(dict.fromkeys([own, *found[:CANDIDATES]]))


def measure(path: Path, cases: Sequence[GemmCase] = CASES) -> None:
    """Times all cases on the current device; the file is written anew after each."""
    arch = arch_of(torch.cuda.get_device_capability())
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    began = time.perf_counter()
    count = compile_all(plan for case in cases for plan in plans(case, sm_count, arch))
    print(f"{count} kernels after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    measured: list[Timings] = []
    for case in cases:
        measured.append(time_case(case, plans(case, sm_count, arch)))
        write(path, arch, measured, environment)
        report(measured[-1:], sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()


def time_case(case: GemmCase, candidates: Sequence[GemmPlan]) -> Timings:
    """Every candidate, and the fastest one in other orders of its tiles."""
    inputs = search.input_sets(GEMM, problem(case))
    out = torch.empty(case.m, case.n, device="cuda", dtype=torch.bfloat16)

    def product(i: int, stream: int) -> None:
        torch.mm(inputs[i % len(inputs)].a[0], inputs[0].b[0].T, out=out)

    product(0, 0)
    timers = {TORCH: search.graph_timer(product), **search.timers_of(GEMM, candidates, inputs)}
    times = search.interleaved(timers, ROUNDS)
    best = min(candidates, key=times.__getitem__)
    orders = search.timers_of(GEMM, GEMM.variants(best), inputs)
    times |= search.interleaved({key: timers[key] for key in (TORCH, best)} | orders, ROUNDS)
    microseconds = {key: 1e3 * value for key, value in times.items()}
    reference = microseconds.pop(TORCH)
    ours = sorted(((value, plan.config) for plan, value in microseconds.items()), key=lambda pair: pair[0])
    return Timings(case, reference, tuple(ours))


def write(path: Path, arch: str, measured: Sequence[Timings], environment: dict[str, str]) -> None:
    names = [field.name for field in dataclasses.fields(CONFIG_TYPES["gemm"][arch])]
    cases = [
        {
            "case": [entry.case.name, entry.case.m, entry.case.n, entry.case.k],
            "torch": round(entry.torch, 3),
            "timings": [[round(value, 3), *(getattr(config, name) for name in names)] for value, config in entry.ours],
        }
        for entry in measured
    ]
    document = {"operation": "gemm", "arch": arch, "environment": environment, "fields": names, "cases": cases}
    text = json.dumps(document)
    path.write_text(text.replace("]], ", "]],\n").replace("]]}, ", "]]},\n"))


def read(path: Path, arch: str = "sm_90a") -> list[Timings]:
    """Inverse of `write`.

    Raises:
        ValueError: the timings of another operation or architecture.
    """
    document = json.loads(archive.read_text(path))
    if document.get("operation") != "gemm":
        raise ValueError(f"{path} has no timings of the dense GEMM")
    if document.get("arch", "sm_90a") != arch:
        raise ValueError(f"{path} has timings of {document['arch']}, expected {arch}")
    names, kind = document["fields"], CONFIG_TYPES["gemm"][arch]
    return [
        Timings(
            GemmCase(*entry["case"]),
            entry["torch"],
            tuple((value, kind(**dict(zip(names, rest, strict=True)))) for value, *rest in entry["timings"]),
        )
        for entry in document["cases"]
    ]


def regret(entry: Timings) -> float | None:
    """Time of the chooser's tile, cluster and split over that of the fastest configuration; None if none was timed.

    It chooses among its candidates that were timed. Of the same tile in several orders or with other store stages, what
    the chooser takes, or else the slowest.
    """
    plans = [make_plan(problem(entry.case), config, "sm_90a") for _, config in entry.ours]
    plans = [plan for plan in plans if sm90_gemm.tile(plan.config) in gemm_sm90_fit.CANDIDATES]
    if not plans:
        return None
    best = min(plans, key=sm90_gemm.modelled_clocks)
    chosen = dataclasses.replace(best.config, group_m=sm90_gemm.tile_group(best))
    own = sm90_gemm.tile(chosen)
    times = [(config == chosen, value) for value, config in entry.ours if sm90_gemm.tile(config) == own]
    return max(times)[1] / entry.ours[0][0]


def report(measured: Sequence[Timings], file=None) -> None:
    """One line per case: fastest microseconds, torch's over them, the chooser's regret, the three fastest."""
    for entry in measured:
        own = regret(entry)
        fastest = "; ".join(
            f"{value:.2f} {','.join(str(int(number)) for number in dataclasses.astuple(config))}"
            for value, config in entry.ours[:3]
        )
        print(
            f"{entry.case.name:34} torch / fastest {entry.torch / entry.ours[0][0]:.3f}, chosen / fastest "
            f"{'not timed' if own is None else f'{own:.3f}'}: {fastest}",
            file=file, flush=True,
        )  # fmt: skip
