"""What a kernel's host function takes, as a table: everything that passes arguments follows it.

`Plan.operands` is that table for one plan, in the order of the host function's parameters; a stream comes after them.
From it follow the arguments that CuTe DSL traces and is called with (`cute_kernels.compile`), the argument frame of a
bound launch (`cute_kernels.frames`), what the emulator registers as memory, and the facts of a launch. It
stands beside the plan, since which operands there are and of which type is decided there, and since both those who
compile and those who launch have to read it, without torch and without CuTe DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["pointer", "value", "size"]


@dataclass(frozen=True)
class Operand:
    """One parameter of a host function.

    Attributes:
        name: of the parameter, and of the address or number that a launch gives for it.
        dtype: element type, as torch names it; ``"tfloat32"``: FP32 in memory, which TMA rounds to TF32.
        kind: ``"pointer"``: a device address; ``"value"``: one number that is given with every launch; ``"size"``: one
            that the plan knows.
        alignment: of the address, in bytes.
        present: whether this plan's kernel was compiled with it; the host function takes None for one that is absent.
        written: whether the kernel writes the memory, all of which is then its output.
        size: the number of a ``"size"``.
    """

    name: str
    dtype: str
    kind: Kind = "pointer"
    alignment: int = 16
    present: bool = True
    written: bool = False
    size: int = 0

    @property
    def given(self) -> bool:
        """Whether a launch has to say where it is, or what."""
        return self.present and self.kind != "size"


def sizes(**values: int) -> tuple[Operand, ...]:
    """32-bit integers that the plan knows, in this order."""
    return tuple(Operand(name, "int32", "size", size=value) for name, value in values.items())


def profile_operand(stamps: int) -> Operand:
    """Where warps write clock stamps (`cute_kernels.plan.profile`); absent without stamps."""
    return Operand("profile", "int64", alignment=8, present=stamps > 0, written=stamps > 0)
