"""Work in many processes, by any `concurrent.futures.Executor`: here, on a Dask cluster, on a Ray cluster.

Results do not depend on the executor: tasks are pure, and come back in the order in which they were given.
"""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import pickle
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from cute_kernels.common import extras, forks

Result = TypeVar("Result")

SCHEMES = ("dask", "ray")
"""Schemes of the addresses that `connect` takes."""

_MOST_BREAKS = 3  # of a pool, one after the other without a result in between
_MOST_STATES = 2  # kept by a worker process
_TASKS_PER_WORKER = 2  # under way: one that runs, and one that waits for its end
_UNKNOWN_WIDTH = 8  # workers of an executor that does not say how many it has


class WorkerLost(RuntimeError):
    """Processes ended again and again while they executed the same tasks."""


# --- in the worker --------------------------------------------------------------------------------------------------

_states: OrderedDict[str, Any] = OrderedDict()
_over: set[str] = set()  # keys of `Workers` of this process that are closed: threads may still have tasks of theirs
# Threads of one process share a state, and neither kernels' memory nor the core is for two.
_lock = forks.lock(interrupted=_states.clear)


@dataclass(frozen=True)
class Prepared:
    """How a worker makes the state that tasks share: ``prepare(*arguments)``, pickled once for all tasks."""

    key: str
    pickled: bytes

    def state(self) -> Any:
        """Made at the first task of a process."""
        if self.key not in _states:
            prepare, arguments = pickle.loads(self.pickled)  # noqa: S301 - our own, see `Workers`
            state = prepare(*arguments)
            if self.key in _over:
                return state
            _states[self.key] = state
        _states.move_to_end(self.key)
        while len(_states) > _MOST_STATES:
            _states.popitem(last=False)
        return _states[self.key]


def _perform(prepared: Prepared, function: Callable[..., Result], item: tuple) -> Result:
    with _lock:
        return function(prepared.state(), *item)


# --- where the work comes from --------------------------------------------------------------------------------------

class Workers:
    """Runs functions on a state that each worker prepares once; a context, at whose end processes end.

    Args:
        prepare: a function of a module; makes the state of a worker.
        arguments: what it is called with, picklable.
        executor: where to run: an executor, which stays open, or a function that makes one, which is called again if
            worker processes end (`BrokenExecutor`); their tasks are run again. None: ``jobs`` says.
        jobs: without an executor, the number of processes; 1 is this one.

    Raises:
        ValueError: both an executor and more than one job.
    """

    def __init__(
        self,
        prepare: Callable[..., Any],
        arguments: tuple,
        executor: Executor | Callable[[], Executor] | None = None,
        jobs: int = 1,
    ) -> None:
        if executor is not None and jobs != 1:
            raise ValueError(f"jobs = {jobs} and an executor are both given; an executor has its own workers")
        if executor is None and jobs > 1:
            executor = functools.partial(_processes, jobs)
        self._make = executor if not isinstance(executor, Executor) else None
        self._executor = executor if isinstance(executor, Executor) else None
        self._here = executor is None
        self._recipe = (prepare, arguments)
        self._key = uuid.uuid4().hex
        self._opened: list[Executor] = []  # own ones
        self._shared: Any = None
        self._state: list[Any] | None = None  # of this process

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for executor in self._opened:
            if kind is not None:  # an interrupt, say: nobody wants what is under way
                _end_processes(executor)
            executor.shutdown(wait=True, cancel_futures=True)
        self._opened, self._shared, self._state = [], None, None
        if self._make is not None:
            self._executor = None
        _over.add(self._key)
        _states.pop(self._key, None)

    def each(self, function: Callable[..., Result], items: Iterable[tuple]) -> Iterator[Result]:
        """``function(state, *item)`` of each item, in the order of the items, which are drawn as they are needed.
        Function and items have to be picklable; what the function raises comes out here.

        A caller that stops early leaves tasks that have not begun undone. Raises WorkerLost: a pool of processes broke
        several times without a result in between.
        """
        if self._here:
            if self._state is None:
                prepare, arguments = self._recipe
                self._state = [prepare(*arguments)]
            for item in items:
                yield function(self._state[0], *item)
            return
        waiting: deque[tuple[tuple, Future[Result]]] = deque()
        items, breaks = iter(items), 0
        try:
            while True:
                while len(waiting) < _TASKS_PER_WORKER * self._width:
                    item = next(items, None)
                    if item is None:
                        break
                    waiting.append((item, self._submit(function, item)))
                if not waiting:
                    return
                try:
                    result = waiting[0][1].result()
                except BrokenExecutor as error:
                    breaks += 1
                    if self._make is None:
                        raise
                    if breaks >= _MOST_BREAKS:
                        names = ", ".join(repr(item) for item, _ in list(waiting)[: self._width])
                        message = f"worker processes ended {breaks} times in a row, at one of the tasks {names}"
                        raise WorkerLost(message) from error
                    self._executor = None
                    waiting = deque(
                        (item, future if _succeeded(future) else self._submit(function, item))
                        for item, future in waiting
                    )
                    continue
                breaks = 0
                waiting.popleft()
                yield result
        finally:
            for _, future in waiting:
                future.cancel()

    def _open(self) -> Executor:
        """The executor, with what it shares."""
        if self._executor is None:
            self._executor = self._make()
            self._opened.append(self._executor)
            self._shared = None
        if self._shared is None:
            share = getattr(self._executor, "share", None)  # clusters send it to each machine once
            self._shared = share(self._prepared()) if share is not None else self._prepared()
        return self._executor

    def _prepared(self) -> Prepared:
        return Prepared(self._key, pickle.dumps(self._recipe))

    @property
    def _width(self) -> int:
        executor = self._open()
        return getattr(executor, "width", None) or getattr(executor, "_max_workers", None) or _UNKNOWN_WIDTH

    def _submit(self, function: Callable[..., Result], item: tuple) -> Future[Result]:
        """A pool that is broken already says so at once; that is to come out where results are waited for."""
        executor = self._open()
        try:
            return executor.submit(_perform, self._shared, function, item)
        except BrokenExecutor as error:
            future: Future[Result] = Future()
            future.set_exception(error)
            return future


def _succeeded(future: Future) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _processes(jobs: int) -> Executor:
    # CuTe DSL has threads of its own, which a forked process would lose.
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(jobs, context, initializer=_end_with_parent)


def _end_processes(executor: Executor) -> None:
    """Ends the processes of a pool, which Python 3.14 has a method for; other executors have none."""
    for process in list((getattr(executor, "_processes", None) or {}).values()):
        process.terminate()


def _end_with_parent() -> None:
    """Ends a worker whose parent has ended: its siblings hold the pipe of tasks open, for which it would wait."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="watches the parent", daemon=True).start()


@contextlib.contextmanager
def connect(address: str) -> Iterator[Executor]:
    """The workers of a cluster that is running, as an executor. Its machines need this package, of the same version.
    Both clusters run the tasks of a lost worker again.

    ``address``: ``dask://HOST:PORT`` of a Dask scheduler, or ``ray://HOST:PORT`` of a Ray cluster's client server.
    Raises ValueError: no such address; MissingExtra: the cluster's client is not installed; OSError: nobody answers.
    """
    scheme, place = check_address(address)
    with _dask(place) if scheme == "dask" else _ray(address) as executor:
        yield executor


def check_address(address: str) -> tuple[str, str]:
    """Scheme and place of an address; raises what `connect` does before it connects."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme not in SCHEMES or not host or not port.isdecimal():
        legal = " or ".join(f"{name}://HOST:PORT" for name in SCHEMES)
        raise ValueError(f"executor = {address!r}: must be {legal}")
    extras.require(scheme, f"an executor {scheme}://")
    return scheme, place


class _Submitting(Executor):
    """An executor by a function that submits; ``share`` makes what each machine gets once, ``width`` is how many run.
    """

    def __init__(self, submit: Callable[..., Future], share: Callable[[Any], Any], width: int) -> None:
        self._submit, self.share, self.width = submit, share, width

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future:
        """Overrides the method of the base class."""
        return self._submit(function, *arguments, **keywords)


@contextlib.contextmanager
def _dask(place: str) -> Iterator[Executor]:
    import distributed

    with distributed.Client(f"tcp://{place}", set_as_default=False) as client:
        # Not pure: equal tasks need not be found by hashing their arguments.
        inner = client.get_executor(pure=False)
        width = sum(client.nthreads().values())
        # A task's result is computed again where the workers that have it are lost; what is scattered is not.
        yield _Submitting(inner.submit, functools.partial(client.submit, _same, pure=False), width)


@contextlib.contextmanager
def _ray(address: str) -> Iterator[Executor]:
    import ray

    def submit(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Future:
        reference = remote.remote(function, *arguments, **keywords)
        future: Future = Future()  # Ray's own cannot be cancelled, and has Ray's exception in place of the function's
        future.add_done_callback(lambda _: ray.cancel(reference) if future.cancelled() else None)
        reference.future().add_done_callback(functools.partial(_hand_on, future))
        return future

    try:
        session = ray.init(address)
    except ConnectionError as error:
        raise ConnectionError(f"executor {address!r}: {error}") from error
    with session:
        remote = ray.remote(_call)
        yield _Submitting(submit, ray.put, int(ray.cluster_resources().get("CPU", 1)))


def _hand_on(future: Future, theirs: Future) -> None:
    """A future has what another one has; of an exception its ``cause``, if that says what was raised."""
    if not future.set_running_or_notify_cancel():
        return
    error = theirs.exception()
    if error is None:
        future.set_result(theirs.result())
    else:
        future.set_exception(getattr(error, "cause", None) or error)


def _same(value: Any) -> Any:
    return value


def _call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)
