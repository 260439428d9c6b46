"""Which architectures have an instruction (PTX ISA, "Target ISA Notes", and what ptxas 13.0 does)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from cute_kernels.emulator.ptx.program import Instruction

#: Opcodes that not every architecture since sm_80 has, and the first that does; with "a" only those whose names end in
#: "a" or "f". The first row that an opcode matches decides.
_FIRST = {
    r"wgmma": "90a",
    r"setmaxnreg|tensormap\.replace": "90a",
    r"tcgen05|redux\.sync\.(min|max)\..*f32|cvt\..*\b(e2m1x2|e2m3x2|e3m2x2|ue8m0x2)": "100a",
    r"st\.bulk|clusterlaunchcontrol|.*\bf32x2\b|(add|sub|fma)\..*f32\.b?f16": "100",
    r"barrier\.cluster|c(p|p\.reduce)\.async\.bulk|elect|fence\.proxy\.(async|tensormap)|getctarank|griddepcontrol|mapa":
        "90",
    r"mbarrier\.(expect_tx|complete_tx|try_wait|arrive.*\.expect_tx)|multimem|prefetch\.tensormap|tensormap": "90",
    r"(st|red)\.async|stmatrix|atom\.global\.(cas|exch)\.b128|(add|sub|mul)\.(\w+\.)*bf16": "90",
    r"cvt\..*\b(e4m3x2|e5m2x2)|mma\.(sync|sp)\..*\be[45]m[23]\b": "89",
}  # fmt: skip
_ROWS = [(re.compile(pattern), needed) for pattern, needed in _FIRST.items()]
_TARGET = re.compile(r"sm_(\d+)([af]?)")


@functools.cache
def needed(opcode: str) -> str:
    """The first architecture with an opcode, ``"90a"``, or "" for those that all have."""
    return next((first for pattern, first in _ROWS if pattern.match(opcode)), "")


def check_target(target: str, instructions: Iterable[Instruction]) -> None:
    """Refuses instructions that an architecture does not have.

    Args:
        target: of the module, ``"sm_90a"``; one of another kind is not looked at.
        instructions: of a kernel.

    Raises:
        UnsupportedPTX: it names the instruction, and where it exists.
    """
    found = _TARGET.fullmatch(target)
    for instruction in instructions if found else ():
        first = needed(instruction.opcode)
        if not first:
            continue
        number = int(first.rstrip("a"))
        if int(found[1]) < number or first.endswith("a") and not found[2]:
            raise instruction.refuse(f"{target} does not have it: it needs sm_{first} or a later architecture")
        if instruction.parts[0] == "wgmma" and int(found[1]) != number:
            raise instruction.refuse(f"{target} does not have it: only sm_90a does")
