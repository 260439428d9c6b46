"""Origin of something that was made from tensors, so that it is made anew when one of them has changed."""

import torch

from cute_kernels.operations.runtime.constants import DERIVED, Source


class Origin:
    """Tensors as they are now, or None in place of one; they are not kept alive."""

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        DERIVED.watch(*tensors)
        self._sources = [None if tensor is None else Source(tensor) for tensor in tensors]
        self._generation = DERIVED.generation

    def is_unchanged(self, *tensors: torch.Tensor | None) -> bool:
        """Whether these are the same objects with the same numbers, as far as `DERIVED.notice` finds out.

        After `cute_kernels.clear_cache` every tensor counts as changed.
        """
        if len(tensors) != len(self._sources) or not DERIVED.are_unchanged(self._sources, *tensors):
            return False
        return self._generation == DERIVED.generation
