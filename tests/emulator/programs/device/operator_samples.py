"""A program: torch's own samples of its operators on "cuda", with results and gradients of the CPU beside them.

``operator_samples.py --drawn 60 --seed 0`` takes some operators, ``--part 2 --of 8`` an eighth of them. Prints a line
for each that differs, and how many were compared.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import types
import unittest
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

SAMPLES = 4
NOT_WRITTEN = ("empty", "new_empty", "resize_")
"""Parts of names of operators that leave memory as it was."""
LEFT_OUT = {
    *("sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"),  # there are no sparse tensors on the emulated device
    "tensor_split",  # wants its indices on the host, as on a GPU
    "as_strided.partial_views",  # reads beyond what is moved to the device
    "nn.functional.layer_norm",  # of one number: what is divided by its variance, 0, is the error of rounding
}
"""Operators without "jiterator" in their names, which compile CUDA C++."""


def operators() -> dict[str, object]:
    """torch's samples, by name. Their module wants a base class of its test cases from a package of its own."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    named = {f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}": op for op in op_db}
    usable = {name: op for name, op in named.items() if torch.float32 in op.dtypes and "jiterator" not in name}
    return {name: op for name, op in usable.items() if name not in LEFT_OUT}


def to_device(value: object) -> object:
    """The same arguments on the device, with leaves of their own."""
    moved = tree_map_only(torch.Tensor, lambda t: t.detach().cuda().requires_grad_(t.requires_grad), value)
    if isinstance(moved, dict) and "device" in moved:
        moved["device"] = "cuda"
    return tree_map_only(torch.device, lambda each: torch.device("cuda"), moved)


def tensors(value: object) -> list[torch.Tensor]:
    return [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor)]


def run(op: Callable[..., object], given: tuple) -> list[torch.Tensor | None]:
    """Results of a call, and gradients of its arguments where there are any."""
    torch.manual_seed(7)
    first, args, kwargs = given
    results = tensors(op(first, *args, **kwargs))
    leaves = [each for each in tensors(given) if each.requires_grad and each.is_leaf]
    outputs = [each for each in results if each.requires_grad]
    if not leaves or not outputs:
        return results
    total = sum((each.abs() if each.is_complex() else each).to(torch.float64).sum() for each in outputs)
    return results + list(torch.autograd.grad(total, leaves, allow_unused=True))


def difference(name: str, op: object) -> str:
    """What differs first between the two devices, or ""."""
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    for number, sample in enumerate(itertools.islice(samples, SAMPLES)):
        given = sample.input, sample.args, sample.kwargs
        try:
            moved = tuple(map(to_device, given))
            expected, found = run(op, given), run(op, moved)
            for i, (wanted, made) in enumerate(zip(expected, found, strict=True)):
                if wanted is None or made is None:
                    assert wanted is made, f"tensor {i} is {made} instead of {wanted}"
                    continue
                assert made.is_cuda and made.shape == wanted.shape and made.dtype == wanted.dtype, f"tensor {i}: {made}"
                if not any(part in name for part in NOT_WRITTEN):
                    torch.testing.assert_close(made.cpu(), wanted, equal_nan=True)
        except Exception as error:
            return f"sample {number}: {type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drawn", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    known = operators()
    names = sorted(known)[chosen.part :: chosen.of]
    if chosen.drawn:
        names = random.Random(chosen.seed).sample(names, chosen.drawn)
    for name in names:
        if found := difference(name, known[name]):
            print(f"{name}: {found}", flush=True)
    print(f"{len(names)} operators")


if __name__ == "__main__":
    main()
