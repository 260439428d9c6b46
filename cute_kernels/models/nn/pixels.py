"""Pixels that are not what was said: refused at once on a CPU, and one call late on a GPU, where nobody waits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_kernels.operations.runtime.constants import outside_of_pools


@dataclass
class _Largest:
    """The largest number that calls noted on one GPU; each call copies it to the host's pinned memory."""

    noted: torch.Tensor
    copied: torch.Tensor
    words: Callable[[], str]


class Contradictions:
    """Contradictions in the calls of one module."""

    def __init__(self) -> None:
        self._largest: dict[tuple[torch.device, float], _Largest] = {}

    def note(self, value: torch.Tensor, limit: float, words: Callable[[], str]) -> None:
        """Notes a number of a call's pixels, which contradict what was said if it is above a limit or NaN. On a CPU
        that raises ValueError with these words."""
        if not value.is_cuda:
            if not value <= limit:
                raise ValueError(words())
            return
        largest = self._largest.get((value.device, limit))
        if largest is None:
            if torch.cuda.is_current_stream_capturing():  # memory for these would be the graph's
                return
            largest = outside_of_pools(lambda: self._nothing(value.device, words), value)
            self._largest[value.device, limit] = largest
        largest.words = words
        torch.maximum(largest.noted, value, out=largest.noted)  # of NaN it is NaN
        largest.copied.copy_(largest.noted, non_blocking=True)

    def report(self) -> None:
        """Raises ValueError if an earlier call's pixels on a GPU are known to contradict; it does not wait."""
        for (device, limit), largest in list(self._largest.items()):  # to which another thread may add
            if not largest.copied.item() <= limit:
                self._largest.pop((device, limit), None)  # copies of what was reported may still be under way
                raise ValueError(f"an earlier call on {device} gave wrong results: {largest.words()}")

    @staticmethod
    def _nothing(device: torch.device, words: Callable[[], str]) -> _Largest:
        with torch.inference_mode(False):
            noted = torch.zeros((), dtype=torch.float32, device=device)
            return _Largest(noted, torch.zeros((), dtype=torch.float32, device="cpu").pin_memory(), words)
