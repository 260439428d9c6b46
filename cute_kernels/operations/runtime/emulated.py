"""Plan + operands -> the launch that a GPU would get, executed by the emulator.

The host function that CuTe DSL generated runs as it does on a GPU: it encodes the TMA descriptors and launches. A
recorder takes the place of the CUDA runtime, and the recorded launch executes the recorded kernel's PTX.
"""

import dataclasses

import torch

from cute_kernels import emulator
from cute_kernels.common import interrupts
from cute_kernels.emulator import programs
from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.kernels.graph import graph_of
from cute_kernels.operations.compile import Artifact, compile_plan, host_arguments
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import Plan


def launch(
    plan: Plan,
    operands: Operands,
    options: emulator.Options | None = None,
    *,
    artifact: Artifact | None = None,
    repeat: int = 1,
) -> emulator.Report:
    """Executes the launch on the CPU from the PTX that CuTe DSL generated; returns the report of the last one when it
    is complete.

    ``options``: seed, completion order and detectors, otherwise those of `cute_kernels.emulator.default_options`; names
    of warp roles and barriers are filled in from the plan. ``artifact``: another kernel for the last launch, e.g. one
    with an instruction taken out. ``repeat``: launches, each behind the one before it; from the second on, accesses
    that griddepcontrol.wait does not order race with that one.

    Raises TypeError: an operand that the plan needs is missing; ValueError: ``repeat`` below 1; EmulatorError: a hang,
    an illegal access, a missing fence, or PTX that the emulator does not know; ``ptx`` and ``launch`` of the error are
    the text and the launch.
    """
    if repeat < 1:
        raise ValueError(f"repeat = {repeat}: must be at least 1")
    *others, last = plan.launches
    with interrupts.deferred():  # from the first argument to the last result: machine code calls Python in between
        for kernel in others:
            _launch(kernel, operands.of(kernel), options, None, 1)
        return _launch(last, operands.of(last), options, artifact, repeat)


def launch_in_program(plan: Plan, operands: Operands) -> None:
    """Launches the kernels of a plan in the current stream of the program that runs in the emulator, whose session
    executes them. Raises TypeError, EmulatorError: as `launch`."""
    stream = torch.cuda.current_stream().cuda_stream
    for kernel in plan.launches:
        function = compile_plan(kernel, emulated=True).function
        function(*host_arguments(kernel, **operands.of(kernel).addresses(), stream=stream))


def recorded(plan: Plan, operands: Operands, artifact: Artifact) -> CapturedLaunch:
    """The launch of a plan's kernel, compiled as ``artifact``, which is not executed."""
    captured = programs.host.record(artifact.function, *host_arguments(plan, **operands.addresses(), stream=0))
    return dataclasses.replace(captured, ptx=artifact.ptx, kernel_name=artifact.kernel_name)


def _launch(
    plan: Plan, operands: Operands, options: emulator.Options | None, artifact: Artifact | None, repeat: int
) -> emulator.Report:
    """One kernel, as `launch` says."""
    artifact = artifact or compile_plan(plan, emulated=True)
    launch = recorded(plan, operands, artifact)
    memory, written = emulator.GlobalMemory(), operands.written(plan)
    for name, tensor in operands.tensors().items():
        memory.register_tensor(tensor, name, writable=name in written)
    names = graph_of(plan).barrier_names()
    first = emulator.DYNAMIC_SHARED_BASE + plan.smem[0].offset
    barriers = tuple((first + 8 * slot, name) for slot, name in enumerate(names))
    options = dataclasses.replace(options or emulator.current_options(), roles=plan.roles, barriers=barriers)
    try:
        for _ in range(repeat):
            report = programs.host.execute_operation(launch, memory, options, programmatic=launch.programmatic)
    except emulator.EmulatorError as error:
        error.attach(artifact.ptx, launch)
        raise
    return report
