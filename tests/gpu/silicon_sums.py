"""Tensor cores of a GPU of sm_90 against `arithmetic="silicon"`, bit by bit, on operands in which rounding shows.

    python -m tests.gpu.silicon_sums [--seconds S] [--processes P] [--seed N] [--json FILE]

Each kind of wgmma and of mma.sync computes results of single instructions. Operands are from
`tests.emulator.sum_inputs`: any bit pattern, near and far exponents, cancellation, subnormal numbers, infinities and
NaN. The emulator's core computes the same in P processes. The first round compares about 10^6 results of each kind;
further ones, of 7 * 10^6 of each wgmma, go on until S seconds are over. Prints a line for each kind and round, and
writes the sums so far as JSON: results, how many differ (-1: the GPU did not execute it), of which style, and the
first. The exit status is 1 where one differs.

Needs the driver, NumPy, ml_dtypes and a C compiler.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cute_kernels.emulator.core.library import library as core
from cute_kernels.emulator.machine.units.matrix import operands as matrix_operands
from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.machine.units.matrix.mma_sync import TYPES, Form, accumulator_registers, accumulator_rows
from cute_kernels.emulator.machine.units.matrix.products import Kind, multiply_rows
from tests.emulator.mma_launch import multiply_in_core
from tests.emulator.record_matrix_on_gpu import Gpu
from tests.emulator.sum_inputs import STYLES, operands
from tests.emulator.wgmma_registers import accumulators_of_rows, rows_of_accumulators

ROWS, COLUMNS, THREADS = 64, 256, 128
_ELEMENTS = {element.name: element for kind in matrix_operands.KINDS.values() for element in kind.values()}
SILICON = Arithmetic("silicon", "sm_90a")


@dataclass(frozen=True)
class Wgmma:
    """One wgmma of 64 x 256 per block: A in registers, B in shared memory without swizzle."""

    a_type: str
    b_type: str
    d_type: str
    saturate: bool = False

    m = ROWS
    n = COLUMNS
    blocks = (10, 64)  # of a launch: in the first round, and later

    @property
    def name(self) -> str:
        return f"wgmma {self.d_type} {self.a_type} {self.b_type}{' satfinite' if self.saturate else ''}"

    @property
    def registers(self) -> int:
        return COLUMNS // (4 if self.d_type == "f16" else 2)

    def ptx(self) -> str:
        """Parameters: fragments of A [blocks, 4, 128], B [blocks, 8192 bytes], cells [blocks, registers, 128]."""
        k = 32 // _ELEMENTS[self.a_type].nbytes
        count, tail = self.registers, "" if self.d_type == "s32" else ", 1, 1"
        if _ELEMENTS[self.a_type].nbytes == 2:
            tail += ", 0"
        suffix = ".satfinite" if self.saturate else ""
        d = ", ".join(f"%d{i}" for i in range(count))
        lines = [f"ld.global.b32 %a{i}, [%fragments+{512 * i}];" for i in range(4)]
        lines += [f"ld.global.b32 %d{i}, [%cells+{512 * i}];" for i in range(count)]
        lines += [
            f"ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%b+{2048 * i}];\n"
            f"st.shared.v4.b32 [%to+{2048 * i}], {{%v0, %v1, %v2, %v3}};"
            for i in range(COLUMNS * 32 // 2048)
        ]
        lines += [
            "fence.proxy.async;", "bar.sync 0;", "wgmma.fence.sync.aligned;",
            f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k{k}{suffix}.{self.d_type}.{self.a_type}.{self.b_type} "
            f"{{{d}}}, {{%a0, %a1, %a2, %a3}}, %descriptor, %p{tail};",
            "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;",
        ]  # fmt: skip
        lines += [f"st.global.b32 [%cells+{512 * i}], %d{i};" for i in range(count)]
        body = "\n".join(lines)
        # Chunk c of row r lies at 4096 c + 128 (r / 8) + 16 (r % 8).
        constant = 4096 >> 4 << 16 | 128 >> 4 << 32
        return f""".version {8.4 if self.saturate else 8.0}
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 data[];
.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{{
.reg .pred %p; .reg .b32 %a<4>, %d<{count}>, %v<4>, %t, %to, %block;
.reg .b64 %fragments, %b, %cells, %descriptor, %offset;
mov.u32 %t, %tid.x; mov.u32 %block, %ctaid.x; mov.u32 %to, data;
cvt.u64.u32 %descriptor, %to; shr.u64 %descriptor, %descriptor, 4; or.b64 %descriptor, %descriptor, {constant};
mad.lo.u32 %to, %t, 16, %to;
ld.param.u64 %fragments, [p0]; ld.param.u64 %b, [p1]; ld.param.u64 %cells, [p2];
mul.wide.u32 %offset, %block, 2048; add.u64 %fragments, %fragments, %offset;
mul.wide.u32 %offset, %block, 8192; add.u64 %b, %b, %offset;
mul.wide.u32 %offset, %block, {512 * count}; add.u64 %cells, %cells, %offset;
mul.wide.u32 %offset, %t, 4; add.u64 %fragments, %fragments, %offset; add.u64 %cells, %cells, %offset;
mul.wide.u32 %offset, %t, 16; add.u64 %b, %b, %offset;
setp.eq.u32 %p, 0, 0;
{body}
ret;
}}
"""

    def arrays(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
        """What the kernel gets."""
        halves = self.d_type == "f16"
        words = a.view(np.uint32).reshape(len(a), 4, 2, 8, 2, 4)  # block, warp, row / 8, row % 8, K / 16, lane % 4
        fragments = words.transpose(0, 4, 2, 1, 3, 5).reshape(len(a), 4, THREADS)
        chunks = b.view(np.uint8).reshape(len(b), COLUMNS, 2, 16).transpose(0, 2, 1, 3)
        cells = [accumulators_of_rows(x, halves).transpose(1, 0, 2).reshape(-1, THREADS) for x in c.astype(np.uint32)]
        return [np.ascontiguousarray(fragments), np.ascontiguousarray(chunks), np.stack(cells)]

    def results(self, cells: np.ndarray) -> np.ndarray:
        """D [blocks, 64, 256] of what the kernel leaves."""
        warps = cells.reshape(len(cells), -1, 4, 32).transpose(0, 2, 1, 3)
        halves = self.d_type == "f16"
        return np.stack([np.concatenate([rows_of_accumulators(w, halves) for w in block]) for block in warps])

    def emulated(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        cells = np.ascontiguousarray(c.transpose(0, 2, 1).astype(np.uint32))
        kinds = Kind(_ELEMENTS[self.a_type]), Kind(_ELEMENTS[self.b_type])
        sums = SILICON.sums("wgmma", self.a_type, self.d_type)
        a, b = a.view(np.uint8), b.view(np.uint8)
        multiply_rows(a, b, cells, kinds, self.d_type, add=True, saturate=self.saturate, sums=sums)
        return cells.transpose(0, 2, 1)

    @property
    def shared(self) -> int:
        return COLUMNS * 32 + 1024


@dataclass(frozen=True)
class MmaSync:
    """One mma.sync of 16 x 8 per block of one warp."""

    a_type: str
    b_type: str
    d_type: str
    k: int

    m = 16
    n = 8
    blocks = (1200, 2400)
    shared = 0

    @property
    def name(self) -> str:
        return f"mma.sync k{self.k} {self.d_type} {self.a_type} {self.b_type}"

    @property
    def form(self) -> Form:
        return Form(16, 8, self.k, TYPES[self.a_type], TYPES[self.b_type], self.d_type)

    def ptx(self) -> str:
        """Parameters: registers of A, of B, and of C and then D, each [blocks, registers, 32]."""
        form = self.form
        counts = {"a": form.a_registers, "b": form.b_registers, "d": form.c_registers}
        names = {key: ", ".join(f"%{key}{i}" for i in range(count)) for key, count in counts.items()}
        lines = []
        for number, (key, count) in enumerate(counts.items()):
            lines.append(f"ld.param.u64 %{key}_at, [p{number}];\nmul.wide.u32 %offset, %block, {128 * count};")
            lines.append(f"add.u64 %{key}_at, %{key}_at, %offset; add.u64 %{key}_at, %{key}_at, %lane;")
            lines += [f"ld.global.b32 %{key}{i}, [%{key}_at+{128 * i}];" for i in range(count)]
        types = f"{self.d_type}.{self.a_type}.{self.b_type}.{self.d_type}"
        lines.append(
            f"mma.sync.aligned.m16n8k{self.k}.row.col.{types} {{{names['d']}}}, {{{names['a']}}}, {{{names['b']}}}, "
            f"{{{names['d']}}};"
        )
        lines += [f"st.global.b32 [%d_at+{128 * i}], %d{i};" for i in range(counts["d"])]
        registers = " ".join(f".reg .b32 %{key}<{count}>; .reg .b64 %{key}_at;" for key, count in counts.items())
        body = "\n".join(lines)
        version = 8.0 if self.a_type not in ("e4m3", "e5m2") else 8.4 if (self.k, self.d_type) == (32, "f32") else 8.7
        return f""".version {version}
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{{
{registers} .reg .b32 %t, %block; .reg .b64 %lane, %offset;
mov.u32 %t, %tid.x; mov.u32 %block, %ctaid.x; mul.wide.u32 %lane, %t, 4;
{body}
ret;
}}
"""

    def arrays(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
        return [_fragments(a), _fragments(b), np.ascontiguousarray(accumulator_registers(c.astype(self._words)))]

    @property
    def _words(self) -> type:
        return np.uint16 if self.d_type == "f16" else np.uint32

    def results(self, cells: np.ndarray) -> np.ndarray:
        return accumulator_rows(cells, 16, self._words)

    def emulated(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return accumulator_rows(multiply_in_core(self.form, *self.arrays(a, b, c), SILICON), 16, self._words)


def _fragments(rows: np.ndarray) -> np.ndarray:
    """uint32 [count, registers, 32] of rows of A or columns of B [count, 16 or 8, K]: see `mma_sync.operand_rows`."""
    count, size, _ = rows.shape
    words = np.ascontiguousarray(rows).view(np.uint32).reshape(count, size // 8, 8, -1, 4)
    return np.ascontiguousarray(words.transpose(0, 3, 1, 2, 4)).reshape(count, -1, 32)


KINDS: tuple[Wgmma | MmaSync, ...] = (
    Wgmma("e4m3", "e4m3", "f32"),
    *(Wgmma(name, name, "f32") for name in ("bf16", "f16", "tf32")),
    Wgmma("s8", "s8", "s32"),
    *(Wgmma(a, "e5m2", "f32") for a in ("e5m2", "e4m3")),
    *(Wgmma(name, name, "f16") for name in ("f16", "e4m3", "e5m2")),
    Wgmma("s8", "u8", "s32", True),
    *(MmaSync(name, name, "f32", k) for name, k in (("f16", 16), ("bf16", 16), ("tf32", 8))),
    MmaSync("e4m3", "e4m3", "f32", 32),
    *(MmaSync(name, name, "f32", k) for name, k in (("f16", 8), ("tf32", 4), ("e5m2", 32), ("e4m3", 16))),
    *(MmaSync(name, name, "f16", k) for name, k in (("f16", 16), ("e4m3", 32), ("e5m2", 32))),
)
"""The most important ones first."""


def draw(kind: Wgmma | MmaSync, style: str, blocks: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bit patterns of A [blocks, m, K], B [blocks, n, K] and C [blocks, m, n]."""
    rng = np.random.default_rng(seed)
    if kind.d_type == "s32":
        a, b = (rng.integers(0, 256, (blocks, rows, 32), dtype=np.uint8) for rows in (kind.m, kind.n))
        return a, b, rng.integers(0, 1 << 32, (blocks, kind.m, kind.n), dtype=np.uint32)
    a, b, c = operands(rng, (kind.a_type, kind.b_type), kind.d_type, style, blocks, kind.m, kind.n)
    if isinstance(kind, MmaSync):
        a, b = (np.ascontiguousarray(x[..., : kind.k]) for x in (a, b))
    return a, b, c


Job = tuple[Wgmma | MmaSync, str, int, int]  # kind, style, blocks, seed


def drawn(job: Job) -> list[np.ndarray]:
    """What the kernel gets."""
    kind, style, blocks, seed = job
    return kind.arrays(*draw(kind, style, blocks, seed))


def compare(job: Job, cells: np.ndarray) -> tuple[str, int, int, str]:
    """(style, results, how many differ, the first of them) of what the GPU left in the cells of one launch."""
    kind, style, blocks, seed = job
    a, b, c = draw(kind, style, blocks, seed)
    want, got = kind.emulated(a, b, c), kind.results(cells)
    wrong = np.argwhere(got != want)
    first = ""
    if len(wrong):
        block, i, j = wrong[0]
        first = f"GPU {got[block, i, j]:#x}, emulator {want[block, i, j]:#x}, C {c[block, i, j]:#x}, "
        first += f"A {a[block, i].tolist()}, B {b[block, j].tolist()}"
    return style, got.size, len(wrong), first


@dataclass
class Counts:
    """What is known of a kind so far."""

    kind: Wgmma | MmaSync
    results: int = 0
    seconds: float = 0.0
    by_style: Counter[str] = field(default_factory=Counter)
    first: str = ""
    failure: str = ""

    @property
    def differ(self) -> int:
        return -1 if self.failure else sum(self.by_style.values())

    def described(self) -> dict[str, Any]:
        return {
            "kind": self.kind.name, "results": self.results, "differ": self.differ,
            "by style": {style: count for style, count in self.by_style.items() if count},
            "first": self.failure or self.first, "seconds": round(self.seconds, 1),
        }  # fmt: skip

    def line(self) -> str:
        first = self.failure or self.first
        return f"{self.kind.name}: {self.differ} of {self.results} results differ {first[:300]}"


def measure(gpu: Any, counts: Counts, pool: Any, blocks: int, seed: int) -> None:
    """One launch of each style; ``gpu`` has `Gpu.launch`, ``pool`` is one of multiprocessing.

    The GPU is used by the thread that calls, which has its context, while the pool draws and compares.
    """
    start, kind = time.perf_counter(), counts.kind
    jobs = [(kind, style, blocks, seed + number) for number, style in enumerate(STYLES)]
    text, threads = kind.ptx(), THREADS if isinstance(kind, Wgmma) else 32
    inputs = [pool.apply_async(drawn, (job,)) for job in jobs]
    found = []
    try:
        for job, waiting in zip(jobs, inputs):
            arrays = waiting.get()
            gpu.launch(text, arrays, blocks, threads, kind.shared)
            found.append(pool.apply_async(compare, (job, arrays[-1])))
    except RuntimeError as error:  # what the assembler or the driver says; other kinds still run
        counts.failure = str(error)
    for style, size, wrong, first in (waiting.get() for waiting in found):
        counts.results += size
        counts.by_style[style] += wrong
        counts.first = counts.first or first
    counts.seconds += time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150, help="no round begins later (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one per processor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    start = time.perf_counter()
    core()  # compiled once, and before the processes are there
    found = [Counts(kind) for kind in KINDS if arguments.only in kind.name]
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:  # before the driver is loaded
        gpu = Gpu()
        for number in range(1 << 20):
            for counts in found:
                late = time.perf_counter() - start > arguments.seconds
                if counts.failure or (number and late):
                    continue
                seed = (arguments.seed * 4096 + number) * 64 * len(STYLES) + KINDS.index(counts.kind) * len(STYLES)
                measure(gpu, counts, pool, counts.kind.blocks[number > 0], seed)
                print(f"{time.perf_counter() - start:.0f} s, round {number}: {counts.line()}", flush=True)
                if arguments.json is not None:
                    record = {"seed": arguments.seed, "kinds": [one.described() for one in found]}
                    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
            if time.perf_counter() - start > arguments.seconds:
                break
    for counts in found:
        print(counts.line())
    sys.exit(any(counts.differ > 0 for counts in found))


if __name__ == "__main__":
    main()
