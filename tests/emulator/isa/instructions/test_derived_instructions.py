"""Instructions that are made of others: against Python integers and floats; generic addresses in a cluster."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.instruction_cases import Case, check, check_constants, signed
from tests.emulator.ptx_launch import launch
from tests.nightly import examples

FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
RELATIONS: dict[str, Callable[..., bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMBINED = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
TRUE = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}


def number(x: int, type_: str) -> float:
    dtype = np.dtype(FLOATS[type_])
    return float(np.array([x], f"u{dtype.itemsize}").view(dtype).astype(np.float64)[0])


def holds(relation: str, type_: str, x: int, y: int) -> bool:
    """A comparison of bit patterns: plain relations of floats are false of NaN, those with u true."""
    if type_ not in FLOATS:
        x, y = (signed(v, int(type_[1:])) if type_[0] == "s" else v for v in (x, y))
        return RELATIONS[UNSIGNED.get(relation, relation)](x, y)
    a, b = number(x, type_), number(y, type_)
    unordered = a != a or b != b
    if relation in ("num", "nan"):
        return unordered == (relation == "nan")
    return relation not in RELATIONS if unordered else RELATIONS[relation[:2]](a, b)


def width(type_: str) -> int:
    return 32 if type_.endswith("x2") else int(type_.lstrip("bfsu"))


def set_cases() -> dict[str, Case]:
    cases = {}
    for result, type_, relations in (
        ("u32", "s32", ("lt", "ge")), ("s32", "u64", ("lo", "hs", "ne")), ("f32", "f32", ("le", "neu", "num")),
        ("u32", "f64", ("gtu", "nan")), ("f32", "b16", ("eq",)), ("u16", "f16", ("ltu", "ge")),
        ("s32", "bf16", ("gt", "equ")), ("f16", "s16", ("le",)), ("bf16", "bf16", ("ne", "leu")),
        ("f16", "f32", ("eq",)),
    ):  # fmt: skip
        true, kinds = TRUE.get(result, (1 << width(result)) - 1), ("f" if type_ in FLOATS else "i") * 2
        sources = (width(type_),) * 2
        for relation in relations:
            compare = functools.partial(holds, relation, type_)
            text = f"set.{relation}.{result}.{type_} {{d}}, {{0}}, {{1}};"
            cases[text] = Case(text, width(result), sources, lambda x, y, v=true, f=compare: v * f(x, y), kinds)
            for name, combine in COMBINED.items():
                text = f"set.{relation}.{name}.{result}.{type_} {{d}}, {{0}}, {{1}}, {{2}};"
                cases[text] = Case(
                    text, width(result), (*sources, 1),
                    lambda x, y, p, v=true, f=compare, c=combine: v * c(f(x, y), bool(p)), kinds + "i",
                )  # fmt: skip
    return cases


def pair_cases() -> dict[str, Case]:
    cases = {}
    for type_ in ("f16", "bf16"):
        for relation in ("eq", "ne", "lt", "geu", "num", "nan", "leu"):

            def both(x: int, y: int, c: int = 0, low: int = 1, high: int = 2, form: tuple = (relation, type_)) -> int:
                first, second = (holds(*form, x >> n & 0xFFFF, y >> n & 0xFFFF) ^ c for n in (0, 16))
                return first * low + second * high

            for result, true in (("u32", 0xFFFF), ("s32", 0xFFFF), (f"{type_}x2", TRUE[type_])):
                text = f"set.{relation}.{result}.{type_}x2 {{d}}, {{0}}, {{1}};"
                function = functools.partial(both, low=true, high=true << 16)
                cases[text] = Case(text, 32, (32, 32), function, "pp")
            bits = "selp.u32 {d}, 1, 0, p; @q add.u32 {d}, {d}, 2; }}"
            text = f"{{{{ .reg .pred p, q; setp.{relation}.{type_}x2 p|q, {{0}}, {{1}}; {bits}"
            cases[text] = Case(text, 32, (32, 32), both, "pp")
            text = f"{{{{ .reg .pred p, q; setp.{relation}.xor.{type_}x2 p|q, {{0}}, {{1}}, {{2}}; {bits}"
            cases[text] = Case(text, 32, (32, 32, 1), both, "ppi")
    return cases


def chosen(by: str, flushed: bool, a: int, b: int, c: int) -> int:
    if by == "s32":
        return a if signed(c, 32) >= 0 else b
    value = 0.0 if flushed and not c & 0x7F800000 else number(c, "f32")
    return a if value >= 0 else b


def of_24_bits(x: int, type_: str) -> int:
    return signed(x & 0xFFFFFF, 24) if type_ == "s32" else x & 0xFFFFFF


def product24(type_: str, shift: int, a: int, b: int, c: int = 0) -> int:
    return (of_24_bits(a, type_) * of_24_bits(b, type_) >> shift) + c


def extended(type_: str, mode: str, a: int, n: int) -> int:
    n = min(n, 32) if mode == "clamp" else n % 32
    low = a & (1 << n) - 1
    return signed(low, n) if n and type_ == "s32" else low


def has_property(name: str, type_: str, x: int) -> bool:
    value = number(x, type_)
    subnormal = 0 < abs(value) < float(np.finfo(FLOATS[type_]).tiny)
    return {
        "finite": np.isfinite(value), "infinite": np.isinf(value), "number": value == value,
        "notanumber": value != value, "normal": np.isfinite(value) and not subnormal, "subnormal": subnormal,
    }[name]  # fmt: skip


def shift_amount(type_: str, x: int) -> int:
    bits = int(type_[1:])
    if type_[0] == "s" and x >> bits - 1:
        x ^= (1 << bits) - 1
    return bits - x.bit_length() if x else -1


def saturated24(a: int, b: int, c: int) -> int:
    total = signed(product24("s32", 16, a, b) & 0xFFFFFFFF, 32) + signed(c, 32)
    return min(max(total, -(1 << 31)), (1 << 31) - 1)


def other_cases() -> dict[str, Case]:
    cases = {}

    def add(text: str, out: int, sources: tuple[int, ...], expected: Callable[..., int], kinds: str = "") -> None:
        cases[text] = Case(text, out, sources, expected, kinds)

    for bits in (16, 32, 64):
        add(f"cnot.b{bits} {{d}}, {{0}};", bits, (bits,), lambda a: not a)
        for by, flushed in (("s32", False), ("f32", False), ("f32", True)):
            text = f"slct{'.ftz' * flushed}.b{bits}.{by} {{d}}, {{0}}, {{1}}, {{2}};"
            kinds = "ii" + ("f" if by == "f32" else "i")
            add(text, bits, (bits, bits, 32), functools.partial(chosen, by, flushed), kinds)
    add("slct.f32.f32 {d}, {0}, {1}, {2};", 32, (32,) * 3, functools.partial(chosen, "f32", False), "fff")
    add("slct.f64.s32 {d}, {0}, {1}, {2};", 64, (64, 64, 32), functools.partial(chosen, "s32", False), "ffi")
    for type_ in ("u32", "s32"):
        for half, shift in (("lo", 0), ("hi", 16)):
            add(f"mul24.{half}.{type_} {{d}}, {{0}}, {{1}};", 32, (32,) * 2, functools.partial(product24, type_, shift))
            text = f"mad24.{half}.{type_} {{d}}, {{0}}, {{1}}, {{2}};"
            add(text, 32, (32,) * 3, functools.partial(product24, type_, shift))
        if type_ == "s32":
            add("mad24.hi.sat.s32 {d}, {0}, {1}, {2};", 32, (32,) * 3, saturated24)
        for mode in ("clamp", "wrap"):
            text = f"szext.{mode}.{type_} {{d}}, {{0}}, {{1}};"
            add(text, 32, (32, 32), functools.partial(extended, type_, mode), "is")
    for type_ in ("f32", "f64"):
        for name in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            text = f"testp.{name}.{type_} {{d}}, {{0}};"
            add(text, 1, (width(type_),), functools.partial(has_property, name, type_), "f")
    for type_ in ("u32", "s32", "u64", "s64"):
        add(f"bfind.shiftamt.{type_} {{d}}, {{0}};", 32, (width(type_),), functools.partial(shift_amount, type_))
    return cases


CASES = {**set_cases(), **pair_cases(), **other_cases()}


@pytest.mark.parametrize("text", CASES)
@settings(max_examples=examples(2, 50))
@given(seed=st.integers(0, 2**32))
def test_results(text: str, seed: int) -> None:
    check(CASES[text], seed)
    check_constants(CASES[text], seed)


@pytest.mark.parametrize("body", [
    "set.lt.f64.f32 %d1, %r1, %r2;", "set.lt.u32.b32 %r3, %r1, %r2;", "set.lo.u32.f32 %r3, %r1, %r2;",
    "set.lt.f16x2.f32 %r3, %r1, %r2;", "set.lt.f32.f16x2 %r3, %r1, %r2;", "setp.lo.f16x2 %p1|%p2, %r1, %r2;",
    "slct.b32.u32 %r3, %r1, %r2, %r4;",  "isspacep.const %p1, %d1;",
])  # fmt: skip
def test_other_forms_are_refused(body: str) -> None:
    with pytest.raises(UnsupportedPTX):
        launch(module(body + " ret;", parameters=0))


# --- addresses --------------------------------------------------------------------------------------------------------

SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry")
ADDRESSES = {
    "global": ("ld.param.u64 %d5, [p0];", ("global",)),
    "own": ("mov.u64 %d5, dynamic; cvta.shared.u64 %d5, %d5; add.s64 %d5, %d5, 8;",
            ("shared", "shared::cta", "shared::cluster")),
    "peer": ("mov.u64 %d5, dynamic; cvta.shared.u64 %d5, %d5; mov.u32 %r5, %cluster_ctarank; xor.b32 %r5, %r5, 1;"
             "mapa.u64 %d5, %d5, %r5;", ("shared::cluster",)),
    "local": (".local .align 8 .b8 depot[16]; mov.u64 %d5, depot; cvta.local.u64 %d5, %d5;", ("local",)),
    "param": ("mov.u64 %d5, p0; cvta.param.u64 %d5, %d5;", ("global", "param", "param::entry")),
}  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_spaces_of_generic_addresses(address: str) -> None:
    text, expected = ADDRESSES[address]
    tests = "".join(f"isspacep.{s} %p{n}, %d5; @%p{n} or.b32 %r9, %r9, {1 << n};" for n, s in enumerate(SPACES))
    where = f"{THREAD_OUTPUT} mov.u32 %r8, %cluster_ctarank; mad.wide.u32 %d1, %r8, 128, %d1; mov.b32 %r9, 0;"
    out = aligned(np.zeros(64, np.uint32))
    kernel = module(f"{where} {text} {tests} st.global.b32 [%d1], %r9; ret;", parameters=1)
    launch(kernel, out, grid=(2, 1, 1), cluster=(2, 1, 1))
    assert (out == sum(1 << n for n, space in enumerate(SPACES) if space in expected)).all()


@pytest.mark.parametrize("form", ["mapa.u64", "mapa.shared::cluster.u64"])
def test_addresses_of_other_ctas(form: str) -> None:
    """Each CTA writes its rank; a thread reads it through the address and asks whose it is."""
    window = "cvta.shared.u64 %d5, %d5;" if form == "mapa.u64" else ""
    load = "ld.b32 %r6, [%d6];" if window else "ld.shared::cluster.b32 %r6, [%d6];"
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; ld.param.u64 %d0, [p0];
        mad.lo.u32 %r3, %r2, 32, %r1; mad.wide.u32 %d1, %r3, 4, %d0; setp.eq.u32 %p1, %r1, 0;
        @%p1 st.shared.u32 [dynamic], %r2; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        and.b32 %r4, %r1, 3; mov.u64 %d5, dynamic; {window} {form} %d6, %d5, %r4; {load}
        {form.replace("mapa", "getctarank")} %r7, %d6; mad.lo.u32 %r8, %r7, 10, %r6; st.global.b32 [%d1], %r8;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ret;"""

    out = aligned(np.zeros(128, np.uint32))
    launch(module(body, parameters=1), out, grid=(4, 1, 1), cluster=(4, 1, 1))
    assert np.array_equal(out, np.arange(128) % 4 * 11)
