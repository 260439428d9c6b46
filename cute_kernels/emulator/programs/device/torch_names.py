"""Answers to ``torch.cuda``: what it calls in C++ that only a build for CUDA has, and queries of the device.

``torch.cuda`` itself is torch's own: streams are entered, seeds set and statistics read by its Python.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.common.chips import Chip
from cute_kernels.emulator.programs.device import answers, memory_statistics

if TYPE_CHECKING:
    from cute_kernels.emulator.programs.streams import Streams

DEVICE = torch.device("cuda", 0)
_TYPE = 1  # c10::DeviceType::CUDA
_DEFAULT = 0  # handle of the default stream
_set_default = torch._C._set_default_tensor_type
AnyDevice = torch.device | str | int | None
"""A device as programs name it; None: the present one."""


def check(device: AnyDevice) -> int:
    """The index of a device. Raises RuntimeError: there is one device, ``cuda:0``."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or DEVICE)
    if found.index not in (None, DEVICE.index):
        raise RuntimeError(f"CUDA error: invalid device ordinal: {found}; emulated programs have one device, {DEVICE}")
    return 0


def names(device: Any) -> Iterator[tuple[object, str, object]]:
    """Module, name and what is there while a program runs; ``device``: its `cuda_device.CudaDevice`."""
    for name, value in of_c(device).items():
        yield torch._C, name, value
    yield from _of_cuda(device)
    yield torch.UntypedStorage, "_share_cuda_", _not_shared
    yield torch.version, "cuda", "13.0"  # as the driver says
    yield torch.profiler, "profile", Profile


def _not_shared(storage: torch.UntypedStorage) -> None:
    raise RuntimeError(
        "a 'cuda' tensor of an emulated program is sent to another process: the emulator runs no process that is "
        "spawned, and shares no memory of its device; send tensor.cpu(), or use threads"
    )


_WITHOUT_EFFECT = (
    "_cuda_init", "_cuda_emptyCache", "_host_emptyCache", "_cuda_ipc_collect", "_cuda_sleep",
    "_cuda_record_memory_history", "_cuda_resetAccumulatedMemoryStats", "_cuda_resetPeakHostMemoryStats",
    "_cuda_resetAccumulatedHostMemoryStats", "_set_cached_tensors_enabled",
)  # fmt: skip


def of_c(device: Any) -> dict[str, object]:
    """Functions of ``torch._C``."""
    call = device.call

    def set_stream(stream_id: int, **_: int) -> None:
        call("exchange_stream", stream_id)

    def set_mode(mode: int) -> None:
        device.synchronising = mode

    capability = device.chip.compute_capability
    return {
        **{name: _nothing() for name in _WITHOUT_EFFECT},
        "_has_cuda": True,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": check,
        "_cuda_exchangeDevice": _same,
        "_cuda_maybeExchangeDevice": _same,
        "_cuda_synchronize": lambda: device.streams.host_waits("torch's cuda.synchronize"),
        "_cuda_isInBadFork": lambda: device.in_bad_fork,
        "_cuda_getCurrentStream": lambda index: (call("stream"), 0, _TYPE),
        "_cuda_getCurrentRawStream": lambda index: call("stream"),
        "_cuda_getDefaultStream": lambda index: (_DEFAULT, 0, _TYPE),
        "_cuda_getStreamFromExternal": lambda handle, index: (handle, 0, _TYPE),
        "_cuda_setStream": set_stream,
        "_cuda_resetPeakMemoryStats": lambda index: call("reset_peak"),
        "_cuda_setMemoryFraction": lambda fraction, index: device.limit(fraction),
        "_cuda_getMemoryFraction": lambda index: device.most_bytes / device.chip.memory_bytes,
        **memory_statistics.functions(call),
        "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
        "_scatter": lambda tensor, devices, *_: [tensor.to(DEVICE)] if not any(map(check, devices)) else [],
        "_cuda_canDeviceAccessPeer": lambda index, peer: False,
        "_cuda_getArchFlags": lambda: f"sm_{capability[0]}{capability[1]}",
        "_cuda_set_sync_debug_mode": set_mode,
        "_cuda_get_sync_debug_mode": lambda: device.synchronising,
    }


def _of_cuda(device: Any) -> Iterator[tuple[object, str, object]]:
    cuda, chip = torch.cuda, device.chip
    own = {"streams": device.streams}
    stream, event = type("Stream", (Stream,), own), type("Event", (Event,), own)
    for module in (cuda, cuda.streams):
        yield module, "Stream", stream
        yield module, "Event", event
        yield module, "ExternalStream", type("ExternalStream", (External, stream), {})
    for module in (cuda, cuda.memory):
        yield module, "MemPool", memory_statistics.MemPool
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        yield cuda.memory, name, _nothing()
    yield cuda.graph, "default_capture_stream", None  # a stream of this program, when it is first needed
    properties = _properties(chip)

    def free() -> tuple[int, int]:
        return chip.memory_bytes - device.call("used")[0], chip.memory_bytes

    queries = {
        "_initialized": False,  # as in a process of its own
        "_queued_calls": [],
        "_lazy_seed_tracker": type(cuda._lazy_seed_tracker)(),
        "_is_in_bad_fork": lambda: device.in_bad_fork,
        "_cudart": _runtime(free),
        "_cached_device_count": 1,  # torch would ask NVML
        "_exchange_device": _same,
        "_maybe_exchange_device": _same,
        "default_generators": (device.call("default_generator"),),
        "get_device_properties": lambda device=None: properties if check(device) == 0 else None,
        "mem_get_info": lambda device=None: free(),
    }
    for name, value in queries.items():
        yield cuda, name, value
    for name, kind in _tensor_types():
        yield cuda, name, kind
    yield torch._C, "_set_default_tensor_type", _set_default_type
    ranges = {"rangePushA": lambda text: 0, "rangePop": lambda: 0, "markA": _nothing()}
    yield cuda.nvtx, "_nvtx", types.SimpleNamespace(**ranges, rangeStartA=lambda text: 0, rangeEnd=_nothing())


def _runtime(free: Callable[[], tuple[int, int]]) -> types.SimpleNamespace:
    """Functions of the CUDA runtime that ``torch.cuda.cudart()`` has, which return a status."""
    fine = 0
    names = ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister")
    return types.SimpleNamespace(
        **{name: lambda *_: fine for name in names},
        cudaError=types.SimpleNamespace(success=fine),
        cudaGetErrorString=str,
        cudaMemGetInfo=lambda device: free(),
    )


_PROPERTIES = {
    "major": 75, "minor": 76, "multi_processor_count": 16, "L2_cache_size": 38, "shared_memory_per_block": 8,
    "shared_memory_per_block_optin": 97, "shared_memory_per_multiprocessor": 81, "warp_size": 10,
    "max_threads_per_multi_processor": 39, "max_threads_per_block": 1, "regs_per_multiprocessor": 82,
    "is_integrated": 18,
}  # fmt: skip
"""Members of torch's properties of a device that are attributes of the driver."""


def _properties(chip: Chip) -> types.SimpleNamespace:
    known = answers.attributes(chip)
    values = {name: known[number] for name, number in _PROPERTIES.items()}
    return types.SimpleNamespace(
        name=chip.device, total_memory=chip.memory_bytes, gcnArchName="", is_multi_gpu_board=0, **values
    )


def _same(device: int) -> int:
    """The device before, of the one there is. Two names need two functions: torch's compiler keeps a table of them."""
    return check(device) if device >= 0 else -1


def _nothing() -> Callable[..., None]:
    """Everything is complete when a call returns. A new function for each name, as torch's compiler wants it."""
    return lambda *_, **__: None


class Stream(torch.Stream):
    """Stands for torch.cuda.Stream; a program has a class of its own, with its ``streams``."""

    streams: Streams

    def __new__(cls, device: object = None, priority: int = 0, *, stream_id: int | None = None, **_: object) -> Stream:
        handle = cls.streams.create(alone=True) if stream_id is None else stream_id
        made = super().__new__(cls, stream_id=handle, device_index=0, device_type=_TYPE)
        made.priority = priority
        return made

    def __init__(self, *_: object, **__: object) -> None: ...

    @property
    def cuda_stream(self) -> int:
        """The handle."""
        return self.stream_id

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority."""
        return 0, -5

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Records an event, a new one without any."""
        event = torch.cuda.Event() if event is None else event
        event.record(self)
        return event

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream_id


class Event(torch.Event):
    """Stands for torch.cuda.Event; the time between two is that of the emulation, which says nothing about a GPU."""

    streams: Streams

    def __new__(cls, enable_timing: bool = False, *_: object, **__: object) -> Event:
        made = super().__new__(cls, DEVICE, enable_timing=enable_timing)
        made.takes_time = enable_timing
        return made

    def __init__(self, *_: object, **__: object) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between the two; torch's own takes no subclasses. Raises ValueError: of events that were made
        without a time, or were not recorded."""
        if not (self.takes_time and end.takes_time):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.event_id and end.event_id):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1e-6 * self.streams.order("elapsed", self.event_id, end.event_id)

    @property
    def cuda_event(self) -> int:
        """A handle, which launches may carry as an attribute: what waits for it is then behind all launches."""
        if not self.event_id:
            self.record()
        self.streams.recorded_by_launch(self.event_id)
        return self.event_id


class External:
    """A stream by the handle that something else gave, as ``torch.cuda.ExternalStream`` takes it."""

    def __new__(cls, stream_ptr: int, device: AnyDevice = None, **_: object) -> External:
        return super().__new__(cls, stream_id=stream_ptr)


class Profile(torch.profiler.profile):
    """Profile of what the CPU does: nothing runs on a GPU."""

    def __init__(self, *, activities: object = None, **keywords: object) -> None:
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **keywords)


class _Type(type):
    """Metaclass: tensors of the device and of the element type are instances."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def _tensor_types() -> Iterator[tuple[str, type]]:
    """``torch.cuda.FloatTensor`` and its kin, of which a build of torch without CUDA makes no tensors, by name."""
    for name, kind in list(vars(torch.cuda).items()):
        if type(kind).__name__ == "tensortype":  # of torch's C++
            of_host = getattr(torch, name)
            members = {"dtype": kind.dtype, "of_host": of_host, "is_cuda": True, "is_sparse": False, "__new__": _new}
            # torch takes a class for an element type by its name, e.g. in Tensor.type().
            yield name, _Type(f"torch.cuda.{name}", (), members)


def _new(cls: _Type, *arguments: object, device: torch.device | str | int = "cuda") -> torch.Tensor:
    """A tensor: sizes make a tensor without values, a sequence one with its values, a tensor one that shares its
    memory. Raises TypeError: a tensor of another type."""
    first = arguments[0] if arguments else 0
    if isinstance(first, int | torch.Size):
        return torch.empty(*(arguments or (0,)), dtype=cls.dtype, device=device)
    if isinstance(first, torch.Tensor):
        if not isinstance(first, cls):
            raise TypeError(f"expected {cls.__name__} (got {first.type()})")
        return first.detach()
    return cls.of_host(*arguments).to(device)


def _set_default_type(kind: type) -> None:
    """``torch.set_default_tensor_type``: the device and the element type of tensors for which a program names none."""
    if isinstance(kind, _Type):
        torch.set_default_device("cuda")
        torch.set_default_dtype(kind.dtype)
    else:
        torch.set_default_device(None)
        _set_default(kind)
