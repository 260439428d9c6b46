"""Launches: barriers between warps and CTAs, clusters, waiting under schedules, reports."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, IllegalAccess, ProxyFenceMissing
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap, encode
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.ptx_launch import launch

SCHEDULES = [
    Options(),
    Options(completion="lazy"),
    *(Options(seed=s, completion="random", interleave="random", spurious_try_wait_failures=True) for s in range(5)),
]


def flat_thread(body: str) -> str:
    """``%r9`` of each thread of the whole grid (1-D blocks) to p0, in order of CTA and thread."""
    return module(
        f"""mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ctaid.y; mov.u32 %r4, %ctaid.z;
        mov.u32 %r5, %ntid.x;
        mov.u32 %r6, %nctaid.x; mov.u32 %r7, %nctaid.y; mad.lo.u32 %r8, %r4, %r7, %r3; mad.lo.u32 %r8, %r8, %r6, %r2;
        mad.lo.u32 %r8, %r8, %r5, %r1; ld.param.u64 %d0, [p0]; mul.wide.u32 %d1, %r8, 4; add.s64 %d1, %d0, %d1;
        {body}
        st.global.b32 [%d1], %r9; ret;""",
        parameters=1,
    )


# --- barriers of a CTA ----------------------------------------------------------------------------------------------

REVERSE = f"""{THREAD_OUTPUT} mul.lo.u32 %r2, %r1, 3; shl.b32 %r3, %r1, 2; mov.b32 %r4, dynamic; add.s32 %r5, %r4, %r3;
    st.shared.b32 [%r5], %r2; bar.sync 0; sub.s32 %r6, 127, %r1; shl.b32 %r6, %r6, 2; add.s32 %r6, %r4, %r6;
    ld.shared.b32 %r9, [%r6]; st.global.b32 [%d1], %r9; ret;"""


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_barrier_separates_writes_from_reads(options: Options):
    out = np.zeros(128, np.uint32)
    launch(module(REVERSE, parameters=1), out, block=(128, 1, 1), options=options)
    assert out.tolist() == [3 * (127 - n) for n in range(128)]


def test_without_the_barrier_the_reader_is_caught():
    """The detector for uninitialised shared memory shows that the schedule really is concurrent."""
    with pytest.raises(IllegalAccess, match="uninitialised"):
        text = module(REVERSE.replace("bar.sync 0;", ""), parameters=1)
        launch(text, np.zeros(128, np.uint32), block=(128, 1, 1))


PRODUCER_CONSUMER = f"""{THREAD_OUTPUT} mov.b32 %r9, 0; mov.b32 %r7, 0; shr.u32 %r2, %r1, 5; setp.ne.u32 %p1, %r2, 0;
    @%p1 bra CONSUMER;
    PRODUCE: mad.lo.u32 %r3, %r7, 100, %r1; shl.b32 %r4, %r1, 2; mov.b32 %r5, dynamic; add.s32 %r4, %r4, %r5;
    st.shared.b32 [%r4], %r3; bar.arrive 1, 64; bar.sync 2, 64; add.s32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 4;
    @%p2 bra PRODUCE; bra END;
    CONSUMER: bar.sync 1, 64; shl.b32 %r4, %r1, 2; mov.b32 %r5, dynamic; add.s32 %r4, %r4, %r5;
    ld.shared.b32 %r6, [%r4+-128]; add.s32 %r9, %r9, %r6; bar.arrive 2, 64; add.s32 %r7, %r7, 1;
    setp.lt.u32 %p2, %r7, 4; @%p2 bra CONSUMER;
    END: st.global.b32 [%d1], %r9; ret;"""


@pytest.mark.parametrize("options", SCHEDULES)
def test_producer_and_consumer_on_named_barriers(options: Options):
    out = np.zeros(64, np.uint32)
    launch(module(PRODUCER_CONSUMER, parameters=1), out, block=(64, 1, 1), options=options)
    assert out.tolist() == [0] * 32 + [600 + 4 * n for n in range(32)]


def test_a_barrier_over_all_threads_does_not_wait_for_exited_warps():
    body = """shr.u32 %r2, %r1, 5; setp.eq.u32 %p1, %r2, 1; @%p1 ret; bar.sync 0; mov.b32 %r9, 1;
    st.global.b32 [%d1], %r9; ret;"""
    out = np.zeros(96, np.uint32)
    launch(module(THREAD_OUTPUT + body, parameters=1), out, block=(96, 1, 1))
    assert out.tolist() == [1] * 32 + [0] * 32 + [1] * 32


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 16;", "named barrier 16"),
        ("bar.sync 1, 48;", "multiples of 32"),
        (
            "shr.u32 %r2, %r1, 5; setp.eq.u32 %p1, %r2, 0; @%p1 bra A; bar.sync 1, 64; A: bar.sync 1, 96;",
            "expects 64 threads where .* expected 96|expects 96 threads where .* expected 64",
        ),
    ],
)
def test_misuse_of_named_barriers(body: str, message: str):
    with pytest.raises(BarrierMisuse, match=message):
        launch(module(f"mov.u32 %r1, %tid.x; {body} ret;"), 0, 0, block=(64, 1, 1))


# --- clusters -------------------------------------------------------------------------------------------------------

EXCHANGE = """mov.u32 %r10, %cluster_ctarank; mul.lo.u32 %r11, %r1, 10; add.s32 %r11, %r11, %r10; shl.b32 %r12, %r1, 2;
    mov.b32 %r13, dynamic; add.s32 %r12, %r12, %r13; st.shared.b32 [%r12], %r11;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    xor.b32 %r14, %r10, 1; mapa.shared::cluster.u32 %r15, %r12, %r14; ld.shared::cluster.b32 %r9, [%r15];
    barrier.cluster.arrive; barrier.cluster.wait;"""


@pytest.mark.parametrize("options", SCHEDULES)
def test_ctas_of_a_cluster_read_each_other(options: Options):
    out = np.zeros((4, 64), np.uint32)
    launch(flat_thread(EXCHANGE), out, grid=(4, 1, 1), cluster=(2, 1, 1), block=(64, 1, 1), options=options)
    assert out.tolist() == [[10 * n + (1 - c % 2) for n in range(64)] for c in range(4)]


REMOTE_ARRIVE = """mov.u32 %r10, %cluster_ctarank; mov.b32 %r13, dynamic; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [dynamic], 4; fence.mbarrier_init.release.cluster;
    READY: barrier.cluster.arrive.relaxed; barrier.cluster.wait;
    setp.ne.u32 %p2, %r10, 0; @%p2 bra SENDER;
    W: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p3, [dynamic], 0; @!%p3 bra W;
    ld.shared.b32 %r9, [dynamic+16]; bra END;
    SENDER: mov.b32 %r9, 0; mapa.shared::cluster.u32 %r15, %r13, 0; elect.sync _|%p4, -1; @!%p4 bra END;
    mul.lo.u32 %r16, %r10, 1000; add.s32 %r16, %r16, 7; setp.eq.u32 %p5, %r10, 2;
    @%p5 st.shared::cluster.b32 [%r15+16], %r16;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r15], 2;
    END: barrier.cluster.arrive; barrier.cluster.wait;"""


@pytest.mark.parametrize("options", SCHEDULES)
def test_arrivals_from_other_ctas(options: Options):
    """CTAs 1 and 2 arrive twice each on the barrier of CTA 0, whose count is 4."""
    out = np.zeros((3, 32), np.uint32)
    launch(flat_thread(REMOTE_ARRIVE), out, grid=(3, 1, 1), cluster=(3, 1, 1), options=options)
    assert out.tolist() == [[2007] * 32, [0] * 32, [0] * 32]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("barrier.cluster.wait;", "without barrier.cluster.arrive"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", "arrives at the cluster barrier again"),
    ],
)
def test_misuse_of_the_cluster_barrier(body: str, message: str):
    with pytest.raises(BarrierMisuse, match=message):
        launch(module(f"{body} ret;"), 0, 0, grid=(2, 1, 1), cluster=(2, 1, 1))


def test_an_address_in_a_cta_that_does_not_exist():
    body = "mov.b32 %r1, dynamic; mapa.shared::cluster.u32 %r2, %r1, 5; ld.shared::cluster.b32 %r3, [%r2]; ret;"
    with pytest.raises(IllegalAccess, match="names CTA 5 of a cluster of 2"):
        launch(module(body), 0, 0, grid=(2, 1, 1), cluster=(2, 1, 1))


# --- waiting --------------------------------------------------------------------------------------------------------

PIPELINE = f"""{THREAD_OUTPUT} mov.b32 %r9, 0; shr.u32 %r2, %r1, 5; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [dynamic], 1; mbarrier.init.shared.b64 [dynamic+8], 32;
    READY: bar.sync 0; mov.b32 %r7, 0; mov.b32 %r6, 0; setp.ne.u32 %p2, %r2, 0; @%p2 bra CONSUMER;
    FILL: xor.b32 %r5, %r6, 1;
    W1: mbarrier.WAIT.parity.shared.b64 %p3, [dynamic+8], %r5; @!%p3 bra W1;
    elect.sync _|%p4, -1; @!%p4 bra FILLED; mul.lo.u32 %r3, %r7, 5; st.shared.b32 [dynamic+16], %r3;
    mbarrier.arrive.shared.b64 %d3, [dynamic]; FILLED: xor.b32 %r6, %r6, 1; add.s32 %r7, %r7, 1;
    setp.lt.u32 %p5, %r7, 6; @%p5 bra FILL; bra END;
    CONSUMER: W2: mbarrier.WAIT.parity.shared.b64 %p3, [dynamic], %r6; @!%p3 bra W2;
    ld.shared.b32 %r3, [dynamic+16]; mad.lo.u32 %r9, %r9, 7, %r3; mbarrier.arrive.shared.b64 %d3, [dynamic+8];
    xor.b32 %r6, %r6, 1; add.s32 %r7, %r7, 1; setp.lt.u32 %p5, %r7, 6; @%p5 bra CONSUMER;
    END: st.global.b32 [%d1], %r9; ret;"""


@pytest.mark.parametrize("wait", ["try_wait", "test_wait"])
@given(seed=st.integers(0, 10_000), random=st.booleans(), spurious=st.booleans())
def test_a_pipeline_under_any_schedule(wait: str, seed: int, random: bool, spurious: bool):
    """Full and empty barriers over six rounds; try_wait may fail at any time, and test_wait polls."""
    out = np.zeros(64, np.uint32)
    options = Options(
        seed=seed, interleave="random" if random else "round_robin", spurious_try_wait_failures=spurious
    )
    launch(module(PIPELINE.replace("WAIT", wait), parameters=1), out, block=(64, 1, 1), options=options)
    expected = 0
    for step in range(6):
        expected = expected * 7 + 5 * step
    assert out.tolist() == [0] * 32 + [expected] * 32


def test_try_wait_fails_spuriously_when_asked_to():
    """How often the loop around a try_wait that could succeed at once is executed."""
    text = module(
        """mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY; mbarrier.init.shared.b64 [dynamic], 1;
        mbarrier.arrive.shared.b64 %d1, [dynamic]; READY: bar.sync 0; mov.b32 %r2, 0;
        W: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; @!%p2 bra W;
        add.s32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 50; @%p3 bra W; ret;"""
    )
    opcode = "mbarrier.try_wait.parity.shared.b64"
    assert launch(text, 0, 0).by_opcode[opcode] == 50
    counts = {
        launch(text, 0, 0, options=Options(seed=s, spurious_try_wait_failures=True)).by_opcode[opcode] for s in range(4)
    }
    assert min(counts) > 50 and len(counts) > 1


def test_a_peek_at_a_barrier_that_only_the_peeking_warp_can_complete():
    """try_wait is bounded: a warp that looks ahead and goes on must not be suspended for ever.

    Program order says that no peek can succeed. On an H200 all do: ptxas lets nothing wait for the result of try_wait
    before the arrival that follows it, and then the phase completes while the unit still waits for it.
    """
    text = module(
        f"""{THREAD_OUTPUT} setp.ne.u32 %p1, %r1, 0; @%p1 bra READY; mbarrier.init.shared.b64 [dynamic], 32;
        READY: bar.sync 0; mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; selp.b32 %r9, 1, 0, %p2;
        mbarrier.arrive.shared.b64 %d3, [dynamic];
        W: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic], 0; @!%p3 bra W; st.global.b32 [%d1], %r9; ret;""",
        parameters=1,
    )
    out = np.full(32, 5, np.uint32)
    launch(text, out, hardware="a try_wait that is not over when its warp goes on to arrive")
    assert out.tolist() == [0] * 32


def test_state_tokens_of_arrivals():
    text = module(
        f"""{THREAD_OUTPUT} setp.ne.u32 %p1, %r1, 0; @%p1 bra READY; mbarrier.init.shared.b64 [dynamic], 64;
        READY: bar.sync 0; mbarrier.arrive.shared.b64 %d3, [dynamic];
        W: mbarrier.try_wait.shared.b64 %p2, [dynamic], %d3;
        @!%p2 bra W; mov.b32 %r9, 3; st.global.b32 [%d1], %r9; ret;""",
        parameters=1,
    )
    out = np.zeros(64, np.uint32)
    launch(text, out, block=(64, 1, 1))
    assert out.tolist() == [3] * 64


@pytest.mark.parametrize("pause", ["", "nanosleep.u32 20;"])
def test_spinning_on_memory_that_another_warp_writes(pause: str):
    """A warp that never waits gives way all the same."""
    text = module(
        f"""{THREAD_OUTPUT} shr.u32 %r2, %r1, 5; setp.ne.u32 %p1, %r2, 0; @%p1 bra WRITER;
        SPIN: {pause} ld.volatile.global.b32 %r3, [%d0+252]; setp.ne.b32 %p2, %r3, 0; @!%p2 bra SPIN; bra END;
        WRITER: mov.b32 %r3, 8; mov.b32 %r4, 0; DELAY: add.s32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, 50; @%p3 bra DELAY;
        END: st.volatile.global.b32 [%d1], %r3; ret;""",
        parameters=1,
    )
    out = np.zeros(64, np.uint32)
    launch(text, out, block=(64, 1, 1))
    assert out.tolist() == [8] * 64


def test_the_same_seed_gives_the_same_schedule():
    """What a warp that races with another one sees: equal for equal seeds, not always equal for different ones."""
    text = module(
        f"""{THREAD_OUTPUT} shr.u32 %r2, %r1, 5; setp.ne.u32 %p1, %r2, 0; mov.b32 %r3, 0; @%p1 bra OTHER;
        COUNT: add.s32 %r3, %r3, 1; st.global.b32 [%d0+256], %r3; setp.lt.u32 %p2, %r3, 200; @%p2 bra COUNT; bra END;
        OTHER: mov.b32 %r4, 0; LOOK: ld.global.b32 %r5, [%d0+256]; mad.lo.u32 %r3, %r3, 31, %r5; add.s32 %r4, %r4, 1;
        setp.lt.u32 %p2, %r4, 50; @%p2 bra LOOK;
        END: st.global.b32 [%d1], %r3; ret;""",
        parameters=1,
    )

    def seen(seed: int) -> int:
        out = np.zeros(65, np.uint32)
        options = Options(seed=seed, interleave="random", detectors=False)
        launch(text, out, block=(64, 1, 1), options=options, hardware="one warp reads what another one is writing")
        return int(out[40])

    first = [seen(s) for s in range(6)]
    assert first == [seen(s) for s in range(6)]
    assert len(set(first)) > 1


# --- errors ---------------------------------------------------------------------------------------------------------


def test_errors_say_where_they_happened():
    text = module(
        ".loc 1 88 5\nmov.u32 %r1, %tid.x;\nshr.u32 %r2, %r1, 5; setp.ne.u32 %p1, %r2, 1; @%p1 ret;\n"
        ".loc 1 91 5\nst.shared.b32 [dynamic+4096], %r1;\nret;"
    )
    text += '.file 1 "/x/epilogue.py"\n'
    with pytest.raises(IllegalAccess) as caught:
        launch(text, 0, 0, block=(64, 1, 1), grid=(2, 1, 1), cluster=(2, 1, 1), options=Options(roles=("load", "mma")))
    error = caught.value
    line = next(i for i, text_line in enumerate(text.splitlines(), 1) if text_line.startswith("st.shared"))
    assert (error.ptx_line, error.source, error.warp) == (line, "epilogue.py:91", "CTA 0 warp 1 (mma)")
    assert error.instruction == "st.shared.b32 [dynamic+4096], %r1"
    assert str(error).endswith(f"at PTX line {line} `{error.instruction}` (epilogue.py:91), CTA 0 warp 1 (mma)")


def test_a_trap_is_reported():
    body = "mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 3; @%p1 bra END; trap; END: ret;"
    with pytest.raises(EmulatorError, match=r"trap at PTX line \d+ `trap`"):
        launch(module(body), 0, 0)


def test_detectors_can_be_switched_off():
    body = "ld.shared.b32 %r1, [dynamic]; st.shared.b32 [dynamic+4], %r1; ret;"
    launch(module(body), 0, 0, options=Options(detectors=False))
    with pytest.raises(IllegalAccess, match="uninitialised"):
        launch(module(body), 0, 0)


TMA_STORE = """mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.b32 %r3, dynamic; add.s32 %r4, %r2, %r3;
    mul.lo.u32 %r5, %r1, 9;
    st.shared.b32 [%r4], %r5; FENCE bar.sync 0; elect.sync _|%p1, -1; @!%p1 bra END; ld.param.u64 %d1, [p0];
    cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%d1, {0}], [dynamic]; cp.async.bulk.commit_group; WAIT
    END: ret;"""


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_tensor_map_is_aligned(options: Options):
    """On an H200 this is a fault: misaligned address."""
    out = np.zeros(64, np.uint32)
    base = out.ctypes.data + -out.ctypes.data % 16
    store = aligned(np.zeros(256, np.uint8))
    store[32:160] = np.frombuffer(encode(TensorMap(base, "u32", (32,), (), (32,), (1,))), np.uint8)
    fence, wait = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group 0;"
    text = module(TMA_STORE.replace("FENCE", fence).replace("WAIT", wait), parameters=2)
    for where in (store[32:], store[16:]):
        with pytest.raises(IllegalAccess, match="tensor map at 0x[0-9a-f]*, which is not 64-byte aligned"):
            launch(text, where, out, options=options)
    store[64:192] = store[32:160].copy()
    launch(text, store[64:192], out, options=options, hardware="an array with an address that is not moved")
    assert out[(base - out.ctypes.data) // 4 :][:32].tolist() == [9 * n for n in range(32)]


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_tensor_store_and_what_it_needs(options: Options):
    def attempt(fence: str, wait: str) -> np.ndarray:
        out = np.zeros(64, np.uint32)
        base = out.ctypes.data + -out.ctypes.data % 16
        tensor_map = TensorMap(base, "u32", (32,), (), (32,), (1,))
        text = module(TMA_STORE.replace("FENCE", fence).replace("WAIT", wait), parameters=2)
        launch(text, tensor_map, out, options=options)
        start = (base - out.ctypes.data) // 4
        return out[start : start + 32]

    fence, wait = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group 0;"
    assert attempt(fence, wait).tolist() == [9 * n for n in range(32)]
    with pytest.raises(ProxyFenceMissing):
        attempt("", wait)
    with pytest.raises(IllegalAccess, match="exits while its shared memory may still be read"):
        attempt(fence, "")


# --- cluster launch control -----------------------------------------------------------------------------------------

TAKE_OVER = """mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [dynamic], 1; mbarrier.init.shared.b64 [dynamic+8], 64;
    fence.mbarrier_init.release.cluster; READY: barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ctaid.y; mov.u32 %r4, %clusterid.x; mov.u32 %r5, %cluster_ctarank;
    mov.b32 %r6, 0; ld.param.u64 %d0, [p0];
    NEXT: mad.lo.u32 %r7, %r3, 8, %r2; mul.wide.u32 %d1, %r7, 128; add.s64 %d1, %d0, %d1; mul.wide.u32 %d2, %r1, 4;
    add.s64 %d1, %d1, %d2; add.s32 %r8, %r4, 1; st.global.b32 [%d1], %r8;
    @!%p1 mbarrier.arrive.expect_tx.shared.b64 _, [dynamic], 16;
    setp.ne.u32 %p2, %r5, 0; @%p2 bra WAIT; elect.sync _|%p3, -1; @!%p3 bra WAIT;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128
    [dynamic+16], [dynamic];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [dynamic], %r6; @!%p4 bra WAIT;
    ld.shared.v2.b64 {%d3, %d4}, [dynamic+16];
    { .reg .b128 answer; mov.b128 answer, {%d3, %d4};
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p5, answer;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r2, answer;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {_, %r3, _, _}, answer; }
    add.s32 %r2, %r2, %r5; fence.proxy.async.shared::cta;
    mapa.shared::cluster.u32 %r9, %r10, 0; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9+8];
    setp.ne.u32 %p6, %r5, 0; @%p6 bra SKIP;
    FREE: mbarrier.try_wait.parity.shared.b64 %p4, [dynamic+8], %r6; @!%p4 bra FREE;
    SKIP: xor.b32 %r6, %r6, 1; @%p5 bra NEXT; barrier.cluster.arrive; barrier.cluster.wait; ret;"""


@pytest.mark.parametrize("options", SCHEDULES)
def test_a_running_cluster_takes_over_those_that_wait(options: Options):
    """CTA 0 asks for the next cluster and the answer goes to both CTAs; nothing is left for a second cluster to do,
    unless a request may fail while clusters wait: the next one begins then, and asks for those behind it.
    """
    out = np.zeros((3, 8, 32), np.uint32)
    calls = []
    text = module("mov.b32 %r10, dynamic;" + TAKE_OVER)
    how = dataclasses.replace(options, progress=lambda done, total: calls.append((done, total)))
    report = launch(text, out, 0, grid=(8, 3, 1), cluster=(2, 1, 1), options=how)
    assert calls[0] == (0, 12) and calls[-1] == (12, 12)
    taken = out[:, ::2, 0].reshape(-1)
    assert (out == np.repeat(taken.reshape(3, 4), 2, axis=1)[:, :, None]).all()
    if not options.spurious_try_wait_failures:
        assert (out == 1).all()  # cluster 0 wrote for every CTA of the grid
        assert report.clusters == 1 and calls == [(0, 12), (12, 12)]
    else:
        assert report.clusters > 1 and (taken > 0).all()
