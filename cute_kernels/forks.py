"""Locks that a forked process can take: the threads that held them are its parent's."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

_LOCKS: weakref.WeakKeyDictionary[threading.RLock, Callable[[], object]] = weakref.WeakKeyDictionary()


def lock(interrupted: Callable[[], object] = lambda: None) -> threading.RLock:
    """A reentrant lock. In a forked process it is free, unless the thread that forked had it.

    Args:
        interrupted: called in a forked process where another thread had the lock, which may have left half done what
            the lock guards. Where that cannot be put right, a fork has to wait instead (`os.register_at_fork`).
    """
    made = threading.RLock()
    _LOCKS[made] = interrupted
    return made


def _forked() -> None:
    for each, interrupted in list(_LOCKS.items()):
        if each.acquire(blocking=False):
            each.release()
        else:
            each._at_fork_reinit()
            interrupted()


os.register_at_fork(after_in_child=_forked)
