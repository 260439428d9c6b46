"""Origin of something that was made from a tensor, so that it is made anew when that has changed."""

from __future__ import annotations

import torch

from cute_kernels.runtime.constants import DERIVED, Source


class Origin:
    """A tensor as it is now.

    Args:
        tensor: what something is made from; it is not kept alive.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        DERIVED.watch(tensor)
        self._source = Source(tensor)
        self._generation = DERIVED.generation

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the same object with the same numbers, as far as `DERIVED.notice` finds out.

        After `cute_kernels.clear_cache` every tensor counts as changed.
        """
        return DERIVED.are_unchanged((self._source,), tensor) and self._generation == DERIVED.generation
