"""The one timing protocol: interleaved rounds in shuffled order, CUDA events, clocks and power beside every run.

Two modes, because a power-limited card is not one machine: ``burst`` times a few launches after an idle pause, at full
clocks; ``sustained`` times launches back to back for most of a second, at the clocks that the power limit then allows.
Only candidates timed in the same rounds compare: clocks drift with temperature and with what ran before.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

Launch = Callable[[int], torch.Tensor]
"""Enqueues one launch on input set ``slot`` and returns its output."""

_SPIN_CYCLES_PER_MS = 2_000_000
"""Cycles of a looping block that last at least a millisecond: SM clocks stay below 2 GHz."""

_SPIN_MARGIN_MS = 0.2
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT: the plain query answers with an average over a second


@dataclass(frozen=True)
class Protocol:
    """How often and for how long.

    Attributes:
        rounds: every candidate runs once per round and mode, in an order shuffled per round.
        warmup_launches: launches of every candidate before the first round.
        burst_launches: launches of a burst.
        burst_idle_s: idle seconds before a burst.
        sustained_s: least seconds of a sustained run.
        settle_s: seconds of the same launches right before a sustained run, untimed: the power limit acts with a delay,
            and without them a candidate is timed partly at the clocks that the one before it left.
        seed: of the shuffling, together with the name of the case.
    """

    rounds: int = 5
    warmup_launches: int = 5
    burst_launches: int = 5
    burst_idle_s: float = 0.05
    sustained_s: float = 0.6
    seed: int = 0
    settle_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rounds", "warmup_launches", "burst_launches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name, least in (("burst_idle_s", 0.0), ("settle_s", 0.0), ("sustained_s", 1e-6)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a duration in seconds")


@dataclass(frozen=True)
class Run:
    """One timed run. Milliseconds and millijoules are per launch, clock and power means over the run.

    None where unknown: energy is read off a counter that advances every 20 to 100 ms, so a burst has none.
    """

    mode: str
    round: int
    launches: int
    ms: float
    sm_mhz: float | None = None
    watts: float | None = None
    millijoules: float | None = None


@dataclass(frozen=True)
class Summary:
    """Median and spread of repeated measurements."""

    median: float
    low: float
    high: float
    minimum: float
    maximum: float
    count: int


def summarize(values: Sequence[float]) -> Summary:
    """Median, quartiles (``low``, ``high``; linear interpolation), extremes.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    if not values or not all(math.isfinite(v) for v in values):
        raise ValueError(f"nothing to summarize in {list(values)}")
    if len(values) == 1:
        low = high = values[0]
    else:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(statistics.median(values), low, high, min(values), max(values), len(values))


def shuffled_rounds(
    names: Sequence[str], modes: Sequence[str], rounds: int, seed: int, case: str = ""
) -> list[list[tuple[str, str]]]:
    """For each round, every (name, mode) once, in an order of its own.

    The name of the case belongs to the seed: a candidate that always came after the same other one, which may have left
    the device hot or idle, would gain or lose in every case alike.
    """
    generator = random.Random(f"{seed} {case}")
    schedule = []
    for _ in range(rounds):
        order = [(name, mode) for name in names for mode in modes]
        generator.shuffle(order)
        schedule.append(order)
    return schedule


# --- clocks and power ------------------------------------------------------------------------------------------------


@dataclass
class Samples:
    """What NVML said during one run; ``energy`` holds (seconds, joules) of each reading."""

    sm_mhz: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    energy: list[tuple[float, float]] = field(default_factory=list)


def mean_power(energy: Sequence[tuple[float, float]]) -> float | None:
    """Watts between the first and the last step of an energy counter, None with fewer than two steps.

    Between two readings that do not fall on steps, the counter is off by up to one step at either end.
    """
    steps = [after for before, after in zip(energy, energy[1:], strict=False) if after[1] != before[1]]
    if len(steps) < 2:
        return None
    return (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0])


class DeviceSampler:
    """Reads SM clock, power and energy of one device through NVML every ``interval_s`` on a thread of its own.

    Raises:
        RuntimeError: NVML knows no device with the UUID of the CUDA device.
    """

    def __init__(self, device: torch.device, interval_s: float = 0.01) -> None:
        import pynvml

        self._nvml = pynvml
        self.interval_s = interval_s
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML does not know CUDA device {device} with UUID {uuid}") from error

    @property
    def driver(self) -> str:
        return str(self._nvml.nvmlSystemGetDriverVersion())

    @property
    def power_limit_watts(self) -> float:
        return self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3

    def _power(self) -> float:
        value = self._nvml.nvmlDeviceGetFieldValues(self._handle, [_POWER_INSTANT])[0]
        if value.nvmlReturn != 0:
            return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        return value.value.uiVal / 1e3

    def _sample(self, samples: Samples) -> None:
        samples.sm_mhz.append(float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)))
        samples.watts.append(self._power())
        energy = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        samples.energy.append((time.perf_counter(), energy))

    def during(self, work: Callable[[], float]) -> tuple[float, Samples]:
        """Runs ``work`` and returns its result with what was sampled meanwhile, at least one sample."""
        samples, done = Samples(), threading.Event()

        def loop() -> None:
            while not done.wait(self.interval_s):
                self._sample(samples)

        thread = threading.Thread(target=loop, name="nvml", daemon=True)
        thread.start()
        try:
            result = work()
        finally:
            done.set()
            thread.join()
        if not samples.watts:
            self._sample(samples)
        return result, samples


# --- timing ----------------------------------------------------------------------------------------------------------


def elapsed_ms(launch: Launch, launches: int, slots: int, *, spin_ms: float = 0.0) -> float:
    """Milliseconds per launch between two events, launches back to back over the input sets in turn.

    Args:
        launch: the candidate.
        launches: how many.
        slots: input sets to rotate among, so that small cases do not find their inputs in L2.
        spin_ms: hold the device this long, so that the host enqueues everything meanwhile and no host time is measured.
            Without it, a kernel shorter than its launch measures the launch.
    """
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if spin_ms:
        torch.cuda._sleep(int(_SPIN_CYCLES_PER_MS * spin_ms))
    start.record()
    for i in range(launches):
        launch(i % slots)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / launches


def covering_spin_ms(launch: Launch, launches: int, slots: int) -> float:
    """A spin during which the host enqueues ``launches`` launches: twice what it takes now, and a margin."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(launches):
        launch(i % slots)
    host_ms = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    return 2 * host_ms + _SPIN_MARGIN_MS


def fastest(candidates: Mapping[str, Launch], slots: int, finalists: int = 3, sustained_s: float = 0.15) -> str:
    """Name of the fastest candidate: all in bursts, then the best few sustained, since power decides there.

    Raises:
        ValueError: no candidates.
    """
    if not candidates:
        raise ValueError("no candidates")
    burst = {}
    for name, launch in candidates.items():
        elapsed_ms(launch, 2, slots)
        spin_ms = covering_spin_ms(launch, 3, slots)
        burst[name] = statistics.median(elapsed_ms(launch, 3, slots, spin_ms=spin_ms) for _ in range(3))
    best = sorted(burst, key=burst.__getitem__)[:finalists]
    if len(best) == 1:
        return best[0]
    sustained = {
        name: elapsed_ms(candidates[name], max(10, math.ceil(1e3 * sustained_s / burst[name])), slots) for name in best
    }
    return min(sustained, key=sustained.__getitem__)


def measure(
    candidates: Mapping[str, Launch],
    protocol: Protocol,
    sampler: DeviceSampler,
    slots: int,
    modes: Sequence[str] = ("burst", "sustained"),
    *,
    case: str = "",
    deadline: float = math.inf,
) -> dict[str, list[Run]]:
    """Times all candidates by the protocol.

    Args:
        candidates: by name; each has run once already (compiled, tuned, checked).
        protocol: rounds and durations.
        sampler: NVML of the device that the candidates run on.
        slots: input sets to rotate among.
        modes: ``"burst"``, ``"sustained"`` or both.
        case: what is timed, see `shuffled_rounds`.
        deadline: of `time.perf_counter`. After the first round, one that would end later is not begun.

    Raises:
        ValueError: an unknown mode.
    """
    unknown = set(modes) - {"burst", "sustained"}
    if unknown:
        raise ValueError(f"modes {sorted(unknown)}: must be burst, sustained")
    estimate, spins = {}, {}
    for name, launch in candidates.items():
        elapsed_ms(launch, protocol.warmup_launches, slots)
        estimate[name] = elapsed_ms(launch, protocol.warmup_launches, slots)
        spins[name] = covering_spin_ms(launch, protocol.burst_launches, slots)
    runs: dict[str, list[Run]] = {name: [] for name in candidates}
    began, longest = time.perf_counter(), 0.0
    for index, order in enumerate(shuffled_rounds(list(candidates), modes, protocol.rounds, protocol.seed, case)):
        if index and time.perf_counter() + longest > deadline:
            break
        for name, mode in order:
            launch = candidates[name]
            if mode == "burst":
                launches, spin_ms = protocol.burst_launches, spins[name]
                time.sleep(protocol.burst_idle_s)
            else:
                # The estimate is from short runs at high clocks, so the run lasts a little longer than asked.
                launches, spin_ms = max(10, math.ceil(1e3 * protocol.sustained_s / estimate[name])), 0.0
                if protocol.settle_s:
                    elapsed_ms(launch, math.ceil(1e3 * protocol.settle_s / estimate[name]), slots)
            ms, samples = sampler.during(
                lambda f=launch, n=launches, s=spin_ms: elapsed_ms(f, n, slots, spin_ms=s)
            )
            power = mean_power(samples.energy) if mode == "sustained" else None
            watts = statistics.fmean(samples.watts) if power is None else power
            energy = None if power is None else power * ms
            runs[name].append(Run(mode, index, launches, ms, statistics.fmean(samples.sm_mhz), watts, energy))
        longest, began = max(longest, time.perf_counter() - began), time.perf_counter()
    return runs


# --- launch cost -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchCost:
    """Microseconds. ``host`` until the call returns; ``graph`` per launch inside a replayed CUDA graph, host excluded.

    ``graph`` is None, with the reason in ``graph_reason``, if the candidate cannot be captured.
    """

    host: float
    graph: float | None
    graph_reason: str = ""


def launch_cost(
    launch: Launch,
    slots: int,
    calls: int = 200,
    repeats: int = 9,
    graph_launches: int = 20,
    around_capture: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> LaunchCost:
    """Median cost of a call from Python, and of a launch in a CUDA graph of ``graph_launches`` launches.

    The graph is captured inside of ``around_capture()``.
    ``calls`` stays below the depth of the launch queue (1024), where the host would wait for the device.
    """
    host = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            launch(i % slots)
        host.append(1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with around_capture(), torch.cuda.graph(graph):
            kept = [launch(i % slots) for i in range(graph_launches)]
    except RuntimeError as error:
        torch.cuda.synchronize()
        return LaunchCost(statistics.median(host), None, str(error).splitlines()[0])

    def replay(_: int) -> torch.Tensor:
        graph.replay()
        return kept[0]

    elapsed_ms(replay, 3, 1)
    replays = [1e3 * elapsed_ms(replay, 10, 1, spin_ms=5.0) / graph_launches for _ in range(repeats)]
    return LaunchCost(statistics.median(host), statistics.median(replays))
