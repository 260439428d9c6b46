"""Common parts of the plans of the dense GEMM: checks of the problem, tiles, order and output staging."""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.common.facts import fact, flag, number, text
from cute_kernels.config import ACTIVATIONS, WEIGHT_TYPES, GemmConfig, GemmProblem, longest_row
from cute_kernels.plan import base
from cute_kernels.plan.options import Option, ProblemOptions
from cute_kernels.plan.shared_operands import StoreBuffers, check_store_stages

FLOATS = ("bfloat16", "float16", "float32")
"""Element types that nothing has to be multiplied with to mean a number."""

OUT_TYPES = (*FLOATS, "float8_e4m3fn")
"""Element types of the output."""

B_TYPES = {
    dtype: WEIGHT_TYPES.get(dtype, dtype)
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "float32")
}
"""Element type of ``b`` by that of ``a``, as torch names them."""


@dataclass(frozen=True)
class GemmPlan(base.Plan):
    """A GEMM over a grid of output tiles.

    A cluster computes ``cluster_rows`` x ``cluster_columns`` of the output at a time; tiles are counted in such blocks.
    """

    operation: ClassVar[str] = "gemm"

    problem: GemmProblem
    config: GemmConfig

    @functools.cached_property
    def operands(self) -> tuple[base.Operand, ...]:
        """In memory: ``a`` [batches, M, K], ``b`` [batches, N, K], ``bias`` [N], ``out`` [batches, M, pitch].

        The pitch is `out_pitch`; of every row of ``out`` the first N are the result. ``scale`` is one number, given
        with the launch or read from memory; ``row_scale`` [batches, M] and ``column_scale`` [batches, N] are factors of
        it, or all of it where both are there. ``residual`` is [batches, M, residual_pitch]; ``out_scale``, like
        ``scale``, one number.
        """
        p = self.problem
        return (
            base.Operand("a", self.multiplied_dtype),
            base.Operand("b", self.b_dtype),
            base.Operand("bias", p.bias_dtype, present=p.bias),
            base.Operand("out", p.out_dtype, written=True),
            base.Operand("scale", "float32", p.scale_source, alignment=4, present=p.call_scale),
            base.Operand("row_scale", "float32", alignment=4, present=p.row_scale),
            base.Operand("column_scale", "float32", present=p.column_scale),
            base.Operand("residual", p.residual or p.out_dtype, present=p.residual is not None),
            base.Operand("out_scale", "float32", p.out_scale_source, alignment=4, present=self.narrows),
            *base.sizes(m=p.m, n=p.n, k=p.k, batches=p.batches, clusters=self.clusters),
        )

    multiplied_dtype = text(lambda self: "tfloat32" if self.problem.in_dtype == "float32" else self.problem.in_dtype)
    """Element type that the tensor core multiplies; of float32 operands TF32."""
    b_dtype = text(lambda self: WEIGHT_TYPES.get(self.problem.in_dtype, self.multiplied_dtype))
    """Element type of ``b`` in the tensor core."""

    narrows = flag(lambda self: self.out_bytes == 1)
    """The output is of 8 bits: a number of the call brings the results into its range."""
    column_vector = number(lambda self: math.gcd(self.problem.n, 4) if self.problem.column_scale else 1)
    """Neighbouring factors of columns that one load may bring, at most the four of 16 bytes."""
    bias_vector = number(lambda self: math.gcd(self.problem.n, self._vector_of_bias) if self.problem.bias else 1)
    """Neighbouring values of the bias that one load may bring, likewise."""
    _vector_of_bias = number(lambda self: base.VECTOR_BYTES // base.ITEMSIZE[self.problem.bias_dtype])
    compiled_in = fact(lambda self: {"column_vector": self.column_vector, "bias_vector": self.bias_vector})
    mma_k = number(lambda self: self.mma_k_bytes // self.in_bytes)
    """Elements of K of one tensor-core instruction: 32 bytes, of every element type and architecture."""
    m_tiles = number(lambda self: -(-self.problem.m // self.cluster_rows))
    n_tiles = number(lambda self: -(-self.problem.n // self.cluster_columns))
    tiles = number(lambda self: self.m_tiles * self.n_tiles * self.problem.batches)
    """Tiles of all batches together; a cluster computes one in each wave."""
    out_pitch = number(lambda self: self._pitch(self.problem.out_dtype))
    """Elements from one output row to the next: N, rounded up to the 16 bytes that TMA asks of a row."""
    tma_residual: ClassVar[bool] = False
    """TMA brings the residual to the store buffers; otherwise threads load it themselves."""
    residual_pitch = number(lambda self: self._pitch(self.problem.residual) if self.problem.residual else 0)
    """Elements from one row of the residual to the next, by the same rule."""

    def _pitch(self, dtype: str) -> int:
        return base.round_up(self.problem.n, base.VECTOR_BYTES // base.ITEMSIZE[dtype])

    def describe_problem(self) -> str:
        p = self.problem
        batch = f"{p.batches} x " if p.batches > 1 else ""
        along = [name for name, there in (("row", p.row_scale), ("column", p.column_scale)) if there]
        more = [f"scale per {' and '.join(along)}"] if along else []
        more += [] if p.activation == "none" else [p.activation]
        more += [f"residual in {p.residual}"] if p.residual else []
        size = f"{batch}[{p.m}, {p.k}] x [{p.n}, {p.k}]^T"
        return ", ".join([size, f"{p.in_dtype} -> {p.out_dtype}", f"bias {p.bias}", *more])


@dataclass(frozen=True)
class StagedGemmPlan(GemmPlan, StoreBuffers):
    """A persistent GEMM: TMA fills stages of both operands, and empties store buffers."""


OPTIONS = ProblemOptions(
    (
        Option("m", 4096, "rows of a and of the output"),
        Option("n", 4096, "rows of b, columns of the output"),
        Option("k", 4096, "elements of a row of a and b"),
        Option("batches", 1, "number of products in one launch"),
        Option("in_dtype", "bfloat16", "element type of a; float32 is multiplied as TF32", tuple(B_TYPES)),
        Option("out_dtype", "bfloat16", choices=OUT_TYPES),
        Option("bias", False, "add a bias"),
        Option("bias_dtype", "float32", "element type of the bias", FLOATS),
        Option("activation", "none", "activation after the bias", ACTIVATIONS),
        Option("row_scale", False, "a scale for each row of a"),
        Option("column_scale", False, "a scale for each column of the output"),
        Option("residual", "none", "element type of the residual, added after the activation", ("none", *FLOATS)),
    ),
    lambda residual, **values: GemmProblem(**values, residual=None if residual == "none" else residual),
)

MOST_TILES = 2**31
"""Tile numbers are 32-bit, and a cluster looks at one beyond the last."""

GROUP_M = base.Field("blocks of rows in a group of the tile order", least=1, most=1024)


def check_gemm_problem(p: GemmProblem) -> None:
    """Limits that TMA and the element types set on every architecture."""
    base.require("in_dtype", p.in_dtype, tuple(B_TYPES), "operands of the tensor core, float32 as TF32")
    base.require("out_dtype", p.out_dtype, OUT_TYPES, "what the epilogue rounds to")
    for name in ("bias_dtype", "residual"):
        base.require(name, getattr(p, name), FLOATS, "what the epilogue adds")
    for name in ("scale_source", "out_scale_source"):
        base.require(name, getattr(p, name), ("value", "pointer"), "the scale is a launch parameter, or in memory")
    if p.out_scale_source == "pointer" and base.ITEMSIZE[p.out_dtype] > 1:
        base.reject("out_scale_source", p.out_scale_source, f"an output of {p.out_dtype} has no scale", "value")
    if p.scale_source == "pointer" and not p.call_scale:
        base.reject("scale_source", p.scale_source, "there is no number for the whole call", "value")
    base.require("activation", p.activation, ACTIVATIONS, "what the epilogue applies before it rounds")
    # TMA coordinates are 32-bit and a tile may begin before the end of the tensor and reach beyond it.
    largest = 2**31 - 1024
    for name, value in (("m", p.m), ("n", p.n), ("k", p.k), ("batches", p.batches)):
        if not 1 <= value <= largest:
            base.reject(name, value, f"TMA coordinates allow 1 to {largest}", min(max(value, 1), largest))
    step = base.VECTOR_BYTES // base.ITEMSIZE[p.in_dtype]
    if p.k % step:
        base.reject("k", p.k, "rows of a and b must be multiples of 16 bytes for TMA", base.round_up(p.k, step))
    most = longest_row(p.in_dtype)
    if most is not None and p.k > most:
        base.reject("k", p.k, f"sums of products of {p.in_dtype} by int8 leave 32 bits", most)


def check_tile_order(plan: StagedGemmPlan) -> None:
    """The order of the tiles and the ring of store buffers."""
    if plan.tiles + plan.clusters >= MOST_TILES:
        fit = max(1, plan.problem.m // (-(-plan.tiles // 2**30)))
        base.reject("m", plan.problem.m, f"tile numbers are 32-bit and there are {plan.tiles} tiles", fit)
    check_store_stages(plan)
