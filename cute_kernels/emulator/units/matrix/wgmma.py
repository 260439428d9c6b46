"""Hopper's tensor core: wgmma.mma_async, executed by the four warps of a warpgroup together.

An operation starts when the last of its warps has issued it, and completes at any later time that the completion policy
chooses; until then its accumulators hold a NaN pattern and its operands are read from shared memory as they are at
completion. Only wgmma.wait_group tells a program that an operation is complete, so the bytes that it reads count as in
use until one of its warps has waited, whatever the policy.

How one instruction adds is in `matrix.arithmetic`: as measured on an H100 and an H200, or exactly with one rounding.
Sums of s8 and u8 products are exact and wrap at 32 bits, or saturate with .satfinite.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cute_kernels.emulator.core.layout import STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.observe.counters import UnitCounters
from cute_kernels.emulator.observe.races.happens_before import Agent
from cute_kernels.emulator.observe.races.tracker import JointOperation, RaceTracker
from cute_kernels.emulator.state.async_engine import AsyncEngine, AsyncOp
from cute_kernels.emulator.state.smem import ClusterMemory, SharedMemory
from cute_kernels.emulator.units.copies.tensor_map import CHUNK
from cute_kernels.emulator.units.matrix import products
from cute_kernels.emulator.units.matrix.arithmetic import EXACTLY, Arithmetic
from cute_kernels.emulator.units.matrix.operands import (
    K_BYTES,
    ElementType,
    Matrix,
    Places,
    check_operand,
    find_operand,
)
from cute_kernels.emulator.units.matrix.products import Accumulator, Kind, Rows

if TYPE_CHECKING:
    from cute_kernels.emulator.ptx.program import Instruction

WARPS = 4  # of a warpgroup
ROWS = 64  # M of every wgmma; warp w holds rows 16 w to 16 w + 15 of A and D
PENDING = 0xFFF1DEAD  # what is read in an accumulator register before its wgmma is complete: a NaN that no sum produces
_Wgmma, _WgmmaForm = STRUCTURES["Wgmma"], STRUCTURES["WgmmaForm"]


@dataclass(frozen=True, eq=False)
class Form:
    """Form of one wgmma.mma_async: what opcode and immediate operands say; one object per instruction of a kernel.

    Attributes:
        n: columns of the accumulator.
        a_type, b_type: element types.
        a_in_registers: A comes from registers, not from shared memory.
        a_mn_major, b_mn_major: the operand in shared memory is MN-major (imm-trans of 16-bit types).
        negate_a, negate_b: imm-scale of -1.
        text: opcode and PTX line, for reports.
        d_type: type of the accumulator, ``"f32"``, ``"f16"`` (two in a register) or ``"s32"``.
        saturate: integer sums saturate.
        instruction: of the kernel, for reports; None where there is no kernel.
    """

    n: int
    a_type: ElementType
    b_type: ElementType
    a_in_registers: bool
    a_mn_major: bool
    b_mn_major: bool
    negate_a: bool
    negate_b: bool
    text: str
    d_type: str = "f32"
    saturate: bool = False
    instruction: Instruction | None = None

    @property
    def registers(self) -> int:
        """Accumulator registers of a thread."""
        return self.n // (4 if self.d_type == "f16" else 2)

    def layout(self, which: int) -> tuple[int, int, bool]:
        """Layout of B (0) or A (1): rows, bytes of an element, MN-major."""
        if which:
            return ROWS, self.a_type.nbytes, self.a_mn_major
        return self.n, self.b_type.nbytes, self.b_mn_major

    @property
    def name(self) -> str:
        """Short, for traces."""
        return f"wgmma {ROWS}x{self.n}"

    @property
    def operand_bytes(self) -> int:
        """That it reads from shared memory."""
        return (self.n + (0 if self.a_in_registers else ROWS)) * K_BYTES


_SWIZZLE_MODES = {0: "none", 1: "128B", 2: "64B", 3: "32B"}


@functools.lru_cache(maxsize=1024)
def decode_descriptor(descriptor: int) -> Matrix:
    """Decodes a shared-memory matrix descriptor of wgmma (PTX ISA, "Matrix descriptor format").

    Raises:
        UnsupportedPTX: a base offset of a swizzled matrix, or a bit outside the defined fields.
    """
    where = f"matrix descriptor {descriptor:#018x}"
    if descriptor >> 49 & 7 and descriptor >> 62:  # no swizzle repeats no pattern: its base offset means nothing
        raise UnsupportedPTX(f"{where}: base offset {descriptor >> 49 & 7}")
    if descriptor & (3 << 14 | 3 << 30 | 7 << 46 | 0x3FF << 52):
        raise UnsupportedPTX(f"{where}: a bit outside of the fields of a wgmma descriptor")
    return Matrix(
        address=(descriptor & 0x3FFF) << 4,
        leading=(descriptor >> 16 & 0x3FFF) << 4,
        stride=(descriptor >> 32 & 0x3FFF) << 4,
        swizzle=_SWIZZLE_MODES[descriptor >> 62],
    )


# --- operations ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Operand:
    """A matrix in shared memory: where it is, and how to read it."""

    where: Places
    element: ElementType
    mn_major: bool


def operand_of(form: Form, which: int, descriptor: int, cta: SharedMemory) -> _Operand:
    """B (0) or A (1) of an operation.

    Raises:
        UnsupportedPTX: a descriptor that is none.
        IllegalAccess: it lies outside of the shared memory of the CTA.
    """
    where = find_operand(decode_descriptor(descriptor), *form.layout(which))
    check_operand(cta, where, form.text)
    return _Operand(where, *((form.a_type, form.a_mn_major) if which else (form.b_type, form.b_mn_major)))


class RegisterFile:
    """Accumulators where bytecode keeps them: the operation reads and writes the warp's registers themselves.

    Nothing else touches them while it is in flight; else they are `registers_in_flight.HeldResults`.

    Args:
        words: uint32, the warp's state.
        places: indices of the registers' first lanes in it.

    Attributes:
        address: of the state.
        offsets: address of the registers' offsets in it, in bytes.
    """

    def __init__(self, words: np.ndarray, places: np.ndarray) -> None:
        self._words, self.address = words, words.ctypes.data
        self.place(places)

    def place(self, places: np.ndarray) -> None:
        """Where they are from now on."""
        self._offsets = (4 * places).astype(np.uint32)
        self.offsets = self._offsets.ctypes.data

    def locate(self) -> None:
        """The operation takes effect now."""

    def fill(self) -> None:
        """It has written the registers."""

    @classmethod
    def of(cls, rows: np.ndarray) -> RegisterFile:
        """Registers in a contiguous array, uint32 [registers, 32]."""
        return cls(rows, np.arange(0, rows.size, 32))


@dataclass
class Part:
    """One warp's share of an operation, which reads and writes the accumulators when it completes."""

    accumulators: RegisterFile
    a: np.ndarray | int


def operation_text(form: Form, rank: int, issued: Collection[int]) -> str:
    """Name in reports of an operation that these warps of a warpgroup have issued."""
    missing = [str(warp) for warp in range(WARPS) if warp not in issued]
    state = f", not issued by warps {', '.join(missing)} of the warpgroup" if missing else ""
    return f"{form.text} of CTA {rank}{state}"


@dataclass(eq=False)
class Operation:
    """One wgmma.mma_async of a warpgroup.

    Attributes:
        a, b: descriptors; ``a`` is None when A comes from registers.
        accumulate: the scale-d predicate.
        operands: B, and A if it has a descriptor.
        parts: by warp index in the warpgroup; complete when all four have issued it.
        done: the accumulators hold the result.
        observed: a warp has waited for the operation.
        watched: what the race detector knows of it, or None.
    """

    form: Form
    rank: int
    a: int | None
    b: int
    accumulate: bool
    operands: list[_Operand] = field(default_factory=list)
    parts: dict[int, Part] = field(default_factory=dict)
    done: bool = False
    observed: bool = False
    watched: JointOperation | None = None

    def describe(self) -> str:
        return operation_text(self.form, self.rank, self.parts)


@dataclass
class WarpGroups:
    """wgmma-groups of one warp."""

    open: list[Operation] = field(default_factory=list)
    committed: list[list[Operation]] = field(default_factory=list)


class InCore(Protocol):
    """The unit's work that the core executes; see `core_wgmma.CoreWgmmas`."""

    def learn(self, rank: int, warp: int, number: int, descriptors: Sequence[int]) -> None: ...
    def complete(self, rank: int, warp: int, newest: int) -> bool: ...
    def outstanding(self, rank: int, warp: int, newest: int) -> tuple[int, str]: ...
    def end_of_wait(self, rank: int, warp: int, newest: int) -> int: ...
    def take_over(self) -> tuple[dict[tuple[int, int], list[Operation]], dict[tuple[int, int], WarpGroups]]: ...


class WgmmaUnit:
    """The wgmma pipes of one cluster, one per warpgroup.

    Attributes:
        instructions: operations executed so far, one per warpgroup.
        meter: hears of every operation that starts, or None.
        arithmetic: how products are added.
        core: what executes the operations as long as there is nothing to it, or None.
    """

    def __init__(
        self,
        shared: ClusterMemory,
        engine: AsyncEngine,
        tracker: RaceTracker | None = None,
        meter: UnitCounters | None = None,
        arithmetic: Arithmetic = EXACTLY,
    ) -> None:
        self.shared, self.engine, self.tracker, self.meter = shared, engine, tracker, meter
        self.arithmetic = arithmetic
        self.instructions = 0
        #: Per (rank, warpgroup): operations that some of its warps have issued and some have not, oldest first.
        self._partial: dict[tuple[int, int], list[Operation]] = {}
        self._warps: dict[tuple[int, int], WarpGroups] = {}
        self._forms: dict[Form, ctypes.Structure] = {}
        self.core: InCore | None = None

    def issue(
        self,
        rank: int,
        warp: int,
        form: Form,
        accumulators: RegisterFile,
        a: np.ndarray | int,
        b: int,
        accumulate: bool,
    ) -> None:
        """wgmma.mma_async by one warp.

        Args:
            rank: cluster rank of the CTA.
            warp: warp index in the CTA; a warpgroup is four warps from a multiple of four on.
            form: the instruction.
            accumulators: D, read if ``accumulate``, and written, when the operation runs.
            a: descriptor, or uint32 [4, 32] registers.
            b: descriptor.
            accumulate: the scale-d predicate.

        Raises:
            BarrierMisuse: the warps of the warpgroup issue different operations.
            IllegalAccess: an operand outside of shared memory.
            ProxyFenceMissing: an operand was written through the generic proxy and not fenced since.
        """
        self._take_over()
        partial = self._partial.setdefault((rank, warp // WARPS), [])
        member = warp % WARPS
        descriptor = None if form.a_in_registers else a
        operation = next((op for op in partial if member not in op.parts), None)
        if operation is None:
            operation = Operation(form, rank, descriptor, b, accumulate)
            partial.append(operation)
            self._find_operands(operation)
            if self.tracker is not None:
                operation.watched = self.tracker.joint(("wgmma", rank, warp // WARPS), form.text)
        elif (operation.form, operation.a, operation.b, operation.accumulate) != (form, descriptor, b, accumulate):
            raise BarrierMisuse(
                f"warp {warp} of CTA {rank} issues {_text(form, descriptor, b, accumulate)} where the other warps "
                f"of its warpgroup issued {_text(operation.form, operation.a, operation.b, operation.accumulate)}"
            )
        operation.parts[member] = Part(accumulators, a)
        if operation.watched is not None:
            self.tracker.join_in(operation.watched)
        self._warps.setdefault((rank, warp), WarpGroups()).open.append(operation)
        if len(operation.parts) == WARPS:
            partial.remove(operation)
            self._start(operation, ("wgmma", rank, warp // WARPS))

    def commit(self, rank: int, warp: int) -> None:
        """wgmma.commit_group by one warp (an empty group is legal)."""
        self._take_over()
        groups = self._warps.setdefault((rank, warp), WarpGroups())
        groups.committed.append(groups.open)
        groups.open = []

    def outstanding(self, rank: int, warp: int, newest: int) -> tuple[int, str]:
        """How many operations in all but the ``newest`` committed groups of a warp are unfinished, and the first."""
        if self.core is not None:
            return self.core.outstanding(rank, warp, newest)
        unfinished = self._unfinished(rank, warp, newest)
        return len(unfinished), unfinished[0].describe() if unfinished else ""

    def _unfinished(self, rank: int, warp: int, newest: int) -> list[Operation]:
        committed = self._warps.setdefault((rank, warp), WarpGroups()).committed
        return [op for group in committed[: max(len(committed) - newest, 0)] for op in group if not op.done]

    def complete(self, rank: int, warp: int, newest: int) -> bool:
        """Whether none is `outstanding`."""
        if self.core is not None:
            return self.core.complete(rank, warp, newest)
        return not self._unfinished(rank, warp, newest)

    def observe(self, rank: int, warp: int, newest: int, agent: Agent | None = None) -> None:
        """The warp has waited for all but the ``newest`` groups; the race detector knows it as ``agent``."""
        self._take_over()
        groups = self._warps.setdefault((rank, warp), WarpGroups())
        older = max(len(groups.committed) - newest, 0)
        for group in groups.committed[:older]:
            for operation in group:
                operation.observed = True
                if operation.watched is not None:
                    operation.watched.observe(agent)
        del groups.committed[:older]

    def check_finished(self, label: Callable[[int, int], str] = lambda rank, warp: "") -> None:
        """At the end of the kernel.

        Args:
            label: of the warp of a rank and index.

        Raises:
            BarrierMisuse: an operation that some warp of a warpgroup never issued.
            IllegalAccess: an operation that no warp waited for.
        """
        self._take_over()
        error: EmulatorError
        for (rank, warpgroup), partial in self._partial.items():
            if partial:
                error = BarrierMisuse(f"the kernel ends with {partial[0].describe()}")
                first = WARPS * warpgroup + min(partial[0].parts)
                raise error.at(partial[0].form.instruction, label(rank, first))
        for (rank, warp), groups in self._warps.items():
            for operation in [op for group in [*groups.committed, groups.open] for op in group]:
                if not operation.observed:
                    error = IllegalAccess(
                        f"warp {warp} of CTA {rank} exits, and its warpgroup never waited for {operation.describe()}"
                    )
                    raise error.at(operation.form.instruction, label(rank, warp))

    # --- execution ----------------------------------------------------------------------------------------------------

    def _find_operands(self, operation: Operation) -> None:
        form, rank = operation.form, operation.rank
        for which, descriptor in enumerate((operation.b, operation.a)):
            if descriptor is not None:
                operation.operands.append(operand_of(form, which, descriptor, self.shared.ctas[rank]))

    def _start(self, operation: Operation, queue: tuple[str, int, int]) -> None:
        """The last warp has issued the operation."""
        if self.meter is not None:
            self.meter.mma(operation.form.operand_bytes)
        if self.tracker is not None:
            for operand in operation.operands:
                self.tracker.async_read(operation.rank, operand.where.starts, CHUNK, operation.watched.operation)
        run, name = functools.partial(self._run, operation), operation.form.name
        self.engine.submit(AsyncOp(queue, run, operation.describe(), yields=True, name=name, signals=queue))

    def _run(self, operation: Operation) -> None:
        form, cta = operation.form, self.shared.ctas[operation.rank]
        job = _Wgmma(accumulate=operation.accumulate)
        for entry, operand in zip(job.operands, operation.operands):
            entry.places = operand.where.address
        files = []
        for warp, entry in enumerate(job.parts):
            part = operation.parts[warp]
            files.append(part.accumulators)
            files[-1].locate()
            entry.state, entry.registers = files[-1].address, files[-1].offsets
            if operation.a is None:
                entry.a[:] = part.a.ravel().tolist()
        entry = self._described(form)
        execute = functools.partial(library().wgmma_execute, ctypes.addressof(entry), ctypes.addressof(job))
        data, states = cta.addresses()
        if not execute(data, states):
            for x in operation.operands:
                cta.check_initialised(x.where.places, x.element.nbytes if x.mn_major else CHUNK)
            # Execution goes on after the report: whatever the memory holds is multiplied.
            if not execute(data, None):
                raise AssertionError(f"{form.text}: nothing is wrong with what the core does not execute")
        for file in files:
            file.fill()
        operation.done = True
        self.instructions += 1

    def _described(self, form: Form) -> ctypes.Structure:
        if form not in self._forms:
            self._forms[form] = described(form, self.arithmetic)
        return self._forms[form]

    def _take_over(self) -> None:
        """From now on operations are Python's."""
        if self.core is not None:
            self.engine.noted()
            self._partial, self._warps = self.core.take_over()
            self.core = None


def described(form: Form, arithmetic: Arithmetic, text: int = 0) -> ctypes.Structure:
    """The core's `WgmmaForm`; ``text`` is the number of its name for the race detector."""
    kinds = [
        Kind(element, negated, element.nbytes if mn_major else CHUNK)
        for element, negated, mn_major in (
            (form.a_type, form.negate_a, form.a_mn_major), (form.b_type, form.negate_b, form.b_mn_major),
        )
    ]  # fmt: skip
    d = Accumulator(form.d_type, False, form.saturate, form.n, form.n, column_stride=ROWS)
    sums = arithmetic.sums("wgmma", form.a_type.name, form.d_type)
    nowhere = Rows(0, None, 0)  # an operation knows its operands and accumulators
    mma = products.describe(ROWS, form.n, *kinds, d, [(nowhere, nowhere, 0, None)], sums)
    return _WgmmaForm(mma, form.registers, form.a_in_registers, form.operand_bytes, text)


def _text(form: Form, a: int | None, b: int, accumulate: bool) -> str:
    first = "registers" if a is None else f"{a:#018x}"
    return f"{form.text} with A {first}, B {b:#018x}, scale-d {int(accumulate)}"
