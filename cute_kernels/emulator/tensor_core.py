"""Fifth-generation tensor core: tcgen05.mma on operands in shared memory, accumulators in tensor memory.

Contract of one instruction: ``D = fp32_round(exact sum over its K of a*b + d)``, one rounding to nearest even. The
order and width of the additions inside the real unit are undocumented.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cute_kernels.emulator.async_engine import AsyncEngine, AsyncOp
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.mbarrier import MBarriers
from cute_kernels.emulator.sanitizer import ProxyTracker
from cute_kernels.emulator.smem import OFFSET_MASK, ClusterMemory, shared_address
from cute_kernels.emulator.tmem import TensorMemory, split_address


@dataclass(frozen=True)
class InstructionDescriptor:
    """The fields of the 32-bit instruction descriptor that matter for dense MMAs (PTX ISA, "Instruction descriptor")."""

    d_type: int
    a_type: int
    b_type: int
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    n: int
    m: int


@dataclass(frozen=True)
class MatrixDescriptor:
    """A shared-memory matrix descriptor (PTX ISA, "Shared memory descriptor"); offsets in bytes.

    Attributes:
        address: offset of the matrix in the shared memory of its CTA.
        leading: leading dimension byte offset.
        stride: stride dimension byte offset.
        swizzle: ``"none"``, ``"32B"``, ``"64B"``, ``"128B"``.
    """

    address: int
    leading: int
    stride: int
    swizzle: str


_SWIZZLE_CODES = {0: "none", 2: "128B", 4: "64B", 6: "32B"}
_SPANS = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
_KINDS = {
    "f8f6f4": ({0: "e4m3", 1: "e5m2"}, 1),
    "f16": ({0: "f16", 1: "bf16"}, 2),
    "tf32": ({2: "tf32"}, 4),
}


@functools.lru_cache(maxsize=64)
def decode_instruction(kind: str, descriptor: int) -> InstructionDescriptor:
    """Decodes an instruction descriptor.

    Raises:
        UnsupportedPTX: sparsity, saturation, an accumulator other than FP32, or element types not implemented.
    """
    if kind not in _KINDS:
        raise UnsupportedPTX(f"tcgen05.mma.kind::{kind}; implemented are {', '.join(_KINDS)}")
    types, _ = _KINDS[kind]
    field = InstructionDescriptor(
        d_type=descriptor >> 4 & 3,
        a_type=descriptor >> 7 & 7,
        b_type=descriptor >> 10 & 7,
        negate_a=bool(descriptor >> 13 & 1),
        negate_b=bool(descriptor >> 14 & 1),
        a_mn_major=bool(descriptor >> 15 & 1),
        b_mn_major=bool(descriptor >> 16 & 1),
        n=(descriptor >> 17 & 63) * 8,
        m=(descriptor >> 24 & 31) * 16,
    )
    if descriptor & 0xF or descriptor >> 29:
        raise UnsupportedPTX(f"instruction descriptor {descriptor:#x}: sparsity, saturation and shift are not implemented")
    if field.d_type != 1:
        raise UnsupportedPTX(f"instruction descriptor {descriptor:#x}: D type {field.d_type}, implemented is 1 (F32)")
    for operand, code in (("A", field.a_type), ("B", field.b_type)):
        if code not in types:
            raise UnsupportedPTX(f"instruction descriptor {descriptor:#x}: {operand} type {code} of kind::{kind}")
    return field


@functools.lru_cache(maxsize=1024)
def decode_matrix(descriptor: int) -> MatrixDescriptor:
    """Decodes a shared-memory matrix descriptor.

    Raises:
        UnsupportedPTX: a reserved bit pattern, a base offset, or a swizzle that is not implemented.
    """
    swizzle = descriptor >> 61 & 7
    if swizzle not in _SWIZZLE_CODES:
        raise UnsupportedPTX(f"matrix descriptor {descriptor:#x}: swizzle mode {swizzle}")
    if descriptor >> 46 & 7 != 1:
        raise UnsupportedPTX(f"matrix descriptor {descriptor:#x}: bits 46-48 must be 0b001")
    if descriptor >> 49 & 0xFFF:
        raise UnsupportedPTX(f"matrix descriptor {descriptor:#x}: base offset or absolute leading dimension")
    return MatrixDescriptor(
        address=(descriptor & 0x3FFF) << 4,
        leading=(descriptor >> 16 & 0x3FFF) << 4,
        stride=(descriptor >> 32 & 0x3FFF) << 4,
        swizzle=_SWIZZLE_CODES[swizzle],
    )


@functools.lru_cache(maxsize=4)
def _decode_table(name: str) -> np.ndarray:
    """float64 values of all bit patterns of a type of at most 16 bits."""
    dtype = {
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "f16": np.float16,
        "bf16": ml_dtypes.bfloat16,
    }[name]
    bits = np.arange(1 << (8 * np.dtype(dtype).itemsize), dtype=np.uint32)
    return bits.astype(np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16).view(dtype).astype(np.float64)


@functools.lru_cache(maxsize=256)
def _chunk_index(rows: int, nbytes: int, phase: int, leading: int, stride: int, swizzle: str) -> np.ndarray:
    """Indices [rows, nbytes / 16] of the 16-byte chunks of a K-major operand, relative to ``address - phase``."""
    span = _SPANS[swizzle]
    row = np.arange(rows)[:, None]
    chunk = np.arange(nbytes // 16)[None, :]
    if swizzle == "none":
        offset = phase + row // 8 * stride + row % 8 * 16 + chunk * leading
    else:
        offset = phase + row // 8 * stride + row % 8 * span + chunk * 16
        offset = offset ^ ((offset >> 7 & (span // 16 - 1)) << 4)
    return offset >> 4


class TensorCore:
    """The tcgen05 pipe of one cluster.

    Attributes:
        instructions: MMAs executed so far.
    """

    def __init__(
        self,
        shared: ClusterMemory,
        tensor_memories: list[TensorMemory],
        barriers: MBarriers,
        engine: AsyncEngine,
        tracker: ProxyTracker | None = None,
    ) -> None:
        self.shared = shared
        self.tensor_memories = tensor_memories
        self.barriers = barriers
        self.engine = engine
        self.tracker = tracker
        self.instructions = 0

    def mma(
        self,
        *,
        kind: str,
        cta_group: int,
        rank: int,
        d: int,
        a: int,
        b: int,
        instruction: int,
        accumulate: bool,
        a_in_tmem: bool = False,
        describe: str = "",
    ) -> None:
        """tcgen05.mma.cta_group.kind [d], a-desc, b-desc, idesc, enable-input-d.

        Args:
            kind: ``"f8f6f4"``, ``"f16"`` or ``"tf32"``.
            cta_group: 1 or 2.
            rank: cluster rank of the issuing CTA.
            d: tensor-memory address of the accumulator.
            a: 64-bit matrix descriptor (or, ``a_in_tmem``, a tensor-memory address).
            b: 64-bit matrix descriptor.
            instruction: 32-bit instruction descriptor.
            accumulate: the enable-input-d predicate.
            a_in_tmem: A is in tensor memory.
            describe: who issues, for reports.

        Raises:
            UnsupportedPTX: a mode that is not implemented.
            IllegalAccess: operands or accumulator outside their memories.
        """
        fields = decode_instruction(kind, instruction)
        if a_in_tmem:
            raise UnsupportedPTX("tcgen05.mma with A in tensor memory")
        if cta_group not in (1, 2) or (cta_group == 2 and rank % 2):
            raise UnsupportedPTX(f"tcgen05.mma.cta_group::{cta_group} issued by CTA {rank}")
        operands = (decode_matrix(a), decode_matrix(b))
        run = functools.partial(self._run_mma, kind, cta_group, rank, d, operands, fields, accumulate)
        self.engine.submit(AsyncOp(("tcgen05", rank), run, f"tcgen05.mma of CTA {rank} {describe}".rstrip()))

    def commit(
        self, *, cta_group: int, rank: int, barrier: int, multicast: int | None = None, describe: str = ""
    ) -> None:
        """tcgen05.commit: one arrival on the mbarrier when all earlier tcgen05 operations of this CTA are complete.

        Args:
            cta_group: 1 or 2.
            rank: cluster rank of the issuing CTA.
            barrier: shared address of the mbarrier.
            multicast: CTA mask: arrive at the same offset in each of these CTAs; None: at ``barrier`` itself.
            describe: who issues, for reports.
        """
        if multicast is None:
            targets = [barrier]
        else:
            if not multicast or multicast >> len(self.shared.ctas):
                raise IllegalAccess(f"multicast mask {multicast:#x} in a cluster of {len(self.shared.ctas)} CTAs")
            targets = [
                shared_address(target, barrier & OFFSET_MASK)
                for target in range(len(self.shared.ctas))
                if multicast >> target & 1
            ]

        def run() -> None:
            for target in targets:
                self.barriers.arrive(target, 1, describe or f"tcgen05.commit of CTA {rank}")

        self.engine.submit(AsyncOp(("tcgen05", rank), run, f"tcgen05.commit of CTA {rank} {describe}".rstrip()))

    def _run_mma(
        self,
        kind: str,
        cta_group: int,
        rank: int,
        d: int,
        operands: tuple[MatrixDescriptor, MatrixDescriptor],
        fields: InstructionDescriptor,
        accumulate: bool,
    ) -> None:
        ranks = [rank] if cta_group == 1 else [rank, rank + 1]
        m, n = fields.m // cta_group, fields.n // cta_group
        a = [self._operand(kind, r, operands[0], m, fields.a_type, fields.a_mn_major, fields.negate_a) for r in ranks]
        b = [self._operand(kind, r, operands[1], n, fields.b_type, fields.b_mn_major, fields.negate_b) for r in ranks]
        b_all = np.concatenate(b) if cta_group == 2 else b[0]
        for r, a_rows in zip(ranks, a, strict=True):
            # Tensor memory is stored column-major, so the transposed product is written in place.
            self._accumulate(self.tensor_memories[r], d, b_all @ a_rows.T, fields, cta_group, accumulate)
        self.instructions += 1

    def _operand(
        self, kind: str, rank: int, matrix: MatrixDescriptor, rows: int, code: int, mn_major: bool, negate: bool
    ) -> np.ndarray:
        """float64 [rows, K] of one CTA's part of an operand."""
        types, _ = _KINDS[kind]
        if mn_major or types[code] == "tf32":
            raise UnsupportedPTX(f"tcgen05.mma.kind::{kind} with {'an MN-major operand' if mn_major else 'tf32'}")
        nbytes = 32  # K of every dense kind is 32 bytes of each row
        phase = matrix.address & 1023
        index = _chunk_index(rows, nbytes, phase, matrix.leading, matrix.stride, matrix.swizzle)
        base = matrix.address - phase
        low, high = base + int(index.min()) * 16, base + int(index.max()) * 16 + 16
        cta = self.shared.ctas[rank]
        if high > cta.size:
            raise IllegalAccess(f"MMA operand at shared offset {low}..{high} of CTA {rank} leaves its {cta.size} bytes")
        chunks = cta.words[16].view(np.complex128).reshape(-1)[index + (base >> 4)]
        table = _decode_table(types[code])
        values = table[chunks.view(np.uint8 if len(table) == 256 else np.uint16)]
        return -values if negate else values

    def _accumulate(
        self,
        memory: TensorMemory,
        d: int,
        product: np.ndarray,
        fields: InstructionDescriptor,
        cta_group: int,
        accumulate: bool,
    ) -> None:
        """Adds float64 [N, rows] to the accumulator at ``d`` and rounds to FP32."""
        lane, column = split_address(d)
        n, rows = product.shape
        if rows != 128:
            raise UnsupportedPTX(f"tcgen05.mma with M = {fields.m} and cta_group::{cta_group}")
        if lane:
            raise IllegalAccess(f"accumulator at lane {lane}; an M of 128 lanes starts at lane 0")
        if accumulate:
            memory.check(0, rows, column, n, write=False)
        memory.check(0, rows, column, n, write=True)
        cells = memory.floats[column : column + n]
        cells[...] = product + cells if accumulate else product
