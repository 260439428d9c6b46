"""The device "cuda" of one program that runs in the emulator: its memory, and when the host waits for it."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import torch

from cute_kernels.common.chips import Chip
from cute_kernels.emulator.errors import EmulatorError, raising
from cute_kernels.emulator.programs.device import building, operators, torch_names
from cute_kernels.emulator.reports.text import short_path

if TYPE_CHECKING:
    from cute_kernels.emulator.programs.streams import Streams

_LIBRARIES = [f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[3])]
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_active: list[CudaDevice] = []
"""Devices of programs that run, the innermost last."""


def is_active() -> bool:
    """Whether a program runs that has the device."""
    return bool(_active)


class CudaDevice:
    """``cuda:0`` in memory of the host. Use `active` to have it.

    Args:
        chip: whose facts answer queries.
        streams: of the program.
        worked: called with the name of an operator of torch that has changed or made device memory, if not None.

    Attributes:
        report: called with a race of what the host reads; raises or returns.
        new_byte: what each byte of a tensor of ``torch.empty`` and its like is, 0 to 255.
        synchronising: what torch is asked to do where the host waits: 0 nothing, 1 to warn, 2 to raise.
        most_bytes: of memory, that it gives.
        in_bad_fork: whether this process was forked after the program had begun to use the device.
    """

    def __init__(
        self,
        chip: Chip,
        streams: Streams,
        worked: Callable[[str], None] | None = None,
    ) -> None:
        self.chip, self.streams, self.worked = chip, streams, worked
        streams.call = self.call
        self.report: Callable[[EmulatorError], None] = raising
        self.new_byte = self.synchronising = self._before = 0
        self.most_bytes, self.in_bad_fork = chip.memory_bytes, False

    @staticmethod
    def call(name: str, *arguments: object) -> object:
        """Calls an operator of the device, past whatever mode of torch is active."""
        return getattr(torch.ops.cute_device, name).default.redispatch(_KEYS, *arguments)

    def regions(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of all memory on the device, in the order in which it was made, and last what earlier
        programs of this process have left."""
        found = self.call("memory")
        older = 3 * sum(serial <= self._before for serial in found[2::3])
        found = found[older:] + found[:older]
        return zip(found[::3], found[1::3])

    def shape(self, address: int) -> tuple[tuple[int, ...], int]:
        """Shape of the first tensor of memory, by its address; bytes of an element, 0 if it is not row by row."""
        shape, element = self.call("shape", address)
        return tuple(shape), element

    def freed(self, address: int | None) -> str:
        """The tensor that was on the device at an address until it was freed, in words, or ""."""
        kind, shape, file, line = self.call("freed", address) if address is not None else ("", (), "", 0)
        if not kind:
            return ""
        return f"{kind} {tuple(shape)}" + (f", made at {short_path(file)}:{line}," if file else "")

    def limit(self, fraction: float) -> None:
        """Gives no more than a part of its memory from here on."""
        self.most_bytes = int(fraction * self.chip.memory_bytes)
        self.call("limit", self.most_bytes)

    def lifetimes(self) -> Callable[[int], bool]:
        """Tells later whether memory that is on the device now, by its address, is still the one there."""
        found = self.call("memory")
        serials = dict(zip(found[::3], found[2::3]))
        return lambda address: address in serials and serials[address] == self.call("serial", address)

    def wait(self, function: str, address: int, nbytes: int) -> None:
        """The host waits for the current stream, in which a function of torch reads ``nbytes`` at an address."""
        if self.synchronising == 2:
            raise RuntimeError(f"torch's {function} is a synchronizing CUDA operation")
        race = self.streams.read(f"torch's {function}", [(address, nbytes)])
        if race is not None:
            self.report(race)
        self.streams.host_waits(f"torch's {function}", stream=self.streams.current)

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Work inside is in no stream that is captured, and finds memory as if captures had run nothing."""
        if not self.streams.captures:
            yield
            return
        self.call("swap_contents")
        try:
            yield
        finally:
            self.call("swap_contents")

    @staticmethod
    def owner_on_the_host(address: int | None) -> str:
        """Kind, type and shape of what lies on the host at an address that a kernel used, or nothing."""
        if address is None:
            return ""
        for item in gc.get_objects():
            kind = type(item)  # isinstance would ask the object, and some do things then
            try:
                if issubclass(kind, torch.Tensor) and item.device.type == "cpu":
                    storage = item.untyped_storage()
                    if storage.device.type != "cpu":  # a fake tensor
                        continue
                    name, start, nbytes = "CPU tensor", storage.data_ptr(), storage.nbytes()
                elif issubclass(kind, np.ndarray):
                    name, start, nbytes = "NumPy array", item.ctypes.data, item.nbytes
                else:
                    continue
            except RuntimeError:  # sparse and MKL-DNN tensors have no storage
                continue
            if start <= address < start + nbytes:
                shape, dtype = tuple(item.shape), str(item.dtype).removeprefix("torch.")
                return f"{name} {dtype} {shape}"
        return ""

    # --- activation ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def active(self) -> Iterator[CudaDevice]:
        """Makes the device one of this process, and lets ``torch.cuda`` know it."""
        install()
        if self.call("memory"):
            gc.collect()  # what an earlier program has forgotten
        self._before = max(self.call("memory")[2::3], default=0)  # serial number of the latest that is left
        with contextlib.ExitStack() as stack:
            _active.append(self)
            stack.callback(_leave, self)
            _enter(self)
            # As a process of its own, which seeds all devices when it seeds the host.
            self.call("default_generator").manual_seed(torch.initial_seed())
            for target, name, value in torch_names.names(self):
                stack.enter_context(mock.patch.object(target, name, value, create=True))
            stack.enter_context(self.inside())
            yield self

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread is one of the program."""
        # Backward functions run in the thread that calls them, where launches are intercepted; also afterwards, of
        # what is left of the program: there are no threads for devices.
        torch._C._set_multithreading_enabled(False)
        was = self.call("enter", True)
        try:
            yield
        finally:
            self.call("enter", was)


def _enter(device: CudaDevice) -> None:
    device.call("activate", device.new_byte, device.most_bytes, _LIBRARIES)
    device.call("watch", device.worked is not None)


def _leave(device: CudaDevice) -> None:
    _active.remove(device)
    device.streams.captures.abandon()
    device.call("exchange_stream", 0)
    if _active:
        _enter(_active[-1])
    else:
        device.call("deactivate")


@functools.cache
def install() -> None:
    """Gives this process's torch the device, which is there while one is `CudaDevice.active`. Raises
    building.DeviceNotBuilt: it is not compiled, and cannot be."""
    building.load()
    own = torch.library.Library("cute_device", "IMPL")
    own.impl("host_waits", lambda name, address, nbytes: _active[-1].wait(name, address, nbytes), "CPU")
    own.impl("worked", lambda name: _active[-1].worked(name), "CPU")
    own.impl("stands_in", _stands_in, "CPU")
    own.impl("order", lambda what, stream, event: _active[-1].streams.order(what, stream, event), "CPU")
    aten = torch.library.Library("aten", "IMPL")
    for name, function in operators.kernels():
        aten.impl(name, function, "CUDA")
    install.libraries = own, aten  # they end what they have registered when they end
    CudaDevice.call("set_of_one_device", operators.of_one_device())
    _serve_storages()
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """Does as torch where CUDA was in use when the process was forked; the emulator's own forks use no tensors."""
    for device in _active:
        device.in_bad_fork = torch.cuda.is_initialized() or device.in_bad_fork
    if _active:
        CudaDevice.call("forked", _active[-1].in_bad_fork)


def _stands_in(name: str) -> bool:
    """Whether an operator's kernel for the CPU does for CUDA: it is of C++, and this build has no other."""
    namespace, _, rest = name.partition("::")
    return f"{namespace}/{rest}/CPU" not in torch.library._impls


def _serve_storages() -> None:
    """Gives ``torch.UntypedStorage`` a device argument of "cuda", with which deepcopy and torch.load call it, and
    another size on the device."""
    made, resized = torch.UntypedStorage.__new__, torch.UntypedStorage.resize_

    def new(cls: type, *args: object, device: object = None, **keywords: object) -> object:
        if device is None or torch.device(device).type != "cuda":
            return made(cls, *args, **({} if device is None else {"device": device}), **keywords)
        content = args[0] if args else 0
        if isinstance(content, int):
            return torch.empty(content, dtype=torch.uint8, device=device).untyped_storage()
        return torch.tensor(list(content), dtype=torch.uint8, device=device).untyped_storage()

    def resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resized(storage, nbytes)
        if not storage.resizable():
            raise RuntimeError("Trying to resize storage that is not resizable")
        CudaDevice.call("resize_storage", storage, nbytes)
        return storage

    torch.UntypedStorage.__new__, torch.UntypedStorage.resize_ = new, resize
