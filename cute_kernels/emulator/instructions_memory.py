"""Loads, stores, prefetches and fences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.emulator.block import BlockBuilder
from cute_kernels.emulator.counters import counting
from cute_kernels.emulator.decode import TYPE_BITS, Instruction, Memory, Register, Symbol, Vector
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess
from cute_kernels.emulator.instructions_convert import extend
from cute_kernels.emulator.instructions_integer import binary
from cute_kernels.emulator.instructions_move import (
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    block_lanes,
    parameter_offset,
)
from cute_kernels.emulator.instructions_registry import family, never_varies, qualifiers
from cute_kernels.emulator.memory_order import Strength, access_strength, distinct, sync_order, watch, watch_uniform
from cute_kernels.emulator.sync_point import Row
from cute_kernels.emulator.values import CANONICAL, DTYPES, FULL, Anchor, Constant, Node, Pack, Value

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
    *("weak", "volatile", "relaxed", "acquire", "release", "cta", "cluster", "gpu", "sys", "nc", "ca", "cg", "cs"),
    *("lu", "cv", "wb", "wt", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last"),
    *("L1::no_allocate", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", "L2::evict_last", "L2::evict_first"),
    *("L2::evict_normal",),
)
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


class _Access:
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
        self.coherent = "nc" not in parts
        self.bits = TYPE_BITS[self.type]
        if self.bits > 64:
            raise instruction.refuse(f"{instruction.parts[0]} of type .{self.type} is not implemented")
        self.nbytes = self.bits // 8

    def storage(self) -> str:
        return CANONICAL[self.bits]


def address_of(block: BlockBuilder, operand: Any) -> tuple[Value, int]:
    """(base value of 32 or 64 bits, constant offset) of a memory operand."""
    if not isinstance(operand, Memory):
        raise block.instruction.refuse("a memory operand is expected")
    base = operand.base
    if isinstance(base, Register):
        value = block.whole(block.register(base.name))
        return block.resize(value, max(value.bits, 32)), operand.offset  # PTX: narrow addresses are zero-extended
    bits = 64 if isinstance(base, Symbol) and block.context.is_wide_symbol(base) else 32
    return block.value(base, bits), operand.offset


def address_value(block: BlockBuilder, operand: Any, bits: int = 32) -> Value:
    """A memory operand as one value."""
    base, offset = address_of(block, operand)
    base = block.resize(base, bits)
    if offset == 0:
        return base
    return block.pure(binary("add", f"u{bits}"), base, Constant(offset, bits))


# --- what generated code calls --------------------------------------------------------------------------------------


def space_of(warp: Any, space: str, address: int) -> tuple[str, int]:
    """(global, shared or param; address in it) of an address in ``space``."""
    if space != "generic":
        return space, address
    if address >= PARAM_WINDOW:
        return "param", address
    if address >= LOCAL_WINDOW:
        return "local", address - LOCAL_WINDOW
    if address >= SHARED_WINDOW:
        return "shared", address - SHARED_WINDOW
    return "global", address


def view_bytes(warp: Any, space: str, address: int, nbytes: int) -> np.ndarray | bytes:
    """Bytes for a read by one thread."""
    space, address = space_of(warp, space, address)
    if space == "param":
        start = parameter_offset(address)
        if start < 0 or start + nbytes > len(warp.cluster.params):
            size = len(warp.cluster.params)
            message = f"load of {nbytes} bytes at offset {start} of {size} parameter bytes"
            raise IllegalAccess(message).know("out-of-bounds")
        return warp.cluster.params[start : start + nbytes]
    if space == "shared":
        return warp.cluster.memory.view(address & FULL, nbytes)
    return warp.cluster.gmem.view(address, nbytes)


def load_uniform(
    warp: Any, mask: int, space: str, address: int, size: int, count: int, strength: Strength | None
) -> Any:
    """One load for all lanes: an int, or a tuple of ``count`` ints."""
    if address % (size * count):
        raise IllegalAccess(f"misaligned {space} load of {size * count} bytes at {address:#x}").know("misaligned")
    raw = bytes(view_bytes(warp, space, address, size * count))
    warp.cluster.polls += strength is not None
    if warp.cluster.meter is not None:
        warp.cluster.meter.uniform("ld", *space_of(warp, space, address), size * count, mask)
    if warp.cluster.tracker is not None:
        watch_uniform(warp, mask, *space_of(warp, space, address), size * count, False, strength)
    if count == 1:
        return int.from_bytes(raw, "little")
    return tuple(int.from_bytes(raw[i : i + size], "little") for i in range(0, size * count, size))


def load_lanes(
    warp: Any,
    mask: int,
    space: str,
    addresses: np.ndarray,
    size: int,
    count: int,
    dtype: Any,
    strength: Strength | None = None,
) -> np.ndarray:
    """n loads of ``count`` elements by each lane: addresses int64 [n, 32] -> [n * count, 32]."""
    n = len(addresses)
    warp.cluster.polls += strength is not None
    if space == "generic":
        space, shift = _generic_lanes(warp, mask, addresses)
        addresses = addresses - shift
    if space == "local":
        raw = local_memory(warp).load(addresses, mask, size * count).view(dtype)
        return raw.transpose(0, 2, 1).reshape(n * count, 32)
    if warp.cluster.meter is not None:
        warp.cluster.meter.lanes("ld", space, addresses, size * count, mask)
    memory = warp.cluster.memory if space == "shared" else warp.cluster.gmem
    if mask == FULL:
        raw = memory.load(addresses.reshape(-1), size * count).view(dtype).reshape(n, 32, count)
        watch(warp, mask, space, addresses, size * count, False, strength)
        return raw.transpose(0, 2, 1).reshape(n * count, 32)
    lanes = block_lanes(mask)
    addresses = addresses[:, lanes]
    raw = memory.load(addresses.reshape(-1), size * count).view(dtype).reshape(n, -1, count)
    watch(warp, mask, space, addresses, size * count, False, strength)
    result = np.zeros((n * count, 32), dtype)
    result[:, lanes] = raw.transpose(0, 2, 1).reshape(n * count, -1)
    return result


def store_lanes(
    warp: Any,
    mask: int,
    space: str,
    addresses: np.ndarray,
    data: np.ndarray,
    size: int,
    count: int,
    strength: Strength | None = None,
) -> None:
    """n stores of ``count`` elements by each lane: addresses int64 [n, 32], data [n * count, 32] (broadcast)."""
    n = len(addresses)
    warp.cluster.progress += 1
    if space == "generic":
        space, shift = _generic_lanes(warp, mask, addresses)
        addresses = addresses - shift
    if space == "local":
        lanes = np.broadcast_to(data, (n * count, 32)).reshape(n, count, 32).transpose(0, 2, 1)
        raw = np.ascontiguousarray(lanes).view(np.uint8).reshape(n, 32, size * count)
        local_memory(warp).store(addresses, mask, raw)
        return
    if warp.cluster.meter is not None:
        warp.cluster.meter.lanes("st", space, addresses, size * count, mask)
    data = np.broadcast_to(data, (n * count, 32)).reshape(n, count, 32).transpose(0, 2, 1)
    if mask != FULL:
        lanes = block_lanes(mask)
        addresses, data = addresses[:, lanes], data[:, lanes]
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1, size * count)
    if space == "shared":
        warp.cluster.memory.store(addresses.reshape(-1), raw)
    else:
        warp.cluster.gmem.store(addresses.reshape(-1), raw)
    watch(warp, mask, space, addresses, size * count, True, strength)


def load_merged(
    warp: Any, mask: int, space: str, addresses: np.ndarray, size: int, count: int, dtype: Any,
    instructions: tuple[Instruction, ...],
) -> np.ndarray:  # fmt: skip
    """`load_lanes` of neighbouring instructions, a row of ``addresses`` each: as if one followed the other.

    Raises:
        EmulatorError: an access is illegal or races; it names the instruction whose access that is.
    """
    try:
        with counting(warp.cluster.meter, instructions):
            return load_lanes(warp, mask, space, addresses, size, count, dtype)
    except EmulatorError:  # of one of them; or of none, where each by itself addresses another state space
        rows = [
            _one_of_merged(instruction, load_lanes, warp, mask, space, addresses[i : i + 1], size, count, dtype)
            for i, instruction in enumerate(instructions)
        ]
        return np.concatenate(rows)


def store_merged(
    warp: Any, mask: int, space: str, addresses: np.ndarray, data: np.ndarray, size: int, count: int,
    instructions: tuple[Instruction, ...],
) -> None:  # fmt: skip
    """`store_lanes` of neighbouring instructions, a row of ``addresses`` each: as if one followed the other.

    Raises:
        EmulatorError: an access is illegal or races, also one with the other; it names the instruction.
    """
    if warp.cluster.tracker is None or distinct(addresses[:, block_lanes(mask)]):
        try:
            with counting(warp.cluster.meter, instructions):
                return store_lanes(warp, mask, space, addresses, data, size, count)
        except EmulatorError:  # as in `load_merged`
            pass
    data = np.broadcast_to(data, (len(addresses) * count, 32))
    for i, instruction in enumerate(instructions):
        values = data[i * count : (i + 1) * count]
        _one_of_merged(instruction, store_lanes, warp, mask, space, addresses[i : i + 1], values, size, count)


def _one_of_merged(instruction: Instruction, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except EmulatorError as error:
        text, source = instruction.text, instruction.source or None
        # Not from the error of the merged access: generated code has one line for all of them.
        raise error.locate(ptx_line=instruction.line, instruction=text, source=source) from None


def _generic_lanes(warp: Any, mask: int, addresses: np.ndarray) -> tuple[str, int]:
    active = addresses[..., block_lanes(mask)]
    low, high = int(active.min()), int(active.max())
    for space, start, end in (
        ("global", 0, SHARED_WINDOW),
        ("shared", SHARED_WINDOW, LOCAL_WINDOW),
        ("local", LOCAL_WINDOW, PARAM_WINDOW),
    ):
        if start <= low and high < end:
            return space, start
    raise IllegalAccess("a generic access whose lanes address different spaces, or parameters, is not implemented")


def local_memory(warp: Any) -> LocalMemory:
    """Raises IllegalAccess where the kernel declares no local memory."""
    if not hasattr(warp, "local"):
        raise IllegalAccess("access to local memory by a kernel that declares none")
    return warp.local


class LocalMemory:
    """Local memory of one warp: ``nbytes`` for each lane, at the same addresses."""

    def __init__(self, nbytes: int) -> None:
        self.cells = np.zeros((32, nbytes), np.uint8)

    def _places(self, addresses: np.ndarray, mask: int, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Lanes [lanes, 1] and bytes [n, lanes, nbytes] of accesses [n, 32]."""
        lanes = np.flatnonzero(block_lanes(mask))
        first = addresses[:, lanes]
        if (first % nbytes).any() or (first < 0).any() or (first + nbytes > self.cells.shape[1]).any():
            raise IllegalAccess(
                f"local access of {nbytes} bytes at {[hex(a) for a in sorted(set(first.ravel().tolist()))[:4]]} of "
                f"{self.cells.shape[1]} bytes"
            ).know("out-of-bounds")
        return lanes[:, None], first[..., None] + np.arange(nbytes)

    def load(self, addresses: np.ndarray, mask: int, nbytes: int) -> np.ndarray:
        """uint8 [n, 32, nbytes]; lanes that are off read zero."""
        lanes, places = self._places(addresses, mask, nbytes)
        out = np.zeros((len(addresses), 32, nbytes), np.uint8)
        out[:, lanes[:, 0]] = self.cells[lanes, places]
        return out

    def store(self, addresses: np.ndarray, mask: int, data: np.ndarray) -> None:
        """uint8 [n, 32, nbytes]."""
        lanes, places = self._places(addresses, mask, data.shape[-1])
        for row in range(len(places)):  # in program order: later stores win
            self.cells[lanes, places[row]] = data[row, lanes[:, 0]]


def lane_addresses(base: np.ndarray, offsets: np.ndarray | int) -> np.ndarray:
    """int64 [n, 32] from a base that broadcasts and offsets [n, 1]."""
    shape = np.broadcast_shapes(base.shape, np.shape(offsets), (1, 32))
    return np.broadcast_to(base.astype(np.int64, copy=False) + offsets, shape)


# --- anchors --------------------------------------------------------------------------------------------------------


def _emit_addresses(block: BlockBuilder, nodes: list[Node]) -> str:
    """Source for int64 [n, 32] addresses of merged accesses."""
    bases = [node.anchor.base for node in nodes]
    type_ = CANONICAL[bases[0].bits]
    text = block.lanes(bases[0], type_) if len(nodes) == 1 else block.rows(bases, type_)
    offsets = [node.anchor.offset for node in nodes]
    if any(offsets) or len(nodes) > 1:
        column = block.space.bind(_column(tuple(offsets)), "OFFSETS")
    else:
        column = "0"
    return f"{block.space.bind(lane_addresses, 'lane_addresses')}({text}, {column})"


def _emit_function(
    block: BlockBuilder, nodes: list[Node], one: Callable[..., Any], merged: Callable[..., Any]
) -> tuple[str, str]:
    """Names of the function for ``nodes`` and of its last argument."""
    if len(nodes) == 1:
        return block.space.bind(one, one.__name__), str(nodes[0].anchor.strength)
    instructions = tuple(node.instruction for node in nodes)
    return block.space.bind(merged, merged.__name__), block.space.bind(instructions, "INSTRUCTIONS")


_COLUMNS: dict[tuple[int, ...], np.ndarray] = {}


def _column(offsets: tuple[int, ...]) -> np.ndarray:
    return _COLUMNS.setdefault(offsets, np.array(offsets, np.int64)[:, None])


class Load(Anchor):
    """ld by lanes; neighbours of the same shape become one gather."""

    def __init__(
        self, space: str, base: Value, offset: int, size: int, count: int, strength: Strength | None = None,
        coherent: bool = True,
    ) -> None:  # fmt: skip
        self.space, self.base, self.offset, self.size, self.count = space, base, offset, size, count
        self.strength = strength
        # What a strong access acquires counts for the next access already. The race detector tells coherent loads from
        # others by one instruction of those that are merged.
        self.key = ("ld", space, size, count, base.bits, coherent) if strength is None else None

    def emit(self, block: BlockBuilder, nodes: list[Node]) -> None:
        mask, condition = block.guard_mask(nodes[0])
        dtype = DTYPES[CANONICAL[self.size * 8]]
        function, last = _emit_function(block, nodes, load_lanes, load_merged)
        call = (
            f"{function}(W, {mask}, {self.space!r}, {_emit_addresses(block, nodes)}, "
            f"{self.size}, {self.count}, {block.space.bind(dtype, dtype.__name__)}, {last})"
        )
        target = block.fresh("g")
        if condition:
            zero = block.space.bind(np.zeros((self.count * len(nodes), 32), dtype), "ZERO")
            call = f"{call} if {condition} else {zero}"
        block.put(f"{target} = {call}", nodes[0])
        row = 0
        for node in nodes:
            for result in node.results:
                result.place = (target, row)
                row += 1


class Store(Anchor):
    """st by lanes; neighbours of the same shape become one scatter (of equal addresses the later store wins)."""

    def __init__(
        self, space: str, base: Value, offset: int, size: int, values: list[Value], strength: Strength | None
    ) -> None:
        self.space, self.base, self.offset, self.size, self.values = space, base, offset, size, values
        self.strength = strength
        self.key = ("st", space, size, len(values), base.bits) if strength is None else None

    def emit(self, block: BlockBuilder, nodes: list[Node]) -> None:
        mask, condition = block.guard_mask(nodes[0])
        values = [value for node in nodes for value in node.anchor.values]
        type_ = CANONICAL[self.size * 8]
        data = block.lanes(values[0], type_) if len(values) == 1 else block.rows(values, type_)
        function, last = _emit_function(block, nodes, store_lanes, store_merged)
        call = (
            f"{function}(W, {mask}, {self.space!r}, "
            f"{_emit_addresses(block, nodes)}, {data}, {self.size}, {len(self.values)}, {last})"
        )
        block.put(f"if {condition}: {call}" if condition else call, nodes[0])


def _load_varies(instruction: Instruction, varies: Callable[[Any], bool]) -> bool:
    return "local" in instruction.parts or varies(instruction.operands[1])


def _is_private(block: BlockBuilder, space: str, operand: Memory) -> bool:
    """Whether an address may be one of local memory, where one number is another place in each lane."""
    if space != "generic" or not block.context.local_bytes:
        return space == "local"
    return isinstance(operand.base, Register) and operand.base.name in block.varying


@family("ld", "ldu", varies=_load_varies)
def _ld(block: BlockBuilder, instruction: Instruction) -> None:
    """ld: param, const, global, shared (own CTA and cluster), local, generic; vectors."""
    access = _Access(instruction)
    base, offset = address_of(block, instruction.operands[1])
    destination = instruction.operands[0]
    targets = destination.items if isinstance(destination, Vector) else (destination,)
    if len(targets) != access.count:
        raise instruction.refuse(f"{access.count} destinations are needed")
    if access.space == "param" and not base.uniform:
        raise instruction.refuse("ld.param from addresses that differ between lanes is not implemented")
    if access.space == "param" or base.uniform and not _is_private(block, access.space, instruction.operands[1]):
        address = address_value(block, instruction.operands[1], max(base.bits, 32))
        results = block.call(
            load_uniform,
            *(access.space, address, access.nbytes, access.count, access.strength),
            results=[(access.storage(), True)] * access.count,
        )
    elif access.bits == 64 and access.count > 1:
        # 64-bit elements of vector loads are pairs of f32 nearly always: keep the halves apart.
        anchor = Load(access.space, base, offset, 4, 2 * access.count, access.strength, access.coherent)
        halves = block.anchor(anchor, [("u32", False)] * (2 * access.count), [base])
        results = [Pack(halves[i : i + 2]) for i in range(0, len(halves), 2)]
    else:
        anchor = Load(
            access.space, base, offset, access.nbytes, access.count, access.strength, access.coherent
        )
        results = block.anchor(anchor, [(access.storage(), False)] * access.count, [base])
    for target, value in zip(targets, results):
        if isinstance(target, Register) and block.bits_of(target.name) > value.bits:
            type_ = access.type if access.type[0] in "su" else f"u{access.bits}"
            value = block.pure(extend(type_, block.bits_of(target.name), value.bits, ""), value)
        block.define(target, value)


@family("st", destinations=0)
def _st(block: BlockBuilder, instruction: Instruction) -> None:
    """st: global, shared (own CTA and cluster), local, generic; vectors."""
    access = _Access(instruction)
    if access.space == "param":
        raise instruction.refuse("st.param is not implemented")
    if "const" in instruction.parts:
        raise instruction.refuse("constant memory is read-only: st.const does not exist")
    base, offset = address_of(block, instruction.operands[0])
    source = instruction.operands[1]
    items = source.items if isinstance(source, Vector) else (source,)
    if len(items) != access.count:
        raise instruction.refuse(f"{access.count} sources are needed")
    values = []
    for item in items:
        value = block.value(item, access.bits)
        value = block.whole(value) if value.bits <= 64 else value
        values.append(block.resize(value, access.bits) if value.bits != access.bits else value)
    block.anchor(Store(access.space, base, offset, access.nbytes, values, access.strength), [], [base, *values])


# --- no effect on results, and fences -------------------------------------------------------------------------------


@family("prefetch", "prefetchu", "discard", "applypriority", destinations=0)
def _prefetch(block: BlockBuilder, instruction: Instruction) -> None:
    """Cache hints: there are no caches here."""


@family("createpolicy", varies=never_varies)
def _createpolicy(block: BlockBuilder, instruction: Instruction) -> None:
    """createpolicy: an eviction priority, which nothing here looks at; its bits, opaque by the PTX ISA, are 0."""
    levels = (f"L2::evict_{level}" for level in ("last", "normal", "first", "unchanged"))
    qualifiers(instruction, "fractional", "range", "cvt", "global", "L2", "b64", *levels)
    block.define(instruction.operands[0], Constant(0, 64))


def fence_proxy_async(warp: Any, mask: int, of_shared: bool, of_global: bool) -> None:
    """fence.proxy.async of shared memory, global memory or both: for the race detector."""
    if warp.agent is not None:
        rows = ((Row.PROXY, of_shared), (Row.PROXY_GLOBAL, of_global))
        warp.agent.fence_proxy(mask, [row for row, fenced in rows if fenced])


@family("fence.proxy.async", "fence.proxy.async::generic", destinations=0)
def _fence_proxy(block: BlockBuilder, instruction: Instruction) -> None:
    """fence.proxy.async: orders generic and asynchronous accesses; memory is coherent here, the detector is told."""
    parts = qualifiers(
        instruction,
        *("proxy", "async", "global", "shared::cta", "shared::cluster", "async::generic", "acquire", "release"),
        *("sync_restrict::shared::cta", "sync_restrict::shared::cluster", "cluster"),
    )
    of_global, of_shared = "global" in parts, any("shared::" in part for part in parts)
    block.call(fence_proxy_async, of_shared or not of_global, of_global or not of_shared)


def fence_memory(warp: Any, mask: int, order: int) -> None:
    """fence and membar: for the race detector."""
    if warp.agent is not None:
        warp.agent.fence(mask, order)


def fence_initialised(warp: Any, mask: int) -> None:
    """fence.mbarrier_init: for the race detector."""
    if warp.agent is not None:
        warp.agent.fence_init()


@family("fence", "membar", destinations=0)
def _fence(block: BlockBuilder, instruction: Instruction) -> None:
    """fence, membar, fence.mbarrier_init: memory operations take effect in program order; the detector is told."""
    parts = qualifiers(
        instruction,
        *("sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys", "gl"),
        *("mbarrier_init", "proxy", "alias", "sync_restrict::shared::cta", "sync_restrict::shared::cluster"),
    )
    if "mbarrier_init" in parts:
        block.call(fence_initialised)
    elif "proxy" not in parts:
        block.call(fence_memory, sync_order(parts))
