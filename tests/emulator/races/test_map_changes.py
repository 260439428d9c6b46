"""A tensor map in global memory changes when no copy reads it any more, whatever changes it."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import GlobalMemoryRace, Options
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch
from tests.emulator.races.test_races import SCHEDULES

TO_SHARED = "".join(
    f"@%p1 ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d0+{n}];"
    f"@%p1 st.shared.v4.b32 [dynamic+{512 + n}], {{%r20, %r21, %r22, %r23}};"
    for n in range(0, 128, 16)
)
#: What makes the address in %d2 the one of the map at %d0.
CHANGES = {
    "tensormap.replace": "@%p1 tensormap.replace.tile.global_address.global.b1024.b64 [%d0], %d2;",
    "tensormap.cp_fenceproxy": TO_SHARED
    + """@%p1 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [dynamic+512], %d2; bar.warp.sync -1;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
            [%d0], [dynamic+512], 128;""",
    "st.global": "@%p1 st.global.b64 [%d0], %d2;",
}
CHANGE = CHANGES["tensormap.replace"]
PUBLISH = """fence.proxy.tensormap::generic.release.gpu; bar.warp.sync -1;
    fence.proxy.tensormap::generic.acquire.gpu [%d0], 128;"""
STORE = """@%p1 cp.{kind}async.bulk.tensor.2d.global.shared::cta.{op}tile.bulk_group [%d0, {{%r9, %r9}}], [dynamic+128];
    @%p1 cp.async.bulk.commit_group;"""
STORES = {"store": STORE.format(kind="", op=""), "reduction": STORE.format(kind="reduce.", op="add.")}


def load(number: int) -> str:
    """A load of 128 bytes to shared memory, with a place and an mbarrier of its own."""
    return f"""@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [dynamic+{8 * number}], 128;
        @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [dynamic+{128 + 128 * number}], [%d0, {{%r9, %r9}}], [dynamic+{8 * number}];"""


def wait(number: int, who: str = "") -> str:
    """A wait of a warp for a load."""
    label = f"$wait{number}{who}"
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p3, [dynamic+{8 * number}], 0; @!%p3 bra {label};"


def run(first: str, second: str = "", options: Options | None = None) -> tuple[list[int], list[int]]:
    """Runs ``first`` by warp 0 and ``second`` by warp 1, %p1 being true in lane 0 of both.

    The map is one of the first of two rows of 32 numbers, 100 and 200; its address in %d2 is that of the second.
    Shared memory has zeros where loads go, and stores come from.

    Returns:
        The first number of what is in the places of the loads, and of the rows.
    """
    body = f"""
        ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d2, [p2]; mov.u32 %r9, 0;
        mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; setp.eq.u32 %p1, %r2, 0; setp.lt.u32 %p2, %r1, 32;
        shl.b32 %r3, %r2, 2; mov.u32 %r4, dynamic; add.u32 %r5, %r4, %r3;
        @%p2 st.shared.b32 [%r5+128], %r9; @%p2 st.shared.b32 [%r5+256], %r9; fence.proxy.async.shared::cta;
        setp.ne.u32 %p4, %r1, 0; @%p4 bra $begin;
        mbarrier.init.shared.b64 [dynamic], 1; mbarrier.init.shared.b64 [dynamic+8], 1;
        $begin: bar.sync 0;
        @!%p2 bra $second; {first} bra $last;
        $second: {second}
        $last: bar.sync 0;
        @!%p2 exit;
        ld.shared.b32 %r6, [%r5+128]; ld.shared.b32 %r7, [%r5+256];
        mul.wide.u32 %d3, %r2, 4; add.s64 %d3, %d1, %d3;
        st.global.b32 [%d3], %r6; st.global.b32 [%d3+128], %r7; ret;
    """
    rows = aligned(np.repeat([100, 200], 32).astype(np.int32).reshape(2, 32))
    tensor_map = TensorMap(rows.ctypes.data, "s32", (32, 1), (128,), (32, 1), (1, 1))
    out = aligned(np.zeros((2, 32), np.int32))
    text = module(body, parameters=3)
    launch(text, tensor_map, out, rows.ctypes.data + 128, block=(64, 1, 1), reachable=[rows], options=options)
    assert (out == out[:, :1]).all() and (rows == rows[:, :1]).all()
    return out[:, 0].tolist(), rows[:, 0].tolist()


def report(first: str, second: str = "", options: Options | None = None) -> str:
    """What is said of the race between a copy that reads the map and what changes it."""
    with pytest.raises(GlobalMemoryRace) as caught:
        run(first, second, options)
    assert "writes the" in str(caught.value) and "of array 0 (128 bytes), which the TMA" in str(caught.value)
    assert caught.value.kind == "global-race"
    return diagnose(caught.value).sentence


@pytest.mark.parametrize("options", SCHEDULES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_load_is_over_before_the_map_changes(change: str, options: Options) -> None:
    before, after = load(0), f"{CHANGES[change]} {PUBLISH} {load(1)}"
    assert run(f"{before} {wait(0)} {after} {wait(1)}", "", options)[0] == [100, 200]
    later = "a change of a tensor map" if "tensormap" in change else "a store"
    expected = f"{later} writes global memory that a TMA load read, and nothing orders the two"
    assert report(f"{before} {after} {wait(0)} {wait(1)}", "", options) == expected


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_store_has_read_its_map_before_that_changes(change: str, kind: str) -> None:
    """`cp.async.bulk.wait_group.read` is enough (PTX ISA); a group that is committed is not."""
    store = STORES[kind]
    for completion in ("eager", "lazy"):
        options = Options(completion=completion)
        for read in ("", ".read"):
            done = f"@%p1 cp.async.bulk.wait_group{read} 0;"
            _, rows = run(f"{store} {done} {CHANGES[change]} {PUBLISH} {store} {done}", "", options)
            assert rows == ([0, 0] if kind == "store" else [100, 200])
        assert f"that a TMA {kind} read" in report(f"{store} {CHANGES[change]} {PUBLISH}", "", options)


def test_another_warp_changes_the_map() -> None:
    """It has waited itself, or for one that has."""
    change = f"{CHANGE} {PUBLISH}"
    issue = f"{load(0)} bar.sync 1, 64; bar.sync 2, 64; {load(1)} {wait(1)}"
    told = f"{load(0)} {wait(0)} bar.sync 1, 64; bar.sync 2, 64; {load(1)} {wait(1)}"
    change_at_once = f"bar.sync 1, 64; {change} bar.sync 2, 64;"
    assert run(issue, f"bar.sync 1, 64; {wait(0)} {change} bar.sync 2, 64;")[0] == [100, 200]
    assert run(told, change_at_once)[0] == [100, 200]
    report(issue, change_at_once)
    report(f"{load(0)} bar.sync 1, 64; {wait(0)} bar.sync 2, 64; {load(1)} {wait(1)}", change_at_once)


def test_the_last_load_stands_for_those_before_it_unless_strictly() -> None:
    """Grouped GEMMs of CUTLASS wait for the last stage alone. An earlier load stands for no later one."""
    loads, strict = f"{load(0)} {load(1)}", Options(strict=True)
    assert run(f"{loads} {wait(1)} {CHANGE} {wait(0)}")[0] == [100, 100]
    assert run(f"{loads} {wait(0)} {wait(1)} {CHANGE}", options=strict)[0] == [100, 100]
    report(f"{loads} {wait(0)} {CHANGE} {wait(1)}")
    report(f"{loads} {wait(1)} {CHANGE} {wait(0)}", options=strict)


def test_without_detectors_it_is_not_looked_for() -> None:
    options = Options(detectors=False)
    assert run(f"{load(0)} {CHANGE} {load(1)} {wait(0)} {wait(1)}", options=options)[0] == [100, 200]
