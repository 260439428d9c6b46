"""The part of cuBLASLt that the peers call, through ctypes: strided-batched FP8, BF16 or TF32 matmul with bias or C.

Enumeration values and structure sizes are those of cublasLt.h, the same in CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

WORKSPACE_BYTES = 256 << 20

_R_32F, _R_16BF, _R_8F_E4M3 = 0, 14, 28
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32 = 68, 77
_TYPES = {
    "fp8": (_R_8F_E4M3, _R_16BF, _COMPUTE_32F),
    "bf16": (_R_16BF, _R_16BF, _COMPUTE_32F),
    "tf32": (_R_32F, _R_32F, _COMPUTE_32F_FAST_TF32),
}
"""Of each kind: types of A and B, type of C and D, type of the computation."""
_OP_T = 1
_EPILOGUE_BIAS = 4
_DESC = {"transa": 3, "epilogue": 7, "bias_pointer": 8, "bias_batch_stride": 10, "fast_accum": 25, "bias_type": 26}
_LAYOUT_BATCH_COUNT, _LAYOUT_BATCH_STRIDE = 5, 6
_PREFERENCE_WORKSPACE = 1


class CublasError(RuntimeError):
    """A call returned a status other than CUBLAS_STATUS_SUCCESS."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: the algorithm is 64 opaque bytes."""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """cuBLASLt as torch loaded it.

    Raises:
        ImportError: neither version is found.
    """
    for name in ("libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            lt = ctypes.CDLL(name)
        except OSError:
            continue
        lt.cublasLtGetVersion.restype = ctypes.c_size_t
        return lt
    raise ImportError("libcublasLt.so.13 or .12")


def version() -> str:
    """Major.minor.patch of the loaded cuBLASLt."""
    number = library().cublasLtGetVersion()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _call(name: str, *arguments) -> None:
    status = getattr(library(), name)(*arguments)
    if status != 0:
        raise CublasError(f"{name}: status {status}")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@functools.cache
def _workspace(device: int) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")


@dataclass(frozen=True)
class Operand:
    """A column-major strided batch: ``rows`` x ``columns`` elements, ``ld`` and ``stride`` in elements."""

    rows: int
    columns: int
    ld: int
    stride: int


def _layout(dtype: int, operand: Operand, batch: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate", ctypes.byref(layout), ctypes.c_int(dtype), ctypes.c_uint64(operand.rows),
        ctypes.c_uint64(operand.columns), ctypes.c_int64(operand.ld),
    )  # fmt: skip
    count, stride = ctypes.c_int32(batch), ctypes.c_int64(operand.stride)
    for attribute, value in ((_LAYOUT_BATCH_COUNT, count), (_LAYOUT_BATCH_STRIDE, stride)):
        _call(
            "cublasLtMatrixLayoutSetAttribute", layout, ctypes.c_int(attribute), ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )  # fmt: skip
    return layout


class Matmul:
    """``D[b] = alpha * A[b]^T @ B[b] + beta * C[b] + bias[b]``.

    The descriptors live as long as the process: a benchmark makes few.

    Args:
        a, b, c, d: layouts; ``c`` may have another stride than ``d`` (0: the same C for every batch), or be None.
        batch: batches.
        alpha: scale of the product.
        bias: ``[batch, rows of D]`` BF16, contiguous, or None: a vector per batch, the same for all columns.
        device: CUDA device index.
        kind: ``"fp8"``: E4M3 in, with fast accumulation, BF16 out; ``"bf16"`` in and out; ``"tf32"``: FP32 in and out.
    """

    def __init__(
        self, a: Operand, b: Operand, d: Operand, batch: int, alpha: float, device: int,
        c: Operand | None = None, bias: torch.Tensor | None = None, kind: str = "fp8",
    ) -> None:  # fmt: skip
        self.device, self._bias = device, bias
        self._alpha, self._beta = ctypes.c_float(alpha), ctypes.c_float(0.0 if c is None else 1.0)
        self._desc = ctypes.c_void_p()
        in_type, out_type, compute = _TYPES[kind]
        _call("cublasLtMatmulDescCreate", ctypes.byref(self._desc), ctypes.c_int(compute), ctypes.c_int(_R_32F))
        self._set("transa", ctypes.c_int32(_OP_T))
        if kind == "fp8":
            self._set("fast_accum", ctypes.c_int8(1))
        if bias is not None:
            self._set("epilogue", ctypes.c_uint32(_EPILOGUE_BIAS))
            self._set("bias_pointer", ctypes.c_void_p(bias.data_ptr()))
            self._set("bias_batch_stride", ctypes.c_int64(d.rows))
            self._set("bias_type", ctypes.c_int32(_R_16BF))
        self._a, self._b = _layout(in_type, a, batch), _layout(in_type, b, batch)
        self._d = _layout(out_type, d, batch)
        self._c = self._d if c is None else _layout(out_type, c, batch)

    def _set(self, name: str, value) -> None:
        _call(
            "cublasLtMatmulDescSetAttribute", self._desc, ctypes.c_int(_DESC[name]), ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )  # fmt: skip

    def algorithms(self, requested: int) -> list[_Heuristic]:
        """What the heuristic proposes, best guess first, at most ``requested``.

        Raises:
            CublasError: it proposes nothing (status 15: not supported).
        """
        preference = ctypes.c_void_p()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        _call(
            "cublasLtMatmulPreferenceSetAttribute", preference, ctypes.c_int(_PREFERENCE_WORKSPACE),
            ctypes.byref(limit), ctypes.c_size_t(8),
        )  # fmt: skip
        results, found = (_Heuristic * requested)(), ctypes.c_int(0)
        try:
            _call(
                "cublasLtMatmulAlgoGetHeuristic", _handle(self.device), self._desc, self._a, self._b, self._c,
                self._d, preference, ctypes.c_int(requested), results, ctypes.byref(found),
            )  # fmt: skip
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        return [r for r in results[: found.value] if r.state == 0 and r.workspace <= WORKSPACE_BYTES]

    def run(self, algorithm: _Heuristic, a: int, b: int, c: int, d: int) -> None:
        """Enqueues on the current stream; operands are device addresses.

        Raises:
            CublasError: the algorithm was refused.
        """
        _call(
            "cublasLtMatmul", _handle(self.device), self._desc, ctypes.byref(self._alpha), ctypes.c_void_p(a),
            self._a, ctypes.c_void_p(b), self._b, ctypes.byref(self._beta), ctypes.c_void_p(c), self._c,
            ctypes.c_void_p(d), self._d, ctypes.byref(algorithm.algo),
            ctypes.c_void_p(_workspace(self.device).data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream),
        )  # fmt: skip
