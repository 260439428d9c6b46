"""Where a byte of a result came from: store <- registers <- MMA <- stage <- copy <- element in global memory.

The launch runs once more under the same schedule, and stops in front of what writes memory or multiplies; there, the
registers say which bytes. Between a store and the MMA lies the arithmetic of one thread, which the text shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.checking import inspection
from cute_kernels.emulator.core.layout import STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.isa.ptx.families import read, written
from cute_kernels.emulator.isa.ptx.flow import Flow
from cute_kernels.emulator.isa.ptx.program import (
    TYPE_BITS,
    Immediate,
    Instruction,
    Memory,
    Operand,
    Register,
    Symbol,
    Vector,
)
from cute_kernels.emulator.machine.launch.scheduler import Scheduler
from cute_kernels.emulator.machine.state.smem import OFFSET_MASK
from cute_kernels.emulator.machine.state.tmem import LANES
from cute_kernels.emulator.machine.units.copies.bulk import tensor_descriptor
from cute_kernels.emulator.machine.units.copies.generic_accesses import space_of
from cute_kernels.emulator.machine.units.copies.tensor_map import CHUNK, SWIZZLES, TensorMap, decode
from cute_kernels.emulator.machine.units.matrix.operands import (
    KINDS,
    ElementType,
    Matrix,
    decode_instruction,
    decode_matrix,
    operand_places,
)
from cute_kernels.emulator.machine.units.matrix.operands import Instruction as MmaForm
from cute_kernels.emulator.machine.units.matrix.wgmma import ROWS, WARPS, Form
from cute_kernels.emulator.machine.units.sm import Warp
from cute_kernels.emulator.programs.recorded import Replay
from cute_kernels.emulator.reports.arrays import Tile, tile_at
from cute_kernels.emulator.reports.operations import noun

_SWIZZLES = tuple(SWIZZLES)
_MMA, _LOAD = ("tcgen05", "mma"), ("tcgen05", "ld")
_Chunk = tuple[str, list[int], int, str]
Byte = tuple[str, int, int]
"""Space ("global", or "shared"), CTA of the cluster (0 for global memory), address."""


@dataclass(frozen=True)
class Event:
    """An instruction that a warp is about to execute.

    Attributes:
        cluster, cta, warp: who; ``lanes``: mask of those that execute it.
        values: of the registers that it reads.
        map: tensor map of a copy.
        form: of a wgmma.
    """

    cluster: int
    cta: int
    warp: int
    lanes: int
    instruction: Instruction
    values: dict[str, int | np.ndarray]
    map: Any = None
    form: Form | None = None

    def value(self, operand: Operand, lane: int | None = None) -> int:
        """A register in a lane, the first that executes if none is given; or a number."""
        if isinstance(operand, Immediate):
            return operand.value
        if not isinstance(operand, Register):
            raise ValueError(f"{operand} of `{self.instruction.text}` is not followed")
        found = self.values[operand.name]
        first = (self.lanes & -self.lanes).bit_length() - 1
        return int(found) if isinstance(found, int) else int(found[first if lane is None else lane])

    @property
    def who(self) -> str:
        """The warp and the instruction, for people."""
        source = f", {self.instruction.source.rpartition('/')[2]}" if self.instruction.source else ""
        place = f"warp {self.cluster}.{self.cta}.{self.warp} at PTX line {self.instruction.line}"
        return f"{noun(self.instruction)} of {place}{source}"


@dataclass
class Trail:
    """Instructions of a launch that move data or multiply, in its order; `Options.debugger` of one run.

    Attributes:
        events: so far; ``flow``: of the kernel, an instruction to a block.
        symbols: shared variables.
    """

    events: list[Event] = field(default_factory=list)
    flow: Flow | None = None
    symbols: dict[str, int] = field(default_factory=dict)

    def begins(self, scheduler: Scheduler) -> None:
        """`Options.debugger`."""
        execution = scheduler.execution
        self.flow = execution.flow
        wanted = [block.index for block in self.flow.blocks if _followed(self._instruction(block.start))]
        execution.bytecode.stop_at(wanted)

    def _instruction(self, index: int) -> Instruction:
        return self.flow.kernel.instructions[index]

    def stops(self, warp: Warp) -> None:
        """`Options.debugger`."""
        instruction, cluster = inspection.standing(warp), warp.cluster
        values = inspection.registers(warp, sorted(read(instruction)))
        lanes, guard = inspection.active_lanes(warp), instruction.guard
        if guard is not None:
            holds = np.broadcast_to(values[guard.register], 32).astype(bool) ^ guard.negated
            lanes &= sum(1 << int(lane) for lane in np.flatnonzero(holds))
        event = Event(cluster.index, warp.cta.rank, warp.index, lanes, instruction, values)
        if instruction.parts[:4] == ("cp", "async", "bulk", "tensor"):
            described = next(each for each in instruction.operands if isinstance(each, Memory) and each.extra)
            event = Event(**{**vars(event), "map": decode(tensor_descriptor(cluster, event.value(described.base)))})
        elif instruction.parts[0] == "wgmma":
            form = next(each for each in cluster.wgmma.forms if each.instruction is instruction)
            event = Event(**{**vars(event), "form": form})
        self.events.append(event)


def _followed(instruction: Instruction) -> bool:
    parts = instruction.parts
    if parts[0] in ("st", "red", "atom", "stmatrix") or parts[:2] in (("wgmma", "mma_async"), _MMA, _LOAD):
        return "local" not in parts
    return parts[:3] == ("cp", "async", "bulk") and "prefetch" not in parts and len(instruction.operands) > 1 or (
        parts[0] == "mov" and any(isinstance(each, Immediate) for each in instruction.operands)
    )


class Origin:
    """Origins of bytes of one launch.

    Args:
        launch: for names.
        replay: the launch with memory of this process.
        options: the schedule.
    """

    def __init__(self, launch: CapturedLaunch, replay: Replay, options: Any) -> None:
        self._launch, self._replay, self._trail = launch, replay, Trail()
        self._left = replay.run(options(debugger=self._trail)).memory

    def lines(self, name: str, byte: int) -> list[str]:
        """How a byte of an array of the device came about, a step per line.

        Raises:
            ValueError: no such array or byte.
        """
        arrays = self._replay.addresses()
        if name not in arrays or not 0 <= byte < arrays[name][1]:
            have = ", ".join(f"{each} of {nbytes} bytes" for each, (_, nbytes) in arrays.items()) or "none has a name"
            raise ValueError(f"array, byte = {name}, {byte}: must be a byte of an array of the device; {have}")
        first = f"byte {byte} of {name}"
        return [first, *self._of_byte(("global", 0, arrays[name][0] + byte), len(self._trail.events), 1)]

    def first_wrong(self, name: str, expected: np.ndarray) -> tuple[int, str]:
        """The first element of an array of the device that is not as expected: its byte, and both values in words.

        Args:
            name: of the array.
            expected: of its type, or float32 where that is bfloat16. Floats may differ by 2% of the largest one.

        Raises:
            ValueError: no such array, another size, or nothing is wrong.
        """
        found = dict(zip((image.name for image in self._replay.recorded.memory), self._left)).get(name)
        kind = expected.dtype
        if found is not None and kind == np.float32 and found.nbytes == expected.nbytes // 2:
            kind = np.dtype(ml_dtypes.bfloat16)
        if found is None or found.nbytes != expected.size * kind.itemsize:
            raise ValueError(f"expected = {expected.dtype} {list(expected.shape)}: must have the bytes of array {name}")
        values, wanted = found.view(kind).reshape(expected.shape), expected
        if not np.issubdtype(expected.dtype, np.integer):
            most = 0.02 * np.nanmax(np.abs(wanted), initial=0)
            wrong = ~np.isclose(values.astype(np.float64), wanted, rtol=0, atol=most, equal_nan=True)
        else:
            wrong = values != wanted
        if not wrong.any():
            raise ValueError(f"expected: all of {name} is as it must be")
        index = tuple(map(int, np.argwhere(wrong)[0]))
        byte = int(np.ravel_multi_index(index, expected.shape)) * kind.itemsize
        return byte, f"{name}[{', '.join(map(str, index))}] is {values[index]}, expected {wanted[index]}"

    def _writer(self, byte: Byte, end: int, cluster: int | None = None) -> tuple[int, Any] | None:
        """Who wrote a byte before an event: its index, and the source, see `_source`."""
        for index in range(end - 1, -1, -1):
            event = self._trail.events[index]
            if cluster is None or event.cluster == cluster:
                source = self._source(event, byte)
                if source is not None:
                    return index, source
        return None

    def _of_byte(self, byte: Byte, end: int, depth: int, cluster: int | None = None) -> Iterator[str]:
        indent, found = "  " * depth, self._writer(byte, end, cluster)
        if found is None:
            yield f"{indent}<- nothing that is followed has written {self._words(byte)}: it is what the launch found"
            return
        (index, source), element = found, self._element(byte)
        event = self._trail.events[index]
        if isinstance(source, str):
            yield f"{indent}<- {event.who} {source}"
        elif source[0] == "register":
            _, lane, (operand, at) = source
            yield f"{indent}<- {event.who} stores {operand} of lane {lane}" + f" to {element}" * bool(element)
            yield from self._of_register(event, index, operand, at, lane, depth + 1)
        else:
            if event.map is not None and byte[0] == "global":
                element = f"{self._array(byte[2])[0]}{_index(event.map, byte[2])[0][::-1]}"
            swizzle = f", with swizzle {event.map.swizzle}" if event.map is not None else ""
            yield f"{indent}<- {event.who} copies {self._words(source)}" + f" to {element}" * bool(element) + swizzle
            yield from self._of_byte(source, index, depth + 1, event.cluster) if source[0] == "shared" else ()

    def _words(self, byte: Byte) -> str:
        space, cta, address = byte
        if space == "shared":
            tile, element = self._tile(byte)
            layout = f" ({tile.swizzle})" if tile is not None else ""
            return f"{element or f'offset {address} of the shared memory'} of CTA {cta}{layout}"
        name, first = self._array(address)
        return f"byte {address - first} of {name}"

    def _array(self, address: int) -> tuple[str, int]:
        """Name and address of the array of the device that an address lies in."""
        for name, (first, nbytes) in self._replay.addresses().items():
            if first <= address < first + nbytes:
                return name, first
        return "global memory", 0

    def _tile(self, byte: Byte) -> tuple[Tile | None, str]:
        launch = self._launch
        return tile_at(launch.ptx, launch.kernel_name, launch, byte[2]) if byte[0] == "shared" else (None, "")

    def _element(self, byte: Byte) -> str:
        return self._tile(byte)[1]

    # --- what one event writes --------------------------------------------------------------------------------------

    def _source(self, event: Event, byte: Byte) -> Any:
        """Where an event takes a byte from that it writes: a `Byte`, a register, words; None: it does not write it."""
        parts = event.instruction.parts
        if parts[:4] == ("cp", "async", "bulk", "tensor"):
            return _boxes(event, byte) if isinstance(event.map, TensorMap) else None
        if parts[0] in ("st", "red", "atom"):
            return self._stored(event, byte)
        if parts[0] == "stmatrix":
            return self._matrix(event, byte)
        return None

    def _addresses(self, event: Event, target: Memory) -> Iterator[tuple[int, str, int]]:
        """Lane, space and address of each lane that executes."""
        for lane in (lane for lane in range(32) if event.lanes >> lane & 1):
            base = target.base
            if isinstance(base, Symbol):
                return
            named = (part.split("::")[0] for part in event.instruction.parts if part[:6] in ("shared", "global"))
            yield lane, *space_of(next(named, "generic"), event.value(base, lane) + target.offset)

    def _stored(self, event: Event, byte: Byte) -> Any:
        instruction = event.instruction
        target = next(each for each in instruction.operands if isinstance(each, Memory))
        data = instruction.operands[-1]
        items = data.items if isinstance(data, Vector) else (data,)
        size = TYPE_BITS.get(instruction.parts[-1], 32) // 8
        for lane, space, address in self._addresses(event, target):
            inside = byte[2] - (address & OFFSET_MASK if space == "shared" else address)
            cta = (address >> 24 if address >> 24 else event.cta) if space == "shared" else 0
            if space == byte[0] and cta == byte[1] and 0 <= inside < size * len(items):
                if instruction.parts[0] != "st":
                    return "adds to it"
                return "register", lane, (items[inside // size], inside % size)
        return None

    def _matrix(self, event: Event, byte: Byte) -> Any:
        """stmatrix: lanes 8 i to 8 i + 7 address the rows of matrix i, register i of each lane has a pair of it."""
        instruction = event.instruction
        target = next(each for each in instruction.operands if isinstance(each, Memory))
        registers = instruction.operands[-1].items if isinstance(instruction.operands[-1], Vector) else ()
        for lane, space, address in self._addresses(event, target):
            inside = byte[2] - (address & OFFSET_MASK)
            if space == byte[0] and event.cta == byte[1] and 0 <= inside < CHUNK and lane // 8 < len(registers):
                row, column = lane % 8, inside // 2
                if "trans" in instruction.parts:
                    row, column = column, row
                return "register", 4 * row + column // 2, (registers[lane // 8], column % 2 * 2 + inside % 2)
        return None

    # --- from a register to the MMA ---------------------------------------------------------------------------------

    def _of_register(self, event: Event, end: int, operand: Operand, at: int, lane: int, depth: int) -> Iterator[str]:
        indent = "  " * depth
        ends = list(self._definitions(event.instruction.index, operand, at))
        products = {index: position for index, position in ends if position >= 0}
        if not products:
            lines = [self._trail.flow.kernel.instructions[index] for index, _ in ends]
            texts = ", ".join(f"PTX line {each.line} `{each.text}`" for each in lines[:4])
            yield f"{indent}<- {texts or 'a number'}"
            return
        found: list[int] = []
        cleared = {index for index, position in ends if position == -2}
        for index in range(end - 1, -1, -1):
            other = self._trail.events[index]
            if (other.cluster, other.cta, other.warp) != (event.cluster, event.cta, event.warp):
                continue
            if other.instruction.index in cleared and found:
                break
            if other.instruction.index in products:
                found.append(index)
                if not _accumulates(other):
                    break
        for index in reversed(found):
            other, position = self._trail.events[index], products[self._trail.events[index].instruction.index]
            if other.instruction.parts[:2] == _LOAD:
                yield from self._of_cell(index, position, lane, indent)
            else:
                yield f"{indent}<- {other.who}: {self._of_product(index, position, lane)}"

    def _of_cell(self, end: int, position: int, lane: int, indent: str) -> Iterator[str]:
        """The MMAs that made what a lane loads from tensor memory into a register of a list."""
        event, found = self._trail.events[end], []
        address = event.value(event.instruction.operands[1].base) + event.instruction.operands[1].offset
        column, row = (address & 0xFFFF) + position, (address >> 16) + lane
        yield f"{indent}<- {event.who} loads column {column}, lane {row} of CTA {event.cta}{self._tile_of(column, row)}"
        if "32x32b" not in event.instruction.parts:
            yield f"{indent}  <- the shape of this load is not followed"
            return
        for index in range(end - 1, -1, -1):
            other = self._trail.events[index]
            if other.cluster != event.cluster or other.instruction.parts[:2] != _MMA:
                continue
            pair, form = _tensor_form(other)
            if other.cta // pair != event.cta // pair:
                continue
            first = (other.value(other.instruction.operands[0].base) + other.instruction.operands[0].offset) & 0xFFFF
            if form is None or form.m != LANES * pair:
                found.append((other, "an MMA of this kind and shape is not followed"))
            elif first <= column < first + form.n:
                found.append((other, self._of_tensor_product(index, row + event.cta % pair * LANES, column - first)))
            if found and found[-1][0] is other and not _accumulates(other):
                break
        yield from (f"{indent}  <- {other.who}: {text}" for other, text in reversed(found))

    def _tile_of(self, column: int, lane: int) -> str:
        launch = self._launch
        element = tile_at(launch.ptx, launch.kernel_name, launch, 4 * (column + (lane << 16)), "tensor")[1]
        return f", {element}" * bool(element)

    def _of_tensor_product(self, index: int, row: int, column: int) -> str:
        """One tcgen05.mma: of a pair, each CTA has half of the rows of A, and half of those of B."""
        event = self._trail.events[index]
        pair, form = _tensor_form(event)
        _, a, b = event.instruction.operands[:3]
        first, width = event.cta // pair * pair, form.n // pair
        matrices = [None if isinstance(each, Memory) else decode_matrix(event.value(each)) for each in (a, b)]
        where = ((row, LANES, form.a_type, form.a_mn_major), (column, width, form.b_type, form.b_mn_major))
        lines = [
            self._line(index, matrix, at % rows, rows, element, major, first + at // rows) if matrix is not None else []
            for matrix, (at, rows, element, major) in zip(matrices, where)
        ]
        return _product(row, column, lines, matrices)

    def _definitions(self, index: int, operand: Operand, at: int) -> Iterator[tuple[int, int]]:
        """Where the value of a register before an instruction comes from, through arithmetic: (instruction, position).

        The position is the register's among those of an accumulator, -2 of a number that is moved, -1 of anything else.
        """
        blocks = {block.start: block for block in self._trail.flow.blocks}
        kernel = self._trail.flow.kernel
        work, seen = [(index, operand, at)], set()
        while work:
            index, operand, at = work.pop()
            if not isinstance(operand, Register) or kernel.registers.get(operand.name) == "pred":
                continue
            before = list(blocks[index].predecessors)
            while before:
                block = self._trail.flow.blocks[before.pop()]
                if (block.start, operand.name, at) in seen:
                    continue
                seen.add((block.start, operand.name, at))
                instruction = kernel.instructions[block.start]
                if operand.name not in written(instruction) or instruction.guard is not None:
                    before += block.predecessors
                if operand.name not in written(instruction):
                    continue
                if instruction.parts[0] == "wgmma" or instruction.parts[:2] == _LOAD:
                    items = instruction.operands[0].items if isinstance(instruction.operands[0], Vector) else (operand,)
                    yield block.start, [item.name for item in items].index(operand.name)
                    if instruction.parts[:2] == _LOAD:
                        continue
                    work.append((block.start, operand, at))  # what it adds to
                elif any(isinstance(each, Memory) for each in instruction.operands) or instruction.parts[0] == "mma":
                    yield block.start, -1
                elif instruction.parts[0] == "mov" and isinstance(instruction.operands[1], Immediate):
                    yield block.start, -2
                else:
                    work += [(block.start, *each) for each in _parts(instruction, operand, at)]

    def _of_product(self, index: int, position: int, lane: int) -> str:
        """One wgmma: which element of D, and where the row of A and the column of B come from."""
        event = self._trail.events[index]
        form, operands = event.form, event.instruction.operands
        pair = position if form.d_type != "f16" else 2 * position
        row = event.warp % WARPS * 16 + lane // 4 + pair // 2 % 2 * 8
        column = pair // 4 * 8 + lane % 4 * 2 + pair % 2
        a = None if form.a_in_registers else _matrix(event.value(operands[1]))
        b = _matrix(event.value(operands[2]))
        of_a = self._line(index, a, row, ROWS, form.a_type, form.a_mn_major, event.cta) if a is not None else []
        of_b = self._line(index, b, column, form.n, form.b_type, form.b_mn_major, event.cta)
        return _product(row, column, [of_a, of_b], [a, b])

    def _line(
        self, index: int, matrix: Matrix, line: int, rows: int, element: ElementType, mn_major: bool, cta: int
    ) -> list[_Chunk]:
        """Chunks of a row: array or words, coordinates of the first element, elements, swizzle of the copy."""
        event, result = self._trail.events[index], []
        unit = element.nbytes if mn_major else CHUNK
        for place in operand_places(matrix, rows, element.nbytes, mn_major)[line] * unit:
            byte = ("shared", cta, int(place))
            found = self._writer(byte, index, event.cluster)
            count = unit // element.nbytes
            if found is None or isinstance(found[1], str) or found[1][0] != "global":
                words = self._words(byte) if found is None or not isinstance(found[1], str) else found[1]
                result.append((words, [], count, ""))
                continue
            copy, (_, _, address) = self._trail.events[found[0]], found[1]
            name, first = self._array(address)
            coordinates = _index(copy.map, address)[0][::-1] if copy.map is not None else [address - first]
            result.append((name, coordinates, count, copy.map.swizzle if copy.map is not None else ""))
        return result


def _product(row: int, column: int, lines: Sequence[list[_Chunk]], matrices: Sequence[Matrix | None]) -> str:
    """A product in words, and whether both of its rows are of the same K and read as they were copied."""
    along_k = [[chunk[1][-1] if chunk[1] else None for chunk in line] for line in lines]
    notes = ["they differ in their last coordinate"] if lines[0] and along_k[0] != along_k[1] else []
    for name, line, matrix in zip("AB", lines, matrices):
        copied = sorted({chunk[3] for chunk in line} - {"", matrix.swizzle}) if matrix is not None else []
        notes += [f"{name} is copied with swizzle {', '.join(copied)} and read with {matrix.swizzle}"] if copied else []
    a, b = (_joined(line) for line in lines)
    return f"D[{row}, {column}] += {a or 'registers or tensor memory'} * {b}" + "".join(f"; {note}" for note in notes)


def _tensor_form(event: Event) -> tuple[int, MmaForm | None]:
    """CTAs of a tcgen05.mma, and what its instruction descriptor says; None of kinds that are not followed."""
    parts = event.instruction.parts
    pair = 2 if "cta_group::2" in parts else 1
    kind = next(part for part in parts if part.startswith("kind::")).removeprefix("kind::")
    return pair, decode_instruction(kind, pair, event.value(event.instruction.operands[3])) if kind in KINDS else None


def _joined(line: Sequence[_Chunk]) -> str:
    """``a[0, 48:64]``; what does not follow each other stands side by side."""
    runs: list[tuple[str, list[int], int]] = []
    for name, first, count, _ in line:
        if runs and runs[-1][0] == name and (not first or [*runs[-1][1][:-1], runs[-1][1][-1] + runs[-1][2]] == first):
            runs[-1] = name, runs[-1][1], runs[-1][2] + count
        else:
            runs.append((name, first, count))
    return " ".join(
        f"{name}[{', '.join(map(str, [*first[:-1], f'{first[-1]}:{first[-1] + count}']))}]" if first else f"({name})"
        for name, first, count in runs
    )


def _parts(instruction: Instruction, result: Operand, at: int) -> Iterator[tuple[Operand, int]]:
    """Operands that a byte of a result is made of, and their bytes."""
    operands, parts = instruction.operands[1:], instruction.parts
    if parts[0] == "cvt" and any(part.endswith("x2") for part in parts) and len(operands) == 2:
        size = 2 if any(part.endswith("16x2") for part in parts) else 1
        yield operands[at // size == 0], 0
    elif parts[0] == "mov" and isinstance(operands[0], Vector):
        size = TYPE_BITS[parts[-1]] // 8 // len(operands[0].items)
        yield operands[0].items[at // size], at % size
    elif parts[0] == "mov" and isinstance(instruction.operands[0], Vector):
        items = instruction.operands[0].items
        yield operands[0], at + items.index(result) * TYPE_BITS[parts[-1]] // 8 // len(items)
    else:
        for operand in operands:
            yield from ((each, at) for each in (operand.items if isinstance(operand, Vector) else (operand,)))


def _accumulates(event: Event) -> bool:
    """Whether a wgmma or tcgen05.mma adds to what D has; false of what is no MMA."""
    if event.instruction.parts[:2] == _LOAD:
        return False
    first = 4 if event.instruction.parts[0] == "tcgen05" else 3
    scale = next(each for each in event.instruction.operands[first:] if not isinstance(each, (Memory, Vector)))
    return event.value(scale) & 1 == 1 if isinstance(scale, Register) else getattr(scale, "value", 1) != 0


def _matrix(descriptor: int) -> Matrix:
    fields = STRUCTURES["Matrix"]()
    library().wgmma_matrix(ctypes.c_int64(descriptor).value, ctypes.byref(fields))
    return Matrix(fields.address, fields.leading, fields.stride, _SWIZZLES[fields.swizzle])


def _boxes(event: Event, byte: Byte) -> Any:
    """A tensor copy: the byte at the other side of the one that it writes; None: it does not write that."""
    memories = [each for each in event.instruction.operands if isinstance(each, Memory)]
    described = next(each for each in memories if each.extra)
    coordinates = [event.value(each) for each in _flat(described.extra)][: event.map.rank]
    store = described is memories[0]
    shared = event.value(memories[1 if store else 0].base) + memories[1 if store else 0].offset
    tensor, size = event.map, event.map.element_bits // 8
    swizzle, pitch = SWIZZLES[tensor.swizzle], tensor.shared_pitch
    if store:
        if byte[0] != "global":
            return None
        index, rest = _index(tensor, byte[2])
        place = [at - first for at, first in zip(index, coordinates)]
        if any(not 0 <= at < most for at, most in zip(place, tensor.tile)) or byte[2] < tensor.address:
            return None
        row = 0
        for at, most in zip(reversed(place[1:]), reversed(tensor.tile[1:])):
            row = row * most + at
        address = (shared & OFFSET_MASK) + row * pitch + place[0] * size + rest
        return "shared", event.cta, address ^ (address >> swizzle.shift & swizzle.mask)
    masks = [each for each in event.instruction.operands if isinstance(each, Register)]
    multicast = "multicast::cluster" in event.instruction.parts
    targets = event.value(masks[0]) if multicast else 1 << (shared >> 24 or event.cta)
    if byte[0] != "shared" or not targets >> byte[1] & 1:
        return None
    inside = (byte[2] ^ (byte[2] >> swizzle.shift & swizzle.mask)) - (shared & OFFSET_MASK)
    if not 0 <= inside < tensor.shared_bytes:
        return None
    row, index = inside // pitch, [inside % pitch // size]
    for most in tensor.tile[1:]:
        index.append(row % most)
        row //= most
    index = [first + at * step for first, at, step in zip(coordinates, index, tensor.element_strides)]
    if any(not 0 <= at < most for at, most in zip(index, tensor.extents)):
        return "zeros beyond the tensor"
    return "global", 0, tensor.address + sum(at * stride for at, stride in zip(index, (size, *tensor.strides)))


def _index(tensor: TensorMap, address: int) -> tuple[list[int], int]:
    """Coordinates of the element of a tensor that has a byte, the innermost first, and the byte of the element."""
    rest, index = address - tensor.address, []
    for stride in reversed((tensor.element_bits // 8, *tensor.strides)):
        index.insert(0, rest // stride)
        rest %= stride
    return index, rest


def _flat(operands: Sequence[Operand]) -> Iterator[Operand]:
    for each in operands:
        yield from each.items if isinstance(each, Vector) else (each,)
