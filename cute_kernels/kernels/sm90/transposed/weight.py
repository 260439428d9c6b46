"""The weight as a warpgroup keeps it: fragments of the A operand in registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int8, Int32

from cute_kernels.dsl import cute_ir, dsl_user_op, mlir_types, tensor_of

FRAGMENT_WORDS = 4
"""Registers per thread of a 64 x 32 byte A operand."""

FRAGMENT_K_BYTES = 32
"""Of K in it."""

_REGISTER_BYTES = 32


@cute.jit
def resident_weight(
    tiled_mma: cute.TiledMma, slice_: cute.ThrMma, weight: cute.Tensor, feature_block: Int32,
    columns: cutlass.Constexpr[int],
) -> cute.Tensor:  # fmt: skip
    """This thread's fragments of 64 features x ``columns`` elements of the weight, zero beyond its end.

    A fragment register is four neighbouring bytes of K, which is a multiple of 16 bytes: a register is all inside or
    all out.

    Args:
        tiled_mma, slice_: the operation, and this thread's part of it.
        weight: ``[N, K]`` of 8- or 16-bit elements.
        feature_block: which 64 features.
        columns: K, rounded up to whole blocks.
    """
    per_word = cutlass.const_expr(Int32.width // weight.element_type.width)
    fragments = _fragments(tiled_mma.partition_shape_A((64, columns)), weight.element_type)
    words = cute.recast_tensor(fragments, Int32)
    coordinates = slice_.partition_A(cute.make_identity_tensor((64, columns)))
    for step in cutlass.range_constexpr(columns // (FRAGMENT_K_BYTES // 4 * per_word)):
        for j in cutlass.range_constexpr(FRAGMENT_WORDS):
            i = step * FRAGMENT_WORDS + j
            row, column = coordinates[i * per_word]
            row = feature_block * 64 + row
            words[i] = Int32(0)
            if row < weight.shape[0] and column < weight.shape[1]:
                address = weight.iterator + cute.crd2idx((row, cute.assume(column, divby=per_word)), weight.layout)
                words[i] = cute.make_tensor(cute.recast_ptr(address, dtype=Int32), cute.make_layout(1))[0]
    return fragments


def _fragments(shape: cute.Shape, dtype: type) -> cute.Tensor:
    return _signed_fragments(shape) if dtype is Int8 else cute.make_rmem_tensor(shape, dtype)


@dsl_user_op
def _signed_fragments(shape: cute.Shape, *, loc=None, ip=None) -> cute.Tensor:
    """Registers of si8, as an integer MMA wants them. Those of ``make_rmem_tensor(.., Int8)`` are i8, which it refuses.

    CuTe DSL 4.8.1 has no public way to them.
    """
    layout = cute.make_layout(shape, loc=loc, ip=ip)
    pointer = cute_ir.PtrType.get(mlir_types.si8(), cute_ir.AddressSpace.rmem, _REGISTER_BYTES)
    memory = cute_ir.memref_alloca(cute_ir.MemRefType.get(pointer, layout.type), layout=layout, loc=loc, ip=ip)
    return tensor_of(memory.value, Int8)
