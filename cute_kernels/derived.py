"""Tensors derived from a model's constants (the table, the padded weight), kept while the constants live unchanged.

An entry is used again only if every source is the same Python object with the same memory, shape and autograd version
counter. Not noticed: writes that bypass the version counter (``tensor.data.copy_``, a NumPy alias, a foreign kernel).
Call `clear_cache` after such a write. Tensors made in inference mode have no version counter and are never cached, and
nothing is taken from or put into the cache while a CUDA graph is captured, so that a replay sees the current constants.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

Sources = Sequence["torch.Tensor | None"]


@dataclass
class _Entry:
    sources: list[weakref.ref | None]
    stamps: tuple
    value: torch.Tensor
    stream: torch.cuda.Stream | None
    ready: torch.cuda.Event | None


@dataclass
class DerivedTensors:
    """A weak cache from source tensors to one derived tensor.

    `misses` counts the calls that had to build, `generation` those of `clear`.
    """

    entries: dict[tuple, _Entry] = field(default_factory=dict)
    misses: int = 0
    generation: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def get(self, key: Hashable, sources: Sources, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return ``build()``, or its result of an earlier call with equal `key` and unchanged `sources`."""
        if not _cacheable(sources):
            self.misses += 1
            return build()
        slot = (key, *(id(s) for s in sources))
        stamps = tuple(None if s is None else _stamp(s) for s in sources)
        with self._lock:
            entry = self.entries.get(slot)
        if entry is not None and entry.stamps == stamps and _same_objects(entry.sources, sources):
            _order_after(entry)
            return entry.value
        value = build()
        stream = ready = None
        if value.is_cuda:
            stream = torch.cuda.current_stream(value.device)
            ready = stream.record_event()
        # The callback runs when a source dies, before its id can name another tensor.
        drop = lambda _, slot=slot: self.entries.pop(slot, None)  # noqa: E731
        refs = [None if s is None else weakref.ref(s, drop) for s in sources]
        with self._lock:
            self.misses += 1
            self.entries[slot] = _Entry(refs, stamps, value, stream, ready)
        return value

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self.entries.clear()
            self.generation += 1


def _cacheable(sources: Sources) -> bool:
    if any(s is not None and s.is_inference() for s in sources):
        return False
    on_cuda = any(s is not None and s.is_cuda for s in sources)
    return not (on_cuda and torch.cuda.is_current_stream_capturing())


def _stamp(tensor: torch.Tensor) -> tuple:
    return (tensor.data_ptr(), tensor._version, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _same_objects(refs: list[weakref.ref | None], sources: Sources) -> bool:
    return all((s is None) if r is None else (r() is s) for r, s in zip(refs, sources, strict=True))


def _order_after(entry: _Entry) -> None:
    """Let the current stream see an entry that another stream built, and keep its memory until this one is done."""
    if entry.stream is None:
        return
    current = torch.cuda.current_stream(entry.value.device)
    if current != entry.stream:
        current.wait_event(entry.ready)
        entry.value.record_stream(current)


DERIVED = DerivedTensors()


def clear_cache() -> None:
    """Forget every cached table and padded weight; needed only after writes that bypass autograd's version counter."""
    DERIVED.clear()
