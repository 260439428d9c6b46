"""The dense GEMM against every peer, on one GPU, in the same run.

    python -m bench.gemm                                  # squares of 1024 to 12288
    python -m bench.gemm --suite siglip2                  # the linear layers of SigLIP2
    python -m bench.gemm --suite all --configs candidates # also every configuration that the chooser may take
    python -m bench.gemm --dtype tf32                     # FP32 tensors, multiplied as TF32 by every peer
    python -m bench.gemm --limit 500                      # ends after about 500 s, with fewer rounds where it must

Peers are checked element by element against FP64 before they are timed by the protocol of bench/timing.py. Writes
NAME.json (every run), NAME.md and NAME.png into --output, and prints the geometric mean of each peer's time over ours;
"cuBLAS" is the faster of torch's linear and the best of cuBLASLt's algorithms, per case.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from bench import archive, gemm_cases, patch_embed
from bench.configs import CONFIG_TYPES, arch_of, check_parsable, parse_config
from bench.gemm_cases import GemmCase, GemmData
from bench.peers import OURS, Peer
from bench.peers import gemm_peers as peers_module
from bench.results import CaseResult, PeerResult, Results
from bench.timing import DeviceSampler, Protocol, elapsed_ms, launch_cost, measure
from cute_kernels.config import GemmConfig, GemmProblem, Sm80GemmConfig
from cute_kernels.plan import ARCHS, sm80
from cute_kernels.plan import gemm_sm90 as sm90_gemm
from cute_kernels.plan import gemm_sm100 as sm100_gemm
from cute_kernels.plan.config_codec import spell
from cute_kernels.plan.registry import MMA_SYNC

TORCH, CUBLASLT, CUBLAS = "torch linear", "cuBLASLt", "cuBLAS"

# quack changes CuTe tensor classes of the whole process when it is imported, so it is built last.
PEERS = (
    Peer(OURS, "complete", "gemm_peers", "build_ours"),
    Peer(TORCH, "complete", "gemm_peers", "build_torch"),
    Peer(CUBLASLT, "complete", "gemm_peers", "build_cublaslt"),
    Peer("torch.compile", "complete", "gemm_peers", "build_compiled"),
    Peer("quack", "complete", "gemm_peers", "build_quack"),
)


CANDIDATES: dict[str, tuple[GemmConfig, ...]] = {
    "sm_90a": tuple(plan.config for plan in sm90_gemm.candidates(GemmProblem(4096, 4096, 4096), ARCHS["sm_90a"], 132)),
    "sm_100a": tuple(sm100_gemm.CANDIDATES),
    **dict.fromkeys(MMA_SYNC, tuple(sm80.candidates(Sm80GemmConfig))),
}
"""What the chooser of each architecture chooses from."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; ``cases``, ``protocol`` and ``peers`` of the result are ready to use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("squares", "siglip2", "all"), default="squares")
    parser.add_argument("--sizes", type=int, nargs="+", help="only these squares")
    parser.add_argument("--batches", type=int, nargs="+", help=f"images, default {gemm_cases.BATCHES}")
    parser.add_argument("--dtype", choices=tuple(gemm_cases.DTYPES), default="bf16", help="default: %(default)s")
    parser.add_argument("--peers", nargs="+", help=f"of {', '.join(peer.name for peer in PEERS)}, default all")
    parser.add_argument("--configs", nargs="+", default=[], metavar="FIELD=N,...", help="more of ours, or 'candidates'")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sustained", type=float, metavar="SECONDS", default=0.6)
    parser.add_argument("--settle", type=float, metavar="SECONDS", default=0.0, help="untimed, before a sustained run")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", default=math.inf,
        help="of the whole run: each case gets an equal share of what is left, builds no peer and begins no round (but "
        "the first) after it",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=archive.OUTPUT)
    parser.add_argument("--name", help="of the files, default gemm[-tf32]-SUITE-DATE")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.peers or ()) - {peer.name for peer in PEERS}
    if unknown:
        parser.error(f"peers {sorted(unknown)}: must be one of {', '.join(peer.name for peer in PEERS)}")
    arguments.peers = [peer for peer in PEERS if arguments.peers is None or peer.name in (*arguments.peers, OURS)]
    try:
        for text in arguments.configs:
            if text != "candidates":
                check_parsable(text, CONFIG_TYPES["gemm"].values())
        if not arguments.limit > 0:
            raise ValueError(f"--limit {arguments.limit}: must be a positive number of seconds")
        arguments.protocol = Protocol(
            rounds=arguments.rounds, sustained_s=arguments.sustained, settle_s=arguments.settle, seed=arguments.seed
        )
    except ValueError as error:
        parser.error(str(error))
    arguments.cases = []
    if arguments.suite != "siglip2":
        arguments.cases += gemm_cases.squares(tuple(arguments.sizes or gemm_cases.SQUARES))
    if arguments.suite != "squares":
        arguments.cases += gemm_cases.siglip2(tuple(arguments.batches or gemm_cases.BATCHES))
    arguments.cases = [dataclasses.replace(case, dtype=arguments.dtype) for case in arguments.cases]
    return arguments


def chosen_configs(texts: Sequence[str], arch: str) -> dict[str, GemmConfig]:
    """Configurations of an architecture's kernel, by the text that names them in the table.

    Raises:
        ValueError: as `parse_config`.
    """
    configs: dict[str, GemmConfig] = {}
    for text in texts:
        if text != "candidates":
            configs[text] = parse_config(text, CONFIG_TYPES["gemm"][arch])
            continue
        for config in CANDIDATES[arch]:
            configs[",".join(map(spell, dataclasses.astuple(config)))] = config
    return configs


def run_case(
    case: GemmCase,
    configs: dict[str, GemmConfig],
    arguments: argparse.Namespace,
    device: torch.device,
    sampler: DeviceSampler,
    deadline: float = math.inf,
) -> CaseResult:
    """Builds, checks and times all peers of a case; ``deadline`` as of `measure`, and peers are not built after it."""
    began = time.perf_counter()
    data = GemmData(case, device, arguments.seed)
    entries = [(peer, peer.build) for peer in arguments.peers]
    for index, (text, config) in enumerate(configs.items()):
        entry = Peer(f"{OURS} {text}", "complete", "gemm_peers", "build_ours")
        entries.insert(1 + index, (entry, functools.partial(peers_module.build_ours, config=config)))
    result, launches = CaseResult(case), {}
    for peer, build in entries:
        if peer.name != OURS and time.perf_counter() > deadline:
            result.peers.append(PeerResult(peer.name, peer.scope, reason="the time of this case was up"))
            continue
        entry, candidate = patch_embed.build_and_check(peer, build, data)
        result.peers.append(entry)
        if candidate is not None:
            launches[peer.name] = candidate.launch
        note = entry.reason or entry.detail or "ready"
        print(f"  {peer.name}: {note} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
    runs = measure(launches, arguments.protocol, sampler, case.slots, case=case.name, deadline=deadline)
    for entry in result.peers:
        entry.runs = runs.get(entry.name, [])
        short = entry.runs and elapsed_ms(launches[entry.name], 10, case.slots) < patch_embed.LAUNCH_COST_BELOW_MS
        if short and not entry.name.startswith(f"{OURS} "):
            entry.cost = launch_cost(launches[entry.name], case.slots)
    return result


def ratios(results: Results, mode: str) -> dict[str, list[float]]:
    """For each peer its median over ours, case by case where both ran: above 1 we are faster."""
    found: dict[str, list[float]] = {}
    for case in results.cases:
        medians = {p.name: s.median for p in case.peers if (s := p.summary(mode)) is not None}
        if TORCH in medians and CUBLASLT in medians:
            medians[CUBLAS] = min(medians[TORCH], medians[CUBLASLT])
        for name, median in medians.items():
            if OURS in medians and name != OURS:
                found.setdefault(name, []).append(median / medians[OURS])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if our kernel did not run or was wrong in some case."""
    began = time.perf_counter()
    arguments = parse_arguments(argv)
    if not torch.cuda.is_available():
        print("bench.gemm: no CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        configs = chosen_configs(arguments.configs, arch_of(torch.cuda.get_device_capability(device)))
    except ValueError as error:
        print(f"bench.gemm: {error}", file=sys.stderr)
        return 2
    sampler = DeviceSampler(device)
    today = datetime.datetime.now(datetime.timezone.utc)
    results = Results(
        date=today.strftime("%Y-%m-%d %H:%M UTC"),
        command=patch_embed.recorded_command(sys.argv[1:] if argv is None else argv, "bench.gemm"),
        environment=patch_embed.environment(device, sampler),
        protocol=arguments.protocol,
    )
    # Compiled before quack is imported, which changes CuTe's tensor classes.
    for config in (None, *configs.values()):
        for case in arguments.cases:
            peers_module.compile_ahead(case, config, device)
    kind = "" if arguments.dtype == "bf16" else f"-{arguments.dtype}"
    name = arguments.name or f"gemm{kind}-{arguments.suite}-{today:%Y-%m-%d}"
    for index, case in enumerate(arguments.cases):
        print(case.title, file=sys.stderr, flush=True)
        now = time.perf_counter()
        deadline = now + (began + arguments.limit - now) / (len(arguments.cases) - index)
        results.cases.append(run_case(case, configs, arguments, device, sampler, deadline))
        # Written after every case: an interrupted run keeps what it has measured.
        paths = patch_embed.write(results, arguments.output, name)
        gc.collect()
        torch.cuda.empty_cache()
    patch_embed.print_tables(results, Console(width=None if sys.stdout.isatty() else 190))
    for mode in ("burst", "sustained"):
        for peer, values in ratios(results, mode).items():
            mean, least = statistics.geometric_mean(values), min(values)
            print(f"{mode}: {peer} / {OURS} = {mean:.3f} (geometric mean of {len(values)} cases, least {least:.3f})")
    print(*paths, sep="\n")
    ours_ran = all(peer.runs for result in results.cases for peer in result.peers if peer.name == OURS)
    return 0 if ours_ran else 1


if __name__ == "__main__":
    sys.exit(main())
