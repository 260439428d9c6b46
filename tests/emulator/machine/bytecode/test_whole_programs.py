"""Whole programs against an interpreter that runs one thread after the other.

The interpreter knows nothing of warps, masks, uniformity or grouping: whatever the translation does to be fast, each
thread must see its own sequential program.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.emulator.isa.instructions.memory import Access
from cute_kernels.emulator.machine.bytecode.execution import translate
from cute_kernels.emulator.machine.bytecode.lowering import lower
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch

REGISTERS = 6
M32 = (1 << 32) - 1


def signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


BINARY = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "min.u32": min,
    "max.s32": lambda a, b: max(a, b, key=signed),
    "shl.b32": lambda a, b: a << min(b, 32),
    "shr.u32": lambda a, b: a >> min(b, 32),
}
COMPARE = {"lt.s32": lambda a, b: signed(a) < signed(b), "eq.b32": lambda a, b: a == b, "hi.u32": lambda a, b: a > b}


@st.composite
def operand(draw: st.DrawFn) -> str | int:
    return draw(st.one_of(st.integers(0, REGISTERS - 1).map(lambda i: f"%r{10 + i}"), st.integers(-3, 40)))


#: Even registers are only ever written with values that are the same in all threads, so they can differ between threads
#: through control flow alone: what uniformity analysis has to find out.
EVEN, ODD = st.sampled_from(range(0, REGISTERS, 2)), st.sampled_from(range(1, REGISTERS, 2))
equal = st.one_of(EVEN.map(lambda i: f"%r{10 + i}"), st.integers(-3, 40))
condition = st.one_of(ODD.map(lambda i: f"%r{10 + i}"), operand())


#: A statement is a tuple; `Source` writes it as PTX and `Thread` runs it for one thread.
def statements(depth: int) -> st.SearchStrategy:
    name, relation = st.sampled_from(sorted(BINARY)), st.sampled_from(sorted(COMPARE))
    simple = st.one_of(
        st.tuples(st.just("op"), name, EVEN, equal, equal),
        st.tuples(st.just("op"), name, ODD, operand(), operand()),
        st.tuples(st.just("guarded"), relation, equal, equal, EVEN, equal),
        st.tuples(st.just("guarded"), relation, operand(), operand(), ODD, operand()),
        st.tuples(st.just("select"), relation, equal, equal, EVEN, equal, equal),
        st.tuples(st.just("select"), relation, operand(), operand(), ODD, operand(), operand()),
        st.tuples(st.just("load"), EVEN, st.just(True)),
        st.tuples(st.just("load"), ODD, st.booleans()),
        st.tuples(st.just("store"), st.one_of(EVEN, ODD)),
        st.tuples(st.just("lane"), ODD),
        st.tuples(st.just("pack"), EVEN, EVEN, EVEN),
        st.tuples(st.just("pack"), ODD, EVEN, ODD),
    )
    if depth == 0:
        return simple
    inner = st.lists(statements(depth - 1), min_size=1, max_size=4)
    return st.one_of(
        simple,
        st.tuples(st.just("if"), relation, condition, operand(), inner, inner),
        st.tuples(st.just("if"), relation, condition, operand(), inner, inner),
        # A loop of at most n rounds that a condition may leave early, possibly at different times in each lane.
        st.tuples(st.just("loop"), st.integers(1, 5), relation, condition, operand(), inner),
        st.tuples(st.just("exit"), relation, condition, operand()),
    )


class Source:
    """Writes statements as PTX. %r10.. are the program's registers, %d10 this thread's memory, %d11 common memory."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def fresh(self) -> int:
        self.count += 1
        return self.count

    def write(self, statement: tuple) -> None:
        put = self.lines.append
        kind, n = statement[0], self.fresh()
        temporary, holds, fails = f"%t{n}", f"%c{n}", f"%n{n}"

        def compare(relation: str, x: str | int, y: str | int) -> None:
            put(f"mov.b32 {temporary}, {x}; setp.{relation} {holds}|{fails}, {temporary}, {y};")

        if kind == "op":
            _, name, d, a, b = statement
            put(f"mov.b32 {temporary}, {a}; {name} %r{10 + d}, {temporary}, {b};")
        elif kind == "guarded":
            _, relation, a, b, d, value = statement
            compare(relation, a, b)
            put(f"@{holds} mov.b32 %r{10 + d}, {value};")
        elif kind == "select":
            _, relation, a, b, d, yes, no = statement
            compare(relation, a, b)
            put(f"selp.b32 %r{10 + d}, {no}, {yes}, {fails};")
        elif kind == "load":
            put(f"ld.global.b32 %r{10 + statement[1]}, [%d{11 if statement[2] else 10}];")
        elif kind == "store":
            put(f"st.global.b32 [%d10], %r{10 + statement[1]};")
        elif kind == "lane":
            put(f"mov.u32 %r{10 + statement[1]}, %laneid;")
        elif kind == "pack":
            _, d, a, b = statement
            put(f"mov.b64 %w{n}, {{%r{10 + a}, %r{10 + b}}}; mov.b64 {{_, %r{10 + d}}}, %w{n};")
        elif kind == "exit":
            compare(*statement[1:])
            put(f"@{holds} bra END;")
        elif kind == "if":
            _, relation, a, b, yes, no = statement
            compare(relation, a, b)
            put(f"@!{holds} bra ELSE{n};")
            for inner in yes:
                self.write(inner)
            put(f"bra DONE{n}; ELSE{n}:")
            for inner in no:
                self.write(inner)
            put(f"DONE{n}:")
        else:
            _, rounds, relation, a, b, body = statement
            put(f"mov.b32 %i{n}, 0; LOOP{n}:")
            for inner in body:
                self.write(inner)
            compare(relation, a, b)
            put(f"@{holds} bra OUT{n};")
            put(f"add.s32 %i{n}, %i{n}, 1; setp.lt.s32 %more{n}, %i{n}, {rounds}; @%more{n} bra LOOP{n}; OUT{n}:")


class Exit(Exception):
    pass


class Thread:
    """Runs statements for one thread."""

    def __init__(self, thread: int, memory: int, common: int) -> None:
        self.lane, self.memory, self.common = thread % 32, memory, common
        self.registers = [(thread * 2654435761 + 12345 * i) & M32 if i % 2 else 7 * i for i in range(REGISTERS)]

    def value(self, operand: str | int) -> int:
        return operand & M32 if isinstance(operand, int) else self.registers[int(operand[2:]) - 10]

    def execute(self, statement: tuple) -> None:
        kind = statement[0]
        holds = None
        if kind in ("guarded", "select", "if", "exit"):
            holds = COMPARE[statement[1]](self.value(statement[2]), self.value(statement[3]))
        if kind == "op":
            _, name, d, a, b = statement
            self.registers[d] = BINARY[name](self.value(a), self.value(b)) & M32
        elif kind == "guarded":
            if holds:
                self.registers[statement[4]] = self.value(statement[5])
        elif kind == "select":
            self.registers[statement[4]] = self.value(statement[5] if holds else statement[6])
        elif kind == "load":
            self.registers[statement[1]] = self.common if statement[2] else self.memory
        elif kind == "store":
            self.memory = self.registers[statement[1]]
        elif kind == "lane":
            self.registers[statement[1]] = self.lane
        elif kind == "pack":
            self.registers[statement[1]] = self.registers[statement[3]]
        elif kind == "exit":
            if holds:
                raise Exit
        elif kind == "if":
            for inner in statement[4] if holds else statement[5]:
                self.execute(inner)
        else:
            _, rounds, relation, a, b, body = statement
            for _ in range(rounds):
                for inner in body:
                    self.execute(inner)
                if COMPARE[relation](self.value(a), self.value(b)):
                    break


def interpreted(
    program: list[tuple], threads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[list[int], int]]]:
    """A program's arrays and what the sequential interpreter makes of it.

    Returns:
        A word per thread, a common word, room for the registers; registers and word of every thread afterwards.
    """
    memory = (np.arange(threads, dtype=np.uint32) * 977 + 5) % 50
    common = np.array([21], np.uint32)
    expected = []
    for thread in range(threads):
        state = Thread(thread, int(memory[thread]), int(common[0]))
        try:
            for statement in program:
                state.execute(statement)
        except Exit:
            pass
        expected.append((state.registers, state.memory))
    return memory, common, np.zeros((threads, REGISTERS), np.uint32), expected


def program_text(program: list[tuple], outputs: list[int]) -> str:
    """Registers start from the thread index (odd ones) or the same in all threads (even ones)."""
    source = Source()
    for statement in program:
        source.write(statement)
    start = "".join(
        f"mad.lo.s32 %r{10 + i}, %r2, {2654435761 - 2**32}, {12345 * i};" if i % 2 else f"mov.b32 %r{10 + i}, {7 * i};"
        for i in range(REGISTERS)
    )
    finish = "".join(f"st.global.b32 [%d12+{4 * i}], %r{10 + i};" for i in outputs)
    n = source.count + 1
    registers = (
        f".reg .b32 %r<20>, %t<{n}>, %i<{n}>;\n.reg .b64 %d<20>, %w<{n}>;\n"
        f".reg .pred %c<{n}>, %n<{n}>, %more<{n}>;"
    )
    return module(
        f"mov.u32 %r2, %tid.x; {start} ld.param.u64 %d10, [p0]; ld.param.u64 %d12, [p1]; ld.param.u64 %d11, [p2];"
        f"mul.wide.u32 %d1, %r2, 4; add.s64 %d10, %d10, %d1; mul.wide.u32 %d1, %r2, {4 * REGISTERS};"
        f"add.s64 %d12, %d12, %d1;\n" + "\n".join(source.lines) + f"\nEND: {finish} ret;",
        parameters=3,
        registers=registers,
    )


@settings(max_examples=200)
@given(
    program=st.lists(statements(2), min_size=3, max_size=9),
    outputs=st.lists(st.integers(0, REGISTERS - 1), unique=True),
    threads=st.sampled_from([32, 64, 40, 7]),
    seed=st.integers(0, 3),
)
def test_programs_equal_the_sequential_interpreter(
    program: list[tuple], outputs: list[int], threads: int, seed: int
):
    memory, common, registers, expected = interpreted(program, threads)
    interleave = "random" if seed else "round_robin"
    launch(
        program_text(program, outputs),
        memory,
        registers,
        common,
        block=(threads, 1, 1),
        options=Options(seed=seed, interleave=interleave),
    )
    assert registers[:, outputs].tolist() == [[r[i] for i in outputs] for r, _ in expected]
    assert memory.tolist() == [m for _, m in expected]


def test_moves_and_packing_cost_nothing():
    body = "mov.b64 %d5, {%r1, %r2}; mov.b64 {%r3, %r4}, %d5; mov.b32 %r5, %r4; st.shared.b32 [dynamic], %r5; ret;"
    lowering = lower(module("mov.u32 %r1, %tid.x; mov.u32 %r2, %laneid;" + body), None, (32, 1, 1), check=True)
    nodes = [node for block in lowering.flow.blocks for node in lowering.block(block)[0].nodes]
    assert [type(node.anchor) for node in nodes] == [Access]


def test_translation_is_cached_by_text():
    text = module("ret;")
    first = translate(text, None, (32, 1, 1))
    assert translate(text, None, (32, 1, 1)) is first
    assert translate(text, None, (64, 1, 1)) is not first  # what is uniform depends on the shape of the block


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ("%tid.x", lambda t: t % 4),
        ("%tid.y", lambda t: t // 4 % 6),
        ("%tid.z", lambda t: t // 24),
        ("%ntid.y", lambda t: 6),
        ("%laneid", lambda t: t % 32),
        ("%warpid", lambda t: t // 32),
        ("%lanemask_lt", lambda t: (1 << t % 32) - 1),
        ("%lanemask_ge", lambda t: M32 & ~((1 << t % 32) - 1)),
    ],
)
def test_thread_registers_in_a_three_dimensional_block(special: str, expected):
    """Rows of 4 threads: a warp spans rows, so %tid.y differs inside it."""
    text = module(
        "mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mad.lo.u32 %r4, %r3, 6, %r2;"
        f"mad.lo.u32 %r4, %r4, 4, %r1; mov.u32 %r5, {special}; ld.param.u64 %d0, [p0]; mul.wide.u32 %d1, %r4, 4;"
        "add.s64 %d1, %d0, %d1; st.global.b32 [%d1], %r5; ret;",
        parameters=1,
    )
    out = np.zeros(72, np.uint32)
    reason = "where a warp runs, of which PTX says nothing"
    launch(text, out, block=(4, 6, 3), hardware=reason if special == "%warpid" else None)
    assert out.tolist() == [expected(t) for t in range(72)]
