"""Common parts of the dense GEMM's kernels on every architecture: host entry, views of its tensors, rounding."""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int16, Int32, Int64

from cute_kernels.kernels import ptx
from cute_kernels.kernels.epilogue import NARROW, Scales, activate, activate_to_e4m3, scale_add, scales_of
from cute_kernels.kernels.host import ELEMENT_TYPES, Host, Operands, launch_clusters
from cute_kernels.kernels.tma import Tma, load_tma, staging_layout, store_tma
from cute_kernels.plan.base import ITEMSIZE
from cute_kernels.plan.gemm import GemmPlan


@dataclass(frozen=True)
class Addends:
    """Multipliers and addends of an epilogue besides the bias; None where its plan has none.

    Beyond the output, where nobody stores, a thread gets the numbers of the last row or column.

    Attributes:
        scales: multipliers of the accumulators, ``[M, batches]`` and ``[N, batches]``.
        residual: ``[M, pitch, batches]``, rows of whole 16 bytes; None where TMA brings it.
        out_factor: of an output of 8 bits, the reciprocal of its scale; before `loaded` the scale, or where it is.
    """

    scales: Scales | None = None
    residual: cute.Tensor | None = None
    out_factor: Float32 | cute.Tensor | None = None

    def loaded(self) -> "Addends":
        """With the call's numbers in registers; global memory may be read from here on."""
        scales, out = self.scales, self.out_factor
        if isinstance(out, cute.Tensor):
            out = out[0]
        return replace(
            self,
            scales=None if scales is None else scales.loaded(),
            out_factor=None if out is None else ptx.rcp_rn_f32(out),
        )

    @cute.jit
    def row_factor(self, row: Int32, batch: Int32) -> Float32 | None:
        """Factor of all columns of a row: the row's own, the call's number, or None."""
        if cutlass.const_expr(self.scales is None):
            return None
        if cutlass.const_expr(self.scales.rows is None):
            return self.scales.call
        return self.scales.of_batch(batch).row(row)

    @cute.jit
    def column_factors(
        self, column: Int32, batch: Int32, count: cutlass.Constexpr[int], vector: cutlass.Constexpr[int]
    ) -> cute.Tensor | None:
        """Factors of ``count`` columns, from a multiple of that many on; None where columns have none.

        ``vector``: `GemmPlan.column_vector`.
        """
        if cutlass.const_expr(self.scales is None or self.scales.features is None):
            return None
        factors = self.scales.features[None, batch]
        return _row_of(factors, column, count, math.gcd(vector, count))

    @cute.jit
    def addends(self, row: Int32, column: Int32, batch: Int32, count: cutlass.Constexpr[int]) -> cute.Tensor | None:
        """The residual of ``count`` columns of a row, likewise, in its own type."""
        if cutlass.const_expr(self.residual is None):
            return None
        residual = self.residual[min(row, cute.size(self.residual, mode=[0]) - 1), None, batch]
        return _row_of(residual, column, count, math.gcd(16 * 8 // residual.element_type.width, count))

    @cute.jit
    def prefetch(self, row: Int32, column: Int32, batch: Int32) -> None:
        """Brings the 128 bytes of the residual around an element into L2."""
        residual = self.residual[min(row, cute.size(self.residual, mode=[0]) - 1), None, batch]
        ptx.prefetch_global_l2(residual.iterator + min(column, cute.size(residual) - 1))


@cute.jit
def _row_of(
    row: cute.Tensor, first: Int32, count: cutlass.Constexpr[int], vector: cutlass.Constexpr[int]
) -> cute.Tensor:
    """Registers with ``count`` neighbouring elements, by loads of ``vector``."""
    vectors = cute.logical_divide(row, cute.make_layout(vector))
    last = cute.size(vectors, mode=[1]) - 1
    values = cute.make_rmem_tensor((vector, count // vector), row.element_type)
    for i in cutlass.range_constexpr(count // vector):
        cute.autovec_copy(vectors[None, min(first // vector + i, last)], values[None, i])
    return cute.make_tensor(values.iterator, count)


@cute.jit
def multipliers(row_factor: Float32 | None, columns: cute.Tensor | Float32 | None) -> Float32 | cute.Tensor | None:
    """``row_factor * columns``, one FP32 product for each column, or of one; the other one where one is missing."""
    if cutlass.const_expr(row_factor is None or columns is None):
        return row_factor if columns is None else columns
    if cutlass.const_expr(not isinstance(columns, cute.Tensor)):
        return ptx.mul_rn_f32(row_factor, columns)
    values = cute.make_rmem_tensor(columns.layout, Float32)
    for i in cutlass.range_constexpr(cute.size(columns)):
        values[i] = ptx.mul_rn_f32(row_factor, columns[i])
    return values


@dataclass(frozen=True)
class DeviceArguments:
    """Arguments that the host function hands to the kernel: TMA copies, bias and sizes in tiles.

    ``residual`` is loaded to the store buffers, by the boxes of the output; None where TMA does not load it.
    ``divisors`` are those of the tile order, if it has any.
    """

    tiled_mma: cute.TiledMma
    a: Tma
    b: Tma
    out: Tma
    residual: Tma | None
    bias: cute.Tensor | None
    addends: Addends
    m_tiles: Int32
    n_tiles: Int32
    batches: Int32
    k_blocks: Int32
    divisors: tuple[cute.FastDivmodDivisorV2, ...] = ()


class GemmHost(Host):
    """A subclass has the device code, ``kernel(arguments: DeviceArguments)``, and ``operands(a, b)``: the tensor-core
    instruction, and the loads of ``a`` and ``b``, each ``[rows, K, batches]``."""

    def __init__(self, plan: GemmPlan) -> None:
        super().__init__(plan)
        self.dtype, self.b_dtype = ELEMENT_TYPES[plan.multiplied_dtype], ELEMENT_TYPES[plan.b_dtype]

    def divisors(self, m_tiles: Int32, n_tiles: Int32) -> tuple[cute.FastDivmodDivisorV2, ...]:
        """Divisors of the tile order."""
        return ()

    @cute.jit
    def __call__(self, o: Operands, stream: Any) -> None:
        """Builds TMA descriptors and launches ``clusters`` clusters on ``stream``."""
        plan, problem, m, n, k, batches = self.plan, self.plan.problem, o.m, o.n, o.k, o.batches
        a = matrices(o.a, m, k, k, batches, problem.in_dtype)
        b = matrices(o.b, n, k, k, batches, problem.in_dtype)
        out = matrices(o.out, m, n, row_pitch(n, problem.out_dtype), batches, problem.out_dtype)
        tiled_mma, a_tma, b_tma = self.operands(a, b)
        box = (plan.store_rows, plan.store_columns)
        box_layout = staging_layout(*box, plan.store_row_bytes)
        residual_tma = None
        if cutlass.const_expr(plan.tma_residual):
            residual = matrices(o.residual, m, n, row_pitch(n, problem.residual), batches, problem.residual)
            residual_tma = load_tma(residual, box_layout, box)
        m_tiles, n_tiles = cute.ceil_div(m, plan.cluster_rows), cute.ceil_div(n, plan.cluster_columns)
        arguments = DeviceArguments(
            tiled_mma=tiled_mma, a=a_tma, b=b_tma, out=store_tma(out, box_layout, box), residual=residual_tma,
            bias=bias_view(o.bias, plan, n), addends=gemm_addends(plan, o), m_tiles=m_tiles, n_tiles=n_tiles,
            batches=batches, k_blocks=cute.ceil_div(k, plan.tile_k), divisors=self.divisors(m_tiles, n_tiles)
        )
        launch_clusters(self.kernel(arguments), plan, o.clusters, stream)


def matrices(
    pointer: cute.Pointer, rows: Int32, columns: Int32, pitch: Int32, batches: Int32, dtype: str
) -> cute.Tensor:
    """``[rows, columns, batches]``, every row ``pitch`` elements after the one before; rows on 16 bytes, as TMA needs.

    The stride between batches is 64-bit: outputs have more than 2^31 elements.
    """
    divisor = 16 // ITEMSIZE[dtype]
    pitch = cute.assume(pitch, divby=divisor)
    stride = cute.assume(Int64(rows) * Int64(pitch), divby=divisor)
    return cute.make_tensor(pointer, cute.make_layout((rows, columns, batches), stride=(pitch, 1, stride)))


def row_pitch(n: Int32, dtype: str) -> Int32:
    """Elements from one row to the next: `GemmPlan.out_pitch` and `GemmPlan.residual_pitch` of this launch's N."""
    divisor = 16 // ITEMSIZE[dtype]
    return cute.ceil_div(n, divisor) * divisor


def gemm_addends(plan: GemmPlan, o: Operands) -> Addends:
    """Operands of a host function, as views."""
    problem, scales, view, out_scale = plan.problem, None, None, o.out_scale
    if problem.scaled:
        columns = cute.assume(o.n, divby=plan.column_vector)
        by_pointer = problem.scale_source == "pointer"
        scales = scales_of(by_pointer, o.scale, o.row_scale, o.column_scale, o.m, columns, o.batches)
    if o.residual is not None and not plan.tma_residual:
        pitch = row_pitch(o.n, problem.residual)
        view = matrices(o.residual, o.m, pitch, pitch, o.batches, problem.residual)
    if problem.out_scale_source == "pointer":
        out_scale = cute.make_tensor(out_scale, 1)
    return Addends(scales, view, out_scale)


def bias_view(pointer: cute.Pointer | None, plan: GemmPlan, n: Int32) -> cute.Tensor | None:
    """``[N]`` in its own type."""
    return None if pointer is None else cute.make_tensor(pointer, cute.assume(n, plan.bias_vector))


@cute.jit
def biases(
    bias: cute.Tensor | None, column: Int32, count: cutlass.Constexpr[int], vector: cutlass.Constexpr[int]
) -> cute.Tensor | None:
    """FP32 registers with the bias of ``count`` columns, from a multiple of that many on; of the last one beyond N.

    ``vector``: `GemmPlan.bias_vector`.
    """
    if cutlass.const_expr(bias is None):
        return None
    loaded = _row_of(bias, column, count, math.gcd(vector, count))
    if cutlass.const_expr(bias.element_type is Float32):
        return loaded
    values = cute.make_rmem_tensor(loaded.layout, Float32)
    values.store(loaded.load().to(Float32))
    return values


@cute.jit
def finish(
    accumulator: cute.Tensor, bias: cute.Tensor | None, activation: cutlass.Constexpr, dtype: cutlass.Constexpr, *,
    scale: Float32 | cute.Tensor | None = None, residual: cute.Tensor | None = None, out_factor: Float32 | None = None,
    packed_f32: cutlass.Constexpr[bool] = False
) -> cute.Tensor:
    """``out_factor * (activation(scale * accumulator + bias) + residual)`` in ``dtype``, by one thread's FP32
    registers, which are overwritten; None where there is nothing to add or to multiply.

    The bias is registers of the same count, the scale a number or such registers; their sum with the accumulator is
    rounded once. The residual has any floating-point type. ``packed_f32``: the architecture has two-wide FP32
    arithmetic (sm_100 and later).
    """
    if cutlass.const_expr(scale is not None):
        for i in cutlass.range_constexpr(0, cute.size(accumulator), 2):
            scales, addends = (scale, scale), None
            if cutlass.const_expr(isinstance(scale, cute.Tensor)):
                scales = (scale[i], scale[i + 1])
            if cutlass.const_expr(bias is not None):
                addends = (bias[i], bias[i + 1])
            pair = (accumulator[i], accumulator[i + 1])
            accumulator[i], accumulator[i + 1] = scale_add(pair, scales, addends, packed_f32)
    elif cutlass.const_expr(bias is not None):
        for i in cutlass.range_constexpr(cute.size(accumulator)):
            accumulator[i] = accumulator[i] + bias[i]
    if cutlass.const_expr(dtype is Float8E4M3FN and activation in NARROW and residual is None):
        narrow = cute.make_rmem_tensor(cute.size(accumulator), dtype)
        pairs = cute.recast_tensor(narrow, Int16)
        for i in cutlass.range_constexpr(cute.size(pairs)):
            pair = (accumulator[2 * i], accumulator[2 * i + 1])
            pairs[i] = activate_to_e4m3(pair, activation, out_factor, packed_f32)
        return narrow
    if cutlass.const_expr(activation != "none"):
        for i in cutlass.range_constexpr(0, cute.size(accumulator), 2):
            pair = (accumulator[i], accumulator[i + 1])
            accumulator[i], accumulator[i + 1] = activate(pair, activation, dtype, packed_f32)
    if cutlass.const_expr(residual is not None):
        for i in cutlass.range_constexpr(cute.size(accumulator)):
            accumulator[i] = ptx.add_rn_f32(accumulator[i], Float32(residual[i]))
    if cutlass.const_expr(out_factor is not None):
        for i in cutlass.range_constexpr(cute.size(accumulator)):
            accumulator[i] = ptx.mul_rn_f32(accumulator[i], out_factor)
    if cutlass.const_expr(dtype is Float32):
        return accumulator
    out = cute.make_rmem_tensor(cute.size(accumulator), dtype)
    if cutlass.const_expr(dtype is Float8E4M3FN):
        words = cute.recast_tensor(out, Int16)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = ptx.cvt_rn_satfinite_e4m3x2_f32(accumulator[2 * i + 1], accumulator[2 * i])
    else:
        out.store(accumulator.load().to(dtype))
    return out
