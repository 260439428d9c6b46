"""Shared memory of another CTA is accessed after that one is known to have begun, by whatever told so."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import IllegalAccess, Options
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
ORDERED = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
#: Each CTA writes its rank + 1 into the other's memory; behind a barrier each copies what it got to the result.
BODY = """
    ld.param.u64 %d1, [p0];
    mov.u32 %r1, %cluster_ctarank;
    xor.b32 %r2, %r1, 1;
    mov.u32 %r3, dynamic;
    mapa.shared::cluster.u32 %r4, %r3, %r2;
    add.u32 %r5, %r1, 1;
    START
    ACCESS
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    LAST
    ld.shared.u32 %r6, [dynamic];
    mul.wide.u32 %d2, %r1, 4;
    add.s64 %d1, %d1, %d2;
    st.global.u32 [%d1], %r6;
    ret;
"""
STORE = "st.shared::cluster.u32 [%r4], %r5;"
ACCESSES = {
    "load": "ld.shared::cluster.u32 %r5, [%r4];",
    "store": STORE,
    "store to a generic address": "cvta.shared.u64 %d5, dynamic; mapa.u64 %d6, %d5, %r2; st.u32 [%d6], %r5;",
    "atomic": "atom.relaxed.cluster.shared::cluster.add.u32 %r5, [%r4], 1;",
    "reduction": "red.relaxed.cluster.shared::cluster.add.u32 [%r4], 1;",
}


def run(start: str, access: str, seed: int = 0, warps: int = 1, last: str = "", **options: object) -> np.ndarray:
    """What each CTA got."""
    text = module(BODY.replace("START", start).replace("ACCESS", access).replace("LAST", last), parameters=1)
    out = aligned(np.zeros(2, np.int32))
    shape = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "block": (32 * warps, 1, 1)}
    launch(text, out, **shape, options=Options(seed=seed, **options))
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("start", ["", "bar.sync 0;", "fence.acq_rel.cluster;"])
@pytest.mark.parametrize("access", ACCESSES)
def test_nothing_says_that_the_other_cta_has_begun(start: str, access: str, seed: int) -> None:
    """Whichever CTA runs first."""
    with pytest.raises(IllegalAccess) as caught:
        run(start, ACCESSES[access], seed, without=("uninitialised",))
    assert "may not have begun" in str(caught.value)
    assert diagnose(caught.value).kind == "cta-not-begun"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("start", [RELAXED, ORDERED])
def test_a_cluster_barrier_says_so(start: str, seed: int) -> None:
    assert run(start, STORE, seed).tolist() == [2, 1]


@pytest.mark.parametrize("seed", range(3))
def test_a_warp_may_hear_of_it_from_another_one(seed: int) -> None:
    """Warp 1 waits for the cluster's arrivals; warp 0 stores behind a barrier of the CTA, and waits for them later."""
    start = """mov.u32 %r7, %tid.x; setp.lt.u32 %p1, %r7, 32; barrier.cluster.arrive.relaxed.aligned;
        @%p1 bra $told; barrier.cluster.wait.aligned; $told: bar.sync 1, 64;"""
    access = f"@!%p1 bra $stored; {STORE} barrier.cluster.wait.aligned; $stored:"
    assert run(start, access, seed, warps=2, last="@!%p1 exit;").tolist() == [2, 1]


def test_without_detectors_it_is_not_looked_for() -> None:
    assert sorted(run("", STORE, detectors=False).tolist()) == [1, 2]
