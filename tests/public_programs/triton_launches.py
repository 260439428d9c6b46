"""Triton's launches made by the emulator: for programs that ``cute-kernels emulate`` runs.

Triton compiles for the architecture that torch names, as it does with a GPU. ``install()`` puts a driver in place of
Triton's own: what that would load and launch becomes a launch of the emulated program. Nothing is timed: autotuning
takes the first configuration that fits, and benchmarks do not run.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton.testing
from triton._C import libtriton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import CompiledKernel
from triton.runtime import _allocation, autotuner
from triton.runtime.driver import driver

from cute_kernels.emulator import TensorMap
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.machine.units.copies.tensor_map import encode
from cute_kernels.emulator.programs import host

REGISTERS = 64
"""Of a thread, which are not known without ptxas' word; programs compute the size of a grid from it."""

_FORMATS = {"i1": "<?", "u1": "<?", "fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"} | {
    f"{sign}{bits}": f"<{code if sign == 'i' else code.upper()}"
    for bits, code in ((8, "b"), (16, "h"), (32, "i"), (64, "q"))
    for sign in "iu"
}
#: Of CUtensorMapDataType and CUtensorMapSwizzle, by number.
_DTYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz")
_PACKED_DTYPES = {13: "b4x16", 14: "b4x16_p64", 15: "b6x16_p32"}
_SWIZZLES = ("none", "32B", "64B", "128B")


def install() -> None:
    """From now on every launch of a Triton kernel is one of the emulated program."""
    driver.set_active(_driver())
    CompiledKernel._init_handles = _load
    autotuner.Autotuner._bench = _untimed
    triton.testing.perf_report = lambda benchmarks: lambda function: SimpleNamespace(run=lambda **options: None)
    libtriton.nvidia.cublas.CublasLt = lambda workspace: None  # as where cuBLAS is missing: programs do without


def _driver() -> SimpleNamespace:
    major, minor = torch.cuda.get_device_capability()
    facts = torch.cuda.get_device_properties(0)
    return SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        utils=SimpleNamespace(
            fill_tma_descriptor_tiled=_tensor_map,
            get_device_properties=lambda device: {
                "multiprocessor_count": facts.multi_processor_count,
                "max_num_regs": 65536,
                "max_shared_mem": 227 * 1024 if major >= 9 else 163 * 1024,
                "warpSize": 32,
            },
        ),
    )


def _load(kernel: CompiledKernel) -> None:
    """Stands for CompiledKernel._init_handles."""
    kernel.n_regs, kernel.n_spills, kernel.n_max_threads = REGISTERS, 0, 1024
    kernel._run = lambda *arguments: _launch(kernel, arguments[:3], arguments[9:])


def _untimed(tuner: autotuner.Autotuner, *_: Any, config: Any, **__: Any) -> list[float]:
    """Stands for Autotuner._bench."""
    return [0.0] * 3


def _launch(kernel: CompiledKernel, grid: Sequence[int], arguments: Sequence[Any]) -> None:
    ptx, facts = kernel.asm["ptx"], kernel.metadata
    maps = iter(getattr(facts, "tensordesc_meta", None) or ())
    given = list(_flat(kernel.src.signature.values(), arguments, maps))
    # What Triton appends: memory of the kernel's own, and of its profiler, of which these kernels have none.
    scratch = _scratch(facts, grid)
    given += [struct.pack("<Q", scratch.data_ptr() if scratch is not None else 0), bytes(8)]
    host.submit(
        CapturedLaunch(
            kernel_name=facts.name,
            grid=(grid[0] * facts.num_ctas, *grid[1:]),
            block=(int(re.search(r"\.reqntid (\d+)", ptx)[1]), 1, 1),
            cluster=(facts.num_ctas, 1, 1),
            dynamic_smem=facts.shared,
            params=tuple(given),
            ptx=ptx,
            programmatic=facts.launch_pdl,
        )
    )


def _scratch(facts: Any, grid: Sequence[int]) -> torch.Tensor | None:
    if not facts.global_scratch_size:
        return None
    size = facts.global_scratch_size * facts.num_ctas * grid[0] * grid[1] * grid[2]
    return _allocation._allocator.get()(size, facts.global_scratch_align, 0)


def _flat(types: Any, values: Sequence[Any], maps: Iterator[dict]) -> Iterator[bytes]:
    """The bytes of each parameter."""
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value, maps)
        elif kind.startswith("tensordesc"):
            metadata = next(maps, None)
            if metadata is None:
                raise NotImplementedError(f"{kind} without a tensor map, as for architectures before sm_90")
            encoded, *extents = nvidia.make_tensordesc_arg(value, metadata, None)
            rank = len(value.shape)
            yield encoded
            yield from (struct.pack("<i" if place < rank else "<q", n) for place, n in enumerate(extents))
        elif kind != "constexpr":
            yield _scalar(kind, value)


def _scalar(kind: str, value: Any) -> bytes:
    if kind.startswith("*"):
        return struct.pack("<Q", value.data_ptr() if value is not None else 0)
    if kind == "bf16":
        return struct.pack("<f", value)[2:]
    return struct.pack(_FORMATS[kind], value)


def _tensor_map(
    address: int, swizzle: int, size: int, kind: int, box: Sequence[int], shape: Sequence[int],
    strides: Sequence[int], nan: int,
) -> bytes:  # fmt: skip
    """Stands for the driver's encoder, called as Triton does: outermost dimension first, strides in elements."""
    return encode(
        TensorMap(
            address=address,
            dtype=_PACKED_DTYPES[kind] if kind in _PACKED_DTYPES else _DTYPES[kind],
            extents=tuple(reversed(shape)),
            strides=tuple(size * n for n in reversed(strides[:-1])),
            box=tuple(reversed(box)),
            element_strides=(1,) * len(box),
            swizzle=_SWIZZLES[swizzle],
            nan_fill=bool(nan),
            l2_promotion=2,
        )
    )
