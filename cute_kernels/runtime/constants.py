"""Tensors derived from a model's constants (the table, the padded weight), kept while the constants live unchanged.

An entry is used again only if every source is the same Python object with the same memory, shape and autograd version
counter. Not noticed: writes that bypass the version counter (``tensor.data.copy_``, a NumPy alias, a foreign kernel),
except those of optimisers, some of which do so (``fused=True`` in torch): after every step of one this module counts,
and forgets everything where what was written are shards (``fully_shard``).
Call `clear_cache` after such a write. Tensors made in inference mode have no version counter and are never cached, and
nothing is taken from or put into the cache while a CUDA graph is captured, so that a replay sees the current constants
(`frozen_constants` lifts this).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

Sources = Sequence["torch.Tensor | None"]


@dataclass
class _Entry:
    sources: list[weakref.ref | None]
    stamps: tuple
    value: torch.Tensor
    stream: torch.cuda.Stream | None
    ready: torch.cuda.Event | None
    complete: bool


@dataclass
class _Captured:
    sources: list[weakref.ref]
    values: list[torch.Tensor] = field(default_factory=list)


@dataclass
class DerivedTensors:
    """A weak cache from source tensors to one derived tensor.

    `misses` counts the calls that had to build, `generation` those of `clear`. `captured` holds what CUDA graphs read,
    until the sources die.
    """

    entries: dict[tuple, _Entry] = field(default_factory=dict)
    misses: int = 0
    generation: int = 0
    captured: dict[tuple, _Captured] = field(default_factory=dict)
    _frozen: threading.local = field(default_factory=threading.local)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def get(self, key: Hashable, sources: Sources, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return ``build()``, or its result of an earlier call with equal `key` and unchanged `sources`."""
        slot = (key, *(id(s) for s in sources))
        capturing = _is_capturing(sources)
        if _has_version(sources) and (not capturing or self.is_frozen):
            stamps = tuple(None if s is None else _stamp(s) for s in sources)
            with self._lock:
                entry = self.entries.get(slot)
            if entry is not None and entry.stamps == stamps and _same_objects(entry.sources, sources):
                if not capturing:
                    _order_after(entry)
                    return entry.value
                if entry.complete:  # a captured stream may not wait for what is outside the graph
                    self._keep(slot, sources, entry.value)
                    return entry.value
        value = build()
        if capturing or not _has_version(sources):
            self.misses += 1
            return value
        stream = ready = None
        if value.is_cuda:
            stream = torch.cuda.current_stream(value.device)
            ready = stream.record_event()
        # The callback runs when a source dies, before its id can name another tensor.
        drop = lambda _, slot=slot: self.entries.pop(slot, None)  # noqa: E731
        refs = [None if s is None else weakref.ref(s, drop) for s in sources]
        with self._lock:
            self.misses += 1
            self.entries[slot] = _Entry(refs, stamps, value, stream, ready, complete=stream is None)
        return value

    def _keep(self, slot: tuple, sources: Sources, value: torch.Tensor) -> None:
        """For a graph that reads the value, whatever becomes of its entry; until a source dies."""

        def release(_: weakref.ref) -> None:
            self.captured.pop(slot, None)

        with self._lock:
            if slot not in self.captured:
                self.captured[slot] = _Captured([weakref.ref(s, release) for s in sources if s is not None])
            self.captured[slot].values.append(value)

    @property
    def is_frozen(self) -> bool:
        """Whether this thread is inside `freeze`."""
        return getattr(self._frozen, "depth", 0) > 0

    @contextlib.contextmanager
    def freeze(self) -> Iterator[None]:
        """See `frozen_constants`."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("frozen_constants() must be entered before the capture begins: it waits for the device")
        with self._lock:
            pending = [entry for entry in self.entries.values() if not entry.complete]
        for entry in pending:
            entry.ready.synchronize()
            entry.complete = True
        self._frozen.depth = getattr(self._frozen, "depth", 0) + 1
        try:
            yield
        finally:
            self._frozen.depth -= 1

    def clear(self) -> None:
        """Forget everything but what captured graphs read."""
        with self._lock:
            self.entries.clear()
            self.generation += 1


def _has_version(sources: Sources) -> bool:
    return not any(s is not None and s.is_inference() for s in sources)


def _is_capturing(sources: Sources) -> bool:
    return any(s is not None and s.is_cuda for s in sources) and torch.cuda.is_current_stream_capturing()


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
        if not entry.complete:
            current.wait_event(entry.ready)
        entry.value.record_stream(current)


DERIVED = DerivedTensors()


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Makes the step of an optimiser visible in the version counters of what it may have written."""
    written = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any(type(p) not in (torch.Tensor, torch.nn.Parameter) for p in written):
        DERIVED.clear()  # FSDP gathers shards into a parameter that is there before, past its version counter
    torch.autograd.graph.increment_version([p for p in written if not p.is_inference()])


register_optimizer_step_post_hook(_count_step)


def clear_cache() -> None:
    """Forget what was made from constants; needed only after writes that bypass autograd's version counter.

    Tables, padded weights, and what modules and converted models (`cute_kernels.nn`, `cute_kernels.integrations`)
    prepared from their weights and positions: all is made anew at the next call.
    """
    DERIVED.clear()


def frozen_constants() -> contextlib.AbstractContextManager[None]:
    """Promises that bias, position embedding and weight stay as they are while graphs captured inside are replayed.

        patch_embed(x, weight, bias, pos)            # once, so that the table exists
        with frozen_constants(), torch.cuda.graph(graph):
            out = patch_embed(x, weight, bias, pos)

    A capture then reads the cached table (and the padded weight, if there is one) instead of building it anew in every
    replay, which takes longer than the kernel at small batches. A later write to the constants does not reach the
    graph. What the graph reads is kept until the constants die, which must outlive the graph as all its inputs must.

    Raises:
        RuntimeError: the current stream is being captured already.
    """
    return DERIVED.freeze()
