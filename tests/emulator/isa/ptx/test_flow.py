"""Control-flow analysis against brute force on random graphs, and uniformity on the patterns that matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.isa.ptx.flow import Flow, analyse
from cute_kernels.testing.ptx import module


def flow_of(body: str, block: tuple[int, int, int] = (64, 1, 1)) -> Flow:
    return analyse(parse(module(body)).kernels["k"], block)


@st.composite
def graphs(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Successors per block: one (jump), two (conditional branch, then the next block) or none (ret)."""
    count = draw(st.integers(1, 9))
    graph: list[tuple[int, ...]] = []
    for i in range(count):
        kind = draw(st.sampled_from(["jump", "branch", "ret", "fall"]))
        target = draw(st.integers(0, count - 1))
        if kind == "jump":
            graph.append((target,))
        elif kind == "ret" or i == count - 1:
            graph.append((count,))
        elif kind == "branch":
            graph.append((target, i + 1) if target != i + 1 else (i + 1,))
        else:
            graph.append((i + 1,))
    return graph


def source(graph: list[tuple[int, ...]]) -> str:
    lines = []
    for i, successors in enumerate(graph):
        lines.append(f"B{i}: add.s32 %r{i}, %r{i}, 1;")
        if successors == (len(graph),):
            lines.append("ret;")
        elif len(successors) == 2:
            lines.append(f"@%p{i} bra B{successors[0]};")
        elif successors != (i + 1,) or i % 2:
            lines.append(f"bra.uni B{successors[0]};")
    return "\n".join(lines)


def reaches_exit(graph: list[tuple[int, ...]], start: int, without: int | None) -> bool:
    seen, work = set(), [start]
    while work:
        node = work.pop()
        if node == without or node in seen:
            continue
        if node == len(graph):
            return True
        seen.add(node)
        work.extend(graph[node])
    return False


@given(graphs())
def test_reconvergence_is_the_nearest_block_on_every_way_to_the_exit(graph: list[tuple[int, ...]]):
    flow = flow_of(source(graph))
    # A jump to the next block that the source leaves out merges nothing: blocks start at labels that are used or not.
    assert [block.successors for block in flow.blocks] == graph
    count = len(graph)
    for block in range(count):
        if not reaches_exit(graph, block, None):
            assert flow.reconvergence[block] == count
            continue
        others = [d for d in range(count) if d != block and not reaches_exit(graph, block, d)]
        found = flow.reconvergence[block]
        if found == count:
            assert not others
        else:  # the nearest: every other post-dominator of the block also post-dominates it
            assert found in others
            assert all(d == found or not reaches_exit(graph, found, d) for d in others)


@given(graphs())
def test_live_registers_are_those_with_a_way_to_a_use(graph: list[tuple[int, ...]]):
    """Register i is used in block i only (it is incremented there), so it is live where block i can be reached."""
    flow = flow_of(source(graph))

    def reachable(start: int) -> set[int]:
        seen: set[int] = set()
        work = [start]
        while work:
            node = work.pop()
            if node not in seen and node < len(graph):
                seen.add(node)
                work.extend(graph[node])
        return seen

    for block in flow.blocks:
        registers = {int(name[2:]) for name in block.live_in if name.startswith("%r")}
        assert registers == reachable(block.index)


def varying(body: str, block: tuple[int, int, int] = (64, 1, 1)) -> set[str]:
    return flow_of(body, block).varying


def test_values_computed_from_the_lane_vary():
    found = varying(
        "mov.u32 %r1, %tid.x; add.s32 %r2, %r1, 1; mov.u32 %r3, %ctaid.x; add.s32 %r4, %r3, 1;"
        "mov.u32 %r5, %laneid; ld.shared.b32 %r6, [dynamic]; ld.shared.b32 %r7, [%r2]; mov.u32 %r8, %tid.y; ret;"
    )
    assert found == {"%r1", "%r2", "%r5", "%r7"}


def test_the_warp_part_of_the_thread_index_is_uniform():
    body = (
        "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; shr.u32 %r3, %r1, 4; setp.lt.u32 %p1, %r1, 64;"
        "setp.lt.u32 %p2, %r1, 63; setp.gt.u32 %p3, %r1, 31; and.b32 %r4, %r1, 96; and.b32 %r5, %r1, 97; ret;"
    )
    assert varying(body, (128, 2, 1)) == {"%r1", "%r3", "%p2", "%r5"}
    # Rows of 48 threads: a warp can span two of them, so %tid.x >> 5 differs within it.
    assert varying(body, (48, 2, 1)) >= {"%r1", "%r2", "%r3", "%r4", "%p1", "%p3"}


def test_broadcasts_and_votes_are_uniform_and_elections_are_not():
    found = varying(
        "mov.u32 %r1, %tid.x; shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1;"
        "elect.sync %r4|%p1, -1; setp.eq.s32 %p2, %r1, 3; vote.sync.any.pred %p3, %p2, -1; ret;"
    )
    assert found == {"%r1", "%r3", "%p1", "%p2"}


def test_a_value_merged_behind_a_divergent_branch_varies():
    body = """
        mov.u32 %r1, %tid.x; setp.eq.s32 %p1, %r1, 0; mov.b32 %r2, 1; mov.b32 %r5, 7;
        @%p1 bra THEN;
        mov.b32 %r2, 2; mov.b32 %r3, 5; add.s32 %r4, %r3, 1; st.shared.b32 [dynamic], %r4;
        THEN: st.shared.b32 [dynamic], %r2; st.shared.b32 [dynamic], %r5; ret;
    """
    flow = flow_of(body)
    assert "%r2" in flow.varying
    assert not {"%r3", "%r4", "%r5"} & flow.varying
    assert [block.divergent for block in flow.blocks] == [False, True, False]


def test_a_loop_left_at_different_times_makes_its_counter_vary():
    body = """
        mov.u32 %r1, %tid.x; mov.b32 %r2, 0;
        LOOP: add.s32 %r2, %r2, 1; ld.shared.b32 %r4, [dynamic]; setp.lt.s32 %p1, %r2, %r1; @%p1 bra LOOP;
        add.s32 %r3, %r2, %r4; st.shared.b32 [dynamic], %r3; ret;
    """
    assert varying(body) >= {"%r1", "%r2", "%r3", "%r4", "%p1"}


def test_a_value_read_on_the_other_side_of_a_branch_varies():
    """The taken side runs first here; what it writes must not be seen by lanes that still need the old value."""
    body = """
        mov.u32 %r1, %tid.x; setp.eq.s32 %p1, %r1, 0; mov.b32 %r2, 1;
        @%p1 bra LEFT;
        st.shared.b32 [dynamic], %r2; bra DONE;
        LEFT: mov.b32 %r2, 9; st.shared.b32 [dynamic], %r2;
        DONE: ret;
    """
    assert "%r2" in varying(body)


def test_a_partial_warp_runs_under_a_mask():
    assert all(block.divergent for block in flow_of("mov.b32 %r1, 1; ret;", (48, 1, 1)).blocks)
    assert not any(block.divergent for block in flow_of("mov.b32 %r1, 1; ret;", (48, 2, 1)).blocks)


def test_blocking_instructions_start_a_block():
    flow = flow_of("mov.b32 %r1, 0; mbarrier.try_wait.parity.shared.b64 %p1, [dynamic], %r1; bar.sync 0; ret;")
    assert [flow.kernel.instructions[block.start].parts[0] for block in flow.blocks] == ["mov", "mbarrier", "bar"]


@pytest.mark.parametrize("body", ["bra NOWHERE;", "brx.idx %r1, T;", "bra.foo L; L: ret;", "txq f;", "wgmma.x %r1;"])
def test_unknown_control_flow_and_opcodes_are_refused_with_their_line(body: str):
    with pytest.raises(UnsupportedPTX) as caught:
        flow_of(body)
    assert caught.value.ptx_line is not None and body[:3] in str(caught.value)
