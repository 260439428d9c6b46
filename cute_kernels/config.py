"""The two inputs of planning: what is asked (`Problem`) and how to do it (`TileConfig`).

Both are frozen, hashable and free of torch and of hardware limits: `cute_kernels.plan` is the only judge of legality.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EpilogueArithmetic = Literal["f32", "bf16x2"]
ScaleSource = Literal["value", "pointer"]


@dataclass(frozen=True)
class Problem:
    """Facts of one call of ``out[m, n] = scale * sum_k x[m, k] * w[n, k] + table[m % table_rows, n]``.

    Attributes:
        m: rows of ``x`` and of the output (images x positions for patch embedding).
        n: output features, rows of the weight.
        k: input features in elements, after zero-padding to whole 16-byte rows.
        table_rows: rows of the bias + position table: 0 (absent), 1 (bias only) or the number of positions.
        in_dtype: element type of ``x`` and weight, as torch names it.
        out_dtype: element type of the output, as torch names it.
        scale_source: ``"value"`` passes the scale in the launch parameters, ``"pointer"`` reads one FP32 from device
            memory when the kernel starts.
    """

    m: int
    n: int
    k: int
    table_rows: int = 0
    in_dtype: str = "float8_e4m3fn"
    out_dtype: str = "bfloat16"
    scale_source: ScaleSource = "value"


@dataclass(frozen=True)
class TileConfig:
    """Tunables of the kernel. Each field names the experiment of the CUDA original that measured it (docs/experiments.md).

    Attributes:
        tile_n: output columns of a tile, 128 or 256 (F12).
        stages: operand buffers between TMA and tensor core (F6).
        epilogue_warps: 4 or 5; with 5, two warps share one quarter of the tensor-memory lanes and split its columns
            (F3, F4, F15).
        tmem_load_width: columns of one ``tcgen05.ld.32x32b``: 16, 32 or 64 (F1, F8, F32).
        epilogue: ``"f32"`` rounds once; ``"bf16x2"`` rounds the scaled accumulator and adds a BF16 table in packed
            BF16, as the CUDA original does (F22).
    """

    tile_n: int = 256
    stages: int = 4
    epilogue_warps: int = 5
    tmem_load_width: int = 32
    epilogue: EpilogueArithmetic = "f32"
