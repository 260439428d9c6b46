"""Derivatives of the operations: autograd of plain torch in float64 gives the same, or whoever asks is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

from cute_kernels import gemm, patch_embed, patch_embed_images, prepare_patch_weight
from cute_kernels.operations.base import dispatch_is_intercepted
from cute_kernels.operations.reference import patch_rows
from cute_kernels.operations.runtime.constants import DERIVED

Function = Callable[..., torch.Tensor]
Tensors = dict[str, torch.Tensor]
F = torch.nn.functional
_GENERATOR = torch.Generator().manual_seed(0)
_ACTIVATIONS: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=_GENERATOR).to(dtype)


# --- forward-mode derivatives, and what has none at all ---------------------------------------------------------------

ROWS, MATRIX, BIAS = _random(4, 64), _random(16, 64), _random(16, dtype=torch.float32)
POSITIONS, SCALE = _random(4, 16), torch.ones(1)
IMAGES, WEIGHT = _random(1, 3, 16, 16), prepare_patch_weight(_random(16, 3, 8, 8), precision="bf16")
NARROW = ROWS.to(torch.float8_e4m3fn), MATRIX.to(torch.float8_e4m3fn)

#: Function of one argument, and that argument.
FUNCTIONS: dict[str, tuple[Function, torch.Tensor]] = {
    "gemm a": (lambda a: gemm(a, MATRIX), ROWS),
    "gemm bias": (lambda bias: gemm(ROWS, MATRIX, bias=bias), BIAS),
    "gemm reference": (lambda a: gemm(a, MATRIX, backend="reference"), ROWS),
    "patch_embed weight": (lambda weight: patch_embed(ROWS, weight), MATRIX),
    "patch_embed pos_embed": (lambda pos: patch_embed(ROWS, MATRIX, BIAS, pos), POSITIONS),
    "patch_embed_images images": (lambda images: patch_embed_images(images, WEIGHT), IMAGES),
    "torch.ops": (lambda a: torch.ops.cute_kernels.gemm(a, MATRIX, *[None] * 9, "auto"), ROWS),
}
WITHOUT: dict[str, tuple[Function, torch.Tensor]] = {
    "a scale of rows": (lambda scale: patch_embed(ROWS, MATRIX, scale_a=scale), SCALE),
    "scale_b": (lambda scale: gemm(ROWS, MATRIX, scale_b=scale), SCALE),
    "FP8 rows": (lambda x: patch_embed(x, NARROW[1]), NARROW[0]),
    "FP8 b": (lambda b: gemm(NARROW[0], b), NARROW[1]),
}


def dual(function: Function, x: torch.Tensor) -> torch.Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def dual_and_gradient(function: Function, x: torch.Tensor) -> torch.Tensor | None:
    return dual(function, x.clone().requires_grad_())


def total(function: Function) -> Function:
    return lambda x: function(x).float().square().sum()


def compiled(function: Function) -> Function:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


FORWARD: dict[str, Callable[[Function, torch.Tensor], object]] = {
    "dual": dual,
    "dual and gradient": dual_and_gradient,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](torch.ones_like(x)),
    "vmap of jvp": lambda f, x: torch.func.vmap(lambda t: torch.func.jvp(f, (x,), (t,))[1])(torch.ones_like(x)[None]),
    "compiled, dual": lambda f, x: dual(torch.compile(f, backend="aot_eager"), x),
    "compiled, jvp": lambda f, x: torch.func.jvp(torch.compile(f, backend="aot_eager"), (x,), (torch.ones_like(x),)),
}


def _gradient(function: Function, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(function(y := x.clone().requires_grad_()), y)[0]


REVERSE: dict[str, Callable[[Function, torch.Tensor], torch.Tensor]] = {
    "autograd.grad": _gradient,
    "func.grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(()))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x[None])[0],
    "compiled": lambda f, x: _gradient(compiled(f), x),
}


@pytest.mark.parametrize("differentiate", FORWARD.values(), ids=FORWARD)
@pytest.mark.parametrize(("function", "x"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_forward_mode_is_refused(function: Function, x: torch.Tensor, differentiate) -> None:
    with pytest.raises(NotImplementedError, match=r"cute_kernels\.\w+ has no forward-mode derivative"):
        differentiate(function, x)


@pytest.mark.parametrize(("function", "x"), WITHOUT.values(), ids=WITHOUT)
def test_what_has_no_derivative_is_refused_backward(function: Function, x: torch.Tensor) -> None:
    out = function(x.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match=r"has no derivative for \w+ of torch.float.*under torch.no_grad"):
        out.float().sum().backward()


@pytest.mark.parametrize("differentiate", REVERSE.values(), ids=REVERSE)
@pytest.mark.parametrize(("function", "x"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_way_of_asking_gives_the_same(function: Function, x: torch.Tensor, differentiate) -> None:
    expected = _gradient(total(function), x)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(differentiate(total(function), x), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("function", "x"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_asks_for_no_derivative_is_computed(function: Function, x: torch.Tensor) -> None:
    """Of tensors without tangents inside a level, under transformations of other arguments, and by vmap's loop."""
    expected = function(x)
    with forward_ad.dual_level():
        assert torch.equal(function(x), expected)
    value, tangent = torch.func.jvp(lambda factor: function(x).float() * factor, (torch.ones(()),), (torch.ones(()),))
    assert torch.equal(value, expected.float()) and torch.equal(tangent, expected.float())
    gradient = torch.func.grad(lambda factor: (function(x).float() * factor).sum())(torch.ones(()))
    assert torch.allclose(gradient, expected.float().sum())
    assert torch.equal(torch.func.vmap(function)(torch.stack([x, x]))[1], expected)


def test_a_level_of_forward_mode_keeps_calls_on_a_gpu_off_the_short_way() -> None:
    assert not dispatch_is_intercepted()
    with forward_ad.dual_level():
        assert dispatch_is_intercepted()


# --- against autograd of plain torch in float64 -----------------------------------------------------------------------


def _check(ours: Function, plain: Function, tensors: Tensors, tolerance: float = 1e-2) -> None:
    """Derivatives of a random sum of the result's elements, for all tensors but integers, norm over norm."""
    mine = {name: value.clone().requires_grad_(value.is_floating_point()) for name, value in tensors.items()}
    exact = {
        name: value.double().requires_grad_() if value.is_floating_point() else value for name, value in tensors.items()
    }
    out, expected = ours(**mine), plain(**exact)
    assert out.shape == expected.shape
    direction = _random(*out.shape, dtype=out.dtype)
    out.backward(direction)
    expected.backward(direction.double())
    for name, value in mine.items():
        if value.is_floating_point():
            assert value.grad.dtype is value.dtype and value.grad.shape == value.shape
            error = (value.grad.double() - exact[name].grad).norm() / exact[name].grad.norm()
            assert error < tolerance, (name, float(error))


@pytest.mark.parametrize(
    ("activation", "backend"), [*((name, "reference") for name in ("none", *_ACTIVATIONS)), ("gelu", "emulator")]
)
def test_gemm(activation: str, backend: str) -> None:
    act = _ACTIVATIONS.get(activation, lambda x: x)
    tensors = {"a": _random(24, 64), "b": _random(40, 64) / 8, "bias": _random(40), "residual": _random(24, 40)}
    _check(
        lambda **t: gemm(**t, activation=activation, backend=backend, scale_a=0.5),
        lambda a, b, bias, residual: act(0.5 * a @ b.T + bias) + residual,
        tensors,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batched", [False, True])
def test_gemm_of_batches_with_scales(batched: bool, dtype: torch.dtype) -> None:
    a, b = _random(3, 16, 32, dtype=dtype), _random(*[3][: batched], 24, 32, dtype=dtype)
    by_row, by_column = torch.rand(48, 1) + 0.5, torch.rand(*[3][: batched], 1, 24) + 0.5
    rows = by_row.view(3, 16, 1)
    _check(
        lambda a, b: gemm(a, b, scale_a=rows if batched else by_row, scale_b=by_column, allow_tf32=True),
        lambda a, b: rows.double() * by_column.double() * (a @ b.mT),
        {"a": a, "b": b},
    )


def test_gradcheck_of_exact_sums() -> None:
    """Small integers have no rounding error: differences of an epilogue without activation are its derivatives."""
    a, b = torch.randint(-4, 5, (8, 8)).float(), torch.randint(-4, 5, (8, 8)).float()
    bias = torch.randint(-4, 5, (8,)).float()
    inputs = [value.requires_grad_() for value in (a, b, bias)]
    call = lambda a, b, bias: gemm(a, b, bias=bias, allow_tf32=True)  # noqa: E731
    assert torch.autograd.gradcheck(call, inputs, eps=0.5, atol=1e-5)
    assert torch.autograd.gradgradcheck(call, inputs, [torch.ones(8, 8, requires_grad=True)], eps=0.5, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_patch_embed(dtype: torch.dtype, backend: str) -> None:
    tensors = {"x": _random(3, 5, 48, dtype=dtype), "weight": _random(16, 48, dtype=dtype) / 8}
    tensors |= {"bias": _random(16), "pos_embed": _random(5, 16, dtype=torch.float32)}
    scale = torch.rand(1, 16) + 0.5
    _check(
        lambda **t: patch_embed(**t, scale_b=scale, backend=backend),
        lambda x, weight, bias, pos_embed: scale.double() * (x @ weight.T) + bias + pos_embed,
        tensors,
    )


def test_positions_by_index() -> None:
    index = torch.tensor([4, 0, 0, 2, 4, 1, 1, 1], dtype=torch.int32)
    pairs = torch.stack([index, index.flip(0) - 1], dim=1)
    tensors = {"x": _random(8, 32), "weight": _random(16, 32), "pos_embed": _random(5, 16)}
    _check(
        lambda **t: patch_embed(**t, pos_index=index),
        lambda x, weight, pos_embed: x @ weight.T + pos_embed[index.long()],
        tensors,
    )
    tensors["pos_embed"] = _random(2, 5, 16)
    kept = (pairs[:, 1] >= 0)[:, None]
    _check(
        lambda **t: patch_embed(**t, pos_index=pairs),
        lambda x, weight, pos_embed: x @ weight.T
        + pos_embed[0, index.long()]
        + pos_embed[1, pairs[:, 1].clamp(min=0).long()] * kept,
        tensors,
    )


@pytest.mark.parametrize("order", ["chw", "hwc"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("raw", [True, False])
def test_images_through_the_preparation(raw: bool, precision: str, order: str) -> None:
    """The parameter is FP32; pixels are near their mean, so that of sums over raw ones little would be left."""
    mean, std = [0.88, 0.9, 0.92], [0.02, 0.03, 0.05]
    weight = _random(16, 192, dtype=torch.float32) / 8
    images = torch.randint(220, 240, (2, 3, 24, 16), dtype=torch.uint8) if raw else _random(2, 3, 24, 16)
    tensors = {"images": images, "weight": weight, "bias": _random(16), "pos_embed": _random(6, 16)}

    def ours(images, weight, bias, pos_embed) -> torch.Tensor:
        prepared = prepare_patch_weight(weight, precision=precision, order=order, mean=mean, std=std)
        return patch_embed_images(images, prepared, bias, pos_embed)

    def plain(images, weight, bias, pos_embed) -> torch.Tensor:
        if raw:
            images = (images / 255.0 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        if order == "hwc":
            weight = weight.view(16, 8, 8, 3).permute(0, 3, 1, 2).flatten(1)
        return (patch_rows(images.double(), 8) @ weight.T + bias).view(2, 6, 16) + pos_embed

    _check(ours, plain, tensors)


def test_positions_of_an_integer_weight_train() -> None:
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    weight, pos = prepare_patch_weight(_random(16, 3, 8, 8)), _random(4, 16).requires_grad_()
    out = patch_embed_images(images, weight, None, pos)
    out.backward(torch.ones_like(out))
    assert torch.equal(pos.grad, torch.full_like(pos, 2))


def test_what_is_not_read_backward_is_not_kept() -> None:
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        patch_embed_images(IMAGES, WEIGHT, BIAS, POSITIONS.clone().requires_grad_())
        gemm(ROWS, MATRIX, bias=BIAS.clone().requires_grad_())
        assert not kept
        gemm(ROWS.clone().requires_grad_(), MATRIX)
    assert kept == [MATRIX.shape]


def test_a_training_call_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU once an optimiser has made a step: comparing weights there would make the host wait."""
    monkeypatch.setattr(DERIVED, "compares_on_gpu", True)
    before, entries = DERIVED.misses, len(DERIVED.entries)
    bias, pos = BIAS.clone(), POSITIONS.clone().requires_grad_()
    for _ in range(2):
        patch_embed(ROWS, MATRIX, bias, pos, backend="emulator").float().sum().backward()
    assert (DERIVED.misses, len(DERIVED.entries)) == (before, entries) and "_cute_kernels_record" not in vars(pos)


def test_losses_beside_plain_torch() -> None:
    """Some steps of an optimiser, in BF16: the plain module rounds as often, and comes as near to FP32."""
    torch.manual_seed(0)
    conv, images = torch.nn.Conv2d(3, 32, 8, stride=8), torch.randn(8, 3, 32, 32).bfloat16()
    target = torch.randn(8, 16, 32)

    def losses(run: Function, dtype: torch.dtype) -> torch.Tensor:
        layer = copy.deepcopy(conv).to(dtype)
        optimiser, found = torch.optim.SGD(layer.parameters(), lr=0.5), []
        for _ in range(20):
            loss = (run(layer, images.to(dtype)).float() - target).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
        return torch.tensor(found)

    def plain(layer, pixels) -> torch.Tensor:
        return layer(pixels).flatten(2).transpose(1, 2)

    def ours(layer, pixels) -> torch.Tensor:
        return patch_embed_images(pixels, prepare_patch_weight(layer.weight, precision="bf16"), layer.bias)

    exact, half, mine = losses(plain, torch.float32), losses(plain, torch.bfloat16), losses(ours, torch.bfloat16)
    assert exact[-1] < 0.8 * exact[0]
    assert (mine - exact).abs().max() <= 2 * (half - exact).abs().max()
