"""Shared memory of the CTAs of one cluster, in one 32-bit address space.

``address = (cta_rank << 24) | offset``, for shared::cta and shared::cluster alike (PTX ISA: the shared::cta window is
contained in the shared::cluster window). Offsets 0..1023 of each CTA belong to the system, as on sm_90 and later; the
dynamic shared memory of a kernel starts at 1024.
"""

from collections.abc import Callable, Iterable

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS
from cute_kernels.emulator.errors import EmulatorError, IllegalAccess, raising
from cute_kernels.emulator.facts import Memory
from cute_kernels.emulator.isa.ptx.program import Variable

SYSTEM_BYTES = 1024
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
#: Generic addresses: it, local memory and kernel parameters appear as windows above every host address.
SHARED_WINDOW = CONSTANTS["SHARED_WINDOW"]
LOCAL_WINDOW = CONSTANTS["LOCAL_WINDOW"]
PARAM_WINDOW = CONSTANTS["PARAM_WINDOW"]

_GRAIN = 32
# A byte's state: 0 = never written, 1 = data, 2 = part of a live mbarrier (opaque to loads and stores).
_DATA, _BARRIER = 1, 2
_HINT = "; if a store was meant to come first, a barrier or a wait is missing"


def shared_layout(variables: Iterable[Variable]) -> tuple[dict[str, int], int]:
    """Offset of each shared variable of a kernel by its name, and the end of those that have a size.

    All arrays without a size name the same dynamic shared memory.
    """
    shared = [variable for variable in variables if variable.space == "shared"]
    offsets, end = {}, SYSTEM_BYTES
    for variable in shared:
        if variable.nbytes:
            offsets[variable.name] = -(-end // variable.align) * variable.align
            end = offsets[variable.name] + variable.nbytes
    dynamic = (variable for variable in shared if not variable.nbytes)
    return offsets | {each.name: -(-end // each.align) * each.align for each in dynamic}, end


def gaps(variables: Iterable[Variable], dynamic_bytes: int, size: int) -> tuple[tuple[int, int], ...]:
    """Gaps of shared memory that belong to no array of a kernel, behind its static ones: (first offset, end), in order.
    ``variables``: of the kernel. ``dynamic_bytes``: of the launch. Without an array that stands for them it is not
    known where they begin, and everything belongs to them. ``size``: of the shared memory of a CTA."""
    variables = [variable for variable in variables if variable.space == "shared"]
    offsets, end = shared_layout(variables)
    dynamic = [offsets[variable.name] for variable in variables if not variable.nbytes]
    if not dynamic:
        found = [] if dynamic_bytes else [(end, size)]
    else:
        found = [(end, min(dynamic)), (max(dynamic) + dynamic_bytes, size)]
    return tuple((first, behind) for first, behind in found if first < behind)


def parameter_offset(address: int) -> int:
    """Offset in the parameter block of an address of it: of one in the window, or in a register of 32 bits, without."""
    return address - PARAM_WINDOW if address >= LOCAL_WINDOW else address


def shared_address(cta_rank: int, offset: int) -> int:
    """The 32-bit address of ``offset`` in CTA ``cta_rank`` of the cluster."""
    return (cta_rank << RANK_SHIFT) | offset


class SharedMemory:
    """Shared memory of one CTA. ``size``: bytes, the 1024 system bytes included. ``cta_rank``: rank of the CTA in its
    cluster. ``detect``: whether accesses to live mbarriers or to a CTA that has exited are reported. ``uninitialised``:
    whether, with ``detect``, reads of what nobody has written are reported too. ``exited``: all threads of the CTA have
    exited while others of the cluster run: nothing may access it any more."""

    def __init__(self, size: int, cta_rank: int = 0, *, detect: bool = True, uninitialised: bool = True) -> None:
        if size < SYSTEM_BYTES or size > 1 << 18:
            raise IllegalAccess(f"shared memory of {size} bytes; legal are {SYSTEM_BYTES} to {1 << 18}")
        self.size, self.cta_rank, self.detect = size, cta_rank, detect
        self.report: Callable[[EmulatorError], None] = raising
        self._fresh = 0 if uninitialised else _DATA  # state of what nobody has written
        self.exited = False
        padded = -(-size // _GRAIN) * _GRAIN
        store = np.zeros(padded, np.uint8)
        self.states = np.full(padded, self._fresh, np.uint8)  # of its bytes, uint8 [size or more]
        self.data = store[:size]  # uint8 [size]
        self.chunks = store.view(np.complex128)  # 16-byte items that NumPy moves fastest
        # Lowest and highest byte of any live mbarrier: almost every access is told apart by two comparisons.
        self._barriers: set[int] = set()
        self.barrier_low, self.barrier_high = size, 0
        self._gaps: tuple[tuple[int, int], ...] = ()

    def spans(self) -> list[tuple[int, int]]:
        """(address, bytes) of its bytes and of their states."""
        return [(each.ctypes.data, each.nbytes) for each in (self.data, self.states)]

    def exclude(self, ranges: tuple[tuple[int, int], ...]) -> None:
        """With ``detect``, nothing may access these (first offset, end), which belong to no array."""
        if self.detect:
            self._gaps = ranges
            for first, end in ranges:
                self.states[first:end] = _BARRIER  # the core leaves accesses to such bytes to the checks here

    def _check_gaps(self, first: int, end: int) -> None:
        if any(first < behind and end > begin for begin, behind in self._gaps):
            raise self.unnamed(first, end - first)

    def unnamed(self, offset: int, nbytes: int) -> EmulatorError:
        """Error of an access that touches bytes that no array has."""
        first, end = offset, offset + nbytes
        begin, behind = next(gap for gap in self._gaps if first < gap[1] and end > gap[0])
        bad, nbytes = max(first, begin), min(end, behind) - max(first, begin)
        message = (
            f"shared access of bytes {bad} to {bad + nbytes - 1} of CTA {self.cta_rank}, which no array of the "
            f"kernel has: there is none from offset {begin} to {behind - 1}"
        )
        return IllegalAccess(message).know("out-of-bounds", memory=self._bytes(bad, nbytes))

    def protect(self, offset: int) -> None:
        """Marks the 8 bytes at ``offset`` as a live mbarrier, which only mbarrier operations may touch."""
        self._barriers.add(offset)
        self.states[offset : offset + 8] = _BARRIER
        self.barrier_low = min(self.barrier_low, offset)
        self.barrier_high = max(self.barrier_high, offset + 8)

    def unprotect(self, offset: int) -> None:
        """Ends `protect`; the bytes count as uninitialised (PTX ISA: mbarrier.inval makes the location reusable)."""
        self._barriers.discard(offset)
        self.states[offset : offset + 8] = self._fresh
        self.barrier_low = min(self._barriers, default=self.size)
        self.barrier_high = max(self._barriers, default=-8) + 8

    def close(self) -> None:
        """The CTA has exited. Without ``detect`` its memory stays what it is."""
        if self.detect:
            self.exited = True
            self.states.fill(_BARRIER)  # the core leaves accesses to such bytes to the checks here

    def check_open(self) -> None:
        """Raises IllegalAccess when the CTA has exited."""
        if self.exited:
            raise self.has_exited()

    def has_exited(self) -> EmulatorError:
        """Error of an access to the memory of a CTA that has exited."""
        message = f"access to the shared memory of CTA {self.cta_rank}, which has exited"
        return IllegalAccess(message).know("exited-cta")

    def check_bounds(self, offset: int, nbytes: int) -> None:
        """Raises IllegalAccess when a range is not inside the memory, or the CTA has exited."""
        self.check_open()
        if offset < 0 or offset + nbytes > self.size:
            raise self.outside(offset, nbytes)

    def check_range(self, offset: int, nbytes: int, *, write: bool) -> None:
        """Checks one contiguous access and, for a write, marks the bytes as initialised. Raises IllegalAccess: out of
        bounds, uninitialised (reads), touching a live mbarrier, or the CTA has exited."""
        end = offset + nbytes
        self.check_bounds(offset, nbytes)
        if not self.detect:
            return
        self._check_gaps(offset, end)
        if offset < self.barrier_high and end > self.barrier_low:
            if any(offset < barrier + 8 and end > barrier for barrier in self._barriers):
                raise self.on_barrier(offset, nbytes, write)
        state = self.states[offset:end]
        if write:
            state.fill(_DATA)
        elif not state.all():
            self.report(self.uninitialised_range(offset, nbytes))

    def unwritten(self) -> list[tuple[int, int]]:
        """Ranges that nobody has written: first byte, and how many."""
        if not self.detect:
            return []
        edges = np.flatnonzero(np.diff(self.states == 0, prepend=False, append=False)).tolist()
        return [(first, end - first) for first, end in zip(edges[::2], edges[1::2])]

    def uninitialised_range(self, offset: int, nbytes: int) -> EmulatorError:
        """Error of a read of bytes of which some were never written."""
        first = offset + int(np.argmin(self.states[offset : offset + nbytes]))
        return IllegalAccess(
            f"read of uninitialised shared memory at offset {first} (access: {nbytes} bytes at offset {offset} of "
            f"CTA {self.cta_rank}){_HINT}"
        ).know("uninitialised-read", memory=self._bytes(offset, nbytes))

    def uninitialised(self, offset: int, nbytes: int) -> EmulatorError:
        """Error of a read by one of several lanes of bytes of which some were never written."""
        return IllegalAccess(
            f"read of uninitialised shared memory: {nbytes} bytes at offset {offset} of CTA {self.cta_rank}{_HINT}"
        ).know("uninitialised-read", memory=self._bytes(offset, nbytes))

    def check_initialised(self, index: np.ndarray, nbytes: int) -> None:
        """Checks that the aligned items of ``nbytes`` with the given indices (any shape) hold data. Raises
        IllegalAccess: some were never written or are part of a live mbarrier, or the CTA has exited."""
        self.check_open()
        holds_data = self.states.reshape(-1, nbytes)[index] == _DATA
        if self.detect and not holds_data.all():
            first = int(index[~holds_data.all(axis=-1)][0]) * nbytes
            self._check_gaps(first, first + nbytes)
            error = IllegalAccess(
                f"asynchronous read of uninitialised shared memory at offset {first} of CTA {self.cta_rank}{_HINT}"
            ).know("uninitialised-read", memory=self._bytes(first, nbytes))
            self.report(error)

    def outside(self, offset: int, nbytes: int) -> EmulatorError:
        """Error of an access that leaves the memory."""
        where = f"at offset {offset} of CTA {self.cta_rank}"
        message = f"shared access of {nbytes} bytes {where} leaves its {self.size} bytes"
        return IllegalAccess(message).know("out-of-bounds", memory=self._bytes(offset, nbytes))

    def _bytes(self, offset: int, nbytes: int) -> Memory:
        return Memory("shared", offset, nbytes, self.cta_rank)

    def on_barrier(self, offset: int, nbytes: int, write: bool) -> EmulatorError:
        """Error of an access that touches a live mbarrier."""
        barrier = next(at for at in self._barriers if offset < at + 8 and offset + nbytes > at)
        return IllegalAccess(
            f"{'store to' if write else 'load from'} {nbytes} bytes at offset {offset} of CTA {self.cta_rank} touches "
            f"the live mbarrier at offset {barrier}"
        ).know("barrier-memory", memory=self._bytes(offset, nbytes))


class ClusterMemory:
    """Shared memory of all CTAs of a cluster under one address. ``ctas``: one SharedMemory per CTA, in order of rank.
    """

    def __init__(self, ctas: list[SharedMemory]) -> None:
        for rank, cta in enumerate(ctas):
            if cta.cta_rank != rank:
                raise ValueError(f"CTA {cta.cta_rank} stands at position {rank} of its cluster")
        self.ctas = ctas

    def resolve(self, address: int) -> tuple[int, int]:
        """Splits an address into (rank of the CTA in the cluster, offset). Raises IllegalAccess: no such CTA in this
        cluster."""
        rank, offset = address >> RANK_SHIFT, address & OFFSET_MASK
        if not 0 <= rank < len(self.ctas):
            raise self.no_cta(address)
        return rank, offset

    def no_cta(self, address: int) -> EmulatorError:
        """Error of an address of which there is no CTA."""
        message = f"shared address {address:#x} names CTA {address >> RANK_SHIFT} of a cluster of {len(self.ctas)}"
        return IllegalAccess(message).know("out-of-bounds")

    def view(self, address: int, nbytes: int, *, write: bool = False) -> np.ndarray:
        """The bytes as a uint8 array onto the memory: for the asynchronous units, which are not the generic proxy.
        ``address``: shared address of the first byte. ``nbytes``: length; the range must lie in one CTA. ``write``:
        True when the caller fills the whole range (marks it as initialised). Raises IllegalAccess: out of bounds,
        uninitialised (unless ``write``) or touching a live mbarrier."""
        rank, offset = self.resolve(address)
        cta = self.ctas[rank]
        cta.check_range(offset, nbytes, write=write)
        return cta.data[offset : offset + nbytes]
