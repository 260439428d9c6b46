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


_cached_properties: tuple[int, list[threading.RLock]] = 0, []
"""Names in modules of this package; locks of its cached properties, which have one for all instances before 3.12."""


@functools.lru_cache(maxsize=1)
def _modules(_count: int) -> list[dict[str, object]]:
    """Names of the modules of this package, among so many modules."""
    return [vars(module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == __package__]


def _look() -> None:
    """Looks for locks of cached properties, before a fork: in the new process that would copy the pages of all classes,
    for 0.1 s. Other threads may import, also a module that is known already."""
    global _cached_properties
    if sys.version_info >= (3, 12):
        return
    modules = _modules(len(sys.modules))
    names = sum(map(len, modules))
    if names == _cached_properties[0]:
        return
    kinds = {value for module in modules for value in list(module.values()) if isinstance(value, type)}
    members = [member for kind in kinds for member in list(vars(kind).values())]
    _cached_properties = names, [each.lock for each in members if isinstance(each, functools.cached_property)]


def _forked() -> None:
    _look()  # again where that was interrupted
    properties = [(each, lambda: None) for each in _cached_properties[1]]
    for each, interrupted in [*_LOCKS.items(), *properties]:
        if each.acquire(blocking=False):
            each.release()
        else:
            each._at_fork_reinit()
            interrupted()


os.register_at_fork(before=_look, after_in_child=_forked)
