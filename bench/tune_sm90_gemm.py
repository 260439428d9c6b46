"""The dense GEMM's part of `bench.tune_sm90`: what every configuration of the search space takes, and what it says.

Times are those of `cute_kernels.tune`: launches in CUDA graphs, all candidates and torch's own product in turn, medians
of the rounds. The device is hardly ever idle, so that large sizes are timed at the clocks of its power limit.
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

from bench.gemm_cases import GemmCase, siglip2, squares
from cute_kernels.config import GemmProblem, Sm90GemmConfig
from cute_kernels.plan import GemmPlan, gemm_candidates, make_plan

CASES = (*squares(), *siglip2((1, 8, 64, 4736)))
CANDIDATES = 40
"""Of a case, the most promising first; the chooser's own is always among them."""

ROUNDS = 5
TORCH = "torch"


@dataclass(frozen=True)
class Timings:
    """Of one case: microseconds of torch's product, and of each configuration, fastest first."""

    case: GemmCase
    torch: float
    ours: tuple[tuple[float, Sm90GemmConfig], ...]


def problem(case: GemmCase) -> GemmProblem:
    return GemmProblem(case.m, case.n, case.k)


def plans(case: GemmCase, sm_count: int | None = None) -> list[GemmPlan]:
    """What is timed of a case, the chooser's own first."""
    own = make_plan(problem(case), arch="sm_90a", sm_count=sm_count)
    found = gemm_candidates(problem(case), "sm_90a", sm_count=sm_count)
    return list(dict.fromkeys([own, *found[:CANDIDATES]]))


def measure(path: Path, cases: Sequence[GemmCase] = CASES) -> None:
    """Times all cases on the current device; the file is written anew after each."""
    import torch

    from bench.tune_sm90 import compile_all

    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    began = time.perf_counter()
    count = compile_all(plan for case in cases for plan in plans(case, sm_count))
    print(f"{count} kernels after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    measured: list[Timings] = []
    for case in cases:
        measured.append(time_case(case, plans(case, sm_count)))
        write(path, measured, environment)
        report(measured[-1:], sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()


def time_case(case: GemmCase, candidates: Sequence[GemmPlan]) -> Timings:
    """Every candidate, and the fastest one in other orders of its tiles."""
    import torch

    from cute_kernels import tune

    rows, weight, bias = tune.gemm_inputs(problem(case))
    out = torch.empty(case.m, case.n, device="cuda", dtype=torch.bfloat16)

    def product(i: int, stream: int) -> None:
        torch.mm(rows[i % len(rows)][0], weight[0].T, out=out)

    product(0, 0)
    timers = {TORCH: tune.graph_timer(product), **tune.gemm_timers(problem(case), candidates, (rows, weight, bias))}
    times = tune.interleaved(timers, ROUNDS)
    best = min(candidates, key=times.__getitem__)
    orders = tune.gemm_timers(problem(case), tune.variants(best), (rows, weight, bias))
    times |= tune.interleaved({key: timers[key] for key in (TORCH, best)} | orders, ROUNDS)
    microseconds = {key: 1e3 * value for key, value in times.items()}
    reference = microseconds.pop(TORCH)
    ours = sorted(((value, plan.config) for plan, value in microseconds.items()), key=lambda pair: pair[0])
    return Timings(case, reference, tuple(ours))


def write(path: Path, measured: Sequence[Timings], environment: dict[str, str]) -> None:
    names = [field.name for field in dataclasses.fields(Sm90GemmConfig)]
    cases = [
        {
            "case": [entry.case.name, entry.case.m, entry.case.n, entry.case.k],
            "torch": round(entry.torch, 3),
            "timings": [[round(value, 3), *(getattr(config, name) for name in names)] for value, config in entry.ours],
        }
        for entry in measured
    ]
    text = json.dumps({"operation": "gemm", "environment": environment, "fields": names, "cases": cases})
    path.write_text(text.replace("]], ", "]],\n").replace("]]}, ", "]]},\n"))


def read(path: Path) -> list[Timings]:
    """Inverse of `write`.

    Raises:
        ValueError: the timings of another operation.
    """
    document = json.loads(path.read_text())
    if document.get("operation") != "gemm":
        raise ValueError(f"{path} has no timings of the dense GEMM")
    names = document["fields"]
    return [
        Timings(
            GemmCase(*entry["case"]),
            entry["torch"],
            tuple((value, Sm90GemmConfig(**dict(zip(names, rest, strict=True)))) for value, *rest in entry["timings"]),
        )
        for entry in document["cases"]
    ]


def regret(entry: Timings) -> float | None:
    """Time of the chooser's configuration over that of the fastest; None if it was not timed."""
    chosen = make_plan(problem(entry.case), arch="sm_90a").config
    times = {config: value for value, config in entry.ours}
    return times[chosen] / entry.ours[0][0] if chosen in times else None


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
