"""Scale, bias + position, rounding: one function per contract of `cute_kernels.operations.reference`."""

import struct
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int16, Int32

from cute_kernels.kernels import ptx
from cute_kernels.kernels.ptx import Pair


@cute.jit
def scale_add_round(
    accumulator: cute.Tensor, table: cute.Tensor | None, scale: Float32 | cute.Tensor, epilogue: cutlass.Constexpr,
    packed_f32: cutlass.Constexpr[bool], adds_bf16: cutlass.Constexpr[bool] = True
) -> cute.Tensor:
    """``accumulator * scale + table`` in BF16, elementwise over one thread's FP32 registers, which are overwritten.

    ``"f32"``: one fused multiply-add of an FP32 table and one rounding to BF16. ``"bf16x2"``: the product is rounded to
    FP32, then to BF16, and the sum with a BF16 table is rounded to BF16 again. No table adds nothing; the scale is one
    number, or registers of one for each element. ``packed_f32``: the architecture has two-wide FP32 arithmetic (sm_100
    and later); ``adds_bf16``: two-wide sums of BF16 (sm_90 and later); earlier ones multiply by 1 and add.
    """
    out = cute.make_rmem_tensor(cute.size(accumulator), BFloat16)
    count = cute.size(accumulator)
    for i in cutlass.range_constexpr(0, count, 2):
        pair = (accumulator[i], accumulator[i + 1])
        addends = None
        if cutlass.const_expr(epilogue == "f32" and table is not None):
            addends = (table[i], table[i + 1])
        scales = (scale, scale)
        if cutlass.const_expr(isinstance(scale, cute.Tensor)):
            scales = (scale[i], scale[i + 1])
        accumulator[i], accumulator[i + 1] = scale_add(pair, scales, addends, packed_f32)
    out.store(accumulator.load().to(BFloat16))
    if cutlass.const_expr(epilogue == "bf16x2" and table is not None):
        packed, packed_table = cute.recast_tensor(out, Int32), cute.recast_tensor(table, Int32)
        for i in cutlass.range_constexpr(count // 2):
            if cutlass.const_expr(adds_bf16):
                packed[i] = cute.arch.add_packed_bf16x2(packed[i], packed_table[i], rnd="rn")
            else:
                packed[i] = ptx.add_rn_bf16x2_by_fma(packed[i], packed_table[i])
    return out


def scale_add(
    sums: tuple[Float32, ...], scales: tuple[Float32, ...], addends: tuple[Float32, ...] | None,
    packed_f32: bool = False
) -> tuple[Float32, ...]:
    """``fma(sum, scale, addend)`` elementwise, or the product where nothing is added: FP32, rounded once.

    With ``packed_f32`` there are two of each.
    """
    if packed_f32:
        return ptx.mul_rn_f32x2(sums, scales) if addends is None else ptx.fma_rn_f32x2(sums, scales, addends)
    if addends is None:
        return tuple(ptx.mul_rn_f32(total, scale) for total, scale in zip(sums, scales, strict=True))
    return tuple(ptx.fma_rn_f32(*operands) for operands in zip(sums, scales, addends, strict=True))


def as_floats(sums: cute.Tensor) -> cute.Tensor:
    """The registers themselves, or integers rounded to FP32."""
    if sums.element_type is Float32:
        return sums
    values = cute.make_rmem_tensor(sums.layout, Float32)
    values.store(sums.load().to(Float32))
    return values


# --- scale of an accumulator: one for the call, or a product of factors of rows and features -------------------------

@dataclass(frozen=True)
class Scales:
    """``scale[m, n] = fp32(row[m] * feature[n])``, ``[M]`` and ``[N]`` FP32; a factor that is the same for all, None
    here, is the call's number, or a view of its place in memory."""

    call: Float32 | cute.Tensor | None
    rows: cute.Tensor | None
    features: cute.Tensor | None

    def loaded(self) -> "Scales":
        """With the call's number in a register; global memory may be read from here on."""
        call = self.call[0] if isinstance(self.call, cute.Tensor) else self.call
        return Scales(call, self.rows, self.features)

    def of_batch(self, batch: Int32) -> "Scales":
        """Scales of one product, where rows and features are ``[.., batches]``."""
        along = [None if factors is None else factors[None, batch] for factors in (self.rows, self.features)]
        return Scales(self.call, *along)

    def row(self, row: Int32) -> Float32:
        """The factor of a row, with the call's number."""
        return self._factor(self.rows, row)

    def feature(self, feature: Int32) -> Float32:
        """The factor of a feature, with the call's number."""
        return self._factor(self.features, feature)

    @cute.jit
    def _factor(self, factors: cute.Tensor, index: Int32) -> Float32:
        # Beyond the last one, where nobody stores, the last.
        factor = factors[min(index, cute.size(factors) - 1)]
        if cutlass.const_expr(self.call is not None):
            factor = ptx.mul_rn_f32(factor, self.call)
        return factor


def scales_of(
    by_pointer: bool, scale: Float32 | cute.Pointer | None, row_scale: cute.Pointer | None,
    feature_scale: cute.Pointer | None, m: Int32, n: Int32, *batches: Int32
) -> Scales:
    """Scales that a host function is given, as views; with a number of products ``[.., batches]``."""
    call = cute.make_tensor(scale, 1) if by_pointer else scale
    rows = None if row_scale is None else cute.make_tensor(row_scale, (m, *batches))
    features = None if feature_scale is None else cute.make_tensor(feature_scale, (n, *batches))
    return Scales(call, rows, features)


# --- activations of an epilogue, by the contract of `cute_kernels.operations.reference.activations` -------------------

@dataclass(frozen=True)
class Sigmoid:
    """``sat(1/2 + u B(sat(u u)))`` with ``u = q A(sat(q q))`` and ``q = scale * x``; sat is into [0, 1], NaN to 0.

    Coefficients ascend: ``inner`` of ``A``, without which u is q, ``outer`` of ``B``.
    """

    scale: float
    inner: tuple[float, ...]
    outer: tuple[float, ...]


# The contract's numbers, written down independently of the reference.
SHORT = {
    "gelu": Sigmoid(0.2856, (1.585, -1.102, 0.3545), (0.881, -0.4692, 0.09143)),
    "gelu_tanh": Sigmoid(0.3035, (1.844, -1.26, 0.4), (0.713, -0.2363, 0.02524)),
    "silu": Sigmoid(0.1333, (2.176, -2.67, 2.326, -0.8413), (0.861, -0.6104, 0.3767, -0.1278)),
    "quick_gelu": Sigmoid(0.2133, (2.252, -2.992, 2.76, -1.018), (0.885, -0.67, 0.4355, -0.1509)),
}
"""In FP16, two elements to an instruction, for results with fewer significant bits than that."""

NARROW = SHORT | {
    "gelu": Sigmoid(0.3369, (), (1.171, -1.523, 1.316, -0.4668)),
    "gelu_tanh": Sigmoid(0.3403, (), (1.159, -1.483, 1.269, -0.4473)),
}
"""Fewer operations of the same kind, for products that are rounded to E4M3."""

LONG = {
    "gelu": Sigmoid(
        0.16949153,
        (2.0993423, -2.4454384, 2.351717, -1.6328466, 0.7259374, -0.14563194),
        (1.1211889, -1.1795907, 0.74863464, -0.19337028, 0.003142447),
    ),
    "gelu_tanh": Sigmoid(
        0.19607843,
        (2.5835042, -4.1110377, 5.0278287, -3.910118, 1.7645273, -0.35471418),
        (0.7875376, -0.32628098, 0.038144577, 0.0022820847, -0.001683326),
    ),
    "silu": Sigmoid(
        0.06896552,
        (3.6005964, -12.249812, 33.302116, -61.036915, 73.625114, -55.995056, 24.305672, -4.584079),
        (1.0067685, -1.0958704, 1.2782457, -1.4361918, 1.4214661, -1.0797008, 0.52356434, -0.11726415),
    ),
}
"""In FP32."""
LONG["quick_gelu"] = replace(LONG["silu"], scale=0.11737931)


@cute.jit
def activate(
    pair: Pair, activation: cutlass.Constexpr[str], dtype: cutlass.Constexpr, packed: cutlass.Constexpr[bool] = False
) -> Pair:
    """One of `cute_kernels.config.ACTIVATIONS` of two FP32 registers, which the caller rounds to ``dtype``.

    ``packed``: the architecture has two-wide FP32 arithmetic (sm_100 and later).
    """
    if cutlass.const_expr(activation == "none"):
        return pair
    if cutlass.const_expr(activation in ("relu", "relu_squared")):
        pair = tuple(ptx.max_nan_f32(x, Float32(0.0)) for x in pair)
        return pair if cutlass.const_expr(activation == "relu") else F32(packed).mul(pair, pair)
    if cutlass.const_expr(dtype in (Float32, Float16)):
        share = _sigmoid(LONG[activation], pair, F32(packed))
    else:
        share = ptx.cvt_f32_f16x2(_sigmoid(SHORT[activation], ptx.cvt_rn_f16x2_f32(pair[1], pair[0]), F16()))
    return F32(packed).mul(pair, share)


def activate_to_e4m3(pair: Pair, activation: str, factor: Float32, packed: bool = False) -> Int16:
    """``factor * x * s(x)`` of two registers in E4M3, where s is a key of `NARROW`: a product of FP16 numbers.

    It has four instructions fewer than products of FP32. What is multiplied by s is finite: that may be 0.
    """
    share = _sigmoid(NARROW[activation], ptx.cvt_rn_f16x2_f32(pair[1], pair[0]), F16())
    low, high = F32(packed).mul(pair, (factor, factor))
    return ptx.cvt_rn_satfinite_e4m3x2_f16x2(ptx.mul_rn_f16x2(ptx.cvt_rn_satfinite_f16x2_f32(high, low), share))


def _sigmoid(sigmoid: Sigmoid, x: Pair | Int32, arithmetic: "F32 | F16") -> Pair | Int32:
    u = arithmetic.mul(x, arithmetic.both(sigmoid.scale))
    if sigmoid.inner:
        u = arithmetic.mul(u, _horner(sigmoid.inner, arithmetic.mul_sat(u, u), arithmetic))
    slope = _horner(sigmoid.outer, arithmetic.mul_sat(u, u), arithmetic)
    return arithmetic.fma_sat(u, slope, arithmetic.both(0.5))


def _horner(coefficients: tuple[float, ...], x: Pair | Int32, arithmetic: "F32 | F16") -> Pair | Int32:
    """A polynomial whose coefficients ascend."""
    value = arithmetic.both(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = arithmetic.fma(value, x, arithmetic.both(coefficient))
    return value


@dataclass(frozen=True)
class F32:
    """Arithmetic of two FP32 registers; ``packed`` in one instruction, but for .sat, which has no two-wide form."""

    packed: bool

    def both(self, value: float) -> Pair:
        return Float32(value), Float32(value)

    def mul(self, a: Pair, b: Pair) -> Pair:
        return ptx.mul_rn_f32x2(a, b) if self.packed else tuple(map(ptx.mul_rn_f32, a, b))

    def fma(self, a: Pair, b: Pair, c: Pair) -> Pair:
        return ptx.fma_rn_f32x2(a, b, c) if self.packed else tuple(map(ptx.fma_rn_f32, a, b, c))

    def mul_sat(self, a: Pair, b: Pair) -> Pair:
        return tuple(map(ptx.mul_rn_sat_f32, a, b))

    def fma_sat(self, a: Pair, b: Pair, c: Pair) -> Pair:
        return tuple(map(ptx.fma_rn_sat_f32, a, b, c))


class F16:
    """Arithmetic of two FP16 numbers in a register."""

    mul, mul_sat = staticmethod(ptx.mul_rn_f16x2), staticmethod(ptx.mul_rn_sat_f16x2)
    fma, fma_sat = staticmethod(ptx.fma_rn_f16x2), staticmethod(ptx.fma_rn_sat_f16x2)

    def both(self, value: float) -> Int32:
        bits = int.from_bytes(struct.pack("<e", value), "little")
        return ptx.mov_b32(bits << 16 | bits)
