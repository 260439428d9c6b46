"""The cache of derived tensors: what is used again, and what never may be."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
import weakref

import pytest
import torch

from cute_kernels.operations.runtime import constants as derived
from cute_kernels.operations.runtime.constants import DerivedTensors, outside_of_pools


def doubled(cache: DerivedTensors, source: torch.Tensor, key: str = "double") -> torch.Tensor:
    return cache.get(key, (source, None), lambda: source.detach() * 2)


def test_unchanged_sources_are_built_once():
    cache, source = DerivedTensors(), torch.randn(4)
    first = doubled(cache, source)
    assert doubled(cache, source) is first
    assert cache.misses == 1
    assert torch.equal(first, source * 2)


def test_equal_values_in_another_tensor_are_another_source():
    cache, source = DerivedTensors(), torch.randn(4)
    assert doubled(cache, source.clone()) is not doubled(cache, source)


def test_keys_and_missing_sources_are_told_apart():
    cache, source = DerivedTensors(), torch.randn(4)
    assert doubled(cache, source, "a") is not doubled(cache, source, "b")
    swapped = cache.get("a", (None, source), lambda: source * 3)
    assert torch.equal(swapped, source * 3)


def reassign_data(parameter):
    parameter.data = parameter.data * 5


def through_numpy(parameter):
    parameter.detach().numpy()[:] = 6.0


def swap(parameter):
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.randn(4)))


def load(parameter):
    torch.nn.ParameterList([parameter]).load_state_dict({"0": torch.full((4,), 7.0)})


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.mul_(3),
        lambda p: p[1:2].fill_(9.0),  # through a view
        lambda p: p.copy_(torch.ones(4)),
        lambda p: torch.optim.SGD([p], lr=1.0).step(setattr(p, "grad", torch.ones(4))),
        reassign_data,
        load,
        lambda p: p.data.mul_(-1),
        lambda p: torch._foreach_lerp_([p.data], [torch.full((4,), 3.0)], 0.5),
        lambda p: p.data[2:].neg_(),
        lambda p: p.data.copy_(p.data.flip(0).clone()),  # sums and norms stay the same
        lambda p: p.data.fill_(float("nan")),
        through_numpy,
        swap,
    ],
    ids=[
        "in place", "view", "copy", "optimizer", "data", "load_state_dict", "through data", "average through data",
        "view of data", "order through data", "nan", "numpy", "swap",
    ],
)
def test_changed_sources_are_built_anew(change):
    cache, source = DerivedTensors(), torch.nn.Parameter(torch.randn(4))
    before = doubled(cache, source)
    with torch.no_grad():
        change(source)
    after = doubled(cache, source)
    assert torch.allclose(after, source * 2, equal_nan=True)
    assert not torch.equal(after, before)
    assert doubled(cache, source) is after


def test_memory_that_comes_back_with_other_numbers():
    """``.data`` of another place and of the first one again: neither its address nor the version counter tells."""
    cache, source = DerivedTensors(), torch.nn.Parameter(torch.ones(4))
    doubled(cache, source)
    memory = source.data
    source.data = torch.ones(4)
    memory.fill_(3.0)
    source.data = memory
    assert torch.equal(doubled(cache, source), torch.full((4,), 6.0))


def test_a_second_derivation_of_numbers_that_come_and_go():
    cache, source = DerivedTensors(), torch.nn.Parameter(torch.ones(4))
    doubled(cache, source, "first")
    source.data.fill_(3.0)
    doubled(cache, source, "second")
    source.data.fill_(1.0)
    for key in ("first", "second"):
        assert torch.equal(doubled(cache, source, key), torch.full((4,), 2.0))


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def test_constants_are_not_in_the_memory_of_a_graph_that_torch_compiles(monkeypatch):
    """Another thread allocates, on the stream and in the modes of the caller, who gets its exceptions."""
    streams = []
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(streams.append(stream)))
    source = torch.ones(4).as_subclass(OnGpu)

    def build() -> tuple[int, bool, bool]:
        return threading.get_ident(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode():
        thread, *modes = outside_of_pools(build, None, source)
    assert thread != threading.get_ident() and modes == [True, False] and streams == ["the caller's"]
    assert outside_of_pools(build, torch.ones(4))[0] == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        outside_of_pools(lambda: 1 // 0, source)


def test_on_a_gpu_constants_are_compared_once_something_trains(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(derived.DERIVED, "compares_on_gpu", False)
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)  # asks for a GPU's stream
    cache, source = derived.DERIVED, torch.ones(4).as_subclass(OnGpu)

    def derive() -> torch.Tensor:
        return cache.get("of a GPU", (source,), lambda: torch.Tensor(source.detach()) * 2)

    before = derive()
    source.data.mul_(-1)
    assert derive() is before
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters()).step()
    assert torch.equal(derive(), torch.full((4,), -2.0))
    source.data.mul_(-1)
    after = derive()
    assert torch.equal(after, torch.full((4,), 2.0)) and derive() is after
    source.data.mul_(-1)
    with cache.freeze():
        assert derive() is after
    assert torch.equal(derive(), torch.full((4,), -2.0))


def test_on_a_gpu_constants_are_compared_once_peft_is_imported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)  # asks for a GPU's stream
    cache, source = DerivedTensors(), torch.ones(4).as_subclass(OnGpu)

    def derive() -> torch.Tensor:
        return cache.get("of a GPU", (source,), lambda: torch.Tensor(source.detach()) * 2)

    before = derive()
    source.data.mul_(-1)
    assert derive() is before
    monkeypatch.setitem(sys.modules, "peft", None)
    for factor in (-2.0, 2.0):
        assert torch.equal(derive(), torch.full((4,), factor))
        source.data.mul_(-1)


def test_copies_and_files_of_a_source_have_nothing_of_what_is_known_of_it(tmp_path):
    cache, sources = DerivedTensors(), [torch.ones(4), torch.nn.Parameter(torch.ones(4))]
    for source in sources:
        first = doubled(cache, source)
        torch.save(source, tmp_path / "file")
        for other in (copy.deepcopy(source), torch.load(tmp_path / "file", weights_only=True)):
            assert torch.equal(other, source)
            assert doubled(cache, other) is not first
            other.data.mul_(3)
            assert torch.equal(doubled(cache, other), torch.full((4,), 6.0))
        assert doubled(cache, source) is first


def test_entries_die_with_their_source():
    cache, source = DerivedTensors(), torch.randn(4)
    doubled(cache, source)
    assert len(cache.entries) == 1
    del source
    gc.collect()
    assert not cache.entries


def test_reused_ids_do_not_return_another_tensors_result():
    cache = DerivedTensors()
    for value in range(200):
        source = torch.full((4,), float(value))
        assert torch.equal(doubled(cache, source), source * 2)
        del source


def test_inference_tensors_have_no_version_and_are_never_cached():
    cache = DerivedTensors()
    with torch.inference_mode():
        source = torch.ones(4)
        assert torch.equal(doubled(cache, source), torch.full((4,), 2.0))
        source.mul_(3)
        assert torch.equal(doubled(cache, source), torch.full((4,), 6.0))
    assert not cache.entries


def test_parameters_are_cached_under_inference_mode():
    cache, source = DerivedTensors(), torch.nn.Parameter(torch.randn(4))
    with torch.inference_mode():
        first = doubled(cache, source)
        assert doubled(cache, source) is first


def test_nothing_is_shared_with_a_graph_capture(monkeypatch):
    """A table taken from the cache would be baked into the graph; one made during capture is valid only in a replay."""
    cache, source = DerivedTensors(), torch.randn(4)
    eager = doubled(cache, source)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = doubled(cache, source)
    assert captured is not eager
    assert next(iter(cache.entries.values())).value is eager


class FakeStream:
    """Records what is asked of it, in place of a CUDA stream."""

    def __init__(self):
        self.waited = []

    def record_event(self):
        return f"event of {id(self)}"

    def wait_event(self, event):
        self.waited.append(event)


def test_another_stream_waits_for_the_build(monkeypatch):
    cache, source, streams, recorded = DerivedTensors(), torch.randn(4), [FakeStream(), FakeStream()], []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    value = doubled(cache, source)
    assert doubled(cache, source) is value
    assert not streams[0].waited
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[1])
    assert doubled(cache, source) is value
    assert streams[1].waited == [streams[0].record_event()]
    assert recorded == [streams[1]]  # the allocator must not hand out the memory while this stream reads it


def test_clear_after_a_write_that_nothing_notices(monkeypatch):
    monkeypatch.setattr(DerivedTensors, "_is_compared", lambda *_: False)
    cache, source = DerivedTensors(), torch.ones(4)
    doubled(cache, source)
    source.numpy()[:] = 5.0
    cache.clear()
    assert torch.equal(doubled(cache, source), torch.full((4,), 10.0))


class Capture:
    """Stands for a stream that is being captured: no build is kept, unless the constants are frozen."""

    def __init__(self, monkeypatch) -> None:
        self.active = False
        monkeypatch.setattr(derived, "_is_capturing", lambda sources: self.active)


def test_a_capture_builds_anew_and_keeps_nothing(monkeypatch):
    capture, cache, source = Capture(monkeypatch), DerivedTensors(), torch.randn(4)
    cached = doubled(cache, source)
    capture.active = True
    assert doubled(cache, source) is not cached
    capture.active = False
    assert doubled(cache, source) is cached


def test_frozen_constants_are_taken_from_the_cache_and_outlive_their_entry(monkeypatch):
    capture, cache, source = Capture(monkeypatch), DerivedTensors(), torch.randn(4)
    cached = doubled(cache, source)
    with cache.freeze():
        assert cache.is_frozen
        capture.active = True
        assert doubled(cache, source) is cached
        capture.active = False
    assert not cache.is_frozen
    alive = weakref.ref(cached)
    del cached
    source.mul_(2)
    doubled(cache, source)
    cache.clear()
    gc.collect()
    assert alive() is not None, "a graph would read freed memory"
    del source
    gc.collect()
    assert alive() is None and not cache.captured


def test_frozen_constants_that_changed_are_built_anew(monkeypatch):
    capture, cache, source = Capture(monkeypatch), DerivedTensors(), torch.randn(4)
    cached = doubled(cache, source)
    source.add_(1)
    with cache.freeze():
        capture.active = True
        assert torch.equal(doubled(cache, source), source * 2)
    assert not torch.equal(cached, source * 2)


def test_freezing_waits_once_and_still_guards_the_memory(monkeypatch):
    """After `freeze` no stream need wait for the value any more, but every stream that uses it is still recorded."""
    recorded, waited, synchronised = [], [], []

    class Ready:
        def synchronize(self):
            synchronised.append(True)

    class Stream:
        def wait_event(self, event):
            waited.append(event)

    class Value:
        device = torch.device("cpu")

        def record_stream(self, stream):
            recorded.append(stream)

    cache, source = DerivedTensors(), torch.randn(4)
    doubled(cache, source)
    (entry,) = cache.entries.values()
    entry.value, entry.stream, entry.ready, entry.complete = Value(), Stream(), Ready(), False
    with cache.freeze():
        assert entry.complete
    assert synchronised == [True]
    other = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: other)
    doubled(cache, source)
    assert recorded == [other] and not waited


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_optimiser_which_passes_by_the_version_counter_is_noticed(kind):
    bias, frozen = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    cache = DerivedTensors()
    optimizer = kind([bias, frozen], lr=0.5, fused=True)
    assert torch.equal(cache.get("double", (bias,), lambda: bias.detach() * 2), torch.full((8,), 2.0))
    bias.grad = torch.ones(8)
    before = frozen._version
    optimizer.step()
    assert torch.equal(cache.get("double", (bias,), lambda: bias.detach() * 2), bias.detach() * 2)
    assert not torch.equal(bias, torch.ones(8)) and frozen._version == before


def test_a_group_of_several_processes_turns_comparison_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives write into parameters, and no version counter tells; of one process alone there are none."""
    import torch.distributed.distributed_c10d as c10d

    monkeypatch.setattr(derived.DERIVED, "compares_on_gpu", False)
    monkeypatch.delitem(derived.sys.modules, derived.PEFT, raising=False)
    for size, compares in ((1, False), (2, True)):
        group = type("Group", (), {"size": lambda self, size=size: size})()
        monkeypatch.setattr(c10d, "_pg_map", {group: None})
        derived.DERIVED.notice(torch.zeros(1))
        assert derived.DERIVED.compares_on_gpu is compares
