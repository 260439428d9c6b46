"""The core's part of the race detector for Python: accesses that it compares with earlier ones and records.

What it finds late is put into words by who asked: `races.checks` and `races.tensor_memory`.
"""

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import ClassVar, NoReturn

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES, word_count
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.races.happens_before import FULL, Offset
from cute_kernels.emulator.races.operations import Operation
from cute_kernels.emulator.races.shadow import GRANULE, Epochs, Lanes, Offsets, Plane, Shadow
from cute_kernels.emulator.races.sync_point import Row

_ACQUIRED, _VISIBLE = map(int, (Row.ACQUIRED, Row.VISIBLE))
_READ = int(Offset.READ)
_WRITES_FIRST, _READS_FIRST, _UNCHECKED, _FREED = (
    CONSTANTS[f"ACCESS_{name}"] for name in ("WRITES_FIRST", "READS_FIRST", "UNCHECKED", "FREED")
)
_ROOM = {CONSTANTS[f"RACE_{name}"]: name for name in ("LAYER", "FOREIGN", "BYTES", "EPOCHS")}
Conflict, GenericAccess, _Access = (STRUCTURES[name] for name in ("Conflict", "GenericAccess", "Access"))
_ASK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)
_NO_OFFSETS = np.zeros(0, np.int64)
_MOST_CONSTANTS = 4096


class ShadowUnit:
    """The core's functions of the race detector, and the `Access` that they read: one at a time.

    Each cluster of a launch has its own: another thread may launch between the writing of an `Access` and the core's
    reading of it. ``find``: the shadow, or the plane of tensor memory, at an address. ``ask``: is told of a `Conflict`;
    its first argument is one of the core's RACE_.., but for more room."""

    #: What is known of arrays that never change, with the array, so that no other one gets its identity.
    _constants: ClassVar[dict[int, tuple[tuple[int, int, int, int], np.ndarray]]] = {}

    def __init__(
        self, epochs: Epochs, find: Callable[[int], Shadow | Plane],
        ask: Callable[[int, ctypes.Structure], None] = lambda what, conflict: None,
    ) -> None:  # fmt: skip
        self._epochs, self._find, self._ask = epochs, find, ask
        self._access = np.zeros(word_count("Access"), np.int64)
        self._set = functools.partial(struct.Struct(f"{len(self._access)}q").pack_into, self._access, 0)
        self._callback = _ASK(self._asked)
        self._error: BaseException | None = None
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        self._record = functools.partial(library().access_record_whole, self._access.ctypes.data, address)
        self._generic = GenericAccess()
        self.callback_address = address  # what the core calls

    def _asked(self, what: int, address: int) -> int:
        try:
            conflict = Conflict.from_address(address)
            if what in _ROOM:
                self._make_room(_ROOM[what], conflict)
            else:
                self._ask(what, conflict)
        except BaseException as error:  # noqa: BLE001 - must not unwind through the core; `_decide` raises it
            self._error = error
            return 1
        return 0

    def _make_room(self, what: str, conflict: ctypes.Structure) -> None:
        if what == "EPOCHS":
            self._epochs.make_room()
            return
        access = _Access.from_address(conflict.access)
        found = self._find(access.shadow)
        if what == "BYTES":
            found.make_bytes()
            return
        plane = found
        if access.grain == GRANULE:
            plane = found.fine if conflict.unit == 1 else found.coarse
        plane.make_room() if what == "LAYER" else plane.add_foreign()

    def _checked(self, done: int) -> None:
        if not done:
            self.reraise()

    def reraise(self) -> NoReturn:
        """Raises what `ask` has raised."""
        error, self._error = self._error, None
        raise error

    def _run(self, *parts: tuple[int, ...]) -> None:
        """The members of an `Access`: what is accessed, where, who looks, what is recorded, and the rest."""
        what, places, view, record, rest = parts
        self._set(*what, *places, 0, *view, self._epochs.address, *record, *rest)
        self._checked(self._record())

    def _places(self, offsets: Offsets) -> tuple[int, int, int, int]:
        """OFFSETS, ROWS, BASE and STRIDE of one range (int), or of an array of offsets."""
        if not isinstance(offsets, np.ndarray):
            return 0, 1, offsets, 0
        found = self._constants.get(id(offsets))
        if found is not None:
            return found[0]
        place = offsets.ctypes.data, offsets.size, 0, 0
        if not offsets.flags.writeable:  # kept by a cache, of MMA operands: it comes again
            if len(self._constants) > _MOST_CONSTANTS:
                self._constants.clear()
            self._constants[id(offsets)] = place, offsets
        return place

    def async_read(
        self, shadow: Shadow, offsets: Offsets, nbytes: int, operation: Operation, fence: Row, cluster: int
    ) -> None:
        """An operation reads ``nbytes`` at offsets; ``fence``: the row of fences that cover the memory."""
        offsets = _contiguous(offsets)
        width, address = operation.clocks.shape[1], operation.address
        visible, fenced = address + 4 * width * _VISIBLE, address + 4 * width * int(fence)
        view = (visible, width, operation.own, 0, operation.lane, -1, cluster)
        record = (operation.identity, 0, fenced, 0, operation.column, 0)
        rest = (_WRITES_FIRST, operation.private, 0, -1, 0)
        self._run((0, 0, shadow.address, GRANULE), (*self._places(offsets), nbytes), view, record, rest)

    def async_write(
        self, shadow: Shadow, offsets: Offsets, nbytes: int, operation: Operation, fence: Row | None, cluster: int
    ) -> None:
        """An operation writes; ``fence`` None: none is asked for.

        Who read a stage came after the copy that filled it, and says more than that one: earlier reads come first.
        """
        offsets = _contiguous(offsets)
        own, width = operation.own, operation.clocks.shape[1]
        exempt = own + _READ if own >= 0 else -1
        known = operation.address + 4 * width * _ACQUIRED
        fenced = 0 if fence is None else operation.address + 4 * width * int(fence)
        view = (known, width, own, 0, operation.lane, exempt, cluster)
        record = (operation.identity, 0, fenced, 0, 0, 0)
        strong, rest = int(operation.reduces), (_READS_FIRST, operation.private, 0, -1, 0)
        self._run((1, strong, shadow.address, GRANULE), (*self._places(offsets), nbytes), view, record, rest)

    def tensor(
        self, plane: Plane, place: tuple[slice, slice], operation: Operation, write: bool, exempt: int, row: Row,
        freed: bool = False,
    ) -> None:  # fmt: skip
        """An access to columns and groups of lanes of tensor memory by one who knows a row of clocks."""
        places, kept = _rectangle(plane, place)
        width = operation.clocks.shape[1]
        known = operation.address + 4 * width * int(row)
        record = (operation.identity, 0, 0, known, operation.column, 0)
        view = (known, width, -1, 0, -1, exempt, 0)
        rest = (_FREED if freed else _WRITES_FIRST, 0, 0, -1, 0)
        self._run((int(write), 0, plane.address, 1), places, view, record, rest)
        del kept

    def note(
        self, shadow: Shadow, offsets: Offsets, nbytes: int, identity: int, write: bool, column: int = 0,
        cluster: int = 0,
    ) -> None:  # fmt: skip
        """Records an access that is not compared with earlier ones; ``column``, ``cluster``: of a read."""
        offsets = _contiguous(offsets)
        view = (0, 0, -1, 0, -1, -1, cluster)
        record = (identity, 0, 0, 0, column, 0)
        what, rest = (int(write), 0, shadow.address, GRANULE), (_UNCHECKED, 0, 0, -1, 0)
        self._run(what, (*self._places(offsets), nbytes), view, record, rest)

    def generic(
        self, context: ctypes.Structure, lanes: Lanes, addresses: np.ndarray, kind: tuple[str, int, bool, bool],
        identity: int, instruction: int,
    ) -> None:  # fmt: skip
        """Loads or stores, as of `RaceTracker.generic`; ``kind``: space, bytes, whether they write, whether strong."""
        access, (space, nbytes, write, strong) = self._generic, kind
        access.write, access.strong, access.nbytes, access.instruction = write, strong, nbytes, instruction
        access.of_global = space == "global"
        access.identity, access.count, access.each = identity, len(addresses), not isinstance(lanes, int)
        access.lane, access.mask = (lanes, FULL) if isinstance(lanes, int) else (-1, 0)
        access.addresses[: len(addresses)] = addresses.tolist()
        if access.each:
            access.lanes[: len(addresses)] = lanes.tolist()
        where = ctypes.addressof(context), ctypes.addressof(access)
        self._checked(library().generic_record_whole(*where, self.callback_address))

    def observe(self, context: ctypes.Structure, log: np.ndarray, first: int) -> int:
        """Works off what a warp has logged (`memory_tables`), from an entry on. ``context``: of the warp. ``log``:
        uint8 [entries, LOG_ENTRY]. ``first``: number of an entry. Returns the number of the first entry that Python has
        to decide; the number of entries if there is none."""
        end = library().log_observe(ctypes.addressof(context), log.ctypes.data, first, len(log), self.callback_address)
        self._checked(end >= 0)
        return end


def _contiguous(offsets: Offsets) -> Offsets:
    return np.ascontiguousarray(offsets, np.int64) if isinstance(offsets, np.ndarray) else offsets


def _rectangle(plane: Plane, place: tuple[slice, slice]) -> tuple[tuple[int, int, int, int, int], np.ndarray]:
    """OFFSETS, ROWS, BASE, STRIDE and COUNT of columns and groups of lanes; with an array that the first may be of."""
    columns, groups = place
    stride = plane.shape[1]
    start, stop, step = groups.indices(stride)
    if step != 1:
        numbers = np.arange(stride)[groups]
        offsets = (stride * np.arange(columns.start, columns.stop)[:, None] + numbers).reshape(-1)
        return (offsets.ctypes.data, len(offsets), 0, 0, 1), offsets
    rows, count = columns.stop - columns.start, stop - start
    if count == stride:  # one piece
        rows, count = 1, rows * count
    return (0, rows, columns.start * stride + start, stride, count), _NO_OFFSETS
