"""tcgen05.mma of E4M3 operands in machine code, whole: operands, the check that sums are exact, products, counts.

A job describes one MMA by addresses alone, so that executing it again asks nothing of Python. It is executed where
every byte of the operands is a number, the sums so far are exact (`tensor_core`), and products fit the integers of
`native_matrix`; else nothing happens and Python executes the MMA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.native_operands import LANES, K, scans

MAX_SUM = (1 << 31) - 1
INTEGERS = [(c & 7 | 8) << (c >> 3) - 1 if c >> 3 else c for c in range(128)]  # magnitude code -> value * 2^9
LARGEST_SHORT = max(code for code, value in enumerate(INTEGERS) if value < 1 << 15)
"""Magnitude code of the largest value that the operands' 16-bit integers hold: 0x67, which is 60."""
#: MMAs that an accumulator may be the sum of: each adds less than 2^23 to it on a grid of 2^-18.
SUMS_LIMIT = 1 << 11
_CTAS, _N, _COLUMNS, _ACCUMULATE, _PARTS = 0, 8, 16, 24, 32  # offsets in a job
_PART = 56
_DATA, _STATES, _A, _B, _CELLS, _SUMS, _ALLOCATED = range(0, _PART, 8)  # in its part of a CTA
_MOST_COLUMNS = 256


@dataclass(frozen=True)
class Part:
    """One CTA's part of an MMA, as addresses.

    Attributes:
        data, states: of its shared memory and of the states of its bytes, None not to check them.
        a, b: of int64 [rows, 2], where the rows of its operands are (`matrix_operands.operand_places`).
        cells: of the accumulator, float32 [n, 128].
        sums: of int32 [n], how many E4M3 MMAs each column is the sum of.
        allocated: of a byte per column, 1 where it is allocated.
    """

    data: int
    states: int | None
    a: int
    b: int
    cells: int
    sums: int
    allocated: int


def make_job(parts: Sequence[Part], n: int, accumulate: bool) -> np.ndarray:
    """The job of an MMA with 128 rows of A and n / len(parts) rows of B per CTA; int64.

    Args:
        parts: of one CTA or of the two of a pair.
        n: columns of the accumulator, a multiple of 8.
        accumulate: whether it is added to.
    """
    words = [len(parts), n, n // len(parts), int(accumulate)]
    for part in parts:
        words += [part.data, part.states or 0, part.a, part.b, part.cells, part.sums, part.allocated]
    return np.array(words, np.int64)


def _field(name: str, base: str, offset: int, type_: str) -> str:
    return f"""
  %{name}.p = getelementptr i8, ptr {base}, i64 {offset}
  %{name} = load {type_}, ptr %{name}.p"""


def _counts() -> str:
    """``i32 @next_count(sums, allocated, n, accumulate)``: what the columns' counts become, or 0: not exact."""
    return f"""
declare i32 @llvm.smax.i32(i32, i32)
define internal i32 @next_count(ptr %sums, ptr %allocated, i64 %n, i1 %add) {{
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i.next, %counted]
  %most = phi i32 [0, %entry], [%most.next, %counted]
  %f.p = getelementptr i8, ptr %allocated, i64 %i
  %f = load <8 x i8>, ptr %f.p, align 1
  %free = icmp eq <8 x i8> %f, zeroinitializer
  %free.b = bitcast <8 x i1> %free to i8
  %s.p = getelementptr i32, ptr %sums, i64 %i
  %s = load <8 x i32>, ptr %s.p, align 4
  %none = icmp sle <8 x i32> %s, zeroinitializer
  %none.b = bitcast <8 x i1> %none to i8
  %needed = select i1 %add, i8 %none.b, i8 0
  %bad = or i8 %free.b, %needed
  %fine = icmp eq i8 %bad, 0
  br i1 %fine, label %counted, label %no
counted:
  %top = call i32 @llvm.vector.reduce.smax.v8i32(<8 x i32> %s)
  %most.next = call i32 @llvm.smax.i32(i32 %most, i32 %top)
  %i.next = add i64 %i, 8
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %loop, label %done
done:
  %earlier = select i1 %add, i32 %most.next, i32 0
  %exact = icmp slt i32 %earlier, {SUMS_LIMIT}
  %next = add i32 %earlier, 1
  %result = select i1 %exact, i32 %next, i32 0
  ret i32 %result
no:
  ret i32 0
}}
declare i32 @llvm.vector.reduce.smax.v8i32(<8 x i32>)
define internal void @set_counts(ptr %sums, i64 %n, i32 %count) {{
entry:
  %one = insertelement <8 x i32> poison, i32 %count, i32 0
  %all = shufflevector <8 x i32> %one, <8 x i32> poison, <8 x i32> zeroinitializer
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i.next, %loop]
  %s.p = getelementptr i32, ptr %sums, i64 %i
  store <8 x i32> %all, ptr %s.p, align 4
  %i.next = add i64 %i, 8
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""


def execution() -> str:
    """``i32 @execute(job)``: 1 if the MMA was executed, 0 if Python has to do it; needs `_multiply_short` beside it."""
    tables = ", ".join(f"i64 {value}" for value in INTEGERS)
    return f"""
{scans()}{_counts()}
@integers = internal constant [128 x i64] [{tables}]
@shorts.a = internal global [{2 * K * LANES} x i16] zeroinitializer, align 64
@shorts.b = internal global [{K * _MOST_COLUMNS} x i16] zeroinitializer, align 64
define i32 @execute(ptr %job) {{
entry:{_field("ctas", "%job", _CTAS, "i64")}{_field("n", "%job", _N, "i64")}{_field("columns", "%job", _COLUMNS, "i64")}
{_field("accumulate", "%job", _ACCUMULATE, "i64")}
  %add = icmp ne i64 %accumulate, 0
  br label %check
check:
  %r = phi i64 [0, %entry], [%r.next, %loaded]
  %most.a = phi i64 [0, %entry], [%most.a.next, %loaded]
  %most.b = phi i64 [0, %entry], [%most.b.next, %loaded]
  %part.o = mul i64 %r, {_PART}
  %part.h = add i64 %part.o, {_PARTS}
  %part = getelementptr i8, ptr %job, i64 %part.h
{_field("sums", "%part", _SUMS, "ptr")}{_field("allocated", "%part", _ALLOCATED, "ptr")}
  %count = call i32 @next_count(ptr %sums, ptr %allocated, i64 %n, i1 %add)
  %exact = icmp ne i32 %count, 0
  br i1 %exact, label %operand.b, label %no
operand.b:{_field("data", "%part", _DATA, "ptr")}{_field("states", "%part", _STATES, "ptr")}
{_field("places.b", "%part", _B, "ptr")}
  %b.rows = mul i64 %r, %columns
  %b.o = mul i64 %b.rows, {2 * K}
  %b = getelementptr i8, ptr @shorts.b, i64 %b.o
  %top.b = call i64 @scan_rows(ptr %data, ptr %states, ptr %places.b, i64 %columns, ptr %b)
  %b.good = icmp sge i64 %top.b, 0
  br i1 %b.good, label %operand.a, label %no
operand.a:{_field("places.a", "%part", _A, "ptr")}
  %a.o = mul i64 %r, {2 * K * LANES}
  %a = getelementptr i8, ptr @shorts.a, i64 %a.o
  %top.a = call i64 @scan_lanes(ptr %data, ptr %states, ptr %places.a, ptr %a)
  %a.good = icmp sge i64 %top.a, 0
  br i1 %a.good, label %loaded, label %no
loaded:
  %a.more = icmp ugt i64 %top.a, %most.a
  %most.a.next = select i1 %a.more, i64 %top.a, i64 %most.a
  %b.more = icmp ugt i64 %top.b, %most.b
  %most.b.next = select i1 %b.more, i64 %top.b, i64 %most.b
  %r.next = add i64 %r, 1
  %more = icmp ult i64 %r.next, %ctas
  br i1 %more, label %check, label %size
size:
  %i.a.p = getelementptr i64, ptr @integers, i64 %most.a.next
  %i.a = load i64, ptr %i.a.p
  %i.b.p = getelementptr i64, ptr @integers, i64 %most.b.next
  %i.b = load i64, ptr %i.b.p
  %product = mul i64 %i.a, %i.b
  %sum = mul i64 %product, {K}
  %sum.fits = icmp ule i64 %sum, {MAX_SUM}
  %a.fits = icmp ule i64 %most.a.next, {LARGEST_SHORT}
  %b.fits = icmp ule i64 %most.b.next, {LARGEST_SHORT}
  %both.fit = and i1 %a.fits, %b.fits
  %fits = and i1 %sum.fits, %both.fit
  br i1 %fits, label %multiply, label %no
multiply:
  %q = phi i64 [0, %size], [%q.next, %multiply]
  %q.o = mul i64 %q, {_PART}
  %q.h = add i64 %q.o, {_PARTS}
  %q.part = getelementptr i8, ptr %job, i64 %q.h
{_field("cells", "%q.part", _CELLS, "ptr")}{_field("q.sums", "%q.part", _SUMS, "ptr")}
{_field("q.allocated", "%q.part", _ALLOCATED, "ptr")}
  %q.a.o = mul i64 %q, {2 * K * LANES}
  %q.a = getelementptr i8, ptr @shorts.a, i64 %q.a.o
  call void @multiply_short(ptr @shorts.b, i64 %n, ptr %q.a, ptr %cells, i64 %accumulate)
  %q.count = call i32 @next_count(ptr %q.sums, ptr %q.allocated, i64 %n, i1 %add)
  call void @set_counts(ptr %q.sums, i64 %n, i32 %q.count)
  %q.next = add i64 %q, 1
  %q.more = icmp ult i64 %q.next, %ctas
  br i1 %q.more, label %multiply, label %yes
yes:
  ret i32 1
no:
  ret i32 0
}}
"""


