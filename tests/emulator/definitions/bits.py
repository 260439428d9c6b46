"""Logic, shifts, fields, positions and permutations of bits; changes of width."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np

from tests.emulator.definitions.definition import KINDS, Definition, one_by_one

AMOUNTS = (0, 1, 5, 15, 16, 31, 32, 33, 40, 63, 64, 200)
ALL_WIDTHS = (8, 16, 32, 64)


def field(value: int, start: int, length: int, bits: int, is_signed: bool) -> int:
    """bfe: bits beyond the register repeat its sign (signed types: ``value`` is the signed value)."""
    start, length = start & 255, length & 255
    if length == 0:
        return 0
    found = (value >> min(start, bits + 64)) & ((1 << length) - 1)  # Python's >> repeats the sign
    sign = value < 0 if start + length > bits else bool(found >> (length - 1) & 1)
    return found | ~((1 << length) - 1) if is_signed and sign else found


def with_field(found: int, base: int, start: int, length: int, bits: int) -> int:
    """bfi on bit patterns."""
    start, length = start & 255, length & 255
    mask = (((1 << length) - 1) << start) & ((1 << bits) - 1)
    return base & ~mask | found << start & mask


def nth_set(mask: int, base: int, offset: int) -> int:
    """fns.b32: the position of the |offset|-th set bit from ``base`` on, upwards or (negative) downwards.

    With offset 0 it is ``base``, if that bit is set. 0xFFFFFFFF where there is none.
    """
    if not offset:
        return base if base < 32 and mask >> base & 1 else 0xFFFFFFFF
    positions = range(base, 32) if offset > 0 else range(min(base, 31), -1, -1)
    found = [position for position in positions if mask >> position & 1]
    return found[abs(offset) - 1] if abs(offset) <= len(found) else 0xFFFFFFFF


def permuted(a: int, b: int, selector: int) -> int:
    """prmt.b32 in its default mode: bit 3 of a selector nibble replicates the byte's sign."""
    source, out = b << 32 | a, 0
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = source >> (8 * (nibble & 7)) & 255
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << (8 * i)
    return out


def logic3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """lop3: bit (a<<2 | b<<1 | c) of ``table`` per bit position."""
    result = a & ~a
    for i in range(8):
        if table >> i & 1:
            x, y, z = (v if i >> k & 1 else ~v for v, k in ((a, 2), (b, 1), (c, 0)))
            result = result | (x & y & z)
    return result


def funnel(low: int, high: int, amount: int, direction: str, mode: str) -> int:
    n, both = amount & 31 if mode == "wrap" else min(amount, 32), high << 32 | low
    return both >> n if direction == "r" else both << n >> 32


def unlike_sign(x: int, bits: int) -> int:
    """The bits of a pattern that differ from its sign bit."""
    return x ^ -(x >> bits - 1) & (1 << bits) - 1


def ones(position: int, width: int) -> int:
    """bmsk.clamp."""
    return (1 << min(width, 32)) - 1 << min(position, 32)


def shifts() -> dict[str, Definition]:
    """By a register and by a literal: amounts beyond the width shift everything out."""
    found: dict[str, Definition] = {}
    for name, bits in itertools.product(("shl_b", "shr_b", "shr_u", "shr_s"), (16, 32, 64)):
        stored = f"s{bits}" if name == "shr_s" else f"u{bits}"

        def shifted(x: int, n: int, name: str = name, bits: int = bits) -> int:
            return x << min(n, bits) if name == "shl_b" else x >> min(n, bits)

        found[f"{name}{bits}"] = Definition(one_by_one(shifted, stored), (stored, "u32"), stored)
        for amount in AMOUNTS:
            by = one_by_one(functools.partial(shifted, n=amount), stored)
            found[f"{name}{bits}_by{amount}"] = Definition(by, (stored,), stored)
    for direction, mode in itertools.product("lr", ("wrap", "clamp")):
        function = one_by_one(functools.partial(funnel, direction=direction, mode=mode), "u32")
        found[f"shf_{direction}_{mode}"] = Definition(function, ("u32",) * 3, "u32")
    return found


def logic() -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for bits in (16, 32, 64):
        kind = f"u{bits}"
        for name, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
            found[f"{name}_b{bits}"] = Definition(function, (kind, kind), kind)
        found[f"not_b{bits}"] = Definition(np.invert, (kind,), kind)
    for table in range(256):
        found[f"lop3_{table:#04x}"] = Definition(functools.partial(logic3, table=table), ("u32",) * 3, "u32")
    return found


def fields() -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for bits in (32, 64):
        kind = f"u{bits}"
        for sign in "us":
            function = one_by_one(functools.partial(field, bits=bits, is_signed=sign == "s"), f"{sign}{bits}")
            found[f"bfe_{sign}{bits}"] = Definition(function, (f"{sign}{bits}", "u32", "u32"), f"{sign}{bits}")
        insert = one_by_one(functools.partial(with_field, bits=bits), kind)
        found[f"bfi_b{bits}"] = Definition(insert, (kind, kind, "u32", "u32"), kind)
        counts: dict[str, tuple[Callable[..., int], str]] = {
            "popc_b": (lambda x: bin(x).count("1"), "u32"),
            "clz_b": (lambda x, bits=bits: bits - x.bit_length(), "u32"),
            "brev_b": (lambda x, bits=bits: int(f"{x:0{bits}b}"[::-1], 2), kind),
            "bfind_u": (lambda x: x.bit_length() - 1, "u32"),
            "bfind_s": (lambda x, bits=bits: unlike_sign(x, bits).bit_length() - 1, "u32"),
        }
        for name, (count, output) in counts.items():
            found[f"{name}{bits}"] = Definition(one_by_one(count, output), (kind,), output)
    found["fns_b32"] = Definition(one_by_one(nth_set, "u32"), ("u32", "u32", "s32"), "u32")
    found["prmt_b32"] = Definition(one_by_one(permuted, "u32"), ("u32",) * 3, "u32")
    found["bmsk_clamp"] = Definition(one_by_one(ones, "u32"), ("u32",) * 2, "u32")
    wrapped = one_by_one(lambda position, width: ones(position & 31, width & 31), "u32")
    found["bmsk_wrap"] = Definition(wrapped, ("u32",) * 2, "u32")
    return found


def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    bits = 8 * low.dtype.itemsize
    wide = np.dtype(f"u{low.dtype.itemsize * 2}").type
    return low.astype(wide) | high.astype(wide) << wide(bits)


def extended(x: np.ndarray, source: str, kind: str) -> np.ndarray:
    """The low bits of a register read as ``source`` and extended by their sign."""
    return x.astype(KINDS[f"u{source[1:]}"]).view(KINDS[source]).astype(KINDS[f"{source[0]}{kind[1:]}"])


def saturated(x: int, source: str, target: str) -> int:
    """The low bits of a register read as ``source`` and limited to the range of ``target``."""
    width, bits = int(source[1:]), int(target[1:])
    value = x & (1 << width) - 1
    value -= (source[0] == "s" and value >> width - 1) << width
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if target[0] == "s" else (0, (1 << bits) - 1)
    return min(max(value, low), high)


def widths() -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    sources = [f"{sign}{bits}" for sign in "su" for bits in ALL_WIDTHS]
    for bits, wanted in itertools.product(ALL_WIDTHS, repeat=2):
        kind, target = f"u{bits}", f"u{wanted}"
        resized = functools.partial(np.ndarray.astype, dtype=KINDS[target])
        found[f"resize_{kind}_{target}"] = Definition(resized, (kind,), target)
        for source in sources:
            function = functools.partial(extended, source=source, kind=target)
            found[f"extend_{source}_{wanted}_{bits}"] = Definition(function, (kind,), target)
        for shift in range(0, bits, wanted) if wanted < bits else ():
            piece = one_by_one(lambda x, shift=shift: x >> shift, target)
            found[f"slice{bits}_{wanted}_{shift}"] = Definition(piece, (kind,), target)
    for source, target in itertools.product(sources, repeat=2):
        function = one_by_one(functools.partial(saturated, source=source, target=target), "u64")
        found[f"saturate_{source}_{target}"] = Definition(function, ("u64",), "u64")
    for bits in (8, 16, 32):
        found[f"pack2x{bits}"] = Definition(joined, (f"u{bits}",) * 2, f"u{2 * bits}")
    for kind in ("pred", *(f"u{bits}" for bits in ALL_WIDTHS)):
        choose = Definition(lambda yes, no, predicate: np.where(predicate, yes, no), (kind, kind, "pred"), kind)
        found[f"select_{kind}"] = choose
    found["join_nibbles"] = Definition(lambda low, high: low | high << np.uint8(4), ("u8", "u8"), "u8")
    found["map_address"] = Definition(lambda a, b: a & np.uint32(0xFFFFFF) | b << np.uint32(24), ("u32", "u32"), "u32")
    return found


def bits() -> dict[str, Definition]:
    """All of them, by the name that the core has."""
    return {**logic(), **shifts(), **fields(), **widths()}
