"""Certificates of kernels that allocate tensor memory: every use, and every change of what is allocated, in order."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError, TensorMemoryRace
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator.machine.state import test_pair_allocation as pairs
from tests.emulator.ptx_launch import launch

OTHERS = [Options(seed=seed, interleave=how) for seed in range(12) for how in ("random", "starve")]
ALONE = 200_000  # bytes of shared memory: a multiprocessor has no second CTA
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic], 32;"
AGAIN = ALLOC.replace("[dynamic]", "[dynamic+4]")
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 0, 32;"
FREE_AGAIN = FREE.replace("b32 0", "b32 32")
GIVE_UP = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
#: By warp 1: its 32 lanes of the first column.
STORE = """tcgen05.st.sync.aligned.32x32b.x1.b32 [0x200000], {%r1}; tcgen05.wait::st.sync.aligned;"""
SHOW = "ld.shared.b32 %r8, [dynamic]; st.global.u32 [%d1], %r8;"
SHOW_AGAIN = SHOW.replace("dynamic", "dynamic+4")
TELL, HEAR = "bar.arrive 1, 64;", "bar.sync 1, 64;"
#: What warps 0 and 1 do: some other schedule fails or leaves another result, and nothing is seen in the first one.
HOSTILE = {
    "a use by a warp that does not know of the allocation": (
        f"{ALLOC} bar.sync 2, 64; {FREE}", f"{STORE} bar.sync 2, 64;"),
    "a use of columns that are freed and allocated again": (
        f"{ALLOC} {TELL} {FREE} {ALLOC} bar.sync 2, 64; {FREE}", f"{HEAR} {STORE} bar.sync 2, 64;"),
    "a dealloc by a warp that does not know of the allocation": (ALLOC, FREE),
    "two allocations in any order": (
        f"{ALLOC} bar.warp.sync -1; {SHOW} bar.sync 2, 64; {FREE}",
        f"{AGAIN} bar.warp.sync -1; {SHOW_AGAIN} bar.sync 2, 64; {FREE_AGAIN}"),
    "an allocation that a dealloc may come before": (
        f"{ALLOC} {TELL} nanosleep.u32 100; {AGAIN} bar.warp.sync -1; {SHOW_AGAIN} bar.sync 2, 64; {FREE_AGAIN}",
        f"{HEAR} nanosleep.u32 100; {FREE} bar.sync 2, 64;"),
    "a permit that is given up": (f"{ALLOC} {FREE}", GIVE_UP),
}  # fmt: skip
SOUND = {
    "a use behind a barrier": (f"{ALLOC} {TELL} bar.sync 2, 64; {FREE}", f"{HEAR} {STORE} bar.sync 2, 64;"),
    "a use behind the second allocation": (
        f"{ALLOC} {FREE} {ALLOC} {TELL} bar.sync 2, 64; {FREE}", f"{HEAR} {STORE} bar.sync 2, 64;"),
    "a dealloc behind a barrier": (f"{ALLOC} {TELL}", f"{HEAR} {FREE}"),
    "one allocation after the other": (
        f"{ALLOC} bar.warp.sync -1; {SHOW} {FREE} {TELL}", f"{HEAR} {ALLOC} bar.warp.sync -1; {SHOW} {FREE}"),
    "a permit that is given up afterwards": (f"{ALLOC} {FREE} {TELL}", f"{HEAR} {GIVE_UP}"),
}  # fmt: skip


def kernel(first: str, second: str) -> str:
    body = f"""{THREAD_OUTPUT} setp.ge.u32 %p2, %r1, 32; @%p2 bra SECOND; {first} bra END; SECOND: {second}
        END: ret;"""
    return module(body, parameters=1, target="sm_100a")


def outcome(text: str, options: Options | None = None, **shape: object):
    """The certificate, and the result in words."""
    words = aligned(np.zeros(256, np.uint32))
    try:
        shape = {"block": (64, 1, 1), "dynamic_smem": ALONE} | shape
        found = launch(text, words, options=options or Options(), **shape).certificate
    except EmulatorError as error:
        return None, str(error)
    return found, str(words.tolist())


@pytest.mark.parametrize("name", HOSTILE)
def test_what_other_schedules_show_has_no_certificate(name: str):
    text = kernel(*HOSTILE[name])
    found, result = outcome(text)
    assert {place.kind for place in found.places} == {"allocation-order"}, found.lines()
    assert any(outcome(text, options)[1] != result for options in OTHERS), "the program is no example"


@pytest.mark.parametrize("name", SOUND)
def test_what_is_in_order_has_one(name: str):
    text = kernel(*SOUND[name])
    found, result = outcome(text)
    assert found.given, found.lines()
    assert all(outcome(text, options)[1] == result for options in OTHERS)


def test_a_use_that_may_come_after_the_dealloc_is_a_fault():
    text = kernel(f"{ALLOC} {TELL} nanosleep.u32 100; nanosleep.u32 100; {FREE}", f"{HEAR} {STORE}")
    with pytest.raises(TensorMemoryRace):
        launch(text, aligned(np.zeros(256, np.uint32)), block=(64, 1, 1))


def test_one_warp_that_knows_of_the_allocation_does_not_answer_for_another():
    """Warp 1 is told by a relaxed barrier, warp 2 by nothing; both execute the same store."""
    told = "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [dynamic+64];"
    wait = "W: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p5, [dynamic+64], 0; @!%p5 bra W;"
    body = f"""{THREAD_OUTPUT} setp.ne.u32 %p9, %r1, 0; @%p9 bra READY; mbarrier.init.shared.b64 [dynamic+64], 1;
        READY: bar.sync 0; shr.u32 %r3, %r1, 5; setp.ge.u32 %p2, %r1, 32; @%p2 bra OTHER; {ALLOC}
        @%p9 bra TOLD; {told} TOLD: bar.sync 2, 96; {FREE} bra END;
        OTHER: setp.ge.u32 %p3, %r1, 64; @%p3 bra SECOND; {wait} bar.arrive 3, 64; bra USE;
        SECOND: HEARD
        USE: shl.b32 %r4, %r3, 21; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {{%r1}};
        tcgen05.wait::st.sync.aligned; bar.sync 2, 96; END: ret;"""
    for heard, given in (("bar.sync 3, 64;", True), ("nanosleep.u32 100; " * 8, False)):
        text = module(body.replace("bar.arrive 3, 64;", "bar.arrive 3, 64;" * given).replace("HEARD", heard),
                      parameters=1, target="sm_100a")  # fmt: skip
        found, result = outcome(text, block=(96, 1, 1))
        assert found is not None, result
        assert found.given == given, found.lines()


def test_columns_of_the_other_cta_of_a_pair():
    """An allocation of both says that the peer has allocated; one of each CTA by itself does not."""
    shape = {"grid": (2, 1, 1), "block": (128, 1, 1), "cluster": (2, 1, 1)}
    out = aligned(np.zeros((2, 128, 4), np.uint32))
    assert launch(pairs.kernel(), out, **shape).certificate.given
    apart = pairs.kernel(alloc=pairs.ALLOC.replace("::2", "::1"), late="")
    apart = apart.replace("tcgen05.cp", f"{pairs.LATE} tcgen05.cp")
    places = launch(apart, out, **shape).certificate.places
    assert {place.kind for place in places} == {"allocation-order"}, places


@pytest.mark.parametrize(
    ("body", "cluster", "given"),
    [
        (f"{ALLOC} {AGAIN} {FREE} {FREE_AGAIN}", 1, False),  # who holds some may wait for more
        (ALLOC.replace("32;", "512;") + FREE.replace("32;", "512;"), 2, False),  # CTAs that may wait for each other
        (ALLOC.replace("32;", "512;") + FREE.replace("32;", "512;"), 1, True),
    ],
)
def test_columns_that_may_have_to_be_waited_for(body: str, cluster: int, given: bool):
    """Where a multiprocessor has several CTAs of the launch, and where a CTA is alone."""
    shape = {"grid": (2, 1, 1), "cluster": (cluster, 1, 1)}
    text = kernel(body, "")
    found, _ = outcome(text, dynamic_smem=4096, **shape)
    assert found.given == given and {place.kind for place in found.places} == (set() if given else {"pool"})
    alone, _ = outcome(text, **shape)
    assert alone.given, alone.lines()
