"""LLVM IR of the shadow memory's fast path for what most loads and stores are: all lanes of a warp, with one history.

Each lane accesses 1 to 16 bytes, and what is known of these places is the same for all lanes: the last write is one
access, or one store of a warp of which lane n wrote what lane n accesses now; the last readers are the same everywhere.
Then one look decides for all lanes whether the access is in order, and what is left is to compare their histories.
Any other access is left as it is: `native_shadow_rows` looks at every lane by itself.
"""

from __future__ import annotations

from cute_kernels.emulator.happens_before import LANES
from cute_kernels.emulator.native_shadow_code import (
    FINE,
    PLANE_WORDS,
    epoch_arrays,
    load_fields,
    load_words,
    splat,
    store_fields,
)
from cute_kernels.emulator.shadow import GRANULE, LANE_BITS, SHADOW_WORDS

_UNITS = (1, 2, 4, 8, 16)  # places of a lane: one granule, or so many bytes


def _of_unit(unit: int) -> str:
    """``@alike``: whether the places of lane n have ``%first + n * %step``. ``@put`` gives them that."""
    vector = f"<{unit} x i32>"
    lane = f"""
  %p.p = getelementptr i64, ptr %places, i64 %i
  %p = load i64, ptr %p.p
  %v.p = getelementptr i32, ptr %array, i64 %p
{splat("ids", "%id", "i32", unit)}
  %id.next = add i32 %id, %step
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, {LANES}"""
    return f"""
define internal i1 @alike.{unit}(ptr %array, ptr %places, i32 %first, i32 %step) noinline {{
entry:
  br label %each
each:
  %i = phi i64 [0, %entry], [%i.next, %each]
  %id = phi i32 [%first, %entry], [%id.next, %each]
  %differ = phi {vector} [zeroinitializer, %entry], [%differ.next, %each]
{lane}
  %v = load {vector}, ptr %v.p, align 4
  %changed = xor {vector} %v, %ids
  %differ.next = or {vector} %differ, %changed
  br i1 %more, label %each, label %done
done:
  %any = call i32 @llvm.vector.reduce.or.v{unit}i32({vector} %differ.next)
  %same = icmp eq i32 %any, 0
  ret i1 %same
}}
define internal void @put.{unit}(ptr %array, ptr %places, i32 %first, i32 %step) noinline {{
entry:
  br label %each
each:
  %i = phi i64 [0, %entry], [%i.next, %each]
  %id = phi i32 [%first, %entry], [%id.next, %each]
{lane}
  store {vector} %ids, ptr %v.p, align 4
  br i1 %more, label %each, label %done
done:
  ret void
}}
declare i32 @llvm.vector.reduce.or.v{unit}i32({vector})
"""


def _by_unit(name: str, result: str) -> str:
    """A function of ``%unit`` places per lane."""
    returned = f"%r.{{unit}} = call {result}" if result != "void" else "call void"
    cases = "".join(
        f"""
of.{unit}:
  {returned.format(unit=unit)} @{name}.{unit}(ptr %array, ptr %places, i32 %first, i32 %step)
  ret {result}{f" %r.{unit}" if result != "void" else ""}"""
        for unit in _UNITS
    )
    return f"""
define internal {result} @{name}(ptr %array, ptr %places, i64 %unit, i32 %first, i32 %step) alwaysinline {{
  switch i64 %unit, label %of.{_UNITS[-1]} [ {" ".join(f"i64 {unit}, label %of.{unit}" for unit in _UNITS[:-1])} ]
{cases}
}}
"""


# Whether lane n is ordered after lane n of a store, for every n: the warp's own, or one that it knows for all lanes.
_STORE_ORDERED = f"""
define internal i1 @store_ordered(ptr %q, i32 %id) alwaysinline {{
entry:
{load_fields("KNOWN", "WIDTH", "OWN", "FLOOR")}
  %id.wide = zext i32 %id to i64
  %number = lshr i64 %id.wide, {LANE_BITS}
  %id.lane = and i64 %id.wide, {LANES - 1}
  %of.lane.0 = icmp eq i64 %id.lane, 0
  %some = icmp ne i64 %number, 0
  %later = icmp sge i64 %number, %FLOOR
  %ours.1 = and i1 %of.lane.0, %some
  %ours = and i1 %ours.1, %later
  br i1 %ours, label %who, label %no
who:
{epoch_arrays("COLUMNS", "CLOCKS")}
  %column.p = getelementptr i32, ptr %columns, i64 %number
  %column.short = load i32, ptr %column.p
  %column = sext i32 %column.short to i64
  %mine = icmp eq i64 %column, %OWN
  br i1 %mine, label %yes, label %other
other:
  %last = add i64 %column, {LANES - 1}
  %first.inside = icmp ult i64 %column, %WIDTH
  %last.inside = icmp ult i64 %last, %WIDTH
  %inside = and i1 %first.inside, %last.inside
  br i1 %inside, label %look, label %no
look:
  %clock.p = getelementptr i32, ptr %clocks, i64 %number
  %clock = load i32, ptr %clock.p
  %known = inttoptr i64 %KNOWN to ptr
  %known.p = getelementptr i32, ptr %known, i64 %column
  %known.all = load <{LANES} x i32>, ptr %known.p, align 4
{splat("clock.all", "%clock", "i32", LANES)}
  %past = icmp sle <{LANES} x i32> %clock.all, %known.all
  %past.bits = bitcast <{LANES} x i1> %past to i{LANES}
  %past.all = icmp eq i{LANES} %past.bits, -1
  ret i1 %past.all
yes:
  ret i1 1
no:
  ret i1 0
}}
"""

# Where the lanes' places are: all in the plane by granules, or all in the plane by bytes. ``%places`` is filled.
_PLACES = f"""
define internal ptr @lanes_plane(ptr %q, ptr %places) alwaysinline {{
entry:
{load_fields("SHADOW", "OFFSETS", "COUNT", "ORIGIN")}
  %shadow = inttoptr i64 %SHADOW to ptr
{load_words("%shadow", SHADOW_WORDS, ("PLACES", "SPLIT"))}
  %split = inttoptr i64 %SPLIT to ptr
  %offsets = inttoptr i64 %OFFSETS to ptr
  %count.less = sub i64 %COUNT, 1
  %bits = and i64 %COUNT, %count.less
  %power = icmp eq i64 %bits, 0
  %small = icmp ule i64 %COUNT, {GRANULE}
  %a = load <{LANES} x i64>, ptr %offsets, align 8
{splat("origin", "%ORIGIN", "i64", LANES)}
  %o = sub <{LANES} x i64> %a, %origin
  %above = call i64 @llvm.vector.reduce.umax.v{LANES}i64(<{LANES} x i64> %o)
  %all.bits = call i64 @llvm.vector.reduce.or.v{LANES}i64(<{LANES} x i64> %o)
  %odd = and i64 %all.bits, %count.less
  %aligned = icmp eq i64 %odd, 0
  %limit = mul i64 %PLACES, {GRANULE}
  %inside = icmp ult i64 %above, %limit
  %fits.1 = and i1 %power, %small
  %fits.2 = and i1 %aligned, %inside
  %fits = and i1 %fits.1, %fits.2
  br i1 %fits, label %granules, label %no
granules:
  %g = lshr <{LANES} x i64> %o, splat (i64 4)
  store <{LANES} x i64> %g, ptr %places, align 64
  %whole = icmp eq i64 %COUNT, {GRANULE}
  %no.split = icmp eq i64 %SPLIT, 0
  br i1 %no.split, label %either, label %each
each:
  %i = phi i64 [0, %granules], [%i.next, %each]
  %some = phi i8 [0, %granules], [%some.next, %each]
  %all = phi i8 [1, %granules], [%all.next, %each]
  %g.p = getelementptr i64, ptr %places, i64 %i
  %g.i = load i64, ptr %g.p
  %s.p = getelementptr i8, ptr %split, i64 %g.i
  %s = load i8, ptr %s.p
  %some.next = or i8 %some, %s
  %all.next = and i8 %all, %s
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, {LANES}
  br i1 %more, label %each, label %looked
looked:
  %all.split = icmp ne i8 %all.next, 0
  br i1 %all.split, label %by.bytes, label %mixed
mixed:
  %none.split = icmp eq i8 %some.next, 0
  br label %either
either:
  %unsplit = phi i1 [1, %granules], [%none.split, %mixed]
  %coarse = and i1 %unsplit, %whole
  br i1 %coarse, label %by.granules, label %no
by.granules:
  ret ptr %shadow
by.bytes:
  store <{LANES} x i64> %o, ptr %places, align 64
  %fine = getelementptr i64, ptr %shadow, i64 {FINE}
  ret ptr %fine
no:
  ret ptr null
}}
"""

# ``@lanes_fit``: the plane of an access with one history that is in order, or null; ``@lanes_record`` records it there.
_LANES = f"""
define internal i64 @lanes_unit(ptr %q, ptr %plane) alwaysinline {{
{load_fields("SHADOW", "COUNT")}
  %plane.i = ptrtoint ptr %plane to i64
  %coarse = icmp eq i64 %plane.i, %SHADOW
  %unit = select i1 %coarse, i64 1, i64 %COUNT
  ret i64 %unit
}}
define internal ptr @lanes_fit(ptr %q, ptr %places) noinline {{
entry:
{load_fields("WRITE", "KNOWN", "OWN", "EXEMPT", "TOGETHER")}
  %known = inttoptr i64 %KNOWN to ptr
  %is.write = icmp ne i64 %WRITE, 0
  %plane = call ptr @lanes_plane(ptr %q, ptr %places)
  %nowhere = icmp eq ptr %plane, null
  br i1 %nowhere, label %no, label %somewhere
somewhere:
  %unit = call i64 @lanes_unit(ptr %q, ptr %plane)
{load_words("%plane", PLANE_WORDS, ("WRITES", "LAYERS", "LAYER_COUNT", "FOREIGN"))}
  %writes = inttoptr i64 %WRITES to ptr
  %layers = inttoptr i64 %LAYERS to ptr
  %p = load i64, ptr %places
  %p.1.p = getelementptr i64, ptr %places, i64 1
  %p.1 = load i64, ptr %p.1.p
  %w.p = getelementptr i32, ptr %writes, i64 %p
  %w = load i32, ptr %w.p
  %w.1.p = getelementptr i32, ptr %writes, i64 %p.1
  %w.1 = load i32, ptr %w.1.p
  %by.lanes = icmp ne i32 %w, %w.1
  %step = zext i1 %by.lanes to i32
  br i1 %by.lanes, label %store, label %single
store:
  %store.past = call i1 @store_ordered(ptr %q, i32 %w)
  br i1 %store.past, label %written, label %no
single:
  %w.past = call i1 @ordered(i32 %w, ptr %q, ptr %known, i64 %OWN, i64 -1, i64 %EXEMPT, i1 0)
  br i1 %w.past, label %written, label %no
written:
  %w.alike = call i1 @alike(ptr %writes, ptr %places, i64 %unit, i32 %w, i32 %step)
  br i1 %w.alike, label %readers, label %no
readers:
  br i1 %is.write, label %writing, label %reading
writing:
  %no.foreign = icmp eq i64 %FOREIGN, 0
  br i1 %no.foreign, label %layer, label %no
layer:
  %n = phi i64 [0, %writing], [%n.next, %r.good]
  %n.more = icmp ult i64 %n, %LAYER_COUNT
  br i1 %n.more, label %reader, label %yes
reader:
  %reads.p = getelementptr ptr, ptr %layers, i64 %n
  %reads = load ptr, ptr %reads.p
  %r.p = getelementptr i32, ptr %reads, i64 %p
  %r = load i32, ptr %r.p
  %r.past = call i1 @ordered(i32 %r, ptr %q, ptr %known, i64 %OWN, i64 -1, i64 %EXEMPT, i1 0)
  br i1 %r.past, label %r.look, label %no
r.look:
  %r.alike = call i1 @alike(ptr %reads, ptr %places, i64 %unit, i32 %r, i32 0)
  br i1 %r.alike, label %r.good, label %no
r.good:
  %n.next = add i64 %n, 1
  br label %layer
reading:
  %no.layer = icmp eq i64 %LAYER_COUNT, 0
  br i1 %no.layer, label %no, label %replaced
replaced:
  ; one reader, which this one replaces; a reader of an earlier cluster would have to be kept
  %first = call i64 @layer(ptr %q, ptr %plane, i64 %p)
  %top = load ptr, ptr %layers
  %t.p = getelementptr i32, ptr %top, i64 %p
  %t = load i32, ptr %t.p
  %t.earlier = call i1 @of_earlier_cluster(ptr %q, i32 %t)
  %t.here = icmp eq i64 %first, 0
  %t.ours = xor i1 %t.earlier, 1
  %t.good = and i1 %t.here, %t.ours
  br i1 %t.good, label %t.look, label %no
t.look:
  %t.alike = call i1 @alike(ptr %top, ptr %places, i64 %unit, i32 %t, i32 0)
  br i1 %t.alike, label %yes, label %no
yes:
  %together = add i64 %TOGETHER, 1
{store_fields(TOGETHER="%together")}
  ret ptr %plane
no:
  ret ptr null
}}
define internal void @lanes_record(ptr %q, ptr %plane, ptr %places, i32 %id) noinline {{
entry:
{load_fields("WRITE")}
{load_words("%plane", PLANE_WORDS, ("WRITES", "LAYERS", "LAYER_COUNT"))}
  %unit = call i64 @lanes_unit(ptr %q, ptr %plane)
  %writes = inttoptr i64 %WRITES to ptr
  %layers = inttoptr i64 %LAYERS to ptr
  %is.write = icmp ne i64 %WRITE, 0
  br i1 %is.write, label %write, label %read
write:
  call void @put(ptr %writes, ptr %places, i64 %unit, i32 %id, i32 1)
  %p = load i64, ptr %places
  br label %layer
layer:
  %n = phi i64 [0, %write], [%n.next, %cleared]
  %n.more = icmp ult i64 %n, %LAYER_COUNT
  br i1 %n.more, label %reader, label %done
reader:
  %reads.p = getelementptr ptr, ptr %layers, i64 %n
  %reads = load ptr, ptr %reads.p
  %r.p = getelementptr i32, ptr %reads, i64 %p
  %r = load i32, ptr %r.p
  %never = icmp eq i32 %r, 0  ; and the other places have the same
  br i1 %never, label %cleared, label %clear
clear:
  call void @put(ptr %reads, ptr %places, i64 %unit, i32 0, i32 0)
  br label %cleared
cleared:
  %n.next = add i64 %n, 1
  br label %layer
read:
  %top = load ptr, ptr %layers
  call void @put(ptr %top, ptr %places, i64 %unit, i32 %id, i32 0)
  br label %done
done:
  ret void
}}
declare i64 @llvm.vector.reduce.umax.v{LANES}i64(<{LANES} x i64>)
declare i64 @llvm.vector.reduce.or.v{LANES}i64(<{LANES} x i64>)
"""


def lanes() -> str:
    """Functions that check and record an access of all lanes that have one history; expects `native_shadow_code.runs`.

    * ``ptr @lanes_fit(request, places)``: where the access is in order, or null; ``places`` are int64 [LANES], aligned.
    * ``void @lanes_record(request, plane, places, identity)``, with what ``@lanes_fit`` returned and filled.
    """
    units = "".join(map(_of_unit, _UNITS))
    return units + _by_unit("alike", "i1") + _by_unit("put", "void") + _STORE_ORDERED + _PLACES + _LANES
