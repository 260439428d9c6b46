"""ld.global.nc is for memory that nobody writes while the kernel runs, however reads and writes are ordered."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.emulator.errors import GlobalMemoryRace
from cute_kernels.testing.ptx import THREAD_OUTPUT, aligned, module

#: %d3 = address of this thread's item in the second half of p0.
HEAD = f"{THREAD_OUTPUT} add.s64 %d3, %d0, 256; mul.wide.u32 %d4, %r1, 4; add.s64 %d3, %d3, %d4;"
TAIL = "add.u32 %r9, %r9, 1; st.global.b32 [%d1], %r9; ret;"
#: A kernel that loads with LOAD what it has written; who wrote it; warps and CTAs.
WRITTEN = {
    "by the same thread": (f"{HEAD} st.global.b32 [%d3], %r1; LOAD %r9, [%d3]; {TAIL}", "store of CTA 0 warp 0", 1, 1),
    "16 bytes, by all lanes": (
        f"""{THREAD_OUTPUT} shl.b32 %r2, %r1, 4; cvt.u64.u32 %d2, %r2; add.s64 %d3, %d0, %d2;
        st.global.v4.b32 [%d3+1024], {{%r1, %r1, %r1, %r1}}; LOADV4 {{%r9, %r5, %r6, %r7}}, [%d3+1024]; {TAIL}""",
        "store of CTA 0 warp 0", 1, 1,
    ),
    "by another warp, before a barrier": (
        f"""{HEAD} setp.ge.u32 %p1, %r1, 32; @!%p1 st.global.b32 [%d3+128], %r1; bar.sync 0; @!%p1 bra LAST;
        LOAD %r9, [%d3]; add.u32 %r9, %r9, 32; {TAIL} LAST: add.u32 %r9, %r1, 1; st.global.b32 [%d1], %r9; ret;""",
        "store of CTA 0 warp 0", 2, 1,
    ),
    "by a bulk copy": (
        f"""{HEAD} shl.b32 %r3, %r1, 2; mov.b32 %r4, dynamic; add.s32 %r5, %r4, %r3; st.shared.b32 [%r5], %r1;
        fence.proxy.async.shared::cta; bar.warp.sync -1; setp.ne.u32 %p9, %r1, 0; @%p9 bra READ;
        cp.async.bulk.global.shared::cta.bulk_group [%d3], [dynamic], 128; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0; READ: bar.warp.sync -1; LOAD %r9, [%d3]; {TAIL}""",
        "bulk store of 128 bytes", 1, 1,
    ),
    "at an address that all lanes share": (
        f"{HEAD} st.global.b32 [%d0+512], 7; LOAD %r9, [%d0+512]; sub.u32 %r9, %r9, 7; add.u32 %r9, %r9, %r1; {TAIL}",
        "store of CTA 0 warp 0", 1, 1,
    ),
}  # fmt: skip


def execute(body: str, options: Options, warps: int, ctas: int, launches: int = 1) -> np.ndarray:
    out = aligned(np.zeros(512, np.uint32))
    memory = GlobalMemory()
    memory.register_tensor(out, "out")
    for number in range(launches):
        run(
            module(body, parameters=1), grid=ctas, block=32 * warps, dynamic_smem=1024, memory=memory, options=options,
            params=out.ctypes.data.to_bytes(8, "little"), programmatic=number > 0,
        )  # fmt: skip
    return out


def loading(body: str, opcode: str) -> str:
    return body.replace("LOADV4", f"ld.global{opcode}.v4.b32").replace("LOAD", f"ld.global{opcode}.b32")


@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_kernel_wrote(name: str):
    body, writer, warps, ctas = WRITTEN[name]
    message = f"a non-coherent load of CTA 0 warp .* reads .* of out .*, which the {writer}.* wrote .*PTX line"
    with pytest.raises(GlobalMemoryRace, match=message):
        execute(loading(body, ".nc"), Options(), warps, ctas)
    out = execute(loading(body, ""), Options(), warps, ctas)
    assert out[: 32 * warps].tolist() == list(range(1, 32 * warps + 1))


def test_what_nobody_wrote_and_what_the_launch_before_wrote():
    body = f"{HEAD} griddepcontrol.wait; ld.global.nc.b32 %r9, [%d3]; add.u32 %r9, %r9, %r1; {TAIL}"
    assert execute(body, Options(), 1, 1)[:32].tolist() == list(range(1, 33))
    accumulates = body.replace("[%d3]", "[%d1+128]").replace("[%d1], %r9", "[%d1], %r9")
    assert execute(accumulates, Options(), 1, 1, launches=2)[:32].tolist() == list(range(1, 33))
    # The second launch loads what the first one stored, in the same place, and stores elsewhere.
    turns = f"""{HEAD} griddepcontrol.wait; ld.global.b32 %r8, [%d0+600]; setp.eq.u32 %p1, %r8, 0; @!%p1 bra SECOND;
        st.global.b32 [%d3], %r1; setp.eq.u32 %p2, %r1, 0; bar.warp.sync -1; @%p2 st.global.b32 [%d0+600], 1; ret;
        SECOND: ld.global.nc.b32 %r9, [%d3]; {TAIL}"""
    assert execute(turns, Options(), 1, 1, launches=2)[:32].tolist() == list(range(1, 33))


def test_what_an_earlier_cluster_wrote():
    """It is a race as well, and is reported as that."""
    body = f"""{HEAD} mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r2, 0; @%p1 bra READ; st.global.b32 [%d3], %r1; ret;
        READ: ld.global.nc.b32 %r9, [%d3]; {TAIL}"""
    with pytest.raises(GlobalMemoryRace, match="it belongs to another cluster"):
        execute(body, Options(), 1, 2)
