"""What the kernels of ``mma.sync`` reach on a GPU since Ampere, beside the bare rate and their peers, in one table.

    python -m bench.mma_sync                      # everything: about five minutes
    python -m bench.mma_sync --limit 120          # fewer rounds and peers where it must
    python -m bench.mma_sync --parts tf32 uint8   # some

On a GPU of compute capability 9.0 other kernels are ours by default; those of ``mma.sync`` are asked for by their
configurations, and Triton is told to use the same instruction. Every result is checked before it is timed, by the
protocol of bench/timing.py. Writes NAME.json (every run), NAME.md, NAME.png and NAME-rates.json into --output.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench import archive, gemm, image_cases, images, patch_embed
from bench.configs import arch_of
from bench.gemm_cases import DTYPES, GemmCase
from bench.image_cases import ImagesCase
from bench.peers import OURS, Peer, image_peers
from bench.results import CaseResult, Results
from bench.timing import DeviceSampler, Protocol, elapsed_ms
from cute_kernels.config import GemmProblem, Sm80Config
from cute_kernels.plan import ARCHS, PLANNERS
from cute_kernels.plan.registry import MMA_SYNC

ROUNDINGS = ("truncate", "nearest_a", "nearest")
SQUARES = (1024, 2048, 4096, 8192)
LAYERS = ((12544, 768, 768), (50176, 3072, 768), (50176, 768, 3072))
"""(M, N, K) of linear layers of SigLIP's tower, 64 and 256 images."""

FEW_ROWS = ((16, 768, 3072), (64, 768, 3072), (16, 1152, 4304), (64, 1152, 4304), (16, 4096, 4096))
"""Likewise of few rows, of which a launch has too few tiles for the device, and of a square."""

BATCHES = (64, 512, 4736)
RATES = {"tf32": "float32", "bf16": "bfloat16", "uint8": "uint8", "bfloat16": "bfloat16"}
"""Element type of A by the part of the table that its bare rate belongs to."""

TRITON, TORCH, COMPILED = "Triton mma.sync", "torch linear", "patchify + linear compiled"

PARTS: dict[str, tuple[GemmCase | ImagesCase, ...]] = {
    **{
        dtype: tuple(
            GemmCase(f"{m}x{n}x{k} {dtype}", m, n, k, dtype)
            for m, n, k in (*((s, s, s) for s in SQUARES), *LAYERS, *FEW_ROWS)
        )
        for dtype in DTYPES
    },
    **{
        dtype: tuple(image_cases.make_cases(["base-p16"], BATCHES, dtype)) for dtype in image_cases.PRECISIONS
    },
}  # fmt: skip
"""Cases by name: products of TF32 and BF16, images of uint8 and BF16."""

GEMM_PEERS = (
    Peer(OURS, "complete", "gemm_peers", "build_ours"),
    Peer(TRITON, "complete", "triton_mma", "build"),
    Peer(TORCH, "complete", "gemm_peers", "build_torch"),
)
IMAGE_PEERS = tuple(peer for peer in image_peers.PEERS if peer.name in (OURS, COMPILED))


def mma_arch(arch: str) -> str:
    """The architecture whose kernels multiply by ``mma.sync`` on a device.

    Raises:
        ValueError: there is none.
    """
    capability = ARCHS[arch].compute_capability
    for name in MMA_SYNC:
        if ARCHS[name].compute_capability == capability:
            return name
    allowed = ", ".join("{}.{}".format(*ARCHS[name].compute_capability) for name in MMA_SYNC)
    raise ValueError("compute capability {}.{}: must be one of {}".format(*capability, allowed))


def configs_of(case: GemmCase | ImagesCase, arch: str, sm_count: int) -> dict[str, Sm80Config]:
    """What the plans choose, by what it is called in the table; of TF32 in every rounding."""
    if isinstance(case, ImagesCase):
        operation, problem = "patch_embed_images", image_cases.problem(case)
    else:
        dtype = str(DTYPES[case.dtype]).removeprefix("torch.")
        operation, problem = "gemm", GemmProblem(case.m, case.n, case.k, in_dtype=dtype, out_dtype=dtype)
    _, config = PLANNERS[operation].usual(problem, ARCHS[arch], sm_count)
    if case.dtype != "tf32":
        return {"mma.sync": config}
    return {f"mma.sync {name}": dataclasses.replace(config, rounding=name) for name in ROUNDINGS}


def bare_rates(parts: Sequence[str], arch: str) -> dict[str, float]:
    """Operations per second of ``mma.sync`` alone, by part."""
    from bench import mma_rate  # imports CuTe DSL

    rates = {}
    for part in parts:
        launch, operations = mma_rate.compiled(RATES[part], arch)
        times = [elapsed_ms(launch, 3, 1) for _ in range(7)]
        rates[part] = operations / (sorted(times)[len(times) // 2] / 1e3)
    return rates


def table_of(cases: Sequence[CaseResult], rates: dict[str, float]) -> Table:
    """One row per case: times and shares of the bare rate of each of ours, and what peers take over the best."""
    header = ("case", "ours, ms (of the bare rate)", "over ours: Triton", "torch", "compiled")
    table = Table(*header, title="mma.sync, sustained")
    for result in cases:
        medians = {peer.name: s.median for peer in result.peers if (s := peer.summary("sustained")) is not None}
        ours = {name: ms for name, ms in medians.items() if "mma.sync" in name and name != TRITON}
        rate = rates.get(result.case.dtype)
        shown = [
            f"{name.removeprefix(f'{OURS} ')} {ms:.4g}"
            + (f" ({result.case.flops / (ms / 1e3) / rate:.2f})" if rate else "")
            for name, ms in ours.items()
        ]
        least = min(ours.values(), default=math.nan)
        peers = [f"{medians[name] / least:.2f}" if name in medians else "" for name in (TRITON, TORCH, COMPILED)]
        table.add_row(result.case.name, "\n".join(shown), *peers)
    return table


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; ``protocol`` of the result is ready to use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sustained", type=float, default=0.3, metavar="SECONDS")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="of the whole run, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=archive.OUTPUT)
    parser.add_argument("--name", help="of the files, default mma-sync-DATE")
    arguments = parser.parse_args(argv)
    try:
        arguments.protocol = Protocol(rounds=arguments.rounds, sustained_s=arguments.sustained, seed=arguments.seed)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def run_case(
    case: GemmCase | ImagesCase, arch: str, arguments: argparse.Namespace, sampler: DeviceSampler, deadline: float
) -> CaseResult:
    """A case by the bench of its operation, with our kernels of ``mma.sync`` beside what is ours by default."""
    device = torch.device("cuda", torch.cuda.current_device())
    configs = configs_of(case, arch, torch.cuda.get_device_properties(device).multi_processor_count)
    given = argparse.Namespace(**vars(arguments))
    if isinstance(case, GemmCase):
        given.peers = list(GEMM_PEERS)
        return gemm.run_case(case, configs, given, device, sampler, deadline)
    given.peers, given.configs, given.sweep = list(IMAGE_PEERS), configs, 0
    return images.run_case(case, given, device, sampler, deadline)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a kernel of ours did not run or was wrong in some case."""
    began = time.perf_counter()
    arguments = parse_arguments(argv)
    if not torch.cuda.is_available():
        print("bench.mma_sync: no CUDA device", file=sys.stderr)
        return 2
    try:
        arch = mma_arch(arch_of(torch.cuda.get_device_capability()))
    except ValueError as error:
        print(f"bench.mma_sync: {error}", file=sys.stderr)
        return 2
    sampler = DeviceSampler(torch.device("cuda", torch.cuda.current_device()))
    now = datetime.datetime.now(datetime.timezone.utc)
    results = Results(
        date=now.strftime("%Y-%m-%d %H:%M UTC"),
        command=patch_embed.recorded_command(sys.argv[1:] if argv is None else argv, "bench.mma_sync"),
        environment=patch_embed.environment(torch.device("cuda"), sampler),
        protocol=arguments.protocol,
    )
    name = arguments.name or f"mma-sync-{now:%Y-%m-%d}"
    rates = bare_rates(arguments.parts, arch)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"{name}-rates.json").write_text(json.dumps(rates, indent=1) + "\n")
    cases = [case for part in arguments.parts for case in PARTS[part]]
    for index, case in enumerate(cases):
        print(case.title, file=sys.stderr, flush=True)
        start = time.perf_counter()
        deadline = start + (began + arguments.limit - start) / (len(cases) - index)
        results.cases.append(run_case(case, arch, arguments, sampler, deadline))
        # Written after every case: an interrupted run keeps what it has measured.
        paths = patch_embed.write(results, arguments.output, name)
        gc.collect()
        torch.cuda.empty_cache()
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print("bare mma.sync, T(FL)OP/s: " + ", ".join(f"{part} {rate / 1e12:.0f}" for part, rate in rates.items()))
    console.print(table_of(results.cases, rates))
    print(*paths, sep="\n")
    ran = [peer.runs for result in results.cases for peer in result.peers if peer.name.startswith(f"{OURS} mma.sync")]
    return 0 if ran and all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
