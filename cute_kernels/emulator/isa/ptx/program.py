"""A PTX module as data: kernels, instructions and their operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cute_kernels.emulator.errors import UnsupportedPTX

#: Width in bits of the fundamental types; ``pred`` counts as 1.
TYPE_BITS = {
    **{f"{kind}{bits}": bits for kind in "bsu" for bits in (8, 16, 32, 64)},
    **{"f16": 16, "f32": 32, "f64": 64, "bf16": 16, "f16x2": 32, "bf16x2": 32, "b128": 128, "pred": 1},
}

#: The register that stands for the carry flag CC.CF of a thread.
CARRY = "%cc.cf"


@dataclass(frozen=True)
class Register:
    """A declared register; ``name`` carries the scope suffix."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Special:
    """A special register, e.g. ``%tid.x``."""

    name: str

    def __str__(self) -> str:
        return f"special register {self.name}"


@dataclass(frozen=True)
class Immediate:
    """A literal. ``value`` is the integer, or the bit pattern when ``float_bits`` (32 or 64) is not 0."""

    value: int
    float_bits: int = 0

    def __str__(self) -> str:
        return f"0{'f' if self.float_bits == 32 else 'd'}{self.value:X}" if self.float_bits else str(self.value)


@dataclass(frozen=True)
class Symbol:
    """A variable, kernel parameter or label (labels carry the scope suffix); ``offset``: bytes behind its address."""

    name: str
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.name}{self.offset:+}" if self.offset else self.name


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """The elements of a list, or the operand itself."""
    return operand.items if isinstance(operand, Vector) else (operand,)


@dataclass(frozen=True)
class Memory:
    """``[base + offset, extra...]``; ``extra`` holds the coordinate vectors of tensor copies."""

    base: Operand
    offset: int = 0
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Pair:
    """``value|predicate``, the two destinations of e.g. ``elect.sync``."""

    value: Operand
    predicate: Operand


@dataclass(frozen=True)
class Not:
    """``!p``."""

    register: Register


@dataclass(frozen=True)
class Sink:
    """``_``: a destination that is thrown away."""


Operand = Register | Special | Immediate | Symbol | Vector | Memory | Pair | Not | Sink


@dataclass(frozen=True)
class Guard:
    """``@p`` or ``@!p`` in front of an instruction."""

    register: str
    negated: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel."""

    index: int  # position in ``Kernel.instructions``
    # the opcode split at its dots, e.g. ``("ld", "shared", "v4", "b32")``; ``::`` stays inside a part
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]  # in PTX order
    guard: Guard | None  # predicate of execution, or None
    line: int  # 1-based line of the PTX text
    source: str  # ``"file:line"`` of the ``.loc`` in force, or ""
    text: str  # the instruction as written, white space collapsed
    used_bytes: int | None = None  # bit i: byte i of a load is used (``.pragma "used_bytes_mask .."``); None: all are
    # what `families` has found out about it, which every pass over the kernel asks for
    facts: dict[str, object] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)

    @property
    def makes_maps(self) -> bool:
        """Whether it changes a tensor map, or is one of the fences that the PTX ISA asks for when others do."""
        return self.parts[0] == "tensormap" or "tensormap::generic" in self.parts

    def refuse(self, why: str) -> UnsupportedPTX:
        """An error to raise that says where this instruction stands."""
        return UnsupportedPTX(why).at(self)


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: where it starts in the parameter block, and its declared type, e.g. "f32", that of an element
    for an array."""

    name: str
    align: int
    nbytes: int
    offset: int
    element: str


@dataclass(frozen=True)
class Variable:
    """A variable in some state space.

    ``nbytes`` is 0 for the unsized (dynamic) shared array; ``refused``: why no kernel can use it, or ""; ``named``:
    (offset, name, bytes behind it) of addresses of other variables in ``initial``.
    """

    name: str
    space: str
    align: int
    nbytes: int
    initial: bytes = b""
    refused: str = ""
    named: tuple[tuple[int, str, int], ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One ``.entry``."""

    name: str
    parameters: tuple[Parameter, ...]
    registers: dict[str, str]  # type (e.g. ``"b32"``) per register name
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # index of the instruction that follows the label
    variables: tuple[Variable, ...]
    reqntid: tuple[int, int, int] | None = None  # block shape the kernel was compiled for, or None
    reqnctapercluster: tuple[int, int, int] | None = None  # cluster shape the kernel was compiled for, or None
    most_threads: int | None = None  # per CTA (.maxntid: the product of its extents), or None
    most_registers: int | None = None  # per thread (.maxnreg), or None
    ctas_per_sm: int | None = None  # that are to fit an SM at least (.minnctapersm), or None

    @property
    def parameter_bytes(self) -> int:
        return max((p.offset + p.nbytes for p in self.parameters), default=0)

    @functools.cached_property
    def non_coherent(self) -> frozenset[int]:
        """Indices of the instructions that are ld.global.nc."""
        return frozenset(i.index for i in self.instructions if i.parts[0] == "ld" and "nc" in i.parts)

    @functools.cached_property
    def makes_maps(self) -> bool:
        """Whether it makes or changes tensor maps."""
        return any(instruction.makes_maps for instruction in self.instructions)

    @functools.cached_property
    def dependence(self) -> str:
        """Reason why a cluster may depend on others: ``"PTX line 12 ..."``; "": nothing is seen.

        What depends on the order of clusters is known by its instruction: it communicates through global memory, or
        asks which clusters are left. Accesses that meet without any of these are found when they happen.
        """
        for instruction in self.instructions:
            why = _depends(instruction)
            if why:
                return f"PTX line {instruction.line} (`{instruction.opcode}`) {why}"
        return ""


_STRONG_LOADS = frozenset({"acquire", "relaxed", "volatile", "mmio"})


def _depends(instruction: Instruction) -> str:
    parts = instruction.parts
    name = parts[0]
    if name in ("atom", "red", "multimem"):
        return "" if _in_shared(parts) else "combines with global memory, in the order of the clusters"
    if name == "cp":
        return "combines with global memory, in the order of the clusters" if {"reduce", "global"} <= set(parts) else ""
    if name == "ld":
        strong = _STRONG_LOADS.intersection(parts) and not _in_shared(parts)
        return "may read what another cluster signals" if strong else ""
    if name == "clusterlaunchcontrol":
        return "asks for the clusters that are left"
    if name == "call":
        return "prints or stops, in the order of the clusters"
    if instruction.makes_maps:
        return "makes tensor maps in global memory, whose fences the race detector does not follow"
    return ""


def _in_shared(parts: Sequence[str]) -> bool:
    return any(part.startswith("shared") for part in parts)


class Kernels(Mapping[str, Kernel]):
    """The kernels of a module by name, each decoded when it is looked up first: none can refuse the others."""

    def __init__(self, names: Iterable[str], decode: Callable[[str], Kernel]) -> None:
        self._decoded: dict[str, Kernel | None] = dict.fromkeys(names)
        self._decode = decode

    def __getitem__(self, name: str) -> Kernel:
        """Raises UnsupportedPTX: a construct that is not read here."""
        kernel = self._decoded[name]
        if kernel is None:
            kernel = self._decoded[name] = self._decode(name)
        return kernel

    def __contains__(self, name: object) -> bool:
        return name in self._decoded

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded)

    def __len__(self) -> int:
        return len(self._decoded)


@dataclass(frozen=True)
class Module:
    """A PTX text."""

    target: str
    version: str
    kernels: Kernels
    variables: tuple[Variable, ...]
