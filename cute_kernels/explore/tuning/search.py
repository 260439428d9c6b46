"""Times the plans of a problem on the GPU at hand, and remembers the configuration of the fastest.

`cute_kernels.explore.tuning.functions` has the functions that users call; what is timed of an operation it says itself.
"""

import dataclasses
import functools
import math
import random
import statistics
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from cute_kernels.operations.arguments import choose_backend
from cute_kernels.operations.base import Operation
from cute_kernels.operations.runtime import tuned
from cute_kernels.operations.runtime.devices import kind_of
from cute_kernels.operations.runtime.gpu import bound_launch
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import Plan, candidate_plans, make_plan

ROTATED_BYTES = 160 << 20
"""Operands and outputs of all input sets together: more than an L2, so that no launch finds its inputs there."""

RUN_MS = 5.0
"""Duration that one timed run should have."""

MAX_ERROR = 0.01
"""Norm of the difference between the results of two plans over that of the first, where something is wrong."""

ROUNDS = 5
"""Timed runs of each candidate, of which the median counts."""

_MAX_LAUNCHES = 64

Timer = Callable[[], float]
"""Runs a candidate once and returns the milliseconds of a launch."""

Key = TypeVar("Key", bound=Hashable)


def check_counts(**counts: int) -> None:
    """Refuses what is no integer, or below 1. Raises TypeError, ValueError: naming the argument."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {type(value).__name__}: must be an integer")
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")


def check_dtypes(**dtypes: torch.dtype) -> None:
    """Refuses what is no type of elements. Raises TypeError: naming the argument."""
    for name, value in dtypes.items():
        if not isinstance(value, torch.dtype):
            raise TypeError(f"{name} is {type(value).__name__}: must be torch.dtype")


def device_at_hand(name: str) -> tuned.Device:
    """The current CUDA device, for the function ``name`` that times kernels there. Raises NotImplementedError: there is
    no CUDA device, or none that has a kernel."""
    if not torch.cuda.is_available():
        raise NotImplementedError(f"{name} times kernels on a CUDA device, and there is none")
    choose_backend(torch.device("cuda"), "auto")
    return kind_of(torch.cuda.current_device())


def fastest(operation: Operation, problem: Any, device: tuned.Device, candidates: int) -> tuple[Plan, float]:
    """The fastest plan of a problem on ``device``, the current one, and its milliseconds.

    ``candidates`` are timed, the most promising first.
    """
    plans = candidate_plans(problem, device.arch, sm_count=device.sm_count)[:candidates]
    inputs = input_sets(operation, problem)
    timers = timers_of(operation, plans, inputs)
    times = interleaved(timers, ROUNDS)
    best = min(times, key=times.__getitem__)
    timers = {best: timers[best]} | timers_of(operation, operation.variants(best), inputs)
    times = interleaved(timers, ROUNDS)
    best = min(times, key=times.__getitem__)
    return best, times[best]


def tune(operation: Operation, problem: Any, candidates: int) -> Any:
    """Finds the fastest configuration of a problem and remembers it.

    From then on it is what calls without a configuration get, here and in later processes.

    Raises ValueError: sizes or types that no kernel takes, a number below 1; TypeError: a number that is no integer;
    NotImplementedError: there is no CUDA device, or none that has a kernel."""
    check_counts(candidates=candidates)
    make_plan(problem)  # refuses sizes and types before a device is asked for
    device = device_at_hand(f"tune_{operation.name}")
    best, milliseconds = fastest(operation, problem, device, candidates)
    try:
        tuned.store(problem, device, best.config, 1e3 * milliseconds)
    except OSError as reason:
        warnings.warn(f"only this process remembers the configuration: {reason}", RuntimeWarning, stacklevel=3)
    operation.repeated.clear()  # a call is planned anew: another configuration has become the default
    return best.config


def input_sets(operation: Operation, problem: Any, device: str = "cuda") -> list[Any]:
    """Random arguments of calls that have a problem and differ in the operation's rotated argument.

    As many that a launch finds nothing of its own in the L2, `ROTATED_BYTES`.
    """
    first = operation.example(problem, device)
    out_bytes = math.prod(operation.output_shape(first)) * operation.output_dtype(first).itemsize
    nbytes = sum(tensor.nbytes for _, _, tensor in operation.table.tensors_of(first)) + out_bytes
    others = (operation.example(problem, device) for _ in range(max(1, -(-ROTATED_BYTES // nbytes)) - 1))
    name = operation.rotated
    return [first, *(dataclasses.replace(first, **{name: getattr(other, name)}) for other in others)]


def timers_of(operation: Operation, plans: Sequence[Plan], inputs: Sequence[Any]) -> dict[Plan, Timer]:
    """A timer for every plan, after its result was compared with that of the first one.

    ``operation``: that of the plans. ``plans``: of one problem, for the current device. Of a chain its kernels are
    timed as one launch. ``inputs``: arguments that have the problem; launches read them in turn. Raises RuntimeError: a
    plan computes something else."""
    outputs: list[torch.Tensor] = []

    def prepare(plan: Plan) -> tuple[Callable[[int, int], None], torch.Tensor]:
        slots = [operation.prepare(arguments, plan).operands for arguments in inputs]
        outputs.extend(slot.out for slot in slots[len(outputs) :])  # those of the first plan serve all
        slots = [slot.replace(out=out.view(slot.out.shape)) for slot, out in zip(slots, outputs, strict=True)]
        calls = [calls_of(plan, slot) for slot in slots]

        def launch(i: int, stream: int, calls=calls, slots=slots) -> None:  # slots: calls have addresses only
            for call in calls[i % len(slots)]:
                call((stream,))

        return launch, outputs[0][..., : operation.output_shape(inputs[0])[-1]]

    return checked_timers(plans, prepare)


def calls_of(plan: Plan, operands: Operands) -> list[Callable[[tuple[int]], None]]:
    """The launches of a plan's kernels in turn, each a function of a tuple of the stream's handle.

    ``operands`` has to live as long as these.
    """
    return [
        bound_launch(kernel).with_constants(("stream",), **operands.of(kernel).addresses()) for kernel in plan.launches
    ]


def compared(plan: Plan, first: Plan, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Refuses a result, in FP32 and overwritten here, that is not the first plan's. Raises RuntimeError: a plan
    computes something else."""
    error = float(result.sub_(expected).norm() / expected.norm())
    if not error <= MAX_ERROR:
        raise RuntimeError(f"{plan.config} differs from {first.config} by {error:.3g} of the norm")


def checked_timers(
    plans: Iterable[Key], prepare: Callable[[Key], tuple[Callable[[int, int], None], torch.Tensor]]
) -> dict[Key, Timer]:
    """A timer for every plan, after its result was compared with that of the first one.

    ``plans``: for the current device. ``prepare``: returns, for a plan, what enqueues launch ``i`` on a stream, given
    as a handle, and the result of launch 0. Raises RuntimeError: a plan computes something else."""
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


def call_timer(call: Callable[[], Any]) -> Timer:
    """Milliseconds of one of as many calls in a row as fill a few milliseconds, the host's time in them."""

    def timed(calls: int) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / calls

    timed(2)
    calls = max(1, min(100, round(RUN_MS / timed(2))))
    return lambda: timed(calls)


def graph_timer(launch: Callable[[int, int], None]) -> Timer:
    """Times launches in a CUDA graph, where no host time is in them. ``launch``: enqueues launch ``i`` on a stream,
    given as a handle; has run before."""
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
