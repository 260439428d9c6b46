"""Where a byte of a result came from: store <- registers <- MMA <- stage <- copy <- element in global memory.

The launch runs once more under the same schedule, and stops in front of each instruction that moves data or multiplies,
and of the arithmetic between these; there, the registers say which bytes.
"""

from __future__ import annotations

import bisect
import ctypes
import difflib
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.checking import inspection
from cute_kernels.emulator.core.layout import STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.isa.ptx import program as ptx
from cute_kernels.emulator.isa.ptx.families import CONTROL, read, registers_of, written
from cute_kernels.emulator.isa.ptx.flow import Flow
from cute_kernels.emulator.machine.launch.scheduler import Scheduler
from cute_kernels.emulator.machine.state.smem import OFFSET_MASK, shared_layout
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
from cute_kernels.emulator.reports.words import noun

_SWIZZLES = tuple(SWIZZLES)
_WGMMA, _MMA, _LOAD = ("wgmma", "mma_async"), ("tcgen05", "mma"), ("tcgen05", "ld")
_WIDEST = 32  # bytes that a lane stores, or a row of stmatrix has
_MOST = 8  # loads that are shown of a value
_PLACE = re.compile(r" at PTX line \d+|, [^ ,]+:\d+|%\w+")  # what may differ between two programs that do the same
_Chunk = tuple[str, list[int], int, str]
Byte = tuple[str, int, int]
"""Space ("global", or "shared"), CTA of the cluster (0 for global memory), address."""


@dataclass(frozen=True)
class Event:
    """An instruction that a warp is about to execute."""

    # cluster, cta, warp: who
    cluster: int
    cta: int
    warp: int
    lanes: int  # mask of those that execute it
    instruction: ptx.Instruction
    values: dict[str, int | np.ndarray]  # of the registers that it reads; addresses of variables
    map: Any = None  # tensor map of a copy
    form: Form | None = None  # of a wgmma

    def value(self, operand: ptx.Operand, lane: int | None = None) -> int:
        """A register in a lane, the first that executes if none is given; or a number."""
        if isinstance(operand, ptx.Immediate):
            return operand.value
        if not isinstance(operand, (ptx.Register, ptx.Symbol)):
            raise ValueError(f"{operand} of `{self.instruction.text}` is not followed")
        found = self.values[operand.name]
        if isinstance(operand, ptx.Symbol):
            return int(found) + operand.offset
        first = (self.lanes & -self.lanes).bit_length() - 1
        return int(found) if isinstance(found, int) else int(found[first if lane is None else lane])

    def may_write(self, byte: Byte) -> bool:
        """Whether an instruction that writes memory may write a byte, by the low bits of its addresses."""
        if self.map is not None:
            return True
        bulk = "bulk" in self.instruction.parts
        most = self.value(self.instruction.operands[2]) if bulk else _WIDEST
        return bool((((byte[2] - self._starts) & OFFSET_MASK) < most).any())

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """Low bits of the addresses of all lanes."""
        target = next(each for each in self.instruction.operands if isinstance(each, ptx.Memory))
        if isinstance(target.base, ptx.Register):
            values = np.atleast_1d(np.array(self.values[target.base.name], np.uint64)).astype(np.int64)
        else:
            values = np.array([self.value(target.base)])
        return (values + target.offset) & OFFSET_MASK

    @property
    def warp_key(self) -> tuple[int, int, int]:
        """Cluster, CTA and warp."""
        return self.cluster, self.cta, self.warp

    @property
    def who(self) -> str:
        """The warp and the instruction, for people."""
        source = f", {self.instruction.source.rpartition('/')[2]}" if self.instruction.source else ""
        place = f"warp {self.cluster}.{self.cta}.{self.warp} at PTX line {self.instruction.line}"
        return f"{noun(self.instruction)} of {place}{source}"


@dataclass
class Trail:
    """Instructions of a launch through which its data go, in its order; `Options.debugger` of one run."""

    events: list[Event] = field(default_factory=list)  # so far
    stores: list[int] = field(default_factory=list)  # indices of those that write memory
    kernel: ptx.Kernel | None = None  # that ran
    shared: Mapping[str, int] = field(default_factory=dict)  # offsets of its shared variables
    # of a register of a warp, by (cluster, CTA, warp, register): events that write it, in order
    writes: dict[tuple[int, int, int, str], list[int]] = field(default_factory=dict)

    def begins(self, scheduler: Scheduler) -> None:
        """`Options.debugger`."""
        flow = scheduler.execution.flow
        self.kernel, wanted = flow.kernel, _data_flow(flow)
        self.shared, _ = shared_layout(flow.kernel.variables)
        scheduler.execution.bytecode.stop_at([block.index for block in flow.blocks if block.start in wanted])

    def stops(self, warp: Warp) -> None:
        """`Options.debugger`."""
        instruction, cluster = inspection.standing(warp), warp.cluster
        values = inspection.registers(warp, sorted(_needed(instruction)))
        bases = (each.base for each in instruction.operands if _is_end(instruction) and isinstance(each, ptx.Memory))
        for name in (base.name for base in bases if isinstance(base, ptx.Symbol)):
            shared = self.shared.get(name)
            values[name] = warp.cta.shared_base + shared if shared is not None else cluster.symbols[name]
        lanes, guard = inspection.active_lanes(warp), instruction.guard
        if guard is not None:
            holds = np.broadcast_to(values[guard.register], 32).astype(bool) ^ guard.negated
            lanes &= sum(1 << int(lane) for lane in np.flatnonzero(holds))
        event = Event(cluster.index, warp.cta.rank, warp.index, lanes, instruction, values)
        if instruction.parts[:4] == ("cp", "async", "bulk", "tensor"):
            described = next(each for each in instruction.operands if isinstance(each, ptx.Memory) and each.extra)
            event = Event(**{**vars(event), "map": decode(tensor_descriptor(cluster, event.value(described.base)))})
        elif instruction.parts[:2] == _WGMMA:
            form = next(each for each in cluster.wgmma.forms if each.instruction is instruction)
            event = Event(**{**vars(event), "form": form})
        if _is_end(instruction) and instruction.parts[0] in ("st", "red", "atom", "stmatrix", "cp"):
            self.stores.append(len(self.events))
        for name in _results(instruction):
            self.writes.setdefault((*event.warp_key, name), []).append(len(self.events))
        self.events.append(event)

    def writer(self, event: Event, name: str, lane: int, end: int) -> int | None:
        """The event before ``end`` that wrote a register of the warp of another event; None: none that is followed."""
        found = self.writes.get((*event.warp_key, name), [])
        for index in reversed(found[: bisect.bisect_left(found, end)]):
            if self.events[index].lanes >> lane & 1:
                return index
        return None


def _is_end(instruction: ptx.Instruction) -> bool:
    """Whether an instruction moves data between memory and registers, or within memory, or multiplies tiles."""
    parts = instruction.parts
    if parts[0] in ("st", "red", "atom", "stmatrix", "ld", "ldmatrix", "mma") or parts[:2] in (
        _WGMMA, _MMA, _LOAD
    ):  # fmt: skip
        return not {"local", "param"} & set(parts)
    copies = parts[:2] == ("cp", "async") and len(instruction.operands) > 1
    return copies and not {"prefetch", "wait_group", "mbarrier"} & set(parts[:4])


def _results(instruction: ptx.Instruction) -> tuple[str, ...]:
    """Registers that an instruction writes; a wgmma writes its accumulators."""
    if instruction.parts[:2] == _WGMMA:
        return tuple(registers_of(instruction.operands[0]))
    return written(instruction)


def _sources(instruction: ptx.Instruction) -> list[ptx.Operand]:
    """Operands whose values go into the results, or into memory."""
    parts, operands = instruction.parts, instruction.operands
    if parts[0] in ("st", "stmatrix"):
        return [operands[-1]]
    if parts[0] == "mma":
        return list(operands[1:4])
    if parts[:2] == _WGMMA:
        return [each for each in operands[:2] if isinstance(each, ptx.Vector)]
    return [] if _is_end(instruction) or any(isinstance(each, ptx.Memory) for each in operands) else list(operands[1:])


def _needed(instruction: ptx.Instruction) -> set[str]:
    """Registers whose values say which bytes an instruction moves, and its guard."""
    ends = instruction.operands if _is_end(instruction) else ()
    found = {name for each in ends if not isinstance(each, ptx.Vector) for name in registers_of(each)}
    return (found & set(read(instruction))) | ({instruction.guard.register} if instruction.guard is not None else set())


def _data_flow(flow: Flow) -> set[int]:
    """Indices of the instructions that move data or multiply, and of those that compute what these move."""
    kernel = flow.kernel
    writers: dict[str, list[ptx.Instruction]] = {}
    for each in kernel.instructions:
        for name in _results(each) if each.parts[0] not in CONTROL else ():
            writers.setdefault(name, []).append(each)
    work = [each for each in kernel.instructions if _is_end(each)]
    found = {each.index for each in work}
    while work:
        for name in (name for each in _sources(work.pop()) for name in registers_of(each)):
            if kernel.registers.get(name) == "pred":
                continue
            new = [each for each in writers.get(name, ()) if each.index not in found]
            found.update(each.index for each in new)
            work += new
    return found


class Origin:
    """Origins of bytes of one launch. ``launch``: for names. ``replay``: the launch with memory of this process.
    ``options``: the schedule."""

    def __init__(self, launch: CapturedLaunch, replay: Replay, options: Any) -> None:
        self._launch, self._replay, self._trail = launch, replay, Trail()
        self._left = replay.run(options(debugger=self._trail)).memory

    def lines(self, name: str, byte: int) -> list[str]:
        """How a byte of an array of the device came about, a step per line. Raises ValueError: no such array or byte.
        """
        arrays = self._replay.addresses()
        if name not in arrays or not 0 <= byte < arrays[name][1]:
            have = ", ".join(f"{each} of {nbytes} bytes" for each, (_, nbytes) in arrays.items()) or "none has a name"
            raise ValueError(f"array, byte = {name}, {byte}: must be a byte of an array of the device; {have}")
        first = f"byte {byte} of {name}"
        return [first, *self._of_byte(("global", 0, arrays[name][0] + byte), len(self._trail.events), 1)]

    def first_wrong(self, name: str, expected: np.ndarray) -> tuple[int, str]:
        """The first element of an array of the device that is not as expected: its byte, and both values in words.
        ``name``: of the array. ``expected``: of its type, or float32 where that is bfloat16. Floats may differ by 2% of
        the largest one. Raises ValueError: no such array, another size, or nothing is wrong."""
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
            raise ValueError(f"all of {name} is as it must be")
        index = tuple(map(int, np.argwhere(wrong)[0]))
        byte = int(np.ravel_multi_index(index, expected.shape)) * kind.itemsize
        return byte, f"{name}[{', '.join(map(str, index))}] is {values[index]}, expected {wanted[index]}"

    def against(self, name: str, other: Origin) -> list[str]:
        """How the first byte of an array that another launch leaves as another value came about, in both launches.

        Lines that only this launch has begin with "- ", those that only the other one has with "+ ". Raises ValueError:
        no such array in both, of other sizes, or no byte differs."""
        left, there = (
            dict(zip((image.name for image in each._replay.recorded.memory), each._left)).get(name)
            for each in (self, other)
        )
        if left is None or there is None or left.nbytes != there.nbytes:
            sizes = [each.nbytes if each is not None else "no" for each in (left, there)]
            have = f"they have {sizes[0]} and {sizes[1]} bytes of it"
            raise ValueError(f"array = {name}: must be in both launches, of one size; {have}")
        differ = np.flatnonzero(left != there)
        if not len(differ):
            raise ValueError(f"array = {name}: must differ in some byte; both launches leave the same")
        ours, theirs = (each.lines(name, int(differ[0])) for each in (self, other))
        texts = ([_PLACE.sub("", line) for line in each] for each in (ours, theirs))
        same = difflib.SequenceMatcher(None, *texts, autojunk=False)
        found = [f"{len(differ)} of {left.nbytes} bytes of {name} differ; here -, there +"]
        for tag, first, last, start, end in same.get_opcodes():
            if tag == "equal":
                found += [f"  {line}" for line in ours[first:last]]
            else:
                found += [f"- {line}" for line in ours[first:last]] + [f"+ {line}" for line in theirs[start:end]]
        return found

    def _writer(self, byte: Byte, end: int, cluster: int | None = None) -> tuple[int, Any] | None:
        """Who wrote a byte before an event: its index, and the source, see `_source`."""
        stores = self._trail.stores
        for index in reversed(stores[: bisect.bisect_left(stores, end)]):
            event = self._trail.events[index]
            if not event.may_write(byte):
                continue
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
        if parts[:2] == ("cp", "async"):
            return self._copied(event, byte)
        if parts[0] in ("st", "red", "atom"):
            return self._stored(event, byte)
        if parts[0] == "stmatrix":
            return self._matrix(event, byte)
        return None

    def _addresses(self, event: Event, target: ptx.Memory, which: int = 0) -> Iterator[tuple[int, str, int]]:
        """Lane, space and address of each lane that executes; the space is that number among those of the opcode."""
        named = [part.split("::")[0] for part in event.instruction.parts if part[:6] in ("shared", "global")]
        for lane in (lane for lane in range(32) if event.lanes >> lane & 1):
            address = event.value(target.base, lane) + target.offset
            yield lane, *space_of(named[which] if which < len(named) else "generic", address)

    def _copied(self, event: Event, byte: Byte) -> Any:
        """cp.async of each lane, and cp.async.bulk of bytes."""
        target, origin, size, *more = event.instruction.operands
        bulk = "bulk" in event.instruction.parts
        sources = {lane: place for lane, *place in self._addresses(event, origin, 1)}
        for lane, space, address in self._addresses(event, target):
            place = self._place(event, space, address)
            inside = byte[2] - place[2]
            ctas, kept = 1 << place[1], None if bulk else self._kept(event, lane)
            if "multicast::cluster" in event.instruction.parts:
                ctas = event.value(more[1])
            if space != byte[0] or not ctas >> byte[1] & 1 or not 0 <= inside < event.value(size, lane):
                continue
            if kept is not None and inside >= kept:
                return "fills it with zeros"
            return self._place(event, sources[lane][0], sources[lane][1] + inside)
        return None

    def _kept(self, event: Event, lane: int) -> int | None:
        """Bytes that a cp.async takes from its source, before zeros; None: all."""
        *_, last = event.instruction.operands[3 : -1 if "L2::cache_hint" in event.instruction.parts else None] or [None]
        if last is None:
            return None
        ignored = isinstance(last, ptx.Not) or self._trail.kernel.registers.get(getattr(last, "name", "")) == "pred"
        value = event.value(last.register if isinstance(last, ptx.Not) else last, lane)
        return value if not ignored else 0 if value ^ isinstance(last, ptx.Not) else None

    def _stored(self, event: Event, byte: Byte) -> Any:
        instruction = event.instruction
        target = next(each for each in instruction.operands if isinstance(each, ptx.Memory))
        data = instruction.operands[-1]
        items = data.items if isinstance(data, ptx.Vector) else (data,)
        size = ptx.TYPE_BITS.get(instruction.parts[-1], 32) // 8
        for lane, space, address in self._addresses(event, target):
            place = self._place(event, space, address)
            inside = byte[2] - place[2]
            if place[:2] == byte[:2] and 0 <= inside < size * len(items):
                if instruction.parts[0] != "st":
                    return "adds to it"
                return "register", lane, (items[inside // size], inside % size)
        return None

    def _matrix(self, event: Event, byte: Byte) -> Any:
        """stmatrix: lanes 8 i to 8 i + 7 address the rows of matrix i, register i of each lane has a pair of it."""
        instruction = event.instruction
        target = next(each for each in instruction.operands if isinstance(each, ptx.Memory))
        registers = instruction.operands[-1].items if isinstance(instruction.operands[-1], ptx.Vector) else ()
        for lane, space, address in self._addresses(event, target):
            inside = byte[2] - (address & OFFSET_MASK)
            if space == byte[0] and event.cta == byte[1] and 0 <= inside < CHUNK and lane // 8 < len(registers):
                row, column = lane % 8, inside // 2
                if "trans" in instruction.parts:
                    row, column = column, row
                return "register", 4 * row + column // 2, (registers[lane // 8], column % 2 * 2 + inside % 2)
        return None

    # --- from a register to the MMA, or to memory ------------------------------------------------------------------

    def _of_register(
        self, event: Event, end: int, operand: ptx.Operand, at: int, lane: int, depth: int
    ) -> Iterator[str]:
        indent = "  " * depth
        ends = list(self._ends(event, end, operand, at, lane))
        moving = sorted((index, place) for index, place in ends if _is_end(self._trail.events[index].instruction))
        if not moving:
            lines = [self._trail.events[index].instruction for index, _ in ends]
            texts = ", ".join(f"PTX line {each.line} `{each.text}`" for each in lines[:4])
            yield f"{indent}<- {texts or 'a number'}"
            return
        loads = 0
        for index, place in moving:
            other = self._trail.events[index]
            if other.instruction.parts[:2] == _LOAD:
                yield from self._of_cell(index, place[0], lane, indent)
            elif other.instruction.parts[0] in ("wgmma", "mma"):
                yield f"{indent}<- {other.who}: {self._of_product(index, *place, lane)}"
            elif (loads := loads + 1) <= _MOST:
                source = self._loaded(other, *place, lane)
                yield f"{indent}<- {other.who} loads {self._words(source) if source is not None else 'it'}"
                if source is not None and source[0] == "shared":
                    yield from self._of_byte(source, index, depth + 1, other.cluster)
        if loads > _MOST:
            yield f"{indent}<- and {loads - _MOST} more loads"

    def _ends(
        self, event: Event, end: int, operand: ptx.Operand, at: int, lane: int
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Events that a byte of a register, before an event, is made of: loads, products, what is not followed.

        With each of them the place in its results: the register among several, and the byte in it.
        """
        work, seen = [(end, operand, at)], set()
        while work:
            end, operand, at = work.pop()
            if not isinstance(operand, ptx.Register):
                continue
            index = self._trail.writer(event, operand.name, lane, end)
            if index is None or (index, operand.name, at) in seen:
                continue
            seen.add((index, operand.name, at))
            instruction = self._trail.events[index].instruction
            position = _results(instruction).index(operand.name)
            if instruction.parts[0] in ("wgmma", "mma"):
                yield index, (position, at)
                added = instruction.operands[0 if instruction.parts[0] == "wgmma" else 3]
                if _accumulates(self._trail.events[index]):
                    work.append((index, added.items[position], at))
                continue
            parts = [] if _is_end(instruction) or not _sources(instruction) else [
                each for each in _parts(instruction, operand, at) if isinstance(each[0], ptx.Register)
            ]  # fmt: skip
            if not parts:
                yield index, (position, at)
            work += [(index, *each) for each in parts]

    def _loaded(self, event: Event, position: int, at: int, lane: int) -> Byte | None:
        """Where a load takes a byte of one of its registers from."""
        instruction = event.instruction
        source = next(each for each in instruction.operands if isinstance(each, ptx.Memory))
        places = {each: (space, address) for each, space, address in self._addresses(event, source)}
        if instruction.parts[0] != "ldmatrix":
            inside = position * ptx.TYPE_BITS.get(instruction.parts[-1], 32) // 8 + at
        elif "trans" in instruction.parts:  # the lane has column lane / 4 of rows 2 * (lane % 4) and the next one
            lane, inside = 8 * position + 2 * (lane % 4) + at // 2, lane // 4 * 2 + at % 2
        else:
            lane, inside = 8 * position + lane // 4, lane % 4 * 4 + at
        if lane not in places:
            return None
        space, address = places[lane]
        return self._place(event, space, address + inside)

    @staticmethod
    def _place(event: Event, space: str, address: int) -> Byte:
        """An address of a warp, as a byte of its cluster or of the device."""
        return (space, address >> 24 or event.cta, address & OFFSET_MASK) if space == "shared" else (space, 0, address)

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
        matrices = [None if isinstance(each, ptx.Memory) else decode_matrix(event.value(each)) for each in (a, b)]
        where = ((row, LANES, form.a_type, form.a_mn_major), (column, width, form.b_type, form.b_mn_major))
        lines = [
            self._line(index, matrix, at % rows, rows, element, major, first + at // rows) if matrix is not None else []
            for matrix, (at, rows, element, major) in zip(matrices, where)
        ]
        return _product(row, column, lines, matrices)

    def _of_product(self, index: int, position: int, at: int, lane: int) -> str:
        """One wgmma or mma.sync: which element of D, and where the row of A and the column of B come from."""
        event = self._trail.events[index]
        operands = event.instruction.operands
        d_type = event.form.d_type if event.form is not None else event.instruction.parts[-1]
        pair = 2 * position + at // 2 if d_type == "f16" else position
        row, column = lane // 4 + pair // 2 % 2 * 8, pair // 4 * 8 + lane % 4 * 2 + pair % 2
        if event.form is None:
            a, b = operands[1].items, operands[2].items
            rows = 2 if len(a) > 1 else 1  # groups of eight
            pieces = [a[row // 8 :: rows], b], [row % 8, column % 8]
            return _product(row, column, [self._fragment(index, *each) for each in zip(*pieces)], [None, None])
        form, row = event.form, row + event.warp % WARPS * 16
        a = None if form.a_in_registers else _matrix(event.value(operands[1]))
        b = _matrix(event.value(operands[2]))
        of_a = self._line(index, a, row, ROWS, form.a_type, form.a_mn_major, event.cta) if a is not None else []
        of_b = self._line(index, b, column, form.n, form.b_type, form.b_mn_major, event.cta)
        return _product(row, column, [of_a, of_b], [a, b])

    def _fragment(self, index: int, registers: Sequence[ptx.Operand], line: int) -> list[_Chunk]:
        """Chunks of a row of A, or column of B, of an mma.sync: four lanes have a piece of each register."""
        event = self._trail.events[index]
        size = _element_bytes(event.instruction)
        found = []
        for register, lane in itertools.product(registers, range(4 * line, 4 * line + 4)):
            for at in range(0, 4, size):
                found.append(self._origin_of(event, index, register, at, lane, size))
        return found

    def _origin_of(self, event: Event, end: int, register: ptx.Operand, at: int, lane: int, size: int) -> _Chunk:
        ends = [(index, *place) for index, place in self._ends(event, end, register, at, lane)]
        if len(ends) != 1 or self._trail.events[ends[0][0]].instruction.parts[0] not in ("ld", "ldmatrix"):
            return "registers", [], 1, ""
        index, *place = ends[0]
        byte = self._loaded(self._trail.events[index], *place, lane)
        return ("registers", [], 1, "") if byte is None else self._chunk(byte, index, event.cluster, size, size)

    def _chunks(self, byte: Byte, end: int, cluster: int, unit: int, size: int) -> list[_Chunk]:
        """Sources of a unit of bytes before an event, in elements of a size: of each alone where threads store them."""
        found = []
        for first in range(byte[2], byte[2] + unit, size):
            index, source = self._writer((*byte[:2], first), end, cluster) or (end, "")
            if source[:1] != ("register",):
                break
            _, lane, (operand, at) = source
            found.append(self._origin_of(self._trail.events[index], index, operand, at, lane, size))
        stored = len(found) * size == unit and all(start for _, start, _, _ in found)
        return found if stored else [self._chunk(byte, end, cluster, unit, size)]

    def _chunk(self, byte: Byte, end: int, cluster: int, unit: int, size: int) -> _Chunk:
        """Source of a unit of bytes before an event, in elements of a size."""
        found = self._writer(byte, end, cluster) if byte[0] == "shared" else (None, byte)
        count = unit // size
        if found is None or isinstance(found[1], str) or found[1][0] != "global":
            return self._words(byte) if found is None or not isinstance(found[1], str) else found[1], [], count, ""
        address = found[1][2]
        tensor = self._trail.events[found[0]].map if found[0] is not None else None
        swizzle = tensor.swizzle if tensor is not None else ""
        return self._array(address)[0], self._coordinates(address, tensor, size), count, swizzle

    def _coordinates(self, address: int, tensor: TensorMap | None, size: int) -> list[int]:
        """Coordinates of an element of an array of the device, by a tensor map or by the shape of its tensor."""
        if tensor is not None:
            return _index(tensor, address)[0][::-1]
        name, first = self._array(address)
        shape, itemsize = next((image.shape for image in self._replay.recorded.memory if image.name == name), ((), 0))
        at = (address - first) // size
        inside = itemsize == size and at < math.prod(shape)
        return [int(each) for each in np.unravel_index(at, shape)] if shape and inside else [at]

    def _line(
        self, index: int, matrix: Matrix, line: int, rows: int, element: ElementType, mn_major: bool, cta: int
    ) -> list[_Chunk]:
        """Chunks of a row: array or words, coordinates of the first element, elements, swizzle of the copy."""
        event = self._trail.events[index]
        unit = element.nbytes if mn_major else CHUNK
        places = operand_places(matrix, rows, element.nbytes, mn_major)[line] * unit
        shared = (("shared", cta, int(place)) for place in places)
        chunks = (self._chunks(each, index, event.cluster, unit, element.nbytes) for each in shared)
        return list(itertools.chain.from_iterable(chunks))


def _product(row: int, column: int, lines: Sequence[list[_Chunk]], matrices: Sequence[Matrix | None]) -> str:
    """A product in words, and whether both of its rows are of the same K and read as they were copied."""
    along_k = [_along(line) for line in lines]
    differ = lines[0] and None not in along_k and along_k[0] != along_k[1]
    notes = ["they differ in their coordinate along K"] if differ else []
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


def _along(line: Sequence[_Chunk]) -> list[int] | None:
    """Coordinates along K: those that are not the same in the whole row; None where that is not one of them."""
    starts = [[*at[:-1], *(each + n for each in at[-1:])] for _, at, count, _ in line for n in range(count)]
    if len({len(each) for each in starts}) != 1 or len(starts) < 2:
        return None
    moving = [column for column in zip(*starts) if len(set(column)) > 1]
    return list(moving[0]) if len(moving) == 1 else None


def _joined(line: Sequence[_Chunk]) -> str:
    """``a[0, 48:64]``, ``b[8:16, 3]``; what does not follow each other stands side by side."""
    runs: list[tuple[str, list[int], int, int]] = []  # array, first element, axis, elements
    for name, first, count, _ in line:
        known, start, axis, have = runs[-1] if runs else ("", [], 0, 0)
        if name == known and not start and not first:
            runs[-1] = known, start, axis, have + count
            continue
        axes = [axis] if have > 1 and start else range(len(start))
        follows = (n for n in axes if name == known and first == [*start[:n], start[n] + have, *start[n + 1 :]])
        if (along := next(follows, None)) is not None:
            runs[-1] = known, start, along, have + count
        else:
            runs.append((name, first, len(first) - 1, count))
    return " ".join(f"{name}[{_range(*place)}]" if place[0] else f"({name})" for name, *place in runs)


def _range(first: list[int], axis: int, count: int) -> str:
    return ", ".join(f"{at}:{at + count}" if n == axis else str(at) for n, at in enumerate(first))


def _element_bytes(mma: ptx.Instruction) -> int:
    """Bytes of an element of A and of B of an mma.sync."""
    return max(1, ptx.TYPE_BITS.get(mma.parts[-2], 32 if mma.parts[-2] == "tf32" else 8) // 8)


def _parts(instruction: ptx.Instruction, result: ptx.Operand, at: int) -> Iterator[tuple[ptx.Operand, int]]:
    """Operands that a byte of a result is made of, and their bytes."""
    operands, parts = instruction.operands[1:], instruction.parts
    if parts[0] == "cvt" and any(part.endswith("x2") for part in parts) and len(operands) == 2:
        size = 2 if any(part.endswith("16x2") for part in parts) else 1
        yield operands[at // size == 0], 0
    elif parts[0] == "mov" and isinstance(operands[0], ptx.Vector):
        size = ptx.TYPE_BITS[parts[-1]] // 8 // len(operands[0].items)
        yield operands[0].items[at // size], at % size
    elif parts[0] == "mov" and isinstance(instruction.operands[0], ptx.Vector):
        items = instruction.operands[0].items
        yield operands[0], at + items.index(result) * ptx.TYPE_BITS[parts[-1]] // 8 // len(items)
    else:
        for operand in operands:
            yield from ((each, at) for each in (operand.items if isinstance(operand, ptx.Vector) else (operand,)))


def _accumulates(event: Event) -> bool:
    """Whether a wgmma or tcgen05.mma adds to what D has, as mma.sync always does; false of what is no MMA."""
    if event.instruction.parts[:2] == _LOAD:
        return False
    if event.instruction.parts[0] == "mma":
        return True
    first = 4 if event.instruction.parts[0] == "tcgen05" else 3
    scale = next(each for each in event.instruction.operands[first:] if not isinstance(each, (ptx.Memory, ptx.Vector)))
    return event.value(scale) & 1 == 1 if isinstance(scale, ptx.Register) else getattr(scale, "value", 1) != 0


def _matrix(descriptor: int) -> Matrix:
    fields = STRUCTURES["Matrix"]()
    library().wgmma_matrix(ctypes.c_int64(descriptor).value, ctypes.byref(fields))
    return Matrix(fields.address, fields.leading, fields.stride, _SWIZZLES[fields.swizzle])


def _boxes(event: Event, byte: Byte) -> Any:
    """A tensor copy: the byte at the other side of the one that it writes; None: it does not write that."""
    memories = [each for each in event.instruction.operands if isinstance(each, ptx.Memory)]
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
    masks = [each for each in event.instruction.operands if isinstance(each, ptx.Register)]
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


def _flat(operands: Sequence[ptx.Operand]) -> Iterator[ptx.Operand]:
    for each in operands:
        yield from each.items if isinstance(each, ptx.Vector) else (each,)
