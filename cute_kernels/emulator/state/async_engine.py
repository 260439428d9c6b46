"""Asynchronous work: when do TMA copies, tensor-core instructions and their completions take effect.

PTX orders asynchronous operations only where it says so. Operations of one queue (e.g. the tcgen05 pipe of one CTA
pair) run in order; operations of different queues (e.g. two TMA loads) may run in any order and arbitrarily late. The
policy decides: ``eager`` runs an operation as soon as it is issued, ``lazy`` only when no warp can run any more,
``random`` at times drawn from a seeded generator. The queues are the core's (``core/asynchronous.c``).
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol, TypeAlias

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES, word_count, words
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import EmulatorError

if TYPE_CHECKING:
    from cute_kernels.emulator.ptx.program import Instruction

Policy = Literal["eager", "lazy", "random"]
Issued: TypeAlias = "tuple[Instruction, str]"
"""An instruction, and the label of the warp that executed it."""
WorkQueues, WorkQueue, Work = (STRUCTURES[name] for name in ("WorkQueues", "WorkQueue", "Work"))
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int64)
_RUN, _ISSUED, _BEGINS, _ENDS, _PHASE = (CONSTANTS[f"WORK_{n}"] for n in ("RUN", "ISSUED", "BEGINS", "ENDS", "PHASE"))
_PYTHON = CONSTANTS["WORK_PYTHON"]


def cluster_random(seed: int, cluster: int) -> tuple[random.Random, random.Random]:
    """The random numbers of one cluster's scheduler, and those of its asynchronous work."""
    rng = random.Random(seed * 1_000_003 + cluster)
    return rng, random.Random(rng.random())


@dataclass(slots=True)
class AsyncOp:
    """One asynchronous operation: ``run`` performs all of its effects, ``describe`` names it in reports.

    Those of kinds that the core performs have no ``run``. ``name`` is short, for traces; ``signals`` is the key of the
    `Wait` that its end may satisfy, if no mbarrier tells. ``yields``: under ``lazy`` it runs only when all that is left
    also yields. For operations that read memory which others overwrite: an overwriting that comes too early shows only
    if it happens first. ``issued`` says where it was issued, ``number`` counts the operations of the cluster; the
    engine fills both in.
    """

    queue_key: Hashable
    run: Callable[[], None] | None
    describe: str
    yields: bool = False
    name: str = ""
    signals: Hashable = None
    issued: Issued | None = None
    number: int = 0


class Observer(Protocol):
    """Hears of asynchronous work and of what warps wait for, as it happens."""

    def issued(self, op: AsyncOp) -> None:
        """An operation is issued; it has not been queued yet."""

    def begins(self, op: AsyncOp) -> None:
        """It takes effect now."""

    def ends(self, op: AsyncOp, failed: bool) -> None:
        """It has taken effect, or has failed."""

    def completed(self, key: Hashable) -> None:
        """A phase, generation or group is complete for which waits with this `Wait.key` wait."""


class AsyncEngine:
    """Asynchronous work of a cluster.

    Attributes:
        address: of the core's `WorkQueues`.
        work: that; ``observed`` says whether there are observers.
        observers: hear of operations as they are issued and take effect.
        words: for each kind that the core performs, what makes an `AsyncOp` of the address of its record.
        where: the instruction of an index and the label of the warp of a number; None: not known.
        shared_queues: numbers of queues that have operations of both kinds.
        stand: says that the running warp is where the core is.
        reraise: raises what an operation of the core has come upon.
        stepped: called with the index of each queue whose first operation `step` is about to run, and its description.

    Args:
        policy: when an operation takes effect.
        rng: draws the times of ``random``.
        issuer: the instruction that is executed now and the label of its warp; None: nobody executes.
        tables: the core's `Tables`, for what it performs.

    Scheduler protocol: call `tick` after each warp slice; when no warp can run, call `step` until a warp can run
    again; when `step` returns False and still no warp can run, the kernel hangs.
    """

    def __init__(
        self,
        policy: Policy = "eager",
        rng: random.Random | None = None,
        issuer: Callable[[], Issued | None] = lambda: None,
        tables: int | None = None,
    ) -> None:
        if policy not in ("eager", "lazy", "random"):
            raise ValueError(f"completion policy {policy!r}; legal are 'eager', 'lazy' and 'random'")
        self.policy = policy
        self._rng = rng or random.Random(0)
        self.issuer = issuer
        self.observers: list[Observer] = []
        self.words: dict[int, Callable[[int], AsyncOp]] = {}
        self.where: Callable[[int, int], Issued | None] = lambda place, warp: None
        self.shared_queues: dict[Hashable, int] = {}
        self.stand: Callable[[], None] = lambda: None
        self.reraise: Callable[[], None] = lambda: None
        self.stepped: Callable[[int, str], None] | None = None
        self._error: BaseException | None = None
        self._ops: dict[int, AsyncOp] = {}  # that have been issued and have not taken effect, by their numbers
        self._queues: dict[Hashable, int] = {}
        self._callback = _CALLBACK(self._tell)
        self.work = WorkQueues(eager=policy == "eager", tables=tables)
        self.work.tell = ctypes.cast(self._callback, ctypes.c_void_p).value
        self.address = ctypes.addressof(self.work)
        weakref.finalize(self, _free, self.work)

    def __len__(self) -> int:
        return sum(1 for _ in self._pending())

    @property
    def executed(self) -> int:
        """Operations that have taken effect."""
        return self.work.executed

    @property
    def running_issued(self) -> Issued | None:
        """Where the operation was issued that had to wait and takes effect now."""
        return self._op(self.work.running).issued if self.work.running else None

    def submit(self, op: AsyncOp) -> None:
        """Issues an operation that Python performs. ``eager`` runs it before returning."""
        if not self.work.count:
            self._queues.clear()
        queue = self.shared_queues.get(op.queue_key) or self._queues.setdefault(op.queue_key, len(self._queues) + 1)
        if self.policy != "eager":
            op.issued = op.issued or self.issuer()
        self._ops[self.work.issued + 1] = op
        if library().work_submit_python(self.address, queue, op.yields):
            self._raise()

    def tick(self) -> None:
        """To be called between warp slices: ``random`` runs zero to two operations, the others none."""
        if self.policy == "random" and self.work.count:
            for _ in range(self._rng.choice((0, 0, 1, 2))):
                self.step()

    def step(self, index: int | None = None) -> bool:
        """Runs one pending operation. False if there is none.

        Without ``index`` of a queue, ``random`` takes one of a random queue, the others (as -1 does) the first that
        does not yield of the oldest queues. What it meets is reported at the instruction that issued it.
        """
        count = self.work.count
        if not count or (index is not None and index >= count):
            return False
        if index is None:
            index = self._rng.randrange(count) if self.policy == "random" else -1
        if self.stepped is not None:
            self.stepped(index, f"takes effect: {self._next_of(index)}")
        if not library().work_step(self.address, index):
            return True
        try:
            self._raise()
        except EmulatorError as error:
            issued = self.running_issued
            if issued is not None:
                error.at(*issued)
            raise

    def drain(self) -> None:
        """Runs everything that is pending (end of a kernel)."""
        while self.step():
            pass

    def force(self, done: Callable[[], bool]) -> bool:
        """Runs pending operations until ``done()`` holds. Returns whether it does."""
        while not done():
            if not self.step():
                return False
        return True

    def pending(self) -> list[str]:
        """Descriptions of what is pending, queue by queue in order of issue."""
        return [self._op(address).describe for address in self._pending()]

    def _next_of(self, index: int) -> str:
        """Description of what `step` runs with this index."""
        firsts = [queue.first for queue in self._work_queues()]
        ready = (address for address in firsts if not Work.from_address(address).yields)
        return self._op(firsts[index] if index >= 0 else next(ready, firsts[0])).describe

    def _work_queues(self) -> ctypes.Array:
        return (WorkQueue * self.work.count).from_address(self.work.queues or self.address)

    def _pending(self) -> Iterator[int]:
        """Addresses of records."""
        for queue in self._work_queues():
            address = queue.first
            while address:
                yield address
                address = Work.from_address(address).next

    def _op(self, address: int) -> AsyncOp:
        record = Work.from_address(address)
        if record.kind == _PYTHON:
            op = self._ops[record.number]
        else:
            op = self.words[record.kind](address)
            op.issued = self.where(record.place, record.warp)
        op.number = record.number
        return op

    def _show(self, what: int, op: AsyncOp) -> None:
        """Tells the observers of an operation."""
        if op.run is None:
            self.stand()
        for observer in self.observers:
            if what == _ISSUED:
                observer.issued(op)
            elif what == _BEGINS:
                observer.begins(op)
            else:
                observer.ends(op, what != _ENDS)
        if what == _ENDS:
            self._ops.pop(op.number, None)

    def _raise(self) -> NoReturn:
        error, self._error = self._error, None
        if error is None:
            self.reraise()
        raise error

    def _tell(self, what: int, detail: int) -> int:
        """Answers the core, which calls this: 0 to go on."""
        try:
            if what == _RUN:
                self._ops[detail].run()
                if not self.observers:
                    del self._ops[detail]
            elif what == _PHASE:
                for observer in self.observers:
                    observer.completed(("mbarrier", detail))
            else:
                self._show(what, self._op(detail))
        except BaseException as error:  # noqa: BLE001 - must not unwind through the core; `_checked` raises it
            self._error = error
            return 1
        return 0


def _free(work: ctypes.Structure) -> None:
    library().work_free(ctypes.addressof(work))


class BulkOp:
    """One bulk asynchronous store: first its source is read, then its destination written.

    Attributes:
        describe: for reports.
        place: index of the instruction that issued it; -1: not known.
        group: number of its group.
        read_done: the shared-memory source may be reused.
        write_done: the writes are visible.
    """

    def __init__(self, describe: str, place: int = -1) -> None:
        self.describe, self.place, self.group = describe, place, 0
        self.read_done = self.write_done = False
        self._complete: Callable[[], None] = lambda: None

    def issued(self, group: int, complete: Callable[[], None]) -> None:
        """It is in a group now; ``complete`` is called when a part of it is done."""
        self.group, self._complete = group, complete

    def has_read(self) -> None:
        """The source has been read."""
        self.read_done = True
        self._complete()

    def has_written(self) -> None:
        """The destination is written."""
        self.write_done = True
        self._complete()


#: Words of what is kept of a thread's bulk groups, a `BulkThread` of the core.
_COMMITTED, _STORED, _IDENTITY, _WAITED, _READING, _WRITING, _READS, _WRITES = (
    words("BulkThread")[name]
    for name in ("committed", "stored", "identity", "waited", "reading", "writing", "reads", "writes")
)
_NO_GROUP = CONSTANTS["NO_GROUP"]


class _Thread:
    """Stores, in order, that are not complete or not known to be."""

    def __init__(self) -> None:
        block = np.zeros(word_count("BulkThread"), np.int64)
        self.words, self.address = memoryview(block).cast("B").cast("q"), block.ctypes.data
        self.stores: list[BulkOp] = []
        self.note()

    def issue(self, op: BulkOp) -> None:
        group, waited = self.words[_COMMITTED] + 1, self.words[_WAITED]
        op.issued(group, self.note)
        self.stores = [each for each in self.stores if each.group > waited or not each.write_done]
        self.stores.append(op)
        if self.words[_STORED] == group:
            self.words[_STORED] = 0  # in this group, but no longer the latest
        self.note()

    def note(self) -> None:
        """Tells the core which groups are not complete."""
        self.words[_READING] = min((op.group for op in self.stores if not op.read_done), default=_NO_GROUP)
        self.words[_WRITING] = min((op.group for op in self.stores if not op.write_done), default=_NO_GROUP)


class BulkGroups:
    """Bulk async-groups, one sequence per thread, which the core counts (``core/bulk_groups.c``).

    ``thread`` is any hashable identity, by convention ``(cta_rank, warp, lane)``.
    """

    def __init__(self) -> None:
        self._threads: dict[Hashable, _Thread] = {}

    def _thread(self, thread: Hashable) -> _Thread:
        if thread not in self._threads:
            self._threads[thread] = _Thread()
        return self._threads[thread]

    def address(self, thread: Hashable, columns: tuple[int, int] = (0, 0)) -> int:
        """Host address of the `BulkThread` of a thread, whose columns in the race detector are these."""
        state = self._thread(thread)
        state.words[_READS], state.words[_WRITES] = columns
        return state.address

    def issue(self, thread: Hashable, op: BulkOp) -> None:
        """Adds an operation to the thread's open group."""
        self._thread(thread).issue(op)

    def committed(self, thread: Hashable) -> int:
        """Number of groups that the thread has committed so far."""
        return self._threads[thread].words[_COMMITTED] if thread in self._threads else 0

    def wait_satisfied(self, thread: Hashable, n: int, read: bool) -> bool:
        """Whether at most the ``n`` newest committed groups are incomplete.

        ``read`` (wait_group.read): only their source reads have to be done. When satisfied, the older groups count
        as observed by the thread: their shared memory may be written again.
        """
        return bool(library().bulk_wait(self._thread(thread).address, n, read))

    def unobserved(self) -> list[tuple[tuple[int, int, int], str | int, int]]:
        """Threads that never waited for a store's reads of shared memory: thread, latest such store, its place.

        That is its description, or the identity of its reads if the core issued it. A CTA must not exit in this
        state: its shared memory may be handed to another CTA while still being read.
        """
        found: list[tuple[tuple[int, int, int], str | int, int]] = []
        for thread, state in self._threads.items():
            words = state.words
            ops = [op for op in state.stores if op.group > words[_WAITED]]
            if words[_STORED] > words[_WAITED] and (not ops or words[_STORED] >= ops[-1].group):
                found.append((thread, words[_IDENTITY], -1))
            elif ops:
                found.append((thread, ops[-1].describe, ops[-1].place))
        return found
