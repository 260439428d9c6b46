"""Forms of arithmetic that compilers and hand-written PTX use more rarely: against Python integers and rationals."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import GlobalMemoryRace, IllegalAccess, UnsupportedPTX
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.ieee import BF16, F16, F32, Format
from tests.emulator.instruction_cases import Case, check, signed
from tests.emulator.isa.instructions.test_instructions import directed, pairwise, propagating
from tests.emulator.ptx_launch import launch
from tests.nightly import examples

rows_of_operands = settings(max_examples=examples(3, 100))

# --- integers -------------------------------------------------------------------------------------------------------


def nth_set(mask: int, base: int, offset: int) -> int:
    """fns, by counting: the walk from ``base`` that the PTX ISA describes."""
    base, offset, count = base & 31, signed(offset, 32), 0
    if not offset:
        return base if mask >> base & 1 else -1
    while 0 <= base < 32:
        count += mask >> base & 1
        if count == abs(offset):
            return base
        base += 1 if offset > 0 else -1
    return -1


def bits_from(position: int, width: int, mode: str) -> int:
    """bmsk, bit by bit."""
    if mode == "wrap":
        position, width = position % 32, width % 32
    return sum(1 << bit for bit in range(32) if position <= bit < position + width)


def limited(x: int) -> int:
    """.sat of s32."""
    return min(max(x, -(2**31)), 2**31 - 1)


def integer_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}

    def add(text: str, out: int, sources: tuple[int, ...], expected: Callable[..., int], name: str = "") -> None:
        cases[name or text.split()[0]] = Case(text, out, sources, expected)

    for kind in "us":

        def value(x: int, bits: int = 16, kind: str = kind) -> int:
            return signed(x, bits) if kind == "s" else x

        halves = {
            "add": lambda a, b: a + b & 0xFFFF,
            "min": lambda a, b, v=value: min(a, b, key=v),
            "max": lambda a, b, v=value: max(a, b, key=v),
        }
        for name, expected in halves.items():
            add(f"{name}.{kind}16x2 {{d}}, {{0}}, {{1}};", 32, (32, 32), pairwise(expected))
        for bits in (16, 32, 64):
            sad = functools.partial(lambda v, n, a, b, c: c + abs(v(a, n) - v(b, n)), value, bits)
            add(f"sad.{kind}{bits} {{d}}, {{0}}, {{1}}, {{2}};", bits, (bits,) * 3, sad)
    for name, sign in (("add", 1), ("sub", -1)):
        within = functools.partial(lambda s, a, b: limited(signed(a, 32) + s * signed(b, 32)), sign)
        add(f"{name}.sat.s32 {{d}}, {{0}}, {{1}};", 32, (32, 32), within)
    add(
        "mad.hi.sat.s32 {d}, {0}, {1}, {2};", 32, (32,) * 3,
        lambda a, b, c: limited((signed(a, 32) * signed(b, 32) >> 32) + signed(c, 32)),
    )  # fmt: skip
    for name, choose in (("min", min), ("max", max)):

        def rectified(a: int, b: int, bits: int = 16, choose: Callable[..., int] = choose) -> int:
            return max(choose(signed(a, bits), signed(b, bits)), 0)

        add(f"{name}.relu.s16x2 {{d}}, {{0}}, {{1}};", 32, (32, 32), pairwise(rectified))
        add(f"{name}.relu.s32 {{d}}, {{0}}, {{1}};", 32, (32, 32), functools.partial(rectified, bits=32))
    small = "{{ .reg .b32 at, by; and.b32 at, {1}, 31; shl.b32 by, {2}, 26; shr.s32 by, by, 26; "
    add(
        small + "fns.b32 {d}, {0}, at, by; }}", 32, (32,) * 3,
        lambda m, b, n: nth_set(m, b, signed(n & 63, 6) & 0xFFFFFFFF), "fns",
    )  # fmt: skip
    add("fns.b32 {d}, {0}, 0, {1};", 32, (32, 32), lambda m, n: nth_set(m, 0, n), "fns of any offset")
    for reach in (64, 2**32):  # positions and widths near 32, and any
        operands = f"{{{{ .reg .b32 at, by; and.b32 at, {{0}}, {reach - 1}; and.b32 by, {{1}}, {reach - 1}; "
        for mode in ("clamp", "wrap"):
            add(
                f"{operands}bmsk.{mode}.b32 {{d}}, at, by; }}}}", 32, (32, 32),
                lambda a, b, r=reach - 1, m=mode: bits_from(a & r, b & r, m), f"bmsk.{mode} below {reach}",
            )  # fmt: skip
    for bits in (32, 64):
        mask = (1 << bits) - 1
        both = f"{{{{ .reg .b{bits} low; "
        for type_ in (f"u{bits}", f"s{bits}"):
            add(
                both + f"add.cc.{type_} low, {{0}}, {{1}}; addc.{type_} {{d}}, {{2}}, {{3}}; }}}}", bits, (bits,) * 4,
                lambda a, b, c, d, n=bits: c + d + (a + b >> n), f"addc.{type_}",
            )  # fmt: skip
            add(
                both + f"sub.cc.{type_} low, {{0}}, {{1}}; subc.{type_} {{d}}, {{2}}, {{3}}; }}}}", bits, (bits,) * 4,
                lambda a, b, c, d: c - d - (a < b), f"subc.{type_}",
            )  # fmt: skip
        for name, sign in (("add", 1), ("sub", -1)):  # the third limb of a long number
            text = f"{name}.cc.u{bits} low, {{0}}, {{1}}; {name}c.cc.u{bits} low, {{2}}, {{3}}; "
            add(
                f"{both}{text}{name}c.u{bits} {{d}}, 0, 0; }}}}", bits, (bits,) * 4,
                lambda a, b, c, d, n=bits, m=mask, s=sign: ((a + (c << n)) + s * (b + (d << n)) >> 2 * n) & m,
                f"{name}c.cc.u{bits}",
            )  # fmt: skip
    limbs = "{{ .reg .b32 a, b, c, d, q, r, s, t; mov.b64 {{a, b}}, {0}; mov.b64 {{c, d}}, {1}; "
    add(
        limbs + """mul.lo.u32 q, a, c; mul.hi.u32 r, a, c; mad.lo.cc.u32 r, b, c, r; madc.hi.u32 s, b, c, 0;
        mad.lo.cc.u32 r, a, d, r; madc.hi.cc.u32 s, a, d, s; addc.u32 t, 0, 0; mad.lo.cc.u32 s, b, d, s;
        madc.hi.u32 t, b, d, t; mov.b64 {d}, {{s, t}}; }}""",
        64, (64, 64), lambda x, y: x * y >> 64, "the upper half of a product of 128 bits",
    )  # fmt: skip
    return cases


INTEGER = integer_cases()


@pytest.mark.parametrize("name", INTEGER)
@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_integer(name: str, seed: int):
    check(INTEGER[name], seed)


def test_a_carry_is_that_of_a_thread():
    """Under a guard and behind a branch, and kept over other instructions."""
    body = f"""{THREAD_OUTPUT} setp.lt.u32 %p1, %r1, 7; mov.b32 %r2, 0xFFFFFFFF; mov.b32 %r3, 0; add.cc.u32 %r4, %r3, 0;
        @%p1 add.cc.u32 %r4, %r2, 1; @!%p1 bra MEET; mul.lo.u32 %r5, %r1, 3; MEET: addc.u32 %r9, %r1, 100;
        st.global.b32 [%d1], %r9; ret;"""
    out = np.zeros(32, np.uint32)
    launch(module(body, parameters=1), out, options=Options())
    assert out.tolist() == [n + 100 + (n < 7) for n in range(32)]


# --- floating point -------------------------------------------------------------------------------------------------


def signs_xored(fmt: Format, a: int, b: int, *, largest: bool, nan: bool) -> int:
    magnitudes = a & ~fmt.sign_bit, b & ~fmt.sign_bit
    order = propagating if nan else lambda fmt, a, b, largest: fmt.order(a, b, largest=largest)
    result = order(fmt, *magnitudes, largest=largest)
    return result if fmt.is_nan(result) else result | (a ^ b) & fmt.sign_bit


def float_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for type_, fmt in (("f32", F32), ("f16", F16), ("bf16", BF16)):
        n = fmt.bits
        for name, largest in (("min", False), ("max", True)):
            for nan in (False, True):
                expected = functools.partial(signs_xored, fmt, largest=largest, nan=nan)
                opcode = f"{name}{'.NaN' if nan else ''}.xorsign.abs.{type_}"
                cases[opcode] = Case(f"{opcode} {{d}}, {{0}}, {{1}};", n, (n, n), expected, "ff")
                if n == 16:
                    text = f"{opcode}x2 {{d}}, {{0}}, {{1}};"
                    cases[f"{opcode}x2"] = Case(text, 32, (32, 32), pairwise(expected), "pp")
        if n == 16:

            def rectified(*args: int, fmt: Format = fmt) -> int:
                result = fmt.fma(*args)
                return 0 if result & fmt.sign_bit and not fmt.is_nan(result) else result

            for pair in (False, True):
                opcode, width = f"fma.rn.relu.{type_}{'x2' if pair else ''}", n * (1 + pair)
                expected, kinds = (pairwise(rectified), "ppp") if pair else (rectified, "fff")
                cases[opcode] = Case(f"{opcode} {{d}}, {{0}}, {{1}}, {{2}};", width, (width,) * 3, expected, kinds)
    return cases | saturating_cases()


def saturating_cases() -> dict[str, Case]:
    """.sat of FP16 results: into [0, 1], NaN to +0 (PTX ISA); BF16 has none."""
    one = 15 << 10

    def saturated(result: int) -> int:
        return 0 if result & F16.sign_bit or F16.is_nan(result) else min(result, one)

    operations: dict[str, tuple[int, Callable[..., int]]] = {
        "add": (2, F16.add),
        "sub": (2, lambda a, b: F16.add(a, b ^ F16.sign_bit)),
        "mul": (2, F16.mul),
        "fma": (3, F16.fma),
    }
    cases: dict[str, Case] = {}
    for name, (count, operation) in operations.items():
        operands = ", ".join(f"{{{i}}}" for i in range(count))
        for suffix, width, kind, wrap in (("", 16, "f", lambda f: f), ("x2", 32, "p", pairwise)):
            opcode = f"{name}.rn.sat.f16{suffix}"
            expected = wrap(lambda *args, operation=operation: saturated(operation(*args)))
            cases[opcode] = Case(f"{opcode} {{d}}, {operands};", width, (width,) * count, expected, kind * count)
    return cases


FLOAT = float_cases()


@pytest.mark.parametrize("name", FLOAT)
@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_float(name: str, seed: int):
    check(FLOAT[name], seed)


def exact_sum(mode: str, a: int, b: int, c: int) -> int:
    """a * b + c rounded in a direction. The sign of a zero sum is that of both terms, or the direction's."""
    negative = F32.negative(a) != F32.negative(b), F32.negative(c)
    total = F32.value(a) * F32.value(b) + F32.value(c)
    return directed(total, mode, all(negative) or mode == "rm" and any(negative))


ONE = 127 << 23
DIRECTED: dict[str, tuple[int, Callable[..., int]]] = {
    "add": (2, lambda mode, a, b: exact_sum(mode, a, ONE, b)),
    "sub": (2, lambda mode, a, b: exact_sum(mode, a, ONE, b ^ F32.sign_bit)),
    "mul": (2, lambda mode, a, b: directed(F32.value(a) * F32.value(b), mode, F32.negative(a) != F32.negative(b))),
    "fma": (3, exact_sum),
}


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", DIRECTED)
@rows_of_operands
@given(seed=st.integers(0, 2**32))
def test_pairs_of_f32_in_a_direction(name: str, mode: str, seed: int):
    count, expected = DIRECTED[name]
    # Numbers from 2^-7 to 2: sums cancel and round, nothing is infinite.
    make = "and.b64 {{{0}}}, {{{0}}}, 0x83FFFFFF83FFFFFF; or.b64 {{{0}}}, {{{0}}}, 0x3C0000003C000000;"
    lines = " ".join(make.format(i) for i in range(count))
    operands = ", ".join(f"{{{i}}}" for i in range(count))

    def one(*patterns: int) -> int:
        return expected(mode, *(x & 0x83FFFFFF | 0x3C000000 for x in patterns))

    text = f"{lines} {name}.{mode}.f32x2 {{d}}, {operands};"
    check(Case(text, 64, (64,) * count, pairwise(one, 32)), seed)


@pytest.mark.parametrize(
    "text",
    ["fma.rz.sat.f64 %d3, %d3, %d3, %d3;", "mul.sat.bf16 %h1, %h1, %h1;",
     "add.relu.f16 %h1, %h1, %h1;", "min.xorsign.f32 %r1, %r1, %r1;",
     "neg.xorsign.abs.f32 %r1, %r1;", "min.xorsign.abs.f32 %r1, %r1, %r1, %r1;", "addc.u16 %h1, %h1, %h1;",
     "setp.lo.s32 %p1, %r1, %r1;", "setp.lt.b32 %p1, %r1, %r1;", "cvt.rzi.ftz.s32.f16 %r1, %h1;"],
)  # fmt: skip
def test_forms_that_do_not_exist_or_are_not_executed(text: str):
    with pytest.raises(UnsupportedPTX):
        launch(module(f"{text} ret;", parameters=0))


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_cache_policy_changes_no_result():
    body = f"""{THREAD_OUTPUT} createpolicy.fractional.L2::evict_last.b64 %d5, 1.0;
        createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %d6, 0.5;
        createpolicy.range.global.L2::evict_last.L2::evict_first.b64 %d7, [%d0], 128, 256;
        createpolicy.cvt.L2.b64 %d8, 3;
        ld.global.L2::cache_hint.b32 %r2, [%d1], %d5; add.u32 %r2, %r2, %r1;
        st.global.L2::cache_hint.b32 [%d1], %r2, %d6; ret;"""
    out = np.arange(32, dtype=np.uint32) * 5
    launch(module(body, parameters=1), out, options=Options())
    assert out.tolist() == [6 * n for n in range(32)]


#: Every thread exchanges 16 bytes, those with the value that they expect; %d3 = its 16 bytes in p0.
WIDE = f"""{THREAD_OUTPUT} .reg .b128 old, want, new; mul.wide.u32 %d3, %r1, 16; add.s64 %d3, %d0, %d3;
    cvt.u64.u32 %d4, %r1; mov.b64 %d5, 7; mov.b128 want, {{%d4, %d5}}; add.s64 %d6, %d4, 100; add.s64 %d7, %d4, 200;
    mov.b128 new, {{%d6, %d7}}; OPERATION mov.b128 {{%d8, %d9}}, old; st.global.v2.b64 [%d3+512], {{%d8, %d9}}; ret;"""


@pytest.mark.parametrize(
    ("operation", "exchanges"),
    [("atom.global.relaxed.gpu.cas.b128 old, [%d3], want, new;", lambda n: n % 3 == 0),
     ("atom.exch.b128 old, [%d3], new;", lambda n: True)],
)  # fmt: skip
def test_atomics_of_16_bytes(operation: str, exchanges: Callable[[int], bool]):
    """Of three threads one finds what it expects, one another low half, one another high half."""
    before = np.array([[n + (n % 3 == 1), 7 + (n % 3 == 2)] for n in range(32)], np.uint64)
    data = aligned(np.concatenate([before, np.zeros((32, 2), np.uint64)]))
    launch(module(WIDE.replace("OPERATION", operation), parameters=1), data, options=Options())
    after = [[n + 100, n + 200] if exchanges(n) else before[n].tolist() for n in range(32)]
    assert data[:32].tolist() == after and data[32:].tolist() == before.tolist()


def test_registers_of_128_bits_live_across_blocks():
    """They are written in one basic block and read in others, in a loop and under a guard, too."""
    body = f"""{THREAD_OUTPUT} .reg .b128 wide, other; mov.u32 %r2, 0; cvt.u64.u32 %d3, %r1; mov.b64 %d4, 5;
        mov.b128 wide, {{%d3, %d4}}; LOOP: setp.gt.u32 %p1, %r1, 7; @%p1 bra SKIP;
        mov.b128 {{%d5, %d6}}, wide; add.s64 %d5, %d5, %d6; @!%p1 mov.b128 other, {{%d5, %d6}};
        @!%p1 mov.b128 wide, other; SKIP: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 3; @%p2 bra LOOP;
        mov.b128 {{%d7, %d8}}, wide; cvt.u32.u64 %r3, %d7; st.global.b32 [%d1], %r3; ret;"""
    out = np.zeros(32, np.uint32)
    launch(module(body, parameters=1), out, options=Options())
    assert out.tolist() == [n + 15 if n < 8 else n for n in range(32)]


def test_atomics_of_16_bytes_in_shared_memory_and_their_faults():
    shared = f"""{THREAD_OUTPUT} .reg .b128 old, want, new; setp.ne.u32 %p1, %r1, 0; @%p1 bra END; mov.b64 %d4, 3;
        mov.b64 %d5, 4; st.shared.v2.b64 [dynamic+16], {{%d4, %d5}}; mov.b128 want, {{%d4, %d5}};
        mov.b128 new, {{%d5, %d4}}; atom.shared.cas.b128 old, [dynamic+16], want, new; mov.b128 {{%d6, %d7}}, old;
        ld.shared.v2.b64 {{%d8, %d9}}, [dynamic+16]; st.global.v4.b64 [%d0], {{%d6, %d7, %d8, %d9}}; END: ret;"""
    data = aligned(np.zeros(4, np.uint64))
    launch(module(shared, parameters=1), data)
    assert data.tolist() == [3, 4, 4, 3]
    exchange = WIDE.replace("OPERATION", "atom.exch.b128 old, [%d3+8], new;")
    with pytest.raises(IllegalAccess, match="misaligned atomic of 16 bytes"):
        launch(module(exchange, parameters=1), aligned(np.zeros((64, 2), np.uint64)))
    # A plain store by another CTA to what an atomic exchanges.
    store = "mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r2, 0; @%p1 st.global.b64 [%d3], %d4;"
    body = WIDE.replace("OPERATION", f"{store} atom.exch.b128 old, [%d3], new;")
    body = body.replace("st.global.v2.b64 [%d3+512], {%d8, %d9};", "")
    with pytest.raises(GlobalMemoryRace, match="belongs to another cluster"):
        launch(module(body, parameters=1), aligned(np.zeros((64, 2), np.uint64)), grid=(2, 1, 1))
