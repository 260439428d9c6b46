"""What every plan has in common: architectures, limits, the checks of a problem, and how a plan is printed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NoReturn

from cute_kernels.config import Config, GemmProblem, PatchEmbedProblem

TableLayout = Literal["blocked", "paired"]
"""Layouts of the bias + position table, see `cute_kernels.operations.table`."""

ITEMSIZE = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}

LANES = 32
"""Threads of a warp, and tensor-memory lanes that one warp may reach: quarter ``warp_id % 4`` (PTX ISA, tcgen05 access
restrictions)."""

VECTOR_BYTES = 16
"""Widest load or store of one thread that every supported architecture has."""


@dataclass(frozen=True)
class Arch:
    """Limits of one architecture, as the CUDA C++ programming guide and the PTX ISA state them.

    Attributes:
        name: compiler target, e.g. ``"sm_100a"``.
        compute_capability: what a device of this architecture reports.
        sm_count: multiprocessors of the part that plans are made for when no device is present (148: B200, 132: H200).
        smem_bytes: dynamic shared memory that one CTA may ask for.
        tmem_columns: columns of tensor memory, each 128 lanes of 32 bits; 0 where there is none.
        max_registers: registers that one thread may have.
        register_file: 32-bit registers of one multiprocessor.
    """

    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    smem_bytes: int
    tmem_columns: int
    max_registers: int = 255
    register_file: int = 65536


ARCHS = {
    "sm_100a": Arch("sm_100a", (10, 0), sm_count=148, smem_bytes=232_448, tmem_columns=512),
    "sm_90a": Arch("sm_90a", (9, 0), sm_count=132, smem_bytes=232_448, tmem_columns=0),
}


@dataclass(frozen=True)
class SmemRegion:
    """One named piece of dynamic shared memory of a CTA: byte offset, size and required alignment."""

    name: str
    offset: int
    nbytes: int
    alignment: int


def smem_map(sizes: tuple[tuple[str, int, int], ...]) -> tuple[SmemRegion, ...]:
    """Regions in address order from (name, bytes, alignment)."""
    regions, offset = [], 0
    for name, nbytes, alignment in sizes:
        offset = round_up(offset, alignment)
        regions.append(SmemRegion(name, offset, nbytes, alignment))
        offset += nbytes
    return tuple(regions)


@dataclass(frozen=True)
class Plan:
    """A legal way to run one problem. Every attribute is derived; construct it with `cute_kernels.plan.make_plan`.

    The common part: what operations and runtime need to know, whatever the architecture.
    """

    problem: PatchEmbedProblem | GemmProblem
    config: Config
    arch: Arch
    sm_count: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.clusters * math.prod(self.cluster), 1, 1)

    @property
    def threads(self) -> int:
        return len(self.roles) * LANES

    @property
    def k_blocks(self) -> int:
        """Stages that one tile takes: 128 bytes of K each, what one SWIZZLE_128B row holds."""
        return -(-self.problem.k // (128 // ITEMSIZE[self.problem.in_dtype]))

    @property
    def smem_bytes(self) -> int:
        last = self.smem[-1]
        return last.offset + last.nbytes

    @property
    def table_height(self) -> int:
        """Rows of the table in memory: one more, of NaN, where an index chooses the row."""
        return self.problem.table_rows + self.problem.table_index

    @property
    def table_dtype(self) -> str:
        return "float32" if self.config.epilogue == "f32" else "bfloat16"

    def describe(self) -> list[tuple[str, str]]:
        """Rows (what, value) for people: tiles, launch, shared- and tensor-memory budget line by line."""
        rows = [
            ("problem", self.describe_problem()),
            ("architecture", f"{self.arch.name}, {self.sm_count} SMs"),
            ("threads", f"{self.threads} = {', '.join(self.roles)}"),
            *self.describe_tiles(),
        ]
        rows += [(f"SMEM {r.name}", f"{r.nbytes:,} B at {r.offset:,}") for r in self.smem]
        rows.append(("SMEM total", f"{self.smem_bytes:,} of {self.arch.smem_bytes:,} B"))
        return rows

    def describe_problem(self) -> str:
        p = self.problem
        return f"[{p.m}, {p.k}] x [{p.n}, {p.k}]^T, {p.in_dtype} -> {p.out_dtype}, table rows {p.table_rows}"


def reject(name: str, value: object, rule: str, nearest: object) -> NoReturn:
    raise ValueError(f"{name} = {value!r} is not possible: {rule}; nearest legal value: {nearest!r}")


def require(name: str, value: object, legal: tuple, rule: str) -> None:
    """Rejects a value that is not one of ``legal``."""
    if value in legal:
        return
    nearest = legal[0]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        nearest = min((v for v in legal if v is not None), key=lambda v: (abs(v - value), v))
    reject(name, value, f"{rule}; legal: {', '.join(map(str, legal))}", nearest)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def check_problem(p: PatchEmbedProblem) -> None:
    """Limits that TMA and the element types set on every architecture."""
    if p.in_dtype != "float8_e4m3fn":
        reject("in_dtype", p.in_dtype, "this kernel multiplies FP8 E4M3", "float8_e4m3fn")
    if p.out_dtype != "bfloat16":
        reject("out_dtype", p.out_dtype, "this kernel stores BF16", "bfloat16")
    if p.scale_source not in ("value", "pointer"):
        reject("scale_source", p.scale_source, "the scale is a launch parameter or one FP32 in memory", "value")
    # Row coordinates of TMA are 32-bit and a tile may begin one row before the end of the tensor. The limits of n and k
    # are multiples themselves, so that rounding up stays within them.
    row_of_16_bytes = "must be a multiple of 16 bytes for TMA"
    for name, value, largest, multiple, rule in (
        ("m", p.m, 2**31 - 256, 1, ""),
        ("n", p.n, 2**31 - 256, VECTOR_BYTES // ITEMSIZE[p.out_dtype], f"an output row {row_of_16_bytes}; zero-pad it"),
        ("k", p.k, 2**31 - 128, VECTOR_BYTES // ITEMSIZE[p.in_dtype], f"a row {row_of_16_bytes}; zero-pad it"),
    ):
        legal = round_up(min(max(value, 1), largest), multiple)
        if not 1 <= value <= largest:
            reject(name, value, f"TMA coordinates allow 1 to {largest}", legal)
        if value % multiple:
            reject(name, value, rule, legal)
    if p.table_rows < 0:
        reject("table_rows", p.table_rows, "a table has 0 (absent), 1 (bias only) or S rows", 0)
    if p.table_index and not p.table_rows:
        reject("table_index", p.table_index, "there is no table to index", False)


def check_epilogue(epilogue: str) -> None:
    if epilogue not in ("f32", "bf16x2"):
        reject("epilogue", epilogue, "rounding contracts are 'f32' and 'bf16x2'", "f32")


def check_capacity(plan: Plan) -> None:
    """Shared memory, by the number of stages or what is in one, and the 32-bit indices of the table."""
    if plan.smem_bytes > plan.arch.smem_bytes:
        fixed = plan.smem_bytes - plan.config.stages * plan.stage_bytes
        fit = (plan.arch.smem_bytes - fixed) // plan.stage_bytes
        rule = (
            f"{plan.config.stages} stages of {plan.stage_bytes:,} B and {fixed:,} B of barriers and staging make "
            f"{plan.smem_bytes:,} B of shared memory, the limit is {plan.arch.smem_bytes:,} B"
        )
        if fit < 2:
            blocks = plan.config.stage_blocks
            room = (plan.arch.smem_bytes - fixed) // 2
            reject("stage_blocks", blocks, f"{rule}, and two stages are needed", room // (plan.stage_bytes // blocks))
        reject("stages", plan.config.stages, rule, fit)
    if plan.table_shape is not None and math.prod(plan.table_shape) >= 2**31:
        rule = f"the bias + position table is indexed with 32 bits and has {plan.padded_n} padded columns"
        largest = (2**31 - 1) // plan.padded_n // LANES * LANES - plan.problem.table_index
        reject("table_rows", plan.problem.table_rows, rule, largest)
