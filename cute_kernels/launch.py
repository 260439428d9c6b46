"""Plan + tensors -> a launch on a GPU, or the same launch in the emulator.

Both ways run the same host function that CuTe DSL generated: it encodes the TMA descriptors and launches. Under the
emulator a recorder takes the place of the CUDA runtime, and the recorded launch executes the recorded kernel's PTX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cute_kernels.compile import Artifact, compile_plan, host_arguments
from cute_kernels.plan import Plan

if TYPE_CHECKING:
    from cute_kernels.emulator import Options, Report


@dataclass(frozen=True)
class LaunchTensors:
    """Tensors of one launch, already checked and padded, all on one device.

    Attributes:
        x: ``[M, K]`` float8_e4m3fn, contiguous, 16-byte aligned.
        weight: ``[N, K]`` float8_e4m3fn, contiguous, 16-byte aligned.
        table: ``Plan.table_shape`` in ``Plan.table_dtype``, or None.
        scale: a number, or one FP32 on the device, as ``plan.problem.scale_source`` says.
        out: ``[M, N]`` bfloat16, contiguous, 16-byte aligned; written.
    """

    x: torch.Tensor
    weight: torch.Tensor
    table: torch.Tensor | None
    scale: float | torch.Tensor
    out: torch.Tensor

    def inputs(self) -> dict[str, torch.Tensor]:
        named = {"x": self.x, "weight": self.weight, "table": self.table, "scale": self.scale}
        return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def launch(plan: Plan, tensors: LaunchTensors, stream: torch.cuda.Stream | None = None) -> None:
    """Enqueues the kernel on ``stream`` (the device's current stream when None) and returns at once."""
    device = tensors.x.device
    with torch.cuda.device(device):
        handle = (torch.cuda.current_stream(device) if stream is None else stream).cuda_stream
        compile_plan(plan).function(*_arguments(plan, tensors, handle))


def emulate(
    plan: Plan,
    tensors: LaunchTensors,
    options: Options | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    artifact: Artifact | None = None,
) -> Report:
    """Executes the launch on the CPU from the PTX that CuTe DSL generated, and returns when it is complete.

    Args:
        plan: as for `launch`.
        tensors: CPU tensors.
        options: seed, completion order and detectors; warp roles are filled in from the plan.
        progress: called with (clusters done, clusters).
        artifact: another kernel for the same launch, e.g. one with an instruction taken out; compiled from the plan
            when None.

    Raises:
        cute_kernels.emulator.errors.EmulatorError: a hang, an illegal access, a missing fence, or PTX that the emulator
            does not know.
    """
    from cute_kernels import emulator

    artifact = artifact or compile_plan(plan, emulated=True)
    captured = emulator.host.record(artifact.function, *_arguments(plan, tensors, 0))
    memory = emulator.GlobalMemory()
    for name, tensor in tensors.inputs().items():
        memory.register_tensor(tensor, name, writable=False)
    memory.register_tensor(tensors.out, "out", writable=True)
    options = dataclasses.replace(options or emulator.Options(), roles=plan.roles)
    return emulator.run(
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
    )


def _arguments(plan: Plan, tensors: LaunchTensors, stream: int) -> tuple:
    scale = tensors.scale
    return host_arguments(
        plan,
        x=tensors.x.data_ptr(),
        weight=tensors.weight.data_ptr(),
        table=None if tensors.table is None else tensors.table.data_ptr(),
        out=tensors.out.data_ptr(),
        scale=scale.data_ptr() if isinstance(scale, torch.Tensor) else scale,
        stream=stream,
    )
