"""Locks that a forked process can take: the threads that held them are its parent's."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable

_LOCKS: weakref.WeakKeyDictionary[threading.RLock, Callable[[], object]] = weakref.WeakKeyDictionary()


def lock(interrupted: Callable[[], object] = lambda: None) -> threading.RLock:
    """A reentrant lock. In a forked process it is free, unless the thread that forked had it.

    Args:
        interrupted: called in a forked process where another thread had the lock, which may have left half done what
            the lock guards. Where that cannot be put right, a fork has to wait instead (`awaited_lock`).
    """
    made = threading.RLock()
    _LOCKS[made] = interrupted
    return made


def awaited_lock() -> threading.RLock:
    """A reentrant lock that a fork waits for: the child has no thread that had it, and would wait for ever."""
    made = threading.RLock()
    os.register_at_fork(before=made.acquire, after_in_parent=made.release, after_in_child=made.release)
    return made


def _of_cached_properties() -> list[threading.RLock]:
    """Locks of this package's cached properties, which have one for all instances before Python 3.12.

    They are looked for before the fork: in the new process that would copy the pages of all classes, for 0.1 s.
    """
    return [] if sys.version_info >= (3, 12) else _of_modules(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _of_modules(_count: int) -> list[threading.RLock]:
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == __package__]
    kinds = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    members = [member for kind in kinds for member in vars(kind).values()]
    return [member.lock for member in members if isinstance(member, functools.cached_property)]


def _forked() -> None:
    properties = [(each, lambda: None) for each in _of_cached_properties()]  # computed anew where that was interrupted
    for each, interrupted in [*_LOCKS.items(), *properties]:
        if each.acquire(blocking=False):
            each.release()
        else:
            each._at_fork_reinit()
            interrupted()


os.register_at_fork(before=_of_cached_properties, after_in_child=_forked)
