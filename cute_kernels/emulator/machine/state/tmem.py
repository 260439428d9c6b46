"""Tensor memory of one CTA: 128 lanes x 512 columns of 32-bit cells, allocated by columns (PTX ISA, "Tensor Memory").

An address is 32 bits: lane in bits 16..31, column in bits 0..15. The array is stored column-major (``cells[column,
lane]``) because a register of a 32x32b load is one column of 32 lanes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess, raising
from cute_kernels.emulator.facts import Memory, WarpName
from cute_kernels.emulator.isa.ptx.program import Instruction

LANES, COLUMNS = CONSTANTS["TENSOR_LANES"], CONSTANTS["TENSOR_COLUMNS"]
LANE_GROUP = CONSTANTS["LANE_GROUP"]  # no access covers less of a column
#: Shape of tcgen05.ld/st -> (columns per repetition, registers per repetition, largest repetition).
SHAPES = {"32x32b": (1, 1, 128), "16x64b": (2, 1, 128), "16x128b": (4, 2, 64), "16x256b": (8, 4, 32)}
#: The shape of two halves of 16 lanes; the instruction says how many columns lie between them.
HALVES = "16x32bx2"
SHAPE_NAMES = (*SHAPES, HALVES)
SHAPE_NUMBERS = {name: number for number, name in enumerate(SHAPE_NAMES)}  # of the core
TensorCells, TensorAccess = STRUCTURES["TensorCells"], STRUCTURES["TensorAccess"]


def split_address(address: int) -> tuple[int, int]:
    """(lane, column) of a tensor-memory address."""
    return (address >> 16) & 0xFFFF, address & 0xFFFF


def tensor_address(lane: int, column: int) -> int:
    """The 32-bit address of a cell."""
    return (lane << 16) | column


class TensorMemory:
    """Tensor memory of one CTA. ``detect``: whether reads of uninitialised cells are reported. ``own_lanes``: whether
    loads and stores that name lanes outside of their warp's quarter are reported. If not, they access the lanes of the
    quarter with the same number modulo 32, which is a reading: by the PTX ISA they are illegal. ``allocated_address``:
    host address of a byte per column, 1 where it is allocated."""

    def __init__(self, *, detect: bool = True, own_lanes: bool = True) -> None:
        self.cells = np.zeros((COLUMNS, LANES), np.uint32)  # uint32 [512 columns, 128 lanes]
        self.allocations: dict[int, int] = {}  # column base -> columns, of what is allocated now
        self._allocated_by: dict[int, tuple[int, str]] = {}  # by column base: instruction, warp
        self.changes = 0  # number of allocations and deallocations so far
        self._residents: list[TensorMemory] = []  # of the multiprocessor's CTAs, which share its columns
        self.report: Callable[[EmulatorError], None] = raising
        self.detect, self._own_lanes = detect, own_lanes
        self.relinquished = False
        self.columns_used = 0
        self._allocated = np.zeros(COLUMNS, bool)
        self.allocated_address = self._allocated.ctypes.data
        self._written = np.zeros((COLUMNS, LANES), bool)
        self._full = np.zeros(COLUMNS, bool)  # columns that were written in all lanes by one access
        self.full_address = self._full.ctypes.data  # of a byte per column, 1 where an access has written all lanes

    def addresses(self, shadow: int) -> tuple[int, ...]:
        """A `TensorCells` of the core, given the address of its shadow or 0."""
        places = self.cells.ctypes.data, self.allocated_address, self.full_address, self._written.ctypes.data
        return *places, shadow, self._own_lanes

    def enter(self, residents: list[TensorMemory]) -> None:
        """The CTA begins on a multiprocessor that these CTAs are on."""
        residents.append(self)
        self._residents = residents

    def leave(self) -> None:
        """The CTA has ended."""
        if self._residents:
            self._residents.remove(self)

    @property
    def held_by_others(self) -> int:
        """Columns that other CTAs of the multiprocessor have allocated."""
        return sum(sum(other.allocations.values()) for other in self._residents if other is not self)

    def has_room(self, ncols: int) -> bool:
        """Whether `alloc` would not return None: it raises an error or finds free columns."""
        return not 32 <= ncols <= COLUMNS or self.relinquished or self._room(ncols) is not None

    def lacks(self, ncols: int) -> str:
        """The wait of `alloc`, in words."""
        others = self.held_by_others
        shared = f"; other CTAs of the multiprocessor hold {others} of its 512" if others else ""
        return f"waits for {ncols} free TMEM columns; allocated: {self.allocations}{shared}"

    def _room(self, ncols: int) -> int | None:
        """The lowest free column range. Where the columns of other CTAs lie makes no difference here."""
        if sum(self.allocations.values()) + ncols > COLUMNS - self.held_by_others:
            return None
        starts = range(0, COLUMNS - ncols + 1, 32)
        return next((start for start in starts if not self._allocated[start : start + ncols].any()), None)

    def alloc(self, ncols: int) -> int | None:
        """tcgen05.alloc: the lowest free column range. None when there is none: the instruction blocks until there is.
        Raises IllegalAccess: ncols is not a power of two in 32..512, or the permit was relinquished."""
        if ncols < 32 or ncols > COLUMNS or ncols & (ncols - 1):
            raise IllegalAccess(f"tcgen05.alloc of {ncols} columns; legal are 32, 64, 128, 256 and 512")
        if self.relinquished:
            raise IllegalAccess("tcgen05.alloc after tcgen05.relinquish_alloc_permit of the same CTA")
        base = self._room(ncols)
        if base is not None:
            self._allocated[base : base + ncols] = True
            self._written[base : base + ncols] = self._full[base : base + ncols] = not self.detect
            self.allocations[base] = ncols
            self.changes += 1
            self.columns_used = max(self.columns_used, int(self._allocated.sum()))
        return base

    def note_alloc(self, base: int, place: int, warp: str) -> None:
        """Keeps, for reports, who made the allocation from column ``base`` on. ``base``: what `alloc` returned.
        ``place``: index of the instruction, -1 if it is not known. ``warp``: label of the warp."""
        self._allocated_by[base] = place, warp

    def dealloc(self, address: int, ncols: int) -> None:
        """tcgen05.dealloc of an allocation as a whole. Raises IllegalAccess: nothing of that size is allocated there.
        """
        lane, column = split_address(address)
        if lane or self.allocations.get(column) != ncols:
            have = ", ".join(f"{n} columns at {base}" for base, n in self.allocations.items()) or "nothing"
            raise IllegalAccess(f"tcgen05.dealloc of {ncols} columns at address {address:#x}; allocated: {have}")
        del self.allocations[column]
        self._allocated_by.pop(column, None)
        self.changes += 1
        self._allocated[column : column + ncols] = False

    def relinquish(self) -> None:
        """tcgen05.relinquish_alloc_permit: no further alloc by this CTA."""
        self.relinquished = True

    def check_released(self, instructions: Sequence[Instruction] = ()) -> None:
        """At the exit of the CTA: each allocation that is left is reported where it was made. ``instructions``: of the
        kernel. Raises IllegalAccess: columns are still allocated (PTX ISA: all must be deallocated before the kernel
        exits)."""
        for base, ncols in self.allocations.items():
            place, label = self._allocated_by.get(base, (-1, ""))
            name = WarpName.of(label)
            error = IllegalAccess(
                f"the CTA exits with {ncols} TMEM columns allocated" + (f" by warp {name.index}" if name else "")
            ).know("tensor-memory-leak", memory=Memory("tensor", base, ncols, name.cta) if name else None)
            instruction = instructions[place] if 0 <= place < len(instructions) else None
            self.report(error.at(instruction, label or None))

    def refuse(self, warp: int, access: ctypes.Structure) -> None:
        """Says what is wrong with a `TensorAccess` of the core by a warp of this index, which may touch the lanes of
        quarter ``warp % 4`` only; returns where it goes on all the same.

        Of `HALVES` threads 0 to 15 hold 16 lanes from its place on, and a column per register, threads 16 to 31 the
        same lanes ``split`` columns further on. With ``pack`` register i has the low halves of columns 2 i and 2 i + 1.
        Raises IllegalAccess: foreign lanes, unallocated columns, cells never written."""
        shape, first = SHAPE_NAMES[access.shape], 32 * (warp % 4)
        if access.lane not in ((first,) if shape == "32x32b" else (first, first + 16)):
            raise IllegalAccess(
                f"tcgen05.{'st' if access.write else 'ld'}.{shape} by warp {warp} starts at lane {access.lane}; the "
                f"warp may touch the lanes of its quarter {warp % 4}, {first} to {first + 31}, only"
            ).know("tensor-memory-place")
        for columns, groups in rectangles(access):
            lanes = LANE_GROUP * (groups.stop - groups.start)
            width = columns.stop - columns.start
            self.check(LANE_GROUP * groups.start, lanes, columns.start, width, write=bool(access.write))

    def check(self, lane: int, nlanes: int, column: int, ncols: int, *, write: bool) -> None:
        """Checks a rectangle and, for a write, marks it as written. Raises IllegalAccess: outside the memory, columns
        not allocated, or (reads) cells never written."""
        if lane < 0 or lane + nlanes > LANES or column < 0 or column + ncols > COLUMNS:
            raise IllegalAccess(
                f"TMEM access to lanes {lane}..{lane + nlanes - 1}, columns {column}..{column + ncols - 1} leaves the "
                f"{LANES} x {COLUMNS} cells"
            ).know("tensor-memory-place")
        if not self._allocated[column : column + ncols].all():
            free = column + int(np.argmin(self._allocated[column : column + ncols]))
            raise IllegalAccess(
                f"TMEM access to columns {column}..{column + ncols - 1}, of which column {free} is not allocated"
            ).know("tensor-memory-place")
        if not self.detect or self._full[column : column + ncols].all():
            return
        written = self._written[column : column + ncols, lane : lane + nlanes]
        if write:
            written[...] = True
            if nlanes == LANES:
                self._full[column : column + ncols] = True
        elif not written.all():
            bad_column, bad_lane = np.argwhere(~written)[0]
            error = IllegalAccess(
                f"read of uninitialised TMEM: lane {lane + bad_lane}, column {column + bad_column} of an access to "
                f"lanes {lane}..{lane + nlanes - 1}, columns {column}..{column + ncols - 1}"
            ).know(
                "uninitialised-read", memory=Memory("tensor", int(column + bad_column), 1, lane=int(lane + bad_lane))
            )
            self.report(error)


def rectangle(address: int, shape: str, repeat: int) -> tuple[slice, slice]:
    """Columns, and groups of 16 lanes, that a load or store touches (of `HALVES` the first half)."""
    lane, column = split_address(address)
    first = lane // LANE_GROUP
    width = SHAPES.get(shape, (1, 1, 1))[0]
    return slice(column, column + width * repeat), slice(first, first + (2 if shape == "32x32b" else 1))


def rectangles(access: ctypes.Structure) -> list[tuple[slice, slice]]:
    """`rectangle` of all that a `TensorAccess` of the core touches."""
    at = access.column, access.column + (access.repeat if access.pack else access.split)
    shape, two = SHAPE_NAMES[access.shape], access.pack or access.shape == SHAPE_NUMBERS[HALVES]
    places = [tensor_address(access.lane, column) for column in at[: 1 + bool(two)]]
    return [rectangle(place, shape, access.repeat) for place in places]
