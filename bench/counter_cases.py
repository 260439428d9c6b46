"""Kernels whose counts are compared between the emulator and Nsight Compute: PTX with known access patterns, and ours.

A PTX case is one instruction with chosen addresses, executed by every warp of a small grid. Its result goes to global
memory so that ptxas keeps it, and the addresses come from there so that ptxas cannot see their pattern.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass

import numpy as np
import torch

from cute_kernels.config import PatchEmbedConfig, PatchEmbedProblem, Sm90PatchEmbedConfig, Sm100PatchEmbedConfig
from cute_kernels.operations.registry import placed
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import ARCHS, Plan, make_plan

CTAS, WARPS = 4, 2
ALIGNMENT = 256  # bytes, of every allocation
SHARED_BYTES = 32768
GLOBAL_BYTES = 1 << 20
OUT_BYTES = 4 * 32 * WARPS * CTAS

_HEAD = """
    .reg .pred %p<4>;
    .reg .b32 %r<32>;
    .reg .b64 %d<16>;
    ld.param.u64 %d0, [table];
    ld.param.u64 %d1, [data];
    ld.param.u64 %d2, [out];
    mov.u32 %r0, %laneid;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.u32 %r1, %r1, LANES, %r2;
    mul.wide.u32 %d3, %r1, 4;
    add.s64 %d2, %d2, %d3;
    mul.wide.u32 %d3, %r0, 4;
    add.s64 %d3, %d0, %d3;
    ld.global.u32 %r3, [%d3];
    mov.u32 %r4, dynamic;
    add.u32 %r4, %r4, %r3;
    cvt.u64.u32 %d4, %r3;
    add.s64 %d4, %d1, %d4;
    setp.ne.u32 %p1, %r3, 0xffffffff;
    mov.u32 %r10, %r3; mov.u32 %r11, %r3; mov.u32 %r12, %r3; mov.u32 %r13, %r3;
""".replace("LANES", str(32 * WARPS))
_TAIL = """
    xor.b32 %r10, %r10, %r11;
    xor.b32 %r12, %r12, %r13;
    xor.b32 %r10, %r10, %r12;
    st.global.u32 [%d2], %r10;
    ret;
"""
_NO_ACCESS = 0xFFFFFFFF  # a table entry: this lane is inactive


@dataclass(frozen=True)
class PtxCase:
    """One warp-wide access.

    Attributes:
        name: entry name of its kernel, unique among the cases.
        instruction: PTX; ``%r4`` and ``%d4`` are the lane's shared and global address, ``%r10`` on its data.
        offsets: byte offset per lane, or `_NO_ACCESS`.
    """

    name: str
    instruction: str
    offsets: tuple[int, ...]

    def ptx(self, arch: str = "sm_90a") -> str:
        """The module, for one architecture: code for an architecture-specific target runs on no other."""
        return (
            f".version {_ISA[arch]}\n.target {arch}\n.address_size 64\n.extern .shared .align 1024 .b8 dynamic[];\n"
            f".visible .entry {self.name}(.param .u64 table, .param .u64 data, .param .u64 out)\n"
            f"{{{_HEAD}    {self.instruction}{_TAIL}}}\n"
        )

    @property
    def table(self) -> np.ndarray:
        return np.array(self.offsets, np.uint32)


_ISA = {"sm_90a": "8.0", "sm_100a": "8.6"}
"""First PTX ISA that has the target."""

_WIDTHS = {1: ".u8", 2: ".u16", 4: ".u32", 8: ".v2.u32", 16: ".v4.u32"}
_DATA = {1: "%r10", 2: "%r10", 4: "%r10", 8: "{%r10, %r11}", 16: "{%r10, %r11, %r12, %r13}"}


def _patterns(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Byte offsets of 32 lanes."""
    rng = np.random.default_rng(nbytes)
    lanes = np.arange(32)
    items = {f"stride{s}": lanes * s for s in (1, 2, 4, 8, 32, 33)}
    items |= {"same": lanes * 0, "pairs1": lanes & ~1, "pairs2": lanes & ~2, "pairs4": lanes & ~4, "fours": lanes & ~3}
    items |= {"halves": lanes % 16, "swapped": lanes ^ 1, "reversed": 31 - lanes, "random": rng.permutation(32)}
    items |= {"scattered": rng.integers(0, SHARED_BYTES // nbytes // 2, 32), "crowded": rng.integers(0, 16, 32)}
    result = {name: tuple(int(i) * nbytes for i in values) for name, values in items.items()}
    for name, keep in (("first8", lanes < 8), ("odd", lanes % 2 == 1), ("some", rng.random(32) < 0.5)):
        result[name] = tuple(int(i) * nbytes if k else _NO_ACCESS for i, k in zip(lanes, keep))
    return result


_BASIC = ("stride1", "stride2", "stride32", "scattered", "same", "odd")


def _accesses() -> list[PtxCase]:
    cases = []
    for nbytes, type_ in _WIDTHS.items():
        for pattern, offsets in _patterns(nbytes).items():
            for space, place in (("shared", "%r4"), ("global", "%d4")):
                if pattern not in _BASIC and (space == "global" or nbytes < 4):
                    continue  # the profiler replays each kernel many times
                load = f"@%p1 ld.{space}{type_} {_DATA[nbytes]}, [{place}];"
                store = f"@%p1 st.{space}{type_} [{place}], {_DATA[nbytes]};"
                # Results of stores by several lanes to one place differ, but not what they cost.
                cases.append(PtxCase(f"case_ld_{space}_{nbytes}_{pattern}", load, offsets))
                cases.append(PtxCase(f"case_st_{space}_{nbytes}_{pattern}", store, offsets))
    return cases


def _matrix_moves() -> list[PtxCase]:
    cases = []
    for pitch in (16, 64, 128, 144):
        for count, registers in ((1, "{%r10}"), (2, "{%r10, %r11}"), (4, "{%r10, %r11, %r12, %r13}")):
            offsets = tuple(lane * pitch for lane in range(32))
            form = f"sync.aligned.m8n8.x{count}.shared.b16"
            cases.append(PtxCase(f"case_ldmatrix_x{count}_{pitch}", f"ldmatrix.{form} {registers}, [%r4];", offsets))
            cases.append(PtxCase(f"case_stmatrix_x{count}_{pitch}", f"stmatrix.{form} [%r4], {registers};", offsets))
    return cases


def _atomics() -> list[PtxCase]:
    cases = []
    patterns = _patterns(4)
    for pattern in ("stride1", "stride32", "same", "fours", "crowded", "odd"):
        offsets = patterns[pattern]
        cases.append(PtxCase(f"case_atom_shared_{pattern}", "@%p1 atom.shared.add.u32 %r10, [%r4], %r11;", offsets))
        cases.append(PtxCase(f"case_red_shared_{pattern}", "@%p1 red.shared.add.u32 [%r4], %r11;", offsets))
        cases.append(PtxCase(f"case_red_global_{pattern}", "@%p1 red.global.add.u32 [%d4], %r11;", offsets))
    return cases


def ptx_cases() -> list[PtxCase]:
    """Every pattern, in the order in which they are launched."""
    return _accesses() + _matrix_moves() + _atomics()


def launch_bytes(pointers: tuple[int, int, int]) -> list[bytes]:
    """The kernel parameters of a PTX case from the addresses of table, data and output."""
    return [struct.pack("<Q", pointer) for pointer in pointers]


# --- our kernel ------------------------------------------------------------------------------------------------------

_BASE = Sm90PatchEmbedConfig()
CONFIGS: dict[str, dict[str, PatchEmbedConfig]] = {
    "sm_90a": {
        "sm90 default": _BASE,
        "sm90 streamed weight": dataclasses.replace(_BASE, weight="streamed", stages=4, stage_blocks=1),
        "sm90 flat rows": dataclasses.replace(_BASE, order="flat"),
    },
    "sm_100a": {
        "sm100 default": Sm100PatchEmbedConfig(),
        "sm100 128 columns": Sm100PatchEmbedConfig(tile_n=128, stages=6),
        "sm100 bf16x2": Sm100PatchEmbedConfig(epilogue="bf16x2"),
    },
}
"""Of our kernel, by architecture and by the name that they have among the cases."""

PROBLEM = PatchEmbedProblem(m=128 * 4, n=768, k=768, table_rows=4)

KERNEL_NAMES = {"sm_90a": "patch_embed_sm90a_0", "sm_100a": "patch_embed_sm100a_0"}
"""Entry point of our kernel, as a profiler shows it."""

CHIPS = {"sm_90a": "gh100", "sm_100a": "gb100"}
"""What Nsight Compute calls the chips whose metrics it lists."""


def plan(arch: str, name: str) -> Plan:
    """Of our kernel in one of its `CONFIGS`, for the multiprocessors of the architecture's usual part."""
    return make_plan(PROBLEM, CONFIGS[arch][name], arch, sm_count=ARCHS[arch].sm_count)


def random_tensors(plan: Plan, device: str) -> Operands:
    """Random tensors for a plan, the same on every device."""
    problem = plan.problem
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    table = draw(*plan.table_shape).to(getattr(torch, plan.table_dtype))
    x, weight = (draw(rows, problem.k).to(torch.float8_e4m3fn) for rows in (problem.m, problem.n))
    out = torch.zeros(problem.m, problem.n, dtype=torch.bfloat16)
    x, weight, table, out = (placed(tensor, device) for tensor in (x, weight, table, out))
    return Operands(x=x, weight=weight, table=table, scale=0.5, out=out)
