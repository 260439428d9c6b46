"""A kernel to one Python generator function per warp.

Every basic block becomes straight-line source (`cute_kernels.emulator.block`); around the blocks stands one loop that
dispatches on the block number ``pc``. Registers are local variables of the generator, so they survive a ``yield``,
which is how a warp gives way. Names in the generated code: ``W`` the warp, ``M`` the mask of running lanes, ``rpc`` the
block where diverged lanes meet (-1: not diverged), ``C`` executions per block, ``budget`` blocks until the warp has to
give way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_kernels.emulator import (  # noqa: F401 - importing a file registers its opcode families
    instructions_atomic,
    instructions_bits,
    instructions_bulk,
    instructions_bulk_copy,
    instructions_call,
    instructions_carry,
    instructions_clc,
    instructions_compare,
    instructions_convert,
    instructions_cp_async,
    instructions_float,
    instructions_integer,
    instructions_matrix,
    instructions_memory,
    instructions_mma,
    instructions_move,
    instructions_sync,
    instructions_tcgen05,
    instructions_tensormap,
    instructions_warp,
    instructions_wgmma,
)
from cute_kernels.emulator.accesses import LocalMemory
from cute_kernels.emulator.block import BlockBuilder
from cute_kernels.emulator.block_source import BlockSource
from cute_kernels.emulator.decode import TYPE_BITS, Instruction, Kernel, Module, parse
from cute_kernels.emulator.flow import Block, Flow, analyse
from cute_kernels.emulator.instructions_registry import CONTROL, find_family, written
from cute_kernels.emulator.kernel_context import Context
from cute_kernels.emulator.lane_masks import block_lanes, mask_of, masks_of
from cute_kernels.emulator.operand_table import check_operands
from cute_kernels.emulator.register_hazards import check_registers
from cute_kernels.emulator.scalars import SCALAR_NAMES
from cute_kernels.emulator.tensor_loads import first_uses
from cute_kernels.emulator.values import FULL, Constant, Namespace, Value
from cute_kernels.emulator.wide_registers import in_halves

if TYPE_CHECKING:
    from cute_kernels.emulator.warp import Warp

_FILE = "<generated from PTX>"


@dataclass(frozen=True)
class Translation:
    """A kernel ready to run.

    Attributes:
        code: makes the generator of one warp; it yields whenever the warp gives way, and is sent block budgets.
        source: the generated Python text.
        origins: instruction index per line of ``source`` (-1: none).
        static_shared: bytes of statically sized shared variables; dynamic shared memory follows them.
    """

    kernel: Kernel
    flow: Flow
    code: Callable[[Warp], Generator[None, int, None]]
    source: str
    origins: tuple[int, ...]
    static_shared: int

    def instruction_at(self, line: int) -> Instruction | None:
        """The PTX instruction behind a line of the generated source."""
        index = self.origins[line - 1] if 0 < line <= len(self.origins) else -1
        return self.kernel.instructions[index] if index >= 0 else None


# What taking an instruction apart raises that is of no form the function for its opcode knows: a missing operand, a
# register or a literal where the other is meant, a number that no register holds. A mistake of that function raises the
# same, which is why the report says so.
_NO_FORM = (LookupError, AttributeError, TypeError, ValueError, ArithmeticError)


class PythonWarp:
    """The execution of one warp by its ``generator``: what the scheduler needs of a warp's code."""

    def __init__(self, translation: Translation, warp: Warp) -> None:
        self._translation, self._warp = translation, warp
        self.generator = translation.code(warp)
        next(self.generator)

    def send(self, budget: int) -> None:
        """Runs until the warp waits or has executed ``budget`` basic blocks.

        Raises:
            StopIteration: it has exited.
        """
        self.generator.send(budget)

    def failed_at(self, error: BaseException) -> Instruction | None:
        """The instruction that raised an error."""
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == _FILE:
                instruction = self._translation.instruction_at(traceback.tb_lineno)
                if instruction is not None:
                    return instruction
            traceback = traceback.tb_next
        return None

    @property
    def executing(self) -> int:
        """Index of the instruction whose Python is running, or where it waits; -1: none."""
        frame = self.generator.gi_frame
        return self._translation.origins[frame.f_lineno - 1] if frame is not None else -1

    @property
    def standing(self) -> int | None:
        """The basic block that the warp is in."""
        frame = self.generator.gi_frame
        return None if frame is None else frame.f_locals.get("pc", 0)

    @property
    def steps(self) -> int:
        """Instructions executed, up to the end of the block that it is in."""
        blocks = self._translation.flow.blocks
        return sum(count * (block.end - block.start) for count, block in zip(self._warp.counts, blocks))

    @property
    def counted(self) -> bool:
        """Whether it gave way behind the count of its block: it does where it waits for nothing."""
        return self.generator.gi_frame is not None and self._warp.wait is None

    def snapshot(self) -> dict[str, Any]:
        """Everything that decides what the warp does next: its generator's variables without the budget."""
        return {name: value for name, value in self.generator.gi_frame.f_locals.items() if name != "budget"}

    @staticmethod
    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        """Whether two snapshots are equal."""
        if a["pc"] != b["pc"] or a["M"] != b["M"] or a.keys() != b.keys():
            return False
        return all(x is b[name] or np.array_equal(x, b[name]) for name, x in a.items())


@functools.lru_cache(maxsize=64)
def translate(
    ptx: str, kernel: str | None, block_shape: tuple[int, int, int], check: bool = True, registers: bool = True
) -> Translation:
    """Translates one kernel of a PTX text (cached by its arguments).

    Args:
        ptx: the module.
        kernel: entry name; None when the module has one entry.
        block_shape: threads per CTA (x, y, z): what is uniform in a warp depends on it.
        check: for detectors: tell the race detector when the values of a tcgen05.ld are used.
        registers: look for registers of wgmma that are touched too early.

    Raises:
        UnsupportedPTX: anything in the kernel that is not implemented.
        IllegalAccess: what ``registers`` found.
    """
    return _Translator(lower(ptx, kernel, block_shape, check, registers)).run()


def lower(
    ptx: str, kernel: str | None, block_shape: tuple[int, int, int], check: bool, registers: bool = True
) -> Lowering:
    """The part of `translate` that both back ends share; arguments and errors as there."""
    module = parse(ptx)
    entry = pick(module, kernel)
    check_operands(entry)
    lowering = Lowering(module, in_halves(entry), block_shape)
    if registers:
        check_registers(lowering.flow)
    if check:
        lowering.uses = first_uses(lowering.flow)
    return lowering


def pick(module: Module, name: str | None) -> Kernel:
    """The entry with this name, or the only one.

    Raises:
        ValueError: no such entry, or several and no name.
    """
    if name is None and len(module.kernels) == 1:
        return next(iter(module.kernels.values()))
    if name not in module.kernels:
        has = f"it has {', '.join(module.kernels) or 'none'}"
        if name is None:
            raise ValueError(f"kernel None: only where the module has a single kernel can its name be left out; {has}")
        raise ValueError(f"kernel {name!r} is not in the module; {has}")
    return module.kernels[name]


# --- the translator -------------------------------------------------------------------------------------------------


class Lowering:
    """A kernel with its flow graph, ready to be lowered block by block for either back end."""

    def __init__(self, module: Module, kernel: Kernel, block_shape: tuple[int, int, int]) -> None:
        self.kernel = kernel
        self.flow = analyse(kernel, block_shape)
        self.space = Namespace(reserved=RUNTIME_NAMES)
        self.context = Context(kernel, self.flow, self.space)
        self.variables = _variable_names(kernel)
        self.uses: dict[int, tuple[int, ...]] = {}  # `tensor_loads.first_uses`

    def bits(self, register: str) -> int:
        return TYPE_BITS[self.kernel.registers[register]]

    def block(self, block: Block) -> tuple[BlockBuilder, Value | None, Instruction | None]:
        """The graph of a block, the condition of the branch at its end (None: it has one successor) and its last
        instruction."""
        builder = BlockBuilder(
            self.kernel.registers, self.variables, self.flow.varying, self.space, block.divergent, self.context
        )
        last: Instruction | None = None
        condition: Value | None = None
        for instruction in self.kernel.instructions[block.start : block.end]:
            builder.instruction = last = instruction
            if instruction.index in self.uses:
                builder.call(instructions_tcgen05.used, self.uses[instruction.index])
            guard = None
            if instruction.guard is not None:
                if self.kernel.registers.get(instruction.guard.register) != "pred":
                    raise instruction.refuse(f"the guard {instruction.guard.register} is no predicate")
                guard = builder.register(instruction.guard.register)
                if instruction.guard.negated:
                    guard = builder.logic_not(guard)
            if instruction.parts[0] in CONTROL:
                condition = guard
                continue
            if isinstance(guard, Constant):
                if not guard.value:
                    continue
                guard = None
            builder.guard = guard
            self._lower(builder, instruction)
            builder.guard = None
        return builder, condition if len(block.successors) > 1 else None, last

    @staticmethod
    def _lower(builder: BlockBuilder, instruction: Instruction) -> None:
        """Raises UnsupportedPTX also where operands are missing, too many, or of another kind than any form has."""
        try:
            find_family(instruction).lower(builder, instruction)
        except _NO_FORM as error:
            raise instruction.refuse(
                f"no form of {instruction.parts[0]} that is implemented has these qualifiers and operands, or the "
                "emulator is at fault "
                f"({type(error).__name__}: {error})"
            ) from error


class _Translator:
    def __init__(self, lowering: Lowering) -> None:
        self.lowering, self.kernel, self.flow = lowering, lowering.kernel, lowering.flow
        self.space, self.context, self.variables = lowering.space, lowering.context, lowering.variables
        self.lines: list[str] = []
        self.origins: list[int] = []

    def run(self) -> Translation:
        bodies = [self._block(block) for block in self.flow.blocks]
        self._put(0, "def kernel(W):")
        self._put(1, "M = W.live; pc = 0; rpc = -1; C = W.counts; budget = yield")
        if self.context.local_bytes:
            self._put(1, f"W.local = LocalMemory({self.context.local_bytes})")
        self._initialise()
        self._put(1, "while True:")
        self._put(2, "C[pc] += 1")
        self._put(2, "budget -= 1")
        self._put(2, f"if budget <= 0 and pc != {len(bodies)}:")  # an exit takes no turn
        self._put(3, "W.wait = None; budget = yield")
        self._dispatch(bodies, 0, len(bodies) + 1, 2)
        source = "\n".join(self.lines)
        names = {**RUNTIME_NAMES, **self.space.values}
        exec(compile(source, _FILE, "exec"), names)  # noqa: S102 - our own generated source
        return Translation(
            self.kernel, self.flow, names["kernel"], source, tuple(self.origins), self.context.static_shared
        )

    def _put(self, indent: int, text: str, origin: int = -1) -> None:
        self.lines.append("    " * indent + text)
        self.origins.append(origin)

    def _initialise(self) -> None:
        """Registers that may be read before they are written: undefined in PTX, zero here.

        Reads of the old value happen where a write under a mask keeps it for the other lanes.
        """
        names = set(self.flow.blocks[0].live_in)
        for block in self.flow.blocks:
            if block.divergent:
                for instruction in self.kernel.instructions[block.start : block.end]:
                    names.update(name for name in written(instruction) if name in block.live_out)
        for name in sorted(names):
            kind = self.kernel.registers[name]
            if name not in self.flow.varying:
                value = "False" if kind == "pred" else "0"
            elif kind == "pred":
                value = "0"
            else:
                value = f"ZERO_{TYPE_BITS[kind]}"
            self._put(1, f"{self.variables[name]} = {value}")

    def _dispatch(self, bodies: list[list[tuple[int, str, int]]], low: int, high: int, indent: int) -> None:
        """A binary tree of comparisons: constant source size, logarithmic time."""
        if high - low == 1:
            if low == len(bodies):
                self._put(indent, "return")
            else:
                for extra, text, origin in bodies[low]:
                    self._put(indent + extra, text, origin)
            return
        middle = (low + high) // 2
        self._put(indent, f"if pc < {middle}:")
        self._dispatch(bodies, low, middle, indent + 1)
        self._put(indent, "else:")
        self._dispatch(bodies, middle, high, indent + 1)

    def _block(self, block: Block) -> list[tuple[int, str, int]]:
        builder, condition, last = self.lowering.block(block)
        source = BlockSource(builder)
        test = source.emit(block.live_out, condition)
        self._branch(source, block, test, condition, last)
        return source.lines

    def _branch(
        self, source: BlockSource, block: Block, test: str, condition: Value | None, last: Instruction | None
    ) -> None:
        origin = last.index if last is not None else -1
        lines = source.lines
        if condition is None:
            lines.append((0, f"pc = {block.successors[0]}", origin))
        else:
            taken, following = block.successors
            if condition.uniform:
                lines.append((0, f"pc = {taken} if {test} else {following}", origin))
            else:
                meet = self.flow.reconvergence[block.index]
                lines.append((0, f"taken = {test} & M", origin))
                lines.append((0, f"if taken == M: pc = {taken}", origin))
                lines.append((0, f"elif not taken: pc = {following}", origin))
                split = f"W.diverge(taken, M, {taken}, {following}, {meet})"
                lines.append((0, f"else: pc, M, rpc = {split}", origin))
        if block.divergent:
            lines.append((0, "if pc == rpc: pc, M, rpc = W.arrive(M)", origin))


def _variable_names(kernel: Kernel) -> dict[str, str]:
    """Readable and unique Python names: ``%r12`` -> ``x_r12``."""
    names: dict[str, str] = {}
    used: set[str] = set()
    for register in kernel.registers:
        name = "x_" + "".join(c if c.isalnum() else "_" for c in register.lstrip("%"))
        while name in used:
            name += "_"
        used.add(name)
        names[register] = name
    return names


# --- names that generated code uses ---------------------------------------------------------------------------------


class _LaneTable(dict):
    """Lane mask -> bool [32], remembered."""

    def __missing__(self, mask: int) -> np.ndarray:
        if len(self) > 4096:
            self.clear()
        self[mask] = lanes = block_lanes(mask)
        return lanes


def _one(type_: Any, bits: Any) -> Callable[[int], np.ndarray]:
    return lambda value: np.array((value,), bits).view(type_)


def _column(type_: Any, bits: Any) -> Callable[[tuple[int, ...]], np.ndarray]:
    return lambda values: np.array(values, bits).view(type_)[:, None]


def _stack(rows: tuple[np.ndarray, ...]) -> np.ndarray:
    return np.concatenate(rows).reshape(len(rows), -1)


def _spread(row: np.ndarray) -> np.ndarray:
    return np.broadcast_to(row, (32,)) if row.shape != (32,) else row


def _bits_of(result: np.ndarray) -> int:
    return int(result.view(f"u{result.dtype.itemsize}")[0])


_LANE_TABLE = _LaneTable()
_TYPES = {"u8": 1, "s8": 1, "u16": 2, "s16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "f32": 4, "f64": 8}
_NUMPY = {name: np.dtype({"u": "u", "s": "i", "f": "f"}[name[0]] + str(size)).type for name, size in _TYPES.items()}
RUNTIME_NAMES: dict[str, Any] = {
    "np": np,
    "LocalMemory": LocalMemory,
    "where": np.where,
    "LANES": _LANE_TABLE,
    "FULL": FULL,
    "mask_of": mask_of,
    "masks_of": masks_of,
    "stack": _stack,
    "stack_lanes": lambda masks: np.stack([_LANE_TABLE[mask] for mask in masks]),
    "spread": _spread,
    "bits_of": _bits_of,
    **{f"one_{name}": _one(_NUMPY[name], f"u{size}") for name, size in _TYPES.items()},
    **{f"column_{name}": _column(_NUMPY[name], f"u{size}") for name, size in _TYPES.items()},
    **{name: _NUMPY[name] for name in _TYPES},
    **{f"ZERO_{8 * size}": np.zeros(32, f"u{size}") for size in (1, 2, 4, 8)},
    **SCALAR_NAMES,
}
