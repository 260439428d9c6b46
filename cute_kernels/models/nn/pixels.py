"""Pixels that are not what was said: refused at once on a CPU, and one call late on a GPU, where nobody waits."""

from dataclasses import dataclass

import torch

from cute_kernels.operations.runtime.constants import outside_of_pools


@dataclass
class _Counts:
    """Counts of one GPU: counted there, copied to the host's pinned memory by each call, and reported so far."""

    counted: torch.Tensor
    copied: torch.Tensor
    words: str = ""
    reported: int = 0


class Contradictions:
    """Contradictions in the calls of one module."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, _Counts] = {}

    def note(self, wrong: torch.Tensor, words: str) -> None:
        """Notes whether a call's pixels contradict what was said, a boolean tensor; on a CPU that raises ValueError."""
        if not wrong.is_cuda:
            if wrong:
                raise ValueError(words)
            return
        counts = self._counts.get(wrong.device)
        if counts is None:
            if torch.cuda.is_current_stream_capturing():  # memory for these would be the graph's
                return
            counts = self._counts[wrong.device] = outside_of_pools(lambda: self._zero(wrong.device), wrong)
        counts.words = words
        counts.counted.add_(wrong)
        counts.copied.copy_(counts.counted, non_blocking=True)

    def report(self) -> None:
        """Raises ValueError if an earlier call's pixels on a GPU are known to contradict; it does not wait."""
        for device, counts in self._counts.items():
            found = int(counts.copied)
            if found > counts.reported:
                counts.reported = found
                raise ValueError(f"an earlier call on {device} gave wrong results: {counts.words}")

    @staticmethod
    def _zero(device: torch.device) -> _Counts:
        with torch.inference_mode(False):
            counted = torch.zeros((), dtype=torch.int64, device=device)
            return _Counts(counted, torch.zeros((), dtype=torch.int64, device="cpu").pin_memory())
