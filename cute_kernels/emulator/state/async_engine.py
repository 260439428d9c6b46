"""Asynchronous work: when do TMA copies, tensor-core instructions and their completions take effect.

PTX orders asynchronous operations only where it says so. Operations of one queue (e.g. the tcgen05 pipe of one CTA
pair) run in order; operations of different queues (e.g. two TMA loads) may run in any order and arbitrarily late. The
policy decides: ``eager`` runs an operation as soon as it is issued, ``lazy`` only when no warp can run any more,
``random`` at times drawn from a seeded generator.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, word_count, words
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import EmulatorError

if TYPE_CHECKING:
    from cute_kernels.emulator.ptx.program import Instruction

Policy = Literal["eager", "lazy", "random"]
Issued: TypeAlias = "tuple[Instruction, str]"
"""An instruction, and the label of the warp that executed it."""


def cluster_random(seed: int, cluster: int) -> tuple[random.Random, random.Random]:
    """The random numbers of one cluster's scheduler, and those of its asynchronous work."""
    rng = random.Random(seed * 1_000_003 + cluster)
    return rng, random.Random(rng.random())


@dataclass(slots=True)
class AsyncOp:
    """One asynchronous operation: ``run`` performs all of its effects, ``describe`` names it in reports.

    ``name`` is short, for traces; ``signals`` is the key of the `Wait` that its end may satisfy, if no mbarrier tells.
    ``yields``: under ``lazy`` it runs only when all that is left also yields. For operations that read memory which
    others overwrite: an overwriting that comes too early shows only if it happens first. ``issued`` says where it was
    issued; the engine fills it in where it is not given and the operation has to wait.
    """

    queue_key: Hashable
    run: Callable[[], None]
    describe: str
    yields: bool = False
    name: str = ""
    signals: Hashable = None
    issued: Issued | None = None


class Observer(Protocol):
    """Hears of asynchronous work and of what warps wait for, as it happens."""

    def issued(self, op: AsyncOp) -> None:
        """An operation is issued; it has not been queued yet."""

    def completed(self, key: Hashable) -> None:
        """A phase, generation or group is complete for which waits with this `Wait.key` wait."""


class AsyncEngine:
    """Queues of `AsyncOp`.

    Attributes:
        observers: hear of operations as they are issued.

    Args:
        policy: when an operation takes effect.
        rng: draws the times of ``random``.
        issuer: the instruction that is executed now and the label of its warp; None: nobody executes.

    Scheduler protocol: call `tick` after each warp slice; when no warp can run, call `step` until a warp can run
    again; when `step` returns False and still no warp can run, the kernel hangs.
    """

    def __init__(
        self,
        policy: Policy = "eager",
        rng: random.Random | None = None,
        issuer: Callable[[], Issued | None] = lambda: None,
    ) -> None:
        if policy not in ("eager", "lazy", "random"):
            raise ValueError(f"completion policy {policy!r}; legal are 'eager', 'lazy' and 'random'")
        self.policy = policy
        self.executed = 0
        self.running_issued: Issued | None = None  # of the operation that takes effect now
        self._rng = rng or random.Random(0)
        self.issuer = issuer
        self.observers: list[Observer] = []
        self._queues: dict[Hashable, deque[AsyncOp]] = {}
        self._keys: list[Hashable] = []  # keys of the non-empty queues, in order of becoming non-empty

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def submit(self, op: AsyncOp) -> None:
        """Issues an operation. ``eager`` runs it before returning unless its queue holds earlier operations."""
        for observer in self.observers:
            observer.issued(op)
        queue = self._queues.get(op.queue_key)
        if queue is None:
            if self.policy == "eager":
                self.executed += 1
                op.run()
                return
            queue = self._queues[op.queue_key] = deque()
            self._keys.append(op.queue_key)
        op.issued = op.issued or self.issuer()
        queue.append(op)

    def tick(self) -> None:
        """To be called between warp slices: ``random`` runs zero to two operations, the others none."""
        if self.policy == "random" and self._keys:
            for _ in range(self._rng.choice((0, 0, 1, 2))):
                self.step()

    def step(self) -> bool:
        """Runs one pending operation. False if there is none.

        ``random`` takes one of a random queue, the others the first that does not yield of the oldest queues.
        """
        if not self._keys:
            return False
        if self.policy == "random":
            index = self._rng.randrange(len(self._keys))
        else:
            index = next((i for i, key in enumerate(self._keys) if not self._queues[key][0].yields), 0)
        key = self._keys[index]
        queue = self._queues[key]
        op = queue.popleft()
        if not queue:
            del self._queues[key]
            del self._keys[index]
        self.executed += 1
        self._run(op)
        return True

    def _run(self, op: AsyncOp) -> None:
        """Performs an operation that waited. What it meets is reported at the instruction that issued it."""
        self.running_issued = op.issued
        try:
            op.run()
        except EmulatorError as error:
            if op.issued is not None:
                error.at(*op.issued)
            raise
        finally:
            self.running_issued = None

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
        return [op.describe for key in self._keys for op in self._queues[key]]


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

    def unobserved(self) -> list[tuple[Any, str | int, int]]:
        """Threads that never waited for a store's reads of shared memory: thread, latest such store, its place.

        That is its description, or the identity of its reads if the core issued it. A CTA must not exit in this
        state: its shared memory may be handed to another CTA while still being read.
        """
        found: list[tuple[Any, str | int, int]] = []
        for thread, state in self._threads.items():
            words = state.words
            ops = [op for op in state.stores if op.group > words[_WAITED]]
            if words[_STORED] > words[_WAITED] and (not ops or words[_STORED] >= ops[-1].group):
                found.append((thread, words[_IDENTITY], -1))
            elif ops:
                found.append((thread, ops[-1].describe, ops[-1].place))
        return found
