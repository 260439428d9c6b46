"""How many instructions of each kind the emulator executes per second on one core: ``python -m bench.throughput``.

Each kind is a loop of one launch, with detectors on. Times are CPU seconds of the process; those of a launch without
rounds are taken off. Operands are random; what a version of the emulator refuses has a row that says why.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from cute_kernels.emulator import EmulatorError
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap
from cute_kernels.testing import ptx

BYTES = 24 << 10
"""Of the operands in global memory, of which the shared memory behind byte 1,024 is a copy."""
HEAD = f"""
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u32 %r9, [p2]; mov.u32 %r1, %tid.x; mov.u32 %r0, dynamic;
    shl.b32 %r2, %r1, 4; mov.u32 %r3, %ntid.x; shl.b32 %r3, %r3, 4; setp.eq.u32 %p1, %r1, 0; mov.u32 %r8, 0;
    COPY: cvt.u64.u32 %d2, %r2; add.u64 %d2, %d0, %d2; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d2];
    add.u32 %r10, %r0, %r2; st.shared.v4.b32 [%r10+1024], {{%r4, %r5, %r6, %r7}};
    add.u32 %r2, %r2, %r3; setp.lt.u32 %p0, %r2, {BYTES}; @%p0 bra COPY;
    @%p1 mbarrier.init.shared.b64 [%r0], 1; @%p1 mbarrier.init.shared.b64 [%r0+8], 32;
    fence.mbarrier_init.release.cluster; fence.proxy.async; bar.sync 0;
    mul.wide.u32 %d3, %r1, 4; add.u64 %d3, %d1, %d3; shl.b32 %r11, %r1, 2; add.u32 %r11, %r11, %r0;
    shr.u32 %r12, %r0, 4; cvt.u64.u32 %d4, %r12; mov.u32 %r13, 0; setp.eq.u32 %p2, 0, 0;
    elect.sync _|%p3, -1; and.pred %p3, %p3, %p1;
"""
LOOP = "NEXT: setp.ge.u32 %p0, %r8, %r9; @%p0 bra LAST; {body} add.u32 %r8, %r8, 1; bra NEXT;\nLAST: {tail} ret;"


@dataclass(frozen=True)
class Kind:
    """A loop to time.

    Attributes:
        name, group: of the row.
        target: of the module.
        body: one round.
        count: what it has of the kind.
        work: multiply-adds, or bytes, of each; 0: none are counted.
        unit: of ``work``.
        start, tail: in front of and behind the loop.
        threads: of the CTA.
        dtype: of the operands.
    """

    group: str
    name: str
    target: str
    body: str
    count: int
    work: int = 0
    unit: str = "M multiply-adds"
    start: str = ""
    tail: str = ""
    threads: int = 32
    dtype: torch.dtype = torch.bfloat16

    def text(self) -> str:
        """PTX; parameters are operands, results, rounds and a tensor map of the operands."""
        head = HEAD if self.target != "sm_80" else re.sub(r"fence\.\S+ *[^;]*;|elect[^;]*;|and.pred[^;]*;", "", HEAD)
        body = LOOP.format(body=self.body, tail=self.tail)
        return ptx.module(f"{head}{self.start}{body}", parameters=4, target=self.target)

    def seconds(self, rounds: int) -> float:
        """CPU time of a launch."""
        generator = torch.Generator().manual_seed(0)
        size = BYTES // self.dtype.itemsize
        numbers = torch.randn(size, generator=generator) if self.dtype.is_floating_point else torch.randint(99, (size,))
        words = ptx.aligned(numbers.to(self.dtype).view(torch.uint8).numpy())
        out = ptx.aligned(np.zeros(1 << 16, np.uint8))
        box = TensorMap(words.ctypes.data, "u8", (128, BYTES // 128), (128,), (128, 64), (1, 1))
        start = time.process_time()
        ptx.launch(self.text(), words, out, rounds, box, block=self.threads, dynamic_smem=BYTES + 1024)
        return time.process_time() - start

    def per_second(self) -> float:
        """The best of three, each of about half a second."""
        self.seconds(1)
        empty = min(self.seconds(0) for _ in range(3))
        rounds = 8
        while rounds < 1 << 20 and self.seconds(rounds) - empty < 0.1:
            rounds *= 4
        return max(self.count * rounds / (self.seconds(rounds) - empty) for _ in range(3))


def registers(first: int, count: int) -> str:
    """A list of registers."""
    return f"{{{', '.join(f'%r{first + i}' for i in range(count))}}}"


PHASE = "xor.b32 %r13, %r13, 1;"
WAIT = f"WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r0], %r13; @!%p4 bra WAIT; {PHASE}"


def arithmetic() -> Iterator[Kind]:
    """Instructions of a warp, and those that synchronise."""
    some = "mad.lo.s32 %r20, %r20, 5, %r1; xor.b32 %r21, %r20, %r8; shr.u32 %r22, %r21, 3; add.s32 %r20, %r20, %r22;"
    yield Kind("warp instructions", "integers", "sm_90a", some * 4, 16)
    yield Kind("warp instructions", "FP32 fma", "sm_90a", "fma.rn.f32 %r20, %r20, 0f3F7FFFFF, 0f3A000000;" * 16, 16)
    shared = "st.shared.b32 [%r11+2048], %r1; ld.shared.b32 %r20, [%r11+2048];"
    yield Kind("warp instructions", "shared memory", "sm_90a", shared * 8, 16)
    memory = "st.global.b32 [%d3], %r1; ld.global.b32 %r20, [%d3];"
    yield Kind("warp instructions", "global memory", "sm_90a", memory * 8, 16)
    yield Kind("warp instructions", "shfl.sync", "sm_90a", "shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1;" * 16, 16)
    yield Kind("synchronisation", "bar.sync of four warps", "sm_90a", "bar.sync 0;" * 4, 16, threads=128)
    phase = "mbarrier.arrive.shared.b64 _, [%r0+8]; {0}: mbarrier.try_wait.parity.shared.b64 %p4, [%r0+8], %r13; "
    phase += f"@!%p4 bra {{0}}; {PHASE}"
    yield Kind("synchronisation", "mbarrier: arrive, try_wait", "sm_90a", "".join(map(phase.format, ("A", "B"))), 4)


def copies() -> Iterator[Kind]:
    """Copies that an mbarrier waits for."""
    box = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    bulk = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    one = {
        "TMA box of 8 KB": f"@%p3 {box} [%r17], [%d5, {{%r16, %r16}}], [%r0];",
        "bulk copy of 8 KB": f"@%p3 {bulk} [%r17], [%d0], 8192, [%r0];",
    }
    start = "ld.param.u64 %d5, [p3]; add.u32 %r17, %r0, 1024; mov.u32 %r16, 0;"
    expect = "@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r0], 8192;"
    for name, copy in one.items():
        yield Kind("copies", name, "sm_90a", f"{expect}{copy}{WAIT} bar.warp.sync -1;", 1, 8192, "MB", start)


MMA_SYNC = {
    "tf32": ("m16n8k8", "f32.tf32.tf32.f32", torch.float32), "bf16": ("m16n8k16", "f32.bf16.bf16.f32", torch.bfloat16),
    "f16": ("m16n8k16", "f32.f16.f16.f32", torch.float16), "f16 sums": ("m16n8k16", "f16.f16.f16.f16", torch.float16),
    "e4m3": ("m16n8k32", "f32.e4m3.e4m3.f32", torch.float8_e4m3fn), "s8": ("m16n8k32", "s32.s8.s8.s32", torch.int8),
}  # fmt: skip
STORE = "st.global.b32 [%d3], %r40;"  # what nothing reads is not computed
LOADS = "".join(f"ld.shared.b32 %r{20 + i}, [%r11+{1024 + 128 * i}];" for i in range(16))


def warp_mmas() -> Iterator[Kind]:
    """mma.sync and wmma."""
    for name, (shape, types, dtype) in MMA_SYNC.items():
        m, n, k = map(int, re.fullmatch(r"m(\d+)n(\d+)k(\d+)", shape).groups())
        d = registers(40, 2 if types.startswith("f16") else 4)
        one = f"mma.sync.aligned.{shape}.row.col.{types} {d}, {registers(20, 4)}, {registers(24, 2)}, {d};"
        zero = "".join(f"mov.b32 %r{40 + i}, 0;" for i in range(8))
        for target in ("sm_80", "sm_90a") if name != "e4m3" else ("sm_90a",):
            both = {"start": LOADS, "tail": STORE, "dtype": dtype}
            yield Kind("mma.sync", f"{name}, {target}", target, zero + one * 8, 8, m * n * k, **both)
    operands = registers(20, 8), registers(28, 8), registers(40, 8)
    one = f"wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {operands[2]}, {', '.join(operands)};"
    both["dtype"] = torch.float16
    yield Kind("wmma", "f16, m16n16k16", "sm_90a", zero + one * 4, 4, 4096, **both)


TILES = {
    "tf32": (8, torch.float32), "bf16": (16, torch.bfloat16), "e4m3": (32, torch.float8_e4m3fn), "s8": (32, torch.int8),
}  # fmt: skip
NO_SWIZZLE = 128 >> 4 << 16 | 256 >> 4 << 32  # rows of 32 bytes; groups of eight are 256 bytes apart


def wgmmas() -> Iterator[Kind]:
    """wgmma of 64 x 128, both operands in shared memory."""
    start = f"add.u64 %d4, %d4, {NO_SWIZZLE + 64:#x}; add.u64 %d6, %d4, 256;"
    start += "".join(f"mov.b32 %r{40 + i}, 0;" for i in range(64))
    for name, (k, dtype) in TILES.items():
        shape, d = f"m64n128k{k}", "s32" if name == "s8" else "f32"
        literals = {"tf32": ", 1, 1", "bf16": ", 1, 1, 0, 0", "e4m3": ", 1, 1", "s8": ""}[name]
        kind = f"wgmma.mma_async.sync.aligned.{shape}.{d}.{name}.{name}"
        one = f"{kind} {registers(40, 64)}, %d4, %d6, %p2{literals};"
        body = f"wgmma.fence.sync.aligned; {one * 4} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        yield Kind("wgmma", name, "sm_90a", body, 4, 64 * 128 * k, start=start, threads=128, dtype=dtype)


SCALES = "".join(f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r18+{128 + i}], {{%r19}};" for i in range(16))
TENSOR_KINDS = {
    "f16": ("", 1 << 4 | 1 << 7 | 1 << 10, "bf16"), "tf32": ("", 1 << 4 | 2 << 7 | 2 << 10, "tf32"),
    "f8f6f4": ("", 1 << 4, "e4m3"), "i8": ("", 2 << 4 | 1 << 7 | 1 << 10, "s8"),
    "mxf8f6f4": (".block_scale.scale_vec::1X", 1 << 23, "e4m3"),
    "mxf4nvf4": (".block_scale.scale_vec::4X", 1 << 7 | 1 << 10, "e4m3"),
}  # fmt: skip


def tensor_mmas() -> Iterator[Kind]:
    """tcgen05.mma of 128 x 128, both operands in shared memory."""
    start = f"""setp.ge.u32 %p5, %r1, 32; @%p5 bra READY;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0+16], 256; READY: bar.sync 0;
        ld.shared.b32 %r17, [%r0+16]; shr.u32 %r18, %r1, 5; shl.b32 %r18, %r18, 21; add.u32 %r18, %r18, %r17;
        mov.b32 %r19, SCALE; {SCALES} tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;
        tcgen05.fence::after_thread_sync;
        add.u64 %d4, %d4, {NO_SWIZZLE + 64 + (1 << 46):#x}; add.u64 %d6, %d4, 256; add.u32 %r15, %r17, 128;
        add.u32 %r16, %r17, 136;"""
    tail = """bar.sync 0; @%p5 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r17, 256;
        tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; END:"""
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r0];"
    for name, (vector, word, operands) in TENSOR_KINDS.items():
        k, dtype = TILES[operands]
        m_field, k = (1 << 27 if vector else 8 << 24), 64 if name == "mxf4nvf4" else k
        scales = ", [%r15], [%r16]" if vector else ""
        word |= 128 // 8 << 17 | m_field
        one = f"tcgen05.mma.cta_group::1.kind::{name}{vector} [%r17], %d4, %d6, {word}{scales}, %p2;"
        body = f"@!%p3 bra WAIT; setp.ne.u32 %p2, %r8, 0; {one * 4} {commit} {WAIT} bar.sync 0;"
        ones = start.replace("SCALE;", "0x38383838;" if name == "mxf4nvf4" else "0x7F7F7F7F;")
        both = {"start": ones, "tail": tail, "threads": 128, "dtype": dtype}
        yield Kind("tcgen05.mma", name, "sm_100a", body, 4, 128 * 128 * k, **both)


def rows(only: str) -> Iterator[tuple[str, str, str]]:
    """Group and kind, thousand per second, and what they do in that time."""
    for kinds in (arithmetic, copies, warp_mmas, wgmmas, tensor_mmas):
        for kind in kinds():
            name = f"{kind.group}: {kind.name}"
            if not re.search(only, name):
                continue
            try:
                rate = kind.per_second()
            except EmulatorError as error:  # of an older version
                yield name, "-", error.message.split(";")[0]
                continue
            work = f"{rate * kind.work / 1e6:,.0f} {kind.unit}" if kind.work else ""
            yield name, f"{rate / 1e3:,.1f}" if rate < 1e6 else f"{rate / 1e3:,.0f}", work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of the rows")
    only = parser.parse_args().only
    print("| kind | thousand per second | in a second |\n|---|---|---|")
    for row in rows(only):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
