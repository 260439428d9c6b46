"""alloca, stacksave, stackrestore: each thread has its own memory, which is free again where ptxas frees it."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.ptx_launch import launch


def execute(body: str, head: str = "", threads: int = 64, hardware: str | None = None) -> np.ndarray:
    out = aligned(np.zeros(threads, np.uint32))
    text = module(f"{THREAD_OUTPUT}{body}\nret;", parameters=1, head=head, target="sm_90a")
    launch(text, out, block=(threads, 1, 1), hardware=hardware)
    return out


def test_sizes_of_lanes_differ_and_places_do_not_overlap() -> None:
    """Every thread fills arrays of its own lengths, one with a generic address, and adds up what they hold."""
    body = """
        and.b32 %r2, %r1, 7; add.u32 %r2, %r2, 1; mul.wide.u32 %d2, %r2, 4;
        alloca.u64 %d3, %d2; alloca.u64 %d4, %d2, 64; cvta.local.u64 %d6, %d4; and.b64 %d5, %d4, 63;
        mov.u32 %r3, 0; mov.u32 %r6, 0;
    FILL:
        mad.wide.u32 %d7, %r3, 4, %d3; st.local.u32 [%d7], %r1;
        mad.wide.u32 %d7, %r3, 4, %d6; st.u32 [%d7], 1000;
        add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, %r2; @%p1 bra FILL;
        mov.u32 %r3, 0;
    ADD:
        mad.wide.u32 %d7, %r3, 4, %d3; ld.local.u32 %r4, [%d7]; add.u32 %r6, %r6, %r4;
        mad.wide.u32 %d7, %r3, 4, %d4; ld.local.u32 %r4, [%d7]; add.u32 %r6, %r6, %r4;
        add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, %r2; @%p1 bra ADD;
        cvt.u32.u64 %r5, %d5; add.u32 %r6, %r6, %r5;
        st.global.u32 [%d1], %r6;
    """
    thread = np.arange(64)
    assert np.array_equal(execute(body), (thread % 8 + 1) * (thread + 1000))


def test_what_is_restored_is_used_again() -> None:
    """A thousand times 4 KB, of lanes that take part; others keep what they have."""
    body = """
        alloca.u64 %d2, 8; st.local.u32 [%d2], %r1; mov.u32 %r2, 0; setp.lt.u32 %p2, %r1, 40;
    LOOP:
        stacksave.u64 %d3; @%p2 alloca.u64 %d4, 4096; @%p2 st.local.u32 [%d4+4092], %r2; stackrestore.u64 %d3;
        add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 1000; @%p1 bra LOOP;
        ld.local.u32 %r3, [%d2]; @%p2 ld.local.u32 %r4, [%d4+4092]; @%p2 add.u32 %r3, %r3, %r4;
        st.global.u32 [%d1], %r3;
    """
    thread = np.arange(64)
    assert np.array_equal(execute(body), thread + 999 * (thread < 40))


def test_a_pointer_of_32_bits_is_restored() -> None:
    body = """
        alloca.u64 %d2, 8; stacksave.u32 %r2; alloca.u64 %d3, 4096; stackrestore.u32 %r2; alloca.u64 %d4, 8;
        sub.u64 %d4, %d4, %d2; cvt.u32.u64 %r3, %d4; st.global.u32 [%d1], %r3;
    """
    assert set(execute(body)) == {8}


CALLED = """
.func (.param .b32 result) f(.param .b32 count) {
    .reg .b32 %a<4>; .reg .b64 %b<4>;
    ld.param.u32 %a1, [count]; alloca.u64 %b1, 4096; st.local.u32 [%b1], %a1; ld.local.u32 %a2, [%b1];
    add.u32 %a2, %a2, 5; st.param.b32 [result], %a2; ret;
}
"""


def test_a_function_frees_what_it_has_allocated() -> None:
    """Ten calls of 4 KB each fit into the 16 KB here; what the caller has stays as it was."""
    call = "{ .param .b32 x; .param .b32 y; st.param.b32 [x], %r3; call.uni (y), f, (x); ld.param.b32 %r3, [y]; }"
    body = f"alloca.u64 %d2, 16; st.local.u32 [%d2], %r1; mov.u32 %r3, 0;\n{call * 10}\n"
    body += "ld.local.u32 %r4, [%d2]; add.u32 %r3, %r3, %r4; st.global.u32 [%d1], %r3;"
    got = execute(body, CALLED, hardware="a thread's stack has 1 KB unless cudaLimitStackSize says more")
    assert np.array_equal(got, np.arange(64) + 50)
    assert np.array_equal(execute(body, CALLED.replace("4096", "64")), np.arange(64) + 50)


@pytest.mark.parametrize("size", ["99999999999", "16377", "0", "%d5", "%d6"])
@pytest.mark.parametrize("access", ["st.local.u32 [%d2], 1;", "ld.local.u32 %r2, [%d2];",
                                    "cvta.local.u64 %d3, %d2; st.u32 [%d3], 1;"])  # fmt: skip
def test_what_has_no_room_must_not_be_accessed(size: str, access: str) -> None:
    """It may be asked for, and what is allocated before and after it stays right."""
    ask = f"mov.u64 %d5, -16; mov.u64 %d6, -1; alloca.u64 %d4, 8; st.local.u32 [%d4], %r1; alloca.u64 %d2, {size};"
    with pytest.raises(IllegalAccess, match="alloca found no room on the stack for it, or was asked for 0 bytes"):
        execute(ask + access)
    after = "alloca.u64 %d7, 16368; st.local.u32 [%d7+16364], 5; ld.local.u32 %r2, [%d4]; st.global.u32 [%d1], %r2;"
    assert np.array_equal(execute(ask + after), np.arange(64))


def test_a_pointer_that_no_stacksave_gave_allocates_nothing_outside() -> None:
    with pytest.raises(IllegalAccess, match="alloca found no room"):
        execute("mov.u64 %d2, 1234567; stackrestore.u64 %d2; alloca.u64 %d3, 8; st.local.u32 [%d3], 1;")


def test_an_access_beyond_the_stack_is_reported() -> None:
    with pytest.raises(IllegalAccess, match="local access of 4 bytes"):
        execute("alloca.u64 %d2, 16384; st.local.u32 [%d2+16384], %r1;")
    with pytest.raises(IllegalAccess, match="local access of 4 bytes"):
        execute("alloca.u64 %d2, 100000; st.local.u32 [%d2+99996], %r1;")


@pytest.mark.parametrize(("instruction", "message"), [
    ("alloca.u64 %d2, 16, 24", "alloca aligned to 24 bytes; powers of two up to 256"),
    ("alloca.u32 %r2, 16", "opcode 'alloca.u32' is not implemented"),
    ("alloca.u64 %d2", "alloca two or three"),
    ("alloca.u64 %r2, 16; stacksave.u64 %r2", "a register of type .b32"),
])  # fmt: skip
def test_other_forms_are_refused(instruction: str, message: str) -> None:
    with pytest.raises(UnsupportedPTX, match=message):
        execute(f"{instruction};")
