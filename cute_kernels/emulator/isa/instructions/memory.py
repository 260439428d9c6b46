"""Loads, stores, prefetches and fences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.instructions.convert import extend
from cute_kernels.emulator.isa.instructions.integers import binary
from cute_kernels.emulator.isa.ptx.decode import TYPE_BITS, Instruction, Memory, Operand, Register, Symbol, Vector
from cute_kernels.emulator.isa.ptx.families import never_varies
from cute_kernels.emulator.isa.ptx.operand_syntax import data_operand, policy_operand
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import CANONICAL, Anchor, Constant, Pack, Value
from cute_kernels.emulator.races.memory_order import access_strength, fence_order, strength_number

if TYPE_CHECKING:
    from cute_kernels.emulator.machine.units.sm import Warp

SPACES = {
    "global": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "shared",
    "param": "param",
    "const": "global",
    "local": "local",
}
# Memory is sequentially consistent here, and caches do not exist: these change no result. The race detector looks at
# the orders and scopes.
_NO_EFFECT = (
    *("weak", "volatile", "mmio", "relaxed", "acquire", "release", "cta", "cluster", "gpu", "sys", "nc"),
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::evict_normal", "L1::evict_unchanged"),
    *("L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"),
    *("L2::evict_last", "L2::evict_first", "L2::evict_normal"),
)
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


class _Form:
    """The decoded form of ld and st: space, vector length and element type."""

    def __init__(self, instruction: Instruction) -> None:
        parts = list(instruction.parts[1:])
        self.type = parts.pop()
        if self.type not in TYPE_BITS or self.type == "pred":
            raise instruction.refuse(f"{instruction.parts[0]} of type .{self.type} is not implemented")
        self.space, self.count = "generic", 1
        for part in parts:
            if part in SPACES:
                self.space = SPACES[part]
            elif part in _VECTORS:
                self.count = _VECTORS[part]
            elif part not in _NO_EFFECT:
                raise instruction.refuse(f"qualifier .{part} of {instruction.parts[0]} is not implemented")
        self.strength = access_strength(parts, write=instruction.parts[0] == "st")
        self.bits = TYPE_BITS[self.type]
        if self.bits > 64 and self.count > 1:
            raise instruction.refuse(f"{instruction.parts[0]} of more than one .{self.type} does not exist")
        #: An operand of 128 bits is moved as two elements.
        self.parts = max(self.bits // 64, 1)
        self.size = self.bits // self.parts // 8

    @property
    def elements(self) -> int:
        """How many of ``size`` bytes are moved."""
        return self.count * self.parts

    def facts(self, size: int | None = None) -> tuple[int, ...]:
        """Facts of an `Access`, with elements of ``size`` bytes."""
        return CONSTANTS[f"SPACE_{self.space.upper()}"], size or self.size, strength_number(self.strength)

    def storage(self) -> str:
        return CANONICAL[8 * self.size]

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """The registers of a data operand; one of 128 bits is in halves, a list itself."""
        return operand.items if isinstance(operand, Vector) and self.bits <= 64 else (operand,)


def address_of(block: BlockBuilder, operand: Operand) -> tuple[Value, int]:
    """(base value of 32 or 64 bits, constant offset) of a memory operand."""
    if not isinstance(operand, Memory):
        raise block.instruction.refuse("a memory operand is expected")
    base = operand.base
    if isinstance(base, Register):
        value = block.whole(block.register(base.name))
        return block.resize(value, max(value.bits, 32)), operand.offset  # PTX: narrow addresses are zero-extended
    bits = 64 if isinstance(base, Symbol) and block.context.is_wide_symbol(base) else 32
    return block.value(base, bits), operand.offset


def address_value(block: BlockBuilder, operand: Operand, bits: int = 32) -> Value:
    """A memory operand as one value."""
    base, offset = address_of(block, operand)
    base = block.resize(base, bits)
    if offset == 0:
        return base
    return block.pure(binary("add", f"u{bits}"), base, Constant(offset, bits))


# --- anchors --------------------------------------------------------------------------------------------------------


class Access(Anchor):
    """Loads or stores by lanes, or matrices of them, which the core performs whole; of equal addresses the highest
    lane's value stays.

    Attributes:
        name: of the core's function: ``load`` and so on, by the width of addresses, or ``load_together``.
        address, offset: where, of each lane or (``load_together``) of all.
        facts: what it is told in front of the registers in its list.
        values: what is stored.
    """

    def __init__(self, name: str, address: Value, facts: Sequence[int], values: Sequence[Value] = (), offset: int = 0):
        self.name, self.address, self.facts, self.values, self.offset = name, address, facts, values, offset


def _load_varies(instruction: Instruction, varies: Callable[[Operand], bool]) -> bool:
    return "local" in instruction.parts or varies(instruction.operands[1])


def _is_private(block: BlockBuilder, space: str, operand: Memory) -> bool:
    """Whether an address may be one of local memory, where one number is another place in each lane."""
    if space != "generic" or not block.context.local_bytes:
        return space == "local"
    return isinstance(operand.base, Register) and operand.base.name in block.varying


def _load_operands(parts: tuple[str, ...]) -> str:
    """Not of 128 bits into a register in braces: ptxas 13.0 takes that, and makes a load of 64 bits of it."""
    data = data_operand("d", "T+", parts)
    return f"{'d' if data == '{d}1:T+' and 'b128' in parts else data}, [a]{policy_operand(parts)}"


@family("ld", "ldu", varies=_load_varies, operands=_load_operands)
def lower_load(block: BlockBuilder, instruction: Instruction) -> None:
    """ld: param, const, global, shared (own CTA and cluster), local, generic; vectors."""
    access = _Form(instruction)
    base, offset = address_of(block, instruction.operands[1])
    targets = access.items(instruction.operands[0])
    if access.space == "param" and not base.uniform:
        raise instruction.refuse("ld.param from addresses that differ between lanes is not implemented")
    if access.space == "param" or base.uniform and not _is_private(block, access.space, instruction.operands[1]):
        address = address_value(block, instruction.operands[1], max(base.bits, 32))
        anchor = Access("load_together", address, access.facts())
        results = block.anchor(anchor, [(access.storage(), True)] * access.elements, [address])
    elif access.size == 8 and access.elements > 1:
        # 64-bit elements of vector loads are pairs of f32 nearly always: keep the halves apart.
        anchor = Access("load", base, access.facts(4), offset=offset)
        results = block.anchor(anchor, [("u32", False)] * (2 * access.elements), [base])
    else:
        anchor = Access("load", base, access.facts(), offset=offset)
        results = block.anchor(anchor, [(access.storage(), False)] * access.elements, [base])
    each = len(results) // access.count
    values = [Pack(results[i : i + each]) for i in range(0, len(results), each)] if each > 1 else results
    for target, value in zip(targets, values):
        if isinstance(target, Register) and block.bits_of(target.name) > value.bits:
            type_ = access.type if access.type[0] in "su" else f"u{access.bits}"
            value = block.pure(extend(type_, block.bits_of(target.name), value.bits), value)
        block.define(target, value)


def _store_operands(parts: tuple[str, ...]) -> str:
    return f"[a], {data_operand('b', 'T+', parts)}{policy_operand(parts)}"


@family("st", destinations=0, operands=_store_operands)
def lower_store(block: BlockBuilder, instruction: Instruction) -> None:
    """st: global, shared (own CTA and cluster), local, generic; vectors."""
    access = _Form(instruction)
    if access.space == "param":
        raise instruction.refuse("st.param is not implemented")
    if "const" in instruction.parts:
        raise instruction.refuse("constant memory is read-only: st.const does not exist")
    base, offset = address_of(block, instruction.operands[0])
    items = access.items(instruction.operands[1])
    values = []
    for item in items:
        value = block.value(item, access.bits)
        for part in block.split(value, access.parts) if access.parts > 1 else (value,):
            values.append(block.resize(block.whole(part), 8 * access.size))
    block.anchor(Access("store", base, access.facts(), values, offset), [], [base, *values])


# --- no effect on results, and fences -------------------------------------------------------------------------------


@family("discard", "applypriority", destinations=0, operands="[a], size:imm")
@family("prefetch", "prefetchu", destinations=0, operands="[a]")
def _prefetch(block: BlockBuilder, instruction: Instruction) -> None:
    """Cache hints: there are no caches here."""


_EVICTIONS = "L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged"


def _policy_operands(parts: tuple[str, ...]) -> str:
    if "range" in parts:
        return "policy, [a], primary_size:u32, total_size:u32"
    return "policy, access_property" if "cvt" in parts else "policy, fraction:f32?"


@family(
    "createpolicy", varies=never_varies, operands=_policy_operands,
    qualifiers=f"fractional range cvt global L2 b64 {_EVICTIONS}",
)  # fmt: skip
def _createpolicy(block: BlockBuilder, instruction: Instruction) -> None:
    """createpolicy: an eviction priority, which nothing here looks at; its bits, opaque by the PTX ISA, are 0."""
    block.define(instruction.operands[0], Constant(0, 64))


_RESTRICTIONS = "sync_restrict::shared::cta sync_restrict::shared::cluster"


@family(
    "fence.proxy.async", "fence.proxy.async::generic", destinations=0, operands="",
    qualifiers=f"global shared::cta shared::cluster acquire release cluster {_RESTRICTIONS}",
)  # fmt: skip
def _fence_proxy(block: BlockBuilder, instruction: Instruction) -> None:
    """fence.proxy.async: orders generic and asynchronous accesses; memory is coherent here, the detector is told."""
    parts = instruction.parts[1:]
    of_global, of_shared = "global" in parts, any("shared::" in part for part in parts)
    spaces = (of_shared or not of_global) + 2 * (of_global or not of_shared)
    block.operation("fence_proxy", order=spaces, watched=True)


def fence_memory(warp: Warp, mask: int, order: int, kind: str) -> None:
    """fence and membar: for the race detector."""
    if warp.agent is not None:
        warp.cluster.tracker.fence(warp.agent, mask, order, kind)


def fence_initialised(warp: Warp, mask: int) -> None:
    """fence.mbarrier_init: for the race detector."""
    if warp.agent is not None:
        warp.agent.fence_init()


@family(
    "fence", "membar", destinations=0, operands="",
    qualifiers=f"sc acq_rel acquire release cta cluster gpu sys gl mbarrier_init proxy alias {_RESTRICTIONS}",
)  # fmt: skip
def _fence(block: BlockBuilder, instruction: Instruction) -> None:
    """fence, membar, fence.mbarrier_init: memory operations take effect in program order; the detector is told."""
    parts = instruction.parts[1:]
    if "mbarrier_init" in parts:
        block.call(fence_initialised)
    elif "proxy" not in parts:
        sequential = "sc" in parts or instruction.parts[0] == "membar"
        kind = "sc" if sequential else next((part for part in parts if part in ("acquire", "release")), "acq_rel")
        block.call(fence_memory, fence_order(parts), kind)
