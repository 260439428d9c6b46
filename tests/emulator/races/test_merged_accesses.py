"""Neighbouring loads or stores: reports are those of one by one.

Every program runs with the units of the core and with those of Python.
"""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator.errors import EmulatorError, GlobalMemoryRace, IllegalAccess, SharedMemoryRace
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch

# %r3 and %d3: a word for each thread in shared and in global memory; %r8: a place in shared memory, the same for all,
# which cannot be known before global memory is read.
ADDRESSES = """mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0];
mul.lo.u32 %r2, %r1, 4; mov.u32 %r4, dynamic; add.u32 %r3, %r2, %r4;
cvt.u64.u32 %d2, %r2; add.u64 %d3, %d1, %d2;
ld.global.b32 %r7, [%d3]; add.u32 %r8, %r7, %r4;
setp.ge.u32 %p1, %r1, 32;
"""


def execute(body: str, threads: int = 32) -> np.ndarray:
    out = np.zeros(256, np.uint32)
    launch(module(f"{ADDRESSES}{body}\nret;"), out, 0, block=(threads, 1, 1))
    return out


def report(kind: type[EmulatorError], instruction: str, body: str, threads: int = 32) -> str:
    """What the program is reported for, which has to be this instruction of it, on a line of its own."""
    with pytest.raises(kind) as caught:
        execute(body, threads)
    lines = module(f"{ADDRESSES}{body}\nret;").splitlines()
    assert f" at PTX line {lines.index(instruction + ';') + 1} `{instruction}`, " in str(caught.value)
    return str(caught.value)


def lines_of(instructions: list[str]) -> str:
    return "".join(f"{instruction};\n" for instruction in instructions)


@pytest.mark.parametrize(
    ("space", "register", "kind"),
    [("shared", "%r3", SharedMemoryRace), ("global", "%d3", GlobalMemoryRace)],
)
@pytest.mark.parametrize("between", ["", "st.{0}.b32 [{1}+512], 3;\n"])
def test_lanes_that_store_to_the_same_places_one_after_the_other(
    space: str, register: str, kind: type[EmulatorError], between: str
) -> None:
    """A lane's second store goes where the next lane's first one went."""
    first, second = f"st.{space}.b32 [{register}], 1", f"st.{space}.b32 [{register}+4], 2"
    between = between.format(space, register)
    report(kind, second, f"{first};\n{between}{second};")
    execute(f"{first};\nbar.warp.sync -1;\n{between}{second};")


def test_a_lane_may_store_twice_to_its_place() -> None:
    out = execute("st.global.b32 [%d3], 1;\nst.global.b32 [%d3], 2;\nst.global.b32 [%d3+512], 3;")
    assert out.tolist() == [2] * 32 + [0] * 96 + [3] * 32 + [0] * 96


def test_what_all_lanes_store_any_lane_may_read() -> None:
    """They store equal values, which are the warp's: this is no exchange between lanes."""
    body = "st.shared.b32 [%r8], 1;\nst.shared.b32 [%r8+4], 2;\nld.shared.b32 %r5, [%r8+4];\nst.global.b32 [%d3], %r5;"
    assert execute(body)[:32].tolist() == [2] * 32


@pytest.mark.parametrize("racing", range(4))
@pytest.mark.parametrize("opcode", ["st", "ld"])
def test_the_racing_one_of_four_neighbours_is_named(opcode: str, racing: int) -> None:
    """The word of one of them was written by another warp before, without synchronisation, the others by this one."""
    initial = "".join(f"st.shared.b32 [%r3+{512 * i}], 0;\n" for i in range(4) if i != racing)
    operands = [f"[%r3+{512 * i}]" for i in range(4)]
    if opcode == "st":
        second = [f"st.shared.b32 {where}, %r1" for where in operands]
    else:
        second = [f"ld.shared.b32 %r{20 + i}, {where}" for i, where in enumerate(operands)]
    use = "add.u32 %r20, %r20, %r21; add.u32 %r20, %r20, %r22; add.u32 %r20, %r20, %r23; st.global.b32 [%d3], %r20;"
    text = f"""@%p1 bra SECOND;
st.shared.b32 [%r3+{512 * racing + 128}], 5;
ret;
SECOND:
{initial}nanosleep.u32 20;
{lines_of(second)}
{use if opcode == "ld" else ""}"""
    words = report(SharedMemoryRace, second[racing], text, threads=64)
    assert f" the 4 bytes at shared offset {1024 + 512 * racing + 128} " in words


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize("opcode", ["st", "ld"])
def test_the_illegal_one_of_three_neighbours_is_named(opcode: str, space: str) -> None:
    where = "%r3" if space == "shared" else "%d3"
    operands = [f"[{where}+{offset}]" for offset in (0, 1_000_000, 128)]
    if opcode == "st":
        accesses = [f"st.{space}.b32 {operand}, %r1" for operand in operands]
    else:
        accesses = [f"ld.{space}.b32 %r{20 + i}, {operand}" for i, operand in enumerate(operands)]
    initial = "" if opcode == "st" else f"st.{space}.b32 [{where}], 0;\nst.{space}.b32 [{where}+128], 0;\n"
    use = "" if opcode == "st" else "add.u32 %r20, %r20, %r21; add.u32 %r20, %r20, %r22; st.global.b32 [%d3], %r20;"
    report(IllegalAccess, accesses[1], f"{initial}{lines_of(accesses)}\n{use}")


def test_generic_neighbours_may_address_different_spaces() -> None:
    body = """cvta.shared.u64 %d5, dynamic; add.u64 %d5, %d5, %d2;
st.u32 [%d5], 7;
st.u32 [%d3], 8;
ld.u32 %r5, [%d5];
ld.u32 %r6, [%d3];
mad.lo.u32 %r5, %r5, 16, %r6; st.global.u32 [%d3+512], %r5;"""
    out = execute(body)
    assert out.tolist() == [8] * 32 + [0] * 96 + [7 * 16 + 8] * 32 + [0] * 96


def test_what_one_load_acquires_the_next_one_may_read() -> None:
    """The first of two neighbours acquires what was released after a weak store to the place that the second reads."""
    body = """@%p1 bra SECOND;
st.shared.b32 [%r8], 0; st.shared.b32 [%r8+4], 0;
bar.sync 0;
st.shared.b32 [%r8+4], 5;
bar.warp.sync -1;
st.release.cta.shared.b32 [%r8], 1;
ret;
SECOND:
bar.sync 0;
POLL: ld.relaxed.cta.shared.b32 %r20, [%r8];
setp.eq.u32 %p2, %r20, 0;
@%p2 bra POLL;
ld.acquire.cta.shared.b32 %r21, [%r8];
ld.acquire.cta.shared.b32 %r22, [%r8+4];
mad.lo.u32 %r21, %r21, 16, %r22; st.global.u32 [%d3], %r21;"""
    assert execute(body, threads=64)[32:64].tolist() == [16 + 5] * 32
    weaker = body.replace("ld.acquire.cta.shared.b32 %r21", "ld.relaxed.cta.shared.b32 %r21")
    report(SharedMemoryRace, "ld.acquire.cta.shared.b32 %r22, [%r8+4]", weaker, threads=64)
