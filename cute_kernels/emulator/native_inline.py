"""Functions of the Python back end that machine code does by itself: all of them, or their frequent case.

Each emits its check and leaves what the check stops to the Python function, which decides again and words the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cute_kernels.emulator import instructions_bulk as bulk
from cute_kernels.emulator import instructions_sync as sync
from cute_kernels.emulator import instructions_tcgen05 as tcgen05
from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.instructions_memory import fence_proxy_async
from cute_kernels.emulator.instructions_move import elect_leader, map_address
from cute_kernels.emulator.native import c_function
from cute_kernels.emulator.native_memory import EVENT, Tables
from cute_kernels.emulator.native_ops import LANES
from cute_kernels.emulator.tmem import COLUMNS
from cute_kernels.emulator.tmem import LANES as TENSOR_LANES
from cute_kernels.emulator.values import FULL, LiveIn, Node, Value, agreed_lanes, first_bit, first_lane

if TYPE_CHECKING:
    from cute_kernels.emulator.native_block import BlockEmitter

EAGER, RANKS, KEY_WORDS = (CONSTANTS[name] for name in ("EAGER", "RANKS", "MMA_KEY"))
#: Words of the operands of a tensor copy.
COORDINATES, WHO, LANE, INSTRUCTION = (
    getattr(STRUCTURES["CopyArguments"], name).offset // 8 for name in ("coordinates", "warp", "lane", "instruction")
)
_COLUMN_BYTES = 4 * TENSOR_LANES
TIMED_OUT = 7  # word of a warp's state, behind those of `native_translate`: its next try_wait gives up


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


def _noted(
    emitter: BlockEmitter, node: Node, event: str, argument: int = 0, first: str = "0", second: int = 0
) -> str:
    """An i1: whether the event is in the log."""
    function = c_function("log_event")
    values = f"i32 {EVENT[event]}, i32 %M, i32 {argument}, i32 {node.instruction.index}, i64 {first}, i64 {second}"
    return emitter.code.let(f"icmp ne i32 {emitter.code.let(f'call i32 {function}(ptr %t, {values})')}, 0")


def _inline_event(emitter: BlockEmitter, node: Node, test: str, event: str, argument: int = 0) -> bool:
    """Without detectors nothing happens, else there is an entry in the log; Python is called where ``test`` fails."""
    if not emitter.program.detectors:
        _unless(emitter, node, test)
        return True
    code = emitter.code
    log, python, joined = (code.fresh("w")[1:] for _ in range(3))
    code.put(f"br i1 {test}, label %{log}, label %{python}")
    code.put(f"{log}:")
    noted = _noted(emitter, node, event, argument)
    code.put(f"br i1 {noted}, label %{joined}, label %{python}")
    code.put(f"{python}:")
    emitter.python(node, "%M")
    code.put(f"br label %{joined}")
    code.put(f"{joined}:")
    return True


def _inline_converged(emitter: BlockEmitter, node: Node) -> bool:
    return _inline_event(emitter, node, "true", "converge")


def _inline_warp_sync(emitter: BlockEmitter, node: Node) -> bool:
    """Python checks a member mask that is not the executing lanes."""
    members = emitter.operand(node.anchor.args[0], False)
    return _inline_event(emitter, node, emitter.code.let(f"icmp eq i32 {members}, %M"), "converge")


def _inline_fence_proxy(emitter: BlockEmitter, node: Node) -> bool:
    of_shared, of_global = map(int, node.anchor.args)
    return _inline_event(emitter, node, "true", "fence_proxy", of_shared + 2 * of_global)


def _inline_tensor_fence(emitter: BlockEmitter, node: Node) -> bool:
    return _inline_event(emitter, node, "true", "tensor_fence", int(node.anchor.args[0]))


def _inline_tensor_wait(emitter: BlockEmitter, node: Node) -> bool:
    """Python checks whether fewer than 32 lanes are all that the warp has."""
    return _inline_event(emitter, node, emitter.code.let("icmp eq i32 %M, -1"), "tensor_wait", node.anchor.args[0])


def _inline_tensor_load(emitter: BlockEmitter, node: Node) -> bool:
    """tcgen05.ld.32x32b: 32 lanes of allocated columns of its quarter, to the exchange rows.

    With detectors the columns have to have been written whole, which Python looks at more closely.
    """
    address, shape, repeat, index, pack = node.anchor.args
    if shape != "32x32b" or pack:
        return False
    detectors = emitter.program.detectors
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
    zeros = "zeroinitializer"
    taken = code.let(f"icmp ne <{repeat} x i8> {flags}, {zeros}")
    if detectors:
        full = emitter.live(LiveIn("W.cta.tmem.full_address", 64, True))
        full_at = code.let(f"inttoptr i64 {code.let(f'add i64 {full}, {wide}')} to ptr")
        written = code.let(f"load <{repeat} x i8>, ptr {full_at}, align 1")
        taken = code.let(f"and <{repeat} x i1> {taken}, {code.let(f'icmp ne <{repeat} x i8> {written}, {zeros}')}")
    bits = code.let(f"bitcast <{repeat} x i1> {taken} to i{repeat}")
    every = code.let(f"icmp eq i{repeat} {bits}, -1")
    if detectors:
        log = code.fresh("w")[1:]
        code.put(f"br i1 {every}, label %{log}, label %{slow}")
        code.put(f"{log}:")
        every = _noted(emitter, node, "tensor_load", repeat, code.let(f"zext i32 {where} to i64"), index)
    code.put(f"br i1 {every}, label %{fast}, label %{slow}")
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


# --- units, by functions of `native_units` --------------------------------------------------


def _word(emitter: BlockEmitter, value: Value) -> str:
    """A value of the one lane that executes, or of all, as an i64."""
    code = emitter.code
    if value.uniform:
        return emitter.emitters[False].resize(emitter.operand(value, False), value.bits, 64)
    text = emitter.operand(value, True)
    lane = code.let(f"and i32 {code.let('call i32 @llvm.cttz.i32(i32 %M, i1 false)')}, 31")
    one = code.let(f"extractelement <{LANES} x i{value.bits}> {text}, i32 {lane}")
    return emitter.emitters[False].resize(one, value.bits, 64)


def _one_lane(emitter: BlockEmitter) -> str:
    """An i1: a single lane executes."""
    code = emitter.code
    others = code.let(f"and i32 %M, {code.let('sub i32 %M, 1')}")
    return code.let(f"icmp eq i32 {others}, 0")


def _function(emitter: BlockEmitter, name: str) -> str:
    place = emitter.code.let(f"getelementptr i8, ptr %t, i64 {getattr(Tables, name).offset}")
    return emitter.code.let(f"load ptr, ptr {place}")


def _if(emitter: BlockEmitter, test: str | None) -> str:
    """Goes on where an i1 holds (always, if None); returns the label to go to where it does not."""
    code = emitter.code
    slow = code.fresh("s")[1:]
    if test is not None:
        good = code.fresh("f")[1:]
        code.put(f"br i1 {test}, label %{good}, label %{slow}")
        code.put(f"{good}:")
    return slow


def _else_python(emitter: BlockEmitter, node: Node, done: str, slow: str) -> None:
    """Calls Python where the i1 ``done`` does not hold, and where code went to ``slow``; then reads the results."""
    code = emitter.code
    joined = code.fresh("w")[1:]
    code.put(f"br i1 {done}, label %{joined}, label %{slow}")
    code.put(f"{slow}:")
    emitter.python(node, "%M")
    code.put(f"br label %{joined}")
    code.put(f"{joined}:")
    for index, result in enumerate(node.results):
        emitter.read_row(index, result)


def _inline_try_wait(emitter: BlockEmitter, node: Node) -> bool:
    """mbarrier.try_wait.parity that succeeds. Python has to see the first one after a time-out, whatever it says."""
    address, state, parity, waits, order = node.anchor.args
    if not (parity and waits and address.uniform and state.uniform):
        return False
    code = emitter.code
    late_p = code.let(f"getelementptr i32, ptr %s, i32 {TIMED_OUT}")
    on_time = code.let(f"icmp eq i32 {code.let(f'load i32, ptr {late_p}')}, 0")
    code.put(f"store i32 0, ptr {late_p}")
    slow = _if(emitter, on_time)
    where, what = _word(emitter, address), emitter.operand(state, False)
    function = _function(emitter, "mbarrier_passed")
    passed = code.let(f"call i32 {function}(ptr %t, i64 {where}, i32 {what}, i64 {int(order)})")
    code.put(f"store i64 1, ptr {emitter.row(0)}")
    _else_python(emitter, node, code.let(f"icmp ne i32 {passed}, 0"), slow)
    return True


def _arrive(emitter: BlockEmitter, node: Node, count: str, nbytes: str, slow: str) -> bool:
    code = emitter.code
    where = _word(emitter, node.anchor.args[0])
    who = emitter.live(LiveIn("(W.number + 1)", 64, True))
    function = _function(emitter, "mbarrier_arrive")
    order = int(node.anchor.args[-1])
    values = f"i64 {where}, i64 {count}, i64 {nbytes}, i64 {who}, i32 %M, i64 {order}"
    phase = code.let(f"call i64 {function}(ptr %t, {values})")
    code.put(f"store i64 {phase}, ptr {emitter.row(0)}")
    _else_python(emitter, node, code.let(f"icmp sge i64 {phase}, 0"), slow)
    return True


def _inline_arrive(emitter: BlockEmitter, node: Node) -> bool:
    """mbarrier.arrive by one lane, or by any number at one address."""
    address, count, _ = node.anchor.args
    if not count.uniform:
        return False
    code = emitter.code
    slow = _if(emitter, None if address.uniform else _one_lane(emitter))
    lanes = emitter.emitters[False].intrinsic("ctpop", "i32", "%M")
    each = _word(emitter, count)
    total = code.let(f"mul i64 {each}, {code.let(f'zext i32 {lanes} to i64')}")
    return _arrive(emitter, node, total, "0", slow)


def _inline_arrive_expect(emitter: BlockEmitter, node: Node) -> bool:
    """mbarrier.arrive.expect_tx by one lane."""
    slow = _if(emitter, _one_lane(emitter))
    return _arrive(emitter, node, "1", _word(emitter, node.anchor.args[1]), slow)


def _tensor_copy(emitter: BlockEmitter, node: Node, name: str, words: list[Value | None], more: str, slow: str) -> bool:
    """Puts the arguments where the functions of `native_units` look for them, and calls one."""
    code = emitter.code
    for index in range(COORDINATES + RANKS):
        value = words[index] if index < len(words) else None
        text = "0" if value is None else _word(emitter, value)
        place = code.let(f"getelementptr i64, ptr %x, i32 {index}")
        code.put(f"store i64 {text}, ptr {place}")
    if emitter.program.detectors:
        number = emitter.live(LiveIn("W.number", 64, True))
        lane = code.let(f"zext i32 {code.let('call i32 @llvm.cttz.i32(i32 %M, i1 false)')} to i64")
        for index, text in ((WHO, number), (LANE, lane), (INSTRUCTION, str(node.instruction.index))):
            code.put(f"store i64 {text}, ptr {code.let(f'getelementptr i64, ptr %x, i32 {index}')}")
    emitter.program.reserve(1)
    function = _function(emitter, name)
    done = code.let(f"call i32 {function}(ptr %t, ptr %x, i32 {len(words) - COORDINATES}{more})")
    _else_python(emitter, node, code.let(f"icmp ne i32 {done}, 0"), slow)
    return True


def _inline_tensor_copy_in(emitter: BlockEmitter, node: Node) -> bool:
    """cp.async.bulk.tensor to one CTA's shared memory, by one lane."""
    destination, descriptor, coords, barrier, group, multicast, offsets = node.anchor.args
    if multicast is not None or offsets is not None:
        return False
    slow = _if(emitter, _one_lane(emitter))
    pair = f", i32 {int(group == 2)}"
    return _tensor_copy(emitter, node, "tensor_load", [descriptor, destination, barrier, *coords], pair, slow)


def _inline_tensor_copy_out(emitter: BlockEmitter, node: Node) -> bool:
    """cp.async.bulk.tensor to global memory by one lane, or by lanes with the same operands, which act as one."""
    descriptor, coords, source, im2col = node.anchor.args
    if im2col:
        return False
    words = [descriptor, source, None, *coords]
    uniform = all(value is None or value.uniform for value in words)
    slow = _if(emitter, None if uniform else _one_lane(emitter))
    return _tensor_copy(emitter, node, "tensor_store", words, "", slow)


def _who(emitter: BlockEmitter) -> str:
    """CTA rank, lane and number of the warp, as keys of `native_units` have them."""
    code = emitter.code
    warp = emitter.live(LiveIn("(W.cta.rank | W.number << 16)", 64, True))
    lane = code.let(f"zext i32 {code.let('call i32 @llvm.cttz.i32(i32 %M, i1 false)')} to i64")
    return code.let(f"or i64 {warp}, {code.let(f'shl i64 {lane}, 8')}")


def _inline_commit(emitter: BlockEmitter, node: Node) -> bool:
    """tcgen05.commit by one lane, that has been executed before."""
    _, barrier, multicast = node.anchor.args
    code = emitter.code
    slow = _if(emitter, _one_lane(emitter))
    where = _word(emitter, barrier)
    mask = "-1" if multicast is None else code.let(f"and i64 {_word(emitter, multicast)}, 65535")
    function = _function(emitter, "tensor_commit")
    done = code.let(f"call i32 {function}(ptr %t, i64 {_who(emitter)}, i64 {where}, i64 {mask})")
    _else_python(emitter, node, code.let(f"icmp ne i32 {done}, 0"), slow)
    return True


def _inline_mma(emitter: BlockEmitter, node: Node) -> bool:
    """tcgen05.mma.kind::f8f6f4 with A in shared memory, by one lane, that has been executed before."""
    kind, group, d, a, b, instruction, accumulate, a_in_tmem, disabled = node.anchor.args
    if kind != "f8f6f4" or a_in_tmem:
        return False
    code = emitter.code
    slow = _if(emitter, _one_lane(emitter))
    off = "0"
    for value in disabled:  # lanes of the accumulator that are left out: refused by Python
        off = code.let(f"or i64 {off}, {_word(emitter, value)}")
    key = [str(group), _who(emitter), *(_word(emitter, value) for value in (d, a, b, instruction, accumulate)), off]
    assert len(key) == KEY_WORDS
    for index, text in enumerate(key):
        code.put(f"store i64 {text}, ptr {code.let(f'getelementptr i64, ptr %x, i32 {index}')}")
    emitter.program.reserve(1)
    function = _function(emitter, "tensor_mma")
    done = code.let(f"call i32 {function}(ptr %t, ptr %x, i32 {node.instruction.index})")
    _else_python(emitter, node, code.let(f"icmp ne i32 {done}, 0"), slow)
    return True


def _inline_bulk_group(emitter: BlockEmitter, node: Node) -> bool:
    """Bulk groups: where copies are done when they are issued, there is nothing to wait for, and without detectors
    nothing to keep.
    """
    if any(isinstance(arg, int) and arg < 0 for arg in node.anchor.args):
        return False
    code = emitter.code
    if emitter.program.detectors:
        name, more = "bulk_commit", ""
        if node.anchor.args:
            count, read = node.anchor.args
            name, more = "bulk_wait", f", i64 {count}, i32 {int(read)}"
        done = code.let(f"call i32 {_function(emitter, name)}(ptr %t, i32 %M{more})")
        _unless(emitter, node, code.let(f"icmp ne i32 {done}, 0"))
        return True
    flags = code.let(f"load i64, ptr {code.let(f'getelementptr i8, ptr %t, i64 {Tables.unit_flags.offset}')}")
    eager = code.let(f"icmp ne i64 {code.let(f'and i64 {flags}, {EAGER}')}, 0")
    _unless(emitter, node, eager)
    return True


def _inline_map_address(emitter: BlockEmitter, node: Node) -> bool:
    """mapa."""
    lanes = not node.results[0].uniform
    code = emitter.emitters[lanes]
    address, rank = (emitter.operand(value, lanes) for value in node.anchor.args)
    window = code.bin("shl", 32, rank, code.const(24, 32))
    offset = code.bin("and", 32, address, code.const(0xFFFFFF, 32))
    emitter.names[node.results[0]] = code.bin("or", 32, window, offset)
    return True


#: What only tells the detectors something: without them it does nothing.
SILENT = frozenset({sync.converged, fence_proxy_async, tcgen05.fence})

#: Each emits the operation where no predicate guards it; False, and nothing emitted, where it is Python's.
INLINE: dict[Callable[..., Any], Callable[[BlockEmitter, Node], bool]] = {
    first_lane: _inline_first_lane,
    first_bit: _inline_first_lane,
    agreed_lanes: _inline_agreed,
    elect_leader: _inline_elect,
    sync.converged: _inline_converged,
    sync.warp_sync: _inline_warp_sync,
    fence_proxy_async: _inline_fence_proxy,
    tcgen05.fence: _inline_tensor_fence,
    tcgen05.wait: _inline_tensor_wait,
    tcgen05.load: _inline_tensor_load,
    map_address: _inline_map_address,
    sync.try_wait: _inline_try_wait,
    sync.mbarrier_arrive: _inline_arrive,
    sync.mbarrier_arrive_expect: _inline_arrive_expect,
    tcgen05.mma: _inline_mma,
    tcgen05.commit: _inline_commit,
    bulk.tma_load: _inline_tensor_copy_in,
    bulk.tma_store: _inline_tensor_copy_out,
    bulk.commit_group: _inline_bulk_group,
    bulk.wait_group: _inline_bulk_group,
}
