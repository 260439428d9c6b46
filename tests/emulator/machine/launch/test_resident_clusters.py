"""Clusters that wait for each other: results and reports against what the program says, whatever the order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError, GlobalMemoryRace, Hang
from cute_kernels.emulator.machine.launch.launch import capacity
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import module
from tests.emulator.ptx_launch import launch

ORDERS = [
    {},
    {"interleave": "random", "seed": 3},
    {"completion": "lazy", "interleave": "starve", "seed": 2},
    *({"interleave_clusters": order, "seed": seed} for order in ("random", "starve") for seed in range(4)),
    {"interleave_clusters": "random", "interleave": "random", "seed": 7},
]

BEGIN = """ld.param.u64 %d0, [p0]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x;
    mul.wide.u32 %d1, %r1, 4; add.s64 %d1, %d1, %d0;"""
#: CTA c adds its number times 3 to cell 16 when cell 0 says that all later CTAs have.
LAST_FIRST = f"""{BEGIN} sub.u32 %r3, %r2, %r1; sub.u32 %r3, %r3, 1;
    WAIT: ld.acquire.gpu.global.u32 %r4, [%d0]; setp.ne.u32 %p1, %r4, %r3; @%p1 bra WAIT;
    ld.global.u32 %r5, [%d0+64]; mad.lo.u32 %r5, %r1, 3, %r5; st.global.u32 [%d0+64], %r5;
    add.u32 %r4, %r4, 1; st.release.gpu.global.u32 [%d0], %r4; ret;"""
#: Rounds of a grid barrier of 128 threads: each CTA adds its right neighbour's cell to its own.
GRID_BARRIER = f"""{BEGIN} mov.u32 %r7, 0; add.u32 %r3, %r1, 1; rem.u32 %r3, %r3, %r2; mul.wide.u32 %d2, %r3, 4;
    add.s64 %d2, %d2, %d0; setp.ne.u32 %p1, %r0, 0; mov.u32 %r8, 0; mov.u32 %r9, 0;
    ROUND: @%p1 bra HERE; ld.global.u32 %r10, [%d2+64];
    HERE: bar.sync 0; @%p1 bra MET; add.u32 %r8, %r8, %r2;
    atom.add.acq_rel.gpu.global.u32 %r4, [%d0], 1;
    WAIT: ld.acquire.gpu.global.u32 %r4, [%d0]; setp.lt.u32 %p2, %r4, %r8; @%p2 bra WAIT;
    MET: bar.sync 0; @%p1 bra NEXT;
    ld.global.u32 %r11, [%d1+64]; add.u32 %r11, %r11, %r10; st.global.u32 [%d1+64], %r11; add.u32 %r8, %r8, %r2;
    atom.add.acq_rel.gpu.global.u32 %r4, [%d0], 1;
    AGAIN: ld.acquire.gpu.global.u32 %r4, [%d0]; setp.lt.u32 %p2, %r4, %r8; @%p2 bra AGAIN;
    NEXT: add.u32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 3; @%p2 bra ROUND; ret;"""
#: As cooperative groups wait, but for all threads: thread 0 looks, and tells the others through shared memory.
THROUGH_SHARED = f"""{BEGIN} setp.ne.u32 %p1, %r0, 0; setp.ne.u32 %p3, %r1, 0; @%p3 bra SET;
    LOOK: @%p1 bra TOLD; ld.acquire.gpu.global.u32 %r4, [%d0]; st.shared.u32 [dynamic], %r4;
    TOLD: bar.sync 0; ld.shared.u32 %r5, [dynamic]; bar.sync 0; setp.eq.u32 %p2, %r5, 0; @%p2 bra LOOK;
    @%p1 bra END; ld.global.u32 %r6, [%d0+4]; st.global.u32 [%d0+64], %r6; END: ret;
    SET: @%p1 bra END; st.global.u32 [%d0+4], 17; st.release.gpu.global.u32 [%d0], 1; ret;"""


def _cells(count: int) -> np.ndarray:
    cells = np.zeros(16 + count, np.uint32)
    cells[16:] = np.arange(1, count + 1) ** 2
    return cells


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_lock_that_goes_from_the_last_cta_to_the_first(order: dict[str, Any]) -> None:
    cells, count = np.zeros(17, np.uint32), 12
    report = launch(module(LAST_FIRST), cells, 0, grid=(count, 1, 1), block=(1, 1, 1), options=Options(**order))
    assert report.clusters == count and cells[0] == count and cells[16] == 3 * sum(range(count))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("cluster", [1, 2])
def test_a_barrier_of_the_grid(order: dict[str, Any], cluster: int) -> None:
    count, cells = 6, _cells(6)
    wanted = cells[16:].copy()
    for _ in range(3):
        wanted = wanted + np.roll(wanted, -1)
    shape = {"grid": (count, 1, 1), "block": (128, 1, 1), "cluster": (cluster, 1, 1)}
    launch(module(GRID_BARRIER), cells, 0, **shape, options=Options(**order))
    assert (cells[16:] == wanted).all() and cells[0] == 6 * count


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_wait_that_thread_0_does_for_its_cta(order: dict[str, Any]) -> None:
    """The CTA that waits stores to its shared memory in every round: it never stands still."""
    cells = np.zeros(17, np.uint32)
    launch(module(THROUGH_SHARED), cells, 0, grid=(2, 1, 1), block=(64, 1, 1),
           options=Options(**order))  # fmt: skip
    assert cells[16] == 17


def test_a_wait_that_stores_is_left_by_clusters_in_a_drawn_order() -> None:
    """Each round of the loop does something, so that nothing but the number of looks tells that it waits."""
    body = LAST_FIRST.replace("WAIT:", "WAIT: st.shared.u32 [dynamic], %r4;")
    cells = np.zeros(17, np.uint32)
    report = launch(module(body), cells, 0, grid=(4, 1, 1), block=(1, 1, 1),
                    options=Options(interleave_clusters="random", max_warp_instructions=3_000_000))  # fmt: skip
    assert cells[0] == 4 and report.warp_instructions < 3_000_000


@pytest.mark.parametrize(
    ("weak", "kept"),
    [("st.release.gpu", "st.relaxed.gpu"), ("ld.acquire.gpu", "ld.relaxed.gpu"), ("st.release.gpu", "st.release.cta")],
)
@pytest.mark.parametrize("order", [{}, {"interleave_clusters": "random"}])
def test_what_a_flag_does_not_order_races(weak: str, kept: str, order: dict[str, Any]) -> None:
    with pytest.raises(GlobalMemoryRace):
        launch(module(LAST_FIRST.replace(weak, kept)), np.zeros(17, np.uint32), 0, grid=(3, 1, 1), block=(1, 1, 1),
               options=Options(**order))  # fmt: skip


def test_order_through_another_cluster_counts() -> None:
    """CTA 0 stores, CTA 1 hands its flag on, and another warp of CTA 0 loads."""
    body = f"""{BEGIN} setp.ne.u32 %p1, %r1, 0; @%p1 bra BETWEEN; setp.ge.u32 %p2, %r0, 32; @%p2 bra SECOND;
    setp.ne.u32 %p3, %r0, 0; @%p3 bra END; st.global.u32 [%d0+64], 9; st.release.gpu.global.u32 [%d0], 1; ret;
    SECOND: setp.ne.u32 %p3, %r0, 32; @%p3 bra END;
    W: ld.acquire.gpu.global.u32 %r4, [%d0+4]; setp.eq.u32 %p2, %r4, 0; @%p2 bra W; ld.global.u32 %r5, [%d0+64];
    st.global.u32 [%d0+68], %r5; ret;
    BETWEEN: setp.ne.u32 %p3, %r0, 0; @%p3 bra END;
    V: ld.acquire.gpu.global.u32 %r4, [%d0]; setp.eq.u32 %p2, %r4, 0; @%p2 bra V;
    st.ORDER.gpu.global.u32 [%d0+4], 1; END: ret;"""
    shape = {"grid": (2, 1, 1), "block": (64, 1, 1)}
    cells = np.zeros(18, np.uint32)
    launch(module(body.replace("ORDER", "release")), cells, 0, **shape)
    assert cells[17] == 9
    with pytest.raises(GlobalMemoryRace):
        launch(module(body.replace("ORDER", "relaxed")), np.zeros(18, np.uint32), 0, **shape)


def test_resident_clusters_race_with_each_other() -> None:
    """CTA 0 stores while it waits, where CTA 1 stores before it sets the flag: nothing orders the two stores."""
    body = f"""{BEGIN} st.global.u32 [%d0+64], %r1; setp.eq.u32 %p1, %r1, 1; @%p1 bra SET;
    W: ld.acquire.gpu.global.u32 %r4, [%d0]; setp.eq.u32 %p2, %r4, 0; @%p2 bra W; ret;
    SET: st.release.gpu.global.u32 [%d0], 1; ret;"""
    with pytest.raises(GlobalMemoryRace, match="cluster 1.*cluster 0"):
        launch(module(body), np.zeros(17, np.uint32), 0, grid=(2, 1, 1))


def test_a_flag_that_nobody_sets_is_a_hang_of_all() -> None:
    text = module(LAST_FIRST.replace("setp.ne.u32 %p1, %r4, %r3", "setp.ne.u32 %p1, %r4, 999"))
    with pytest.raises(Hang, match="cluster 0 hangs") as caught:
        launch(text, np.zeros(17, np.uint32), 0, grid=(12, 1, 1), block=(1, 1, 1), options=Options(resident=6))
    report = caught.value.report
    assert "cluster 1 waits, too: cluster 1, CTA 0 warp 0" in report
    assert "and 2 other clusters\n6 clusters have not started: 6 are resident at most at the same time" in report


def test_a_hang_in_an_order_that_is_drawn_in_all() -> None:
    text = module(LAST_FIRST.replace("setp.ne.u32 %p1, %r4, %r3", "setp.ne.u32 %p1, %r4, 999"))
    order = Options(interleave_clusters="random", interleave="random")
    with pytest.raises(Hang, match="livelock"):
        launch(text, np.zeros(17, np.uint32), 0, grid=(3, 1, 1), block=(1, 1, 1), options=order)


def test_no_more_are_resident_than_the_option_allows() -> None:
    for resident, ends in ((4, True), (3, False)):
        cells = np.zeros(17, np.uint32)
        if ends:
            launch(module(LAST_FIRST), cells, 0, grid=(4, 1, 1), block=(1, 1, 1), options=Options(resident=resident))
            continue
        with pytest.raises(Hang, match="hangs"):
            launch(module(LAST_FIRST), cells, 0, grid=(4, 1, 1), block=(1, 1, 1), options=Options(resident=resident))
    with pytest.raises(ValueError, match="resident = 0"):
        Options(resident=0)


ONE_ON_AN_SM = (132, 66, 39, 30, 22, 17, 15, 15, 9, *[7] * 7)
TWO_ON_AN_SM = (264, 132, 79, 62, 47, 39, 32, 30, 23, 21, 16, 16, *[14] * 4)


@pytest.mark.parametrize(
    ("target", "ctas", "threads", "shared", "registers", "wanted"),
    [
        ("sm_90a", 1, 128, 1024, None, 132 * 16),  # 2,048 threads of an SM
        ("sm_90a", 2, 384, 200 << 10, None, 66),
        ("sm_100a", 1, 1, 1024, None, 148 * 32),  # 32 CTAs
        ("sm_80", 1, 256, 60 << 10, None, 108 * 2),
        ("sm_90a", 1, 256, 1024, 128, 132 * 2),  # 65,536 registers
        ("sm_90a", 1, 673, 1024, None, 132 * 2),  # threads of whole warps: 704
        ("sm_90a", 1, 33, 1024, 255, 132 * 4),  # whose registers are taken as well
        # What cuOccupancyMaxActiveClusters of an H100 says: GPCs have 18, 16, 8 and 2 multiprocessors.
        *(("sm_90a", ctas, 1024, 200 << 10, None, wanted) for ctas, wanted in zip(range(1, 17), ONE_ON_AN_SM)),
        *(("sm_90a", ctas, 1024, 100 << 10, None, wanted) for ctas, wanted in zip(range(1, 17), TWO_ON_AN_SM)),
        ("sm_75", 16, 32, 164 << 10, None, 6),
    ],
)
def test_how_many_a_chip_holds(
    target: str, ctas: int, threads: int, shared: int, registers: int | None, wanted: int
) -> None:
    assert capacity(target, ctas, threads, shared, registers) == wanted


def test_a_gpu_without_clusters_is_given_none() -> None:
    with pytest.raises(ValueError, match=r"\(2, 1, 1\): must have 1 to 1 CTAs on sm_80 \(clusters need sm_90"):
        launch(module("ret;", parameters=0, target="sm_80"), grid=(2, 1, 1), cluster=(2, 1, 1))


# --- tensor memory of a multiprocessor -------------------------------------------------------------------------------

#: Each CTA allocates columns, waits until all have, and frees them; FIRST: CTA 0 frees them before it waits.
COLUMNS_OF_ALL = f"""{BEGIN} setp.ne.u32 %p3, %r0, 0; setp.ne.u32 %p1, %r1, 0;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic], COLUMNS; bar.warp.sync -1;
    ld.shared.b32 %r9, [dynamic]; FIRST
    @%p3 bra MET; atom.add.acq_rel.gpu.global.u32 %r4, [%d0], 1;
    WAIT: ld.acquire.gpu.global.u32 %r4, [%d0]; setp.lt.u32 %p2, %r4, %r2; @%p2 bra WAIT;
    MET: bar.warp.sync -1; FREE tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, COLUMNS; ret;"""


@pytest.mark.parametrize(
    ("columns", "ctas", "first", "hangs"),
    [(512, 148, False, False), (512, 149, False, True), (256, 150, False, False), (512, 149, True, False)],
)
def test_ctas_of_a_multiprocessor_share_its_tensor_memory(columns: int, ctas: int, first: bool, hangs: bool) -> None:
    """An SM holds 32 such CTAs: of 149, two share one of a B200's 148, and 512 columns."""
    free = "@!%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, COLUMNS;" if first else ""
    text = COLUMNS_OF_ALL.replace("FIRST", free).replace("FREE", "@%p1" if first else "")
    text = module(text.replace("COLUMNS", str(columns)), target="sm_100a")
    cells = np.zeros(1, np.uint32)
    if not hangs:
        launch(text, cells, 0, grid=(ctas, 1, 1))
        assert cells[0] == ctas
        return
    with pytest.raises(Hang, match="other CTAs of the multiprocessor hold 512 of its 512") as caught:
        launch(text, cells, 0, grid=(ctas, 1, 1))
    assert diagnose(caught.value).kind == "tensor-columns"


# --- cooperative launches -------------------------------------------------------------------------------------------

#: What nvcc makes of cooperative_groups::this_grid().sync(), for one thread.
COOPERATIVE = f"""{BEGIN} mov.u32 %r4, %envreg1; mov.u32 %r5, %envreg2; mov.b64 %d3, {{%r5, %r4}};
    setp.ne.s64 %p1, %d3, 0; @%p1 bra GRID; trap; GRID: add.s64 %d3, %d3, 4; add.u32 %r3, %r1, 7;
    st.global.u32 [%d1], %r3; sub.u32 %r6, 0x80000001, %r2; setp.eq.u32 %p2, %r1, 0; selp.b32 %r6, %r6, 1, %p2;
    barrier.sync 0; atom.add.release.gpu.u32 %r7, [%d3], %r6;
    W: ld.acquire.gpu.u32 %r8, [%d3]; xor.b32 %r8, %r8, %r7; setp.gt.s32 %p3, %r8, -1; @%p3 bra W;
    barrier.sync 0; add.u32 %r3, %r1, 1; rem.u32 %r3, %r3, %r2; mul.wide.u32 %d2, %r3, 4; add.s64 %d2, %d2, %d0;
    ld.global.u32 %r9, [%d2]; st.global.u32 [%d1+64], %r9; ret;"""


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_barrier_of_cooperative_groups(order: dict[str, Any]) -> None:
    cells = np.zeros(32, np.uint32)
    shape = {"grid": (5, 1, 1), "block": (1, 1, 1), "cooperative": True}
    launch(module(COOPERATIVE), cells, 0, **shape, options=Options(**order), hardware="a cooperative launch")
    assert cells[16:21].tolist() == [8, 9, 10, 11, 7]


def test_a_grid_without_a_barrier_traps() -> None:
    with pytest.raises(EmulatorError, match="trap"):
        launch(module(COOPERATIVE), np.zeros(32, np.uint32), 0, grid=(5, 1, 1))


def test_a_cooperative_launch_that_does_not_fit() -> None:
    message = r"grid = \(133, 1, 1\) of a cooperative launch has 133 clusters: must be at most 132"
    with pytest.raises(ValueError, match=message):
        launch(module(COOPERATIVE, target="sm_90a"), np.zeros(32, np.uint32), 0, grid=(133, 1, 1), block=(1024, 1, 1),
               dynamic_smem=200_000, cooperative=True)  # fmt: skip
