"""Hopper's tensor core, which the core operates (``core/wgmma.c``): wgmma.mma_async and what waits for it.

This tells it of the instructions of a kernel, and puts into words what goes wrong.

How one instruction adds is in `matrix.arithmetic`: as measured on an H100 and an H200, or exactly with one rounding.
Sums of s8 and u8 products are exact and wrap at 32 bits, or saturate with .satfinite.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.state.async_engine import AsyncOp
from cute_kernels.emulator.machine.state.warp import Wait, WarpState
from cute_kernels.emulator.machine.units.copies.tensor_map import CHUNK
from cute_kernels.emulator.machine.units.matrix import products
from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.machine.units.matrix.operands import K_BYTES, ElementType
from cute_kernels.emulator.machine.units.matrix.products import Accumulator, Kind, Rows

if TYPE_CHECKING:
    from cute_kernels.emulator.machine.units.surroundings import Surroundings

WARPS, ROWS = CONSTANTS["WGMMA_WARPS"], CONSTANTS["WGMMA_ROWS"]  # of a warpgroup; M of every wgmma
PENDING = CONSTANTS["PENDING"]  # what is read in an accumulator register before its wgmma is complete
Wgmma, WgmmaForm, WgmmaWork, Warpgroup = (STRUCTURES[name] for name in ("Wgmma", "WgmmaForm", "WgmmaWork", "Warpgroup"))
_WORK = CONSTANTS["WORK_WGMMA"]
#: What the core finds wrong.
FAULTS = {
    CONSTANTS[f"WGMMA_{name}"]: name
    for name in ("SCALE", "LANES", "DESCRIPTOR", "OUTSIDE", "DIFFERS", "UNINITIALISED", "COPIED")
}


@dataclass(frozen=True, eq=False)
class Form:
    """Form of one wgmma.mma_async: what opcode and immediate operands say; one object per instruction of a kernel."""

    n: int  # columns of the accumulator
    # a_type, b_type: element types
    a_type: ElementType
    b_type: ElementType
    a_in_registers: bool  # A comes from registers, not from shared memory
    # a_mn_major, b_mn_major: the operand in shared memory is MN-major (imm-trans of 16-bit types)
    a_mn_major: bool
    b_mn_major: bool
    # negate_a, negate_b: imm-scale of -1
    negate_a: bool
    negate_b: bool
    text: str  # opcode and PTX line, for reports
    d_type: str = "f32"  # type of the accumulator, ``"f32"``, ``"f16"`` (two in a register) or ``"s32"``
    saturate: bool = False  # integer sums saturate
    instruction: Instruction | None = None  # of the kernel, for reports; None where there is no kernel

    @property
    def registers(self) -> int:
        """Accumulator registers of a thread."""
        return self.n // (4 if self.d_type == "f16" else 2)

    @property
    def name(self) -> str:
        """Short, for traces."""
        return f"wgmma {ROWS}x{self.n}"

    @property
    def operand_bytes(self) -> int:
        """Bytes that the instruction reads from shared memory."""
        return (self.n + (0 if self.a_in_registers else ROWS)) * K_BYTES


def operation_text(form: Form, rank: int, issued: Collection[int]) -> str:
    """Name in reports of an operation that these warps of a warpgroup have issued."""
    missing = [str(warp) for warp in range(WARPS) if warp not in issued]
    state = f", not issued by warps {', '.join(missing)} of the warpgroup" if missing else ""
    return f"{form.text} of CTA {rank}{state}"


class WgmmaUnit:
    """The wgmma pipes of one cluster, one per warpgroup, as reports and waits need them. ``forms``: of the kernel's
    wgmma.mma_async, by number."""

    def __init__(self, cluster: Surroundings) -> None:
        self.cluster, self._header = cluster, cluster.barriers.tables
        self.forms: tuple[Form, ...] = ()
        self._forms: Sequence[ctypes.Structure] = ()
        self._groups: Sequence[ctypes.Structure] = ()  # of CTA after CTA
        self._of_cta = 1
        cluster.engine.words[_WORK] = self._work

    def begin(self, forms: Sequence[Form], cells: int, spare: int) -> None:
        """A kernel is about to run. ``forms``: of its wgmma.mma_async, by number. ``cells``: of a warp's state, where
        other instructions touch accumulators in flight, else 0. ``spare``: where results go then that no register holds
        any more."""
        cluster, header = self.cluster, self._header
        if not forms:
            return
        self.forms = tuple(forms)
        self._of_cta = -(-max(len(cta.warps) for cta in cluster.ctas) // WARPS)
        self._groups = (Warpgroup * (self._of_cta * len(cluster.ctas)))()
        tracker = cluster.tracker
        texts = [0 if tracker is None else tracker.epochs.text(form.text) for form in forms]
        entries = (_described(form, cluster.arithmetic, text) for form, text in zip(forms, texts))
        self._forms = (WgmmaForm * len(forms))(*entries)
        for index, group in enumerate(self._groups if tracker is not None else ()):
            group.column = tracker.columns.named(self.key(index))
        header.wgmma_forms, header.warpgroups = ctypes.addressof(self._forms), ctypes.addressof(self._groups)
        header.warpgroups_of_cta, header.register_cells, header.spare_register = self._of_cta, cells, spare
        weakref.finalize(self, _free, self._groups)

    def key(self, index: int) -> tuple[str, int, int]:
        """`Wait.key` of a warpgroup of the cluster, and of the queue of its operations."""
        return ("wgmma", *divmod(index, self._of_cta))

    def wait(self, rank: int, warp: int, newest: int, end: int) -> Wait:
        """wgmma.wait_group of a warp, for all operations of its warpgroup before ``end``."""
        index = rank * self._of_cta + warp // WARPS

        def describe() -> str:
            complete = self._groups[index].complete
            first = f", first {self._text(index, complete)}" if complete < end else ""
            count = max(end - complete, 0)
            return f"waits for all but the {newest} newest of its wgmma-groups: {count} operations{first}"

        return Wait(
            "wgmma_group", lambda: self._groups[index].complete >= end, describe, self.key(index),
            ready_at=lambda count: count >= end,
        )

    def _form(self, index: int, number: int) -> Form:
        group = self._groups[index]
        entry = Wgmma.from_address(group.operations + number % group.room * ctypes.sizeof(Wgmma))
        return self.forms[entry.form]

    def _issued(self, index: int, number: int) -> list[int]:
        """The warps of a warpgroup that have issued an operation."""
        return [member for member in range(WARPS) if self._groups[index].warps[member].issued > number]

    def _text(self, index: int, number: int) -> str:
        return operation_text(self._form(index, number), index // self._of_cta, self._issued(index, number))

    def _work(self, address: int) -> AsyncOp:
        work = WgmmaWork.from_address(address)
        form, queue = self.forms[work.form], self.key(work.warpgroup)
        text = operation_text(form, work.warpgroup // self._of_cta, range(WARPS))
        return AsyncOp(queue, None, text, yields=True, name=form.name)

    def answer(self, what: int, fault: ctypes.Structure, warp: WarpState | None) -> None:
        """Raises what the core finds wrong, a key of `FAULTS`, or reports it. Raises BarrierMisuse: warps of a
        warpgroup, or lanes, that do not issue the same operation; UnsupportedPTX: a descriptor that is none; a part of
        a warp that copies an accumulator in flight; IllegalAccess: an operand outside of shared memory, or that was
        never written."""
        name = FAULTS[what]
        if name == "COPIED":
            if self.cluster.options.looks_for("registers"):
                raise UnsupportedPTX(
                    f"lanes {fault.lanes.mask:#010x} of a warp with live lanes {warp.live:#010x} copy an accumulator "
                    "of a wgmma that no wgmma.wait_group has waited for: only whole warps can"
                )
            return
        fault = fault.wgmma
        form = self.forms[fault.form]
        if name == "UNINITIALISED":
            self._uninitialised(form, fault)
        elif name == "DESCRIPTOR":
            raise _no_descriptor(fault.descriptor % (1 << 64), fault.why)
        elif name == "OUTSIDE":
            raise IllegalAccess(
                f"{form.text}: operand at shared offsets {fault.low} to {fault.high} of CTA {fault.cta}, which "
                f"has {self.cluster.ctas[fault.cta].shared.size} bytes"
            ).know("out-of-bounds")
        elif name == "DIFFERS":
            mine, theirs = (self._asked(Wgmma.from_address(each)) for each in (fault.record, fault.theirs))
            raise BarrierMisuse(
                f"warp {warp.index} of CTA {fault.cta} issues {mine} where the other warps of its warpgroup issued "
                f"{theirs}"
            )
        else:
            operand = "scale-d" if name == "SCALE" else "a matrix descriptor"
            raise BarrierMisuse(f"{operand} of {form.text} differs between the lanes of {warp.label}")

    def _asked(self, operation: ctypes.Structure) -> str:
        form, a, b = self.forms[operation.form], operation.a % (1 << 64), operation.b % (1 << 64)
        first = "registers" if form.a_in_registers else f"{a:#018x}"
        return f"{form.text} with A {first}, B {b:#018x}, scale-d {operation.accumulate}"

    def _uninitialised(self, form: Form, fault: ctypes.Structure) -> None:
        element, mn_major, rows = form.b_type, form.b_mn_major, form.n
        if fault.operand:
            element, mn_major, rows = form.a_type, form.a_mn_major, ROWS
        nbytes = element.nbytes if mn_major else CHUNK
        places = (ctypes.c_int64 * (rows * K_BYTES // nbytes)).from_address(fault.places)
        self.cluster.ctas[fault.cta].shared.check_initialised(np.array(places), nbytes)

    def check_finished(self) -> None:
        """At the end of the kernel. Raises BarrierMisuse: an operation that some warp of a warpgroup never issued;
        IllegalAccess: an operation that no warp waited for."""
        error: EmulatorError
        by_order = sorted(self._issuers(), key=lambda each: each[2].order)  # reports name who issued first
        for index in dict.fromkeys(index for index, *_ in by_order):
            complete = min(each.issued for each in self._groups[index].warps)
            if issued := self._issued(index, complete):
                error = BarrierMisuse(f"the kernel ends with {self._text(index, complete)}")
                raise error.at(self._form(index, complete).instruction, self._label(index, min(issued)))
        for index, member, mine in by_order:
            observed = max(each.observed for each in self._groups[index].warps)
            if observed < mine.issued:
                rank, warp = index // self._of_cta, index % self._of_cta * WARPS + member
                error = IllegalAccess(
                    f"warp {warp} of CTA {rank} exits, and its warpgroup never waited for {self._text(index, observed)}"
                )
                raise error.at(self._form(index, observed).instruction, self._label(index, member))

    def _issuers(self) -> Iterator[tuple[int, int, ctypes.Structure]]:
        """Warpgroup, index in it and `WgmmaWarp` of the warps that have issued an operation."""
        for index, group in enumerate(self._groups):
            for member, mine in enumerate(group.warps):
                if mine.issued:
                    yield index, member, mine

    def _label(self, index: int, member: int) -> str:
        return self.cluster.ctas[index // self._of_cta].warps[index % self._of_cta * WARPS + member].label


def _described(form: Form, arithmetic: Arithmetic, text: int) -> ctypes.Structure:
    """The core's `WgmmaForm`; ``text`` is the number of its name for the race detector."""
    kinds = [
        Kind(element, negated, element.nbytes if mn_major else CHUNK)
        for element, negated, mn_major in (
            (form.a_type, form.negate_a, form.a_mn_major), (form.b_type, form.negate_b, form.b_mn_major),
        )
    ]  # fmt: skip
    d = Accumulator(form.d_type, False, form.saturate, ROWS)
    sums = arithmetic.sums("wgmma", form.a_type.name, form.d_type)
    nowhere = Rows(0, None, 0)  # an operation knows its operands and accumulators
    mma = products.describe(ROWS, form.n, *kinds, d, [(nowhere, nowhere, 0)], sums)
    return WgmmaForm(mma, form.registers, form.a_in_registers, form.operand_bytes, text)


def _no_descriptor(descriptor: int, wrong: int) -> UnsupportedPTX:
    """The error for what ``wgmma_matrix`` has found wrong."""
    text = "a bit outside of the fields of a wgmma descriptor"
    if wrong == CONSTANTS["MATRIX_BASE"]:
        text = f"base offset {descriptor >> 49 & 7}"
    return UnsupportedPTX(f"matrix descriptor {descriptor:#018x}: {text}")


def _free(groups: ctypes.Array[ctypes.Structure]) -> None:
    library().wgmma_free(ctypes.addressof(groups), len(groups))
