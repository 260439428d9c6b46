"""Operators that torch has for CUDA only, out of operators that it has for every device; what it asks of tensors."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_ELEMENTS_OF_SCALE = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TILE_ROWS, _TILE_SCALES = 128, 4

Tensor = torch.Tensor


def kernels() -> Iterator[tuple[str, Callable[..., object]]]:
    """Names of operators of aten, and what computes them."""
    yield "_scaled_mm", _scaled_mm
    yield "mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype)
    yield "bmm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype)
    yield "addmm.dtype", _added(torch.addmm)
    yield "baddbmm.dtype", _added(torch.baddbmm)
    for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"):
        for overload in ("", ".Tensor") if hasattr(torch.ops.aten, name) else ():
            yield name + overload, lambda *_: False
    yield "_thnn_fused_lstm_cell", _lstm_cell
    yield "_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward
    yield "_thnn_fused_gru_cell", _gru_cell
    yield "_thnn_fused_gru_cell_backward", _gru_cell_backward


def of_one_device() -> list[str]:
    """Names of operators whose tensors torch's kernels for CUDA all want on the device, also those of one element.

    The file from which torch's kernels are registered says so; others let a tensor of the host stand for a number.
    """
    found = importlib.util.find_spec("torchgen")
    path = Path(found.origin).with_name("packaged") / "ATen/native/native_functions.yaml" if found is not None else None
    if path is None or not path.exists():
        return []
    functions = path.read_text().split("\n- func: ")[1:]
    checked = [each for each in functions if "device_check: NoCheck" not in each and _OF_CUDA.search(each)]
    return ["aten::" + each.partition("(")[0] for each in checked]


_OF_CUDA = re.compile(r"^    [^#\n:]*\bCUDA\b[^\n:]*:|^  structured_delegate:", re.MULTILINE)


def _added(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product and a sum in the type of the result."""

    def added(c: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return function(c.to(dtype), a.to(dtype), b.to(dtype), beta=beta, alpha=alpha)

    return added


# --- scaled products --------------------------------------------------------------------------------------------------


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """The product of the scaled operands, computed in float64 and rounded once.

    Scales are of all of an operand, of rows of ``a`` and columns of ``b``, or of blocks along K: of 32 elements (E8M0)
    or 16 (E4M3), in cuBLAS's tiles of 128 rows and 4 scales, in which rows r, r + 32, r + 64, r + 96 are side by side.

    Args:
        a: [M, K] of 8-bit floats, or [M, K / 2] of pairs of E2M1.
        b: [K, N] or [K / 2, N] likewise, column-major.
        scale_a, scale_b: of float32, or of blocks.
        bias: [N]; ``scale_result``: that an 8-bit result is multiplied by.
        out_dtype: of the result; None: that of ``a``, with scales of blocks bfloat16.
        use_fast_accum: sums of a GPU may be less exact.
    """
    if _has_block_scales(a, scale_a):
        first, second, usual = _by_blocks(a, scale_a), _by_blocks(b.transpose(0, 1), scale_b).T, torch.bfloat16
    else:
        first, second = (each.to(torch.float64) * scale for each, scale in ((a, scale_a), (b, scale_b)))
        usual = a.dtype
    product = first @ second
    if bias is not None:
        product = product + bias
    if scale_result is not None:
        product = product * scale_result
    return product.to(usual if out_dtype is None else out_dtype)


def _has_block_scales(a: Tensor, scale_a: Tensor) -> bool:
    rows, columns = a.shape[0], a.shape[1] * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1)
    length = _ELEMENTS_OF_SCALE.get(scale_a.dtype)
    return length is not None and scale_a.numel() == _padded_scales(rows, columns, length)


def _padded_scales(rows: int, columns: int, length: int) -> int:
    tiles = -(-rows // _TILE_ROWS) * -(-columns // (length * _TILE_SCALES))
    return tiles * _TILE_ROWS * _TILE_SCALES


def _by_blocks(operand: Tensor, scales: Tensor) -> Tensor:
    values = _values(operand.contiguous())
    length = _ELEMENTS_OF_SCALE[scales.dtype]
    rows, columns = values.shape
    tiles = scales.contiguous().view(-1).to(torch.float64)
    tiles = tiles.view(-(-rows // _TILE_ROWS), -(-columns // (length * _TILE_SCALES)), 32, 4, _TILE_SCALES)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(tiles.shape[0] * _TILE_ROWS, tiles.shape[1] * _TILE_SCALES)
    return values * plain.repeat_interleave(length, 1)[:rows, :columns]


def _values(operand: Tensor) -> Tensor:
    if operand.dtype != torch.float4_e2m1fn_x2:
        return operand.to(torch.float64)
    pairs = operand.view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64, device=operand.device)
    return table[codes.int()]


# --- cells of recurrent networks --------------------------------------------------------------------------------------


def _lstm_cell(
    x: Tensor, h: Tensor, c: Tensor, bias_x: Tensor | None = None, bias_h: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(new h, new c, gates) of products ``x`` and ``h`` [batch, 4 * hidden] and a state ``c`` [batch, hidden]."""
    gates = x + h if bias_x is None else x + bias_x + h + bias_h
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * c + i * g
    return o * new.tanh(), new, torch.cat((i, f, g, o), 1)


def _lstm_cell_backward(
    grad_h: Tensor | None, grad_c: Tensor | None, c: Tensor, new: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates, of ``c`` and of a bias."""
    i, f, g, o = gates.chunk(4, 1)
    t = new.tanh()
    grad_h = torch.zeros_like(t) if grad_h is None else grad_h
    d = grad_h * o * (1 - t * t) + (0 if grad_c is None else grad_c)
    grads = torch.cat((d * g * i * (1 - i), d * c * f * (1 - f), d * i * (1 - g * g), grad_h * t * o * (1 - o)), 1)
    return grads, d * f, grads.sum(0) if has_bias else torch.empty(0, device=grads.device)


def _gru_cell(
    x: Tensor, h: Tensor, state: Tensor, bias_x: Tensor | None = None, bias_h: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(new state, what backward needs) of products ``x`` and ``h`` [batch, 3 * hidden] and a state [batch, hidden]."""
    if bias_x is not None:
        x, h = x + bias_x, h + bias_h
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return n + z * (state - n), torch.cat((r, z, n, state, hn), 1)


def _gru_cell_backward(grad: Tensor, saved: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    """Gradients of both products, of the state and of both biases."""
    r, z, n, state, hn = saved.chunk(5, 1)
    dz, dn = grad * (state - n) * z * (1 - z), grad * (1 - z) * (1 - n * n)
    dr = dn * hn * r * (1 - r)
    x, h = torch.cat((dr, dz, dn), 1), torch.cat((dr, dz, dn * r), 1)
    none = torch.empty(0, device=grad.device)
    return x, h, grad * z, x.sum(0) if has_bias else none, h.sum(0) if has_bias else none
