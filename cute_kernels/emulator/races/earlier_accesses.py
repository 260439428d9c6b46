"""Which instruction made an earlier access that a race is reported with.

The race detector knows an access by its epoch, and an epoch knows the instruction of its first access. An asynchronous
operation has an epoch of its own, so that is it. Loads (stores) of a warp share an epoch until the warp synchronises,
as the tcgen05 operations of a thread do until it commits: there, every instruction of the right kind that can follow
the first one without such an end in between may be the one. Nothing is noted while the kernel runs; the flow graph is
searched when a race is reported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cute_kernels.emulator.isa.ptx.flow import Flow, region_of
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Instruction
from cute_kernels.emulator.races.memory_order import access_strength
from cute_kernels.emulator.races.shadow import LANE_BITS, STRONG, Epochs

_MOST_NAMED = 3
_PIPELINED = ("mma", "cp", "shift")  # tcgen05 operations that one commit completes


@dataclass(frozen=True)
class Access:
    """Properties of an access."""

    space: str  # "shared", "global" or "tensor"
    write: bool  # it wrote
    strong: bool = False  # it was a strong operation
    unit: int = 1  # bytes of the places that are kept of it; it accessed a multiple of them


def suspects(epochs: Epochs, flow: Flow | None, identity: int, write: bool, space: str, unit: int) -> list[Instruction]:
    """The instructions that may have made an access, in text order; none if that is not known. ``epochs``: what
    accesses are known by. ``flow``: of the kernel, None: nothing is known. ``identity``: of the access. ``write``,
    ``space``, ``unit``: as in `Access`."""
    number = identity >> LANE_BITS
    first = epochs.places[number]
    if first < 0 or flow is None:
        return []
    return instructions_of(flow, first, Access(space, write, epochs.generic[number] == STRONG, unit))


def place(instructions: Sequence[Instruction]) -> str:
    """Where in the program an access was made, for a message: " (PTX line 7 `st ...`)", "" if that is not known."""
    return f" ({describe(instructions)})" if instructions else ""


def instructions_of(flow: Flow, first: int, access: Access) -> list[Instruction]:
    """The instructions that may have made an access, in text order; at least one. ``flow``: of the kernel. ``first``:
    index of the instruction of the first access of the same epoch. ``access``: which access."""
    instruction = flow.kernel.instructions[first]
    parts = instruction.parts
    if parts[0] == "tcgen05" and parts[1] in _PIPELINED:
        found = _reached(flow, first, lambda other: _pipelined(other, access), _is("commit"))
    elif parts[:2] == ("tcgen05", "st"):
        found = _reached(flow, first, _is("st"), lambda other: _is("wait::st")(other) or _synchronises(other))
    elif _by_thread(instruction, access.write):
        found = _reached(flow, first, lambda other: _matches(other, access), _synchronises)
    else:
        found = []
    return found or [instruction]


def describe(instructions: Sequence[Instruction]) -> str:
    """PTX lines, texts and source lines for people: "PTX line 7 `st.shared.b32 [%r1], %r2`, kernel.py:12"."""
    if len(instructions) > _MOST_NAMED:
        lines = [instruction.line for instruction in instructions]
        sources = list(dict.fromkeys(i.source for i in instructions if i.source))
        more = f" and {len(sources) - _MOST_NAMED} more lines" if len(sources) > _MOST_NAMED else ""
        where = f", {', '.join(sources[:_MOST_NAMED])}{more}" if sources else ""
        return f"one of {len(lines)} instructions in PTX lines {min(lines)} to {max(lines)}{where}"
    places = (f"PTX line {i.line} `{i.text}`" + (f", {i.source}" if i.source else "") for i in instructions)
    return " or ".join(places)


def _reached(
    flow: Flow, first: int, wanted: Callable[[Instruction], bool], ends: Callable[[Instruction], bool]
) -> list[Instruction]:
    """Wanted instructions, ``first`` too, up to the next end; those of a divergent region may follow each other."""
    instructions = flow.kernel.instructions
    found: set[int] = set()
    seen: set[int] = set()
    start = next(block for block in flow.blocks if block.start <= first < block.end)
    work = [(start.index, first)]
    regions = [region_of(flow, branch) for branch in flow.divergent_branches]
    while work:
        number, index = work.pop()
        block = flow.blocks[number]
        for region in regions:
            if number in region:
                fresh = region - seen
                seen |= fresh
                work.extend((other, flow.blocks[other].start) for other in fresh)
        for instruction in instructions[index : block.end]:
            if wanted(instruction):
                found.add(instruction.index)
            if instruction.guard is None and ends(instruction):
                break
        else:
            fresh = set(block.successors) - seen - {flow.exit}
            seen |= fresh
            work.extend((other, flow.blocks[other].start) for other in fresh)
    return [instructions[index] for index in sorted(found)]


# --- loads, stores and atomics --------------------------------------------------------------------------------------


def _by_thread(instruction: Instruction, write: bool) -> bool:
    """Whether it is a load (a store or atomic) through the generic proxy that takes effect at once."""
    parts = instruction.parts
    if write:
        if parts[0] in ("st", "red"):
            return "async" not in parts
        return parts[0] in ("stmatrix", "atom", "tensormap") or parts[:2] == ("tcgen05", "alloc")
    # The global memory that cp.async reads is reported as a load.
    return parts[0] in ("ld", "ldu", "ldmatrix") or parts[:2] == ("cp", "async") and parts[2] in ("ca", "cg")


def _matches(instruction: Instruction, access: Access) -> bool:
    parts = instruction.parts
    if not _by_thread(instruction, access.write) or access.space not in _spaces(parts):
        return False
    atomic = parts[0] in ("atom", "red")
    strong = atomic or parts[0] in ("ld", "st") and access_strength(parts, write=access.write) is not None
    if strong != access.strong:
        return False
    if parts[0] not in ("ld", "ldu", "st"):
        return True
    count = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
    return TYPE_BITS.get(parts[-1], 0) // 8 * count % access.unit == 0


def _spaces(parts: tuple[str, ...]) -> tuple[str, ...]:
    """State spaces that an access may be in."""
    if parts[0] == "cp":
        return ("global",)
    if parts[0] == "tcgen05":
        return ("shared",)
    named = (part.split("::")[0] for part in parts[1:])
    spaces = [name for name in named if name in ("shared", "global", "param", "local")]
    return tuple(spaces[:1]) or ("shared", "global")


def _synchronises(instruction: Instruction) -> bool:
    """Whether accesses of the warp after it belong to another epoch."""
    parts = instruction.parts
    if parts[0] == "bar" or parts[0] == "barrier" and "wait" not in parts or parts[:2] == ("mbarrier", "arrive"):
        return True
    if parts[0] in ("fence", "membar"):
        return "mbarrier_init" not in parts and ("proxy" not in parts or any("async" in part for part in parts))
    return parts[:2] in (("tcgen05", "commit"), ("wgmma", "mma_async"))


# --- tensor memory --------------------------------------------------------------------------------------------------


def _pipelined(instruction: Instruction, access: Access) -> bool:
    """Whether it is a tcgen05 operation of a pipe that makes such an access."""
    parts = instruction.parts
    if parts[0] != "tcgen05" or parts[1] not in _PIPELINED:
        return False
    if access.space == "tensor":
        return access.write or parts[1] != "cp"
    return not access.write and parts[1] != "shift"


def _is(name: str) -> Callable[[Instruction], bool]:
    return lambda instruction: instruction.parts[:2] == ("tcgen05", name)
