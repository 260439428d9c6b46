"""Answers to programs about the emulated device: by cuda-python's driver and runtime, and by CuTe DSL."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

from cute_kernels.emulator.errors import UnsupportedPTX

if TYPE_CHECKING:
    from cute_kernels.emulator.programs.cuda_tensors import DeviceFacts

_PROPERTIES = {
    "maxThreadsPerBlock": 1, "sharedMemPerBlock": 8, "totalConstMem": 9, "warpSize": 10, "regsPerBlock": 12,
    "multiProcessorCount": 16, "integrated": 18, "concurrentKernels": 31, "l2CacheSize": 38,
    "maxThreadsPerMultiProcessor": 39, "unifiedAddressing": 41, "major": 75, "minor": 76,
    "sharedMemPerMultiprocessor": 81, "regsPerMultiprocessor": 82, "sharedMemPerBlockOptin": 97,
    "maxBlocksPerMultiProcessor": 106, "reservedSharedMemPerBlock": 111, "clusterLaunch": 120,
}  # fmt: skip
"""Members of cudaDeviceProp that are attributes, too."""


def attributes(facts: DeviceFacts) -> dict[int, int]:
    """Values by CUdevice_attribute and cudaDeviceAttr, whose numbers agree; of what the emulator knows."""
    capability = facts.capability
    return {
        1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2**31 - 1, 6: 65535, 7: 65535,  # threads and CTAs, each dimension
        8: 48 << 10, 9: 64 << 10, 10: 32, 12: 1 << 16, 16: facts.multiprocessors,
        17: 0, 18: 0, 20: 0, 31: 1,  # no limit of run time, memory of its own, for any process, kernels side by side
        38: facts.l2_bytes, 39: 2048, 41: 1, 75: capability[0], 76: capability[1],
        81: facts.shared_bytes + (1 << 10), 82: 1 << 16, 97: facts.shared_bytes, 106: 32, 111: 1 << 10,
        120: int(capability[0] >= 9),
    }  # fmt: skip


def hardware_info(facts: DeviceFacts) -> object:
    """Stands for cutlass.utils.HardwareInfo: one CTA fits on a multiprocessor."""
    return SimpleNamespace(
        get_max_active_clusters=lambda cluster_size, stream=None: facts.multiprocessors // cluster_size,
        get_device_multiprocessor_count=lambda: facts.multiprocessors,
        get_l2_cache_size_in_bytes=lambda: facts.l2_bytes,
    )


def driver_answers(driver: ModuleType, runtime: ModuleType, facts: DeviceFacts) -> Iterator[tuple[object, str, object]]:
    """Entry points of cuda-python that programs call to find a device; all others fail as they do without a driver."""
    ok, fine = driver.CUresult.CUDA_SUCCESS, runtime.cudaError_t.cudaSuccess
    no_device, not_valid = driver.CUresult.CUDA_ERROR_INVALID_DEVICE, runtime.cudaError_t.cudaErrorInvalidDevice
    known = attributes(facts)

    def attribute(which: enum.IntEnum) -> int:
        if int(which) not in known:
            raise UnsupportedPTX(f"host code asks for device attribute {which}")
        return known[int(which)]

    def of_driver(answer: object) -> object:
        return lambda *which: (ok, answer(*which[:-1])) if int(which[-1]) == 0 else (no_device, None)

    def of_runtime(answer: object) -> object:
        return lambda *which: (fine, answer(*which[:-1])) if int(which[-1]) == 0 else (not_valid, None)

    yield driver, "cuInit", lambda flags: (ok,)
    yield driver, "cuDeviceGetCount", lambda: (ok, 1)
    yield driver, "cuDeviceGet", of_driver(lambda: driver.CUdevice(0))
    yield driver, "cuDeviceGetAttribute", of_driver(attribute)
    yield driver, "cuCtxGetCurrent", lambda: (ok, driver.CUcontext(1))
    yield driver, "cuDriverGetVersion", lambda: (ok, 13000)
    yield runtime, "cudaGetDeviceCount", lambda: (fine, 1)
    yield runtime, "cudaGetDeviceProperties", of_runtime(lambda: _properties(runtime, facts, known))
    yield runtime, "cudaDeviceGetAttribute", of_runtime(attribute)
    yield runtime, "cudaGetDevice", lambda: (fine, 0)
    yield runtime, "cudaSetDevice", lambda device: (fine if device == 0 else not_valid,)


def _properties(runtime: ModuleType, facts: DeviceFacts, known: dict[int, int]) -> object:
    """cudaDeviceProp of the emulated device: what programs size their launches by; what is not known stays 0."""
    found = runtime.cudaDeviceProp()
    found.name = facts.name.encode()[:255].ljust(256, b"\0")
    found.totalGlobalMem = facts.memory_bytes
    found.maxThreadsDim, found.maxGridSize = [known[n] for n in (2, 3, 4)], [known[n] for n in (5, 6, 7)]
    for name, number in _PROPERTIES.items():
        setattr(found, name, known[number])
    return found
