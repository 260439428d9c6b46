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
from typing import Literal, NoReturn, TypeAlias

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.isa.ptx.program import Instruction

Policy = Literal["eager", "lazy", "random"]
Issued: TypeAlias = "tuple[Instruction, str]"
"""An instruction, and the label of the warp that executed it."""
WorkQueues, WorkQueue, Work = (STRUCTURES[name] for name in ("WorkQueues", "WorkQueue", "Work"))
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)
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
    if it happens first. ``issued`` says where it was issued; the engine fills it in."""

    queue_key: Hashable
    run: Callable[[], None] | None
    describe: str
    yields: bool = False
    name: str = ""
    signals: Hashable = None
    issued: Issued | None = None


class AsyncEngine:
    """Asynchronous work of a cluster. ``policy``: when an operation takes effect; ``issuer``: the instruction that is
    executed now and the label of its warp, or None; ``tables``: the core's `Tables`, for what it performs.

    Call `tick` after each warp slice; when no warp can run, call `step` until a warp can run again; when `step` returns
    False and still no warp can run, the kernel hangs.

    Attributes:
        words: for each kind that the core performs, what makes an `AsyncOp` of the address of its record, of which the
            first EVENT_VALUES words are there.
        where: the instruction of an index and the label of the warp of a number; None: not known.
        stepped: called with the index of each queue whose first operation `step` is about to run, and its description.
    """

    def __init__(
        self, policy: Policy = "eager", rng: random.Random | None = None,
        issuer: Callable[[], Issued | None] = lambda: None, tables: int | None = None,
    ) -> None:
        if policy not in ("eager", "lazy", "random"):
            raise ValueError(f"completion policy = {policy!r}: must be 'eager', 'lazy' or 'random'")
        self.policy = policy
        self.rng = rng or random.Random(0)  # draws the times of ``random``
        self.issuer = issuer
        self.observed = False  # operations are kept until they are forgotten
        self.noted: Callable[[], None] = lambda: None  # passes on what the core has noted for observers
        self.words: dict[int, Callable[[int], AsyncOp]] = {}
        self.where: Callable[[int, int], Issued | None] = lambda place, warp: None
        self.shared_queues: dict[Hashable, int] = {}  # numbers of queues that have operations of both kinds
        self.reraise: Callable[[], None] = lambda: None  # raises what an operation of the core has come upon
        self.stepped: Callable[[int, str], None] | None = None
        self._error: BaseException | None = None
        self._ops: dict[int, AsyncOp] = {}  # that have been issued and have not taken effect, by their numbers
        self._queues: dict[Hashable, int] = {}
        self._callback = _CALLBACK(self._run)
        self.work = WorkQueues(eager=policy == "eager", tables=tables)
        self.work.run = ctypes.cast(self._callback, ctypes.c_void_p).value
        self.address = ctypes.addressof(self.work)
        # The core is loaded here: to compile it while memory is collected would wait for the lock of the compilation.
        weakref.finalize(self, _free, library(), self.work)

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
        wrong = library().work_submit_python(self.address, queue, op.yields)
        self.noted()
        if wrong:
            self._raise()

    def tick(self) -> None:
        """To be called between warp slices: ``random`` runs zero to two operations, the others none."""
        if self.policy == "random" and self.work.count:
            for _ in range(self.rng.choice((0, 0, 1, 2))):
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
            index = self.rng.randrange(count) if self.policy == "random" else -1
        if self.stepped is not None:
            self.stepped(index, f"takes effect: {self._next_of(index)}")
        wrong = library().work_step(self.address, index)
        self.noted()
        if not wrong:
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
        op = self.operation(record.kind, record.number, address)
        if record.kind != _PYTHON:
            op.issued = self.where(record.place, record.warp)
        return op

    def operation(self, kind: int, number: int, address: int) -> AsyncOp:
        """One that has been issued and is not forgotten, of which the address of the record is known."""
        return self._ops[number] if kind == _PYTHON else self.words[kind](address)

    def forget(self, number: int) -> None:
        """Nobody will ask for an operation any more."""
        self._ops.pop(number, None)

    def _raise(self) -> NoReturn:
        error, self._error = self._error, None
        if error is None:
            self.reraise()
        raise error

    def _run(self, number: int) -> int:
        """Performs an operation for the core, which calls this: 0 to go on."""
        try:
            self._ops[number].run()
            if not self.observed:
                self.forget(number)
        except BaseException as error:  # noqa: BLE001 - must not unwind through the core; `_raise` raises it
            self._error = error
            return 1
        return 0


def _free(core: ctypes.CDLL, work: ctypes.Structure) -> None:
    core.work_free(ctypes.addressof(work))
