"""Races in global memory name the array and the byte in it, wherever arrays begin."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.emulator.errors import GlobalMemoryRace, ProxyFenceMissing, Race
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module
from tests.emulator import ptx_launch

#: Thread 3 of warp 0 and thread 35 store to item 3; a barrier may stand between.
STORES = f"""{THREAD_OUTPUT} and.b32 %r2, %r1, 31; setp.ne.u32 %p1, %r2, 3; setp.lt.u32 %p2, %r1, 32; @%p1 bra MEET;
    @%p2 st.global.b32 [%d0+12], %r1; MEET: BARRIER @%p1 bra LAST; @!%p2 st.global.b32 [%d0+12], %r1; LAST: ret;"""
#: A bulk copy of 16 bytes at byte 16 of what thread 0 has stored.
COPY = """ld.param.u64 %d0, [p0]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra LAST;
    mbarrier.init.shared.b64 [dynamic], 1; st.global.b32 [%d0+20], %r1; FENCE
    mbarrier.arrive.expect_tx.shared.b64 %d2, [dynamic], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [dynamic+16], [%d0+16], 16, [dynamic];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; @!%p2 bra WAIT; LAST: ret;"""


def launch(body: str, start: int, name: str, options: Options, warps: int = 1) -> np.ndarray:
    """Runs a kernel on 128 bytes that begin ``start`` bytes behind a multiple of 128, with other arrays around them."""
    store = aligned(np.zeros(128, np.uint32)).view(np.uint8)
    array = store[start : start + 128]
    memory = GlobalMemory()
    memory.register(store.ctypes.data, start, "before", owner=store)
    memory.register(array.ctypes.data, 128, name, owner=store)
    memory.register(array.ctypes.data + 128, 64, "behind", owner=store)
    params = array.ctypes.data.to_bytes(8, "little")
    text = module(body, parameters=1)
    run(text, grid=1, block=32 * warps, dynamic_smem=1024, params=params, memory=memory, options=options)
    return array


@pytest.mark.parametrize(
    ("start", "name", "words"),
    [(4, "out", r"byte 12 of out \(128 bytes\)"), (20, "", r"byte 12 of a global array \(128 bytes\)"),
     (32, "argument p0", r"byte 12 of argument p0 \(128 bytes\)")],
)  # fmt: skip
def test_stores(start: int, name: str, words: str):
    with pytest.raises(GlobalMemoryRace, match=f"writes the 4 bytes at {words}, which the store of CTA 0 warp 0 wrote"):
        launch(STORES.replace("BARRIER", ""), start, name, Options(), warps=2)
    assert launch(STORES.replace("BARRIER", "bar.sync 0;"), start, name, Options(), warps=2)[12] == 35


def test_a_copy_without_a_proxy_fence():
    with pytest.raises(ProxyFenceMissing, match=r"reads the 4 bytes at byte 20 of out \(128 bytes\), which the store"):
        launch(COPY.replace("FENCE", ""), 16, "out", Options())
    launch(COPY.replace("FENCE", "fence.proxy.async.global;"), 16, "out", Options())


#: Lane 0, or lanes 1 and 0 one after the other, store to the array's first item.
ONE_LANE = "setp.eq.u32 %p1, %r1, 0; @%p1 st.global.b32 [%d0], %r1; ret;"
TWO_LANES = f"setp.eq.u32 %p2, %r1, 1; @%p2 st.global.b32 [%d0], %r1; {ONE_LANE}"


@pytest.mark.parametrize(
    ("body", "ctas", "kind"), [(ONE_LANE, 2, "global-race"), (TWO_LANES, 1, "lanes-race"), (TWO_LANES, 2, "lanes-race")]
)
def test_warps_of_the_same_number_in_two_clusters_are_two_warps(body: str, ctas: int, kind: str):
    text = module(THREAD_OUTPUT + body, parameters=1)
    with pytest.raises(GlobalMemoryRace) as caught:
        ptx_launch.launch(text, np.zeros(64, np.uint32), grid=(ctas, 1, 1), options=Options())
    assert caught.value.kind == kind


def two_stores(space: str, first: str, between: str, second: str) -> None:
    """Lane 1 and then lane 0 access one word, which is 0 at first, by an instruction each."""
    place = {"shared": "[dynamic]", "global": "[%d0]"}[space]
    body = f"""{THREAD_OUTPUT} setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 1; @%p1 st.shared.b32 [dynamic], 0;
        bar.warp.sync -1; @%p2 {first.format(space, place)}
        {between.format(space, place)} @%p1 {second.format(space, place)} ret;"""
    ptx_launch.launch(
        module(body, parameters=1), np.zeros(64, np.uint32), options=Options(), hardware="either store may come last"
    )


STRENGTHS = ("", ".volatile", ".relaxed.cta", ".release.gpu")


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize(("first", "second"), [(x, y) for x in STRENGTHS for y in STRENGTHS])
def test_two_stores_of_two_lanes_to_one_word_race_however_strong(space: str, first: str, second: str):
    stores = [f"st{strength}.{{}}.b32 {{}}, %r1;" for strength in (first, second)]
    with pytest.raises(Race) as caught:
        two_stores(space, stores[0], "", stores[1])
    assert caught.value.kind == "lanes-race"
    for between in ("bar.warp.sync -1;", "bar.sync 0;"):
        two_stores(space, stores[0], between, stores[1])


@pytest.mark.parametrize("space", ["shared", "global"])
def test_strong_stores_of_two_lanes_that_atomics_or_a_read_order_do_not_race(space: str):
    store = "st.volatile.{}.b32 {}, %r1;"
    two_stores(space, store, "", "red.relaxed.cta.{}.add.u32 {}, 1;")
    two_stores(space, "atom.relaxed.cta.{}.exch.b32 %r5, {}, 1;", "", store)
    two_stores(space, store, "@%p1 ld.volatile.{}.b32 %r5, {};", store)
