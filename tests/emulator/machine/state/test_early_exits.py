"""Lanes that leave a kernel early, as ``if (..) return;`` has them: nothing that comes then waits for them."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

#: Odd threads leave at once, as ``if (..) return;`` is compiled; the others write what %r4 has become.
LEAVE = """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4; add.s64 %d1, %d1, %d2;
    mov.u32 %r3, 0; mov.u32 %r4, %r1; and.b32 %r2, %r1, 1; setp.ne.u32 %p1, %r2, 0;
    {leave}
    {together}
    st.global.u32 [%d1], %r4;
$last:
    ret;
"""
LEAVES = {
    "predicated": "@%p1 exit;",
    "a branch to the only ret": "@%p1 bra $last;",
    "one that jumps there": "@%p1 bra $jump; bra $on; $jump: bra $last; $on:",
    "around a ret": "@!%p1 bra $on; ret; $on:",
    "in two steps": "setp.gt.u32 %p2, %r1, 9; and.pred %p2, %p2, %p1; @%p2 bra $last; @%p1 bra $last;",
    "in a loop": "$again: @%p1 bra $last; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 3; @%p2 bra $again;",
}
TOGETHER = {
    "bar.sync": ("bar.sync 0;", lambda t: t),
    "barrier.sync": ("barrier.sync 0;", lambda t: t),
    "cluster barrier": ("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", lambda t: t),
    "bar.warp.sync": ("bar.warp.sync -1;", lambda t: t),
    "shfl": ("shfl.sync.bfly.b32 %r4, %r1, 2, 31, -1;", lambda t: t ^ 2),
    "vote": ("vote.sync.ballot.b32 %r4, 1, -1;", lambda t: 0x55555555),
    "redux": ("redux.sync.add.u32 %r4, %r1, -1;", lambda t: sum(range(t // 32 * 32, t // 32 * 32 + 32, 2))),
    "match": ("match.any.sync.b32 %r4, 7, -1;", lambda t: 0x55555555),
}


@pytest.mark.parametrize("together", TOGETHER)
@pytest.mark.parametrize("leave", LEAVES)
def test_lanes_that_left_are_not_waited_for(leave: str, together: str) -> None:
    """Barriers and exchanges are for the threads of a mask or CTA that have not exited (PTX ISA)."""
    text, expected = TOGETHER[together]
    out = aligned(np.full(64, 1, np.uint32))
    launch(module(LEAVE.format(leave=LEAVES[leave], together=text), parameters=1), out, block=(64, 1, 1))
    assert out.tolist() == [expected(t) if t % 2 == 0 else 1 for t in range(64)]


@pytest.mark.parametrize("together", ["bar.sync", "shfl", "vote"])
def test_lanes_that_have_more_to_do_are(together: str) -> None:
    """Those that meet the others again behind the barrier have not exited."""
    body = LEAVE.replace("$last:", "$last: bar.sync 1, 64;").format(
        leave="@%p1 bra $last;", together=TOGETHER[together][0]
    )
    with pytest.raises(BarrierMisuse):
        launch(module(body, parameters=1), aligned(np.zeros(64, np.uint32)), block=(64, 1, 1))
