"""quack's operators against torch, on small problems: a program for a GPU, and for ``cute-kernels emulate``.

    pip install quack-kernels==0.6.5 triton
    QUACK_CACHE_ENABLED=0 cute-kernels emulate --arch sm_90a tests/public_programs/quack_operators.py softmax gemm

Without arguments all operators are run. Each prints the largest difference from torch's result in float32, forward and
backward, in units of what is allowed: the machine epsilon of the result's type times the expected element's magnitude,
plus a part of the largest magnitude for sums. The program fails if that exceeds 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from comparison import Comparison, main, normal

EPSILON = 1e-6


def run_softmax(to: Comparison) -> None:
    """Rows of 512, and of 24,576 over a cluster of CTAs; backward."""
    from quack.softmax import softmax

    for rows, columns in ((8, 512), (2, 24_576)):
        x, dy = normal(rows, columns).requires_grad_(), normal(rows, columns)
        y = softmax(x)
        y.backward(dy)
        reference = x.detach().cpu().float().requires_grad_()
        expected = torch.softmax(reference, -1)
        expected.backward(dy.cpu().float())
        to.check("softmax", y.detach(), expected.detach())
        to.check("softmax, gradient", x.grad, reference.grad, 2e-3)


def run_rmsnorm(to: Comparison) -> None:
    """With weight; backward for both."""
    from quack.rmsnorm import rmsnorm

    x, dy = normal(8, 1024).requires_grad_(), normal(8, 1024)
    weight = normal(1024, dtype=torch.float32).requires_grad_()
    y = rmsnorm(x, weight, eps=EPSILON)
    y.backward(dy)
    a, w = (t.detach().cpu().float().requires_grad_() for t in (x, weight))
    expected = a * torch.rsqrt((a * a).mean(-1, keepdim=True) + EPSILON) * w
    expected.backward(dy.cpu().float())
    to.check("rmsnorm", y.detach(), expected.detach())
    to.check("rmsnorm, gradient of x", x.grad, a.grad, 2e-3)
    to.check("rmsnorm, gradient of weight", weight.grad, w.grad)


def run_layernorm(to: Comparison) -> None:
    """With weight and bias, and what backward needs."""
    from quack.rmsnorm import layernorm_fwd

    x, weight, bias = normal(8, 1024), normal(1024, dtype=torch.float32), normal(1024, dtype=torch.float32)
    y, rstd, mean = layernorm_fwd(x, weight, bias, EPSILON, return_rstd=True, return_mean=True)
    a = x.cpu().float()
    to.check("layernorm", y, torch.nn.functional.layer_norm(a, (1024,), weight.cpu(), bias.cpu(), EPSILON))
    to.check("layernorm, mean", mean, a.mean(-1))
    to.check("layernorm, 1 / deviation", rstd, torch.rsqrt(a.var(-1, correction=0) + EPSILON))


def run_cross_entropy(to: Comparison) -> None:
    """Of each row, one of them ignored; backward."""
    from quack.cross_entropy import cross_entropy

    x = normal(8, 2048).requires_grad_()
    target = torch.randint(0, 2048, (8,), device="cuda")
    target[3] = -100
    loss = cross_entropy(x, target, reduction="none")
    loss.sum().backward()
    reference = x.detach().cpu().float().requires_grad_()
    expected = torch.nn.functional.cross_entropy(reference, target.cpu(), reduction="none")
    expected.sum().backward()
    to.check("cross_entropy", loss.detach(), expected.detach())
    to.check("cross_entropy, gradient", x.grad, reference.grad, 2e-3)


def run_topk(to: Comparison) -> None:
    """Values and indices, which are unique: every row is a permutation."""
    from quack.topk import topk

    x = torch.stack([torch.randperm(256) for _ in range(8)]).to("cuda", torch.float32)
    values, indices = topk(x, 16)
    expected, where = torch.topk(x.cpu(), 16, dim=-1)
    to.check("topk, values", values, expected)
    to.equal("topk, indices", indices, where)


def run_gemm(to: Comparison) -> None:
    """Plain, batched, with bias, with an addend and a factor, with an activation."""
    from quack import gemm_interface as interface

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.cpu().float() @ b.cpu().float()

    a, b = normal(256, 192), normal(320, 192).mT
    to.check("gemm", interface.gemm(a, b, tuned=False), product(a, b))
    bias = normal(320, dtype=torch.float32)
    to.check("gemm with bias", interface.gemm(a, b, bias=bias, tuned=False), product(a, b) + bias.cpu())
    c = normal(256, 320)
    expected = 2 * product(a, b) + c.cpu().float()
    to.check("gemm_add", interface.gemm_add(a, b, c, alpha=2.0, tuned=False), expected)
    _, activated = interface.gemm_act(a, b, activation="relu", tuned=False)
    to.check("gemm_act, relu", activated, product(a, b).relu())
    batched, other = normal(3, 128, 64), normal(3, 128, 64).mT
    to.check("gemm, 3 products", interface.gemm(batched, other, tuned=False), product(batched, other))


OPERATORS: dict[str, Callable[[Comparison], None]] = {
    "softmax": run_softmax,
    "rmsnorm": run_rmsnorm,
    "layernorm": run_layernorm,
    "cross_entropy": run_cross_entropy,
    "topk": run_topk,
    "gemm": run_gemm,
}


if __name__ == "__main__":
    main(__doc__, OPERATORS)
