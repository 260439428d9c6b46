"""Which architectures have an instruction (PTX ISA, "Target ISA Notes", and what ptxas 13.0 does)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from cute_kernels.emulator.isa.ptx.program import Instruction

#: Opcodes that not every architecture since sm_80 has: the first that does, with "a" only those whose names end in "a"
#: or "f", and the last, if others follow. The first row that an opcode matches decides.
_FIRST = {
    r"wgmma": "90a 90",
    r"setmaxnreg|tensormap\.replace": "90a",
    r"tcgen05|redux\.sync\.(min|max)\..*f32": "100a 119",
    r"cvt\..*\b(e2m1x2|e2m3x2|e3m2x2|ue8m0x2)": "100a",
    r"st\.bulk|clusterlaunchcontrol|.*\bf32x2\b|(add|sub|fma)\..*f32\.b?f16": "100",
    r"barrier\.cluster|c(p|p\.reduce)\.async\.bulk|elect|fence\.proxy\.(async|tensormap)|getctarank|griddepcontrol":
        "90",
    r"mapa|mbarrier\.(expect_tx|complete_tx|try_wait|arrive.*\.expect_tx)|multimem|prefetch\.tensormap|tensormap": "90",
    r"(st|red)\.async|stmatrix|(add|sub|mul|setp?)\.(\w+\.)*bf16|(min|max)\.relu\.s": "90",
    r"(atom|red)\..*(\.b128|\.v\d\.|add\.noftz\.bf16)": "90",
    r"cvt\..*\b(e4m3x2|e5m2x2)|mma\.(sync|sp)\..*\be[45]m[23]\b": "89",
    r"(min|max)\..*xorsign": "86",
}  # fmt: skip
_ROWS = [(re.compile(pattern), needed) for pattern, needed in _FIRST.items()]
_TARGET = re.compile(r"sm_(\d+)([af]?)")


@functools.cache
def missing(target: str, opcode: str) -> str:
    """Why an architecture, ``"sm_90a"``, does not have an opcode, or ""; those of another kind have all."""
    found = _TARGET.fullmatch(target)
    first, *last = next((which for pattern, which in _ROWS if pattern.match(opcode)), "0").split()
    own = first.endswith("a")
    if found is None:
        return ""
    if last and int(found[1]) > int(last[0]):
        return f"{target} does not have it: only the generation of sm_{first} does"
    if int(found[1]) >= int(first.rstrip("a")) and (found[2] or not own):
        return ""
    return f"{target} does not have it: it needs sm_{first} or a later architecture"


def check_target(target: str, instructions: Iterable[Instruction]) -> None:
    """Refuses instructions that an architecture does not have.

    Args:
        target: of the module.
        instructions: of a kernel.

    Raises:
        UnsupportedPTX: it names the instruction, and where it exists.
    """
    for instruction in instructions:
        reason = missing(target, instruction.opcode)
        if reason:
            raise instruction.refuse(reason)
