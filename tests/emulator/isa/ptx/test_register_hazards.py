"""Registers that tcgen05.ld has still to write."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.testing.ptx import THREAD_OUTPUT, module
from tests.emulator.ptx_launch import launch

LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r20];"
WAIT = "tcgen05.wait::ld.sync.aligned;"
STORE = "st.global.b32 [%d1], %r9;"


def kernel(body: str) -> str:
    """Two columns of tensor memory hold tid + 5 and 3 * tid; what ``body`` leaves in %r9 is the result."""
    return module(
        f"""{THREAD_OUTPUT} tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic], 32; bar.warp.sync -1;
        ld.shared.b32 %r20, [dynamic]; add.s32 %r3, %r1, 5; mul.lo.u32 %r4, %r1, 3; mov.b32 %r9, 0; mov.b32 %r8, 0;
        mov.b32 %r6, 0;
        tcgen05.st.sync.aligned.32x32b.x2.b32 [%r20], {{%r3, %r4}}; tcgen05.wait::st.sync.aligned;
        {body} {STORE} {WAIT} tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32; ret;""",
        parameters=1,
    )


SOUND = [
    (f"{LOAD} {WAIT} add.s32 %r9, %r6, %r7;", lambda n: 4 * n + 5),
    (f"L: {LOAD} add.s32 %r8, %r8, 1; {WAIT} add.s32 %r9, %r9, %r6; setp.lt.u32 %p1, %r8, 3; @%p1 bra L;",
     lambda n: 3 * (n + 5)),
    # A true dependency orders the reader after the load, and what overwrites the register after the reader.
    (f"{LOAD} add.s32 %r9, %r6, %r7; mov.b32 %r6, 0; add.s32 %r9, %r9, %r6;", lambda n: 4 * n + 5),
    (f"{LOAD} mov.b64 %d5, {{%r6, %r7}}; cvt.u32.u64 %r9, %d5;", lambda n: n + 5),
    # Nothing reads %r7, so that it does not matter which load writes it last.
    (f"L: {LOAD} add.s32 %r9, %r6, %r9; add.s32 %r8, %r8, 1; setp.lt.u32 %p1, %r8, 3; @%p1 bra L;",
     lambda n: 3 * (n + 5)),
    (f"{LOAD} {WAIT} mov.b32 %r6, 1; mov.b32 %r9, %r6;", lambda n: 1),
    # Overwritten too early, and once more when the load is over.
    (f"{LOAD} mov.b32 %r6, 1; {WAIT} mov.b32 %r6, 2; mov.b32 %r9, %r6;", lambda n: 2),
]  # fmt: skip
FAULTY = [
    (f"{LOAD} mov.b32 %r7, 0; {WAIT} mov.b32 %r9, %r7;", "%r7"),
    (f"{LOAD} add.s32 %r9, %r6, 1; mul.lo.u32 %r7, %r4, %r4; add.s32 %r9, %r9, %r7; {WAIT}", "%r7"),
    (f"{LOAD} {LOAD} {WAIT} add.s32 %r9, %r6, 1;", "%r6"),
    # Some lanes may not have read it.
    (f"setp.eq.u32 %p1, %r1, 1; {LOAD} @%p1 mov.b32 %r9, %r6; mov.b32 %r6, 0; {WAIT} mov.b32 %r9, %r6;", "%r6"),
    # Not waited for on one of two ways.
    (f"setp.eq.u32 %p1, %r8, 1; {LOAD} @%p1 bra SKIP; {WAIT} SKIP: mov.b32 %r6, 1; mov.b32 %r9, %r6;", "%r6"),
    # The second time round it may be overwritten.
    (f"L: add.s32 %r9, %r6, %r9; mov.b32 %r6, 0; {LOAD} add.s32 %r8, %r8, 1; setp.lt.u32 %p1, %r8, 3; @%p1 bra M;"
     "bra END; M: mov.b32 %r6, 3; bra L; END:", "%r6"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), SOUND)
def test_registers_read_or_waited_for_before_they_are_overwritten(body: str, expected):
    out = np.zeros(32, np.uint32)
    launch(kernel(body), out)
    assert out.tolist() == [expected(n) for n in range(32)]


@pytest.mark.parametrize(("body", "register"), FAULTY)
def test_registers_overwritten_before_the_wait(body: str, register: str):
    out = np.zeros(32, np.uint32)
    message = rf"register {register} is overwritten at PTX line \d+ .* while the tcgen05.ld at PTX line \d+"
    with pytest.raises(IllegalAccess, match=message):
        launch(kernel(body), out)
    launch(kernel(body), out, options=Options(detectors=False))
