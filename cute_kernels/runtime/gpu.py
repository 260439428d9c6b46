"""Plan + operands -> a launch on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from cute_kernels import dsl
from cute_kernels.compile import Artifact, compile_plan
from cute_kernels.frames import Frames, launcher
from cute_kernels.plan import Plan
from cute_kernels.runtime.operands import Operands


def launch(plan: Plan, operands: Operands, stream: torch.cuda.Stream | None = None) -> None:
    """Enqueues the kernels of a plan on ``stream`` (the device's current stream when None) and returns at once.

    Raises:
        TypeError: an operand that the plan needs is missing.
        RuntimeError: the CUDA runtime refused the launch.
    """
    device = operands.device(plan)
    with torch.cuda.device(device):
        handle = (torch.cuda.current_stream(device) if stream is None else stream).cuda_stream
        for kernel in plan.launches:
            bound_launch(kernel)(**operands.of(kernel).addresses(), stream=handle)


@functools.lru_cache(maxsize=1024)
def bound_launch(plan: Plan) -> BoundLaunch:
    """The plan's kernel, compiled and loaded, ready to be launched on any device of its architecture."""
    return BoundLaunch(plan, compile_plan(plan))


class BoundLaunch:
    """A compiled host function with the sizes of one plan filled in."""

    def __init__(self, plan: Plan, artifact: Artifact) -> None:
        """Loads the kernel into every device.

        Raises:
            RuntimeError: the CUDA runtime refused it.
        """
        self.plan = plan
        self._name = artifact.kernel_name
        self._function = artifact.function  # owns the machine code
        self._function.load()
        self._frames = Frames(plan)
        self._names = tuple(operand.name for operand in plan.operands if operand.kind != "size")
        self._launch = self._launcher((*self._names, "stream"), self._frames)

    def __call__(self, *, stream: int, **given: float | int | None) -> None:
        """Enqueues the kernel on a stream of the current device.

        Args:
            stream: CUstream handle.
            given: device addresses, and the number of a value, by the names of `Plan.operands`; what the plan does
                without is ignored.

        Raises:
            RuntimeError: the CUDA runtime refused the launch.
        """
        self._launch(**(dict.fromkeys(self._names) | given), stream=stream)

    def with_constants(self, parameters: Sequence[str], **constants: float | int | None) -> Callable[..., None]:
        """The launch as a function of ``parameters`` only: the shortest way for calls that repeat.

        Args:
            parameters: names of what differs from launch to launch, in the order in which the result takes it; one that
                the plan does without is taken and ignored.
            constants: everything else, ``stream`` among it, likewise; what they point to has to live as long as the
                result.
        """
        own = {operand.name for operand in self.plan.operands if operand.given} | {"stream"}
        frames = Frames(self.plan, **{name: value for name, value in constants.items() if name in own})
        return self._launcher(tuple(parameters), frames)

    def _launcher(self, parameters: tuple[str, ...], frames: Frames) -> Callable[..., None]:
        own = [operand.name for operand in self.plan.operands if operand.given]
        written = tuple(name for name in (*own, "stream") if name in parameters)
        return launcher(parameters, written)(frames, self._function.call, self._fail)

    def _fail(self, status: int) -> NoReturn:
        dsl.fail(f"launch of {self._name}", status)
