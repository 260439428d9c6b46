"""The CUDA driver through ctypes: assembles PTX, launches it on copies of host buffers, and reads them back."""

from __future__ import annotations

import ctypes
import re
import time

from cute_kernels.emulator.programs.recorded import Relocation
from tests.emulator.hardware import ALIGNMENT, Launch, Rejected, for_sm90

_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES = 5, 6  # CUjit_option
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
_NOT_READY = 600
#: Newest PTX ISA that a driver of each CUDA version assembles (CUDA release notes).
_ISA = {12000: (8, 0), 12010: (8, 1), 12020: (8, 2), 12030: (8, 3), 12040: (8, 4), 12050: (8, 5), 12060: (8, 5)}
_ISA |= {12070: (8, 6), 12080: (8, 7), 12090: (8, 8), 13000: (9, 0)}


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_uint32)
            for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")
        ),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    ]


class Device:
    """The first GPU. Raises OSError without a driver and RuntimeError without a GPU of compute capability 9.0."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        device, context, version = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        capability = (ctypes.c_int(), ctypes.c_int())
        for value, attribute in zip(capability, (75, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        if (capability[0].value, capability[1].value) != (9, 0):
            raise RuntimeError(f"compute capability {capability[0].value}.{capability[1].value}: must be 9.0")
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, len(name), device)
        self.name = name.value.decode()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.isa = max((isa for least, isa in _ISA.items() if least <= version.value), default=(8, 0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self._kept: dict[tuple[str, str | None], ctypes.c_void_p] = {}

    def call(self, name: str, *arguments) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: error {code}, {(text.value or b'unknown').decode()}")

    def execute(self, launch: Launch, patience: float) -> list[bytes]:
        """Contents of the buffers after the launch, with device addresses in them turned back into the host's.

        Raises:
            Rejected: the assembler does not take the PTX.
            RuntimeError: a fault, or no end after ``patience`` seconds; the context is of no use afterwards.
        """
        function = self._load(launch.ptx, launch.kernel)
        allocations, ranges = [], []
        for host, data, _ in launch.buffers:
            base = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(base), ctypes.c_size_t(len(data) + 2 * ALIGNMENT))
            allocations.append(base)
            ranges.append((host, base.value + (host - base.value) % ALIGNMENT, len(data)))
        relocation = Relocation(tuple(ranges))
        for (_, data, addresses), (_, device, nbytes) in zip(launch.buffers, ranges):
            if nbytes:
                moved = relocation.words(data) if addresses else data
                self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(device), moved, ctypes.c_size_t(nbytes))
        self._launch(function, launch, [relocation.words(value) for value in launch.params])
        self._wait(patience)
        results = []
        for _, device, nbytes in ranges:
            data = ctypes.create_string_buffer(max(nbytes, 1))
            if nbytes:
                self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(device), ctypes.c_size_t(nbytes))
            results.append(relocation.words(data.raw[:nbytes], back=True))
        for base in allocations:
            self.call("cuMemFree_v2", base)
        return results

    def _load(self, ptx: str, kernel: str | None) -> ctypes.c_void_p:
        """The kernel; kept if no launch can change what the next one finds in the module."""
        if (ptx, kernel) in self._kept:
            return self._kept[ptx, kernel]
        module, function, log = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        text = for_sm90(ptx, self.isa).encode()
        code = self.driver.cuModuleLoadDataEx(ctypes.byref(module), text, 2, options, values)
        if code:
            raise Rejected(log.value.decode(errors="replace") or f"error {code}")
        entry = kernel or re.search(r"\.entry\s+([\w$]+)", ptx)[1]
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        if re.search(r"^\s*(\.\w+\s+)*\.global\b", ptx, re.MULTILINE) is None:
            self._kept[ptx, kernel] = function
        return function

    def _launch(self, function: ctypes.c_void_p, launch: Launch, params: list[bytes]) -> None:
        self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, max(launch.dynamic_smem, 1))
        values = [ctypes.create_string_buffer(value, len(value)) for value in params]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, values))
        size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        if size > 8:
            self.call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER, 1)
        attribute = _Attribute(_CLUSTER_DIMENSION)
        attribute.value[:3] = launch.cluster
        config = _Config(
            *launch.grid, *launch.block, launch.dynamic_smem, None, ctypes.pointer(attribute), int(size > 1)
        )
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def _wait(self, patience: float) -> None:
        """Polls, since a synchronising call would wait for a hanging kernel for ever."""
        end = time.monotonic() + patience
        while True:
            code = self.driver.cuStreamQuery(None)
            if code != _NOT_READY:
                self.call("cuCtxSynchronize")  # reports a fault
                return
            if time.monotonic() > end:
                raise RuntimeError(f"the kernel did not end within {patience:g} s")
            time.sleep(0.0005)
