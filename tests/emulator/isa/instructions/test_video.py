"""vabsdiff2, vabsdiff4 and cvt.pack, against Python integers."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.testing.ptx import module
from tests.emulator.instruction_cases import Case, check, signed
from tests.emulator.ptx_launch import launch
from tests.nightly import daily_or_all, examples


def read(value: int, bits: int, type_: str) -> int:
    value &= (1 << bits) - 1
    return signed(value, bits) if type_[0] == "s" else value


def clamp(value: int, bits: int, type_: str) -> int:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)
    return min(max(value, low), high)


@dataclass(frozen=True)
class Laned:
    """vabsdiff2 or vabsdiff4."""

    lanes: int
    types: tuple[str, str, str]
    more: str = ""

    def __call__(self, a: int, b: int, c: int) -> int:
        bits = 32 // self.lanes
        result = c if self.more == "add" else 0
        for first in range(0, 32, bits):
            x, y = (read(each >> first, bits, type_) for each, type_ in zip((a, b), self.types[1:]))
            value = abs(x - y)
            if self.more == "sat":
                value = clamp(value, bits, self.types[0])
            result += value if self.more == "add" else (value & (1 << bits) - 1) << first
        return result & 0xFFFFFFFF

    def case(self) -> Case:
        parts = [f"vabsdiff{self.lanes}", *self.types, *filter(None, (self.more,))]
        return Case(f"{'.'.join(parts)} {{d}}, {{0}}, {{1}}, {{2}};", 32, (32, 32, 32), self, "")


def cases() -> dict[str, Case]:
    signs = itertools.product(("s32", "u32"), repeat=3)
    made = [Laned(*each) for each in itertools.product((2, 4), signs, ("", "sat", "add"))]
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
    "vset2.s32.s32.eq %r1, %r2, %r3, %r4;", "vadd4.s32.s32.s32 %r1, %r2, %r3, %r4;", "vadd.s32.s32.s32 %r1, %r2, %r3;",
    "vabsdiff4.u32.u32.u32.add %r1, %r2, %r3;", "vabsdiff4.u32.u32.u32.add.sat %r1, %r2, %r3, %r4;",
    "vabsdiff4.u32.u32.u32 %r1.b01, %r2, %r3, %r4;", "vabsdiff4.u32.u32.u32 %r1, %r2.b3210, %r3, %r4;",
    "vabsdiff2.u32.u32.u32 %r1, -%r2, %r3, %r4;", "vshl.s32.s32.u32.clamp %r1, %r2, %r3;",
    "vmad.s32.s32.s32 %r1, %r2, %r3, %r4;", "add.s32 %r1, %r2.b0, %r3;", "add.s32 %r1, -%r2, %r3;",
    "mov.b64 %d1, {%r1.h0, %r2};", "st.global.b32 [%d1.h0], %r2;", "ld.global.b32 %r1.h0, [%d1];",
    "cvt.pack.s16.s32 %r1, %r2, %r3;", "tex.1d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%d1, {%f5}];",
])  # fmt: skip
def test_other_forms_are_refused(body: str) -> None:
    with pytest.raises(UnsupportedPTX):
        launch(module(body + " ret;", parameters=0))
