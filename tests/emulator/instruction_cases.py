"""Arithmetic opcodes as cases: generated kernels, operands with the edges of their formats, expected results.

Each opcode runs in the three ways in which it can be translated: on lanes, grouped with equal instructions, and on
values that are uniform in the warp.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from cute_kernels.emulator import Options
from cute_kernels.testing.ptx import module
from tests.emulator.ieee import F16, F32, F64, Format
from tests.emulator.ptx_launch import launch

M32 = (1 << 32) - 1
GROUPS, UNIFORM = 3, 6


@dataclass(frozen=True)
class Case:
    """``text`` with {d} and {0}, {1}, ... ; widths in bits (1: predicate); ``expected`` on bit patterns."""

    text: str
    out: int
    sources: tuple[int, ...]
    expected: Callable[..., int]
    kinds: str = ""  # per source: i(nteger), f(loat), s(hift amount)


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def kernel_text(case: Case) -> str:
    """GROUPS groups of 32 rows on lanes, then UNIFORM rows on uniform values. A row: sources, result; 8 bytes each."""
    stride = 8 * (len(case.sources) + 1)
    lines = [f"mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0]; mul.wide.u32 %d1, %r0, {stride}; add.s64 %d2, %d0, %d1;"]
    names = {1: "%p", 16: "%h", 32: "%r", 64: "%d"}
    rows = [("%d2", 32 * g * stride) for g in range(GROUPS)]
    rows += [("%d0", (32 * GROUPS + u) * stride) for u in range(UNIFORM)]
    for row, (base, offset) in enumerate(rows):
        registers = []
        for i, bits in enumerate(case.sources):
            number = 5 + 5 * row + i
            register = f"{names[bits]}{number % 40 if bits == 1 else number}"
            wide = 16 if bits == 1 else bits
            loaded = f"%h{number}" if bits == 1 else register
            lines.append(f"ld.global.b{wide} {loaded}, [{base}+{offset + 8 * i}];")
            if bits == 1:
                lines.append(f"setp.ne.b16 {register}, {loaded}, 0;")
            registers.append(register)
        number = 5 + 5 * row + 4
        result = f"{names[case.out]}{number % 40 if case.out == 1 else number}"
        lines.append(case.text.format(*registers, d=result))
        if case.out == 1:
            lines.append(f"selp.b32 %r{number}, 1, 0, {result};")
            result = f"%r{number}"
        lines.append(f"st.global.b{32 if case.out == 1 else case.out} [{base}+{offset + stride - 8}], {result};")
    lines.append("ret;")
    return module("\n".join(lines), parameters=1)


FORMATS = {16: F16, 32: F32, 64: F64}
EDGES = {
    "i": lambda bits: [0, 1, 2, 3, 31, 32, 33, (1 << bits) - 1, (1 << bits) - 2, 1 << bits - 1, (1 << bits - 1) - 1],
    "s": lambda bits: [0, 1, 2, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, M32],
    "f": lambda bits: _float_edges(FORMATS[bits]),
    "p": lambda bits: _pair_edges(bits),
}


def _float_edges(fmt: Format) -> list[int]:
    one = fmt.round(Fraction(1))
    finite = [0, 1, 2, fmt.infinity - 1, one, one + 1, one - 1, 1 << fmt.fraction_bits, (1 << fmt.fraction_bits) - 1]
    values = [*finite, fmt.infinity, fmt.nan, fmt.infinity + 1, fmt.round(Fraction(3, 2)), fmt.round(Fraction(7))]
    return values + [v | fmt.sign_bit for v in values]


def _pair_edges(bits: int) -> list[int]:
    """Two elements in one register; f16's edges are as telling for bf16 patterns."""
    half = bits // 2
    edges = EDGES["f"](half)
    return [low | high << half for low, high in zip(edges, edges[5:] + edges[:5])]


@functools.cache
def edges(kind: str, bits: int) -> list[int]:
    """Patterns at the ends of ranges."""
    return [pattern & ((1 << bits) - 1) for pattern in EDGES[kind](bits)]


@functools.cache
def small_numbers(bits: int) -> dict[tuple[int, int], int]:
    """Patterns of numerator / denominator."""
    return {(n, d): FORMATS[bits].round(Fraction(n, d)) for n in (1, 2, 3, 4) for d in (1, 2, 1024)}


def draw_value(rng: random.Random, kind: str, bits: int) -> int:
    if bits == 1:
        return rng.randrange(2)
    if rng.random() < 0.4:
        return rng.choice(edges(kind, bits))
    if kind == "f" and rng.random() < 0.5:  # near 1, so that sums cancel and round
        base = small_numbers(bits)[rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 2, 1024])]
        return (base + rng.randrange(-4, 5)) ^ (FORMATS[bits].sign_bit if rng.random() < 0.5 else 0)
    value = rng.getrandbits(bits)
    return value >> rng.randrange(bits) if kind != "f" and rng.random() < 0.5 else value


_DIFFERS = {
    r"bf[ei]\.[bsu]64": "positions and lengths beyond 63 mean something else to an H200",
    r"fns.b32 \{d\}, \{0\}, 0, ": "an H100 finds bit 0 at the offset -2**31",
}


@functools.cache
def text_of(case: Case) -> str:
    return kernel_text(case)


def check(case: Case, seed: int, options: Options | None = None) -> None:
    rng = random.Random(seed)
    kinds = case.kinds or "i" * len(case.sources)
    count = 32 * GROUPS + UNIFORM
    rows = [[draw_value(rng, k, bits) for k, bits in zip(kinds, case.sources)] for _ in range(count)]
    data = np.zeros((count, len(case.sources) + 1), np.uint64)
    data[:, :-1] = np.array(rows, np.uint64)
    hardware = next((why for form, why in _DIFFERS.items() if re.match(form, case.text)), None)
    launch(text_of(case), data, hardware=hardware, options=options)
    mask = (1 << case.out) - 1
    for i, row in enumerate(rows):
        got, want = int(data[i, -1]) & mask, case.expected(*row) & mask
        assert got == want, f"row {i}: {case.text} on {[hex(v) for v in row]} gives {got:#x}, expected {want:#x}"


def check_constants(case: Case, seed: int, options: Options | None = None) -> None:
    """As `check` for one row of operands that the translator knows: every source is a literal moved to a register."""
    rng = random.Random(seed)
    row = [draw_value(rng, k, bits) for k, bits in zip(case.kinds or "i" * len(case.sources), case.sources)]
    names = {1: "%p", 16: "%h", 32: "%r", 64: "%d"}
    registers = [f"{names[bits]}{10 + i}" for i, bits in enumerate(case.sources)]
    lines = ["ld.param.u64 %d0, [p0];"]
    for value, bits, register in zip(row, case.sources, registers):
        if bits == 1:
            lines.append(f"mov.u32 %r0, {value}; setp.ne.u32 {register}, %r0, 0;")
        else:
            lines.append(f"mov.b{bits} {register}, {value};")
    result = f"{names[case.out]}20"
    lines.append(case.text.format(*registers, d=result))
    if case.out == 1:
        lines.append(f"selp.b32 %r20, 1, 0, {result};")
        result = "%r20"
    lines.append(f"st.global.b{32 if case.out == 1 else case.out} [%d0], {result}; ret;")
    data = np.zeros(1, np.uint64)
    launch(module("\n".join(lines), parameters=1), data, hardware="as `check`", options=options)
    mask = (1 << case.out) - 1
    got, want = int(data[0]) & mask, case.expected(*row) & mask
    assert got == want, f"{case.text} on the constants {[hex(v) for v in row]} gives {got:#x}, expected {want:#x}"
