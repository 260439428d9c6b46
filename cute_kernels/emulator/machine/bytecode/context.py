"""A kernel as lowering functions ask for it: addresses of its symbols, special registers, how registers vary."""

import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.ptx.flow import Flow, uniform_function_of_tid
from cute_kernels.emulator.isa.ptx.program import Instruction, Kernel, Special, Symbol
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.values import Constant, LiveIn, OfWarp, Value
from cute_kernels.emulator.machine.state.smem import PARAM_WINDOW, SYSTEM_BYTES, shared_layout
from cute_kernels.emulator.machine.units.matrix.mma_sync import Form as MmaForm
from cute_kernels.emulator.machine.units.sm import Warp


def _axes(register: str, read: Callable[[Warp], Sequence[int]]) -> dict[str, tuple[OfWarp, int]]:
    return {f"{register}.{name}": (lambda warp, at=at: read(warp)[at], 32) for at, name in enumerate("xyz")}


def _units_of_shared(warp: Warp) -> int:
    """Shared memory of a CTA in allocation units of 128 bytes, as bytes."""
    return -(-warp.cta.shared.size // 128) * 128


#: Value and width of uniform special registers.
_UNIFORM: dict[str, tuple[OfWarp, int]] = {
    **_axes("%ctaid", lambda warp: warp.cta.coordinates),
    **_axes("%nctaid", lambda warp: warp.cluster.grid),
    **_axes("%ntid", lambda warp: warp.cluster.block),
    **_axes("%clusterid", lambda warp: warp.cluster.coordinates),
    **_axes("%nclusterid", lambda warp: [a // b for a, b in zip(warp.cluster.grid, warp.cluster.shape)]),
    **_axes("%cluster_ctaid", lambda warp: warp.cta.in_cluster),
    **_axes("%cluster_nctaid", lambda warp: warp.cluster.shape),
    "%cluster_ctarank": (lambda warp: warp.cta.rank, 32),
    "%cluster_nctarank": (lambda warp: len(warp.cluster.ctas), 32),
    "%warpid": (lambda warp: warp.index, 32),  # PTX: some slot of the SM, which may change; only here always this
    "%nwarpid": (lambda warp: 64, 32),  # PTX: as many as there can be; an SM of sm_80, 90, 100 has 64
    # One CTA per SM, in launch order; a real GPU's assignment is not specified.
    "%smid": (lambda warp: warp.cluster.index * len(warp.cluster.ctas) + warp.cta.rank, 32),
    "%nsmid": (lambda warp: math.prod(warp.cluster.grid), 32),
    "%gridid": (lambda warp: 0, 64),
    # PTX leaves their meaning to the driver: of a cooperative launch, the upper and lower half of its workspace.
    **{f"%envreg{n}": (lambda warp: 0, 32) for n in range(32)},
    "%envreg1": (lambda warp: warp.cluster.symbols.get("%envreg", 0) >> 32, 32),
    "%envreg2": (lambda warp: warp.cluster.symbols.get("%envreg", 0) & 0xFFFFFFFF, 32),
    "%dynamic_smem_size": (lambda warp: warp.cluster.dynamic_smem, 32),
    # What the system has in front counts for %aggr_smem_size alone.
    "%total_smem_size": (lambda warp: _units_of_shared(warp) - SYSTEM_BYTES, 32),
    "%aggr_smem_size": (_units_of_shared, 32),
    "%reserved_smem_offset_begin": (lambda warp: 0, 32),
    "%reserved_smem_offset_end": (lambda warp: SYSTEM_BYTES, 32),
    "%reserved_smem_offset_cap": (lambda warp: SYSTEM_BYTES, 32),
    "%is_explicit_cluster": (lambda warp: len(warp.cluster.ctas) > 1, 1),
    "%current_graph_exec": (lambda warp: 0, 64),
}
#: Of those, what clusters of one CTA differ in: coordinates (0 to 2), or the index (3).
OF_CLUSTER = {f"{register}.{name}": axis for register in ("%ctaid", "%clusterid") for axis, name in enumerate("xyz")}
OF_CLUSTER["%smid"] = 3
_LANES = np.arange(32, dtype=np.uint32)
_BITS = np.uint32(1) << _LANES
_LANE_ARRAYS = {
    "%laneid": _LANES,
    "%lanemask_eq": _BITS,
    "%lanemask_lt": _BITS - np.uint32(1),
    "%lanemask_le": _BITS | (_BITS - np.uint32(1)),
    "%lanemask_gt": ~(_BITS | (_BITS - np.uint32(1))),
    "%lanemask_ge": ~(_BITS - np.uint32(1)),
}


class Context:
    """Facts of a kernel that lowering functions ask for: addresses of symbols, special registers."""

    def __init__(self, kernel: Kernel, flow: Flow) -> None:
        self.kernel, self.flow = kernel, flow
        self.parameters = {p.name: p.offset for p in kernel.parameters}
        self.wide = {v.name for v in kernel.variables if v.space not in ("shared", "local")}
        self.warp_mmas: list[MmaForm] = []
        self.local: dict[str, int] = {}
        self.local_bytes = 0
        for variable in kernel.variables:
            if variable.space == "local":
                self.local[variable.name] = -(-self.local_bytes // variable.align) * variable.align
                self.local_bytes = self.local[variable.name] + variable.nbytes
        self.shared, end = shared_layout(kernel.variables)
        self.static_shared = end - SYSTEM_BYTES

    def number_of(self, form: MmaForm) -> int:
        """The number of a form of mma.sync that the core executes."""
        if form not in self.warp_mmas:
            self.warp_mmas.append(form)
        return self.warp_mmas.index(form)

    def is_wide_symbol(self, symbol: Symbol) -> bool:
        """Whether the address of a symbol has 64 bits (all but shared variables)."""
        return symbol.name not in self.shared

    def is_uniform_of_tid(self, instruction: Instruction) -> bool:
        return uniform_function_of_tid(self.flow, instruction)

    def named_value(self, block: BlockBuilder, operand: Symbol | Special, bits: int) -> Value:
        if isinstance(operand, Special):
            return self._special(block, operand.name, bits)
        if operand.name in self.parameters:
            return Constant(PARAM_WINDOW + self.parameters[operand.name], 64)
        if operand.name in self.shared:
            offset = self.shared[operand.name]
            return LiveIn(f"shared + {offset}", bits, True, lambda warp: warp.cta.shared_base + offset)
        if operand.name in self.local:
            return Constant(self.local[operand.name], bits)
        if operand.name in self.wide:
            return LiveIn(f"symbol {operand.name}", 64, True, lambda warp: warp.cluster.symbols[operand.name])
        raise block.instruction.refuse(f"{operand.name!r} is not a variable or parameter")

    def _special(self, block: BlockBuilder, name: str, bits: int) -> Value:
        if name in _UNIFORM:
            of_warp, width = _UNIFORM[name]
            return block.resize(LiveIn(name, width, True, of_warp), bits)
        if name in ("%tid.x", "%tid.y", "%tid.z"):
            return self._tid(block, name[-1], bits)
        if name in _LANE_ARRAYS:
            return block.resize(LiveIn(name, 32, False, lambda warp: _LANE_ARRAYS[name]), bits)
        if name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
            width = 32 if name in ("%clock", "%globaltimer_lo") else 64
            flags = CONSTANTS["FLAG"] if width == 64 else 0
            return block.resize(block.operation("read_clock", flags=flags, results=[(f"u{width}", True)])[0], bits)
        raise block.instruction.refuse(f"special register {name} is not implemented")

    def _tid(self, block: BlockBuilder, axis: str, bits: int) -> Value:
        read = operator.attrgetter(f"tid_{axis}")
        if axis != "x" and self.flow.rows_of_warps:
            return block.resize(LiveIn(f"%tid.{axis}", 32, True, lambda warp: int(read(warp)[0])), bits)
        return block.resize(LiveIn(f"%tid.{axis}", 32, False, read), bits)
