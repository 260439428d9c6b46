"""mbarrier objects of one cluster (PTX ISA, "mbarrier"), which the core operates (``core/mbarriers.c``).

This initialises them, and puts into words what goes wrong. The phase is kept as a full integer, so that a parity wait
that aliases two phases can be told apart in reports.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import BarrierMisuse, EmulatorError, IllegalAccess, UnsupportedPTX, raising
from cute_kernels.emulator.facts import BarrierState, Moment, Past
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.state.smem import OFFSET_MASK, RANK_SHIFT, ClusterMemory

MAX_COUNT = CONSTANTS["MAX_COUNT"]  # PTX ISA: valid range of expected, pending and transaction counts
_BLOCK = CONSTANTS["BARRIER_BLOCK"]
MOST = CONSTANTS["BARRIER_BLOCKS"] * _BLOCK  # of a cluster
Tables, Cta, Barrier = (STRUCTURES[name] for name in ("Tables", "Cta", "Barrier"))
#: What is done with an mbarrier, by the core's number.
OPERATIONS = {
    CONSTANTS[name.upper().replace(".", "_")]: text
    for name, text in {
        "arrive": "mbarrier.arrive", "arrive_drop": "mbarrier.arrive_drop", "arrive_expect_tx": "expect_tx",
        "expect_tx": "expect_tx", "complete_tx": "complete_tx", "expect_arrivals": "cp.async.mbarrier.arrive",
        "try_wait": "mbarrier.try_wait", "test_wait": "mbarrier.test_wait",
        "tensor_commit": "tcgen05.commit",
    }.items()
}  # fmt: skip
_ARRIVALS = ("arrive", "arrive_drop", "arrive_expect_tx", "tensor_commit")
_MOMENTS = (
    dict.fromkeys((CONSTANTS[name.upper()] for name in _ARRIVALS), "arrive")
    | dict.fromkeys((CONSTANTS["TRY_WAIT"], CONSTANTS["TEST_WAIT"]), "wait")
    | {CONSTANTS["EXPECT_TX"]: "announce", CONSTANTS["COMPLETE_TX"]: "deliver"}
)
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)


@dataclass
class MBarrier:
    """One barrier: its shared address, who executed mbarrier.init (and index of that instruction, -1: not known), and
    the core's `Barrier`.
    """

    address: int
    initialiser: str
    init_at: int
    words: ctypes.Structure

    @property
    def phase(self) -> int:
        """Number of completed phases."""
        return self.words.phase


class MBarriers:
    """All live barriers of a cluster, keyed by shared address (rank included). ``names``: by offset in the shared
    memory of a CTA, and ``instructions`` of the kernel, for reports. ``ask``: answers what the core asks while it
    executes, by its number: whether to go on. None: `fault` is raised. The core's `Tables` are ``tables``, at
    ``address``; these have ``callback_address``, of `report`."""

    def __init__(
        self, memory: ClusterMemory, names: Mapping[int, str] | None = None,
        instructions: Sequence[Instruction] = (), ask: Callable[[int], bool] | None = None,
    ) -> None:  # fmt: skip
        self._memory, self._names, self.instructions = memory, names or {}, instructions
        self.ask = self._raise if ask is None else ask
        self._barriers: dict[int, MBarrier] = {}
        self.labels: list[str] = []  # who arrives, by number: names of the cluster's warps, then of operations
        self._blocks: list[ctypes.Array[ctypes.Structure]] = []
        self._free: list[int] = []
        self.slots = [np.zeros(-(-cta.size // 8), np.int16) for cta in memory.ctas]
        size = Tables.ctas.offset + ctypes.sizeof(Cta) * len(memory.ctas)
        self._block = np.zeros(size, np.uint8)
        self.tables, self.address = Tables.from_buffer(self._block), self._block.ctypes.data
        self.tables.ranks = len(memory.ctas)
        for cta, slots in zip(memory.ctas, self.slots):
            entry = self.cta(cta.cta_rank)
            entry.data, entry.states = cta.data.ctypes.data, cta.states.ctypes.data
            entry.size, entry.slots = cta.size, slots.ctypes.data
        self.error: BaseException | None = None  # what `ask` has raised
        self.noted: Callable[[], None] = lambda: None  # passes on what the core has noted for observers
        self._callback = _CALLBACK(self.report)
        self.callback_address = self.tables.report = ctypes.cast(self._callback, ctypes.c_void_p).value

    def __iter__(self) -> Iterator[MBarrier]:
        return iter(self._barriers.values())

    def cta(self, rank: int) -> ctypes.Structure:
        """An entry of the tables: what the core knows of the shared memory of a CTA, a `Cta`."""
        return Cta.from_buffer(self._block, Tables.ctas.offset + ctypes.sizeof(Cta) * rank)

    @property
    def completions(self) -> int:
        """Phases completed so far by any barrier; a waiting warp has to look again only when it changed."""
        return self.tables.completions

    def init(self, address: int, count: int, who: str = "", at: int = -1) -> None:
        """mbarrier.init, the instruction of index ``at``: phase 0, ``count`` pending arrivals, no pending bytes. Raises
        BarrierMisuse: count outside 1..2^20-1, or a live barrier there (PTX ISA: invalidate it first); IllegalAccess:
        address not 8-byte aligned or out of bounds."""
        if address % 8:
            raise IllegalAccess(f"mbarrier at {address:#x} is not 8-byte aligned")
        if not 1 <= count <= MAX_COUNT:
            raise BarrierMisuse(f"mbarrier.init with count {count}; legal are 1 to {MAX_COUNT}").know("barrier-count")
        if address in self._barriers:
            message = f"mbarrier.init over a live mbarrier: {self.describe(address)}"
            raise BarrierMisuse(message).know("barrier-initialised-twice", barrier=self.state(address))
        rank, offset = self._memory.resolve(address)
        self._memory.ctas[rank].check_range(offset, 8, write=True)
        if len(self._barriers) == MOST:
            raise UnsupportedPTX(f"more than {MOST} mbarriers in a cluster")
        self._memory.ctas[rank].protect(offset)
        number = self._free.pop() if self._free else len(self._barriers)
        if number == _BLOCK * len(self._blocks):
            self._blocks.append((Barrier * _BLOCK)())
            self.tables.barriers[number // _BLOCK] = ctypes.addressof(self._blocks[-1])
        self.slots[rank][offset // 8] = number + 1
        words = self._blocks[number // _BLOCK][number % _BLOCK]
        words.phase = words.tx = words.arriver = words.point = 0
        words.expected = words.pending = count
        self._barriers[address] = MBarrier(address, who, at, words)

    def watch(self, address: int, point: int) -> None:
        """Says where the race detector keeps what it knows of a barrier: `SyncPoint.address`."""
        self._barriers[address].words.point = point

    def inval(self, address: int) -> None:
        """mbarrier.inval: the location may be used for anything again. Raises BarrierMisuse: no live barrier there."""
        if address not in self._barriers:
            raise self._not_live("mbarrier.inval", address)
        rank, offset = self._memory.resolve(address)
        self._memory.ctas[rank].check_open()
        self.noted()
        del self._barriers[address]
        self._free.append(int(self.slots[rank][offset // 8]) - 1)
        self.slots[rank][offset // 8] = 0
        self._memory.ctas[rank].unprotect(offset)

    # --- operations, for units ---------------------------------------------------------------------------------------

    def complete_tx(self, address: int, nbytes: int, issued: tuple[int, int] = (-1, -1)) -> None:
        """``nbytes`` bytes arrived. They may arrive before the expect_tx of the same phase."""
        self.apply(CONSTANTS["COMPLETE_TX"], address, nbytes, issued=issued)

    def apply(
        self, operation: int, address: int, amount: int, who: str = "", issued: tuple[int, int] = (-1, -1)
    ) -> int:
        """Any operation, a key of `OPERATIONS`. Returns the phase that it found; raises what `fault` says.

        ``issued``: for reports, index of the instruction and number of the warp that issued it, where they are known.
        """
        if who and who not in self.labels:
            self.labels.append(who)
        number = self.labels.index(who) + 1 if who else 0
        phase = library().mbarrier_apply(self.address, operation, address, amount, number, *issued)
        if phase < 0:
            self.reraise()
        self.noted()
        return phase

    def reraise(self) -> None:
        """Raises what an operation of the core has come upon."""
        error, self.error = self.error, None
        raise error

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def report(self, what: int) -> int:
        """Answers the core, which calls this: 0 to go on."""
        try:
            return not self.ask(what)
        except BaseException as error:  # noqa: BLE001 - must not unwind through the core; `reraise` raises it
            self.error = error
            return 1

    def _raise(self, what: int) -> bool:
        raise self.fault(what)

    def fault(self, what: int) -> EmulatorError:
        """The fault that the core has come upon, in words."""
        fault = self.tables.fault.barrier
        address, amount, operation = fault.address, fault.amount, OPERATIONS[fault.operation]
        if what == CONSTANTS["NOT_LIVE"]:
            return self._not_live(operation, address)
        if what == CONSTANTS["EXITED"]:
            return self._memory.ctas[address >> RANK_SHIFT].has_exited()
        barrier = self._barriers[address].words
        kind, message = {
            CONSTANTS["EXTRA_ARRIVALS"]: (
                "extra-arrivals",
                f"{amount} arrival(s){f' by {self._arriver(fault.arriver)}' if fault.arriver else ''} on an mbarrier "
                f"whose phase expects {barrier.pending} more",
            ),
            CONSTANTS["EXTRA_BYTES"]: ("extra-bytes", f"{-barrier.tx} bytes more arrived than expect_tx announced"),
            CONSTANTS["TOO_MANY_ARRIVALS"]: ("barrier-count", f"more than {MAX_COUNT} pending arrivals"),
            CONSTANTS["TOO_MANY_BYTES"]: (
                "barrier-count", f"{operation} of {abs(amount)} bytes takes the transaction count out of range"
            ),
        }[what]
        return BarrierMisuse(f"{message}: {self.describe(address)}").know(kind, barrier=self.state(address))

    def _not_live(self, operation: str, address: int) -> EmulatorError:
        message = f"{operation} on {self.describe(address)}"
        return BarrierMisuse(message).know("uninitialised-barrier", barrier=self.state(address))

    def check_finished(self, strict: bool = True, report: Callable[[EmulatorError], None] = raising) -> None:
        """At the end of the kernel, when nothing is in flight.

        A phase of which all arrivals have come and bytes have not is what a producer leaves that acquires a stage to
        see it free, as the tail of FlashAttention-4's loads does: it announces bytes that it does not load.

        Raises:
            BarrierMisuse: a phase that has begun is not complete: bytes and arrivals are missing, or (``strict``)
                either alone; or bytes have come that nobody announced.
        """
        for barrier in self:
            words = barrier.words
            unsound = words.tx < 0 or (words.tx > 0 and words.pending > 0)
            if unsound or (strict and words.pending != words.expected):
                message = f"the kernel ends in the middle of a phase: {self.describe(barrier.address)}"
                state = self.state(barrier.address)
                error = BarrierMisuse(message).know("phase-at-exit", barrier=state)
                report(error.at(state.init) if state.init is not None else error)

    def phase(self, address: int) -> int:
        """Number of completed phases."""
        if address not in self._barriers:
            raise self._not_live("mbarrier", address)
        return self._barriers[address].phase

    def all_arrived(self, address: int) -> bool:
        """Whether a barrier has taken all arrivals of the phase in which it is, and waits for bytes alone."""
        return address in self._barriers and not self._barriers[address].words.pending

    def name(self, address: int) -> str:
        """The name that was given to a barrier, or ""."""
        return self._names.get(address & OFFSET_MASK, "")

    def state(self, address: int) -> BarrierState:
        """State of a barrier, as far as it is known, for reports."""
        place = self.name(address), address >> RANK_SHIFT, address & OFFSET_MASK
        barrier = self._barriers.get(address)
        if barrier is None:
            return BarrierState(*place, live=False)
        init = self.instructions[barrier.init_at] if 0 <= barrier.init_at < len(self.instructions) else None
        words = barrier.words
        numbers = words.phase, words.expected, words.pending, words.tx
        return BarrierState(*place, *numbers, True, init, barrier.initialiser, self._arriver(words.arriver))

    def states(self) -> tuple[BarrierState, ...]:
        """`state` of all."""
        return tuple(self.state(address) for address in self._barriers)

    def past(self) -> Past:
        """Operations before a fault, for reports."""
        count, most = self.tables.moment_count, CONSTANTS["MOMENTS"]
        latest = (self.tables.moments[number % most] for number in range(max(0, count - most), count))
        moments = tuple(self._moment(each) for each in latest if each.operation in _MOMENTS)
        unwritten = tuple((cta.cta_rank, *each) for cta in self._memory.ctas for each in cta.unwritten())
        return Past(self.states(), moments, count <= most, unwritten)

    def latest(self, address: int, warp: int) -> tuple[int, int]:
        """Index of the instruction of a warp's latest operation on an mbarrier that is kept, or -1; `Side.steps`."""
        count, most = self.tables.moment_count, CONSTANTS["MOMENTS"]
        for number in range(count - 1, max(0, count - most) - 1, -1):
            each = self.tables.moments[number % most]
            if each.address == address and each.warp == warp and each.operation in _MOMENTS:
                return each.place, each.steps
        return -1, 0

    def _moment(self, moment: ctypes.Structure) -> Moment:
        operation, asked = "timeout" if moment.timed_out else _MOMENTS[moment.operation], moment.amount
        instruction = self.instructions[moment.place] if 0 <= moment.place < len(self.instructions) else None
        by_parity = moment.parity or operation not in ("wait", "timeout")
        return Moment(
            operation, (moment.address >> RANK_SHIFT, moment.address & OFFSET_MASK), moment.phase,
            asked if by_parity else -1, self._arriver(moment.warp + 1), instruction,
        )  # fmt: skip

    def describe(self, address: int) -> str:
        """One line for reports: place, phase, pending arrivals and bytes, who initialised it."""
        barrier = self._barriers.get(address)
        if barrier is None:
            return f"{self._place(address)}: not initialised"
        words = barrier.words
        return self.describe_as(address, words.phase, words.expected, words.pending, words.tx, words.arriver)

    def describe_as(self, address: int, phase: int, expected: int, pending: int, tx: int, arriver: int) -> str:
        """`describe`, when these were the words of a live barrier's `Barrier`."""
        return (
            f"{self._place(address)}: phase {phase} (parity {phase & 1}) incomplete, {pending} of {expected} arrivals "
            f"pending, {tx} transaction bytes pending, initialised by "
            f"{self._barriers[address].initialiser or 'unknown'}, last arrival by {self._arriver(arriver) or 'nobody'}"
        )

    def _arriver(self, number: int) -> str:
        return self.labels[number - 1] if number else ""

    def _place(self, address: int) -> str:
        rank, offset, name = address >> RANK_SHIFT, address & OFFSET_MASK, self.name(address)
        return f"mbarrier {f'{name} ' if name else ''}at shared offset {offset} ({offset:#x}) of CTA {rank}"
