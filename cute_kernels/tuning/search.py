"""Which configuration is fastest on the GPU at hand: times the candidates of a plan and remembers the winner."""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

from cute_kernels.config import Activation, GemmConfig, GemmProblem
from cute_kernels.operations.gemm import GEMM
from cute_kernels.plan import GemmPlan, gemm_candidates, make_plan
from cute_kernels.runtime import tuned
from cute_kernels.runtime.devices import choose_backend, device_facts
from cute_kernels.runtime.gpu import bound_launch

ROTATED_BYTES = 160 << 20
"""Operands and outputs of all input sets together: more than an L2, so that no launch finds its inputs there."""

RUN_MS = 5.0
"""Duration that one timed run should have."""

GROUPS = (1, 4, 8, 16)
"""Values of ``group_m`` that are tried on the fastest candidate."""

_MAX_LAUNCHES = 64
_MAX_ERROR = 0.01

Timer = Callable[[], float]
"""Runs a candidate once and returns the milliseconds of a launch."""

Key = TypeVar("Key", bound=Hashable)


def tune_gemm(
    m: int,
    n: int,
    k: int,
    *,
    batches: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    bias: bool = False,
    activation: Activation = "none",
    device: torch.device | int | str | None = None,
    candidates: int = 24,
    rounds: int = 5,
) -> GemmConfig:
    """Finds the fastest configuration of `cute_kernels.gemm` for one problem on this GPU, and remembers it.

    From then on, `gemm` without a ``config`` takes it for this problem on devices of this kind, in this process and,
    by the cache directory, in later ones. ``cute-kernels cache --clear`` forgets it. Compiling takes about a second for
    every candidate that is not in the cache yet. Candidates are timed in turns on random data, in an order shuffled per
    round. Where the winner splits K, the order of the additions changes with it (`cute_kernels.reference.gemm`).

    Args:
        m: rows of ``a``, which is ``[m, k]`` or ``[batches, m, k]``.
        n: rows of ``b``.
        k: elements of a row of either.
        batches: products, as of `GemmProblem`.
        dtype: bfloat16, float16 or, multiplied as TF32, float32, of ``a`` and ``b``.
        out_dtype: bfloat16, float16 or float32; ``dtype`` when None.
        bias: whether there is one.
        activation: as of `cute_kernels.gemm`.
        device: CUDA device; the current one when None.
        candidates: how many are timed, the most promising first.
        rounds: timed runs of each, of which the median counts.

    Returns:
        The fastest configuration.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes or types that `gemm` does not take, a number of candidates or rounds below 1.
        NotImplementedError: a device without a kernel.
        RuntimeError: a candidate computed something else than the others.
    """
    for name, value in (("candidates", candidates), ("rounds", rounds)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {type(value).__name__}, expected an integer")
        if value < 1:
            raise ValueError(f"{name} = {value}, allowed: at least 1")
    for name, value in (("dtype", dtype), ("out_dtype", out_dtype)):
        if not isinstance(value, torch.dtype) and (value is not None or name == "dtype"):
            raise TypeError(f"{name} is {type(value).__name__}, expected torch.dtype")
    names = (str(value).removeprefix("torch.") for value in (dtype, out_dtype or dtype))
    problem = GemmProblem(m, n, k, batches, *names, bias, activation)
    place = torch.device("cuda" if device is None else device)
    if place.type != "cuda":
        raise ValueError(f"device = {str(device)!r}, allowed: a CUDA device")
    make_plan(problem)  # refuses sizes and types before a device is asked for
    if not torch.cuda.is_available():
        raise NotImplementedError("tune_gemm times kernels on a CUDA device, and there is none")
    choose_backend(place, "auto")
    index = torch.cuda.current_device() if place.index is None else place.index
    arch, sm_count = device_facts(index)
    kind = tuned.Device(torch.cuda.get_device_name(index), arch, sm_count)
    with torch.cuda.device(index):
        plans = gemm_candidates(problem, arch, sm_count=sm_count)[:candidates]
        timers = gemm_timers(problem, plans)
        times = interleaved(timers, rounds)
        best = min(times, key=times.__getitem__)
        timers = {best: timers[best]} | gemm_timers(problem, variants(best))
        times = interleaved(timers, rounds)
    best = min(times, key=times.__getitem__)
    try:
        tuned.store(problem, kind, best.config, 1e3 * times[best])
    except OSError as reason:
        warnings.warn(f"only this process remembers the configuration: {reason}", RuntimeWarning, stacklevel=2)
    GEMM.repeated.clear()  # a call is planned anew: another configuration has become the default
    return best.config


def variants(plan: GemmPlan) -> list[GemmPlan]:
    """The same tiles in other orders."""
    own = plan.config.group_m
    if plan.n_tiles == 1:
        return []
    groups = [group for group in GROUPS if group != own and plan.m_tiles > min(group, own)]
    return [dataclasses.replace(plan, config=dataclasses.replace(plan.config, group_m=group)) for group in groups]


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
    """As `graph_timer`, with a given number of launches in the graph."""
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


def gemm_inputs(problem: GemmProblem) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Random ``a`` of every input set, ``b`` and the bias, on the current device."""
    dtype = getattr(torch, problem.in_dtype)
    itemsize, out_itemsize = (getattr(torch, name).itemsize for name in (problem.in_dtype, problem.out_dtype))
    operands, outputs = (problem.m + problem.n) * problem.k, problem.m * problem.n
    nbytes = problem.batches * (itemsize * operands + out_itemsize * outputs)
    shape = (problem.batches, problem.m, problem.k)
    inputs = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(max(1, -(-ROTATED_BYTES // nbytes)))]
    weight = torch.randn(problem.batches, problem.n, problem.k, device="cuda", dtype=dtype)
    return inputs, weight, torch.randn(problem.n, device="cuda") if problem.bias else None


def gemm_timers(
    problem: GemmProblem,
    plans: Sequence[GemmPlan],
    inputs: tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None] | None = None,
) -> dict[GemmPlan, Timer]:
    """A timer for every plan, after its result was compared with that of the first one.

    Args:
        problem: that of the plans.
        plans: for the current device.
        inputs: of `gemm_inputs`, drawn anew when None.

    Raises:
        RuntimeError: a plan computes something else.
    """
    rows, weight, bias = inputs or gemm_inputs(problem)
    timers: dict[GemmPlan, Timer] = {}
    expected, outputs = None, []
    for plan in plans:
        if not outputs:  # their pitch is that of every plan
            shape, dtype = (problem.batches, problem.m, plan.out_pitch), getattr(torch, problem.out_dtype)
            outputs = [torch.empty(shape, dtype=dtype, device="cuda") for _ in rows]
        padded = None
        if bias is not None:
            padded = torch.nn.functional.pad(bias, (0, plan.padded_n - problem.n))
        call = bound_launch(plan).with_constants(("a", "b", "bias", "out", "stream"))

        def launch(i: int, stream: int, call=call, padded=padded, outputs=outputs) -> None:
            slot = i % len(rows)
            address = None if padded is None else padded.data_ptr()
            call(rows[slot].data_ptr(), weight.data_ptr(), address, outputs[slot].data_ptr(), stream)

        outputs[0].fill_(torch.nan)
        launch(0, torch.cuda.current_stream().cuda_stream)
        result = outputs[0][..., : problem.n].to(torch.float32, copy=True)
        if expected is None:
            expected, norm = result.clone(), result.norm()
        error = float(result.sub_(expected).norm() / norm)
        if not error <= _MAX_ERROR:
            raise RuntimeError(f"{plan.config} differs from {plans[0].config} by {error:.3g} of the norm")
        timers[plan] = graph_timer(launch)
    return timers
