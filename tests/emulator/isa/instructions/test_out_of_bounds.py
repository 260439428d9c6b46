"""Accesses beyond the end of a memory have the kind that says so, in every state space."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch

#: Space -> an access within it, and the same one beyond its end. The local array has 16 bytes, the parameter 8.
ACCESSES = {
    "global": ("ld.global.b32 %r1, [%d0+252];", "ld.global.b32 %r1, [%d0+4096];"),
    "shared": ("ld.shared.b32 %r1, [dynamic+64];", "ld.shared.b32 %r1, [dynamic+65536];"),
    "local": ("st.local.b32 [%d1+12], %r0;", "st.local.b32 [%d1+16], %r0;"),
    "parameters": ("ld.param.b32 %r1, [p0+4];", "ld.param.b32 %r1, [p0+8];"),
}


def run(access: str) -> None:
    body = f""".local .align 8 .b8 depot[16];
        ld.param.b64 %d0, [p0]; mov.u32 %r0, %tid.x; mov.b64 %d1, depot; st.shared.b32 [dynamic+64], %r0;
        {access} ret;"""
    launch(module(body, parameters=1), np.zeros(64, np.uint32), block=(1, 1, 1))


@pytest.mark.parametrize("space", ACCESSES)
def test_the_kind(space: str):
    inside, beyond = ACCESSES[space]
    run(inside)
    with pytest.raises(IllegalAccess) as caught:
        run(beyond)
    assert caught.value.kind == "out-of-bounds"
