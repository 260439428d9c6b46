"""torch tensors "on cuda" in host memory, for programs that run in the emulator.

Inside `CudaOnHost` a tensor that a program puts on a CUDA device lives in host memory and is a `CudaTensor`: it says
that it is on ``cuda:0``, everything computed from it is a `CudaTensor` again, and moving it to or from the CPU copies,
as on a GPU. Its storage is what kernels may touch. Queries such as ``torch.cuda.is_available`` are answered for the
emulated device; a function of ``torch.cuda`` that is not replaced here fails as it does without a GPU.

Limits: torch's own operations do not refuse to mix tensors of the two kinds; a CUDA graph can hold kernel launches
only.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from cute_kernels.common import forks
from cute_kernels.common.chips import MEMORY_BYTES, Chip
from cute_kernels.emulator.errors import EmulatorError, raising
from cute_kernels.emulator.programs.cuda_operators import CudaOperators, on_device_backward
from cute_kernels.emulator.programs.cuda_scaled_mm import has_block_scales, scaled_mm
from cute_kernels.emulator.programs.guarded_memory import guarded
from cute_kernels.emulator.programs.streams import DEFAULT, Streams, classes
from cute_kernels.emulator.reports.text import short_path

DEVICE = torch.device("cuda", 0)
AnyDevice = torch.device | str | int | None
"""A device as programs name it; None: the present one."""
_SYNCHRONISING = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__repr__"),
    *("__format__", "equal", "allclose", "is_nonzero", "nonzero", "argwhere", "unique", "unique_consecutive"),
    *("masked_select", "bincount"),
}
"""Functions of torch for whose result the host waits for the current stream, besides copies between host and device."""
_UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Functions of torch that leave a result as the host's memory was."""
_MOST_FREED = 256  # storages that are remembered
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
_ALIGNMENT = 512  # bytes, of what the CUDA allocator returns


class CudaTensor(torch.Tensor):
    """A tensor in host memory that stands for one in device memory; plain outside of `CudaOnHost`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Saved as a plain tensor, which any program loads, on the host."""
        with torch._C.DisableTorchFunction():
            plain = self.detach().as_subclass(torch.Tensor).requires_grad_(self.requires_grad)
            return plain.__reduce_ex__(protocol)


class CudaOnHost(TorchFunctionMode):
    """Serves device="cuda" from host memory. Use `active` to enter it.

    Args:
        chip: whose facts answer queries.
        streams: of the program.
        refuse: called with a function's name for work that must not happen now (tensor operations while a CUDA graph
            is captured); raises or returns.

    Attributes:
        report: called with a race of what the host reads; raises or returns.
        new_byte: what each byte of a tensor of ``torch.empty`` and its like is, 0 to 255.
    """

    def __init__(
        self, chip: Chip, streams: Streams, refuse: Callable[[str], None] = lambda name: None
    ) -> None:
        super().__init__()
        self.chip, self.streams, self.refuse = chip, streams, refuse
        self.report: Callable[[EmulatorError], None] = raising
        self.new_byte = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._shapes: dict[int, tuple[str, tuple[int, ...], int, tuple[str, int] | None]] = {}  # `shape`, `_maker`
        self._freed: deque[tuple[int, int, str]] = deque(maxlen=_MOST_FREED)
        self._lock = forks.lock()  # of changes
        self._operators = CudaOperators(self)

    def regions(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of every storage on the device that is still alive."""
        for address, (storage, nbytes) in list(self._storages.items()):  # to which other threads may add
            if not storage.expired():
                yield address, nbytes
                continue
            with self._lock:  # another thread may have a new storage there by now
                if address in self._storages and self._storages[address][0] is storage:
                    self._forget(address)

    def _forget(self, address: int) -> None:
        _, nbytes = self._storages.pop(address)
        kind, shape, _, maker = self._shapes.pop(address)
        made = f", made at {short_path(maker[0])}:{maker[1]}," if maker else ""
        self._freed.append((address, nbytes, f"{kind} {shape}{made}"))

    def shape(self, address: int) -> tuple[tuple[int, ...], int]:
        """Shape of the first tensor of a storage, by its address; bytes of an element, 0 if it is not row by row."""
        return self._shapes[address][1:3] if address in self._shapes else ((), 0)

    def freed(self, address: int | None) -> str:
        """The tensor that was on the device at an address until it was freed, in words, or ""."""
        latest = reversed(self._freed)
        found = (shape for start, nbytes, shape in latest if address is not None and start <= address < start + nbytes)
        return next(found, "")

    def lifetimes(self) -> Callable[[int], bool]:
        """Tells later whether a storage that is on the device now, by its address, is still the one there."""
        storages = {address: storage for address, (storage, _) in list(self._storages.items())}
        return lambda address: address in storages and not storages[address].expired()

    def wait(self, function: str, inputs: Iterable[object]) -> None:
        """The host waits for the current stream, in which a function of torch reads its inputs."""
        given = [x for x in inputs if self.is_on_device(x) and x.is_contiguous()]
        race = self.streams.read(f"torch's {function}", [(x.data_ptr(), x.nbytes) for x in given])
        if race is not None:
            self.report(race)
        self.streams.host_waits(self.streams.reached(self.streams.current))

    # --- operations ---------------------------------------------------------------------------------------------------

    def owner_on_the_host(self, address: int | None) -> str:
        """For reports: what of the host lies at an address that a kernel used, or nothing."""
        if address is None:
            return ""
        with torch._C.DisableTorchFunction():
            for item in gc.get_objects():
                kind = type(item)  # isinstance would ask the object, and some do things then
                if issubclass(kind, torch.Tensor) and not issubclass(kind, CudaTensor) and item.device.type == "cpu":
                    try:
                        storage = item.untyped_storage()
                        name, start, nbytes = "CPU tensor", storage.data_ptr(), storage.nbytes()
                    except RuntimeError:  # sparse and MKL-DNN tensors have no storage
                        continue
                elif issubclass(kind, np.ndarray):
                    name, start, nbytes = "NumPy array", item.ctypes.data, item.nbytes
                else:
                    continue
                if start <= address < start + nbytes:
                    shape, dtype = tuple(item.shape), str(item.dtype).removeprefix("torch.")
                    return (
                        f". This address is in a {name} {dtype} {shape}, which a GPU cannot access: give the kernel "
                        "a 'cuda' tensor, e.g. tensor.cuda()"
                    )
        return ""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            handler = _HANDLERS.get(func)
            if handler is not None:
                return handler(self, args, kwargs)
            if name == "__get__" and args and self.is_on_device(args[0]):
                owner = getattr(func, "__self__", None)
                if owner in _ANSWERS:
                    return _ANSWERS[owner]
                if owner is torch.Tensor.grad:
                    return self._gradient(args[0])
            return self._run(func, args, kwargs)

    def is_on_device(self, value: object) -> bool:
        """Whether a tensor stands for one in device memory.

        What torch's autograd makes of a `CudaTensor` (a saved output, a view) is a plain tensor with its storage, and a
        parameter that its module moves stays the object that it was.
        """
        value = _unwrapped(value)
        if isinstance(value, CudaTensor):
            return True
        if type(value) is not torch.Tensor and not isinstance(value, torch.nn.Parameter):
            return False
        with torch._C.DisableTorchFunction():  # this mode would answer for the device, where it is active
            if value.layout is not torch.strided or value.device.type != "cpu":
                return False
            try:
                known = self._storages.get(value.untyped_storage().data_ptr())
            except RuntimeError:  # torch.compile's tensors have none
                return False
        return known is not None and not known[0].expired()

    def _gradient(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Autograd makes plain tensors; the one that is kept is the one that the program sees."""
        gradient = tensor.grad
        if gradient is None or isinstance(gradient, CudaTensor):
            return gradient
        adopted = self.adopt(gradient)
        if adopted.data_ptr() != gradient.data_ptr():
            tensor.grad = adopted
        return adopted

    def _run(self, func: Callable[..., object], args: tuple, kwargs: dict) -> object:
        asked = _device_type(kwargs.get("device"))
        is_program_s = self._operators.prepare(func)
        if asked == "cuda" and not is_program_s:
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        inputs, _ = tree_flatten((args, kwargs))
        on_device = asked == "cuda" or asked is None and any(map(self.is_on_device, inputs))
        if on_device:
            name = getattr(func, "__name__", "")
            if _synchronises(name, inputs):
                self.wait(name, inputs)
        result = func(*args, **kwargs)
        if not on_device or getattr(func, "__name__", "") in ("__dlpack__", "numpy", "__array__"):
            return result
        if not any(isinstance(each, torch.Tensor) for each in tree_flatten(result)[0]):
            return result  # as it is: a torch.Size stays one
        if getattr(func, "__name__", "") in _UNINITIALISED and type(result) is torch.Tensor and "out" not in kwargs:
            result.untyped_storage().fill_(self.new_byte)  # as `guarded_memory` says: two runs do not differ by it
        copies: dict[int, torch.UntypedStorage] = {}
        return tree_map_only(torch.Tensor, lambda x: self.adopt(x, func, copies), result)

    def adopt(
        self, tensor: torch.Tensor, func: Callable[..., object] | None = None,
        copies: dict[int, torch.UntypedStorage] | None = None,
    ) -> torch.Tensor:
        """A result as a tensor on the device.

        Args:
            tensor: host tensor.
            func: what made it.
            copies: of one call: new storages by the address of the ones that they replace.
        """
        inner = _unwrapped(tensor)
        if inner is not tensor:
            self._know(inner.untyped_storage(), inner, func)
            return tensor
        if type(tensor) is torch.Tensor and tensor.requires_grad and tensor.is_leaf:
            return self.adopt(tensor.detach(), func, copies).requires_grad_()  # a view of a leaf would not be one
        if tensor.layout is not torch.strided:
            return _as_cuda(tensor)
        storage = tensor.untyped_storage()
        if not storage.nbytes() or isinstance(tensor, FakeTensor):  # which has no memory
            return _as_cuda(tensor)
        if self._is_new(storage):
            if type(tensor) is torch.Tensor and not tensor.requires_grad:
                storage = _guarded_copy(storage, {} if copies is None else copies)
                size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
                tensor = torch.empty(0, dtype=tensor.dtype).set_(storage, offset, size, stride)
            self._know(storage, tensor, func)
        return _as_cuda(tensor)

    def _is_new(self, storage: torch.UntypedStorage) -> bool:
        known = self._storages.get(storage.data_ptr())
        return known is None or known[0].expired()

    def _know(self, storage: torch.UntypedStorage, tensor: torch.Tensor, func: Callable[..., object] | None) -> None:
        """Kernels may touch the storage of a tensor from here on."""
        if not self._is_new(storage):
            return
        self.refuse(getattr(func, "__name__", str(func)))
        with self._lock:
            address = storage.data_ptr()
            if address in self._storages:
                self._forget(address)
            self._storages[address] = (StorageWeakRef(storage), storage.nbytes())
            kind = str(tensor.dtype).removeprefix("torch.")
            element = tensor.itemsize * tensor.is_contiguous()
            self._shapes[address] = kind, tuple(tensor.shape), element, _maker()

    def move(
        self, tensor: torch.Tensor, device: AnyDevice, dtype: torch.dtype | None, copy: bool, rest: dict,
        waits: bool = True,
    ) -> torch.Tensor:
        """Tensor.to: ``device`` is a device, its name, or None to stay; ``waits``: not non_blocking."""
        here = self.is_on_device(tensor)
        there = here if device is None else _device_type(device) == "cuda"
        if device is not None and _device_type(device) not in ("cuda", "cpu"):
            return tensor.to(device, dtype=dtype, copy=copy, **rest)
        if waits and here != there:
            self.wait("copy to the host", [_unwrapped(tensor)])
        moved = tensor.to(dtype=dtype, copy=copy or here != there, **rest)
        if not there:
            return moved if type(moved) is not CudaTensor else moved.as_subclass(torch.Tensor)
        return self.adopt(moved)

    # --- activation ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def active(self) -> Iterator[CudaOnHost]:
        """Enters the mode and answers the queries of ``torch.cuda``."""
        with contextlib.ExitStack() as stack:
            for name, value in self._queries().items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value, create=True))
            stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))  # as the driver says
            stack.enter_context(mock.patch.object(torch, "Generator", Generator))
            stack.enter_context(mock.patch.object(torch.profiler, "profile", Profile))
            stack.enter_context(on_device_backward(self))
            stack.enter_context(self._operators)
            stack.enter_context(self)
            yield self

    def _queries(self) -> dict[str, object]:
        chip = self.chip
        properties = types.SimpleNamespace(
            name=chip.device,
            major=chip.compute_capability[0],
            minor=chip.compute_capability[1],
            multi_processor_count=chip.sm_count,
            total_memory=MEMORY_BYTES,
            L2_cache_size=chip.l2_bytes,
            shared_memory_per_block_optin=chip.smem_bytes,
            shared_memory_per_multiprocessor=chip.sm_smem_bytes,
            warp_size=32,
            max_threads_per_multi_processor=chip.threads,
            regs_per_multiprocessor=65536,
        )
        stream, event = classes(self.streams)

        @contextlib.contextmanager
        def entered(entered_stream: object) -> Iterator[None]:
            with contextlib.nullcontext() if entered_stream is None else entered_stream:
                yield

        names = ("init", "_lazy_init", "empty_cache", "reset_peak_memory_stats")
        return {
            **{name: _nothing() for name in names},
            # The host draws the device's random numbers, too.
            "default_generators": (torch.default_generator,),
            "manual_seed": torch.default_generator.manual_seed,
            "manual_seed_all": torch.default_generator.manual_seed,
            "get_rng_state": lambda device=None: torch.default_generator.get_state(),
            "set_rng_state": lambda new_state, device=None: torch.default_generator.set_state(new_state),
            "get_rng_state_all": lambda: [torch.default_generator.get_state()],
            "set_rng_state_all": lambda new_states: torch.default_generator.set_state(*new_states),
            "initial_seed": torch.default_generator.initial_seed,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": _of_device(None),
            "get_device_capability": _of_device(chip.compute_capability),
            "get_device_properties": _of_device(properties),
            "get_device_name": _of_device(chip.device),
            "can_device_access_peer": lambda device, peer: False,
            "synchronize": lambda device=None: self.streams.host_waits(),
            "current_stream": lambda device=None: stream(handle=self.streams.current),
            "default_stream": lambda device=None: stream(handle=DEFAULT),
            "set_stream": lambda to: setattr(self.streams, "current", to.cuda_stream),
            "device": lambda device: contextlib.nullcontext(),
            "stream": entered,
            "Stream": stream,
            "ExternalStream": lambda stream_ptr, device=None: stream(handle=stream_ptr),
            "Event": event,
            "memory_allocated": lambda device=None: sum(nbytes for _, nbytes in self.regions()),
            "max_memory_allocated": lambda device=None: sum(nbytes for _, nbytes in self.regions()),
            "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        }


def _maker() -> tuple[str, int] | None:
    """File and line of the program that runs, of neither torch nor this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _nothing() -> Callable[..., None]:
    """Everything is complete when a call returns, and there is one device. A new function for each name: torch's
    compiler keeps a table of torch functions."""
    return lambda *_, **__: None


class Generator(torch.Generator):
    """A random number generator; of the host for every device."""

    def __new__(cls, device: AnyDevice = "cpu") -> Generator:
        return super().__new__(cls, "cpu" if _device_type(device) == "cuda" else device)


class Profile(torch.profiler.profile):
    """Profile of what the CPU does: nothing runs on a GPU."""

    def __init__(self, *, activities: object = None, **keywords: object) -> None:
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **keywords)


def _synchronises(function: str, inputs: list) -> bool:
    """Whether the host waits for the result of a function of torch."""
    if function in ("__getitem__", "__setitem__"):  # of a mask the places are counted
        return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in inputs[1:])
    return function in _SYNCHRONISING


def _device_type(device: AnyDevice) -> str | None:
    if device is None:
        return None
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cuda" and found.index not in (None, DEVICE.index):
        raise RuntimeError(f"CUDA error: invalid device ordinal: {found}; emulated programs have one device, {DEVICE}")
    return found.type


def _of_device(answer: object) -> Callable[..., object]:
    """A query that takes a device, the current one by default."""

    def query(device: AnyDevice = None) -> object:
        _device_type(device)
        return answer

    return query


def _as_cuda(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(CudaTensor) if type(tensor) is torch.Tensor else tensor


def _unwrapped(value: object) -> object:
    """The tensor whose memory a wrapper of torch.func has (torch.vmap, torch.func.grad); anything else as it is."""
    while type(value) is torch.Tensor and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def _guarded_copy(storage: torch.UntypedStorage, done: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
    """A copy that is aligned as the CUDA allocator aligns and far from all other storages; the same for the same."""
    address = storage.data_ptr()
    if address not in done:
        copy = torch.from_numpy(guarded(storage.nbytes(), _ALIGNMENT))
        copy.untyped_storage().copy_(storage)
        done[address] = copy.untyped_storage()
    return done[address]


def _to(mode: CudaOnHost, args: tuple, kwargs: dict) -> torch.Tensor:
    tensor, *rest = args
    kwargs = dict(kwargs)
    device, dtype, copy = kwargs.pop("device", None), kwargs.pop("dtype", None), kwargs.pop("copy", False)
    blocking = not kwargs.pop("non_blocking", False)
    other = kwargs.pop("other", None)
    if rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
    elif rest and isinstance(rest[0], torch.dtype):
        dtype = rest.pop(0)
    elif rest:
        device = rest.pop(0)
        if rest:
            dtype = rest.pop(0)
    if other is not None:
        device, dtype = (DEVICE if mode.is_on_device(other) else "cpu"), other.dtype
    if rest:  # (non_blocking, copy)
        blocking = not rest[0]
    if len(rest) > 1:
        copy = rest[1]
    return mode.move(tensor, device, tensor.dtype if dtype is None else dtype, copy, kwargs, blocking)


def _cuda(
    mode: CudaOnHost, tensor: torch.Tensor, device: AnyDevice = None, *_: object, **__: object
) -> torch.Tensor:
    return mode.move(tensor, DEVICE if device is None else device, tensor.dtype, False, {})


def _deepcopy(mode: CudaOnHost, args: tuple, kwargs: dict) -> torch.Tensor:
    """copy.deepcopy, which torch leaves to subclasses."""
    tensor, memo = args
    if not mode.is_on_device(tensor) or not tensor.is_leaf or id(tensor) in memo:  # others with a history
        return torch.Tensor.__deepcopy__(tensor, memo)
    original = tensor.detach().as_subclass(torch.Tensor)
    memo.setdefault(id(memo), []).append(original)  # as copy.deepcopy does: another tensor could get its id
    plain = original.__deepcopy__(memo)
    made = mode.adopt(plain, copies=memo.setdefault("storages on the device", {}))
    made = memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    made.__dict__ = copy.deepcopy(tensor.__dict__, memo)
    return made


def _product(mode: CudaOnHost, args: tuple, kwargs: dict, *, func: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A product of matrices, whose result CUDA alone gives in another type: the operands are converted first."""
    dtype = kwargs.pop("out_dtype", None)
    if dtype is not None:
        args = tree_map_only(torch.Tensor, lambda x: mode.move(x, None, dtype, False, {}), args)
    return mode._run(func, args, kwargs)


def _copy(mode: CudaOnHost, args: tuple, kwargs: dict) -> torch.Tensor:
    if mode.is_on_device(args[0]):
        mode.refuse("copy_")
    blocking = not (kwargs.pop("non_blocking", False) or args[2:3] == (True,))
    if blocking and mode.is_on_device(args[0]) != mode.is_on_device(args[1]):
        mode.wait("copy_", args[1:2])
    return torch.Tensor.copy_(*args[:2], **kwargs)


def _scaled_mm(mode: CudaOnHost, args: tuple, kwargs: dict) -> object:
    names = ("self", "mat2", "scale_a", "scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum")
    given = {"self": kwargs.pop("input", None)} | dict(zip(names, args)) | kwargs
    a, b, scale_a, scale_b = (given.get(name) for name in names[:4])
    if not has_block_scales(a, scale_a) or given.get("bias") is not None or given.get("scale_result") is not None:
        return mode._run(torch._scaled_mm, args, kwargs)
    return mode.adopt(scaled_mm(a, b, scale_a, scale_b, given.get("out_dtype")), torch._scaled_mm)


class _DLTensor(ctypes.Structure):
    """The head of a DLTensor (DLPack ABI): what follows is not touched."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


_DL_CUDA = 2  # kDLCUDA
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _dlpack(mode: CudaOnHost, args: tuple, kwargs: dict) -> object:
    """A capsule of a CudaTensor says that the memory is on a device: CuTe DSL puts only such tensors in .global."""
    tensor = args[0]
    for name in ("stream", "dl_device", "max_version"):
        kwargs.pop(name, None)
    if not mode.is_on_device(tensor):
        return tensor.__dlpack__(**kwargs)
    capsule = mode.adopt(tensor).as_subclass(torch.Tensor).__dlpack__(**kwargs)
    head = _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))  # first member of a DLManagedTensor
    head.device_type, head.device_id = _DL_CUDA, 0
    return capsule


_HANDLERS: dict[Callable[..., object], Callable[[CudaOnHost, tuple, dict], object]] = {
    torch.device: lambda mode, args, kwargs: torch.device(*args, **kwargs),
    torch.Tensor.to: _to,
    torch.Tensor.cuda: lambda mode, args, kwargs: _cuda(mode, *args, **kwargs),
    torch.Tensor.cpu: lambda mode, args, kwargs: mode.move(args[0], "cpu", args[0].dtype, False, {}),
    torch.Tensor.pin_memory: lambda mode, args, kwargs: args[0],
    torch.Tensor.is_pinned: lambda mode, args, kwargs: False,
    torch.Tensor.record_stream: lambda mode, args, kwargs: None,
    torch.Tensor.get_device: lambda mode, args, kwargs: 0 if mode.is_on_device(args[0]) else -1,
    torch.Tensor.copy_: _copy,
    **{func: functools.partial(_product, func=func) for func in (torch.mm, torch.bmm, torch.addmm, torch.baddbmm)},
    torch.Tensor.__deepcopy__: _deepcopy,
    torch._scaled_mm: _scaled_mm,
    torch.Tensor.__dlpack__: _dlpack,
    torch.Tensor.__dlpack_device__: lambda mode, args, kwargs: (
        (_DL_CUDA, 0) if mode.is_on_device(args[0]) else args[0].__dlpack_device__()
    ),
}
_ANSWERS = {torch.Tensor.device: DEVICE, torch.Tensor.is_cuda: True, torch.Tensor.is_cpu: False}
