"""LLVM IR of the shadow memory's fast path: an access, row by row, of granules, bytes or places of tensor memory."""

from __future__ import annotations

from cute_kernels.emulator.happens_before import AGENT_WORDS
from cute_kernels.emulator.native_shadow_code import FINE, PLANE_WORDS, load_fields, load_words, runs, store_fields
from cute_kernels.emulator.native_shadow_lanes import lanes
from cute_kernels.emulator.shadow import GRANULE, SHADOW_WORDS
from cute_kernels.emulator.sync_point import Row

#: An access of a tcgen05 operation, in words of 64 bits that become fields of a request; GRAIN is 1 in tensor memory.
PIPELINED_WORDS = ("WRITE", "SHADOW", "GRAIN", "OFFSETS", "ROWS", "FIRST", "STRIDE", "COUNT", "EPOCHS")
_CHECK, _WRITE, _READ = range(3)

# One row: which places of which plane it has, and what is done there. A granule of which less than all is accessed is
# split into bytes, which take over what is known of it, as `shadow.Shadow` does.
_ROW = f"""
define internal i1 @run(
  ptr %q, i64 %do, ptr %plane, i64 %start, i64 %count, i64 %lane, i32 %id, ptr %good
) alwaysinline {{
  switch i64 %do, label %check [ i64 {_WRITE}, label %write i64 {_READ}, label %read ]
check:
  %fine = call i1 @verify_run(ptr %q, ptr %plane, i64 %start, i64 %count, i64 %lane, ptr %good)
  ret i1 %fine
write:
  call void @write_run(ptr %q, ptr %plane, i64 %start, i64 %count, i32 %id)
  ret i1 1
read:
  call void @read_run(ptr %q, ptr %plane, i64 %start, i64 %count, i32 %id, ptr %good)
  ret i1 1
}}
define internal i1 @divide(ptr %shadow, i64 %g) {{
entry:
{load_words("%shadow", SHADOW_WORDS, SHADOW_WORDS)}
  %few = icmp ult i64 %FINE_LAYER_COUNT, %LAYER_COUNT
  %foreigners = icmp ne i64 %FOREIGN, 0
  %no.fine.foreign = icmp eq i64 %FINE_FOREIGN, 0
  %nowhere = and i1 %foreigners, %no.fine.foreign
  %impossible = or i1 %few, %nowhere
  br i1 %impossible, label %no, label %planes
planes:
  %split = inttoptr i64 %SPLIT to ptr
  %s.p = getelementptr i8, ptr %split, i64 %g
  store i8 1, ptr %s.p
  %layers = inttoptr i64 %LAYERS to ptr
  %fine.layers = inttoptr i64 %FINE_LAYERS to ptr
  %b = mul i64 %g, {GRANULE}
  %one.foreign = zext i1 %foreigners to i64
  %copies = add i64 %LAYER_COUNT, %one.foreign
  br label %plane
plane:
  %n = phi i64 [-1, %planes], [%n.next, %copy]
  %writes = icmp slt i64 %n, 0
  br i1 %writes, label %of.writes, label %reads
reads:
  %layer = icmp slt i64 %n, %LAYER_COUNT
  br i1 %layer, label %of.layer, label %of.foreign
of.foreign:
  %f.from = inttoptr i64 %FOREIGN to ptr
  %f.to = inttoptr i64 %FINE_FOREIGN to ptr
  br label %copy
of.writes:
  %w.from = inttoptr i64 %WRITES to ptr
  %w.to = inttoptr i64 %FINE_WRITES to ptr
  br label %copy
of.layer:
  %from.p = getelementptr ptr, ptr %layers, i64 %n
  %l.from = load ptr, ptr %from.p
  %to.p = getelementptr ptr, ptr %fine.layers, i64 %n
  %l.to = load ptr, ptr %to.p
  br label %copy
copy:
  %from = phi ptr [%w.from, %of.writes], [%l.from, %of.layer], [%f.from, %of.foreign]
  %to = phi ptr [%w.to, %of.writes], [%l.to, %of.layer], [%f.to, %of.foreign]
  %v.p = getelementptr i32, ptr %from, i64 %g
  %v = load i32, ptr %v.p
  %one = insertelement <{GRANULE} x i32> poison, i32 %v, i32 0
  %all = shufflevector <{GRANULE} x i32> %one, <{GRANULE} x i32> poison, <{GRANULE} x i32> zeroinitializer
  %b.p = getelementptr i32, ptr %to, i64 %b
  store <{GRANULE} x i32> %all, ptr %b.p, align 4
  %n.next = add i64 %n, 1
  %more = icmp slt i64 %n.next, %copies
  br i1 %more, label %plane, label %yes
yes:
  ret i1 1
no:
  ret i1 0
}}
define internal i1 @row(ptr %q, i64 %do, i64 %start, i64 %count, i64 %lane, i32 %id, ptr %good) {{
entry:
{load_fields("SHADOW", "GRAIN")}
  %shadow = inttoptr i64 %SHADOW to ptr
  %fine = getelementptr i64, ptr %shadow, i64 {FINE}
  %places = icmp eq i64 %GRAIN, 1
  br i1 %places, label %direct, label %bytes
direct:
  %d = call i1 @run(ptr %q, i64 %do, ptr %shadow, i64 %start, i64 %count, i64 %lane, i32 %id, ptr %good)
  ret i1 %d
bytes:
{load_words("%shadow", SHADOW_WORDS, ("PLACES", "FINE_WRITES", "SPLIT"))}
  %split = inttoptr i64 %SPLIT to ptr
  %low = icmp slt i64 %start, 0
  %count.less = sub i64 %count, 1
  %last = add i64 %start, %count.less
  %g.first = ashr i64 %start, 4
  %g.last = ashr i64 %last, 4
  %high = icmp sge i64 %g.last, %PLACES
  %outside = or i1 %low, %high
  br i1 %outside, label %no, label %inside
inside:
  %either = or i64 %start, %count
  %odd = and i64 %either, {GRANULE - 1}
  %whole = icmp eq i64 %odd, 0
  br i1 %whole, label %granules, label %pieces
granules:
  %none.split = icmp eq i64 %SPLIT, 0
  %g.count = lshr i64 %count, 4
  br i1 %none.split, label %all, label %each
all:
  %a = call i1 @run(ptr %q, i64 %do, ptr %shadow, i64 %g.first, i64 %g.count, i64 %lane, i32 %id, ptr %good)
  ret i1 %a
each:
  %g = phi i64 [%g.first, %granules], [%g.next, %g.good]
  %g.more = icmp sle i64 %g, %g.last
  br i1 %g.more, label %granule, label %yes
granule:
  %s.p = getelementptr i8, ptr %split, i64 %g
  %s = load i8, ptr %s.p
  %s.whole = icmp eq i8 %s, 0
  br i1 %s.whole, label %span, label %one
span:
  ; all whole granules up to the next split one
  %b = phi i64 [%g, %granule], [%b.next, %whole.too]
  %b.next = add i64 %b, 1
  %b.more = icmp sle i64 %b.next, %g.last
  br i1 %b.more, label %another, label %spanned
another:
  %b.p = getelementptr i8, ptr %split, i64 %b.next
  %b.s = load i8, ptr %b.p
  %b.whole = icmp eq i8 %b.s, 0
  br i1 %b.whole, label %whole.too, label %spanned
whole.too:
  br label %span
spanned:
  %b.count = sub i64 %b.next, %g
  %b.r = call i1 @run(ptr %q, i64 %do, ptr %shadow, i64 %g, i64 %b.count, i64 %lane, i32 %id, ptr %good)
  br i1 %b.r, label %g.good, label %no
one:
  %g.fine = mul i64 %g, {GRANULE}
  %g.one = add i64 %g, 1
  %g.r = call i1 @run(ptr %q, i64 %do, ptr %fine, i64 %g.fine, i64 {GRANULE}, i64 %lane, i32 %id, ptr %good)
  br i1 %g.r, label %g.good, label %no
g.good:
  %g.next = phi i64 [%b.next, %spanned], [%g.one, %one]
  br label %each
pieces:
  %no.fine = icmp eq i64 %FINE_WRITES, 0
  br i1 %no.fine, label %no, label %dividing
dividing:
  %h = phi i64 [%g.first, %pieces], [%h.next, %divided]
  %h.more = icmp sle i64 %h, %g.last
  br i1 %h.more, label %maybe, label %narrow
maybe:
  %h.p = getelementptr i8, ptr %split, i64 %h
  %h.s = load i8, ptr %h.p
  %h.whole = icmp eq i8 %h.s, 0
  br i1 %h.whole, label %cut, label %divided
cut:
  %h.r = call i1 @divide(ptr %shadow, i64 %h)
  br i1 %h.r, label %divided, label %no
divided:
  %h.next = add i64 %h, 1
  br label %dividing
narrow:
  %f = call i1 @run(ptr %q, i64 %do, ptr %fine, i64 %start, i64 %count, i64 %lane, i32 %id, ptr %good)
  ret i1 %f
yes:
  ret i1 1
no:
  ret i1 0
}}
"""

_ROWS = f"""
define internal i1 @rows(ptr %q, i64 %do) {{
entry:
  %good = alloca [3 x i32]
{load_fields("OFFSETS", "ROWS", "BASE", "STRIDE", "COUNT", "ORIGIN", "LANES", "LANE", "IDENTITY", "ADD_LANES")}
  %offsets = inttoptr i64 %OFFSETS to ptr
  %lanes = inttoptr i64 %LANES to ptr
  %regular = icmp eq i64 %OFFSETS, 0
  %one.lane = icmp eq i64 %LANES, 0
  %add = icmp ne i64 %ADD_LANES, 0
  %identity = trunc i64 %IDENTITY to i32
  store [3 x i32] zeroinitializer, ptr %good
{load_fields("SHADOW", "GRAIN")}
  %shadow = inttoptr i64 %SHADOW to ptr
{load_words("%shadow", SHADOW_WORDS, (*PLANE_WORDS, "SPLIT"))}
  %writes = inttoptr i64 %WRITES to ptr
  %layers = inttoptr i64 %LAYERS to ptr
  %split = inttoptr i64 %SPLIT to ptr
  %some.split = icmp ne i64 %SPLIT, 0
  %good.layer = getelementptr i32, ptr %good, i64 2
{load_fields("WRITE", "FLOOR")}
  ; short rows that are read, of whole granules of shared memory with a history that was met before: an MMA's operands
  %is.read = icmp eq i64 %WRITE, 0
  %in.bytes = icmp eq i64 %GRAIN, {GRANULE}
  %readers = icmp ne i64 %LAYER_COUNT, 0
  %of.one = icmp eq i64 %COUNT, {GRANULE}
  %of.two = icmp eq i64 %COUNT, {2 * GRANULE}
  %is.short = or i1 %of.one, %of.two
  %shared = icmp eq i64 %FLOOR, 0
  %t.1 = and i1 %is.read, %in.bytes
  %t.2 = and i1 %readers, %is.short
  %t.3 = and i1 %t.1, %t.2
  %t.4 = and i1 %t.3, %shared
  %short = and i1 %t.4, %one.lane
  %checking = icmp eq i64 %do, {_CHECK}
  %second = zext i1 %of.two to i64
  br label %rows
rows:
  %i = phi i64 [0, %entry], [%i.next, %next]
  %more = icmp ult i64 %i, %ROWS
  br i1 %more, label %which, label %yes
which:
  br i1 %regular, label %computed, label %listed
computed:
  %far = mul i64 %i, %STRIDE
  %at = add i64 %BASE, %far
  br label %who
listed:
  %o.p = getelementptr i64, ptr %offsets, i64 %i
  %o = load i64, ptr %o.p
  %from.origin = sub i64 %o, %ORIGIN
  br label %who
who:
  %start = phi i64 [%at, %computed], [%from.origin, %listed]
  br i1 %one.lane, label %ready, label %own
own:
  ; what is in order for one lane need not be for the next one
  store i64 0, ptr %good, align 4
  %l.p = getelementptr i64, ptr %lanes, i64 %i
  %l = load i64, ptr %l.p
  br label %ready
ready:
  %lane = phi i64 [%LANE, %who], [%l, %own]
  %lane.some = icmp sge i64 %lane, 0
  %lane.added = and i1 %add, %lane.some
  %lane.short = trunc i64 %lane to i32
  %lane.more = select i1 %lane.added, i32 %lane.short, i32 0
  %id = add i32 %identity, %lane.more
  br i1 %short, label %t.place, label %slow
t.place:
  %t.odd = and i64 %start, {GRANULE - 1}
  %t.whole = icmp eq i64 %t.odd, 0
  %g = ashr i64 %start, 4
  %h = add i64 %g, %second
  %t.inside = icmp ult i64 %h, %PLACES
  %t.legal = and i1 %t.whole, %t.inside
  br i1 %t.legal, label %t.split, label %slow
t.split:
  br i1 %some.split, label %t.look, label %t.ids
t.look:
  %g.s.p = getelementptr i8, ptr %split, i64 %g
  %g.s = load i8, ptr %g.s.p
  %h.s.p = getelementptr i8, ptr %split, i64 %h
  %h.s = load i8, ptr %h.s.p
  %either.s = or i8 %g.s, %h.s
  %t.unsplit = icmp eq i8 %either.s, 0
  br i1 %t.unsplit, label %t.ids, label %slow
t.ids:
  %top = load ptr, ptr %layers
  %g.l.p = getelementptr i32, ptr %top, i64 %g
  %g.l = load i32, ptr %g.l.p
  %h.l.p = getelementptr i32, ptr %top, i64 %h
  %h.l = load i32, ptr %h.l.p
  %l.good = load i32, ptr %good.layer
  %g.l.same = icmp eq i32 %g.l, %l.good
  %h.l.same = icmp eq i32 %h.l, %l.good
  %l.same = and i1 %g.l.same, %h.l.same
  br i1 %l.same, label %t.do, label %slow
t.do:
  br i1 %checking, label %t.check, label %t.record
t.check:
  %g.w.p = getelementptr i32, ptr %writes, i64 %g
  %g.w = load i32, ptr %g.w.p
  %h.w.p = getelementptr i32, ptr %writes, i64 %h
  %h.w = load i32, ptr %h.w.p
  %w.good = load i32, ptr %good
  %g.w.same = icmp eq i32 %g.w, %w.good
  %h.w.same = icmp eq i32 %h.w, %w.good
  %w.same = and i1 %g.w.same, %h.w.same
  br i1 %w.same, label %next, label %slow
t.record:
  store i32 %id, ptr %g.l.p
  store i32 %id, ptr %h.l.p
  br label %next
slow:
  %r = call i1 @row(ptr %q, i64 %do, i64 %start, i64 %COUNT, i64 %lane, i32 %id, ptr %good)
  br i1 %r, label %next, label %no
next:
  %i.next = add i64 %i, 1
  br label %rows
yes:
  ret i1 1
no:
  ret i1 0
}}
define internal void @record(ptr %q) {{
{load_fields("WRITE")}
  %is.write = icmp ne i64 %WRITE, 0
  %do = select i1 %is.write, i64 {_WRITE}, i64 {_READ}
  %done = call i1 @rows(ptr %q, i64 %do)
  ret void
}}
define i64 @access(ptr %q) {{
  %good = call i1 @rows(ptr %q, i64 {_CHECK})
  br i1 %good, label %yes, label %no
yes:
  call void @record(ptr %q)
  ret i64 1
no:
  ret i64 0
}}
"""


# Accesses of one tcgen05 operation: to shared memory, and to tensor memory, where what its pipe (``column``) did before
# is in order.
_PIPELINED = f"""
define i64 @pipelined(ptr %q, ptr %list, i64 %end, ptr %agent, i64 %identity, i64 %lane, i64 %column) {{
begin:
{load_words("%agent", AGENT_WORDS, ("CLOCKS", "WIDTH", "BASE"))}
  %pitch = mul i64 %WIDTH, 4
  %visible.o = mul i64 %pitch, {int(Row.VISIBLE)}
  %visible = add i64 %CLOCKS, %visible.o
  %proxy.o = mul i64 %pitch, {int(Row.PROXY)}
  %proxy = add i64 %CLOCKS, %proxy.o
  %tensor.o = mul i64 %pitch, {int(Row.TENSOR)}
  %tensor = add i64 %CLOCKS, %tensor.o
{store_fields(STRONG=0, ORIGIN=0, WIDTH="%WIDTH", LANES=0, FLOOR=0, IDENTITY="%identity", ADD_LANES=0,
              READ_COLUMN="%column")}
  br label %entries
entries:
  %e = phi i64 [0, %begin], [%e.next, %good]
  %more = icmp slt i64 %e, %end
  br i1 %more, label %entry, label %stop
entry:
  %e.o = mul i64 %e, {len(PIPELINED_WORDS)}
  %entry.p = getelementptr i64, ptr %list, i64 %e.o
{load_words("%entry.p", PIPELINED_WORDS, PIPELINED_WORDS)}
  %in.tensor = icmp eq i64 %GRAIN, 1
  %known = select i1 %in.tensor, i64 %tensor, i64 %visible
  %own = select i1 %in.tensor, i64 -1, i64 %BASE
  %who = select i1 %in.tensor, i64 -1, i64 %lane
  %exempt = select i1 %in.tensor, i64 %column, i64 -1
  %fenced = select i1 %in.tensor, i64 0, i64 %proxy
  %read.known = select i1 %in.tensor, i64 %tensor, i64 0
{store_fields(
    WRITE="%WRITE", SHADOW="%SHADOW", GRAIN="%GRAIN", OFFSETS="%OFFSETS", ROWS="%ROWS", BASE="%FIRST",
    STRIDE="%STRIDE", COUNT="%COUNT", EPOCHS="%EPOCHS", KNOWN="%known", OWN="%own", LANE="%who", EXEMPT="%exempt",
    FENCED="%fenced", READ_KNOWN="%read.known")}
  %r = call i64 @access(ptr %q)
  %fine = icmp ne i64 %r, 0
  br i1 %fine, label %good, label %stop
good:
  %e.next = add i64 %e, 1
  br label %entries
stop:
  ret i64 %e
}}
"""


def accesses() -> str:
    """What the module for accesses is made of.

    * ``i64 @access(request)``: 1 if the access is in order and recorded.
    * ``i64 @pipelined(request, list, length, agent, identity, lane, column)``: how many accesses of a list
      (`PIPELINED_WORDS`) are, before the first that is not.
    """
    return runs() + lanes() + _ROW + _ROWS + _PIPELINED
