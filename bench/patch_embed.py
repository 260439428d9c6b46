"""The fused patch embed against every peer, on one GPU, in the same run.

    python -m bench.patch_embed                 # the headline size: 4736 images of 196 positions, all peers
    python -m bench.patch_embed --suite models  # the table of models and batches
    python -m bench.patch_embed --quick         # the headline size, fewer and shorter rounds

Every peer is checked, element by element against FP64 on random normal data with poisoned outputs, before it is timed
by the protocol of bench/timing.py. A peer that cannot run is shown with the reason. Writes NAME.json (every run),
NAME.md and NAME.png into --output.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import hashlib
import importlib.metadata
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import cute_kernels
from bench import archive
from bench import cases as case_module
from bench import results as results_module
from bench.cases import Case, CaseData
from bench.configs import arch_of, check_parsable, parse_first, rows_type
from bench.gemm_cases import GemmData
from bench.image_cases import ImagesData
from bench.peers import OURS, Candidate, Peer, PeerUnavailable, cublaslt, ours, select
from bench.results import CaseResult, PeerResult, Results
from bench.timing import DeviceSampler, Protocol, elapsed_ms, launch_cost, measure
from cute_kernels.config import PatchEmbedConfig
from cute_kernels.plan import PLANNERS

LAUNCH_COST_BELOW_MS = 0.2
"""Launch cost is measured where a launch is short enough for it to count."""

ROWS = {"fp8": "float8_e4m3fn", "bf16": "bfloat16"}
"""Element types of rows, as torch names them."""

_LOST_CONTEXT = getattr(torch, "AcceleratorError", ())
"""What torch raises for a CUDA error, from 2.8 on."""

_PACKAGES = ("nvidia-cutlass-dsl", "triton", "quack-kernels", "nvidia-cublas", "numpy")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; ``cases``, ``protocol`` and ``peers`` of the result are ready to use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("headline", "models"), default="headline")
    parser.add_argument("--models", nargs="+", help=f"of {', '.join(case_module.MODELS)}")
    parser.add_argument("--positions", type=int, nargs="+", help="only these numbers of positions")
    parser.add_argument("--batches", type=int, nargs="+", help=f"images, default {case_module.BATCHES}")
    parser.add_argument("--peers", nargs="+", help="names of peers, default all")
    parser.add_argument("--configs", nargs="+", default=[], metavar="FIELD=VALUE,...", help="more of our kernel")
    parser.add_argument("--rows", choices=tuple(ROWS), help="element type, default: fp8 where it has a kernel")
    parser.add_argument("--rounds", type=int, help="default 7, quick 3")
    parser.add_argument("--sustained", type=float, metavar="SECONDS", help="default 0.6, quick 0.2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=archive.OUTPUT)
    parser.add_argument("--name", help="of the files, default SUITE-DATE")
    arguments = parser.parse_args(argv)
    try:
        arguments.peers = select(arguments.peers)
        for text in arguments.configs:
            check_parsable(text, PLANNERS["patch_embed"].kinds)
        arguments.protocol = Protocol(
            rounds=arguments.rounds if arguments.rounds is not None else 3 if arguments.quick else 7,
            sustained_s=arguments.sustained if arguments.sustained is not None else 0.2 if arguments.quick else 0.6,
            seed=arguments.seed,
        )
        arguments.cases = _cases(arguments)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def chosen_configs(texts: Sequence[str], arch: str) -> dict[str, PatchEmbedConfig]:
    """Configurations of an architecture's kernel, by the text that names them in the table.

    Raises:
        ValueError: as `parse_config`.
    """
    kinds = [kernel.config for kernel in PLANNERS["patch_embed"].of(arch)]
    return {text: parse_first(text, kinds) for text in texts}


def _cases(arguments: argparse.Namespace) -> list[Case]:
    if arguments.suite == "headline":
        given = [name for name in ("models", "positions", "batches") if getattr(arguments, name)]
        if given:
            raise ValueError(f"--{given[0]} needs --suite models")
        return [case_module.headline()]
    batches = arguments.batches or ((1, 64) if arguments.quick else case_module.BATCHES)
    return case_module.make_cases(arguments.models or list(case_module.MODELS), arguments.positions, batches)


def recorded_command(argv: Sequence[str], program: str = "bench.patch_embed") -> str:
    """The command line without ``--output`` and ``--name``: where files went on one machine does not repeat a run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output")
    parser.add_argument("--name")
    _, rest = parser.parse_known_args(list(argv))
    return " ".join([f"python -m {program}", shlex.join(rest)]).strip()


def source_digest() -> str:
    """What was measured: a digest of the package without the emulator, equal at every commit that has the same."""
    root = Path(cute_kernels.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if "emulator" not in path.parts:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def environment(device: torch.device, sampler: DeviceSampler) -> dict[str, str]:
    """What the numbers depend on."""
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "gpu": f"{properties.name}, {properties.multi_processor_count} SMs, limit {sampler.power_limit_watts:.0f} W",
        "driver": sampler.driver,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
    }
    facts["cute_kernels source"] = source_digest()
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    with contextlib.suppress(ImportError):
        facts["cuBLASLt"] = cublaslt.version()
    return facts


def build_and_check(peer: Peer, build, data: CaseData | GemmData | ImagesData) -> tuple[PeerResult, Candidate | None]:
    """A peer's candidate, or the reason why there is none. A wrong result is a reason."""
    result = PeerResult(peer.name, peer.scope)
    try:
        candidate = build(data)
        result.detail = candidate.detail
        if peer.scope != "copy":
            data.poison()
            out = candidate.launch(0)
            if data.device.type == "cuda":
                torch.cuda.synchronize(data.device)
            result.check = data.check(out, with_table=peer.scope != "GEMM only")
            if not result.check.passed:
                result.reason = (
                    f"WRONG: row error {result.check.row_error:.3g}, {result.check.unwritten} elements unwritten"
                )
                if not math.isfinite(result.check.row_error):
                    result.check = None  # JSON has no NaN and no infinity; the reason says it
                return result, None
    except PeerUnavailable as error:
        result.reason = str(error)
    except _LOST_CONTEXT:
        raise  # the context is lost: whatever followed would be noise
    except Exception as error:  # a peer's failure is a row of the table, and the others still count
        result.reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    else:
        return result, candidate
    return result, None


def run_case(
    case: Case,
    configs: dict[str, PatchEmbedConfig],
    arguments: argparse.Namespace,
    device: torch.device,
    sampler: DeviceSampler,
) -> CaseResult:
    """Builds, checks and times all peers of a case, and our kernel in ``configs`` besides."""
    case = case_module.fit(case, torch.cuda.mem_get_info(device)[0])
    data = CaseData(case, device, arguments.seed)
    entries = [(peer, peer.build) for peer in arguments.peers]
    for text, config in configs.items():
        entry = Peer(f"{OURS} {text}", "complete", "ours", "build")
        entries.insert(1, (entry, functools.partial(ours.build, config=config)))
    result, candidates = CaseResult(case), {}
    for peer, build in entries:
        entry, candidate = build_and_check(peer, build, data)
        result.peers.append(entry)
        if candidate is not None:
            candidates[peer.name] = candidate
        print(f"  {peer.name}: {entry.reason or entry.detail or 'ready'}", file=sys.stderr, flush=True)
    launches = {name: candidate.launch for name, candidate in candidates.items()}
    runs = measure(launches, arguments.protocol, sampler, case.slots, case=case.name)
    for entry in result.peers:
        entry.runs = runs.get(entry.name, [])
        if entry.runs and entry.scope == "complete":
            candidate = candidates[entry.name]
            if elapsed_ms(candidate.launch, 10, case.slots) < LAUNCH_COST_BELOW_MS:
                entry.cost = launch_cost(candidate.launch, case.slots, around_capture=candidate.around_capture)
    return result


def write(results: Results, directory: Path, name: str) -> list[Path]:
    """JSON, Markdown and plot; returns their paths. The JSON is read back, so that a bad document is noticed here."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}{suffix}" for suffix in (".json", ".md", ".png")]
    text = results_module.to_json(results)
    results_module.from_json(text)
    paths[0].write_text(text)
    paths[1].write_text(results_module.report(results, OURS))
    results_module.plot(results, OURS, paths[2])
    return paths


def print_tables(results: Results, console: Console) -> None:
    """One table per case, and the overview where there are several."""
    for result in results.cases:
        console.print(results_module.case_table(result, OURS))
    tables = []
    if len(results.cases) > 1:
        for mode in ("burst", "sustained"):
            header, rows = results_module.overview_rows(results, OURS, mode)
            tables.append((f"relative to {OURS}, {mode}", header, rows))
    tables.append(("launch cost", results_module.COST_HEADER, results_module.cost_rows(results)))
    for title, header, rows in tables:
        if rows:
            table = Table(*header, title=title)
            for row in rows:
                table.add_row(*row)
            console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if our kernel did not run or was wrong in some case."""
    arguments = parse_arguments(argv)
    if not torch.cuda.is_available():
        print("bench.patch_embed: no CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        arch = arch_of(torch.cuda.get_device_capability(device))
        configs = chosen_configs(arguments.configs, arch)
    except ValueError as error:
        print(f"bench.patch_embed: {error}", file=sys.stderr)
        return 2
    dtype = ROWS[arguments.rows] if arguments.rows else rows_type(arch)
    arguments.cases = [dataclasses.replace(case, dtype=dtype) for case in arguments.cases]
    sampler = DeviceSampler(device)
    now = datetime.datetime.now(datetime.timezone.utc)
    results = Results(
        date=now.strftime("%Y-%m-%d %H:%M UTC"),
        command=recorded_command(sys.argv[1:] if argv is None else argv),
        environment=environment(device, sampler),
        protocol=arguments.protocol,
    )
    for case in arguments.cases:
        for config in (None, *configs.values()):
            # A refused configuration is reported with its case, as any peer's failure.
            with contextlib.suppress(ValueError):
                ours.compile_ahead(case, config, device)
    name = arguments.name or f"{arguments.suite}-{now:%Y-%m-%d}"
    for case in arguments.cases:
        print(case.name, file=sys.stderr, flush=True)
        results.cases.append(run_case(case, configs, arguments, device, sampler))
        # Written after every case: an interrupted run keeps what it has measured.
        paths = write(results, arguments.output, name)
        gc.collect()
        torch.cuda.empty_cache()
    width = None if sys.stdout.isatty() else 190
    print_tables(results, Console(width=width))
    print(*paths, sep="\n")
    ours_ran = all(peer.runs for result in results.cases for peer in result.peers if peer.name == OURS)
    return 0 if ours_ran else 1


if __name__ == "__main__":
    sys.exit(main())
