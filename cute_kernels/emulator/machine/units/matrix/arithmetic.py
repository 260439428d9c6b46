"""How tensor cores add: the parameters of the published models, by unit and architecture.

One step of a dot product adds the products of some bytes of K, and the accumulator C, at once:

1. Products are exact. A term's exponent is the sum of its factors' encoded exponents (of subnormal numbers the lowest
   exponent of their type); C's is its own. Terms that are zero have none.
2. All terms are aligned to the largest exponent, and cut to ``fraction`` bits behind the point, toward zero. Where C is
   zero, the largest exponent is at least ``lowest``.
3. What is left of them is added exactly.
4. The sum is cut to FP32 with ``result`` bits behind the point, toward zero (beyond the largest number: infinity), or
   rounded to FP16, to nearest even. Zero is +0.

The next step of K adds to that result. NaN operands, infinity times zero and infinities of both signs give NaN,
0x7FFFFFFF or 0x7FFF; other infinities give infinity. Sums of integers are exact everywhere, and wrap at 32 bits or
saturate once per instruction.

Sources:
    [MMA-Sim] P. Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores", arXiv 2511.10909;
        package ``mmasim`` 2.1.1, which the authors compared with GPUs of each architecture.
    [KM] F. A. Khattak, M. Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv 2512.07004 (V100, A100, H100,
        B200 and others).
    [tcgen05] github.com/sf-tensor/tcgen05, ``tcgen05_model/MODEL.md``: a model with result words of a B200.
    [mmaemu] package ``mmaemu`` 0.1.0: FP8 of an RTX 4060 and of an H100.
    [SASS] what ptxas 13.0 makes of the PTX instruction.
"""

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Literal

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.options import Choice


@dataclass(frozen=True)
class Sums:
    """How one instruction adds products of floats."""

    fraction: int  # bits behind the point of aligned terms; 0: sums are exact, and rounded once to nearest even
    result: int = 23  # bits behind the point of an FP32 result
    step: int = 32  # bytes of K that are added at once, of operands as they are stored
    lowest: int = 0  # of the largest exponent, where C is zero
    # FP8 is converted to FP16, and added from zero, first the products of the lower two of every four bytes of K, then
    # those of the upper two; C is added to that, rounded to nearest even
    split: bool = False


EXACT = Sums(0)


_EIGHT_BITS = ("e4m3", "e5m2")
_HIGHER = 127 - 15  # by which the exponents of FP16 begin above those of FP32
#: (unit, generation, whether operands have 8 bits) -> parameters of FP32 results, and who measured them.
TABLE = {
    ("tcgen05", "blackwell", False): Sums(25, 23, 32, -133),  # [MMA-Sim] [tcgen05] [KM]
    ("tcgen05", "blackwell", True): Sums(25, 23, 32, -133),  # [MMA-Sim] [tcgen05]
    ("wgmma", "hopper", False): Sums(25, 23, 32, -133),  # [MMA-Sim] [KM]; an H200, see the documentation
    ("wgmma", "hopper", True): Sums(13, 13, 32, -133),  # [MMA-Sim] [KM] [mmaemu]; an H200, likewise
    ("mma", "turing", False): Sums(24, 23, 16, -132),  # [MMA-Sim]
    ("mma", "ampere", False): Sums(24, 23, 16, -132),  # [MMA-Sim] [KM]
    ("mma", "ada", False): Sums(24, 23, 16, -132),  # [MMA-Sim] [KM]
    ("mma", "ada", True): Sums(13, 13, 16, -132),  # [MMA-Sim] [KM] [mmaemu]
    ("mma", "hopper", False): Sums(25, 23, 32, -133),  # [MMA-Sim] [KM]
    ("mma", "hopper", True): Sums(25, 23, 32, -133, split=True),  # [SASS] [mmaemu]
    ("mma", "blackwell", False): Sums(25, 23, 32, -133),  # [MMA-Sim] [KM]
    ("mma", "blackwell", True): Sums(25, 23, 32, -133, split=True),  # [SASS]
    ("mma", "rtx blackwell", False): Sums(25, 23, 32, -133),  # [MMA-Sim]
    ("mma", "rtx blackwell", True): Sums(25, 23, 32, -133),  # [MMA-Sim]
}
#: tcgen05 and mma with block scaling. Of FP4 pairs the terms are exact sums of 16 products, with the exponent of their
#: scales alone; a sum of products that are all zero has none. [MMA-Sim]
SCALED = {
    "mxf8f6f4": Sums(25, 23, 32, -133),
    "mxf4": Sums(35, 23, 32, -139),
    "mxf4nvf4": Sums(35, 23, 32, -139),
}
#: Compute capabilities of each generation.
GENERATIONS = {
    "turing": (75,),
    "ampere": (80, 86, 87, 88),
    "ada": (89,),
    "hopper": (90,),
    "blackwell": (100, 101, 103, 110),
    "rtx blackwell": (120, 121),
}


@functools.lru_cache(maxsize=64)
def generation(target: str) -> str:
    """The generation of a PTX target such as ``sm_100a``. Raises UnsupportedPTX: none of `GENERATIONS`."""
    match = re.fullmatch(r"sm_(\d+)[af]?", target)
    found = [name for name, numbers in GENERATIONS.items() if match and int(match[1]) in numbers]
    if not found:
        known = ", ".join(f"sm_{number}" for numbers in GENERATIONS.values() for number in numbers)
        raise UnsupportedPTX(
            f"how the tensor cores of .target {target} add is not known; known are {known}. "
            "Options(arithmetic='exact') rounds exact sums once"
        )
    return found[0]


@dataclass(frozen=True)
class Arithmetic:
    """How the tensor cores of a launch add. ``choice``: as of the architecture, or exactly; ``target``: of the PTX,
    ``sm_90a``."""

    choice: Choice = "exact"
    target: str = ""

    @property
    def exact(self) -> bool:
        return self.choice == "exact"

    def sums(self, unit: Literal["tcgen05", "wgmma", "mma"], element: str, d_type: str) -> Sums:
        """How an instruction of these operands adds. ``unit``: which instruction. ``element``: type of A's elements;
        B's have as many bits. ``d_type``: ``"f32"``, ``"f16"``, or ``"s32"``, which is exact. Raises UnsupportedPTX: it
        is not known, of this target."""
        if self.exact or d_type == "s32":
            return EXACT
        row = TABLE.get((unit, generation(self.target), element in _EIGHT_BITS))
        if row is None:
            raise UnsupportedPTX(
                f"how {unit} of {element} adds on {self.target} is not known; Options(arithmetic='exact') rounds "
                "exact sums once"
            )
        return dataclasses.replace(row, lowest=row.lowest + _HIGHER) if d_type == "f16" else row

    def scaled_sums(self, kind: str) -> Sums:
        """How tcgen05.mma, or mma on sm_120, with block scaling adds. Raises UnsupportedPTX: it is not known, of this
        target."""
        if self.exact:
            return EXACT
        known = SCALED if generation(self.target) in ("blackwell", "rtx blackwell") else {}
        if kind not in known:
            raise UnsupportedPTX(
                f"how kind::{kind} with scales adds on {self.target} is not known; Options(arithmetic='exact') rounds "
                "exact sums once"
            )
        return known[kind]


EXACTLY = Arithmetic()
