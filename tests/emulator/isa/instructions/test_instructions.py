"""Every arithmetic opcode against Python integers and exact rationals; test_conversions.py has conversions."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulator.ieee import BF16, F16, F32, F64, Format
from tests.emulator.instruction_cases import GROUPS, M32, UNIFORM, Case, check, signed, text_of
from tests.emulator.ptx_launch import launch
from tests.nightly import examples

#: An example is a launch of more than 32 rows of operands, most of them at the ends of ranges.
rows_of_operands = settings(max_examples=examples(6, 200))

# --- integers -------------------------------------------------------------------------------------------------------


def truncated_div(a: int, b: int) -> int:
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


class Cases(dict[str, Case]):
    def add(self, text: str, out: int, sources: tuple[int, ...], expected: Callable[..., int], kinds: str = "") -> None:
        """Under the name of the instruction."""
        self[text.split()[0]] = Case(text, out, sources, expected, kinds)


def integer_cases() -> Cases:
    cases = Cases()
    _add_arithmetic_and_logic(cases)
    _add_predicates_and_shifts(cases)
    _add_bit_fields(cases)
    return cases


def _add_arithmetic_and_logic(cases: Cases) -> None:
    add = cases.add
    for bits in (16, 32, 64):
        for kind in "su":
            t = f"{kind}{bits}"

            def v(x: int, kind: str = kind, bits: int = bits) -> int:
                return signed(x, bits) if kind == "s" else x

            binary = {
                "add": lambda a, b: a + b,
                "sub": lambda a, b: a - b,
                "min": lambda a, b, v=v: min(a, b, key=v),
                "max": lambda a, b, v=v: max(a, b, key=v),
                "mul.lo": lambda a, b: a * b,
                "mul.hi": lambda a, b, v=v, bits=bits: v(a) * v(b) >> bits,
                "div": lambda a, b, v=v: truncated_div(v(a), v(b)),
                "rem": lambda a, b, v=v: v(a) - v(b) * truncated_div(v(a), v(b)) if b else -1,
            }
            for name, expected in binary.items():
                add(f"{name}.{t} {{d}}, {{0}}, {{1}};", bits, (bits, bits), expected)
            add(f"mad.lo.{t} {{d}}, {{0}}, {{1}}, {{2}};", bits, (bits,) * 3, lambda a, b, c: a * b + c)
            add(
                f"mad.hi.{t} {{d}}, {{0}}, {{1}}, {{2}};",
                bits,
                (bits,) * 3,
                lambda a, b, c, v=v, bits=bits: (v(a) * v(b) >> bits) + c,
            )
            if bits < 64:
                add(f"mul.wide.{t} {{d}}, {{0}}, {{1}};", 2 * bits, (bits, bits), lambda a, b, v=v: v(a) * v(b))
                add(
                    f"mad.wide.{t} {{d}}, {{0}}, {{1}}, {{2}};",
                    2 * bits,
                    (bits, bits, 2 * bits),
                    lambda a, b, c, v=v: v(a) * v(b) + c,
                )
            add(
                f"shr.{t} {{d}}, {{0}}, {{1}};",
                bits,
                (bits, 32),
                lambda a, n, v=v, bits=bits: v(a) >> min(n, bits),
                "is",
            )
            for relation, python in (("lt", int.__lt__), ("le", int.__le__), ("gt", int.__gt__), ("ge", int.__ge__)):
                add(
                    f"setp.{relation}.{t} {{d}}, {{0}}, {{1}};",
                    1,
                    (bits, bits),
                    lambda a, b, v=v, python=python: python(v(a), v(b)),
                )
        add(f"neg.s{bits} {{d}}, {{0}};", bits, (bits,), lambda a: -a)
        add(f"abs.s{bits} {{d}}, {{0}};", bits, (bits,), lambda a, bits=bits: abs(signed(a, bits)))
        add(f"not.b{bits} {{d}}, {{0}};", bits, (bits,), lambda a: ~a)
        add(f"and.b{bits} {{d}}, {{0}}, {{1}};", bits, (bits, bits), lambda a, b: a & b)
        add(f"or.b{bits} {{d}}, {{0}}, {{1}};", bits, (bits, bits), lambda a, b: a | b)
        add(f"xor.b{bits} {{d}}, {{0}}, {{1}};", bits, (bits, bits), lambda a, b: a ^ b)
        add(f"shl.b{bits} {{d}}, {{0}}, {{1}};", bits, (bits, 32), lambda a, n: a << min(n, 64), "is")
        add(f"setp.eq.b{bits} {{d}}, {{0}}, {{1}};", 1, (bits, bits), lambda a, b: a == b)
        add(f"setp.ne.b{bits} {{d}}, {{0}}, {{1}};", 1, (bits, bits), lambda a, b: a != b)
        add(f"setp.hi.u{bits} {{d}}, {{0}}, {{1}};", 1, (bits, bits), lambda a, b: a > b)
        add(f"setp.ls.u{bits} {{d}}, {{0}}, {{1}};", 1, (bits, bits), lambda a, b: a <= b)
        add(f"selp.b{bits} {{d}}, {{0}}, {{1}}, {{2}};", bits, (bits, bits, 1), lambda a, b, p: a if p else b)


def _add_predicates_and_shifts(cases: Cases) -> None:
    add = cases.add
    for name, python in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)):
        add(f"{name}.pred {{d}}, {{0}}, {{1}};", 1, (1, 1), python)
        cases[f"setp.lt.{name}"] = Case(
            f"setp.lt.{name}.s32 {{d}}, {{0}}, {{1}}, {{2}};",
            1,
            (32, 32, 1),
            lambda a, b, p, python=python: python(int(signed(a, 32) < signed(b, 32)), p),
        )
    add("not.pred {d}, {0};", 1, (1,), lambda a: 1 - a)
    for mode in ("wrap", "clamp"):

        def amount(n: int, mode: str = mode) -> int:
            return n & 31 if mode == "wrap" else min(n, 32)

        add(
            f"shf.l.{mode}.b32 {{d}}, {{0}}, {{1}}, {{2}};",
            32,
            (32, 32, 32),
            lambda a, b, n, amount=amount: (b << 32 | a) << amount(n) >> 32,
            "iis",
        )
        add(
            f"shf.r.{mode}.b32 {{d}}, {{0}}, {{1}}, {{2}};",
            32,
            (32, 32, 32),
            lambda a, b, n, amount=amount: (b << 32 | a) >> amount(n),
            "iis",
        )
    for amount in (0, 5, 31, 32, 40):
        cases[f"shl by {amount}"] = Case(f"shl.b32 {{d}}, {{0}}, {amount};", 32, (32,), lambda a, n=amount: a << n)
        cases[f"shr by {amount}"] = Case(
            f"shr.s32 {{d}}, {{0}}, {amount};", 32, (32,), lambda a, n=amount: signed(a, 32) >> n
        )


def _add_bit_fields(cases: Cases) -> None:
    add = cases.add
    for bits in (32, 64):
        add(f"popc.b{bits} {{d}}, {{0}};", 32, (bits,), lambda a: bin(a).count("1"))
        add(f"clz.b{bits} {{d}}, {{0}};", 32, (bits,), lambda a, bits=bits: len(f"{a:0{bits}b}".split("1")[0]))
        add(f"brev.b{bits} {{d}}, {{0}};", bits, (bits,), lambda a, bits=bits: int(f"{a:0{bits}b}"[::-1], 2))
        add(f"bfind.u{bits} {{d}}, {{0}};", 32, (bits,), lambda a: a.bit_length() - 1)
        add(
            f"bfind.s{bits} {{d}}, {{0}};",
            32,
            (bits,),
            lambda a, bits=bits: (a if signed(a, bits) >= 0 else ~a & ((1 << bits) - 1)).bit_length() - 1,
        )
        for kind in "us":
            add(
                f"bfe.{kind}{bits} {{d}}, {{0}}, {{1}}, {{2}};",
                bits,
                (bits, 32, 32),
                functools.partial(bfe, bits=bits, is_signed=kind == "s"),
                "iss",
            )
        add(
            f"bfi.b{bits} {{d}}, {{0}}, {{1}}, {{2}}, {{3}};",
            bits,
            (bits, bits, 32, 32),
            functools.partial(bfi, bits=bits),
            "iiss",
        )
    add("prmt.b32 {d}, {0}, {1}, {2};", 32, (32, 32, 32), prmt)
    for a, b in product("us", repeat=2):
        text = f"{a}32.{b}32 {{d}}, {{0}}, {{1}}, {{2}};"
        add(f"dp4a.{text}", 32, (32,) * 3, functools.partial(dot, pieces="b" * 4, first=0, signs=a + b))
        for first, half in ((0, "lo"), (2, "hi")):
            add(f"dp2a.{half}.{text}", 32, (32,) * 3, functools.partial(dot, pieces="hh", first=first, signs=a + b))
    for table in (0x80, 0xFE, 0x96, 0xEA, 0x1B, 0xC6):
        text = f"lop3.b32 {{d}}, {{0}}, {{1}}, {{2}}, {table};"
        cases[f"lop3 {table:#x}"] = Case(text, 32, (32,) * 3, functools.partial(lop3, table=table))


def bfe(a: int, start: int, length: int, *, bits: int, is_signed: bool) -> int:
    """The PTX ISA's pseudocode, bit by bit."""
    pos, count, msb = start & 0xFF, length & 0xFF, bits - 1
    if not is_signed or count == 0:
        sign = 0
    else:
        sign = a >> min(pos + count - 1, msb) & 1
    out = 0
    for i in range(msb + 1):
        out |= ((a >> (pos + i) & 1) if i < count and pos + i <= msb else sign) << i
    return out


def bfi(a: int, b: int, start: int, length: int, *, bits: int) -> int:
    pos, count = start & 0xFF, length & 0xFF
    out = b
    for i in range(count):
        if pos + i < bits and i < bits:
            out = out & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
    return out


def prmt(a: int, b: int, c: int) -> int:
    source = struct.pack("<II", a, b)
    out = []
    for i in range(4):
        selector = c >> 4 * i & 0xF
        byte = source[selector & 7]
        out.append((0xFF if byte & 0x80 else 0) if selector & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def dot(a: int, b: int, c: int, *, pieces: str, first: int, signs: str) -> int:
    """Pieces of a by bytes of b from ``first`` on: `struct` formats, in capitals where they are unsigned."""
    formats = [text.upper() if sign == "u" else text for text, sign in ((pieces, signs[0]), ("bbbb", signs[1]))]
    x, y = (struct.unpack(f"<{text}", struct.pack("<I", value)) for text, value in zip(formats, (a, b)))
    return c + sum(p * q for p, q in zip(x, y[first:]))


def lop3(a: int, b: int, c: int, *, table: int) -> int:
    out = 0
    for i in range(32):
        index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)
        out |= (table >> index & 1) << i
    return out


INTEGER = integer_cases()


@pytest.mark.parametrize("name", INTEGER)
@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_integer(name: str, seed: int):
    check(INTEGER[name], seed)


# --- floating point -------------------------------------------------------------------------------------------------


def pairwise(operation: Callable[..., int], bits: int = 16) -> Callable[..., int]:
    """A function of elements applied to both halves."""
    mask = (1 << bits) - 1

    def both(*args: int) -> int:
        return operation(*(a & mask for a in args)) | operation(*(a >> bits for a in args)) << bits

    return both


def relations(fmt: Format, name: str) -> Callable[[int, int], int]:
    def compare(a: int, b: int) -> int:
        if fmt.is_nan(a) or fmt.is_nan(b):
            return name == "nan" or (name.endswith("u") and name != "num")
        if name in ("num", "nan"):
            return name == "num"
        infinity = (float("inf"), float("-inf"))
        x, y = (infinity[fmt.negative(v)] if fmt.is_infinite(v) else fmt.value(v) for v in (a, b))
        return {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[name[:2]]

    return compare


def propagating(fmt: Format, a: int, b: int, *, largest: bool) -> int:
    return fmt.nan if fmt.is_nan(a) or fmt.is_nan(b) else fmt.order(a, b, largest=largest)


def ordered_three(a: int, b: int, c: int, *, largest: bool) -> int:
    return F32.order(F32.order(ftz(a), ftz(b), largest=largest), ftz(c), largest=largest)


def float_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}

    def add(text: str, out: int, sources: tuple[int, ...], expected: Callable[..., int], kinds: str) -> None:
        cases[text.split()[0]] = Case(text, out, sources, expected, kinds)

    for type_, fmt in (("f32", F32), ("f16", F16), ("bf16", BF16)):
        n = fmt.bits
        neg = functools.partial(lambda fmt, b: b ^ fmt.sign_bit, fmt)
        operations = {
            "add.rn": (2, fmt.add),
            "sub.rn": (2, lambda a, b, fmt=fmt, neg=neg: fmt.add(a, b if fmt.is_nan(b) else neg(b))),
            "mul.rn": (2, fmt.mul),
            "fma.rn": (3, fmt.fma),
            "min": (2, functools.partial(fmt.order, largest=False)),
            "max": (2, functools.partial(fmt.order, largest=True)),
            "min.NaN": (2, functools.partial(propagating, fmt, largest=False)),
            "max.NaN": (2, functools.partial(propagating, fmt, largest=True)),
            "neg": (1, lambda a, fmt=fmt, neg=neg: fmt.nan if fmt.is_nan(a) else neg(a)),
            "abs": (1, lambda a, fmt=fmt: fmt.nan if fmt.is_nan(a) else a & ~fmt.sign_bit),
        }
        for name, (count, expected) in operations.items():
            operands = ", ".join(f"{{{i}}}" for i in range(count))
            add(f"{name}.{type_} {{d}}, {operands};", n, (n,) * count, expected, "f" * count)
            if type_ != "f32" or name in ("add.rn", "mul.rn", "fma.rn"):
                both = pairwise(expected, n)
                add(f"{name}.{type_}x2 {{d}}, {operands};", 2 * n, (2 * n,) * count, both, "p" * count)
    for type_, fmt in (("f32", F32), ("f64", F64)):
        n, sign = fmt.bits, fmt.sign_bit
        add(f"copysign.{type_} {{d}}, {{0}}, {{1}};", n, (n, n), lambda a, b, s=sign: a & s | b & ~s, "ff")
    for narrow, fmt in (("f16", F16), ("bf16", BF16)):

        def widened(x: int, fmt: Format = fmt) -> int:
            if fmt.is_nan(x):
                return F32.nan
            sign = F32.sign_bit if fmt.negative(x) else 0
            return sign | F32.infinity if fmt.is_infinite(x) else F32.round(fmt.value(x), zero_negative=bool(sign))

        def fused(a: int, b: int, c: int, widened: Callable[[int], int] = widened) -> int:
            return F32.fma(widened(a), widened(b), c)

        def total(a: int, c: int, widened: Callable[[int], int] = widened) -> int:
            return F32.add(widened(a), c)

        add(f"fma.rn.f32.{narrow} {{d}}, {{0}}, {{1}}, {{2}};", 32, (16, 16, 32), fused, "fff")
        add(f"add.rn.f32.{narrow} {{d}}, {{0}}, {{1}};", 32, (16, 32), total, "ff")
    for largest in (False, True):
        three = functools.partial(ordered_three, largest=largest)
        add(f"{'max' if largest else 'min'}.ftz.f32 {{d}}, {{0}}, {{1}}, {{2}};", 32, (32,) * 3, three, "fff")
    add("div.rn.f32 {d}, {0}, {1};", 32, (32, 32), F32.div, "ff")
    add("rcp.rn.f32 {d}, {0};", 32, (32,), functools.partial(F32.div, F32.round(Fraction(1))), "f")
    add("sqrt.rn.f32 {d}, {0};", 32, (32,), F32.sqrt, "f")
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
        add(f"setp.{name}.f32 {{d}}, {{0}}, {{1}};", 1, (32, 32), relations(F32, name), "ff")
    add("setp.lt.bf16 {d}, {0}, {1};", 1, (16, 16), relations(BF16, "lt"), "ff")
    add("selp.f32 {d}, {0}, {1}, {2};", 32, (32, 32, 1), lambda a, b, p: a if p else b, "ffi")
    return cases


FLOAT = float_cases()


@pytest.mark.parametrize("name", FLOAT)
@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_float(name: str, seed: int):
    check(FLOAT[name], seed)


def ftz(x: int) -> int:
    return x & F32.sign_bit if x & ~F32.sign_bit < 1 << 23 else x


@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_flush_to_zero(seed: int):
    text = "fma.rn.ftz.f32 {d}, {0}, {1}, {2};"
    check(Case(text, 32, (32,) * 3, lambda a, b, c: ftz(F32.fma(ftz(a), ftz(b), ftz(c))), "fff"), seed)


@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_saturation(seed: int):
    def saturate(x: int) -> int:
        if F32.is_nan(x) or F32.negative(x):
            return 0
        return min(x, F32.round(Fraction(1)))

    check(Case("add.sat.f32 {d}, {0}, {1};", 32, (32, 32), lambda a, b: saturate(F32.add(a, b)), "ff"), seed)


@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_fma_of_f64_rounds_once(seed: int):
    """Finite operands of all exponents, sums that cancel, underflow and overflow."""
    rng = np.random.default_rng(seed)
    data = np.zeros((32 * GROUPS + UNIFORM, 4), np.uint64)
    bits = rng.integers(0, 1 << 63, data[:, :3].shape, dtype=np.uint64) & ~np.uint64(0x7FF << 52)
    edges, middle = rng.choice([0, 1, 2046], bits.shape), rng.integers(900, 1150, bits.shape)
    exponents = np.where(rng.random(bits.shape) < 0.3, edges, middle).astype(np.uint64)
    signs = rng.integers(0, 2, bits.shape).astype(np.uint64) << np.uint64(63)
    data[:, :3] = bits & ~(np.uint64(1) << np.uint64(63)) | exponents << np.uint64(52) | signs
    with np.errstate(all="ignore"):
        data[::3, 2] = (-(data[::3, 0].view(np.float64) * data[::3, 1].view(np.float64))).view(np.uint64)
    data[~np.isfinite(data[:, 2].view(np.float64)), 2] = 1
    rows = data[:, :3].tolist()
    launch(text_of(Case("fma.rn.f64 {d}, {0}, {1}, {2};", 64, (64,) * 3, lambda *_: 0, "")), data)
    for row, got in zip(rows, data[:, 3].tolist(), strict=True):
        assert got == F64.fma(*row), [hex(x) for x in row]


def directed(value: Fraction, mode: str, zero_negative: bool) -> int:
    """The FP32 next to an exact value in a direction."""
    inward = F32.round(value, zero_negative=zero_negative, toward_zero=True)
    away = mode == "rm" and value < 0 or mode == "rp" and value > 0
    return inward + 1 if away and F32.value(inward) != value else inward


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_directed_rounding(mode: str, seed: int):
    """Finite operands near each other, so that sums cancel, underflow and, with large exponents, overflow."""
    rng = np.random.default_rng(seed)
    count = 32 * GROUPS + UNIFORM
    exponents = rng.choice([0, 1, 40, 100, 126, 127, 128, 130, 250, 254], (count, 3))
    rows = (rng.integers(0, 1 << 23, (count, 3)) * rng.integers(0, 2, (count, 3)) | exponents << 23).astype(np.uint64)
    rows |= rng.integers(0, 2, (count, 3)).astype(np.uint64) << np.uint64(31)
    rows[::4, 1] = rows[::4, 0] ^ np.uint64(1 << 31)

    def expected(name: str, a: int, b: int, c: int) -> int:
        x, y, z = (F32.value(v) for v in (a, b, c))
        signs = [F32.negative(v) for v in (a, b, c)]
        negative = signs[0] != signs[1]
        if name == "mul":
            return directed(x * y, mode, negative)
        total, first, second = (x + y, *signs[:2]) if name == "add" else (x * y + z, negative, signs[2])
        return directed(total, mode, first and second or mode == "rm" and (first or second))

    for name, operands in (("add", "{0}, {1}"), ("mul", "{0}, {1}"), ("fma", "{0}, {1}, {2}")):
        case = Case(f"{name}.{mode}.f32 {{d}}, {operands};", 32, (32,) * 3, lambda *_: 0, "")
        data = np.zeros((count, 4), np.uint64)
        data[:, :3] = rows
        launch(text_of(case), data)
        for row, got in zip(rows.tolist(), data[:, 3].tolist(), strict=True):
            assert got & M32 == expected(name, *row), (name, [hex(x) for x in row], hex(got))


@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_conversion_saturates(seed: int):
    def saturate(x: int) -> int:
        return 0 if F32.is_nan(x) or F32.negative(x) else min(x, F32.round(Fraction(1)))

    check(Case("cvt.sat.f32.f32 {d}, {0};", 32, (32,), saturate, "f"), seed)


@given(exponent=st.integers(-126, 100), low=st.integers(0, 2**23 - 1), tie=st.sampled_from([-1, 0, 1]))
def test_fma_rounds_once_where_two_roundings_would_differ(exponent: int, low: int, tie: int):
    """a * b lies exactly half-way between two f32; c, far below f64's last bit, decides the direction."""
    a = F32.round((1 + Fraction(low | 1, 2**23)) * Fraction(2) ** min(exponent, 60))
    b = F32.round(Fraction(3, 2))
    c = F32.round(Fraction(tie) * Fraction(2) ** max(min(exponent, 60) - 70, -149))
    data = np.zeros((32 * GROUPS + UNIFORM, 4), np.uint64)
    data[:, :3] = (a, b, c)
    launch(text_of(FLOAT["fma.rn.f32"]), data)
    assert {int(x) & M32 for x in data[:, 3]} == {F32.fma(a, b, c)}
