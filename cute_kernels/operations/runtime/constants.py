"""Tensors derived from a model's constants (the table, the padded weight), kept while the constants live unchanged.

An entry is used again only if every source is the same Python object with the same memory, shape and numbers. Writes
that bypass autograd's version counter (``tensor.data.copy_``, a NumPy alias, a foreign kernel) are found by comparing
with a copy (`Source`): on a CPU in every call, on a GPU, where the host has to wait for the
answer, from the first step of an optimiser on, once PEFT is imported, or once processes share a group of
`torch.distributed`, whose collectives write into parameters. Before that, `clear_cache` is for such writes.

Tensors made in inference mode have no version counter and are never cached, and nothing is taken from or put into the
cache while a CUDA graph is captured, so that a replay sees the current constants (`frozen_constants` lifts this).
"""

import contextlib
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from cute_kernels.common import forks

Sources = Sequence["torch.Tensor | None"]

# --- tensors that something was made from ----------------------------------------------------------------------------
# Autograd's version counter counts writes, but not those through ``.data`` (PEFT's merge, averages of weights, loaders
# of checkpoints), nor those of NumPy or another library to the same memory. These are found by comparing the tensor,
# bit for bit, with a copy. A copy is kept beside the tensor for as long as it holds what the copy holds.

_NAME = "_cute_kernels_record"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes: of floating-point numbers NaN differs from itself, and 0 does not from -0."""


class _Record:
    """Facts of a tensor, in its ``__dict__``, so that they live as long as the tensor: a copy of it, `_counted` of it
    when the copy was made, and how many writes were found by comparing.

    Weak references are to this, for `torch.utils.swap_tensors` refuses tensors to which there are any.
    """

    __slots__ = ("__weakref__", "contents", "of", "writes")

    def __init__(self) -> None:
        self.contents: torch.Tensor | None = None
        self.of: tuple = ()
        self.writes = 0

    def __reduce__(self) -> tuple:
        """A copy of a tensor, and one in a file, gets none; what stands for it may be loaded with weights_only."""
        return OrderedDict, ()


def _record(tensor: torch.Tensor) -> _Record | None:
    found = tensor.__dict__.get(_NAME)
    return found if type(found) is _Record else None


def _counted(tensor: torch.Tensor) -> tuple:
    """Differs after writes that autograd counts, and for other memory; tensors of inference mode have no counter."""
    version = None if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), version, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_neg().view(_BITS[tensor.itemsize])


def _record_of(tensor: torch.Tensor) -> _Record:
    record = _record(tensor)
    if record is None:
        record = tensor.__dict__[_NAME] = _Record()
    return record


def count_unseen_write(tensor: torch.Tensor) -> None:
    """Compares the tensor with its copy; a difference that nothing else tells is counted, for its `Source`s.

    On a GPU the host waits. Without a copy, and of a tensor that autograd's counter says was written to, it does
    nothing.
    """
    record = _record(tensor)
    if record is None or record.contents is None:
        return
    if record.of != _counted(tensor):
        record.contents = None
        return
    with torch.inference_mode(False), torch.no_grad():
        if torch.equal(_bits(tensor), record.contents):
            return
        record.contents = _bits(tensor).clone()
    record.writes += 1


def keep_contents(tensor: torch.Tensor) -> None:
    """Makes a copy, unless there is one of the tensor as it is, for `count_unseen_write`."""
    count_unseen_write(tensor)
    record = _record_of(tensor)
    if record.contents is None:
        with torch.inference_mode(False), torch.no_grad():
            record.contents, record.of = _bits(tensor).clone(), _counted(tensor)


class Source:
    """A tensor as it is now, told from all others, also from one whose contents its object gets by swapping.
    ``tensor``: is not kept alive; ``at_death``: called with one argument when it dies, before its id can be another's.
    """

    def __init__(self, tensor: torch.Tensor, at_death: Callable[[Any], None] | None = None) -> None:
        self._record = weakref.ref(_record_of(tensor), at_death)
        self._counted, self._writes = _counted(tensor), _record_of(tensor).writes

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether this is the tensor, and no write to it was counted."""
        record = self._record()
        same = record is not None and record is tensor.__dict__.get(_NAME)
        return same and self._writes == record.writes and self._counted == _counted(tensor)


# --- what was made of them -------------------------------------------------------------------------------------------

@dataclass
class _Entry:
    sources: list[Source | None]
    value: torch.Tensor
    stream: torch.cuda.Stream | None
    ready: torch.cuda.Event | None
    complete: bool


@dataclass
class _Captured:
    sources: list[weakref.ref[_Record]]
    values: list[torch.Tensor] = field(default_factory=list)


@dataclass
class DerivedTensors:
    """A weak cache from source tensors to one derived tensor.

    `misses` counts the calls that had to build, `generation` those of `clear`. `captured` holds what CUDA graphs read,
    until the sources die. `compares_on_gpu` says whether constants on a GPU are compared with copies.
    """

    entries: dict[tuple, _Entry] = field(default_factory=dict)
    misses: int = 0
    generation: int = 0
    compares_on_gpu: bool = False
    captured: dict[tuple, _Captured] = field(default_factory=dict)
    _frozen: threading.local = field(default_factory=threading.local)
    _training: threading.local = field(default_factory=threading.local)
    _lock: threading.RLock = field(default_factory=forks.lock)

    def get(self, key: Hashable, sources: Sources, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return ``build()``, or its result of an earlier call with equal `key` and unchanged `sources`."""
        if self.keeps_nothing:
            return build()
        slot = (key, *(id(s) for s in sources))
        capturing = _is_capturing(sources)
        if _has_version(sources) and (not capturing or self.is_frozen):
            with self._lock:
                entry = self.entries.get(slot)
            if entry is not None and self.are_unchanged(entry.sources, *sources):
                if not capturing:
                    _order_after(entry)
                    return entry.value
                if entry.complete:  # a captured stream may not wait for what is outside the graph
                    self._keep(slot, sources, entry.value)
                    return entry.value
        if capturing or not _has_version(sources):
            self.misses += 1
            return build()
        # The callback runs when a source dies, before its id can name another tensor.
        drop = lambda _, slot=slot: self.entries.pop(slot, None)  # noqa: E731
        self.watch(*sources)
        then = [None if s is None else Source(s, drop) for s in sources]
        value = outside_of_pools(build, *sources)
        stream = ready = None
        if value.is_cuda:
            stream = torch.cuda.current_stream(value.device)
            ready = stream.record_event()
        with self._lock:
            self.misses += 1
            self.entries[slot] = _Entry(then, value, stream, ready, complete=stream is None)
        return value

    def _keep(self, slot: tuple, sources: Sources, value: torch.Tensor) -> None:
        """For a graph that reads the value, whatever becomes of its entry; until a source dies."""

        def release(_: Any) -> None:
            self.captured.pop(slot, None)

        with self._lock:
            if slot not in self.captured:
                self.captured[slot] = _Captured([weakref.ref(_record_of(s), release) for s in sources if s is not None])
            self.captured[slot].values.append(value)

    def compare_on_gpu(self) -> None:
        """From now on; what was made before is forgotten, for it has no copies of what it was made from."""
        if not self.compares_on_gpu:
            self.compares_on_gpu = True
            self.clear()

    def watch(self, *sources: torch.Tensor | None) -> None:
        """Keeps copies of sources as they are, for `notice`."""
        self._look_for_writers()
        for source in sources:
            if source is not None and self._is_compared(source):
                keep_contents(source)

    def are_unchanged(self, then: Sequence[Source | None], *sources: torch.Tensor | None) -> bool:
        """Whether sources are those of then, compared with copies where that is done."""
        generation = self.generation
        self.notice(*sources)
        if generation != self.generation:
            return False
        pairs = zip(then, sources, strict=True)
        return all((s is None) if t is None else (s is not None and t.is_unchanged(s)) for t, s in pairs)

    def notice(self, *sources: torch.Tensor | None) -> None:
        """Compares sources with their copies, and counts the writes that nothing else tells."""
        self._look_for_writers()
        for source in sources:
            if source is not None and self._is_compared(source) and not (source.is_cuda and self.is_frozen):
                count_unseen_write(source)

    def _look_for_writers(self) -> None:
        if not self.compares_on_gpu and (PEFT in sys.modules or _receives_weights()):
            self.compare_on_gpu()

    def _is_compared(self, source: torch.Tensor) -> bool:
        if not source.is_cuda:
            return not source.is_meta
        wanted = self.compares_on_gpu or source.is_inference()
        return wanted and not torch.cuda.is_current_stream_capturing()

    @property
    def keeps_nothing(self) -> bool:
        return getattr(self._training, "on", False)

    @contextlib.contextmanager
    def keep_nothing(self) -> Iterator[None]:
        """Makes everything anew inside, and looks at no numbers: what trains changes from call to call."""
        before, self._training.on = self.keeps_nothing, True
        try:
            yield
        finally:
            self._training.on = before

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


def outside_of_pools(build: Callable[[], Any], *sources: torch.Tensor | None) -> Any:
    """Result of ``build``, made of tensors on a GPU, in memory of no CUDA graph.

    While `torch.compile` warms up its graphs, what a thread allocates is the graph's, and nothing but its outputs may
    live on. So another thread allocates, on the same stream.
    """
    device = next((s.device for s in sources if s is not None and s.is_cuda), None)
    if device is None or "torch._inductor.cudagraph_trees" not in sys.modules:
        return build()
    stream, made = torch.cuda.current_stream(device), []
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def allocate() -> None:
        with torch.cuda.stream(stream), torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            try:
                made.append(build())
            except BaseException as error:  # the caller's
                made.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]


def _receives_weights() -> bool:
    """Whether another process of any group may write into parameters: collectives bump no version counter."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    groups = () if c10d is None else c10d._world.pg_map
    return any(group.size() > 1 for group in groups)


def _has_version(sources: Sources) -> bool:
    return not any(s is not None and s.is_inference() for s in sources)


def _is_capturing(sources: Sources) -> bool:
    return any(s is not None and s.is_cuda for s in sources) and torch.cuda.is_current_stream_capturing()


def _order_after(entry: _Entry) -> None:
    """Let the current stream see an entry that another stream built, and keep its memory until this one is done."""
    if entry.stream is None:
        return
    current = torch.cuda.current_stream(entry.value.device)
    if current != entry.stream:
        if not entry.complete:
            current.wait_event(entry.ready)
        entry.value.record_stream(current)


def in_autograd_function() -> bool:
    """Whether the ``forward`` of a `torch.autograd.Function` is under way, in which gradients are disabled.

    Checkpointing with ``use_reentrant=True`` and its likes run a module there, and again with gradients in the backward
    pass, which has to repeat the numbers. No flag of autograd tells; the frames around do, in about 30 ns each.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            return True
        frame = frame.f_back
    return False


DERIVED = DerivedTensors()
PEFT = "peft"
"""A library whose adapters are merged into weights through ``.data``."""


def _after_step(*_: Any) -> None:
    """Turns on comparison on a GPU: fused optimisers, averages and sharding (FSDP) write past version counters."""
    DERIVED.compare_on_gpu()


register_optimizer_step_post_hook(_after_step)


def clear_cache() -> None:
    """Forget what was made from constants, after a write on a GPU that bypassed autograd's version counter.

    It is needed there only while no optimiser has made a step in this process, PEFT is not imported and there is no
    group of several processes: then, and on a CPU always, such writes are found. Of CUDA graphs it changes nothing.

    Tables, padded weights, and what modules and converted models (`cute_kernels.models.nn`, `cute_kernels.models`)
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
