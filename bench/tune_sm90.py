"""Where the default configurations of SM90 come from: times every candidate, then fits the predicted time.

    python -m bench.tune_sm90 measure --output FILE.json   # on an SM90 GPU
    python -m bench.tune_sm90 fit FILE.json                 # anywhere: coefficients and how well they choose
    python -m bench.tune_sm90 measure --operation gemm --output FILE.json   # the dense GEMM: bench/tune_sm90_gemm.py
    python -m bench.tune_sm90 fit --operation gemm FILE.json ...

A time is that of one launch in a CUDA graph of 24, median of 7 replays; every candidate's output is compared with
FP64 first. The fit is non-negative least squares on relative errors per class (weight, order), where a timing counts
less the slower it is: what matters is that the best are predicted well. "Regret" is the time of the chosen candidate
over that of the fastest; "unseen" is the regret when the case itself was left out of the fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import nnls

from bench import tune_sm90_gemm
from bench.compile_ahead import compile_all
from cute_kernels.config import PatchEmbedProblem, Sm90PatchEmbedConfig
from cute_kernels.operations.table import build_table
from cute_kernels.plan import ARCHS, Sm90PatchEmbedPlan
from cute_kernels.plan.patch_embed import sm90_default as default
from cute_kernels.runtime.gpu import bound_launch
from cute_kernels.tuning.search import replay_timer

SIZES = (
    (196, 768, 768), (256, 768, 768), (576, 768, 768), (1024, 768, 768), (256, 1024, 768), (576, 1024, 768),
    (1024, 1024, 768), (256, 1152, 768), (576, 1152, 768), (1024, 1152, 768), (256, 1152, 592), (729, 1152, 592),
    (256, 1536, 768), (576, 1536, 768),
)  # fmt: skip
"""(positions, N, K) of the models that bench/cases.py lists."""

CASES = (
    *((*size, images) for size in SIZES for images in (1, 8, 64)),
    (196, 768, 768, 3), (196, 768, 768, 24), (196, 768, 768, 512), (256, 1152, 592, 512), (196, 768, 768, 16),
    (256, 1152, 768, 16), (576, 1024, 768, 16), (1024, 768, 768, 32),
)  # fmt: skip
"""(positions, N, K, images)."""

ARCH = ARCHS["sm_90a"]
LAUNCHES, REPLAYS, SCALE = 24, 7, 0.05
CHECKED_ROWS = 20_000
FAST_ENOUGH = 2.2
"""Slower candidates than this many times the fastest say nothing about the choice and are left out of the fit."""

Case = tuple[int, int, int, int]
Timing = tuple[float, Sm90PatchEmbedConfig]


def problem(case: Case) -> PatchEmbedProblem:
    positions, n, k, images = case
    return PatchEmbedProblem(images * positions, n, k, positions)


def candidates(case: Case) -> list[Sm90PatchEmbedPlan]:
    return list(default.candidates(problem(case), ARCH, ARCH.sm_count))


# --- measuring -------------------------------------------------------------------------------------------------------


def time_case(case: Case) -> list[Timing]:
    """Microseconds of every candidate, fastest first.

    Raises:
        AssertionError: a candidate computes something else.
    """
    positions, n, k, images = case
    rows = images * positions
    slots = 8 if rows <= CHECKED_ROWS else 2
    device = torch.device("cuda")
    x = [torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for _ in range(slots)]
    weight = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    bias, pos = torch.randn(n, device=device), torch.randn(positions, n, device=device)
    out = [torch.empty(rows, n, device=device, dtype=torch.bfloat16) for _ in range(slots)]
    checked = min(rows, CHECKED_ROWS)
    expected = x[0][:checked].double() @ weight.double().T * SCALE
    expected += (bias + pos).double().repeat(images, 1)[:checked]

    timings = []
    for plan in candidates(case):
        table = build_table(
            bias, pos, positions=positions, columns=plan.padded_n, dtype=torch.float32, layout=plan.table_layout
        )
        call = bound_launch(plan).with_constants(
            ("x", "out", "stream"), weight=weight.data_ptr(), table=table.data_ptr(), scale=SCALE
        )

        def launch(i: int, stream: int, table=table, call=call) -> None:
            slot = i % slots
            call(x[slot].data_ptr(), out[slot].data_ptr(), stream)

        out[0].fill_(float("nan"))
        launch(0, torch.cuda.current_stream().cuda_stream)
        error = (out[0][:checked].double() - expected).norm() / expected.norm()
        assert error < 0.01, f"{plan.config}: relative error {float(error):.3g}"
        timer = replay_timer(launch, LAUNCHES)
        timer()
        timings.append((1e3 * statistics.median(timer() for _ in range(REPLAYS)), plan.config))
    return sorted(timings, key=lambda timing: timing[0])


# --- fitting ---------------------------------------------------------------------------------------------------------


def fit(measured: dict[Case, list[Timing]]) -> dict[tuple[str, str], tuple[float, ...]]:
    """Coefficients of `cute_kernels.plan.patch_embed.sm90_default.facts` per class."""
    rows: dict[tuple[str, str], list[tuple[np.ndarray, float]]] = {}
    for case, timings in measured.items():
        fastest = timings[0][0]
        for time, config in timings:
            if time <= FAST_ENOUGH * fastest:
                importance = (fastest / time) ** 3 / time
                facts = np.array(default.facts(Sm90PatchEmbedPlan(problem(case), config, ARCH, ARCH.sm_count)))
                rows.setdefault((config.weight, config.order), []).append((facts * importance, time * importance))
    return {
        key: tuple(round(float(value), 3) for value in nnls(np.array([a for a, _ in equations]),
                                                            np.array([b for _, b in equations]))[0])
        for key, equations in rows.items()
    }  # fmt: skip


def regret(case: Case, timings: Sequence[Timing], coefficients: dict[tuple[str, str], tuple[float, ...]]) -> float:
    """Time of the candidate with the least predicted time over that of the fastest."""

    def predicted(config: Sm90PatchEmbedConfig) -> float:
        plan = Sm90PatchEmbedPlan(problem(case), config, ARCH, ARCH.sm_count)
        pairs = zip(coefficients[config.weight, config.order], default.facts(plan), strict=True)
        return sum(a * b for a, b in pairs)

    return min(timings, key=lambda timing: predicted(timing[1]))[0] / timings[0][0]


def read(path: Path) -> dict[Case, list[Timing]]:
    document = json.loads(path.read_text())
    names = document["fields"]
    return {
        tuple(entry["case"]): [
            (time, Sm90PatchEmbedConfig(**dict(zip(names, values, strict=True)))) for time, *values in rows
        ]
        for entry in document["cases"]
        for rows in [entry["timings"]]
    }


def write(path: Path, measured: dict[Case, list[Timing]], environment: dict[str, str]) -> None:
    names = [field.name for field in dataclasses.fields(Sm90PatchEmbedConfig)]
    cases = [
        {
            "case": case,
            "timings": [
                [round(time, 3), *(getattr(config, name) for name in names)]
                for time, config in timings
                if time <= FAST_ENOUGH * timings[0][0]
            ],
        }
        for case, timings in measured.items()
    ]
    path.write_text(json.dumps({"environment": environment, "fields": names, "cases": cases}).replace("]], ", "]],\n"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring, fitting = commands.add_parser("measure"), commands.add_parser("fit")
    measuring.add_argument("--output", type=Path, required=True)
    fitting.add_argument("files", type=Path, nargs="+", help="of measure; of the GEMM also of bench.gemm --configs")
    for command in (measuring, fitting):
        command.add_argument("--operation", choices=("patch-embed", "gemm"), default="patch-embed")
    arguments = parser.parse_args(argv)
    if arguments.operation == "gemm":
        if arguments.command == "measure":
            tune_sm90_gemm.measure(arguments.output)
        else:
            tune_sm90_gemm.report_fit(arguments.files)
        return 0
    if arguments.command == "measure":
        print(f"{compile_all(plan for case in CASES for plan in candidates(case))} kernels", file=sys.stderr)
        measured = {}
        for case in CASES:
            measured[case] = time_case(case)
            time, config = measured[case][0]
            print(f"{case}: {time:.2f} us, {config}", file=sys.stderr, flush=True)
        write(arguments.output, measured, {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__})
        return 0
    measured = {case: timings for path in arguments.files for case, timings in read(path).items()}
    coefficients = fit(measured)
    for key, values in coefficients.items():
        print(f"{key}: {values},")
    print(f"\n{'case (positions, N, K, images)':34}{'fastest us':>12}{'regret':>9}{'unseen':>9}")
    for case, timings in measured.items():
        others = fit({other: rows for other, rows in measured.items() if other != case})
        seen, unseen = (regret(case, timings, model) for model in (coefficients, others))
        print(f"{case!s:34}{timings[0][0]:12.2f}{seen:9.3f}{unseen:9.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
