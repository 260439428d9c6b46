"""What every plan has in common: architectures, limits, the checks of a problem, and how a plan is printed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, NoReturn

from cute_kernels.config import Config, GemmProblem, PatchEmbedProblem
from cute_kernels.plan.operands import Operand

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


@dataclass(frozen=True)
class TmemRegion:
    """Columns of a CTA's tensor memory that hold one thing: the first one and how many."""

    name: str
    first: int
    columns: int


def smem_map(sizes: tuple[tuple[str, int, int], ...]) -> tuple[SmemRegion, ...]:
    """Regions in address order from (name, bytes, alignment)."""
    regions, offset = [], 0
    for name, nbytes, alignment in sizes:
        offset = round_up(offset, alignment)
        regions.append(SmemRegion(name, offset, nbytes, alignment))
        offset += nbytes
    return tuple(regions)


@dataclass(frozen=True)
class Plan(ABC):
    """A legal way to run one problem. Every attribute is derived; construct it with `cute_kernels.plan.make_plan`.

    The common part: what operations and runtime need to know, whatever the architecture.

    Attributes:
        operation: name of the operation, a key of `cute_kernels.plan.PLANNERS`.
        kernel: ``module:class`` of the CuTe DSL kernel, made from a plan. A name, because plans do without CuTe DSL.
        graph: ``module:function`` that gives the kernel's producer -> consumer graph.
        profile: clock stamps that each warp may write, 0 in a kernel that is not profiled
            (`cute_kernels.plan.profile`).
    """

    operation: ClassVar[str]
    kernel: ClassVar[str]
    graph: ClassVar[str]

    problem: PatchEmbedProblem | GemmProblem
    config: Config
    arch: Arch
    sm_count: int
    profile: int = field(default=0, kw_only=True)

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
    def tmem(self) -> tuple[TmemRegion, ...]:
        """What the allocated columns of tensor memory hold, in order; empty where the architecture has none."""
        return ()

    @property
    def launches(self) -> tuple[Plan, ...]:
        """Kernels that run, in this order: one, but for a plan that chains others; `turns` says how often each does."""
        return (self,)

    @property
    def turns(self) -> tuple[tuple[Plan, Mapping[str, slice]], ...]:
        """All launches in their order, and which part of an operand, along its first dimension, each of them gets.

        An operand that is not named goes to the launch as a whole.
        """
        return tuple((part, {}) for part in self.launches)

    @property
    def scratch(self) -> tuple[str, ...]:
        """Operands that one launch writes and a later one reads: memory of a call, of no interest afterwards."""
        return ()

    @property
    @abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """Parameters of the kernel's host function, in its order."""

    @property
    def compiled_in(self) -> dict[str, Hashable]:
        """What the generated code depends on besides configuration and problem: consequences of launch arguments."""
        return {}

    @property
    def kernel_key(self) -> tuple:
        """What the generated code depends on; everything else in the plan is a launch argument.

        All that is not marked as one is in it (`cute_kernels.config.LAUNCH_ARGUMENT`): fields of the problem, the whole
        configuration, and constants of the plan where they were replaced.
        """
        problem = {
            f.name: getattr(self.problem, f.name)
            for f in fields(self.problem)
            if not f.metadata.get("launch_argument")
        }
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.default is not MISSING}
        replaced = {f.name: own[f.name] for f in fields(self) if f.name in own and own[f.name] != f.default}
        facts = {**problem, **self.compiled_in, **replaced}
        return (self.operation, self.arch.name, self.config, *facts.items())

    @property
    def launch_facts(self) -> dict[str, Any]:
        """What a launch without this package has to know of its tensors besides the problem, in types that JSON has."""
        return {}

    @property
    def runs(self) -> str:
        """Which kernels run, and why these where a problem may have others."""
        return ", then ".join(part.operation for part in self.launches)

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

    @abstractmethod
    def describe_problem(self) -> str:
        """One line about what is computed."""

    @abstractmethod
    def describe_tiles(self) -> list[tuple[str, str]]:
        """Rows (what, value) that only this kind of plan has."""


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


def check_smem(plan: Plan) -> None:
    """Shared memory, by the number of stages or what is in one."""
    if plan.smem_bytes <= plan.arch.smem_bytes:
        return
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
