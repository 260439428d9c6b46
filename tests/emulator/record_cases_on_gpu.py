"""Runs the kernels of sm90_cases.py on an sm_90 GPU and records digests of their results for the emulator's tests.

    PYTHONPATH=. python tests/emulator/record_cases_on_gpu.py tests/emulator/data/cases_h200.json

Needs the driver and NumPy. Cases whose result differs from the expected one are printed and not recorded.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np

from tests.emulator.record_matrix_on_gpu import Gpu
from tests.emulator.sm90_all_cases import cases
from tests.emulator.sm90_cases import Case, digest


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("sizes", ctypes.c_uint * 7),
        ("_pad", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


def run(gpu: Gpu, case: Case) -> np.ndarray:
    """What the kernel of a case leaves in ``out``."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    log = ctypes.create_string_buffer(8192)
    options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
    try:
        gpu.call("cuModuleLoadDataEx", ctypes.byref(module), case.text.encode(), 2, options, values)
    except RuntimeError as error:
        raise RuntimeError(f"{case}: {error}: {log.value.decode()}") from None
    gpu.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
    gpu.call("cuFuncSetAttribute", function, 8, max(case.shared, 48 * 1024))  # MAX_DYNAMIC_SHARED_SIZE_BYTES
    out = np.full(case.expected.nbytes, 0xAB, np.uint8).view(case.expected.dtype).reshape(case.expected.shape)
    arguments = [gpu.put(np.ascontiguousarray(array)) for array in (*case.inputs, out)]
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    cluster = _Attribute(4)  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value[0:3] = [case.cluster, 1, 1]
    sizes = (ctypes.c_uint * 7)(case.grid, 1, 1, case.block, 1, 1, case.shared)
    config = _Config(sizes, 0, None, ctypes.addressof(cluster), 1)
    gpu.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
    gpu.call("cuCtxSynchronize")
    gpu.call("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), arguments[-1], ctypes.c_size_t(out.nbytes))
    for pointer in arguments:
        gpu.call("cuMemFree_v2", pointer)
    gpu.call("cuModuleUnload", module)
    return out


def main() -> None:
    gpu = Gpu()
    digests: dict[str, str] = {}
    wrong = []
    for case in cases():
        try:
            out = run(gpu, case)
        except RuntimeError as error:
            print(f"not run: {error}")
            wrong.append(case)
            if "cuCtxSynchronize" in str(error):
                break  # the context is lost
            continue
        if np.array_equal(out.view(np.uint8), case.expected.view(np.uint8)):
            digests[case.name] = digest(out)
        else:
            wrong.append(case)
            places = np.flatnonzero(out.reshape(-1) != case.expected.reshape(-1))
            got, want = out.reshape(-1)[places[:4]], case.expected.reshape(-1)[places[:4]]
            print(f"differs: {case} in {len(places)} of {out.size} places, first {places[:4]}: {got}: must be {want}")
    Path(sys.argv[1]).write_text(json.dumps(digests, indent=0) + "\n")
    print(f"{len(digests)} cases recorded, {len(wrong)} not")


if __name__ == "__main__":
    main()
