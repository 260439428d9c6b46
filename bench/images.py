"""From images to patch embeddings, against what people run today, on one GPU, in the same run.

    python -m bench.images                              # 224 x 224, 768 features, 1 to 4736 images, all peers
    python -m bench.images --batches 4736               # the headline size alone
    python -m bench.images --batches 4736 --models base-p16 base-p14 vit-b32        # patches that a pass lays out
    python -m bench.images --batches 4736 --channels-last
    python -m bench.images --batches 4736 --channels-last --configs tile_rows=64 tile_rows=128
    python -m bench.images --models so400m-p16-384 --batches 64 512
    python -m bench.images --pixels bfloat16            # from normalised BF16 images
    python -m bench.images --batches 4736 --peers "bf16 on normalised pixels"
    python -m bench.images --pixels bfloat16 --batches 4736 --peers "gemm on BF16 rows" --sweep 16

Every peer is checked, element by element against FP64 with the result poisoned before, and ours from uint8 images bit
by bit against the exact reference as well, before it is timed by the protocol of bench/timing.py. Writes NAME.json
(every run), NAME.md and NAME.png into --output.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import gc
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from bench import archive, image_cases, patch_embed
from bench.cases import BATCHES, fit
from bench.configs import arch_of, parse_first
from bench.image_cases import ImagesCase, ImagesData
from bench.peers import OURS, Peer, image_peers
from bench.results import CaseResult, PeerResult, Results
from bench.timing import DeviceSampler, Protocol, elapsed_ms, launch_cost, measure
from cute_kernels import (
    Sm80ImagesConfig,
    Sm80PatchEmbedConfig,
    Sm90GatherConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100ImagesConfig,
)
from cute_kernels.config import Config
from cute_kernels.plan import ARCHS, PLANNERS
from cute_kernels.plan.config_codec import spell
from cute_kernels.plan.registry import MMA_SYNC

KINDS: dict[str, dict[str, tuple[type[Config], ...]]] = {
    "sm_90a": {"uint8": (Sm90ImagesConfig, Sm90PatchEmbedConfig), "bfloat16": (Sm90GatherConfig, Sm90PatchEmbedConfig)},
    "sm_100a": {"uint8": (Sm100ImagesConfig,)},
    **dict.fromkeys(MMA_SYNC, dict.fromkeys(("uint8", "bfloat16"), (Sm80ImagesConfig, Sm80PatchEmbedConfig))),
}
"""Tunables of our kernels by architecture and type of the pixels."""


def architecture() -> str:
    """That of the device at hand; SM90's without one, whose command lines can be checked anywhere."""
    return arch_of(torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90a"


def swept_configs(case: ImagesCase, count: int) -> dict[str, Config]:
    """By their settings, the ``count`` configurations of our kernel that its plans would time first."""
    arch = architecture()
    planner, limits = PLANNERS["patch_embed_images"], ARCHS[arch]
    plans = planner.search(image_cases.problem(case), limits, limits.sm_count)[:count] if count else []
    return {
        ",".join(f"{name}={spell(value)}" for name, value in dataclasses.asdict(plan.config).items()): plan.config
        for plan in plans
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; ``cases``, ``protocol``, ``peers`` and ``configs`` of the result are ready to use."""
    known = [peer.name for peer in image_peers.PEERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["base-p16"], help=f"of {', '.join(image_cases.MODELS)}")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help=f"images, default {BATCHES}")
    parser.add_argument("--peers", nargs="+", choices=known, metavar="NAME", help=f"of {', '.join(known)}; default all")
    pixels = tuple(KINDS["sm_90a"])
    parser.add_argument("--pixels", choices=pixels, default="uint8", help="raw uint8 images, or normalised BF16 ones")
    parser.add_argument("--channels-last", action="store_true", help="the channels of a pixel are neighbours in memory")
    parser.add_argument("--configs", nargs="+", default=[], metavar="FIELD=VALUE,...", help="more of our kernel")
    parser.add_argument("--sweep", type=int, default=0, metavar="COUNT", help="more of our kernel, BF16 only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sustained", type=float, default=0.6, metavar="SECONDS")
    parser.add_argument("--settle", type=float, default=0.2, metavar="SECONDS", help="untimed, before a sustained run")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="of the whole run, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=archive.OUTPUT)
    parser.add_argument("--name", help="of the files, default images-DATE")
    arguments = parser.parse_args(argv)
    chosen = arguments.peers or known
    arguments.peers = [peer for peer in image_peers.PEERS if peer.name in chosen or peer.name == OURS]
    try:
        arch = architecture()
        if arguments.pixels not in KINDS[arch]:
            raise ValueError(f"--pixels {arguments.pixels}, allowed on {arch}: {', '.join(KINDS[arch])}")
        arguments.configs = {text: parse_first(text, KINDS[arch][arguments.pixels]) for text in arguments.configs}
        arguments.protocol = Protocol(
            rounds=arguments.rounds, sustained_s=arguments.sustained, settle_s=arguments.settle, seed=arguments.seed
        )
        arguments.cases = image_cases.make_cases(
            arguments.models, arguments.batches, arguments.pixels, arguments.channels_last
        )
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    return arguments


def run_case(
    case: ImagesCase, arguments: argparse.Namespace, device: torch.device, sampler: DeviceSampler, deadline: float
) -> CaseResult:
    """Builds, checks and times all peers of a case; ``deadline`` as of `measure`, and peers are not built after it."""
    if device.type == "cuda":
        case = fit(case, torch.cuda.mem_get_info(device)[0])
    data = ImagesData(case, device, arguments.seed)
    entries = [(peer, peer.build) for peer in arguments.peers]
    configs = arguments.configs | swept_configs(case, arguments.sweep)
    for index, (text, config) in enumerate(configs.items()):
        entry = Peer(f"{OURS} {text}", "complete", "image_peers", "build_ours")
        entries.insert(1 + index, (entry, functools.partial(image_peers.build_ours, config=config)))
    torch._dynamo.reset()  # a size is compiled in, and the compiled functions of a case live as long as it
    result, candidates = CaseResult(case), {}
    for peer, build in entries:
        began = time.perf_counter()
        if peer.name != OURS and began > deadline:
            result.peers.append(PeerResult(peer.name, peer.scope, reason="the time of this case was up"))
            continue
        entry, candidate = patch_embed.build_and_check(peer, build, data)
        result.peers.append(entry)
        if candidate is not None:
            candidates[peer.name] = candidate
        note = entry.reason or entry.detail or "ready"
        print(f"  {peer.name}: {note} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
    launches = {name: candidate.launch for name, candidate in candidates.items()}
    runs = measure(launches, arguments.protocol, sampler, case.slots, case=case.name, deadline=deadline)
    for entry in result.peers:
        entry.runs = runs.get(entry.name, [])
        short = entry.runs and elapsed_ms(launches[entry.name], 10, case.slots) < patch_embed.LAUNCH_COST_BELOW_MS
        if short and entry.scope != "copy":
            candidate = candidates[entry.name]
            entry.cost = launch_cost(candidate.launch, case.slots, around_capture=candidate.around_capture)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if our kernel did not run or was wrong in some case."""
    began = time.perf_counter()
    arguments = parse_arguments(argv)
    if not torch.cuda.is_available():
        print("bench.images: no CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    sampler = DeviceSampler(device)
    now = datetime.datetime.now(datetime.timezone.utc)
    results = Results(
        date=now.strftime("%Y-%m-%d %H:%M UTC"),
        command=patch_embed.recorded_command(sys.argv[1:] if argv is None else argv, "bench.images"),
        environment=patch_embed.environment(device, sampler),
        protocol=arguments.protocol,
    )
    name = arguments.name or f"images-{now:%Y-%m-%d}"
    for index, case in enumerate(arguments.cases):
        print(case.title, file=sys.stderr, flush=True)
        start = time.perf_counter()
        deadline = start + (began + arguments.limit - start) / (len(arguments.cases) - index)
        results.cases.append(run_case(case, arguments, device, sampler, deadline))
        # Written after every case: an interrupted run keeps what it has measured.
        paths = patch_embed.write(results, arguments.output, name)
        gc.collect()
        torch.cuda.empty_cache()
    patch_embed.print_tables(results, Console(width=None if sys.stdout.isatty() else 190))
    print(*paths, sep="\n")
    ours_ran = all(peer.runs for result in results.cases for peer in result.peers if peer.name == OURS)
    return 0 if ours_ran else 1


if __name__ == "__main__":
    sys.exit(main())
