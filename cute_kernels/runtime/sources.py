"""Tensors that something was made from: which one it was, and whether it holds the numbers that it held then.

Autograd's version counter counts writes, but not those through ``.data`` (PEFT's merge, averages of weights, loaders of
checkpoints), nor those of NumPy or another library to the same memory. These are found by comparing the tensor, bit for
bit, with a copy. A copy is kept beside the tensor for as long as it holds what the copy holds.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

_NAME = "_cute_kernels_record"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes: of floating-point numbers NaN differs from itself, and 0 does not from -0."""


class _Record:
    """Facts of a tensor, in its ``__dict__``, so that they live as long as the tensor.

    Weak references are to this, for `torch.utils.swap_tensors` refuses tensors to which there are any.

    Attributes:
        contents: copy of the tensor, or None.
        of: `_counted` of the tensor when the copy was made.
        writes: how many writes were found by comparing.
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


class Identity:
    """Tells a tensor from all others, also from one whose contents its object gets by swapping, and keeps none alive.

    Args:
        tensor: the one.
        at_death: called with one argument when the tensor dies, before its id can be another's.
    """

    def __init__(self, tensor: torch.Tensor, at_death: Callable[[Any], None] | None = None) -> None:
        self._record = weakref.ref(_record_of(tensor), at_death)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether this is the tensor."""
        record = _record(tensor)
        return record is not None and record is self._record()


class Source(Identity):
    """A tensor as it is now; arguments as of `Identity`."""

    def __init__(self, tensor: torch.Tensor, at_death: Callable[[Any], None] | None = None) -> None:
        super().__init__(tensor, at_death)
        self._counted, self._writes = _counted(tensor), _record_of(tensor).writes

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether this is the tensor, and no write to it was counted."""
        record = self._record()
        same = record is not None and record is tensor.__dict__.get(_NAME)
        return same and self._writes == record.writes and self._counted == _counted(tensor)
