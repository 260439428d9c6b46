"""Common parts of the plans of the patch embed: its operands, its table, and the checks of a problem."""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from cute_kernels.common.facts import fact, number, text
from cute_kernels.config import WEIGHT_TYPES, PatchEmbedConfig, PatchEmbedProblem, longest_row
from cute_kernels.plan import base
from cute_kernels.plan.options import BATCH, FEATURES, TABLE, Option, ProblemOptions, table_rows
from cute_kernels.plan.tiles import RowTiles

TableLayout = Literal["row_major", "interleaved", "paired", "quads"]
"""Layouts of the bias + position table, see `cute_kernels.operations.table`."""


@dataclass(frozen=True)
class PatchEmbedPlan(base.Plan):
    """A persistent GEMM whose epilogue scales and adds a row of the bias + position table."""

    operation: ClassVar[str] = "patch_embed"

    problem: PatchEmbedProblem
    config: PatchEmbedConfig

    @functools.cached_property
    def operands(self) -> tuple[base.Operand, ...]:
        """In memory: ``x`` [M, K], ``weight`` [N, K], ``table`` as `table_shape`, ``index`` [M], ``out`` [M, N].

        ``scale`` is one number, given with the launch or read from memory; ``row_scale`` [M] and ``feature_scale`` [N]
        are factors of it, or all of it where both are there.
        """
        p = self.problem
        return (
            base.Operand("x", p.in_dtype),
            base.Operand("weight", WEIGHT_TYPES[p.in_dtype]),
            base.Operand("table", self.table_dtype, present=p.table_rows > 0),
            base.Operand("index", "int32", alignment=4, present=p.table_index),
            base.Operand("out", p.out_dtype, written=True),
            base.Operand("scale", "float32", p.scale_source, alignment=4, present=p.call_scale),
            base.Operand("row_scale", "float32", alignment=4, present=p.row_scale),
            base.Operand("feature_scale", "float32", present=p.feature_scale),
            *base.sizes(m=p.m, n=p.n, k=p.k, table_rows=p.table_rows, clusters=self.clusters),
        )

    compiled_in = fact(lambda self: {"table": self.problem.table_rows > 0})
    table_height = number(lambda self: self.problem.table_rows + self.problem.table_index)
    """Rows of the table in memory: one more, of NaN, where an index chooses the row."""

    table_dtype = text(lambda self: "float32" if self.config.epilogue == "f32" else "bfloat16")

    @property
    def memory_bytes(self) -> int:
        """Bytes that a launch cannot do without moving: both operands once, the table, the output."""
        p = self.problem
        operands = (p.m + p.n) * p.k * base.ITEMSIZE[p.in_dtype]
        return operands + p.table_rows * p.n * base.ITEMSIZE[self.table_dtype] + p.m * p.n * base.ITEMSIZE[p.out_dtype]

    def describe_problem(self) -> str:
        p = self.problem
        along = [name for name, there in (("row", p.row_scale), ("feature", p.feature_scale)) if there]
        scale = f", scale per {' and '.join(along)}" if along else ""
        return f"[{p.m}, {p.k}] x [{p.n}, {p.k}]^T, {p.in_dtype} -> {p.out_dtype}, table rows {p.table_rows}{scale}"


def check_problem(p: PatchEmbedProblem) -> None:
    """Limits that TMA and the element types set on every architecture."""
    base.require("in_dtype", p.in_dtype, tuple(WEIGHT_TYPES), "element types of rows that have a kernel")
    if p.out_dtype != "bfloat16":
        base.reject("out_dtype", p.out_dtype, "this kernel stores BF16", "bfloat16")
    if p.scale_source not in ("value", "pointer"):
        base.reject("scale_source", p.scale_source, "the scale is a launch parameter or one FP32 in memory", "value")
    if p.scale_source == "pointer" and not p.call_scale:
        base.reject("scale_source", p.scale_source, "rows and features have factors: none is left in memory", "value")
    # Row coordinates of TMA are 32-bit and a tile may begin one row before the end of the tensor. The limits of n and k
    # are multiples themselves, so that rounding up stays within them.
    row_of_16_bytes = "must be a multiple of 16 bytes for TMA"
    for name, value, largest, multiple, rule in (
        ("m", p.m, 2**31 - 256, 1, ""),
        ("n", p.n, 2**31 - 256, 16 // base.ITEMSIZE[p.out_dtype], f"an output row {row_of_16_bytes}; zero-pad it"),
        ("k", p.k, 2**31 - 128, 16 // base.ITEMSIZE[p.in_dtype], f"a row {row_of_16_bytes}; zero-pad it"),
    ):
        legal = base.round_up(min(max(value, 1), largest), multiple)
        if not 1 <= value <= largest:
            base.reject(name, value, f"TMA coordinates allow 1 to {largest}", legal)
        if value % multiple:
            base.reject(name, value, rule, legal)
    most = longest_row(p.in_dtype)
    if most is not None and p.k > most:
        base.reject("k", p.k, f"sums of products of {p.in_dtype} by int8 leave 32 bits", most)
    if p.table_rows < 0:
        base.reject("table_rows", p.table_rows, "a table has 0 (absent), 1 (bias only) or S rows", 0)
    if p.table_index and not p.table_rows:
        base.reject("table_index", p.table_index, "there is no table to index", False)


def _problem_of_options(
    *, batch: int, positions: int, features: int, in_features: int, table: str, scale: str, **factors: bool
) -> PatchEmbedProblem:
    k, rows = base.round_up(in_features, base.VECTOR_BYTES), table_rows(table, positions)
    return PatchEmbedProblem(m=batch * positions, n=features, k=k, table_rows=rows, scale_source=scale, **factors)


OPTIONS = ProblemOptions(
    (
        BATCH,
        FEATURES,
        TABLE,
        Option("positions", 196, "patches per image"),
        Option("in_features", 768, "elements of a row, K, before zero-padding"),
        Option("scale", "value", "the scale is a launch parameter, or read from device memory", ("value", "pointer")),
        Option("row_scale", False, "a scale for each row of x"),
        Option("feature_scale", False, "a scale for each feature"),
    ),
    _problem_of_options,
)

EPILOGUE = base.Field("rounding contracts", ("f32", "bf16x2"))
ORDER = base.Field("which rows make a tile", ("position", "flat"))
FLAT_ROWS = "in flat order the rows of a tile are consecutive ones"


def check_order(problem: PatchEmbedProblem, order: str | None) -> None:
    """Checks that tiles can be images at positions, where a configuration says so."""
    if order != "position":
        return
    if problem.table_index:
        base.reject("order", order, "an index gives every row its own table row", "flat")
    positions = max(problem.table_rows, 1)
    if problem.m % positions:
        rule = f"position order needs whole images of {positions} positions, m = {problem.m}"
        base.reject("order", order, rule, "flat")


def check_tile_positions(plan: RowTiles) -> None:
    """Checks that there are as many positions as a tile has."""
    config = plan.config
    if config.tile_positions > plan.positions:
        rule = f"{config.order} order has {plan.positions} positions"
        if config.order == "flat":
            rule = FLAT_ROWS
        base.reject("tile_positions", config.tile_positions, rule, 1)


def check_capacity(plan: PatchEmbedPlan) -> None:
    """Shared memory, and the 32-bit indices of the table."""
    base.check_smem(plan)
    if plan.table_shape is not None and math.prod(plan.table_shape) >= 2**31:
        rule = f"the bias + position table is indexed with 32 bits and has {plan.padded_n} padded columns"
        largest = (2**31 - 1) // plan.padded_n // base.LANES * base.LANES - plan.problem.table_index
        base.reject("table_rows", plan.problem.table_rows, rule, largest)
