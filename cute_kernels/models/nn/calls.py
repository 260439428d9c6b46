"""Additions to a module's call that its library's file does not show: hooks, adapters, replaced code, modes.

A forward in place of a library's asks here in every call whether the function is still the one that it stands for.
Only what is exactly as known is replaced, so what nobody thought of is called.
"""

import sys
from collections.abc import Callable
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn.modules import module as global_hooks
from torch.utils._device import DeviceContext


class Known:
    """Forwards of classes and all that their code names, as files of the libraries define it; asked in every call.

    Names are followed from the ``entries``: attributes of the class, which may be functions that name others, and what
    the class's file and torch have of these names. So whatever somebody puts in place of one of them is noticed.
    """

    def __init__(self, *kinds: type, entries: tuple[str, ...] = ("forward",)) -> None:
        self._foreign: str | None = None
        self.packages: set[str] = set()
        self._spaces: dict[int, tuple[dict[str, object], dict[str, object]]] = {}
        own = {kind: self._follow(kind, list(entries)) for kind in kinds}
        self.methods = {kind: tuple(name for name in names if name != "forward") for kind, names in own.items()}
        self._checks = [(kind, *_getter(attrgetter, names)) for kind, names in own.items()]
        self._checks += [(space, *_getter(itemgetter, names)) for space, names in self._spaces.values()]

    def _follow(self, kind: type, pending: list[str]) -> dict[str, object]:
        """Attributes of a class that these names lead to; beside them, `_spaces` gets what the code finds elsewhere."""
        own: dict[str, object] = {}
        while pending:
            name = pending.pop()
            owner = next((base for base in kind.__mro__ if name in vars(base)), None)
            if owner is None or name in own:
                continue
            own[name] = getattr(kind, name)
            function = vars(owner)[name]
            function = _undecorated(getattr(function, "__func__", getattr(function, "fget", function)), owner)
            if not isinstance(function, FunctionType):
                continue
            self.packages.add(owner.__module__.partition(".")[0])
            if function.__code__.co_filename != sys.modules[owner.__module__].__file__:
                other = f"{function.__module__}.{function.__qualname__}"
                self._foreign = f"{owner.__name__} has {other} as its {name}"
            used = set() if owner is torch.nn.Module else _names(function.__code__)
            pending += [each for each in used if not hasattr(torch.nn.Module, each)]
            for space in (function.__globals__, *map(vars, (torch.nn.functional, torch, torch.Tensor))):
                found = {each: space[each] for each in used & space.keys()}
                for each, value in found.items():
                    if isinstance(value, FunctionType) and _package(value) not in ("torch", _package(function)):
                        self._foreign = f"{each} is {value.__module__}.{value.__qualname__}"
                if found:
                    key = id(space) if isinstance(space, dict) else 0  # a class gives another view at each look
                    self._spaces.setdefault(key, (space, {}))[1].update(found)
        return own

    def why(self) -> str | None:
        """Why a call may compute another function than the libraries' files say; None where it does not."""
        try:
            for space, get, values in self._checks:
                if get(space) != values:
                    break
            else:
                return self._foreign
        except (AttributeError, KeyError):
            pass
        return f"{next(iter(self.methods)).__name__} calls other code than its library's"


def _undecorated(function: object, owner: type) -> object:
    """The function in decorators of the library that has the class, and in `torch.compiler`'s."""
    library = owner.__module__.partition(".")[0]
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        if _package(function) != library and function.__globals__["__name__"] != "torch._dynamo.eval_frame":
            break
        function = function.__wrapped__
    return function


def _package(function: FunctionType) -> str:
    """Where a function's code was written, whatever it says of itself."""
    return str(function.__globals__.get("__name__")).partition(".")[0]


def _names(code: CodeType) -> set[str]:
    """Names that a function and those inside it use."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _getter(kind: type, names: dict[str, object]) -> tuple[Callable[[Any], tuple], tuple]:
    """Gets all of these names at once, and what it got: tuples, whose items are compared by identity first."""
    items = list(names.items())
    items = items if len(items) > 1 else items * 2  # of one name no tuple would come
    return kind(*(name for name, _ in items)), tuple(value for _, value in items)


_KNOWN: dict[tuple[type, ...], Known] = {}


def known(*kinds: type) -> Known:
    """`Known` of these classes, made once unless something was replaced before: that may be undone."""
    found = _KNOWN.get(kinds)
    if found is None:
        found = Known(*kinds)
        if found._foreign is None:
            _KNOWN[kinds] = found
    return found


_CALLS = Known(torch.nn.Module, entries=("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__"))


@torch.compiler.assume_constant_result
def why_code(*kinds: type) -> str | None:
    """`Known.why` of these classes, made once: of what was replaced before, the file that defines it tells."""
    return known(*kinds).why()


def why_seen() -> str | None:
    """Why operations may be others than a module calls: modes that see each of them, another ``Module.__call__``.

    Device contexts, which are modes, and those of this package change no numbers.
    """
    for level in range(torch._C._len_torch_function_stack()):
        mode = type(torch._C._get_function_stack_at(level))
        if mode is not DeviceContext and not mode.__module__.startswith("cute_kernels."):
            return f"the mode {mode.__name__} sees what torch computes"
    if torch._C._len_torch_dispatch_stack():
        return f"the mode {type(torch._C._get_dispatch_stack_at(0)).__name__} sees what torch computes"
    return _CALLS.why()


def why_called(name: str, module: torch.nn.Module, kind: type[torch.nn.Module]) -> str | None:
    """Why a module has to be called because its parameters alone do not say what it computes; None where they do.

    Its type has to be the library's layer itself, ``kind``: adapters, quantised and parametrised layers are of another.
    """
    if type(module) is not kind:
        return f"{name} is {type(module).__module__}.{type(module).__name__}"
    if hidden_by(module) is not None:
        return f"{name} has a forward of its own"
    if has_hooks(module):
        return f"{name} has hooks, or a _call_impl of its own"
    if global_hooks._has_any_global_hook():
        return f"there are hooks of all modules, {name} among them"
    if isinstance(module, torch.nn.Embedding):
        given = (module.padding_idx, module.max_norm, module.scale_grad_by_freq, module.sparse)
        if given == (None, None, False, False):
            return None
        return f"{name} has padding_idx, max_norm, scale_grad_by_freq and sparse = {given}"
    return None if isinstance(module, (torch.nn.Linear, torch.nn.LayerNorm)) else why_no_patches(name, module)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module does something else than its forward, there or on the way back."""
    forward, backward = module._forward_hooks or module._forward_pre_hooks, module._backward_hooks
    return bool(forward or backward or module._backward_pre_hooks) or "_call_impl" in vars(module)


_TILES = {2: ((0, 0), (1, 1), 1), 3: ((0, 0, 0), (1, 1, 1), 1)}
"""Padding, dilation and groups of a convolution over patches, by their dimensions; its stride is the patch."""


def why_no_patches(name: str, layer: torch.nn.Conv2d | torch.nn.Conv3d) -> str | None:
    """Why a convolution is not one product for each patch, None where it is; asked in every call, for all may be set.

    Its weight has the patch's shape, whatever its ``kernel_size`` says.
    """
    if "_conv_forward" in vars(layer):
        return f"{name} has a _conv_forward of its own"
    own = layer._parameters.get("weight")  # past torch's __getattr__, which takes a microsecond
    patch = (layer.weight if own is None else own).shape[2:]
    allowed = (patch, *_TILES[len(patch)])
    padding = allowed[1] if layer.padding == "valid" else layer.padding
    if (layer.stride, padding, layer.dilation, layer.groups, layer.padding_mode) == (*allowed, "zeros"):
        return None
    if layer.padding_mode != "zeros" and any(layer._reversed_padding_repeated_twice):
        return f"{name} has padding_mode = {layer.padding_mode!r}"
    for what, wanted in zip(("stride", "padding", "dilation", "groups"), allowed, strict=True):
        value = getattr(layer, what)
        each = (value,) * len(patch) if isinstance(value, int) and what != "groups" else value
        if each != wanted and not (isinstance(each, list) and tuple(each) == wanted) and value != "valid":
            return f"{name} has {what} = {value!r} and patches of {list(patch)}"
    return None


def why_own(module: torch.nn.Module, *kinds: type, ours: str = "") -> str | None:
    """Why a module of the first of these classes does not compute what their files say, or None.

    Its own methods count, but the one that is ``ours``, and everything of `why_code`.
    """
    why, methods = _code(*kinds)
    for name in methods:
        if name in vars(module) and name != ours:
            return f"{type(module).__name__} has a {name} of its own"
    return why


@torch.compiler.assume_constant_result
def _code(*kinds: type) -> tuple[str | None, tuple[str, ...]]:
    found = known(*kinds)
    return found.why(), found.methods[kinds[0]]


def why_holder(module: torch.nn.Module, library: str, ours: str = "") -> str | None:
    """Why a module may do something else with the layer in it than its ``library``'s code, which calls it; or None."""
    kind = type(module)
    if not reaches_class(module):
        return f"{kind.__name__} has a forward of its own"
    if not _is_written_by(library, kind):
        return f"{kind.__name__} has methods that are not {library}'s"
    return why_own(module, kind, ours=ours)


@torch.compiler.assume_constant_result
def _is_written_by(library: str, kind: type) -> bool:
    return known(kind).packages <= {library, "torch"}


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
    """Refuses a module whose calls would not come to the forward of another class that it gets. Raises ValueError: a
    forward of the instance that is not accelerate's."""
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
