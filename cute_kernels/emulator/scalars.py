"""Integer operations on single Python integers: what the scalar templates of `values.PureOp` call."""

from __future__ import annotations

from typing import Any


def int_div(a: int, b: int) -> int:
    """Quotient rounded towards zero; by zero all ones, as on an H200 (PTX leaves it open)."""
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def int_rem(a: int, b: int) -> int:
    """Remainder with the sign of the dividend; by zero all ones, as on an H200 (PTX leaves it open)."""
    return -1 if b == 0 else a - b * int_div(a, b)


def bfe_int(value: int, start: int, length: int, bits: int, is_signed: bool) -> int:
    """bfe on a Python integer (signed types: the signed value); returns the bit pattern."""
    mask = (1 << bits) - 1
    start, length = start & 255, length & 255
    if length == 0:
        return 0
    field = (value >> min(start, bits + 64)) & ((1 << length) - 1)  # Python's >> repeats the sign
    sign = value < 0 if start + length > bits else bool(field >> (length - 1) & 1)
    if is_signed and sign:
        field |= ~((1 << length) - 1)
    return field & mask


def bfi_int(field: int, base: int, start: int, length: int, bits: int) -> int:
    """bfi on bit patterns."""
    start, length = start & 255, length & 255
    mask = (((1 << length) - 1) << start) & ((1 << bits) - 1)
    return base & ~mask | field << start & mask


def fns_int(mask: int, base: int, offset: int) -> int:
    """fns.b32: the position of the |offset|-th set bit from ``base`` on, upwards or (negative) downwards.

    With offset 0 it is ``base``, if that bit is set. 0xFFFFFFFF where there is none.
    """
    if not offset:
        return base if base < 32 and mask >> base & 1 else 0xFFFFFFFF
    positions = range(base, 32) if offset > 0 else range(min(base, 31), -1, -1)
    found = [position for position in positions if mask >> position & 1]
    return found[abs(offset) - 1] if abs(offset) <= len(found) else 0xFFFFFFFF


def prmt_int(a: int, b: int, selector: int) -> int:
    """prmt.b32 in its default mode: bit 3 of a selector nibble replicates the byte's sign."""
    source = b << 32 | a
    out = 0
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = source >> (8 * (nibble & 7)) & 255
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << (8 * i)
    return out


def lop3_value(a: Any, b: Any, c: Any, table: int, ones: Any) -> Any:
    """lop3 on ints or arrays of one type, of which ``ones`` has all bits set."""
    result = a & ~a
    for i in range(8):
        if table >> i & 1:
            x, y, z = (v if i >> k & 1 else v ^ ones for v, k in ((a, 2), (b, 1), (c, 0)))
            result = result | (x & y & z)
    return result


def lop3_int(a: int, b: int, c: int, table: int) -> int:
    """lop3.b32 on bit patterns: bit (a<<2 | b<<1 | c) of ``table`` per bit position."""
    return lop3_value(a, b, c, table, 0xFFFFFFFF)


def dot_int(a: Any, b: Any, c: Any, bits: int, first: int, a_signed: bool, b_signed: bool) -> Any:
    """dp4a and dp2a on bit patterns, ints or int64 arrays: ``c`` plus products of pieces of ``a`` and bytes of ``b``.

    Args:
        bits: of a piece of ``a``.
        first: which byte of ``b`` goes with the lowest piece.
        a_signed, b_signed: the pieces are two's complement.
    """
    half_a, half_b = (1 << bits - 1) * a_signed, 128 * b_signed
    for i in range(32 // bits):
        x, y = a >> bits * i & (1 << bits) - 1, b >> 8 * (first + i) & 255
        c = c + ((x ^ half_a) - half_a) * ((y ^ half_b) - half_b)
    return c & 0xFFFFFFFF


def clz_int(x: int, bits: int) -> int:
    """Leading zeros of a bit pattern."""
    return bits - x.bit_length()


def brev_int(x: int, bits: int) -> int:
    """Bits in reverse order."""
    return int(f"{x:0{bits}b}"[::-1], 2)


def bfind_int(x: int) -> int:
    """Position of the highest set bit, 0xFFFFFFFF for 0."""
    return (x.bit_length() - 1) & 0xFFFFFFFF


#: Names that scalar templates use, in generated code and where constants are folded.
SCALAR_NAMES = {
    f.__name__: f
    for f in (int_div, int_rem, bfe_int, bfi_int, fns_int, prmt_int, dot_int, lop3_int, clz_int, brev_int, bfind_int)
}
