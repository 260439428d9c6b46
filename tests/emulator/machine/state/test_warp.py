"""One warp: divergence, lanes that wait for each other, and what a part of a warp may not execute."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import BarrierMisuse, UnsupportedPTX
from cute_kernels.testing.ptx import THREAD_OUTPUT, module
from tests.emulator.ptx_launch import launch

M32 = (1 << 32) - 1
LANES = np.arange(32)


def per_thread(body: str, result: str = "%r9", threads: int = 32, **more: object) -> np.ndarray:
    """Runs ``body`` in each thread of one block and returns the 32-bit ``result`` of each."""
    out = np.zeros(threads, np.uint32)
    text = module(f"{THREAD_OUTPUT}\n{body}\nst.global.b32 [%d1], {result};\nret;", parameters=1)
    launch(text, out, block=(threads, 1, 1), **more)
    return out


# --- divergence -----------------------------------------------------------------------------------------------------


def test_both_sides_of_a_branch_run_and_meet():
    out = per_thread(
        """setp.lt.u32 %p1, %r1, 10; @%p1 bra LOW;
        mov.b32 %r9, 100; bra MEET;
        LOW: mov.b32 %r9, 200;
        MEET: vote.sync.ballot.b32 %r8, 1, -1; add.s32 %r9, %r9, %r8; add.s32 %r9, %r9, 1;"""
    )
    assert out.tolist() == [200] * 10 + [100] * 22  # a full ballot is -1: all lanes are together again


def test_loops_of_different_lengths():
    out = per_thread(
        """mov.b32 %r9, 0; mov.b32 %r2, 0;
        LOOP: setp.ge.u32 %p1, %r2, %r1; @%p1 bra DONE;
        add.s32 %r2, %r2, 1; add.s32 %r9, %r9, %r2; bra LOOP;
        DONE: """
    )
    assert out.tolist() == [n * (n + 1) // 2 for n in range(32)]


def test_nested_divergence_with_a_common_exit():
    out = per_thread(
        """mov.b32 %r9, 1; and.b32 %r2, %r1, 1; setp.eq.s32 %p1, %r2, 0; setp.lt.u32 %p2, %r1, 8;
        setp.gt.u32 %p3, %r1, 20;
        @%p1 bra EVEN; @%p2 bra END; add.s32 %r9, %r9, 10; bra END;
        EVEN: @%p2 bra SMALL; @%p3 bra END; add.s32 %r9, %r9, 100; bra END;
        SMALL: add.s32 %r9, %r9, 1000;
        END: """
    )
    expected = [(1001 if n < 8 else 1 if n > 20 else 101) if n % 2 == 0 else (1 if n < 8 else 11) for n in range(32)]
    assert out.tolist() == expected


def test_guards_keep_the_lanes_that_are_off():
    out = per_thread(
        """mov.b32 %r9, 5; setp.gt.u32 %p1, %r1, 3; @%p1 add.s32 %r9, %r1, 7; @!%p1 ld.global.b32 %r8, [%d1];
        @!%p1 add.s32 %r9, %r8, 1; setp.eq.u32 %p2, %r1, 9; @%p2 st.global.b32 [%d1+4], %r1; @%p2 mov.b32 %r9, 4000;
        bar.warp.sync -1;"""
    )
    expected = [1] * 4 + [n + 7 for n in range(4, 32)]
    expected[9] = 4000
    assert out.tolist() == expected


def test_lanes_that_exit_early_leave_the_others():
    body = f"""{THREAD_OUTPUT} setp.lt.u32 %p1, %r1, 5; mov.b32 %r9, 1; st.global.b32 [%d1], %r9; @%p1 ret;
    bar.sync 0; elect.sync %r2|%p3, 0xFFFFFFE0; @%p3 st.global.b32 [%d1], %r2;
    setp.lt.u32 %p2, %r1, 10; @%p2 bra END; mov.b32 %r9, 2; st.global.b32 [%d1], %r9; exit; END: ret;"""
    out = np.zeros(32, np.uint32)
    launch(module(body, parameters=1), out)
    assert out.tolist() == [1] * 5 + [5] + [1] * 4 + [2] * 22


@pytest.mark.parametrize("threads", [1, 5, 32, 33, 47])
def test_partial_warps_touch_no_memory_of_threads_that_do_not_exist(threads: int):
    out = np.full(64, 9, np.uint32)
    text = module(f"{THREAD_OUTPUT} add.s32 %r9, %r1, 1; bar.sync 0; st.global.b32 [%d1], %r9; ret;", parameters=1)
    launch(text, out, block=(threads, 1, 1))
    assert out.tolist() == [n + 1 if n < threads else 9 for n in range(64)]


@pytest.mark.parametrize("seed", range(6))
def test_lanes_of_a_warp_may_wait_for_each_other(seed: int):
    """Independent thread scheduling: the waiting side of a branch must not keep the arriving side from running."""
    options = Options(seed=seed, interleave="random" if seed else "round_robin")
    out = per_thread(
        """setp.ne.u32 %p1, %r1, 0; @%p1 bra READY; mov.b32 %r2, 16; mbarrier.init.shared.b64 [dynamic], %r2;
        READY: bar.sync 0; setp.lt.u32 %p2, %r1, 16; @%p2 bra ARRIVE;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra WAIT;
        ld.shared.b32 %r9, [dynamic+8]; bra MEET;
        ARRIVE: mov.b32 %r9, 77; setp.eq.u32 %p4, %r1, 15; @%p4 st.shared.b32 [dynamic+8], %r9;
        mbarrier.arrive.shared.b64 %d3, [dynamic];
        MEET: """,
        options=options,
    )
    assert out.tolist() == [77] * 32


@pytest.mark.parametrize("order", ["bra FIRST", "bra SECOND"])
def test_three_paths_that_wait_in_a_chain(order: str):
    """Path 2 waits for path 1, path 3 for path 2; whichever runs first, all must end."""
    out = per_thread(
        f"""setp.ne.u32 %p1, %r1, 0; @%p1 bra READY; mbarrier.init.shared.b64 [dynamic], 4;
        mbarrier.init.shared.b64 [dynamic+8], 10;
        READY: bar.sync 0; mov.b32 %r9, 1; setp.lt.u32 %p2, %r1, 4; setp.lt.u32 %p3, %r1, 14;
        @%p2 {order}; @%p3 bra MIDDLE;
        W3: mbarrier.try_wait.parity.shared.b64 %p4, [dynamic+8], 0; @!%p4 bra W3; mov.b32 %r9, 3; bra MEET;
        MIDDLE:
        W2: mbarrier.try_wait.parity.shared.b64 %p4, [dynamic], 0; @!%p4 bra W2; mov.b32 %r9, 2;
        mbarrier.arrive.shared.b64 %d3, [dynamic+8]; bra MEET;
        SECOND: nanosleep.u32 100;
        FIRST: mbarrier.arrive.shared.b64 %d3, [dynamic];
        MEET: """
    )
    assert out.tolist() == [1] * 4 + [2] * 10 + [3] * 18


def _waiting_paths(rng: np.random.Generator) -> tuple[str, list[int]]:
    """Branches inside branches, whose paths wait for each other in a chain of any order; some of them exit.

    Returns the body, and for each lane when its turn is.
    """
    count = int(rng.integers(2, 12))
    cuts = [0, *sorted(rng.choice(np.arange(1, 32), count - 1, replace=False).tolist()), 32]
    turn, exits = rng.permutation(count).tolist(), rng.random(count) < 0.3
    lines = ["setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;"]
    lines += [f"mbarrier.init.shared.b64 [dynamic+{8 * turn[k]}], {cuts[k + 1] - cuts[k]};" for k in range(count)]
    lines += ["mov.b32 %r2, 0; st.shared.b32 [dynamic+512], %r2; READY: bar.sync 0;"]

    def path(k: int) -> None:
        if turn[k]:
            wait = f"mbarrier.{rng.choice(['try_wait', 'test_wait'])}.parity.shared.b64"
            lines.append(f"W{k}: {wait} %p3, [dynamic+{8 * turn[k] - 8}], 0; @!%p3 bra W{k};")
        lanes = (1 << cuts[k + 1]) - (1 << cuts[k])
        lines.append(f"ld.shared.b32 %r9, [dynamic+512]; bar.warp.sync {lanes}; add.u32 %r2, %r9, 1;")
        lines.append("st.shared.b32 [dynamic+512], %r2; st.global.b32 [%d1], %r9;")
        lines.append(f"mbarrier.arrive.shared.b64 %d3, [dynamic+{8 * turn[k]}];" + " exit;" * bool(exits[k]))

    def paths(first: int, last: int) -> None:
        if last - first == 1:
            return path(first)
        middle = int(rng.integers(first + 1, last))
        lines.append(f"setp.lt.u32 %p2, %r1, {cuts[middle]}; @%p2 bra L{middle};")
        paths(middle, last)
        lines.append(f"bra M{middle}; L{middle}:")
        paths(first, middle)
        lines.append(f"M{middle}:")

    paths(0, count)
    return "\n".join(lines), [turn[k] for k in range(count) for _ in range(cuts[k], cuts[k + 1])]


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), interleave=st.sampled_from(["round_robin", "random"]))
def test_paths_that_wait_for_each_other_in_any_order_and_depth(seed: int, interleave: str):
    body, turns = _waiting_paths(np.random.default_rng(seed))
    out = np.full(32, 99, np.uint32)
    options = Options(seed=seed, interleave=interleave)
    launch(module(f"{THREAD_OUTPUT}\n{body}\nret;", parameters=1), out, options=options)
    assert out.tolist() == turns


# --- between lanes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "instruction",
    [
        "elect.sync %r2|%p2, -1;",
        "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
        "vote.sync.ballot.b32 %r2, %p1, -1;",
        "bar.warp.sync 0x0000ffff;",
        "bar.sync 0;",
        "barrier.sync.aligned 0;",
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic], 32;",
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r2, %r3}, {%r1}, {%r1}, {%r1, %r1}; st.b32 [%d1], %r2;",
    ],
)
def test_whole_warp_instructions_in_a_part_of_the_warp_are_reported(instruction: str):
    body = f"setp.lt.u32 %p1, %r1, 20; @%p1 bra END;\n{instruction}\nEND: mov.b32 %r9, 0;"
    with pytest.raises(BarrierMisuse, match=r"lanes 0xfff00000 .* at PTX line \d+ `.*CTA 0 warp 0"):
        per_thread(body)


@pytest.mark.parametrize("instruction", ["bar.warp.sync -1;", "barrier.sync 0;", "barrier.arrive 0, 64;"])
def test_what_parts_of_a_warp_may_execute_is_refused_by_name(instruction: str):
    """Legal since sm_70, where the other lanes execute one elsewhere."""
    body = f"setp.lt.u32 %p1, %r1, 20; @%p1 bra B;\n{instruction} bra END; B: {instruction}\nEND: mov.b32 %r9, 0;"
    with pytest.raises(UnsupportedPTX, match=rf"{instruction.split()[0]} .*by a part of .*is not implemented"):
        per_thread(body)
    assert not per_thread(f"{instruction.replace(', 64', ', 32')} mov.b32 %r9, 0;").any()


def test_operands_that_must_agree_are_checked_when_they_run():
    """%r2 is not known to be uniform when it is translated: it is where all lanes hold 3, and not where they differ."""
    body = "min.u32 %r2, %r1, LIMIT; add.s32 %r2, %r2, 3; bar.sync %r2, 32; bar.sync 1, %r3; mov.b32 %r9, %r2;"
    body = "add.s32 %r3, %r1, 32; sub.s32 %r3, %r3, %r1;" + body
    assert per_thread(body.replace("LIMIT", "0")).tolist() == [3] * 32
    with pytest.raises(BarrierMisuse, match=r"must be the same in all lanes is \[3, 4, 5\]"):
        per_thread(body.replace("LIMIT", "2"))
