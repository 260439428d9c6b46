"""A timeline of a profile, in the same form as the emulator's: a process per CTA, a track per warp."""

import math
import statistics

from cute_kernels.common.trace_events import TraceEvents, Track
from cute_kernels.explore.profiling.record import Profile, WarpRecord, is_wait, phase_name
from cute_kernels.plan.base import Phase

AXIS = "time of the device; clocks of each multiprocessor are placed by the times that its warps read beside them"
"""Note of the file."""

EMULATED_AXIS = "clocks of the emulator, not time: one microsecond is one of them, and each read of a clock is 16"


def timeline(profile: Profile, *, clusters: int = 2, tiles: int | None = 16, emulated: bool = False) -> TraceEvents:
    """Slices of the phases of the first clusters, each with its clocks; idle warps are left out.

    ``profile``: stamps of a launch. ``clusters``: how many of them. ``tiles``: of each warp, from its first on; all
    when None. ``emulated``: the emulator's clocks, which are no time. Raises ValueError: a number below 1."""
    for name, value in (("clusters", clusters), ("tiles", tiles)):
        if value is not None and value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
    ctas = math.prod(profile.plan.cluster)
    rate = 0.0 if emulated else 1e3 * profile.clocks_per_nanosecond
    shown = [warp for warp in profile.warps if warp.cta < clusters * ctas]
    offsets = _offsets(shown, rate)
    origin = min((_time(warp, warp.begin[0], rate, offsets) for warp in shown), default=0.0)
    trace = TraceEvents()
    for warp in shown:
        track = Track(1 + warp.cta, warp.warp + 1)
        if warp.warp == 0:
            trace.name("process", Track(track.process, 0), f"cluster {warp.cta // ctas}, CTA {warp.cta % ctas}")
        spans = _spans(warp, tiles)
        if not spans:
            continue
        trace.name("thread", track, f"warp {warp.warp} {warp.role}")
        for phase, first, last in spans:
            begin, end = (_time(warp, clock, rate, offsets) - origin for clock in (first, last))
            category = "wait" if is_wait(phase) else "work"
            trace.slice(track, phase_name(profile.graph, phase), category, begin, end, clocks=last - first)
    return trace


def _spans(warp: WarpRecord, tiles: int | None) -> list[tuple[int, int, int]]:
    """Phase, first and last clock of everything that a warp did in its first tiles, and before them."""
    clocks, phases = warp.clocks.tolist(), warp.phases.tolist()
    result, seen = [], 0
    for phase, first, last in zip(phases, clocks, clocks[1:]):
        seen += phase == Phase.TILE
        if tiles is not None and seen > tiles:
            break
        if last > first:
            result.append((phase, first, last))
    return result


def _offsets(warps: list[WarpRecord], rate: float) -> dict[int, float]:
    """By CTA: microseconds of the device at clock 0 of its multiprocessor, the median over its warps' headers."""
    pairs: dict[int, list[float]] = {}
    for warp in warps:
        ends = pairs.setdefault(warp.cta, [])
        ends += [time / 1e3 - clock / rate for clock, time in (warp.begin, warp.finish)] if rate else [0.0]
    return {cta: statistics.median(values) for cta, values in pairs.items()}


def _time(warp: WarpRecord, clock: int, rate: float, offsets: dict[int, float]) -> float:
    """Microseconds of a clock of a warp; without a rate the clock itself."""
    return clock / rate + offsets[warp.cta] if rate else float(clock)
