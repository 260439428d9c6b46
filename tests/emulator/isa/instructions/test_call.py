"""vprintf, __assertfail, indirect branches: what compilers put around kernels."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cute_kernels.emulator import EmulatorError, UnsupportedPTX, run
from cute_kernels.emulator.isa.instructions.call import formatted

HEAD = """
.version 8.6
.target sm_90a
.address_size 64
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 a, .param .b64 b);
.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
.global .align 1 .b8 format[] = {108, 37, 50, 117, 58, 37, 46, 50, 102, 33, 10, 0};
.global .align 1 .b8 what[6] = {120, 32, 62, 32, 49, 0};
"""
PRINT = (
    HEAD
    + """
.visible .entry k(.param .u64 out) {
    .local .align 8 .b8 depot[16];
    .reg .b64 %x<9>; .reg .b32 %r<9>; .reg .pred %p; .reg .f64 %f;
    ld.param.u64 %x0, [out];
    mov.b64 %x1, depot;
    cvta.local.u64 %x2, %x1;
    mov.u32 %r0, %tid.x;
    and.b32 %r1, %r0, 7;
    setp.ne.b32 %p, %r1, 3;
    @%p bra DONE;
    st.local.u32 [%x1], %r0;
    cvt.rn.f64.u32 %f, %r0;
    st.local.f64 [%x1+8], %f;
    {
    .param .b64 param0;
    .param .b64 param1;
    .param .b32 retval0;
    mov.b64 %x3, format;
    cvta.global.u64 %x4, %x3;
    st.param.b64 [param0], %x4;
    st.param.b64 [param1], %x2;
    call.uni (retval0), vprintf, (param0, param1);
    ld.param.b32 %r2, [retval0];
    }
    mul.wide.u32 %x5, %r0, 4;
    add.s64 %x5, %x0, %x5;
    st.global.u32 [%x5], %r2;
DONE:
    ret;
}
"""
)


def launch(text: str, **options: object) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    run(text, args=[out], grid=(1, 1, 1), block=(32, 1, 1), **options)
    return out


def test_printf_prints_the_active_lanes_in_order(capsys) -> None:
    out = launch(PRINT)
    assert capsys.readouterr().out == "".join(f"l{lane:2}:{lane:.2f}!\n" for lane in (3, 11, 19, 27))
    assert out[3::8].tolist() == [2] * 4 and out.sum() == 8


@pytest.mark.parametrize(
    "template, values, expected",
    [
        ("%d %i|", [("<i", -5), ("<i", 7)], "-5 7|"),
        ("%u %x %#X %o", [("<I", 4294967295), ("<I", 255), ("<I", 255), ("<I", 8)], "4294967295 ff 0XFF 10"),
        ("%c%%%5.1f%-4d|", [("<i", 65), ("<d", 2.25), ("<i", 3)], "A%  2.23   |"),
        ("%lld %llx %e", [("<q", -(1 << 40)), ("<Q", 1 << 63), ("<d", 0.5)], f"{-(1 << 40)} 8{'0' * 15} 5.000000e-01"),
        ("%d%lf%d", [("<i", 1), ("<d", 1.0), ("<i", 2)], "11.0000002"),
        ("%s|%p", [("<Q", 4096), ("<Q", 4096)], "text|0x1000"),
    ],
)
def test_conversions_and_alignment(template: str, values: list, expected: str) -> None:
    """C's printf says what to expect; arguments lie one after the other, each aligned to its size."""
    buffer = b""
    for kind, value in values:
        raw = struct.pack(kind, value)
        buffer += bytes(-len(buffer) % len(raw)) + raw
    text, count = formatted(template, lambda at, n: buffer[at : at + n], {4096: "text"}.get)
    assert (text, count) == (expected, len(values))


@pytest.mark.parametrize("template", ["%2000000000d", "%.2000000000f", "%4096d", "%-9999999999999999999x", "%.4096s"])
def test_conversions_wider_than_c_promises_are_refused(template: str) -> None:
    with pytest.raises(UnsupportedPTX, match="widths and precisions up to 4095 are printed"):
        formatted(template, lambda at, n: bytes(n), lambda address: "")
    allowed, _ = formatted("%4095d%.4095x", lambda at, n: b"\1" + bytes(n - 1), str)
    assert allowed == f"{1:4095}{1:04095}"


ASSERT = PRINT.replace("call.uni (retval0), vprintf, (param0, param1);", """
    .param .b32 line;
    st.param.b32 [line], 42;
    mov.b64 %x6, what;
    st.param.b64 [param0], %x6;
    call.uni __assertfail, (param0, param0, line, param0, param1);
    mov.b32 retval0, 0;
""")


def test_failed_assertions_are_raised() -> None:
    with pytest.raises(EmulatorError, match=r"assertion `x > 1` failed in x > 1 \(x > 1:42\), lane 3"):
        launch(ASSERT)


def test_other_functions_are_refused() -> None:
    with pytest.raises(UnsupportedPTX, match="only vprintf and __assertfail"):
        launch(PRINT.replace("vprintf", "malloc"))


BRANCHES = HEAD + """
.visible .entry k(.param .u64 out) {
    .reg .b64 %x<9>; .reg .b32 %r<9>;
TABLE:
    .branchtargets A, B, C;
    ld.param.u64 %x0, [out];
    mov.u32 %r0, %tid.x;
    rem.u32 %r1, %r0, 3;
    brx.idx %r1, TABLE;
A:  mov.u32 %r2, 100;
    bra JOIN;
B:  add.u32 %r2, %r0, 1000;
    bra JOIN;
C:  mul.lo.u32 %r2, %r0, %r0;
JOIN:
    mul.wide.u32 %x5, %r0, 4;
    add.s64 %x5, %x0, %x5;
    st.global.u32 [%x5], %r2;
    ret;
}
"""


def test_indirect_branches_diverge_and_meet() -> None:
    expected = [(100, 1000 + lane, lane * lane)[lane % 3] for lane in range(32)]
    assert launch(BRANCHES).tolist() == expected
    with pytest.raises(UnsupportedPTX, match="without a table"):
        launch(BRANCHES.replace("TABLE:", "OTHER:"))


def test_special_registers_of_shared_memory() -> None:
    text = BRANCHES.replace("mov.u32 %r2, 100;", "mov.u32 %r2, %dynamic_smem_size;")
    assert launch(text, dynamic_smem=768)[::3].tolist() == [768] * 11
