"""Random calls, launches into guarded poison, and FP64 references for the tests on a GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from cute_kernels.config import PatchEmbedConfig
from cute_kernels.operations.base import Operation
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.runtime import gpu
from cute_kernels.plan import Plan
from cute_kernels.testing import data

POISON = data.POISON[torch.bfloat16]
"""Bits of a BF16 NaN that no arithmetic produces (the canonical NaN is 0x7FFF)."""

GUARD_ROWS = 256
"""Rows before and after the output, at least one tile, in which a write beyond the output would be seen."""

ACCUMULATION_ERROR = 2.0**-10
"""Bound of the accumulation error of FP8 WGMMA relative to ``sum_k |x| |w|``.

The tensor cores of SM90 align the products of an MMA to the largest exponent and keep fewer bits than FP32. On random
normal inputs these tests measured at most 4.9e-4 (just under 2^-11) on one H200; the bound is twice that.
"""

BF16_HALF_ULP = 2.0**-8
"""Largest relative error of rounding to BF16: half a unit of 8 bits of significand, relative to the lower end."""


def long_ways(monkeypatch: pytest.MonkeyPatch, operation: Operation) -> list[object]:
    """Gets the plan of each call of an operation that is not a remembered one."""
    plans: list[object] = []
    put = operation.repeated.put

    def watched(values, plan, *rest):
        plans.append(plan)
        put(values, plan, *rest)

    monkeypatch.setattr(operation.repeated, "put", watched)
    return plans


@dataclass(frozen=True)
class Call:
    """Arguments of one `patch_embed` on the GPU: ``x [B, S, K]``, ``weight [N, K]``, addends, combined scale."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    pos_embed: torch.Tensor | None
    scale: float | torch.Tensor

    @property
    def scale_value(self) -> float:
        return float(self.scale)

    def addend(self) -> torch.Tensor:
        """FP64 ``[S, N]``, ``[1, N]`` or ``[1, 1]``: the FP32 sum of bias and position, which is what a table holds."""
        zero = torch.zeros(1, 1, device=self.x.device)
        bias = zero if self.bias is None else self.bias.float()[None, :]
        return (bias + (zero if self.pos_embed is None else self.pos_embed.float())).double()


def random_call(
    images: int,
    positions: int,
    n: int,
    k: int,
    *,
    seed: int = 0,
    addends: str = "bias+pos",
    scale: str = "value",
    small_integers: bool = False,
) -> Call:
    """Fresh data on the current device.

    Args:
        images, positions, n, k: B, S, N, K.
        seed: of everything that is drawn.
        addends: any of "bias" and "pos" joined by "+", or "".
        scale: ``"value"`` or ``"pointer"`` (an FP32 tensor).
        small_integers: x and weight in -2..2, so that every partial sum needs at most 13 bits and is exact in any
            order; otherwise normal. The scale brings the product to the size of the addends either way.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        if small_integers:
            return torch.randint(-2, 3, shape, generator=generator, device="cuda").to(torch.float8_e4m3fn)
        return torch.randn(shape, generator=generator, device="cuda").to(torch.float8_e4m3fn)

    number = 0.7318 / k**0.5
    return Call(
        draw(images, positions, k),
        draw(n, k),
        torch.randn(n, generator=generator, device="cuda") if "bias" in addends else None,
        torch.randn(positions, n, generator=generator, device="cuda") if "pos" in addends else None,
        number if scale == "value" else torch.tensor([number], device="cuda"),
    )


DRY_RUN = False
"""Set by tests/gpu/conftest.py where the emulator takes the place of the device: sizes are then reduced."""


def _reduced(extent: int, most: int, tile: int) -> int:
    """``extent``, or in a dry run at most ``most``, of the same remainder modulo ``tile``."""
    if not DRY_RUN or extent <= most:
        return extent
    return most - (most - extent) % tile


def sized_rows(rows: int) -> int:
    """Rows of a call."""
    return _reduced(rows, 600, 256)


def sized(images: int, positions: int, n: int, k: int) -> tuple[int, int, int, int]:
    """The size of a patch embed: what is given, or in a dry run a few tiles of it."""
    positions = _reduced(positions, 300, 32)
    return _reduced(images, max(1, 600 // positions), 1), positions, _reduced(n, 264, 128), _reduced(k, 400, 128)


def sized_gemm(m: int, n: int, k: int) -> tuple[int, int, int]:
    """The size of a dense GEMM, likewise."""
    return _reduced(m, 600, 128), _reduced(n, 300, 64), _reduced(k, 300, 64)


def run_poisoned(
    call: Call, config: PatchEmbedConfig | None, *, sm_count: int | None = None
) -> tuple[torch.Tensor, Plan]:
    """``[B, S, N]`` of one launch into poison, and the plan; fails if the launch writes outside or leaves poison.

    ``sm_count`` plans for a part of the device.
    """
    prepared = PATCH_EMBED.prepared(
        x=call.x, weight=call.weight, bias=call.bias, pos_embed=call.pos_embed, scale_a=call.scale, config=config
    )
    plan = prepared.plan if sm_count is None else dataclasses.replace(prepared.plan, sm_count=sm_count)
    rows, n = prepared.operands.out.shape
    guarded = torch.full((rows + 2 * GUARD_ROWS, n), POISON, dtype=torch.int16, device=call.x.device)
    out = guarded[GUARD_ROWS : GUARD_ROWS + rows]
    gpu.launch(plan, prepared.operands.replace(out=out.view(torch.bfloat16)))
    torch.cuda.synchronize()
    for name, guard in (("before", guarded[:GUARD_ROWS]), ("after", guarded[-GUARD_ROWS:])):
        assert bool((guard == POISON).all()), f"wrote {name} the output"
    unwritten = int((out == POISON).sum())
    assert unwritten == 0, f"{unwritten} of {out.numel()} elements not written"
    return out.view(torch.bfloat16).view(prepared.output_shape), plan


def accumulation_error(call: Call, out: torch.Tensor, epilogue: str) -> float:
    """Largest error of the accumulation relative to ``sum_k |x| |w|``, after subtracting what BF16 rounding may cost.

    ``out`` is compared with ``scale * x @ weight^T + addend`` in FP64.
    """
    x, weight, scale = call.x.double(), call.weight.double(), call.scale_value
    product = scale * (x @ weight.T)
    expected = product + call.addend()
    error = (out.double() - expected).abs()
    assert bool(error.isfinite().all()), f"{int((~error.isfinite()).sum())} results are not finite"
    rounding = BF16_HALF_ULP * expected.abs()
    if epilogue == "bf16x2":
        rounding = rounding + BF16_HALF_ULP * (product.abs() + call.addend().abs()) * (1 + BF16_HALF_ULP)
    magnitude = scale * (x.abs() @ weight.abs().T)
    return float(((error - rounding) / magnitude.clamp_min(1e-30)).max())


def check_against_fp64(call: Call, out: torch.Tensor, epilogue: str, record_property) -> None:
    """Fails beyond `ACCUMULATION_ERROR`; records the figure."""
    error = accumulation_error(call, out, epilogue)
    record_property("accumulation error / sum |x| |w|", error)
    assert error <= ACCUMULATION_ERROR, f"accumulation error {error:.3g} of sum |x| |w|"
