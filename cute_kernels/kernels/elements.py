"""CuTe DSL's types by the names that plans use."""

from __future__ import annotations

import cutlass

ELEMENT_TYPES = {
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "tfloat32": cutlass.TFloat32,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    "int8": cutlass.Int8,
    "uint8": cutlass.Uint8,
}
"""Of numbers, and of what pointers point to. A tensor map of ``"tfloat32"`` makes TMA round FP32 on its way to shared
memory."""
