"""Video instructions and cvt.pack, against Python integers."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.testing.ptx import module
from tests.emulator.instruction_cases import Case, check, signed
from tests.emulator.ptx_launch import launch
from tests.nightly import examples

RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def average(a: int, b: int) -> int:
    """The mean, a half away from zero."""
    total = a + b
    half = abs(total) // 2 + abs(total) % 2
    return half if total >= 0 else -half if total % 2 == 0 else total // 2


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "vadd": operator.add, "vsub": operator.sub, "vmin": min, "vmax": max, "vabsdiff": lambda a, b: abs(a - b),
    "vavrg": average, **{f"vset {name}": lambda a, b, r=relation: int(r(a, b)) for name, relation in RELATIONS.items()},
}  # fmt: skip
SECOND = {"add": operator.add, "min": min, "max": max}
LANES = {"": 1, "2": 2, "4": 4}


def read(value: int, bits: int, type_: str) -> int:
    value &= (1 << bits) - 1
    return signed(value, bits) if type_[0] == "s" else value


def clamp(value: int, bits: int, type_: str) -> int:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)
    return min(max(value, low), high)


def video(name: str, lanes: int, types: tuple[str, ...], saturates: bool, second: str, *operands: int) -> int:
    a, b, *c = operands
    bits, kept = 32 // lanes, types[0] if len(types) == 3 else "u32"
    results = []
    for lane in range(lanes):
        x, y = (read(value >> lane * bits, bits, type_) for value, type_ in zip((a, b), types[-2:]))
        result = OPERATIONS[name](x, y)
        results.append(clamp(result, bits, kept) if saturates else result)
    if second:
        return SECOND[second](read(sum(results), 32, kept), read(c[0], 32, kept)) & 0xFFFFFFFF
    return sum((result & (1 << bits) - 1) << lane * bits for lane, result in enumerate(results))


def cases() -> dict[str, Case]:
    found = {}
    for (name, suffix), types in itertools.product(
        itertools.product(OPERATIONS, LANES), itertools.product(("s32", "u32"), repeat=3)
    ):
        opcode, _, relation = name.partition(" ")
        if relation:
            types = types[1:]
        if opcode + suffix == "vavrg" or (opcode == "vavrg" and len(set(types)) > 1):
            continue
        lanes = LANES[suffix]
        for saturates, second in ((False, ""), (True, ""), *((False, s) for s in (SECOND if lanes == 1 else ("add",)))):
            if relation and saturates:
                continue
            if second in ("min", "max") and types[0] == "u32":
                continue
            parts = [opcode + suffix, *types, *(["sat"] if saturates else []), *([relation] if relation else [])]
            parts += [second] if second else []
            third = lanes > 1 or bool(second)
            text = f"{'.'.join(parts)} {{d}}, {{0}}, {{1}}{', {2}' if third else ''};"
            expected = functools.partial(video, name, lanes, types, saturates, second)
            found[text] = Case(text, 32, (32,) * (3 if third else 2), expected, "")
    for type_, c in itertools.product((f"{k}{n}" for k in "us" for n in (16, 8, 4, 2)), (False, True)):
        if c == (int(type_[1:]) == 16):
            continue
        text = f"cvt.pack.sat.{type_}.s32{'.b32' if c else ''} {{d}}, {{0}}, {{1}}{', {2}' if c else ''};"
        found[text] = Case(text, 32, (32,) * (3 if c else 2), functools.partial(packed, type_), "")
    return found


def packed(type_: str, a: int, b: int, c: int = 0) -> int:
    bits = int(type_[1:])
    high, low = (clamp(signed(value, 32), bits, type_) & (1 << bits) - 1 for value in (a, b))
    return (c << 2 * bits | high << bits | low) & 0xFFFFFFFF


CASES = cases()


@pytest.mark.parametrize("group", sorted({text.split(".")[0] for text in CASES}))
@settings(max_examples=examples(1, 50))
@given(seed=st.integers(0, 2**32))
def test_results(group: str, seed: int) -> None:
    for text, case in CASES.items():
        if text.split(".")[0] == group:
            check(case, seed)


@pytest.mark.parametrize("body", [
    "vadd.s32.s32.s32 %r1, %r2, %r3, %r4;", "vadd.s32.s32 %r1, %r2, %r3;", "vset.s32.s32 %r1, %r2, %r3;",
    "vadd4.s32.s32.s32.add %r1, %r2, %r3;", "vmad.s32.s32.s32 %r1, %r2, %r3, %r4;",
    "cvt.pack.s16.s32 %r1, %r2, %r3;", "tex.1d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%d1, {%f5}];",
])  # fmt: skip
def test_other_forms_are_refused(body: str) -> None:
    with pytest.raises(UnsupportedPTX):
        launch(module(body + " ret;", parameters=0))
