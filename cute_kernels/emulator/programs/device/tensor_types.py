"""``torch.cuda.FloatTensor`` and its kin, of which a build of torch without CUDA makes no tensors."""

from collections.abc import Iterator

import torch

_set_default = torch._C._set_default_tensor_type


class _Type(type):
    """Metaclass: tensors of the device and of the element type are instances."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def classes() -> Iterator[tuple[str, type]]:
    """Names in ``torch.cuda``, and what is there while a program runs."""
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


def set_default(kind: type) -> None:
    """``torch.set_default_tensor_type``: the device and the element type of tensors for which a program names none."""
    if isinstance(kind, _Type):
        torch.set_default_device("cuda")
        torch.set_default_dtype(kind.dtype)
    else:
        torch.set_default_device(None)
        _set_default(kind)
