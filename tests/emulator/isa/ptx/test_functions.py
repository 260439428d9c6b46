"""Device functions: calls give what Python functions of the same definition give, and what is not called is skipped."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator.errors import EmulatorError, IllegalAccess, UnsupportedPTX
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
.func odd(.param .f128 a) { ret; }
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
    [("call (%d2), big, (%d1);", "not.an.opcode"),
     ("call odd, (%r1);", "call of odd: a parameter or result `.param .f128 a`"),
     ("call elsewhere, (%r1);", "of functions outside of the module, only vprintf"),
     ("call keep, (%d1);", "call of keep with 1 arguments, not 2"),
     ("call (%r2), keep, (%d1, %r1);", "call of keep with 1 results, not 0"),
     ("call keep, (%d1, %r999);", "%r999 is not declared")],
)  # fmt: skip
def test_calls_that_are_refused(call: str, message: str):
    with pytest.raises(UnsupportedPTX, match=message):
        execute(f"{call} ret;", COLLATZ + TWICE + UNUSED)


STRUCTURES = """
.func (.param .align 8 .b8 out[24]) turned(.param .align 8 .b8 in[24], .param .b32 scale) {
    .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .b16 %h;
    ld.param.v2.b32 {%r1, %r2}, [in]; ld.param.b64 %d1, [in+8]; ld.param.b32 %r3, [in+16]; ld.param.u8 %h, [in+21];
    ld.param.b32 %r4, [scale]; mul.lo.u32 %r1, %r1, %r4; cvt.u32.u16 %r5, %h; add.u64 %d1, %d1, 1;
    st.param.b32 [out+4], %r1; st.param.b32 [out], %r2; st.param.v2.b32 [out+16], {%r5, %r3};
    st.param.b64 [out+8], %d1; ret; }
"""


def test_structures_are_passed_and_returned():
    """Parts of other sizes and places are read than were written; the first result is the second call's argument."""
    one = """{ .param .align 8 .b8 a[24]; .param .b32 s; .param .align 8 .b8 r[24]; st.param.v2.b64 [a], {%d5, %d6};
        st.param.v2.b32 [a+16], {%r1, %r2}; st.param.b32 [s], 3; call.uni (r), turned, (a, s);
        ld.param.b64 %d5, [r+0]; ld.param.b64 %d6, [r+8]; ld.param.v2.b32 {%r1, %r2}, [r+16]; }"""
    body = f"""mov.b32 %r5, 7; mov.b64 %d5, {{%r5, %r1}}; mov.b64 %d6, 40; mov.b32 %r2, 0x00BB00; {one} {one}
        mov.b64 {{%r3, %r4}}, %d5; cvt.u32.u64 %r5, %d6; mad.lo.u32 %r3, %r3, 1000, %r4;
        mad.lo.u32 %r3, %r5, 100000, %r3;
        xor.b32 %r3, %r3, %r1; xor.b32 %r3, %r3, %r2; call keep, (%d1, %r3); ret;"""
    expected = []
    for lane in range(32):
        first, second, count, low, high = 7, lane, 40, lane, 0xBB00
        for _ in range(2):
            first, second, count, low, high = second, 3 * first, count + 1, high >> 8 & 255, low
        expected.append(first * 1000 + second + count * 100_000 ^ low ^ high)
    assert execute(body, COLLATZ + TWICE + STRUCTURES) == expected


#: Two functions that call each other, with an array and predicates that live over the calls; one that hands its own
#: array down to itself; and one that calls itself twice under guards, once with what the other call gave.
THEMSELVES = """
.func (.param .b32 out) odd(.param .b32 n);
.func (.param .b32 out) even(.param .b32 n) { .reg .b32 %r<4>; .reg .pred %p; ld.param.b32 %r1, [n];
    setp.eq.u32 %p, %r1, 0; mov.b32 %r2, 1; @%p bra GIVE; sub.u32 %r3, %r1, 1; call (%r2), odd, (%r3);
    GIVE: st.param.b32 [out], %r2; ret; }
.func (.param .b32 out) odd(.param .b32 n) { .local .align 4 .b8 kept[16];
    .reg .b32 %r<9>; .reg .b64 %d<3>; .reg .pred %p<3>;
    ld.param.b32 %r1, [n]; setp.eq.u32 %p1, %r1, 0; st.param.b32 [out], 0; @%p1 ret;
    mov.b64 %d1, kept; and.b32 %r2, %r1, 3; mul.wide.u32 %d2, %r2, 4; add.u64 %d1, %d1, %d2; st.local.b32 [%d1], %r1;
    setp.gt.u32 %p2, %r1, 4; sub.u32 %r3, %r1, 1; call (%r4), even, (%r3);
    ld.local.b32 %r5, [%d1]; mad.lo.u32 %r4, %r5, 100, %r4; @%p2 add.u32 %r4, %r4, 7; st.param.b32 [out], %r4; ret; }
.func (.param .b32 out) down(.param .b64 where, .param .b32 n) { .local .align 8 .b8 own[8];
    .reg .b32 %r<9>; .reg .b64 %d<4>;
    .reg .pred %p; ld.param.b64 %d1, [where]; ld.param.b32 %r1, [n]; ld.local.b32 %r2, [%d1]; st.param.b32 [out], %r2;
    setp.eq.u32 %p, %r1, 0; @%p ret; mad.lo.u32 %r3, %r2, 3, %r1; st.local.b32 [own], %r3; mov.b64 %d2, own;
    sub.u32 %r4, %r1, 1; call (%r5), down, (%d2, %r4); st.local.b32 [%d1], %r5; ld.local.b32 %r6, [own];
    add.u32 %r6, %r6, %r5; st.param.b32 [out], %r6; ret; }
.func (.param .b32 out) tree(.param .b32 n, .param .b32 x) { .reg .b32 %r<9>; .reg .pred %p<3>; ld.param.b32 %r1, [n];
    ld.param.b32 %r2, [x]; mov.b32 %r5, %r2; setp.eq.u32 %p1, %r1, 0; sub.u32 %r3, %r1, 1; and.b32 %r4, %r2, 1;
    setp.ne.u32 %p2, %r4, 0; @%p1 bra GIVE; @%p2 call (%r5), tree, (%r3, %r1); mad.lo.u32 %r6, %r2, 5, %r5;
    @!%p2 call (%r5), tree, (%r3, %r6); xor.b32 %r5, %r5, %r6; GIVE: st.param.b32 [out], %r5; ret; }
"""


def even(n: int) -> int:
    return odd(n - 1) if n else 1


def odd(n: int) -> int:
    return even(n - 1) + 100 * n + 7 * (n > 4) if n else 0


def down(cell: list[int], n: int) -> int:
    if not n:
        return cell[0]
    own = [cell[0] * 3 + n]
    given = down(own, n - 1)
    cell[0] = given
    return own[0] + given


def tree(n: int, x: int) -> int:
    if not n:
        return x
    given = tree(n - 1, n) if x & 1 else x
    mixed = x * 5 + given & 0xFFFFFFFF
    given = tree(n - 1, mixed) if not x & 1 else given
    return given ^ mixed


def test_functions_that_call_themselves():
    """Each lane to another depth."""
    calls = {
        "rem.u32 %r2, %r1, 9; call (%r2), even, (%r2);": [even(n % 9) for n in range(32)],
        "mov.b64 %d4, mine; st.local.b32 [%d4], %r1; and.b32 %r2, %r1, 7; call (%r2), down, (%d4, %r2);":
            [down([n], n & 7) for n in range(32)],
        "shr.u32 %r2, %r1, 2; call (%r2), tree, (%r2, %r1);": [tree(n >> 2, n) for n in range(32)],
        "setp.gt.u32 %p1, %r1, 9; mov.b32 %r2, 5; @%p1 call (%r2), even, (6); call (%r2), tree, (4, %r2);":
            [tree(4, even(6) if n > 9 else 5) for n in range(32)],
    }  # fmt: skip
    for call, expected in calls.items():
        body = f".local .align 8 .b8 mine[8]; {call} call keep, (%d1, %r2); ret;"
        assert execute(body, COLLATZ + TWICE + THEMSELVES) == expected


def test_calls_without_end_leave_the_stack():
    for name in ("endless", "there"):
        with pytest.raises(IllegalAccess, match="local access of 4 bytes"):
            execute(f"call {name}, (%r1); ret;", COLLATZ + TWICE + UNUSED)


POINTERS = """
.func (.param .b32 out) once(.param .b32 n) {
    .reg .b32 %r; ld.param.b32 %r, [n]; add.u32 %r, %r, 1; st.param.b32 [out], %r; }
.func (.param .b32 out) again(.param .b32 n) {
    .reg .b32 %r; ld.param.b32 %r, [n]; mul.lo.u32 %r, %r, %r; st.param.b32 [out], %r; }
.func (.param .b32 out) over(.param .b32 n) { .reg .b32 %r<3>; .reg .b64 %d; .reg .pred %p; ld.param.b32 %r1, [n];
    ld.global.b64 %d, [table+16]; setp.gt.u32 %p, %r1, 30; st.param.b32 [out], %r1; @%p ret; add.u32 %r1, %r1, 4;
    P: .callprototype (.param .b32 _) _ (.param .b32 _); call (%r2), %d, (%r1), P; st.param.b32 [out], %r2; }
.func wider(.param .b64 n) { ret; }
.global .b64 table[5] = {once, again, over, wider, 0}; .global .align 8 .b64 place = generic(table)+8;
"""


def test_calls_by_address():
    """Functions out of a table, whose place another variable has, and one that calls itself so."""
    body = """ld.global.b64 %d2, [place]; and.b32 %r2, %r1, 1; mul.wide.u32 %d3, %r2, 8; add.u64 %d3, %d2, %d3;
        ld.global.b64 %d4, [%d3]; P: .callprototype (.param .b32 _) _ (.param .b32 _); call (%r3), %d4, (%r1), P;
        mov.b64 %d5, once; setp.lt.u32 %p1, %r1, 20; @%p1 call (%r3), %d5, (%r3), P; call keep, (%d1, %r3); ret;"""

    def over(n: int) -> int:
        return n if n > 30 else over(n + 4)

    expected = [(over(n) if n & 1 else n * n) + (n < 20) for n in range(32)]
    assert execute(body, COLLATZ + TWICE + POINTERS) == expected


@pytest.mark.parametrize(
    "pointer", ["ld.global.b64 %d2, [table+32]", "ld.global.b64 %d2, [table+24]", "mov.b64 %d2, 5"],
)  # fmt: skip
def test_an_address_of_no_function_of_the_type_stops(pointer: str):
    body = f"{pointer}; P: .callprototype (.param .b32 _) _ (.param .b32 _); call (%r3), %d2, (%r1), P; ret;"
    with pytest.raises(EmulatorError, match="trap"):
        execute(body, COLLATZ + TWICE + POINTERS)


def test_an_initialiser_names_variables():
    with pytest.raises(ValueError, match="names nothing, which is no variable of the module"):
        execute("ret;", ".global .b64 place = nothing;")


def test_a_report_names_the_line_in_the_function():
    functions = ".func stop(.param .b32 a) {\n .reg .b32 %r;\n ld.param.b32 %r, [a];\n ld.shared.b32 %r, [%r];\n ret; }"
    with pytest.raises(EmulatorError, match=r"ld.shared.b32 %r, \[%r\]") as caught:
        execute("mov.b32 %r2, dynamic; call stop, (%r2); ret;", functions)
    text = module("", parameters=1, head=functions)
    assert text.splitlines()[caught.value.ptx_line - 1].strip().startswith("ld.shared")
