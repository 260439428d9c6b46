"""E4M3 matrix products in machine code: operands straight from shared memory, accumulators in tensor memory.

One pass reads the bytes of an operand and checks them; one pass multiplies, adds the accumulator and rounds to FP32, so
that no intermediate matrix goes through memory. `tensor_core` uses it only where every sum is exact in float64, so the
order of the additions is of no account and the results are those of `exact.dot`.

There are two ways to the sum of products. An E4M3 value is an integer times 2^-9. Where the largest magnitudes of both
operands leave every sum of 32 products below 2^31, the integers fit in 16 bits, and pairs of products are added in
32-bit integers (one instruction per 32 products with AVX-512). Else the values are multiplied and added in float64.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from cute_kernels.emulator.native import Library, has_feature
from cute_kernels.emulator.native_mma import INTEGERS, LARGEST_SHORT, MAX_SUM, execution
from cute_kernels.emulator.native_operands import LANES, K, scans

_ROWS = 4  # of B per pass over A in float64: 4 x 32 accumulators are half of AVX-512's registers
_SHORT_ROWS = 8  # the same for integers of 32 bits
_PAIR_WIDTHS = (("avx512bw", 16, "avx512.pmaddw.d.512"), ("avx2", 8, "avx2.pmadd.wd"), ("sse2", 4, "sse2.pmadd.wd"))
_FLOAT_LIMIT = 1 << 24  # integers from -2^24 to 2^24 - 1 are FP32 numbers
_UNIT = "0x3ED0000000000000"  # 2^-18 in LLVM's words


@dataclass
class _Operand:
    """One operand of the product: its parts as they were loaded, and what is decoded of them.

    Attributes:
        parts: (address of the data, address of the places, rows, first row) of each `load`.
        largest: code of the largest magnitude.
        wide: whether the float64 values are those of ``parts``.
    """

    parts: list[tuple[int, int, int, int]] = field(default_factory=list)
    largest: int = 0
    wide: bool = False


class E4m3Unit:
    """The compiled functions.

    Scratch memory is reused: one product at a time.

    Attributes:
        short: whether the host has instructions for products of 16-bit integers, which `execute` needs.
        execute_address: of the function that it calls, or None.
    """

    def __init__(self) -> None:
        lanes = 32 if has_feature("avx512f") else 8
        pairs = next(((n, name) for feature, n, name in _PAIR_WIDTHS if has_feature(feature)), None)
        self.short = pairs is not None
        text = _decode() + _multiply(lanes, has_feature("fma"))
        text += execution() + _multiply_short(*pairs) if pairs else scans()
        self._library = Library(text, level=2)
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        rows = ctypes.CFUNCTYPE(integer, pointer, pointer, pointer, integer, pointer)
        lane_rows = ctypes.CFUNCTYPE(integer, pointer, pointer, pointer, pointer)
        decode = ctypes.CFUNCTYPE(None, pointer, pointer, integer, pointer, pointer, integer, integer)
        multiply = ctypes.CFUNCTYPE(None, pointer, integer, pointer, pointer, integer)
        self._scan_rows = rows(self._library.address("scan_rows"))
        self._scan_lanes = lane_rows(self._library.address("scan_lanes"))
        self._decode = decode(self._library.address("decode"))
        self._multiply = multiply(self._library.address("multiply"))
        self._multiply_short = multiply(self._library.address("multiply_short")) if pairs else None
        self.execute_address = self._library.address("execute") if pairs else None
        self._execute = ctypes.CFUNCTYPE(ctypes.c_int32, pointer)(self.execute_address) if pairs else None
        codes = np.arange(256, dtype=np.uint8)
        self._values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        self._scratch = [np.empty((K, LANES)), np.empty((256, K)), np.empty((K // 2, LANES, 2), np.int16)]
        self._scratch.append(np.empty((256, K), np.int16))
        # Asking an array for its address costs as much as decoding thirty rows.
        self._table = self._values.ctypes.data
        self._a, self._b, self._short_a, self._short_b = (x.ctypes.data for x in self._scratch)
        self._operand_a, self._operand_b = _Operand(), _Operand()

    def load_a(self, data: int, states: int | None, places: int) -> bool:
        """Reads the 128 rows of A.

        The arrays must stay as they are until the product has been computed.

        Args:
            data: address of the shared memory of a CTA.
            states: address of its states, bytes that are 1 where it holds data; None not to check.
            places: address of int64 [128, 2], indices of the 16-byte chunks of each row
                (`matrix_operands.operand_places`).

        Returns:
            False when a byte is uninitialised or NaN.
        """
        self._operand_a = _Operand()
        largest = self._scan_lanes(data, states, places, self._short_a)
        return self._keep(self._operand_a, (data, places, LANES, 0), largest)

    def load_b(self, data: int, states: int | None, places: int, rows: int, first: int) -> bool:
        """Reads ``rows`` rows of B from ``first`` on (0 begins a new matrix); the rest as for `load_a`."""
        if not first:
            self._operand_b = _Operand()
        largest = self._scan_rows(data, states, places, rows, self._short_b + 2 * K * first)
        return self._keep(self._operand_b, (data, places, rows, first), largest)

    @staticmethod
    def _keep(operand: _Operand, part: tuple[int, int, int, int], largest: int) -> bool:
        if largest < 0:
            return False
        operand.parts.append(part)
        operand.largest = max(operand.largest, largest)
        return True

    def execute(self, job: int) -> bool:
        """Executes a whole MMA, given the address of what `native_mma.make_job` made of it.

        Returns:
            False, and nothing has happened, where `native_mma` says that Python has to do it.
        """
        return self._execute(job) != 0

    def multiply(self, n: int, cells: int, accumulate: bool) -> None:
        """``cells[:n] = round(b[:n] @ a (+ cells[:n]))``; cells: address of float32 [n, 128], contiguous."""
        a, b = self._operand_a, self._operand_b
        fits = max(a.largest, b.largest) <= LARGEST_SHORT and K * INTEGERS[a.largest] * INTEGERS[b.largest] <= MAX_SUM
        if self.short and fits:
            self._multiply_short(self._short_b, n, self._short_a, cells, int(accumulate))
            return
        for operand, out, row, column in ((a, self._a, 1, LANES), (b, self._b, K, 1)):
            if not operand.wide:
                for data, places, rows, first in operand.parts:
                    self._decode(data, places, rows, self._table, out + 8 * row * first, row, column)
                operand.wide = True
        self._multiply(self._b, n, self._a, cells, int(accumulate))


_WORTH_IT = 1000  # instructions of this process; LLVM and the compilation cost as much as they save in so many
_seen = 0


@functools.cache
def e4m3_unit() -> E4m3Unit:
    """The unit of this process, compiled on first use."""
    return E4m3Unit()


def unit_if_worth_it(native: bool | None) -> E4m3Unit | None:
    """The unit, or None: never if ``native`` is False, for the first instructions of a process if it is None."""
    global _seen
    if native is None:
        _seen += 1
        native = _seen > _WORTH_IT
    return e4m3_unit() if native else None


def _decode() -> str:
    """``void @decode(data, places, rows, values, out, row and column stride)``: float64 of what `_scan` passed."""
    elements = []
    for i in range(16):
        elements.append(f"""
  %c.{i} = extractelement <16 x i8> %bytes, i32 {i}
  %x.{i} = zext i8 %c.{i} to i64
  %v.p.{i} = getelementptr double, ptr %values, i64 %x.{i}
  %v.{i} = load double, ptr %v.p.{i}
  %o.i.{i} = mul i64 %column, {i}
  %o.{i} = getelementptr double, ptr %out.p, i64 %o.i.{i}
  store double %v.{i}, ptr %o.{i}""")
    return f"""
define void @decode(ptr %data, ptr %places, i64 %rows, ptr %values, ptr %out, i64 %row, i64 %column) {{
entry:
  %chunks = mul i64 %rows, 2
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i.next, %loop]
  %place.p = getelementptr i64, ptr %places, i64 %i
  %place = load i64, ptr %place.p
  %offset = mul i64 %place, 16
  %b.p = getelementptr i8, ptr %data, i64 %offset
  %bytes = load <16 x i8>, ptr %b.p, align 1
  %r = lshr i64 %i, 1
  %half = and i64 %i, 1
  %k = mul i64 %half, 16
  %row.o = mul i64 %r, %row
  %k.o = mul i64 %k, %column
  %start = add i64 %row.o, %k.o
  %out.p = getelementptr double, ptr %out, i64 %start
{"".join(elements)}
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %chunks
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""


def _cell(row: int, half: int, width: int, prefix: str) -> str:
    """The place of ``width`` accumulators of `_multiply_short`."""
    return f"  %{prefix}c.{row}.{half} = getelementptr float, ptr %d.row, i64 {row * LANES + half * width}"


def _multiply_short(width: int, intrinsic: str) -> str:
    """``void @multiply_short(b, n, a, cells, accumulate)`` on int16: ``_SHORT_ROWS`` rows of B by 2 x ``width`` of A.

    ``a`` is [pairs of elements, rows, 2], so that a pair of each of ``width`` rows is one register. Sums that FP32
    holds are added to the accumulator in FP32, which rounds once; where one of a block is larger, all in float64.
    """
    sums, shorts = f"<{width} x i32>", f"<{2 * width} x i16>"
    wide, floats = f"<{width} x double>", f"<{width} x float>"
    each = [(j, h) for j in range(_SHORT_ROWS) for h in range(2)]
    lines: list[str] = []
    for h in range(2):
        lines.append(f"  %a.p.{h} = getelementptr i32, ptr %a.pairs, i64 {h * width}")
        lines.append(f"  %a.{h} = load {shorts}, ptr %a.p.{h}, align 4")
    for j in range(_SHORT_ROWS):
        lines.append(f"  %b.q.{j} = getelementptr i32, ptr %b.pair, i64 {j * K // 2}")
        lines.append(f"  %b.{j} = load i32, ptr %b.q.{j}, align 4")
        lines.append(f"  %b.one.{j} = insertelement {sums} poison, i32 %b.{j}, i32 0")
        lines.append(
            f"  %b.all.{j} = shufflevector {sums} %b.one.{j}, {sums} poison, <{width} x i32> zeroinitializer"
        )
        lines.append(f"  %b.s.{j} = bitcast {sums} %b.all.{j} to {shorts}")
        for h in range(2):
            lines.append(f"  %d.{j}.{h} = call {sums} @llvm.x86.{intrinsic}({shorts} %a.{h}, {shorts} %b.s.{j})")
            lines.append(f"  %next.{j}.{h} = add {sums} %acc.{j}.{h}, %d.{j}.{h}")
    ranges = "".join(
        f"""
  %u.{j}.{h} = add {sums} %next.{j}.{h}, splat (i32 {_FLOAT_LIMIT})
  %any.{j}.{h} = or {sums} %u.{j}.{h}, {f"%any.{each[i - 1][0]}.{each[i - 1][1]}" if i else "zeroinitializer"}"""
        for i, (j, h) in enumerate(each)
    )
    stores_double = "".join(
        f"""
{_cell(j, h, width, "")}
  %w.{j}.{h} = sitofp {sums} %next.{j}.{h} to {wide}
  %x.{j}.{h} = fmul {wide} %w.{j}.{h}, splat (double {_UNIT})
  %old.f.{j}.{h} = load {floats}, ptr %c.{j}.{h}, align 4
  %old.{j}.{h} = fpext {floats} %old.f.{j}.{h} to {wide}
  %sum.{j}.{h} = fadd {wide} %x.{j}.{h}, %old.{j}.{h}
  %result.{j}.{h} = select i1 %add, {wide} %sum.{j}.{h}, {wide} %x.{j}.{h}
  %rounded.{j}.{h} = fptrunc {wide} %result.{j}.{h} to {floats}
  store {floats} %rounded.{j}.{h}, ptr %c.{j}.{h}, align 4"""
        for j, h in each
    )
    stores_float = "".join(
        f"""
{_cell(j, h, width, "f.")}
  %f.w.{j}.{h} = sitofp {sums} %next.{j}.{h} to {floats}
  %f.x.{j}.{h} = fmul {floats} %f.w.{j}.{h}, splat (float {_UNIT})
  %f.old.{j}.{h} = load {floats}, ptr %f.c.{j}.{h}, align 4
  %f.sum.{j}.{h} = fadd {floats} %f.x.{j}.{h}, %f.old.{j}.{h}
  %f.result.{j}.{h} = select i1 %add, {floats} %f.sum.{j}.{h}, {floats} %f.x.{j}.{h}
  store {floats} %f.result.{j}.{h}, ptr %f.c.{j}.{h}, align 4"""
        for j, h in each
    )
    phis = "\n".join(f"  %acc.{j}.{h} = phi {sums} [zeroinitializer, %rows], [%next.{j}.{h}, %depth]" for j, h in each)
    return f"""
declare {sums} @llvm.x86.{intrinsic}({shorts}, {shorts})
declare i32 @llvm.vector.reduce.or.v{width}i32({sums})
define void @multiply_short(ptr noalias %b, i64 %n, ptr noalias %a, ptr noalias %d, i64 %accumulate) {{
entry:
  %add = icmp ne i64 %accumulate, 0
  br label %columns
columns:
  %m = phi i64 [0, %entry], [%m.next, %columns.end]
  %a.column = getelementptr i32, ptr %a, i64 %m
  %d.column = getelementptr float, ptr %d, i64 %m
  br label %rows
rows:
  %j = phi i64 [0, %columns], [%j.next, %stored]
  %b.o = mul i64 %j, {K}
  %b.row = getelementptr i16, ptr %b, i64 %b.o
  br label %depth
depth:
  %k = phi i64 [0, %rows], [%k.next, %depth]
{phis}
  %a.o = mul i64 %k, {LANES}
  %a.pairs = getelementptr i32, ptr %a.column, i64 %a.o
  %b.pair = getelementptr i32, ptr %b.row, i64 %k
{chr(10).join(lines)}
  %k.next = add i64 %k, 1
  %deeper = icmp ult i64 %k.next, {K // 2}
  br i1 %deeper, label %depth, label %rows.end
rows.end:
  %d.o = mul i64 %j, {LANES}
  %d.row = getelementptr float, ptr %d.column, i64 %d.o
{ranges}
  %high = lshr {sums} %any.{_SHORT_ROWS - 1}.1, splat (i32 {(2 * _FLOAT_LIMIT).bit_length() - 1})
  %large = call i32 @llvm.vector.reduce.or.v{width}i32({sums} %high)
  %small = icmp eq i32 %large, 0
  br i1 %small, label %floats, label %doubles
floats:
{stores_float}
  br label %stored
doubles:
{stores_double}
  br label %stored
stored:
  %j.next = add i64 %j, {_SHORT_ROWS}
  %lower = icmp ult i64 %j.next, %n
  br i1 %lower, label %rows, label %columns.end
columns.end:
  %m.next = add i64 %m, {2 * width}
  %further = icmp ult i64 %m.next, {LANES}
  br i1 %further, label %columns, label %done
done:
  ret void
}}
"""


def _multiply(width: int, fused: bool) -> str:
    """``void @multiply(b, n, a, cells, accumulate)``: ``_ROWS`` rows of B by ``width`` rows of A at a time."""
    vector, floats = f"<{width} x double>", f"<{width} x float>"
    lines: list[str] = []
    for i in range(_ROWS):
        lines.append(f"  %b.p.{i} = getelementptr double, ptr %b.row, i64 {i * K}")
        lines.append(f"  %b.q.{i} = getelementptr double, ptr %b.p.{i}, i64 %k")
        lines.append(f"  %b.{i} = load double, ptr %b.q.{i}")
        lines.append(f"  %b.one.{i} = insertelement {vector} poison, double %b.{i}, i32 0")
        lines.append(
            f"  %b.all.{i} = shufflevector {vector} %b.one.{i}, {vector} poison, <{width} x i32> zeroinitializer"
        )
        if fused:
            operands = f"{vector} %a.v, {vector} %b.all.{i}, {vector} %acc.{i}"
            lines.append(f"  %next.{i} = call {vector} @llvm.fma.v{width}f64({operands})")
        else:  # every product and every sum is exact, so fusing them changes nothing
            lines.append(f"  %product.{i} = fmul {vector} %a.v, %b.all.{i}")
            lines.append(f"  %next.{i} = fadd {vector} %product.{i}, %acc.{i}")
    stores: list[str] = []
    for i in range(_ROWS):
        stores.append(f"""
  %d.p.{i} = getelementptr float, ptr %d.row, i64 {i * LANES}
  %old.f.{i} = load {floats}, ptr %d.p.{i}, align 4
  %old.{i} = fpext {floats} %old.f.{i} to {vector}
  %sum.{i} = fadd {vector} %next.{i}, %old.{i}
  %result.{i} = select i1 %add, {vector} %sum.{i}, {vector} %next.{i}
  %rounded.{i} = fptrunc {vector} %result.{i} to {floats}
  store {floats} %rounded.{i}, ptr %d.p.{i}, align 4""")
    phis = "\n".join(f"  %acc.{i} = phi {vector} [zeroinitializer, %rows], [%next.{i}, %depth]" for i in range(_ROWS))
    return f"""
declare {vector} @llvm.fma.v{width}f64({vector}, {vector}, {vector})
define void @multiply(ptr noalias %b, i64 %n, ptr noalias %a, ptr noalias %d, i64 %accumulate) {{
entry:
  %add = icmp ne i64 %accumulate, 0
  br label %columns
columns:
  %m = phi i64 [0, %entry], [%m.next, %columns.end]
  %a.column = getelementptr double, ptr %a, i64 %m
  %d.column = getelementptr float, ptr %d, i64 %m
  br label %rows
rows:
  %j = phi i64 [0, %columns], [%j.next, %rows.end]
  %b.o = mul i64 %j, {K}
  %b.row = getelementptr double, ptr %b, i64 %b.o
  br label %depth
depth:
  %k = phi i64 [0, %rows], [%k.next, %depth]
{phis}
  %a.o = mul i64 %k, {LANES}
  %a.p = getelementptr double, ptr %a.column, i64 %a.o
  %a.v = load {vector}, ptr %a.p, align 8
{chr(10).join(lines)}
  %k.next = add i64 %k, 1
  %deeper = icmp ult i64 %k.next, {K}
  br i1 %deeper, label %depth, label %rows.end
rows.end:
  %d.o = mul i64 %j, {LANES}
  %d.row = getelementptr float, ptr %d.column, i64 %d.o
{"".join(stores)}
  %j.next = add i64 %j, {_ROWS}
  %lower = icmp ult i64 %j.next, %n
  br i1 %lower, label %rows, label %columns.end
columns.end:
  %m.next = add i64 %m, {width}
  %further = icmp ult i64 %m.next, {LANES}
  br i1 %further, label %columns, label %done
done:
  ret void
}}
"""
