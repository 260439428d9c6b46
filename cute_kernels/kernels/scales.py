"""The dequantisation multiplier of the patch embeds: one for the call, or a product of factors of rows and features."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.kernels import ptx


@dataclass(frozen=True)
class Scales:
    """``scale[m, n] = fp32(row[m] * feature[n])``, where a factor that is the same for all is the call's number.

    Attributes:
        call: that number, a view of its place in memory, or None where rows and features both have factors.
        rows: ``[M]`` FP32, or None.
        features: ``[N]`` FP32, or None.
    """

    call: Float32 | cute.Tensor | None
    rows: cute.Tensor | None
    features: cute.Tensor | None

    def loaded(self) -> Scales:
        """With the call's number in a register; global memory may be read from here on."""
        call = self.call[0] if isinstance(self.call, cute.Tensor) else self.call
        return Scales(call, self.rows, self.features)

    @cute.jit
    def row(self, row: Int32) -> Float32:
        """The factor of a row, or of the last one for a row beyond it, which nobody stores; with the call's number."""
        factor = self.rows[min(row, cute.size(self.rows) - 1)]
        if cutlass.const_expr(self.call is not None):
            factor = ptx.mul_rn_f32(factor, self.call)
        return factor

    @cute.jit
    def feature(self, feature: Int32) -> Float32:
        """The factor of a feature, likewise."""
        factor = self.features[min(feature, cute.size(self.features) - 1)]
        if cutlass.const_expr(self.call is not None):
            factor = ptx.mul_rn_f32(factor, self.call)
        return factor


def scales_of(
    by_pointer: bool,
    scale: Float32 | cute.Pointer | None,
    row_scale: cute.Pointer | None,
    feature_scale: cute.Pointer | None,
    m: Int32,
    n: Int32,
) -> Scales:
    """What a host function is given, as views."""
    call = cute.make_tensor(scale, cute.make_layout(1)) if by_pointer else scale
    rows = None if row_scale is None else cute.make_tensor(row_scale, cute.make_layout((m,)))
    features = None if feature_scale is None else cute.make_tensor(feature_scale, cute.make_layout((n,)))
    return Scales(call, rows, features)
