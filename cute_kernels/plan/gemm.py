"""Common parts of the plans of the dense GEMM: checks of the problem, tiles, order and output staging."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from cute_kernels.config import ACTIVATIONS, GemmConfig, GemmProblem
from cute_kernels.plan.base import (
    ITEMSIZE,
    VECTOR_BYTES,
    Operand,
    Plan,
    SmemRegion,
    reject,
    require,
    round_up,
    sizes,
    smem_map,
)
from cute_kernels.plan.fields import Field
from cute_kernels.plan.options import Option, ProblemOptions
from cute_kernels.plan.shared_operands import SWIZZLE_BYTES, StoreBuffers, check_store_stages

DTYPES = ("bfloat16", "float16", "float32")
"""Element types of the operands, float32 as TF32, and of the output."""

MMA_K_BYTES = 32
"""K of one `tcgen05.mma` or `wgmma.mma_async` (PTX ISA: 16 elements of 16 bits, 8 of TF32)."""


@dataclass(frozen=True)
class GemmPlan(Plan):
    """A GEMM over a grid of output tiles.

    A cluster computes ``cluster_rows`` x ``cluster_columns`` of the output at a time; tiles are counted in such blocks.
    """

    operation: ClassVar[str] = "gemm"

    problem: GemmProblem
    config: GemmConfig

    @property
    def operands(self) -> tuple[Operand, ...]:
        """In memory: ``a`` [batches, M, K], ``b`` [batches, N, K], ``bias`` [padded_n], ``out`` [batches, M, pitch].

        The pitch is `out_pitch`; of every row of ``out`` the first N are the result.
        """
        p = self.problem
        return (
            Operand("a", self.multiplied_dtype),
            Operand("b", self.multiplied_dtype),
            Operand("bias", "float32", present=p.bias),
            Operand("out", p.out_dtype, written=True),
            *sizes(m=p.m, n=p.n, k=p.k, batches=p.batches, clusters=self.clusters),
        )

    @property
    def multiplied_dtype(self) -> str:
        """Element type that the tensor core multiplies; of float32 operands TF32."""
        return "tfloat32" if self.problem.in_dtype == "float32" else self.problem.in_dtype

    @property
    def launch_facts(self) -> dict[str, Any]:
        return {"out_pitch": self.out_pitch, "bias_elements": self.padded_n if self.problem.bias else 0}

    @property
    def mma_k(self) -> int:
        """Elements of K of one tensor-core instruction: 32 bytes, of every element type and architecture."""
        return MMA_K_BYTES // ITEMSIZE[self.problem.in_dtype]

    @property
    def m_tiles(self) -> int:
        return -(-self.problem.m // self.cluster_rows)

    @property
    def n_tiles(self) -> int:
        return -(-self.problem.n // self.cluster_columns)

    @property
    def tiles(self) -> int:
        """Tiles of all batches together; each is one turn of one cluster."""
        return self.m_tiles * self.n_tiles * self.problem.batches

    @property
    def padded_n(self) -> int:
        """Columns rounded up to whole tiles, so that reads of the bias need no bounds check."""
        return self.n_tiles * self.cluster_columns

    @property
    def out_pitch(self) -> int:
        """Elements from one output row to the next: N, rounded up to the 16 bytes that TMA asks of a row."""
        return round_up(self.problem.n, VECTOR_BYTES // ITEMSIZE[self.problem.out_dtype])

    def describe_problem(self) -> str:
        p = self.problem
        batch = f"{p.batches} x " if p.batches > 1 else ""
        activation = "" if p.activation == "none" else f", {p.activation}"
        return f"{batch}[{p.m}, {p.k}] x [{p.n}, {p.k}]^T, {p.in_dtype} -> {p.out_dtype}, bias {p.bias}{activation}"


@dataclass(frozen=True)
class StagedGemmPlan(GemmPlan, StoreBuffers):
    """A persistent GEMM: TMA fills stages of both operands, and empties store buffers."""

    k_block_bytes: int = SWIZZLE_BYTES
    swizzle_period: int = 1024
    barrier_bytes: int = 1024
    barrier_region: str = "barriers"

    @property
    def tile_k(self) -> int:
        """Elements of K in one stage."""
        return self.k_block_bytes // ITEMSIZE[self.problem.in_dtype]

    @property
    def more_smem(self) -> tuple[tuple[str, int, int], ...]:
        """Regions after those that every dense GEMM has: name, bytes, alignment."""
        return ()

    @cached_property
    def smem(self) -> tuple[SmemRegion, ...]:
        """Dynamic shared memory of a CTA, in address order."""
        stages = self.config.stages
        return smem_map(
            (self.barrier_region, self.barrier_bytes, 128),
            (f"a: {stages} stages", stages * self.a_stage_bytes, self.swizzle_period),
            (f"b: {stages} stages", stages * self.b_stage_bytes, self.swizzle_period),
            (f"output: {self.config.store_stages} stages", self.staging_bytes, self.swizzle_period),
            *self.more_smem,
        )


OPTIONS = ProblemOptions(
    (
        Option("m", 4096, "rows of a"),
        Option("n", 4096, "rows of b"),
        Option("k", 4096, "elements of a row"),
        Option("batches", 1, "products"),
        Option("in_dtype", "bfloat16", "element type of a and b; float32 is multiplied as TF32", DTYPES),
        Option("out_dtype", "bfloat16", choices=DTYPES),
        Option("bias", False, "add a bias"),
        Option("activation", "none", "of the sum", ACTIVATIONS),
    ),
    GemmProblem,
)

GROUP_M = Field("blocks of rows in a group of the tile order", least=1, most=1024)


def check_gemm_problem(p: GemmProblem) -> None:
    """Limits that TMA and the element types set on every architecture."""
    require("in_dtype", p.in_dtype, DTYPES, "operands of the tensor core, float32 as TF32")
    require("out_dtype", p.out_dtype, DTYPES, "what the epilogue rounds to")
    require("activation", p.activation, ACTIVATIONS, "what the epilogue applies before it rounds")
    # TMA coordinates are 32-bit and a tile may begin before the end of the tensor and reach beyond it.
    largest = 2**31 - 1024
    for name, value in (("m", p.m), ("n", p.n), ("k", p.k), ("batches", p.batches)):
        if not 1 <= value <= largest:
            reject(name, value, f"TMA coordinates allow 1 to {largest}", min(max(value, 1), largest))
    step = VECTOR_BYTES // ITEMSIZE[p.in_dtype]
    if p.k % step:
        reject("k", p.k, "rows of a and b must be multiples of 16 bytes for TMA", round_up(p.k, step))


def check_tile_order(plan: StagedGemmPlan) -> None:
    """The order of the tiles and the ring of store buffers."""
    if plan.tiles + plan.clusters >= 2**31:
        fit = max(1, plan.problem.m // (-(-plan.tiles // 2**30)))
        reject("m", plan.problem.m, f"tile numbers are 32-bit and there are {plan.tiles} tiles", fit)
    check_store_stages(plan)
