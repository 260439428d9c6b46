"""State of a warp that stands still: its registers, its CTA's shared memory, and where in the source it is."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.facts import BarrierState
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.units.sm import Cluster, Warp
from cute_kernels.emulator.reports.arrays import Tile, arrays, tiles
from cute_kernels.emulator.reports.barriers import Barriers
from cute_kernels.emulator.reports.diagnosis import place_of_line
from cute_kernels.emulator.reports.model import Place


def instructions_at(instructions: Sequence[Instruction], place: str) -> tuple[int, ...]:
    """Indices of the instructions that warps come to first of a PTX line, or of a line of the source. ``instructions``:
    of a kernel; ``place``: see `Debugger.break_at`. Raises ValueError: no instruction was made of it."""
    file, _, line = place.rpartition(":")
    if not line.isdecimal():
        raise ValueError(f"place = {place!r}: must be a line of the PTX or FILE:LINE")
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


def registers(warp: Warp, names: Sequence[str] | None) -> dict[str, int | np.ndarray]:
    """`Debugger.registers`; None: of all that are live."""
    launch = warp.code.launch
    if warp.code.standing >= len(launch.flow.blocks):
        raise ValueError(f"{warp.label} has exited")
    live = launch.flow.blocks[warp.code.standing].live_in
    if names is None:
        names = sorted(live, key=_order)
    for name in names:
        if name not in launch.kernel.registers:
            raise ValueError(f"register {name!r}: the kernel has none of this name")
        if name not in live:
            raise ValueError(f"register {name}: nothing from here on reads it, so that its value is not kept")
    return {name: _value(warp, *launch.translation.slots[name]) for name in names}


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
    """`Debugger.shared`. Raises ValueError: no such variable, or bytes that the CTA has not got."""
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


_TILE = re.compile(r"([^@\[\]]+)(?:@(\d+))?(?:\[(.*)\])?")


def find_tile(launch: CapturedLaunch, name: str, part: int) -> tuple[Tile, np.ndarray]:
    """The tensor with a name, and its places; of several that begin at known places the one with number ``part``.
    Raises ValueError: there is none."""
    known = list(tiles(launch.ptx, launch.kernel_name, launch))
    named = [each for each in known if each.name == name] or [each for each in known if each.variable == name]
    if not named:
        names = ", ".join(filter(None, dict.fromkeys(name for each in known for name in (each.name, each.variable))))
        have = f"the kernel has {names}" if names else "none is known, and PTX does not say the layouts of tensors"
        raise ValueError(f"tile = {name!r}: must be the variable of a tensor; {have}")
    fixed = list(dict.fromkeys(each for each in named if not each.view.step))
    found = fixed[part] if part < len(fixed) else named[0]
    return found, found.places(part)


def tile(
    find: Callable[..., tuple[Tile, np.ndarray]], warp: Warp, text: str, index: tuple[int | slice, ...], part: int
) -> np.ndarray:
    """`Debugger.tile`; ``find`` is `find_tile` of the launch."""
    found = _TILE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"tile = {text!r}: must be NAME, NAME@PART or NAME[INDEX, ..]")
    wanted, places = find(found[1], int(found[2] or part))
    size = wanted.dtype.itemsize
    index = parsed_index(found[3], places.ndim) if found[3] else index
    if len(index) > places.ndim or any(isinstance(i, int) and i >= n for i, n in zip(index, places.shape)):
        raise ValueError(f"tile = {text!r}: index must be within {list(places.shape)}")
    places = places[index]
    if wanted.view.space == "tensor":
        columns = warp.cta.tmem.allocations
        if len(columns) != 1:
            raise ValueError(f"tile = {text!r}: the CTA has {len(columns)} allocations of tensor memory: must have one")
        places = places + 4 * next(iter(columns))
        memory, cells = warp.cta.tmem.cells.view(np.uint8), places // 4  # uint32 [columns, lanes]
        places = cells % 65536 * memory.shape[1] + cells // 65536 * 4 + places % 4
    else:
        memory = warp.cta.shared.data
    if places.size and not 0 <= places.min() <= places.max() < memory.size:
        raise ValueError(f"tile = {text!r}: its bytes {places.min()} to {places.max()} must be within the CTA's memory")
    cells = memory.reshape(-1)[places[..., None] + np.arange(size)]
    return np.ascontiguousarray(cells).view(wanted.dtype)[..., 0]


def parsed_index(text: str, axes: int) -> tuple[int | slice, ...]:
    """``0:8, :, 1`` as an index; ``stage 1`` is that of the third axis. Raises ValueError: no index."""
    index: list[int | slice] = []
    for each in (part.strip() for part in text.split(",")):
        if each.startswith("stage "):
            index += [slice(None)] * (min(2, axes - 1) - len(index))
            each = each.removeprefix("stage ").strip()
        try:
            numbers = [int(number) if number.strip() else None for number in each.split(":")]
        except ValueError:
            raise ValueError(f"index = [{text}]: must be numbers, ranges like 0:8, or stage N") from None
        index.append(slice(*numbers) if len(numbers) > 1 else numbers[0])
    return tuple(index)


def named_barriers(ptx: str, cluster: Cluster) -> list[tuple[BarrierState, str]]:
    """The mbarriers of a cluster and the name of each, "" where it has none."""
    states = cluster.barriers.states()
    names = Barriers(states, lambda instruction: place_of_line(ptx, instruction.line, instruction.text))
    return [(state, names.barrier(state).name) for state in states]


def phase(ptx: str, warp: Warp, barrier: str, known: dict[tuple[int, str], int]) -> int:
    """`Debugger.phase`; ``known`` keeps the offsets of names, by CTA."""
    rank = warp.cta.rank
    mine = {state.offset: state for state in warp.cluster.barriers.states() if state.cta == rank}
    if known.get((rank, barrier)) not in mine:
        all_names = named_barriers(ptx, warp.cluster)
        found = {name or str(state.offset): state.offset for state, name in all_names if state.cta == rank}
        if barrier not in (*found, *map(str, mine)):
            have = ", ".join(found) or "none is initialised"
            raise ValueError(f"barrier = {barrier!r}: must be a name or an offset; the CTA has {have}")
        known[rank, barrier] = found[barrier] if barrier in found else int(barrier)
    return mine[known[rank, barrier]].phase


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
