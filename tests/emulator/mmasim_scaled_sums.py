"""Block scaling and elements of four and six bits against the package ``mmasim``, bit by bit.

    python -m tests.emulator.mmasim_scaled_sums [--results N] [--only TEXT] [--seed N]

As `tests.emulator.mmasim_sums`, with operands of `tests.emulator.machine.units.matrix.test_scaled_products`. NaN and
infinities are left out: the tests compare them with the rules.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import numpy as np
import torch

from cute_kernels.emulator.machine.units.matrix.arithmetic import Arithmetic
from cute_kernels.emulator.machine.units.matrix.scaled_products import dot_products
from tests.emulator.machine.units.matrix.test_scaled_products import SCALED, STYLES, UNSCALED, inputs, sides

_TORCH = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "ue8m0": torch.float8_e8m0fnu,
    "ue4m3": torch.float8_e4m3fn,
}  # fmt: skip
SHAPE = (128, 64)
CASES = [*((*case[:4],) for case in SCALED), *(("f8f6f4", types, 32, 0) for types in UNSCALED)]


def as_torch(codes: np.ndarray, name: str) -> torch.Tensor:
    """Codes of eight bits as their type; narrower ones are bytes in mmasim, of which FP4 has bits 2 to 5."""
    tensor = torch.from_numpy(np.ascontiguousarray(codes) << (2 if name == "e2m1" else 0))
    return tensor.view(_TORCH[name]) if name in _TORCH else tensor


def peer(case: tuple) -> object:
    models = importlib.import_module("mmasim.nv_ptx")  # not installed for the other tests
    kind, types, k, count = case
    if not count:
        name = f"m128n64k{k}.kind::{kind}.f32.{types[0]}.{types[1]}"
        return models.TCGen05MMA("Blackwell", name)
    name = f"m128n64k{k}.kind::{kind}.block{k // count}.f32.{'.'.join(types)}"
    return models.TCGen05MMABlockScale("Blackwell", name)


def finite(codes: list[np.ndarray], names: tuple[str, ...]) -> list[np.ndarray]:
    """Without NaN and infinities."""
    last = {"e4m3": 0x7F, "ue4m3": 0x7F, "e5m2": 0x7C, "ue8m0": 0xFF}
    return [
        np.where((x & (0xFF if name == "ue8m0" else 0x7F)) >= last.get(name, 256), np.uint8(0x21), x)
        for x, name in zip(codes, names)
    ]


def compare(case: tuple, results: int, seed: int) -> tuple[int, int]:
    """How many results were compared, and how many differ."""
    kind, types, k, count = case
    model, arithmetic = peer(case), Arithmetic("silicon", "sm_100a")
    sums = arithmetic.scaled_sums(kind) if count else arithmetic.sums("tcgen05", types[0], "f32")
    rng = np.random.default_rng([seed, *map(ord, f"{case}")])
    done = differ = number = 0
    while done < results or number < len(STYLES):
        elements, scales, c = inputs(rng, types, k, max(count, 1), STYLES[number % len(STYLES)], SHAPE)
        elements = finite(elements, types)
        c = np.where(np.isfinite(c.view(np.float32)), c, 0)
        operands = [as_torch(x, name) for x, name in zip(elements, types)]
        if k == 64:
            operands = [as_torch(x[:, ::2] | x[:, 1::2] << 4, "e2m1x2") for x in elements]
        arguments = [operands[0], operands[1].T, torch.from_numpy(c.view(np.float32).copy())]
        if count:
            scales = finite(scales, (types[2], types[2]))
            factors = [as_torch(x & 127 if types[2] == "ue4m3" else x, types[2]) for x in scales]
            arguments += [factors[0], factors[1].T]
        want = model(*arguments).contiguous().view(torch.int32).numpy().view(np.uint32)
        got = dot_products(*sides(elements, scales if count else None, types), c, "f32", sums)
        differ += int((got != want).sum())
        done, number = done + got.size, number + 1
    return done, differ


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator.mmasim_scaled_sums", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--results", type=int, default=1_000_000, help="of each case (default: 10^6)")
    parser.add_argument("--only", default="", metavar="TEXT", help="what a case's line contains, as mxf4nvf4")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    if parsed.results < 1:
        parser.error(f"--results {parsed.results}: at least 1")
    cases = [(f"{kind} {' x '.join(types[:2])} {' '.join(types[2:])}{count or ''}", (kind, types, k, count))
             for kind, types, k, count in CASES]  # fmt: skip
    chosen = [(text, case) for text, case in cases if parsed.only in text]
    if not chosen:
        parser.error(f"--only {parsed.only}: in none of {', '.join(text for text, _ in cases)}")
    total = 0
    for text, case in chosen:
        done, differ = compare(case, parsed.results, parsed.seed)
        total += differ
        print(f"{text}: {differ} of {done} differ", flush=True)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
