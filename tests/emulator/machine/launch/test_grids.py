"""Launches: grids, clusters that are chosen, options, parameters, variables, and what is counted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cute_kernels.emulator import GlobalMemory, Options, run
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.testing.ptx import THREAD_OUTPUT, module
from tests.emulator.machine.launch.test_run import flat_thread
from tests.emulator.ptx_launch import launch
from tests.processes import run_python


@pytest.mark.parametrize(
    ("special", "value"),
    [
        ("%ctaid.x", lambda x, y, z: x),
        ("%ctaid.y", lambda x, y, z: y),
        ("%ctaid.z", lambda x, y, z: z),
        ("%clusterid.x", lambda x, y, z: x // 2),
        ("%clusterid.y", lambda x, y, z: y // 3),
        ("%nclusterid.x", lambda x, y, z: 2),
        ("%nclusterid.y", lambda x, y, z: 1),
        ("%cluster_ctaid.x", lambda x, y, z: x % 2),
        ("%cluster_ctaid.y", lambda x, y, z: y % 3),
        ("%cluster_nctaid.y", lambda x, y, z: 3),
        ("%cluster_ctarank", lambda x, y, z: x % 2 + 2 * (y % 3)),
        ("%cluster_nctarank", lambda x, y, z: 6),
        ("%nctaid.z", lambda x, y, z: 2),
        ("%nwarpid", lambda x, y, z: 64),
    ],
)
def test_coordinates_in_a_grid_of_clusters(special: str, value):
    out = np.full((2, 3, 4, 32), 999, np.uint32)
    launch(flat_thread(f"mov.u32 %r9, {special};"), out, grid=(4, 3, 2), cluster=(2, 3, 1))
    expected = [[[value(x, y, z) for x in range(4)] for y in range(3)] for z in range(2)]
    assert (out == np.array(expected)[..., None]).all()


def test_only_the_chosen_clusters_run_and_progress_counts_them():
    out = np.full((8, 32), 7, np.uint32)
    calls = []
    report = launch(
        flat_thread("mov.b32 %r9, %r2;"),
        out,
        grid=(8, 1, 1),
        cluster=(2, 1, 1),
        options=Options(clusters=(3, 0), progress=lambda done, total: calls.append((done, total))),
    )
    assert out[:, 0].tolist() == [0, 1, 7, 7, 7, 7, 6, 7]
    assert calls == [(0, 2), (1, 2), (2, 2)]
    assert report.clusters == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "must be a multiple of cluster"),
        ({"grid": (0, 1, 1)}, "positive"),
        ({"block": (2048, 1, 1)}, "at most 1024"),
        ({"block": (1, 1, 128)}, r"block \(1, 1, 128\); at most"),
        ({"grid": 0}, "grid = 0: must be a positive integer"),
        ({"grid": (1, 1, 1, 1)}, "one to three of them"),
        ({"grid": (1, 70_000, 1)}, r"grid .*; at most"),
        ({"grid": (2**31, 1, 1)}, r"grid .*; at most"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "must have 1 to 16 CTAs on"),
        ({"block": (64, 1, 1)}, r"compiled for \(32, 1, 1\)"),
        ({"dynamic_smem": 300_000}, "at most 232448"),
        ({"options": Options(clusters=(9,))}, "cluster 9"),
    ],
)
def test_launches_that_no_gpu_would_take(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        launch(module("ret;", entry=".reqntid 32"), 0, 0, **wrong)


@pytest.mark.parametrize(
    ("grid", "block", "cluster"), [(4, 64, 2), ((4,), (64,), (2, 1)), ((4, 1), [64, 1], np.int64(2))]
)
def test_shapes_may_be_integers_or_short(grid, block, cluster):
    body = """ld.param.u64 %d0, [p0]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mul.lo.u32 %r1, %r1, %r2;
    mov.u32 %r3, %tid.x; add.u32 %r1, %r1, %r3; mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d0;
    mov.u32 %r4, %cluster_nctarank; st.global.b32 [%d1], %r4; ret;"""
    out = np.zeros(256, np.uint32)
    report = run(module(body, parameters=1), grid=grid, block=block, cluster=cluster, args=[out])
    assert (out == 2).all() and report.clusters == 2


def test_more_threads_than_the_kernel_was_compiled_for():
    text = module("ret;", entry=".maxntid 8, 8")
    launch(text, 0, 0, block=(64, 1, 1))
    with pytest.raises(ValueError, match=r"65 threads per CTA; the kernel was compiled for 64"):
        launch(text, 0, 0, block=(65, 1, 1))


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (ValueError, {"completion": "soon"}),
        (ValueError, {"interleave": "rr"}),
        (ValueError, {"clusters": (1, 1)}),
        (TypeError, {"detectors": None}),
        (TypeError, {"barriers": (0, "full")}),
        (TypeError, {"barriers": (("full", 0),)}),
        (TypeError, {"seed": 1.5}),
        (ValueError, {"seed": -1}),
    ],
)
def test_options_are_checked(error: type[Exception], wrong: dict):
    with pytest.raises(error, match=next(iter(wrong))):
        Options(**wrong)


def test_local_memory_that_the_kernel_does_not_declare():
    for body in ("ld.local.b32 %r9, [%r1];", "st.local.b32 [%r1], %r1;"):
        with pytest.raises(IllegalAccess, match="declares none"):
            launch(module(f"mov.b32 %r1, 0; {body} ret;"), 0, 0)
    with pytest.raises(UnsupportedPTX, match="qualifier .const does not exist here"):
        launch(module("st.const.b32 [%d1], 0; ret;"), 0, 0)


def test_parameters_must_fit_the_kernel():
    text = module("ret;")
    shape = {"grid": (1, 1, 1), "block": (32, 1, 1), "memory": GlobalMemory()}
    run(text, params=bytes(16), **shape)
    with pytest.raises(ValueError, match="15 bytes"):
        run(text, params=bytes(15), **shape)
    with pytest.raises(ValueError, match="1 parameters, the kernel takes 2"):
        run(text, params=[bytes(8)], **shape)
    with pytest.raises(ValueError, match="parameter 1 has 4 bytes"):
        run(text, params=[bytes(8), bytes(4)], **shape)
    with pytest.raises(ValueError, match="'other'"):
        run(text, "other", params=bytes(16), **shape)


def test_module_variables_and_static_shared_memory():
    text = module(
        f"""{THREAD_OUTPUT} mov.u64 %d2, table; and.b32 %r2, %r1, 3; mul.wide.u32 %d3, %r2, 4; add.s64 %d2, %d2, %d3;
        ld.global.b32 %r3, [%d2]; ld.global.b32 %r4, [table+4]; st.shared.b32 [fixed+8], %r4;
        ld.shared.b32 %r5, [fixed+8];
        mad.lo.u32 %r9, %r3, 100, %r5; mov.b32 %r6, dynamic; mov.b32 %r7, fixed; sub.s32 %r7, %r6, %r7;
        mad.lo.u32 %r9, %r7, 1000000, %r9; st.global.b32 [%d1], %r9; ret;""",
        parameters=1,
        head=".global .align 4 .u32 table[4] = {3, 1, 4, 15};\n.shared .align 16 .b8 fixed[48];",
    )
    out = np.zeros(32, np.uint32)
    launch(text, out)
    distance = (int(out[0]) - 301) // 1_000_000
    assert 48 <= distance and distance % 1024 == 0
    assert out.tolist() == [(3, 1, 4, 15)[n % 4] * 100 + 1 + distance * 1_000_000 for n in range(32)]


def test_generic_addresses_of_shared_memory():
    text = module(
        f"""{THREAD_OUTPUT} mov.u32 %r2, dynamic; cvt.u64.u32 %d2, %r2; cvta.shared.u64 %d2, %d2;
        mul.wide.u32 %d3, %r1, 4; add.s64 %d4, %d2, %d3; mul.lo.u32 %r3, %r1, 11; st.b32 [%d4], %r3; bar.sync 0;
        cvta.to.shared.u64 %d5, %d4; cvt.u32.u64 %r4, %d5; ld.shared.b32 %r9, [%r4]; st.b32 [%d1], %r9; ret;""",
        parameters=1,
    )
    out = np.zeros(32, np.uint32)
    launch(text, out)
    assert out.tolist() == [11 * n for n in range(32)]


def test_counts_follow_from_the_program():
    """Two warps run the prologue; the loop runs as often as the warp index says, plus one."""
    text = module(
        """mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r3, 0;
        LOOP: add.s32 %r3, %r3, 1; setp.le.u32 %p1, %r3, %r2; @%p1 bra LOOP;
        ret;"""
    )
    report = launch(text, 0, 0, block=(64, 1, 1), options=Options(roles=("first", "second")))
    assert report.by_opcode == {
        "add.s32": 3,
        "setp.le.u32": 3,
        "bra": 3,
        "mov.u32": 2,
        "shr.u32": 2,
        "mov.b32": 2,
        "ret": 2,
    }
    assert report.by_role == {"first": 3 + 3 + 1, "second": 3 + 6 + 1}
    assert report.warp_instructions == 17


def test_a_wait_counts_once_however_long_it_lasts():
    text = module(
        """mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.eq.u32 %p1, %r2, 0; setp.ne.u32 %p3, %r1, 0;
        @%p3 bra READY; mbarrier.init.shared.b64 [dynamic], 32; READY: bar.sync 0; @%p1 bra WAIT;
        mov.b32 %r4, 0; SPIN: add.s32 %r4, %r4, 1; setp.lt.u32 %p4, %r4, 100; @%p4 bra SPIN;
        mbarrier.arrive.shared.b64 %d1, [dynamic]; ret;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; @!%p2 bra WAIT; ret;"""
    )
    report = launch(text, 0, 0, block=(64, 1, 1), options=Options(interleave="random", seed=3))
    assert report.by_opcode["mbarrier.try_wait.parity.shared.b64"] == 1
    assert report.by_opcode["bar.sync"] == 2


LARGEST = """
import resource, signal
import numpy as np
from cute_kernels.emulator import Options, run
from cute_kernels.testing.ptx import module

resource.setrlimit(resource.RLIMIT_AS, (4 << 30,) * 2)
done = []

def progress(count, of):
    done.append((count, of))
    if count == 40:
        signal.raise_signal(signal.SIGINT)

try:
    options = Options(processes=int(PROCESSES), progress=progress)
    run(module("ret;", parameters=0), grid=GRID, block=1, options=options)
except KeyboardInterrupt:
    print(done[0], done[-1][0] < 200)
"""


@pytest.mark.parametrize("grid", [(2**31 - 1, 1, 1), (2**31 - 1, 65_535, 65_535)])
@pytest.mark.parametrize("processes", [1, 2])
def test_clusters_take_memory_when_they_begin(grid: tuple[int, int, int], processes: int) -> None:
    """The largest grids: in 4 GB of addresses they begin, and an interrupt ends them."""
    done = run_python("-c", LARGEST.replace("PROCESSES", str(processes)).replace("GRID", str(grid)))
    assert done.stdout == f"{(0, math.prod(grid))} True\n", done.stderr
