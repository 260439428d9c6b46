"""FlashAttention-4's operators against attention in float32: for a GPU, and for ``cute-kernels emulate``.

    pip install flash-attn-4==4.0.0b36 triton
    QUACK_CACHE_ENABLED=0 cute-kernels emulate --arch sm_90a tests/public_programs/flash_attention_4.py forward

Without arguments all operators are run. Results are compared as quack_operators.py does, with a larger part of the
largest magnitude: probabilities and the gradients of scores are rounded to BF16 between two products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from comparison import Comparison, main, normal
from flash_attn.cute.interface import flash_attn_func

PART = 8e-3


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention in float32 of [batch, length, heads, width], K and V repeated for groups of heads of Q."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) * q.shape[-1] ** -0.5
    if causal:
        rows, columns = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(rows, columns).triu(columns - rows + 1).bool(), float("-inf"))
    return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v)


def attend(to: Comparison, name: str, *, width: int, causal: bool = False, groups: int = 1, backward: bool = False):
    """160 queries, 224 keys, two heads of Q."""
    q = normal(1, 160, 2, width)
    k, v = (normal(1, 224, 2 // groups, width) for _ in range(2))
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]
    plain = [x.detach().cpu().float().requires_grad_(backward) for x in inputs]
    out = flash_attn_func(*inputs, causal=causal)
    out = out[0] if isinstance(out, tuple) else out
    expected = reference(*plain, causal)
    to.check(name, out, expected, PART)
    if backward:
        do = normal(*out.shape)
        out.backward(do)
        expected.backward(do.cpu().float())
        for letter, x, y in zip("QKV", inputs, plain):
            to.check(f"{name}, gradient of {letter}", x.grad, y.grad, PART)


OPERATORS: dict[str, Callable[[Comparison], None]] = {
    "forward": lambda to: attend(to, "forward", width=128),
    "forward-64": lambda to: attend(to, "forward, 64", width=64),
    "causal": lambda to: attend(to, "causal", width=128, causal=True),
    "groups": lambda to: attend(to, "groups of heads", width=128, groups=2),
    "backward": lambda to: attend(to, "backward", width=128, backward=True),
    "backward-64": lambda to: attend(to, "backward, 64", width=64, backward=True),
    "backward-causal": lambda to: attend(to, "causal backward", width=128, causal=True, backward=True),
}


if __name__ == "__main__":
    main(__doc__, OPERATORS)
