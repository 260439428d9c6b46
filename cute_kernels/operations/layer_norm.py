"""LayerNorm of uint8 rows and the linear layer behind it, as one product of integers.

With ``rstd = 1 / sqrt(variance + eps)`` of a row x, and g and h the weight and bias of the norm,

    linear(norm(x)) = rstd * (x - mean(x)) @ (g W).T + (b + W h)

and ``(x - mean(x)) @ w = x @ (w - mean(w))``. So the rows of ``g W`` are centred, and rounded to integers whose sum is
exactly 0: then the mean drops out exactly, whatever it is, and `cute_kernels.gemm` computes the rest with ``rstd`` as
the multiplier of a row. What rounding a weight adds is multiplied by a pixel's distance from the row's mean.
"""

import functools
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_kernels.config import GemmConfig, longest_row
from cute_kernels.operations import reference
from cute_kernels.operations.arguments import ON_DEVICE, Backend, choose_backend
from cute_kernels.operations.base import ROW_BYTES, define_operator, launch
from cute_kernels.operations.gemm import gemm
from cute_kernels.operations.patch_weight import to_integers
from cute_kernels.operations.runtime.devices import device_facts
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.scales import fp32
from cute_kernels.plan.base import ARCHS
from cute_kernels.plan.layer_norm import LayerNormScalePlan, LayerNormScaleProblem, plan_layer_norm_scale
from cute_kernels.plan.registry import GEMM

_OUT_TYPES = (torch.bfloat16, torch.float16, torch.float32)

_CHUNK_ELEMENTS = 1 << 22
"""Bounds the float64 temporaries of a preparation."""

_ROUNDING = 2.0**-30
"""Weights that differ by less are equal: below, steps of 16 bits come near to what float64 rounds in a mean."""


@dataclass(frozen=True, eq=False)
class LayerNormWeight:
    """A LayerNorm and the linear layer behind it, made by `prepare_layer_norm_weight` for `layer_norm_linear`.

    Attributes:
        values: ``[N, K]`` int8; every row's sum is 0.
        scale: ``[1, N]`` float32, their multipliers.
        bias: ``[N]`` float32.
        eps: of the norm, in units of squared pixels of 0 to 255.
    """

    values: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor
    eps: float

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> "LayerNormWeight":
        """Moves and never casts."""
        device = fn(self.bias).device
        return LayerNormWeight(*(each.to(device) for each in (self.values, self.scale, self.bias)), self.eps)


def prepare_layer_norm_weight(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    divisor: float = 255.0,
) -> LayerNormWeight:
    """Folds a LayerNorm over uint8 pixels into the linear layer behind it, for `cute_kernels.layer_norm_linear`.

    Args:
        weight: ``[N, K]`` of the Linear, a floating-point type; K is a multiple of 16, at most 65,792.
        bias: ``[N]`` of the Linear, or None.
        norm_weight, norm_bias: ``[K]`` of the LayerNorm, or None.
        eps: of the LayerNorm, of what the model gives it.
        divisor: what the model divides pixels by before the norm.

    Returns:
        The prepared weight, on the device of ``weight``: ``norm_weight * weight``, centred in float64 and rounded to
        multiples of the feature's scale, ``max|w| / 127``. Where the rounded ones of a feature sum to d and
        not to 0, the d of them that rounding moved furthest that way are rounded the other way.

    Raises:
        TypeError: an argument of the wrong type or element type.
        ValueError: a wrong shape, device or value; NaN or infinity; a feature whose scale leaves FP32's range.
    """
    _check_tensor("weight", weight, None, weight)
    n, k = weight.shape
    most = longest_row("uint8")
    if k % ROW_BYTES or not ROW_BYTES <= k <= most:
        raise ValueError(f"weight has K = {k}: must be multiples of {ROW_BYTES} up to {most}")
    for name, value, extent in (("bias", bias, n), ("norm_weight", norm_weight, k), ("norm_bias", norm_bias, k)):
        if value is not None:
            _check_tensor(name, value, extent, weight)
    pixel_eps = eps_of_pixels(_positive("eps", eps), _positive("divisor", divisor), k)
    if pixel_eps is None:
        raise ValueError(f"eps = {eps} with divisor = {divisor} and K = {k} is no normal number in FP32")
    step = max(1, _CHUNK_ELEMENTS // k)
    parts = [_features(rows, norm_weight, norm_bias) for rows in weight.detach().split(step)]
    integers, scale, shift = map(torch.cat, zip(*parts, strict=True))
    total = shift if bias is None else shift + bias.detach().to(torch.float64)
    if not bool(torch.isfinite(total.to(torch.float32)).all()):
        raise ValueError("bias or norm_bias has NaN, infinity or what is beyond FP32: must be finite numbers")
    return LayerNormWeight(integers, scale[None], total.to(torch.float32), pixel_eps)


def eps_of_pixels(eps: float, divisor: float, k: int) -> float | None:
    """``eps`` in units of squared pixels of 0 to 255; None where K^2 times that is no normal number of FP32. ``eps``,
    ``divisor``: as of `prepare_layer_norm_weight`; ``k``: pixels of a row."""
    scaled = eps * (divisor * divisor)  # a power would overflow with an error of its own
    fp32_range = torch.finfo(torch.float32)
    return scaled if fp32_range.tiny <= k * k * scaled <= fp32_range.max else None


def layer_norm_linear(
    x: torch.Tensor,
    weight: LayerNormWeight,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """``linear(layer_norm(x))`` of uint8 rows, the same bits on every device: sums are exact integers.

    `cute_kernels.operations.reference.layer_norm_scale` says what a row is multiplied by, which a small kernel finds;
    the products are those of `cute_kernels.gemm`: ``fma(sum, fp32(row * scale), bias)``, with one rounding to FP32,
    then one to ``out_dtype``. A row of equal pixels, padding among them, gives ``bias``.

    Args:
        x: ``[.., K]`` uint8.
        weight: of `cute_kernels.prepare_layer_norm_weight`.
        out_dtype: bfloat16, float16 or float32.
        config, backend: as for `cute_kernels.gemm`.

    Returns:
        ``[.., N]`` in ``out_dtype``, contiguous. There are no derivatives.

    Raises:
        TypeError: an argument of the wrong type or element type.
        ValueError: a wrong shape, device, backend or config value.
        NotImplementedError: a device without a kernel.
    """
    if not isinstance(weight, LayerNormWeight):
        raise TypeError(f"weight is {type(weight).__name__}: must be what prepare_layer_norm_weight makes")
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is {type(x).__name__}: must be torch.Tensor")
    if x.dtype is not torch.uint8 or x.layout is not torch.strided:
        raise TypeError(f"x has dtype {x.dtype} and layout {x.layout}: must be strided tensors of torch.uint8")
    n, k = weight.values.shape
    if not x.dim() or x.shape[-1] != k:
        raise ValueError(f"x has shape {list(x.shape)}: must be [.., {k}]")
    if x.device != weight.bias.device:
        raise ValueError(f"x is on {x.device} and weight is on {weight.bias.device}: they must be on one device")
    if out_dtype not in _OUT_TYPES:
        raise ValueError(f"out_dtype = {out_dtype}: must be one of {', '.join(map(str, _OUT_TYPES))}")
    rows = x.reshape(-1, k).contiguous()
    arch = GEMM.kinds.get(type(config), next(iter(GEMM.kernels)))
    row_scale = torch.ops.cute_kernels.layer_norm_scale(rows, weight.eps, backend, arch)
    out = gemm(
        rows, weight.values, scale_a=row_scale, scale_b=weight.scale, bias=weight.bias, out_dtype=out_dtype,
        config=config, backend=backend
    )
    return out.view(*x.shape[:-1], n)


def _features(
    weight: torch.Tensor, norm_weight: torch.Tensor | None, norm_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int8 integers of some rows of the layer's weight, their multipliers, and what ``norm_bias`` becomes."""
    wide = weight.to(torch.float64)
    integers, scale = _balanced(_centred(wide if norm_weight is None else wide * norm_weight.detach()))
    shift = torch.zeros_like(wide[:, 0]) if norm_bias is None else wide @ norm_bias.detach().to(torch.float64)
    return integers.to(torch.int8), scale, shift


def _centred(rows: torch.Tensor) -> torch.Tensor:
    """Rows less their means; of equal numbers zeros, and not what rounding leaves of them."""
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("weight or norm_weight has NaN or infinity: must be finite numbers")
    centred = rows - rows.mean(1, keepdim=True)
    largest, left = (each.abs().amax(1, keepdim=True) for each in (rows, centred))
    return torch.where(left > _ROUNDING * largest, centred, 0.0)


def _balanced(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 integers whose rows sum to 0, and the multiplier of each row, of ``rows`` that do so already.

    Of d too many, at least ``2 * d`` were rounded up, none of them by more than a half: so the d that are furthest from
    what they were lie within `LARGEST` afterwards, too.
    """
    integers, scale = to_integers(rows)
    excess = integers.sum(1, keepdim=True)
    count, sign = excess.abs(), excess.sign()
    moved = (integers - rows / scale.to(torch.float64)[:, None]) * sign
    furthest = moved.topk(max(1, int(count.max())), dim=1).values.gather(1, (count.to(torch.int64) - 1).clamp(min=0))
    # Of equal ones the first, on every device.
    beyond, equal = moved > furthest, moved == furthest
    chosen = beyond | (equal & (equal.cumsum(1) <= count - beyond.sum(1, keepdim=True)))
    return integers - torch.where(chosen, sign, 0.0), scale


def _check_tensor(name: str, value: object, extent: int | None, weight: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {type(value).__name__}: must be torch.Tensor")
    if value.layout is not torch.strided or not value.dtype.is_floating_point or value.itemsize < 2 or value.is_meta:
        allowed = "a strided tensor with values, of torch.float32, torch.float64, torch.bfloat16 or torch.float16"
        raise TypeError(f"{name} has dtype {value.dtype} and layout {value.layout}: must be {allowed}")
    if extent is None and (value.dim() != 2 or not value.shape[0]):
        raise ValueError(f"{name} has shape {list(value.shape)}: must be [N, K]")
    if extent is not None and tuple(value.shape) != (extent,):
        raise ValueError(f"{name} has shape {list(value.shape)}: must be [{extent}]")
    if value.device != weight.device:
        raise ValueError(f"{name} is on {value.device} and weight is on {weight.device}: they must be on one device")


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {type(value).__name__}: must be a number")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} = {value}: must be finite and greater than 0")
    return float(value)


# --- what rows are multiplied by -------------------------------------------------------------------------------------

def _row_scale(rows: torch.Tensor, eps: float, backend: Backend, arch: str) -> torch.Tensor:
    executor = choose_backend(rows.device, backend)
    if executor == "reference" or not rows.shape[0]:
        return reference.layer_norm_scale(rows, eps)
    if executor in ON_DEVICE:
        arch, _ = device_facts(rows.device.index)
    m, k = rows.shape
    if rows.data_ptr() % ROW_BYTES:
        rows = rows.clone()
    out = torch.empty(m, 1, dtype=torch.float32, device=rows.device)
    operands = Operands(x=rows, addend=fp32(k * k * eps), scale=out)
    launch(executor, _plan(m, k, arch), operands)
    return out


@functools.lru_cache(maxsize=1024)
def _plan(m: int, k: int, arch: str) -> LayerNormScalePlan:
    return plan_layer_norm_scale(LayerNormScaleProblem(m, k), ARCHS[arch])


define_operator(
    "layer_norm_scale",
    "Tensor rows, float eps, str backend, str arch",
    _row_scale,
    lambda rows, eps, backend, arch: rows.new_empty(rows.shape[0], 1, dtype=torch.float32),
)
