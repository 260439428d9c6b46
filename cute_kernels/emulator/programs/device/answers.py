"""Answers to programs about the emulated device: by cuda-python's driver and runtime, and by CuTe DSL."""

import enum
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

from cute_kernels.common.chips import CTA_SMEM_BYTES, DEFAULT_SMEM_BYTES, Chip
from cute_kernels.emulator.errors import UnsupportedPTX

_PROPERTIES = {
    "maxThreadsPerBlock": 1, "sharedMemPerBlock": 8, "totalConstMem": 9, "warpSize": 10, "regsPerBlock": 12,
    "multiProcessorCount": 16, "integrated": 18, "concurrentKernels": 31, "l2CacheSize": 38,
    "maxThreadsPerMultiProcessor": 39, "unifiedAddressing": 41, "major": 75, "minor": 76,
    "sharedMemPerMultiprocessor": 81, "regsPerMultiprocessor": 82, "sharedMemPerBlockOptin": 97,
    "maxBlocksPerMultiProcessor": 106, "reservedSharedMemPerBlock": 111, "clusterLaunch": 120,
}  # fmt: skip
"""Members of cudaDeviceProp that are attributes, too."""


def attributes(chip: Chip) -> dict[int, int]:
    """Values by CUdevice_attribute and cudaDeviceAttr, whose numbers agree; of what the emulator knows."""
    capability = chip.compute_capability
    return {
        1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2**31 - 1, 6: 65535, 7: 65535,  # threads and CTAs, each dimension
        8: DEFAULT_SMEM_BYTES, 9: 64 << 10, 10: 32, 12: chip.register_file, 16: chip.sm_count,
        17: 0, 18: 0, 20: 0, 31: 1,  # no limit of run time, memory of its own, for any process, kernels side by side
        38: chip.l2_bytes, 39: chip.threads, 41: 1, 75: capability[0], 76: capability[1],
        81: chip.sm_smem_bytes, 82: chip.register_file, 97: chip.smem_bytes, 106: chip.ctas, 111: CTA_SMEM_BYTES,
        120: int(chip.cluster > 1),
    }  # fmt: skip


def hardware_info(chip: Chip) -> object:
    """Stands for cutlass.utils.HardwareInfo: one CTA fits on a multiprocessor."""
    return SimpleNamespace(
        get_max_active_clusters=lambda cluster_size, stream=None: chip.sm_count // cluster_size,
        get_device_multiprocessor_count=lambda: chip.sm_count,
        get_l2_cache_size_in_bytes=lambda: chip.l2_bytes,
    )


def driver_answers(driver: ModuleType, runtime: ModuleType, chip: Chip) -> Iterator[tuple[object, str, object]]:
    """Entry points of cuda-python that programs call to find a device; all others fail as they do without a driver."""
    ok, fine = driver.CUresult.CUDA_SUCCESS, runtime.cudaError_t.cudaSuccess
    no_device, not_valid = driver.CUresult.CUDA_ERROR_INVALID_DEVICE, runtime.cudaError_t.cudaErrorInvalidDevice
    known = attributes(chip)

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
    yield runtime, "cudaGetDeviceProperties", of_runtime(lambda: _properties(runtime, chip, known))
    yield runtime, "cudaDeviceGetAttribute", of_runtime(attribute)
    yield runtime, "cudaGetDevice", lambda: (fine, 0)
    yield runtime, "cudaSetDevice", lambda device: (fine if device == 0 else not_valid,)


def _properties(runtime: ModuleType, chip: Chip, known: dict[int, int]) -> object:
    """cudaDeviceProp of the emulated device: what programs size their launches by; what is not known stays 0."""
    found = runtime.cudaDeviceProp()
    found.name = chip.device.encode()[:255].ljust(256, b"\0")
    found.totalGlobalMem = chip.memory_bytes
    found.maxThreadsDim, found.maxGridSize = [known[n] for n in (2, 3, 4)], [known[n] for n in (5, 6, 7)]
    for name, number in _PROPERTIES.items():
        setattr(found, name, known[number])
    return found
