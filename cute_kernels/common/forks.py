"""Locks that a forked process can take: the threads that held them are its parent's."""

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable

_PACKAGE = __name__.partition(".")[0]
_LOCKS: weakref.WeakKeyDictionary[threading.RLock, Callable[[], object]] = weakref.WeakKeyDictionary()


def _state_of_this_thread() -> dict[object, object]:
    """The dictionary of `threading.local` and of caches of libraries."""
    borrowed = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_GetDict", ctypes.pythonapi))()
    return ctypes.cast(borrowed, ctypes.py_object).value


# One more reference than Python's, which a process that another thread forks drops inside of os.fork. Torch's cache of
# DTensor, which that destroyed, waited there for threads of a process group that its parent has, or crashed.
_OF_MAIN_THREAD = _state_of_this_thread() if threading.current_thread() is threading.main_thread() else None


def lock(interrupted: Callable[[], object] = lambda: None) -> threading.RLock:
    """A reentrant lock. In a forked process it is free, unless the thread that forked had it.

    ``interrupted`` is called in a forked process where another thread had the lock, which may have left half done what
    the lock guards. Where that cannot be put right, a fork has to wait instead (`awaited_lock`).
    """
    made = threading.RLock()
    _LOCKS[made] = interrupted
    return made


def end_with_parent(parent: int) -> None:
    """In a forked process: it is killed when the thread that forked it ends, as where a signal kills its process.
    ``parent``: the process that forked this one."""
    with contextlib.suppress(AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # which has ended before that
        os._exit(1)


_PR_SET_PDEATHSIG = 1


def awaited_lock() -> threading.RLock:
    """A reentrant lock that a fork waits for: the child has no thread that had it, and would wait for ever.

    An interrupt ends the wait. The process that forks gets it a moment later, since Python drops what is raised before
    a fork, and the child, in which the lock would never be free, ends at once.
    """
    made = threading.RLock()
    interrupted = threading.local()

    def before() -> None:
        interrupted.by = None
        try:
            made.acquire()
        except BaseException as error:  # of a signal's handler
            interrupted.by = error

    def in_parent() -> None:
        if interrupted.by is None:
            made.release()
        else:
            threading.Timer(_AFTER_FORK, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()

    def in_child() -> None:
        if interrupted.by is not None:
            os._exit(128 + signal.SIGINT)
        made.release()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
    return made


_AFTER_FORK = 0.05
"""Seconds after which a fork is over that has begun its last steps."""


_cached_properties: tuple[int, list[threading.RLock]] = 0, []
"""Names in modules of this package; locks of its cached properties, which have one for all instances before 3.12."""


@functools.lru_cache(maxsize=1)
def _modules(_count: int) -> list[dict[str, object]]:
    """Names of the modules of this package, among so many modules."""
    return [vars(module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == _PACKAGE]


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
