"""E4M3 matrix products in machine code: operands straight from shared memory, accumulators in tensor memory.

One pass reads the bytes of an operand, checks them and writes their values as float64; one pass multiplies, adds the
accumulator and rounds to FP32, so that no intermediate matrix goes through memory. `tensor_core` uses it only where
every sum is exact in float64, so the order of the additions is of no account and the results are those of `exact.dot`.
"""

from __future__ import annotations

import ctypes
import functools

import ml_dtypes
import numpy as np

from cute_kernels.emulator.native import Library, has_feature

K = 32  # elements of 8 bits per instruction
LANES = 128  # rows of A in one CTA, and lanes of tensor memory
_ROWS = 4  # of B per pass over A: 4 x 32 accumulators are half of AVX-512's registers
_NAN, _UNINITIALISED = 1, 2


class E4m3Unit:
    """The compiled functions.

    Scratch memory is reused: one product at a time.
    """

    def __init__(self) -> None:
        wide = has_feature("avx512f")
        self._library = Library(_decode() + _multiply(32 if wide else 8, has_feature("fma")), level=2)
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        decode = ctypes.CFUNCTYPE(integer, pointer, pointer, pointer, integer, pointer, pointer, integer, integer)
        multiply = ctypes.CFUNCTYPE(None, pointer, integer, pointer, pointer, integer)
        self._decode = decode(self._library.address("decode"))
        self._multiply = multiply(self._library.address("multiply"))
        codes = np.arange(256, dtype=np.uint8)
        self._values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        self.a = np.empty((K, LANES))  # transposed
        self.b = np.empty((256, K))
        # Asking an array for its address costs as much as decoding thirty rows.
        self._table, self._a, self._b = (x.ctypes.data for x in (self._values, self.a, self.b))

    def load_a(self, data: np.ndarray, states: np.ndarray | None, places: np.ndarray) -> bool:
        """Decodes 128 rows into ``a``.

        Args:
            data: uint8, shared memory of a CTA.
            states: uint8, 1 where it holds data; None not to check.
            places: int64 [128, 2], indices of the 16-byte chunks of each row (`tensor_core.operand_places`).

        Returns:
            False when a byte is uninitialised or NaN.
        """
        return self._load(data, states, places, self._a, 1, LANES)

    def load_b(self, data: np.ndarray, states: np.ndarray | None, places: np.ndarray, first: int) -> bool:
        """Decodes rows into ``b[first:]``; arguments and result as for `load_a`."""
        return self._load(data, states, places, self._b + 8 * K * first, K, 1)

    def _load(
        self,
        data: np.ndarray,
        states: np.ndarray | None,
        places: np.ndarray,
        out: int,
        row: int,
        column: int,
    ) -> bool:
        state = None if states is None else states.ctypes.data
        return not self._decode(
            data.ctypes.data, state, places.ctypes.data, len(places), self._table, out, row, column
        )

    def multiply(self, n: int, cells: np.ndarray, accumulate: bool) -> None:
        """``cells[:n] = round(b[:n] @ a (+ cells[:n]))``; cells: float32 [n, 128], contiguous."""
        self._multiply(self._b, n, self._a, cells.ctypes.data, int(accumulate))


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
    """``i64 @decode(data, states or null, places, rows, values, out, row and column stride)``: nonzero if refused."""
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
define i64 @decode(ptr %data, ptr %states, ptr %places, i64 %rows, ptr %values, ptr %out, i64 %row, i64 %column) {{
entry:
  %checked = icmp ne ptr %states, null
  %chunks = mul i64 %rows, 2
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i.next, %good]
  %place.p = getelementptr i64, ptr %places, i64 %i
  %place = load i64, ptr %place.p
  %offset = mul i64 %place, 16
  br i1 %checked, label %check, label %read
check:
  %s.p = getelementptr i8, ptr %states, i64 %offset
  %s = load <16 x i8>, ptr %s.p, align 1
  %s.bad = icmp ne <16 x i8> %s, splat (i8 1)
  %s.i = bitcast <16 x i1> %s.bad to i16
  %s.any = icmp ne i16 %s.i, 0
  br i1 %s.any, label %refused, label %read
refused:
  %code = phi i64 [{_UNINITIALISED}, %check], [{_NAN}, %read]
  ret i64 %code
read:
  %b.p = getelementptr i8, ptr %data, i64 %offset
  %bytes = load <16 x i8>, ptr %b.p, align 1
  %magnitude = and <16 x i8> %bytes, splat (i8 127)
  %nan = icmp eq <16 x i8> %magnitude, splat (i8 127)
  %nan.i = bitcast <16 x i1> %nan to i16
  %nan.any = icmp ne i16 %nan.i, 0
  br i1 %nan.any, label %refused, label %good
good:
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
  ret i64 0
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
