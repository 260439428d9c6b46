"""Threads that a program starts inside `cute_kernels.emulator.programs.capture` are inside of it, too.

What redirects CuTe DSL and torch is kept per thread, so that other threads of the process stay as they are.
"""

import concurrent.futures
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from unittest import mock


class ProgramThreads:
    """The threads of one program. ``inside``: makes the context in which a thread runs."""

    def __init__(self, inside: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._inside = inside
        self._here = threading.local()  # member: whether this thread belongs to the program
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._executors: weakref.WeakSet[concurrent.futures.Executor] = weakref.WeakSet()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """This thread is one of the program, and so is every thread that one of them starts."""
        start, submit = threading.Thread.start, concurrent.futures.ThreadPoolExecutor.submit

        @functools.wraps(start)
        def start_member(thread: threading.Thread) -> None:
            if self._is_member():
                thread.run = functools.partial(self._run, thread.run)
                self._threads.add(thread)
            start(thread)

        @functools.wraps(submit)
        def submit_noted(executor: concurrent.futures.Executor, *arguments: object, **keywords: object) -> object:
            if self._is_member():
                self._executors.add(executor)
            return submit(executor, *arguments, **keywords)

        with (
            mock.patch.object(threading.Thread, "start", start_member),
            mock.patch.object(concurrent.futures.ThreadPoolExecutor, "submit", submit_noted),
            self._membership(),
        ):
            yield

    def wait(self) -> None:
        """Until they are over, as the interpreter waits at its end: for all but daemons, and for executors' work."""
        for executor in list(self._executors):
            executor.shutdown(wait=True)
        current = threading.current_thread()
        while waited_for := [t for t in self._threads if t.is_alive() and not t.daemon and t is not current]:
            waited_for[0].join()

    def _run(self, run: Callable[[], None]) -> None:
        with self._membership(), self._inside():
            run()

    @contextlib.contextmanager
    def _membership(self) -> Iterator[None]:
        before = self._is_member()
        self._here.member = True
        try:
            yield
        finally:
            self._here.member = before

    def _is_member(self) -> bool:
        return getattr(self._here, "member", False)
