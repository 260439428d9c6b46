"""Functions of the Python back end that machine code does by itself: all of them, or their frequent case.

Each emits its check and leaves what the check stops to the Python function, which decides again and words the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cute_kernels.emulator import instructions_tcgen05 as tcgen05
from cute_kernels.emulator.instructions_memory import fence_proxy_async
from cute_kernels.emulator.instructions_move import elect_leader
from cute_kernels.emulator.instructions_sync import converged, warp_sync
from cute_kernels.emulator.native_ops import LANES
from cute_kernels.emulator.tmem import COLUMNS
from cute_kernels.emulator.tmem import LANES as TENSOR_LANES
from cute_kernels.emulator.values import FULL, LiveIn, Node, agreed_lanes, first_bit, first_lane

if TYPE_CHECKING:
    from cute_kernels.emulator.native_block import BlockEmitter

_COLUMN_BYTES = 4 * TENSOR_LANES


def _inline_first_lane(emitter: BlockEmitter, node: Node) -> bool:
    (value,) = node.args
    text = emitter.operand(value, True)
    emitter.names[node.results[0]] = emitter.code.let(f"extractelement <{LANES} x i{value.bits}> {text}, i32 0")
    return True


def _inline_agreed(emitter: BlockEmitter, node: Node) -> bool:
    """The first executing lane's value; Python is called to name the others when they differ."""
    (value,) = node.args
    code, bits = emitter.code, value.bits
    text = emitter.operand(value, True)
    lane = code.let("call i32 @llvm.cttz.i32(i32 %M, i1 false)")
    inside = code.let(f"and i32 {lane}, 31")
    chosen = code.let(f"extractelement <{LANES} x i{bits}> {text}, i32 {inside}")
    differs = emitter.emitters[True].cmp("ne", bits, text, emitter.splat(chosen, bits))
    lanes = code.let(f"and i32 %M, {code.let(f'bitcast <{LANES} x i1> {differs} to i32')}")
    test = code.let(f"icmp eq i32 {lanes}, 0")
    _unless(emitter, node, test)
    emitter.names[node.results[0]] = chosen
    return True


def _inline_elect(emitter: BlockEmitter, node: Node) -> bool:
    """The lowest executing lane; Python checks a member mask that is not the executing lanes."""
    members = node.anchor.args[0]
    code = emitter.code
    test = code.let(f"icmp eq i32 {emitter.operand(members, False)}, %M")
    _unless(emitter, node, test)
    lowest = code.let(f"and i32 %M, {code.let('sub i32 0, %M')}")
    emitter.names[node.results[0]] = code.let(f"bitcast i32 {lowest} to <{LANES} x i1>")
    return True


def _unless(emitter: BlockEmitter, node: Node, test: str) -> None:
    """Calls Python where an i1 does not hold."""
    code = emitter.code
    good, bad = code.fresh("f")[1:], code.fresh("s")[1:]
    code.put(f"br i1 {test}, label %{good}, label %{bad}")
    code.put(f"{bad}:")
    emitter.python(node, "%M")
    code.put(f"br label %{good}")
    code.put(f"{good}:")


def _inline_warp_sync(emitter: BlockEmitter, node: Node) -> bool:
    """Without detectors nothing happens; Python checks a member mask that is not the executing lanes."""
    if emitter.program.detectors:
        return False
    members = emitter.operand(node.anchor.args[0], False)
    _unless(emitter, node, emitter.code.let(f"icmp eq i32 {members}, %M"))
    return True


def _inline_tensor_wait(emitter: BlockEmitter, node: Node) -> bool:
    """Without detectors nothing happens; Python checks whether fewer than 32 lanes are all that the warp has."""
    if emitter.program.detectors:
        return False
    _unless(emitter, node, emitter.code.let("icmp eq i32 %M, -1"))
    return True


def _inline_tensor_load(emitter: BlockEmitter, node: Node) -> bool:
    """tcgen05.ld.32x32b without detectors: 32 lanes of allocated columns of its quarter, to the exchange rows."""
    address, shape, repeat, _, pack = node.anchor.args
    if emitter.program.detectors or shape != "32x32b" or pack:
        return False
    code = emitter.code
    cells = emitter.live(LiveIn(f"(W.cta.tmem.address_of_column(0) + {4 * 32} * (W.index % 4))", 64, True))
    allocated = emitter.live(LiveIn("W.cta.tmem.allocated_address", 64, True))
    quarter = emitter.live(LiveIn("(32 * (W.index % 4))", 32, True))
    where = emitter.operand(address, False)
    column = code.let(f"and i32 {where}, 65535")
    own = code.let(f"icmp eq i32 {code.let(f'lshr i32 {where}, 16')}, {quarter}")
    inside = code.let(f"icmp ule i32 {column}, {COLUMNS - repeat}")
    whole = code.let(f"icmp eq i32 %M, {FULL - (1 << 32)}")
    legal = code.let(f"and i1 {whole}, {code.let(f'and i1 {own}, {inside}')}")
    check, fast, slow, joined = (code.fresh("w")[1:] for _ in range(4))
    code.put(f"br i1 {legal}, label %{check}, label %{slow}")
    code.put(f"{check}:")
    wide = code.let(f"zext i32 {column} to i64")
    flags_at = code.let(f"inttoptr i64 {code.let(f'add i64 {allocated}, {wide}')} to ptr")
    flags = code.let(f"load <{repeat} x i8>, ptr {flags_at}, align 1")
    taken = code.let(f"icmp ne <{repeat} x i8> {flags}, zeroinitializer")
    bits = code.let(f"bitcast <{repeat} x i1> {taken} to i{repeat}")
    code.put(f"br i1 {code.let(f'icmp eq i{repeat} {bits}, -1')}, label %{fast}, label %{slow}")
    code.put(f"{slow}:")
    emitter.python(node, "%M")
    code.put(f"br label %{joined}")
    code.put(f"{fast}:")
    start = code.let(f"add i64 {cells}, {code.let(f'mul i64 {wide}, {_COLUMN_BYTES}')}")
    first = code.let(f"inttoptr i64 {start} to ptr")
    for index in range(repeat):
        source = code.let(f"getelementptr i8, ptr {first}, i64 {index * _COLUMN_BYTES}")
        values = code.let(f"load <{LANES} x i32>, ptr {source}, align 16")
        code.put(f"store <{LANES} x i32> {values}, ptr {emitter.row(index)}, align 64")
    code.put(f"br label %{joined}")
    code.put(f"{joined}:")
    for index, result in enumerate(node.results):
        emitter.read_row(index, result)
    return True


#: What only tells the detectors something: without them it does nothing.
SILENT = frozenset({converged, fence_proxy_async, tcgen05.fence})

#: Each emits the operation where no predicate guards it; False, and nothing emitted, where it is Python's.
INLINE: dict[Callable[..., Any], Callable[[BlockEmitter, Node], bool]] = {
    first_lane: _inline_first_lane,
    first_bit: _inline_first_lane,
    agreed_lanes: _inline_agreed,
    elect_leader: _inline_elect,
    warp_sync: _inline_warp_sync,
    tcgen05.wait: _inline_tensor_wait,
    tcgen05.load: _inline_tensor_load,
}
