"""Parts of a module's call besides its class's own forward: hooks, adapters, forwards of one instance.

A replaced forward that reads a submodule's parameters instead of calling it asks here first whether that is the same.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch.nn.modules import module as global_hooks


def why_called(name: str, module: torch.nn.Module, kind: type[torch.nn.Module]) -> str | None:
    """Why a module has to be called because its parameters alone do not say what it computes; None where they do.

    Args:
        name: of the module, for the text.
        module: in the place of a layer.
        kind: of the library's layer: `torch.nn.Conv2d`, `Conv3d`, `Linear`, `LayerNorm` or `Embedding`. Adapters,
            quantised layers, parametrised layers and other subclasses are of another.
    """
    if type(module) is not kind:
        return f"{name} is {type(module).__module__}.{type(module).__name__}"
    if hidden_by(module) is not None:
        return f"{name} has a forward of its own"
    if module._forward_hooks or module._forward_pre_hooks:
        return f"{name} has hooks"
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        return f"there are hooks of all modules, {name} among them"
    if isinstance(module, torch.nn.Embedding):
        return f"{name} has max_norm = {module.max_norm}" if module.max_norm is not None else None
    return None if isinstance(module, (torch.nn.Linear, torch.nn.LayerNorm)) else why_no_patches(name, module)


_TILES = {2: ((0, 0), (1, 1), 1), 3: ((0, 0, 0), (1, 1, 1), 1)}
"""Padding, dilation and groups of a convolution over patches, by their dimensions; its stride is the patch."""


def why_no_patches(name: str, layer: torch.nn.Conv2d | torch.nn.Conv3d) -> str | None:
    """Why a convolution is not one product for each patch, None where it is; asked in every call, for all may be set.

    Args:
        name: of the layer, for the text.
        layer: whose weight has the patch's shape, whatever its ``kernel_size`` says.
    """
    if "_conv_forward" in vars(layer):
        return f"{name} has a _conv_forward of its own"
    patch = layer.weight.shape[2:]
    allowed = (patch, *_TILES[len(patch)])
    if (layer.stride, layer.padding, layer.dilation, layer.groups) == allowed:
        return None
    for what, wanted in zip(("stride", "padding", "dilation", "groups"), allowed, strict=True):
        value = getattr(layer, what)
        each = (value,) * len(patch) if isinstance(value, int) and what != "groups" else value
        if each != wanted and not (isinstance(each, list) and tuple(each) == wanted) and value != "valid":
            return f"{name} has {what} = {value!r} and patches of {list(patch)}"
    return None


def why_own(module: torch.nn.Module, *names: str) -> str | None:
    """Calls of a module with methods of the instance in place of its class's."""
    return next((f"{type(module).__name__} has a {name} of its own" for name in names if name in vars(module)), None)


# --- forwards of an instance -----------------------------------------------------------------------------------------
# accelerate's hooks put a function into ``module.forward`` that calls ``module._old_forward``, the bound method that
# was there; without hooks again, the bound method itself stays in ``module.forward``. Both outlive a change of class.

_OLD = "_old_forward"


def hidden_by(module: torch.nn.Module) -> object | None:
    """The forward of the instance, where it is not its class's."""
    own = vars(module).get("forward")
    return None if own is None or _is_of_class(own, module, type(module)) else own


def reaches_class(module: torch.nn.Module) -> bool:
    """Whether a call of the module comes to its class's forward, by way of accelerate's hooks or straight."""
    return hidden_by(module) is None or _is_of_class(vars(module).get(_OLD), module, type(module))


def check_reachable(module: torch.nn.Module, name: str = "module") -> None:
    """Refuses a module whose calls would not come to the forward of another class that it gets.

    Raises:
        ValueError: a forward of the instance that is not accelerate's.
    """
    if not reaches_class(module):
        raise ValueError(
            f"{name} is {type(module).__name__} with a forward of its own, {hidden_by(module)!r}, which would run in "
            "place of this package's: remove it, or set it after converting"
        )


def change_class(module: torch.nn.Module, new: type[torch.nn.Module]) -> None:
    """Gives a module another class, and its bound methods of the former one's forward that of the new one."""
    before = type(module)
    module.__class__ = new
    for name in ("forward", _OLD):
        if _is_of_class(vars(module).get(name), module, before):
            setattr(module, name, MethodType(new.forward, module))


def _is_of_class(function: object, module: torch.nn.Module, kind: type) -> bool:
    return isinstance(function, MethodType) and function.__self__ is module and function.__func__ is kind.forward
