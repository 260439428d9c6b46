"""Exchange between the lanes of a warp, lane by lane as the PTX ISA says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator.errors import BarrierMisuse
from cute_kernels.testing.ptx import module
from tests.emulator.machine.state.test_warp import LANES, M32, per_thread
from tests.emulator.ptx_launch import launch


def shuffle(mode: str, values: np.ndarray, b: np.ndarray, c: int) -> tuple[list[int], list[int]]:
    """The PTX ISA's description of shfl, lane by lane."""
    out, valid = [], []
    for lane in range(32):
        segment, clamp, bval = c >> 8 & 31, c & 31, int(b[lane]) & 31
        top = (lane & segment) | (clamp & ~segment & 31)
        low = lane & segment
        source, ok = {
            "up": (lane - bval, lane - bval >= top),
            "down": (lane + bval, lane + bval <= top),
            "bfly": (lane ^ bval, (lane ^ bval) <= top),
            "idx": (low | (bval & ~segment & 31), (low | (bval & ~segment & 31)) <= top),
        }[mode]
        out.append(int(values[source if ok else lane]))
        valid.append(int(ok))
    return out, valid


@given(
    mode=st.sampled_from(["up", "down", "bfly", "idx"]),
    width=st.sampled_from([1, 2, 4, 8, 16, 32]),
    b=st.one_of(st.integers(0, 31), st.lists(st.integers(0, 40), min_size=32, max_size=32)),
)
def test_shuffles(mode: str, width: int, b: int | list[int]):
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    values = (LANES * 7919 + 3).astype(np.uint32)
    offsets = np.broadcast_to(np.array(b, np.uint32), 32).copy()
    result, predicate = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    text = module(
        f"""mov.u32 %r1, %laneid; mul.wide.u32 %d9, %r1, 4; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
        ld.param.u64 %d3, [p2]; ld.param.u64 %d4, [p3]; add.s64 %d1, %d1, %d9; add.s64 %d2, %d2, %d9;
        add.s64 %d3, %d3, %d9; add.s64 %d4, %d4, %d9; ld.global.b32 %r2, [%d1]; ld.global.b32 %r3, [%d2];
        shfl.sync.{mode}.b32 %r4|%p1, %r2, {b if isinstance(b, int) else "%r3"}, {c}, -1; selp.b32 %r5, 1, 0, %p1;
        st.global.b32 [%d3], %r4; st.global.b32 [%d4], %r5; ret;""",
        parameters=4,
    )
    launch(text, values, offsets, result, predicate)
    assert (result.tolist(), predicate.tolist()) == shuffle(mode, values, offsets, c)


def test_broadcast_from_one_lane():
    assert per_thread("mul.lo.u32 %r2, %r1, 5; shfl.sync.idx.b32 %r9, %r2, 11, 31, -1;").tolist() == [55] * 32


def test_election_takes_one_lane_and_tells_all():
    out = per_thread("mov.b32 %r9, 0; elect.sync %r2|%p1, -1; @%p1 mov.b32 %r9, 100; add.s32 %r9, %r9, %r2;")
    assert sorted(out.tolist()) == [0] * 31 + [100] and out.tolist().index(100) == 0


def test_election_among_the_lanes_of_a_branch():
    out = per_thread(
        """mov.b32 %r9, 0; setp.lt.u32 %p1, %r1, 20; @%p1 bra END;
        elect.sync %r2|%p2, 0xFFF00000; @%p2 mov.b32 %r9, 1; add.s32 %r9, %r9, %r2;
        END: """
    )
    assert out.tolist() == [0] * 20 + [21] + [20] * 11


@given(mask=st.integers(0, M32))
def test_votes_and_reductions(mask: int):
    head = f"shl.b32 %r2, 1, %r1; and.b32 %r2, %r2, {mask}; setp.ne.b32 %p1, %r2, 0;"
    assert set(per_thread(head + "vote.sync.ballot.b32 %r9, %p1, -1;").tolist()) == {mask}
    for name, expected in (("all", mask == M32), ("any", mask != 0), ("uni", mask in (0, M32))):
        out = per_thread(head + f"vote.sync.{name}.pred %p2, %p1, -1; selp.b32 %r9, 1, 0, %p2;")
        assert set(out.tolist()) == {int(expected)}
    values = [(1 << n) & mask for n in range(32)]
    signed = [v - (1 << 32) if v >> 31 else v for v in values]
    folds = {"add.u32": sum(values), "max.u32": max(values), "min.s32": min(signed), "or.b32": mask}
    for name, expected in folds.items():
        assert set(per_thread(head + f"redux.sync.{name} %r9, %r2, -1;").tolist()) == {expected & M32}


def test_a_shuffle_from_a_lane_that_does_not_take_part_is_reported():
    body = "setp.lt.u32 %p1, %r1, 16; @%p1 bra END; shfl.sync.idx.b32 %r2, %r1, 3, 31, 0xFFFF0000; END: mov.b32 %r9, 0;"
    with pytest.raises(BarrierMisuse, match="reads lane 3"):
        per_thread(body)
