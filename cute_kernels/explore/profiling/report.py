"""Where the warps of a kernel spend their clocks: one launch with stamps, as lines for people and as data."""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cute_kernels.operations.arguments as arguments
import cute_kernels.operations.runtime.devices as devices
import cute_kernels.operations.runtime.gpu as gpu
from cute_kernels.common import extras, files
from cute_kernels.common.words import columns
from cute_kernels.explore import plan_facts
from cute_kernels.explore.comparison import MOST_EMULATED
from cute_kernels.explore.profiling import statistics
from cute_kernels.explore.profiling.record import Profile, record
from cute_kernels.explore.profiling.timeline import AXIS, EMULATED_AXIS, timeline
from cute_kernels.explore.tuning import search
from cute_kernels.operations import registry
from cute_kernels.plan import Plan
from cute_kernels.plan import base as layout


def gpu_at_hand() -> tuple[str, int] | None:
    """Architecture and multiprocessors of the current CUDA device, if it has a kernel."""
    if not torch.cuda.is_available():
        return None
    try:
        arguments.choose_backend(torch.device("cuda"), "auto")
    except NotImplementedError:
        return None
    return devices.device_facts(torch.cuda.current_device())


def device_for(plan: Plan, asked: str, at_hand: tuple[str, int] | None, stamps: int) -> str:
    """``"gpu"`` or ``"emulator"``: where a plan is profiled.

    ``plan``: what is launched. ``asked``: ``"gpu"``, ``"emulator"`` or ``"auto"``. ``at_hand``: `gpu_at_hand`, or None
    in the emulator. ``stamps``: that each warp may write. Raises ValueError: a plan whose kernel cannot be profiled, no
    GPU for it, or a problem that is large for the emulator."""
    try:
        layout.with_profile(plan, stamps)
    except NotImplementedError as reason:
        raise ValueError(str(reason)) from None
    if at_hand is not None and at_hand[0] == plan.arch.name:
        return "gpu"
    if asked == "gpu":
        raise ValueError(f"--device gpu: there is no GPU for {plan.arch.name} here")
    extras.require("emulator", "the command profile, without a GPU for the kernel,")
    tiles = plan_facts.tiles_of(plan)
    if asked == "auto" and tiles > MOST_EMULATED:
        raise ValueError(
            f"there is no GPU for {plan.arch.name} here, and {tiles:,} tiles take long in the emulator: must be at "
            f"most {MOST_EMULATED}, or --device emulator"
        )
    return "emulator"


@dataclass(frozen=True)
class ProfileReport:
    """A launch with stamps.

    ``profile``: what its warps wrote. ``device``: ``"gpu"`` or ``"emulator"``. ``times``: microseconds of a launch
    without stamps, ``"plain"``, and with them, ``"stamped"``; none in the emulator. ``equilibrium``: the first and the
    last tile of each warp are left out of the statistics. ``phases``: statistics of every warp and phase."""

    profile: Profile
    device: str
    times: dict[str, float]
    equilibrium: bool
    phases: list[statistics.PhaseStatistics]

    def lines(self, *, warps: bool) -> list[str]:
        """The report for people; ``warps``: on a GPU, statistics of every warp, too."""
        timed = self.device == "gpu"
        balance = statistics.role_balance(self.profile, equilibrium=self.equilibrium)
        lines = [self.profile.plan.describe_problem(), *self._facts(), "", *_balance_lines(balance, timed=timed)]
        if timed:
            busiest = min(balance, key=lambda role: role.waiting / role.total)
            lines.append(f"{busiest.role} waits least: the others wait for it")
            if warps:
                lines += ["", *_warp_lines(self.phases)]
        return lines

    def _facts(self) -> Iterable[str]:
        plan, times = self.profile.plan, self.times
        config = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(plan.config).items())
        yield f"{plan.arch.name}, {math.prod(plan.grid)} CTAs, {config}"
        if times:
            slower = times["stamped"] / times["plain"] - 1
            yield f"launch: {times['plain']:,.1f} us, with stamps {times['stamped']:,.1f} us ({slower:+.1%})"
            yield f"clock: {self.profile.clocks_per_nanosecond:.3f} GHz"
        else:
            yield "emulator: clocks are no time, each read of one is 16 more than the one before it"
        if self.profile.lost:
            yield f"{self.profile.lost:,} stamps were lost: --stamps {2 * plan.profile} has room for more"
        if not self.equilibrium:
            yield "no warp has three tiles: the first and the last tile of each are in the statistics"

    def write_json(self, path: Path) -> None:
        """Writes the statistics of every warp."""
        plan = self.profile.plan
        facts = {
            "kernel": plan.operation,
            "arch": plan.arch.name,
            "problem": dataclasses.asdict(plan.problem),
            "config": dataclasses.asdict(plan.config),
            "grid": plan.grid,
            "device": self.device,
            "launch_microseconds": self.times,
            "clocks_per_nanosecond": self.profile.clocks_per_nanosecond,
            "lost_stamps": self.profile.lost,
            "equilibrium": self.equilibrium,
            "warps": [dataclasses.asdict(entry) for entry in self.phases],
        }
        files.write_text(path, json.dumps(facts, indent=1) + "\n")

    def write_timeline(self, path: Path, clusters: int, tiles: int) -> None:
        emulated = self.device == "emulator"
        trace = timeline(self.profile, clusters=clusters, tiles=tiles, emulated=emulated)
        trace.write(path, EMULATED_AXIS if emulated else AXIS)


def profiled(plan: Plan, device: str, stamps: int) -> ProfileReport:
    """Profiles one launch of a plan on random operands; on a GPU with its times."""
    operands = registry.random_operands(plan, "cuda" if device == "gpu" else "cpu")
    profile = record(plan, operands, stamps=stamps, device=device)
    times = _launch_times(plan, profile, operands) if device == "gpu" else {}
    equilibrium = statistics.has_equilibrium(profile)
    phases = statistics.phase_statistics(profile, equilibrium=equilibrium)
    return ProfileReport(profile, device, times, equilibrium, phases)


def _launch_times(plan: Plan, profile: Profile, operands: Any) -> dict[str, float]:
    """Microseconds of a launch without stamps and with them, in turn."""
    memory = torch.zeros(layout.profile_shape(profile.plan), dtype=torch.int64, device="cuda")
    timers = {}
    for name, launched in (("plain", plan), ("stamped", profile.plan)):
        call = gpu.bound_launch(launched).with_constants(("stream",), **operands.addresses(), profile=memory.data_ptr())
        call((torch.cuda.current_stream().cuda_stream,))  # what is captured has to have run before
        timers[name] = search.graph_timer(lambda i, stream, call=call: call((stream,)))
    return {name: 1e3 * milliseconds for name, milliseconds in search.interleaved(timers, 5).items()}


def _balance_lines(balance: list[statistics.RoleBalance], *, timed: bool) -> list[str]:
    """A row per role and phase: clocks of a tile, and their share, where they are time."""
    if not timed:
        return columns([("role", "phases of a tile"), *((role.role, ", ".join(role.phases)) for role in balance)])
    rows = [("role", "phase", "clocks per tile", "share")]
    for role in balance:
        for name, clocks in role.phases.items():
            rows.append((role.role, name, f"{clocks:,.0f}", f"{clocks / role.total:.1%}"))
        rows.append((role.role, "all", f"{role.total:,.0f}", f"waits {role.waiting / role.total:.1%}"))
    return columns(rows)


def _warp_lines(found: list[statistics.PhaseStatistics]) -> list[str]:
    rows = [("warp", "role", "phase", "mean", "p95", "most", "tiles")]
    for entry in found:
        clocks = (f"{value:,.0f}" for value in (entry.mean, entry.p95, entry.most))
        rows.append((str(entry.warp), entry.role, entry.phase, *clocks, f"{entry.tiles:,}"))
    return columns(rows)
