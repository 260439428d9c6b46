"""Plan + tensors -> a launch on a GPU, or the same launch in the emulator.

Both ways run the same host function that CuTe DSL generated: it encodes the TMA descriptors and launches. Under the
emulator a recorder takes the place of the CUDA runtime, and the recorded launch executes the recorded kernel's PTX.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from cute_kernels import dsl
from cute_kernels.compile import Artifact, compile_plan, host_arguments
from cute_kernels.plan import GemmPlan, Plan

if TYPE_CHECKING:
    from cute_kernels.emulator import Options, Report


@dataclass(frozen=True)
class LaunchTensors:
    """Tensors of one launch, already checked and padded, all on one device.

    Attributes:
        x: ``[M, K]`` float8_e4m3fn, contiguous, 16-byte aligned.
        weight: ``[N, K]`` float8_e4m3fn, contiguous, 16-byte aligned.
        table: ``Plan.table_shape`` in ``Plan.table_dtype``, or None.
        index: ``[M]`` int32, contiguous: table row of every row, or None.
        scale: a number, or one FP32 on the device, as ``plan.problem.scale_source`` says.
        out: ``[M, N]`` bfloat16, contiguous, 16-byte aligned; written.
    """

    x: torch.Tensor
    weight: torch.Tensor
    table: torch.Tensor | None
    scale: float | torch.Tensor
    out: torch.Tensor
    index: torch.Tensor | None = None

    def inputs(self) -> dict[str, torch.Tensor]:
        named = {"x": self.x, "weight": self.weight, "table": self.table, "index": self.index, "scale": self.scale}
        return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}

    def addresses(self) -> dict[str, Any]:
        """Addresses by argument name; a scale by value stays a number."""
        return {
            "x": self.x.data_ptr(),
            "weight": self.weight.data_ptr(),
            "table": None if self.table is None else self.table.data_ptr(),
            "index": None if self.index is None else self.index.data_ptr(),
            "out": self.out.data_ptr(),
            "scale": self.scale.data_ptr() if isinstance(self.scale, torch.Tensor) else self.scale,
        }


@dataclass(frozen=True)
class GemmTensors:
    """Tensors of one launch of the dense GEMM, already checked and aligned, all on one device.

    Attributes:
        a: ``[batches, M, K]``, contiguous, 16-byte aligned, in ``plan.problem.in_dtype``.
        b: ``[batches, N, K]`` likewise.
        bias: ``[plan.padded_n]`` float32, 16-byte aligned, or None.
        out: ``[batches, M, plan.out_pitch]`` in ``plan.problem.out_dtype``; the first N of every row are written.
    """

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor

    def inputs(self) -> dict[str, torch.Tensor]:
        named = {"a": self.a, "b": self.b, "bias": self.bias}
        return {name: value for name, value in named.items() if value is not None}

    def addresses(self) -> dict[str, Any]:
        """Addresses by argument name."""
        return {name: tensor.data_ptr() for name, tensor in self.inputs().items()} | {
            "bias": None if self.bias is None else self.bias.data_ptr(),
            "out": self.out.data_ptr(),
        }


def launch(plan: Plan, tensors: LaunchTensors | GemmTensors, stream: torch.cuda.Stream | None = None) -> None:
    """Enqueues the kernel on ``stream`` (the device's current stream when None) and returns at once.

    Raises:
        RuntimeError: the CUDA runtime refused the launch.
    """
    device = tensors.out.device
    with torch.cuda.device(device):
        handle = (torch.cuda.current_stream(device) if stream is None else stream).cuda_stream
        bound_launch(plan)(**tensors.addresses(), stream=handle)


@functools.lru_cache(maxsize=1024)
def bound_launch(plan: Plan) -> BoundLaunch | BoundGemm:
    """The plan's kernel, compiled and loaded, ready to be launched on any device of its architecture."""
    return (BoundGemm if isinstance(plan, GemmPlan) else BoundLaunch)(plan, compile_plan(plan))


class _Bound:
    """A compiled host function with the sizes of one plan filled in.

    CuTe DSL's own call converts and checks its Python objects one by one, which takes longer than the launch. The
    machine code underneath takes an array of pointers, one to each argument, and a last one to the status it returns;
    here both are kept per thread, and a call writes the addresses that differ. That the layout is the one CuTe DSL
    would pass is checked when the launch is bound.
    """

    def __init__(self, plan: Plan, artifact: Artifact, sample: dict[str, float | int]) -> None:
        """Loads the kernel into every device.

        Args:
            plan: of the kernel.
            artifact: the compiled kernel.
            sample: a value for every address of `host_arguments`, to check the layout with.

        Raises:
            RuntimeError: this version of CuTe DSL passes arguments in another way.
        """
        self.plan = plan
        self._name = artifact.kernel_name
        self._function = artifact.function  # owns the machine code
        self._executor, self._call = dsl.load_on_devices(self._function)  # the executor owns the loaded library
        self._frames = _Frames(plan)
        _check_layout(plan, self._function, self._frames.values, sample)

    def _fail(self, status: int) -> NoReturn:
        raise RuntimeError(f"launch of {self._name} failed: {_error_text(status)}")


class BoundGemm(_Bound):
    """The dense GEMM with the sizes of one plan filled in."""

    def __init__(self, plan: GemmPlan, artifact: Artifact) -> None:
        super().__init__(plan, artifact, {"a": 0x1110, "b": 0x2220, "bias": 0x3330, "out": 0x4440})

    def __call__(self, a: int, b: int, bias: int | None, out: int, stream: int) -> None:
        """Enqueues the kernel on a stream of the current device.

        Args:
            a, b, bias, out: device addresses; ``bias`` is ignored without a bias.
            stream: CUstream handle.

        Raises:
            RuntimeError: the CUDA runtime refused the launch.
        """
        frames = self._frames
        values = frames.values
        values.a, values.b, values.out, values.stream = a, b, out, stream
        if self.plan.problem.bias:
            values.bias = bias
        self._call(frames.address)
        if values.status:
            self._fail(values.status)


class BoundLaunch(_Bound):
    """The patch embed with the sizes of one plan filled in."""

    def __init__(self, plan: Plan, artifact: Artifact) -> None:
        sample = {"x": 0x1110, "weight": 0x2220, "table": 0x3330, "index": 0x7770, "out": 0x4440}
        sample["scale"] = 0.75 if plan.problem.scale_source == "value" else 0x5550
        super().__init__(plan, artifact, sample)
        self._has_table, self._has_index = plan.problem.table_rows > 0, plan.problem.table_index

    def __call__(
        self,
        x: int,
        weight: int,
        table: int | None,
        out: int,
        scale: float | int,
        stream: int,
        index: int | None = None,
    ) -> None:
        """Enqueues the kernel on a stream of the current device.

        Args:
            x, weight, table, out, index: device addresses; ``table`` is ignored without a table, as ``index`` is.
            scale: the value, or the address of one FP32, as the plan's problem says.
            stream: CUstream handle.

        Raises:
            RuntimeError: the CUDA runtime refused the launch.
        """
        frames = self._frames
        values = frames.values
        values.x = x
        values.weight = weight
        if self._has_table:
            values.table = table
        if self._has_index:
            values.index = index
        values.out = out
        values.scale = scale
        values.stream = stream
        self._call(frames.address)
        if values.status:
            self._fail(values.status)

    def with_constants(self, weight: int, table: int | None, stream: int) -> Callable[..., None]:
        """The launch as ``(x, out, scale, index or None) -> None``: the shortest way for calls that repeat.

        Args:
            weight, table, stream: as for a call; they and what they point to have to live as long as the result.
        """
        constants = {"weight": weight, "stream": stream} | ({"table": table} if self._has_table else {})
        frames, call, fail = _Frames(self.plan, **constants), self._call, self._fail

        def launch(x: int, out: int, scale: float | int, index: int | None) -> None:
            values = frames.values
            values.x = x
            values.out = out
            values.scale = scale
            if index is not None:
                values.index = index
            call(frames.address)
            if values.status:
                fail(values.status)

        return launch


class _Frames(threading.local):
    """Argument values of one thread, and the array of pointers to them: the call releases the interpreter lock.

    ``address`` is that of the array; a number is converted faster than the array itself.
    """

    def __init__(self, plan: Plan, **constants: int | None) -> None:
        problem = plan.problem
        if isinstance(plan, GemmPlan):
            kind = _gemm_values_type(problem.bias)
            sizes = {"batches": problem.batches}
        else:
            kind = _values_type(problem.table_rows > 0, problem.table_index, problem.scale_source == "value")
            sizes = {"table_rows": problem.table_rows}
        self.values = kind(m=problem.m, n=problem.n, k=problem.k, clusters=plan.clusters, **sizes, **constants)
        base = ctypes.addressof(self.values)
        addresses = [base + getattr(kind, name).offset for name, _ in kind._fields_]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self.address = ctypes.addressof(self._pointers)


@functools.cache
def _gemm_values_type(has_bias: bool) -> type[ctypes.Structure]:
    """As `_values_type`, of the dense GEMM."""
    names = ["a", "b", "bias", "out"] if has_bias else ["a", "b", "out"]
    fields = [(name, ctypes.c_void_p) for name in names]
    fields += [(name, ctypes.c_int32) for name in ("m", "n", "k", "batches", "clusters")]
    fields += [("stream", ctypes.c_void_p), ("status", ctypes.c_int32)]
    return type("GemmArguments", (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def _values_type(has_table: bool, has_index: bool, scale_by_value: bool) -> type[ctypes.Structure]:
    """Arguments in the order of the host function's parameters, without those that the kernel was compiled without."""
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    fields = [("x", pointer), ("weight", pointer)]
    fields += [("table", pointer)] if has_table else []
    fields += [("index", pointer)] if has_index else []
    fields += [("out", pointer), ("scale", ctypes.c_float if scale_by_value else pointer)]
    fields += [(name, integer) for name in ("m", "n", "k", "table_rows", "clusters")]
    fields += [("stream", pointer), ("status", integer)]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


def _check_layout(plan: Plan, function: Any, values: ctypes.Structure, sample: dict[str, float | int]) -> None:
    """Compares the frame with what CuTe DSL itself makes of the same arguments, argument by argument."""
    arguments = host_arguments(plan, **sample, stream=0x6660)
    expected, _keep_alive = dsl.argument_pointers(function, arguments)
    names = [name for name, _ in values._fields_ if name != "status"]
    for name, value in (*sample.items(), ("stream", 0x6660)):
        if name in names:
            setattr(values, name, value)
    own = [getattr(type(values), name) for name in names]
    if len(expected) != len(own) or any(
        ctypes.string_at(address, field.size) != ctypes.string_at(ctypes.addressof(values) + field.offset, field.size)
        for address, field in zip(expected, own, strict=True)
    ):
        raise RuntimeError(f"this version of CuTe DSL does not pass {', '.join(names)} as the tested ones do")


def _error_text(status: int) -> str:
    import cuda.bindings.runtime as runtime

    _, text = runtime.cudaGetErrorString(runtime.cudaError_t(status))
    return f"CUDA error {status}, {text.decode()}"


def emulate(
    plan: Plan,
    tensors: LaunchTensors | GemmTensors,
    options: Options | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    artifact: Artifact | None = None,
    repeat: int = 1,
) -> Report:
    """Executes the launch on the CPU from the PTX that CuTe DSL generated, and returns when it is complete.

    Args:
        plan: as for `launch`.
        tensors: CPU tensors.
        options: seed, completion order and detectors; names of warp roles and barriers are filled in from the plan.
        progress: called with (clusters done, clusters).
        artifact: another kernel for the same launch, e.g. one with an instruction taken out; compiled from the plan
            when None.
        repeat: launches, each behind the one before it; from the second on, accesses that griddepcontrol.wait does not
            order race with that one.

    Returns:
        The report of the last launch.

    Raises:
        ValueError: ``repeat`` below 1.
        cute_kernels.emulator.errors.EmulatorError: a hang, an illegal access, a missing fence, or PTX that the emulator
            does not know.
    """
    from cute_kernels import emulator
    from cute_kernels.kernels.graph import graph_of

    if repeat < 1:
        raise ValueError(f"repeat {repeat}; at least one launch is needed")
    artifact = artifact or compile_plan(plan, emulated=True)
    captured = emulator.host.record(artifact.function, *host_arguments(plan, **tensors.addresses(), stream=0))
    memory = emulator.GlobalMemory()
    for name, tensor in tensors.inputs().items():
        memory.register_tensor(tensor, name, writable=False)
    memory.register_tensor(tensors.out, "out", writable=True)
    names = graph_of(plan).barrier_names()
    first = emulator.DYNAMIC_SHARED_BASE + plan.smem[0].offset
    barriers = tuple((first + 8 * slot, name) for slot, name in enumerate(names))
    options = dataclasses.replace(options or emulator.Options(), roles=plan.roles, barriers=barriers)
    for _ in range(repeat):
        report = emulator.run(
            artifact.ptx,
            artifact.kernel_name,
            grid=captured.grid,
            block=captured.block,
            cluster=captured.cluster,
            dynamic_smem=captured.dynamic_smem,
            params=captured.params,
            memory=memory,
            options=options,
            progress=progress,
            programmatic=captured.programmatic,
        )
    return report
