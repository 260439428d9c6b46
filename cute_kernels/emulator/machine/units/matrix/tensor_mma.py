"""tcgen05.mma in words: what the core asks of one that it executes (``core/tensor_mma.c``)."""

import ctypes

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.machine.state.smem import ClusterMemory
from cute_kernels.emulator.machine.state.tmem import LANES, TensorMemory, split_address
from cute_kernels.emulator.machine.units.copies.tensor_map import CHUNK
from cute_kernels.emulator.machine.units.matrix import operands

#: By the numbers of the core.
KIND_NAMES = (*operands.KINDS, *operands.SCALED_KINDS)
A, B = 0, 1
A_COLUMNS = operands.K_BYTES // 4  # of A in tensor memory
QUARTER = 32  # lanes, to all of which scales are copied
_RULES = {
    CONSTANTS[f"MMA_{name}"]: name
    for name in ("LANES", "ODD", "INSTRUCTION", "NO_CTA", "A", "MATRIX", "SWIZZLE", "OUTSIDE", "SCALES")
}


class TensorMma:
    """A tcgen05.mma of the core. ``record``: its `TensorMma`; ``label``: of the warp that issues it."""

    def __init__(self, record: ctypes.Structure, label: str) -> None:
        self.record, self.kind = record, KIND_NAMES[record.kind]
        self.text = f"tcgen05.mma.cta_group::{record.group}.kind::{self.kind} issued by {label}"  # for reports
        self.ranks = range(record.rank, record.rank + record.group)  # CTAs whose memories it accesses

    @property
    def fields(self) -> operands.Instruction:
        """Fields of its instruction descriptor; raises UnsupportedPTX or IllegalAccess where that is illegal."""
        record = self.record
        if record.scales:
            return operands.decode_scaled(self.kind, record.scales, record.group, record.instruction)[0]
        return operands.decode_instruction(self.kind, record.group, record.instruction)

    def decode(self) -> None:
        """Fills in the fields of the record. Raises as `fields`."""
        fields, into = self.fields, self.record.fields
        into.a, into.b = operands.ELEMENT_NUMBERS[fields.a_type], operands.ELEMENT_NUMBERS[fields.b_type]
        into.negate_a, into.negate_b = fields.negate_a, fields.negate_b
        into.a_mn_major, into.b_mn_major = fields.a_mn_major, fields.b_mn_major
        into.m, into.n, into.d = fields.m, fields.n, operands.D_TYPES.index(fields.d_type)

    @property
    def rows(self) -> int:
        """Rows of A in each CTA."""
        return self.fields.m // self.record.group

    @property
    def folded(self) -> bool:
        """64 rows in each CTA of a pair: lanes from 64 on have the upper half of the columns of D."""
        return self.record.group == 2 and self.rows == 64

    @property
    def width(self) -> int:
        """Columns of D in each CTA."""
        return self.fields.n // 2 if self.folded else self.fields.n

    def element(self, which: int) -> tuple[operands.ElementType, bool]:
        """Elements of `A` or `B`, and whether it is MN-major."""
        fields = self.fields
        return (fields.b_type, fields.b_mn_major) if which == B else (fields.a_type, fields.a_mn_major)

    def operand(self, which: int) -> operands.Places:
        """Where `A` or `B` lies in shared memory. Raises UnsupportedPTX for an illegal descriptor."""
        rows = self.rows if which == A else self.fields.n // self.record.group
        element, mn_major = self.element(which)
        return operands.find_operand(operands.decode_matrix(self._descriptor(which)), rows, element.nbytes, mn_major)

    def _descriptor(self, which: int) -> int:
        return (self.record.b if which == B else self.record.a) & (1 << 64) - 1

    def scale_columns(self, which: int) -> tuple[int, int]:
        """First column and number of columns of the scales of `A` or `B`, each 32 rows in one."""
        address, rows = (self.record.scale_b, self.width) if which == B else (self.record.scale_a, self.rows)
        return split_address(address)[1], -(-rows // QUARTER)

    def refuse(self, fault: ctypes.Structure, memory: ClusterMemory) -> None:
        """Raises the error of an MMA that breaks a rule."""
        rule, which = _RULES[fault.rule], fault.operand
        match rule:
            case "INSTRUCTION":
                assert self.fields is None
            case "MATRIX":
                self.operand(which)
            case "OUTSIDE":
                operands.check_operand(memory.ctas[fault.cta], self.operand(which), self.text)
        raise self._refused(rule, fault.cta if rule == "NO_CTA" else which)

    def _refused(self, rule: str, which: int) -> EmulatorError:
        record = self.record
        if rule == "LANES":
            lanes = [hex(mask) for mask in record.disabled[: 4 * record.group]]
            return UnsupportedPTX(f"tcgen05.mma with a disable-output-lane mask {lanes}")
        if rule == "ODD":
            return UnsupportedPTX(f"tcgen05.mma.cta_group::2 issued by CTA {record.rank}, the odd one of its pair")
        if rule == "NO_CTA":
            return IllegalAccess(f"{self.text}: the cluster has no CTA {which}")
        if rule == "A":
            what = "A in tensor memory other than K-major with 128 rows per CTA from lane 0"
            return UnsupportedPTX(f"{self.text}: {what}")
        if rule == "SCALES":
            lane = split_address(record.scale_b if which == B else record.scale_a)[0]
            return IllegalAccess(f"{self.text}: scales of {'AB'[which]} at lane {lane}")
        element, mn_major = self.element(which)
        what = f"MN-major {element.name}" if mn_major else "K-major"
        matrix = operands.decode_matrix(self._descriptor(which))
        return UnsupportedPTX(f"{self.text}: {what} operand with swizzle {matrix.swizzle}")

    def check(self, shared: ClusterMemory, memories: list[TensorMemory]) -> None:
        """Checks what it touches. Raises IllegalAccess: it is not allocated or not initialised, or a CTA has exited."""
        record = self.record
        for which in (B,) if record.a_in_tensor else (B, A):
            places, (element, mn_major) = self.operand(which).places, self.element(which)
            unit = element.nbytes if mn_major else CHUNK
            if element.held < CHUNK:  # the last bytes of a chunk may hold nothing: copies of padded types leave them
                places, unit = places[..., None] * (CHUNK // 4) + np.arange(element.held // 4), 4
            for rank in self.ranks:
                shared.ctas[rank].check_initialised(places, unit)
        for rank in self.ranks:
            if record.a_in_tensor:
                memories[rank].check(0, self.rows, split_address(record.a)[1], A_COLUMNS, write=False)
            for which in (A, B) if record.scales else ():
                memories[rank].check(0, LANES, *self.scale_columns(which), write=False)
            self._check_d(memories[rank])

    def _check_d(self, memory: TensorMemory) -> None:
        lane, column = split_address(self.record.d)
        half_lanes = self.record.group == 1 and self.rows == 64
        if lane not in ((0, 16) if half_lanes else (0,)):
            raise IllegalAccess(f"{self.text}: accumulator at lane {lane}")
        places = [(lane + QUARTER * quarter, 16) for quarter in range(4)] if half_lanes else [(0, LANES)]
        for first, lanes in places:
            memory.check(first, lanes, column, self.width, write=not self.record.accumulate)
