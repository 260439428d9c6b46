"""Signals that arrive during a launch or a compilation: their handlers run where it can be left.

Python runs a handler between any two of its own operations, and what it raises (KeyboardInterrupt, the failure of a
test that takes too long) comes out there. In a launch that place may be a function that machine code has called, where
ctypes drops the exception and execution goes on without what was left out, which looks like a fault of the kernel; in
a compilation by CuTe DSL it may be one whose exceptions abort the process. So while either runs, handlers of Python are
replaced by one that only notes the signal. `check`, between two turns of warps, runs the program's handlers; what they
raise ends the launch, whose state nobody uses again. A compilation is left at its end. Handlers find themselves
installed, and what they install stays. While handlers are replaced and put back, the system holds signals back.

Only the main thread runs handlers, so launches of other threads have nothing to defer.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

noted: dict[int, FrameType | None] = {}
"""Signals whose handlers have not run, in their order, each once, as the system keeps those that it holds back. A warp
whose turn is under way gives way when there are any."""

_replaced: dict[int, Callable[[int, FrameType | None], Any]] = {}
"""The program's handlers while a launch runs."""
_thread = 0  # whose launch that is


class deferred:  # noqa: N801 - used like a function
    """A context in which signals' handlers wait for `check`, or for its end; inside of another one it does nothing."""

    def __enter__(self) -> "deferred":
        self._outermost = _in_main_thread() and not _replaced
        if self._outermost:
            _replace()
        return self

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            try:
                _put_back()
            finally:
                _run()


class OutOfTime(Exception):
    """The time that `until` allows is over."""


_end = ContextVar("end", default=math.inf)


@contextlib.contextmanager
def until(end: float) -> Iterator[None]:
    """A context in which `check` raises OutOfTime after a moment of time.monotonic()."""
    token = _end.set(end)
    try:
        yield
    finally:
        _end.reset(token)


def check() -> None:
    """Runs the handlers of signals that were noted; raises what they raise, and OutOfTime as `until` says."""
    if time.monotonic() > _end.get():
        raise OutOfTime
    if noted and _in_main_thread():
        try:
            _put_back()
            _run()
        finally:
            _replace()


def _replace() -> None:
    global _thread
    _thread = threading.get_ident()
    with _held_back():
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                _replaced[number] = handler
                signal.signal(number, _note)


def _put_back() -> None:
    with _held_back():
        while _replaced:
            number, handler = _replaced.popitem()
            if signal.getsignal(number) is _note:  # no progress function has installed another one
                signal.signal(number, handler)


def _run() -> None:
    """Runs the handlers of all noted signals, whatever one of them raises."""
    if noted:
        number = next(iter(noted))
        frame, handler = noted.pop(number), signal.getsignal(number)
        try:
            if callable(handler):
                handler(number, frame)
            else:  # an earlier handler has chosen so
                signal.raise_signal(number)
        finally:
            _run()


def _note(number: int, frame: FrameType | None) -> None:
    noted.setdefault(number, frame)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _forked() -> None:
    """A process that another thread forks is in no launch of the main thread; what was noted is the parent's."""
    if _replaced and threading.get_ident() != _thread:
        noted.clear()
        _put_back()


os.register_at_fork(after_in_child=_forked)

_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


class _held_back:  # noqa: N801 - used like a function
    """A context in which no signal arrives: those of the meantime do at its end."""

    def __enter__(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # runs the handlers of what had arrived
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
            raise

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
