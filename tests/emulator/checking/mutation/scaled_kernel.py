"""A block-scaled MMA in a pipeline, in PTX by hand: what is mutated of tcgen05's kind::mxf8f6f4."""

from __future__ import annotations

import functools

import numpy as np

from cute_kernels.emulator import Options
from cute_kernels.emulator.checking.mutation.target import Outcome
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.machine.units.matrix.test_scaled_mma import INSTRUCTION, Case, expected, operands, rows_of
from tests.emulator.machine.units.matrix.test_tensor_core import Layout
from tests.emulator.ptx_launch import launch

CASE = Case("mxf8f6f4", ("e4m3", "e2m1"), n=16)
BLOCKS, STAGES, STAGE_BYTES, THREADS = 5, 2, 6144, 192
BLOCK_BYTES = 128 * 32 + 16 * 32 + 2 * 512
"""A, B, and the scales of each."""

#: Of a ring in shared memory: the next stage, and at the first one the other parity.
_NEXT = f"""add.u32 %r3, %r3, 1;
xor.b32 %r4, %r4, 1;
setp.eq.u32 %p9, %r4, 0;
@%p9 xor.b32 %r5, %r5, 1;
mad.lo.u32 %r21, %r4, 8, %r20;
mad.lo.u32 %r22, %r4, {STAGE_BYTES}, %r23;"""

#: Warp 4 loads blocks of K, warp 5 multiplies them, warps 0 to 3 store D. In shared memory: the address of D, mbarriers
#: at 16 (a stage is full), 32 (it is empty) and 48 (D is complete), stages from 1024 on.
BODY = f"""ld.param.u64 %d0, [p0];
ld.param.u64 %d1, [p1];
ld.param.u64 %d5, [p2];
ld.param.u64 %d6, [p3];
mov.u32 %r0, %tid.x;
shr.u32 %r1, %r0, 5;
mov.u32 %r20, dynamic;
add.u32 %r23, %r20, 1024;
mov.u32 %r21, %r20;
mov.u32 %r22, %r23;
mov.u32 %r3, 0;
mov.u32 %r4, 0;
setp.ne.u32 %p1, %r1, 4;
setp.ne.u32 %p2, %r1, 5;
@%p1 bra ALLOCATE;
elect.sync _|%p3, -1;
@!%p3 bra READY;
mbarrier.init.shared::cta.b64 [%r20+16], 1;
mbarrier.init.shared::cta.b64 [%r20+24], 1;
mbarrier.init.shared::cta.b64 [%r20+32], 1;
mbarrier.init.shared::cta.b64 [%r20+40], 1;
mbarrier.init.shared::cta.b64 [%r20+48], 1;
fence.mbarrier_init.release.cluster;
bra READY;
ALLOCATE:
@%p2 bra READY;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 64;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
READY:
bar.sync 0;
ld.shared.b32 %r8, [%r20];
@!%p1 bra LOAD;
@!%p2 bra MULTIPLY;
DONE: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r20+48], 0;
@!%p5 bra DONE;
tcgen05.fence::after_thread_sync;
shl.b32 %r13, %r1, 21;
add.u32 %r13, %r13, %r8;
tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{", ".join(f"%r{i}" for i in range(30, 46))}}}, [%r13];
tcgen05.wait::ld.sync.aligned;
tcgen05.fence::before_thread_sync;
mul.wide.u32 %d10, %r0, 64;
add.u64 %d10, %d1, %d10;
{" ".join(f"st.global.b32 [%d10+{4 * i}], %r{30 + i};" for i in range(16))}
bra END;
LOAD:
elect.sync _|%p3, -1;
@!%p3 bra END;
mov.u32 %r5, 1;
NEXT_LOAD:
EMPTY: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r21+32], %r5;
@!%p5 bra EMPTY;
setp.ge.u32 %p6, %r3, {BLOCKS};
@%p6 bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21+16], {BLOCK_BYTES};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r22], [%d0], {BLOCK_BYTES}, [%r21+16];
add.u64 %d0, %d0, {BLOCK_BYTES};
LOADED:
{_NEXT}
setp.lt.u32 %p7, %r3, {BLOCKS + STAGES};
@%p7 bra NEXT_LOAD;
bra END;
MULTIPLY:
elect.sync _|%p3, -1;
@!%p3 bra END;
mov.u32 %r5, 0;
add.u32 %r14, %r8, 16;
NEXT_MULTIPLY:
FULL: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r21+16], %r5;
@!%p5 bra FULL;
shr.u32 %r10, %r22, 4;
cvt.u64.u32 %d3, %r10;
mad.lo.u32 %r11, %r4, 16, %r14;
add.u32 %r12, %r11, 8;
add.u64 %d4, %d3, %d6;
add.u64 %d4, %d4, {4608 >> 4};
add.u64 %d7, %d4, 32;
tcgen05.cp.cta_group::1.32x128b.warpx4 [%r11], %d4;
tcgen05.cp.cta_group::1.32x128b.warpx4 [%r12], %d7;
add.u64 %d8, %d3, %d5;
add.u64 %d9, %d8, {4096 >> 4};
setp.ne.u32 %p4, %r3, 0;
{INSTRUCTION.format("mxf8f6f4.block_scale.scale_vec::1X", CASE.word())}
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r21+32];
{_NEXT}
setp.lt.u32 %p7, %r3, {BLOCKS};
@%p7 bra NEXT_MULTIPLY;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20+48];
END:
bar.sync 0;
@%p2 bra LAST;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 64;
LAST:
ret;"""


class ScaledTarget:
    """D [128, 16] of five blocks of 32 of K, E4M3 by E2M1, with a scale per row and block."""

    ptx, quick = module(BODY, parameters=4), False

    def run(self, ptx: str, options: Options, repeat: int = 1) -> Outcome:
        """Runs the kernel like `cute_kernels.emulator.checking.mutation.target.Target.run`; no launch follows it."""
        image, wanted = _inputs()
        out = aligned(np.full((128, 16), np.nan, np.float32))
        layout, scales = Layout("32B", False, 1, 0).descriptor(0), Layout("none", False, 1, 0).descriptor(0)
        scales = scales & ~(0x3FFF << 32) | 128 >> 4 << 32
        report = launch(
            ptx, image, out, layout, scales, block=(THREADS, 1, 1), dynamic_smem=1024 + STAGES * STAGE_BYTES,
            options=options,
        )  # fmt: skip
        wrong = int((out != wanted).sum())
        return Outcome(report.warp_instructions, f"{wrong} of {out.size} elements differ" if wrong else "")


@functools.cache
def _inputs() -> tuple[np.ndarray, np.ndarray]:
    """The blocks as they lie in global memory, and D; FP32 has all its sums exactly."""
    image, wanted = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8), np.zeros((128, 16), np.float32)
    for block, content in enumerate(image):
        elements, scales = operands(CASE, block)
        for start, codes, name in zip((0, 4096), elements, CASE.types):
            rows = Layout("32B", False, 1, 0).place(rows_of(codes, name, 0))
            content[start : start + len(rows)] = rows
        for start, codes in zip((4608, 5120), scales):
            for (row, _), code in np.ndenumerate(codes):
                content[start + row % 32 * 16 + row // 32 * 4] = code
        wanted += expected(CASE, elements, scales)
    return aligned(image), wanted
