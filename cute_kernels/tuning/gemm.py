"""`tune_gemm`: what is timed of the dense GEMM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from cute_kernels.config import Activation, GemmConfig, GemmProblem
from cute_kernels.operations.gemm import GEMM
from cute_kernels.plan import GemmPlan
from cute_kernels.runtime.gpu import bound_launch
from cute_kernels.tuning import search

GROUPS = (1, 4, 8, 16)
"""Values of ``group_m`` that are tried on the fastest candidate."""


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
    search.check_dtypes(dtype=dtype, out_dtype=dtype if out_dtype is None else out_dtype)
    names = (str(value).removeprefix("torch.") for value in (dtype, out_dtype or dtype))
    problem = GemmProblem(m, n, k, batches, *names, bias, activation)
    return search.tune(GEMM, problem, device, gemm_timers, variants, candidates, rounds)


def variants(plan: GemmPlan) -> list[GemmPlan]:
    """Plans of the same tiles in other orders."""
    own = plan.config.group_m
    if plan.n_tiles == 1:
        return []
    groups = [group for group in GROUPS if group != own and plan.m_tiles > min(group, own)]
    return [dataclasses.replace(plan, config=dataclasses.replace(plan.config, group_m=group)) for group in groups]


def gemm_inputs(problem: GemmProblem) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Random ``a`` of every input set, ``b`` and the bias, on the current device."""
    dtype = getattr(torch, problem.in_dtype)
    itemsize, out_itemsize = (getattr(torch, name).itemsize for name in (problem.in_dtype, problem.out_dtype))
    operands, outputs = (problem.m + problem.n) * problem.k, problem.m * problem.n
    nbytes = problem.batches * (itemsize * operands + out_itemsize * outputs)
    shape = (problem.batches, problem.m, problem.k)
    inputs = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(max(1, -(-search.ROTATED_BYTES // nbytes)))]
    weight = torch.randn(problem.batches, problem.n, problem.k, device="cuda", dtype=dtype)
    return inputs, weight, torch.randn(problem.n, dtype=torch.float32, device="cuda") if problem.bias else None


def gemm_timers(
    problem: GemmProblem,
    plans: Sequence[GemmPlan],
    inputs: tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None] | None = None,
) -> dict[GemmPlan, search.Timer]:
    """A timer for every plan, after its result was compared with that of the first one.

    Args:
        problem: that of the plans.
        plans: for the current device.
        inputs: of `gemm_inputs`, drawn anew when None.

    Raises:
        RuntimeError: a plan computes something else.
    """
    rows, weight, bias = inputs or gemm_inputs(problem)
    outputs: list[torch.Tensor] = []

    def prepare(plan: GemmPlan) -> tuple[Callable[[int, int], None], torch.Tensor]:
        if not outputs:  # their pitch is that of every plan
            shape, dtype = (problem.batches, problem.m, plan.out_pitch), getattr(torch, problem.out_dtype)
            outputs.extend(torch.empty(shape, dtype=dtype, device="cuda") for _ in rows)
        padded = None
        if bias is not None:
            padded = torch.nn.functional.pad(bias, (0, plan.padded_n - problem.n))
        call = bound_launch(plan).with_constants(("a", "b", "bias", "out", "stream"))

        def launch(i: int, stream: int) -> None:
            slot = i % len(rows)
            address = None if padded is None else padded.data_ptr()
            call(rows[slot].data_ptr(), weight.data_ptr(), address, outputs[slot].data_ptr(), stream)

        return launch, outputs[0][..., : problem.n]

    return search.checked_timers(plans, prepare)
