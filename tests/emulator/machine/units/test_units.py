"""Hardware units through PTX, on the emulator and (EMULATOR_HW=1) on a GPU: TMA, multicast, mbarrier phases.

The programs of record_tma_on_gpu.py are the ones whose results on an H200 are stored; here the emulator executes them
as PTX, not only its TMA unit.
"""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.machine.units.copies.tensor_map import SWIZZLES, TensorMap, encode
from cute_kernels.testing.ptx import aligned, module
from tests.emulator import hardware
from tests.emulator import record_tma_on_gpu as recorder
from tests.emulator.machine.units.copies.test_tma import CASES, COPIES, name_of, tensor_map_of
from tests.emulator.ptx_launch import launch

EVERY = 1 if hardware.MODE else 16  # the recorded cases are many, and one thread moves every byte
RECORDED = [n for n in COPIES if "fault" not in CASES[n]][::EVERY]


def text_of(kind: str, rank: int) -> str:
    head, *entries = recorder.ptx().split(".visible .entry ")
    entry = next(entry for entry in entries if entry.startswith(f"{kind}{rank}("))
    return f"{head}.visible .entry {entry}"


@pytest.mark.parametrize("number", RECORDED, ids=name_of)
def test_a_copy_in_ptx_as_an_h200_does_it(number: int) -> None:
    case = CASES[number]
    tensor = recorder.special_floats() if case["data"] == "floats" else recorder.noise(0, recorder.GLOBAL_BYTES)
    tensor = aligned(tensor)
    loads = case["kind"] == "load"
    nbytes = recorder.SHARED_BYTES
    image = np.full(nbytes, recorder.SHARED_FILL, np.uint8) if loads else recorder.noise(number, nbytes)
    image = aligned(image)
    coords = np.array([*case["coords"], *[0] * (32 - len(case["coords"]))], np.int32)
    flag = np.zeros(4, np.uint32)
    steps = [1, *case["element_strides"][1:]]
    box = math.prod(-(-b // s) for b, s in zip(case["box"], steps)) * recorder.element_bytes(case["dtype"])
    tensor_map = encode(tensor_map_of(case, tensor.ctypes.data))
    arguments = (tensor_map, coords, struct.pack("<I", case["offset"]), struct.pack("<I", box), image, flag)
    # The tensor is no argument of the kernel, which knows its address from the tensor map alone.
    text = text_of(case["kind"], len(case["box"]))
    # More than its 16 KB of image plus the barrier in front of it: the largest offsets reach beyond.
    launch(text, *arguments, block=(1, 1, 1), dynamic_smem=nbytes + 1024, reachable=(tensor,))
    after = image if loads else tensor
    assert not flag.any() == case["completed"]
    assert hashlib.sha256(after.tobytes()).hexdigest()[:16] == case["digest"]


MULTICAST = """
mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, dynamic;
ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];
setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
mbarrier.init.shared.b64 [dynamic], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %d3, [dynamic], BYTES;
READY: mul.lo.u32 %r13, %r1, 4; add.u32 %r13, %r13, %r3; mov.b32 %r11, 0;
ZERO: st.shared.b32 [%r13+1024], 0; add.u32 %r13, %r13, 128; add.u32 %r11, %r11, 1; setp.lt.u32 %p5, %r11, 32;
@%p5 bra ZERO; fence.proxy.async; barrier.cluster.arrive; barrier.cluster.wait;
@%p1 bra WAIT;
setp.gt.u32 %p3, %r2, 1; @%p3 bra WAIT;
mov.b16 %h1, 0xF;
mul.lo.u32 %r5, %r2, 2048; add.u32 %r5, %r5, %r3; mul.lo.u32 %r6, %r2, 16;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
 [%r5+1024], [%d1, {0, %r6}], [dynamic], %h1;
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [dynamic], 0; @!%p2 bra WAIT;
mul.lo.u32 %r7, %r2, 4096; mul.lo.u32 %r8, %r1, 4; add.u32 %r9, %r7, %r8; cvt.u64.u32 %d4, %r9; add.u64 %d4, %d4, %d2;
add.u32 %r10, %r3, %r8; mov.b32 %r11, 0;
COPY: ld.shared.b32 %r12, [%r10+1024]; st.global.b32 [%d4], %r12; add.u32 %r10, %r10, 128; add.u64 %d4, %d4, 128;
add.u32 %r11, %r11, 1; setp.lt.u32 %p5, %r11, 32; @%p5 bra COPY;
barrier.cluster.arrive; barrier.cluster.wait; ret;"""


@pytest.mark.parametrize("options", [Options(), Options(seed=3, completion="random", interleave="random")])
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
def test_multicast_to_every_cta_of_a_cluster(swizzle: str, options: Options) -> None:
    """CTAs 0 and 1 of four each load 16 rows and send them to all four: the boxes lie in the same place everywhere."""
    rows, inner = 16, SWIZZLES[swizzle].span or 128
    source = aligned(recorder.noise(77, 64 * 128).reshape(64, 128))
    tensor_map = TensorMap(source.ctypes.data, "u8", (128, 64), (128,), (inner, rows), (1, 1), swizzle)
    text = module(MULTICAST.replace("BYTES", str(2 * rows * inner)))
    out = np.zeros((4, 4096), np.uint8)
    launch(
        text, tensor_map, out, grid=(4, 1, 1), cluster=(4, 1, 1), dynamic_smem=8192, options=options,
        reachable=(source,),
    )  # fmt: skip
    expected = np.zeros((4096,), np.uint8)
    for box in range(2):
        for row in range(rows):
            for column in range(inner):
                place = 1024 + 1024 + 2048 * box + row * inner + column  # 1024 reserved bytes, 1024 of barrier
                moved = place ^ (place >> SWIZZLES[swizzle].shift & SWIZZLES[swizzle].mask)
                expected[moved - 2048] = source[16 * box + row, column]
    assert np.array_equal(out, np.tile(expected, (4, 1)))


# One thread drives a barrier through its phases and notes after each step whether the two parities have completed.
STEPS = [
    ("mbarrier.init.shared.b64 [dynamic], 2;", (False, True)),
    ("mbarrier.arrive.shared.b64 %d2, [dynamic];", (False, True)),
    ("mbarrier.arrive.shared.b64 %d2, [dynamic];", (True, False)),
    ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [dynamic], 64;", (True, False)),
    ("mbarrier.arrive.shared.b64 %d2, [dynamic], 2;", (True, False)),
    ("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [dynamic], 48;", (True, False)),
    ("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [dynamic], 16;", (False, True)),
    ("mbarrier.arrive.expect_tx.shared.b64 %d2, [dynamic], 32;", (False, True)),
    ("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [dynamic], 32;", (False, True)),
    ("mbarrier.arrive.shared.b64 %d2, [dynamic];", (True, False)),
    ("mbarrier.arrive_drop.shared.b64 %d2, [dynamic];", (True, False)),
    ("mbarrier.arrive.shared.b64 %d2, [dynamic];", (False, True)),
    ("mbarrier.arrive.shared.b64 %d2, [dynamic];", (True, False)),
    ("mbarrier.inval.shared.b64 [dynamic]; mbarrier.init.shared.b64 [dynamic], 1;", (False, True)),
]


def test_phases_of_an_mbarrier() -> None:
    notes = "".join(
        f"""{step} mbarrier.test_wait.parity.shared.b64 %p1, [dynamic], 0;
        mbarrier.test_wait.parity.shared.b64 %p2, [dynamic], 1;
        selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; or.b32 %r1, %r1, %r2; st.global.b32 [%d1+{4 * i}], %r1;
        """
        for i, (step, _) in enumerate(STEPS)
    )
    out = np.full(len(STEPS), 99, np.uint32)
    launch(module(f"ld.param.u64 %d1, [p0];\n{notes}\nret;"), out, 0, block=(1, 1, 1))
    assert out.tolist() == [int(even) + 2 * int(odd) for _, (even, odd) in STEPS]
