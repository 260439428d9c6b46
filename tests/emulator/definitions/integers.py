"""Integer arithmetic and comparison, and predicates."""

from __future__ import annotations

import itertools

import numpy as np

from tests.emulator.definitions.definition import KINDS, Definition, one_by_one

WIDTHS = (16, 32, 64)
SIGNED_OR_NOT = [f"{kind}{bits}" for kind in "su" for bits in WIDTHS]


def quotient(a: int, b: int) -> int:
    """Rounded towards zero; by zero all ones, as on an H200 (PTX leaves it open)."""
    if b == 0:
        return -1
    size = abs(a) // abs(b)
    return size if (a < 0) == (b < 0) else -size


def remainder(a: int, b: int) -> int:
    """With the sign of the dividend; by zero all ones, as on an H200 (PTX leaves it open)."""
    return -1 if b == 0 else a - b * quotient(a, b)


def dot(a: int, b: int, c: int, bits: int, first: int, signs: tuple[bool, bool]) -> int:
    """dp4a and dp2a on bit patterns: ``c`` plus products of pieces of ``a`` of ``bits`` bits and bytes of ``b`` from
    ``first`` on; ``signs``: those of ``a``, of ``b`` are two's complement."""
    half_a, half_b = (1 << bits - 1) * signs[0], 128 * signs[1]
    for i in range(32 // bits):
        x, y = a >> bits * i & (1 << bits) - 1, b >> 8 * (first + i) & 255
        c = c + ((x ^ half_a) - half_a) * ((y ^ half_b) - half_b)
    return c


def arithmetic() -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for kind in SIGNED_OR_NOT:
        bits = int(kind[1:])
        binary = {
            "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "mul_lo": np.multiply,
            "mul_hi": one_by_one(lambda a, b, bits=bits: a * b >> bits, kind),
            "div": one_by_one(quotient, kind), "rem": one_by_one(remainder, kind),
        }  # fmt: skip
        for name, function in binary.items():
            found[f"{name}_{kind}"] = Definition(function, (kind, kind), kind)
        sad = one_by_one(lambda a, b, c: c + abs(a - b), kind)
        found[f"sad_{kind}"] = Definition(sad, (kind, kind, kind), kind)
        if bits < 64:
            wide = f"{kind[0]}{2 * bits}"
            product = one_by_one(lambda a, b: a * b, wide)
            found[f"mul_wide_{kind}"] = Definition(product, (kind, kind), wide)
    for bits in WIDTHS:
        kind = f"s{bits}"
        found[f"neg_{kind}"] = Definition(np.negative, (kind,), kind)
        found[f"abs_{kind}"] = Definition(np.abs, (kind,), kind)
    for name, sum_ in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        function = one_by_one(lambda a, b, sum_=sum_: min(max(sum_(a, b), -(2**31)), 2**31 - 1), "s32")
        found[f"{name}_sat_s32"] = Definition(function, ("s32", "s32"), "s32")
    for name, kind in itertools.product(("min", "max"), ("s16", "s32")):
        choose = {"min": min, "max": max}[name]
        function = one_by_one(lambda a, b, choose=choose: max(choose(a, b), 0), kind)
        found[f"{name}_{kind}_relu"] = Definition(function, (kind, kind), kind)
    for a, b in itertools.product(("s32", "u32"), repeat=2):
        for name, bits, first in (("dp4a", 8, 0), ("dp2a", 16, 0), ("dp2a", 16, 2)):
            form = (bits, first, (a[0] == "s", b[0] == "s"))
            function = one_by_one(lambda x, y, z, form=form: dot(x, y, z, *form), "u32")
            found[f"{name}_{bits}_{first}_{a}_{b}"] = Definition(function, ("u32",) * 3, "u32")
    return found


def carries() -> dict[str, Definition]:
    """Sums and differences with a carry or borrow, and what they leave."""
    found: dict[str, Definition] = {}
    for kind in ("u32", "u64"):
        inputs, limit = (kind, kind, "pred"), 1 << int(kind[1:])
        found[f"addc_{kind}"] = Definition(one_by_one(lambda a, b, carry: a + b + carry, kind), inputs, kind)
        found[f"subc_{kind}"] = Definition(one_by_one(lambda a, b, borrow: a - b - borrow, kind), inputs, kind)
        overflows = one_by_one(lambda a, b, carry, limit=limit: a + b + carry >= limit, "pred")
        found[f"carry_{kind}"] = Definition(overflows, inputs, "pred")
        found[f"borrow_{kind}"] = Definition(one_by_one(lambda a, b, borrow: a < b + borrow, "pred"), inputs, "pred")
    return found


def comparisons() -> dict[str, Definition]:
    relations = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    found = {
        f"setp_{relation}_{kind}": Definition(function, (kind, kind), "pred")
        for (relation, function), kind in itertools.product(relations.items(), SIGNED_OR_NOT)
    }
    for (relation, function), bits in itertools.product((("eq", np.equal), ("ne", np.not_equal)), WIDTHS):
        found[f"setp_{relation}_b{bits}"] = Definition(function, (f"u{bits}",) * 2, "pred")
    return found


def predicates() -> dict[str, Definition]:
    functions = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    found = {f"{name}_pred": Definition(function, ("pred", "pred"), "pred") for name, function in functions.items()}
    return {**found, "not_pred": Definition(np.logical_not, ("pred",), "pred")}


def integers() -> dict[str, Definition]:
    """All of them, by the name that the core has."""
    assert set(SIGNED_OR_NOT) < set(KINDS)
    return {**arithmetic(), **carries(), **comparisons(), **predicates()}
