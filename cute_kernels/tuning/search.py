"""Times the plans of a problem on the GPU at hand, and remembers the configuration of the fastest.

What operations have in common: `cute_kernels.tuning.gemm` and `cute_kernels.tuning.patch_embed` say what is timed.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from cute_kernels.operations.base import Operation
from cute_kernels.plan import Plan, candidate_plans, make_plan
from cute_kernels.runtime import tuned
from cute_kernels.runtime.devices import choose_backend, kind_of

ROTATED_BYTES = 160 << 20
"""Operands and outputs of all input sets together: more than an L2, so that no launch finds its inputs there."""

RUN_MS = 5.0
"""Duration that one timed run should have."""

MAX_ERROR = 0.01
"""Norm of the difference between the results of two plans over that of the first, where something is wrong."""

_MAX_LAUNCHES = 64

Timer = Callable[[], float]
"""Runs a candidate once and returns the milliseconds of a launch."""

Timers = Callable[[Any, Sequence[Plan]], "dict[Plan, Timer]"]
"""Makes timers of a problem and its plans, after their results were compared."""

Key = TypeVar("Key", bound=Hashable)


def check_counts(**counts: int) -> None:
    """Refuses what is no integer, or below 1.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {type(value).__name__}, expected an integer")
        if value < 1:
            raise ValueError(f"{name} = {value}, allowed: at least 1")


def check_dtypes(**dtypes: torch.dtype) -> None:
    """Refuses what is no type of elements.

    Raises:
        TypeError: naming the argument.
    """
    for name, value in dtypes.items():
        if not isinstance(value, torch.dtype):
            raise TypeError(f"{name} is {type(value).__name__}, expected torch.dtype")


@contextlib.contextmanager
def device_at_hand(name: str, device: torch.device | int | str | None) -> Iterator[tuned.Device]:
    """Makes a CUDA device the current one.

    Args:
        name: of the function that wants to time there, for messages.
        device: the current one when None.

    Raises:
        ValueError: another kind of device.
        NotImplementedError: there is no CUDA device, or none that has a kernel.
    """
    place = torch.device("cuda" if device is None else device)
    if place.type != "cuda":
        raise ValueError(f"device = {str(device)!r}, allowed: a CUDA device")
    if not torch.cuda.is_available():
        raise NotImplementedError(f"{name} times kernels on a CUDA device, and there is none")
    choose_backend(place, "auto")
    index = torch.cuda.current_device() if place.index is None else place.index
    with torch.cuda.device(index):
        yield kind_of(index)


def fastest(
    problem: Any,
    device: tuned.Device,
    timers_of: Timers,
    variants: Callable[[Any], list[Any]],
    candidates: int,
    rounds: int,
) -> tuple[Plan, float]:
    """The fastest plan of a problem on the current device, and its milliseconds.

    Args:
        problem: of an operation that has a search space.
        device: the current one.
        timers_of: makes the timers.
        variants: of a plan, those that are timed beside it if it is the fastest of the candidates.
        candidates: how many are timed, the most promising first.
        rounds: timed runs of each, of which the median counts.
    """
    plans = candidate_plans(problem, device.arch, sm_count=device.sm_count)[:candidates]
    timers = timers_of(problem, plans)
    times = interleaved(timers, rounds)
    best = min(times, key=times.__getitem__)
    timers = {best: timers[best]} | timers_of(problem, variants(best))
    times = interleaved(timers, rounds)
    best = min(times, key=times.__getitem__)
    return best, times[best]


def tune(
    operation: Operation,
    problem: Any,
    device: torch.device | int | str | None,
    timers_of: Timers,
    variants: Callable[[Any], list[Any]],
    candidates: int,
    rounds: int,
) -> Any:
    """Finds the fastest configuration of a problem and remembers it.

    From then on it is what calls without a configuration get, here and in later processes.

    Args:
        operation, problem: what to tune.
        device: CUDA device; the current one when None.
        timers_of, variants, candidates, rounds: as for `fastest`.

    Raises:
        ValueError: sizes or types that no kernel takes, another kind of device, a number below 1.
        TypeError: a number that is no integer.
        NotImplementedError: there is no CUDA device, or none that has a kernel.
    """
    check_counts(candidates=candidates, rounds=rounds)
    make_plan(problem)  # refuses sizes and types before a device is asked for
    with device_at_hand(f"tune_{operation.name}", device) as kind:
        best, milliseconds = fastest(problem, kind, timers_of, variants, candidates, rounds)
    try:
        tuned.store(problem, kind, best.config, 1e3 * milliseconds)
    except OSError as reason:
        warnings.warn(f"only this process remembers the configuration: {reason}", RuntimeWarning, stacklevel=3)
    operation.repeated.clear()  # a call is planned anew: another configuration has become the default
    return best.config


def compared(plan: Plan, first: Plan, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Refuses a result, in FP32 and overwritten here, that is not the first plan's.

    Raises:
        RuntimeError: a plan computes something else.
    """
    error = float(result.sub_(expected).norm() / expected.norm())
    if not error <= MAX_ERROR:
        raise RuntimeError(f"{plan.config} differs from {first.config} by {error:.3g} of the norm")


def checked_timers(
    plans: Iterable[Key], prepare: Callable[[Key], tuple[Callable[[int, int], None], torch.Tensor]]
) -> dict[Key, Timer]:
    """A timer for every plan, after its result was compared with that of the first one.

    Args:
        plans: for the current device.
        prepare: returns, for a plan, what enqueues launch ``i`` on a stream, given as a handle, and the result of
            launch 0.

    Raises:
        RuntimeError: a plan computes something else.
    """
    timers: dict[Key, Timer] = {}
    first = expected = None
    for plan in plans:
        launch, out = prepare(plan)
        out.fill_(torch.nan)
        launch(0, torch.cuda.current_stream().cuda_stream)
        result = out.to(torch.float32, copy=True)
        if expected is None:
            first, expected = plan, result.clone()
        compared(plan, first, result, expected)
        timers[plan] = graph_timer(launch)
    return timers


def interleaved(timers: Mapping[Key, Timer], rounds: int, seed: int = 0) -> dict[Key, float]:
    """Median milliseconds of each candidate over ``rounds`` runs, all in turn, in an order shuffled per round."""
    generator, order = random.Random(seed), list(timers)
    times: dict[Key, list[float]] = {key: [] for key in timers}
    for _ in range(rounds):
        generator.shuffle(order)
        for key in order:
            times[key].append(timers[key]())
    return {key: statistics.median(values) for key, values in times.items()}


# --- on the device ---------------------------------------------------------------------------------------------------


def graph_timer(launch: Callable[[int, int], None]) -> Timer:
    """Times launches in a CUDA graph, where no host time is in them.

    Args:
        launch: enqueues launch ``i`` on a stream, given as a handle; has run before.
    """
    single = replay_timer(launch, 1)
    single()
    return replay_timer(launch, max(1, min(_MAX_LAUNCHES, round(RUN_MS / max(single(), 1e-4)))))


def replay_timer(launch: Callable[[int, int], None], count: int) -> Timer:
    """Timer like `graph_timer`, with a given number of launches in the graph."""
    return functools.partial(_replay, _captured(launch, count), count, launch)


def _captured(launch: Callable[[int, int], None], count: int) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            launch(i, stream.cuda_stream)
    return graph


def _replay(graph: torch.cuda.CUDAGraph, count: int, owner: Callable[[int, int], None]) -> float:
    """Milliseconds of a launch. A graph has addresses only: ``owner``, what was captured, keeps the tensors alive."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / count
