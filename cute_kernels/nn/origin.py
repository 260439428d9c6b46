"""What something was made from, so that it is made anew when that has changed."""

from __future__ import annotations

import weakref

import torch

from cute_kernels.runtime.constants import DERIVED


def stamp(tensor: torch.Tensor) -> tuple:
    """Differs when the tensor's numbers may: memory, version counter, type, device and layout.

    A tensor made in inference mode has no version counter; of such a one only another memory is noticed.
    """
    version = None if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), version, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())


class Origin:
    """A tensor as it is now.

    Where autograd counts no versions, for a tensor that was made in inference mode, its numbers are kept and compared.
    On a GPU the host waits for that.

    Args:
        tensor: what something is made from; it is not kept alive.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._stamp = stamp(tensor)
        self._generation = DERIVED.generation
        self._numbers = tensor.detach().clone() if tensor.is_inference() else None

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the same object with the same numbers.

        Writes through ``.data`` are not noticed; after `cute_kernels.clear_cache` every tensor counts as changed.
        """
        if self._generation != DERIVED.generation or self._tensor() is not tensor or self._stamp != stamp(tensor):
            return False
        return self._numbers is None or torch.equal(self._numbers, tensor)
