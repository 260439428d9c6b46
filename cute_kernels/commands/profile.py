"""``cute-kernels profile``: where the warps of a kernel spend their clocks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cute_kernels.commands.kernel_options import MOST_EMULATED, OPERATIONS, add_planned, count, plan_of
from cute_kernels.common import extras, files
from cute_kernels.explore import plan_facts
from cute_kernels.plan import Plan
from cute_kernels.plan import base as layout


def add_parser(commands: argparse._SubParsersAction, names: Sequence[str] = tuple(OPERATIONS)) -> None:
    parser = commands.add_parser(
        "profile",
        help="time the phases of a kernel's warps, from the inside",
        description="Compiles a kernel whose warps write clock stamps, launches it on random operands, on the GPU at "
        "hand or in the emulator, and prints the clocks of a tile by role and phase. A launch with stamps is slower "
        "than one without; on a GPU both are timed. Statistics leave out the first and the last tile of each warp.",
    )
    add_planned(parser, names, device="the GPU, a B200 or an H200")
    parser.add_argument(
        "--device",
        choices=("auto", "gpu", "emulator"),
        default="auto",
        help=f"auto: a GPU that has the kernel, otherwise the emulator if the problem has at most {MOST_EMULATED} "
        "tiles. Without --arch the GPU decides which kernel it is. In the emulator clocks are no time: only their "
        "order means something (default: %(default)s)",
    )
    parser.add_argument(
        "--stamps",
        type=count,
        default=16384,
        help="that each warp may write, a multiple of 8; later ones are lost (default: %(default)s)",
    )
    parser.add_argument("--warps", action="store_true", help="on a GPU, statistics of every warp, too")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a timeline for https://ui.perfetto.dev")
    parser.add_argument("--clusters", type=count, default=2, help="in the timeline (default: %(default)s)")
    parser.add_argument("--tiles", type=count, default=16, help="of each warp in the timeline (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the statistics of every warp as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Profiles one launch and prints what its warps did."""
    import cute_kernels.explore.profiling as profiling  # torch

    for path in (options.trace, options.json):
        if path is not None:
            files.check_output(path)
    plan, device = _plan_and_device(options)
    import cute_kernels.operations.examples as examples

    operands = examples.random_operands(plan, "cuda" if device == "gpu" else "cpu")
    profile = profiling.record(plan, operands, stamps=options.stamps, device=device)
    times = _launch_times(plan, profile, operands) if device == "gpu" else {}
    equilibrium = profiling.has_equilibrium(profile)
    lines = [plan.describe_problem(), *_facts(profile, times, equilibrium), ""]
    balance = profiling.role_balance(profile, equilibrium=equilibrium)
    lines += _balance_lines(balance, timed=device == "gpu")
    if device == "gpu":
        busiest = min(balance, key=lambda role: role.waiting / role.total)
        lines.append(f"{busiest.role} waits least: the others wait for it")
    found = profiling.phase_statistics(profile, equilibrium=equilibrium)
    if options.warps and device == "gpu":
        lines += ["", *_warp_lines(found)]
    print("\n".join(lines))
    if options.json is not None:
        facts = _as_json(profile, found, device, times, equilibrium)
        files.write_text(options.json, json.dumps(facts, indent=1) + "\n")
    if options.trace is not None:
        emulated = device == "emulator"
        trace = profiling.timeline(profile, clusters=options.clusters, tiles=options.tiles, emulated=emulated)
        trace.write(options.trace, profiling.EMULATED_AXIS if emulated else profiling.AXIS)
        files.show(f"\ntimeline: {options.trace.resolve()}; open it with https://ui.perfetto.dev")
    return 0


# --- what is launched ------------------------------------------------------------------------------------------------


def _plan_and_device(options: argparse.Namespace) -> tuple[Plan, str]:
    """The plan, and "gpu" or "emulator".

    Raises:
        ValueError: a plan whose kernel cannot be profiled, no GPU for it, or a problem that is large for the emulator.
    """
    at_hand = None if options.device == "emulator" else _gpu()
    if at_hand is not None:
        options.arch = options.arch or at_hand[0]
        options.sm_count = options.sm_count or at_hand[1]
    plan = plan_of(options, options.sm_count)
    if plan.launches != (plan,):
        kernels = " and ".join(part.operation for part in plan.launches)
        raise ValueError(f"{options.kernel} chains the kernels of {kernels} here: profile patch-embed for the rows")
    try:
        layout.with_profile(plan, options.stamps)
    except NotImplementedError as reason:
        raise ValueError(str(reason)) from None
    if at_hand is not None and at_hand[0] == plan.arch.name:
        return plan, "gpu"
    if options.device == "gpu":
        raise ValueError(f"--device gpu: there is no GPU for {plan.arch.name} here")
    extras.require("emulator", "the command profile, without a GPU for the kernel,")
    tiles = plan_facts.tiles_of(plan)
    if options.device == "auto" and tiles > MOST_EMULATED:
        raise ValueError(
            f"there is no GPU for {plan.arch.name} here, and {tiles:,} tiles take long in the emulator: must be at "
            f"most {MOST_EMULATED}, or --device emulator"
        )
    return plan, "emulator"


def _gpu() -> tuple[str, int] | None:
    """Architecture and multiprocessors of the current CUDA device, if it has a kernel."""
    import torch

    import cute_kernels.operations.arguments as arguments
    import cute_kernels.operations.runtime.devices as devices

    if not torch.cuda.is_available():
        return None
    try:
        arguments.choose_backend(torch.device("cuda"), "auto")
    except NotImplementedError:
        return None
    return devices.device_facts(torch.cuda.current_device())


def _launch_times(plan: Plan, profile: Any, operands: Any) -> dict[str, float]:
    """Microseconds of a launch without stamps and with them, in turn."""
    import torch

    import cute_kernels.explore.tuning.search as search
    import cute_kernels.operations.runtime.gpu as gpu

    memory = torch.zeros(layout.profile_shape(profile.plan), dtype=torch.int64, device="cuda")
    timers = {}
    for name, launched in (("plain", plan), ("stamped", profile.plan)):
        call = gpu.bound_launch(launched).with_constants(("stream",), **operands.addresses(), profile=memory.data_ptr())
        call((torch.cuda.current_stream().cuda_stream,))  # what is captured has to have run before
        timers[name] = search.graph_timer(lambda i, stream, call=call: call((stream,)))
    return {name: 1e3 * milliseconds for name, milliseconds in search.interleaved(timers, 5).items()}


# --- what is printed -------------------------------------------------------------------------------------------------


def _facts(profile: Any, times: dict[str, float], equilibrium: bool) -> Iterable[str]:
    plan = profile.plan
    ctas = math.prod(plan.grid)
    yield f"{plan.arch.name}, {ctas} CTAs, {', '.join(f'{k}={v}' for k, v in _config(plan).items())}"
    if times:
        slower = times["stamped"] / times["plain"] - 1
        yield f"launch: {times['plain']:,.1f} us, with stamps {times['stamped']:,.1f} us ({slower:+.1%})"
        yield f"clock: {profile.clocks_per_nanosecond:.3f} GHz"
    else:
        yield "emulator: clocks are no time, each read of one is 16 more than the one before it"
    if profile.lost:
        yield f"{profile.lost:,} stamps were lost: --stamps {2 * plan.profile} has room for more"
    if not equilibrium:
        yield "no warp has three tiles: the first and the last tile of each are in the statistics"


def _config(plan: Plan) -> dict[str, Any]:
    return dataclasses.asdict(plan.config)


def _balance_lines(balance: list[Any], *, timed: bool) -> list[str]:
    """A row per role and phase: clocks of a tile, and their share, where they are time."""
    if not timed:
        return _columns([("role", "phases of a tile"), *((role.role, ", ".join(role.phases)) for role in balance)])
    rows = [("role", "phase", "clocks per tile", "share")]
    for role in balance:
        for name, clocks in role.phases.items():
            rows.append((role.role, name, f"{clocks:,.0f}", f"{clocks / role.total:.1%}"))
        rows.append((role.role, "all", f"{role.total:,.0f}", f"waits {role.waiting / role.total:.1%}"))
    return _columns(rows)


def _warp_lines(found: list[Any]) -> list[str]:
    rows = [("warp", "role", "phase", "mean", "p95", "most", "tiles")]
    for entry in found:
        clocks = (f"{value:,.0f}" for value in (entry.mean, entry.p95, entry.most))
        rows.append((str(entry.warp), entry.role, entry.phase, *clocks, f"{entry.tiles:,}"))
    return _columns(rows)


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _as_json(profile: Any, found: list[Any], device: str, times: dict[str, float], equilibrium: bool) -> dict[str, Any]:
    plan = profile.plan
    return {
        "kernel": plan.operation,
        "arch": plan.arch.name,
        "problem": dataclasses.asdict(plan.problem),
        "config": _config(plan),
        "grid": plan.grid,
        "device": device,
        "launch_microseconds": times,
        "clocks_per_nanosecond": profile.clocks_per_nanosecond,
        "lost_stamps": profile.lost,
        "equilibrium": equilibrium,
        "warps": [dataclasses.asdict(entry) for entry in found],
    }
