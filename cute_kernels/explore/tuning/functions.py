"""`tune_gemm`, `tune_patch_embed`, `tune_patch_embed_images`: the fastest configuration of a problem on a GPU.
`tune_first_calls`: of every problem that a program calls."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch

from cute_kernels.common import forks
from cute_kernels.config import (
    WEIGHT_TYPES,
    Activation,
    GemmConfig,
    GemmProblem,
    ImagesConfig,
    PatchEmbedConfig,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    check_choice,
    name_of,
)
from cute_kernels.explore.tuning import search
from cute_kernels.operations.base import FIRST_CALLS, ROW_BYTES, Operation
from cute_kernels.operations.gemm import GEMM
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES
from cute_kernels.operations.runtime.devices import tuned_config
from cute_kernels.plan.base import round_up
from cute_kernels.plan.images import PIXEL_TYPES
from cute_kernels.plan.options import table_rows

Table = Literal["positions", "index", "bias", "none"]
"""Kind of table that the epilogue adds."""


_TUNING = forks.lock()
"""Held while first calls are timed: another thread's launches would lengthen them, and end a capture."""


@contextlib.contextmanager
def tune_first_calls(candidates: int = 2) -> Iterator[None]:
    """A context in which the first call of each problem that this thread makes on a GPU times ``candidates``
    configurations, the most promising first, and remembers the fastest as `tune_patch_embed` does.

    For a model's warm-up: such a call takes seconds, waits for the device and allocates at least 160 MB of random data
    meanwhile; no other thread may capture a CUDA graph then. Random numbers of the program stay what they were. A
    problem that was tuned before, or called before in this process, keeps its configuration; so does a call with a
    ``config``, or in a CUDA graph that is being captured. If the GPU's memory does not suffice, a RuntimeWarning says
    that the chooser's configuration is taken. Contexts are left in the opposite order, as `with` leaves them.

    Raises:
        TypeError, ValueError: ``candidates`` is no integer, or below 1.
        RuntimeError: in a call: a candidate computed something else than the others.
    """
    search.check_counts(candidates=candidates)

    def tune(operation: Operation, problem: Any) -> Any:
        try:
            with _TUNING, torch.random.fork_rng([torch.cuda.current_device()]):
                found = tuned_config(problem, torch.device("cuda"))  # by another thread meanwhile
                return search.tune(operation, problem, candidates) if found is None else found
        except torch.OutOfMemoryError:
            warnings.warn(f"too little memory to time {operation.name} of {problem}", RuntimeWarning, stacklevel=2)
            return None

    token = FIRST_CALLS.set(tune)
    try:
        yield
    finally:
        FIRST_CALLS.reset(token)


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
    candidates: int = 24,
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
        candidates: how many are timed, the most promising first.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes or types that `patch_embed` does not take, a number of candidates below 1.
        NotImplementedError: a device without a kernel.
        RuntimeError: a candidate computed something else than the others.
    """
    search.check_counts(images=images, positions=positions, k=k)
    search.check_dtypes(dtype=dtype)
    check_choice("table", table, get_args(Table))
    in_dtype = name_of(dtype)
    if in_dtype not in WEIGHT_TYPES:
        raise ValueError(f"dtype = {dtype}: must be one of {', '.join(f'torch.{name}' for name in WEIGHT_TYPES)}")
    problem = PatchEmbedProblem(
        m=images * positions,
        n=n,
        k=round_up(k, ROW_BYTES // dtype.itemsize),
        in_dtype=in_dtype,
        table_rows=table_rows(table, positions),
        table_index=table == "index",
        row_scale=row_scales,
        feature_scale=feature_scales,
    )
    return search.tune(PATCH_EMBED, problem, candidates)


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
    row_scales: bool = False,
    column_scales: bool = False,
    residual: torch.dtype | None = None,
    candidates: int = 24,
) -> GemmConfig:
    """Finds the fastest configuration of `cute_kernels.gemm` for one problem on this GPU, and remembers it, as
    `tune_patch_embed` does. Where the winner splits K, the order of the additions changes with it
    (`cute_kernels.operations.reference.gemm`).

    Args:
        m: rows of ``a``, which is ``[m, k]`` or ``[batches, m, k]``.
        n: rows of ``b``.
        k: elements of a row of either.
        batches: products, as of `GemmProblem`.
        dtype: of ``a``: bfloat16, float16, float8_e4m3fn, int8, uint8 or, multiplied as TF32, float32.
        out_dtype: bfloat16, float16, float32 or float8_e4m3fn; when None ``dtype``, of 8 bits bfloat16.
        bias: whether there is one.
        activation: as of `cute_kernels.gemm`.
        row_scales: ``scale_a`` has a number for each row.
        column_scales: ``scale_b`` has a number for each column.
        residual: its element type; None: there is none.
        candidates: as of `tune_patch_embed`.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `tune_patch_embed`, of what `gemm` takes.
    """
    if out_dtype is None:
        out_dtype = torch.bfloat16 if dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8) else dtype
    search.check_dtypes(dtype=dtype, out_dtype=out_dtype, **({} if residual is None else {"residual": residual}))
    problem = GemmProblem(
        m=m,
        n=n,
        k=k,
        batches=batches,
        in_dtype=name_of(dtype),
        out_dtype=name_of(out_dtype),
        bias=bias,
        activation=activation,
        row_scale=row_scales,
        column_scale=column_scales,
        residual=None if residual is None else name_of(residual),
    )
    return search.tune(GEMM, problem, candidates)


def tune_patch_embed_images(
    images: int,
    height: int,
    width: int,
    patch: int,
    n: int,
    *,
    channels: int = 3,
    precision: str = "int8",
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    table: Literal["positions", "bias", "none"] = "positions",
    candidates: int = 24,
) -> ImagesConfig | PatchEmbedConfig:
    """Finds the fastest configuration of `cute_kernels.patch_embed_images` for one problem on this GPU and remembers
    it, as `tune_patch_embed` does. Candidates are configurations of the kernels that read the images, and of the kernel
    over rows behind a pass over the images.

    Args:
        images, channels, height, width: of ``images``, which is ``[B, C, H, W]``.
        patch: side of a patch in pixels.
        n: features, N.
        precision: of the prepared weight: int8, bf16 or fp16.
        dtype: element type of the images; what the precision multiplies when None.
        channels_last: memory order of the images.
        out_dtype: bfloat16, float16 or float32.
        table: what is added: ``"positions"``: a position embedding, with a bias or without; ``"bias"`` alone, which
            the offset of uint8 images counts as; ``"none"``.
        candidates: as of `tune_patch_embed`.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `tune_patch_embed`, of what `patch_embed_images`
            takes.
    """
    search.check_counts(images=images, height=height, width=width, patch=patch, channels=channels)
    search.check_dtypes(out_dtype=out_dtype, **({} if dtype is None else {"dtype": dtype}))
    check_choice("precision", precision, PIXEL_TYPES)
    check_choice("table", table, ("positions", "bias", "none"))
    in_dtype = PIXEL_TYPES[precision] if dtype is None else name_of(dtype)
    problem = PatchEmbedImagesProblem(
        batch=images,
        channels=channels,
        height=height,
        width=width,
        patch=patch,
        n=n,
        in_dtype=in_dtype,
        channels_last=channels_last,
        precision=precision,
        out_dtype=name_of(out_dtype),
    )
    problem = dataclasses.replace(problem, table_rows=table_rows(table, problem.positions))
    return search.tune(PATCH_EMBED_IMAGES, problem, candidates)
