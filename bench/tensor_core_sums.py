"""What `arithmetic="silicon"` costs: whole instructions of tensor cores, with it and with exact sums, in turns.

    python -m bench.tensor_core_sums [--rounds N]

Prints microseconds per instruction on one core of this machine, the best of N rounds of each, and their ratio. Operands
are integers from -3 to 3, whose sums no chip cuts, or random normal numbers of a standard deviation.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cute_kernels.emulator.core.library import library as core
from cute_kernels.emulator.machine.units.matrix import operands
from cute_kernels.emulator.machine.units.matrix.arithmetic import EXACT, Arithmetic, Sums
from cute_kernels.emulator.machine.units.matrix.products import Accumulator, Kind, Rows, describe

K_BYTES, CALLS = 32, 4
ELEMENTS = {element.name: element for kind in operands.KINDS.values() for element in kind.values()}
TYPES: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
}  # fmt: skip
#: Unit, target, M, N.
INSTRUCTIONS = (("wgmma", "sm_90a", 64, 256), ("tcgen05", "sm_100a", 128, 256))
#: Type, standard deviation or None: integers.
DATA = (("e4m3", None), ("e4m3", 1.0), ("e4m3", 60.0), ("e5m2", 1.0), ("f16", 1.0), ("bf16", 1.0), ("tf32", 1.0))


@dataclass
class Product:
    """One instruction that adds to D, as the core is told of it, with the arrays that it has the addresses of."""

    mma: Any
    cells: np.ndarray
    kept: tuple[np.ndarray, ...]

    def seconds(self) -> float:
        """Of one instruction, the mean of `CALLS`, from D = 0 on."""
        self.cells[...] = 0
        execute, address = core().mma_execute, ctypes.addressof(self.mma)
        start = time.perf_counter()
        for _ in range(CALLS):
            execute(address)
        return (time.perf_counter() - start) / CALLS


def product(name: str, deviation: float | None, m: int, n: int, sums: Sums) -> Product:
    rng, dtype = np.random.default_rng(0), np.dtype(TYPES[name])
    shapes = [(rows, K_BYTES // dtype.itemsize) for rows in (m, n)]
    if deviation is None:
        drawn = [rng.integers(-3, 4, shape) for shape in shapes]
    else:
        drawn = [rng.normal(0, deviation, shape) for shape in shapes]
    a, b = (values.astype(dtype) for values in drawn)
    cells, places = np.zeros((n, m), np.uint32), np.arange(2 * max(m, n))
    rows = [Rows(array.ctypes.data, None, places.ctypes.data) for array in (a, b)]
    kind, shape = Kind(ELEMENTS[name]), Accumulator("f32", True, False, m)
    mma = describe(m, n, kind, kind, shape, [(*rows, cells.ctypes.data)], sums)
    return Product(mma, cells, (a, b, places))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tensor_core_sums", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parsed = parser.parse_args(arguments)
    if parsed.rounds < 1:
        parser.error(f"--rounds {parsed.rounds}: at least 1")
    print("| instruction | operands | exact, us | silicon, us | ratio |\n|---|---|---|---|---|")
    for unit, target, m, n in INSTRUCTIONS:
        for name, deviation in DATA:
            chips = Arithmetic("silicon", target).sums(unit, name, "f32")
            both = [product(name, deviation, m, n, sums) for sums in (EXACT, chips)]
            exact, silicon = np.min([[one.seconds() for one in both] for _ in range(parsed.rounds)], axis=0) * 1e6
            drawn = "integers" if deviation is None else f"deviation {deviation:g}"
            times = f"{exact:.0f} | {silicon:.0f} | {silicon / exact:.2f}"
            print(f"| {unit} {m} x {n} | {name}, {drawn} | {times} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
