"""Times every candidate of the patch embed of rows, or of the dense GEMM, at sizes that were chosen by hand.

    python -m bench.tune measure --output FILE.json    # on an SM90 or SM100 GPU
    python -m bench.tune report FILE.json              # anywhere: what each configuration takes over the fastest
    python -m bench.tune measure --operation gemm --output FILE.json   # the dense GEMM: bench/tune_gemm.py

A time is that of one launch in a CUDA graph of 24, median of 7 replays; every candidate's output is compared with
FP64 first. `bench.choices fit --images` reads files of SM90; SM100's patch embed has one default for all sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import archive, tune_gemm
from bench.compile_ahead import compile_all
from bench.configs import CONFIG_TYPES, arch_of
from cute_kernels.config import PatchEmbedConfig, PatchEmbedProblem, Sm100PatchEmbedConfig
from cute_kernels.explore.tuning.search import replay_timer
from cute_kernels.operations.runtime.gpu import bound_launch
from cute_kernels.operations.table import build_table
from cute_kernels.plan import ARCHS, Plan, make_plan
from cute_kernels.plan import patch_embed_sm90 as default

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

LAUNCHES, REPLAYS, SCALE = 24, 7, 0.05
CHECKED_ROWS = 20_000
FAST_ENOUGH = 2.2
"""Slower candidates than this many times the fastest say nothing about the choice and are not recorded."""

Case = tuple[int, int, int, int]
Timing = tuple[float, PatchEmbedConfig]


def problem(case: Case) -> PatchEmbedProblem:
    positions, n, k, images = case
    return PatchEmbedProblem(images * positions, n, k, positions)


def candidates(case: Case, arch: str = "sm_90a", sm_count: int | None = None) -> list[Plan]:
    """What is timed of a case: SM90's search space, or every legal configuration of SM100."""
    count = ARCHS[arch].sm_count if sm_count is None else sm_count
    if arch == "sm_90a":
        return list(default.candidates(problem(case), ARCHS[arch], count))
    plans = []
    for values in itertools.product((128, 256), range(2, 9), (4, 5), (16, 32, 64)):
        with contextlib.suppress(ValueError):
            plans.append(make_plan(problem(case), Sm100PatchEmbedConfig(*values), arch, sm_count=count))
    return plans


# --- measuring -------------------------------------------------------------------------------------------------------


def time_case(case: Case, plans: Sequence[Plan]) -> list[Timing]:
    """Microseconds of every plan, fastest first.

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
    for plan in plans:
        table = build_table(bias, pos, plan.table_shape, plan.table_layout)
        call = bound_launch(plan).with_constants(
            ("x", "out", "stream"), weight=weight.data_ptr(), table=table.data_ptr(), scale=SCALE
        )

        def launch(i: int, stream: int, table=table, call=call) -> None:
            slot = i % slots
            call((x[slot].data_ptr(), out[slot].data_ptr(), stream))

        out[0].fill_(float("nan"))
        launch(0, torch.cuda.current_stream().cuda_stream)
        error = (out[0][:checked].double() - expected).norm() / expected.norm()
        assert error < 0.01, f"{plan.config}: relative error {float(error):.3g}"
        timer = replay_timer(launch, LAUNCHES)
        timer()
        timings.append((1e3 * statistics.median(timer() for _ in range(REPLAYS)), plan.config))
    return sorted(timings, key=lambda timing: timing[0])


# --- files -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[str, dict[Case, list[Timing]]]:
    """Architecture and timings: the inverse of `write`."""
    document = json.loads(archive.read_text(path))
    names, arch = document["fields"], document.get("arch", "sm_90a")
    return arch, {
        tuple(entry["case"]): [
            (time, CONFIG_TYPES["patch_embed"][arch](**dict(zip(names, values, strict=True)))) for time, *values in rows
        ]
        for entry in document["cases"]
        for rows in [entry["timings"]]
    }


def write(path: Path, arch: str, measured: dict[Case, list[Timing]], environment: dict[str, str]) -> None:
    names = [field.name for field in dataclasses.fields(CONFIG_TYPES["patch_embed"][arch])]
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
    document = {"arch": arch, "environment": environment, "fields": names, "cases": cases}
    path.write_text(json.dumps(document).replace("]], ", "]],\n"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring, reporting = commands.add_parser("measure"), commands.add_parser("report")
    measuring.add_argument("--output", type=Path, required=True)
    measuring.add_argument(
        "--cases", type=sizes, nargs="+", metavar="A,B,..",
        help="instead of all: positions,N,K,images of the patch embed, or M,N,K of the dense GEMM",
    )  # fmt: skip
    measuring.add_argument("--operation", choices=("patch-embed", "gemm"), default="patch-embed")
    reporting.add_argument("files", type=Path, nargs="+", help="of measure")
    arguments = parser.parse_args(argv)
    if arguments.command == "report":
        report(arguments.files)
    elif arguments.operation == "gemm":
        cases = tune_gemm.CASES if arguments.cases is None else tune_gemm.of_sizes(arguments.cases)
        tune_gemm.measure(arguments.output, cases)
    else:
        measure(arguments.output, CASES if arguments.cases is None else arguments.cases)
    return 0


def sizes(text: str) -> tuple[int, ...]:
    """Inverse of writing sizes with commas."""
    return tuple(int(size) for size in text.split(","))


def measure(path: Path, cases: Sequence[Case] = CASES) -> None:
    """Times the cases on the current device; the file is written anew after each."""
    arch = arch_of(torch.cuda.get_device_capability())
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    plans = {case: candidates(case, arch, sm_count) for case in cases}
    print(f"{compile_all(plan for group in plans.values() for plan in group)} kernels", file=sys.stderr)
    measured = {}
    for case in cases:
        measured[case] = time_case(case, plans[case])
        time, config = measured[case][0]
        print(f"{case}: {time:.2f} us, {config}", file=sys.stderr, flush=True)
        write(path, arch, measured, {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__})


def report(paths: Sequence[Path]) -> None:
    """Prints what each configuration takes over the fastest.

    Raises:
        ValueError: timings of several architectures.
    """
    files = [read(path) for path in paths]
    archs = {arch for arch, _ in files}
    measured = {case: timings for _, cases in files for case, timings in cases.items()}
    if len(archs) > 1:
        raise ValueError(f"timings of {' and '.join(sorted(archs))}: must be those of one architecture")
    for mean, most, count, config in overall(measured):
        print(f"mean {mean:.3f}, most {most:.3f} of the fastest in {count} of {len(measured)} cases: {config}")


def overall(measured: dict[Case, list[Timing]]) -> list[tuple[float, float, int, PatchEmbedConfig]]:
    """Per configuration: geometric mean and largest of its times over the fastest, number of cases; best first.

    Those that were recorded in most cases come first: where one is missing, it was slower than `FAST_ENOUGH`.
    """
    ratios: dict[PatchEmbedConfig, list[float]] = {}
    for timings in measured.values():
        for time, config in timings:
            ratios.setdefault(config, []).append(time / timings[0][0])
    rows = [(statistics.geometric_mean(values), max(values), len(values), key) for key, values in ratios.items()]
    return sorted(rows, key=lambda row: (-row[2], row[0]))


if __name__ == "__main__":
    sys.exit(main())
