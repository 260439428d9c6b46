"""Plan -> compiled kernel.

Kernels take sizes as launch arguments, so one compiled kernel serves every problem whose `kernel_key` is equal: a new
batch, resolution or model width costs no compilation.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels import dsl
from cute_kernels.plan import GemmPlan, Plan, Sm90GemmPlan, Sm90PatchEmbedPlan
from cute_kernels.runtime import kernel_cache as cache

_COMPILE_LOCK = threading.Lock()
"""`cute.compile` keeps global state and is not thread-safe."""


@dataclass(frozen=True)
class Resources:
    """What the assembler reports for a kernel: per thread registers, stack and local bytes; static shared bytes.

    Spilled registers live on the stack, so a kernel without stack and local memory has no spills.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    static_smem_bytes: int


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel: its PTX and cubin, and the host function that builds TMA descriptors and launches it.

    ``loader`` gives the host function; it is called when `function` is first asked for, since PTX and resources are of
    use without it.
    """

    kernel_name: str
    ptx: str
    cubin: bytes
    loader: Callable[[], Callable[..., Any]]

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return self.loader()

    @functools.cached_property
    def resources(self) -> Resources:
        return resource_usage(self.cubin, self.kernel_name)


def kernel_key(plan: Plan) -> tuple:
    """What the generated code depends on; everything else in the plan is a launch argument."""
    if isinstance(plan, GemmPlan):
        return plan.kernel_key
    problem = plan.problem
    key = (plan.arch.name, plan.config, problem.table_rows > 0, problem.table_index, problem.scale_source)
    if not isinstance(plan, Sm90PatchEmbedPlan):
        return key
    flat_table = plan.config.order == "flat" and problem.table_rows > 0 and not problem.table_index
    return (*key, plan.k_blocks, plan.table_wraps_once if flat_table else None)


def compile_plan(plan: Plan, *, emulated: bool = False) -> Artifact:
    """Compiles the kernel of a plan, or takes it from memory or from disk. Needs no GPU and no driver.

    Args:
        plan: a legal plan.
        emulated: bind the host function to the emulator's launch recorder instead of the CUDA runtime. The recorder
            needs a host function that was compiled in this process, so these are kept in memory only.
    """
    key = (kernel_key(plan), emulated)
    with _COMPILE_LOCK:
        if key not in _CACHE:
            _CACHE[key] = compile_uncached(plan, emulated=True) if emulated else _from_disk(plan)
        return _CACHE[key]


_CACHE: dict[tuple, Artifact] = {}


def _from_disk(plan: Plan) -> Artifact:
    compiled: list[Artifact] = []

    def build() -> cache.CompiledKernel:
        compiled.append(compile_uncached(plan))
        (artifact,) = compiled
        prefix = f"{artifact.kernel_name}_host"
        code = dsl.export_object(artifact.function, prefix)
        return cache.CompiledKernel(artifact.kernel_name, artifact.ptx, artifact.cubin, code, prefix)

    kernel = cache.load_or_build(kernel_key(plan), build)
    if compiled:
        return compiled[0]
    # From the bytes that were verified, and not from the cache's file.
    load = functools.partial(dsl.load_object, kernel.host_object, kernel.host_prefix)
    return Artifact(kernel.kernel_name, kernel.ptx, kernel.cubin, load)


def compile_uncached(plan: Plan, *, emulated: bool = False) -> Artifact:
    """As `compile_plan`, always anew and without a lock: for kernels changed on purpose."""
    recording: contextlib.AbstractContextManager = contextlib.nullcontext()
    if emulated:
        from cute_kernels.emulator import host  # launches on a GPU need neither the emulator nor its dependencies

        recording = host.recording_runtime()
    with recording:
        function = dsl.compile_function(_kernel(plan), _example_arguments(plan), plan.arch.name)
    ptx = dsl.ptx(function)
    name = re.search(r"\.entry\s+(\w+)", ptx).group(1)
    return Artifact(name, ptx, dsl.cubin(function), lambda: function)


def _kernel(plan: Plan) -> Any:
    if isinstance(plan, Sm90GemmPlan):
        from cute_kernels.kernels.sm90.gemm.kernel import GemmKernel as Kernel
    elif isinstance(plan, GemmPlan):
        from cute_kernels.kernels.sm100.gemm.kernel import GemmKernel as Kernel
    elif isinstance(plan, Sm90PatchEmbedPlan):
        from cute_kernels.kernels.sm90.patch_embed.kernel import PatchEmbedKernel as Kernel
    else:
        from cute_kernels.kernels.sm100.patch_embed.kernel import PatchEmbedKernel as Kernel
    return Kernel(plan)


def _example_arguments(plan: Plan) -> tuple:
    """Arguments of the right types for tracing; their values do not reach the generated code."""
    if isinstance(plan, GemmPlan):
        return host_arguments(plan, a=16, b=16, bias=16, out=16, stream=0)
    return host_arguments(plan, x=16, weight=16, table=16, index=16, out=16, scale=16, stream=0)


def host_arguments(plan: Plan, *, stream: int, **addresses: float | int | None) -> tuple:
    """Arguments of the compiled host function.

    Args:
        plan: gives sizes, types and which arguments are present.
        stream: CUstream handle.
        addresses: device addresses of the tensors by their names in `cute_kernels.runtime.launch`, 16-byte aligned
            but for the table index (4); None or any number for one that the plan does without. A patch embed also
            takes ``scale``: the value, or the address of one FP32 when ``plan.problem.scale_source == "pointer"``.
    """
    arguments = _gemm_arguments if isinstance(plan, GemmPlan) else _patch_embed_arguments
    return arguments(plan, stream=stream, **addresses)


def _gemm_arguments(plan: GemmPlan, *, a: int, b: int, bias: int | None, out: int, stream: int) -> tuple:
    import cuda.bindings.driver as driver
    from cutlass import Float32, Int32

    from cute_kernels.kernels.gemm import ELEMENT_TYPES, OPERAND_TYPES

    problem = plan.problem
    sizes = (problem.m, problem.n, problem.k, problem.batches, plan.clusters)
    return (
        _pointer(OPERAND_TYPES[problem.in_dtype], a),
        _pointer(OPERAND_TYPES[problem.in_dtype], b),
        _pointer(Float32, bias) if problem.bias else None,
        _pointer(ELEMENT_TYPES[problem.out_dtype], out),
        *(Int32(size) for size in sizes),
        driver.CUstream(stream),
    )


def _pointer(dtype: type, address: int, alignment: int = 16) -> Any:
    from cutlass.cute.runtime import make_ptr
    from cutlass.cute.typing import AddressSpace

    return make_ptr(dtype, address, AddressSpace.gmem, assumed_align=alignment)


def _patch_embed_arguments(
    plan: Plan, *, x: int, weight: int, table: int | None, out: int, scale: float | int, stream: int,
    index: int | None = None,
) -> tuple:  # fmt: skip
    import cuda.bindings.driver as driver
    import cutlass
    from cutlass import Float32, Int32

    problem = plan.problem
    table_dtype = Float32 if plan.table_dtype == "float32" else cutlass.BFloat16
    by_value = problem.scale_source == "value"
    return (
        _pointer(cutlass.Float8E4M3FN, x),
        _pointer(cutlass.Float8E4M3FN, weight),
        _pointer(table_dtype, table) if problem.table_rows else None,
        _pointer(Int32, index, 4) if problem.table_index else None,
        _pointer(cutlass.BFloat16, out),
        Float32(scale) if by_value else _pointer(Float32, int(scale), 4),
        Int32(problem.m),
        Int32(problem.n),
        Int32(problem.k),
        Int32(problem.table_rows),
        Int32(plan.clusters),
        driver.CUstream(stream),
    )


def resource_usage(cubin: bytes, kernel_name: str) -> Resources:
    """Reads a cubin's resource usage with NVIDIA's `cuobjdump` (package ``nvidia-cuda-cuobjdump``).

    Raises:
        RuntimeError: the tool is missing or its report does not name the kernel.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [_cuobjdump(), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    pattern = rf"Function {re.escape(kernel_name)}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    match = re.search(pattern, report)
    if match is None:
        raise RuntimeError(f"cuobjdump reports nothing for kernel {kernel_name}:\n{report}")
    registers, stack, shared, local = map(int, match.groups())
    return Resources(registers, stack, local, shared)


def _cuobjdump() -> str:
    import nvidia

    for root in nvidia.__path__:
        for candidate in sorted(Path(root).glob("*/bin/cuobjdump")):
            return str(candidate)
    raise RuntimeError("cuobjdump not found: pip install nvidia-cuda-cuobjdump")
