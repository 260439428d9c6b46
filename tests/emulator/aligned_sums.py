"""Dot products as tensor cores compute them, in integers: slow, and written from the rules, not from the core.

Operands and results are bit patterns. The rules are in the docstring of
`cute_kernels.emulator.machine.units.matrix.arithmetic`; their parameters are passed in, so that tests state them a
second time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Format -> bits of exponent and of fraction, and whether the highest exponent is for infinities and NaN (None: there
#: are none of them).
FORMATS = {
    "e2m3": (2, 3, None), "e3m2": (3, 2, None), "e2m1": (2, 1, None), "ue4m3": (4, 3, False),
    "e4m3": (4, 3, False), "e5m2": (5, 2, True), "f16": (5, 10, True), "bf16": (8, 7, True), "f32": (8, 23, True),
}  # fmt: skip
NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF}


@dataclass(frozen=True)
class Rules:
    """Parameters of one kind of instruction.

    Attributes:
        fraction: bits behind the point of aligned terms.
        cut: of the 23 bits behind the point of an FP32 result, those that are 0.
        together: bytes of K that are added at once.
        floor: of the largest exponent, where C is zero.
    """

    fraction: int
    cut: int
    together: int
    floor: int


class Number(NamedTuple):
    """``significand * 2**unit`` with its encoded exponent, or ``special``: ``"nan"``, ``"inf"``, ``"-inf"``."""

    significand: int = 0
    unit: int = 0
    exponent: int = 0
    special: str = ""


@functools.lru_cache(maxsize=1 << 16)
def decode(bits: int, form: str) -> Number:
    """A bit pattern's number; of TF32 the lower 13 bits do not count, of ue4m3 the highest one."""
    if form == "ue8m0":
        return Number(special="nan") if bits == 255 else Number(1, bits - 127, bits - 127)
    if form == "ue4m3":
        bits &= 127
    if form == "tf32":
        bits, form = bits & 0xFFFFE000, "f32"
    exponent_bits, fraction_bits, ieee = FORMATS[form]
    fraction, field = bits & ((1 << fraction_bits) - 1), bits >> fraction_bits & ((1 << exponent_bits) - 1)
    negative = bits >> (exponent_bits + fraction_bits) & 1
    if ieee is not None and field == (1 << exponent_bits) - 1 and (ieee or fraction == (1 << fraction_bits) - 1):
        return Number(special="nan" if fraction else "-inf" if negative else "inf")
    exponent = max(field, 1) - ((1 << exponent_bits - 1) - 1)
    significand = fraction | (bool(field) << fraction_bits)
    return Number(-significand if negative else significand, exponent - fraction_bits, exponent)


def product(x: Number, y: Number) -> Number:
    if not x.special and not y.special:
        return Number(x.significand * y.significand, x.unit + y.unit, x.exponent + y.exponent)
    zero = any(not z.special and z.significand == 0 for z in (x, y))
    if zero or "nan" in (x.special, y.special):
        return Number(special="nan")
    negative = sum(z.special == "-inf" or z.significand < 0 for z in (x, y)) % 2
    return Number(special="-inf" if negative else "inf")


def shifted(value: int, places: int) -> int:
    """``value * 2**places``, cut toward zero."""
    size = abs(value) << places if places >= 0 else abs(value) >> -places
    return -size if value < 0 else size


def encode(total: int, unit: int, form: str, cut: int) -> int:
    """``total * 2**unit`` in FP32, cut toward zero, or in FP16, rounded to nearest even."""
    exponent_bits, fraction_bits, _ = FORMATS[form]
    lowest, highest = 2 - (1 << exponent_bits - 1), (1 << exponent_bits - 1) - 1
    sign = (total < 0) << (exponent_bits + fraction_bits)
    size = abs(total)
    if not size:
        return 0
    kept = fraction_bits - cut
    last = max(size.bit_length() - 1 + unit, lowest) - kept  # exponent of the last digit that is kept
    digits, rest = divmod(size << max(unit - last, 0), 1 << max(last - unit, 0))
    if form == "f16":
        half = (1 << max(last - unit, 0)) / 2
        digits += rest > half or (rest == half and rest > 0 and digits % 2)
    if digits.bit_length() > kept + 1:
        digits, last = digits >> 1, last + 1
    if last + kept > highest:
        return sign | ((1 << exponent_bits) - 1) << fraction_bits
    field = last + kept - lowest + 1 if digits >> kept else 0
    return (sign | field << fraction_bits | (digits & ((1 << kept) - 1)) << cut) if digits else 0


def step(a: Sequence[Number], b: Sequence[Number], c: int, form: str, rules: Rules) -> int:
    """One step: C and D are bit patterns of ``form``."""
    terms = [product(x, y) for x, y in zip(a, b, strict=True)]
    return add(terms, [term.exponent for term in terms if term.significand], c, form, rules)


def add(terms: list[Number], exponents: list[int], c: int, form: str, rules: Rules) -> int:
    """Terms of these exponents, and C."""
    terms = [*terms, decode(c, form)]
    specials = {term.special for term in terms} - {""}
    if len(specials) > 1 or "nan" in specials:
        return NAN[form]
    if specials:
        return {"f32": (0x7F800000, 0xFF800000), "f16": (0x7C00, 0xFC00)}[form]["-inf" in specials]
    exponents = [*exponents, terms[-1].exponent if terms[-1].significand else rules.floor]
    unit = max(exponents) - rules.fraction
    return encode(sum(shifted(term.significand, term.unit - unit) for term in terms), unit, form, rules.cut)


def dot(a: Sequence[int], b: Sequence[int], c: int, types: tuple[str, str], form: str, rules: Rules) -> int:
    """One result of an instruction: bit patterns of a row of A, of a row of B, and of C."""
    x, y = ([decode(bits, name) for bits in row] for row, name in zip((a, b), types))
    nbytes = {"tf32": 4, "f16": 2, "bf16": 2}.get(types[0], 1)
    together = rules.together // nbytes
    for first in range(0, len(x), together):
        c = step(x[first : first + together], y[first : first + together], c, form, rules)
    return c


def scaled_dot(
    rows: tuple[Sequence[int], Sequence[int]], scales: tuple[Sequence[int], Sequence[int]], c: int,
    types: tuple[str, str, str], rules: Rules, group: int,
) -> int:
    """One result of an instruction with block scaling, FP32.

    Args:
        rows: bit patterns of a row of A and of one of B.
        scales: theirs, each for as many elements as there are for one.
        c: bit pattern of C.
        types: of A, B and scales.
        rules: how terms are added.
        group: products that are added exactly before that, to a term with the exponent of the scales; 1: none are.
    """
    x, y = ([decode(bits, name) for bits in row] for row, name in zip(rows, types))
    u, v = ([decode(bits, types[2]) for bits in row] for row in scales)
    size = len(x) // len(u)
    terms, exponents = [], []
    for first in range(0, len(x), group):
        scale = product(u[first // size], v[first // size])
        products = [product(x[i], y[i]) for i in range(first, first + group)]
        if group == 1:
            term = product(products[0], scale)
        elif scale.special:
            term = scale
        else:
            unit = min(each.unit for each in products)
            total = sum(each.significand << (each.unit - unit) for each in products)
            term = Number(total * scale.significand, unit + scale.unit, scale.exponent)
        terms.append(term)
        if any(each.significand for each in products) and scale.significand:
            exponents.append(term.exponent)
    return add(terms, exponents, c, "f32", rules)
