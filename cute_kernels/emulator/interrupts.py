"""Signals that arrive during a launch: their handlers run where the launch can be left.

Python runs a handler between any two of its own operations, and what it raises (KeyboardInterrupt, the failure of a
test that takes too long) comes out there. In a launch that place may be a function that machine code has called, where
ctypes drops the exception and execution goes on without what was left out, which looks like a fault of the kernel. So
while a launch runs, handlers of Python are replaced by one that only notes the signal. `check`, between two turns of
warps, runs the program's handlers; what they raise ends the launch, whose state nobody uses again. While handlers are
replaced and put back, the system holds signals back.

Only the main thread runs handlers, so launches of other threads have nothing to defer.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

noted: deque[tuple[int, FrameType | None]] = deque()
"""Signals whose handlers have not run, in their order. A warp whose turn is under way gives way when there are any."""

_replaced: dict[int, Callable[[int, FrameType | None], Any]] = {}
"""The program's handlers while a launch runs."""


class deferred:  # noqa: N801 - used like a function
    """A context in which signals' handlers wait for `check`, or for its end; inside of another one it does nothing."""

    def __enter__(self) -> deferred:
        self._outermost = _in_main_thread() and not _replaced
        if self._outermost:
            handlers = {number: signal.getsignal(number) for number in _SIGNALS}
            with _held_back():
                for number, handler in handlers.items():
                    if callable(handler):
                        _replaced[number] = handler
                        signal.signal(number, _note)
                if not _replaced:  # what tells that a launch of this thread runs
                    _replaced[0] = _nothing
        return self

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            with _held_back():
                handlers = dict(_replaced)
                _replaced.clear()
                for number, handler in handlers.items():
                    if number:
                        signal.signal(number, handler)
            _run(handlers)


def check() -> None:
    """Runs the handlers of signals that were noted; raises what they raise."""
    if noted and _in_main_thread():
        _run(dict(_replaced))


def _run(handlers: dict[int, Callable[[int, FrameType | None], Any]]) -> None:
    while noted:
        number, frame = noted.popleft()
        handlers[number](number, frame)


def _note(number: int, frame: FrameType | None) -> None:
    noted.append((number, frame))


def _nothing(number: int, frame: FrameType | None) -> None:
    """In the place of a handler where there is none."""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


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
