"""Floating-point arithmetic and comparison.

Sums, products, fused multiply-adds, quotients and square roots are correctly rounded; these and their NaNs were found
equal to an H200 bit for bit. The ``.approx`` functions are computed in f64 and rounded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np

from tests.emulator.definitions import rounding
from tests.emulator.definitions.definition import Definition, quiet

Vector = Callable[..., np.ndarray]
RELATIONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def with_one_nan(function: Vector) -> Vector:
    """Of f32: every NaN is the canonical one."""
    return lambda *arrays: rounding.canonical_f32(function(*arrays))


def via_f64(function: Vector) -> Vector:
    return with_one_nan(lambda x: function(x.astype(np.float64)).astype(np.float32))


def magnitude_bits(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).view(np.float32)


def negate_bits(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) ^ np.uint32(0x80000000)).view(np.float32)


def signed_zero(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A zero addend of the product's sign: it changes nothing, not even the sign of a zero."""
    return np.copysign(a.dtype.type(0), a) * np.copysign(a.dtype.type(1), b)


def directed(fused: Callable[..., np.ndarray], one: np.floating) -> dict[str, Vector]:
    """Sums, differences and products by a fused multiply-add that rounds in a direction."""
    return {
        "add": lambda a, b: fused(a, one, b),
        "sub": lambda a, b: fused(a, one, -b),
        "mul": lambda a, b: fused(a, b, signed_zero(a, b)),
        "fma": fused,
    }


def signs_xored(order: Vector, widen: Callable[[np.ndarray], np.ndarray]) -> Vector:
    """min or max of magnitudes as f32, with the exclusive or of the operands' signs: .xorsign.abs."""

    def signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = widen(a), widen(b)
        result = order(magnitude_bits(a), magnitude_bits(b))
        sign = (a.view(np.uint32) ^ b.view(np.uint32)) & np.uint32(0x80000000)
        return np.where(result != result, result.view(np.uint32), result.view(np.uint32) | sign).view(np.float32)

    return signed


ORDERS: dict[str, Vector] = {
    "min": rounding.lowest_f32,
    "max": rounding.highest_f32,
    "min_NaN": rounding.lowest_nan_f32,
    "max_NaN": rounding.highest_nan_f32,
}
#: f32 that can be saturated, and those that cannot.
SUMS: dict[str, tuple[int, Vector]] = {
    "add": (2, with_one_nan(np.add)),
    "sub": (2, with_one_nan(np.subtract)),
    "mul": (2, with_one_nan(np.multiply)),
    "fma": (3, rounding.fma_f32),
    **{
        f"{name}_{mode}": (3 if name == "fma" else 2, function)
        for mode in rounding.DIRECTIONS
        for name, function in directed(functools.partial(rounding.fma_directed_f32, mode), np.float32(1)).items()
    },
}
OTHERS: dict[str, tuple[int, Vector]] = {
    "div": (2, with_one_nan(np.divide)),
    **{name: (2, order) for name, order in ORDERS.items()},
    **{f"{name}_xorsign": (2, signs_xored(order, lambda x: x)) for name, order in ORDERS.items()},
    "abs": (1, with_one_nan(magnitude_bits)),
    "neg": (1, with_one_nan(negate_bits)),
    "rcp": (1, with_one_nan(lambda x: np.float32(1) / x)),
    "sqrt": (1, with_one_nan(np.sqrt)),
    "rsqrt": (1, via_f64(lambda x: 1.0 / np.sqrt(x))),
    "ex2": (1, via_f64(np.exp2)),
    "lg2": (1, via_f64(np.log2)),
    "sin": (1, via_f64(np.sin)),
    "cos": (1, via_f64(np.cos)),
    "tanh": (1, via_f64(np.tanh)),
}


def flushed(function: Vector) -> Vector:
    """.ftz, of operands and results."""
    return lambda *arrays: rounding.flush_f32(function(*(rounding.flush_f32(x) for x in arrays)))


def saturated(function: Vector) -> Vector:
    return lambda *arrays: rounding.clamp_f32(function(*arrays))


def singles() -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for name, (count, function) in {**SUMS, **OTHERS}.items():
        forms = {"": function, "_ftz": flushed(function)}
        if name in SUMS:
            forms |= {"_sat": saturated(function), "_ftz_sat": saturated(flushed(function))}
        for suffix, form in forms.items():
            found[f"{name}_f32{suffix}"] = Definition(quiet(form), ("f32",) * count, "f32")
    return found


def doubles() -> dict[str, Definition]:
    functions: dict[str, tuple[int, Vector]] = {
        "add": (2, np.add), "sub": (2, np.subtract), "mul": (2, np.multiply), "div": (2, np.divide),
        "sqrt": (1, np.sqrt), "rcp": (1, lambda x: 1.0 / x), "fma": (3, rounding.fma_f64),
        "rsqrt": (1, lambda x: 1.0 / np.sqrt(x)), "min": (2, rounding.lowest_f64), "max": (2, rounding.highest_f64),
    }  # fmt: skip
    for mode in rounding.DIRECTIONS:
        for name, function in directed(functools.partial(rounding.fma_f64, mode=mode), np.float64(1)).items():
            functions[f"{name}_{mode}"] = (3 if name == "fma" else 2, function)
    found = {
        f"{name}_f64": Definition(quiet(rounding.with_nan_f64(function)), ("f64",) * count, "f64")
        for name, (count, function) in functions.items()
    }
    for name, function in (("abs", np.abs), ("neg", np.negative)):
        found[f"{name}_f64"] = Definition(function, ("f64",), "f64")
    return found


def copy_sign(sign: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    top = sign.dtype.type(1 << (8 * sign.dtype.itemsize - 1))
    return sign & top | magnitude & ~top


def rectified(x: np.ndarray) -> np.ndarray:
    """.relu of bits of f16 or bf16: negative numbers and -0 become +0, NaN stays."""
    return np.where(x & np.uint16(0x8000) != 0, np.uint16(0), x)  # the one NaN of these results has no sign


def widen_f16(x: np.ndarray) -> np.ndarray:
    return x.view(np.float16).astype(np.float32)


def halves(type_: str) -> dict[str, Definition]:
    """On bits of f16 or bf16."""
    bf16 = type_ == "bf16"
    widen = rounding.bf16_to_f32 if bf16 else widen_f16
    narrow = rounding.f32_to_bf16 if bf16 else rounding.f32_to_f16
    once = rounding.f64_to_bf16 if bf16 else rounding.f64_to_f16
    add = rounding.add_bf16 if bf16 else rounding.add_f16
    fused = rounding.fma_bf16 if bf16 else rounding.fma_f16
    functions: dict[str, tuple[int, Vector]] = {
        "add": (2, add),
        "sub": (2, lambda a, b: add(a, b ^ np.uint16(0x8000))),
        "mul": (2, rounding.mul_bf16 if bf16 else rounding.mul_f16),
        "fma": (3, fused),
        "fma_relu": (3, lambda a, b, c: rectified(fused(a, b, c))),
        "abs": (1, lambda a: narrow(magnitude_bits(widen(a)))),
        "neg": (1, lambda a: narrow(negate_bits(widen(a)))),
        "ex2": (1, lambda a: once(np.exp2(widen(a).astype(np.float64)))),
        "tanh": (1, lambda a: once(np.tanh(widen(a).astype(np.float64)))),
    }
    for name, order in ORDERS.items():
        functions[name] = (2, lambda a, b, order=order: narrow(order(widen(a), widen(b))))
        functions[f"{name}_xorsign"] = (2, lambda a, b, order=order: narrow(signs_xored(order, widen)(a, b)))
    forms = {f"{name}_{type_}": entry for name, entry in functions.items()}
    if not bf16:  # .sat: into [0, 1], of NaN 0
        for name in ("add", "sub", "mul", "fma"):
            count, function = functions[name]
            saturate = lambda *x, f=function: narrow(rounding.clamp_f32(widen(f(*x))))  # noqa: E731
            forms[f"{name}_f16_sat"] = (count, saturate)
    return {name: Definition(quiet(function), ("u16",) * count, "u16") for name, (count, function) in forms.items()}


def compared(a: np.ndarray, b: np.ndarray, relation: str) -> np.ndarray:
    plain = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    unordered = (a != a) | (b != b)
    if relation in ("num", "nan"):
        return unordered if relation == "nan" else ~unordered
    if relation in ("ne", "neu"):  # np.not_equal is true when unordered
        return np.not_equal(a, b) & (~unordered if relation == "ne" else True)
    return plain[relation[:2]](a, b) | (unordered if relation.endswith("u") else False)


def comparisons() -> dict[str, Definition]:
    """Plain relations are false when unordered, the ...u ones true."""
    widen = {"bf16": rounding.bf16_to_f32, "f16": lambda x: x.view(np.float16)}
    found: dict[str, Definition] = {}
    for relation, type_ in itertools.product(RELATIONS, ("f16", "bf16", "f32", "f64")):

        def function(*arrays: np.ndarray, relation: str = relation, type_: str = type_) -> np.ndarray:
            return compared(*map(widen.get(type_, lambda x: x), arrays), relation)

        stored = "u16" if type_ in widen else type_
        found[f"setp_{relation}_{type_}"] = Definition(function, (stored, stored), "pred")
    return found


def floats() -> dict[str, Definition]:
    """All of them, by the name that the core has."""
    copies = {f"copysign_{kind}": Definition(copy_sign, (kind, kind), kind) for kind in ("u32", "u64")}
    return {**singles(), **doubles(), **halves("f16"), **halves("bf16"), **comparisons(), **copies}
