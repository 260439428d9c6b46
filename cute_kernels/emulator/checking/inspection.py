"""State of a warp that stands still: its registers, its CTA's shared memory, and where in the source it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.isa.ptx.decode import Instruction
from cute_kernels.emulator.machine.units.sm import Warp
from cute_kernels.emulator.reports.arrays import arrays
from cute_kernels.emulator.reports.diagnosis import place_of_line
from cute_kernels.emulator.reports.model import Place


def instructions_at(instructions: Sequence[Instruction], place: str) -> tuple[int, ...]:
    """Indices of the instructions that warps come to first of a PTX line, or of a line of the source.

    Args:
        instructions: of a kernel.
        place: see `Debugger.break_at`.

    Raises:
        ValueError: no instruction was made of it.
    """
    file, _, line = place.rpartition(":")
    if not line.isdecimal():
        raise ValueError(f"place {place!r}: a line of the PTX, or FILE:LINE, is needed")
    if not file:
        found = [each.index for each in instructions if each.line == int(line)]
        lines = f"{instructions[0].line} to {instructions[-1].line}"
        if not found:
            raise ValueError(f"PTX line {line} has no instruction; those of the kernel are within lines {lines}")
        return tuple(found)
    at = [_is_at(each, file, line) for each in instructions]
    found = [index for index, here in enumerate(at) if here and not (index and at[index - 1])]
    if not found:
        known = {each.source.split(" inlined at ")[0] for each in instructions if each.source}
        inside = sorted({int(n) for path, _, n in (name.rpartition(":") for name in known) if _ends(path, file)} - {0})
        lines = ", ".join(map(str, inside))
        have = f"lines {lines} have some" if inside else f"the kernel has lines of {_files(known)}"
        raise ValueError(f"no instruction was made of line {line} of {file}; {have}")
    return tuple(found)


def _is_at(instruction: Instruction, file: str, line: str) -> bool:
    places = (each.rpartition(":") for each in instruction.source.split(" inlined at "))
    return any(number == line and _ends(path, file) for path, _, number in places)


def _ends(path: str, file: str) -> bool:
    return path == file or path.endswith("/" + file.lstrip("./"))


def _files(places: set[str]) -> str:
    return ", ".join(sorted({place.rpartition(":")[0] for place in places})) or "no file: its PTX has no .loc"


def standing(warp: Warp) -> Instruction | None:
    """The instruction that a warp executes next; None: it has exited."""
    launch = warp.code.launch
    if warp.code.standing >= len(launch.flow.blocks):
        return None
    return launch.kernel.instructions[launch.flow.blocks[warp.code.standing].start]


def active_lanes(warp: Warp) -> int:
    """Mask of the lanes that execute it."""
    return warp.code.header.mask & 0xFFFFFFFF


def registers(warp: Warp, names: Sequence[str]) -> dict[str, int | np.ndarray]:
    """`Debugger.registers`."""
    launch = warp.code.launch
    if warp.code.standing >= len(launch.flow.blocks):
        raise ValueError(f"{warp.label} has exited")
    live = launch.flow.blocks[warp.code.standing].live_in
    for name in names:
        if name not in launch.kernel.registers:
            raise ValueError(f"register {name!r}: the kernel has none of this name")
        if name not in live:
            raise ValueError(f"register {name}: nothing from here on reads it, so that its value is not kept")
    return {name: _value(warp, *launch.translation.slots[name]) for name in names or sorted(live, key=_order)}


def _order(name: str) -> tuple[str, int]:
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or 0)


def _value(warp: Warp, offset: int, bits: int, uniform: bool) -> int | np.ndarray:
    state = warp.code.state
    word = int(state[offset : offset + 8].view(np.uint64)[0])
    if uniform:
        return word & 1 if bits == 1 else word
    if bits == 1:
        return (word >> np.arange(32, dtype=np.uint64)).astype(np.uint8) & 1
    return state[offset : offset + 4 * bits].view(f"u{bits // 8}").copy()


def shared(launch: CapturedLaunch, warp: Warp, first: int | str, nbytes: int | None) -> np.ndarray:
    """`Debugger.shared`.

    Raises:
        ValueError: no such variable, or bytes that the CTA has not got.
    """
    memory = warp.cta.shared.data
    if isinstance(first, str):
        known = list(arrays(launch.ptx, launch.kernel_name, launch))
        array = next((each for each in known if each.name == first), None)
        if array is None:
            names = ", ".join(each.name for each in known if each.name) or "none with a name"
            raise ValueError(f"{first!r} is no array in shared memory; there are {names}")
        first, nbytes = array.first, array.nbytes if nbytes is None else nbytes
    end = len(memory) if nbytes is None else first + nbytes
    if not 0 <= first < end <= len(memory):
        raise ValueError(f"bytes {first} to {end} of shared memory; the CTA has {len(memory)}")
    return memory[first:end].copy()


def device_memory(warp: Warp, address: int, nbytes: int) -> np.ndarray:
    """`Debugger.memory`."""
    try:
        return warp.cluster.gmem.view(address, nbytes).copy()
    except IllegalAccess as error:
        raise ValueError(error.message) from None


def backtrace(ptx: str, warp: Warp) -> list[Place]:
    """`Debugger.backtrace`."""
    instruction = standing(warp)
    if instruction is None:
        return []
    place = place_of_line(ptx, instruction.line, instruction.text)
    outer = [Place(place.inlined_at)] if place.inlined_at is not None else []
    return [place, *outer]
