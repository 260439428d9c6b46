"""Tensor cores of the emulator against the package ``mmasim``, bit by bit, on operands in which rounding shows.

    python -m tests.emulator.mmasim_sums [--results N] [--only TEXT] [--seed N]

``mmasim`` is the model of P. Xie and others (arXiv 2511.10909), which they compared with GPUs of each generation. Every
row of `tests.emulator.machine.units.matrix.test_silicon.CASES` that it has too computes N results of single
instructions, from the operands of `tests.emulator.sum_inputs`: any bit pattern, near and far exponents, cancellation,
subnormal numbers, infinities and NaN. The exit status is 1 where one differs.

``make mmasim`` installs the package (extra ``verify``) and runs this.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic
from tests.emulator.machine.units.matrix.test_silicon import CASES, products
from tests.emulator.sum_inputs import NBYTES, STYLES, operands

ARCHITECTURES = {
    "sm_80": "Ampere", "sm_89": "Ada Lovelace", "sm_90": "Hopper", "sm_90a": "Hopper", "sm_100a": "Blackwell",
    "sm_120a": "RTX Blackwell",
}  # fmt: skip
#: Rows of A and of B in one instruction of each unit.
SHAPES = {"tcgen05": (128, 256), "wgmma": (64, 256), "mma": (16, 8)}
KINDS = {"tf32": "tf32", "f16": "f16", "bf16": "f16"}
_TORCH = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "f16": torch.float16, "bf16": torch.bfloat16,
    "tf32": torch.float32, "f32": torch.float32,
}  # fmt: skip
#: Results that are computed at once, which bounds the memory that mmasim takes.
ROWS, COLUMNS = 128, 256


def peer(unit: str, target: str, types: tuple[str, str], d_type: str) -> Callable[..., torch.Tensor]:
    """mmasim's dot products: A [..., K], B [..., K], C [...] -> D [...].

    Raises:
        AssertionError: mmasim does not have it.
    """
    models = importlib.import_module("mmasim.nv_ptx")  # not installed for the other tests
    (m, n), k = SHAPES[unit], 32 // NBYTES[types[0]]
    if unit == "tcgen05":
        kind = KINDS.get(types[0], "f8f6f4")
        model, name = models.TCGen05MMA, f"m{m}n{n}k{k}.kind::{kind}.{d_type}.{types[0]}.{types[1]}"
    elif unit == "wgmma":
        model, name = models.WGMMA, f"m{m}n{n}k{k}.{d_type}.{types[0]}.{types[1]}"
    else:
        model, name = models.MMA, f"m{m}n{n}k{k}.{d_type}.{types[0]}.{types[1]}.{d_type}"
    return model(ARCHITECTURES[target], name).dpa


def as_torch(patterns: np.ndarray, name: str) -> torch.Tensor:
    """Bit patterns of a type."""
    if name == "f16" and patterns.dtype == np.uint32:
        patterns = patterns.astype(np.uint16)  # C, of which a cell has 32 bits
    return torch.from_numpy(np.ascontiguousarray(patterns)).view(_TORCH[name])


def compare(case: tuple[str, str, tuple[str, str], str], results: int, seed: int) -> tuple[int, Counter[str], str]:
    """How many results were compared, how many differ of which style, and the first that does."""
    unit, target, types, d_type = case
    dot, sums = peer(*case), Arithmetic("silicon", target).sums(unit, types[0], d_type)
    rng = np.random.default_rng([seed, *map(ord, f"{case}")])
    differ: Counter[str] = Counter()
    done, first = 0, ""
    for number in range(max(len(STYLES), math.ceil(results / (ROWS * COLUMNS)))):
        style = STYLES[number % len(STYLES)]
        a, b, c = operands(rng, types, d_type, style, 1, ROWS, COLUMNS)
        got = products(a, b, c, types, d_type, sums)[0]
        left, right = as_torch(a[0], types[0])[:, None], as_torch(b[0], types[1])[None]
        shape = (ROWS, COLUMNS, left.shape[-1])
        want = dot(left.expand(shape), right.expand(shape), as_torch(c[0], d_type)).contiguous()
        bits = want.view(torch.int16 if d_type == "f16" else torch.int32).numpy().astype(np.int64)
        bits &= 0xFFFF if d_type == "f16" else 0xFFFFFFFF
        wrong = np.argwhere(got != bits)
        done += got.size
        differ[style] += len(wrong)
        if len(wrong) and not first:
            i, j = wrong[0]
            first = f"{style}: {got[i, j]:#x}, mmasim {bits[i, j]:#x}; A {a[0, i].tolist()}, B {b[0, j].tolist()}, "
            first += f"C {int(c[0, i, j]):#x}"
    return done, differ, first


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.mmasim_sums", description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=int, default=1_000_000, help="of each type and instruction (default: 10^6)")
    parser.add_argument("--only", default="", metavar="TEXT", help="what a case's line contains, as tcgen05")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    if parsed.results < 1:
        parser.error(f"--results {parsed.results}: at least 1")
    cases = [("{} {} {} x {} -> {}".format(*case[:2], *case[2], case[3]), case) for case in CASES]
    chosen = [(text, case) for text, case in cases if parsed.only in text]
    if not chosen:
        parser.error(f"--only {parsed.only}: in none of {', '.join(text for text, _ in cases)}")
    total = 0
    for text, case in chosen:
        done, differ, first = compare(case, parsed.results, parsed.seed)
        total += sum(differ.values())
        print(f"{text}: {sum(differ.values())} of {done} differ{' ' + str(dict(differ)) if first else ''}", flush=True)
        if first:
            print(f"  first: {first}", flush=True)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
