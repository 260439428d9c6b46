"""Hopper's tensor core: wgmma.mma_async, executed by the four warps of a warpgroup together.

An operation starts when the last of its warps has issued it, and completes at any later time that the completion policy
chooses; until then its accumulators hold a NaN pattern and its operands are read from shared memory as they are at
completion. Only wgmma.wait_group tells a program that an operation is complete, so the bytes that it reads count as in
use until one of its warps has waited, whatever the policy.

How one instruction adds is in `matrix_arithmetic`: as measured on an H100 and an H200, or exactly with one rounding.
Sums of s8 and u8 products are exact and wrap at 32 bits, or saturate with .satfinite.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cute_kernels.emulator import matrix_products
from cute_kernels.emulator.async_engine import AsyncEngine, AsyncOp
from cute_kernels.emulator.counters import UnitCounters
from cute_kernels.emulator.errors import BarrierMisuse, IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.happens_before import Agent
from cute_kernels.emulator.matrix_arithmetic import EXACTLY, Arithmetic
from cute_kernels.emulator.matrix_operands import (
    K_BYTES,
    ElementType,
    Matrix,
    Places,
    check_operand,
    find_operand,
)
from cute_kernels.emulator.matrix_products import Accumulator, Kind, Rows
from cute_kernels.emulator.sanitizer import JointOperation, RaceTracker
from cute_kernels.emulator.smem import ClusterMemory
from cute_kernels.emulator.tensor_map import CHUNK

WARPS = 4  # of a warpgroup
ROWS = 64  # M of every wgmma; warp w holds rows 16 w to 16 w + 15 of A and D
_PENDING = 0xFFF1DEAD  # what an accumulator register holds until its wgmma is complete: a NaN that no sum produces
_FRAGMENT_PLACES = np.arange(ROWS * K_BYTES // CHUNK)  # of the rows of A that registers hold


@dataclass(frozen=True, eq=False)
class Form:
    """What the opcode and the immediate operands of one wgmma.mma_async say; one object per instruction of a kernel.

    Attributes:
        n: columns of the accumulator.
        a_type, b_type: element types.
        a_in_registers: A comes from registers, not from shared memory.
        a_mn_major, b_mn_major: the operand in shared memory is MN-major (imm-trans of 16-bit types).
        negate_a, negate_b: imm-scale of -1.
        text: opcode and PTX line, for reports.
        d_type: type of the accumulator, ``"f32"``, ``"f16"`` (two in a register) or ``"s32"``.
        saturate: integer sums saturate.
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

    @property
    def registers(self) -> int:
        """Accumulator registers of a thread."""
        return self.n // (4 if self.d_type == "f16" else 2)


_SWIZZLE_MODES = {0: "none", 1: "128B", 2: "64B", 3: "32B"}


@functools.lru_cache(maxsize=1024)
def decode_descriptor(descriptor: int) -> Matrix:
    """Decodes a shared-memory matrix descriptor of wgmma (PTX ISA, "Matrix descriptor format").

    Raises:
        UnsupportedPTX: a base offset, or a bit outside the defined fields.
    """
    where = f"matrix descriptor {descriptor:#018x}"
    if descriptor >> 49 & 7:
        raise UnsupportedPTX(f"{where}: base offset {descriptor >> 49 & 7}")
    if descriptor & (3 << 14 | 3 << 30 | 7 << 46 | 0x3FF << 52):
        raise UnsupportedPTX(f"{where}: a bit outside of the fields of a wgmma descriptor")
    return Matrix(
        address=(descriptor & 0x3FFF) << 4,
        leading=(descriptor >> 16 & 0x3FFF) << 4,
        stride=(descriptor >> 32 & 0x3FFF) << 4,
        swizzle=_SWIZZLE_MODES[descriptor >> 62],
    )


# --- fragments (PTX ISA, register fragments of wgmma) ----------------------------------------------------------------


def rows_of_fragment(registers: np.ndarray) -> np.ndarray:
    """Rows of A that one warp holds: uint32 [4 registers, 32 lanes] -> uint8 [16 rows, 32 bytes of K].

    Register j of lane l is row ``l / 4 + 8 * (j % 2)``, bytes ``4 * (l % 4) + 16 * (j / 2)`` onward, for elements of
    any width.
    """
    words = registers.reshape(2, 2, 8, 4).transpose(1, 2, 0, 3)
    return np.ascontiguousarray(words).reshape(16, 8).view(np.uint8)


def rows_of_accumulators(registers: np.ndarray, halves: bool = False) -> np.ndarray:
    """Rows of D that one warp holds: 32 bits [n / 2 registers, 32 lanes] -> [16 rows, n].

    Registers 4 g to 4 g + 3 of lane l are columns ``8 g + 2 * (l % 4)`` and the next one, of row ``l / 4`` and then of
    row ``l / 4 + 8``. With ``halves`` (FP16), a register is both columns of a row: [n / 4 registers, 32 lanes].
    """
    if halves:
        pairs = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, 2, 8, 4, 2)
        return pairs.transpose(1, 2, 0, 3, 4).reshape(16, -1).astype(np.uint32)
    groups = len(registers) // 4
    return registers.reshape(groups, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, 8 * groups)


def accumulators_of_rows(rows: np.ndarray, halves: bool = False) -> np.ndarray:
    """The inverse of `rows_of_accumulators` for all warps: [64, n] -> [4 warps, registers, 32 lanes]."""
    groups = rows.shape[1] // 8
    split = rows.reshape(WARPS, 2, 8, groups, 4, 2)
    if halves:
        pairs = np.ascontiguousarray(split.transpose(0, 3, 1, 2, 4, 5).astype(np.uint16))
        return pairs.view(np.uint32).reshape(WARPS, 2 * groups, 32)
    return split.transpose(0, 3, 1, 5, 2, 4).reshape(WARPS, 4 * groups, 32)


# --- operations ------------------------------------------------------------------------------------------------------

#: Accumulators as an instruction receives them: [registers, 32], or one array of 32 lanes per register. They may be the
#: unfinished results of an earlier operation, so they are looked at only when the operation runs.
Accumulators = np.ndarray | Sequence[np.ndarray]


@dataclass(frozen=True)
class _Operand:
    """A matrix in shared memory: where it is, and how to read it."""

    where: Places
    element: ElementType
    mn_major: bool


class RegisterFile:
    """Accumulators where bytecode keeps them: the operation reads and writes the warp's registers themselves.

    Nothing else touches them while it is in flight (`register_hazards.touched_in_flight`).

    Args:
        words: uint32, the warp's state.
        places: indices of the registers' first lanes in it.
    """

    def __init__(self, words: np.ndarray, places: np.ndarray) -> None:
        first, count = int(places[0]), len(places)
        if (np.diff(places) == 32).all():
            self._rows = words[first : first + 32 * count].reshape(count, 32)
            self._index: Any = slice(None)
        else:
            self._rows, self._index = words, places[:, None] + np.arange(32)

    def read(self) -> np.ndarray:
        """uint32 [registers, 32]."""
        return self._rows[self._index]

    def write(self, rows: np.ndarray) -> None:
        """Puts 32-bit [registers, 32]."""
        self._rows[self._index] = rows.view(np.uint32)


@dataclass
class _Part:
    """One warp's share of an operation; ``result`` is filled when it completes."""

    accumulators: Accumulators | RegisterFile
    a: np.ndarray | int
    result: np.ndarray | RegisterFile


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
    parts: dict[int, _Part] = field(default_factory=dict)
    done: bool = False
    observed: bool = False
    watched: JointOperation | None = None

    def describe(self) -> str:
        missing = [str(warp) for warp in range(WARPS) if warp not in self.parts]
        state = f", not issued by warps {', '.join(missing)} of the warpgroup" if missing else ""
        return f"{self.form.text} of CTA {self.rank}{state}"


@dataclass
class _WarpGroups:
    """wgmma-groups of one warp."""

    open: list[Operation] = field(default_factory=list)
    committed: list[list[Operation]] = field(default_factory=list)


class WgmmaUnit:
    """The wgmma pipes of one cluster, one per warpgroup.

    Attributes:
        instructions: operations executed so far, one per warpgroup.
        meter: hears of every operation that starts, or None.
        arithmetic: how products are added.
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
        self._warps: dict[tuple[int, int], _WarpGroups] = {}

    def issue(
        self,
        rank: int,
        warp: int,
        form: Form,
        accumulators: Accumulators | RegisterFile,
        a: np.ndarray | int,
        b: int,
        accumulate: bool,
    ) -> np.ndarray | RegisterFile:
        """wgmma.mma_async by one warp.

        Args:
            rank: cluster rank of the CTA.
            warp: warp index in the CTA; a warpgroup is four warps from a multiple of four on.
            form: the instruction.
            accumulators: the old D, read when the operation runs and only if ``accumulate``.
            a: descriptor, or uint32 [4, 32] registers.
            b: descriptor.
            accumulate: the scale-d predicate.

        Returns:
            uint32 [registers, 32], filled when the operation completes; ``accumulators``, if they are a `RegisterFile`.

        Raises:
            BarrierMisuse: the warps of the warpgroup issue different operations.
            IllegalAccess: an operand outside of shared memory.
            ProxyFenceMissing: an operand was written through the generic proxy and not fenced since.
        """
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
        result = accumulators
        if not isinstance(accumulators, RegisterFile):
            result = np.full((form.registers, 32), _PENDING, np.uint32)
        operation.parts[member] = _Part(accumulators, a, result)
        if operation.watched is not None:
            self.tracker.join_in(operation.watched)
        self._warps.setdefault((rank, warp), _WarpGroups()).open.append(operation)
        if len(operation.parts) == WARPS:
            partial.remove(operation)
            self._start(operation, ("wgmma", rank, warp // WARPS))
        return result

    def commit(self, rank: int, warp: int) -> None:
        """wgmma.commit_group by one warp (an empty group is legal)."""
        groups = self._warps.setdefault((rank, warp), _WarpGroups())
        groups.committed.append(groups.open)
        groups.open = []

    def outstanding(self, rank: int, warp: int, newest: int) -> list[Operation]:
        """Unfinished operations in all but the ``newest`` committed groups of a warp."""
        committed = self._warps.setdefault((rank, warp), _WarpGroups()).committed
        return [op for group in committed[: max(len(committed) - newest, 0)] for op in group if not op.done]

    def observe(self, rank: int, warp: int, newest: int, agent: Agent | None = None) -> None:
        """The warp has waited for all but the ``newest`` groups; the race detector knows it as ``agent``."""
        groups = self._warps.setdefault((rank, warp), _WarpGroups())
        older = max(len(groups.committed) - newest, 0)
        for group in groups.committed[:older]:
            for operation in group:
                operation.observed = True
                if operation.watched is not None:
                    operation.watched.observe(agent)
        del groups.committed[:older]

    def check_finished(self) -> None:
        """At the end of the kernel.

        Raises:
            BarrierMisuse: an operation that some warp of a warpgroup never issued.
            IllegalAccess: an operation that no warp waited for.
        """
        for partial in self._partial.values():
            if partial:
                raise BarrierMisuse(f"the kernel ends with {partial[0].describe()}")
        for (rank, warp), groups in self._warps.items():
            for operation in [op for group in [*groups.committed, groups.open] for op in group]:
                if not operation.observed:
                    raise IllegalAccess(
                        f"warp {warp} of CTA {rank} exits, and its warpgroup never waited for {operation.describe()}"
                    )

    # --- execution ----------------------------------------------------------------------------------------------------

    def _find_operands(self, operation: Operation) -> None:
        form, rank = operation.form, operation.rank
        cta = self.shared.ctas[rank]
        matrices = [(operation.b, form.n, form.b_type, form.b_mn_major)]
        if operation.a is not None:
            matrices.append((operation.a, ROWS, form.a_type, form.a_mn_major))
        for descriptor, rows, element, mn_major in matrices:
            where = find_operand(decode_descriptor(descriptor), rows, element.nbytes, mn_major)
            check_operand(cta, where, form.text)
            operation.operands.append(_Operand(where, element, mn_major))

    def _start(self, operation: Operation, queue: tuple[str, int, int]) -> None:
        """The last warp has issued the operation."""
        if self.meter is not None:
            form = operation.form
            self.meter.mma((form.n + (0 if operation.a is None else ROWS)) * K_BYTES)
        if self.tracker is not None:
            for operand in operation.operands:
                self.tracker.async_read(operation.rank, operand.where.starts, CHUNK, operation.watched.operation)
        run, name = functools.partial(self._run, operation), f"wgmma 64x{operation.form.n}"
        self.engine.submit(AsyncOp(queue, run, operation.describe(), yields=True, name=name, signals=queue))

    def _run(self, operation: Operation) -> None:
        form = operation.form
        parts = [operation.parts[warp] for warp in range(WARPS)]
        cta = self.shared.ctas[operation.rank]
        data = cta.addresses()
        rows = [Rows(*data, operand.where.address) for operand in operation.operands]
        if operation.a is None:
            fragments = np.concatenate([rows_of_fragment(part.a) for part in parts])
            rows.append(Rows(fragments.ctypes.data, None, _FRAGMENT_PLACES.ctypes.data))
        cells = np.empty((form.n, ROWS), np.uint32)
        halves = form.d_type == "f16"
        if operation.accumulate:
            old = [rows_of_accumulators(_stacked(part.accumulators), halves) for part in parts]
            np.concatenate(old, out=cells.T)
        self._multiply(operation, rows[1], rows[0], cells)
        for part, registers in zip(parts, accumulators_of_rows(cells.T, halves)):
            if isinstance(part.result, RegisterFile):
                part.result.write(registers)
            else:
                part.result.view(registers.dtype)[...] = registers
            part.accumulators = ()  # a chain of operations must not keep all of its intermediate results alive
        operation.done = True
        self.instructions += 1

    def _multiply(self, operation: Operation, a: Rows, b: Rows, cells: np.ndarray) -> None:
        """The product, into D transposed: 32 bits [n, 64]."""
        form, cta = operation.form, self.shared.ctas[operation.rank]
        kinds = [
            Kind(element, negated, element.nbytes if mn_major else CHUNK)
            for element, negated, mn_major in (
                (form.a_type, form.negate_a, form.a_mn_major), (form.b_type, form.negate_b, form.b_mn_major),
            )
        ]  # fmt: skip
        d = Accumulator(form.d_type, operation.accumulate, form.saturate, form.n, form.n, column_stride=ROWS)
        parts = [(a, b, cells.ctypes.data, None)]
        sums = self.arithmetic.sums("wgmma", form.a_type.name, form.d_type)
        if not matrix_products.execute(matrix_products.describe(ROWS, form.n, *kinds, d, parts, sums)):
            for x in operation.operands:
                cta.check_initialised(x.where.places, x.element.nbytes if x.mn_major else CHUNK)
            raise AssertionError(f"{form.text}: nothing is wrong with what the core does not execute")



def _stacked(accumulators: Accumulators | RegisterFile) -> np.ndarray:
    """uint32 [registers, 32]."""
    if isinstance(accumulators, RegisterFile):
        return accumulators.read()
    if isinstance(accumulators, np.ndarray):
        return accumulators
    return np.stack([np.broadcast_to(row, (32,)) for row in accumulators])


def _text(form: Form, a: int | None, b: int, accumulate: bool) -> str:
    first = "registers" if a is None else f"{a:#018x}"
    return f"{form.text} with A {first}, B {b:#018x}, scale-d {int(accumulate)}"
