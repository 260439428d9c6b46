"""Loads, stores, prefetches and fences."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.isa.instructions.convert import extend
from cute_kernels.emulator.isa.instructions.integers import binary
from cute_kernels.emulator.isa.ptx.families import never_varies
from cute_kernels.emulator.isa.ptx.operand_syntax import data_operand, policy_operand
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Instruction, Memory, Operand, Register, Symbol, Vector
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import CANONICAL, Anchor, Constant, Pack, Value
from cute_kernels.emulator.machine.units.sm import Warp
from cute_kernels.emulator.races.memory_order import access_strength, fence_order, strength_number

SPACES = {
    "global": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "shared",
    "param": "param",
    "param::entry": "param",
    "const": "global",
    "local": "local",
}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}

#: Qualifiers of addresses in the shared memory of the thread's own CTA (PTX ISA: .shared alone is .shared::cta).
OWN = frozenset(("shared", "shared::cta"))


def memory_space(space: str, own: bool) -> int:
    """Number by which the core knows a state space; ``own``: of shared memory that of the CTA."""
    return CONSTANTS["SPACE_OWN" if own else f"SPACE_{space.upper()}"]


class _Form:
    """The decoded form of ld and st: space, vector length and element type."""

    def __init__(self, instruction: Instruction) -> None:
        parts = list(instruction.parts[1:])
        self.type = parts.pop()
        self.space, self.count, self.own = "generic", 1, bool(OWN & set(parts))
        for part in parts:
            if part in SPACES:
                self.space = SPACES[part]
            elif part in _VECTORS:
                self.count = _VECTORS[part]
            # Memory is sequentially consistent here, and caches do not exist: the others change no result. The race
            # detector looks at the orders and scopes.
        self.strength = access_strength(parts, write=instruction.parts[0] == "st")
        self.bits = TYPE_BITS[self.type]
        #: An operand of 128 bits is moved as two elements.
        self.parts = max(self.bits // 64, 1)
        self.size = self.bits // self.parts // 8

    @property
    def elements(self) -> int:
        """How many of ``size`` bytes are moved."""
        return self.count * self.parts

    def facts(self, size: int | None = None) -> tuple[int, ...]:
        """Facts of an `Access`, with elements of ``size`` bytes."""
        return memory_space(self.space, self.own), size or self.size, strength_number(self.strength)

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """The registers of a data operand; one of 128 bits is in halves, a list itself."""
        return operand.items if isinstance(operand, Vector) and self.bits <= 64 else (operand,)


def address_of(block: BlockBuilder, operand: Memory) -> tuple[Value, int]:
    """(base value of 32 or 64 bits, constant offset) of a memory operand."""
    base = operand.base
    if isinstance(base, Register):
        value = block.whole(block.register(base.name))
        return block.resize(value, max(value.bits, 32)), operand.offset  # PTX: narrow addresses are zero-extended
    bits = 64 if isinstance(base, Symbol) and block.context.is_wide_symbol(base) else 32
    return block.value(base, bits), operand.offset


def address_value(block: BlockBuilder, operand: Operand, bits: int = 32) -> Value:
    """A memory operand as one value, 32 bits in shared memory, where with detectors the CTA has to be the right one."""
    value = _address_value(block, operand, bits)
    if bits == 32 and isinstance(operand.base, Register) and _is_own(block.instruction, operand):
        block.operation("own_addresses", value, watched=True)
    return value


def _is_own(instruction: Instruction, operand: Operand) -> bool:
    """Whether an address has to be one of the CTA's own shared memory, by the qualifiers of the instruction.

    Of copies from .shared::cta to .shared::cluster that is the source, and of those of a pair of CTAs the mbarrier need
    not be: it may be that of the other one.
    """
    first, parts = operand is instruction.operands[0], set(instruction.parts)
    if "shared::cluster" in parts:
        return bool(OWN & parts) and operand is instruction.operands[1]
    return bool(OWN & parts) and (first or "cta_group::2" not in parts)


def _address_value(block: BlockBuilder, operand: Operand, bits: int) -> Value:
    base, offset = address_of(block, operand)
    base = block.resize(base, bits)
    if offset == 0:
        return base
    return block.pure(binary("add", f"u{bits}"), base, Constant(offset, bits))


class Access(Anchor):
    """Loads or stores by lanes, or matrices of them, which the core performs whole; of equal addresses the highest
    lane's value stays. ``name``: of the core's function: ``load`` and so on, by the width of addresses, or
    ``load_together``. ``address``, ``offset``: where, of each lane or (``load_together``) of all. ``facts``: what it is
    told in front of the registers in its list. ``values``: what is stored."""

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


def _loaded(block: BlockBuilder, access: _Form, first: int, nbytes: int, used: int) -> list[Value]:
    """The elements in ``nbytes`` of a load, or a part of one; bytes that the mask does not use are not accessed."""
    mask, size = used >> first & ((1 << nbytes) - 1), min(access.size, nbytes)
    if not mask:
        return [Constant(0, 8 * size)] * (nbytes // size)
    if mask + 1 >> nbytes:
        return _load(block, access, first, size, nbytes // size)
    half = nbytes // 2
    values = [each for at in (first, first + half) for each in _loaded(block, access, at, half, used)]
    return values if nbytes > access.size else [Pack(values)]


def _load(block: BlockBuilder, access: _Form, first: int, size: int, count: int) -> list[Value]:
    """Elements side by side, from a byte of the operand on."""
    operand = block.instruction.operands[1]
    base, offset = address_of(block, operand)
    if access.space == "param" and not base.uniform:
        raise block.instruction.refuse("ld.param from addresses that differ between lanes is not implemented")
    if access.space == "param" or base.uniform and not _is_private(block, access.space, operand):
        address = _address_value(block, replace(operand, offset=operand.offset + first), max(base.bits, 32))
        anchor = Access("load_together", address, access.facts(size))
        return block.anchor(anchor, [(CANONICAL[8 * size], True)] * count, [address])
    # 64-bit elements of vector loads are pairs of f32 nearly always: keep the halves apart.
    halves = 2 if size == 8 and count > 1 else 1
    anchor = Access("load", base, access.facts(size // halves), offset=offset + first)
    results = block.anchor(anchor, [(CANONICAL[8 * size // halves], False)] * (halves * count), [base])
    return results if halves == 1 else [Pack(pair) for pair in zip(results[::2], results[1::2])]


_NARROW = ("v{2,4}? {b,u,s}{8,16,32}|f32", "v2? {b,u,s}64|f64", "b128")
_WIDE = ("v8 {b,u,s}32|f32", "v4 {b,u,s}64|f64")
_GLOBAL = re.compile(r"global\|[^ ]+(?=\?)")
_L1, _L2 = "L1::evict_{first,last,normal,unchanged}|L1::no_allocate", "L2::evict_{first,last,normal}"


def _grammar(load: bool) -> str:
    """Forms of ld and st by how strong they are, each with all types."""
    caches, others, prefetches = ("ca|cg|cs|lu|cv", "|const|param|param::entry", "L2::{64,128,256}B?") if load else (
        "wb|cg|cs|wt", "|param", "")  # fmt: skip
    hints = f"{_L1}? $policy? {prefetches}"
    accesses = (
        f"weak? global|$shared|local{others}? {caches}? {hints}", f"volatile global|$shared|local? {prefetches}",
        f"relaxed|{'acquire' if load else 'release'} $scope global|$shared? {hints}", "mmio relaxed sys global?",
        *([f"global ca|cg|cs? nc {hints}"] if load else ()),
    )  # fmt: skip
    forms = [f"{access} {data}" for access in accesses for data in _NARROW]
    forms += [f"{_GLOBAL.sub('global', access)} {_L2}? {data}" for access in accesses for data in _WIDE]
    private = f"$shared|local{others}"
    rules = f"{caches} / {_L1}; {_L1}|$policy / {private}; volatile / local"
    return "; ".join((*forms, rules + (f"; L2::{{64,128,256}}B / {private}" if load else "")))


@family(
    "ldu", varies=_load_varies, operands=_load_operands, qualifiers="; ".join(f"global? {data}" for data in _NARROW)
)
@family("ld", varies=_load_varies, operands=_load_operands, qualifiers=_grammar(load=True))
def lower_load(block: BlockBuilder, instruction: Instruction) -> None:
    """ld: param, const, global, shared (own CTA and cluster), local, generic; vectors."""
    access = _Form(instruction)
    targets = access.items(instruction.operands[0])
    used, nbytes = instruction.used_bytes, access.elements * access.size
    values = _loaded(block, access, 0, nbytes, (1 << nbytes) - 1 if used is None else used)
    if access.parts > 1:
        values = [Pack(values)]
    for target, value in zip(targets, values):
        if isinstance(target, Register) and block.bits_of(target.name) > value.bits:
            type_ = access.type if access.type[0] in "su" else f"u{access.bits}"
            value = block.pure(extend(type_, block.bits_of(target.name), value.bits), value)
        block.define(target, value)


@family(
    "st", destinations=0, operands=lambda parts: f"[a], {data_operand('b', 'T+', parts)}{policy_operand(parts)}",
    qualifiers=_grammar(load=False),
)  # fmt: skip
def lower_store(block: BlockBuilder, instruction: Instruction) -> None:
    """st: global, shared (own CTA and cluster), local, generic; vectors."""
    access = _Form(instruction)
    if access.space == "param":
        raise instruction.refuse("st.param is not implemented")
    base, offset = address_of(block, instruction.operands[0])
    items = access.items(instruction.operands[1])
    values = []
    for item in items:
        value = block.value(item, access.bits)
        for part in block.split(value, access.parts) if access.parts > 1 else (value,):
            values.append(block.resize(block.whole(part), 8 * access.size))
    block.anchor(Access("store", base, access.facts(), values, offset), [], [base, *values])


# --- no effect on results, and fences -------------------------------------------------------------------------------


@family("discard", destinations=0, operands="[a], size:imm", qualifiers="global? L2")
@family("applypriority", destinations=0, operands="[a], size:imm", qualifiers="global? L2::evict_normal")
@family("prefetchu", destinations=0, operands="[a]", qualifiers="L1")
@family("prefetch", destinations=0, operands="[a]", qualifiers="global|local? L1|L2; global L2::evict_{last,normal}")
def _prefetch(block: BlockBuilder, instruction: Instruction) -> None:
    """Cache hints: there are no caches here."""


_PRIMARY = "L2::evict_{last,normal,first,unchanged}"


@family(
    "createpolicy.fractional", varies=never_varies, operands="policy, fraction:f32?",
    qualifiers=f"{_PRIMARY} L2::evict_{{first,unchanged}}? b64",
)  # fmt: skip
@family(
    "createpolicy.range", varies=never_varies, operands="policy, [a], primary_size:u32, total_size:u32",
    qualifiers=f"global? {_PRIMARY} L2::evict_{{first,unchanged}}? b64",
)  # fmt: skip
@family("createpolicy.cvt", varies=never_varies, operands="policy, access_property", qualifiers="L2 b64")
def _createpolicy(block: BlockBuilder, instruction: Instruction) -> None:
    """createpolicy: an eviction priority, which nothing looks at; its bits are 0."""
    block.define(instruction.operands[0], Constant(0, 64))


_ACQUIRED, _RELEASED = "sync_restrict::shared::cluster", "sync_restrict::shared::cta"


@family(
    "fence.proxy.async::generic", destinations=0, operands="",
    qualifiers=f"acquire {_ACQUIRED} cluster; release {_RELEASED} cluster",
)  # fmt: skip
@family("fence.proxy.async", destinations=0, operands="", qualifiers="global|shared::{cta,cluster}?")
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


@family("membar", destinations=0, operands="", qualifiers="cta|gl|sys; proxy alias")
@family(
    "fence", destinations=0, operands="",
    qualifiers=f"sc|acq_rel|acquire|release? $scope; mbarrier_init release cluster; proxy alias; "
    f"acquire {_ACQUIRED} cluster; release {_RELEASED} cluster",
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
