"""A kernel as lowering functions ask for it: addresses of its symbols, special registers, how registers vary."""

from __future__ import annotations

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.ptx.decode import Instruction, Kernel, Special, Symbol
from cute_kernels.emulator.isa.ptx.flow import Flow, uniform_function_of_tid
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.values import Constant, LiveIn, Namespace, Value
from cute_kernels.emulator.machine.state.generic_addresses import PARAM_WINDOW
from cute_kernels.emulator.machine.state.smem import SYSTEM_BYTES, shared_layout
from cute_kernels.emulator.machine.units.matrix.mma_sync import Form as MmaForm

#: Expression and width of uniform special registers.
_UNIFORM = {
    **{f"%ctaid.{a}": (f"W.cta.coordinates[{i}]", 32) for i, a in enumerate("xyz")},
    **{f"%nctaid.{a}": (f"W.cluster.grid[{i}]", 32) for i, a in enumerate("xyz")},
    **{f"%ntid.{a}": (f"W.cluster.block[{i}]", 32) for i, a in enumerate("xyz")},
    **{f"%clusterid.{a}": (f"W.cluster.coordinates[{i}]", 32) for i, a in enumerate("xyz")},
    **{f"%nclusterid.{a}": (f"(W.cluster.grid[{i}] // W.cluster.shape[{i}])", 32) for i, a in enumerate("xyz")},
    **{f"%cluster_ctaid.{a}": (f"W.cta.in_cluster[{i}]", 32) for i, a in enumerate("xyz")},
    **{f"%cluster_nctaid.{a}": (f"W.cluster.shape[{i}]", 32) for i, a in enumerate("xyz")},
    "%cluster_ctarank": ("W.cta.rank", 32),
    "%cluster_nctarank": ("len(W.cluster.ctas)", 32),
    "%warpid": ("W.index", 32),  # PTX: some slot of the SM, which may change; only here always this
    "%nwarpid": ("64", 32),  # PTX: as many as there can be, whatever the CTA has; an SM of sm_80, 90, 100 has 64
    # One CTA per SM, in launch order; a real GPU's assignment is not specified.
    "%smid": ("(W.cluster.index * len(W.cluster.ctas) + W.cta.rank)", 32),
    "%nsmid": ("(W.cluster.grid[0] * W.cluster.grid[1] * W.cluster.grid[2])", 32),
    "%gridid": ("0", 64),
    # PTX leaves their meaning to the driver: of a cooperative launch, the upper and lower half of its workspace.
    **{f"%envreg{n}": ("0", 32) for n in range(32)},
    "%envreg1": ("(W.cluster.symbols.get('%envreg', 0) >> 32)", 32),
    "%envreg2": ("(W.cluster.symbols.get('%envreg', 0) & 0xFFFFFFFF)", 32),
    "%dynamic_smem_size": ("W.cluster.dynamic_smem", 32),
    # PTX: in allocation units, 128 bytes; what the system has in front counts for the latter alone.
    "%total_smem_size": (f"(-(-W.cta.shared.size // 128) * 128 - {SYSTEM_BYTES})", 32),
    "%aggr_smem_size": ("(-(-W.cta.shared.size // 128) * 128)", 32),
    "%reserved_smem_offset_begin": ("0", 32),
    "%reserved_smem_offset_end": (str(SYSTEM_BYTES), 32),
    "%reserved_smem_offset_cap": (str(SYSTEM_BYTES), 32),
    "%is_explicit_cluster": ("(len(W.cluster.ctas) > 1)", 1),
    "%current_graph_exec": ("0", 64),
}
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

    def __init__(self, kernel: Kernel, flow: Flow, space: Namespace) -> None:
        self.kernel, self.flow, self.space = kernel, flow, space
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
        """The value of a symbol's address or of a special register."""
        if isinstance(operand, Special):
            return self._special(block, operand.name, bits)
        if operand.name in self.parameters:
            return Constant(PARAM_WINDOW + self.parameters[operand.name], 64)
        if operand.name in self.shared:
            return LiveIn(f"(W.cta.shared_base + {self.shared[operand.name]})", bits, uniform=True)
        if operand.name in self.local:
            return Constant(self.local[operand.name], bits)
        if operand.name in self.wide:
            return LiveIn(f"W.cluster.symbols[{operand.name!r}]", 64, uniform=True)
        raise block.instruction.refuse(f"{operand.name!r} is not a variable or parameter")

    def _special(self, block: BlockBuilder, name: str, bits: int) -> Value:
        if name in _UNIFORM:
            text, width = _UNIFORM[name]
            return block.resize(LiveIn(text, width, uniform=True), bits)
        if name in ("%tid.x", "%tid.y", "%tid.z"):
            return self._tid(block, name[-1], bits)
        if name in _LANE_ARRAYS:
            return block.resize(LiveIn(self.space.bind(_LANE_ARRAYS[name], name[1:]), 32, uniform=False), bits)
        if name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
            width = 32 if name in ("%clock", "%globaltimer_lo") else 64
            flags = CONSTANTS["FLAG"] if width == 64 else 0
            return block.resize(block.operation("read_clock", flags=flags, results=[(f"u{width}", True)])[0], bits)
        raise block.instruction.refuse(f"special register {name} is not implemented")

    def _tid(self, block: BlockBuilder, axis: str, bits: int) -> Value:
        if axis != "x" and self.flow.rows_of_warps:
            return block.resize(LiveIn(f"int(W.tid_{axis}[0])", 32, uniform=True), bits)
        return block.resize(LiveIn(f"W.tid_{axis}", 32, uniform=False), bits)
