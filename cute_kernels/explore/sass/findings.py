"""Costs in a kernel's machine code: barriers of memory, waits for loads, moves beside MMAs, spills."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cute_kernels.explore.sass.flow import Flow, Loop, issue_clocks
from cute_kernels.explore.sass.listing import Instruction

KINDS = {
    "membar": "MEMBAR: the warp waits until its earlier accesses are performed",
    "cache": "CCTL.IVALL: empties the L1 cache",
    "wait": "an instruction waits for a load that was issued fewer clocks before than such a load takes",
    "lanes": "BRA.U.ANY: a loop over lanes, which may differ in a register that the instruction in it takes as uniform",
    "move": "copies of registers in a loop with MMAs, between registers or to uniform ones",
    "spill": "STL and LDL: registers in local memory",
}
"""Kind of a finding -> what it is."""

LATENCIES = {"LDG": 260, "LD": 260, "LDL": 40, "LDS": 29, "LDSM": 29, "LDTM": 32}
"""Clocks that a load takes at best, about: published measurements of A100 and H100 with hits in L2 (LDG), in L1 (LDL)
and without bank conflicts (LDS); of tensor memory a clock for each of 32 columns, which is its rate."""

_MMA = re.compile(r"[BDFHIOQ]?G?MMA|UTC\w*MMA")
_SYNCHRONISES = ("SYNCS.PHASECHK", "BAR.SYNC", "DEPBAR", "WARPGROUP.DEPBAR", "UCGABAR_WAIT", "NANOSLEEP")
_COPIES = {"MOV": r"R\d+, R\d+\b", "IMAD": r"R\d+, RZ, RZ, R\d+\b", "R2UR": "", "UMOV": r"UR\d+, UR\d+\b"}
"""Opcode -> operands with which it copies a register."""


@dataclass(frozen=True)
class Finding:
    """One instruction that costs.

    ``kind``: of `KINDS`. ``instruction``: that costs; of a wait, the one that waits. ``loop``: the innermost one around
    it, None outside of loops. ``clocks``: of a wait, those that the load takes beyond what passed since its issue, at
    best; else 0. ``producer``: of a wait, the load. ``behind``: of a wait, clocks since its issue: what was issued
    between, and waits for other loads."""

    kind: str
    instruction: Instruction
    loop: Loop | None = None
    clocks: int = 0
    producer: Instruction | None = None
    behind: int = 0


def is_mma(instruction: Instruction) -> bool:
    """Whether tensor cores execute it."""
    return _MMA.fullmatch(instruction.name) is not None


def findings(flow: Flow) -> list[Finding]:
    """All findings of a kernel, by address; of a kernel with loops only those in one, but for spills."""
    multiplying = [loop for loop in flow.loops if any(map(is_mma, flow.inside(loop)))]
    found = []
    for number, instruction in enumerate(flow.code):
        loop = flow.innermost.get(number)
        for kind, applies in _SINGLE.items():
            counts = kind == "spill" or (loop in multiplying if kind == "move" else flow.repeated(number))
            if counts and applies(instruction):
                found.append(Finding(kind, instruction, loop))
    return sorted([*found, *_waits(flow)], key=lambda each: each.instruction.address)


def _copies(instruction: Instruction) -> bool:
    operands = _COPIES.get(instruction.name)
    if operands is None or (instruction.name == "IMAD" and "MOV" not in instruction.opcode):
        return False
    return re.match(operands, instruction.operands) is not None


_SINGLE: Mapping[str, Callable[[Instruction], bool]] = {
    "membar": lambda instruction: instruction.name == "MEMBAR",
    "cache": lambda instruction: instruction.opcode.startswith("CCTL.IVALL"),
    "lanes": lambda instruction: instruction.opcode.startswith("BRA.U.ANY"),
    "spill": lambda instruction: instruction.name in ("STL", "LDL"),
    "move": _copies,
}


def _waits(flow: Flow) -> Iterator[Finding]:
    """One finding for each instruction that awaits loads too early, of the load that is complete last."""
    waited: dict[int, int] = {}  # clocks by instruction: a wait covers others that begin before its end
    for number, instruction in enumerate(flow.code):
        if not instruction.awaits or not flow.repeated(number):
            continue
        exposed = [
            (LATENCIES[load.name] - behind, load, behind)
            for scoreboard in instruction.awaits
            for load, behind in _setters(flow, number, scoreboard, waited)
            if load.written == scoreboard and load.name in LATENCIES
        ]
        clocks, load, behind = max(exposed, key=lambda each: each[0], default=(0, instruction, 0))
        if clocks > 0:
            waited[number] = clocks
            yield Finding("wait", instruction, flow.innermost.get(number), clocks, load, behind)


def _setters(flow: Flow, number: int, scoreboard: int, waited: Mapping[int, int]) -> Iterator[tuple[Instruction, int]]:
    """The instructions that may hold a scoreboard at ``number``, and the fewest clocks from each to there.

    Looked for backwards on every way in the outermost loop around, up to an instruction that awaits the scoreboard, or
    waits for something else: how long that takes, and so how much of a load it covers, the code does not say.
    """
    reached: dict[int, int] = {}
    around = flow.around(number)
    waiting = [(number - 1, flow.block_of[number], 0)]
    while waiting:
        at, block, clocks = waiting.pop()
        while at >= flow.blocks[block].first:
            instruction = flow.code[at]
            clocks += issue_clocks(instruction)
            if scoreboard in (instruction.written, instruction.read):
                yield instruction, clocks
            if scoreboard in instruction.awaits or instruction.opcode.startswith(_SYNCHRONISES):
                break
            clocks += waited.get(at, 0)
            at -= 1
        else:
            for before in flow.before[block]:
                if before in around and clocks < reached.get(before, clocks + 1):
                    reached[before] = clocks
                    waiting.append((flow.blocks[before].end - 1, before, clocks))
