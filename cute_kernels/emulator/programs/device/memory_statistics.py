"""Statistics of the device's memory as torch's allocator gives them in a build for CUDA, and pools of memory.

The device has neither pools nor blocks that are split: all memory is in the large pool, and a pool is a name. What
nobody counts is 0.
"""

import itertools
from collections.abc import Callable, Mapping

import torch

_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
_COUNTS = ("allocation", "segment", "active")
_SPLIT = ("inactive_split", "inactive_split_bytes")
_EVENTS = ("alloc_retries", "ooms", "oom_rejections", "sync_all_streams", "device_alloc", "device_free")
_OF_HOST = ("allocations", "active_requests", "allocated_bytes", "active_bytes")
_TIMES = ("host_alloc_time", "host_free_time")
Statistics = dict[str, object]


def functions(call: Callable[..., object]) -> dict[str, object]:
    """Functions of ``torch._C``, by name; ``call`` calls an operator of the device."""
    return {
        "_cuda_memoryStats": lambda index: _statistics(call),
        "_cuda_memorySnapshot": lambda pool=None: _snapshot(call, pool),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_hostMemoryStats": _host_statistics,
    }


def _statistics(call: Callable[..., object]) -> Statistics:
    used, peak = call("used")
    count = len(call("memory")) // 3
    return {
        **{name: _pools(used, peak) for name in _BYTES},
        **{name: _pools(count, count) for name in _COUNTS},
        **{name: _pools(0, 0) for name in _SPLIT},
        **{name: _amount(0, 0) for name in ("oversize_allocations", "oversize_segments")},
        **{f"num_{name}": 0 for name in _EVENTS},
        "max_split_size": -1,
        "reserved_bytes_by_private_pools": {},
    }


def _pools(current: int, peak: int) -> dict[str, dict[str, int]]:
    whole = _amount(current, peak)
    return {"all": whole, "large_pool": whole, "small_pool": _amount(0, 0)}


def _amount(current: int, peak: int) -> dict[str, int]:
    return {"current": current, "peak": peak, "allocated": current, "freed": 0}


def _host_statistics() -> Statistics:
    """Pinned memory is memory of the host like any other here."""
    times = {name: dict.fromkeys(("total", "max", "min", "count", "avg"), 0) for name in _TIMES}
    return {**{name: _amount(0, 0) for name in _OF_HOST}, **times, "num_host_alloc": 0, "num_host_free": 0}


def _snapshot(call: Callable[..., object], pool: tuple[object, ...] | None) -> Mapping[str, object]:
    """Each tensor's memory is a segment of one block; private pools are empty."""
    found = call("memory") if pool is None or tuple(pool[:2]) == (0, 0) else []
    segments = [_segment(address, nbytes) for address, nbytes in zip(found[::3], found[1::3])]
    return {"segments": segments, "device_traces": [[]], "allocator_settings": {}, "external_annotations": []}


def _segment(address: int, nbytes: int) -> dict[str, object]:
    common = {"address": address, "requested_size": nbytes, "frames": []}
    return {
        **common,
        "device": 0,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        **dict.fromkeys(("total_size", "allocated_size", "active_size"), nbytes),
        "blocks": [{**common, "size": nbytes, "state": "active_allocated"}],
    }


class MemPool:
    """``torch.cuda.MemPool``: memory that is made in it is made as elsewhere."""

    _numbers = itertools.count(1)

    def __init__(self, allocator: object = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        self.allocator, self.id = allocator, (0, next(self._numbers))

    def use_count(self) -> int:
        """How many use the pool: whoever holds it."""
        return 1

    def snapshot(self, include_traces: bool = True) -> list[dict[str, object]]:
        """Segments of the pool."""
        return torch.cuda.memory_snapshot(self.id)
