"""Common parts of every plan: operands, architectures, limits, how a plan is printed, and what a kernel declares."""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, NoReturn

from cute_kernels.common.chips import CHIPS
from cute_kernels.common.chips import Chip as Arch
from cute_kernels.common.facts import fact, flag, number, text
from cute_kernels.config import ITEMSIZE, LARGEST_PRODUCT, Config, GemmProblem, PatchEmbedProblem

# --- what a kernel's host function takes, as a table: everything that passes arguments follows it --------------------
# `Plan.operands` is that table for one plan. From it follow the named tuple that CuTe DSL traces and the arguments of a
# bound launch (both `cute_kernels.operations.compile`), the memory that the emulator registers, and the facts of a
# launch. A stream comes after them. It stands beside the plan, since those who compile and those who launch read it,
# without torch and without CuTe DSL.


Kind = Literal["pointer", "value", "size"]


@dataclass(frozen=True)
class Operand:
    """The argument that a host function takes by one name."""

    name: str  # of the parameter, and of the address or number that a launch gives for it
    dtype: str  # element type, as torch names it; ``"tfloat32"``: FP32 in memory, which TMA rounds to TF32
    # ``"pointer"``: a device address; ``"value"``: one number that is given with every launch; ``"size"``: one that the
    # plan knows
    kind: Kind = "pointer"
    alignment: int = 16  # of the address, in bytes
    # whether this plan's kernel was compiled with it; the host function takes None for one that is absent
    present: bool = True
    written: bool = False  # whether the kernel writes the memory, all of which is then its output
    size: int = 0  # the number of a ``"size"``

    given = flag(lambda self: self.present and self.kind != "size")
    """Whether a launch has to say where it is, or what."""


def sizes(**values: int) -> tuple[Operand, ...]:
    """32-bit integers that the plan knows, in this order."""
    return tuple(Operand(name, "int32", "size", size=value) for name, value in values.items())


# --- time ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Prediction:
    """A modelled time, never a measured one."""

    microseconds: float  # of the launch
    # what it consists of: microseconds by what takes them. Where several things run beside each other and the longest
    # decides, only that one is in it
    parts: Mapping[str, float]
    caveat: str  # what is known of the model's errors: a sentence that stands under every table of its times
    error: float  # how far off the model is to be expected, as a part of the time
    # the same of ratios of two configurations' times of one problem: that differ in one field, and any; None: unknown
    ratio_errors: tuple[float, float] | None = None

    least = number(lambda self: self.microseconds * (1 - self.error))
    """Lower end of the range of microseconds."""
    most = number(lambda self: self.microseconds * (1 + self.error))
    """Upper end of the range of microseconds."""
    largest_part = text(lambda self: max(self.parts, key=self.parts.__getitem__))
    """The name of the part that takes most of the time. It bounds nothing: the time is the parts' sum."""

    def __str__(self) -> str:
        share = self.parts[self.largest_part] / self.microseconds
        return f"{self.time}, of which {self.largest_part} {share:.0%}"

    time = text(lambda self: f"{self.microseconds:,.1f} us (modelled, {self.least:,.0f} to {self.most:,.0f})")
    """Time and range in words."""


# --- architectures, limits, memory maps, the plan --------------------------------------------------------------------

LANES = 32
"""Threads of a warp, and tensor-memory lanes that one warp may reach: quarter ``warp_id % 4`` (PTX ISA, tcgen05 access
restrictions)."""

VECTOR_BYTES = 16
"""Widest load or store of one thread that every supported architecture has."""


ARCHS = {name: CHIPS[name] for name in ("sm_100a", "sm_90a", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120")}
"""Chips that have kernels. Devices of a compute capability get the kernels of the first with it: those of sm_90a are
WGMMA's, those of sm_90 the same mma.sync as everywhere since Ampere, for whoever asks for them by a configuration."""


def arch_of(capability: tuple[int, int]) -> str | None:
    """The architecture of `ARCHS` whose binaries a device of this compute capability runs, or None.

    Binaries of targets without a suffix also run on later minor versions of the same major one; those of ``sm_90a`` and
    ``sm_100a`` on no other (CUDA C++ programming guide, binary compatibility).
    """
    for name, arch in ARCHS.items():
        if arch.compute_capability == capability:
            return name
    older = [
        arch
        for arch in ARCHS.values()
        if not arch.name.endswith("a")
        and arch.compute_capability[0] == capability[0]
        and arch.compute_capability < capability
    ]
    return max(older, key=lambda arch: arch.compute_capability).name if older else None


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


def tmem_accumulators(count: int, columns: int) -> tuple[TmemRegion, ...]:
    """Accumulators side by side, from the first column on."""
    return tuple(TmemRegion(f"accumulator {i}", i * columns, columns) for i in range(count))


def smem_map(*regions: tuple[str, int, int]) -> tuple[SmemRegion, ...]:
    """Regions in address order from (name, bytes, alignment)."""
    placed, offset = [], 0
    for name, nbytes, alignment in regions:
        offset = round_up(offset, alignment)
        placed.append(SmemRegion(name, offset, nbytes, alignment))
        offset += nbytes
    return tuple(placed)


DESCRIBED = (
    "tile_rows", "tile_positions", "tile_images", "columns", "features", "mma_spans", "cluster_rows", "cluster_columns",
    "tiles", "m_tiles", "n_tiles", "row_tiles", "position_tiles", "image_tiles", "feature_groups", "clusters",
    "k_blocks", "tile_k", "tile_stages", "loaded_rows", "box", "stage_box", "accumulators", "accumulator_registers",
    "weight_registers", "needed_registers", "consumer_registers", "weight_bytes", "table_shape", "holds_table",
    "copies_table", "epilogue_columns", "store_rows", "store_columns", "load_pixels", "store_elements"
)  # fmt: skip
"""Facts of a plan that `Plan.describe` shows, where a kernel has them."""


@dataclass(frozen=True)
class Plan(ABC):
    """A legal way to run one problem. Every attribute is derived; construct it with `cute_kernels.plan.make_plan`.

    The common part: what operations and runtime need to know, whatever the architecture.

    Attributes:
        operation: name of the operation, a key of `cute_kernels.plan.PLANNERS`.
        kernel: ``module:class`` of the CuTe DSL kernel, made from a plan. A name, because plans do without CuTe DSL.
        graph: ``module:function`` that gives the kernel's producer -> consumer graph.
        k_block_bytes: of a K block, a row of SWIZZLE_128B.
        mma_k_bytes: K of one MMA: 32 elements of 8 bits, 16 of 16, 8 of TF32 (PTX ISA, wgmma and tcgen05.mma).
        swizzle_period: bytes after which SWIZZLE_128B repeats.
        barrier_bytes: of shared memory that barriers take.
    """

    operation: ClassVar[str]
    kernel: ClassVar[str]
    graph: ClassVar[str]

    problem: PatchEmbedProblem | GemmProblem
    config: Config
    arch: Arch
    sm_count: int
    k_block_bytes: int = field(default=128, kw_only=True)
    mma_k_bytes: int = field(default=32, kw_only=True)
    swizzle_period: int = field(default=1024, kw_only=True)
    barrier_bytes: int = field(default=1024, kw_only=True)

    ctas: ClassVar[int] = 1
    """CTAs of a cluster."""
    cluster = fact(lambda self: (self.ctas, 1, 1))
    grid = fact(lambda self: (self.clusters * math.prod(self.cluster), 1, 1))
    threads = number(lambda self: len(self.roles) * LANES)
    in_bytes = cached_property(lambda self: ITEMSIZE[self.problem.in_dtype])
    out_bytes = cached_property(lambda self: ITEMSIZE[self.problem.out_dtype])
    sums_integers = flag(lambda self: self.problem.in_dtype in LARGEST_PRODUCT)
    """Accumulators are 32-bit integers and exact; otherwise FP32."""
    tile_k = number(lambda self: self.k_block_bytes // self.in_bytes)
    """Elements of K in a block."""
    k_blocks = number(lambda self: -(-self.problem.k // self.tile_k))
    """K blocks of a tile."""
    smem_bytes = number(lambda self: self.smem[-1].offset + self.smem[-1].nbytes)
    tmem = fact(lambda self: ())
    """Regions of the allocated columns of tensor memory, in order; empty where the architecture has none."""
    resident_ctas: ClassVar[int] = 1
    """CTAs that fit the registers of a multiprocessor, as the kernel is compiled."""
    launches = fact(lambda self: (self,))
    """Kernels that run, in this order: one, but for a plan that chains others."""
    scratch = fact(lambda self: ())
    """Operands that one launch writes and a later one reads: memory of a call, of no interest afterwards."""

    operands = fact()
    """Parameters of the kernel's host function, in its order."""

    compiled_in = fact(lambda self: {})
    """Facts that generated code depends on besides configuration and problem: consequences of launch arguments."""

    @property
    def kernel_key(self) -> tuple:
        """Key of all that the generated code depends on; everything else in the plan is a launch argument.

        All that is not marked as one is in it (`cute_kernels.config.LAUNCH_ARGUMENT`): fields of the problem, the whole
        configuration, and constants of the plan where they were replaced.
        """
        problem = {
            f.name: getattr(self.problem, f.name) for f in fields(self.problem) if not f.metadata.get("launch_argument")
        }
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.default is not MISSING}
        replaced = {f.name: own[f.name] for f in fields(self) if f.name in own and own[f.name] != f.default}
        facts = {**problem, **self.compiled_in, **replaced}
        return (self.operation, self.arch.name, self.config, *facts.items())

    def smaller_stage(self, nbytes: int) -> tuple[str, object, object]:
        """The field that makes a stage smaller: its name, value, and the nearest one with which a stage has ``nbytes``.

        Of plans that `check_smem` checks.
        """
        blocks = self.config.stage_blocks
        return "stage_blocks", blocks, nbytes // (self.stage_bytes // blocks)

    runs = text(lambda self: ", then ".join(part.operation for part in self.launches))
    """Which kernels run, and why these where a problem may have others."""

    def describe(self) -> list[tuple[str, str]]:
        """Rows (what, value) for people: what follows from problem and configuration, memory line by line."""
        rows = [
            ("problem", self.describe_problem()),
            ("architecture", f"{self.arch.name}, {self.sm_count} SMs"),
            ("threads", f"{self.threads} = {', '.join(self.roles)}"),
        ]
        known = [(name.replace("_", " "), getattr(self, name, None)) for name in DESCRIBED]
        rows += [(what, f"{value:,}" if type(value) is int else str(value)) for what, value in known if value]
        rows += [(f"SMEM {r.name}", f"{r.nbytes:,} B at {r.offset:,}") for r in self.smem]
        rows.append(("SMEM total", f"{self.smem_bytes:,} of {self.arch.smem_bytes:,} B"))
        rows += [(f"TMEM {r.name}", f"{r.columns} columns from {r.first} on") for r in self.tmem]
        if self.tmem:
            rows.append(("TMEM total", f"{self.tmem_columns} of {self.arch.tmem_columns} columns"))
        return rows

    @abstractmethod
    def describe_problem(self) -> str:
        """One line about what is computed."""


def room_for_stages(plan: Plan) -> int:
    """Stages that shared memory holds beside all that is no stage."""
    return plan.config.stages + (plan.arch.smem_bytes - plan.smem_bytes) // plan.stage_bytes


def smem_rule(plan: Plan) -> str:
    """Why its stages are too many."""
    stages = plan.config.stages * plan.stage_bytes
    return (
        f"{plan.config.stages} stages of {plan.stage_bytes:,} B and {plan.smem_bytes - stages:,} B of barriers and "
        f"staging make {plan.smem_bytes:,} B of shared memory, the limit is {plan.arch.smem_bytes:,} B"
    )


Checked = Callable[[Any, Any, Arch, int], Any]
"""Makes a plan of a problem, a configuration, an architecture and multiprocessors; raises ValueError."""


def is_legal(plan: Any, check: Callable[[Any], None]) -> bool:
    """Whether a check raises no ValueError."""
    try:
        check(plan)
    except ValueError:
        return False
    return True


def legal_plans(checked_plan: Checked, problem: Any, configs: Iterable[Any], arch: Arch, sm_count: int) -> list[Any]:
    """Plans of those configurations that are legal, in their order."""
    plans = []
    for config in configs:
        with contextlib.suppress(ValueError):
            plans.append(checked_plan(problem, config, arch, sm_count))
    return plans


class IllegalValue(ValueError):
    """A limit that a plan would break: the field at fault, and its nearest legal value beside all others."""

    field: str
    nearest: Any


def reject(name: str, value: object, rule: str, nearest: object, must: str = "legal") -> NoReturn:
    refusal = IllegalValue(f"{name} = {value!r}: must be {must}: {rule}; nearest legal value: {nearest!r}")
    refusal.field, refusal.nearest = name, nearest
    raise refusal


def require(name: str, value: object, legal: tuple, rule: str) -> None:
    """Rejects a value that is not one of ``legal``, but for one that is open."""
    if value is None or value in legal:
        return
    nearest = legal[0]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        nearest = min(legal, key=lambda v: (abs(v - value), v))
    reject(name, value, rule, nearest, f"one of {', '.join(map(str, legal))}" if len(legal) > 1 else str(legal[0]))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def check_sm_count(sm_count: int, ctas: int | None, what: str = "cluster") -> None:
    """Raises ValueError for a device that has no multiprocessor for each of the CTAs of a cluster."""
    if ctas is not None and sm_count < ctas:
        reject("sm_count", sm_count, f"a {what} needs {ctas} multiprocessors", ctas)


def check_smem(plan: Plan) -> None:
    """Shared memory, by the number of stages or what is in one."""
    if plan.smem_bytes <= plan.arch.smem_bytes:
        return
    fit, rule = room_for_stages(plan), smem_rule(plan)
    if fit < 2:
        room = plan.arch.smem_bytes - plan.smem_bytes + plan.config.stages * plan.stage_bytes
        name, value, nearest = plan.smaller_stage(room // 2)
        reject(name, value, f"{rule}, and at least two stages have to fit", nearest)
    reject("stages", plan.config.stages, rule, fit)


# --- values that a field of a configuration may have: one table a kernel, which checks, ``--help`` and docs read -----
# What else a value depends on (the problem, other fields, memory) is checked by the kernel's plan.


CHOSEN = "chosen for the problem"
TWO_TILES = "two tiles' worth, or what fits"


@dataclass(frozen=True)
class Field:
    """A field of a configuration: all its legal values, or the range from ``least`` to ``most``, and why others are
    refused. ``open``: what None, where the field's type has it, stands for."""

    rule: str
    legal: tuple[int | str, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    open: str = CHOSEN

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError for a value that the field never has."""
        if self.legal:
            require(name, value, self.legal, self.rule)
        elif value is not None and not self.least <= value <= self.most:
            reject(name, value, self.rule, min(max(value, self.least), self.most))


Fields = Mapping[str, Field]
"""By the name of the field; a bool needs no entry."""


def check_fields(config: Any, fields: Fields) -> None:
    """Raises ValueError for the first field whose value is never legal."""
    for name, each in fields.items():
        each.check(name, getattr(config, name))


# --- a kernel as plans know it: its tunables, its planner, which problems get it, what a tuner tries, a model of time -


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel of an operation on an architecture."""

    config: type  # class of its tunables
    # ``(problem, config, arch, sm_count) -> Plan``; chooses the fields that are open, and raises ValueError where a
    # limit is broken
    plan: Checked
    fields: Fields  # legal values of its tunables
    # ``(problem, arch, sm_count)`` -> the configuration that a problem gets; it may leave fields open
    choose: Callable[[Any, Arch, int], Any]
    # ``(problem, arch, sm_count)`` -> plans that are worth timing on a device, the most promising first; none of a
    # problem that it cannot compute
    search: Callable[[Any, Arch, int], list[Any]]
    # why a problem does not get this kernel unless its configuration asks for it; empty where it does
    takes: Callable[[Any, Arch], str] = lambda problem, arch: ""
    predict: Callable[[Any], Prediction | None] | None = None  # the modelled time of a plan
