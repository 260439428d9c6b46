"""Launches that may overlap (programmatic dependent launch): what griddepcontrol.wait orders."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.emulator.errors import GlobalMemoryRace
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module

SCHEDULES = [Options(), Options(seed=1, completion="random", interleave="random"), Options()]

STORE = f"{THREAD_OUTPUT} WAIT st.global.b32 [%d1], %r1; ret;"
#: Every thread adds one to its item.
READ = f"{THREAD_OUTPUT} WAIT ld.global.b32 %r2, [%d1]; add.u32 %r2, %r2, 1; st.global.b32 [%d1], %r2; ret;"
ATOMIC = f"{THREAD_OUTPUT} WAIT red.global.add.u32 [%d1], 1; ret;"
#: Warp 0 waits, and warp 1 stores after a barrier.
HANDED_ON = f"""{THREAD_OUTPUT} setp.ge.u32 %p1, %r1, 32; @%p1 bra MEET; WAIT MEET: BARRIER @!%p1 bra LAST;
    st.global.b32 [%d1], %r1; LAST: ret;"""
#: 128 bytes of shared memory to global memory.
BULK = f"""{THREAD_OUTPUT} shl.b32 %r3, %r1, 2; mov.b32 %r4, dynamic; add.s32 %r5, %r4, %r3; st.shared.b32 [%r5], %r1;
    fence.proxy.async.shared::cta; bar.warp.sync -1; setp.ne.u32 %p9, %r1, 0; @%p9 bra LAST; WAIT
    cp.async.bulk.global.shared::cta.bulk_group [%d0], [dynamic], 128; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0; LAST: ret;"""


def run_twice(body: str, options: Options, *, programmatic: bool = True, warps: int = 1) -> np.ndarray:
    """The second launch behind the first, with the same memory; returns p0."""
    out = aligned(np.zeros(64, np.uint32))
    memory = GlobalMemory()
    memory.register_tensor(out, "out")
    for behind in (False, programmatic):
        run(
            module(body, parameters=1),
            grid=(1, 1, 1),
            block=(32 * warps, 1, 1),
            dynamic_smem=4096,
            params=struct.pack("<Q", out.ctypes.data),
            memory=memory,
            options=options,
            programmatic=behind,
        )
    return out


def without_wait(body: str) -> str:
    return body.replace("WAIT", "")


def with_wait(body: str) -> str:
    return body.replace("WAIT", "griddepcontrol.wait;")


@pytest.mark.parametrize(("body", "verb"), [(STORE, "writes"), (READ, "reads"), (BULK, "writes")])
def test_an_access_before_the_wait_races_with_the_launch_before(body: str, verb: str):
    message = rf"{verb} .* of out \(256 bytes\), which the launch before this one wrote .* no griddepcontrol.wait"
    for options in SCHEDULES:
        with pytest.raises(GlobalMemoryRace, match=message):
            run_twice(without_wait(body), options)
        run_twice(with_wait(body), options)


def test_values_are_those_of_launches_in_order():
    for options in SCHEDULES:
        assert run_twice(with_wait(READ), options)[:32].tolist() == [2] * 32


def test_launches_that_do_not_overlap_need_no_wait():
    for options in SCHEDULES:
        run_twice(without_wait(STORE), options, programmatic=False)


def test_a_store_over_what_the_launch_before_reads():
    body = f"""{THREAD_OUTPUT} ld.global.b32 %r2, [%d1+128]; setp.eq.u32 %p1, %r2, 0; @%p1 bra LAST; WAIT
        st.global.b32 [%d1+128], %r1; LAST: ret;"""
    out = aligned(np.ones(64, np.uint32))
    memory = GlobalMemory()
    memory.register_tensor(out, "out")
    for kernel, error in (("ld.global.b32 %r2, [%d1+128]; ret;", None), (without_wait(body), GlobalMemoryRace)):
        text = module(kernel if error else f"{THREAD_OUTPUT} {kernel}", parameters=1)
        arguments = {"grid": (1, 1, 1), "block": (32, 1, 1), "params": struct.pack("<Q", out.ctypes.data)}
        if error is None:
            run(text, memory=memory, **arguments)
        else:
            with pytest.raises(error, match="writes .* which the launch before this one read before"):
                run(text, memory=memory, programmatic=True, **arguments)


def test_atomics_of_both_launches_do_not_race():
    for options in SCHEDULES:
        assert run_twice(without_wait(ATOMIC), options)[:32].tolist() == [2] * 32


def test_the_wait_of_another_warp_counts_after_a_barrier():
    for options in SCHEDULES:
        run_twice(with_wait(HANDED_ON).replace("BARRIER", "bar.sync 0;"), options, warps=2)
        with pytest.raises(GlobalMemoryRace, match="launch before this one"):
            run_twice(with_wait(HANDED_ON).replace("BARRIER", ""), options, warps=2)
