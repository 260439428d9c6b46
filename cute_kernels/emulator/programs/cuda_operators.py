"""What reaches torch's C++ code with tensors "on cuda" in host memory: operators made in Python, and autograd.

Both see tensors of the CPU. So of operators that Python functions implement (torch.library) the CPU's kernel becomes
one that looks at the tensors: for those on the device it calls the function for CUDA, or for all devices. Backward
functions run with the mode of `CudaOnHost` and get gradients on the device, where those that torch computed itself
would be plain tensors.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

_KEYS = ("CPU", "CUDA")
# A kernel of the CPU that the program has registered comes back when the library that has this one is destroyed.
_MAY_OVERRIDE = "allow_override" in inspect.signature(torch.library.Library.impl).parameters  # of a newer torch
_MARK = "_cute_kernels_on_device"


class Device(Protocol):
    """What of `CudaOnHost` is used here."""

    def is_on_device(self, value: Any) -> bool:
        """Whether a tensor stands for one in device memory."""

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor as one on the device."""

    def __enter__(self) -> Any:
        """Enters the mode."""

    def __exit__(self, *_: Any) -> None:
        """Leaves it."""


class CudaOperators(contextlib.AbstractContextManager):
    """Registers kernels of operators that are implemented in Python, until it is left.

    Calls reach a kernel without the mode, which is not active while it handles a call; a kernel for CUDA is therefore
    called as the Python function that was registered, with the mode, and not through torch's dispatcher.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernels: dict[tuple[str, str], Callable[..., Any]] = {}  # by operator and key, since it was entered
        self._prepared: set[str] = set()
        self._libraries: list[torch.library.Library] = []
        self._patch: Any = None

    def prepare(self, function: Any) -> None:
        """Before a call: registers kernels for what is called, if it is an operator that needs one."""
        if isinstance(function, torch._ops.OpOverloadPacket):
            for overload in function.overloads():
                self.prepare(getattr(function, overload))
        if not isinstance(function, torch._ops.OpOverload) or function.namespace == "aten":
            return
        name = _base_name(function)
        if name in self._prepared:
            return
        self._prepared.add(name)
        definition = torch._library.custom_ops.OPDEFS.get(name)  # made by torch.library.custom_op
        made = {} if definition is None else definition._backend_fns
        kernels = {key: self._kernels.get((name, key)) or made.get(key.lower()) or made.get(None) for key in _KEYS}
        cpu, cuda = kernels["CPU"], kernels["CUDA"]
        elsewhere = cpu is None and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        if elsewhere or (cuda is None and (cpu is None or definition is None)):
            return

        def on_device(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
            key = "CUDA" if cuda is not None and not tensors else "CPU"
            key = "CUDA" if any(map(self._device.is_on_device, tensors)) else key
            kernel = kernels[key]
            if kernel is None:
                (other,) = set(_KEYS) - {key}
                what = f"Could not run {name!r} with arguments from the {key!r} backend"
                raise NotImplementedError(f"{what}: only {other}")
            if key == "CPU":
                return kernel(*args, **kwargs)
            with self._device:
                return kernel(*args, **kwargs)

        library = torch.library.Library(function.namespace, "IMPL")
        library.impl(name.partition("::")[2], on_device, "CPU", **({"allow_override": True} if _MAY_OVERRIDE else {}))
        self._libraries.append(library)

    def __enter__(self) -> CudaOperators:
        implement = torch.library.Library.impl

        def impl(library: Any, operator: Any, kernel: Any, dispatch_key: str = "", **keywords: Any) -> Any:
            result = implement(library, operator, kernel, dispatch_key, **keywords)
            if dispatch_key in _KEYS:
                known = isinstance(operator, torch._ops.OpOverload)
                name = _base_name(operator) if known else f"{library.ns}::{operator.rpartition('::')[2]}"
                self._kernels[name, dispatch_key] = kernel
            return result

        self._patch = mock.patch.object(torch.library.Library, "impl", impl)
        self._patch.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._patch.__exit__(None, None, None)
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()
        self._prepared.clear()


def _base_name(operator: Any) -> str:
    """Name of an overload as torch.library names it: without ``.default``."""
    return operator.name().removesuffix(".default")


@contextlib.contextmanager
def on_device_backward(device: Device) -> Iterator[None]:
    """Backward functions of what ran on the device run on the device."""
    function, nodes = torch.autograd.Function, torch.autograd.function.BackwardCFunction
    apply, run = function.__dict__["apply"].__func__, torch.autograd._engine_run_backward

    def adopted(value: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return tree_map_only(torch.Tensor, lambda x: device.adopt(x) if type(x) is torch.Tensor else x, value)

    def apply_and_mark(cls: Any, *args: Any, **kwargs: Any) -> Any:
        results = apply(cls, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            if any(map(device.is_on_device, tree_flatten((args, kwargs))[0])):
                for result in tree_flatten(results)[0]:
                    node = result.grad_fn if isinstance(result, torch.Tensor) else None
                    if isinstance(node, nodes):
                        setattr(node, _MARK, True)
        return results

    def with_gradients_on_device(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply_backward(self: Any, *gradients: Any) -> Any:
            return original(self, *(adopted(gradients) if getattr(self, _MARK, False) else gradients))

        return apply_backward

    def run_backward(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
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
