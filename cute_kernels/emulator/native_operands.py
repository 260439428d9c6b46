"""LLVM IR that reads E4M3 operands from shared memory as integers: values times 2^9, 16 bits each.

That means something where all magnitudes are below 2^15, which the largest magnitude's code tells. Both functions read
the 32 bytes of each row from two 16-byte chunks and give the code of the largest magnitude, or a negative number where
they refuse: `NAN`, `UNINITIALISED`. What they have written by then is of no account.
"""

from __future__ import annotations

K = 32  # elements of 8 bits per instruction
LANES = 128  # rows of A in one CTA, and lanes of tensor memory
NAN, UNINITIALISED = -1, -2
_GROUP = 16  # rows of A that are transposed together
_NAN_CODE = 127
_ROW = f"<{K} x i8>"
_SHORTS = f"<{K} x i16>"
_PAIRS = f"<{_GROUP} x i32>"


def scans() -> str:
    """Both functions.

    * ``i64 @scan_rows(data, states or null, places, rows, out)``: operand B, to int16 [rows, 32].
    * ``i64 @scan_lanes(data, states or null, places, out)``: the 128 rows of operand A, to int16 [16, 128, 2]: pairs of
      elements, so that those of neighbouring rows lie side by side.

    ``data`` and ``states``: bytes of a CTA's shared memory and their states, 1 where they hold data. ``places``: int64
    [rows, 2], indices of the chunks of each row.
    """
    return f"""
declare i8 @llvm.vector.reduce.umax.v{K}i8({_ROW})
declare {_ROW} @llvm.umax.v{K}i8({_ROW}, {_ROW})
declare {_SHORTS} @llvm.usub.sat.v{K}i16({_SHORTS}, {_SHORTS})
{_verdict()}{_scan_rows()}{_scan_lanes()}"""


def _verdict() -> str:
    """``i64 @verdict(largest magnitudes, states that are not 1)``."""
    return f"""
define internal i64 @verdict({_ROW} %most, {_ROW} %odd) {{
  %bad = icmp ne {_ROW} %odd, zeroinitializer
  %bits = bitcast <{K} x i1> %bad to i{K}
  %sound = icmp eq i{K} %bits, 0
  %top = call i8 @llvm.vector.reduce.umax.v{K}i8({_ROW} %most)
  %wide = zext i8 %top to i64
  %nan = icmp eq i8 %top, {_NAN_CODE}
  %number = select i1 %nan, i64 {NAN}, i64 %wide
  %result = select i1 %sound, i64 %number, i64 {UNINITIALISED}
  ret i64 %result
}}
"""


def _both(result: str, base: str, tag: str) -> str:
    """The 32 bytes of the row at ``%at.<tag>`` of the places, of the data or of their states."""
    chunk = "<16 x i8>"
    lanes = ", ".join(f"i32 {i}" for i in range(K))
    text = ""
    for half in range(2):
        text += f"""
  %{result}.p.{half}.{tag} = getelementptr i8, ptr {base}, i64 %offset.{half}.{tag}
  %{result}.{half}.{tag} = load {chunk}, ptr %{result}.p.{half}.{tag}, align 1"""
    joined = f"{chunk} %{result}.0.{tag}, {chunk} %{result}.1.{tag}"
    return f"{text}\n  %{result}.{tag} = shufflevector {joined}, <{K} x i32> <{lanes}>"


def _read(row: str, tag: str) -> str:
    """Where the chunks of a row are, and its bytes."""
    text = f"  %at.{tag} = mul i64 {row}, 2"
    for half in range(2):
        text += f"""
  %item.{half}.{tag} = add i64 %at.{tag}, {half}
  %place.p.{half}.{tag} = getelementptr i64, ptr %places, i64 %item.{half}.{tag}
  %place.{half}.{tag} = load i64, ptr %place.p.{half}.{tag}
  %offset.{half}.{tag} = mul i64 %place.{half}.{tag}, 16"""
    return text + _both("bytes", "%data", tag)


def _decode(tag: str) -> str:
    """``%magnitude.<tag>`` (codes) and ``%value.<tag>`` (int16) of ``%bytes.<tag>``."""
    return f"""
  %magnitude.{tag} = and {_ROW} %bytes.{tag}, splat (i8 127)
  %m.{tag} = zext {_ROW} %magnitude.{tag} to {_SHORTS}
  %e.{tag} = lshr {_SHORTS} %m.{tag}, splat (i16 3)
  %f.{tag} = and {_SHORTS} %m.{tag}, splat (i16 7)
  %subnormal.{tag} = icmp eq {_SHORTS} %e.{tag}, zeroinitializer
  %one.{tag} = select <{K} x i1> %subnormal.{tag}, {_SHORTS} zeroinitializer, {_SHORTS} splat (i16 8)
  %digits.{tag} = or {_SHORTS} %f.{tag}, %one.{tag}
  %shift.{tag} = call {_SHORTS} @llvm.usub.sat.v{K}i16({_SHORTS} %e.{tag}, {_SHORTS} splat (i16 1))
  %size.{tag} = shl {_SHORTS} %digits.{tag}, %shift.{tag}
  %minus.{tag} = sub {_SHORTS} zeroinitializer, %size.{tag}
  %negative.{tag} = icmp slt {_ROW} %bytes.{tag}, zeroinitializer
  %value.{tag} = select <{K} x i1> %negative.{tag}, {_SHORTS} %minus.{tag}, {_SHORTS} %size.{tag}"""


def _scan_rows() -> str:
    return f"""
define i64 @scan_rows(ptr %data, ptr %states, ptr %places, i64 %rows, ptr %out) {{
entry:
  %checked = icmp ne ptr %states, null
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i.next, %next]
  %most = phi {_ROW} [zeroinitializer, %entry], [%most.next, %next]
  %odd = phi {_ROW} [zeroinitializer, %entry], [%odd.next, %next]
{_read("%i", "r")}
{_decode("r")}
  %out.o = mul i64 %i, {K}
  %out.p = getelementptr i16, ptr %out, i64 %out.o
  store {_SHORTS} %value.r, ptr %out.p, align 2
  %most.next = call {_ROW} @llvm.umax.v{K}i8({_ROW} %most, {_ROW} %magnitude.r)
  br i1 %checked, label %check, label %next
check:
{_both("s", "%states", "r")}
  %differ = xor {_ROW} %s.r, splat (i8 1)
  %odd.more = or {_ROW} %odd, %differ
  br label %next
next:
  %odd.next = phi {_ROW} [%odd, %loop], [%odd.more, %check]
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %rows
  br i1 %more, label %loop, label %done
done:
  %result = call i64 @verdict({_ROW} %most.next, {_ROW} %odd.next)
  ret i64 %result
}}
"""


def _transpose(names: list[str]) -> tuple[str, list[str]]:
    """Instructions that transpose 16 vectors of 16 pairs: rounds of exchanges between rows ever closer together."""
    lines, distance = [], _GROUP // 2
    while distance:
        after = list(names)
        for i in range(_GROUP):
            if i & distance:
                continue
            a, b = names[i], names[i + distance]
            for number, (target, upper) in enumerate(((i, 0), (i + distance, distance))):
                picks = []
                for column in range(_GROUP):
                    own = (column & ~distance) | upper
                    picks.append(own if not column & distance else _GROUP + own)
                mask = ", ".join(f"i32 {pick}" for pick in picks)
                name = f"%t.{distance}.{i}.{number}"
                lines.append(f"  {name} = shufflevector {_PAIRS} {a}, {_PAIRS} {b}, <{_GROUP} x i32> <{mask}>")
                after[target] = name
        names = after
        distance //= 2
    return "\n".join(lines), names


def _scan_lanes() -> str:
    rows, checks = [], []
    largest, odd = "%most", "%odd"
    for i in range(_GROUP):
        rows.append(f"  %row.{i} = add i64 %first, {i}")
        rows.append(_read(f"%row.{i}", str(i)))
        rows.append(_decode(str(i)))
        rows.append(f"  %pairs.{i} = bitcast {_SHORTS} %value.{i} to {_PAIRS}")
        rows.append(f"  %most.{i} = call {_ROW} @llvm.umax.v{K}i8({_ROW} {largest}, {_ROW} %magnitude.{i})")
        largest = f"%most.{i}"
        checks.append(_both("s", "%states", str(i)))
        checks.append(f"  %differ.{i} = xor {_ROW} %s.{i}, splat (i8 1)")
        checks.append(f"  %odd.{i} = or {_ROW} {odd}, %differ.{i}")
        odd = f"%odd.{i}"
    moves, columns = _transpose([f"%pairs.{i}" for i in range(_GROUP)])
    stores = "".join(
        f"""
  %out.p.{k} = getelementptr i32, ptr %out.first, i64 {k * LANES}
  store {_PAIRS} {name}, ptr %out.p.{k}, align 4"""
        for k, name in enumerate(columns)
    )
    return f"""
define i64 @scan_lanes(ptr %data, ptr %states, ptr %places, ptr %out) {{
entry:
  %checked = icmp ne ptr %states, null
  br label %loop
loop:
  %first = phi i64 [0, %entry], [%first.next, %next]
  %most = phi {_ROW} [zeroinitializer, %entry], [{largest}, %next]
  %odd = phi {_ROW} [zeroinitializer, %entry], [%odd.next, %next]
  %out.first = getelementptr i32, ptr %out, i64 %first
{chr(10).join(rows)}
{moves}{stores}
  br i1 %checked, label %check, label %next
check:
{chr(10).join(checks)}
  br label %next
next:
  %odd.next = phi {_ROW} [%odd, %loop], [{odd}, %check]
  %first.next = add i64 %first, {_GROUP}
  %more = icmp ult i64 %first.next, {LANES}
  br i1 %more, label %loop, label %done
done:
  %result = call i64 @verdict({_ROW} {largest}, {_ROW} %odd.next)
  ret i64 %result
}}
"""
