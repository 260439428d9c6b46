"""Calls of torch's C++ code with tensors "on cuda" in host memory: operators of libraries, and autograd.

Both see tensors of the CPU. So operators outside of aten (torch.library, custom_op) are sent to their kernel for CUDA,
or for all devices, where a tensor is on the device, and run with the mode of `CudaOnHost`, as the program around them.
Backward functions run with it too, and get gradients on the device, where those that torch computed itself would be
plain tensors.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Protocol
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

_BACKENDS = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_OWN = ("CPU", "CUDA", "Autograd", "AutogradCPU", "AutogradCUDA")
_MARK = "_cute_kernels_on_device"


class Device(Protocol):
    """The part of `CudaOnHost` that is used here."""

    def is_on_device(self, value: object) -> bool:
        """Whether a tensor stands for one in device memory."""

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor as one on the device."""

    def __enter__(self) -> object:
        """Enters the mode."""

    def __exit__(self, *_: object) -> None:
        """Leaves it."""


Keys = torch._C.DispatchKeySet
Choose = Callable[[torch._ops.OpOverload, Keys, list[object]], Keys]


class CudaOperators(contextlib.AbstractContextManager):
    """Sees to it that kernels of operators outside of aten run as on a device, until it is left.

    Calls reach a kernel without the mode, which is not active while it handles a call. So the operators that are
    called get a kernel for a dispatch key before those of the devices, which enters the mode and goes on with CUDA's
    key where a tensor or device argument says so.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._prepared: set[str] = set()
        self._libraries: list[torch.library.Library] = []

    def prepare(self, function: object) -> bool:
        """Before a call: whether this is an operator that takes arguments as the program gives them."""
        if isinstance(function, torch._ops.OpOverloadPacket):
            prepared = [self.prepare(getattr(function, overload)) for overload in function.overloads()]
            return any(prepared)
        if not isinstance(function, torch._ops.OpOverload) or function.namespace == "aten":
            return False
        name = function.name()
        if name not in self._prepared:
            self._prepared.add(name)
            self._implement(function, "BackendSelect", self._backend)
            # A kernel that is made of other operators is in the place of autograd, and the same for all devices.
            if _has_kernel(name, "CompositeImplicitAutograd") and not any(_has_kernel(name, key) for key in _OWN):
                self._implement(function, "AutogradCPU", lambda *_: _keys("AutogradCUDA"))
        return True

    def _backend(self, operator: torch._ops.OpOverload, keys: Keys, values: list[object]) -> object:
        """Dispatch keys with which a call goes on: those of the device of its tensors, or of its device argument."""
        if any(map(self._device.is_on_device, values)) and not _is_of_host_alone(operator):
            return _keys("CUDA")
        named = [value.type for value in values if isinstance(value, torch.device)]
        return _keys(torch._C._dispatch_key_for_device(named[0])) if named else keys & _BACKENDS

    def _implement(self, operator: torch._ops.OpOverload, key: str, choose: Choose) -> None:
        def enter(keys: Keys, *args: object, **kwargs: object) -> object:
            chosen = choose(operator, keys, tree_flatten((args, kwargs))[0])
            with self._device:
                return operator.redispatch(chosen, *args, **kwargs)

        library = torch.library.Library(operator.namespace, "IMPL")
        self._libraries.append(library)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that has one already
            library.impl(operator, enter, key, with_keyset=True)

    def __exit__(self, *_: object) -> None:
        for library in self._libraries:
            library._destroy()  # what was in the place of its kernels comes back
        self._libraries.clear()
        self._prepared.clear()


def _keys(name: str) -> Keys:
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _is_of_host_alone(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator is C++ whose functions for CUDA are not in this build: those for the CPU do instead."""
    name = operator.name()
    of_python = f"{operator.namespace}/{name.partition('::')[2].removesuffix('.default')}/CPU" in torch.library._impls
    return not of_python and not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA")


@contextlib.contextmanager
def on_device_backward(device: Device) -> Iterator[None]:
    """Backward functions of what ran on the device run on the device."""
    function, nodes = torch.autograd.Function, torch.autograd.function.BackwardCFunction
    apply, run = function.__dict__["apply"], torch.autograd._engine_run_backward  # of C since torch 2.14

    def adopted(value: object) -> object:
        with torch._C.DisableTorchFunction():
            return tree_map_only(torch.Tensor, lambda x: device.adopt(x) if type(x) is torch.Tensor else x, value)

    def apply_and_mark(cls: type[torch.autograd.Function], *args: object, **kwargs: object) -> object:
        results = apply.__get__(None, cls)(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if any(map(device.is_on_device, tree_flatten((args, kwargs))[0])):
                for result in tree_flatten(results)[0]:
                    node = result.grad_fn if isinstance(result, torch.Tensor) else None
                    if isinstance(node, nodes):
                        setattr(node, _MARK, True)
        return results

    def with_gradients_on_device(original: Callable[..., object]) -> Callable[..., object]:
        def apply_backward(self: object, *gradients: object) -> object:
            return original(self, *(adopted(gradients) if getattr(self, _MARK, False) else gradients))

        return apply_backward

    def run_backward(outputs: object, gradients: object, *args: object, **kwargs: object) -> object:
        pairs = list(zip(outputs, gradients))
        gradients = tuple(adopted(g) if g is not None and device.is_on_device(o) else g for o, g in pairs)
        with device:  # a mode is not active while it handles a call, as it does that of Tensor.backward
            return run(outputs, gradients, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", run_backward))
        stack.enter_context(mock.patch.object(function, "apply", classmethod(apply_and_mark)))
        for name in ("apply", "apply_boxed"):
            if hasattr(nodes, name):
                wrapped = with_gradients_on_device(getattr(nodes, name))
                stack.enter_context(mock.patch.object(nodes, name, wrapped))
        yield
