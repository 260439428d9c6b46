"""`tune_patch_embed`: what is timed of the patch embedding of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch

from cute_kernels.config import PatchEmbedConfig, PatchEmbedProblem
from cute_kernels.operations.base import ROW_BYTES
from cute_kernels.operations.patch_embed import PATCH_EMBED, PatchEmbedArguments
from cute_kernels.plan import PatchEmbedPlan
from cute_kernels.plan.base import round_up
from cute_kernels.plan.patch_embed import WEIGHT_TYPES
from cute_kernels.runtime.gpu import bound_launch
from cute_kernels.tuning import search

Table = Literal["positions", "index", "bias", "none"]
"""Kind of table that the epilogue adds."""


def tune_patch_embed(
    images: int,
    positions: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    table: Table = "positions",
    row_scales: bool = False,
    feature_scales: bool = False,
    device: torch.device | int | str | None = None,
    candidates: int = 24,
    rounds: int = 5,
) -> PatchEmbedConfig:
    """Finds the fastest configuration of `cute_kernels.patch_embed` for one problem on this GPU, and remembers it.

    From then on, `patch_embed` without a ``config`` takes it for this problem on devices of this kind, in this process
    and, by the cache directory, in later ones. ``cute-kernels cache --clear`` forgets it. Compiling takes about a
    second for every candidate that is not in the cache yet. Candidates are timed in turns on random data, in an order
    shuffled per round. All of them round as ``epilogue="f32"`` says, so that no result changes but in the order of FP32
    additions within the tensor core.

    Args:
        images: B of ``x``, which is ``[B, S, K]``.
        positions: S; of packed rows those of ``pos_embed``, of which there are ``images`` times as many rows.
        n: features, N.
        k: elements of a row, K.
        dtype: float8_e4m3fn, uint8, int8, bfloat16 or float16, of ``x``.
        table: what is added: ``"positions"``: a position embedding, with a bias or without; ``"index"``: the same for
            packed rows, each of which names its position; ``"bias"`` alone; ``"none"``.
        row_scales: whether every row has a multiplier of its own.
        feature_scales: whether every feature has one.
        device: CUDA device; the current one when None.
        candidates: how many are timed, the most promising first.
        rounds: timed runs of each, of which the median counts.

    Returns:
        The fastest configuration.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes or types that `patch_embed` does not take, a number of candidates or rounds below 1.
        NotImplementedError: a device without a kernel.
        RuntimeError: a candidate computed something else than the others.
    """
    search.check_counts(images=images, positions=positions, k=k)
    search.check_dtypes(dtype=dtype)
    if table not in get_args(Table):
        raise ValueError(f"table = {table!r}, allowed: {', '.join(map(repr, get_args(Table)))}")
    in_dtype = str(dtype).removeprefix("torch.")
    if in_dtype not in WEIGHT_TYPES:
        raise ValueError(f"dtype = {dtype}, allowed: {', '.join(f'torch.{name}' for name in WEIGHT_TYPES)}")
    problem = PatchEmbedProblem(
        m=images * positions,
        n=n,
        k=round_up(k, ROW_BYTES // dtype.itemsize),
        in_dtype=in_dtype,
        table_rows={"bias": 1, "none": 0}.get(table, positions),
        table_index=table == "index",
        row_scale=row_scales,
        feature_scale=feature_scales,
    )
    return search.tune(PATCH_EMBED, problem, device, patch_embed_timers, lambda plan: [], candidates, rounds)


def random_arguments(problem: PatchEmbedProblem, sets: int, device: str = "cuda") -> list[PatchEmbedArguments]:
    """Input sets that differ in ``x``: arguments of a call that has this problem, its configuration left open."""
    weight_type = getattr(torch, WEIGHT_TYPES[problem.in_dtype])
    weight = _values(problem.n, problem.k, weight_type, device)
    positions = problem.table_rows
    addends: dict[str, torch.Tensor | None] = {"bias": None, "pos_embed": None, "pos_index": None}
    if positions > 1 or problem.table_index:
        addends["pos_embed"] = torch.randn(positions, problem.n, dtype=torch.float32, device=device)
    elif positions:
        addends["bias"] = torch.randn(problem.n, dtype=torch.float32, device=device)
    if problem.table_index:
        addends["pos_index"] = torch.randint(positions, (problem.m,), device=device, dtype=torch.int32)
    uniform = functools.partial(torch.rand, dtype=torch.float32, device=device)
    scales = {
        "scale_a": uniform(problem.m, 1) + 0.5 if problem.row_scale else 0.05,
        "scale_b": uniform(1, problem.n) + 0.5 if problem.feature_scale else None,
    }
    dtype = getattr(torch, problem.in_dtype)
    return [
        PatchEmbedArguments(
            _values(problem.m, problem.k, dtype, device), weight, **addends, **scales, backend="auto", config=None
        )
        for _ in range(sets)
    ]  # fmt: skip


def _values(rows: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normally distributed, of integers all values that there are."""
    if dtype.is_floating_point:
        return torch.randn(rows, columns, dtype=torch.float32, device=device).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, (rows, columns), device=device, dtype=dtype)


def patch_embed_timers(
    problem: PatchEmbedProblem, plans: Sequence[PatchEmbedPlan]
) -> dict[PatchEmbedPlan, search.Timer]:
    """A timer for every plan, after its result was compared with that of the first one.

    Raises:
        RuntimeError: a plan computes something else.
    """
    if not plans:
        return {}
    itemsize = getattr(torch, problem.in_dtype).itemsize
    nbytes = itemsize * (problem.m + problem.n) * problem.k + 2 * problem.m * problem.n
    inputs = random_arguments(problem, max(1, -(-search.ROTATED_BYTES // nbytes)))
    outputs = [torch.empty(problem.m, problem.n, dtype=torch.bfloat16, device="cuda") for _ in inputs]

    def prepare(plan: PatchEmbedPlan) -> tuple[Callable[[int, int], None], torch.Tensor]:
        operands = PATCH_EMBED.prepare(inputs[0], plan).operands
        call = bound_launch(plan).with_constants(("x", "out", "stream"), **operands.addresses())

        def launch(i: int, stream: int, operands=operands) -> None:  # operands: the call has addresses only
            slot = i % len(inputs)
            call(inputs[slot].x.data_ptr(), outputs[slot].data_ptr(), stream)

        return launch, outputs[0]

    return search.checked_timers(plans, prepare)

