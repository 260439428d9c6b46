"""Video instructions of 2 and 4 lanes and cvt.pack, against Python integers."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.testing.ptx import module
from tests.emulator.instruction_cases import Case, check, signed
from tests.emulator.ptx_launch import launch
from tests.nightly import daily_or_all, examples

RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def average(a: int, b: int) -> int:
    """The mean, a half away from zero."""
    total = a + b
    half = abs(total) // 2 + abs(total) % 2
    return half if total >= 0 else -half if total % 2 == 0 else total // 2


def compared(name: str) -> Callable[[int, int], int]:
    return lambda a, b: int(RELATIONS[name](a, b))


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "vadd": operator.add, "vsub": operator.sub, "vmin": min, "vmax": max, "vabsdiff": lambda a, b: abs(a - b),
    "vavrg": average, **{f"vset {name}": compared(name) for name in RELATIONS},
}  # fmt: skip
LANES = {2: "h", 4: "b"}


def read(value: int, bits: int, type_: str) -> int:
    value &= (1 << bits) - 1
    return signed(value, bits) if type_[0] == "s" else value


def clamp(value: int, bits: int, type_: str) -> int:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)
    return min(max(value, low), high)


def merged(value: int, old: int, first: int, bits: int) -> int:
    mask = ((1 << bits) - 1) << first
    return old & ~mask | value << first & mask


@dataclass(frozen=True)
class Laned:
    """An instruction of 2 or 4 lanes."""

    name: str
    lanes: int
    types: tuple[str, str, str]
    more: str = ""
    selectors: tuple[str, str, str] = ("", "", "")

    def __call__(self, a: int, b: int, c: int) -> int:
        bits = 32 // self.lanes
        defaults = (range(self.lanes), range(self.lanes), range(self.lanes, 2 * self.lanes))
        mask, *chosen = (
            [int(digit) for digit in reversed(text)] or list(default) for text, default in zip(self.selectors, defaults)
        )
        result = c
        for lane in mask:
            x, y = (read((a | b << 32) >> bits * one[lane], bits, type_) for one, type_ in zip(chosen, self.types[1:]))
            value = OPERATIONS[self.name](x, y)
            if self.more == "sat":
                value = clamp(value, bits, self.types[0])
            result = result + value if self.more == "add" else merged(value, result, bits * lane, bits)
        return result & 0xFFFFFFFF

    def case(self) -> Case:
        opcode, _, relation = self.name.partition(" ")
        types = self.types[1:] if relation else self.types
        parts = [f"{opcode}{self.lanes}", *types, *filter(None, (relation, self.more))]
        letter = f".{LANES[self.lanes]}"
        d, a, b = (name + (letter + each if each else "") for name, each in zip(("{d}", "{0}", "{1}"), self.selectors))
        return Case(f"{'.'.join(parts)} {d}, {a}, {b}, {{2}};", 32, (32, 32, 32), self, "")


def cases() -> dict[str, Case]:
    rng = random.Random(1)
    made: list[Laned] = []
    for name, types in itertools.product(OPERATIONS, itertools.product(("s32", "u32"), repeat=3)):
        if types[0] == "s32" and name.startswith("vset"):
            continue
        for lanes, more in itertools.product(LANES, ("", "sat", "add")):
            if more == "sat" and name.startswith("vset"):
                continue
            mask = "".join(map(str, sorted(rng.sample(range(lanes), rng.randrange(1, lanes + 1)), reverse=True)))
            chosen = ("".join(str(rng.randrange(2 * lanes)) for _ in range(lanes)) for _ in range(2))
            made += [Laned(name, lanes, types, more), Laned(name, lanes, types, more, (mask, *chosen))]
    found = {case.text: case for case in (each.case() for each in made)}
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


def by_opcode() -> dict[str, list[Case]]:
    """Cases by the first word of their opcode; by day every fourth of each, drawn once and for all."""
    groups = collections.defaultdict(list)
    for text, case in cases().items():
        groups[text.split(".")[0]].append(case)
    fourths = {name: random.Random(name).sample(group, -(-len(group) // 4)) for name, group in groups.items()}
    return {name: daily_or_all(fourths[name], group) for name, group in sorted(groups.items())}


CASES = by_opcode()


@pytest.mark.parametrize("opcode", CASES)
@settings(max_examples=examples(1, 50))
@given(seed=st.integers(0, 2**32))
def test_results(opcode: str, seed: int) -> None:
    for case in CASES[opcode]:
        check(case, seed)


@pytest.mark.parametrize("body", [
    "vset2.s32.s32 %r1, %r2, %r3, %r4;", "vadd4.s32.s32.s32.add %r1, %r2, %r3;", "vadd.s32.s32.s32 %r1, %r2, %r3;",
    "vadd4.s32.s32.s32 %r1.b01, %r2, %r3, %r4;", "vadd4.s32.s32.s32 %r1, %r2.b321, %r3, %r4;",
    "vadd2.s32.s32.s32 %r1, %r2.b10, %r3, %r4;", "vadd2.s32.s32.s32 %r1, %r2.h14, %r3, %r4;",
    "vadd2.s32.s32.s32 %r1, -%r2, %r3, %r4;", "vshl.s32.s32.u32.clamp %r1, %r2, %r3;",
    "vmad.s32.s32.s32 %r1, %r2, %r3, %r4;", "add.s32 %r1, %r2.b0, %r3;", "add.s32 %r1, -%r2, %r3;",
    "mov.b64 %d1, {%r1.h0, %r2};", "st.global.b32 [%d1.h0], %r2;", "ld.global.b32 %r1.h0, [%d1];",
    "cvt.pack.s16.s32 %r1, %r2, %r3;", "tex.1d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%d1, {%f5}];",
])  # fmt: skip
def test_other_forms_are_refused(body: str) -> None:
    with pytest.raises(UnsupportedPTX):
        launch(module(body + " ret;", parameters=0))
