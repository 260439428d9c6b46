"""Derivatives of the operations: there are none, and whoever asks for one is told so instead of getting zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

from cute_kernels import gemm, patch_embed, patch_embed_images, prepare_patch_weight
from cute_kernels.operations.base import dispatch_is_intercepted

Function = Callable[[torch.Tensor], torch.Tensor]
_GENERATOR = torch.Generator().manual_seed(0)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.rand(*shape, generator=_GENERATOR).to(dtype)


ROWS, MATRIX, BIAS = _random(4, 64), _random(16, 64), _random(16, dtype=torch.float32)
POSITIONS, SCALE = _random(4, 16), torch.ones(1)
IMAGES, WEIGHT = _random(1, 3, 16, 16), prepare_patch_weight(_random(16, 3, 8, 8), precision="bf16")

#: Function of one argument, and that argument.
FUNCTIONS: dict[str, tuple[Function, torch.Tensor]] = {
    "gemm a": (lambda a: gemm(a, MATRIX), ROWS),
    "gemm b": (lambda b: gemm(ROWS, b), MATRIX),
    "gemm bias": (lambda bias: gemm(ROWS, MATRIX, bias=bias), BIAS),
    "gemm reference": (lambda a: gemm(a, MATRIX, backend="reference"), ROWS),
    "patch_embed x": (lambda x: patch_embed(x, MATRIX), ROWS),
    "patch_embed weight": (lambda weight: patch_embed(ROWS, weight), MATRIX),
    "patch_embed pos_embed": (lambda pos: patch_embed(ROWS, MATRIX, BIAS, pos), POSITIONS),
    "patch_embed scale_a": (lambda scale: patch_embed(ROWS, MATRIX, scale_a=scale), SCALE),
    "patch_embed_images images": (lambda images: patch_embed_images(images, WEIGHT), IMAGES),
    "patch_embed_images bias": (lambda bias: patch_embed_images(IMAGES, WEIGHT, bias), BIAS),
    "torch.ops": (lambda a: torch.ops.cute_kernels.gemm(a, MATRIX, *[None] * 9, "auto"), ROWS),
}


def dual(function: Function, x: torch.Tensor) -> torch.Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def dual_and_gradient(function: Function, x: torch.Tensor) -> torch.Tensor | None:
    return dual(function, x.clone().requires_grad_())


def total(function: Function) -> Function:
    return lambda x: function(x).float().sum()


def compiled(function: Function) -> Function:
    return torch.compile(function, backend="aot_eager")


FORWARD: dict[str, Callable[[Function, torch.Tensor], object]] = {
    "dual": dual,
    "dual and gradient": dual_and_gradient,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](torch.ones_like(x)),
    "vmap of jvp": lambda f, x: torch.func.vmap(lambda t: torch.func.jvp(f, (x,), (t,))[1])(torch.ones_like(x)[None]),
    "compiled, dual": lambda f, x: dual(compiled(f), x),
    "compiled, jvp": lambda f, x: torch.func.jvp(compiled(f), (x,), (torch.ones_like(x),)),
}
REVERSE: dict[str, Callable[[Function, torch.Tensor], object]] = {
    "backward": lambda f, x: total(f)(x.clone().requires_grad_()).backward(),
    "autograd.grad": lambda f, x: torch.autograd.grad(total(f)(y := x.clone().requires_grad_()), y),
    "func.grad": lambda f, x: torch.func.grad(total(f))(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(total(f))(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(total(f)))(x[None]),
    "compiled, backward": lambda f, x: compiled(total(f))(x.clone().requires_grad_()).backward(),
}


@pytest.mark.parametrize("differentiate", FORWARD.values(), ids=FORWARD)
@pytest.mark.parametrize(("function", "x"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_forward_mode_is_refused(function: Function, x: torch.Tensor, differentiate) -> None:
    with pytest.raises(NotImplementedError, match=r"cute_kernels\.\w+ has no forward-mode derivative"):
        differentiate(function, x)


@pytest.mark.parametrize("differentiate", REVERSE.values(), ids=REVERSE)
@pytest.mark.parametrize(("function", "x"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_reverse_mode_is_refused(function: Function, x: torch.Tensor, differentiate) -> None:
    # A compiler that traces backward wraps the error.
    with pytest.raises((NotImplementedError, RuntimeError), match="has no backward: call it under torch.no_grad"):
        differentiate(function, x)


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
