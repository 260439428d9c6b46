"""LLVM IR of memory accesses by the lanes of a warp, and the tables that it finds memory by.

Native code performs what is legal and nothing else: an access that any check stops, for whatever reason, is handed to
the Python function of the instruction (`instructions_memory`), which decides again and words the error. All lanes are
checked before the first byte moves, so nothing has happened yet when that is called.

A launch has one exchange area of 256-byte rows, through which accesses and calls of Python get operands and results:
row 0 of an access holds 32 addresses, the rows after it the elements to store, one row each; loaded elements start at
row 0.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import address
from cute_kernels.emulator.instructions_move import SHARED_WINDOW

if TYPE_CHECKING:
    from cute_kernels.emulator.sm import Cluster

ROW = 256  # bytes of an exchange row: 32 lanes of 64 bits
#: Flags of the tables.
STATES, CALL, EVENTS = CONSTANTS["STATES"], CONSTANTS["CALL"], CONSTANTS["LOG_EVENTS"]
#: Kinds of entries of the log for the race detector, and flags of the tables that ask for them: accesses,
LOG = {
    (space, write): CONSTANTS[f"LOG_{space.upper()}_{'WRITE' if write else 'READ'}"]
    for space in ("shared", "global") for write in (False, True)
}  # fmt: skip
#: and events.
EVENT = {
    name: CONSTANTS[f"LOG_{name.upper()}"]
    for name in ("converge", "fence_proxy", "tensor_load", "tensor_wait", "tensor_fence")
}
LOG_ENTRY = ctypes.sizeof(STRUCTURES["LogEntry"])
_LOG_ENTRIES = 64  # a few: what is worked off soon is still in the cache
Tables, Cta, Region = (STRUCTURES[name] for name in ("Tables", "Cta", "Region"))
assert Tables.ranks.offset == Cta.data.offset == Region.start.offset == 0, "the text below has no offset for them"
CTA_TABLE, CTA_ENTRY, _REGION = Tables.ctas.offset, ctypes.sizeof(Cta), ctypes.sizeof(Region)


class MemoryTables:
    """What native code knows of the memories of a cluster.

    Attributes:
        address: of the tables.
        header: the tables, a `Tables`.
    """

    def __init__(self, cluster: Cluster, flags: int) -> None:
        ctas = [cta.shared for cta in cluster.ctas]
        self._bytes = np.zeros(CTA_TABLE + CTA_ENTRY * len(ctas), np.uint8)
        self.header = Tables.from_buffer(self._bytes)
        self.address = self._bytes.ctypes.data
        regions = cluster.gmem.regions()
        self._regions = np.array([(r.start, r.end, r.writable) for r in regions] or [(0, 0, 0)], np.int64)
        self._params = np.frombuffer(cluster.params or b"\0", np.uint8)
        self._log = np.zeros((_LOG_ENTRIES if flags & ~(STATES | CALL) else 0, LOG_ENTRY), np.uint8)
        header = self.header
        header.ranks, header.flags = len(ctas), flags
        header.regions, header.region_table = len(regions), self._regions.ctypes.data
        header.params = self._params.ctypes.data
        header.log, header.log_size = self._log.ctypes.data, len(self._log)
        for rank, cta in enumerate(ctas):
            entry = self.cta(rank)
            entry.data, entry.states, entry.size = cta.words[1].ctypes.data, cta.states[1].ctypes.data, cta.size

    def cta(self, rank: int) -> ctypes.Structure:
        """What they know of the shared memory of a CTA, a `Cta`."""
        return Cta.from_buffer(self._bytes, CTA_TABLE + CTA_ENTRY * rank)

    def take_log(self) -> np.ndarray:
        """What is logged and not worked off, uint8 [n, LOG_ENTRY], in order; the log is empty afterwards."""
        done, used = self.header.log_done, self.header.log_used
        self.header.log_done = self.header.log_used = 0
        return self._log[done:used]


def exchange_area(rows: int) -> tuple[np.ndarray, int]:
    """(uint8 [rows * ROW], its address), on a cache line."""
    raw = np.zeros(rows * ROW + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    area = raw[skip : skip + rows * ROW]
    return area, area.ctypes.data


CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_uint32)


def function_name(space: str, write: bool, size: int, count: int) -> str:
    return f"{'st' if write else 'ld'}_{space}_{8 * size}x{count}"


def access(space: str, write: bool, size: int, count: int) -> str:
    """IR of ``i32 @name(ptr tables, ptr exchange, i32 mask, i32 instruction)``: 1 if done, 0 if Python has to do it.

    Args:
        space: "shared", "global" or "generic".
        write: store or load.
        size: bytes per element.
        count: elements per lane.
    """
    name = function_name(space, write, size, count)
    if space == "generic":
        return _generic(name, write, size, count)
    checks = _shared_checks(write, size * count) if space == "shared" else _global_checks(write, size * count)
    return f"""
define internal i32 @{name}(ptr %t, ptr %x, i32 %mask, i32 %instruction) noinline {{
entry:
  %ptrs = alloca [32 x ptr], align 64
  %tracked = alloca i64
  store i64 0, ptr %tracked
  %flags.p = getelementptr i8, ptr %t, i64 {Tables.flags.offset}
  %flags = load i64, ptr %flags.p
  %slow.b = and i64 %flags, {CALL}
  %slow = icmp ne i64 %slow.b, 0
  br i1 %slow, label %fail, label %loop
loop:
  %m = phi i32 [%mask, %entry], [%m.rest, %found]
  %none = icmp eq i32 %m, 0
  br i1 %none, label %checked, label %lane
lane:
  %lane.n = call i32 @llvm.cttz.i32(i32 %m, i1 true)
  %m.less = sub i32 %m, 1
  %m.rest = and i32 %m, %m.less
  %a.p = getelementptr i64, ptr %x, i32 %lane.n
  %a = load i64, ptr %a.p
  %low = and i64 %a, {size * count - 1}
  %aligned = icmp eq i64 %low, 0
  br i1 %aligned, label %check, label %fail
{checks}
found:
  %slot = getelementptr ptr, ptr %ptrs, i32 %lane.n
  store ptr %p, ptr %slot
  br label %loop
checked:
{_log(space, write, size * count)}
{_move(write, size, count, states=space == "shared" and write)}
fail:
  ret i32 0
}}
"""


def _shared_checks(write: bool, nbytes: int) -> str:
    state = f"<{nbytes} x i8>"
    wanted = (f"icmp ne {state} %st, splat (i8 2)" if write else f"icmp eq {state} %st, splat (i8 1)")  # fmt: skip
    return f"""
check:
  %rank = lshr i64 %a, 24
  %ranks = load i64, ptr %t
  %inside = icmp ult i64 %rank, %ranks
  br i1 %inside, label %cta, label %fail
cta:
  %cta.o = mul i64 %rank, {CTA_ENTRY}
  %cta.h = add i64 %cta.o, {CTA_TABLE}
  %cta.p = getelementptr i8, ptr %t, i64 %cta.h
  %data = load ptr, ptr %cta.p
  %state.p = getelementptr i8, ptr %cta.p, i64 {Cta.states.offset}
  %state = load ptr, ptr %state.p
  %size.p = getelementptr i8, ptr %cta.p, i64 {Cta.size.offset}
  %size = load i64, ptr %size.p
  %offset = and i64 %a, 16777215
  %end = add i64 %offset, {nbytes}
  %fits = icmp ule i64 %end, %size
  br i1 %fits, label %states, label %fail
states:
  %p = getelementptr i8, ptr %data, i64 %offset
  %detect.b = and i64 %flags, {STATES}
  %detect = icmp ne i64 %detect.b, 0
  br i1 %detect, label %bytes, label %found
bytes:
  %s.p = getelementptr i8, ptr %state, i64 %offset
  %st = load {state}, ptr %s.p, align 1
  %st.ok = {wanted}
  %st.i = bitcast <{nbytes} x i1> %st.ok to i{nbytes}
  %st.all = icmp eq i{nbytes} %st.i, -1
  br i1 %st.all, label %found, label %fail
"""


def _global_checks(write: bool, nbytes: int) -> str:
    allowed = "%writable = icmp ne i64 %w, 0" if write else "%writable = icmp eq i64 %w, %w"
    return f"""
check:
  %end = add i64 %a, {nbytes}
  %count.p = getelementptr i8, ptr %t, i64 {Tables.regions.offset}
  %count = load i64, ptr %count.p
  %table.p = getelementptr i8, ptr %t, i64 {Tables.region_table.offset}
  %table = load ptr, ptr %table.p
  br label %search
search:
  %i = phi i64 [0, %check], [%i.next, %next]
  %left = icmp ult i64 %i, %count
  br i1 %left, label %region, label %fail
region:
  %r.o = mul i64 %i, {_REGION}
  %r.p = getelementptr i8, ptr %table, i64 %r.o
  %start = load i64, ptr %r.p
  %stop.p = getelementptr i8, ptr %r.p, i64 {Region.end.offset}
  %stop = load i64, ptr %stop.p
  %w.p = getelementptr i8, ptr %r.p, i64 {Region.writable.offset}
  %w = load i64, ptr %w.p
  {allowed}
  %after = icmp uge i64 %a, %start
  %before = icmp ule i64 %end, %stop
  %in.1 = and i1 %after, %before
  %in = and i1 %in.1, %writable
  %i.next = add i64 %i, 1
  %p = inttoptr i64 %a to ptr
  br i1 %in, label %hit, label %next
next:
  br label %search
hit:
  %before.w = load i64, ptr %tracked
  %after.w = or i64 %before.w, %w
  store i64 %after.w, ptr %tracked
  br label %found
"""


def _log(space: str, write: bool, nbytes: int) -> str:
    bit = LOG[space, write]
    # The race detector does not track reads of memory that nobody may write.
    anything = "" if space == "shared" or write else """
  %tracked.w = load i64, ptr %tracked
  %untracked = icmp eq i64 %tracked.w, 0
  br i1 %untracked, label %move, label %logging"""
    return f"""
  %log.b = and i64 %flags, {bit}
  %log = icmp ne i64 %log.b, 0
  br i1 %log, label %{"tracking" if anything else "logging"}, label %move
{"tracking:" + anything if anything else ""}
logging:
  %e.lanes = call ptr @log_entry(ptr %t, i32 {bit}, i32 %mask, i32 {nbytes}, i32 %instruction)
  %full = icmp eq ptr %e.lanes, null
  br i1 %full, label %fail, label %append
append:
  %all = load <32 x i64>, ptr %x, align 64
  store <32 x i64> %all, ptr %e.lanes, align 8
  br label %move
move:"""


def log_code() -> str:
    """IR of ``ptr @log_entry``: a new entry of the log, and what comes behind its head (null: none is free), and of
    ``i32 @note``, an entry of another event than an access; 0 where Python has to be told.
    """
    return f"""
define internal ptr @log_entry(ptr %t, i32 %kind, i32 %mask, i32 %argument, i32 %instruction) noinline {{
  %r = call ptr inttoptr (i64 {address("log_entry")} to ptr)(
    ptr %t, i32 %kind, i32 %mask, i32 %argument, i32 %instruction)
  ret ptr %r
}}
define internal i32 @note(
  ptr %t, i32 %kind, i32 %mask, i32 %argument, i32 %instruction, i64 %first, i64 %second
) noinline {{
  %r = call i32 inttoptr (i64 {address("log_event")} to ptr)(
    ptr %t, i32 %kind, i32 %mask, i32 %argument, i32 %instruction, i64 %first, i64 %second)
  ret i32 %r
}}
"""


def _move(write: bool, size: int, count: int, states: bool) -> str:
    """The second pass: elements between the exchange rows and memory."""
    element = f"i{8 * size}"
    lines = []
    if write:
        lines += [
            f"  %progress.p = getelementptr i8, ptr %t, i64 {Tables.progress.offset}",
            "  %progress = load i64, ptr %progress.p",
            "  %progress.next = add i64 %progress, 1",
            "  store i64 %progress.next, ptr %progress.p",
        ]
    lines += [
        "  br label %each",
        "each:",
        "  %k = phi i32 [%mask, %move], [%k.rest, %moved]",
        "  %k.none = icmp eq i32 %k, 0",
        "  br i1 %k.none, label %done, label %one",
        "one:",
        "  %k.lane = call i32 @llvm.cttz.i32(i32 %k, i1 true)",
        "  %k.less = sub i32 %k, 1",
        "  %k.rest = and i32 %k, %k.less",
        "  %k.slot = getelementptr ptr, ptr %ptrs, i32 %k.lane",
        "  %q = load ptr, ptr %k.slot",
        f"  %row = getelementptr {element}, ptr %x, i32 %k.lane",
    ]
    for i in range(count):
        lines.append(f"  %m.{i} = getelementptr i8, ptr %q, i64 {i * size}")
        lines.append(f"  %r.{i} = getelementptr i8, ptr %row, i64 {(i + write) * ROW}")
        source, target = (f"%r.{i}", f"%m.{i}") if write else (f"%m.{i}", f"%r.{i}")
        lines.append(f"  %v.{i} = load {element}, ptr {source}")
        lines.append(f"  store {element} %v.{i}, ptr {target}")
    if states:
        # The state of a byte lies as far from the state array's start as the byte from the data's.
        lines += [
            "  %d.p = getelementptr i64, ptr %x, i32 %k.lane",
            "  %d.a = load i64, ptr %d.p",
            "  %d.rank = lshr i64 %d.a, 24",
            f"  %d.o = mul i64 %d.rank, {CTA_ENTRY}",
            f"  %d.h = add i64 %d.o, {CTA_TABLE + Cta.states.offset}",
            "  %d.cta = getelementptr i8, ptr %t, i64 %d.h",
            "  %d.state = load ptr, ptr %d.cta",
            "  %d.offset = and i64 %d.a, 16777215",
            "  %d.s = getelementptr i8, ptr %d.state, i64 %d.offset",
            "  %d.f = and i64 %flags, 1",
            "  %d.c = icmp ne i64 %d.f, 0",
            "  br i1 %d.c, label %mark, label %moved",
            "mark:",
            f"  store <{size * count} x i8> splat (i8 1), ptr %d.s, align 1",
        ]
    lines += ["  br label %moved", "moved:", "  br label %each", "done:", "  ret i32 1"]
    return "\n".join(lines)


def _generic(name: str, write: bool, size: int, count: int) -> str:
    """Shared memory appears as a window above every host address; lanes that do not agree are left to Python."""
    inner = {space: function_name(space, write, size, count) for space in ("shared", "global")}
    return f"""
define internal i32 @{name}(ptr %t, ptr %x, i32 %mask, i32 %instruction) noinline {{
entry:
  %none = icmp eq i32 %mask, 0
  br i1 %none, label %fail, label %first
first:
  %lane = call i32 @llvm.cttz.i32(i32 %mask, i1 true)
  %a.p = getelementptr i64, ptr %x, i32 %lane
  %a = load i64, ptr %a.p
  %window = icmp uge i64 %a, {SHARED_WINDOW}
  br i1 %window, label %shared, label %global
shared:
  %before = load <32 x i64>, ptr %x, align 64
  %after = sub <32 x i64> %before, splat (i64 {SHARED_WINDOW})
  store <32 x i64> %after, ptr %x, align 64
  %s = call i32 @{inner["shared"]}(ptr %t, ptr %x, i32 %mask, i32 %instruction)
  %s.ok = icmp ne i32 %s, 0
  br i1 %s.ok, label %good, label %restore
restore:
  store <32 x i64> %before, ptr %x, align 64
  br label %fail
global:
  %g = call i32 @{inner["global"]}(ptr %t, ptr %x, i32 %mask, i32 %instruction)
  ret i32 %g
good:
  ret i32 1
fail:
  ret i32 0
}}
"""
