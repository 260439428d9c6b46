"""Device functions: calls give what Python functions of the same definition give, and what is not called is skipped."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator.errors import EmulatorError, UnsupportedPTX
from cute_kernels.testing.ptx import THREAD_OUTPUT, module
from tests.emulator.ptx_launch import launch

#: As compilers write them: the Collatz steps of a number up to a limit, which returns early and from a loop ...
COLLATZ = """
.func (.param .b32 func_retval0) collatz(.param .b32 collatz_param_0, .param .b32 collatz_param_1) {
    .reg .pred %p<5>; .reg .b32 %r<9>;
    ld.param.u32 %r1, [collatz_param_0]; ld.param.u32 %r2, [collatz_param_1];
    mov.b32 %r3, 0; setp.eq.u32 %p1, %r1, 0; @%p1 bra GIVE;
AGAIN:
    setp.eq.u32 %p2, %r1, 1; @%p2 bra GIVE;
    setp.ge.u32 %p3, %r3, %r2; st.param.b32 [func_retval0+0], %r2; @%p3 ret;
    and.b32 %r4, %r1, 1; setp.ne.u32 %p4, %r4, 0; shr.u32 %r5, %r1, 1; mad.lo.u32 %r6, %r1, 3, 1;
    selp.b32 %r1, %r6, %r5, %p4; add.u32 %r3, %r3, 1; bra.uni AGAIN;
GIVE: st.param.b32 [func_retval0], %r3; ret;
}
"""
#: ... one that calls it twice, with local memory; and one without a result.
TWICE = """
.visible .func (.param .b64 out) twice(.param .b64 first, .param .b32 limit)
.noreturn
{
    .local .align 8 .b8 depot[8]; .reg .b32 %r<9>; .reg .b64 %d<9>;
    ld.param.b64 %d1, [first]; cvt.u32.u64 %r1, %d1; ld.param.b32 %r2, [limit]; mov.b64 %d2, depot;
    { .param .b32 a; .param .b32 b; .param .b32 c; st.param.b32 [a+0], %r1; st.param.b32 [b], %r2;
      call.uni (c), collatz, (a, b); ld.param.b32 %r3, [c+0]; }
    st.local.b32 [%d2], %r3;
    add.u32 %r4, %r1, 1;
    { .param .b32 a; .param .b32 b; .param .b32 c; st.param.b32 [a], %r4; st.param.b32 [b], %r2;
      call (c), collatz, (a, b); ld.param.b32 %r3, [c]; }
    ld.local.b32 %r5, [%d2]; mul.wide.u32 %d3, %r5, 1000; cvt.u64.u32 %d4, %r3; add.u64 %d3, %d3, %d4;
    st.param.b64 [out], %d3; ret.uni;
}
.func keep(.param .b64 where, .param .b32 what) { .reg .b64 %d<2>; .reg .b32 %r;
    ld.param.b64 %d1, [where]; ld.param.b32 %r, [what]; st.global.b32 [%d1], %r; }
"""
DECLARED = """.func (.param .b64 out) twice(.param .b64 first, .param .b32 limit);
.func (.param .b32 func_retval0) collatz(.param .b32 a, .param .b32 b);"""


def collatz(number: int, limit: int) -> int:
    steps = 0
    while number > 1:
        if steps >= limit:
            return limit
        number, steps = (3 * number + 1 if number & 1 else number // 2), steps + 1
    return steps


def execute(body: str, functions: str) -> list[int]:
    out = np.zeros(32, np.uint32)
    launch(module(f"{THREAD_OUTPUT} {body}", parameters=1, head=functions), out)
    return out.tolist()


def test_calls():
    """Registers and labels have the names of the caller's; lanes return at different times."""
    body = """{ .param .b64 a; .param .b32 b; .param .b64 c; cvt.u64.u32 %d5, %r1; st.param.b64 [a], %d5;
        st.param.b32 [b], 20; call.uni (c), twice, (a, b); ld.param.b64 %d6, [c]; }
        cvt.u32.u64 %r2, %d6; AGAIN: add.u32 %r2, %r2, %r1; call.uni keep, (%d1, %r2); ret;"""
    expected = [1000 * collatz(n, 20) + collatz(n + 1, 20) + n for n in range(32)]
    for functions in (COLLATZ + TWICE, DECLARED + TWICE + COLLATZ):
        assert execute(body, functions) == expected


def test_calls_by_some_lanes():
    """Under a guard, behind a branch, and with literals for arguments."""
    body = """setp.lt.u32 %p1, %r1, 9; mov.b32 %r2, 77; mov.b32 %r3, 0; @%p1 call (%r2), collatz, (%r1, 5);
        setp.gt.u32 %p2, %r1, 20; @!%p2 bra STORE; @!%p1 call (%r3), collatz, (27, %r1);
        STORE: mad.lo.u32 %r2, %r2, 100, %r3; call keep, (%d1, %r2); ret;"""
    expected = [
        100 * (collatz(n, 5) if n < 9 else 77) + (collatz(27, n) if n > 20 else 0) for n in range(32)
    ]  # fmt: skip
    assert execute(body, COLLATZ + TWICE) == expected


UNUSED = """
.func (.param .align 8 .b8 out[16]) big(.param .align 8 .b8 in[16]) { not.an.opcode %r1; ret; }
.func endless(.param .b32 a) { .reg .b32 %r; ld.param.b32 %r, [a]; call endless, (%r); ret; }
.func there(.param .b32 a) { call back, (a); ret; } .func back(.param .b32 a) { call there, (a); ret; }
.extern .func elsewhere(.param .b32 a);
"""


NARROW = """
.func (.param .b32 out) narrow(.param .b32 a, .param .b32 b, .param .b32 c) {
    .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b64 %d;
    ld.param.s8 %h1, [a]; ld.param.u8 %r1, [b]; ld.param.s16 %d, [c];
    cvt.s32.s16 %r2, %h1; cvt.u32.u64 %r3, %d; mad.lo.s32 %r4, %r2, 1000, %r1; add.s32 %r4, %r4, %r3;
    { .param .b32 d; st.param.b8 [d], %r4; ld.param.b8 %r5, [d]; } xor.b32 %r4, %r4, %r5;
    st.param.b32 [out], %r4; ret; }
"""


def test_parameters_that_are_wider_than_what_is_passed():
    """As nvcc passes char and short: only the value's own bits count, and its sign fills a wider register."""
    body = """mad.lo.u32 %r2, %r1, 0x01235F85, 0x7DC3A1B7; call (%r3), narrow, (%r2, %r2, %r2);
        call keep, (%d1, %r3); ret;"""
    values = np.arange(32, dtype=np.uint32) * np.uint32(0x01235F85) + np.uint32(0x7DC3A1B7)
    low = values.view(np.int8).reshape(32, 4)[:, 0].astype(np.int32)
    total = low * 1000 + (values & 255).astype(np.int32) + values.view(np.int16).reshape(32, 2)[:, 0]
    assert execute(body, NARROW + COLLATZ + TWICE) == (total ^ (total & 255)).view(np.uint32).tolist()


def test_functions_that_are_not_called_are_skipped():
    assert execute("st.global.b32 [%d1], %r1; ret;", UNUSED) == list(range(32))


@pytest.mark.parametrize(
    ("call", "message"),
    [("call (%r2), big, (%r1);", r"call of big: a parameter or result `.param .align 8 .b8 out \[ 16 \]` is not impl"),
     ("call endless, (%r1);", "endless calls itself"), ("call there, (%r1);", "there calls itself"),
     ("call elsewhere, (%r1);", "of functions outside of the module, only vprintf"),
     ("call keep, (%d1);", "call of keep with 1 arguments, not 2"),
     ("call (%r2), keep, (%d1, %r1);", "call of keep with 1 results, not 0"),
     ("call keep, (%d1, %r999);", "%r999 is not declared")],
)  # fmt: skip
def test_calls_that_are_refused(call: str, message: str):
    with pytest.raises(UnsupportedPTX, match=message):
        execute(f"{call} ret;", COLLATZ + TWICE + UNUSED)


def test_a_report_names_the_line_in_the_function():
    functions = ".func stop(.param .b32 a) {\n .reg .b32 %r;\n ld.param.b32 %r, [a];\n ld.shared.b32 %r, [%r];\n ret; }"
    with pytest.raises(EmulatorError, match=r"ld.shared.b32 %r, \[%r\]") as caught:
        execute("mov.b32 %r2, dynamic; call stop, (%r2); ret;", functions)
    text = module("", parameters=1, head=functions)
    assert text.splitlines()[caught.value.ptx_line - 1].strip().startswith("ld.shared")
