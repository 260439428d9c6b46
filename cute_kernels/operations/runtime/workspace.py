"""Memory that kernels pass sums through from one CTA to another: counters that are 0 between launches, and the sums.

Launches of one stream follow each other and share it. A CUDA graph may run beside them: what is captured has its own.
"""

import torch

_Key = tuple[torch.device, int]
_COUNTERS: dict[_Key, torch.Tensor] = {}
_SUMS: dict[_Key, torch.Tensor] = {}


def workspace(device: torch.device, counters: int, sums: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The two, for launches on the current stream: int32 counters, which kernels leave as 0, and sums of 4 bytes."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(counters, dtype=torch.int32, device=device), torch.empty(sums, dtype=dtype, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _COUNTERS or len(_COUNTERS[key]) < counters:
        _COUNTERS[key] = torch.zeros(counters, dtype=torch.int32, device=device)
    if key not in _SUMS or len(_SUMS[key]) < sums:
        _SUMS[key] = torch.empty(sums, dtype=torch.float32, device=device)
    return _COUNTERS[key][:counters], _SUMS[key][:sums].view(dtype)
