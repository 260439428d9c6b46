"""Runs the kernels of matrix_cases.py on an sm_90 GPU and records digests of their results for the emulator's tests.

    PYTHONPATH=. python tests/emulator/record_matrix_on_gpu.py tests/emulator/data/matrix_h200.json

Needs the driver and NumPy.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.emulator.matrix_cases import MatrixMove, Wgmma, matrix_cases, wgmma_cases


class Gpu:
    """The few driver calls that the cases need."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self._functions: dict[str, ctypes.c_void_p] = {}
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} returned {code}")

    def put(self, data: np.ndarray) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(data.nbytes))
        self.call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes))
        return pointer

    def run(self, text: str, image: np.ndarray, registers: np.ndarray, out: np.ndarray) -> None:
        """Launches the kernel on one block of 128 threads and reads ``out`` back."""
        self.launch(text, (image, registers, out), 1, 128, len(image) + 1024)

    def launch(self, text: str, arrays: Sequence[np.ndarray], blocks: int, threads: int, shared: int) -> None:
        """Launches a kernel whose parameters are the arrays, and reads the last one back."""
        out, function = arrays[-1], self.load(text)
        self.call("cuFuncSetAttribute", function, 8, max(shared, 48 * 1024))  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        arguments = [self.put(np.ascontiguousarray(array)) for array in arrays]
        pointers = (ctypes.c_void_p * len(arrays))(*map(ctypes.addressof, arguments))
        self.call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, shared, None, pointers, None)
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), arguments[-1], ctypes.c_size_t(out.nbytes))
        for pointer in arguments:
            self.call("cuMemFree_v2", pointer)

    def load(self, text: str) -> ctypes.c_void_p:
        """The kernel ``k`` of a text, which is assembled once."""
        if text in self._functions:
            return self._functions[text]
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(4096)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), text.encode(), 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {log.value.decode()}") from None
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        return self._functions.setdefault(text, function)


def result_array(case: Wgmma | MatrixMove) -> np.ndarray:
    """Where the kernel of a case puts its result, filled with a pattern."""
    if isinstance(case, Wgmma):
        return np.full((case.n // 2, 128), 0xABABABAB, np.uint32)
    return np.full(4096, 0xAB, np.uint8) if case.store else np.full((case.count, 128), 0xABABABAB, np.uint32)


def digest(result: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(result).tobytes()).hexdigest()[:16]


def main() -> None:
    gpu = Gpu()
    digests: dict[str, str] = {}
    wrong = 0
    for case in (*wgmma_cases(), *matrix_cases()):
        out = result_array(case)
        image = case.image()[0] if isinstance(case, Wgmma) else case.image()
        gpu.run(case.ptx(), image, case.registers(), out)
        digests[repr(case)] = digest(out)
        expected = case.fragments(case.expected()) if isinstance(case, Wgmma) else case.expected()
        if not np.array_equal(out, expected):
            wrong += 1
            print(f"differs from the formula in {int((out != expected).sum())} of {out.size} places: {case}")
    Path(sys.argv[1]).write_text(json.dumps(digests, indent=0) + "\n")
    print(f"{len(digests)} cases, {wrong} differ from the formula")


if __name__ == "__main__":
    main()
