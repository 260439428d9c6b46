"""Processes that are forked off this one for a task, and talk with it over pipes.

A forked process begins with all memory of this one, at the same addresses, and what it writes stays its own. It is for
code that takes no lock which another thread of this process may hold: of several threads, the one that forks lives on.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait

from cute_kernels.common import forks, interrupts

_PATIENCE = 0.1
"""Seconds without a message after which signals are looked for."""

AVAILABLE = hasattr(os, "fork")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected, and in a process that is forked inside none that both share: that would copy it."""
    parent, was_enabled = os.getpid(), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if os.getpid() != parent:
            gc.freeze()
        if was_enabled:
            gc.enable()


class Ended(Exception):
    """A forked process has ended before it was done, or could not be forked."""


class Forked:
    """Forked processes; a context, at whose end all have ended. Entered inside of `interrupts.deferred`. ``tasks``:
    what each of them executes, with its end of a pipe. It raises nothing that anybody would see. Raises Ended: on
    entry, where the system has no room for a process."""

    def __init__(self, tasks: list[Callable[[Connection], None]]) -> None:
        self._tasks = tasks
        self._running: dict[Connection, int] = {}

    def __enter__(self) -> Forked:
        try:
            for task in self._tasks:
                self._start(task)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._running.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)  # it may have ended already
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
            connection.close()
        self._running.clear()

    @property
    def connections(self) -> list[Connection]:
        """To each of the processes, in the order of their tasks."""
        return list(self._running)

    def messages(self) -> Iterator[tuple[int, object]]:
        """(number of the process, object that it has sent), as they come, until each has sent None. Raises Ended: a
        process has ended without that."""
        numbers = {connection: number for number, connection in enumerate(self._running)}
        while numbers:
            interrupts.check()
            for connection in wait(list(numbers), _PATIENCE):
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    raise Ended("a process ended before it was done") from None
                if message is None:
                    del numbers[connection]
                else:
                    yield numbers[connection], message

    def _start(self, task: Callable[[Connection], None]) -> None:
        parent = os.getpid()
        try:
            here, there = multiprocessing.Pipe()
            # os.fork ends the other threads' Python states in the new process before it returns there. Garbage that was
            # collected meanwhile would be destroyed by libraries whose threads are gone.
            with _no_collection(), warnings.catch_warnings():
                # From Python 3.12 on: of other threads, whose locks the tasks do not take.
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
        except OSError as error:
            raise Ended(f"no process could be started: {error.strerror}") from None
        if process:
            there.close()
            self._running[here] = process
            return
        status = 1
        try:
            forks.end_with_parent(parent)
            for other in (here, *self._running):  # ends that are the parent's: who writes to them notices its end
                other.close()
            task(there)
            status = 0
        finally:
            os._exit(status)
