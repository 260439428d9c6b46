"""ptxas takes the qualifiers of an opcode in any order, and public code writes ``red.global.v4.f32.add``."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import UnsupportedPTX
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch


def test_types_may_stand_in_front() -> None:
    """Loads, arithmetic, comparisons, conversions and vectors of additions, which generic addresses have as well."""
    given = aligned(np.array([1.25, -2.5, 3.75, 4.0], np.float32))
    sums = aligned(np.arange(4, dtype=np.float32))
    halves = aligned(np.ones(8, np.float16))
    words = aligned(np.zeros(4, np.uint32))
    body = """
        .reg .f32 %f<9>; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d2, [p2]; ld.param.u64 %d3, [p3];
        ld.v4.f32.global {%f0, %f1, %f2, %f3}, [%d0];
        red.global.v4.f32.add [%d1], {%f0, %f1, %f2, %f3};
        red.v2.f32.add [%d1], {%f0, %f1};
        atom.v2.f32.global.add {%f4, %f5}, [%d1+8], {%f0, %f1};
        mov.b32 %r1, 0x40003C00; red.global.v4.f16x2.add.noftz [%d2], {%r1, %r1, %r1, %r1};
        fma.ftz.rn.f32 %f6, %f0, %f1, %f2; add.f32.rn %f6, %f6, %f5; setp.f32.lt %p1, %f6, %f0;
        cvt.u32.f32.rzi %r2, %f3; selp.u32 %r3, 7, 9, %p1;
        st.v2.u32.global [%d3], {%r2, %r3}; st.f32.global [%d3+8], %f6; ret;"""
    launch(module(body, parameters=4), given, sums, halves, words, block=1)
    a, b, c, d = given.tolist()
    assert sums.tolist() == [0 + 2 * a, 1 + 2 * b, 2 + c + a, 3 + d + b]
    assert halves.tolist() == [2.0, 3.0] * 4
    result = a * b + c + (3 + d)
    assert words[:2].tolist() == [4, 7 if result < a else 9] and words[2:3].view(np.float32)[0] == result


@pytest.mark.parametrize(
    ("line", "message"),
    [("red.shared.v2.f32.add [%r1], {%r2, %r3};", "qualifiers .v2 and .shared do not go together"),
     ("add.f32.rni %r1, %r1, %r1;", "rni"), ("vadd.s32.s32.s32.sat %r1, %r1, %r2, %r3;", "vadd")],
)  # fmt: skip
def test_what_no_order_makes_legal(line: str, message: str) -> None:
    with pytest.raises(UnsupportedPTX, match=message):
        launch(module(f"mov.u32 %r1, dynamic; {line} ret;", parameters=0), dynamic_smem=64)
