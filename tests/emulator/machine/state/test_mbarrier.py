"""mbarrier objects: phases, transaction bytes, and misuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import BarrierMisuse, IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.machine.state.mbarrier import MAX_COUNT, MOST
from cute_kernels.emulator.machine.state.smem import ClusterMemory, SharedMemory, shared_address
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.barriers import Barriers
from tests.emulator.definitions.mbarriers import Mbarrier, Wrong
from tests.emulator.ptx_launch import launch

AT = 1024


def barriers(count: int = 1) -> Barriers:
    made = Barriers(ClusterMemory([SharedMemory(4096, rank) for rank in range(2)]))
    made.init(AT, count, "warp 0")
    return made


PHASES = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 5000), max_size=4)), max_size=6)


@given(st.integers(1, 6), PHASES)
def test_phase_completes_exactly_when_arrivals_and_bytes_are_in(count: int, phases: list[tuple[int, list[int]]]):
    """Per phase: the copies' bytes are announced, then arrive before, between and after the arrivals, shuffled."""
    made = barriers(count)
    for number, (seed, copies) in enumerate(phases):
        rng = np.random.default_rng(seed)
        events = [("arrive", 1)] * (count - 1) + [("complete", n) for n in copies]
        events = [events[i] for i in rng.permutation(len(events))]
        events.insert(int(rng.integers(len(events) + 1)), ("arrive_expect", sum(copies)))
        for kind, value in events:
            assert made.phase(AT) == number and not made.test_parity(AT, number & 1)
            assert made.test_parity(AT, 1 - (number & 1)), "the phase before counts as complete"
            if kind == "arrive":
                assert made.arrive(AT, value, "w") == number
            elif kind == "complete":
                made.complete_tx(AT, value)
            else:
                made.arrive_expect_tx(AT, value, "producer")
        assert made.phase(AT) == number + 1 and made.test_parity(AT, number & 1) and made.test_phase(AT, number)
    assert made.completions == len(phases)


AMOUNTS = st.one_of(st.integers(0, 5), st.sampled_from([16, 4096, MAX_COUNT - 20, MAX_COUNT]))
EVENTS = st.tuples(
    st.sampled_from(["arrive", "arrive_drop", "expect_tx", "complete_tx", "expect_arrivals", "passed", "over"]), AMOUNTS
)


@settings(max_examples=500)
@given(st.integers(1, 6), st.lists(EVENTS, max_size=25))
def test_any_operations_in_any_order_as_defined(count: int, events: list[tuple[str, int]]):
    """State and answer after each, and the kind of fault that ends it."""
    made, defined = barriers(count), Mbarrier(count, count)
    for event, amount in events:
        if event == "passed":
            assert made.test_parity(AT, amount & 1) == defined.passed(amount & 1)
            continue
        if event == "over":
            assert made.test_phase(AT, amount) == (defined.phase > amount)
            continue
        try:
            answer = getattr(defined, event)(amount)
        except Wrong as wrong:
            with pytest.raises(BarrierMisuse) as misuse:
                made.apply(CONSTANTS[event.upper()], AT, amount)
            assert misuse.value.kind == str(wrong)
            return
        assert made.apply(CONSTANTS[event.upper()], AT, amount) == answer
        words = made._barriers[AT].words
        assert (words.phase, words.expected, words.pending, words.tx) == (
            defined.phase, defined.expected, defined.pending, defined.tx,
        )  # fmt: skip
        assert made.completions == defined.phase


def test_rows_of_barriers_are_used_again_and_are_not_without_end():
    made = Barriers(ClusterMemory([SharedMemory(200_000, 0)]))
    for place in range(MOST):
        made.init(8 * place, 1)
    made.arrive(8 * (MOST - 1))
    with pytest.raises(UnsupportedPTX, match=f"more than {MOST} mbarriers"):
        made.init(8 * MOST, 1)
    made.inval(40)
    made.init(8 * MOST, 2)
    made.arrive(8 * MOST)
    assert (made.phase(8 * MOST), made.phase(8 * (MOST - 1)), made.phase(0)) == (0, 1, 0)


def test_an_init_does_not_look_at_all_other_barriers():
    """Else those of a kernel with 16,000 take ten seconds."""

    class Unread(set):
        def __iter__(self):
            raise AssertionError("it looks at all")

    memory = SharedMemory(1024, 0)
    for offset in (512, 256, 768):
        memory.protect(offset)
    memory._barriers = Unread(memory._barriers)
    memory.protect(640)
    assert (memory.barrier_low, memory.barrier_high) == (256, 776)


def test_bytes_may_come_before_they_are_expected():
    made = barriers()
    made.complete_tx(AT, 100)
    assert made.phase(AT) == 0 and "-100 transaction bytes" in made.describe(AT)
    made.expect_tx(AT, 100)
    assert made.phase(AT) == 0, "an arrival is pending"
    made.arrive(AT)
    assert made.phase(AT) == 1


def test_bytes_alone_complete_a_phase_whose_arrivals_are_in():
    made = barriers(2)
    made.expect_tx(AT, 64)
    made.arrive(AT, 2)
    made.complete_tx(AT, 48)
    assert made.phase(AT) == 0
    made.complete_tx(AT, 16)
    assert made.phase(AT) == 1


def test_more_arrivals_than_the_phase_expects():
    made = barriers(2)
    with pytest.raises(BarrierMisuse, match="3 arrival.* by warp 5 on an mbarrier whose phase expects 2"):
        made.arrive(AT, 3, "warp 5")
    made.expect_tx(AT, 16)
    made.arrive(AT, 2)
    with pytest.raises(BarrierMisuse, match="expects 0 more.*16 transaction bytes pending, initialised by warp 0"):
        made.arrive(AT)


def test_more_bytes_than_announced():
    made = barriers()
    made.arrive_expect_tx(AT, 100)
    with pytest.raises(BarrierMisuse, match="28 bytes more arrived than expect_tx announced"):
        made.complete_tx(AT, 128)
    made = barriers()
    made.complete_tx(AT, 128)
    with pytest.raises(BarrierMisuse, match="28 bytes more arrived"):
        made.arrive_expect_tx(AT, 100)


def test_ranges():
    made = barriers()
    for count in (0, -1, MAX_COUNT + 1):
        with pytest.raises(BarrierMisuse, match=f"count {count}"):
            made.init(AT + 8, count)
    made.expect_tx(AT, MAX_COUNT)
    with pytest.raises(BarrierMisuse, match="out of range"):
        made.expect_tx(AT, 1)
    assert [made.test_parity(AT, parity) for parity in range(4)] == [False, True, False, True], "the lowest bit counts"
    with pytest.raises(IllegalAccess, match="not 8-byte aligned"):
        made.init(AT + 4, 1)
    with pytest.raises(IllegalAccess, match="leaves its 4096 bytes"):
        made.init(4096, 1)


def test_use_before_init_and_after_inval():
    made = barriers()
    uses = [
        lambda at: made.arrive(at),
        lambda at: made.expect_tx(at, 16),
        lambda at: made.arrive_expect_tx(at, 16),
        lambda at: made.complete_tx(at, 16),
        lambda at: made.test_parity(at, 0),
        lambda at: made.test_phase(at, 0),
        lambda at: made.inval(at),
    ]
    for use in uses:
        with pytest.raises(BarrierMisuse, match="offset 1040 .* of CTA 1: not initialised"):
            use(shared_address(1, 1040))
    made.inval(AT)
    for use in uses:
        with pytest.raises(BarrierMisuse, match="not initialised"):
            use(AT)


def test_init_over_a_live_barrier_needs_inval_first():
    made = barriers(3)
    with pytest.raises(BarrierMisuse, match="over a live mbarrier"):
        made.init(AT, 1)
    made.inval(AT)
    made.init(AT, 1)
    made.arrive(AT)
    assert made.phase(AT) == 1 and len(list(made)) == 1


def test_barriers_of_different_ctas_are_different():
    made = barriers()
    made.init(shared_address(1, AT), 1)
    made.arrive(shared_address(1, AT))
    assert [barrier.phase for barrier in made] == [0, 1]


def test_arrive_drop_lowers_later_phases():
    made = barriers(3)
    made.arrive(AT, 2)
    made.arrive_drop(AT)
    assert made.phase(AT) == 1
    made.arrive(AT, 2)
    assert made.phase(AT) == 2
    with pytest.raises(BarrierMisuse, match="expects 2 more"):
        made.arrive_drop(AT, 3)


def test_description_names_everything_a_report_needs():
    made = barriers(2)
    made.arrive(AT, 1, "CTA 0 warp 4")
    made.expect_tx(AT, 32)
    text = made.describe(AT)
    parts = ["offset 1024", "CTA 0", "phase 0", "parity 0", "1 of 2 arrivals", "32 transaction", "warp 0", "warp 4"]
    assert [part for part in parts if part not in text] == []


def test_names_are_reported_in_every_cta():
    barriers = Barriers(ClusterMemory([SharedMemory(4096, rank) for rank in range(4)]), {1032: "operands_full[1]"})
    other = 1032 | 3 << 24
    for address in (1032, other, 1040):
        barriers.init(address, 1)
    assert barriers.describe(1032).startswith("mbarrier operands_full[1] at shared offset 1032")
    assert barriers.describe(other).startswith("mbarrier operands_full[1] at shared offset 1032 (0x408) of CTA 3: ")
    assert barriers.describe(1040).startswith("mbarrier at shared offset 1040")


LANES_ARRIVE = """
    mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u32 %r2, [p2];
    mul.wide.u32 %d3, %r1, 4; add.s64 %d4, %d1, %d3; ld.global.u32 %r3, [%d4];
    mov.u32 %r4, dynamic;
    setp.ne.u32 %p1, %r1, 0; @%p1 bra ARRIVE;
    INITIALISED
ARRIVE:
    bar.sync 0;
    shl.b32 %r5, %r3, 3; add.s32 %r5, %r5, %r4;
    shr.u32 %r6, MASK, %r1; and.b32 %r6, %r6, 1; setp.eq.u32 %p2, %r6, 0; @%p2 bra DONE;
    mbarrier.arrive.shared.b64 %d5, [%r5], %r2;
DONE:
    bar.sync 0;
    setp.gt.u32 %p3, %r1, 3; @%p3 bra END;
    shl.b32 %r5, %r1, 3; add.s32 %r5, %r5, %r4;
    mbarrier.test_wait.parity.shared.b64 %p4, [%r5], 0;
    selp.u32 %r7, 1, 0, %p4; add.s64 %d4, %d2, %d3; st.global.u32 [%d4], %r7;
END:
    ret;
"""


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=4, max_size=4), st.lists(st.integers(0, 3), min_size=32, max_size=32),
    st.one_of(st.just(2**32 - 1), st.integers(0, 2**32 - 1)), st.integers(1, 2), st.booleans(),
)  # fmt: skip
def test_lanes_arrive_each_where_it_says(
    counts: list[int], places: list[int], mask: int, times: int, detectors: bool
):
    """Lanes that name one mbarrier arrive together: more of them than its phase expects are a fault, not two phases."""
    defined = [Mbarrier(count, count) for count in counts]
    inits = "\n".join(f"mbarrier.init.shared.b64 [dynamic + {8 * i}], {count};" for i, count in enumerate(counts))
    body = LANES_ARRIVE.replace("INITIALISED", inits).replace("MASK", hex(mask))
    where, passed = aligned(np.array(places, np.uint32)), aligned(np.zeros(4, np.uint32))
    options = Options(detectors=detectors, strict=False)
    try:
        for place in range(4):
            lanes = sum(mask >> lane & 1 for lane in range(32) if places[lane] == place)
            if lanes:
                defined[place].arrive(times * lanes)
    except Wrong:
        with pytest.raises(BarrierMisuse, match="on an mbarrier whose phase expects"):
            launch(module(body, parameters=3), where, passed, times, options=options)
        return
    unfinished = [each for each in defined if each.pending != each.expected]
    try:
        launch(module(body, parameters=3), where, passed, times, options=options)
    except BarrierMisuse as error:
        assert error.kind == "phase-at-exit" and unfinished
        return
    assert passed.tolist() == [each.phase == 1 for each in defined]


PENDING_COUNT = """
    mov.u32 %r9, dynamic; ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mad.wide.u32 %d1, %r1, 8, %d1;
    and.b32 %r2, %r1, 1; mad.lo.u32 %r8, %r2, 8, %r9; setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared.b64 [%r9], 16; @%p1 mbarrier.init.shared.b64 [%r9+8], 40; bar.sync 0;
    mov.u32 %r3, 0;
LOOP:
    {arrive} mbarrier.pending_count.b64 %r4, %d2;
WAIT:
    mbarrier.try_wait.shared.b64 %p2, [%r8], %d2; @!%p2 bra WAIT;
    st.global.u32 [%d1], %r4; add.u64 %d1, %d1, 4;
    add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 2; @%p3 bra LOOP; ret;
"""


@pytest.mark.parametrize("several", [False, True])
def test_states_say_how_many_arrivals_were_pending(several: bool) -> None:
    """Even lanes arrive at a barrier of 16 arrivals, odd ones, with counts that differ, at one of 40: twice each.

    Whoever arrives first is not specified: each number of a phase comes once.
    """
    odd = np.arange(1, 32, 2) // 2 % 4 + 1  # 1 to 4 arrivals, 40 of 16 threads
    if several:
        arrive = "shr.u32 %r5, %r1, 1; and.b32 %r5, %r5, 3; add.u32 %r5, %r5, 1; setp.eq.u32 %p4, %r2, 1;"
        arrive += "selp.b32 %r5, %r5, 1, %p4; mbarrier.arrive.shared.b64 %d2, [%r8], %r5;"
        expected = 40
    else:
        arrive, expected = "mbarrier.arrive.shared.b64 %d2, [%r8];", 16
    text = module(PENDING_COUNT.format(arrive=arrive).replace("8], 40", f"8], {expected}"), parameters=1)
    out = aligned(np.zeros((32, 2), np.uint32))
    launch(text.replace("sm_100a", "sm_90a"), out, dynamic_smem=64, hardware="lanes arrive in any order")
    for phase in out.T:
        assert sorted(phase[::2].tolist()) == list(range(1, 17))
        counts = odd if several else np.ones(16, np.int64)
        order = np.argsort(-phase[1::2].astype(np.int64))
        assert phase[1::2][order].tolist() == [expected - int(n) for n in np.cumsum([0, *counts[order][:-1]])]
