"""Liger-Kernel's operators, in Triton, against torch, on small problems: for ``cute-kernels emulate``.

    pip install liger-kernel==0.8.5 triton packaging
    cute-kernels emulate --arch sm_90a tests/public_programs/liger_operators.py softmax

Without arguments all operators are run, forward and backward. Results are compared as quack_operators.py does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton_launches
from comparison import Comparison, main, normal

triton_launches.install()

PART = 1e-5


def both(
    to: Comparison, name: str, operator: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], *shapes: tuple
) -> None:
    """An operator and its reference on float32 tensors of these shapes, and both gradients."""
    inputs = [normal(*shape, dtype=torch.float32).requires_grad_() for shape in shapes]
    copies = [x.detach().cpu().clone().requires_grad_() for x in inputs]
    result, expected = operator(*inputs), plain(*copies)
    to.check(name, result, expected, PART)
    gradient = torch.randn(expected.shape)
    result.backward(gradient.to("cuda"))
    expected.backward(gradient)
    for number, (x, y) in enumerate(zip(inputs, copies), 1):
        to.check(f"{name}, gradient {number}", x.grad, y.grad, PART)


def run_softmax(to: Comparison) -> None:
    """Rows of 300."""
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    both(to, "softmax", LigerSoftmaxFunction.apply, lambda x: x.softmax(-1), (6, 300))


def run_rms_norm(to: Comparison) -> None:
    """With weight."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w

    both(to, "rms_norm", lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6), plain, (6, 256), (256,))


def run_layer_norm(to: Comparison) -> None:
    """With weight and bias."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    def plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (256,), w, b, 1e-6)

    both(to, "layer_norm", lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-6), plain, (6, 256), (256,), (256,))


def run_swiglu(to: Comparison) -> None:
    """SiLU of one factor."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    both(to, "swiglu", LigerSiLUMulFunction.apply, lambda a, b: torch.nn.functional.silu(a) * b, (6, 200), (6, 200))


def run_geglu(to: Comparison) -> None:
    """GELU, by tanh, of one factor."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    def plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(a, approximate="tanh") * b

    both(to, "geglu", LigerGELUMulFunction.apply, plain, (6, 200), (6, 200))


OPERATORS: dict[str, Callable[[Comparison], None]] = {
    "softmax": run_softmax,
    "rms_norm": run_rms_norm,
    "layer_norm": run_layer_norm,
    "swiglu": run_swiglu,
    "geglu": run_geglu,
}


if __name__ == "__main__":
    main(__doc__, OPERATORS)
